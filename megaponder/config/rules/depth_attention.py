"""Rules on Depth-Attention: what its options may be, and which passes and stages it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from megaponder.config.rules.case import Case, Rule, nearest_divisor, require, require_number, require_option
from megaponder.config.schema import RunConfig
from megaponder.config.stages import stage_range
from megaponder.decoding.depth_sources import CHOICES, DepthAttention, counted, read

FIELD = "model.depth_attention"
KNOWN = tuple(f.name for f in fields(DepthAttention))


def depth_attention_is_whole(c: Case) -> None:
    """Each option of Depth-Attention is known and has a legal value."""
    given, layers = c.cfg.model.depth_attention or {}, c.cfg.model.num_layers or 1
    for name, value in given.items():
        field = f"{FIELD}.{name}"
        require_option(FIELD, name, value, KNOWN)
        if name in CHOICES:
            legal = CHOICES[name]
            require(value in legal, field, value, f"it must be {' or '.join(legal)}", f"use {legal[0]}")
        elif name == "sources":
            _sources(field, value, layers)
        elif name == "scale":
            number = type(value) in (int, float) and 0 <= value < math.inf
            require_number(
                number, field, value, "it must be a number of at least 0", "use 0.0, for 1 / sqrt(head size)"
            )
        elif name == "blocks":
            whole = type(value) is int and value >= 1
            require_number(whole, field, value, "it must be a whole number of at least 1", "use 1")
            fix = f"the nearest is {nearest_divisor(value, layers)}"
            require(layers % value == 0, field, value, f"it must divide model.num_layers = {layers}", fix)


def _sources(field: str, value: Any, layers: int) -> None:
    rule, fix = "it must be all, last:N, stride:N or a list of layers", "use all"
    if isinstance(value, list):
        numbers = value and all(type(i) is int for i in value)
        require(bool(numbers) and sorted(set(value)) == value, field, value, f"{rule} in ascending order", fix)
        rule = f"the layers are numbered from 0 to {layers - 1}"
        require(value[0] >= 0 and value[-1] < layers, field, value, rule, f"for example {[0, layers - 1]}")
        return
    kind, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    counted = kind in ("last", "stride") and number.isascii() and number.isdecimal() and 0 < int(number) < 10**6
    require(value == "all" or counted, field, value, rule, fix)


def depth_attention_fits_passes(c: Case) -> None:
    """Passes run the whole stack, and a layer of an earlier one has a value for the same row."""
    depth, facts = read(c.cfg.model.depth_attention), c.facts
    if depth is None or facts.max_passes == 1:
        return
    method, fix = c.cfg.ponder.method, "use within"
    rule = f"method {method} repeats a part of the stack, for which Depth-Attention is not built"
    require(facts.core is None, FIELD, c.cfg.model.depth_attention, rule, "use {}, or method loop")
    rule = f"in method {method} a token has other rows from pass to pass, so rows of earlier passes do not match"
    across = depth.passes == "across"
    require(not across or facts.max_slots == 1, f"{FIELD}.passes", depth.passes, rule, fix)
    rule = "with several blocks a layer sees its own block in its own pass only"
    require(not across or depth.blocks == 1, f"{FIELD}.passes", depth.passes, rule, fix)


def depth_attention_fits_stages(c: Case) -> None:
    """A message between stages has room for a fixed number of earlier layers, or for none where blocks end."""
    depth, pp, layers = read(c.cfg.model.depth_attention), c.cfg.parallel.pipeline, c.cfg.model.num_layers or 1
    if depth is None or pp == 1 or depth.last:
        return
    ends = [stage_range(c.cfg, stage).stop for stage in range(pp)]
    rule = (
        f"on {pp} pipeline stages a message would grow with the number of layers before it, unless sources are last:N "
        "or blocks end where stages do"
    )
    fix = f"use last:{layers // pp}, or parallel.pipeline: 1"
    cut = depth.passes == "within" or c.facts.max_passes == 1
    ok = cut and all(end % (layers // depth.blocks) == 0 for end in ends)
    require(ok, f"{FIELD}.sources", depth.sources, rule, fix)


def unreached_sources(cfg: RunConfig, parts: Sequence[tuple[int, int] | None]) -> str:
    """A sentence if no layer has a source, or `last:N` reaches further back than there are layers; empty otherwise.

    parts: the layers that each pass of a token runs, None where it is all of them."""
    depth, layers = read(cfg.model.depth_attention), cfg.model.num_layers or 1
    if depth is None:
        return ""
    every = replace(depth, sources="all")
    most = max((n for found in counted(every, layers, parts) for n in found), default=0)
    if not any(any(found) for found in counted(depth, layers, parts)):
        given = list(depth.sources) if isinstance(depth.sources, tuple) else depth.sources
        return f"{FIELD}: with sources {given} no layer has an earlier one to mix with, so the model is a plain one."
    if depth.last > most:
        return f"{FIELD}: no layer has more than {most} before it, so sources {depth.sources} are all of them."
    return ""


RULES: tuple[Rule, ...] = (depth_attention_is_whole, depth_attention_fits_passes)
"""Of the model; `depth_attention_fits_stages` belongs to the layout."""
