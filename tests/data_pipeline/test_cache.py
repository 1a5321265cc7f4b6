"""The index cache: many processes, sudden deaths, damage, folders that cannot be written."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from megaponder.data.cache import cached_arrays
from megaponder.errors import UserError

WORKER = """
import sys, time
import numpy as np
from megaponder.data.cache import cached_arrays
root, key, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])
def build():
    print("building", flush=True)
    time.sleep(delay)
    return {"a": np.arange(100000), "b": np.ones((3, 4), np.int32)}
arrays = cached_arrays(root, key, ("a", "b"), build, 600)
print(int(arrays["a"][:].sum()), arrays["b"].shape, flush=True)
"""


def _worker(root: Path, key: str = "k", delay: float = 0.3) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(root), key, str(delay)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _build() -> dict[str, np.ndarray]:
    return {"a": np.arange(10)}


def test_one_of_many_builds(tmp_path: Path) -> None:
    runs = [_worker(tmp_path) for _ in range(4)]
    outputs = [r.communicate()[0].splitlines() for r in runs]
    assert sum(o.count("building") for o in outputs) == 1
    assert {o[-1] for o in outputs} == {"4999950000 (3, 4)"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k", "k.lock"] or (tmp_path / "k").is_dir()


def test_builder_killed(tmp_path: Path) -> None:
    run = _worker(tmp_path, delay=60)
    assert run.stdout is not None and run.stdout.readline() == "building\n"
    waiting = _worker(tmp_path)
    earlier = subprocess.Popen(["true"])
    os.waitid(os.P_PID, earlier.pid, os.WEXITED | os.WNOWAIT)  # nobody has waited for it
    orphan = tmp_path / f"k.tmp-{socket.gethostname()}-{earlier.pid}-00"
    orphan.mkdir()  # as if it had begun to write
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert waiting.communicate()[0].splitlines() == ["building", "4999950000 (3, 4)"]
    assert not orphan.exists()
    earlier.wait()


def test_deadline_names_the_file(tmp_path: Path) -> None:
    with FileLock(str(tmp_path / "k.lock")):
        began = time.monotonic()
        with pytest.raises(UserError, match=r"k\.lock: another process has held this lock for more than 1 s"):
            cached_arrays(tmp_path, "k", ("a",), _build, 1.0)
        assert time.monotonic() - began < 300


def test_published_by_others_ends_the_wait(tmp_path: Path) -> None:
    with FileLock(str(tmp_path / "k.lock")):
        cached_arrays(tmp_path / "aside", "k", ("a",), _build)
        os.rename(tmp_path / "aside" / "k", tmp_path / "k")
        assert cached_arrays(tmp_path, "k", ("a",), lambda: pytest.fail("built again"), 5)["a"][:].sum() == 45


def test_damaged_set_is_replaced(tmp_path: Path) -> None:
    cached_arrays(tmp_path, "k", ("a",), _build)
    os.truncate(tmp_path / "k" / "a.npy", 100)
    assert cached_arrays(tmp_path, "k", ("a",), _build)["a"][:].tolist() == list(range(10))


def test_changed_numbers_are_built_anew(tmp_path: Path) -> None:
    """A set of the right shape whose numbers a disk has changed: training on it would be training on other data."""
    cached_arrays(tmp_path, "k", ("a",), _build)
    np.save(tmp_path / "k" / "a.npy", np.zeros(10, int))
    assert cached_arrays(tmp_path, "k", ("a",), _build)["a"][:].tolist() == list(range(10))
    (tmp_path / "k" / "checksums.json").write_text("[]")
    assert cached_arrays(tmp_path, "k", ("a",), _build)["a"][:].tolist() == list(range(10))
    assert len(list(tmp_path.glob("k.damaged-*"))) == 2


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    assert cached_arrays(tmp_path, "k", ("a",), _build)["a"][:].sum() == 45


def test_second_publisher_takes_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no locks here")

    def build_late() -> dict[str, np.ndarray]:
        cached_arrays(tmp_path, "k", ("a",), _build)  # another process publishes while this one builds
        return {"a": np.zeros(10)}

    monkeypatch.setattr(FileLock, "acquire", refuse)
    assert cached_arrays(tmp_path, "k", ("a",), build_late)["a"][:].sum() == 45


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*set data\.cache to another folder"):
        cached_arrays(tmp_path / "file" / "cache", "k", ("a",), _build)
