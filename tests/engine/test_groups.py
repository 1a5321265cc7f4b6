"""Groups that somebody else destroyed are made anew."""

from __future__ import annotations

import torch.distributed as dist

from megaponder.engine import cuda_on_cpu
from tests.layouts.cases import Case, run_config
from tests.layouts.layouts import LAYOUTS

cuda_on_cpu.install()

from megaponder.engine import groups  # noqa: E402


def test_groups_that_another_library_destroyed_are_made_anew() -> None:
    cfg = run_config(Case("llama", "vanilla", {}), LAYOUTS["one-batch1"])
    before = groups.init(cfg).tp
    assert groups.init(cfg).tp is before, "one layout has one set of groups"
    dist.destroy_process_group()
    place = groups.init(cfg)
    assert place.tp is not before
    assert (place.pp_rank, dist.get_world_size(place.tp), dist.get_world_size(place.dp)) == (0, 1, 1)
    groups.shutdown()
