"""What one layer costs: parameters, FLOPs and the bytes that a row keeps, by the features of the model section."""

from __future__ import annotations

from dataclasses import dataclass

from megaponder.config.model import ModelConfig
from megaponder.plan.depth_attention import mixing_bytes
from megaponder.plan.moe import kept_bytes, moe_parameters, row_elements


@dataclass(frozen=True)
class LayerParameters:
    """Numbers of parameters."""

    attention: int
    mlp: int
    norms: int
    experts: int = 0


def norm_parameters(model: ModelConfig, width: int) -> int:
    """A weight a channel, and in LayerNorm a bias."""
    return width if model.norm == "rmsnorm" else 2 * width


def _matrices(model: ModelConfig) -> tuple[int, int, int, int]:
    """Elements of the matrices: q, k and v; attention's output; the MLP's first one or two; its last."""
    assert model.hidden_size and model.ffn_size
    h, inner = model.hidden_size, (2 if model.gated else 1) * model.ffn_size
    return (model.query_width + 2 * model.key_width) * h, model.query_width * h, inner * h, model.ffn_size * h


def layer_parameters(model: ModelConfig, tensor: int = 1, shares: int = 1) -> LayerParameters:
    """On one of `tensor` ranks: matrices are split; norms and the biases after a reduction are not.

    Experts are split into `shares` shares of their own.
    """
    assert model.hidden_size and model.ffn_size
    h, (qkv, out, first, last) = model.hidden_size, _matrices(model)
    attention, mlp = (qkv + out) // tensor, (first + last) // tensor
    if model.qkv_bias:
        attention += (model.query_width + (2 if model.qkv_bias is True else 1) * model.key_width) // tensor
    norms = model.norms_per_layer * norm_parameters(model, h)
    if model.qk_norm == "head":
        norms += 2 * norm_parameters(model, model.head_size or 0)
    elif model.qk_norm == "all":
        norms += (model.query_width + model.key_width) // tensor
    if model.output_bias:
        attention += h
    if model.mlp_bias:
        mlp += (2 if model.gated else 1) * model.ffn_size // tensor + h
    if model.moe:
        mixture = moe_parameters(model, tensor, shares)
        return LayerParameters(attention, mixture.others, norms, mixture.experts)
    return LayerParameters(attention, mlp, norms)


def linear_flops(model: ModelConfig) -> float:
    """Of its matrices for one row, forward."""
    qkv, out, *mlp = _matrices(model)
    return 2.0 * (qkv + out + (row_elements(model) or sum(mlp)))


def unread_flops(model: ModelConfig) -> float:
    """What it skips for a row that only serves as a key: its output projection and MLP."""
    return linear_flops(model) - 2.0 * _matrices(model)[0]


def key_flops(model: ModelConfig) -> float:
    """Of attention for one row and one key that it sees, forward: the logit, and the value's share."""
    return 4.0 * model.query_width


def norm_bytes(model: ModelConfig, width: int, e: int, te: bool) -> float:
    """One norm of `width` channels keeps its input and its output, elements of `e` bytes."""
    if model.norm == "rmsnorm" and not te:  # the local RMSNorm keeps its FP32 input and the normed value besides
        return float(width * (4 + 2 * e))
    return float(2 * width * e)


def pre_norms_bytes(model: ModelConfig, e: int, te: bool) -> float:
    """What the norms before attention and MLP keep of one row."""
    h = model.hidden_size or 0
    shared = h * e if model.parallel_residual and (te or model.norm != "rmsnorm") else 0  # both norms have one input
    return 2 * norm_bytes(model, h, e, te) - shared


def norms_bytes(model: ModelConfig, e: int, te: bool) -> float:
    """What all norms of one row keep for the backward pass; they are split under sequence parallelism only."""
    kept, h = pre_norms_bytes(model, e, te), model.hidden_size or 0
    if model.norms_per_layer == 4:  # what comes out of the other two is added, or kept by the next norm
        kept += 2 * (norm_bytes(model, h, e, te) - h * e)
    return kept


def attention_bytes(model: ModelConfig, e: int, te: bool) -> float:
    """What one row keeps between the projections: q, k, v, and the input of the output projection."""
    kept = 4.0 * model.query_width * e  # with grouped queries, k and v are repeated for all heads
    width, grouped = model.query_width + model.key_width, model.key_width < model.query_width
    if model.qk_norm == "head":
        # their input: the projection's output, of which grouped queries are copied; the local RMSNorm's FP32 input and
        # normed value; what comes out of them is rotated and not kept
        copies = 3 if model.norm == "rmsnorm" and not te else 2 if grouped else 1
        kept += copies * width * e
    elif model.qk_norm == "all":
        kept += width * e  # their input
    elif model.qk_norm == "rotated":
        kept += width * 4  # the FP32 input
    if not grouped and (model.qk_norm == "all" or (model.qkv_bias == "qk" and model.qk_norm != "head")):
        kept += width * e  # v is a part of the projection's output, all of which stays
    return kept + mixing_bytes(model, e)


def mlp_bytes(model: ModelConfig, e: int, te: bool) -> float:
    """What one row keeps inside the MLP: SwiGLU's two inputs, an activation's one, and what the last layer reads.

    ReLU needs only its result.  Elements have `e` bytes.
    """
    assert model.ffn_size
    if (mixture := kept_bytes(model, e, te)) is not None:
        return mixture
    return float((3 if model.gated else 1 if model.activation == "relu" else 2) * model.ffn_size * e)
