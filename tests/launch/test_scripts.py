"""The launch scripts: valid bash, clean for shellcheck, and what they run, seen through a fake torchrun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "launch" / "torchrun.sh", ROOT / "launch" / "train.sbatch", ROOT / ".ci" / "run"]


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder of programs that stand for those of a cluster; torchrun prints what it was asked to do."""
    programs = {
        "torchrun": 'echo "rank=$NODE_RANK nodes=$NNODES"; printf "%s\\n" "$@"',
        "nvidia-smi": "printf 'GPU 0\\nGPU 1\\n'",
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'shift; SLURM_NODEID=1 exec "$@"',
    }
    for name, body in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    return tmp_path


def launch(script: Path, fakes: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{fakes}:{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR")}
    return subprocess.run(
        ["bash", str(script), *arguments], env=clean | {"PATH": path} | environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_valid_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert os.access(script, os.X_OK)


def test_one_node_uses_its_gpus(fakes: Path) -> None:
    done = launch(SCRIPTS[0], fakes, "c.yaml", "--run", "a b")
    words = done.stdout.splitlines()[1:]
    torchrun = ["--standalone", "--nproc-per-node", "2", "-m", "--", "megaponder"]
    assert words == [*torchrun, "train", "c.yaml", "--run", "a b"]


def test_several_nodes_need_an_address(fakes: Path) -> None:
    done = launch(SCRIPTS[0], fakes, "c.yaml", NNODES="2", NODE_RANK="0")
    assert done.returncode != 0
    assert "MASTER_ADDR must be set" in done.stderr


def test_without_configuration_prints_usage(fakes: Path) -> None:
    done = launch(SCRIPTS[0], fakes)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")


def test_slurm_starts_one_torchrun_a_node(fakes: Path) -> None:
    job = dict(SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_NODELIST="node[7-8]", SLURM_JOB_ID="31", SLURM_JOB_NUM_NODES="2")
    done = launch(SCRIPTS[1], fakes, "c.yaml", "--train.steps", "5", **job, SLURM_GPUS_ON_NODE="8")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert words == (
        "rank=1 nodes=2 --nnodes 2 --node-rank 1 --master-addr node7 --master-port 20031 --nproc-per-node 8 "
        "-m -- megaponder train c.yaml --train.steps 5"
    )


def test_slurm_script_outside_slurm_is_refused(fakes: Path) -> None:
    done = launch(SCRIPTS[1], fakes, "c.yaml", SLURM_SUBMIT_DIR="")
    assert done.returncode != 0
    assert "start it with sbatch" in done.stderr
