"""A rank is killed with SIGKILL, and the run goes on in another layout: is its loss that of a run that never stopped?

    python -m benchmarks.interrupted configs/pythia-1.4b-ponderlm-300b.yaml --corpus CORPUS --processes 8 \\
        --layouts pipeline=2 tensor=2,pipeline=2 --train.global_batch 64
    python -m benchmarks.interrupted configs/tiny-loop.yaml --corpus CORPUS --bytes 1e6 --processes 2 \\
        --layouts pipeline=2 tensor=2 --steps 40 --kill 25 --every 10 \\
        --model.vocab_size 8192 --train.micro_batch 4       (two CPU cores)

Three trainings of CONFIG by launch/torchrun.sh: one in the first layout from begin to end; one in the first layout
whose last rank is killed after step --kill; the same command in the second layout, which goes on from the newest
checkpoint.  The runs' metrics are then laid over each other.  CORPUS is a folder as for `benchmarks.study`; its text
gets 8,192 ids.  Further words change CONFIG, as in `megaponder train`.  The results are interrupted-NAME.json, .md
and .png.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import add_output, folder, number, parser, script, typed, write
from benchmarks.study import corpus as texts
from megaponder.errors import UserError
from megaponder.monitor import jsonl

say = partial(print, flush=True)
ROOT = Path(__file__).parents[1]
VOCABULARY = 8191
"""Of the study's tokenizer, without the end of a document."""
ENDS_WITHIN = 900
"""Seconds that the ranks which are left have after the kill."""
POLL = 0.2
"""Seconds between two looks at a run's metrics."""


def parallel(layout: str) -> list[str]:
    """`tensor=2,pipeline=2` as words of the command line; UserError for anything else."""
    words = []
    for part in layout.split(","):
        name, found, value = part.partition("=")
        if not (found and name and value):
            raise UserError(f"--layouts {layout}: a layout is written as tensor=2,pipeline=2.")
        words += [f"--parallel.{name}", value]
    return words


def training(config: Path, run: Path, world: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """`megaponder train` on `world` processes of this machine; its output is appended to RUN.log."""
    run.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"NPROC": str(world), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment.setdefault("LAUNCHER", f"{sys.executable} -m torch.distributed.run")
    command = ["bash", str(ROOT / "launch" / "torchrun.sh"), str(config), "--run", str(run), *words]
    with open(f"{run}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def finished(job: subprocess.Popen[bytes], run: Path) -> float:
    """Seconds until a training has ended well; UserError with the end of its log if it ends otherwise."""
    begin = time.monotonic()
    if job.wait():
        said = [line for line in Path(f"{run}.log").read_text().splitlines() if "error: " in line]
        raise UserError(
            f"{run} ended with exit code {job.returncode}; {run}.log: {said[0] if said else 'no error line'}"
        )
    return time.monotonic() - begin


def rows(run: Path, name: str = jsonl.NAME) -> dict[int, dict[str, Any]]:
    """Rows of a run by step."""
    return {row["step"]: row for row in jsonl.read(run / name, ("step",))}


def kill_last_rank(job: subprocess.Popen[bytes], run: Path, world: int, step: int) -> dict[str, Any]:
    """SIGKILL to the process of rank `world` - 1 once the metrics have `step`; what was seen of the job's end."""
    while max(rows(run), default=0) < step:
        if job.poll() is not None:
            finished(job, run)
            raise UserError(f"{run} had ended before step {step}; use a smaller --kill.")
        time.sleep(POLL)
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            if process.environ().get("RANK") == str(world - 1):
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue  # it has ended meanwhile
    begin = time.monotonic()
    try:
        code = job.wait(ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise UserError(
            f"{run}: {ENDS_WITHIN} s after the kill the other ranks had not ended; see {run}.log."
        ) from None
    return {"reached": max(rows(run)), "seconds_to_the_end": time.monotonic() - begin, "exit_code": code}


def summary(want: dict[int, dict[str, Any]], got: dict[int, dict[str, Any]], resumed: int) -> dict[str, Any]:
    """Both series of losses, and how far they lie apart before and after step `resumed`, relative to the first;
    UserError unless both have the same steps."""
    if list(want) != list(got):
        raise UserError(
            f"the runs have different steps: {len(want)} up to {max(want)}, and {len(got)} up to {max(got)}."
        )
    apart = {step: abs(got[step]["loss"] - row["loss"]) / abs(row["loss"]) for step, row in want.items()}
    parts = {
        "before": [d for s, d in apart.items() if s <= resumed],
        "after": [d for s, d in apart.items() if s > resumed],
    }
    return {
        "steps": list(want),
        "loss": {
            "whole": [row["loss"] for row in want.values()],
            "interrupted": [row["loss"] for row in got.values()],
        },
        "apart": list(apart.values()),
        "largest": {name: max(part, default=0.0) for name, part in parts.items()},
        "mean": {name: sum(part) / max(1, len(part)) for name, part in parts.items()},
        "validation": [
            (s, row["validation_loss"], got[s].get("validation_loss"))
            for s, row in want.items()
            if "validation_loss" in row
        ],
    }


def report(found: dict[str, Any], origin: str) -> str:
    """The table, in Markdown."""
    first, second = found["layouts"]
    resumed, last = found["resumed"], found["steps"][-1]
    lines = [
        f"# A rank is killed, the run goes on in another layout: {found['name']}",
        "",
        f"`{found['command']}`: {origin}.",
        "",
        f"{found['processes']} processes. The last rank got SIGKILL after step {found['reached']}; the job had ended "
        f"{found['seconds_to_the_end']:.1f} s later with exit code {found['exit_code']}. The same command with "
        f"{second} went on from step {resumed}, so {found['reached'] - resumed} steps were done again; their first was "
        f"done {found['seconds_to_go_on']:.1f} s after its start. Differences are those of the loss from the run that "
        "never stopped, relative to it.",
        "",
        "| steps | layout | largest difference | mean |",
        "|---|---|---|---|",
    ]
    for name, steps, layout in (("before", f"1 to {resumed}", first), ("after", f"{resumed + 1} to {last}", second)):
        lines.append(f"| {steps} | {layout} | {found['largest'][name]:.1e} | {found['mean'][name]:.1e} |")
    lines += ["", "| step | held-out loss, never stopped | interrupted |", "|---|---|---|"]
    lines += [f"| {step} | {a:.6f} | {'missing' if b is None else f'{b:.6f}'} |" for step, a, b in found["validation"]]
    return "\n".join(lines) + "\n"


def figure(found: dict[str, Any], path: Path) -> None:
    """Both losses over steps, and their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, (losses, apart) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=[2, 1])
    losses.plot(
        found["steps"], found["loss"]["whole"], color="0.6", linewidth=3, label=f"never stopped ({found['layouts'][0]})"
    )
    losses.plot(
        found["steps"],
        found["loss"]["interrupted"],
        color="#d55e00",
        linewidth=1,
        label=f"killed, then {found['layouts'][1]}",
    )
    apart.plot(found["steps"], found["apart"], color="#0072b2", linewidth=1)
    apart.set_yscale("symlog", linthresh=1e-8)
    for axis in (losses, apart):
        axis.axvspan(found["resumed"], found["reached"], color="#d55e00", alpha=0.15, label="done again")
    losses.set_ylabel("training loss")
    losses.legend(fontsize=8)
    apart.set_ylabel("relative difference")
    apart.set_xlabel("step")
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)


@script
def main(argv: list[str] | None = None) -> None:
    from benchmarks.report import origin

    options = parser("interrupted", __doc__)
    options.add_argument("config", type=Path, metavar="CONFIG", help="the run's configuration")
    options.add_argument("--corpus", type=Path, metavar="FOLDER", required=True, help="the text")
    options.add_argument("--bytes", type=number(1.0), metavar="N", help="train on the first N bytes of all sources")
    options.add_argument("--processes", type=number(2), default=2, metavar="N", help="ranks; default: 2")
    options.add_argument("--layouts", nargs=2, default=["pipeline=2", "tensor=2"], metavar="LAYOUT",
                         help="before and after the kill; default: pipeline=2 tensor=2")  # fmt: skip
    options.add_argument("--steps", type=number(2), default=200, metavar="N", help="default: 200")
    options.add_argument("--kill", type=number(1), default=110, metavar="N", help="after this step; default: 110")
    options.add_argument("--every", type=number(1), default=50, metavar="N",
                         help="steps between checkpoints, and between evaluations; default: 50")  # fmt: skip
    options.add_argument("--name", help="of the results; default: that of the configuration")
    options.add_argument("--work", type=folder, default=Path("runs/interrupted"), help="runs; default: %(default)s")
    add_output(options)
    args, changes = options.parse_known_args(argv)
    if args.kill >= args.steps or args.every > args.kill:
        rule = "the kill comes after a checkpoint and before the last step"
        raise UserError(
            f"--every {args.every} --kill {args.kill} --steps {args.steps}: {rule}; use --every N <= --kill < --steps."
        )
    layouts = [parallel(layout) for layout in args.layouts]
    if not args.config.is_file():
        raise UserError(f"{args.config}: no such file; name a configuration, such as configs/tiny-loop.yaml.")
    name = args.name or args.config.stem
    text = texts.ready(args.corpus, args.bytes, VOCABULARY, args.work)
    words = [
        "--data.train", text.path("train"), "--data.valid", text.path("heldout"),
        "--data.tokenizer", text.path("tokenizer.json"), "--train.tokens", "null", "--train.steps", str(args.steps),
        "--train.eval_every", str(args.every), "--train.eval_batches", "2", "--checkpoint.every", str(args.every),
        "--checkpoint.keep_last", "2", "--logging.every", "1", "--logging.tensorboard", "false", *changes,
    ]  # fmt: skip
    whole, stopped = args.work / f"{name}.whole", args.work / f"{name}.interrupted"
    for run in (whole, stopped):
        shutil.rmtree(run, ignore_errors=True)
        Path(f"{run}.log").unlink(missing_ok=True)
    jobs: list[subprocess.Popen[bytes]] = []

    def start(run: Path, layout: list[str]) -> subprocess.Popen[bytes]:
        jobs.append(training(args.config, run, args.processes, [*words, *layout]))
        return jobs[-1]

    try:
        say(f"{whole}: {args.layouts[0]}, never stopped ...")
        seconds = finished(start(whole, layouts[0]), whole)
        say(
            f"  {seconds:.0f} s\n{stopped}: {args.layouts[0]}, until the last rank is killed after step {args.kill} ..."
        )
        found = kill_last_rank(start(stopped, layouts[0]), stopped, args.processes, args.kill)
        say(f"  the job ended {found['seconds_to_the_end']:.1f} s later\n{stopped}: {args.layouts[1]} ...")
        finished(start(stopped, layouts[1]), stopped)
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)
                job.wait()
    after = rows(stopped)
    resumed = found["reached"] - len(rows(stopped, jsonl.SUPERSEDED))
    command = typed("interrupted", argv)
    found |= summary(rows(whole), after, resumed) | {
        "name": name, "command": command, "layouts": args.layouts, "processes": args.processes, "resumed": resumed,
        "seconds_to_go_on": after[resumed + 1]["start_seconds"], "corpus": text.files,
    }  # fmt: skip
    told = report(found, origin())
    write(args.output, f"interrupted-{name}", found, told)
    figure(found, args.output / f"interrupted-{name}.png")
    say(told)


if __name__ == "__main__":
    sys.exit(main())
