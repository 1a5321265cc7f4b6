"""Process groups and this process's place in the layout."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megaponder.config import launcher
from megaponder.config.schema import ParallelConfig, RunConfig
from megaponder.engine import cuda_on_cpu


@dataclass(frozen=True)
class Groups:
    """Ranks and sizes; the groups themselves are megatron-core's."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def logs(self) -> bool:
        """True on exactly one rank, which has the loss."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0 and self.dp_rank == 0

    @staticmethod
    def expert_split() -> tuple[int, int]:
        """Ranks over which each expert is split, and which of them this is."""
        from megatron.core import parallel_state as ps

        return ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()

    @property
    def tp(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pp(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def cp(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_context_parallel_group()

    @property
    def dp(self) -> dist.ProcessGroup:
        """Ranks that run other sequences."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks with the same weights, which run other tokens."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group(with_context_parallel=True)


_attempt = 0
"""Number of the start of the groups, in processes that may leave them and start again (`training.in_process`)."""
_shared: dist.Store | None = None


def attempt(number: int) -> None:
    """The groups will be started for the time `number`, from 1: they must not read what earlier ones left behind."""
    global _attempt
    _attempt = number


def shared_store() -> dist.Store:
    """The launcher's store, which outlives the groups."""
    global _shared
    if _shared is None:
        _shared, _, _ = next(dist.rendezvous("env://"))
    return _shared


def _start(timeout: datetime.timedelta, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    here = launcher.adopt()
    if here.launcher != "none":
        launcher.meeting_point()  # in words, before torch
    if _attempt:
        store = dist.PrefixStore(f"attempt_{_attempt}", shared_store())
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world_size, timeout=timeout)
    elif here.launcher != "none":
        # without device_id, NCCL connects a group on first use: most of megatron-core's groups are never used, and
        # messages between two stages have their own communicator
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


_layout_of: dist.ProcessGroup | None = None
"""The group of all ranks that megatron-core's groups are parts of."""


def _has_layout(parallel: ParallelConfig) -> bool:
    """Whether megatron-core's groups of this layout exist already.

    Another library may have destroyed torch's groups, and megatron-core's with them, without a word to megatron-core.
    """
    from megatron.core import parallel_state as ps

    return (
        _layout_of is dist.group.WORLD
        and ps.model_parallel_is_initialized()
        and ps.get_tensor_model_parallel_world_size() == parallel.tensor
        and ps.get_pipeline_model_parallel_world_size() == parallel.pipeline
        and ps.get_context_parallel_world_size() == parallel.context
        and ps.get_expert_model_parallel_world_size() == parallel.experts
        and ps.get_expert_tensor_parallel_world_size() == parallel.expert_ranks
    )


def start(cfg: RunConfig) -> torch.device:
    """Start torch.distributed with the group of all ranks (a single process needs no launcher); returns the device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", launcher.place().local_rank)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=cfg.parallel.timeout_minutes)
    if not dist.is_initialized():
        _start(timeout, device)
    return device


def init(cfg: RunConfig) -> Groups:
    """`start`, and create megatron-core's groups."""
    global _layout_of
    cuda_on_cpu.install()
    from megatron.core import parallel_state

    device = start(cfg)
    if not _has_layout(cfg.parallel):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            cfg.parallel.tensor,
            cfg.parallel.pipeline,
            context_parallel_size=cfg.parallel.context,
            expert_model_parallel_size=cfg.parallel.experts,
            expert_tensor_parallel_size=cfg.parallel.expert_ranks,
            distributed_timeout_minutes=max(1, round(cfg.parallel.timeout_minutes)),
            create_gloo_process_groups=device.type == "cuda",
        )
        _layout_of = dist.group.WORLD
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(cfg.train.seed, force_reset_rng=True)
    if cfg.train.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports PyTorch's compiler
        torch.use_deterministic_algorithms(cfg.train.deterministic, warn_only=True)
    return Groups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        device=device,
    )


def shutdown() -> None:
    """Leave the process groups; the process may exit or create new ones."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
