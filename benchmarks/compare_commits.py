"""Whether two commits compute the same: tiny runs of every method, loss by loss and gradient norm by gradient norm.

    python -m benchmarks.compare_commits main                  the working tree against main, 1 to 3 minutes on 2 cores
    python -m benchmarks.compare_commits v0.1 main --all       two commits, more layouts
    python -m benchmarks.compare_commits ../old . --gpu methods        speed on a GPU: two folders, no git needed
    python -m benchmarks.compare_commits . . --python .newest/bin/python      one tree with two sets of packages

A and B are commits of this repository or folders that hold a tree; B is the working tree unless given, and `--python`
names the interpreter that runs it, such as one whose packages are others.  Runs in FP32
and BF16, on one process and on two, a resume and a resume at another layout, on the CPU with one thread: numbers are
compared as they are, and the exit code is 1, with a table, where any differs by more than `--tolerance`.

With `--gpu TABLE`, each tree's own `benchmarks.training TABLE` runs, in turns, and the ratio of tokens/s of each row is
printed; the exit code is 1 where one is below `--least`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.command import number, parser, script
from megaponder.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parents[1]
CONFIG: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "ffn_size": 56, "vocab_multiple": 16},
    "data": {"train": ["data"], "tokenizer": "bytes", "sequence_length": 24, "split": "8,2,0"},
    "optimizer": {"lr": 0.01},
    "train": {"steps": 3, "global_batch": 4, "micro_batch": 1, "eval_every": 3, "eval_batches": 1},
    "checkpoint": {"every": 2},
    "logging": {"every": 1, "tensorboard": False},
}
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vanilla": ("llama", "vanilla", {}),
    "loop": ("llama", "loop", {"extra_passes": 2}),
    "pause": ("gpt2", "pause", {"pauses": 2, "pause_token_id": 200}),
    "ponderlm": ("pythia", "ponderlm", {"steps": 2}),
    "ponderlm-topk": ("gpt2", "ponderlm", {"steps": 2, "topk": 5, "multiply_by_steps": True}),
    "ponderlm2": ("llama", "ponderlm2", {"latents": 2, "jacobi": 1}),
    "ponderlm2-drawn": ("pythia", "ponderlm2", {"jacobi_from": 0, "jacobi_to": 2}),
    "ponderlm3": ("llama", "ponderlm3", {"latents": 2, "jacobi": 1, "target": 0.0, "threshold": 0.3}),
    "adaponderlm": ("pythia", "adaponderlm", {"steps": 2, "target": 0.0, "threshold": 0.7}),
    "adaptive_cot": ("llama", "adaptive_cot", {"steps": 2, "target": 0.0, "threshold": 0.3}),
    "pruned_ponderlm": ("pythia", "pruned_ponderlm", {"steps": 2, "depth": 2.3}),
    "confident_ponderlm": ("pythia", "confident_ponderlm", {"steps": 2, "target": 0.0, "threshold": 0.03}),
    "huginn": ("llama", "huginn", {"prelude": 1, "coda": 1, "recurrence": 2, "kept": 1, "draw_to": 3}),
    "retrofit": ("llama", "retrofit", {"prelude": 1, "coda": 1, "recurrence": 2, "kept": 1, "draw": "fixed"}),
    "parcae": ("llama", "parcae", {"prelude": 1, "coda": 1, "recurrence": 2, "kept": 1, "draw_to": 3}),
    "ouro": ("llama", "ouro", {"loops": 2}),
    "nanbeige": ("llama", "nanbeige", {"loops": 2, "middle": 2}),
}
"""Family, method and options."""
BF16 = ["--precision.dtype", "bf16"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["--parallel.tensor", "2", "--parallel.sequence", "true"]),
    "pp2": (2, ["--parallel.pipeline", "2"]),
    "dp2": (2, ["--parallel.distributed_optimizer", "true", "--parallel.overlap_grad_reduce", "true"]),
    "recompute": (1, ["--parallel.recompute", "layer", "--train.micro_batch", "4"]),
    "skip": (1, ["--ponder.skip_halted", "true"]),
}
FEW = {
    "bf16": ("ponderlm", "adaponderlm"),
    "tp2": ("ponderlm", "adaponderlm"),
    "pp2": ("ponderlm2", "adaptive_cot"),
    "dp2": ("loop",),
    "recompute": ("ponderlm",),
    "skip": ("adaponderlm", "adaptive_cot"),
}
"""Methods that run in other than one process and FP32, unless `--all`."""


def cases(everything: bool, part: str = "") -> list[dict[str, Any]]:
    """Every run whose name contains `part`: its name, and world size and words of each command that it takes."""
    found: list[dict[str, Any]] = []

    def add(name: str, method: str, *parts: tuple[int, list[str]]) -> None:
        family, kind, options = METHODS[method]
        words = ["train", "config.json", "--run", name, "--model.family", family, "--ponder.method", kind]
        words += ["--ponder.options", json.dumps(options)]
        found.append({"name": name, "lines": [(world, words + extra) for world, extra in parts]})

    for method in METHODS:
        add(method, method, (1, []))
    for how, few in FEW.items():
        world, extra = LAYOUTS.get(how, (1, BF16))
        skipping = ("adaponderlm", "adaptive_cot", "pruned_ponderlm", "confident_ponderlm")
        for method in (skipping if how == "skip" else METHODS) if everything else few:
            if not (how == "dp2" and "drawn" in method):  # passes that vary exclude overlapped reduction
                add(f"{method}-{how}", method, (world, extra))
    first = ["--train.steps", "2"]
    add("ponderlm-resumed", "ponderlm", (1, first), (1, []))
    add("ponderlm-bf16-resumed", "ponderlm", (1, first + BF16), (1, BF16))
    add("adaponderlm-resumed-at-pp2", "adaponderlm", (1, first), LAYOUTS["pp2"])
    chosen = [case for case in found if part in case["name"]]
    if not chosen:
        names = ", ".join(case["name"] for case in found)
        raise ConfigError("--only", part, "no case contains it", f"the cases are: {names}")
    return chosen


@contextmanager
def tree(name: str) -> Iterator[Path]:
    """The folder of a commit, or the one that is named."""
    if Path(name).is_dir():
        if not (Path(name) / "megaponder").is_dir():
            raise UserError(f"{name}: this folder holds no tree of megaponder; name a commit or the root of a tree.")
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="megaponder-") as folder:
        path = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        try:
            made = subprocess.run([*git, "add", "--detach", str(path), name], capture_output=True, text=True)
            reason = made.stderr.strip().splitlines()[-1] if made.returncode else ""
        except FileNotFoundError:
            reason = "there is no git"
        if reason:
            raise UserError(f"{name} is neither a folder nor a commit that git can check out here ({reason}).")
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], capture_output=True)


def environment(path: Path, *more: Path) -> dict[str, str]:
    """Variables with which Python imports the package of a tree."""
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *map(str, more), *others])}


def train(path: Path, python: str, work: dict[str, Any]) -> dict[str, Any]:
    """Results of the cases of `work` with the package of a tree, in a process of its own."""
    text = " ".join(f"{word} {word[::-1]}" for word in (ROOT / "LICENSE").read_text().split()[:900])
    with tempfile.TemporaryDirectory(prefix="megaponder-") as name:
        here = Path(name)
        shutil.copy(Path(__file__).parent / "one_tree.py", here)
        (here / "config.json").write_text(json.dumps(CONFIG))  # JSON is YAML
        (here / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in text.split(". ")))
        (here / "work.json").write_text(json.dumps(work))
        env = environment(path, here) | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([python, str(here / "one_tree.py"), str(here), str(path)], cwd=path, env=env)
        if done.returncode:
            raise UserError(f"{path}: the runs of this tree could not be started; its lines above say why.")
        return json.loads((here / "results.json").read_text())


def apart(a: Any, b: Any) -> float:
    """How far two values are from each other, relative to the first; inf where they cannot be compared."""
    if a == b or (a != a and b != b):  # nan is nan
        return 0.0
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in (a, b)):
        return math.inf
    return abs(a - b) / abs(a) if a else math.inf


def differences(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[tuple[str, str, Any, Any, float]]:
    """Case, name, both values and their distance, for all that are further apart than the tolerance.

    A case that failed in either is one line, also where it failed in both: nothing was compared then.
    """
    found = []
    for case, ours in a.items():
        theirs = b[case]
        names = ["failed"] if "failed" in ours.keys() | theirs.keys() else list(ours)
        for name in names:
            far = math.inf if name == "failed" else apart(ours[name], theirs.get(name))
            if far > tolerance:
                found.append((case, name, ours.get(name), theirs.get(name), far))
    return found


def report(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> int:
    """Print a table of what differs; the exit code."""
    if new := [case for case, values in a.items() if "there is no such" in values.get("failed", "")]:
        print(f"Not in A: {', '.join(new)}.")  # a method or an option that came later
    a = {case: values for case, values in a.items() if case not in new}
    found = differences(a, b, tolerance)
    count = sum(map(len, a.values()))
    if not found:
        print(f"{len(a)} cases, {count} values: equal" + (f" within {tolerance:g}" if tolerance else "") + ".")
        return 0
    rows = [("case", "value", "A", "B", "relative")]
    for case, name, one, other, far in found:
        rows.append((case, name, _short(one), _short(other), "" if math.isinf(far) else f"{far:.1e}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(f"{len(found)} of {count} values differ, in {len({f[0] for f in found})} of {len(a)} cases.")
    return 1


def _short(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else "-" if value is None else f"{value:.9g}"
    return text if len(text) <= 60 else text[:57] + "..."


def speeds(path: Path, python: str, table: str, part: str, steps: int) -> dict[str, float]:
    """Tokens/s of each row of a table of `benchmarks.training`, measured with the package and script of a tree."""
    with tempfile.TemporaryDirectory(prefix="megaponder-") as output:
        words = ["benchmarks.training", table, "--only", part, "--steps", str(steps), "--output", output]
        subprocess.run([python, "-m", *words], cwd=path, env=environment(path))
        results = Path(output) / f"training-{table}.json"
        rows = json.loads(results.read_text()) if results.is_file() else []
    return {row["name"]: row["tokens_per_second_per_gpu"] for row in rows if "error" not in row}


def compare_speed(
    a: tuple[Path, str], b: tuple[Path, str], table: str, part: str, steps: int, rounds: int, least: float
) -> int:
    """Print B's tokens/s over A's, the best of all rounds of each; 1 if a row is slower than `least` or absent."""
    best: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            for name, rate in speeds(*(a, b)[which], table, part, steps).items():
                best[which][name] = max(rate, best[which].get(name, 0.0))
    if not best[0]:
        raise UserError(f"benchmarks.training {table} measured nothing in {a[0]}; its lines above say why.")
    print(f"\n{'row':56} {'A tokens/s':>12} {'B tokens/s':>12} {'ratio':>7}")
    slow = False
    for name, rate in best[0].items():
        other = best[1].get(name, 0.0)
        slow |= other / rate < least
        print(f"{name:56} {rate:12,.0f} {other:12,.0f} {other / rate:7.3f}{' <' if other / rate < least else ''}")
    return int(slow)


@script
def main(argv: list[str] | None = None) -> int:
    options = parser("compare_commits", __doc__)
    options.add_argument("a", metavar="A", help="commit, or folder with a tree")
    options.add_argument("b", metavar="B", nargs="?", default=str(ROOT), help="the same; default: the working tree")
    options.add_argument("--python", default=sys.executable, metavar="FILE", help="interpreter of B; default: this one")
    options.add_argument("--all", action="store_true", help="every method in every layout; some 10 minutes")
    options.add_argument("--tolerance", type=number(0.0), default=0.0, help="relative; default: 0, the same bits")
    options.add_argument("--jobs", type=number(1), default=1, help="runs at a time of each tree; default: 1")
    options.add_argument("--gpu", metavar="TABLE", help="compare the speed of a table of benchmarks.training instead")
    options.add_argument("--only", default="", metavar="PART", help="cases, or rows, whose name contains this")
    options.add_argument("--steps", type=number(1), default=5, help="for --gpu: timed steps of a row; default: 5")
    options.add_argument("--rounds", type=number(1), default=1, help="for --gpu: runs of each tree; the best counts")
    options.add_argument(
        "--least", type=number(0.0), default=0.98, help="for --gpu: ratio that is enough; default: 0.98"
    )
    args = options.parse_args(argv)
    runs = [] if args.gpu else cases(args.all, args.only)
    work = {
        "jobs": args.jobs,
        "prepare": ["prepare", "text.jsonl", "--tokenizer", "bytes", "--output", "data", "--workers", "1"],
        "cases": runs,
        "generate": [case["name"] for case in runs if case["name"] in METHODS],
        "prompt": ["of the", "--max-tokens", "8", "--temperature", "1", "--device", "cpu"],
    }
    if (python := shutil.which(args.python)) is None:
        raise ConfigError("--python", args.python, "there is no such program", f"this one is {sys.executable}")
    with tree(args.a) as first, tree(args.b) as second:
        a, b = (first, sys.executable), (second, python)
        if args.gpu:
            return compare_speed(a, b, args.gpu, args.only, args.steps, args.rounds, args.least)
        with ThreadPoolExecutor() as pool:
            return report(*pool.map(lambda side: train(*side, work), (a, b)), args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
