"""NVIDIA's launcher with its rank monitors: a frozen rank is killed, and the run goes on in the same job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaponder.errors import UserError
from megaponder.monitor.jsonl import read
from megaponder.training.rank_monitor import SOCKET, RankMonitor
from tests.data_pipeline.make import random_documents, write_documents
from tests.external import EXTERNAL
from tests.launch.test_slurm import CONFIG

ROOT = Path(__file__).resolve().parents[2]


def test_the_launcher_without_the_extension_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET, "/nowhere")
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.fault_tolerance", None)
    with pytest.raises(UserError, match="start with torchrun"):
        RankMonitor()


@EXTERNAL
@pytest.mark.skipif(shutil.which("ft_launcher") is None, reason="the extra megaponder[resilience] is not installed")
def test_a_frozen_rank_is_killed_and_the_job_goes_on(tmp_path: Path) -> None:
    run, config = tmp_path / "run", tmp_path / "c.yaml"
    text = write_documents(tmp_path / "text", random_documents([7, 30, 2, 19] * 20))
    changed = (
        CONFIG.replace("[text]", f"[{text}]").replace("steps: 100000", "steps: 60").replace("every: 0", "every: 2")
    )
    config.write_text(changed)
    launcher = "ft_launcher --max-restarts 1 --ft-initial-rank-heartbeat-timeout 300 --ft-rank-heartbeat-timeout 10"
    env = os.environ | {"LAUNCHER": launcher, "NPROC": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["launch/torchrun.sh", str(config), "--run", str(run)]
    log = tmp_path / "log"
    with log.open("w") as file:
        job = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 300
        while len(read(run / "metrics.jsonl")) < 4:
            assert time.monotonic() < end and job.poll() is None, log.read_text()
            time.sleep(0.05)
        os.kill(json.loads((run / "ranks" / "00000.json").read_text())["pid"], signal.SIGSTOP)
        assert job.wait(600) == 0, log.read_text()
    finally:
        job.terminate()
    assert "Resuming from checkpoint" in log.read_text()
    assert [row["step"] for row in read(run / "metrics.jsonl")] == list(range(1, 61))
