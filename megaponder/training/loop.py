"""`train`: the door to the training loop, which is in `run`."""

from __future__ import annotations

import warnings

from megaponder.config.schema import RunConfig
from megaponder.engine import groups as process_groups
from megaponder.training import setup


def train(cfg: RunConfig) -> None:
    """Train as the configuration says, or continue the run in its folder.  Every rank of the world calls this.

    Returns when the budget is spent, or after saving when SIGTERM or SIGINT asked to stop.  Raises UserError for the
    user's mistakes, for a loss that is not finite and for a disk that is full; whole checkpoints stay as they are.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # deprecations of its own, and libraries it misses
    cfg = setup.complete(cfg)
    groups = process_groups.init(cfg)  # it also prepares a machine without a GPU for the first import of megatron-core
    from megaponder.training.run import run

    run(cfg, groups)
    # not after an error: a rank that fails alone must end at once instead of waiting for the others here
    process_groups.shutdown()
