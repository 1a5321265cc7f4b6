"""The batch script under a real Slurm of one node, which this test starts for itself: save, requeue, go on, end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaponder.monitor.jsonl import read
from tests.data_pipeline.make import random_documents, write_documents
from tests.distributed import free_port
from tests.external import EXTERNAL

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    EXTERNAL,
    pytest.mark.skipif(bool(MISSING), reason=f"no Slurm here: {', '.join(MISSING)} missing"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a private Slurm is started as root only"),
]
CONF = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
# credentials end soon, since Slurm lets a requeued job wait for the end of the old one
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
CONFIG = """\
model: {family: llama, num_layers: 2, hidden_size: 32, num_heads: 4, ffn_size: 64, vocab_size: 100}
data: {train: [text], split: "8,2,0", sequence_length: 16, eod_id: 0}
train: {steps: 100000, global_batch: 4, eval_batches: 0}
checkpoint: {every: 0}
logging: {every: 1, tensorboard: false}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A private cluster; the environment for its commands."""
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    ports = [free_port(), free_port()]
    (tmp_path / "slurm.conf").write_text(CONF.format(host=socket.gethostname(), folder=tmp_path, ports=ports))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    env |= {"PATH": path, "SLURM_CONF": str(tmp_path / "slurm.conf"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    key = tmp_path / "munge.key"
    subprocess.run(["mungekey", "--create", "--keyfile", str(key)], check=True, env=env)
    files = {"socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
    options = [f"--{name}={tmp_path / file}" for name, file in files.items()]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *options],
        ["slurmctld", "-D", "-f", env["SLURM_CONF"]],
        ["slurmd", "-D", "-f", env["SLURM_CONF"]],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen(command, env=env, **quiet))  # type: ignore[call-overload]
            time.sleep(1)
        _until(lambda: "idle" in _ask(env, "sinfo", "-h", "-o", "%T"), 120, lambda: _logs(tmp_path))
        yield env
    finally:
        _ask(env, "scancel", "--full", "--state=RUNNING")
        for process in reversed(running):
            process.terminate()
            process.wait(30)


def _ask(env: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in sorted(folder.glob("*.log")))


def _until(holds, seconds: float, why) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, why()
        time.sleep(0.5)


def test_a_job_saves_at_the_signal_goes_back_to_the_queue_and_finishes(slurm: dict[str, str], tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    text = write_documents(tmp_path / "text", random_documents([7, 30, 2, 19] * 20))
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.replace("[text]", f"[{text}]"))
    size = ["--gpus-per-node=0", "--cpus-per-task=1", "--time=60", f"--output={log}"]
    command = ["sbatch", "--parsable", *size, "launch/train.sbatch", str(config), "--run", str(run)]
    done = subprocess.run(command, cwd=ROOT, env=slurm | {"NPROC": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()

    def said() -> str:
        return (log.read_text() if log.exists() else "") + _logs(tmp_path)

    _until(lambda: len(read(run / "metrics.jsonl")) > 2, 600, said)
    # what Slurm itself does --signal=B:USR1@600 before the limit
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=slurm, check=True)
    _until(lambda: f"Exit code 75: job {job} goes back to the queue." in said(), 120, said)
    assert "1 of 1 ranks on 1 nodes have reported." in said() and "it is saved." in said()
    (reached,) = (int(p.name[5:]) for p in (run / "checkpoints").iterdir())
    _until(lambda: f"Resuming from checkpoint {run}/checkpoints/step_{reached:08d}" in said(), 600, said)
    (run / "STOP").touch()  # the way to end a run for good
    _until(lambda: job not in _ask(slurm, "squeue", "-h", "-o", "%i"), 300, said)
    steps = [row["step"] for row in read(run / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= reached, "one series, without a gap"
    assert "Stopped by the file STOP" in said() and "Traceback" not in log.read_text()
