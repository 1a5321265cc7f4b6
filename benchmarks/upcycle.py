"""Upcycling in its four stages on three kinds of text, beside a dense model that goes on for the same FLOPs.

    python -m benchmarks.upcycle --corpus CORPUS --parallel 4
    python -m benchmarks.upcycle --corpus CORPUS --size tiny --tokens 2048     (two CPU cores, some minutes)

A vanilla model sees half of the tokens of its size in `benchmarks.study`.  Then, from its weights: a copy for each kind
trains its MLPs alone on that kind; the copies become the experts of one mixture, in several ways; the mixtures train
their routers alone, then everything, on all text.  The dense model goes on with as many FLOPs as all of this together,
on text with the same shares of kinds.  FLOPs count frozen weights as if they were trained, which favours the dense one.
CORPUS is a folder as for `benchmarks.study`.  What is in the folder of results is not run again.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS, folder, number, parser, script, typed, write
from benchmarks.gentle_start import flops_per_token, job
from benchmarks.study import corpus as texts
from benchmarks.study import queue
from benchmarks.study.rows import ORDER, SEEDS, SIZES, Row, rows
from megaponder.errors import UserError

say = partial(print, flush=True)
KINDS = ("docs", "textbooks", "encyclopedic")
REST = "rest"
"""All other kinds."""
SLICES = 4
SHARES = {"expert": 0.18, "routers": 0.09, "mixture": 0.45}
"""Tokens of a stage, of those of the base."""
RATE = 3e-3
"""Learning rate of every stage: of dense models the better of two (docs/gentle-start.md), else the only one tried."""
METRICS = ("moe_load_max", "moe_load_min", "moe_entropy", "moe_discipline")


@dataclass(frozen=True)
class Way:
    """How a mixture starts and is trained."""

    split: dict[str, Any] = field(default_factory=dict)
    labels: float = 0.0
    """Weight of the routers' loss on disciplines, in both stages."""

    @property
    def start(self) -> str:
        """The first of the ways that start so."""
        return next(name for name, way in WAYS.items() if way.split == self.split)


WAYS = {
    "average": Way(),
    "average-labels": Way(labels=0.1),
    "sum": Way({"init": "sum"}),
    "damped-0.1": Way({"init": "damped", "beta": 0.1}),
}


def by_kind(corpus: Path, size: float | None, text: texts.Corpus) -> dict[str, int]:
    """Datasets train-KIND of the three kinds and train-rest beside the corpus's own; their tokens."""
    from megaponder.data.indexed import read_index
    from megaponder.data.info import read_meta
    from megaponder.data.prepare import PrepareOptions, prepare

    parts = (*KINDS, REST)
    if not all(Path(text.path(f"train-{kind}.idx")).is_file() for kind in parts):
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in parts}
        for document in texts.first_part(corpus, size)[0]:
            kind = texts.slug(document.get("cat", "text"))
            found[kind if kind in KINDS else REST].append(document)
        for kind, documents in found.items():
            if not documents:
                raise UserError(f"--corpus {corpus}: it has no text whose cat is {kind}.")
            lines = Path(text.path(f"train-{kind}.jsonl"))
            texts.write_lines(lines, documents)
            prepare(PrepareOptions([str(lines)], text.path(f"train-{kind}"), text.path("tokenizer.json")))
            lines.unlink()
    metas = {kind: read_meta(read_index(text.path(f"train-{kind}"))) for kind in parts}
    return {kind: meta.tokens for kind, meta in metas.items() if meta is not None}


def stage(base: dict[str, Any], run: Path, tokens: float, data: list[Any], load: Path, **train: Any) -> dict[str, Any]:
    """The configuration of a stage from the weights of `load`: a warm-up and a cosine of its own."""
    batch = base["train"]["global_batch"] * base["data"]["sequence_length"]
    steps = max(2, round(tokens / batch))
    return base | {
        "run": str(run),
        "data": base["data"] | {"train": data, "shuffle_seed": ORDER + 1},
        "optimizer": {"lr": RATE},
        "train": base["train"] | {"steps": steps, "eval_every": max(1, steps // 10)} | train,
        "checkpoint": {"load": str(load), "every": 0, "keep_last": 1},  # at the end, and when it is stopped
        "logging": base["logging"] | {"every": max(1, steps // 100)},
    }


def mixture(base: dict[str, Any]) -> dict[str, Any]:
    """The model section of a mixture, as `split` writes it."""
    from benchmarks.gentle_start import resolved
    from megaponder.upcycle.split import mixture_config

    model = mixture_config(resolved(base)[0], len(KINDS), SLICES, Path("-")).model
    return base["model"] | {"ffn_size": model.ffn_size, "moe": model.moe}


def stages(base: dict[str, Any], work: Path, text: texts.Corpus, sizes: dict[str, int], tokens: int) -> dict[str, Any]:
    """All configurations by name, but the base's."""
    size, whole = Path(base["run"]).name.removesuffix(".base"), sum(sizes.values())
    start, everything = (
        Path(base["run"]),
        [item for kind, n in sizes.items() for item in (n, text.path(f"train-{kind}"))],
    )
    budget = {name: share * tokens for name, share in SHARES.items()}
    found, flops = {}, 0.0
    for kind in KINDS:
        run = work / f"{size}.expert-{kind}"
        found[f"expert-{kind}"] = stage(base, run, budget["expert"], [text.path(f"train-{kind}")], start, only=["mlp"])
    experts = base | {"model": mixture(base)}
    for name, way in WAYS.items():
        labels = {"weight": way.labels, "data": {kind: [text.path(f"train-{kind}")] for kind in KINDS}}
        told = {"disciplines": labels if way.labels else {}}
        split, routers = work / f"{size}.split-{way.start}", work / f"{size}.routers-{name}"
        found[f"routers-{name}"] = stage(
            experts, routers, budget["routers"], everything, split, only=["routers"], **told
        )
        found[f"mixture-{name}"] = stage(
            experts, work / f"{size}.mixture-{name}", budget["mixture"], everything, routers, **told
        )
    way = next(iter(WAYS))
    for name in (*(f"expert-{kind}" for kind in KINDS), f"routers-{way}", f"mixture-{way}"):
        flops += spent(found[name])
    seen = {kind: (kind in KINDS) * budget["expert"] for kind in sizes}
    for kind, n in sizes.items():
        seen[kind] += n / whole * (budget["routers"] + budget["mixture"])
    blend = [item for kind, n in seen.items() for item in (n, text.path(f"train-{kind}"))]
    found["dense"] = stage(base, work / f"{size}.dense", flops / flops_per_token(base), blend, start)
    return found


def spent(config: dict[str, Any]) -> float:
    """Training FLOPs of a run."""
    batch = config["train"]["global_batch"] * config["data"]["sequence_length"]
    return flops_per_token(config) * config["train"]["steps"] * batch


def measure(run: Path, text: texts.Corpus) -> dict[str, Any]:
    """Held-out losses of a run that was not trained."""
    from megaponder.inference import heldout

    cfg, state = heldout.read_model(run)
    kinds = {kind: text.path(f"heldout-{kind}") for kind in text.heldout if kind != "all"}
    scores = heldout.score_all(cfg, state, kinds, heldout.Reading(32))
    whole = heldout.together(list(scores.values()))
    return {"loss": whole.loss, "kinds": {kind: {"loss": score.loss} for kind, score in scores.items()}}


def losses(result: dict[str, Any], text: texts.Corpus) -> dict[str, float]:
    """By kind, of the rest, and of all."""
    others = [kind for kind in result["kinds"] if kind not in KINDS]
    weights = {kind: text.heldout[kind]["tokens"] for kind in others}
    rest = sum(result["kinds"][kind]["loss"] * n for kind, n in weights.items()) / max(1, sum(weights.values()))
    return {kind: result["kinds"][kind]["loss"] for kind in KINDS} | {REST: rest, "all": result["loss"]}


def report(size: str, found: dict[str, dict[str, Any]], text: texts.Corpus) -> str:
    """The table, in Markdown, in the order of the stages; the base is the first."""
    names, base = [*KINDS, REST, "all"], found["base"]
    lines = [
        f"# Upcycling, {size}",
        "",
        f"`{base['command']}`: {base['origin']}.",
        "",
        f"The base has {base['parameters']:,} parameters and saw {base['curve'][-1]['tokens']:,} tokens. Held-out "
        f"losses by kind of text; {REST}: all other kinds.",
        "",
        f"| model | parameters | tokens | training FLOPs | {' | '.join(names)} |",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    for name, r in found.items():
        told = losses(r, text)
        trained = f"{r['curve'][-1]['tokens']:,} | {r['executed_flops']:.3g}" if "curve" in r else " | "
        count = f"{r['parameters']:,}" if "parameters" in r else ""
        lines.append(f"| {name} | {count} | {trained} | {' | '.join(f'{told[n]:.4f}' for n in names)} |")
    routers = [(name, r["router"]) for name, r in found.items() if r.get("router")]
    if routers:
        lines += ["", f"| mixture, last training step | {' | '.join(METRICS)} |", "|---" * (1 + len(METRICS)) + "|"]
        for name, r in routers:
            lines.append(f"| {name} | {' | '.join(f'{r[m]:.3f}' if m in r else '' for m in METRICS)} |")
    return "\n".join(lines) + "\n"


def with_router(path: Path, run: Path) -> dict[str, Any]:
    """A result, with what the run's last row says of its routers; written back."""
    from megaponder.monitor import jsonl

    result: dict[str, Any] = json.loads(path.read_text())
    if "router" not in result and (run / jsonl.NAME).is_file():
        rows = [row for row in jsonl.read(run / jsonl.NAME) if METRICS[0] in row]
        result["router"] = {name: rows[-1][name] for name in METRICS if name in rows[-1]} if rows else {}
        path.write_text(json.dumps(result, indent=1) + "\n")
    return result


@script
def main(argv: list[str] | None = None) -> None:
    import torch

    options = parser("upcycle", __doc__)
    options.add_argument("--corpus", type=Path, metavar="FOLDER", required=True, help="the text")
    options.add_argument("--bytes", type=number(1.0), metavar="N", help="train on the first N bytes of all sources")
    options.add_argument("--size", choices=list(SIZES), default="6x256", help="backbone; default: 6x256")
    options.add_argument("--tokens", type=number(1), metavar="N", help="of the base; default: half the size's")
    options.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="mixtures; default: all")
    options.add_argument("--parallel", type=number(1), default=1, metavar="N", help="runs at a time; default: 1")
    options.add_argument("--minutes", type=number(0.1), metavar="M", help="time that there is; default: no limit")
    options.add_argument("--work", type=folder, default=Path("runs/upcycle"), help="runs; default: %(default)s")
    options.add_argument("--output", type=folder, default=RESULTS, help="results; default: benchmarks/results")
    args = options.parse_args(argv)
    begin, cuda = time.monotonic(), torch.cuda.is_available()
    size = SIZES[args.size]
    command = typed("upcycle", argv)
    text = texts.ready(args.corpus, args.bytes, size.vocab - 1, args.work)
    sizes = by_kind(args.corpus, args.bytes, text)

    def together(jobs: list[queue.Job]) -> None:
        queue.run_all(jobs, args.parallel, begin, args.minutes, say)

    tokens = args.tokens or size.tokens // 2
    vanilla = next(row.kind for row in rows(args.size) if row.kind.name == "vanilla")
    row = Row(vanilla, args.size, SEEDS[0], 1.0, tokens)
    base = row.config(text, str(args.work / f"{args.size}.base"), cuda)
    base["checkpoint"]["every"] = 0
    place = args.output / "upcycle"
    configs = {"base": base} | stages(base, args.work, text, sizes, tokens)
    files = {name: place / f"{args.size}.{name}.json" for name in configs}

    def run(*names: str) -> None:
        """Those of the stages that are not done, side by side; a model that a later stage needs is trained again."""
        later = {"base": ("expert", "dense"), "expert": ("split",), "routers": ("mixture",)}
        waiting = []
        for name in names:
            model = Path(configs[name]["run"]) / "checkpoints"
            if files[name].is_file() and (model.is_dir() or name.split("-")[0] not in later):
                say(f"{name}: done before.")
            else:
                waiting.append(job(name, configs[name], {"kind": name, "lr": RATE}, text, files[name], command))
        if waiting:
            together(waiting)

    starts = list(dict.fromkeys(WAYS[name].start for name in args.ways))

    def measured() -> None:
        for name in starts:
            measure_split(args.work / f"{args.size}.split-{name}", name, text, files[f"split-{name}"])

    def told() -> None:
        """The table of what there is."""
        order = ["base", *(f"expert-{kind}" for kind in KINDS), *(f"split-{name}" for name in starts)]
        order += [f"{what}-{name}" for name in args.ways for what in ("routers", "mixture")]
        found = {
            name: with_router(files[name], Path(configs[name]["run"]) if name in configs else Path("-"))
            for name in (*order, "dense")
            if files[name].is_file()
        }
        values = [{"name": name, **losses(r, text)} for name, r in found.items()]
        write(args.output, f"upcycle-{args.size}", values, report(args.size, found, text))
        say(report(args.size, found, text))

    files |= {f"split-{name}": place / f"{args.size}.split-{name}.json" for name in starts}
    try:
        run("base")
        run(*(f"expert-{kind}" for kind in KINDS), "dense")
        for name in starts:
            split(args.work, args.size, name)
        with ThreadPoolExecutor(1) as beside:  # the device has room for it
            measuring = beside.submit(measured)
            run(*(f"routers-{name}" for name in args.ways))
            measuring.result()
        run(*(f"mixture-{name}" for name in args.ways))
    finally:
        if files["base"].is_file():
            told()


def split(work: Path, size: str, name: str) -> None:
    """Make a mixture, unless it is there."""
    from megaponder.upcycle.split import split as upcycle

    run = work / f"{size}.split-{name}"
    if not (run / "checkpoints").is_dir():
        experts = {kind: work / f"{size}.expert-{kind}" for kind in KINDS}
        say(str(upcycle(work / f"{size}.base", experts, run, slices=SLICES, **WAYS[name].split)))


def measure_split(run: Path, name: str, text: texts.Corpus, out: Path) -> None:
    """Write its held-out losses, unless they are there."""
    if not out.is_file():
        result = measure(run, text)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"name": name, **result, "corpus": asdict(text)}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
