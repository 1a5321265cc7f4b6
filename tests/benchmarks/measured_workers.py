"""What the tests of `benchmarks.training` run in several processes."""

from __future__ import annotations

import datetime
import os
import time


def rows(fails: bool) -> list[bool]:
    """Two rows on two ranks: one that went well, and one that rank 1 failed in, or never came back from."""
    from benchmarks import training

    training.LOST = datetime.timedelta(seconds=1)
    rank = int(os.environ["RANK"])
    first = training.may_go_on(0, failed=False)
    if rank == 1 and not fails:
        time.sleep(600)
    return [first, training.may_go_on(1, failed=rank == 1)]
