"""The commands as a user types them: text, `prepare`, then `train` alone and under torchrun; one series of losses.

Only the run of one process is started as a program of its own: everything else is the same command line without the
imports.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from megaponder.monitor.jsonl import read
from tests import forks
from tests.distributed import Workers, free_port
from tests.tolerance import ATOL, RTOL

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """\
model:
  {family: pythia, num_layers: 4, hidden_size: 32, num_heads: 4, ffn_size: 64, max_positions: 64, norm_eps: 1.0e-5,
   rotary_fraction: 0.25, rotary_base: 10000.0, parallel_residual: true, tie_embeddings: false}
ponder: {method: ponderlm, options: {steps: 2}}
data: {train: [0.5, data/lines, 0.5, data/json], split: "80,20,0", sequence_length: 32}
optimizer: {lr: 1.0e-2}
train: {steps: 4, global_batch: 4, micro_batch: 2, eval_every: 2, eval_batches: 1}
checkpoint: {every: 0}
logging: {every: 1, tensorboard: false}
"""
WORDS = ["a", "tale", "of", "two", "processes", "that", "count", "alike"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]


def python(folder: Path, program: str, *words: str) -> str:
    """What the command prints; all of it in the failure's message.  Processes that torchrun starts are forked."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [program, *words], cwd=folder, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": forks.python()},
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def command(folder: Path, world: int, *words: str) -> str:
    """What `megaponder WORDS` prints in `world` processes that see torchrun's variables."""
    target, args = "tests.training.test_torchrun:typed", {"folder": str(folder), "words": list(words)}
    workers = Workers(target, world, args)
    try:
        assert workers.wait(600) == [0] * world, workers.output()
        return "".join(workers.output(r) for r in range(world))
    finally:
        workers.kill()


def typed(folder: str, words: list[str]) -> int:
    """In a worker: the command line's exit code."""
    from megaponder.cli.main import main

    os.chdir(folder)
    return main(words)


def two_nodes(folder: Path, *words: str) -> str:
    """What `launch/torchrun.sh` prints on two nodes of one process each, which meet on this machine."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shared = os.environ | {
        "PATH": path, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": forks.python(), "NNODES": "2", "NPROC": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "LAUNCHER": f"{forks.python()} -m torch.distributed.run",
    }  # fmt: skip
    script = ["bash", str(ROOT / "launch" / "torchrun.sh"), *words]
    nodes = [
        subprocess.Popen(
            script, cwd=folder, env=shared | {"NODE_RANK": str(n)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    try:
        printed = [node.communicate(timeout=600)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], printed
    return "".join(printed)


def test_two_processes_give_the_series_of_one(tmp_path: Path) -> None:
    dice = random.Random(5)
    texts = [" ".join(dice.choices(WORDS, k=40)) for _ in range(40)]
    (tmp_path / "lines.txt").write_text("".join(f"{t}\n" for t in texts[:20]))
    (tmp_path / "json.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in texts[20:]))
    (tmp_path / "run.yaml").write_text(CONFIG)
    prepare = ["prepare", "--tokenizer", "bytes"]
    command(tmp_path, 1, *prepare, "lines.txt", "--txt-split", "line", "--output", "data/lines")
    command(tmp_path, 1, *prepare, "json.jsonl", "--output", "data/json")
    train = ["train", "run.yaml", "--run"]
    python(tmp_path, sys.executable, "-m", "megaponder", *train, "one")
    printed = [
        python(tmp_path, forks.python(), *TORCHRUN, "megaponder", *train, "pp2", "--parallel.pipeline", "2"),
        two_nodes(tmp_path, "run.yaml", "--run", "nodes", "--parallel.pipeline", "2"),
    ]

    one, *others = (read(tmp_path / name / "metrics.jsonl") for name in ("one", "pp2", "nodes"))
    assert [row["step"] for row in one] == [1, 2, 3, 4] and one[3]["loss"] < one[0]["loss"]
    for rows in others:
        for key in ("loss", "grad_norm", "validation_loss", "learning_rate"):
            want, got = ([r[key] for r in series if key in r] for series in (one, rows))
            np.testing.assert_allclose(got, want, RTOL, ATOL, err_msg=key)
    for text in printed:
        assert text.count("step 4/4") == 1, "exactly one process writes"
        assert "Warning" not in text and "WARNING" not in text, text
