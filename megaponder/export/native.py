"""Tensors in transformers' own formats, to and from those of the modelling file."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from megaponder.errors import UserError
from megaponder.export.formats import Format, Layout
from megaponder.export.names import Tensors, fuse_qkv, split_qkv

_QKV = re.compile(r"(.+)\.self_attn\.([qkv])_proj\.(weight|bias)")
# buffers in old files: causal masks and rotary frequencies, recomputed by the model
IGNORED = re.compile(r".*(\.attention\.(bias|masked_bias)|\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)")


_POSITIONS = "model.embed_positions.weight"


def _fuse(layout: Layout, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    return fuse_qkv(q, k, v, heads, heads) if layout.fused == "heads" else torch.cat([q, k, v])


def _split(layout: Layout, fused: Tensor, heads: int) -> tuple[Tensor, ...]:
    return split_qkv(fused, heads, heads) if layout.fused == "heads" else fused.chunk(3)


def _rename(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def _is_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and "layers." in name


def to_native(plain: Tensors, form: Format, heads: int) -> Tensors:
    """Native tensors from plain ones; if q, k and v are fused, there are as many key/value heads as query heads."""
    if form.layout is None:
        return dict(plain)
    layout, fused = form.layout, {}
    for name, tensor in plain.items():
        match = _QKV.fullmatch(name)
        if not layout.fused:
            fused[name] = tensor
        elif match and match[2] == "q":
            k, v = (plain[f"{match[1]}.self_attn.{x}_proj.{match[3]}"] for x in "kv")
            fused[f"{match[1]}.self_attn.qkv.{match[3]}"] = _fuse(layout, tensor, k, v, heads)
        elif not match:
            fused[name] = tensor
    if layout.unused_positions:
        table = fused[_POSITIONS]
        fused[_POSITIONS] = torch.cat([table.new_zeros(layout.unused_positions, table.shape[1]), table])
    turned = {n: t.t() if layout.transposed and _is_matrix(n, t) else t for n, t in fused.items()}
    return {_rename(name, layout.names): tensor.contiguous() for name, tensor in turned.items()}


def without_buffers(native: Tensors) -> Tensors:
    """The parameters alone."""
    return {name: tensor for name, tensor in native.items() if not IGNORED.fullmatch(name)}


def from_native(native: Tensors, form: Format, heads: int) -> Tensors:
    """Plain tensors from native ones; buffers in old files are dropped."""
    native, layout = without_buffers(native), form.layout
    if prefix := layout.prefix if layout else "model.":
        known = (prefix, "lm_head.")
        native = {n if n.startswith(known) else f"{prefix}{n}": t for n, t in native.items()}
    if layout is None:
        return native
    back = {new: old for old, new in layout.names.items()}
    out = {}
    for raw, tensor in native.items():
        name = _rename(raw, back)
        turned = tensor.t() if layout.transposed and _is_matrix(name, tensor) else tensor
        if ".self_attn.qkv." in name:
            if turned.shape[0] % (3 * heads):
                raise UserError(f"{raw} has {turned.shape[0]} rows, which {heads} heads cannot share.")
            for letter, part in zip("qkv", _split(layout, turned, heads), strict=True):
                out[name.replace(".qkv.", f".{letter}_proj.")] = part
        else:
            out[name] = turned[layout.unused_positions :] if name == _POSITIONS else turned
    return {name: tensor.contiguous() for name, tensor in out.items()}
