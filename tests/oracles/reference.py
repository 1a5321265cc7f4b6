"""Float64 models of each feature and method on a stage's weights (one-process names), one sequence at a time.

Plain matrix algebra, no code of megaponder or megatron-core: x [rows, H], positions [rows].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Keys = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Result:
    """Of one sequence."""

    logits: Tensor
    depth: Tensor | None = None
    """Passes that each token ran [n]."""
    cost: Callable[[Tensor], Tensor] | None = None
    """Auxiliary loss, a sum over the tokens of a mask [n]."""
    objective: Callable[[Tensor], Tensor] | None = None
    """The same of the loss that replaces the cross entropy in the gradients."""


def causal(n: int) -> Tensor:
    """0 where row i may see row j <= i, else -inf."""
    return torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)


class Oracle:
    """`weights` by name; `m` is a resolved model section."""

    def __init__(self, weights: Weights, m: Any, scale: float):
        self.w = {k: v.detach().double().requires_grad_() for k, v in weights.items()}
        self.m, self.scale = m, scale
        self.table = self.w["embedding.word_embeddings.weight"][: m.vocab_size]
        self.head = self.table if m.tie_embeddings else self.w["output_layer.weight"][: m.vocab_size]

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"{name}.weight"]
        if self.m.norm == "rmsnorm":
            return x / (x.pow(2).mean(-1, keepdim=True) + self.m.norm_eps).sqrt() * weight
        return F.layer_norm(x, x.shape[-1:], weight, self.w[f"{name}.bias"], self.m.norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [rows, heads, d]: the first rotary_fraction of d turns, in halves."""
        if self.m.positions == "learned":
            return x
        width = int(x.shape[-1] * self.m.rotary_fraction)
        turned, rest = x[..., :width], x[..., width:]
        frequency = self.m.rotary_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = positions.double()[:, None, None] * frequency
        a, b = turned.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], dim=-1)

    def attention(
        self, x: Tensor, positions: Tensor, name: str, logit_bias: Tensor | None = None, keys: Keys | None = None
    ) -> Tensor:
        """`logit_bias` [rows, keys] replaces the causal mask; `keys` may replace or extend this layer's k and v."""
        rows, m = x.shape[0], self.m
        per_group = m.num_heads // m.num_kv_heads
        qkv = self.linear(x, f"{name}.linear_qkv").view(rows, m.num_kv_heads, per_group + 2, -1)
        d = qkv.shape[-1]
        q, k = qkv[:, :, :per_group].reshape(rows, m.num_heads, d), qkv[:, :, per_group]
        if m.qk_norm == "head":
            q, k = self.norm(q, f"{name}.q_layernorm"), self.norm(k, f"{name}.k_layernorm")
        q, k = self.rotate(q, positions), self.rotate(k, positions).repeat_interleave(per_group, dim=1)
        v = qkv[:, :, per_group + 1].repeat_interleave(per_group, dim=1)
        if keys is not None:
            k, v = keys(name, k, v)
        logits = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
        p = (logits + (causal(rows) if logit_bias is None else logit_bias)).softmax(-1)
        return self.linear(torch.einsum("hij,jhd->ihd", p, v).reshape(rows, -1), f"{name}.linear_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        x = self.linear(x, f"{name}.linear_fc1")
        if self.m.activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate="tanh" if self.m.activation == "gelu_tanh" else "none")
        return self.linear(x, f"{name}.linear_fc2")

    def stack(
        self,
        x: Tensor,
        positions: Tensor,
        logit_bias: Tensor | None = None,
        keys: Keys | None = None,
        layers: range | None = None,
    ) -> Tensor:
        for i in range(self.m.num_layers) if layers is None else layers:
            at = f"decoder.layers.{i}"
            normed = self.norm(x, f"{at}.input_layernorm")
            attended = self.attention(normed, positions, f"{at}.self_attention", logit_bias, keys)
            if self.m.norm_placement == "sandwich":
                attended = self.norm(attended, f"{at}.post_self_attn_layernorm")
            inner = self.norm(x if self.m.parallel_residual else x + attended, f"{at}.pre_mlp_layernorm")
            inner = self.mlp(inner, f"{at}.mlp")
            if self.m.norm_placement == "sandwich":
                inner = self.norm(inner, f"{at}.post_mlp_layernorm")
            x = x + attended + inner
        return x

    def embed(self, ids: Tensor, positions: Tensor, factor: float = 1.0) -> Tensor:
        x = factor * self.scale * self.table[ids]
        if self.m.positions == "learned":
            x = x + self.w["embedding.position_embeddings.weight"][positions]
        return x

    def logits(self, ids: Tensor, method: str, options: dict[str, Any]) -> Tensor:
        """[n, vocab_size] of a sequence [n]."""
        return self.run(ids, method, options).logits

    def run(self, ids: Tensor, method: str, options: dict[str, Any], labels: Tensor | None = None) -> Result:
        """Logits, and for the adaptive methods depth and auxiliary loss, of a sequence [n]."""
        from tests.oracles import adaptive, looped

        if (found := (adaptive.METHODS | looped.METHODS).get(method)) is not None:
            return found(self, ids, options, labels)
        return Result(self._plain(ids, method, options))

    def _plain(self, ids: Tensor, method: str, options: dict[str, Any]) -> Tensor:
        positions = torch.arange(len(ids))
        if method == "pause":
            pauses = torch.full((len(ids), options["pauses"]), options["pause_token_id"])
            slots = options["pauses"] + 1
            ids = torch.cat([ids[:, None], pauses], dim=1).flatten()
            positions = positions.repeat_interleave(slots)
            x = self.stack(self.embed(ids, positions), positions)[slots - 1 :: slots]
        elif method == "ponderlm":
            steps, topk = options["steps"], options.get("topk", 0)
            x = start = self.embed(ids, positions, steps if options.get("multiply_by_steps") else 1.0)
            for _ in range(steps):
                h = self.norm(self.stack(x, positions), "final_norm")
                if options.get("feedback", "mixture") == "mixture":
                    z = h @ self.head.T
                    if topk:
                        z = z.masked_fill(z < z.topk(topk).values[:, -1:], -math.inf)
                    h = z.softmax(-1) @ (self.scale * self.table)
                elif options["feedback"] == "projected":
                    h = self.linear(h, "method_modules.projection")
                if options.get("gentle_start"):
                    h = self.w["method_modules.feedback_gate.weight"] * h
                x = (x if options.get("accumulate", True) else start) + h
            x = self.stack(x, positions)
        else:
            x = self.embed(ids, positions)
            for _ in range(1 + options.get("extra_passes", 0)):
                x = self.stack(x, positions)
        return self.norm(x, "final_norm") @ self.head.T

    def loss_and_gradients(
        self, ids_bn: Tensor, labels_bn: Tensor, mask_bn: Tensor, method: str, options: dict[str, Any]
    ) -> tuple[Tensor, Weights]:
        """Mean cross entropy over the valid targets of the batch, and the gradient of every weight."""
        total, objective = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        aux = torch.zeros((), dtype=torch.float64)
        for ids, labels, mask in zip(ids_bn, labels_bn, mask_bn, strict=True):
            result = self.run(ids, method, options, labels)
            losses = F.cross_entropy(result.logits, labels, reduction="none")
            total = total + (losses * mask).sum()
            objective = objective + ((losses * mask).sum() if result.objective is None else result.objective(mask))
            if result.cost is not None:
                aux = aux + result.cost(mask)
        loss = total / mask_bn.sum()
        grads = torch.autograd.grad((objective + aux) / mask_bn.sum(), list(self.w.values()), allow_unused=True)
        return loss.detach(), {
            k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(self.w.items(), grads, strict=True)
        }
