"""NVIDIA's resiliency extension: its launcher kills a silent rank and restarts all of them in the same job.

Under `ft_launcher` (the extra `resilience`) every rank has a monitor process that waits for heartbeats.  This module
sends them; without that launcher it does nothing.  Time-outs are options of the launcher.
"""

from __future__ import annotations

import os
import time
from typing import Any

from megaponder.errors import UserError

SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
"""Set by ft_launcher for each rank."""
EVERY = 1.0
"""Minimum seconds between heartbeats: each is a message to another process."""


class RankMonitor:
    """The connection of this rank to its monitor, if it has one."""

    def __init__(self) -> None:
        self._client: Any = None
        self._last = -EVERY
        if SOCKET not in os.environ:
            return
        try:
            from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
        except ImportError:
            raise UserError(
                f"{SOCKET} is set, so ft_launcher started this process, but nvidia-resiliency-ext cannot be imported: "
                "pip install 'megaponder[resilience]', or start with torchrun."
            ) from None
        self._client = RankMonitorClient()
        self._client.init_workload_monitoring()

    def alive(self) -> None:
        """This rank makes progress."""
        if self._client is not None and time.monotonic() - self._last >= EVERY:
            self._client.send_heartbeat()
            self._last = time.monotonic()

    def close(self) -> None:
        """No more heartbeats will come, and none will be expected."""
        if self._client is not None:
            self._client.shutdown_workload_monitoring()
