"""From a resolved config to a running engine."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megaponder.backbone.config import dtype_of, uses_graphs
from megaponder.backbone.init import freeze_all_but, freeze_norms, initialise
from megaponder.config.schema import RunConfig
from megaponder.engine.capture import Captures
from megaponder.engine.groups import Groups
from megaponder.engine.model import PonderStage
from megaponder.engine.pipelined import Pipelined
from megaponder.engine.transfer import transfer
from megaponder.ponder.base import Method
from megaponder.ponder.settings import embedding_scale, initialisation


def build_stage(cfg: RunConfig, method: Method, groups: Groups) -> PonderStage:
    """This rank's parameters, initialised: the same weights in every layout."""
    stage = PonderStage(cfg, method, groups, embedding_scale(cfg.model, method))
    stage.to(device=groups.device, dtype=dtype_of(cfg.precision))
    carried = transfer(cfg, method)
    kind, std, factor = initialisation(carried.tuned, method)
    initialise(
        stage,
        seed=cfg.train.seed,
        kind=kind,
        std=std,
        output_factor=factor,
        tp_rank=groups.tp_rank,
        tp=groups.tp_size,
        gated=cfg.model.gated,
        up_factor=factor if method.scales_up else 1.0,
        split=groups.expert_split(),
        carried=carried.std,
    )
    if not cfg.model.norm_affine:
        freeze_norms(stage)
    if cfg.train.only:
        freeze_all_but(stage, cfg.train.only)
        if "embeddings" not in cfg.train.only:
            stage.share_embeddings_and_output_weights = False  # megatron-core would sum a gradient that is not there
    return stage


def build_engine(cfg: RunConfig, method: Method, groups: Groups) -> Pipelined:
    """Stage, its one DistributedDataParallel wrapper, and the schedules."""
    stage = build_stage(cfg, method, groups)
    captures = Captures(stage) if uses_graphs(cfg) else None
    with torch.cuda.stream(captures.stream) if captures else nullcontext():
        ddp = DistributedDataParallel(
            stage.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=cfg.parallel.overlap_grad_reduce,
                use_distributed_optimizer=cfg.cuts_buffers,
                overlap_param_gather=cfg.gathers_ahead,
            ),
            stage,
        )
    if captures:
        torch.cuda.current_stream().wait_stream(captures.stream)
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    return Pipelined(stage, ddp, groups, cfg.train.seed, cfg.parallel.microbatch_group, captures)
