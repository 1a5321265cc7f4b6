"""Two nodes that do not see the same files, on one machine: rank 1 has mounts and a host name of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaponder.errors import UserError
from megaponder.files import windows
from tests.training import fault_workers
from tests.training.workers import config

CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000


def become_node(name: str) -> None:
    """This process gets mounts and a host name that no other process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) or libc.sethostname(name.encode(), len(name)):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _mount(*words: str) -> None:
    """On rank 1 alone, until the job ends."""
    if _second():
        subprocess.run(["mount", *words], check=True)
        fault_workers._undo.append(lambda: subprocess.run(["umount", words[-1]], check=True))


def _second() -> bool:
    return os.environ["RANK"] == "1"


def _stale(times: int, rank: str = "1") -> None:
    """The first listings of a folder of checkpoints by one rank lack its newest entry."""
    if os.environ["RANK"] != rank:
        return
    listing, left = Path.iterdir, [times]

    def iterdir(self: Path) -> Any:
        entries = list(listing(self))
        steps = [p for p in entries if p.name.startswith("step_")]
        if self.name == "checkpoints" and steps and left[0]:
            left[0] -= 1
            entries.remove(max(steps))
        return iter(entries)

    fault_workers._replace(Path, "iterdir", iterdir)


def _after_writing(harm: Callable[[Path], None]) -> None:
    """Something happens to the first file of rank 1 once its checksum is taken."""
    from megaponder.checkpoint import manifest

    if not _second():
        return
    original = manifest.describe

    def describe(folder: Path, names: Any) -> Any:
        found = original(folder, names)
        harm(folder / min(found))
        return found

    fault_workers._replace(manifest, "describe", describe)


def _other_bytes(run: Path) -> None:
    """Node 2 sees a file of the same size with other bytes, which rank 0 checks and rank 1 would load."""
    [shard] = run.glob("*/step_00000006/__0_0.distcp")
    if _second():
        data = bytearray(shard.read_bytes())
        middle = windows(len(data))[32]  # of a larger file, these are what nodes compare
        data[middle : middle + 512] = b"?" * 512
        (run / "other").write_bytes(data)
    _mount("--bind", str(run / "other"), str(shard))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _killed(name: str) -> None:
    """The kernel kills a writer of rank 1."""
    from megaponder.checkpoint import writers

    if _second():
        fault_workers._replace(writers, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        fault_workers._replace(writers, "WORTH_ANOTHER", 0)  # as with a large model, which has writers


def two_nodes(jobs: dict[str, dict[str, Any]], root: str, ports: list[int]) -> dict[str, Any]:
    """Each job with its fault, one after another; exit code and sentence of each, and of the pre-flights."""
    from megaponder import ranks

    if _second():
        become_node("node2")
    faults: dict[str, Callable[[Path], None]] = {
        "stale-once": lambda run: _stale(1),
        "stale-first": lambda run: _stale(2, "0"),  # it also lists them to sweep
        "stale-always": lambda run: _stale(10**6),
        "rolled-back": lambda run: (_stale(1), fault_workers._in_training(fault_workers.nan_gradient, {5, 6})),  # type: ignore[dict-item,return-value]
        "other-disk": lambda run: _mount("--bind", f"{run}/elsewhere", f"{run}/checkpoints/step_00000006"),
        "lost-shard": lambda run: _mount("--bind", "/dev/null", str(next(run.glob("*/step_00000006/__0_0.distcp")))),
        "other-bytes": _other_bytes,
        "load": lambda run: _mount(
            "--bind", f"{root}/whole/checkpoints/step_00000003", f"{root}/whole/checkpoints/step_00000008"
        ),
        "private-run": lambda run: _mount("-t", "tmpfs", "tmpfs", str(run)),
        "private-checkpoints": lambda run: _mount("-t", "tmpfs", "tmpfs", str(run / "checkpoints")),
        "flipped": lambda run: _after_writing(_flip),
        "flipped-async": lambda run: _after_writing(_flip),
        "short": lambda run: _after_writing(lambda path: os.truncate(path, 100)),
        "gone-async": lambda run: _after_writing(lambda path: path.unlink()),
        "killed": lambda run: _killed("_write"),
        "killed-async": lambda run: _killed("write"),
        "none": lambda run: None,
    }
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        ranks.PATIENCE = 120.0 if name in ("stale-once", "stale-first", "rolled-back", "none") else 1.0
        faults[name](Path(job["run"]))
        found[name] = fault_workers._train(job, lambda error: f"{error.exit_code}: {error}")
    found["preflights"] = [
        _preflight(port, jobs["private-run"], mounted) for port, mounted in zip(ports, (0, 1), strict=True)
    ]
    return found


def _preflight(port: int, job: dict[str, Any], mounted: int) -> str | None:
    from megaponder.training import preflight

    os.environ["MASTER_PORT"] = str(port)
    preflight.PATIENCE = 1.0
    if mounted:
        _mount("-t", "tmpfs", "tmpfs", job["run"])
    try:
        preflight.preflight(config(**job), 300.0)
    except UserError as error:
        return str(error)
    finally:
        while fault_workers._undo:
            fault_workers._undo.pop()()
    return None
