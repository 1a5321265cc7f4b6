"""The same weights with other thresholds or numbers of passes: what `megaponder eval` and the study sweep over."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.decoding.ranges import RANGES, broken
from megaponder.errors import ConfigError
from megaponder.ponder.base import PARAMETER_PREFIX
from megaponder.ponder.budget import THETA
from megaponder.ponder.facts import own_shapes
from megaponder.ponder.settings import method_of

PASSES = {"ponderlm": ("steps", -1), "loop": ("extra_passes", -1), "adaptive_cot": ("steps", -1),
          "adaponderlm": ("steps", -1), "confident_ponderlm": ("steps", -1), "huginn": ("recurrence", 0),
          "retrofit": ("recurrence", 0), "parcae": ("recurrence", 0), "ouro": ("loops", 0),
          "nanbeige": ("loops", 0)}  # fmt: skip
"""Option that counts a method's passes, and what it lacks of their number."""
GATES = ("adaponderlm",)
"""Methods with parameters for each pass: they cannot run more passes than they were trained with."""
STATE = "method_modules.budget.state"
"""Where a model with a budget keeps its threshold (`ponder.budget.Threshold`)."""
Variant = tuple[str, RunConfig, dict[str, Tensor]]
"""Label, configuration and weights."""


def asked(
    cfg: RunConfig, state: dict[str, Tensor], thresholds: Sequence[float], passes: Sequence[int]
) -> list[Variant]:
    """The model as it is, and with each of the thresholds and numbers of passes.

    Raises ConfigError for a method that has none, and for a value that it cannot take.
    """
    made = [("as trained" if thresholds or passes else "", cfg, state)]
    made += [(f"threshold {x:g}", *_halting_at(cfg, state, x)) for x in thresholds]
    made += [(f"{n} pass{'es' if n > 1 else ''}", with_passes(cfg, n), state) for n in passes]
    return made


def _halting_at(cfg: RunConfig, state: dict[str, Tensor], threshold: float) -> tuple[RunConfig, dict[str, Tensor]]:
    """With another threshold; that of a budget is among the weights, in the units of its scores and of any sign."""
    if method_of(cfg).window is None:
        return with_threshold(cfg, threshold), state
    if not math.isfinite(threshold):
        raise ConfigError("--thresholds", threshold, "it must be a number", "leave it out")
    moved = state[STATE].clone()
    moved[THETA] = threshold
    return cfg, {**state, STATE: moved}


def with_threshold(cfg: RunConfig, threshold: float) -> RunConfig:
    """Halting at another threshold; ponderlm exits by confidence."""
    method, options = cfg.ponder.method, cfg.ponder.options
    _refuse_budget(cfg, "--thresholds", threshold)
    if (told := broken(threshold, *RANGES["threshold"])) is not None:
        raise ConfigError("--thresholds", threshold, *told)
    if method == "ponderlm" and not options.get("multiply_by_steps"):
        if options.get("feedback", "mixture") != "mixture" or not options.get("accumulate", True):
            rule = "exit by confidence is built for a ponderlm whose mixtures add up"
            raise ConfigError("--thresholds", threshold, rule, "leave it out")
        kept: dict[str, Any] = {name: options[name] for name in ("steps", "topk", "gentle_start") if name in options}
        return _changed(cfg, "confident_ponderlm", {**kept, "target": 0.0, "threshold": float(threshold)})
    if not hasattr(method_of(cfg).options, "threshold"):
        raise ConfigError("--thresholds", threshold, f"method {method} has no threshold", "leave it out")
    return _changed(cfg, method, {**options, "threshold": float(threshold)})


def has_threshold(cfg: RunConfig) -> bool:
    """Whether `with_threshold` makes a variant of the model."""
    try:
        with_threshold(cfg, 0.5)
    except ConfigError:
        return False
    return True


def with_passes(cfg: RunConfig, passes: int) -> RunConfig:
    """At most so many passes a token; of a model with a budget, exactly as many for every token."""
    method = cfg.ponder.method
    if method not in PASSES or cfg.ponder.options.get("multiply_by_steps") or cfg.ponder.options.get("middle"):
        rule = f"method {method} has no number of passes that may differ from training"
        raise ConfigError("--passes", passes, rule, "leave it out")
    option, less = PASSES[method]
    if passes < 1:
        raise ConfigError("--passes", passes, "it must be at least 1", "use 1")
    if passes + less < 1:
        return _one_pass(cfg)
    if (window := method_of(cfg).window) is not None:
        return _without_budget(cfg, passes, window.most)
    trained = getattr(method_of(cfg).options, option) - less
    if passes > trained and method in GATES:
        raise ConfigError("--passes", passes, f"{method} has gates for {trained} passes", f"use {trained}")
    kept = {name: value for name, value in cfg.ponder.options.items() if name != "loss_weights"}  # of the loops trained
    return _changed(cfg, method, {**kept, option: passes + less})


def own_weights(cfg: RunConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The trained model's weights that a variant of it uses: fewer passes need fewer gates, one pass needs none."""
    own = own_shapes(method_of(cfg))
    return {name: tensor for name, tensor in state.items() if name in own or not name.startswith(PARAMETER_PREFIX)}


def _without_budget(cfg: RunConfig, passes: int, most: int) -> RunConfig:
    """As many passes for every token, whatever its scores are: adaponderlm and confident_ponderlm are then ponderlm."""
    method, options = cfg.ponder.method, method_of(cfg).options
    if passes > most:
        rule = f"with its budget, {options.target}, no token ran more than {most} passes in training"
        raise ConfigError("--passes", passes, rule, f"use {most}")
    if method == "adaptive_cot":
        never = {"target": 0.0, "threshold": 0.0}
        return _changed(cfg, method, {**cfg.ponder.options, **never, "steps": passes - 1})
    kept = {name: getattr(options, name) for name in ("topk", "gentle_start")}
    return _changed(cfg, "ponderlm", {**kept, "steps": passes - 1})


def _refuse_budget(cfg: RunConfig, flag: str, value: float) -> None:
    if method_of(cfg).window is not None:
        target = cfg.ponder.options["target"]
        rule = f"the model keeps the budget that it was trained for, {target}"
        raise ConfigError(flag, value, rule, "leave it out; megaponder eval --depth measures other depths")


def _one_pass(cfg: RunConfig) -> RunConfig:
    """One pass is vanilla with the method's embedding scale."""
    from megaponder.ponder.settings import embedding_scale

    out = _changed(cfg, "vanilla", {})
    out.model.embedding_scale = embedding_scale(cfg.model, method_of(cfg))
    return out


def _changed(cfg: RunConfig, method: str, options: dict[str, Any]) -> RunConfig:
    out = copy.deepcopy(cfg)
    out.ponder.method, out.ponder.options = method, options
    method_of(out)  # refuses what the method cannot take
    return out
