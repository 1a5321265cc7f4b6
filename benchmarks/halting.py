"""Time and FLOPs that leaving halted tokens out saves in a training step, at several halting rates, on this machine.

    python -m benchmarks.halting

Pairs: the same model, text and weights, masked and gathered, in one process, alternating; forward and backward of one
micro-batch.  The halting rate is set with the fixed-depth method, so that it is exact.  Writes
halting-<device>.{json,md} into the folder of results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from megaponder.engine import cuda_on_cpu

cuda_on_cpu.install()

import torch  # noqa: E402

from benchmarks.command import add_output, number, parser, script, write  # noqa: E402
from benchmarks.report import origin  # noqa: E402
from megaponder.config.resolve import resolve  # noqa: E402
from megaponder.config.schema import ModelConfig, RunConfig  # noqa: E402
from megaponder.data.batch import MicroBatch  # noqa: E402
from megaponder.engine import depth, groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.plan.flops import step_flops  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402

HEAD = 64
"""Channels of a head."""
DEPTHS = (4.0, 3.7, 3.1, 2.5, 1.9)


def config(args: argparse.Namespace, mean_depth: float, skip: bool) -> RunConfig:
    """A Pythia of the asked size with four passes."""
    cfg = RunConfig(
        model=ModelConfig(
            family="pythia",
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_heads=args.hidden // HEAD,
            vocab_size=args.vocab,
        )
    )
    cfg.ponder.method, cfg.ponder.skip_halted = "pruned_ponderlm", skip
    cfg.ponder.options = {"steps": 3, "depth": mean_depth}
    cfg.data.sequence_length = args.length
    cfg.train.steps, cfg.train.global_batch, cfg.train.micro_batch = 1, args.batch, args.batch
    return resolve(cfg)


def measure(args: argparse.Namespace, mean_depth: float) -> dict[str, Any]:
    """Median step time of both ways, and the FLOPs that should be left."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(0, args.vocab, (args.batch, args.length + 1), generator=draw)
    batch = MicroBatch(text[:, :-1], text[:, 1:], torch.ones(args.batch, args.length))
    engines, times, losses = {}, {False: [], True: []}, {}
    for skip in (False, True):
        cfg = config(args, mean_depth, skip)
        engines[skip] = build_engine(cfg, method_of(cfg), groups.init(cfg))
    for i in range(args.rounds + 1):
        for skip, engine in engines.items():
            engine.zero_grad()
            begin = time.perf_counter()
            out = engine.forward_backward([batch], 0, train=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i:
                times[skip].append(time.perf_counter() - begin)
            losses[skip] = out
    assert abs(losses[True].loss - losses[False].loss) < 1e-3 * losses[False].loss
    active = depth.active_shares(depth.metrics(losses[True].stats, losses[True].loss))
    cfg = config(args, mean_depth, True)
    passes = [p.total for p in step_flops(cfg, method_of(cfg)).passes]
    masked, gathered = (statistics.median(times[skip]) for skip in (False, True))
    left = sum(a * f for a, f in zip(active, passes, strict=True)) / sum(passes)
    return {
        "mean_depth": mean_depth,
        "halted": 1 - sum(active) / len(active),
        "masked_s": masked,
        "gathered_s": gathered,
        "time_saved": 1 - gathered / masked,
        "flops_saved": 1 - left,
    }


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The Markdown report."""
    lines = [
        "# Halted tokens left out of a training step\n",
        f"{origin()}, FP32: {args.layers} layers x {args.hidden}, vocabulary {args.vocab}, {args.batch} x "
        f"{args.length} tokens, four passes, median of {args.rounds} alternating steps (forward and backward).\n",
        "| mean depth of 4 | halted | FLOPs saved | time saved | time / FLOPs saved | masked s | gathered s |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        share = f"{r['time_saved'] / r['flops_saved']:.2f}" if r["flops_saved"] > 0.01 else ""
        lines.append(
            f"| {r['mean_depth']} | {r['halted']:.0%} | {r['flops_saved']:.0%} | {r['time_saved']:.0%} | {share} | "
            f"{r['masked_s']:.3f} | {r['gathered_s']:.3f} |"
        )
    return "\n".join(lines) + "\n"


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("halting", __doc__)
    for name, kind, default, what in (
        ("layers", number(1), 4, "layers of the model"),
        ("hidden", number(HEAD, multiple=HEAD), 256, f"its width, in heads of {HEAD}"),
        ("vocab", number(2), 4096, "vocabulary"),
        ("batch", number(1), 2, "sequences of the micro-batch"),
        ("length", number(1), 512, "tokens of a sequence"),
        ("rounds", number(1), 5, "timed steps of each way"),
    ):
        options.add_argument(f"--{name}", type=kind, default=default, help=f"{what}; default: {default}")
    add_output(options)
    args = options.parse_args(argv)
    rows = [measure(args, d) for d in DEPTHS]
    report = table(rows, args)
    print(report)
    write(args.output, f"halting-{'cuda' if torch.cuda.is_available() else 'cpu'}", rows, report)


if __name__ == "__main__":
    sys.exit(main())
