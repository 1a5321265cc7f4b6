"""What a mixture of experts costs: parameters, and by row FLOPs and what the backward pass needs.

    parameters    E 3 H F  in experts, E H in each router, 3 H F_s in the shared expert
    active        k of the E experts
    FLOPs         2 (k 3 H F + E H + 3 H F_s) a row, forward

Rows are counted as if every expert got an equal number of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaponder.config.model import ModelConfig
from megaponder.decoding.moe_options import read


@dataclass(frozen=True)
class MoeParameters:
    """Of one layer; zeros without a mixture."""

    experts: int = 0
    others: int = 0
    """Routers and shared expert."""


def moe_parameters(model: ModelConfig, tensor: int = 1, shares: int = 1) -> MoeParameters:
    """On one of `tensor` ranks, of which each has one of `shares` shares of the experts."""
    o = read(model.moe)
    if o is None:
        return MoeParameters()
    assert model.hidden_size and model.ffn_size
    h = model.hidden_size
    others = o.router_count * o.experts * h + 3 * h * o.shared_ffn // tensor
    return MoeParameters(3 * h * model.ffn_size * o.experts // shares, others)


def inactive(model: ModelConfig) -> int:
    """Parameters of the whole model that a row does not use."""
    o = read(model.moe)
    if o is None:
        return 0
    unused = moe_parameters(model).experts // o.experts * (o.experts - o.top_k)
    return unused * (model.num_layers or 0)


def row_elements(model: ModelConfig) -> int | None:
    """Elements of the matrices that a row meets in place of an MLP's; None without a mixture."""
    o = read(model.moe)
    if o is None:
        return None
    assert model.hidden_size and model.ffn_size
    return model.hidden_size * (3 * (o.top_k * model.ffn_size + o.shared_ffn) + o.experts)


def kept_bytes(model: ModelConfig, e: int, te: bool) -> float | None:
    """Bytes that a row keeps inside of the mixture, elements of `e` bytes; None without one.

    An expert's copy of the row, gate and up, what they make, and the weight; PyTorch's layers keep each step between
    them, too.  The router keeps FP32 logits and scores, and a mask.
    """
    o = read(model.moe)
    if o is None:
        return None
    assert model.hidden_size and model.ffn_size
    widths, shared = (3, 3) if te else (6, 5)
    router = o.experts * ROUTER_BYTES + (0 if te or e == 4 else 4 * model.hidden_size)
    chosen = o.top_k * (model.hidden_size * e + widths * model.ffn_size * e + CHOICE_BYTES)
    return chosen + shared * o.shared_ffn * e + router


ROUTER_BYTES = 4 * 4
"""Of an expert in a row's logits, scores, weights and mask."""
CHOICE_BYTES = 24
"""Of a choice: its place before and after, as indices of 8 bytes, and its weight."""
