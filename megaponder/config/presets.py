"""Named backbones: the shapes, epsilons and initialisations of the published models.

Sources: the config.json of the models of these names (Mistral 7B: its first version; Galactica: with biases);
the Pythia and GPT-2 model cards' shapes; the Llama shapes of the PonderLM-2 repository (no GQA, head size 64,
FFN = 43/16 H).  Those Llama configurations ship with rms_norm_eps = 0.1, not the usual 1e-5 or 1e-6.  It was changed
from 1e-5 after the paper's tables were made, so it is unclear which of the two gave the published numbers; at
initialisation 0.1 damps every norm (a residual stream of mean square q leaves it with RMS sqrt(q / (q + 0.1))).  The
presets follow the shipped value; set `model.norm_eps: 1.0e-5` for the other.

`vocab_size` is the published table: all of its rows take part in the papers' softmax, and the pause token of the
Pause method is one of the rows that the GPT-NeoX tokenizer (50277 entries) does not use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megaponder.config.fields import nearest
from megaponder.config.model import Family, ModelConfig
from megaponder.errors import ConfigError

LLAMA_EPS = 0.1
"""RMSNorm epsilon of the shipped pondering Llama configurations."""
NEOX_RECIPE = frozenset({"pythia"})
"""Families whose published pondering models come from the papers' GPT-NeoX code, which initialises differently from
their Llama code."""


@dataclass(frozen=True)
class Preset:
    """A published shape of a family."""

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    normal_std: float
    """Standard deviation where the initialisation is `normal` (the papers' initializer_range)."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of the model section that differ from the family's."""


def _pythia(layers: int, hidden: int, heads: int, std: float) -> Preset:
    return Preset("pythia", layers, hidden, heads, 4 * hidden, 50304, 2048, 1e-5, std)


def _llama(layers: int, hidden: int, heads: int, ffn: int, std: float) -> Preset:
    return Preset("llama", layers, hidden, heads, ffn, 50304, 2048, LLAMA_EPS, std)


def _gpt2(layers: int, hidden: int, heads: int) -> Preset:
    return Preset("gpt2", layers, hidden, heads, 4 * hidden, 50257, 1024, 1e-5, 0.02)


_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TIED = {"tie_embeddings": True, "rotary_base": 1e6}
_OURO: dict[str, Any] = {"norm_placement": "sandwich", "rotary_base": 1e6}
_HUGINN: dict[str, Any] = {
    "norm_placement": "stream", "qkv_bias": "qk", "rotary_pairs": "adjacent", "rotary_base": 5e4,
    "tie_embeddings": True,
}  # fmt: skip

# fmt: off
PRESETS: dict[str, Preset] = {
    "pythia-70m": _pythia(6, 512, 8, 0.02),
    "pythia-160m": _pythia(12, 768, 12, 0.02),
    "pythia-410m": _pythia(24, 1024, 16, 0.02),
    "pythia-1b": _pythia(16, 2048, 8, 0.01),
    "pythia-1.4b": _pythia(24, 2048, 16, 0.01),
    "pythia-2.8b": _pythia(32, 2560, 32, 0.01),
    "llama-125m": _llama(12, 768, 12, 2064, 0.02),
    "llama-410m": _llama(24, 1024, 16, 2752, 0.02),
    "llama-410m-x2depth": _llama(48, 1024, 16, 2752, 0.02),
    "llama-834m": _llama(24, 1536, 24, 4128, 0.01),
    "llama-1.4b": _llama(24, 2048, 32, 5504, 0.01),
    "llama-2.8b": _llama(48, 2048, 32, 5504, 0.01),
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-2-7b": Preset("llama", 32, 4096, 32, 11008, 32000, 4096, 1e-5, 0.02),
    "llama-3.2-1b": Preset(
        "llama", 16, 2048, 32, 8192, 128256, 131072, 1e-5, 0.02,
        {"num_kv_heads": 8, "rotary_base": 5e5, "rotary_scaling": _LLAMA_3, "tie_embeddings": True},
    ),
    "qwen2.5-0.5b": Preset("qwen2", 24, 896, 14, 4864, 151936, 32768, 1e-6, 0.02, {"num_kv_heads": 2} | _TIED),
    "qwen2.5-7b": Preset(
        "qwen2", 28, 3584, 28, 18944, 152064, 131072, 1e-6, 0.02, {"num_kv_heads": 4, "rotary_base": 1e6}
    ),
    "qwen3-0.6b": Preset(
        "qwen3", 28, 1024, 16, 3072, 151936, 40960, 1e-6, 0.02, {"num_kv_heads": 8, "head_size": 128} | _TIED
    ),
    "mistral-7b": Preset("mistral", 32, 4096, 32, 14336, 32000, 32768, 1e-5, 0.02, {"num_kv_heads": 8}),
    "olmo2-1b": Preset("olmo2", 16, 2048, 16, 8192, 100352, 4096, 1e-6, 0.02, {"rotary_base": 5e5}),
    # mixtures of experts; ffn_size is the width of an expert
    "qwen3-30b-a3b": Preset(
        "qwen3", 48, 2048, 32, 768, 151936, 40960, 1e-6, 0.02,
        {"num_kv_heads": 4, "head_size": 128, "rotary_base": 1e6, "moe": {"experts": 128, "top_k": 8}},
    ),
    "olmoe-1b-7b": Preset(
        "llama", 16, 2048, 16, 1024, 50304, 4096, 1e-5, 0.02,
        {"qk_norm": "all", "moe": {"experts": 64, "top_k": 8, "renormalise": False}},
    ),
    "opt-125m": Preset("opt", 12, 768, 12, 3072, 50272, 2048, 1e-5, 0.02),
    "galactica-30b": Preset("opt", 48, 7168, 56, 28672, 50000, 2048, 1e-5, 0.02, {"activation": "gelu"}),
    # backbones of looped models
    "ouro-1.4b": Preset("llama", 24, 2048, 16, 5632, 49152, 65536, 1e-6, 0.02, _OURO),
    "ouro-2.6b": Preset("llama", 48, 2048, 16, 5632, 49152, 65536, 1e-6, 0.02, _OURO),
    "nanbeige-3b": Preset(
        "llama", 22, 3072, 48, 10752, 166144, 4096, 1e-5, 0.02,
        {"num_kv_heads": 8, "head_size": 128, "rotary_base": 7e7},
    ),
    "huginn-3.5b": Preset("llama", 8, 5280, 55, 17920, 65536, 4096, 1e-6, 0.02, _HUGINN),
    # for tests and first experiments: odd sizes where the published shapes are round
    "pythia-tiny": Preset("pythia", 2, 32, 4, 128, 96, 64, 1e-5, 0.02),
    "llama-tiny": Preset("llama", 2, 32, 4, 88, 96, 64, LLAMA_EPS, 0.02),
    "gpt2-tiny": Preset("gpt2", 2, 32, 4, 128, 96, 64, 1e-5, 0.02),
}
# fmt: on

NORMAL_STD = 0.02
"""Standard deviation of `normal` for shapes without a preset."""


def find_preset(name: str) -> Preset:
    """The preset with this name; ConfigError that suggests the nearest name."""
    if name not in PRESETS:
        close = nearest(name, PRESETS)
        fix = f"did you mean {close}" if close else f"known: {', '.join(PRESETS)}"
        raise ConfigError("model.preset", name, "there is no such preset", fix)
    return PRESETS[name]


def default_ffn(model: ModelConfig) -> int:
    """MLP width: 4H, and for a gated MLP 43/16 H rounded up to a multiple of 16 (the papers' ratio)."""
    assert model.hidden_size is not None
    return -(-model.hidden_size * 43 // 256) * 16 if model.gated else 4 * model.hidden_size
