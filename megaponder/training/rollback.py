"""Going back to the last checkpoint inside a running job."""

from __future__ import annotations

from pathlib import Path

from megaponder.checkpoint import agree, restore
from megaponder.checkpoint.state import load_state
from megaponder.errors import UserError
from megaponder.ranks import on_first_rank
from megaponder.training.build import Run


def roll_back(run: Run) -> None:
    """Continue from the newest complete checkpoint: none is written while steps are skipped, so it precedes the bad
    ones.

    UserError if there is none, or if the run has gone back to it too often.  All ranks call this.
    """
    run.clock.enter("start")
    run.saver.wait()
    root, faults = Path(run.cfg.run) / "checkpoints", run.faults
    choice = agree.choose(root)
    if choice.path is None:
        raise UserError(
            f"Steps {faults.streak[0]} to {faults.streak[-1]} were skipped in a row (faults.rollback_after), and "
            f"{root} contains no complete checkpoint to go back to; set a smaller checkpoint.every."
        )
    path = choice.path
    faults.rolled_back(on_first_rank(lambda: load_state(path)[0].step))
    with run.engine.whole_parameters():
        run.state = restore.resume(path, run.engine.stage, run.optimizer, run.ema)
    run.saver.newest = run.state.step
    if run.local is not None:
        run.local.forget(run.state.step)
    run.batches.restart(run.state)
    run.monitor.close()
    run.monitor.start(run.state.step, run.state.tokens, run.who)
