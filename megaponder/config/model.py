"""The model section: sizes, the features of a block, and families, which are sets of features.

No code checks a family's name: the features alone determine what a block computes.  A family only fills in the features
that a configuration leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megaponder.config.declare import declaration, declare

Family = Literal["pythia", "llama", "gpt2", "qwen2", "qwen3", "mistral", "olmo2", "opt"]

SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""rope_type of a rotary scaling -> its values, under transformers' names: those it must have, and those it may have."""


def short_reach(m: ModelConfig) -> str:
    """A sentence if YaRN, as it is set, ends before the last position; empty otherwise."""
    scaling, longest = m.rotary_scaling or {}, m.max_positions or 0
    if scaling.get("rope_type") != "yarn":
        return ""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    if factor * original >= longest:
        return ""
    return (
        f"model.rotary_scaling: YaRN with factor {factor:g} stretches {original:,} positions to "
        f"{factor * original:,.0f}, fewer than model.max_positions = {longest:,}; factor {longest / original:g} "
        "reaches them."
    )


def feature(**said: Any) -> Any:
    """A field that the family fills in; with another value, weights would mean something else unless it says so."""
    return declare(None, **{"feature": True, "resume": "refused"} | said)


@dataclass
class ModelConfig:
    """The backbone: a preset or a family, and any field of it that should differ."""

    preset: str | None = declare(None, compared=False)
    """Named shape, for example pythia-410m or llama-1.4b; `megaponder plan --presets` lists them."""
    family: Family | None = declare(None, resume="refused")
    """Set of features: pythia (GPT-NeoX), llama, gpt2, qwen2, qwen3, mistral, olmo2 or opt.  Features that are given
    beside it beat it."""

    num_layers: int | None = declare(None, ge=1, resume="refused", aliases=("layers", "num_hidden_layers"))
    """Transformer layers in the stack that a pass runs through."""
    hidden_size: int | None = declare(None, ge=1, resume="refused")
    """Width H of the residual stream."""
    num_heads: int | None = declare(None, ge=1, resume="refused", aliases=("heads",))
    """Query heads."""
    num_kv_heads: int | None = declare(None, ge=1, resume="refused")
    """Key/value heads (grouped-query attention); equal to num_heads unless set."""
    head_size: int | None = declare(None, ge=1, resume="refused", aliases=("head_dim", "kv_channels"))
    """Channels of a head; hidden_size / num_heads unless set."""
    ffn_size: int | None = declare(None, ge=1, resume="refused", aliases=("intermediate_size",))
    """Width of the MLP."""
    vocab_size: int | None = declare(None, ge=2, resume="refused")
    """True vocabulary size; rows that pad it for tensor parallelism never take part in a softmax."""
    vocab_multiple: int = declare(128, ge=1, resume="refused", load="free")
    """The embedding table is padded to a multiple of this, whatever the layout, so that checkpoints reshard."""
    max_positions: int | None = declare(None, ge=1, unit="tokens")
    """Longest sequence: rows of the table of learned positions, and the limit written into exports."""

    norm: Literal["layernorm", "rmsnorm"] | None = feature(aliases=("normalization",))
    """Kind of every norm: LayerNorm (with bias) or RMSNorm."""
    norm_eps: float | None = feature(gt=0, le=1, resume="warned", load="warned", aliases=("rms_norm_eps",))
    """Epsilon of the norms."""
    norm_affine: bool | None = feature(aliases=("layer_norm_elementwise_affine",))
    """Norms learn a weight (and LayerNorm a bias); false: these stay 1 and 0."""
    norm_placement: Literal["pre", "sandwich", "post", "stream"] | None = feature()
    """Norms N around attention and MLP f: pre, x + f(N(x)); sandwich, x + N(f(N(x))); post, x + N(f(x)) (OLMo2);
    stream, N(x + f(N(x))), which norms the residual stream itself (Huginn)."""
    qk_norm: Literal["none", "head", "all", "rotated"] | None = feature(aliases=("qk_layernorm",))
    """Norm of queries and keys: none; head, over the channels of each head (Qwen3); all, one RMSNorm over all heads
    (OLMo2); both before RoPE.  rotated: RMS of each head after RoPE, without weights, epsilon that of the number format
    (Parcae)."""
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu"] | None = feature(
        aliases=("hidden_act", "activation_function")
    )
    """Inside the MLP: exact GELU, its tanh approximation, ReLU, squared ReLU, or SwiGLU (gated, hence three matrices
    instead of two)."""
    qkv_bias: bool | Literal["qk"] | None = feature(aliases=("attention_bias", "add_qkv_bias"))
    """Biases on queries, keys and values; qk: on queries and keys only (Huginn)."""
    output_bias: bool | None = feature()
    """Bias on the output projection of attention."""
    mlp_bias: bool | None = feature()
    """Biases in the MLP."""
    positions: Literal["rotary", "learned"] | None = feature()
    """Rotary embedding of queries and keys (RoPE), or a learned table that is added to the token embeddings."""
    rotary_fraction: float | None = feature(gt=0, le=1)
    """Part of each head that is rotated (pythia 0.25, llama 1.0); without effect on learned positions."""
    rotary_base: float | None = feature(gt=0, load="asked", aliases=("rope_theta",))
    """RoPE theta."""
    rotary_pairs: Literal["halves", "adjacent"] | None = feature(aliases=("rotary_interleaved",))
    """Channels that turn together: i and i + d/2 of d rotated ones (Llama), or 2i and 2i + 1 (Huginn)."""
    rotary_scaling: dict[str, Any] | None = feature(load="asked", aliases=("rope_scaling", "rope_parameters"))
    """Change of RoPE for longer texts, with transformers' names: {} or {rope_type: linear, dynamic (NTK), yarn or
    llama3, factor: ..., and the values of that type}."""
    attention_window: int | None = feature(ge=0, unit="tokens", aliases=("sliding_window", "window_size"))
    """Sliding window: a token attends to itself and to the tokens before it, so many in all; 0: to all before it."""
    depth_attention: dict[str, Any] | None = feature(load="asked")
    """Depth-Attention mixes values with those of earlier layers: {}: off; or any of {sources: all, last:N, stride:N or
    a list of layers; values: mixed or raw; query: mean_query or mean_prob; own: softmax or residual; scale: 0.0;
    passes: across or within; blocks: 1}."""
    freqkv: dict[str, Any] | None = feature(load="asked")
    """FreqKV compresses keys and values of long texts: {}: off; or {capacity: C, sink: 4, ratio: 0.5}.  A token attends
    to C rows at most: when so many are full, all but the first `sink` are resampled to the share `ratio` of their
    number."""
    moe: dict[str, Any] | None = feature()
    """Mixture of experts: {}: off; or {experts: E, top_k: k} and any of {shared_ffn: 0; score: softmax or sigmoid;
    renormalise: true; scale: 1.0; aux_weight: 0.01; bias_rate: 0.0; routers: shared, per_pass or their number}.  Each
    MLP becomes E experts of width ffn_size, of which every row takes k, beside a shared one of width `shared_ffn`."""
    parallel_residual: bool | None = feature()
    """x + attn(norm1 x) + mlp(norm2 x) instead of two residual steps (pythia)."""
    tie_embeddings: bool | None = feature(aliases=("tie_word_embeddings",))
    """Input embedding and output head share one table."""

    init: Literal["auto", "normal", "trunc_normal"] = declare("auto", compared=False)
    """Initialisation family; auto takes the published one of backbone and method."""
    init_std: float | None = declare(None, gt=0, compared=False)
    """Standard deviation of matrices and embeddings; auto: 0.02 or 0.01 (normal), sqrt(2/(5H)) (trunc_normal)."""
    init_output_scale: float | Literal["auto"] = declare("auto", gt=0, compared=False)
    """Factor on the std of attention-output and MLP-down matrices; auto takes the published one (often 1/sqrt(2L))."""
    embedding_scale: float | Literal["auto", "none", "sqrt_h", "sqrt_2.5h"] = declare("auto", gt=0, compared=False)
    """Factor c on every token embedding that is looked up; auto takes the method's published one."""

    @property
    def norms_per_layer(self) -> int:
        """Norms of a layer, those of queries and keys aside."""
        return 4 if self.norm_placement in ("sandwich", "stream") else 2

    @property
    def gated(self) -> bool:
        """The MLP has a gate: three matrices."""
        return self.activation == "swiglu"

    @property
    def learned_positions(self) -> int:
        """Rows of the position table; 0 with rotary positions."""
        return (self.max_positions or 0) if self.positions == "learned" else 0

    @property
    def query_width(self) -> int:
        """Channels of all query heads together."""
        assert self.num_heads and self.head_size
        return self.num_heads * self.head_size

    @property
    def key_width(self) -> int:
        """Channels of all key heads together; those of the values are as many."""
        assert self.num_kv_heads and self.head_size
        return self.num_kv_heads * self.head_size

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to a multiple of vocab_multiple, whatever the layout."""
        assert self.vocab_size is not None
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


_LLAMA = ModelConfig(
    norm="rmsnorm",
    norm_eps=1e-5,
    norm_affine=True,
    norm_placement="pre",
    qk_norm="none",
    activation="swiglu",
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    positions="rotary",
    rotary_fraction=1.0,
    rotary_base=1e4,
    rotary_pairs="halves",
    rotary_scaling={},
    attention_window=0,
    depth_attention={},
    freqkv={},
    moe={},
    parallel_residual=False,
    tie_embeddings=False,
)
_GPT2 = replace(
    _LLAMA,
    norm="layernorm",
    activation="gelu_tanh",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    positions="learned",
    tie_embeddings=True,
)
FAMILIES: dict[str, ModelConfig] = {
    "pythia": replace(
        _GPT2,
        activation="gelu",
        positions="rotary",
        rotary_fraction=0.25,
        parallel_residual=True,
        tie_embeddings=False,
    ),
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "qwen2": replace(_LLAMA, qkv_bias=True),
    "qwen3": replace(_LLAMA, qk_norm="head"),
    "mistral": replace(_LLAMA, attention_window=4096),
    "olmo2": replace(_LLAMA, norm_placement="post", qk_norm="all"),
    "opt": replace(_GPT2, activation="relu"),
}
"""The features of each family."""
FEATURES = tuple(f.name for f in fields(ModelConfig) if declaration(f).feature)
"""Fields that say what a block computes; every family has a value for each."""
