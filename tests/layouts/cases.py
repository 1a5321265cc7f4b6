"""The cases of the matrix, and which run in a layout; a new method is one line here, a layout one in `layouts.py`."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable
from typing import Any

from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, ParallelConfig, RunConfig
from tests.layouts.layouts import LAYOUTS
from tests.layouts.samples import (
    REPRESENTATIVES,
    SIMILAR,
)
from tests.layouts.shapes import Case, Layout

SEQUENCES, LENGTH, VOCAB = 4, 12, 93  # a vocabulary that is a multiple of nothing
BIASED = {"experts": 4, "top_k": 2, "score": "sigmoid", "aux_weight": 0.3, "bias_rate": 0.1}

UNEVEN = {2: [1, 2]}
"""Layers of the stages of three layers; three stages have one each."""

CASES = {
    "vanilla-llama-tied": Case("llama", "vanilla", model={"tie_embeddings": True}),
    "vanilla-pythia": Case("pythia", "vanilla"),
    "loop-llama-gqa": Case("llama", "loop", {"extra_passes": 2}, {"num_kv_heads": 2}),
    "loop-drawn-gqa": Case(
        "llama", "loop", {"extra_passes": 2, "draw": "lognormal", "draw_to": 3}, {"num_kv_heads": 2}, steps=4
    ),
    "pause-gpt2": Case("gpt2", "pause", {"pauses": 2, "pause_token_id": 90}, {"tie_embeddings": True}),
    "ponderlm-pythia": Case("pythia", "ponderlm", {"steps": 3}),
    "ponderlm-projected-pythia": Case("pythia", "ponderlm", {"steps": 2, "feedback": "projected"}),
    "ponderlm-topk-gpt2-tied": Case("gpt2", "ponderlm", {"steps": 2, "topk": 5, "multiply_by_steps": True}),
    "ponderlm-newest-gentle": Case("llama", "ponderlm", {"steps": 2, "accumulate": False, "gentle_start": True}),
    "ponderlm2-llama-gqa": Case("llama", "ponderlm2", {"latents": 2, "jacobi": 1}, {"num_kv_heads": 2}),
    "ponderlm2-gpt2-softmax": Case(
        "gpt2", "ponderlm2", {"latents": 1, "jacobi": 2, "softmax_feedback": True, "topk": 7}
    ),
    "ponderlm3-llama-gqa": Case(
        "llama",
        "ponderlm3",
        {"latents": 2, "target": 0.0, "jacobi": 2, "cost_weight": 0.3, "threshold": 0.3},
        {"num_kv_heads": 2},
    ),
    "ponderlm3-pythia-deep": Case(
        "pythia",
        "ponderlm3",
        {"latents": 2, "target": 0.0, "jacobi": 1, "cost_weight": 0.3, "target_depth": 1.1, "threshold": 0.3},
        {"num_layers": 3},
        stages=UNEVEN,
    ),
    "adaponderlm-pythia-deep": Case(
        "pythia",
        "adaponderlm",
        {"target": 0.0, "threshold": 0.5, "bottom_share": 0.5, "cost_weight": 0.3},
        {"num_layers": 3},
        stages=UNEVEN,
    ),
    "adaponderlm-llama-gqa": Case(
        "llama",
        "adaponderlm",
        {
            "steps": 2,
            "target": 0.0,
            "threshold": 0.6,
            "cost_on": "probability",
            "cost_weight": 0.3,
            "topk": 9,
            "gentle_start": True,
        },
        {"num_kv_heads": 2},
    ),
    "adaptive-cot-llama-gqa": Case(
        "llama",
        "adaptive_cot",
        {"target": 0.0, "threshold": 0.3, "cost_weight": 1.0, "cost_power": 0.7},
        {"num_kv_heads": 2},
    ),
    "adaptive-cot-pythia-deep": Case(
        "pythia",
        "adaptive_cot",
        {"steps": 2, "target": 0.0, "threshold": 0.4, "cost_weight": 1.0, "cost_power": 0.3},
        {"num_layers": 3},
        stages=UNEVEN,
    ),
    "ponderlm2-drawn-pythia": Case("pythia", "ponderlm2", {"jacobi_from": 0, "jacobi_to": 2}, steps=4),
    "adaponderlm-skip": Case(
        "pythia",
        "adaponderlm",
        {"target": 0.0, "threshold": 0.5, "steps": 2},
        {"num_layers": 3},
        skip=True,
        stages=UNEVEN,
    ),
    "adaptive-cot-skip-gqa": Case(
        "llama", "adaptive_cot", {"target": 0.0, "threshold": 0.3}, {"num_kv_heads": 2}, skip=True
    ),
    "adaponderlm-budget": Case(
        "llama",
        "adaponderlm",
        {"target": 0.6, "explore": 0.5, "cost_weight": 20.0},
        {"num_kv_heads": 2},
        steps=3,
    ),
    "adaponderlm-budget-skip": Case(
        "pythia",
        "adaponderlm",
        {"target": 0.5, "explore": 0.9, "cost_weight": 20.0},
        {"num_layers": 3},
        skip=True,
        steps=3,
        stages=UNEVEN,
    ),
    "adaptive-cot-budget-skip": Case(
        "llama", "adaptive_cot", {"target": 0.45, "score_weight": 20.0}, {"num_kv_heads": 2}, skip=True, steps=2
    ),
    "ponderlm3-budget": Case(
        "llama",
        "ponderlm3",
        {"latents": 3, "jacobi": 1, "target": 0.5, "explore": 0.5, "score_weight": 100.0},
        {"num_kv_heads": 2},
    ),
    "pruned-pythia": Case("pythia", "pruned_ponderlm", {"steps": 2, "depth": 2.3}),
    "pruned-gpt2-skip": Case("gpt2", "pruned_ponderlm", {"steps": 2, "depth": 1.6, "by": "position"}, skip=True),
    "confident-pythia": Case("pythia", "confident_ponderlm", {"steps": 2, "target": 0.0, "threshold": 0.1}),
    "confident-budget-skip": Case(
        "llama",
        "confident_ponderlm",
        {"target": 0.75, "explore": 0.2, "topk": 9},
        {"num_kv_heads": 2},
        skip=True,
        steps=3,
    ),
    # features that no family has together: heads wider than H / heads, biases on some matrices only
    "features-serial": Case(
        "pythia",
        "loop",
        {"extra_passes": 1},
        {
            "head_size": 12,
            "num_kv_heads": 2,
            "activation": "gelu_tanh",
            "qkv_bias": True,
            "output_bias": False,
            "mlp_bias": False,
            "parallel_residual": False,
            "rotary_fraction": 0.5,
        },
    ),
    "features-parallel": Case(
        "llama",
        "vanilla",
        {},
        {
            "head_size": 4,
            "norm": "layernorm",
            "qkv_bias": False,
            "output_bias": True,
            "mlp_bias": True,
            "positions": "learned",
            "parallel_residual": True,
        },
    ),
    "qk-norm-gqa": Case("qwen3", "ponderlm2", {"latents": 1, "jacobi": 1}, {"num_kv_heads": 2, "head_size": 12}),
    "sandwich-gqa": Case("llama", "loop", {"extra_passes": 1}, {"norm_placement": "sandwich", "num_kv_heads": 2}),
    # OLMo2's block, and Huginn's
    "post-norm-all-heads": Case(
        "llama", "loop", {"extra_passes": 1}, {"norm_placement": "post", "qk_norm": "all", "num_kv_heads": 2}
    ),
    "stream-norm-qk-bias": Case(
        "llama",
        "ponderlm",
        {"steps": 1},
        {"norm_placement": "stream", "qkv_bias": "qk", "rotary_pairs": "adjacent", "num_kv_heads": 2},
    ),
    "window-yarn-gqa": Case(
        "mistral",
        "loop",
        {"extra_passes": 1},
        {
            "num_kv_heads": 2,
            "attention_window": 5,
            "rotary_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
        },
    ),
    # two memories in a sequence, the last block not full
    "freqkv-gqa": Case(
        "qwen3",
        "loop",
        {"extra_passes": 1},
        {"num_kv_heads": 2, "freqkv": {"capacity": 6, "sink": 1, "ratio": 0.45}},
    ),
    # keys and values of earlier layers cross stages and passes, in another grouping than the layers
    "depth-across-gqa": Case(
        "llama", "loop", {"extra_passes": 1}, {"num_kv_heads": 2, "depth_attention": {"sources": "last:3"}}
    ),
    "depth-within-deep": Case(
        "qwen3",
        "ponderlm2",
        {"latents": 1, "jacobi": 1},
        {
            "num_layers": 6,
            "num_kv_heads": 2,
            "depth_attention": {"sources": "last:4", "values": "raw", "query": "mean_prob", "passes": "within"},
        },
    ),
    "depth-blocks-deep": Case(
        "pythia",
        "ponderlm",
        {"steps": 1},
        {"num_layers": 6, "depth_attention": {"own": "residual", "passes": "within", "blocks": 3}},
        stages={2: [2, 4]},
    ),
    "depth-skip": Case(
        "pythia",
        "adaponderlm",
        {"target": 0.0, "threshold": 0.5, "steps": 2, "cost_weight": 0.3},
        {"depth_attention": {"sources": "last:5"}},
        skip=True,
    ),
    "moe-loop-gqa": Case(
        "llama",
        "loop",
        {"extra_passes": 2},
        {"num_kv_heads": 2, "moe": {"experts": 4, "top_k": 2, "shared_ffn": 24, "aux_weight": 0.5}},
        disciplines=0.7,
    ),
    # rows of a token that count together, some of which the last layer does not finish; a bias that moves
    "moe-bias-latents": Case(
        "qwen3", "ponderlm2", {"latents": 1, "jacobi": 1}, {"moe": BIASED | {"scale": 1.5}}, steps=3, disciplines=0.4
    ),
    "moe-skip": Case(
        "llama",
        "adaponderlm",
        {"target": 0.0, "threshold": 0.4, "steps": 2, "cost_weight": 0.3},
        {"num_kv_heads": 2, "moe": {"experts": 4, "top_k": 2, "aux_weight": 0.5}},
        skip=True,
    ),
    # a router for each pass: of rows that are gathered, with biases that move
    "moe-routers-skip": Case(
        "llama",
        "adaponderlm",
        {"target": 0.0, "threshold": 0.4, "steps": 2, "cost_weight": 0.3},
        {"moe": BIASED | {"routers": 3}},
        skip=True,
        steps=2,
        disciplines=0.4,
    ),
    # a router for each row of a token, of which the last one has that of the one before, and some rows are not finished
    "moe-routers-latents": Case(
        "qwen3", "ponderlm2", {"latents": 2, "jacobi": 1}, {"moe": BIASED | {"routers": 2}}, steps=2
    ),
    "halfway-llama": Case("llama", "halfway"),
    "huginn-llama": Case(
        "llama",
        "huginn",
        {"prelude": 1, "coda": 1, "recurrence": 3, "kept": 2, "draw_to": 4},
        {
            "num_layers": 4,
            "num_kv_heads": 2,
            "tie_embeddings": True,
            "norm_placement": "stream",
            "qkv_bias": "qk",
            "rotary_pairs": "adjacent",
        },
        steps=4,  # 4, 2, 1 and 4 recurrences
        stages={2: [1, 3], 3: [1, 2, 1]},
    ),
    "retrofit-llama": Case(
        "llama",
        "retrofit",
        {"prelude": 2, "coda": 1, "recurrence": 3, "kept": 1, "draw": "fixed"},
        {"num_layers": 5, "num_kv_heads": 2},
        stages={2: [3, 2], 3: [2, 1, 2], 4: [2, 1, 1, 1]},
    ),
    "parcae-llama": Case(
        "llama",
        "parcae",
        {"prelude": 1, "coda": 1, "recurrence": 2, "draw_to": 5, "kept": 2, "value_embeddings": True},
        {
            "num_layers": 4,
            "num_kv_heads": 2,
            "tie_embeddings": True,
            "qk_norm": "rotated",
            "rotary_pairs": "adjacent",
            "activation": "relu2",
        },
        stages={2: [1, 3], 3: [1, 2, 1]},
    ),
    "ouro-sandwich": Case(
        "llama",
        "ouro",
        {"loops": 3, "entropy_weight": 0.2, "threshold": 0.7},
        {"norm_placement": "sandwich", "rotary_base": 1e6},
    ),
    "ouro-deep": Case(
        "llama",
        "ouro",
        {"loops": 2, "entropy_weight": 0.2, "threshold": 0.7},
        {"norm_placement": "sandwich", "num_layers": 4, "num_kv_heads": 2},
        stages={3: [1, 2, 1]},
    ),
    "nanbeige-split": Case(
        "llama",
        "nanbeige",
        {"loops": 2, "loss_weights": [0.3], "middle": 2},
        {"num_layers": 4, "num_kv_heads": 2, "head_size": 12},
        stages={3: [1, 2, 1]},
    ),
    "nanbeige-shared": Case(
        "llama",
        "nanbeige",
        {"loops": 2, "loss_weights": [0.2], "middle": 2, "share_kv": True},
        {"num_layers": 4, "num_kv_heads": 2},
        stages={2: [1, 3], 3: [1, 2, 1]},
    ),
    # of the global batch, in one micro-batch a rank or several; losses of two passes; with halting, of each micro-batch
    "eslm-global": Case("llama", "vanilla", eslm={"by": "loss", "alpha": 0.3, "scope": "global"}),
    "eslm-entropy-losses": Case(
        "llama",
        "nanbeige",
        {"loops": 2, "loss_weights": [0.3]},
        eslm={"by": "entropy", "alpha": 0.4, "scope": "global"},
    ),
    "eslm-micro-skip": Case(
        "pythia",
        "adaponderlm",
        {"target": 0.5, "explore": 0.5, "cost_weight": 20.0},
        skip=True,
        eslm={"by": "entropy", "alpha": 0.35},
    ),
    "detached-llama": Case("llama", "detached"),
    "everything-llama": Case("llama", "sink", {}, {"num_kv_heads": 2}),
    "everything-deep": Case("pythia", "sink", {}, {"num_layers": 3}, stages=UNEVEN),
}

TRUNCATED = ("huginn", "retrofit", "parcae")
"""Methods whose first passes have no gradient."""

DRAWN = "loop-drawn-gqa"
"""4, 3, 2 and again 4 passes: an overlapped reduction must know how many gradients a step brings."""

WHOLE = "MEGAPONDER_WHOLE_MATRIX" in os.environ
"""Every case in every layout, evaluation included: minutes on many cores, the better part of an hour on two."""

ONLY = re.compile(os.environ.get("MEGAPONDER_CASES", ""))
"""Cases whose names contain this alone, for `-k test_layout_changes_nothing` after a change that touches few."""


def cases_of(layout: Layout) -> list[str]:
    """Cases that run in a layout: those whose layers its pipeline divides.

    Deep cases exist for PP = 3 and 4; elsewhere they run where most comes together.  Unless WHOLE,
    layouts without `every` run their `sample` only.
    """
    found, known = [], set()
    for name, case in CASES.items():
        if not ONLY.search(name):
            continue
        layers = case.model.get("num_layers", 2)
        fits = layers % layout.pipeline == 0 or layout.pipeline in case.stages
        if not (fits and (layers == 2 or layout.deep or WHOLE)):
            continue
        if layout.context > 1 and "freqkv" in case.model:
            continue  # refused: config.rules.freqkv
        if case.model.get("num_kv_heads", 4) % layout.tensor:
            continue  # refused: config.rules.layout
        if case.eslm.get("scope") != "global" and case.eslm and layout.batch != 1:
            continue  # another choice of tokens
        if layout.experts > 1 and "moe" not in case.model:
            continue
        if case.skip and "moe" in case.model and layout.tensor > 1 and not layout.sequence:
            continue  # refused: config.rules.moe
        sample = REPRESENTATIVES if layout.sample is None else layout.sample
        first = layout.methods and (case.method, case.skip) not in known
        known.add((case.method, case.skip))
        every = layout.every and name not in layout.without and (name not in SIMILAR or layout.world != 2)
        if WHOLE or every or first or name in sample or (layout.overlap and name == DRAWN):
            found.append(name)
    return found


def run_config(case: Case, layout: Layout) -> RunConfig:
    """A resolved tiny config of a case in a layout."""
    values = {"family": case.family, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_size": 56} | case.model
    cfg = RunConfig(model=ModelConfig(vocab_size=VOCAB, vocab_multiple=32, **values))
    cfg.ponder.method, cfg.ponder.options, cfg.ponder.skip_halted = case.method, dict(case.options), case.skip
    cfg.data.sequence_length = LENGTH
    cfg.train.steps, cfg.train.global_batch, cfg.train.micro_batch = 1, SEQUENCES, layout.batch
    cfg.train.eslm = dict(case.eslm)
    if case.disciplines:
        cfg.train.disciplines = {"weight": case.disciplines, "data": {"one": [], "other": []}}
    cfg.train.z_loss = 0.02  # in every case: what is without it is compared with official code
    cfg.model.init_std = 0.2  # far from the linear regime, so that every path matters in the gradients
    cfg.parallel = ParallelConfig(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        experts=layout.experts,
        expert_tensor=layout.expert_tensor,
        stage_layers=case.stages.get(layout.pipeline),
        sequence=layout.sequence,
        distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap and layout.distributed_optimizer,
        recompute=layout.recompute,  # type: ignore[arg-type]
        recompute_layers=layout.parts,
        recompute_passes=None if case.method in TRUNCATED else layout.parts,
        offload_passes=int(layout.offload and case.method not in TRUNCATED),
    )
    return resolve(cfg)


def is_gated(case: str) -> bool:
    """The first matrix of the case's MLP is two."""
    return run_config(CASES[case], LAYOUTS["one"]).model.gated


def disturb(named: Iterable[tuple[str, Any]]) -> None:
    """Move weights that start at 0 or 1 (norms, biases, gates), which would hide their own mistakes.

    The noise of a parameter depends on its name alone, so that every layout gets the same.  Gates are made strong
    enough for tokens to halt at every depth.
    """
    import torch
    from megatron.core import parallel_state

    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        own = name.startswith("method_")
        if name.endswith("linear_fc1.bias"):
            continue  # of a gated MLP it is two, each of which is sharded by itself
        if parameter.dim() == 1 or own or name.endswith(".router.weight"):  # those of several passes start alike
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            sharded = getattr(parameter, "tensor_model_parallel", False)
            parts = parallel_state.get_tensor_model_parallel_world_size() if sharded else 1
            whole = torch.randn(parts * parameter.shape[0], *parameter.shape[1:], generator=draw)
            part = parallel_state.get_tensor_model_parallel_rank() if sharded else 0
            noise = whole.chunk(parts)[part].to(parameter)
            with torch.no_grad():
                if own:
                    parameter.copy_(noise * (0.3 if parameter.dim() == 1 else 2.0 * parameter.shape[-1] ** -0.5))
                else:
                    parameter += 0.2 * noise
