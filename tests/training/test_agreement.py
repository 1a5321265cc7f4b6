"""One truth for all ranks: what two nodes see differently ends a run, or is waited for, and costs no checkpoint."""

from __future__ import annotations

import shutil
import socket
import subprocess
from typing import Any

import pytest

from megaponder.checkpoint import folder
from megaponder.checkpoint.damage import damage
from tests.distributed import Workers, free_port
from tests.training.conftest import Base

ASYNC = {"checkpoint__asynchronous": True}
EVERY = {"checkpoint__every": 1, "checkpoint__keep_last": 1}


@pytest.fixture(scope="module")
def nodes(base: Base) -> tuple[list[dict[str, Any]], str]:
    if subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    ways: dict[str, dict[str, Any]] = {
        "stale-once": {}, "stale-first": {}, "stale-always": {}, "other-disk": {}, "lost-shard": {},
        "other-bytes": {},
        "flipped": EVERY, "flipped-async": EVERY | ASYNC, "short": EVERY, "gone-async": EVERY | ASYNC,
        "killed": EVERY, "killed-async": EVERY | ASYNC, "none": EVERY | ASYNC,
        "private-run": {}, "private-checkpoints": {},
    }  # fmt: skip
    jobs = {name: base.copy(name, upto=6) | changes for name, changes in ways.items()}
    shutil.copytree(base.root / "other-disk" / "checkpoints" / "step_00000003", base.root / "other-disk" / "elsewhere")
    job = {"data": base.data}
    jobs["rolled-back"] = job | {"run": str(base.root / "rolled-back-2")}
    jobs["rolled-back"] |= {"faults__not_finite": "skip", "faults__rollback_after": 2}
    jobs["load"] = job | {"run": str(base.root / "load-2"), "checkpoint__load": str(base.run)}
    workers = Workers(
        "tests.training.agreement_workers:two_nodes", 2,
        {"jobs": jobs, "root": str(base.root), "ports": [free_port(), free_port()]},
    )  # fmt: skip
    try:
        results = workers.wait(600)
        return results, "".join(workers.output(rank) for rank in range(2))
    finally:
        workers.kill()


def agreed(nodes: Any, name: str) -> Any:
    """What both ranks say."""
    one, other = (results[name] for results in nodes[0])
    assert one == other, (one, other)
    return one


@pytest.mark.parametrize("name", ["stale-once", "stale-first", "rolled-back"])
def test_a_listing_that_lags_is_waited_for(base: Base, nodes: Any, name: str) -> None:
    assert agreed(nodes, name) == 0
    run = "rolled-back-2" if name == "rolled-back" else name
    assert base.rows(run)[8]["loss"] == pytest.approx(base.rows()[8]["loss"], rel=1e-4)
    if name != "rolled-back":
        assert f"Resuming from checkpoint {base.root}/{name}/checkpoints/step_00000006" in nodes[1]


HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stale-always", f"rank 1 on node2 sees 1, the newest of them step_00000003, rank 0 on {HERE} sees 2, the new"),
        ("other-disk", f"rank 1 on node2 finds that its manifest.json is different, rank 0 on {HERE} does not"),
        ("lost-shard", "is not the same on all ranks: rank 1 on node2 finds that __0_0.distcp is missing"),
        ("other-bytes", "is not the same on all ranks: rank 1 on node2 finds that __0_0.distcp has other bytes"),
        ("load", "is not the same on all ranks: rank 1 on node2 finds that its manifest.json is different"),
        ("private-run", "rank 1 on node2 does not see what rank 0 has just written to the folder"),
        ("private-checkpoints", "rank 1 on node2 does not see what rank 0 has just written to the folder"),
    ],
)
def test_what_stays_different_ends_the_start(base: Base, nodes: Any, name: str, words: str) -> None:
    sentence = str(agreed(nodes, name))
    assert words in sentence and sentence.startswith("2: " if name.startswith("private") else "69: ")
    if name != "load":
        assert list(folder.published(base.root / name / "checkpoints")) == [6, 3], "nothing that existed was touched"
        assert not list((base.root / name).rglob(".token-*"))
        assert max(base.rows(name)) == 8, "its rows are still there"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flipped", f"rank 0 on {HERE} finds that __1_0.distcp changed after it was written"),
        ("flipped-async", f"rank 0 on {HERE} finds that __1_0.distcp changed after it was written"),
        ("short", f"rank 0 on {HERE} finds that __1_0.distcp has 100 bytes instead of"),
        ("gone-async", f"rank 0 on {HERE} finds that __1_0.distcp is missing"),
        ("killed", "was killed by SIGKILL (as the kernel does when memory runs out)"),
        ("killed-async", "was killed by SIGKILL (as the kernel does when memory runs out)"),
    ],
)
def test_a_save_that_is_not_read_back_costs_no_older_checkpoint(base: Base, nodes: Any, name: str, words: str) -> None:
    sentence = nodes[0][0][name]
    assert sentence.startswith("2: The checkpoint could not be written to ") and words in sentence
    assert "full disk" not in sentence and "earlier ones, if any, are intact" in sentence
    assert "The checkpoint could not be written" in nodes[0][1][name]
    root = base.root / name / "checkpoints"
    assert list(folder.published(root)) == [6, 3] and all(damage(p) is None for p in folder.published(root).values())
    assert not list(root.glob(".step_*")), "what was written is taken away again"
    assert "Traceback" not in nodes[1]


def test_an_older_checkpoint_goes_once_the_newer_one_is_read_back(base: Base, nodes: Any) -> None:
    assert agreed(nodes, "none") == 0
    assert list(folder.published(base.root / "none" / "checkpoints")) == [8]


def test_the_preflight_sees_a_run_folder_that_is_not_shared(base: Base, nodes: Any) -> None:
    well, unshared = agreed(nodes, "preflights")
    assert well is None
    assert unshared.startswith("Rank 1 on node2 does not see what rank 0 has just written to the folder")
    assert not list((base.root / "private-run").rglob(".token-*"))
