"""Rules on the backbone alone."""

from __future__ import annotations

import math

from megaponder.config.fields import nearest
from megaponder.config.model import SCALINGS
from megaponder.config.rules.case import Case, Rule, nearest_divisor, nearest_multiple, require
from megaponder.config.rules.depth_attention import RULES as DEPTH_ATTENTION
from megaponder.config.rules.freqkv import RULES as FREQKV
from megaponder.config.rules.moe import RULES as MOE


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


def norms_fit(c: Case) -> None:
    """The norm of the stream has one sum to norm, and the one over all heads is an RMSNorm."""
    m = c.cfg.model
    rule, fix = "model.norm_placement = stream norms the sum of each step", "use false"
    wrong = m.norm_placement == "stream" and m.parallel_residual
    require(not wrong, "model.parallel_residual", m.parallel_residual, rule, fix)
    wrong = m.qk_norm == "all" and m.norm != "rmsnorm"
    require(not wrong, "model.qk_norm", m.qk_norm, f"it needs RMSNorm, but model.norm = {m.norm}", "use head")
    wrong = not m.norm_affine and m.norm == "rmsnorm"
    require(not wrong, "model.norm_affine", m.norm_affine, "RMSNorm always learns its weight", "use true")


def rotary_scaling_is_whole(c: Case) -> None:
    """A scaling of RoPE has the values of its type, all of them legal."""
    m = c.cfg.model
    values = dict(m.rotary_scaling or {})
    if not values:
        return
    field = "model.rotary_scaling"
    require(m.positions == "rotary", field, m.rotary_scaling, f"model.positions = {m.positions} does not rotate", "{}")
    kind = values.pop("rope_type", None)
    rule = f"its rope_type must be one of {', '.join(SCALINGS)}"
    require(isinstance(kind, str) and kind in SCALINGS, field, m.rotary_scaling, rule, "or use {}")
    needed, optional = SCALINGS[str(kind)]
    for name, value in values.items():  # before what is missing, which may be there misspelt
        known = (*needed, *optional)
        near = nearest(name, known)
        fix = f"did you mean {near}" if near else "take it out"
        require(name in known, f"{field}.{name}", value, f"{kind} has only {', '.join(known)}", fix)
    for name in needed:
        require(name in values, field, m.rotary_scaling, f"{kind} needs {name}", f"add {name}")
    for name, value in values.items():
        if name == "truncate":
            require(isinstance(value, bool), f"{field}.{name}", value, "it must be true or false", "use true")
            continue
        number = type(value) in (int, float) and 0 < value < math.inf
        require(number, f"{field}.{name}", value, "it must be a positive number", "use 1")
        least = value >= 1 or name not in ("factor", "original_max_position_embeddings")
        require(least, f"{field}.{name}", value, "it must be at least 1", "use 1")
    low, high = values.get("low_freq_factor", 0), values.get("high_freq_factor", 1)
    rule = f"it must be more than low_freq_factor = {low}"
    require(high > low, f"{field}.high_freq_factor", high, rule, f"use {4 * low}")
    turned = int((m.head_size or 0) * (m.rotary_fraction or 0))
    rule = "dynamic scaling needs at least 4 rotated channels"
    require(kind != "dynamic" or turned > 2, "model.rotary_fraction", m.rotary_fraction, rule, "rotate more, or use {}")


RULES: tuple[Rule, ...] = (
    heads_divide_hidden,
    kv_heads_divide_heads,
    rotary_dims_are_even,
    norms_fit,
    rotary_scaling_is_whole,
    *DEPTH_ATTENTION,
    *FREQKV,
    *MOE,
)
"""Without these a model cannot be built at all."""
