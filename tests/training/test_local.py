"""Local checkpoints: a killed job continues from them bit for bit, and never from a part that is not intact."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

from megaponder.checkpoint import folder, manifest
from megaponder.checkpoint.local import TENSORS
from megaponder.monitor.jsonl import read
from tests.distributed import Workers
from tests.training.conftest import HERE, Base, run
from tests.training.test_resume import series

LAYOUT = {"parallel__distributed_optimizer": True}


def steps(place: Path, rank: int) -> list[int]:
    (owner,) = place.iterdir()  # one run
    found = folder.published(owner / f"rank_{rank:05d}")
    assert all(manifest.damage(path) is None for path in found.values())
    return list(found)


def part(place: Path, rank: int, step: int) -> Path:
    (owner,) = place.iterdir()
    return folder.final(owner / f"rank_{rank:05d}", step)


def copies(base: Base, root: Path, name: str) -> tuple[dict[str, Any], Path]:
    """A job that goes on with a copy of the lost run and of its nodes' disks."""
    place = root / f"disk-{name}"
    shutil.copytree(root / "lost", root / name)
    shutil.copytree(root / "disk", place)
    job = {"run": str(root / name), "data": base.data, **LAYOUT}
    return job | {"checkpoint__local": str(place), "checkpoint__local_every": 1}, place


def test_a_killed_job_continues_from_what_all_ranks_have_intact(base: Base) -> None:
    root = base.root / "nodes"
    local = {"checkpoint__local": str(root / "disk"), "checkpoint__local_every": 1}
    job = {"run": str(root / "lost"), "data": base.data, **LAYOUT, **local}
    workers = Workers(f"{HERE}:run_and_signal", 2, {"at_step": 6, "number": signal.SIGKILL, "rank": None} | job)
    try:
        assert workers.join() == [-signal.SIGKILL] * 2, workers.output()
    finally:
        workers.kill()
    assert list(folder.published(root / "lost" / "checkpoints")) == [3]
    assert steps(root / "disk", 0) == steps(root / "disk", 1) == [5, 4]
    jobs: dict[str, dict[str, Any]] = {"unharmed": {"run": str(root / "unharmed"), "data": base.data, **LAYOUT}}
    for name in ("whole-disks", "lost-disk", "changed", "killed-while-saving", "none"):
        jobs[name], place = copies(base, root, name)
        if name == "lost-disk":
            shutil.rmtree(part(place, 1, 5).parent)
        if name == "changed":
            with (part(place, 1, 5) / TENSORS).open("r+b") as file:
                file.seek(2000)
                file.write(b"\xff" * 8)
        if name == "killed-while-saving":
            newest = part(place, 0, 5)
            newest.rename(newest.with_name(".step_00000005.1f03.tmp"))
            (newest.with_name(".step_00000005.1f03.tmp") / manifest.MANIFEST).unlink()
        if name == "none":
            shutil.rmtree(place)
    jobs["unwritable"], place = copies(base, root, "unwritable")
    shutil.rmtree(place)
    place.write_text("a file")
    _, output = run("run_many", 2, jobs=list(jobs.values()))
    told = {}
    for text in output.split("== ")[1:]:
        path, _, rest = text.partition("\n")
        told[Path(path).name] = told.get(Path(path).name, "") + rest
    want = series(_rows(root / "unharmed"))
    for name in jobs:  # the same layout: bit for bit
        assert series(_rows(root / name)) == want, name
    assert "Resuming from the local checkpoint of step 5" in told["whole-disks"]
    assert "step 5 is not used: rank 1 on " in told["lost-disk"] and "step_00000003" in told["lost-disk"]
    assert f"{TENSORS} changed after it was written" in told["changed"]
    assert "Resuming from the local checkpoint of step 4" in told["changed"]
    assert "step 5 is not used: rank 0 on " in told["killed-while-saving"]
    assert "Resuming from the local checkpoint of step 4" in told["killed-while-saving"]
    assert "local" not in told["none"] and "step_00000003" in told["none"]
    assert "could not write its local checkpoint of step 4" in told["unwritable"] and "Traceback" not in output
    assert list(folder.published(root / "whole-disks" / "checkpoints")) == [8, 6, 3]


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    rows = read(path / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, 9))
    return {r["step"]: r for r in rows}
