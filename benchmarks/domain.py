"""A small model learns a domain, then to answer: pretraining, continued pretraining, SFT, and what each stage forgets.

    python -m benchmarks.domain --corpus CORPUS
    python -m benchmarks.domain --corpus CORPUS --size tiny --tokens 4096     (two CPU cores, some minutes)

The domain is one kind of the corpus, encyclopedic text (the World Factbook and dictionaries).  A vanilla model is
pretrained on all other kinds; it goes on with the domain alone, and with as much general text beside it; then it is
trained on questions and answers, from the base, from the domain model, and with general text beside them.  Questions
are made of the corpus: four lines "Field: text" of an entry are the input, each of the fields is asked for, and its
text is the answer.  Held-out questions are made of held-out entries.  CORPUS is a folder as for `benchmarks.study`.
What is in the folder of results is not run again.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from benchmarks.command import RESULTS, folder, number, parser, script, typed, write
from benchmarks.gentle_start import flops_per_token
from benchmarks.study import corpus as texts
from benchmarks.study import queue
from benchmarks.study.rows import ORDER, SEEDS, SIZES, Row, rows
from megaponder.errors import UserError

say = partial(print, flush=True)
DOMAIN = "encyclopedic"
"""The kind of text that is learnt last."""
RATES = {"cpt": 1e-3, "sft": 1e-3}
"""Learning rates; the base has that of the study."""
EPOCHS = {"cpt": 2, "sft": 3}
SMALLER = 4
"""So many times smaller are the batches of SFT."""
FIELD = re.compile(r"([A-Z][^:\n]{2,60}(?:: [a-z][^:\n]{1,60})?): (\S.*)")
LINES, LONGEST_INPUT, LONGEST_ANSWER = 4, 500, 80
"""Lines of an input, and characters of an input and of an answer."""
PROMPTS = 64
"""Held-out questions that are answered by greedy decoding."""
TARGETS = 40_000
"""Of each kind of held-out text: so many are read, or all."""


@dataclass(frozen=True)
class Stage:
    """A training that goes on from another."""

    kind: str
    start: str
    blend: tuple[float | str, ...]
    """Weights and datasets."""


STAGES = {
    "cpt": Stage("cpt", "base", (1.0, "domain")),
    "cpt-mixed": Stage("cpt", "base", (0.5, "domain", 0.5, "general")),
    "sft-from-base": Stage("sft", "base", (1.0, "answers")),
    "sft": Stage("sft", "cpt-mixed", (1.0, "answers")),
    "sft-mixed": Stage("sft", "cpt-mixed", (0.7, "answers", 0.15, "domain", 0.15, "general")),
}


def questions(text: str) -> Iterator[dict[str, str]]:
    """Records of Alpaca's form, made of an entry's lines; inputs share no line."""
    for part in text.split("\n\n"):
        lines = [m for line in part.split("\n") if (m := FIELD.fullmatch(line.strip()))]
        for begin in range(0, len(lines) - LINES + 1, LINES):
            chosen = lines[begin : begin + LINES]
            shown = "\n".join(m[0] for m in chosen)
            names = Counter(m[1] for m in chosen)
            asked = [m for m in chosen if names[m[1]] == 1 and len(m[2]) <= LONGEST_ANSWER]
            for one in asked if len(shown) <= LONGEST_INPUT else ():
                yield {"instruction": f"What does the entry say about {one[1]}?", "input": shown, "output": one[2]}


def ready(corpus: Path, size: float | None, text: texts.Corpus) -> dict[str, str]:
    """Datasets beside the corpus's own: train-domain, train-general, train-answers and heldout-answers."""
    from megaponder.data.prepare import PrepareOptions, prepare

    paths = {name: text.path(f"train-{name}") for name in ("domain", "general", "answers")}
    paths["heldout"] = text.path("heldout-answers")
    if all(Path(f"{path}.idx").is_file() for path in paths.values()):
        return paths
    of_domain = {True: list[dict[str, Any]](), False: list[dict[str, Any]]()}
    for document in texts.first_part(corpus, size)[0]:
        of_domain[texts.slug(document.get("cat", "text")) == DOMAIN].append(document)
    held = [d for path in texts.inputs(corpus, "heldout") for d in texts.documents(path)]
    talks = {
        "answers": [q for d in of_domain[True] for q in questions(d["text"])],
        "heldout": [q for d in held if texts.slug(d.get("cat", "text")) == DOMAIN for q in questions(d["text"])],
    }
    for name, found in {"domain": of_domain[True], "general": of_domain[False], **talks}.items():
        if not found:
            raise UserError(f"--corpus {corpus}: it has no text for {name} (cat {DOMAIN}, lines `Field: text`).")
        lines = Path(f"{paths[name]}.jsonl")
        if name in talks:
            lines.write_bytes(b"".join(orjson.dumps(q) + b"\n" for q in found))
        else:
            texts.write_lines(lines, found)
        template = "alpaca" if name in talks else None
        options = PrepareOptions([str(lines)], paths[name], text.path("tokenizer.json"), workers=1, template=template)
        prepare(options)
    return paths


def going_on(base: dict[str, Any], name: str, run: Path, start: Path, paths: dict[str, str]) -> dict[str, Any]:
    """The configuration of a stage: a warm-up and a linear decay of its own, as in the 30B recipe."""
    from megaponder.data.indexed import read_index

    stage = STAGES[name]
    blend = [paths[item] if isinstance(item, str) else item for item in stage.blend]
    batch, length = base["train"]["global_batch"], base["data"]["sequence_length"]
    data = base["data"] | {"train": blend, "shuffle_seed": ORDER + 1}
    few = max(1, batch // SMALLER)
    budget: dict[str, Any] = {"steps": None, "epochs": EPOCHS["sft"], "global_batch": few, "micro_batch": few}
    if stage.kind == "cpt":
        tokens = EPOCHS["cpt"] * read_index(paths["domain"]).tokens / float(stage.blend[0])
        budget = {"steps": None, "tokens": max(2 * batch * length, round(tokens))}
    else:
        data |= {"loss_mask": "answers"}  # epochs of a blend are those of its answers
    return base | {
        "run": str(run),
        "data": data,
        "optimizer": {"lr": RATES[stage.kind]},
        "schedule": {"kind": "linear", "warmup_fraction": 0.02, "min_lr_fraction": 0.01},
        "train": base["train"] | budget | {"eval_every": 0},
        "checkpoint": {"load": str(start), "every": 200, "keep_last": 1},
    }


def steps_of(config: dict[str, Any]) -> int:
    """Those of a run whose budget may be in tokens or epochs."""
    from megaponder.config.load import from_mapping
    from megaponder.config.resolve import resolve
    from megaponder.data.check import check_data, fill_from_data

    cfg = resolve(from_mapping(config))
    steps = fill_from_data(cfg, check_data(cfg)).train.steps
    assert steps is not None
    return steps


def job(name: str, config: dict[str, Any], text: texts.Corpus, out: Path, command: str) -> queue.Job:
    """A run that `benchmarks.study.run` trains; it is measured afterwards."""
    run = Path(config["run"])
    task = {"row": {"name": name}, "corpus": asdict(text), "config": config, "out": str(out), "command": command}
    queue.write(run / "row.json", task | {"evaluate": False})
    tokens = steps_of(config) * config["train"]["global_batch"] * config["data"]["sequence_length"]
    return queue.Job(name, run / "row.json", run / "row.log", flops_per_token(config) * tokens)


def measure(run: Path, text: texts.Corpus, paths: dict[str, str]) -> dict[str, Any]:
    """Held-out losses of the domain, of all other text and of the answers, and the share of questions that are
    answered word for word."""
    from megaponder.inference import heldout
    from megaponder.inference.generate import generate

    cfg, state = heldout.read_model(run)
    kinds = {kind: text.path(f"heldout-{kind}") for kind in text.heldout if kind != "all"}
    scores = heldout.score_all(cfg, state, kinds | {"answers": paths["heldout"]}, heldout.Reading(32, limit=TARGETS))
    general = heldout.together([score for kind, score in scores.items() if kind not in (DOMAIN, "answers")])
    records = [json.loads(line) for line in Path(f"{paths['heldout']}.jsonl").read_text().splitlines()]
    new = min(64, cfg.data.sequence_length // 2)
    some = records[:: max(1, len(records) // PROMPTS)][:PROMPTS]
    asked = [(p, r["output"].strip()) for r in some if (p := prompt(r, text, cfg.data.sequence_length - new))]
    found = generate(run, [p for p, _ in asked], max_new_tokens=new, temperature=0.0) if asked else []
    right = sum(g.text.strip() == want for g, (_, want) in zip(found, asked, strict=True))
    return {
        "domain": scores[DOMAIN].loss, "general": general.loss, "answers": scores["answers"].loss,
        "targets": scores["answers"].targets, "right": right, "asked": len(asked),
    }  # fmt: skip


def likeness(base: Path, run: Path) -> float:
    """AWM (official) between two models: how far attention has moved (docs/lineage.md)."""
    from megaponder.lineage import awm, weights

    a, b = weights.load(base), weights.load(run)
    return awm.compare(a, b, weights.shared(a, b)).score


def prompt(record: dict[str, str], text: texts.Corpus, room: int) -> str | None:
    """The question in its template; None if it has more tokens than `room`."""
    from megaponder.data.conversations import conversation
    from megaponder.data.template import find_template
    from megaponder.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(text.path("tokenizer.json"))
    asked = find_template("alpaca", tokenizer).prompt(conversation(record).messages[:-1])
    return asked if len(tokenizer.encode_batch([asked])[0]) <= room else None


def report(size: str, found: dict[str, dict[str, Any]], command: str, origin: str) -> str:
    """The table, in Markdown, in the order of the stages."""
    base = found["base"]
    lines = [
        f"# A domain and its questions, {size}",
        "",
        f"`{command}`: {origin}.",
        "",
        f"Held-out loss of the domain ({DOMAIN}), of all other kinds and of {base['targets']:,} tokens of answers; in "
        f"brackets the change from the base. Right: of {base['asked']} held-out questions, those that are answered "
        "word for word. AWM to base: whether attention is still the base's (1: the same; docs/lineage.md).",
        "",
        "| stage | goes on from | trained on | tokens | domain | general | answers | right | AWM to base |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in found.items():
        start, blend = ("", "general") if name == "base" else (STAGES[name].start, words(STAGES[name].blend))
        kinds = ("domain", "general", "answers")
        near = "not measured" if r.get("awm") is None else f"{r['awm']:.4f}"
        changes = [f"{r[k]:.4f}" + ("" if name == "base" else f" ({r[k] - base[k]:+.3f})") for k in kinds]
        lines.append(
            f"| {name} | {start} | {blend} | {r['tokens']:,} | {' | '.join(changes)} | {r['right']} | {near} |"
        )
    return "\n".join(lines) + "\n"


def words(blend: Sequence[float | str]) -> str:
    """Shares in percent."""
    pairs = list(zip(blend[::2], blend[1::2], strict=True))
    return ", ".join(str(name) if len(pairs) == 1 else f"{float(weight):.0%} {name}" for weight, name in pairs)


def figure(found: dict[str, dict[str, Any]], path: Path) -> None:
    """The three losses after each stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 3, figsize=(10, 3.2))
    for axis, kind in zip(axes, ("domain", "general", "answers"), strict=True):
        values = [r[kind] for r in found.values()]
        axis.bar(list(found), values, color=["0.6", "C0", "C0", "C1", "C1", "C1"][: len(values)])
        axis.set_title(f"held-out loss: {kind}", fontsize=9)
        axis.tick_params(axis="x", labelrotation=45, labelsize=7)
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)


@script
def main(argv: list[str] | None = None) -> None:
    import torch

    from benchmarks.report import origin

    options = parser("domain", __doc__)
    options.add_argument("--corpus", type=Path, metavar="FOLDER", required=True, help="the text")
    options.add_argument("--bytes", type=number(1.0), metavar="N", help="train on the first N bytes of all sources")
    options.add_argument("--size", choices=list(SIZES), default="6x256", help="backbone; default: 6x256")
    options.add_argument("--tokens", type=number(1), metavar="N", help="of the base; default: a quarter of the size's")
    options.add_argument("--parallel", type=number(1), default=3, metavar="N", help="runs at a time; default: 3")
    options.add_argument("--minutes", type=number(0.1), metavar="M", help="time that there is; default: no limit")
    options.add_argument("--work", type=folder, default=Path("runs/domain"), help="runs; default: %(default)s")
    options.add_argument("--output", type=folder, default=RESULTS, help="results; default: benchmarks/results")
    args = options.parse_args(argv)
    begin, cuda, size = time.monotonic(), torch.cuda.is_available(), SIZES[args.size]
    command = typed("domain", argv)
    text = texts.ready(args.corpus, args.bytes, size.vocab - 1, args.work)
    paths = ready(args.corpus, args.bytes, text)
    kind = next(row.kind for row in rows(args.size) if row.kind.name == "vanilla")
    row = Row(kind, args.size, SEEDS[0], 1.0, args.tokens or size.tokens // 4)
    base = row.config(text, str(args.work / f"{args.size}.base"), cuda)
    base["data"] |= {"train": [paths["general"]], "document_attention": True}
    place = args.output / "domain"
    files = {name: place / f"{args.size}.{name}.json" for name in ("base", *STAGES)}
    runs = {name: args.work / f"{args.size}.{name}" for name in files}

    def run(*names: str) -> None:
        """Those that are not done, side by side; then they are measured.  A start of later stages is trained again if
        its run is gone."""
        waiting = []
        for name in names:
            begins = name in {stage.start for stage in STAGES.values()}
            if files[name].is_file() and (not begins or (runs[name] / "checkpoints").is_dir()):
                say(f"{name}: done before.")
                continue
            start = runs[STAGES[name].start] if name in STAGES else runs["base"]
            config = going_on(base, name, runs[name], start, paths) if name in STAGES else base
            waiting.append(job(name, config, text, runs[name] / "trained.json", command))
        minutes = None if args.minutes is None else args.minutes - (time.monotonic() - begin) / 60
        rate = queue.RATES["cuda" if cuda else "cpu"]
        done = queue.run(waiting, min(args.parallel, max(1, len(waiting))), minutes, rate, say)
        for name in done:
            trained = json.loads((runs[name] / "trained.json").read_text())
            told = {"name": name, "tokens": trained["curve"][-1]["tokens"]} | measure(runs[name], text, paths)
            told["awm"] = likeness(runs["base"], runs[name])
            queue.write(files[name], told | {"command": command, "corpus": asdict(text)})
        found = {name: json.loads(path.read_text()) for name, path in files.items() if path.is_file()}
        if found:
            told = report(args.size, found, found["base"]["command"], origin())
            kept = ("name", "tokens", "domain", "general", "answers", "right", "awm")
            write(args.output, f"domain-{args.size}", [{k: r.get(k) for k in kept} for r in found.values()], told)
            figure(found, args.output / f"domain-{args.size}.png")
            say(told)
        if len(done) < len(waiting):
            raise UserError(f"{len(waiting) - len(done)} of {len(waiting)} runs remain; the same command goes on.")

    run("base")
    run("cpt", "cpt-mixed", "sft-from-base")
    run("sft", "sft-mixed")


if __name__ == "__main__":
    sys.exit(main())
