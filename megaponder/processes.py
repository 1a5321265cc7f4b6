"""Whether a process of this host is at work, and which one it is."""

from __future__ import annotations

from pathlib import Path

import psutil

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def runs(pid: int) -> bool:
    """Whether the process is there; one that has ended is not, even if nobody has waited for it.

    In a container whose first process waits for nobody, what was killed stays in the table of processes for ever.
    """
    try:
        return psutil.Process(pid).status() not in _ENDED
    except psutil.NoSuchProcess:
        return False


def birth(pid: int) -> str | None:
    """The boot, and the moment in it, at which a process began; None if it is gone, or where /proc does not tell.

    psutil's time of creation moves when the clock is set.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return None
