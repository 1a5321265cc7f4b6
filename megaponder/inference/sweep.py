"""The same weights at other depths: fewer passes for all tokens, halting at other thresholds, passes at random.

Thresholds are fitted to mean depths on other text than is then measured: for ponderlm, exit by confidence; for the
adaptive methods, their own gates.  A model with a budget has thresholds of its own: where this share of the open
decisions would go on if scores were normal; beside each, the same depth with passes spread at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.engine import depth as depths
from megaponder.export import reference
from megaponder.inference import fit, variants
from megaponder.inference.heldout import Reading, Score, score, together
from megaponder.ponder.settings import method_of

if TYPE_CHECKING:
    from megaponder.engine.step import Engine

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Mean depths, as shares of the most passes."""
FITTED = ("ponderlm", "adaponderlm", "adaptive_cot", "ponderlm3")
PASSES = ("ponderlm", "loop", "ouro", "nanbeige")
CORES = ("huginn", "retrofit", "parcae")
"""Methods with a core, of which other numbers of recurrences are powers of two."""
MORE = 2
"""Passes beyond those of training, or times as many recurrences."""
AS_TRAINED, OTHER_PASSES, HALTING, RANDOM = "as trained", "passes", "halting", "random"
"""What a point of a sweep is."""
BY_SCORE = "scores"
"""Variants of a model with a budget: its own scores, of any sign, against another threshold."""


def sweep(
    cfg: RunConfig,
    state: dict[str, Tensor],
    prefixes: Sequence[str],
    reading: Reading,
) -> list[dict[str, Any]]:
    """Variant, kind, loss, depth and FLOPs per token of each variant of the model, for JSON.

    Thresholds are fitted on the targets that `reading` skips.
    """
    method, found = cfg.ponder.method, []
    known: dict[float, float] = {}  # of the one model whose threshold is fitted
    skipped = Reading(reading.batch, limit=reading.skip)

    def scored(engine: Engine, changed: RunConfig) -> Score:
        return together([score(engine, changed, prefix, reading) for prefix in prefixes])

    def measure(changed: RunConfig, variant: str, kind: str, depth: float | None = None) -> None:
        with reference.engine(changed, variants.own_weights(changed, state)) as engine:
            if depth is not None:
                fitted = fit.fit_threshold(engine, changed, prefixes, depth, skipped, known=known)
                changed = variants.with_threshold(changed, fitted)
                variant += f", threshold {fitted:.4g}"
            found.append(_point(scored(engine, changed), variant, kind))

    measure(cfg, AS_TRAINED, AS_TRAINED)
    for n in other_passes(cfg):
        measure(variants.with_passes(cfg, n), f"passes {n}", OTHER_PASSES)
    if method_of(cfg).window is not None:
        with reference.engine(cfg, state) as engine:
            found += _by_budget(engine, partial(scored, engine, cfg))
    elif method in FITTED and variants.has_threshold(cfg):
        halting = variants.with_threshold(cfg, 0.5)
        for share in SHARES:
            if share * method_of(cfg).max_depth() >= 1:
                measure(halting, f"share {share}", HALTING, share * method_of(cfg).max_depth())
    return found


def other_passes(cfg: RunConfig) -> list[int]:
    """Numbers of passes (of recurrences) with which the same weights are measured; none where there is no choice."""
    options, trained = cfg.ponder.options, method_of(cfg).max_depth()
    if cfg.ponder.method in CORES:
        return [n for n in (2**i for i in range(20)) if n <= MORE * trained]
    if cfg.ponder.method not in PASSES or options.get("multiply_by_steps") or options.get("middle"):
        return []
    return list(range(1, trained + MORE + 1))


def _point(found: Score, variant: str, kind: str) -> dict[str, Any]:
    stats = found.stats
    more = {name: stats[name] for name in ("depth_nll_correlation", "soft_loss") if name in stats}
    depth = stats.get("mean_depth")
    told: dict[str, Any] = {"variant": variant, "kind": kind, "loss": found.loss, "depth": depth}
    return told | {"flops_per_token": found.flops} | more


def _by_budget(engine: Engine, scored: Callable[[], Score]) -> list[dict[str, Any]]:
    """Loss and depth of a model with a budget at other thresholds, and of the same depths at random."""
    found, method = [], engine.stage.method
    gates: Any = engine.stage.method_modules["budget"]
    assert method.window is not None
    trained, mean, variance, correction, *_ = gates.state.tolist()
    others = [mean + variance**0.5 * (NormalDist().inv_cdf(1 - p) + correction) for p in (0.25, 0.5, 0.75)]
    try:
        for theta in (trained, *others):  # in one order, so that points of several runs are the same
            gates.state[0] = theta
            own = scored()
            method.at_random = depths.shares_that_go_on(own.stats, method.window)
            chance = scored()
            method.at_random = None
            at = {"threshold": theta}
            found.append(_point(own, f"{BY_SCORE}, threshold {theta:.4g}", HALTING) | at)
            found.append(_point(chance, f"random, threshold {theta:.4g}", RANDOM) | at)
    finally:
        method.at_random = None
        gates.state[0] = trained
    return found
