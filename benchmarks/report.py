"""Where and from what a result comes: the first line of every report."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess

import torch


def origin() -> str:
    """Date, commit (marked where files differ from it), card or CPU with its cores, and torch's version."""
    told = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    cores = f"{len(os.sched_getaffinity(0))} cores"
    card = (
        f"{torch.cuda.get_device_name()}, {cores}"
        if torch.cuda.is_available()
        else f"CPU ({platform.machine()}), {cores}"
    )
    return f"{datetime.date.today()}, commit {told.stdout.strip() or 'unknown'}, {card}, torch {torch.__version__}"
