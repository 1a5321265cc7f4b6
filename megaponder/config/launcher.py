"""This process's rank among all processes, from the environment set by the launcher.

| started by                     | recognised by                | rank         | world size           | local rank    |
|--------------------------------|------------------------------|--------------|----------------------|---------------|
| torchrun or the like           | RANK                         | RANK         | WORLD_SIZE           | LOCAL_RANK    |
| srun, several tasks            | SLURM_STEP_NUM_TASKS above 1 | SLURM_PROCID | SLURM_STEP_NUM_TASKS | SLURM_LOCALID |
| a shell, also in an allocation | neither                      | 0            | 1                    | 0             |

The first matching row applies, so torchrun inside srun counts torchrun's processes.  SLURM_NTASKS and the number of
GPUs are ignored: in an interactive shell both describe an allocation, not running processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from megaponder.errors import UserError


@dataclass(frozen=True)
class Place:
    """The rank of this process and the world size."""

    launcher: str
    """torchrun, srun or none."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def place(env: Mapping[str, str] | None = None) -> Place:
    """Rank and world size of this process; UserError for variables that contradict each other."""
    env = os.environ if env is None else env
    if "RANK" in env:
        world, local = _number(env, "WORLD_SIZE"), _number(env, "LOCAL_RANK", _number(env, "RANK"))
        return _checked("RANK", Place("torchrun", _number(env, "RANK"), world, local))
    if _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        world, local = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_LOCALID")
        return _checked("SLURM_PROCID", Place("srun", _number(env, "SLURM_PROCID"), world, local))
    return Place("none")


def adopt(env: MutableMapping[str, str] | None = None) -> Place:
    """Set the variables that torch reads and torchrun would have set, for a task of srun; returns the place."""
    env = os.environ if env is None else env
    here = place(env)
    if here.launcher == "srun":
        env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = str(here.rank), str(here.world_size), str(here.local_rank)
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        env.setdefault("MASTER_ADDR", first_host(nodes) or "localhost")  # rank 0 runs on the first node of the step
        env.setdefault("MASTER_PORT", str(20000 + _number(env, "SLURM_JOB_ID", 0) % 10000))
    return here


def meeting_point(env: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Address and port at which all ranks meet; UserError if the launcher has not set them, or no such port exists."""
    env = os.environ if env is None else env
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UserError(f"Environment variable {name} is not set: the launcher must set it, alike for all ranks.")
    port = _number(env, "MASTER_PORT")
    if port > 65535:
        raise UserError(f"Environment variable MASTER_PORT = {port}: it must be at most 65535; use one such as 29500.")
    return env["MASTER_ADDR"], port


def first_host(nodes: str) -> str:
    """The first host of Slurm's compact list: node[007-9,12],gpu3 -> node007."""
    head = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in head.groups()) if head else ""


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        got = "is not set" if text is None else f"= {text!r}"
        raise UserError(f"Environment variable {name} {got}: the launcher must set it to an integer of at least 0.")
    return int(text)


def _checked(name: str, here: Place) -> Place:
    if not 0 <= here.rank < here.world_size:
        raise UserError(
            f"Environment variable {name} = {here.rank}: it must be below the world size {here.world_size}; a process "
            "that stands alone needs none of these variables."
        )
    return here
