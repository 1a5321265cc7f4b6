"""Rules on the backbone alone."""

from __future__ import annotations

import math

from megaponder.config.rules.case import Case, Rule, nearest_divisor, nearest_multiple, require


def heads_divide_hidden(c: Case) -> None:
    """Each head takes an equal part of the residual stream, unless its size is given."""
    m = c.cfg.model
    assert m.hidden_size and m.num_heads
    near = nearest_divisor(m.num_heads, m.hidden_size)
    rule = f"it must divide model.hidden_size = {m.hidden_size}"
    fix = f"the nearest is {near}; or give model.head_size"
    require(m.head_size is not None, "model.num_heads", m.num_heads, rule, fix)


def kv_heads_divide_heads(c: Case) -> None:
    """Each key/value head serves an equal group of query heads."""
    m = c.cfg.model
    assert m.num_heads and m.num_kv_heads
    near = nearest_divisor(m.num_kv_heads, m.num_heads)
    rule = f"it must divide model.num_heads = {m.num_heads}"
    require(m.num_heads % m.num_kv_heads == 0, "model.num_kv_heads", m.num_kv_heads, rule, f"the nearest is {near}")


def rotary_dims_are_even(c: Case) -> None:
    """RoPE rotates pairs of channels."""
    m = c.cfg.model
    assert m.head_size and m.rotary_fraction is not None
    if m.positions != "rotary":
        return
    head = m.head_size
    exact = head * m.rotary_fraction
    dims = int(exact)
    near = min(head - head % 2, nearest_multiple(dims, 2)) / head
    rule = f"it must rotate an even number of the {head} channels of a head, not {exact:g}"
    fix = f"the nearest is {near:g}" if near else "use heads of at least 2 channels"
    whole = math.isclose(exact, dims, rel_tol=1e-6)
    require(whole and dims > 0 and dims % 2 == 0, "model.rotary_fraction", m.rotary_fraction, rule, fix)


RULES: tuple[Rule, ...] = (heads_divide_hidden, kv_heads_divide_heads, rotary_dims_are_even)
"""Without these a model cannot be built at all."""
