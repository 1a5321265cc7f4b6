"""The model section: sizes, the features of a block, and families, which are sets of features.

No code checks a family's name: the features alone determine what a block computes.  A family only fills in the features
that a configuration leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Family = Literal["pythia", "llama", "gpt2", "qwen3"]


@dataclass
class ModelConfig:
    """The backbone: a preset or a family, and any field of it that should differ."""

    preset: str | None = None
    """Named shape, for example pythia-410m or llama-1.4b; `megaponder plan --presets` lists them."""
    family: Family | None = None
    """Set of features: pythia (GPT-NeoX), llama, gpt2 or qwen3.  Features that are given beside it beat it."""

    num_layers: int | None = None
    """Transformer layers in the stack that a pass runs through."""
    hidden_size: int | None = None
    """Width H of the residual stream."""
    num_heads: int | None = None
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); equal to num_heads unless set."""
    head_size: int | None = None
    """Channels of a head; hidden_size / num_heads unless set."""
    ffn_size: int | None = None
    """Width of the MLP."""
    vocab_size: int | None = None
    """True vocabulary size; rows that pad it for tensor parallelism never take part in a softmax."""
    vocab_multiple: int = 128
    """The embedding table is padded to a multiple of this, whatever the layout, so that checkpoints reshard."""
    max_positions: int | None = None
    """Longest sequence: rows of the table of learned positions, and the limit written into exports."""

    # features: the family fills in those that are None
    norm: Literal["layernorm", "rmsnorm"] | None = None
    """Kind of every norm: LayerNorm (with bias) or RMSNorm."""
    norm_eps: float | None = None
    """Epsilon of the norms."""
    norm_placement: Literal["pre", "sandwich"] | None = None
    """pre: x + f(norm(x)) for attention and MLP f; sandwich: x + norm(f(norm(x))), a norm on what is added, too."""
    qk_norm: Literal["none", "head"] | None = None
    """Norm of queries and keys before RoPE: none, or over the channels of each head (Qwen3)."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] | None = None
    """Inside the MLP: exact GELU, its tanh approximation, or SwiGLU (gated, hence three matrices instead of two)."""
    qkv_bias: bool | None = None
    """Biases on queries, keys and values."""
    output_bias: bool | None = None
    """Bias on the output projection of attention."""
    mlp_bias: bool | None = None
    """Biases in the MLP."""
    positions: Literal["rotary", "learned"] | None = None
    """Rotary embedding of queries and keys (RoPE), or a learned table that is added to the token embeddings."""
    rotary_fraction: float | None = None
    """Part of each head that is rotated (pythia 0.25, llama 1.0); without effect on learned positions."""
    rotary_base: float | None = None
    """RoPE theta."""
    parallel_residual: bool | None = None
    """x + attn(norm1 x) + mlp(norm2 x) instead of two residual steps (pythia)."""
    tie_embeddings: bool | None = None
    """Input embedding and output head share one table."""

    init: Literal["auto", "normal", "trunc_normal"] = "auto"
    """Initialisation family; auto takes the published one of backbone and method."""
    init_std: float | None = None
    """Standard deviation of matrices and embeddings; auto: 0.02 or 0.01 (normal), sqrt(2/(5H)) (trunc_normal)."""
    init_output_scale: float | Literal["auto"] = "auto"
    """Factor on the std of attention-output and MLP-down matrices; auto takes the published one (often 1/sqrt(2L))."""
    embedding_scale: float | Literal["auto", "none", "sqrt_h", "sqrt_2.5h"] = "auto"
    """Factor c on every token embedding that is looked up; auto takes the method's published one."""

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
    norm_placement="pre",
    qk_norm="none",
    activation="swiglu",
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    positions="rotary",
    rotary_fraction=1.0,
    rotary_base=1e4,
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
    "qwen3": replace(_LLAMA, qk_norm="head"),
}
"""The features of each family."""
SIZES = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_size", "vocab_size", "vocab_multiple",
)  # fmt: skip
"""Fields that give the parameters their shapes."""
FEATURES = tuple(
    name for name, value in vars(_LLAMA).items() if value is not None and vars(ModelConfig())[name] is None
)
"""Fields that say what a block computes; every family has a value for each."""
