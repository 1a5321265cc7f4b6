"""Pondering language models for `transformers`: one self-contained file, loaded with `trust_remote_code=True`.

A pondering model runs its layer stack several times before it emits a token.  One traversal of the stack is a *pass*; a
token takes part in a pass with one or more *slots* (rows, token-major: row = token * slots + slot; all slots of a token
share its position).  A method is a small class below that says which passes run and what enters and leaves them:

    vanilla    one pass
    loop       extra_passes + 1 passes, no norm in between                               (weight-shared looped stack)
    pause      one pass of pauses + 1 slots, read out at the last slot                   (pause tokens)
    ponderlm   steps + 1 passes, E <- E + softmax(N(h) Wo^T) (c We) in between           (PonderLM, arXiv 2505.20674)

Decoding is exact: every pass has its own keys and values, and pass p of token t reads the pass-p keys of tokens <= t.

Shapes: b batch, n tokens of this call, r = n * slots rows, t tokens cached before, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """Backbone (family and shape), pondering method and its options."""

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
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(**kwargs)
        # set after the base class, whose signature for these differs between releases
        self.tie_word_embeddings = tie_word_embeddings
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id


# ---------------------------------------------------------------------------------------------------------------- cache
class PonderCache(Cache):
    """Keys and values of every pass: entry `pass * layers + layer`, `slots` rows for each token.

    Its length is counted in tokens, as `generate` expects; beam reordering and cropping act on all passes alike.
    """

    def __init__(self, slots: int = 1):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.slots = slots

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) // self.slots

    def crop(self, tokens: int) -> None:
        super().crop(tokens * self.slots)


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
    masks: dict[int, Tensor | None] = field(default_factory=dict)

    def mask(self, slots: int) -> Tensor | None:
        """[1 or b, 1, r, k] True where a row may read a key; None: plain causal, or one row that reads everything."""
        if slots not in self.masks:
            self.masks[slots] = self._mask(slots)
        return self.masks[slots]

    def _mask(self, slots: int) -> Tensor | None:
        rows, past = self.positions.shape[1] * slots, self.past * slots
        if self.keep is None and (past == 0 or rows == 1):
            return None
        query = torch.arange(past, past + rows, device=self.positions.device)[:, None]
        key = torch.arange(past + rows, device=self.positions.device)[None]
        mask = (key <= query)[None]
        if self.keep is not None:
            # a padded row still reads itself: its result is never used, but a softmax over nothing would be NaN
            mask = (mask & self.keep.repeat_interleave(slots, 1)[:, None]) | (key == query)
        return mask[:, None]


# ------------------------------------------------------------------------------------------------------------- backbone
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in float32, rounded to the input's format, times a weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
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
        mask: Tensor | None,
        cache: PonderCache | None,
        entry: int,
    ) -> Tensor:
        b, rows, _ = x.shape
        q, k, v = (
            proj(x).view(b, rows, -1, self.size).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, tables), rotate(k, tables)
        if cache is not None:
            k, v = cache.update(k, v, entry)
        if self.groups != self.heads:
            k, v = (y.repeat_interleave(self.heads // self.groups, dim=1) for y in (k, v))
        causal = mask is None and rows > 1
        if self.config._attn_implementation == "eager":
            out = self._eager(q, k, v, mask, causal)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).reshape(b, rows, -1))

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * self.size**-0.5
        if causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
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
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        cache: PonderCache | None,
        entry: int,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), tables, mask, cache, entry)
        if self.parallel:
            return x + attended + self.mlp(self.post_attention_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


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

    def stack(self, x: Tensor, index: int, run: Run, slots: int = 1) -> Tensor:
        """Pass `index` of `slots` rows a token through all layers, without the final norm: [b, r, H]."""
        tables = rotary_tables(self.config, run.positions.repeat_interleave(slots, dim=1), x.dtype)
        for i, layer in enumerate(self.layers):
            args = (x, tables, run.mask(slots), run.cache, index * len(self.layers) + i)
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer.__call__, *args)  # type: ignore[operator]  # set by enable
            else:
                x = layer(*args)
        return x


# -------------------------------------------------------------------------------------------------------------- methods
class Vanilla:
    """One pass.  Base of the methods: `hidden` gives one final-normed row a token, ready for the head."""

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: MegaponderConfig):
        unknown = set(config.method_options) - set(self.defaults)
        if unknown:
            raise ValueError(f"method {config.method} has no option {sorted(unknown)}; it has {sorted(self.defaults)}")
        self.config = config
        self.options = {**self.defaults, **config.method_options}

    def slots(self) -> int:
        """Rows a token that each cache entry holds."""
        return 1

    def modules(self) -> dict[str, nn.Module]:
        """Parameters of the method's own, saved under `method.`."""
        return {}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        """[b, n, H] for ids [b, n]."""
        net = model.model
        return net.norm(net.stack(net.embed(net.embed_tokens(ids), run.positions), 0, run))


class Loop(Vanilla):
    """The stack runs extra_passes + 1 times; there is no norm and no new embedding in between."""

    defaults: ClassVar[dict[str, Any]] = {"extra_passes": 3}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        net = model.model
        x = net.embed(net.embed_tokens(ids), run.positions)
        for index in range(self.options["extra_passes"] + 1):
            x = net.stack(x, index, run)
        return net.norm(x)


class Pause(Vanilla):
    """Each token is followed by `pauses` pause tokens at its position; the last one is read out.

    The pause token is a row of the table, or a row of its own where its id lies beyond the vocabulary.
    """

    defaults: ClassVar[dict[str, Any]] = {"pauses": 3, "pause_token_id": 50288}

    def slots(self) -> int:
        return self.options["pauses"] + 1

    def modules(self) -> dict[str, nn.Module]:
        beyond = self.options["pause_token_id"] >= self.config.vocab_size
        return {"pause": nn.Embedding(1, self.config.hidden_size)} if beyond else {}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        net, slots, pause = model.model, self.slots(), self.options["pause_token_id"]
        own = "pause" in model.method
        row = model.method["pause"](ids.new_zeros(())) if own else net.embed_tokens.weight[pause]
        pauses = row.expand(*ids.shape, slots - 1, -1)
        words = torch.cat([net.embed_tokens(ids)[:, :, None], pauses], dim=2).flatten(1, 2)
        x = net.stack(net.embed(words, run.positions.repeat_interleave(slots, dim=1)), 0, run, slots)
        return net.norm(x[:, slots - 1 :: slots])


class PonderLM(Vanilla):
    """Between two passes every token's embedding takes up the expected embedding of its next token."""

    defaults: ClassVar[dict[str, Any]] = {"steps": 3, "topk": 0, "multiply_by_steps": False}

    def hidden(self, model: MegaponderForCausalLM, ids: Tensor, run: Run) -> Tensor:
        net, steps = model.model, self.options["steps"]
        factor = steps if self.options["multiply_by_steps"] else 1
        x = net.embed(net.embed_tokens(ids), run.positions, factor)
        for index in range(steps):
            x = x + self.mixture(model, net.norm(net.stack(x, index, run)))
        return net.norm(net.stack(x, steps, run))

    def mixture(self, model: MegaponderForCausalLM, h: Tensor) -> Tensor:
        """softmax(h Wo^T) (c We) over the vocabulary, or over every token as likely as the topk-th."""
        logits = model.lm_head(h).float()
        if 0 < self.options["topk"] < logits.shape[-1]:
            least = logits.topk(self.options["topk"], dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return (logits.softmax(-1).to(h.dtype) @ model.model.embed_tokens.weight) * self.config.embedding_scale


METHODS: dict[str, type[Vanilla]] = {"vanilla": Vanilla, "loop": Loop, "pause": Pause, "ponderlm": PonderLM}


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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [b, n, V] in float32, and the mean cross entropy of the shifted `labels` where they are given.

        `attention_mask` [b, t + n] is 0 at padding (either side); positions count the real tokens.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            cache = PonderCache(self.ponder.slots())
        h = self.ponder.hidden(self, input_ids, self._run(input_ids, attention_mask, position_ids, cache))
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(h[:, keep]).float()
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
