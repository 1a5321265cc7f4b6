"""One uninterrupted run that every resumed one is compared with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megaponder.monitor.jsonl import read
from tests.distributed import Workers
from tests.training import datasets

HERE = "tests.training.workers"


@dataclass
class Base:
    """Folders of the uninterrupted run and its data; its first 3 steps (and every 3) end right at an epoch's edge.

    Tests write into `root`, where that run is `whole`; the run and its data are in `home`, which several roots share.
    """

    root: Path
    output: str
    home: Path | None = None

    @property
    def data(self) -> str:
        return str(self.home or self.root)

    @property
    def run(self) -> Path:
        return (self.home or self.root) / "whole"

    def copy(self, name: str, source: str = "whole", upto: int = 3) -> dict[str, Any]:
        """A job that continues a copy of a run whose checkpoints beyond `upto` are gone."""
        target = self.root / name
        shutil.copytree(self.root / source, target)
        for path in (target / "checkpoints").iterdir():
            if int(path.name[5:]) > upto:
                shutil.rmtree(path)
        return {"run": str(target), "data": self.data}

    def rows(self, name: str = "whole") -> dict[int, dict[str, Any]]:
        """Metrics by step."""
        rows = read(self.root / name / "metrics.jsonl")
        assert [r["step"] for r in rows] == sorted({r["step"] for r in rows})
        return {r["step"]: r for r in rows}


def run(target: str, world: int, timeout: float = 600, **args: Any) -> tuple[list[Any], str]:
    """Results and printed text of workers."""
    workers = Workers(f"{HERE}:{target}", world, args)
    try:
        return workers.wait(timeout), "".join(workers.output(r) for r in range(world))
    finally:
        workers.kill()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Base:
    root = tmp_path_factory.mktemp("training")
    datasets.write(root / "train", tokens=12 * 16 + 1, seed=1)  # 12 sequences an epoch, 4 a step
    datasets.write(root / "valid", tokens=200, seed=2)
    _, output = run("run_train", 1, run=str(root / "whole"), data=str(root))
    return Base(root, output)


@pytest.fixture(scope="module")
def base(whole: Base, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The uninterrupted run, with a folder of each file's own: files may give their runs the same names."""
    root = tmp_path_factory.mktemp("runs")
    (root / "whole").symlink_to(whole.run)
    return Base(root, whole.output, whole.root)
