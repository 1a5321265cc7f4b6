"""What an earlier commit wrote still serves: data, runs in each precision, exports (see `fixtures/make_old.py`)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaponder.config.load import load_config
from megaponder.monitor import jsonl
from tests.distributed import run_workers
from tests.fixtures.make_old import COMPARED, CPU, FP8, GREEDY, SAMPLED, SAVED, STEPS
from tests.tolerance import ATOL, RTOL

FIXTURES = Path(__file__).parent / "fixtures"
TOLERANCES = {"fp32": RTOL, "bf16": 3e-3, "fp8": 1e-2}
HAS_FP8 = (FIXTURES / "old-fp8.tar.xz").is_file()
IN_FP8 = [pytest.param(n, marks=pytest.mark.skipif(not HAS_FP8, reason="made on a GPU only")) for n in FP8]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All archives, unpacked."""
    folder = tmp_path_factory.mktemp("old")
    for archive in FIXTURES.glob("old-*.tar.xz"):
        shutil.unpack_archive(archive, folder)
    return folder


def commands(folder: str, lines: list[list[str]]) -> list[tuple[int, str]]:
    """In a worker: exit code and output of one command after another, called inside `folder`."""
    from megaponder.cli.main import main

    os.chdir(folder)
    results = []
    for words in lines:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            results.append((main(words), out.getvalue()))
    return results


def call(folder: Path, *lines: list[str]) -> list[str]:
    """What each command prints; all must succeed."""
    results = run_workers("tests.test_old_files:commands", 1, args={"folder": str(folder), "lines": list(lines)})[0]
    assert [code for code, _ in results] == [0] * len(lines)
    return [text for _, text in results]


def expected(old: Path, name: str) -> dict[str, Any]:
    return json.loads((old / f"{name}.json").read_text())


@pytest.mark.parametrize("name", [*CPU, *IN_FP8])
def test_what_it_wrote_is_read(old: Path, name: str) -> None:
    """On the CPU, whatever it was trained on: the same facts, the same text, also after exporting and importing."""
    want = expected(old, name)
    inspected, greedy, sampled, export, *_, imported, exported = call(
        old,
        ["inspect", name],
        ["generate", name, *GREEDY, "--device", "cpu"],
        ["generate", name, *SAMPLED, "--device", "cpu"],
        ["generate", f"{name}-export", *SAMPLED, "--trust-remote-code", "--device", "cpu"],
        ["import", f"{name}-export", f"{name}-imported", "--trust-remote-code"],
        ["export", name, f"{name}-again"],
        ["generate", f"{name}-imported", *SAMPLED, "--device", "cpu"],
        ["generate", f"{name}-again", *SAMPLED, "--device", "cpu"],
    )
    facts = want["inspect"].replace("(whole,", "(complete,").replace("loads at any", "loads in any")  # words of today
    facts = facts.replace("threshold 0.6", "threshold 0.6, target 0.0")  # which was the default then
    assert inspected == facts
    assert (greedy, sampled, export) == (want["greedy"], want["sampled"], want["export"])
    assert imported == exported == want["export"]


def continued(old: Path, folder: Path, name: str) -> None:
    """The run goes on from its checkpoint to the losses that the old code found."""
    shutil.copytree(old, folder, dirs_exist_ok=True)
    (output,) = call(folder, ["train", f"{name}/config.yaml"])
    assert f"checkpoints/step_{SAVED:08}" in output and f"step {SAVED}/{STEPS}" not in output, "it began anew"
    stated = load_config(folder / name / "config.yaml", []).ponder.options
    assert stated.get("target") == (0.0 if "ada" in name else None)  # the form that it was started with
    want = expected(old, name)["rows"]
    rows = {str(row["step"]): row for row in jsonl.read(folder / name / "metrics.jsonl")}
    assert list(rows) == list(want) and float(want[str(STEPS)]["loss"]) > 0
    for step, values in want.items():
        found = {key: rows[step][key] for key in COMPARED if key in rows[step]}
        assert found.keys() == values.keys()
        tolerance = TOLERANCES[name.rpartition("-")[2]]
        np.testing.assert_allclose(list(found.values()), list(values.values()), tolerance, ATOL, err_msg=f"step {step}")


@pytest.mark.parametrize("name", CPU)
def test_its_runs_go_on(old: Path, tmp_path: Path, name: str) -> None:
    continued(old, tmp_path, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", IN_FP8)
def test_its_runs_in_fp8_go_on(old: Path, tmp_path: Path, name: str) -> None:
    continued(old, tmp_path, name)


def test_its_data_are_read(old: Path) -> None:
    assert call(old, ["inspect", "text", "--audit"])[0].splitlines()[:2] == [
        "text: 40 documents, 724 tokens", "  checksums agree"
    ]  # fmt: skip
