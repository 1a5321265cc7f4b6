"""`train`: process groups around the training loop, and what happens if they fail or do not end."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from pathlib import Path

from megaponder.config import launcher
from megaponder.config.schema import ParallelConfig, RunConfig
from megaponder.engine import cuda_on_cpu
from megaponder.engine import groups as process_groups
from megaponder.errors import LostRank, UserError, first_line, is_lost_connection
from megaponder.monitor.start_end import ended, ending, sentence, starting
from megaponder.ranks import gather
from megaponder.training import flight_recorder, setup
from megaponder.training.exit_code import leave, stopped

PATIENCE = 60.0
"""Seconds that process groups have to shut down."""
TELL_MINUTES = 1.0
"""Seconds that a rank that cannot start waits for the others to be told."""


def train(cfg: RunConfig) -> int:
    """Train as the configuration says, or continue the run in its folder.  Every rank of the world calls this.

    Returns 0 when the budget is spent, or after saving the exit code of what asked to stop (`training.stop`).  Raises
    UserError for the user's mistakes, for a loss that is not finite and for a full disk, and LostRank if another
    rank is lost; existing checkpoints are not touched.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # its deprecations, and libraries it does not find
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # its collectives
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")  # its sharded optimizer
    starting("configuration")
    flight_recorder.record(Path(cfg.run))
    if cfg.faults.in_process_restarts and launcher.place().world_size > 1:
        from megaponder.training import in_process

        return in_process.run(cfg, _train)
    return _train(cfg)


def _train(cfg: RunConfig) -> int:
    """One attempt."""
    try:
        cfg = _complete_on_all_ranks(cfg)
        starting("processes")
        process_groups.start(cfg)
        setup.refuse_different_versions()
        setup.refuse_different_ranks(cfg)  # before groups of the configured sizes
        starting("imports")
        cuda_on_cpu.install()  # before megatron-core's first import
        from megaponder.training.loop import run

        starting("processes")
        groups = process_groups.init(cfg)
        code = run(cfg, groups)
    except Exception as error:
        if isinstance(error, LostRank) or not is_lost_connection(error):
            raise
        why = (first_line(error) or type(error).__name__).rstrip(".")
        if "EADDRINUSE" in why:
            raise UserError(_port_is_taken()) from error
        raise LostRank(f"Another rank was lost, or never started, before the first step ({why}).") from error
    # not after an error: a rank that fails alone must exit at once instead of waiting here for the others
    ending("processes")
    _shut_down(code)
    if groups.logs() and (seconds := ended()):
        print(sentence("after the last save", seconds), flush=True)
    return code


def _complete_on_all_ranks(cfg: RunConfig) -> RunConfig:
    """`setup.complete`; an error on one rank, such as a dataset missing on its node, is raised on all ranks.

    Without this the others would wait for that rank until `parallel.timeout_minutes`.
    """
    problem: UserError | None = None
    try:
        cfg = setup.complete(cfg)
    except UserError as error:
        problem = error
    starting("processes")
    if launcher.place().world_size > 1:
        try:
            process_groups.start(
                cfg if problem is None else RunConfig(parallel=ParallelConfig(timeout_minutes=TELL_MINUTES))
            )
            told = gather(str(problem) if problem else None)
        except Exception:
            if problem is None:
                raise
        else:
            elsewhere = next((said for said in told if said.value is not None), None)
            if problem is None and elsewhere is not None:
                raise UserError(f"R{elsewhere.who[1:]}: {elsewhere.value}")
    if problem is not None:
        raise problem
    return cfg


def _port_is_taken() -> str:
    """Rank 0 could not listen where the others look for it; torchrun does so itself and never comes here."""
    port = os.environ.get("MASTER_PORT", "")
    return (
        f"MASTER_PORT = {port}: rank 0 on {socket.gethostname()} cannot listen there, since another program does; set "
        "it to a free port, the same one for all ranks."
    )


def _shut_down(code: int) -> None:
    """Leave the process groups, but do not wait for ever for communicators that hang: everything is saved."""

    def give_up() -> None:
        print(
            f"warning: the process groups did not shut down within {PATIENCE:.0f} s; everything is saved, so we exit.",
            flush=True,
        )
        leave(stopped(code))

    timer = threading.Timer(PATIENCE, give_up)
    timer.daemon = True
    timer.start()
    process_groups.shutdown()
    timer.cancel()
