"""transformers' own formats of the three backbones: names and layouts to and from the plain ones.

llama is the plain format itself.  GPT-NeoX fuses q, k, v per head; GPT-2 fuses them whole, with matrices [in, out].
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaponder.export.names import Tensors, fuse_qkv, split_qkv

_QKV = re.compile(r"(.+)\.self_attn\.([qkv])_proj\.(weight|bias)")
# buffers of old files: causal masks and rotary frequencies, made anew by the model
IGNORED = re.compile(r".*(\.attention\.(bias|masked_bias)|\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)")

NEOX = {
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head.": "embed_out.",
    "model.layers.": "gpt_neox.layers.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.qkv.": ".attention.query_key_value.",
    ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}
GPT2 = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".self_attn.o_proj.": ".attn.c_proj.",
    ".self_attn.qkv.": ".attn.c_attn.",
    ".mlp.up_proj.": ".mlp.c_fc.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}


@dataclass(frozen=True)
class Format:
    """How a family's native format differs from the plain one."""

    names: dict[str, str]
    fuse: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    split: Callable[[Tensor, int], tuple[Tensor, ...]]
    transposed: bool = False
    """Layer matrices lie as [in, out]."""


_FORMATS = {
    "pythia": Format(
        NEOX,
        fuse=lambda q, k, v, heads: fuse_qkv(q, k, v, heads, heads),
        split=lambda fused, heads: split_qkv(fused, heads, heads),
    ),
    "gpt2": Format(
        GPT2,
        fuse=lambda q, k, v, heads: torch.cat([q, k, v]),
        split=lambda fused, heads: fused.chunk(3),
        transposed=True,
    ),
}


def _rename(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def _is_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and "layers." in name


def to_native(plain: Tensors, family: str, heads: int) -> Tensors:
    """Native tensors of plain ones; pythia and gpt2 need as many key/value heads as query heads."""
    if family == "llama":
        return dict(plain)
    form = _FORMATS[family]
    fused = {}
    for name, tensor in plain.items():
        match = _QKV.fullmatch(name)
        if match and match[2] == "q":
            k, v = (plain[f"{match[1]}.self_attn.{x}_proj.{match[3]}"] for x in "kv")
            fused[f"{match[1]}.self_attn.qkv.{match[3]}"] = form.fuse(tensor, k, v, heads)
        elif not match:
            fused[name] = tensor
    turned = {n: t.t() if form.transposed and _is_matrix(n, t) else t for n, t in fused.items()}
    return {_rename(name, form.names): tensor.contiguous() for name, tensor in turned.items()}


def from_native(native: Tensors, family: str, heads: int) -> Tensors:
    """Plain tensors of native ones; buffers of old files are left out."""
    native = {name: tensor for name, tensor in native.items() if not IGNORED.fullmatch(name)}
    if family == "llama":
        return native
    form = _FORMATS[family]
    if family == "gpt2":  # the first published GPT-2 files have no prefix
        native = {n if n.startswith(("transformer.", "lm_head.")) else f"transformer.{n}": t for n, t in native.items()}
    back = {new: old for old, new in form.names.items()}
    out = {}
    for raw, tensor in native.items():
        name = _rename(raw, back)
        turned = tensor.t() if form.transposed and _is_matrix(name, tensor) else tensor
        if ".self_attn.qkv." in name:
            for letter, part in zip("qkv", form.split(turned, heads), strict=True):
                out[name.replace(".qkv.", f".{letter}_proj.")] = part
        else:
            out[name] = turned
    return {name: tensor.contiguous() for name, tensor in out.items()}
