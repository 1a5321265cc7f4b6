"""Attention of a pass over some rows of several sequences, against a plain sum over the keys that each row may read."""

from __future__ import annotations

import pytest
import torch

from megaponder.decoding.packed import packed
from megaponder.decoding.slots import Slots
from tests.tolerance import PARITY, difference

LENGTHS, GROUPS, SIZE = (9, 6, 7), 2, 4


@pytest.mark.parametrize("share", [1.0, 0.7, 0.3])
@pytest.mark.parametrize("window", [0, 3])
def test_rows_read_the_last_key_of_each_token_up_to_their_own(share: float, window: int) -> None:
    """Most rows stand at their tokens' places, causally, without a mask; few are packed and have one."""
    torch.manual_seed(0)
    seq = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
    token = torch.cat([torch.arange(n) for n in LENGTHS])
    store = Slots(len(LENGTHS), merge=False)
    store.extend(max(LENGTHS))
    goes_on = {1.0: token >= 0, 0.7: token % 3 != 0, 0.3: token % 3 == 1}[share]
    latest = {}
    for index, alive in enumerate((torch.ones_like(goes_on), goes_on)):
        s, t = seq[alive], token[alive]
        view = packed(store, 1, index, s, t, t).within(window)
        q, k, v = (torch.randn(1, GROUPS, len(s), SIZE, dtype=torch.float64) for _ in range(3))
        latest |= {(int(a), int(b)): (k[0, :, i], v[0, :, i]) for i, (a, b) in enumerate(zip(s, t, strict=True))}
        keys, values, *_ = view.join(0, k, v, ())
        mask = view.mask
        attend = torch.nn.functional.scaled_dot_product_attention
        out = view.collected(attend(view.spread(q), keys, values, attn_mask=mask, is_causal=mask is None))
        for i, (a, b) in enumerate(zip(s.tolist(), t.tolist(), strict=True)):
            seen = [latest[a, x] for x in range(max(0, b - window + 1) if window else 0, b + 1)]
            weights = (torch.stack([x for x, _ in seen], 1) @ q[0, :, i, :, None] * SIZE**-0.5).softmax(1)
            assert difference(out[0, :, i], (weights * torch.stack([x for _, x in seen], 1)).sum(1)) < PARITY
    assert window or (view.mask is None) == (share >= 0.7)
