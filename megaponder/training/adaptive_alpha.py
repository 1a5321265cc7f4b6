"""Which share of the tokens a step leaves out (`train.eslm`): none while warming up, then alpha, which may move.

With `adapt` above 0, after each step that was taken, with L its selected tokens' mean loss:

    m'    = L in the first such step, then m + 0.1 (L - m)
    alpha = alpha (m / m')^adapt, kept within alpha_range

So while the hardest tokens get easier, fewer and harder ones are kept, and more again when they get harder.  The
published Ada-ESLM also moves alpha by changes of this loss; its exact rule could not be read, and this one is ours.
The steps multiply up: alpha follows the ratio of the first mean to the newest one, and noise of steps does not add up.

alpha and m are in `TrainState.selection`: in checkpoints, and taken back by a rollback.  They follow from the loss that
all ranks have, so they are equal on all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from megaponder.checkpoint.state import TrainState
from megaponder.config.eslm import Eslm, read
from megaponder.config.schema import RunConfig
from megaponder.engine.step import Engine, StepOutput

RATE = 0.1
"""Weight of the newest step in the moving mean."""


def alpha_of(options: Eslm, state: TrainState) -> float:
    """Of the step after `state`."""
    if state.step < options.warmup:
        return 0.0
    return state.selection[0] if options.adapt and state.selection else options.alpha


def prepare(cfg: RunConfig, engine: Engine, state: TrainState) -> None:
    """Before the step after `state`."""
    options = read(cfg.train.eslm)
    if options is not None and engine.stage.selection is not None:
        engine.stage.selection.set_alpha(alpha_of(options, state))


def follow(cfg: RunConfig, before: TrainState, after: TrainState, out: StepOutput) -> TrainState:
    """`after`, the position after a step that was taken, with what the next one leaves out."""
    options, loss = read(cfg.train.eslm), out.selected.get("selected_loss", math.nan)
    if options is None or not options.adapt or before.step < options.warmup or not (math.isfinite(loss) and loss > 0):
        return after
    return replace(after, selection=list(moved(options, before.selection, loss)))


def moved(options: Eslm, selection: list[float], loss: float) -> tuple[float, float]:
    """alpha and moving mean after a step with this mean loss of the selected tokens; `selection`: those before it."""
    if not selection:
        return options.alpha, loss
    alpha, before = selection
    mean = before + RATE * (loss - before)
    low, high = options.alpha_range
    return min(max(alpha * (before / mean) ** options.adapt, low), high), mean
