"""What is measured of a trained row: all held-out text by kind, and on a part of it sweeps of depth and who gets the
passes, in the format of `megaponder eval --depth`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BATCH = 32
SWEEP, FIT = 256, 32
"""Windows of a sweep, the same for every row, and windows before them on which thresholds are fitted."""


def prepare() -> None:
    """The imports that take long; nothing touches a GPU."""
    from megaponder.engine import cuda_on_cpu

    cuda_on_cpu.install()
    import megaponder.engine.build
    import megaponder.inference.evaluation  # noqa: F401


def evaluate(run: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Values of the newest checkpoint of a run, for its JSON; `evaluation` is also written into the run."""
    from megaponder import files
    from megaponder.inference import evaluation, heldout

    cfg, state = heldout.read_model(run)
    folder, length = Path(task["corpus"]["folder"]), cfg.data.sequence_length
    kinds = {kind: str(folder / f"heldout-{kind}") for kind in task["corpus"]["heldout"] if kind != "all"}
    scores = heldout.score_all(cfg, state, kinds, heldout.Reading(BATCH))
    whole = heldout.together(list(scores.values()))
    sample = evaluation.Sample((str(folder / "heldout"),), SWEEP * length, FIT * length)
    by_depth = evaluation.by_depth(cfg, state, sample, BATCH)
    told = evaluation.results_of(str(run), cfg, [("", scores)], cfg.data.sequence_length) | by_depth
    files.write_json(run / evaluation.NAME, told)
    return {
        "parameters": sum(tensor.numel() for tensor in state.values()),
        "loss": whole.loss,
        "bits_per_byte": whole.bits_per_byte,
        "depth": whole.stats.get("mean_depth"),
        "flops_per_token": whole.flops,
        "heldout": whole.values(),
        "kinds": {kind: {"loss": s.loss, "bits_per_byte": s.bits_per_byte} for kind, s in scores.items()},
        "sweep": by_depth["sweep"],
        "evaluation": told,
    }
