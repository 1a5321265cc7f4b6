"""Embedding, layer stack and final norm, built from the features in the configuration.

Shapes: b batch, r rows, k keys, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaponder.decoding.configuration import MegaponderConfig
from megaponder.decoding.depth_attention import mix
from megaponder.decoding.depth_sources import read
from megaponder.decoding.moe import Mixture
from megaponder.decoding.moe_options import read as read_experts
from megaponder.decoding.passes import View
from megaponder.decoding.rotary import frequencies
from megaponder.decoding.wide import linear, wide  # noqa: F401  decoding forms find `linear` here, too


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in float32, rounded to the input's format, times a weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x, self.weight.shape, eps=self.eps)


def unit(x: Tensor) -> Tensor:
    """x / RMS(x) over the last dimension; the epsilon is that of x's format."""
    y = wide(x)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)).to(x.dtype)


LATER: dict[str, Any] = {
    "qk_norm": "none",
    "norm_placement": "pre",
    "norm_affine": True,
    "rotary_pairs": "halves",
    "rotary_scaling": {},
    "attention_window": 0,
    "depth_attention": {},
    "freqkv": {},
    "moe": {},
}
"""Features that an earlier version's config.json lacks, and what its models have."""


def feature(config: MegaponderConfig, name: str) -> Any:
    """The value of a later feature."""
    return getattr(config, name, LATER[name])


def make_norm(config: MegaponderConfig, width: int) -> nn.Module:
    """RMSNorm, or LayerNorm with bias."""
    if config.norm == "rmsnorm":
        return RMSNorm(width, config.norm_eps)
    return nn.LayerNorm(width, config.norm_eps, elementwise_affine=feature(config, "norm_affine"))


def rotary_tables(config: MegaponderConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin [b, r, 1, d] of the rotated part of a head, computed in float32; None for learned positions.

    The sine has the sign of what it multiplies in `rotate`.
    """
    size = int(config.head_size * config.rotary_fraction)
    if config.positions != "rotary" or size == 0:
        return None
    scaling, longest = feature(config, "rotary_scaling"), config.max_position_embeddings
    tokens = positions.max() + 1 if scaling.get("rope_type") == "dynamic" and positions.numel() else None
    inverse, factor = frequencies(size, config.rotary_base, scaling, longest, tokens, positions.device)
    angle = positions[..., None, None].float() * inverse
    cos, sin = factor * angle.cos(), factor * angle.sin()
    if feature(config, "rotary_pairs") == "adjacent":
        cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack([-sin, sin], dim=-1).flatten(-2)
    else:
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], adjacent: bool) -> Tensor:
    """Rotary embedding of the leading part of each head, of its halves or of neighbours; x [b, r, heads, head size], or
    with its dimensions in another order if the tables have the same."""
    cos, sin = tables
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = (slice(0, None, 2), slice(1, None, 2)) if adjacent else (slice(size // 2), slice(size // 2, None))
    out = turned * cos
    out[..., first].addcmul_(turned[..., second], sin[..., first])
    out[..., second].addcmul_(turned[..., first], sin[..., second])
    return torch.cat([out, rest], dim=-1) if rest.shape[-1] else out


def weigh(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with 8 more channels a head, through which q k^T scale gains `weight` [b, k]; v gains zeros.

    So fused kernels need no float mask.  In 16-bit formats the weight is split over three channels whose sum is exact
    to 24 bits.
    """
    rest, parts = weight / scale, []
    for _ in range(1 if k.dtype in (torch.float32, torch.float64) else 3):
        parts.append(rest.to(k.dtype))
        rest = rest - parts[-1]
    extra = F.pad(torch.stack(parts, dim=-1), (0, 8 - len(parts)))[:, None].expand(-1, k.shape[1], -1, -1)
    ones = F.pad(q.new_ones(len(parts)), (0, 8 - len(parts))).expand(*q.shape[:3], -1)
    return torch.cat([q, ones], dim=-1), torch.cat([k, extra], dim=-1), F.pad(v, (0, 8))


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, config: MegaponderConfig):
        super().__init__()
        self.config = config
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size, self.scaling = config.head_size, config.head_size**-0.5
        self.num_key_value_groups, self.is_causal = self.heads // self.groups, True  # read by attention functions
        width, bias = config.hidden_size, config.qkv_bias
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=bool(bias))
        self.k_proj = nn.Linear(width, self.groups * self.size, bias=bool(bias))
        self.v_proj = nn.Linear(width, self.groups * self.size, bias=bias is True)
        self.qk_norm, self.adjacent = feature(config, "qk_norm"), feature(config, "rotary_pairs") == "adjacent"
        counts = {"head": (1, 1), "all": (self.heads, self.groups)}.get(self.qk_norm, (0, 0))
        self.q_norm, self.k_norm = (make_norm(config, n * self.size) if n else nn.Identity() for n in counts)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=config.output_bias)
        self.depth = read(feature(config, "depth_attention"))

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        view: View,
        entry: int,
        before: tuple[Tensor, ...],
        sources: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Output [b, r, H]; keys and values of these rows; with Depth-Attention, those that later layers mix with."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if view.values is not None:
            v = view.values(entry, x, v)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.size)) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if tables is not None:  # as one tensor: where rows are few, the number of operations is what takes time
            turned = rotate(torch.cat([q, k], dim=2), tables, self.adjacent)
            q, k = turned.split([q.shape[2], k.shape[2]], dim=2)  # an engine's rank has some of the heads
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if self.qk_norm == "rotated":
            q, k = unit(q), unit(k)
        made: tuple[Tensor, ...] = ()
        if self.depth is not None:
            mixed = mix(self.depth, q, k, v, sources)
            made, v = (k, v if self.depth.values == "raw" else mixed), mixed
        out, k, v = self.read(view, entry, q, k, v, before)
        return self.o_proj(out.transpose(1, 2).flatten(2)), k, v, *made

    def read(
        self, view: View, entry: int, q: Tensor, k: Tensor, v: Tensor, before: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What rows [b, heads, r, d] read through a view; the keys and values that it makes of theirs."""
        if view.attends:
            return view.attend(self, entry, q, k, v), k, v
        k, v, own_k, own_v = view.join(entry, k, v, before)
        q, mask, weight = view.spread(q), view.mask, view.weight
        if not view.blocks or mask is None:
            return view.collected(self.softmax(q, k, v, mask, weight)), own_k, own_v
        out = [
            self.softmax(
                q[:, :, begin:end], k[:, :, :keys], v[:, :, :keys], mask[:, :, begin:end, :keys],
                None if weight is None else weight[:, :keys],
            )
            for begin, end, keys in view.blocks
        ]  # fmt: skip
        return view.collected(torch.cat(out, dim=2)), own_k, own_v

    def softmax(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weight: Tensor | None) -> Tensor:
        """[b, heads, r, d] of queries over keys and values [b, groups, k, d]; mask and weight: see `View`."""
        if self.groups != self.heads:
            k, v = (y.repeat_interleave(self.heads // self.groups, dim=1) for y in (k, v))
        attend = self._eager if self.config._attn_implementation == "eager" else self._fused
        return attend(q, k, v, mask, weight)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weight: Tensor | None) -> Tensor:
        scale, causal = self.size**-0.5, mask is None and q.shape[2] > 1
        if weight is not None:
            q, k, v = weigh(q, k, v, weight, scale)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        return out[..., : self.size]

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weight: Tensor | None) -> Tensor:
        scores = wide(q @ k.transpose(-1, -2)) * self.size**-0.5
        if weight is not None:
            scores = scores + weight[:, None, None]
        if mask is None and q.shape[2] > 1:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1).to(v.dtype) @ v


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class MLP(nn.Module):
    """SwiGLU, or two matrices with an activation in between."""

    def __init__(self, config: MegaponderConfig, inner: int):
        super().__init__()
        self.activation = config.activation
        width, bias = config.hidden_size, config.mlp_bias
        if self.activation == "swiglu":
            self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))


class Layer(nn.Module):
    """One block: two residual steps, or one parallel step."""

    def __init__(self, config: MegaponderConfig):
        super().__init__()
        self.parallel, self.placement = config.parallel_residual, feature(config, "norm_placement")
        before, after = self.placement != "post", self.placement != "pre"
        self.input_layernorm = self._norm(config, before)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = self._norm(config, before)
        experts, make, width = read_experts(feature(config, "moe")), partial(MLP, config), config.intermediate_size
        self.mlp = make(width) if experts is None else Mixture(experts, config.hidden_size, width, make)
        self.input_layernorm_2, self.post_attention_layernorm_2 = (self._norm(config, after) for _ in range(2))

    @staticmethod
    def _norm(config: MegaponderConfig, there: bool) -> nn.Module:
        return make_norm(config, config.hidden_size) if there else nn.Identity()

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        tables: tuple[Tensor, Tensor] | None,
        view: View,
        entry: int,
        *carried: Tensor,
        sources: int = 0,
        steps: Sequence[int] = (0,),
    ) -> tuple[Tensor, ...]:
        """Output [b, r, H]; keys and values of these rows; what later layers mix with.  `weight` is the view's.

        `carried`: keys and values that the view needs, then `sources` tensors of earlier layers.  `steps`: see `stack`.
        Tensors with gradients are arguments of their own, since that is where gradient checkpointing looks for them.
        """
        before, earlier = carried[: len(carried) - sources], carried[len(carried) - sources :]
        if weight is not None:
            view = replace(view, weight=weight)
        attended, *made = self.self_attn(self.input_layernorm(x), tables, view, entry, before, earlier)
        y = self._step(x, attended, self.input_layernorm_2)
        inner = self.post_attention_layernorm(x if self.parallel else y)
        out = self.mlp(inner, steps) if isinstance(self.mlp, Mixture) else self.mlp(inner)
        return self._step(y, out, self.post_attention_layernorm_2), *made

    def _step(self, x: Tensor, out: Tensor, norm: nn.Module) -> Tensor:
        return norm(x + out) if self.placement == "stream" else x + norm(out)


class Backbone(nn.Module):
    """Embedding, layer stack and final norm; methods decide how they are combined."""

    def __init__(self, config: MegaponderConfig, *given: Any):
        """`given`: what a further base class wants."""
        super().__init__(*given)
        self.config = config
        self.gradient_checkpointing = False
        self.states: list[Tensor] | None = None
        """What `stack` computes is collected here, if it is a list."""
        self.depth = read(feature(config, "depth_attention"))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = make_norm(config, config.hidden_size)

    def words(self, tokens: Tensor) -> Tensor:
        """Rows [b, n, H] of the table for ids [b, n]; rows that are given instead of ids stay."""
        return tokens if tokens.is_floating_point() else self.embed_tokens(tokens)

    def embed(self, words: Tensor, positions: Tensor, factor: float = 1.0) -> Tensor:
        """factor * scale * words (rows of the table), plus unscaled learned positions if the model has them."""
        x = words * (factor * self.config.embedding_scale)
        return x + self.embed_positions(positions) if self.config.positions == "learned" else x

    def seen(self, view: View, dtype: torch.dtype) -> View:
        """A view as layers read it: within the window, with the kind of mask that their attention takes."""
        view = view.within(feature(self.config, "attention_window"))
        return view if self.config._attn_implementation == "eager" else view.added(dtype)

    def stack(
        self,
        x: Tensor,
        index: int,
        view: View,
        kept: list[tuple[Tensor, ...]] | None = None,
        part: range | None = None,
        steps: Sequence[int] | None = None,
    ) -> Tensor:
        """Pass `index` of rows [b, r, H] through all layers, or those of a part, without the final norm.

        `index` says where keys and values are; `kept`, one tuple per layer, has those that `view` needs from earlier
        passes, and is updated in place.  `steps`: which steps of a token the rows are in turn, for routers that differ
        from step to step (`moe_options`): the pass, or slots; None: `index`.
        """
        steps = (index,) if steps is None else steps
        tables = rotary_tables(self.config, view.positions, x.dtype)
        view = self.seen(view, x.dtype)
        if self.states is not None:
            self.states.append(x)
        depth = self.depth
        earlier = view.of_all if depth is not None and depth.passes == "across" else []
        for i in range(len(self.layers)) if part is None else part:
            before = () if kept is None else kept[i]
            sources = [] if depth is None else [x for entry in depth.of(earlier) for x in entry]
            layer = partial(self.layers[i].__call__, sources=len(sources), steps=steps)
            args = (x, view.weight, tables, view, index * len(self.layers) + i, *before, *sources)
            if self.gradient_checkpointing and self.training:
                x, k, v, *made = self._gradient_checkpointing_func(layer, *args)  # type: ignore[operator]  # set by enable
            else:
                x, k, v, *made = layer(*args)
            if depth is not None:
                earlier[:] = depth.after(earlier, (made[0], made[1]), i, len(self.layers))
            if self.states is not None:
                self.states.append(x)
            if kept is not None:
                kept[i] = view.kept(before, k, v)
        return x
