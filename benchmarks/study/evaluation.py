"""What is measured of a trained row: all held-out text by kind, and sweeps of depth on a part of it.

A model with a budget has its own sweep: its threshold where this share of the open decisions would go on if scores were
normal, and beside each the same depth with passes spread at random.

A sweep has the same weights with fewer passes for all tokens, and halting at thresholds that are fitted to mean depths
on other text than is then measured: for ponderlm, exit by confidence; for the adaptive methods, their own gates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BATCH = 32
SWEEP, FIT = 256, 32
"""Windows of a sweep, the same for every row, and windows before them on which thresholds are fitted."""
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Mean depths of a sweep, as shares of the most passes."""
FITTED = ("ponderlm", "adaponderlm", "adaptive_cot", "ponderlm3")
PASSES = {"ponderlm": (1, 2, 3, 4, 5, 6), "loop": (1, 2, 3, 4, 5, 6)}


def prepare() -> None:
    """The imports that take long; nothing touches a GPU."""
    from megaponder.engine import cuda_on_cpu

    cuda_on_cpu.install()
    import megaponder.engine.build
    import megaponder.inference.heldout  # noqa: F401


def evaluate(run: Path, corpus: dict[str, Any]) -> dict[str, Any]:
    """Values of the newest checkpoint of a run, for its JSON."""
    from megaponder.inference import heldout

    cfg, state = heldout.read_model(run)
    folder = Path(corpus["folder"])
    kinds = {kind: str(folder / f"heldout-{kind}") for kind in corpus["heldout"] if kind != "all"}
    scores = heldout.score_all(cfg, state, kinds, BATCH)
    whole = heldout.together(list(scores.values()))
    return {
        "parameters": sum(tensor.numel() for tensor in state.values()),
        "loss": whole.loss,
        "bits_per_byte": whole.bits_per_byte,
        "depth": whole.stats.get("mean_depth"),
        "flops_per_token": whole.flops,
        "heldout": whole.values(),
        "kinds": {kind: {"loss": s.loss, "bits_per_byte": s.bits_per_byte} for kind, s in scores.items()},
        "sweep": sweep(cfg, state, str(folder / "heldout")),
    }


def sweep(cfg: Any, state: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """Loss, depth and FLOPs of each variant of the model."""
    from megaponder.export import reference
    from megaponder.inference import variants
    from megaponder.inference.heldout import score
    from megaponder.ponder.settings import method_of

    window, method, found = cfg.data.sequence_length, cfg.ponder.method, []

    def measure(changed: Any, variant: str, depth: float | None = None) -> None:
        with reference.engine(changed, state) as engine:
            if depth is not None:
                fitted = variants.fit_threshold(engine, changed, text, depth, BATCH, FIT * window)
                changed = variants.with_threshold(changed, fitted)
                variant += f", threshold {fitted:.4g}"
            s = score(engine, changed, text, BATCH, None, SWEEP * window, FIT * window)
        stats = s.stats
        told = {"variant": variant, "loss": s.loss, "depth": stats.get("mean_depth"), "flops_per_token": s.flops}
        found.append(told | {"depth_nll_correlation": stats.get("depth_nll_correlation")})

    measure(cfg, "as trained")
    for n in PASSES.get(method, ()):
        measure(variants.with_passes(cfg, n), f"passes {n}")
    if method_of(cfg).window is not None:
        found += by_budget(cfg, state, text)
    elif method in FITTED:
        halting = variants.with_threshold(cfg, 0.5)
        for share in SHARES:
            measure(halting, f"share {share}", share * method_of(cfg).max_depth())
    return found


def by_budget(cfg: Any, state: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """Loss and depth of a model with a budget at other thresholds, and of the same depths at random."""
    from statistics import NormalDist

    from megaponder.engine import depth
    from megaponder.export import reference
    from megaponder.inference.heldout import score

    length, found = cfg.data.sequence_length, []
    with reference.engine(cfg, state) as engine:
        method = engine.stage.method
        gates: Any = engine.stage.method_modules["budget"]
        trained, mean, variance, correction, *_ = gates.state.tolist()
        others = [mean + variance**0.5 * (NormalDist().inv_cdf(1 - p) + correction) for p in (0.25, 0.5, 0.75)]
        for theta in (trained, *others):
            gates.state[0] = theta
            own = score(engine, cfg, text, BATCH, None, SWEEP * length, FIT * length)
            active = depth.active_shares(own.stats)
            method.at_random = [
                active[k] / max(active[k - 1], 1e-9) for k in range(method.window.least, method.window.most)
            ]
            chance = score(engine, cfg, text, BATCH, None, SWEEP * length, FIT * length)
            method.at_random = None
            for what, s in (("scores", own), ("random", chance)):
                told = {"variant": f"{what}, threshold {theta:.4g}", "loss": s.loss, "depth": s.stats.get("mean_depth")}
                found.append(told | {"flops_per_token": s.flops})
    return found
