"""A pondering language model with its head, and `generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from megaponder.decoding.backbone import Backbone, wide
from megaponder.decoding.cache import PonderCache
from megaponder.decoding.configuration import MegaponderConfig
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run

# transformers calls the cache of an output "cache" since 5.2x and "past_key_values" before
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@dataclass
class PonderOutput(CausalLMOutputWithPast):
    """Logits, loss and cache as everywhere; `depths` [b, n] on request."""

    depths: Tensor | None = None


class PonderForCausalLM(PreTrainedModel, GenerationMixin):
    """A pondering language model with its head; a subclass says which method it decodes."""

    decoding: type[DecodingMethod]

    config_class = MegaponderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Layer"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MegaponderConfig):
        super().__init__(config)
        if config.method != self.decoding.name:
            raise ValueError(f"method {config.method!r} is unknown here: this is the code for {self.decoding.name}")
        self.ponder = self.decoding(config)
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.method_entry = nn.ModuleDict(self.ponder.entry_modules())
        self.method_layers = nn.ModuleDict(
            {str(i): nn.ModuleDict(self.ponder.layer_modules(i)) for i in range(config.num_hidden_layers)}
        )
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
            **self.ponder.in_generation(),
            **{name: kwargs[name] for name in self.ponder.arguments if kwargs.get(name) is not None},
        }

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        # transformers refuses what no signature names
        super()._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k not in self.ponder.arguments})

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
        output_depths: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [b, n, V] in float32 or wider; the mean cross entropy of the shifted `labels` if given.

        `attention_mask` [b, t + n] is 0 at padding (either side); positions count the real tokens.
        The method may have arguments of its own (`DecodingMethod.arguments`), which are among `kwargs`: for most,
        `passes` (of a token, at most) and `threshold`.  `output_depths` adds `depths` [b, n], passes that tokens ran.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            cache = PonderCache(self.config.num_hidden_layers)
        given = {name: kwargs.pop(name, None) for name in self.ponder.arguments}
        self.ponder.check(given)
        ponder = self.ponder.using(given)
        run = self._run(input_ids, attention_mask, position_ids, cache, given)
        h = ponder.hidden(self, input_ids, run)
        if run.cache is not None:
            run.cache.tokens = run.past + input_ids.shape[1]
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = wide(self.lm_head(h[:, keep]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = PonderOutput(
            loss=loss, logits=logits, depths=run.depth if output_depths else None, **{CACHE_FIELD: cache}
        )
        return output.to_tuple() if return_dict is False else output

    def _run(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: Cache | None,
        given: dict[str, Any],
    ) -> Run:
        if cache is not None and not isinstance(cache, PonderCache):
            raise ValueError(f"a {type(cache).__name__} has no entries for passes; pass no cache, or a PonderCache")
        past, n = 0 if cache is None else cache.get_seq_length(), ids.shape[1]
        if mask is not None and tuple(mask.shape) != (ids.shape[0], past + n):
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; it must be {(ids.shape[0], past + n)}")
        keep = None if mask is None else mask.to(ids.device).bool()
        if positions is None:
            counted = torch.ones_like(ids[:, :1]).expand(-1, past + n) if keep is None else keep.long()
            positions = (counted.cumsum(-1) - 1).clamp(min=0)[:, -n:]
        return Run(positions.expand(ids.shape[0], -1), None if keep is None or keep.all() else keep, cache, past, given)
