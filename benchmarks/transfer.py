"""Does a learning rate carry over to wider models and to more passes?  A sweep with and without the option.

    python -m benchmarks.transfer width passes --corpus CORPUS --parallel 8 --minutes 9
    python -m benchmarks.transfer width passes --report
    python -m benchmarks.transfer width --corpus CORPUS --size tiny --tokens 4096     (two CPU cores, a minute or two)

`width`: models of half, once and twice the width of --size, at every rate, plain and with `optimizer.tuned_width` of
the narrowest.  `passes`: models of --size that run their layers once, twice and four times (`loop`), plain and with
`optimizer.tuned_passes: 1`.  All begin as the pondering methods do (embeddings scaled, output projections small).  They
see the same text in the same order, in batches half as large as those of `benchmarks.study`, whose text CORPUS is, with
a cosine after a warm-up of a fifth, since they are short.  A run whose JSON lies in the folder of results is not run
again; one that was cut off goes on.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS, folder, number, parser, script, typed, write
from benchmarks.study import corpus as texts
from benchmarks.study import queue
from benchmarks.study.rows import SEEDS, SIZES, Row, rows
from megaponder.errors import UserError

say = partial(print, flush=True)
RATES = (1.5e-3, 3e-3, 6e-3, 12e-3, 24e-3)
SWEEPS = ("width", "passes")
WIDTHS, PASSES = (0.5, 1, 2), (1, 2, 4)
COLORS = ("#0072b2", "#d55e00", "#009e73")


@dataclass(frozen=True)
class Point:
    """One run: a model of this width, or with so many passes."""

    sweep: str
    size: str
    value: int
    tuned: int
    """The value at which rates are meant to be tuned; models of it are the same with and without the option."""
    lr: float
    carried: bool
    tokens: int

    @property
    def name(self) -> str:
        """Of its result and its run folder."""
        how = "carried" if self.carried else "plain"
        return f"{self.size}.{self.tokens / 1e6:g}M.{self.sweep}{self.value}.{how}.lr{self.lr:g}"

    def config(self, text: texts.Corpus, run: Path, cuda: bool) -> dict[str, Any]:
        """The study's configuration of a vanilla model, in this width or with these passes."""
        size = SIZES[self.size]
        kind = next(row.kind for row in rows(self.size) if row.kind.name == "vanilla-sqrt_2.5h")  # begins as `loop`
        batch = max(1, size.batch // 2)
        made = Row(kind, self.size, SEEDS[0], 1.0, self.tokens).config(text, str(run), cuda)
        made["optimizer"] = {"lr": self.lr}
        if self.sweep == "width":
            made["model"] |= {"hidden_size": self.value, "num_heads": self.value * size.heads // size.hidden}
        elif self.value > 1:
            made["ponder"] = {"method": "loop", "options": {"extra_passes": self.value - 1}}
        if self.carried:
            made["optimizer"][f"tuned_{self.sweep}"] = self.tuned
        steps = max(2, self.tokens // (batch * size.length))
        made["train"] |= {"steps": steps, "global_batch": batch, "micro_batch": batch}
        made["train"] |= {"eval_every": 0, "eval_batches": 32}
        made["schedule"]["warmup_fraction"] = 0.2
        made["checkpoint"] = {"every": 0}
        made["faults"] = {"not_finite": "skip"}  # a rate that is far too high has a result, too
        return made


def points(
    sweep: str, size: str, tokens: int, lrs: Sequence[float] = RATES, only: Sequence[float] | None = None
) -> Iterator[Point]:
    """All runs of a sweep, or those of `only` some of `WIDTHS` or `PASSES`; the long ones first."""
    every = WIDTHS if sweep == "width" else PASSES
    unit = SIZES[size].hidden if sweep == "width" else 1
    for value in sorted(every, reverse=True):
        if only is None or value in only:
            plain = Point(sweep, size, round(value * unit), round(every[0] * unit), 0.0, False, tokens)
            yield from (replace(plain, lr=lr) for lr in lrs)
            if value > every[0]:
                yield from (replace(plain, lr=lr, carried=True) for lr in lrs)


def job(point: Point, text: texts.Corpus, work: Path, out: Path, cuda: bool, command: str) -> queue.Job:
    """A run for the queue; its result has what `Point` has, and the loss on held-out text."""
    from megaponder.config.load import from_mapping
    from megaponder.config.resolve import resolve
    from megaponder.plan.flops import mean_needed
    from megaponder.ponder.settings import method_of

    run = work / point.name
    config = point.config(text, run, cuda)
    told = asdict(point) | {"name": point.name}
    task = {"row": told, "corpus": asdict(text), "config": config, "out": str(out), "command": command}
    queue.write(run / "row.json", task | {"evaluate": False})
    cfg = resolve(from_mapping(config))
    return queue.Job(point.name, run / "row.json", run / "row.log", mean_needed(cfg, method_of(cfg)) * point.tokens)


def curves(found: list[dict[str, Any]], carried: bool) -> dict[int, list[tuple[float, float]]]:
    """(rate, loss) of each width or number of passes, by rate; those that are tuned belong to both."""
    made: dict[int, list[tuple[float, float]]] = {}
    for r in sorted(found, key=lambda r: (r["value"], r["lr"])):
        if r["carried"] == carried or r["value"] == r["tuned"]:
            loss = r["curve"][-1]["loss"]
            made.setdefault(r["value"], []).append((r["lr"], loss if math.isfinite(loss) else math.inf))
    return made


def optimum(curve: list[tuple[float, float]]) -> float | None:
    """The rate at the lowest point of the parabola through the best run and its neighbours, over the logarithm of the
    rate; None where the best run is the first or the last, its own rate where a neighbour's loss is not finite."""
    best = min(range(len(curve)), key=lambda i: curve[i][1])
    if best in (0, len(curve) - 1):
        return None
    if not all(math.isfinite(loss) for _, loss in curve[best - 1 : best + 2]):
        return curve[best][0]
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(lr), loss) for lr, loss in curve[best - 1 : best + 2])
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    return math.exp((x0 + x1) / 2 - left * (x2 - x0) / 2 / (right - left))


def report(size: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: the losses of each sweep, the best rate of each model, and what the tuned one's rate costs there."""
    first = next(iter(found.values()))[0]
    lines = [f"# Learning rates carried over, {size}", ""]
    for command, origin in dict.fromkeys((r["command"], r["origin"]) for rs in found.values() for r in rs):
        lines += [f"`{command}`: {origin}.", ""]
    lines += [
        f"{first['tokens']:,} training tokens, one seed.  Held-out losses in nats per token; `-`: not run.  The "
        "optimum is that of a parabola through the best rate and its neighbours; the last column is the loss at the "
        "best rate of the first row, less that at the model's own.",
        "",
    ]
    for sweep, rs in found.items():
        rates = sorted({r["lr"] for r in rs})
        titles = [sweep, "option", *(f"{lr:g}" for lr in rates), "optimum", "at the tuned rate"]
        lines += [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
        for carried in (False, True):
            by = curves(rs, carried)
            tuned = min(by[rs[0]["tuned"]], key=lambda p: p[1])[0] if rs[0]["tuned"] in by else None
            for value, curve in by.items():
                if carried and value == rs[0]["tuned"]:
                    continue
                losses, best = dict(curve), optimum(curve)
                cells = [f"{losses[lr]:.4f}" if lr in losses else "-" for lr in rates]
                cost = f"{losses[tuned] - min(losses.values()):+.4f}" if tuned in losses else "-"
                how = f"tuned_{sweep}: {rs[0]['tuned']}" if carried else "none"
                edge = "lowest" if min(losses, key=lambda lr: losses[lr]) == curve[0][0] else "highest"
                at = f"{best:.2g}" if best else f"the {edge}"
                lines.append(f"| {value} | {how} | " + " | ".join(cells) + f" | {at} | {cost} |")
        lines.append("")
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Loss over the rate, a panel without and one with the option for each sweep whose tuned models were run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {sweep: rs for sweep, rs in found.items() if any(r["value"] == r["tuned"] for r in rs)}
    figure = Figure(figsize=(9.0, 3.6 * max(1, len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(1, len(shown)), 2, squeeze=False, sharex="row")
    for row, (sweep, rs) in zip(panels, shown.items(), strict=False):
        finite = [r["curve"][-1]["loss"] for r in rs if math.isfinite(r["curve"][-1]["loss"])]
        colors = dict(zip(sorted({r["value"] for r in rs}), COLORS, strict=False))
        for axes, carried in zip(row, (False, True), strict=True):
            for value, curve in curves(rs, carried).items():
                color = colors[value]
                axes.plot(*zip(*curve, strict=True), "o-", color=color, label=f"{sweep} {value}")
                axes.plot(*min(curve, key=lambda p: p[1]), "o", ms=11, mfc="none", color=color)
            axes.set(xscale="log", xlabel="optimizer.lr", ylabel="held-out loss (nats per token)")
            rates = sorted({r["lr"] for r in rs})
            axes.set_xticks(rates, [f"{lr:g}" for lr in rates])
            axes.set_xticks([], minor=True)
            axes.set_ylim(min(finite) - 0.03, min(min(finite) + 1.2, max(finite) + 0.03))
            axes.set_title(f"with tuned_{sweep}: {rs[0]['tuned']}" if carried else "without the option")
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


@script
def main(argv: list[str] | None = None) -> None:
    import torch

    options = parser("transfer", __doc__)
    options.add_argument("sweeps", nargs="+", choices=SWEEPS, help="over what")
    options.add_argument("--corpus", type=Path, metavar="FOLDER", help="the text")
    options.add_argument("--bytes", type=number(1.0), metavar="N", help="train on the first N bytes of all sources")
    options.add_argument("--size", choices=list(SIZES), default="6x256", help="backbone; default: 6x256")
    options.add_argument("--tokens", type=number(1), default=11_000_000, metavar="N", help="of each run; %(default)s")
    options.add_argument("--lrs", nargs="+", type=number(1e-9), default=list(RATES), help="default: %(default)s")
    options.add_argument("--widths", nargs="+", type=float, choices=WIDTHS, help="factors on that of --size")
    options.add_argument("--passes", nargs="+", type=int, choices=PASSES, help="default: all")
    options.add_argument("--parallel", type=number(1), default=1, metavar="N", help="runs at a time; default: 1")
    options.add_argument("--minutes", type=number(0.1), metavar="M", help="time that there is; default: no limit")
    options.add_argument("--work", type=folder, default=Path("runs/transfer"), help="runs; default: %(default)s")
    options.add_argument("--output", type=folder, default=RESULTS, help="results; default: benchmarks/results")
    options.add_argument("--report", action="store_true", help="write table and figure of the results, and stop")
    args = options.parse_args(argv)
    begin, cuda, place = time.monotonic(), torch.cuda.is_available(), args.output / "transfer"
    only = {"width": args.widths, "passes": args.passes}
    wanted = [p for sweep in args.sweeps for p in points(sweep, args.size, args.tokens, args.lrs, only[sweep])]
    if not args.report:
        if args.corpus is None:
            raise UserError("--corpus is missing: name a folder with train.jsonl and heldout.jsonl.")
        text = texts.ready(args.corpus, args.bytes, SIZES[args.size].vocab - 1, args.work)
        command = typed("transfer", argv)
        jobs = [
            job(p, text, args.work, place / f"{p.name}.json", cuda, command)
            for p in wanted
            if not (place / f"{p.name}.json").is_file()
        ]
        say(f"{len(wanted) - len(jobs)} of {len(wanted)} runs were done before.")
        queue.run_all(jobs, args.parallel, begin, args.minutes, say)
    found: dict[str, list[dict[str, Any]]] = {}
    for p in wanted:
        if (place / f"{p.name}.json").is_file():
            found.setdefault(p.sweep, []).append(json.loads((place / f"{p.name}.json").read_text()))
    if not found:
        raise UserError(f"--output {args.output}: it has no result of these sweeps; leave out --report to run them.")
    told = report(args.size, found)
    short = {sweep: [{k: r[k] for k in ("name", "value", "lr", "carried")} | {"loss": r["curve"][-1]["loss"]}
                     for r in rs] for sweep, rs in found.items()}  # fmt: skip
    write(args.output, f"transfer-{args.size}", short, told)
    if importlib.util.find_spec("matplotlib"):
        draw(found, args.output / f"transfer-{args.size}.png")
    say(told)


if __name__ == "__main__":
    sys.exit(main())
