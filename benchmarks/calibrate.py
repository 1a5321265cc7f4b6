"""Calibrate the exit threshold of a trained PonderLM on held-out text, after Confident Adaptive Language Modeling.

    python -m benchmarks.calibrate runs/first --depth 3.1

Evaluates the newest checkpoint of the run as `confident_ponderlm` on its validation split at thresholds found by
bisection, until the mean depth is the one that is asked for, and prints threshold, depth and loss of every try.  The
weights are those of `ponderlm`: nothing is trained.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

from megaponder.engine import cuda_on_cpu  # noqa: E402

cuda_on_cpu.install()

from benchmarks.command import number, parser, script  # noqa: E402
from megaponder.checkpoint.weights import load_weights  # noqa: E402
from megaponder.data.stream import build_streams  # noqa: E402
from megaponder.errors import ConfigError, UserError  # noqa: E402
from megaponder.export import reference  # noqa: E402
from megaponder.training.evaluate import Evaluation, evaluate  # noqa: E402


class _Never:
    """No signal stops a calibration."""

    def agreed(self) -> int:
        return 0

    def wait(self, future: Any) -> Any:
        return future.result()


def measure(cfg: Any, state: Any, threshold: float, batches: int) -> Evaluation:
    """Loss and depth on held-out text with this threshold."""
    cfg = copy.deepcopy(cfg)
    old = cfg.ponder.options
    cfg.ponder.method = "confident_ponderlm"
    kept = {"steps": old.get("steps", 3), "topk": old.get("topk", 0)}
    cfg.ponder.options = kept | {"target": 0.0, "threshold": threshold}
    cfg.train.eval_batches, cfg.data.cache = batches, None
    with reference.engine(cfg, state) as engine:
        streams = build_streams(cfg, cfg.train.global_batch, batches * cfg.train.global_batch)
        if not streams.valid:
            raise UserError("The run has no held-out text: its data.split has no validation part.")
        found = evaluate(cfg, engine, streams.valid, _Never(), lambda: None)  # type: ignore[arg-type]
    assert found is not None
    return found


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("calibrate", __doc__)
    options.add_argument("run", type=Path, help="run folder or checkpoint of method ponderlm")
    options.add_argument("--depth", type=float, required=True, help="mean number of passes to reach")
    options.add_argument("--batches", type=number(1), default=4, help="global batches of held-out text; default: 4")
    options.add_argument("--tries", type=number(1), default=8, help="steps of the bisection; default: 8")
    args = options.parse_args(argv)
    cfg, state = load_weights(args.run)
    if cfg.ponder.method != "ponderlm" or cfg.ponder.options.get("multiply_by_steps"):
        method = cfg.ponder.method
        raise UserError(f"{args.run}: method {method}; calibration needs ponderlm without multiply_by_steps.")
    most = cfg.ponder.options.get("steps", 3) + 1
    if not 1 <= args.depth <= most:  # also nan
        rule = f"{args.run} has {most} passes, and the depth must lie between 1 and {most}"
        raise ConfigError("--depth", args.depth, rule, f"use {most if args.depth > most else 1}")
    low, high = 0.0, 1.0
    for _ in range(args.tries):
        threshold = (low + high) / 2
        found = measure(cfg, state, threshold, args.batches)
        depth = found.stats["mean_depth"]
        print(f"threshold {threshold:.4f}: mean depth {depth:.3f}, validation loss {found.loss:.4f}", flush=True)
        low, high = (low, threshold) if depth > args.depth else (threshold, high)
    print(
        f"use ponder.method confident_ponderlm with ponder.options {{target: 0.0, threshold: {(low + high) / 2:.4f}}}"
    )


if __name__ == "__main__":
    sys.exit(main())
