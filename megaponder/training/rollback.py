"""Going back to the last checkpoint inside a running job."""

from __future__ import annotations

from pathlib import Path

from megatron.core.optimizer import MegatronOptimizer

from megaponder.checkpoint import restore
from megaponder.checkpoint.choose import choose
from megaponder.checkpoint.save import Saver
from megaponder.checkpoint.state import TrainState, load_state
from megaponder.engine.step import Engine
from megaponder.errors import UserError
from megaponder.training.faults import Faults
from megaponder.training.step import whole_parameters


def roll_back(engine: Engine, optimizer: MegatronOptimizer, saver: Saver, faults: Faults, root: Path) -> TrainState:
    """Load the newest whole checkpoint; none is written while steps are skipped, so it is older than the bad ones.

    UserError if there is none, or if the run has gone back to it too often.  All ranks call this.
    """
    saver.wait()
    choice = choose(root, restore.agreed_damage)
    if choice.path is None:
        raise UserError(
            f"Steps {faults.streak[0]} to {faults.streak[-1]} were skipped in a row (faults.rollback_after), and "
            f"{root} holds no whole checkpoint to go back to; choose a smaller checkpoint.every."
        )
    faults.rolled_back(load_state(choice.path)[0].step)
    with whole_parameters(engine):
        state = restore.resume(choice.path, engine.stage, optimizer)
    saver.newest = state.step
    return state
