"""Loop, PonderLM and AdaPonderLM in vLLM.

Shapes: r rows (tokens of all requests of a step), H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from megaponder_vllm.layer import Layer, make_norm
from megaponder_vllm.options import options_of, refuse_unknown


class MegaponderForCausalLM(nn.Module):
    """A pondering language model; every token runs all passes, and halted ones keep what they had."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        refuse_unknown({k: v for k, v in config.to_diff_dict().items() if not k.startswith("_")})
        self.options = options_of(config)
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("pipeline_parallel_size must be 1: every pass needs all layers; use tensor parallelism")
        self.passes = self.options.get("steps", self.options.get("extra_passes")) + 1
        width, quant = config.hidden_size, vllm_config.quant_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, width, quant_config=quant, prefix="model.embed_tokens"
        )
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, width)
        self.layers = nn.ModuleList(Layer(config, i, self.passes, vllm_config) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config, width)
        self.lm_head = ParallelLMHead(config.vocab_size, width, quant_config=quant, prefix="lm_head")
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        if config.method == "adaponderlm":  # decisions in FP32, from values that are equal on all ranks
            inner = self.options["gate_width"] * width
            self.gates = nn.ModuleList(
                nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, 1)).float()
                for _ in range(self.passes - 1)
            )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Rows [r, H] of the table."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Final-normed rows [r, H]."""
        words = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        factor = self.passes - 1 if self.options.get("multiply_by_steps") else 1
        x = words * (self.config.embedding_scale * factor)
        if self.config.positions == "learned":
            x = x + self.embed_positions(positions)
        return {"loop": self._loop, "ponderlm": self._ponder, "adaponderlm": self._halting}[self.config.method](
            positions, x
        )

    def _loop(self, positions: Tensor, x: Tensor) -> Tensor:
        for index in range(self.passes):
            x = self._stack(positions, x, index)
        return self.norm(x)

    def _ponder(self, positions: Tensor, x: Tensor) -> Tensor:
        for index in range(self.passes - 1):
            x = x + self._mixture(self.norm(self._stack(positions, x, index)))
        return self.norm(self._stack(positions, x, self.passes - 1))

    def _halting(self, positions: Tensor, x: Tensor) -> Tensor:
        kept: list[Any] = [None] * len(self.layers)
        state = self.norm(self._stack(positions, x, 0, None, kept))
        active = torch.ones_like(state[:, :1], dtype=torch.bool)
        for index in range(1, self.passes):
            gate = self.gates[index - 1](state.float()).sigmoid()
            active = active & (gate >= self.options["threshold"])
            x = x + (active * gate).to(x.dtype) * self._mixture(state)
            state = torch.where(active, self.norm(self._stack(positions, x, index, active, kept)), state)
        return state

    def _stack(
        self, positions: Tensor, x: Tensor, index: int, active: Tensor | None = None, kept: list[Any] | None = None
    ) -> Tensor:
        for i, layer in enumerate(self.layers):
            x, kv = layer(positions, x, index, active, kept[i] if kept else None)
            if kept is not None:
                kept[i] = kv
        return x

    def _mixture(self, h: Tensor) -> Tensor:
        """softmax(h Wo^T) (c We) [r, H]; each rank weighs its own rows of the table."""
        logits = self.lm_head.quant_method.apply(self.lm_head, h)
        if get_tensor_model_parallel_world_size() > 1:
            logits = tensor_model_parallel_all_gather(logits)
        logits = logits[..., : self.config.vocab_size].float()  # the padding of the vocabulary is at its end
        if 0 < (topk := self.options["topk"]) < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(topk, dim=-1).values[..., -1:], float("-inf"))
        own = self.embed_tokens.shard_indices
        share = logits.softmax(-1).to(h.dtype)[:, own.org_vocab_start_index : own.org_vocab_end_index]
        mixed = share @ self.embed_tokens.weight[: share.shape[1]]
        if get_tensor_model_parallel_world_size() > 1:
            mixed = tensor_model_parallel_all_reduce(mixed)
        return mixed * self.config.embedding_scale

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits [r, V]."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Parameters under the names of an export; returns the names that were loaded."""
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            ours = name.removeprefix("model.").removeprefix("method.")
            ours = ours.replace(".self_attn.", ".").replace(".mlp.", ".")
            if ours == "second_head.weight" or (ours == "lm_head.weight" and self.config.tie_word_embeddings):
                continue
            shard = next((letter for letter in "qkv" if f".{letter}_proj." in ours), None)
            if shard is not None:
                ours = ours.replace(f".{shard}_proj.", ".qkv_proj.")
            parameter = parameters[ours]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor, shard) if shard else load(parameter, tensor)
            loaded.add(ours)
        return loaded
