"""Heartbeats: every rank reports where it is, and a rank that makes no progress finds out which rank it is waiting for.

A thread of each rank writes `<run>/ranks/00003.json` (host, process, step, phase) a few times per `limit`.  When its
own rank has not moved for `limit`, it writes the stacks of its threads to `<run>/stacks/00003.txt`, its last
collectives (`flight_recorder`) beside them, and reads the files of the others: a rank whose file is old is frozen or
dead; otherwise the others wait for the one furthest behind.  The first rank that is alive names it, and again if it is
another one later, or has died since.  It uses files instead of a store, because a store dies or freezes with the rank
that hosts it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megaponder import processes
from megaponder.errors import LOST, LostRank, is_lost_connection
from megaponder.monitor.phases import OUTSIDE, PHASES, Now, PhaseClock
from megaponder.ranks import on_first_rank
from megaponder.training import fault_record, flight_recorder
from megaponder.training.rank_monitor import RankMonitor

MISSED = 3
"""Missed heartbeats after which a rank counts as frozen or dead."""


_live: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def end_left_behind() -> None:
    """End the threads of attempts of this process that were interrupted before they could."""
    for one in list(_live):
        one.end()


class Heartbeat:
    """Reports and watches while in use (a context manager).  All ranks enter it together.

    `limit`: seconds without progress after which the stalled rank is named; `deadline`: seconds after which, if a rank
    is frozen or dead, this one ends too instead of waiting for it.
    """

    def __init__(self, run: Path, clock: PhaseClock, limit: float, deadline: float):
        self.folder, self.stacks, self.record = run / "ranks", run / "stacks", run / "faults.jsonl"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.limit, self.deadline, self.beat = limit, deadline, min(30.0, limit / (2 * MISSED))
        self._clock = clock
        clock.listeners.append(self._entered)
        self._reported: Now | None = None
        self._named: list[Any] | None = None
        """Whom this rank has named in the hang that it reported, if it is the one that does."""
        self._ends = False
        self._monitor = RankMonitor()
        self._end, self._woken = threading.Event(), threading.Event()
        _live.add(self)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def _entered(self, before: Now, now: Now) -> None:
        self._monitor.alive()
        if now.phase != before.phase and {"start", *OUTSIDE} & {before.phase, now.phase}:
            self._woken.set()  # rare phases are written at once, so that the files are not out of date

    def __enter__(self) -> Heartbeat:
        on_first_rank(lambda: shutil.rmtree(self.folder, ignore_errors=True))  # left by an earlier start
        if dist.get_backend() == "nccl":
            self.stacks.mkdir(exist_ok=True)  # NCCL's watchdog makes no folder
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Turns the error of a lost connection into a sentence, and tells the other ranks that this one ends."""
        self._monitor.close()
        self.end()
        self._thread.join()
        if error is None:
            return
        try:
            if is_lost_connection(error):
                step, phase, _ = self._clock.now
                end = time.monotonic() + 2  # a dying process closes its connections shortly before it exits
                while time.monotonic() < end and not any(r["gone"] for r in self._ranks()):
                    time.sleep(0.1)
                lost = f"Rank {self.rank} lost another rank in {phase} of step {step}: {self.blame()}."
                raise LostRank(lost) from error
        finally:
            self._ends = True  # before its connections close, and where nobody else could see that its process is gone
            with contextlib.suppress(OSError):
                self._write()

    def end(self) -> None:
        """Report and watch no more."""
        self._end.set()
        self._woken.set()

    def blame(self, ranks: list[dict[str, Any]] | None = None) -> str:
        """The rank that the others wait for, or that is lost, in words without a full stop."""
        ranks = ranks or self._ranks()
        gone = [r for r in ranks if r["gone"]]
        if gone:
            return "; ".join(_words(r) for r in gone)
        last = _last(ranks)
        if len(last) == len(ranks):
            return f"all {self.world} ranks are in {last[0]['phase']} of step {last[0]['step']} and alive"
        return "the others wait for " + "; ".join(_words(r) for r in last)

    def _watch(self) -> None:
        while True:
            self._woken.wait(self.beat)
            self._woken.clear()
            if self._end.is_set():
                break
            with contextlib.suppress(OSError):  # a full disk: the training loop reports it
                self._write()
                now, since = self._clock.now, self._clock.idle()
                if since > self.limit:
                    first = self._reported != now
                    if first:
                        self._reported, self._named = now, None
                        self._write_stacks(now, since)
                    if first or self._named is not None:  # many ranks need not read many files all the time
                        self._tell(now, since)
                if since > self.deadline and now.phase != "start" and self._hopeless():
                    self._give_up()

    def _hopeless(self) -> bool:
        """Whether a rank is dead or has been silent as long as a hang; on a busy machine it can miss some heartbeats.

        During startup no rank is given up: imports and reading a checkpoint can hold the interpreter's lock.
        """
        return any(r["dead"] or r["age"] > self.limit for r in self._ranks())

    def _write_stacks(self, now: Now, since: float) -> None:
        self.stacks.mkdir(parents=True, exist_ok=True)
        with (self.stacks / f"{self.rank:05d}.txt").open("w") as file:
            print(f"rank {self.rank}: {now.phase} of step {now.step} for {since:.0f} s", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        flight_recorder.write(self.stacks, self.rank)

    def _tell(self, now: Now, since: float) -> None:
        """Name the rank, if this one is the first that is alive and has not named it yet."""
        ranks = self._ranks()
        named = [(r["rank"], r["gone"], r["dead"]) for r in [r for r in ranks if r["gone"]] or _last(ranks)]
        if named != self._named and self.rank == min(r["rank"] for r in ranks if not r["gone"]):
            self._named, blame = named, self.blame(ranks)
            fault_record.write(self.record, "hang", step=now.step, blame=blame)
            print(
                f"warning: no progress for {since:.0f} s: {blame}. Stacks and last collectives of the ranks: "
                f"{self.stacks}", file=sys.stderr, flush=True,
            )  # fmt: skip

    def _give_up(self) -> None:
        """The main thread may be inside a collective that cannot be interrupted, so no exception would reach it."""
        from megaponder.training.exit_code import leave

        step, phase, _ = self._clock.now
        print(f"error: Rank {self.rank} waits in {phase} of step {step}: {self.blame()}.", file=sys.stderr, flush=True)
        leave(LOST)

    def _path(self, rank: int) -> Path:
        return self.folder / f"{rank:05d}.json"

    def _me(self) -> dict[str, Any]:
        step, phase, _ = self._clock.now
        here = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()}
        return here | {"step": step, "phase": phase, "ends": self._ends}

    def _write(self) -> None:
        self.folder.mkdir(exist_ok=True)  # not its parent: a removed run folder must not reappear
        temporary = self._path(self.rank).with_suffix(".tmp")
        temporary.write_text(json.dumps(self._me()))
        temporary.replace(self._path(self.rank))

    def _ranks(self) -> list[dict[str, Any]]:
        """What every rank last reported, with its age by the file system's own clock."""
        with contextlib.suppress(OSError):
            self._write()
        now = self._path(self.rank).stat().st_mtime if self._path(self.rank).exists() else time.time()
        found = []
        for rank in range(self.world):
            if rank == self.rank:
                found.append(self._me() | {"age": 0.0, "dead": False, "gone": False})
                continue
            try:
                said = json.loads(self._path(rank).read_text())
                said["age"] = now - self._path(rank).stat().st_mtime
            except (OSError, ValueError):
                said = {"rank": rank, "host": "?", "pid": 0, "step": 0, "phase": "start", "age": float("inf")}
            here = said["host"] == socket.gethostname()
            said["dead"] = said.get("ends", False) or (here and not processes.runs(said["pid"]))
            said["gone"] = said["dead"] or said["age"] > MISSED * self.beat
            found.append(said)
        return found


def _last(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those furthest behind."""
    places = [(r["step"], PHASES.index(r["phase"])) for r in ranks]
    return [r for r, place in zip(ranks, places, strict=True) if place == min(places)]


def _words(said: dict[str, Any]) -> str:
    who, place = f"rank {said['rank']} on {said['host']}", f"in {said['phase']} of step {said['step']}"
    if said["age"] == float("inf"):
        return f"rank {said['rank']}, which never reported"
    if said["dead"]:
        return f"{who}, last seen {said['age']:.0f} s ago {place}, has ended"
    if said["gone"]:
        return f"{who}, last seen {place}, has not reported for {said['age']:.0f} s"
    return f"{who}, {place}"
