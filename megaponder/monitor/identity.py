"""Which run, which start of it and which program: its identification in labels and trackers."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaponder import __version__, files
from megaponder.config.load import to_mapping
from megaponder.config.schema import RunConfig

STARTS = "starts"


@dataclass(frozen=True)
class Identity:
    """One start of a run."""

    run_id: str
    restarts: int
    """Starts before this one."""


def run_id(run: Path) -> str:
    """The id of the run folder, created once."""
    path = run / "run_id"
    if not path.exists():
        files.write_bytes(path, f"{uuid.uuid4().hex[:12]}\n".encode())
    return path.read_text(errors="replace").strip()


def start(run: Path) -> Identity:
    """Count a start of the run; one process calls it and tells the others."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / STARTS
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    earlier = int(text) if text.isdecimal() and len(text) < 10 else 0
    files.write_json(path, earlier + 1)
    return Identity(run_id(run), earlier)


def labels(identity: Identity) -> dict[str, str]:
    """The common labels; the scheduler's names of job and node take precedence over the machine's."""
    env = os.environ
    job = env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID") or "local"
    return {"run_id": identity.run_id, "job": job, "node": env.get("SLURMD_NODENAME") or platform.node()}


def build_info(cfg: RunConfig) -> dict[str, str]:
    """What was run: version, source revision, hash of the configuration, name of the run folder."""
    return {
        "version": __version__,
        "git_sha": _git_sha(),
        "config_hash": digest(to_mapping(cfg)),
        "run": Path(cfg.run).resolve().name,
    }


def digest(value: Any) -> str:
    """A short name for a JSON value: equal values have equal ones."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _git_sha() -> str:
    """Revision of a source checkout; `unknown` for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
