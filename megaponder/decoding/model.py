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
from transformers.utils import logging

from megaponder.decoding.backbone import Backbone, feature, wide
from megaponder.decoding.cache import PonderCache
from megaponder.decoding.configuration import MegaponderConfig
from megaponder.decoding.freqkv_blocks import read
from megaponder.decoding.freqkv_view import new_cache, run_of
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.paged import PagedRun
from megaponder.decoding.passes import Run

logger = logging.get_logger(__name__)
# transformers calls the cache of an output "cache" since 5.2x and "past_key_values" before
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def _no_such_cache(kind: str) -> ValueError:
    return ValueError(
        f"cache_implementation = {kind!r}: no such cache has entries for passes and rows that a token skips; leave it "
        "out"
    )


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
    _supports_sdpa = _supports_cache_class = True  # the latter is read by early releases
    _no_split_modules: ClassVar[list[str]] = ["Layer"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = ["^second_head[.]"]  # that of `headless`

    def __init__(self, config: MegaponderConfig):
        super().__init__(config)
        if config.method != self.decoding.name:
            raise ValueError(f"method {config.method!r} is unknown here: this is the code for {self.decoding.name}")
        self.ponder = self.decoding(config)
        self.freqkv = read(feature(config, "freqkv"))
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

    def _prepare_generation_config(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        # "hybrid" never reaches the method below: transformers takes it for a default that it has given up
        kind = kwargs.get("cache_implementation") or getattr(generation_config, "cache_implementation", None)
        if kind == "hybrid":
            raise _no_such_cache(kind)
        return super()._prepare_generation_config(generation_config, *args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config: Any, given: Any, *args: Any, **kwargs: Any) -> None:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise _no_such_cache(kind)
        super()._prepare_cache_for_generation(generation_config, given, *args, **kwargs)
        if generation_config.use_cache is not False and given.get(CACHE_FIELD) is None:
            given[CACHE_FIELD] = new_cache(self.freqkv, self.config.num_hidden_layers)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        for one in criteria if self.freqkv is not None else ():
            if hasattr(one, "max_position_embeddings"):
                one.max_position_embeddings = None  # no limit, so nothing to warn of beyond it
        return criteria

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """The manager of `generate_batch`, whose cache has a layer for each pass and layer."""
        if self.freqkv is not None:
            raise ValueError("generate_batch: pages keep keys as they are, and FreqKV compresses them; use generate")
        if not (passes := self.ponder.kv_passes()):
            raise ValueError(
                f"generate_batch: method {self.config.method} does not have exactly one row, with keys and values "
                "of its own, for each token in every pass; use generate"
            )
        self.config._kv_passes = passes
        return super().init_continuous_batching(*args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        cache = past_key_values if cache is None else cache
        past, ahead = 0 if cache is None else cache.get_seq_length(), 0  # tokens before `input_ids`
        if inputs_embeds is not None:  # a prompt without ids
            ahead = inputs_embeds.shape[1]
        elif attention_mask is not None:  # the new tokens alone, or one chunk of the prompt
            ahead = max(0, attention_mask.shape[1] - input_ids.shape[1])
        elif kwargs.get("is_first_iteration") and "next_sequence_length" not in kwargs:
            ahead = past  # transformers 5 drops a mask of ones, and calls so for a chunk only
        inputs: dict[str, Any] = {"input_ids": input_ids[:, max(0, past - ahead) :].to(self.device)}
        if inputs_embeds is not None and past < ahead:
            rest = self.model.embed_tokens(inputs["input_ids"])
            inputs = {"input_ids": None, "inputs_embeds": torch.cat([inputs_embeds, rest], dim=1)[:, past:]}
        new = next(x for x in reversed(inputs.values()) if x is not None).shape[1]
        return {
            **inputs,
            "cache": cache,
            "attention_mask": attention_mask,
            "position_ids": None if position_ids is None else position_ids[:, -new:],
            "output_hidden_states": output_hidden_states,
            "output_attentions": kwargs.get("output_attentions"),
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
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        output_depths: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [b, n, V] in float32 or wider; the mean cross entropy of the shifted `labels` if given.

        `attention_mask` [b, t + n] is 0 at padding (either side); positions count the real tokens.  `inputs_embeds`
        [b, n, H] takes the place of rows of the token table, before their scale.  `hidden_states` are, for each pass in
        the order of computation, the rows that enter it and those after each layer; the last are those that the head
        reads.
        The method may have arguments of its own (`DecodingMethod.arguments`), which are among `kwargs`: for most,
        `passes` (of a token, at most) and `threshold`.  `output_depths` adds `depths` [b, n], passes that tokens ran.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            cache = new_cache(self.freqkv, self.config.num_hidden_layers)
        given = {name: kwargs.pop(name, None) for name in self.ponder.arguments}
        self.ponder.check(given)
        ponder = self.ponder.using(given)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if output_attentions or (output_attentions is None and getattr(self.config, "output_attentions", False)):
            raise ValueError("output_attentions: attention never writes its weights down here; leave it out")
        if inputs_embeds is not None and self.ponder.needs_ids:
            raise ValueError(f"inputs_embeds: method {self.config.method} reads the ids themselves; give input_ids")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        if hasattr(cache, "cache_allocators"):  # continuous batching
            pages, cache, inside = cache, None, {k: v for k, v in kwargs.items() if k != "logits_indices"}
            positions = (
                torch.arange(tokens.shape[1], device=tokens.device)[None] if position_ids is None else position_ids
            )
            run: Run = PagedRun(
                positions, None, None, 0, given, pages=pages, mask_of_batch=attention_mask, arguments=inside
            )
        else:
            run = self._run(tokens, attention_mask, position_ids, cache, given)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        self.model.states = [] if wanted else None
        h = ponder.hidden(self, tokens, run)
        states, self.model.states = self.model.states, None
        if run.cache is not None:
            run.cache.tokens = run.past + tokens.shape[1]
            if run.depth is not None:
                run.cache.note(run.depth)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = wide(self.lm_head(h[:, keep]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        hidden = None if states is None else (*states[:-1], h)
        output = PonderOutput(
            loss=loss,
            logits=logits,
            hidden_states=hidden,
            depths=run.depth if output_depths else None,
            **{CACHE_FIELD: cache},
        )
        return output.to_tuple() if return_dict is False else output

    def _run(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: Cache | None,
        given: dict[str, Any],
    ) -> Run:
        if cache is not None and not isinstance(cache, PonderCache):
            raise ValueError(f"a {type(cache).__name__} has no entries for passes; pass no cache, or a PonderCache")
        past, (b, n) = 0 if cache is None else cache.get_seq_length(), tokens.shape[:2]
        if mask is not None and tuple(mask.shape) != (b, past + n):
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; it must be {(b, past + n)}")
        keep = None if mask is None else mask.to(tokens.device).bool()
        if positions is None:
            counted = torch.ones(b, past + n, dtype=torch.long, device=tokens.device) if keep is None else keep.long()
            positions = (counted.cumsum(-1) - 1).clamp(min=0)[:, -n:]
        if past + n > (most := self.config.max_position_embeddings) and self.freqkv is None:
            if self.config.positions == "learned" and positions.max() >= most:
                raise ValueError(f"{past + n} tokens are more than max_position_embeddings = {most}, the learned ones")
            logger.warning_once(
                f"{past + n} tokens are more than max_position_embeddings = {most}, to which the model was trained"
            )
        run = Run(positions.expand(b, -1), None if keep is None or keep.all() else keep, cache, past, given)
        return run_of(self.freqkv, run)
