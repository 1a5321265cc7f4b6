"""The table of launchers: real environments of each, and variables that contradict each other."""

from __future__ import annotations

import pytest

from megaponder.config.launcher import Place, adopt, first_host, meeting_point, place
from megaponder.errors import UserError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node3", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "31", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[007-008]",
}  # fmt: skip
NODE_TASK = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
SHELL = {"SLURM_JOB_ID": "31", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "node[007-008]"}
TABLE = {
    "torchrun": (TORCHRUN, Place("torchrun", 5, 8, 1)),
    "torchrun in a task of srun": (NODE_TASK | TORCHRUN, Place("torchrun", 5, 8, 1)),
    "a launcher that sets no local rank": ({"RANK": "1", "WORLD_SIZE": "2"}, Place("torchrun", 1, 2, 1)),
    "a task of srun": (SRUN, Place("srun", 9, 16, 1)),
    "a shell in an allocation": (SHELL, Place("none")),
    "an interactive step of one task": (SHELL | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Place("none")),
    "a batch script": (SHELL | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, Place("none")),
    "nothing": ({}, Place("none")),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    env, want = TABLE[name]
    assert place(env) == want


def test_a_task_of_srun_gets_torchruns_variables() -> None:
    env = dict(SRUN)
    assert adopt(env) == Place("srun", 9, 16, 1)
    assert {k: env[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
    }
    assert env["MASTER_ADDR"] == "node007" and env["MASTER_PORT"] == "20031"
    assert adopt(env) == Place("torchrun", 9, 16, 1), "a second time changes nothing but the name"
    given = SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    adopt(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("head", "1234")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node7", "node7"), ("node[007-9,12],gpu3", "node007"), ("a,b", "a"), ("r[1,3]n-x,z", "r1n-x"), ("", "")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set: the launcher must set it to an integer"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2: it must be below the world size 2"),
        (SRUN | {"SLURM_PROCID": "-1"}, "SLURM_PROCID = '-1'"),
    ],
)
def test_contradictions_are_named(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        place(env)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set: the launcher must set it, alike for all ranks"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT = 'x': the launcher must set it to an integer"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = 70000: it must be at most 65535"),
    ],
)
def test_a_place_where_nobody_can_meet_is_named(changes: dict[str, str], sentence: str) -> None:
    assert meeting_point(TORCHRUN) == ("node3", 29500)
    with pytest.raises(UserError, match=sentence):
        meeting_point(TORCHRUN | changes)
