"""A checkpoint's own forward, through the training engine in one process, and the comparison with an export's."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megaponder.config.schema import ParallelConfig, PrecisionConfig, RunConfig
from megaponder.errors import UserError

if TYPE_CHECKING:
    from megaponder.engine.step import Engine

ROWS, TOKENS, STEPWISE = 2, 48, 4
"""Prompts of a comparison, their length, and how many last tokens are also decoded one by one with the cache."""


def one_process(cfg: RunConfig) -> RunConfig:
    """The same model in one process and in FP32."""
    cfg = copy.deepcopy(cfg)
    cfg.parallel = ParallelConfig(timeout_minutes=cfg.parallel.timeout_minutes)
    cfg.precision = PrecisionConfig(implementation="local")
    return cfg


@contextmanager
def engine(cfg: RunConfig, state: dict[str, Tensor]) -> Iterator[Engine]:
    """The training engine of a whole model in this process, holding `state` (one-process stage names)."""
    import torch.distributed as dist

    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    cfg = one_process(cfg)
    started = not dist.is_initialized()
    places = groups.init(cfg)
    try:
        built = build_engine(cfg, method_of(cfg), places)
        load(built.stage, state)
        built.stage.eval()
        yield built
    finally:
        if started:
            groups.shutdown()
        gc.collect()


def load(stage: torch.nn.Module, state: dict[str, Tensor]) -> None:
    """Copy tensors into a stage; every parameter must be given, and nothing else."""
    own = dict(stage.named_parameters())
    if lacking := sorted(own.keys() - state.keys()):
        raise UserError(f"the weights lack {lacking[0]}, which the model has.")
    if extra := sorted(state.keys() - own.keys()):
        raise UserError(f"the weights have {extra[0]}, which the model does not have.")
    with torch.no_grad():
        for name, parameter in own.items():
            if parameter.shape != state[name].shape:
                raise UserError(
                    f"{name} has shape {tuple(state[name].shape)}; the model needs {tuple(parameter.shape)}."
                )
            parameter.copy_(state[name])


def prompts(vocab_size: int, max_positions: int, seed: int = 0) -> Tensor:
    """Token ids [ROWS, TOKENS or fewer] over the whole vocabulary, always the same."""
    shape = (ROWS, min(TOKENS, max_positions))
    ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    ids[0, 0], ids[-1, -1] = 0, vocab_size - 1
    return ids


@torch.no_grad()
def export_logits(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 logits [b, n, V] of a transformers model: in one forward, and with its cache over the last tokens."""
    whole = model(ids, use_cache=False).logits
    first = model(ids[:, :-STEPWISE], use_cache=True)
    name = "cache" if "cache" in first else "past_key_values"
    parts, cache = [first.logits], first[name]
    for i in range(ids.shape[1] - STEPWISE, ids.shape[1]):
        parts.append(model(ids[:, i : i + 1], use_cache=True, **{name: cache}).logits)
    return whole.float(), torch.cat(parts, dim=1).float()


def compare(folder: Path, want: Tensor, whole: Tensor, stepwise: Tensor, tolerance: float) -> float:
    """Largest difference over largest logit; UserError if it exceeds `tolerance`."""
    worst = 0.0
    for got, how in ((whole, "in one forward"), (stepwise, "with its cache")):
        if got.shape != want.shape:
            raise UserError(
                f"{folder}: logits have shape {tuple(got.shape)} instead of {tuple(want.shape)}; nothing was published."
            )
        error = ((got - want).abs().max() / want.abs().max()).item()
        if not error <= tolerance:  # also true for NaN
            raise UserError(
                f"{folder}: logits {how} differ from the checkpoint's by {error:.1e} of the largest logit, more than "
                f"the tolerance {tolerance:.0e}; nothing was published."
            )
        worst = max(worst, error)
    return worst
