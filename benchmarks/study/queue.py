"""Rows side by side on one device, for as long as there is time; a row that is cut off goes on at the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.study.run import END, QUEUE, SAVE, STOPPED
from megaponder.errors import UserError

POLL = 0.5
SAVING = 45.0
"""Seconds before the end of the time at which rows that still run are asked to save and stop."""
START = 60.0
"""Guess of what a row takes besides its steps."""
RATES = {"cuda": 4e14, "cpu": 5e9}
"""Guess of FLOP/s until a row has ended, for a row that runs beside others of its own size: more than all rows of a
device reach together (1.75e14 on an H200), since most are lighter."""
MORE, CONTEXT = 1.35, 1.5e9
"""Memory of a row that shares a GPU, beyond its plan: caches of graphs and allocator (seen: 1.0 to 1.33), and CUDA."""


@dataclass
class Job:
    """A row that is to be run."""

    name: str
    task: Path
    """File that `benchmarks.study.run` reads."""
    log: Path
    flops: float
    """Needed by what is left of its training."""
    memory: float = 0.0
    """Bytes that it takes on a GPU."""
    logged: int = 0
    """Bytes of its training's log before its last start."""


def run_all(jobs: list[Job], parallel: int, begin: float, minutes: float | None, say: Callable[[str], None]) -> None:
    """Run the jobs over all GPUs, or on the CPU; UserError if some remain when `minutes` since `begin` are over."""
    import torch

    gpus = max(1, torch.cuda.device_count())
    left = None if minutes is None else minutes - (time.monotonic() - begin) / 60
    rate = RATES["cuda" if torch.cuda.is_available() else "cpu"] * gpus
    done = run(jobs, min(parallel, max(1, len(jobs))), left, rate, say, gpus)
    if len(done) < len(jobs):
        raise UserError(f"{len(jobs) - len(done)} of {len(jobs)} runs remain; the same command goes on.")


def run(
    jobs: list[Job],
    parallel: int,
    minutes: float | None,
    rate: float,
    say: Callable[[str], None],
    gpus: int = 1,
    room: float = float("inf"),
) -> list[str]:
    """Run the jobs; names of those that have ended.  Those that cannot end in time are not started.

    `rate`: FLOP/s of all rows together, as far as is known; what is seen of the first that end replaces it.
    `room`: bytes of each GPU.  A row waits until one has the memory for it; one that runs alone is not held back.
    """
    begin = time.monotonic()
    end = None if minutes is None else begin + 60 * minutes
    waiting, going, done = list(jobs), {}, []  # type: ignore[var-annotated]
    stopping = False

    def left() -> float:
        return float("inf") if end is None else end - time.monotonic()

    def needs(job: Job) -> float:
        return START + job.flops * parallel / rate

    def ready() -> tuple[Job, int] | None:
        if len(going) >= parallel:
            return None
        return place(
            [j for j in waiting if needs(j) < left()], [(job, gpu) for job, _, gpu in going.values()], gpus, room
        )

    try:
        while waiting or going:
            while (found := ready()) is not None:
                job, gpu = found
                waiting.remove(job)
                going[_start(job, gpu if gpus > 1 else None)] = (job, time.monotonic(), gpu)
                say(f"{job.name}: started; {left():.0f} s are left." if end else f"{job.name}: started.")
            if not going:
                break
            if left() < SAVING and not stopping:
                stopping = True
                for process in going:
                    process.send_signal(SAVE)
            for process in [p for p in going if p.poll() is not None]:
                job, started, _ = going.pop(process)
                seconds = time.monotonic() - started
                if process.returncode == 0:
                    done.append(job.name)
                    if job.flops:  # else it was trained before
                        rate = job.flops * parallel / max(1.0, seconds - START / 2)
                    say(f"{job.name}: done in {seconds:.0f} s.")
                elif process.returncode in (STOPPED, -SAVE, -END):
                    say(f"{job.name}: stopped and saved; the same command goes on with it.")
                else:
                    say(f"{job.name}: failed with exit code {process.returncode}; {_last_words(job)}")
            time.sleep(POLL)
    finally:
        end_all(list(going))  # after an error or Ctrl-C
    for job in waiting:
        say(f"{job.name}: not started; it needs about {needs(job):.0f} s.")
    return done


def end_all(processes: Sequence[subprocess.Popen[bytes]], patience: float = SAVING) -> None:
    """Ask rows to end, those that train after saving.  What has not ended then, or at a second Ctrl-C, is killed."""
    for process in processes:
        process.send_signal(END)
    end = time.monotonic() + patience
    try:
        for process in processes:
            process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def place(waiting: Sequence[Job], going: Sequence[tuple[Job, int]], gpus: int, room: float) -> tuple[Job, int] | None:
    """The first job that some GPU has room for, and of those GPUs the one with the fewest jobs."""
    on = [[job for job, its in going if its == gpu] for gpu in range(gpus)]
    for job in waiting:
        free = [g for g in range(gpus) if not on[g] or sum(j.memory for j in on[g]) + job.memory <= room]
        if free:
            return job, min(free, key=lambda g: len(on[g]))
    return None


def _start(job: Job, gpu: int | None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, QUEUE: str(os.getpid())}
    job.logged = _size(job.log.with_name("train.log"))
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with open(job.log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.study.run", str(job.task)], stdout=log, stderr=log, env=environment,
            start_new_session=True,  # Ctrl-C is for the queue, which tells the rows
        )  # fmt: skip


def _last_words(job: Job) -> str:
    """The end of its logs; of its training's, the last error of this start where it names one."""
    for log, begin in ((job.log.with_name("train.log"), job.logged), (job.log, 0)):
        text = log.read_bytes()[begin:].decode(errors="replace") if log.is_file() else ""
        if lines := text.strip().splitlines():
            if errors := [line for line in lines if line.startswith("error: ")]:
                return f"{log}: {errors[-1]}"
            return f"{log} ends with: {lines[-1]}"
    return f"see {job.log}"


def _size(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


def write(path: Path, task: object) -> None:
    """A task's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(task))
