"""config.json of a pondering language model."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

try:
    from transformers.configuration_utils import PreTrainedConfig
except ImportError:  # before 5.0
    from transformers.configuration_utils import PretrainedConfig as PreTrainedConfig

_LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "positions": "rotary",
    "rotary_fraction": 1.0,
    "parallel_residual": False,
}
_GPT2 = _LLAMA | {
    "norm": "layernorm", "activation": "gelu_tanh", "qkv_bias": True, "output_bias": True, "mlp_bias": True,
    "positions": "learned",
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "pythia": _GPT2 | {"activation": "gelu", "positions": "rotary", "rotary_fraction": 0.25, "parallel_residual": True},
    "llama": _LLAMA,
    "gpt2": _GPT2,
}
"""Features of the backbone for a config.json that names only a family, as in earlier versions."""


class MegaponderConfig(PreTrainedConfig):
    """Backbone (shape and features), pondering method and its options.

    norm                 layernorm or rmsnorm, with epsilon norm_eps
    activation           gelu (exact), gelu_tanh, relu, relu2 (squared), or swiglu (gated)
    qkv_bias, output_bias, mlp_bias    of queries, keys and values; of attention's output; of the MLP
    positions            rotary or learned
    parallel_residual    attention and MLP read the same rows

    Further fields are later features, and the method's own.
    """

    model_type = "megaponder"
    keys_to_ignore_at_inference = ("cache", "past_key_values")
    attribute_map: ClassVar[dict[str, str]] = {"head_dim": "head_size"}  # what paged caches and engines ask for

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
        head_size: int | None = None,
        intermediate_size: int = 2048,
        max_position_embeddings: int = 2048,
        norm_eps: float = 1e-5,
        rotary_base: float = 10000.0,
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
        self.head_size = hidden_size // num_attention_heads if head_size is None else head_size
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.norm_eps = norm_eps
        self.rotary_base = rotary_base
        lacking = _LLAMA.keys() - kwargs.keys()
        if lacking and family not in FAMILIES:
            raise ValueError(f"family {family!r} is unknown; it must be {', '.join(FAMILIES)}, or give {min(lacking)}")
        for name in _LLAMA:
            setattr(self, name, kwargs.pop(name) if name in kwargs else FAMILIES[family][name])
        self.embedding_scale = embedding_scale
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(**kwargs)
        # set after the base class, whose signature for these differs between releases
        self.tie_word_embeddings = tie_word_embeddings
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id

    _kv_passes = 1
    """By how many passes a paged cache multiplies the layers (`megaponder.decoding.paged`); never saved."""

    def get_text_config(self, *args: Any, **kwargs: Any) -> MegaponderConfig:
        """This configuration; for a paged cache with a layer for each pass and layer."""
        if self._kv_passes == 1:
            return self
        paged = copy.copy(self)
        paged.num_hidden_layers, paged._kv_passes = self.num_hidden_layers * self._kv_passes, 1
        return paged

    def to_diff_dict(self) -> dict[str, Any]:
        """What is saved: all features, since omitted ones would take the defaults of `family`."""
        features: dict[str, Any] = {name: getattr(self, name) for name in _LLAMA}
        saved: dict[str, Any] = super().to_diff_dict() | features
        saved.pop("_kv_passes", None)
        return saved
