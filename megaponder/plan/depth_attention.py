"""What Depth-Attention adds to a layer: FLOPs and the bytes that a row keeps."""

from __future__ import annotations

from collections.abc import Sequence

from megaponder.config.method_facts import PassLike
from megaponder.config.model import ModelConfig
from megaponder.decoding.depth_sources import counted, read


def mixing_flops(model: ModelConfig, passes: Sequence[PassLike]) -> float:
    """Forward FLOPs per token of the last of these passes, which follow one another from the first of a step on.

    A row and each of m layers: a product of d channels for the score of each query (the mean of a group, or each head's
    own), and the share of its values: 2 (q + G) d m, with G key/value heads and q = G or all query heads.
    """
    depth = read(model.depth_attention)
    if depth is None:
        return 0.0
    assert model.num_layers
    *_, sources = counted(depth, model.num_layers, [p.layers for p in passes])
    mixed = sum(n + (depth.own == "softmax") for n in sources if n)
    queries = model.key_width if depth.query == "mean_query" else model.query_width
    return 2.0 * (queries + model.key_width) * mixed * passes[-1].slots


def mixing_bytes(model: ModelConfig, e: int) -> float:
    """What one row keeps of a layer beside what attention keeps, elements of e bytes."""
    depth = read(model.depth_attention)
    if depth is None:
        return 0.0
    own = depth.own == "softmax" or depth.values == "raw"  # values from before mixing
    grouped = model.key_width < model.query_width  # attention keeps copies for all heads
    return float((own + 2 * grouped) * model.key_width * e)


def made_bytes(model: ModelConfig, e: int) -> float:
    """What one row of a recomputed layer keeps for later layers: keys and values."""
    return 2.0 * model.key_width * e if model.depth_attention else 0.0
