"""Before the first FP8 step: is the first batch's loss in FP8 close to its loss in BF16?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megaponder.config.schema import RunConfig
from megaponder.data.batch import MicroBatch
from megaponder.engine.step import Engine
from megaponder.errors import UserError
from megaponder.ranks import largest

FILLS = 2
"""Forward and backward runs that fill an empty amax history: the scales of the first are 1, and its gradients wrong."""


class Canary:
    """Checks once, before the first step after a start; does nothing in other precisions.

    Weights, data position and gradients stay as they are.
    """

    def __init__(self, cfg: RunConfig, engine: Engine, say: Callable[[str], None]):
        self._cfg, self._engine, self._say = cfg, engine, say
        self._checked = False

    def check(self, batches: Sequence[MicroBatch]) -> None:
        """UserError if the losses differ by more than precision.fp8_canary.

        All ranks call this with the batch of the next step.
        """
        self._checked = self._checked or check_fp8(self._cfg, self._engine, batches, self._say)


def check_fp8(cfg: RunConfig, engine: Engine, batches: Sequence[MicroBatch], say: Callable[[str], None]) -> bool:
    """UserError if the losses differ by more than precision.fp8_canary; does nothing in other precisions.

    Returns whether the check was made: False for a batch in which no target counts, which has no loss.
    All ranks call this with the batch of the next step; weights, data position and gradients stay as they are.
    """
    fp8 = engine.stage.fp8
    if fp8 is None:
        return True
    # a stage whose layers are all in BF16 lacks none, but must help those that do
    if largest(int(fp8.lacks_history), engine.groups.device):
        for _ in range(FILLS):
            engine.forward_backward(batches, 0, train=True)
        engine.zero_grad()
    bound = cfg.precision.fp8_canary
    if not bound:
        return True
    with fp8.off():
        out = engine.forward_backward(batches, 0, train=False)
    if not out.tokens:
        return False
    exact = out.loss
    rough = engine.forward_backward(batches, 0, train=False).loss
    apart = abs(rough - exact) / abs(exact)
    sentence = (
        f"the first batch's loss is {rough:.5g} in FP8 and {exact:.5g} in BF16, a relative difference of {apart:.2g}"
    )
    if not apart <= bound:  # neither is NaN
        raise UserError(
            f"precision.fp8 = {cfg.precision.fp8!r}: {sentence}, and precision.fp8_canary allows {bound}; keep the "
            "first and last layers in BF16 (precision.fp8_bf16_layers: 1), use another recipe, or none."
        )
    say(f"FP8 ({cfg.precision.fp8}): {sentence}.")
    return True
