"""Checks before a long run: every process reports what it sees, and rank 0 says what is missing or different.

The reports are collected in a TCP store on CPUs, so that a broken GPU, a missing node or a different library version
ends in a sentence within `DEADLINE` instead of a collective that never completes.  No process group is created.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaponder import files
from megaponder.config import launcher
from megaponder.config.launcher import Place
from megaponder.config.load import to_mapping
from megaponder.config.schema import RunConfig
from megaponder.data.check import identities, open_data
from megaponder.data.identity import different
from megaponder.errors import UserError
from megaponder.monitor.identity import digest
from megaponder.plan.parameters import model_parameters
from megaponder.ranks import PATIENCE
from megaponder.training import setup
from megaponder.training.lock import RunLock
from megaponder.training.shared_folder import leave_token, places, take_token, without_token
from megaponder.training.versions import versions

DEADLINE = 45.0
"""Seconds for all reports to arrive."""
SAME = (
    "megaponder", "megaponder's code", "python", "torch", "cuda", "nccl", "driver", "megatron-core",
    "transformer-engine", "gpu", "gpus", "configuration",
)  # fmt: skip
"""Facts that must be equal on all ranks."""
Report = dict[str, Any]


def preflight(cfg: RunConfig, deadline: float = DEADLINE) -> None:
    """Check all processes of the job; rank 0 prints a summary.  On failure all of them raise the same UserError."""
    here, begin = launcher.adopt(), time.monotonic()
    store = _connect(here, deadline)
    try:
        files.refuse_lost_link(Path(cfg.run))
        cfg = setup.complete(cfg)
        data = {path: one.stored() for path, one in identities(open_data(cfg.data)).items()}
        report = look(cfg, here) | {"error": None, "data": data}
    except UserError as error:  # it may concern one rank only; all must be told
        report = look(cfg, here) | {"error": str(error), "data": {}}
    reports: dict[int, Report] = {}
    with _token(store, here, cfg, deadline) as report["unshared"]:
        store.set(f"report/{here.rank}", json.dumps(report))
        if here.rank == 0:
            reports = _collect(store, here.world_size, begin + deadline)
            lines, problem = conclude(reports, here.world_size, deadline)
    if here.rank == 0:
        store.set("verdict", json.dumps(problem))
        print("\n".join(lines), flush=True)
    else:
        try:
            store.wait(["verdict"], datetime.timedelta(seconds=deadline + 10))
            problem = json.loads(store.get("verdict"))
        except (dist.DistError, RuntimeError):
            raise UserError(f"Rank {here.rank} on {socket.gethostname()} lost rank 0 during the pre-flight.") from None
    if here.rank != 0:  # rank 0 must not close the store before the others have read it
        store.add("read", 1)
    else:
        end = time.monotonic() + deadline
        while store.add("read", 0) < len(reports) - 1 and time.monotonic() < end:
            time.sleep(0.05)
    if problem is not None:
        raise UserError(problem)


@contextmanager
def _token(store: Any, here: Place, cfg: RunConfig, deadline: float) -> Iterator[str | None]:
    """Rank 0 writes a token into the run's folder and removes it at the end; returns what another rank fails to see."""
    folders, word = places(_existing(Path(cfg.run))), ""
    if here.rank == 0:
        with contextlib.suppress(OSError):  # the report says whether the folder is writable
            word = leave_token(folders)
        store.set("token", json.dumps([word, [str(folder) for folder in folders]]))
        yield None
        with contextlib.suppress(OSError):
            take_token(word, folders)
        return
    lacks = None
    with contextlib.suppress(
        dist.DistError, RuntimeError
    ):  # ranks that wait for the verdict report that rank 0 is lost
        store.wait(["token"], datetime.timedelta(seconds=deadline))
        word, names = json.loads(store.get("token"))
        end = time.monotonic() + PATIENCE
        while word and (lacks := without_token(word, [Path(name) for name in names])) and time.monotonic() < end:
            time.sleep(0.5)
    yield lacks


def look(cfg: RunConfig, here: Place) -> Report:
    """What this process sees of itself and its node."""
    cuda = torch.cuda.is_available() and torch.version.cuda is not None
    folder = _existing(Path(cfg.run))
    return {
        "host": socket.gethostname(),
        "rank": here.rank,
        "local_rank": here.local_rank,
        "world_size": here.world_size,
        "device": f"cuda:{here.local_rank}" if cuda else "cpu",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "gpu": torch.cuda.get_device_name(0) if cuda else "none",
        "driver": _driver(),
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
        "python": platform.python_version(),
        **versions(),
        "configuration": digest(to_mapping(cfg)),
        "free": shutil.disk_usage(folder).free,
        "checkpoint": _checkpoint_bytes(cfg),
        "folder": str(folder),
        "writable": folder.is_dir() and os.access(folder, os.W_OK),
        "taken": RunLock(Path(cfg.run)).holder() if here.rank == 0 else None,
    }


def conclude(reports: dict[int, Report], world: int, deadline: float) -> tuple[list[str], str | None]:
    """Lines about the nodes, and the first problem in a sentence (None: all is well)."""
    hosts: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        hosts.setdefault(report["host"], []).append(rank)
    lines = []
    for host, ranks in hosts.items():
        r = reports[ranks[0]]
        gpus = f"{r['gpus']} x {r['gpu']}, driver {r['driver']}" if r["gpus"] else "no GPU"
        lines.append(f"{host}: ranks {_ranges(ranks)}; {gpus}; torch {r['torch']}; {r['free'] / 1e9:.1f} GB free")
    lines.append(f"{len(reports)} of {world} ranks on {len(hosts)} nodes have reported.")
    return lines, _problem(reports, hosts, world, deadline)


def _problem(reports: dict[int, Report], hosts: dict[str, list[int]], world: int, deadline: float) -> str | None:
    absent = [rank for rank in range(world) if rank not in reports]
    if absent:
        known = "; ".join(f"{host} has ranks {_ranges(ranks)}" for host, ranks in hosts.items())
        return (
            f"Rank{'s' if len(absent) > 1 else ''} {_ranges(absent)} of {world} did not report within {deadline:g} s "
            f"({known}); check for a node whose processes did not start or that cannot reach rank 0."
        )
    for rank, r in sorted(reports.items()):
        where = f"Rank {rank} on {r['host']}"
        if r["error"]:
            return f"{where}: {r['error']}"
        if r["world_size"] != world:
            return f"{where} expects {r['world_size']} processes, but rank 0 expects {world}."
        if r["gpus"] and r["local_rank"] >= r["gpus"]:
            return f"{where} has local rank {r['local_rank']} but sees {r['gpus']} GPUs: start one process per GPU."
        if not r["writable"]:
            return f"{where} cannot write to {r['folder']}, where the run folder would be."
        if r["taken"]:
            return f"{where}: {r['taken']}"
        if r["unshared"]:
            return f"{where} {r['unshared']}."
        if r["checkpoint"] and r["free"] < r["checkpoint"]:
            need, free = r["checkpoint"] / 1e9, r["free"] / 1e9
            return f"{where} sees {free:.1f} GB free in {r['folder']}; a checkpoint needs about {need:.1f} GB."
    for fact in SAME:
        values = Counter(str(r[fact]) for r in reports.values())
        if len(values) > 1:
            common = values.most_common(1)[0][0]
            odd = {rank: r for rank, r in sorted(reports.items()) if str(r[fact]) != common}
            rank, r = next(iter(odd.items()))
            return (
                f"Rank{'s' if len(odd) > 1 else ''} {_ranges(list(odd))} differ{'' if len(odd) > 1 else 's'} from the "
                f"others in {fact}: {r[fact]} on {r['host']}, {common} elsewhere."
            )
    for rank, r in sorted(reports.items()):
        if found := different(r["data"], reports[0]["data"]):
            return (
                f"Rank {rank} on {r['host']} has a different dataset {found[0]} from rank 0 on {reports[0]['host']}: "
                f"{found[1]}; give all nodes the same files."
            )
    return None


def _connect(here: Place, deadline: float) -> Any:
    """A store that all ranks reach: torchrun's own, or one on rank 0."""
    if here.launcher == "none":
        return dist.HashStore()
    address, port = launcher.meeting_point()
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address, port, is_master=here.rank == 0 and not hosted, wait_for_workers=False,
            timeout=datetime.timedelta(seconds=deadline),
        )  # fmt: skip
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"Rank {here.rank} on {socket.gethostname()} cannot reach {address}:{port} within {deadline:g} s "
            f"({str(error).splitlines()[0]}); rank 0 has not started, or a firewall blocks the connection."
        ) from None
    return dist.PrefixStore("preflight", store)


def _collect(store: Any, world: int, end: float) -> dict[int, Report]:
    """Reports by rank, as many as arrive until `end`; rank 0's own has."""
    reports: dict[int, Report] = {}
    while True:
        over = time.monotonic() >= end
        for rank in set(range(world)) - set(reports):
            if store.check([f"report/{rank}"]):
                reports[rank] = json.loads(store.get(f"report/{rank}"))
        if over or len(reports) == world:
            return reports
        time.sleep(0.05)


def _checkpoint_bytes(cfg: RunConfig) -> int:
    """Approximate size of a checkpoint: parameters, two moments, and master weights beside BF16 parameters."""
    if cfg.model.vocab_size is None or cfg.model.num_layers is None:
        return 0
    return model_parameters(cfg.model).total * (14 if cfg.precision.dtype == "bf16" else 12)


def _existing(path: Path) -> Path:
    """The folder itself or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _driver() -> str:
    """Version of the NVIDIA kernel driver, as reported by Linux."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "none"


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> 0 to 2, 5."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{p[0]}" if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts)
