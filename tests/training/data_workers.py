"""What the tests of changed, damaged and empty data run inside worker processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.layouts.cases import WHOLE
from tests.training.fault_workers import LAYOUTS, _changes, _in_training, _replace, _train, _watch_memory


def _empty(field: str, holds: Callable[[int], bool]) -> None:
    """Sequences that `holds` names consist of EOD alone, so that no target of them counts."""
    from megaponder.data.stream import SampleStream

    original = SampleStream.item

    def item(self: Any, index: int) -> Any:
        found = original(self, index)
        return {"text": np.zeros_like(found["text"])} if self.field == field and holds(index) else found

    _replace(SampleStream, "item", item)


def _at_step(step: int, action: Callable[[], object]) -> None:
    """The first rank does something to the files while this step is computed; the others go on after it."""
    import torch.distributed as dist

    def fault(engine: Any, step: int, out: Any) -> Any:
        if dist.get_rank() == 0:
            action()
        dist.barrier()
        return out

    _in_training(fault, {step})


def empty_batches(root: str, data: str) -> dict[str, Any]:
    """On each layout: a step without targets and a step of which one micro-batch has none; what either has changed."""
    results: dict[str, Any] = {}
    layouts = {"dp2": {}, **LAYOUTS, **({"tp2": {"parallel__tensor": 2}} if WHOLE else {})}
    for name, changes in layouts.items():
        found: dict[int, dict[str, Any]] = {}
        _watch_memory({3, 4, 5}, found)
        _empty("data.train", lambda i: 8 <= i < 12 or i == 16)
        job = {"run": f"{root}/{name}", "data": data, "train__steps": 5, "train__eval_batches": 0} | changes
        job["train__micro_batch"] = 1  # so that one of them has no target
        results[name] = _train(job), _changes(found[3], found[4]), _changes(found[4], found[5])
    return results


def changed_data(root: str, data: str) -> dict[str, Any]:
    """Runs whose data change, vanish, are cut, have no targets or are others on another rank; code or sentence."""
    import torch.distributed as dist

    results: dict[str, Any] = {}
    none = {"train__eval_batches": 0}

    def job(key: str, name: str, **changes: Any) -> None:
        results[key] = _train({"run": f"{root}/{name}", "data": f"{root}/{name}-data"} | none | changes)

    def own(name: str) -> Path:
        """A copy of the data for one run."""
        folder = Path(root, f"{name}-data")
        if os.environ["RANK"] == "0":
            shutil.copytree(data, folder)
        if dist.is_initialized():
            dist.barrier()
        return folder

    def swap(folder: Path) -> None:
        """Another dataset takes the place of the training data, as a copy or a new preparation would put it there."""
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{data}/valid{suffix}", folder / "new")
            os.replace(folder / "new", folder / f"train{suffix}")

    def first(action: Callable[[], object]) -> None:
        if os.environ["RANK"] == "0":
            action()
        dist.barrier()

    results["whole"] = _train({"run": f"{root}/whole", "data": data} | none)  # it also makes the process groups
    folder = own("replaced")
    _at_step(4, lambda: swap(folder))
    job("replaced", "replaced")
    job("replaced-again", "replaced", train__steps=9)
    job("replaced-accepted", "replaced", train__steps=9, data__accept_changed=[f"{folder}/train"])
    job("replaced-ever-after", "replaced", train__steps=10)
    folder = own("deleted")
    _at_step(4, lambda: os.remove(folder / "train.idx"))
    job("deleted", "deleted")
    folder = own("cut")
    _at_step(4, lambda: os.truncate(folder / "train.bin", 10))
    job("cut", "cut", checkpoint__every=0)
    first(lambda: shutil.copy(f"{data}/train.bin", folder / "train.bin"))
    job("cut-again", "cut")
    own("starved")
    _empty("data.train", lambda i: i >= 8)
    job("starved", "starved", faults__max_without_targets=2, checkpoint__every=0)
    job("starved-again", "starved")
    own("starved-valid")
    _empty("data.valid", lambda i: True)
    valid = {"train__eval_every": 1, "train__eval_batches": 1, "faults__max_without_targets": 1}
    job("starved-valid", "starved-valid", **valid)
    _earlier(own("earlier"), job, first, swap)
    here = Path(root, f"node{os.environ['RANK']}")
    here.mkdir()
    shutil.copytree(data, here / "data")
    if os.environ["RANK"] == "1":
        swap(here / "data")
    os.chdir(here)
    results["other"] = _train({"run": f"{root}/other", "data": "data"} | none)
    return results


def _earlier(folder: Path, job: Callable[..., None], first: Callable[..., None], swap: Callable[[Path], None]) -> None:
    """Checkpoints with the identities of earlier versions: their runs go on, and changed data are refused."""
    from megaponder.data.check import earlier_identity
    from megaponder.training.same_data import SameData

    _replace(SameData, "stored", lambda self: {path: earlier_identity(one) for path, one in self.opened.items()})
    job("earlier", "earlier", train__steps=3)
    first(lambda: shutil.copytree(folder, f"{folder}-kept"))
    first(lambda: swap(folder))
    job("earlier-changed", "earlier", train__steps=4)
    first(lambda: shutil.copytree(f"{folder}-kept", folder, dirs_exist_ok=True))
    job("earlier-again", "earlier", train__steps=4)


def other_node(root: str, preflight: bool) -> None:
    """`megaponder train` and its pre-flight where rank 1 has a mount namespace with other data under the same name."""
    import ctypes
    import sys

    from megaponder.cli.main import main

    if os.environ["RANK"] == "1":
        libc = ctypes.CDLL(None, use_errno=True)
        for call in (
            lambda: libc.unshare(0x00020000),  # CLONE_NEWNS
            lambda: libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None),  # MS_REC | MS_PRIVATE
            lambda: libc.mount(f"{root}/other".encode(), f"{root}/data".encode(), None, 0x1000, None),  # MS_BIND
        ):
            if call():
                raise OSError(ctypes.get_errno(), "no mount namespace")
    sys.exit(main(["train", f"{root}/run.yaml", *(["--preflight"] if preflight else [])]))
