"""A checkpoint's own forward, through the training engine in one process, and the comparison with an export's."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megaponder.config.schema import ParallelConfig, PrecisionConfig, RunConfig
from megaponder.errors import ConfigError, UserError

if TYPE_CHECKING:
    from megaponder.engine.step import Engine

ROWS, TOKENS, STEPWISE = 2, 48, 4
"""Prompts of a comparison, their length, and how many final tokens are also decoded one by one with the cache."""


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
    own: dict[str, Tensor] = dict(stage.named_parameters())
    own |= {name: buffer for name, buffer in stage.named_buffers() if name.endswith(".expert_bias")}
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


def prompts(cfg: RunConfig) -> list[Tensor]:
    """Sets of token ids [ROWS, TOKENS or fewer] over the whole vocabulary, always the same: one set, or two.

    If tokens halt, or the mixture uses the likeliest tokens, a decision may lie within rounding error of its threshold
    and fall either way.  Then a second set distinguishes such an accident from a bug.
    """
    from megaponder.ponder.settings import method_of

    assert cfg.model.vocab_size is not None and cfg.model.max_positions is not None
    shape, sets = (ROWS, min(TOKENS, cfg.model.max_positions, cfg.data.sequence_length)), []
    for seed in range(2 if method_of(cfg).decides() else 1):
        ids = torch.randint(cfg.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
        ids[0, 0], ids[-1, -1] = 0, cfg.model.vocab_size - 1
        sets.append(ids)
    return sets


def check_tolerance(tolerance: float) -> None:
    """ConfigError, before any work, for a tolerance that nothing or everything would meet."""
    if not 0 < tolerance < math.inf:
        raise ConfigError("tolerance", tolerance, "it must be a positive number", "the default is 1e-4")


def engine_logits(engine: Engine, ids: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """FP32 logits [b, n, V] of the checkpoint: of one forward, and those expected from decoding.

    The two differ if a forward approximates what decoding computes (`Method.towards_decoding`): then the second are
    from an approximation so close that the next one changes less than a tenth of the tolerance.
    """
    once = engine.logits(ids).float().cpu()
    method, exact = engine.stage.method, once
    trained = method.options
    try:
        for options in method.towards_decoding(ids.shape[1]):
            method.options, before = options, exact
            exact = engine.logits(ids).float().cpu()
            if _error(exact, before) <= tolerance / 10:
                break
    finally:
        method.options = trained
    return once, exact


def checkpoint_logits(
    cfg: RunConfig, state: dict[str, Tensor], prompts: list[Tensor], tolerance: float
) -> list[tuple[Tensor, Tensor]]:
    """`engine_logits` of a state, whose engine has left memory afterwards."""
    with engine(cfg, state) as built:
        found = [engine_logits(built, ids, tolerance) for ids in prompts]
    del built
    gc.collect()
    return found


@torch.no_grad()
def export_logits(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 logits [b, n, V] of a transformers model: in one forward, and with its cache over the last tokens.

    With the cache, what training approximates is computed exactly, and decoding skips nothing that training computes,
    so that the results are comparable with the checkpoint's.
    """
    from megaponder.decoding.method import DecodingMethod
    from megaponder.decoding.model import CACHE_FIELD
    from megaponder.export import compose

    form = compose.decoding_class(model.config.method) if hasattr(model, "ponder") else DecodingMethod
    whole = model(ids, use_cache=False).logits
    options = model.ponder.options if hasattr(model, "ponder") else {}
    before = dict(options)
    try:
        options.update(form.as_trained)
        first = model(ids[:, :-STEPWISE], use_cache=True, **form.as_decoded)
        parts, cache = [first.logits], first[CACHE_FIELD]
        for i in range(ids.shape[1] - STEPWISE, ids.shape[1]):
            step = model(ids[:, i : i + 1], use_cache=True, **{CACHE_FIELD: cache})
            parts.append(step.logits)
            cache = step[CACHE_FIELD]  # with transformers 4.51 GPT-2 and OPT return a new one
    finally:
        options.update(before)
    return whole.float(), torch.cat(parts, dim=1).float()


def _error(got: Tensor, want: Tensor) -> float:
    """Largest difference over largest logit."""
    return ((got - want).abs().max() / want.abs().max()).item()


def agree(folder: Path, want: list[tuple[Tensor, Tensor]], got: list[tuple[Tensor, Tensor]], tolerance: float) -> float:
    """`compare` on the first set of prompts, or on the second if the first differs."""
    for last in range(len(want)):
        try:
            return compare(folder, want[last], got[last], tolerance)
        except UserError:
            if last + 1 == len(want):
                raise
    raise AssertionError("there is at least one set of prompts")


def compare(folder: Path, want: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor], tolerance: float) -> float:
    """Largest difference over largest logit of pairs from `engine_logits` and `export_logits`.

    UserError if it exceeds `tolerance`.
    """
    worst = 0.0
    for ours, theirs, how in zip(want, got, ("in one forward", "with its cache"), strict=True):
        if theirs.shape != ours.shape:
            raise UserError(
                f"{folder}: logits have shape {tuple(theirs.shape)} instead of {tuple(ours.shape)}; nothing was "
                "published."
            )
        error = _error(theirs, ours)
        if not error <= tolerance:  # also true for NaN
            raise UserError(
                f"{folder}: logits {how} differ from the checkpoint's by {error:.1e} of the largest logit, more than "
                f"the tolerance {tolerance:.0e}; nothing was published."
            )
        worst = max(worst, error)
    return worst
