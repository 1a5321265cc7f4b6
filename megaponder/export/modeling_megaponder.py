"""Pondering language models for `transformers`: one self-contained file, loaded with `trust_remote_code=True`.

A pondering model runs its layer stack several times before it emits a token.  One traversal of the stack is a *pass*; a
token takes part in a pass with one or more *slots* (rows, token-major: row = token * slots + slot; all slots of a token
share its position).  A method is a class below that says which passes run and what enters and leaves them:

    vanilla        one pass
    loop           extra_passes + 1 passes, no norm in between                           (weight-shared looped stack)
    pause          one pass of pauses + 1 slots, read out at the last slot               (pause tokens)
    ponderlm       steps + 1 passes, E <- E + softmax(N(h) Wo^T) (c We) in between       (PonderLM, arXiv 2505.20674)
    ponderlm2      latents more slots a token, each the state of the slot before it      (PonderLM-2, arXiv 2509.23184)
    ponderlm3      ponderlm2 with a router that grants each token its number of latents  (PonderLM-3, arXiv 2603.02023)
    adaponderlm    ponderlm whose tokens halt when a gate says so                        (AdaPonderLM, arXiv 2603.01914)
    adaptive_cot   latent steps, as many as each token's router continues                (arXiv 2602.08220)

Decoding with the cache is the same function as a forward over the whole text, up to rounding:

* vanilla, loop, pause, ponderlm, adaponderlm and adaptive_cot: always.
* ponderlm2 and ponderlm3: a token's latents are defined by a recursion over slots, which decoding runs as it is.  A
  forward over many tokens solves it by parallel (Jacobi) refinements.  `forward(jacobi=None)`, the default, does what
  training does: a fixed number of them, and in ponderlm3 soft weights instead of pruning.  That is an approximation of
  the recursion, as good as training made it converge.  `forward(jacobi="converge")` refines until nothing moves any
  more and prunes as decoding does: the recursion itself.  `generate` takes `config.prefill_jacobi`, "converge" unless
  set to a number of refinements.

Shapes: b batch, n tokens of this call, r = n * slots rows, t tokens cached before, k keys, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers calls the cache of an output "cache" since 5.2x and "past_key_values" before
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class MegaponderConfig(PreTrainedConfig):
    """Backbone (family and shape), pondering method and its options.

    prefill_jacobi: refinements of a prompt in `generate` (ponderlm2, ponderlm3), or "converge".
    """

    model_type = "megaponder"
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    def __init__(
        self,
        family: str = "pythia",
        method: str = "vanilla",
        method_options: dict[str, Any] | None = None,
        vocab_size: int = 50304,
        hidden_size: int = 512,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        intermediate_size: int = 2048,
        max_position_embeddings: int = 2048,
        norm_eps: float = 1e-5,
        rotary_fraction: float = 0.25,
        rotary_base: float = 10000.0,
        parallel_residual: bool = True,
        embedding_scale: float = 1.0,
        prefill_jacobi: int | str = "converge",
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ):
        self.family = family
        self.method = method
        self.method_options = dict(method_options or {})
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.norm_eps = norm_eps
        self.rotary_fraction = rotary_fraction
        self.rotary_base = rotary_base
        self.parallel_residual = parallel_residual
        self.embedding_scale = embedding_scale
        self.prefill_jacobi = prefill_jacobi
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(**kwargs)
        # set after the base class, whose signature for these differs between releases
        self.tie_word_embeddings = tie_word_embeddings
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id


# ---------------------------------------------------------------------------------------------------------------- cache
@dataclass
class Rows:
    """What the rows of one pass in the cache are; the same in all layers."""

    token: Tensor
    """[r] the token that each row belongs to; never falls."""
    alive: Tensor | None = None
    """[b, r] False where a row is there only for other sequences of the batch; None: all alive."""
    weight: Tensor | None = None
    """[b, r] added to the attention logits of the row's key; None: 0."""

    def joined(self, new: Rows) -> Rows:
        """These rows and then the new ones."""
        return Rows(
            torch.cat([self.token, new.token]),
            _joined(self.alive, new.alive, self.token, new.token, True),
            _joined(self.weight, new.weight, self.token, new.token, 0.0),
        )

    def at(self, rows: slice | Tensor) -> Rows:
        """Some of the rows."""
        return Rows(self.token[rows], *(None if x is None else x[:, rows] for x in (self.alive, self.weight)))

    def over_batch(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """The rows of another batch, made by `change` [b, r] -> [b', r]."""
        return Rows(self.token, *(None if x is None else change(x) for x in (self.alive, self.weight)))


def _joined(a: Tensor | None, b: Tensor | None, rows_a: Tensor, rows_b: Tensor, absent: float) -> Tensor | None:
    """[b, r + r'] where either half may be absent."""
    there = a if a is not None else b
    if there is None:
        return None
    halves = ((a, rows_a), (b, rows_b))
    return torch.cat(
        [there.new_full((there.shape[0], len(rows)), absent) if x is None else x for x, rows in halves], dim=1
    )


class PonderCache(Cache):
    """Keys and values of every pass: entry `pass * layers + layer`.

    A pass may hold any number of rows for a token: slots, or none where no sequence of the batch took it.  `rows` tells
    which; the length is counted in tokens, as `generate` expects.  Beam reordering and cropping act on all of it.
    """

    def __init__(self, layers: int):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.layers_a_pass = layers
        self.tokens = 0
        self.rows: dict[int, Rows] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def add(self, index: int, new: Rows) -> Rows:
        """Announce rows that pass `index` is about to store; returns all rows of that pass."""
        self.rows[index] = self.rows[index].joined(new) if index in self.rows else new
        return self.rows[index]

    def retain(self, index: int, rows: slice | Tensor) -> None:
        """Keep only these rows of a pass."""
        self.rows[index] = self.rows[index].at(rows)
        first = index * self.layers_a_pass
        for i in range(first, first + self.layers_a_pass):
            keys, values = self.layers[i].keys[:, :, rows], self.layers[i].values[:, :, rows]
            self.layers[i] = DynamicLayer()  # without rows it must forget the batch size
            if keys.shape[2]:
                self.layers[i].update(keys, values)
        if not len(self.rows[index].token):
            del self.rows[index]

    def drop_dead(self, index: int) -> None:
        """Forget the rows of a pass that no sequence of the batch took."""
        alive = self.rows[index].alive
        if alive is not None and not alive.all():
            self.retain(index, alive.any(0).nonzero()[:, 0])
            if index in self.rows and self.rows[index].alive.all():  # type: ignore[union-attr]
                self.rows[index].alive = None

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` tokens; a negative number removes as many."""
        tokens = tokens if tokens >= 0 else max(0, self.tokens + tokens)
        for index, rows in list(self.rows.items()):
            if tokens < self.tokens:
                self.retain(index, slice(int((rows.token < tokens).sum())))
        self.tokens = min(tokens, self.tokens)

    def reset(self) -> None:
        self.layers.clear()
        self.rows.clear()
        self.tokens = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._over_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._over_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._over_batch(lambda x: x[indices])

    def _over_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rows = {index: rows.over_batch(change) for index, rows in self.rows.items()}


# ---------------------------------------------------------------------------------------------------- what a pass reads
@dataclass
class View:
    """What the rows of one pass read: a mask and weights over keys, and where the keys come from."""

    positions: Tensor
    """[b, r] RoPE positions of the rows."""
    mask: Tensor | None
    """[1 or b, 1, r, k] True where a row may read a key; None: plain causal, or one row that reads everything."""
    weight: Tensor | None
    """[b, k] added to the logits of each key; None: 0."""
    cache: PonderCache | None

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(keys, values that all rows read; keys, values of the new rows alone), each [b, groups, k or r, d].

        `before`: keys and values of the new rows in earlier passes of this layer, as far as the method keeps them.
        """
        return (*(self.cache.update(k, v, entry) if self.cache is not None else (k, v)), k, v)

    def kept(self, before: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """`before` of the next pass."""
        return k, v


@dataclass
class Aligned(View):
    """Rows that are not active have the keys and values that they had in the pass before."""

    active: Tensor | None = None
    """[b, r]; None in the first pass."""

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.active is not None:
            active = self.active[:, None, :, None]
            k, v = torch.where(active, k, before[0]), torch.where(active, v, before[1])
        return super().join(entry, k, v, before)


@dataclass
class Union(View):
    """Rows read the keys of all passes up to their own."""

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.cache is None:
            keys, values = [*before[0::2], k], [*before[1::2], v]
        else:
            self.cache.update(k, v, entry)
            step = self.cache.layers_a_pass
            layers = self.cache.layers[entry % step : entry + 1 : step]
            keys, values = [x.keys for x in layers], [x.values for x in layers]
        return torch.cat(keys, dim=2), torch.cat(values, dim=2), k, v

    def kept(self, before: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return () if self.cache is not None else (*before, k, v)


@dataclass
class Run:
    """What all passes of one forward share."""

    positions: Tensor
    """[b, n] RoPE positions (or rows of the position table) of the new tokens."""
    keep: Tensor | None
    """[b, t + n] True at real tokens; None: no padding."""
    cache: PonderCache | None
    past: int
    """t: tokens that the cache held when this forward began."""
    jacobi: int | str | None = None
    """Refinements of ponderlm2 and ponderlm3; None: as in training."""
    rows: dict[int, Rows] = field(default_factory=dict)
    """By pass: all rows that were stored, with those of this forward."""

    @property
    def real(self) -> Tensor:
        """[b, n] True at the new tokens that are no padding."""
        everyone = torch.ones_like(self.positions, dtype=torch.bool)
        return everyone if self.keep is None else self.keep[:, self.past :]

    def single(self, i: int) -> Run:
        """New token i alone, when those before it are in the cache."""
        end = self.past + i + 1
        keep = None if self.keep is None else self.keep[:, :end]
        return Run(self.positions[:, i : i + 1], keep, self.cache, end - 1, self.jacobi)

    def add(self, index: int, slots: int = 1, alive: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Announce the rows of pass `index`, alive and weight [b, r]; returns their tokens [r]."""
        token = self.past + torch.arange(self.positions.shape[1], device=self.positions.device)
        # without dead rows there is no need of a mask
        new = Rows(token.repeat_interleave(slots), None if alive is None or alive.all() else alive, weight)
        self.rows[index] = new if self.cache is None else self.cache.add(index, new)
        return new.token

    def view(self, index: int = 0, slots: int = 1, alive: Tensor | None = None, weight: Tensor | None = None) -> View:
        """A pass whose rows read the rows of the same pass, themselves and those before."""
        self.add(index, slots, alive, weight)
        positions = self.positions.repeat_interleave(slots, dim=1)
        return View(positions, self._mask(index, slots), self.rows[index].weight, self.cache)

    def draft(self, slots: int, alive: Tensor | None = None, weight: Tensor | None = None) -> View:
        """A pass over whole sequences that leaves nothing in the cache, which is empty."""
        return replace(self, cache=None, rows={}).view(0, slots, alive, weight)

    def aligned(self, index: int, active: Tensor | None) -> Aligned:
        """A pass in which only the active tokens [b, n] get new keys and values."""
        self.add(index)
        return Aligned(self.positions, self._mask(index, 1), None, self.cache, active)

    def union(self, index: int, alive: Tensor | None) -> Union:
        """A pass whose rows read all living rows of passes 0 .. index of their token and those before."""
        token = self.add(index, 1, alive)
        seen = [self.rows[i] for i in range(index + 1)]
        keys = torch.cat([rows.token for rows in seen])
        return Union(self.positions, readable(token, keys, self._there(seen)), None, self.cache)

    def copy(self, index: int, kept: list[tuple[Tensor, ...]]) -> None:
        """Store keys and values of every layer, unchanged, as those of pass `index`."""
        if self.cache is not None:
            self.add(index)
            for i, (k, v) in enumerate(kept):
                self.cache.update(k, v, index * len(kept) + i)

    def _mask(self, index: int, slots: int) -> Tensor | None:
        order = torch.arange(len(self.rows[index].token), device=self.positions.device)
        return readable(order[-self.positions.shape[1] * slots :], order, self._there([self.rows[index]]))

    def _there(self, seen: list[Rows]) -> Tensor | None:
        """[b, k] True at keys that exist: of real tokens, alive; None: all of them."""
        there = None if self.keep is None else torch.cat([self.keep[:, rows.token] for rows in seen], dim=1)
        if any(rows.alive is not None for rows in seen):
            b = self.positions.shape[0]
            alive = [r.token.new_ones(b, len(r.token)).bool() if r.alive is None else r.alive for r in seen]
            there = torch.cat(alive, dim=1) if there is None else there & torch.cat(alive, dim=1)
        return there


def readable(query: Tensor, key: Tensor, there: Tensor | None) -> Tensor | None:
    """The mask of a `View`: rows of order `query` [r] read the keys of order `key` [k] <= it if `there` [b, k]."""
    if there is None and (len(query) == 1 or len(query) == len(key)):
        return None
    mask = (key <= query[:, None])[None]
    if there is not None:
        # a row that is not there still reads itself: its result is never used, but a softmax over nothing would be NaN
        mask = (mask & there[:, None]) | (key == query[:, None])
    return mask[:, None]


# ------------------------------------------------------------------------------------------------------------- backbone
def wide(x: Tensor) -> Tensor:
    """In float32, unless x is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in float32, rounded to the input's format, times a weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x)
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def make_norm(config: MegaponderConfig) -> nn.Module:
    """RMSNorm for llama, LayerNorm with bias for the others."""
    cls = RMSNorm if config.family == "llama" else nn.LayerNorm
    return cls(config.hidden_size, eps=config.norm_eps)


def rotary_tables(config: MegaponderConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin [b, 1, r, d] of the rotated part of a head, computed in float32; None for learned positions."""
    size = int(config.hidden_size // config.num_attention_heads * config.rotary_fraction)
    if config.family == "gpt2" or size == 0:
        return None
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    angle = positions[:, None, :, None].float() / config.rotary_base**exponent
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotary embedding of the leading part of each head; x [b, heads, r, head size]."""
    if tables is None:
        return x
    cos, sin = tables
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def weigh(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with 8 more channels a head, by which q k^T scale gains `weight` [b, k]; v gains zeros.

    So fused kernels need no mask of floats.  In 16 bits the weight goes into three channels whose sum is exact to 24.
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
        self.size = config.hidden_size // self.heads
        width, bias = config.hidden_size, config.family != "llama"
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(width, self.groups * self.size, bias=bias)
        self.v_proj = nn.Linear(width, self.groups * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        view: View,
        entry: int,
        before: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [b, r, H]; keys and values of these rows."""
        b, rows, _ = x.shape
        q, k, v = (
            proj(x).view(b, rows, -1, self.size).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, tables), rotate(k, tables)
        k, v, own_k, own_v = view.join(entry, k, v, before)
        if self.groups != self.heads:
            k, v = (y.repeat_interleave(self.heads // self.groups, dim=1) for y in (k, v))
        attend = self._eager if self.config._attn_implementation == "eager" else self._fused
        out = attend(q, k, v, view.mask, view.weight)
        return self.o_proj(out.transpose(1, 2).reshape(b, rows, -1)), own_k, own_v

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


class MLP(nn.Module):
    """SwiGLU (llama), or two biased matrices with exact GELU (pythia) or tanh GELU (gpt2) in between."""

    def __init__(self, config: MegaponderConfig):
        super().__init__()
        self.family = config.family
        width, inner, bias = config.hidden_size, config.intermediate_size, config.family != "llama"
        if self.family == "llama":
            self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.family == "llama":
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh" if self.family == "gpt2" else "none"))


class Layer(nn.Module):
    """One pre-norm block: two residual steps, or one parallel step where the config says so (pythia)."""

    def __init__(self, config: MegaponderConfig):
        super().__init__()
        self.parallel = config.family == "pythia" and config.parallel_residual
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor] | None, view: View, entry: int, *before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [b, r, H]; keys and values of these rows."""
        attended, k, v = self.self_attn(self.input_layernorm(x), tables, view, entry, before)
        if self.parallel:
            return x + attended + self.mlp(self.post_attention_layernorm(x)), k, v
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Backbone(nn.Module):
    """Embedding, layer stack and final norm; methods decide how they are put together."""

    def __init__(self, config: MegaponderConfig):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.family == "gpt2":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = make_norm(config)

    def embed(self, words: Tensor, positions: Tensor, factor: float = 1.0) -> Tensor:
        """factor * scale * words (rows of the table), plus unscaled learned positions where the family has them."""
        x = words * (factor * self.config.embedding_scale)
        return x + self.embed_positions(positions) if self.config.family == "gpt2" else x

    def stack(self, x: Tensor, index: int, view: View, kept: list[tuple[Tensor, ...]] | None = None) -> Tensor:
        """Pass `index` of rows [b, r, H] through all layers, without the final norm.

        `kept`, one tuple a layer: the keys and values that `view` needs of earlier passes; brought up to date.
        """
        tables = rotary_tables(self.config, view.positions, x.dtype)
        for i, layer in enumerate(self.layers):
            before = () if kept is None else kept[i]
            args = (x, tables, view, index * len(self.layers) + i, *before)
            if self.gradient_checkpointing and self.training:
                x, k, v = self._gradient_checkpointing_func(layer.__call__, *args)  # type: ignore[operator]  # set by enable
            else:
                x, k, v = layer(*args)
            if kept is not None:
                kept[i] = view.kept(before, k, v)
        return x


# -------------------------------------------------------------------------------------------------------------- methods
class Vanilla:
    """One pass.  Base of the methods: `hidden` gives one final-normed row a token, ready for the head."""

    defaults: ClassVar[dict[str, Any]] = {}
    """Options and their defaults."""
    training_only: ClassVar[tuple[str, ...]] = ()
    """Options without effect here."""

    def __init__(self, config: MegaponderConfig):
        given = {name: value for name, value in config.method_options.items() if name not in self.training_only}
        if unknown := set(given) - set(self.defaults):
            raise ValueError(f"method {config.method} has no option {sorted(unknown)}; it has {sorted(self.defaults)}")
        self.config = config
        self.options = {**self.defaults, **given}

    def modules(self) -> dict[str, nn.Module]:
        """Parameters of the method's own, saved under `method.`."""
        return {}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        """[b, n, H] for ids [b, n]."""
        net = model.model
        return net.norm(net.stack(net.embed(net.embed_tokens(ids), run.positions), 0, run.view()))

    def mixture(self, model: MegaponderForCausalLM, h: Tensor) -> Tensor:
        """softmax(h Wo^T) (c We) over the vocabulary, or over every token as likely as the topk-th."""
        logits = wide(model.lm_head(h))
        if 0 < self.options["topk"] < logits.shape[-1]:
            least = logits.topk(self.options["topk"], dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return (logits.softmax(-1).to(h.dtype) @ model.model.embed_tokens.weight) * self.config.embedding_scale


class Loop(Vanilla):
    """The stack runs extra_passes + 1 times; there is no norm and no new embedding in between."""

    defaults: ClassVar[dict[str, Any]] = {"extra_passes": 3}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        net = model.model
        x = net.embed(net.embed_tokens(ids), run.positions)
        for index in range(self.options["extra_passes"] + 1):
            x = net.stack(x, index, run.view(index))
        return net.norm(x)


class Pause(Vanilla):
    """Each token is followed by `pauses` pause tokens at its position; the last one is read out.

    The pause token is a row of the table, or a row of its own where its id lies beyond the vocabulary.
    """

    defaults: ClassVar[dict[str, Any]] = {"pauses": 3, "pause_token_id": 50288}

    def modules(self) -> dict[str, nn.Module]:
        beyond = self.options["pause_token_id"] >= self.config.vocab_size
        return {"pause": nn.Embedding(1, self.config.hidden_size)} if beyond else {}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        net, slots, pause = model.model, self.options["pauses"] + 1, self.options["pause_token_id"]
        own = "pause" in model.method
        row = model.method["pause"](ids.new_zeros(())) if own else net.embed_tokens.weight[pause]
        pauses = row.expand(*ids.shape, slots - 1, -1)
        words = torch.cat([net.embed_tokens(ids)[:, :, None], pauses], dim=2).flatten(1, 2)
        view = run.view(0, slots)
        x = net.stack(net.embed(words, view.positions), 0, view)
        return net.norm(x[:, slots - 1 :: slots])


class PonderLM(Vanilla):
    """Between two passes every token's embedding takes up the expected embedding of its next token."""

    defaults: ClassVar[dict[str, Any]] = {"steps": 3, "topk": 0, "multiply_by_steps": False}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        net, steps = model.model, self.options["steps"]
        factor = steps if self.options["multiply_by_steps"] else 1
        x = net.embed(net.embed_tokens(ids), run.positions, factor)
        for index in range(steps):
            x = x + self.mixture(model, net.norm(net.stack(x, index, run.view(index))))
        return net.norm(net.stack(x, steps, run.view(steps)))


class PonderLM2(Vanilla):
    """Slots 0 .. K of a token: its embedding, then its latents; latent k + 1 is the output at slot k (the expected
    embedding of the next token with `softmax_feedback`); slot K is read out.

    Every slot reads all slots before it, so this is a recursion over slots.  Decoding runs it (exact given the cache),
    one row after the other.  Whole sequences run K passes of 1 .. K slots, then Jacobi refinements of all slots, then
    the pass that is read out and stored.  Each pass makes one more slot exact, so n K - K refinements are always
    enough; models that were trained so need few.
    """

    defaults: ClassVar[dict[str, Any]] = {"latents": 1, "jacobi": 3, "softmax_feedback": False, "topk": 0}
    training_only: ClassVar[tuple[str, ...]] = ("jacobi_from", "jacobi_to")

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        words = model.model.embed(model.model.embed_tokens(ids), run.positions)
        if run.past == 0:
            return self._sequences(model, words, run)
        rows = [self._token(model, words[:, i : i + 1], run.single(i)) for i in range(words.shape[1])]
        return torch.cat(rows, dim=1)

    def feed(self, model: MegaponderForCausalLM, h: Tensor) -> Tensor:
        """What the state of a slot puts into the next one."""
        return self.mixture(model, h) if self.options["softmax_feedback"] else h

    def route(self, model: MegaponderForCausalLM, h: Tensor) -> Tensor | None:
        """Router logits [b, n, K + 1] of the states of slot 0 [b, n, H]; None: all latents count fully."""
        return None

    def weights(self, a: Tensor | None, slots: slice, hard: bool) -> dict[str, Any]:
        """`weight` and `alive` of the rows of some slots, [b, rows]."""
        return {}

    def readout(self, h: Tensor, a: Tensor | None, hard: bool) -> Tensor:
        """[b, n, H] of the states of the slots [b, n, slots, H]."""
        return h[:, :, -1]

    def _sequences(self, model: MegaponderForCausalLM, words: Tensor, run: Run) -> Tensor:
        net, most, hard = model.model, self.options["latents"], run.jacobi is not None
        converge = run.jacobi == "converge"
        refine: Any = self.options["jacobi"] if run.jacobi is None else run.jacobi
        if converge:
            refine = words.shape[1] * most - most
        stages, a = [words], None

        def states(view: Callable[..., View]) -> Tensor:
            slots = len(stages)
            rows = torch.stack(stages, dim=2).flatten(1, 2)
            return net.norm(net.stack(rows, 0, view(slots=slots, **self.weights(a, slice(slots), hard)))).unflatten(
                1, (-1, slots)
            )

        for i in range(most + refine):
            h = states(run.draft)
            a = self.route(model, h[:, :, 0])
            latents = [self.feed(model, h[:, :, s]) for s in range(min(i + 1, most))]
            settled = converge and i >= most and self._settled(stages[1:], latents, run.real)
            stages = [words, *latents]
            if settled:
                break
        h = states(run.view)
        a = self.route(model, h[:, :, 0])
        self._store(a, run)
        return self.readout(h, a, hard)

    def _store(self, a: Tensor | None, run: Run) -> None:
        """Prune what lies in the cache as decoding would have: by the last router logits."""
        if run.cache is not None and a is not None:
            run.cache.rows[0] = Rows(run.rows[0].token, **self.weights(a, slice(None), True))
            run.cache.drop_dead(0)

    @staticmethod
    def _settled(old: list[Tensor], new: list[Tensor], real: Tensor) -> bool:
        """Nothing moved by more than rounding."""
        x, y = (torch.stack(z, dim=2)[real] for z in (old, new))
        return bool((x - y).abs().max() <= 2 * torch.finfo(x.dtype).eps * y.abs().max())

    def _token(self, model: MegaponderForCausalLM, x: Tensor, run: Run) -> Tensor:
        """[b, 1, H] of one token's embedding, after those in the cache."""
        net, a, states = model.model, None, []
        for slot in range(self.options["latents"] + 1):
            row = self.weights(a, slice(slot, slot + 1), True)
            alive = row.get("alive")
            if alive is not None and not (alive & run.real).any():
                break  # no sequence of the batch has more latents here
            h = net.norm(net.stack(x, 0, run.view(**row)))
            if slot == 0:
                a = self.route(model, h)
            states.append(h)
            x = self.feed(model, h)
        return self.readout(torch.stack(states, dim=2), a, hard=True)


class PonderLM3(PonderLM2):
    """Latents of which a router on slot 0 grants each token some: w_k = its probability of at least k latents.

    Soft (training): log w_k is added to the logits of the key of latent k, all latents are run and read out by the
    router's probabilities.  Hard (decoding): the same with latents of w_k < threshold left out altogether, without
    renormalisation; this differs from soft by O(threshold).  A pass over sequences takes w from the pass before it.
    """

    defaults: ClassVar[dict[str, Any]] = {"latents": 3, "jacobi": 3, "threshold": 1e-4}
    training_only = (
        *("jacobi_from", "jacobi_to", "cost_weight", "target_depth"),
        *("ramp_start", "ramp_end", "router_bias"),
    )

    def modules(self) -> dict[str, nn.Module]:
        return {"router": nn.Linear(self.config.hidden_size, self.options["latents"] + 1)}

    def feed(self, model: MegaponderForCausalLM, h: Tensor) -> Tensor:
        return h

    def route(self, model: MegaponderForCausalLM, h: Tensor) -> Tensor:
        return linear(model.method["router"], h)

    def weights(self, a: Tensor | None, slots: slice, hard: bool) -> dict[str, Any]:
        if a is None:
            return {}  # nothing is known before the first pass, which has slot 0 alone
        weight = log_tails(a)[..., slots]
        return {
            "weight": weight.flatten(1, 2),
            "alive": (weight.exp() >= self.options["threshold"]).flatten(1, 2) if hard else None,
        }

    def readout(self, h: Tensor, a: Tensor | None, hard: bool) -> Tensor:
        assert a is not None
        share = a.softmax(-1)
        if hard:
            share = share * (log_tails(a).exp() >= self.options["threshold"])
        return (share[..., : h.shape[2], None].to(h.dtype) * h).sum(2)


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """A Linear in float32 at least: decisions must not hang on rounding."""
    return F.linear(wide(x), wide(module.weight), wide(module.bias))  # type: ignore[arg-type]


def log_tails(a: Tensor) -> Tensor:
    """log of w_k = sum_{j >= k} softmax(a)_j; the first is exactly 0."""
    tails = torch.logcumsumexp(a.flip(-1), dim=-1).flip(-1)
    return tails - tails[..., :1]


class AdaPonderLM(Vanilla):
    """PonderLM with a gate s after every pass: a token goes on while s >= threshold, and adds s times its mixture.

    A halted token keeps its last state and, in all deeper passes, the keys and values of the pass in which it halted.
    """

    defaults: ClassVar[dict[str, Any]] = {"steps": 3, "threshold": 1e-4, "topk": 0, "gate_width": 4}
    training_only: ClassVar[tuple[str, ...]] = ("cost_weight", "bottom_share", "ramp_start", "ramp_end", "cost_on")

    def modules(self) -> dict[str, nn.Module]:
        width = self.config.hidden_size
        inner = self.options["gate_width"] * width
        gates = [
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, 1)) for _ in range(self.options["steps"])
        ]
        return {"gates": nn.ModuleList(gates)}

    def decide(self, model: MegaponderForCausalLM, index: int, h: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """(weight of the mixture, whether a token goes on), both [b, n], after pass `index`."""
        first, _, last = model.method["gates"][index]  # type: ignore[index]
        gate = linear(last, F.relu(linear(first, h)))[..., 0].sigmoid()
        return gate, gate >= self.options["threshold"]

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        net, steps = model.model, self.options["steps"]
        x = net.embed(net.embed_tokens(ids), run.positions)
        kept: list[tuple[Tensor, ...]] = [()] * len(net.layers)
        state, active = net.norm(net.stack(x, 0, run.aligned(0, None), kept)), run.real
        for index in range(1, steps + 1):
            weight, go_on = self.decide(model, index - 1, state, run)
            active = active & go_on
            if not model.training and not active.any():  # in training every gate shall have a gradient
                for deeper in range(index, steps + 1):
                    run.copy(deeper, kept)
                break
            x = x + (active * weight).to(x.dtype)[..., None] * self.mixture(model, state)
            h = net.norm(net.stack(x, index, run.aligned(index, active), kept))
            state = torch.where(active[..., None], h, state)
        return state


class PrunedPonderLM(AdaPonderLM):
    """Baseline: floor(depth) passes for each position or one more, at random or evenly spaced, `depth` on average."""

    defaults: ClassVar[dict[str, Any]] = {"steps": 3, "depth": 3.7, "by": "random", "seed": 0, "topk": 0}
    training_only: ClassVar[tuple[str, ...]] = ()

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def decide(self, model: MegaponderForCausalLM, index: int, h: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        base, extra, t = int(self.options["depth"]), self.options["depth"] % 1, run.positions.long()
        if self.options["by"] == "random":
            x = (t + 1) * 0x9E3779B1 + (self.options["seed"] + 1) * 0x85EBCA6B
            for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
                x = ((x ^ ((x & 0xFFFFFFFF) >> shift)) * factor) & 0xFFFFFFFF
            chosen = (x & 0xFFFFFF).double() / 2**24 < extra
        else:
            chosen = torch.floor((t + 1).double() * extra) > torch.floor(t.double() * extra)
        return torch.ones_like(t, dtype=h.dtype), base + chosen.long() > index + 1


class ConfidentPonderLM(AdaPonderLM):
    """Baseline: a token exits once its most likely next token reaches the threshold (1: never)."""

    defaults: ClassVar[dict[str, Any]] = {"steps": 3, "threshold": 1.0, "topk": 0}
    training_only: ClassVar[tuple[str, ...]] = ()

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def decide(self, model: MegaponderForCausalLM, index: int, h: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        best = model.lm_head(h).float().softmax(-1).amax(-1)
        return torch.ones_like(best, dtype=h.dtype), (best < self.options["threshold"]) | (
            self.options["threshold"] >= 1
        )


class AdaptiveCot(Vanilla):
    """Step k + 1 of a token starts from the state h_k of its step k, as long as reach_k g_k >= threshold, k < steps.

    g_k is a router's gate on h_k; reach_0 = 1, reach_{k+1} = reach_k g_k.  Step k reads steps 0 .. k of its token and
    of those before, as far as they were run.  The output is sum_k e_k h_k, with e_k = reach_k (1 - g_k), or reach_k at
    the last step.
    """

    defaults: ClassVar[dict[str, Any]] = {"steps": 3, "threshold": 0.01}
    training_only = ("cost_weight", "cost_power", "router_bias")

    def modules(self) -> dict[str, nn.Module]:
        return {"router": nn.Linear(self.config.hidden_size, 1)}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        net, steps = model.model, self.options["steps"]
        x = net.embed(net.embed_tokens(ids), run.positions)
        kept: list[tuple[Tensor, ...]] = [()] * len(net.layers)
        out, reach, alive = torch.zeros_like(x), wide(torch.ones_like(x[..., 0])), run.real
        for step in range(steps + 1):
            x = net.norm(net.stack(x, step, run.union(step, alive if step else None), kept))
            on = reach * linear(model.method["router"], x)[..., 0].sigmoid()
            go_on = alive & (on >= self.options["threshold"]) & (step < steps)
            mass = torch.where(go_on, reach - on, reach) * alive
            out = out + mass.to(x.dtype)[..., None] * x
            reach, alive = on, go_on
            if not alive.any():
                break
        if run.cache is not None:
            for index in run.rows:
                run.cache.drop_dead(index)
        return out


METHODS: dict[str, type[Vanilla]] = {
    "vanilla": Vanilla,
    "loop": Loop,
    "pause": Pause,
    "ponderlm": PonderLM,
    "ponderlm2": PonderLM2,
    "ponderlm3": PonderLM3,
    "adaponderlm": AdaPonderLM,
    "pruned_ponderlm": PrunedPonderLM,
    "confident_ponderlm": ConfidentPonderLM,
    "adaptive_cot": AdaptiveCot,
}


# ---------------------------------------------------------------------------------------------------------------- model
class MegaponderForCausalLM(PreTrainedModel, GenerationMixin):
    """A pondering language model with its head."""

    config_class = MegaponderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Layer"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MegaponderConfig):
        super().__init__(config)
        if config.family not in ("pythia", "llama", "gpt2"):
            raise ValueError(f"family {config.family!r} is unknown; it must be pythia, llama or gpt2")
        if config.method not in METHODS:
            raise ValueError(f"method {config.method!r} is unknown; it must be one of {', '.join(METHODS)}")
        self.ponder = METHODS[config.method](config)
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.method = nn.ModuleDict(self.ponder.modules())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `generate` would size its cache by layers; forward makes one of passes x layers

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        jacobi: int | str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        cache = past_key_values if cache is None else cache
        ids = input_ids[:, 0 if cache is None else cache.get_seq_length() :].to(self.device)
        return {
            "input_ids": ids,
            "cache": cache,
            "attention_mask": attention_mask,
            "position_ids": None if position_ids is None else position_ids[:, -ids.shape[1] :],
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
            "jacobi": self.config.prefill_jacobi if jacobi is None else jacobi,
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        jacobi: int | str | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [b, n, V] in float32 or wider; the mean cross entropy of the shifted `labels` where they are given.

        `attention_mask` [b, t + n] is 0 at padding (either side); positions count the real tokens.
        `jacobi` (ponderlm2, ponderlm3; without effect on the others and on tokens that follow a cache) says how the
        latents of whole sequences are found.  None: as in training.  With ponderlm3's pruning: "converge", exactly; a
        number, by as many refinements.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            cache = PonderCache(self.config.num_hidden_layers)
        if not (jacobi is None or jacobi == "converge" or (isinstance(jacobi, int) and jacobi >= 0)):
            raise ValueError(f'jacobi = {jacobi!r}: it must be None, "converge", or a number of refinements')
        run = self._run(input_ids, attention_mask, position_ids, cache)
        run.jacobi = jacobi
        h = self.ponder.hidden(self, input_ids, run)
        if run.cache is not None:
            run.cache.tokens = run.past + input_ids.shape[1]
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = wide(self.lm_head(h[:, keep]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_FIELD: cache})
        return output.to_tuple() if return_dict is False else output

    def _run(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Cache | None) -> Run:
        if cache is not None and not isinstance(cache, PonderCache):
            raise ValueError(f"a {type(cache).__name__} has no entries for passes; give no cache, or a PonderCache")
        past, n = 0 if cache is None else cache.get_seq_length(), ids.shape[1]
        if mask is not None and tuple(mask.shape) != (ids.shape[0], past + n):
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; it must be {(ids.shape[0], past + n)}")
        keep = None if mask is None else mask.to(ids.device).bool()
        if positions is None:
            counted = torch.ones_like(ids[:, :1]).expand(-1, past + n) if keep is None else keep.long()
            positions = (counted.cumsum(-1) - 1).clamp(min=0)[:, -n:]
        return Run(positions.expand(ids.shape[0], -1), None if keep is None or keep.all() else keep, cache, past)
