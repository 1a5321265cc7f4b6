"""Does a gentle start pay?  A vanilla model is pretrained; then the same training FLOPs go on it and on each start.

    python -m benchmarks.gentle_start --corpus CORPUS --parallel 5 --minutes 20
    python -m benchmarks.gentle_start --corpus CORPUS --size tiny --tokens 4096     (two CPU cores, a minute)

The vanilla model sees half of the tokens of its size in `benchmarks.study`.  Then every kind goes on from its weights,
on text in another order, with a warm-up and a cosine of its own, until it has spent the FLOPs of --tokens of vanilla
training, at every --lrs; the best rate of each kind counts.  CORPUS is a folder as for `benchmarks.study`.  What is in
the folder of results is not run again.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS, folder, number, parser, script, typed, write
from benchmarks.study import corpus as texts
from benchmarks.study import queue
from benchmarks.study.rows import ORDER, SEEDS, SIZES, STEPS, Row, rows

say = partial(print, flush=True)
PLANNED = 1000
"""Steps for which the FLOPs of a run whose passes grow are averaged, before its own are known."""


@dataclass(frozen=True)
class Kind:
    """One way to go on."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    grows: float = 0.0
    """Share of the steps over which the number of passes grows."""
    ramped: bool = False
    """ramp_start and ramp_end are 30 and 60 % of the steps."""

    @property
    def gentle(self) -> bool:
        """Its gate is trained alone at first."""
        return bool(self.options.get("gentle_start"))


GENTLE = {"steps": STEPS, "gentle_start": True}
KINDS = {
    "vanilla": Kind("vanilla"),
    "ponderlm-gentle": Kind("ponderlm", GENTLE),
    "ponderlm-gentle-grown": Kind("ponderlm", GENTLE, grows=0.5),
    "adaponderlm-gentle": Kind("adaponderlm", GENTLE | {"target": 0.0, "bottom_share": 0.1}, ramped=True),
    "ponderlm-at-once": Kind("ponderlm", {"steps": STEPS}),
}


def resolved(config: dict[str, Any]) -> Any:
    """The configuration that a mapping means, and its method."""
    from megaponder.config.load import from_mapping
    from megaponder.config.resolve import resolve
    from megaponder.ponder.settings import method_of

    cfg = resolve(from_mapping(config))
    return cfg, method_of(cfg)


def flops_per_token(config: dict[str, Any]) -> float:
    """Training FLOPs of a token, averaged over the run's steps."""
    from megaponder.plan.flops import mean_executed

    return mean_executed(*resolved(config))


def going_on(base: dict[str, Any], kind: Kind, lr: float, flops: float, run: str) -> dict[str, Any]:
    """The configuration of a run that spends `flops` from the weights of `base`."""
    batch = base["train"]["global_batch"] * base["data"]["sequence_length"]
    made: dict[str, Any] = {}
    steps = PLANNED
    for _ in range(2):  # once for the FLOPs of a token
        options = dict(kind.options)
        if kind.grows:
            options["grow_steps"] = round(kind.grows * steps)
        if kind.ramped:
            options |= {"ramp_start": round(0.3 * steps), "ramp_end": round(0.6 * steps)}
        alone = {"method_only_steps": max(1, steps // 50), "method_lr": 1e-2} if kind.gentle else {}
        made = base | {
            "run": run,
            "model": base["model"] | {"embedding_scale": "none"},
            "ponder": {"method": kind.method, "options": options},
            "data": base["data"] | {"shuffle_seed": ORDER + 1},
            "optimizer": {"lr": lr},
            "train": base["train"] | {"steps": steps, "eval_every": max(1, steps // 20)} | alone,
            "checkpoint": {"load": base["run"], "every": max(1, steps // 8), "keep_last": 1},
            "logging": base["logging"] | {"every": max(1, steps // 200)},
        }
        steps = max(2, round(flops / (flops_per_token(made) * batch)))
    return made


def job(
    name: str, config: dict[str, Any], told: dict[str, Any], text: texts.Corpus, out: Path, command: str
) -> queue.Job:
    """A run that `benchmarks.study.run` trains and evaluates."""
    run = Path(config["run"])
    task = {"row": {"name": name} | told, "corpus": asdict(text), "config": config, "out": str(out), "command": command}
    queue.write(run / "row.json", task)
    steps, batch = config["train"]["steps"], config["train"]["global_batch"] * config["data"]["sequence_length"]
    return queue.Job(name, run / "row.json", run / "row.log", flops_per_token(config) * steps * batch)


def report(size: str, base: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """The table, in Markdown: the best learning rate of each kind first."""
    loss = base["loss"]
    lines = [
        f"# Gentle start, {size}",
        "",
        f"`{base['command']}`: {base['origin']}.",
        "",
        f"The vanilla model has {base['parameters']:,} parameters and saw {base['curve'][-1]['tokens']:,} tokens, "
        f"{base['executed_flops']:.3g} FLOPs; its held-out loss is {loss:.4f}. Every row went on from it.",
        "",
        "| start | learning rate | tokens | training FLOPs | held-out loss | change | bits per byte | FLOPs to "
        "generate a token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    best = {kind: min(r["loss"] for r in found if r["kind"] == kind) for kind in {r["kind"] for r in found}}
    for r in sorted(found, key=lambda r: (best[r["kind"]], r["loss"])):
        lines.append(
            f"| {r['kind']} | {r['lr']:g} | {r['curve'][-1]['tokens']:,} | {r['executed_flops']:.3g} | "
            f"{r['loss']:.4f} | {r['loss'] - loss:+.4f} | {r['bits_per_byte']:.4f} | {r['flops_per_token']:.3g} |"
        )
    return "\n".join(lines) + "\n"


@script
def main(argv: list[str] | None = None) -> None:
    import torch

    options = parser("gentle_start", __doc__)
    options.add_argument("--corpus", type=Path, metavar="FOLDER", required=True, help="the text")
    options.add_argument("--bytes", type=number(1.0), metavar="N", help="train on the first N bytes of all sources")
    options.add_argument("--size", choices=list(SIZES), default="6x256", help="backbone; default: 6x256")
    options.add_argument(
        "--base-tokens", type=number(1), metavar="N", help="of the vanilla model; default: half the size's"
    )
    options.add_argument("--tokens", type=number(1), metavar="N", help="whose vanilla FLOPs go on; default: the size's")
    options.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="starts; default: all")
    options.add_argument("--lrs", nargs="+", type=number(1e-9), default=[1e-3, 3e-3], help="default: 1e-3 3e-3")
    options.add_argument("--parallel", type=number(1), default=1, metavar="N", help="runs at a time; default: 1")
    options.add_argument("--minutes", type=number(0.1), metavar="M", help="time that there is; default: no limit")
    options.add_argument("--work", type=folder, default=Path("runs/gentle-start"), help="runs; default: %(default)s")
    options.add_argument("--output", type=folder, default=RESULTS, help="results; default: benchmarks/results")
    args = options.parse_args(argv)
    begin, cuda = time.monotonic(), torch.cuda.is_available()
    size = SIZES[args.size]
    command = typed("gentle_start", argv)
    text = texts.ready(args.corpus, args.bytes, size.vocab - 1, args.work)

    def together(jobs: list[queue.Job]) -> None:
        queue.run_all(jobs, args.parallel, begin, args.minutes, say)

    tokens = args.base_tokens or size.tokens // 2
    vanilla = next(row.kind for row in rows(args.size) if row.kind.name == "vanilla")
    row = Row(vanilla, args.size, SEEDS[0], 1.0, tokens)
    base = row.config(text, str(args.work / f"{args.size}.base"), cuda)
    place = args.output / "gentle-start"
    first = place / f"{args.size}.base.json"
    if not first.is_file():
        together([job("base", base, {"kind": "base", "lr": row.lr}, text, first, command)])
    flops = (args.tokens or size.tokens) * flops_per_token(base)
    jobs, files = [], []
    for name in args.kinds:
        for lr in args.lrs:
            short = f"{args.size}.{name}.lr{lr:g}"
            files.append(place / f"{short}.json")
            if files[-1].is_file():
                say(f"{short}: done before.")
                continue
            config = going_on(base, KINDS[name], lr, flops, str(args.work / short))
            jobs.append(job(short, config, {"kind": name, "lr": lr}, text, files[-1], command))
    if jobs:
        together(jobs)
    found = [json.loads(path.read_text()) for path in files]
    told = report(args.size, json.loads(first.read_text()), found)
    write(
        args.output,
        f"gentle-start-{args.size}",
        [{k: r[k] for k in ("name", "kind", "lr", "loss")} for r in found],
        told,
    )
    say(told)


if __name__ == "__main__":
    sys.exit(main())
