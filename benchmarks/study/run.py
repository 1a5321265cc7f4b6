"""One row, in a process of its own: train (or go on), evaluate, write its JSON.

python -m benchmarks.study.run ROW.json     (the queue writes that file and starts this)

`evaluate` in that file names the module that evaluates, if not the study's; with false nothing does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from megaponder.monitor import jsonl

STOPPED = 75
"""The row was asked to stop; its checkpoint waits for the next start."""
QUEUE = "MEGAPONDER_STUDY_QUEUE"
"""In the environment of a row, the process id of its queue."""
LOOK = 1.0
"""Seconds between looks at whether the queue is there."""
SAVE, END = signal.SIGUSR1, signal.SIGTERM
"""What a row is sent: a training shall save and stop, or all shall."""
CURVE = ("needed_flops", "executed_flops", "training_seconds", "ponder_valid_mean_depth")


def main(path: Path) -> int:
    """Exit code: 0 done, STOPPED, or that of a failed training."""
    task = json.loads(path.read_text())
    begin = time.time()
    run = Path(task["config"]["run"])
    run.mkdir(parents=True, exist_ok=True)
    (run / "study.yaml").write_text(json.dumps(task["config"]))  # which is YAML, too
    with open(run / "train.log", "ab") as log:
        train = start(run, log)
        if queue := os.environ.get(QUEUE):
            threading.Thread(target=_end_with, args=(int(queue),), daemon=True).start()
        how = task.get("evaluate", "benchmarks.study.evaluation")
        if how:
            evaluation = importlib.import_module(how)
            evaluation.prepare()  # meanwhile
        code = train.wait()
    if code in (143, -signal.SIGTERM):  # the second before it listens, with nothing to save
        return STOPPED
    if code:
        return code
    found = evaluation.evaluate(run, task) if how else {}
    result = task["row"] | summary(run, task) | found | {"wall_seconds": time.time() - begin}
    out = Path(task["out"])
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(out)
    return 0


def _end_with(queue: int) -> None:
    """A row whose queue was killed ends as if it had been asked to, for the next one starts it again."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(queue, 0)  # whether it is there
            time.sleep(LOOK)
    os.kill(os.getpid(), END)


def start(run: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """The training, which saves and ends at either signal; `END` ends the evaluation, too."""
    train = subprocess.Popen(
        [sys.executable, "-m", "megaponder", "train", str(run / "study.yaml")], stdout=log, stderr=log
    )

    def stop(number: int, _: object) -> None:
        if train.poll() is None:
            train.send_signal(signal.SIGTERM)
        elif number == END:
            sys.exit(STOPPED)

    for number in (SAVE, END):
        signal.signal(number, stop)
    return train


def summary(run: Path, task: dict[str, Any]) -> dict[str, Any]:
    """What the row's metrics and its evaluation tell."""
    from benchmarks.report import origin

    rows = jsonl.read(run / jsonl.NAME)
    looks = [r for r in rows if "validation_loss" in r]
    curve = [
        {"step": r["step"], "tokens": r["tokens"], "loss": r["validation_loss"], **{k: r[k] for k in CURVE if k in r}}
        for r in looks
    ]
    last = looks[-1]
    return {
        "origin": origin(),
        "command": task["command"],
        "corpus": task["corpus"],
        "epochs": last["tokens"] / task["corpus"]["train_tokens"],
        "config": task["config"],
        "needed_flops": last.get("needed_flops"),
        "executed_flops": last.get("executed_flops"),
        "training_seconds": last.get("training_seconds"),
        "depth_in_training": [
            {"step": r["step"], "depth": r["ponder_mean_depth"]} for r in rows if "ponder_mean_depth" in r
        ],
        "curve": curve,
    }


def task(row: Any, corpus: Any, run: Path, out: Path, cuda: bool, command: str) -> dict[str, Any]:
    """What `main` reads."""
    return {
        "row": {
            "name": row.name, "kind": row.kind.name, "method": row.kind.method, "size": row.size, "seed": row.seed,
            "lr": row.lr, "target": row.kind.target, "family": row.kind.family, "tokens": row.tokens,
        },
        "corpus": asdict(corpus),
        "config": row.config(corpus, str(run), cuda),
        "out": str(out),
        "command": command,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
