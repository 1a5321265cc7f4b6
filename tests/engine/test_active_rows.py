"""Gathering active rows and scattering them back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaponder.engine.active_rows import SIZES, Rows, places_for, unit_of


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 70), share=st.floats(0, 1))
def test_rows_come_back_where_they_were(seed: int, n: int, share: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    active, x = torch.rand(n, 3, generator=draw) < share, torch.randn(n, 3, 4, generator=draw)
    rows = Rows(active)
    assert rows.places >= int(active.sum(0).max()) and rows.places <= n
    assert rows.places % max(1, n // SIZES) == 0 or rows.covers_all
    old = torch.randn(n, 3, 4, generator=draw)
    got = rows.scatter(2 * rows.gather(x), old)
    assert torch.equal(got, torch.where(active[..., None], 2 * x, old))
    assert torch.equal(rows.scatter(rows.gather(x) + 1), torch.where(active[..., None], x + 1, 0.0))
    for b in range(3):  # active tokens come first and keep their order
        there = active[:, b].nonzero()[:, 0]
        assert torch.equal(rows.index[: len(there), b], there)


@given(sixteenths=st.integers(1, 300), b=st.sampled_from([1, 2, 3, 4, 6, 16]), share=st.floats(0, 1))
def test_rows_for_fp8_are_multiples_of_16(sixteenths: int, b: int, share: float) -> None:
    """A sequence length that the rule for FP8 allows, such as 272 with micro-batches of 1."""
    unit = unit_of(16, b)
    s = sixteenths * unit
    most = int(share * s)
    places = places_for(most, s, unit)
    assert places * b % 16 == 0 and most <= places <= s
    assert len({places_for(m, s, unit) for m in range(s + 1)}) < 2 * SIZES
    assert places_for(most, s, unit_of(1, b)) == places_for(most, s)
