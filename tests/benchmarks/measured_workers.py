"""What the tests of `benchmarks.training` run in several processes."""

from __future__ import annotations

import datetime
import os
import time


def rows(fails: bool) -> list[bool]:
    """Two rows on two ranks: one that went well, and one that rank 1 failed in, or never came back from."""
    from benchmarks import training
    from megaponder.engine import groups

    rank = int(os.environ["RANK"])
    first = training.may_go_on(0, failed=False)
    if not fails:
        training.LOST = datetime.timedelta(seconds=1)
    if rank == 1 and not fails:
        time.sleep(600)
    said = [first, training.may_go_on(1, failed=rank == 1)]
    store = groups.shared_store()
    store.set(f"has read/{rank}", "yes")
    if rank == 0:  # it holds the store, which no launcher does here
        store.wait(["has read/1"], datetime.timedelta(seconds=300))
    return said
