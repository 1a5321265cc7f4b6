"""config.json of a pondering language model."""

from __future__ import annotations

from typing import Any

from transformers.configuration_utils import PreTrainedConfig


class MegaponderConfig(PreTrainedConfig):
    """Backbone (family and shape), pondering method and its options.  Further fields are the method's own."""

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
