"""The launch scripts: valid bash, and what they run, forward and return, seen through fake programs of a cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from megaponder.training import exit_code

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "launch" / "torchrun.sh", ROOT / "launch" / "train.sbatch", ROOT / ".ci" / "run"]
OURS = ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MEGAPONDER_EXIT_FILE", "MEGAPONDER_REQUEUE_FILE")


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder of programs that stand for those of a cluster; torchrun prints what it was asked to do."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder, "torchrun", 'echo "rank=$NODE_RANK nodes=$NNODES"; printf "%s\\n" "$@"')
    program(folder, "nvidia-smi", "printf 'GPU 0\\nGPU 1\\n'")
    program(folder, "scontrol", 'if [ "$1" = requeue ]; then echo "requeued $2"; else printf "node7\\nnode8\\n"; fi')
    # runs the program behind its options once, as the task of the second node
    srun = 'echo "srun $*"; while [[ $1 == -* || $1 =~ ^[0-9]+$ ]]; do shift; done; SLURM_NODEID=1 exec "$@"'
    program(folder, "srun", srun)
    program(folder, "python", 'echo "python $*"')
    return folder


def environment(fakes: Path, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in OURS}
    return clean | {"PATH": f"{fakes}:{os.environ['PATH']}"} | more


def launch(script: Path, fakes: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment(fakes, **more), capture_output=True, text=True, timeout=300)


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
    assert done.returncode == 2
    assert "MASTER_ADDR must be set" in done.stderr


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NPROC": "x"}, "NPROC = 'x': it must be an integer of at least 1"),
        ({"NPROC": "1.5"}, "NPROC = '1.5'"),
        ({"NPROC": "0"}, "NPROC = '0'"),
        ({"NNODES": "two"}, "NNODES = 'two'"),
        ({"NNODES": "2"}, "NODE_RANK must be set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK = 2: it counts from 0"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "MASTER_PORT = 70000: it must"),
        ({"LAUNCHER": "nolauncher --x"}, "LAUNCHER = 'nolauncher': there is no such command here"),
    ],
)
def test_wrong_variables_are_refused(fakes: Path, variables: dict[str, str], words: str) -> None:
    done = launch(SCRIPTS[0], fakes, "c.yaml", **variables)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and words in done.stderr and done.stderr.count("\n") == 1


def test_a_machine_without_gpus_has_one_process(fakes: Path) -> None:
    for body in ("exit 9", "true"):
        program(fakes, "nvidia-smi", body)
        done = launch(SCRIPTS[0], fakes, "c.yaml")
        assert done.returncode == 0 and done.stdout.splitlines()[1:4] == ["--standalone", "--nproc-per-node", "1"]


def test_the_slurm_script_refuses_what_is_no_job(fakes: Path, tmp_path: Path) -> None:
    assert "start it with sbatch" in (done := launch(SCRIPTS[1], fakes, "c.yaml")).stderr and done.returncode == 2
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n", "NPROC": "0"}
    done = launch(SCRIPTS[1], fakes, "c.yaml", SLURM_SUBMIT_DIR=str(tmp_path), **slurm)
    assert done.returncode == 2 and "NPROC = '0'" in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    ("codes", "torchruns", "want"), [("75 75", 1, 75), ("69 2 69", 1, 2), ("", 1, 1), ("75 75", 0, 75), ("", 0, 0)]
)
def test_the_exit_code_is_the_lowest_of_the_ranks(
    fakes: Path, tmp_path: Path, codes: str, torchruns: int, want: int
) -> None:
    write = f'for code in {codes}; do echo "$code" >> "$MEGAPONDER_EXIT_FILE"; done; exit {torchruns}'
    program(fakes, "torchrun", write)
    assert launch(SCRIPTS[0], fakes, "c.yaml").returncode == want
    own = str(tmp_path / "codes")
    assert launch(SCRIPTS[0], fakes, "c.yaml", MEGAPONDER_EXIT_FILE=own).returncode == want


def test_a_job_that_ends_without_a_word_has_lost_a_rank(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(fakes, "torchrun", 'touch "$MEGAPONDER_BEGUN_FILE"; exit 1')
    assert launch(SCRIPTS[0], fakes, "c.yaml").returncode == 69
    own = fakes / "begun"
    monkeypatch.setenv("MEGAPONDER_BEGUN_FILE", str(own))
    with exit_code.noted():
        assert own.exists()


def _heed() -> None:
    """Ctrl-C counts, also where the tests run in the background of a shell, which makes its children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def begun(script: Path, fakes: Path, torchrun: str, **more: str) -> subprocess.Popen[str]:
    """A script whose torchrun has said `begun`."""
    # not `sleep` alone: bash 5.2 sends itself SIGINT for ever if one arrives as a command in the foreground ends
    turns = f"for i in {{1..12000}}; do {LOOK}; sleep 0.05 & wait $!; done"
    program(fakes, "torchrun", f"{torchrun}\necho begun\n{turns}; exit 9")
    command = ["bash", str(script), "c.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment(fakes, **more), text=True, preexec_fn=_heed, **pipes)
    assert process.stdout is not None
    while "begun" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()  # type: ignore[union-attr]
    return process


LOOK = '[ ! -e "$MEGAPONDER_REQUEUE_FILE" ] || { echo 75 >> "$MEGAPONDER_EXIT_FILE"; exit 1; }'
SLURM = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(("number", "want"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_signals_reach_the_ranks(fakes: Path, number: int, want: int) -> None:
    traps = "trap 'echo 143 > \"$MEGAPONDER_EXIT_FILE\"; exit 1' TERM"
    traps += "\ntrap 'echo 130 > \"$MEGAPONDER_EXIT_FILE\"; exit 1' INT"
    process = begun(SCRIPTS[0], fakes, traps)
    process.send_signal(number)
    assert process.wait(timeout=300) == want, process.stderr.read()  # type: ignore[union-attr]


@pytest.mark.parametrize(("number", "want"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_that_a_signal_kills_before_they_listen(fakes: Path, number: int, want: int) -> None:
    process = begun(SCRIPTS[0], fakes, "trap 'exit 1' TERM INT")
    process.send_signal(number)
    assert process.wait(timeout=300) == want


def test_torchrun_survives_usr1(fakes: Path) -> None:
    process = begun(SCRIPTS[0], fakes, "kill -USR1 $$")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=300) == 75


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_as_the_ranks_begin_reaches_them(fakes: Path, name: str) -> None:
    """It comes when there is a child, and the script has not noted it yet."""
    program(fakes, "torchrun", "for i in {1..12000}; do sleep 0.05 & wait $!; done; exit 9")
    early = fakes / "early"
    early.write_text(f"trap 'case $BASH_COMMAND in \"child=\\$!\") kill -{name} $$;; esac' DEBUG\n")
    command = ["bash", str(SCRIPTS[0]), "c.yaml"]
    done = subprocess.run(command, env=environment(fakes, BASH_ENV=str(early)), timeout=300, preexec_fn=_heed)
    assert done.returncode == {"TERM": 143, "INT": 130}[name]


@pytest.mark.parametrize(("script", "child"), [(SCRIPTS[0], "torchrun"), (SCRIPTS[1], "srun")])
def test_the_ranks_end_while_a_signal_is_heeded(fakes: Path, script: Path, child: str) -> None:
    """Their exit code counts, not that of the wait which the signal has ended."""
    gone = f'while kill -0 "$(cat {fakes}/pid)" 2>/dev/null; do sleep 0.02; done'
    program(fakes, "touch", f'"{shutil.which("touch")}" "$@"\n{gone}')
    saves = 'until [ -e "$MEGAPONDER_REQUEUE_FILE" ]; do sleep 0.02; done'
    program(fakes, child, f"echo $$ > {fakes}/pid\necho begun\n{saves}")
    more = SLURM | {"SLURM_JOB_ID": "36", "PREFLIGHT": "0"}
    process = subprocess.Popen(["bash", str(script), "c.yaml"], env=environment(fakes, **more), stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=300) == 0


def test_a_launcher_that_is_stopped_for_a_while_has_not_ended(fakes: Path) -> None:
    program(fakes, "torchrun", "(sleep 0.2; kill -CONT $$) & kill -STOP $$\nexit 5")
    assert launch(SCRIPTS[0], fakes, "c.yaml").returncode == 5


def test_without_configuration_prints_usage(fakes: Path) -> None:
    done = launch(SCRIPTS[0], fakes)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")


def test_slurm_checks_all_processes_and_starts_one_torchrun_a_node(fakes: Path, tmp_path: Path) -> None:
    job = SLURM | {"SLURM_JOB_ID": "31", "SLURM_GPUS_ON_NODE": "8"}
    done = launch(SCRIPTS[1], fakes, "c.yaml", "--train.steps", "5", **job)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("srun --kill-on-bad-exit=1 --overcommit --ntasks 16 --ntasks-per-node 8 python")
    assert lines[1] == "python -m megaponder train c.yaml --train.steps 5 --preflight"
    assert lines[2].startswith("srun --kill-on-bad-exit=1 --ntasks 2 --ntasks-per-node 1 bash")
    assert " ".join(lines[3:]) == (
        "rank=1 nodes=2 --nnodes 2 --node-rank 1 --master-addr node7 --master-port 20031 --nproc-per-node 8 "
        "-m -- megaponder train c.yaml --train.steps 5"
    )
    assert not list(ROOT.glob(".megaponder-31.*"))


def test_a_failed_preflight_ends_the_job(fakes: Path) -> None:
    program(fakes, "python", 'echo 2 >> "$MEGAPONDER_EXIT_FILE"; exit 2')
    done = launch(SCRIPTS[1], fakes, "c.yaml", SLURM_JOB_ID="32", **SLURM)
    assert done.returncode == 2
    assert "torchrun" not in done.stdout and "requeued" not in done.stdout


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(75, 0, True), (69, 3, True), (75, 50, False), (2, 0, False), (1, 0, False)]
)
def test_the_exit_code_decides_about_the_queue(fakes: Path, code: int, restarts: int, requeued: bool) -> None:
    program(fakes, "torchrun", f'echo {code} >> "$MEGAPONDER_EXIT_FILE"; exit 1')
    job = SLURM | {"SLURM_JOB_ID": "33", "SLURM_RESTART_COUNT": str(restarts), "PREFLIGHT": "0"}
    done = launch(SCRIPTS[1], fakes, "c.yaml", **job)
    assert done.returncode == code, done.stderr
    assert ("requeued 33" in done.stdout) is requeued


def test_the_sign_before_the_limit_saves_and_requeues(fakes: Path) -> None:
    process = begun(SCRIPTS[1], fakes, ":", SLURM_JOB_ID="34", PREFLIGHT="0", **SLURM)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert "The time limit is near: saving." in out and "requeued 34" in out


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("registry/megaponder:1", "--container-image=registry/megaponder:1"),
        ("/images/megaponder.sif", "apptainer exec --nv --bind /data:/data /images/megaponder.sif bash"),
    ],
)
def test_a_container_by_option(fakes: Path, image: str, words: str) -> None:
    program(fakes, "srun", 'echo "srun $*"')
    job = SLURM | {"SLURM_JOB_ID": "35", "PREFLIGHT": "0", "CONTAINER": image, "CONTAINER_MOUNTS": "/data:/data"}
    assert words in launch(SCRIPTS[1], fakes, "c.yaml", **job).stdout


def test_slurm_script_outside_slurm_is_refused(fakes: Path) -> None:
    done = launch(SCRIPTS[1], fakes, "c.yaml", SLURM_SUBMIT_DIR="")
    assert done.returncode != 0
    assert "start it with sbatch" in done.stderr
