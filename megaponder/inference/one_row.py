"""The layers over one row each of several texts: as they are, compiled, or by kernels for one row alone.

Shapes: n rows, k keys, H hidden, N outputs, K inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import RMSNorm, feature, rotary_tables
from megaponder.decoding.passes import View
from megaponder.inference.fp8 import Linear8
from megaponder.inference.prompts import Beside


def has_kernels(model: Any) -> bool:
    """Whether `megaponder.inference.kernels` can run where the model is."""
    return model.device.type == "cuda" and importlib.util.find_spec("triton") is not None


def kernels() -> Any:
    """The module of kernels, which needs Triton."""
    return importlib.import_module("megaponder.inference.kernels")


@dataclass
class OneEach(View):
    """One row [1, n, H] of each of n texts, and where it reads and writes in one layer."""

    k: Tensor
    v: Tensor
    slots: Tensor
    """[n] new ones."""
    table: Tensor
    """[n, k] slots that each row may read, as far as `mask` [n, 1, 1, k] says."""

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.k.index_copy_(0, self.slots, k[0].transpose(0, 1))
        self.v.index_copy_(0, self.slots, v[0].transpose(0, 1))
        return self.k[self.table].transpose(1, 2), self.v[self.table].transpose(1, 2), k, v

    def spread(self, q: Tensor) -> Tensor:
        return q.transpose(0, 2)

    def collected(self, out: Tensor) -> Tensor:
        return out.transpose(0, 2)


@dataclass
class BySlot(OneEach):
    """The same by a kernel that reads keys where they lie."""

    attends: ClassVar[bool] = True

    def attend(self, module: Any, entry: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.mask is not None
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        out: Tensor = attention_by_slots(*rows, self.k, self.v, self.slots, self.table, self.mask[:, 0, 0])
        return out.transpose(0, 1)[None]


@torch.library.custom_op("megaponder::attention_by_slots", mutates_args=("keys", "values"))
def attention_by_slots(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot: Tensor, found: Tensor, mask: Tensor
) -> Tensor:
    """`kernels.attention` as one operation, which torch.compile does not look into."""
    out: Tensor = kernels().attention(q, k, v, keys, values, slot, found, mask)
    return out


@attention_by_slots.register_fake
def _(q: Tensor, *others: Tensor) -> Tensor:
    return q.new_empty(q.shape)


class Stack:
    """The layers of a model over one row of each text; compiled once for all, with their weights as arguments."""

    def __init__(self, model: Any, compiled: bool, kernels: bool):
        self.net, self.view = model.model, BySlot if kernels else OneEach
        self.weights = [dict([*layer.named_parameters(), *layer.named_buffers()]) for layer in self.net.layers]
        self.layer = self._layer if compiled else None
        self.one_row = OneRow(self.net) if kernels and OneRow.fits(self.net) else None
        if compiled:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            options: dict[str, Any] = {
                "coordinate_descent_tuning": True
            }  # a product with one row becomes a fused reduction
            self.layer = torch.compile(self._layer, options=options if model.device.type == "cuda" else None)

    @staticmethod
    def of(model: Any, compiled: bool, kernels: bool) -> Stack:
        """The model's own, so that it is compiled once however many batches are made."""
        if not compiled:
            return Stack(model, False, kernels)
        made = model.model.__dict__.setdefault("compiled_stacks", {})
        found: Stack | None = made.get(kernels)
        if found is None or (found.one_row is not None and not found.one_row.current()):
            found = made[kernels] = Stack(model, True, kernels)
        return found

    def _view(
        self, at: Tensor, k: Tensor, v: Tensor, slot: Tensor, found: Tensor, mask: Tensor, weight: Tensor | None
    ) -> OneEach:
        kind = self.view if weight is None else OneEach
        return kind(at[None], mask[:, None, None], weight, None, None, k, v, slot, found)

    def _layer(
        self, weights: dict[str, Tensor], x: Tensor, tables: Any, at: Tensor, k: Tensor, v: Tensor, *where: Any
    ) -> Tensor:
        args = (x, None, tables, self._view(at, k, v, *where), 0)
        out: Tensor = torch.func.functional_call(self.net.layers[0], weights, args)[0]
        return out

    def __call__(
        self,
        x: Tensor,
        at: Tensor,
        slots: Any,
        slot: Tensor,
        found: Tensor,
        mask: Tensor,
        weight: Tensor | None = None,
        beside: list[tuple[int, View]] | None = None,
    ) -> Tensor:
        """[r, H] of x [r, H] at positions `at` [r], without the final norm; `slots`: Pages.

        slot [n], found [n, k], mask: as in OneEach; weight [n, k] is added to the attention logits of these keys.
        beside: the rows after the first n, and what they read.
        """
        tables, where = rotary_tables(self.net.config, at[None], x.dtype), (slot, found, mask, weight)
        if self.one_row is not None and len(x) == 1 and weight is None:
            return self.one_row(x, tables, slots, slot, found, mask)
        x = x[None]
        for i, (layer, weights, k, v) in enumerate(
            zip(self.net.layers, self.weights, slots.keys, slots.values, strict=True)
        ):
            if self.layer is None:
                view: View = self._view(at, k, v, *where)
                if beside:
                    view = Beside(at[None], None, None, None, None, [(len(slot), view), *beside])
                x = layer(x, None, tables, view, i)[0]
            else:
                x = self.layer(weights, x, tables, at, k, v, *where)
        return x[0]


class Matrix(NamedTuple):
    """Weights [N, K] of linear layers side by side; in FP8 with a scale [N]."""

    weight: Tensor
    scale: Tensor | None


def joined(*linears: Any) -> Matrix:
    """Several linear layers' weights as one tensor, of which theirs become parts: nothing is held twice."""
    found: list[Tensor | None] = []
    for name, dim in (("weight", 0), ("scale", 1)):
        if not hasattr(linears[0], name):
            found.append(None)
            continue
        parts = [getattr(linear, name) for linear in linears]
        whole = parts[0].detach()
        if len(parts) > 1:
            whole = torch.cat([part.detach().view(torch.uint8) for part in parts], dim).view(parts[0].dtype)
            for part, piece in zip(parts, whole.split([part.shape[dim] for part in parts], dim), strict=True):
                part.data = piece
        found.append(whole)
    weight, scale = found
    assert weight is not None
    return Matrix(weight, None if scale is None else scale[0])


class OneRow:
    """The layers of a Llama over one row, in five kernels each."""

    def __init__(self, net: Any):
        self.net, c = net, net.config
        self.widths = [n * c.head_size for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
        self.matrices = [
            (
                joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                joined(layer.self_attn.o_proj),
                joined(layer.mlp.gate_proj, layer.mlp.up_proj),
                joined(layer.mlp.down_proj),
            )
            for layer in net.layers
        ]

    @staticmethod
    def fits(net: Any) -> bool:
        """Whether the layers are such: RMSNorm before each step, SwiGLU, no biases, nothing between."""
        c = net.config
        plain = feature(c, "qk_norm") == "none" and feature(c, "norm_placement") == "pre" and not c.parallel_residual
        if not plain or c.activation != "swiglu" or c.norm != "rmsnorm":
            return False
        if c.qkv_bias or c.output_bias or c.mlp_bias:
            return False
        layers = [m for layer in net.layers for m in layer.modules() if not list(m.children())]
        return all(type(m) in (nn.Linear, Linear8, RMSNorm, nn.Identity) for m in layers)

    def current(self) -> bool:
        """Whether the layers still have these weights, which a move elsewhere would have replaced."""
        first = self.net.layers[0].self_attn.q_proj.weight
        return bool(first.data_ptr() == self.matrices[0][0].weight.data_ptr())

    def __call__(self, x: Tensor, tables: Any, slots: Any, slot: Tensor, found: Tensor, mask: Tensor) -> Tensor:
        attention, product = kernels().attention, kernels().product
        row, eps, adjacent = x[0], self.net.config.norm_eps, feature(self.net.config, "rotary_pairs") == "adjacent"
        tables = None if tables is None else tuple(table[0, :, 0] for table in tables)
        size = self.net.config.head_size
        for i, (layer, (qkv, o, up, down)) in enumerate(zip(self.net.layers, self.matrices, strict=True)):
            gain = layer.input_layernorm.weight
            # what attention reads early must be there before the first kernel, so this one waits for all before it
            made = product(row, *qkv, gain=gain, eps=eps, early=i > 0)[None].split(self.widths, 1)
            q, k, v = (y.unflatten(1, (-1, size)) for y in made)
            where = (slots.keys[i], slots.values[i], slot, found, mask)
            row = product(attention(q, k, v, *where, tables, adjacent, early=True).flatten(), *o, rest=row)
            inner = product(row, *up, gain=layer.post_attention_layernorm.weight, eps=eps, gated=True)
            row = product(inner, *down, rest=row)
        return row[None]
