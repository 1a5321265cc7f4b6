"""Decoding for a method without a decoding form: the training forward over the full text, for every token."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from megaponder.config.schema import RunConfig
from megaponder.decoding.configuration import MegaponderConfig
from megaponder.export import reference


class TrainingForward(PreTrainedModel, GenerationMixin):
    """A checkpoint's model for `generate`, without a cache, in one process and FP32."""

    config_class = MegaponderConfig

    def __init__(self, cfg: RunConfig, state: dict[str, Tensor]):
        assert cfg.model.vocab_size is not None
        super().__init__(MegaponderConfig(vocab_size=cfg.model.vocab_size, method=cfg.ponder.method))
        self._open = ExitStack()
        engine = self._open.enter_context(reference.engine(cfg, state))
        self._engine = [engine]  # in a list, so that its stage is not part of this module
        self.place = nn.Parameter(torch.zeros(0, device=engine.groups.device))  # says which device this is

    def close(self) -> None:
        """Leave the process groups."""
        self._open.close()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        """FP32 logits [b, 1, V] of the last token; padding, 0 in `attention_mask` [b, n], is left out."""
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        texts = [ids[there.bool()] for ids, there in zip(input_ids, keep, strict=True)]
        rows = [self._engine[0].logits(text[None])[:, -1:] for text in texts]
        return CausalLMOutputWithPast(logits=torch.cat(rows))

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}
