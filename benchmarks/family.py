"""Does `megaponder lineage tree` find a real family?  Its members are made by the commands that make them for users.

    python -m benchmarks.family --data PREFIX --domain PREFIX --instructions PREFIX --tokenizer FILE

Two bases that differ in their seeds; of the first one: a continued pretraining on --domain and its SFT on
--instructions (`megaponder prepare --template alpaca`), two experts whose MLPs alone were trained, their upcycled
mixture before and after a training, a dense model merged out of it, a gentle start and the export of the SFT.  Then the
tree of all, with what they record and without, all scores with the base, and the tree once more with a copy whose
record is false.  What is in --work is not made again.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import add_output, folder, number, parser, script, typed, write
from benchmarks.report import origin
from megaponder.data.indexed import read_index
from megaponder.errors import UserError

say = partial(print, flush=True)
PARENTS = {
    "cpt": "base", "sft": "cpt", "expert-domain": "base", "expert-data": "base", "split": "base", "mixture": "split",
    "merged": "mixture", "gentle": "base", "export": "sft",
}  # fmt: skip
"""The truth; `stranger` has no relatives."""
WAVES = (
    ("base", "stranger"), ("cpt", "expert-domain", "expert-data", "gentle"), ("sft", "split"), ("mixture", "export"),
    ("merged",),
)  # fmt: skip
"""What is made side by side."""
ORDER = ("export", "merged", "mixture", "gentle", "sft", "stranger", "split", "cpt", "expert-data", "expert-domain")
"""As they are named to the command, the base last: a tree must not live on a good order."""
TOKENS = 512
"""At which HuRef compares."""
FALSE = "false"
"""A copy of the continued pretraining that says it came from the stranger."""


def trainings(args: Any) -> dict[str, dict[str, Any]]:
    """Configurations by name."""
    sizes = {
        "family": "llama", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 160,
        "vocab_size": args.vocab, "max_positions": 256, "embedding_scale": "none",
    }  # fmt: skip
    shared = {"sequence_length": 256, "tokenizer": args.tokenizer, "split": "96,4,0"}

    def made(share: float, text: list[Any], lr: float, start: str | None, **more: Any) -> dict[str, Any]:
        steps = max(2, round(share * args.steps))
        train = {"steps": steps, "global_batch": 4, "micro_batch": 4, "eval_every": 0} | more.pop("train", {})
        load = {} if start is None else {"load": str(args.work / start)}
        return {
            "model": sizes, "ponder": {"method": "vanilla"}, "data": shared | {"train": text} | more.pop("data", {}),
            "optimizer": {"lr": lr}, "schedule": {"warmup_fraction": 0.1}, "train": train,
            "checkpoint": load | {"every": 0, "keep_last": 1}, "logging": {"every": 10}, **more,
        }  # fmt: skip

    general, domain, answers = [args.data], [args.domain], [args.instructions]
    mlp, gentle = {"only": ["mlp"]}, {"steps": 2, "gentle_start": True}
    return {
        "base": made(1.0, general, 3e-3, None, train={"seed": 1}),
        "stranger": made(1.0, general, 3e-3, None, train={"seed": 2}),
        "cpt": made(0.3, domain, 1e-3, "base"),
        "sft": made(0.15, answers, 1e-3, "cpt", data={"loss_mask": "answers"}),
        "expert-domain": made(0.2, domain, 1e-3, "base", train=mlp),
        "expert-data": made(0.2, general, 1e-3, "base", train=mlp),
        "mixture": made(0.2, [0.5, *general, 0.5, *domain], 1e-3, "split"),
        "gentle": made(0.2, general, 1e-3, "base", ponder={"method": "ponderlm", "options": gentle}),
    }


def commands(args: Any) -> dict[str, list[str]]:
    """Words of `megaponder` that make each model."""
    at = {name: str(args.work / name) for name in ("base", "stranger", *PARENTS)}
    found = {}
    for name, config in trainings(args).items():
        file = args.work / f"{name}.json"
        if name == "mixture":  # the split says what model it is
            config.pop("model")
            file = Path(at["split"]) / "config.yaml"
            fields = {f"--{s}.{key}": value for s in ("data", "train") for key, value in config[s].items()}
            words = [w for flag, v in fields.items() for w in (flag, v if isinstance(v, str) else json.dumps(v))]
            words += ["--run", at[name], "--checkpoint.load", at["split"], "--optimizer.lr", "1e-3"]
        else:
            args.work.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"run": at[name]} | config, indent=1))
            words = []
        if name == "mixture":
            experts = [f"{kind}={at[f'expert-{kind}']}" for kind in ("domain", "data")]
            found["split"] = ["upcycle", "split", "--base", at["base"], "--experts", *experts]
            found["split"] += ["--slices", "2", "--out", at["split"]]
        found[name] = ["train", str(file), *words]
    found["merged"] = ["upcycle", "merge", at["mixture"], "--out", at["merged"]]
    found["export"] = ["export", at["sft"], at["export"]]
    return found


def make(args: Any) -> None:
    """All models; UserError if a command fails."""
    words = commands(args)

    def one(name: str) -> None:
        there, begin = args.work / name, time.monotonic()
        if (there / "config.json").is_file() or any(there.glob("checkpoints/step_*")):
            return say(f"{name}: made before.")
        with (args.work / f"{name}.log").open("w") as log:
            done = subprocess.run([sys.executable, "-m", "megaponder", *words[name]], stdout=log, stderr=log)
        if done.returncode:
            raise UserError(f"{shlex.join(['megaponder', *words[name]])}: exit code {done.returncode}; see {log.name}.")
        say(f"{name}: {time.monotonic() - begin:.0f} s")

    with ThreadPoolExecutor(args.parallel) as pool:
        for wave in WAVES:
            list(pool.map(one, wave))
    liar = args.work / FALSE
    if not liar.exists():
        from megaponder.checkpoint.origin import record

        shutil.copytree(args.work / "cpt", liar)
        record(liar, "load", args.work / "stranger")


def scores(a: Any, b: Any) -> dict[str, float]:
    """AWM in both modes and HuRef, whose official mode refuses grouped keys."""
    from megaponder.lineage import awm, huref, weights

    ids = weights.shared(a, b)
    found = {f"AWM {mode}": awm.compare(a, b, ids, mode).score for mode in awm.MODES}
    chosen = huref.choose(a, b, TOKENS, None, False)
    one, other = (huref.fingerprint(m, rows, "robust") for m, rows in zip((a, b), chosen, strict=True))
    return found | {"HuRef robust": huref.compare(one, other).score}


def parents(found: Any) -> dict[str, str]:
    """Of each child its parent in a tree."""
    names = [Path(node.name).name for node in found.nodes]
    return {names[e.child]: names[e.parent] for e in found.edges}


def branches(found: Any, edges: dict[str, str]) -> set[frozenset[frozenset[str]]]:
    """Edges without their direction, between groups of models that have the same queries and keys."""
    from megaponder.lineage import tree

    names = [Path(node.name).name for node in found.nodes]
    group = {a: frozenset(b for b, score in zip(names, row, strict=True) if tree.angle(score) <= tree.SAME)
             for a, row in zip(names, found.scores, strict=True)}  # fmt: skip
    return {frozenset((group[a], group[b])) for a, b in edges.items() if group[a] != group[b]}


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("family", __doc__)
    for name in ("data", "domain", "instructions"):
        options.add_argument(f"--{name}", required=True, metavar="PREFIX", help="a dataset of megaponder prepare")
    options.add_argument("--tokenizer", required=True, metavar="FILE", help="of all three datasets")
    options.add_argument("--vocab", type=number(8), default=2048, help="its tokens; default: 2048")
    options.add_argument("--steps", type=number(10), default=200, help="of a base; default: 200")
    options.add_argument("--parallel", type=number(1), default=2, metavar="N", help="runs at a time; default: 2")
    options.add_argument("--work", type=folder, default=Path("runs/family"), help="models; default: %(default)s")
    add_output(options)
    args = options.parse_args(argv)
    for name in ("data", "domain", "instructions"):
        read_index(getattr(args, name))
    make(args)
    from megaponder.lineage import picture, tree

    nodes = [tree.node(args.work / name) for name in (*ORDER, "base")]
    nodes = [replace(n, model=replace(n.model, name=Path(n.name).name)) for n in nodes]
    told, silent = tree.grow(nodes), tree.grow([replace(n, run=None, origin=None, upcycled=None) for n in nodes])
    liar = tree.node(args.work / FALSE)
    lied = tree.grow([*nodes, replace(liar, model=replace(liar.model, name=FALSE))])
    rows = [{"name": node.name, "scores": scores(nodes[-1].model, node.model)} for node in nodes[:-1]]
    said, guessed = parents(told), parents(silent)
    checks = {told.nodes[c.child].name: c.kind for c in told.checks}
    measures = list(rows[-1]["scores"])
    lines = [f"| model | {' | '.join(measures)} | recorded | tree, with records | without | record |",
             "|---" * (5 + len(measures)) + "|"]  # fmt: skip
    for row in rows:
        name = row["name"]
        cells = [f"{score:.4f}" for score in row["scores"].values()]
        cells += [PARENTS.get(name, ""), said.get(name, ""), guessed.get(name, ""), checks.get(name, "")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    right = [sum(tree_.get(child) == parent for child, parent in PARENTS.items()) for tree_ in (said, guessed)]
    truth = branches(told, PARENTS)
    apart = [len(truth & branches(told, edges)) for edges in (said, guessed)]
    command = typed("family", argv)
    verdict = next(c for c in lied.checks if lied.nodes[c.child].name == FALSE)
    report = [
        "# The tree of a real family", "",
        f"`{command}`: {origin()}. Llama of 4 layers of 64 channels, {args.steps} steps of 4 x 256 tokens for a base. "
        "Scores with the base; parents in the tree.", "", *lines, "",
        f"Families: {len(told.families)} with records, {len(silent.families)} without (true: 2). Of {len(PARENTS)} "
        f"true edges the tree has {right[0]} with records and {right[1]} without; of the {len(truth)} branches between "
        f"models that differ in queries and keys, whatever their direction, {apart[0]} and {apart[1]}.", "",
        "With records:", "", "```", *tree.lines(told), "```", "", "Without:", "", "```", *tree.lines(silent), "```", "",
        f"A copy of cpt whose record names the stranger: `{verdict.kind}: {verdict.words}`", "",
    ]  # fmt: skip
    results = {"command": command, "rows": rows, "tree": tree.plain(told), "without": tree.plain(silent)}
    write(args.output, "family", results, "\n".join(report))
    picture.write(args.output / "family", told)
    say("\n".join(report))


if __name__ == "__main__":
    raise SystemExit(main())
