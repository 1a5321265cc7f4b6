"""Rules on the backbone alone."""

from __future__ import annotations

import math

from megaponder.config.rules.case import Case, Rule, nearest_divisor, nearest_multiple, require


def sizes_are_positive(c: Case) -> None:
    """A size counts something."""
    m = c.cfg.model
    for name in (
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "ffn_size",
        "vocab_multiple",
        "max_positions",
    ):
        value = getattr(m, name)
        if name == "head_size" and value is None:
            continue  # the next rule says why it has none
        require(value is not None and value >= 1, f"model.{name}", value, "it must be at least 1", "for example 1")
    require(
        m.vocab_size is None or m.vocab_size >= 2, "model.vocab_size", m.vocab_size, "it must be at least 2", "use 2"
    )


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
    assert m.head_size and m.rotary_fraction is not None and m.rotary_base is not None
    if m.positions != "rotary":
        return
    head = m.head_size
    require(0 < m.rotary_fraction <= 1, "model.rotary_fraction", m.rotary_fraction, "it lies in (0, 1]", "use 1.0")
    require(m.rotary_base > 0, "model.rotary_base", m.rotary_base, "it must be positive", "use 10000.0")
    exact = head * m.rotary_fraction
    dims = int(exact)
    near = min(head - head % 2, nearest_multiple(dims, 2)) / head
    rule = f"it must rotate an even number of the {head} channels of a head, not {exact:g}"
    fix = f"the nearest is {near:g}" if near else "use heads of at least 2 channels"
    whole = math.isclose(exact, dims, rel_tol=1e-6)
    require(whole and dims > 0 and dims % 2 == 0, "model.rotary_fraction", m.rotary_fraction, rule, fix)


def numbers_are_positive(c: Case) -> None:
    """Epsilon, standard deviation and scales."""
    m = c.cfg.model
    require(
        m.norm_eps is not None and m.norm_eps > 0, "model.norm_eps", m.norm_eps, "it must be positive", "use 1.0e-5"
    )
    require(m.init_std is None or m.init_std > 0, "model.init_std", m.init_std, "it must be positive", "use 0.02")
    for name in ("init_output_scale", "embedding_scale"):
        value = getattr(m, name)
        ok = isinstance(value, str) or value > 0
        require(ok, f"model.{name}", value, "it must be positive", "use auto")


SHAPES: tuple[Rule, ...] = (sizes_are_positive, heads_divide_hidden, kv_heads_divide_heads, rotary_dims_are_even)
"""Without these a model cannot be built at all."""
RULES: tuple[Rule, ...] = (
    *SHAPES,
    numbers_are_positive,
)
