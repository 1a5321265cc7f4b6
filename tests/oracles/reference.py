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

from tests.oracles import freqkv

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
    squares: Tensor | None = None
    """Squared log normaliser of each token [n], where it is not that of `logits`."""


def causal(n: int) -> Tensor:
    """0 where row i may see row j <= i, else -inf."""
    return torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)


class DepthAttention:
    """One key/value head at a time, as the formula says it."""

    def __init__(self, m: Any):
        self.m, self.layers = m, []
        self.o = {"sources": "all", "values": "mixed", "query": "mean_query", "own": "softmax", "scale": 0.0}
        self.o |= {"passes": "across", "blocks": 1} | (m.depth_attention or {})

    def begin_pass(self) -> None:
        if self.o["passes"] == "within":
            self.layers.clear()

    def earlier(self, layer: int) -> list[tuple[int, Tensor, Tensor]]:
        kind, _, n = str(self.o["sources"]).partition(":")
        found, size = self.layers, self.m.num_layers // self.o["blocks"]
        if self.o["blocks"] > 1:  # within a pass
            found = [x for x in found if x[0] // size == layer // size]
        if kind == "last":
            return found[-int(n) :]
        if kind == "stride":
            return [x for back, x in enumerate(found[::-1], start=1) if back % int(n) == 0][::-1]
        return found if kind == "all" else [x for x in found if x[0] in self.o["sources"]]

    def mixed(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, h, d], k and v [rows, g, d]."""
        layer = int(name.split(".")[2])
        groups, d = k.shape[1:]
        tau, earlier = self.o["scale"] or d**-0.5, self.earlier(layer)
        out = []
        for g in range(groups):
            heads = q[:, g * (q.shape[1] // groups) : (g + 1) * (q.shape[1] // groups)]
            keys, values = [x[1][:, g] for x in earlier], [x[2][:, g] for x in earlier]
            if self.o["own"] == "softmax":
                keys, values = [*keys, k[:, g]], [*values, v[:, g]]
            u = torch.zeros_like(v[:, g]) if self.o["own"] == "softmax" else v[:, g]
            if keys:
                queries = heads.mean(1, keepdim=True) if self.o["query"] == "mean_query" else heads
                scores = tau * torch.einsum("thd,jtd->thj", queries, torch.stack(keys))
                u = u + torch.einsum("tj,jtd->td", scores.softmax(-1).mean(1), torch.stack(values))
            out.append(u)
        u = torch.stack(out, dim=1)
        self.layers.append((layer, k, v if self.o["values"] == "raw" else u))
        return u


class Oracle:
    """`weights` by name; `m` is a resolved model section."""

    def __init__(self, weights: Weights, m: Any, scale: float):
        self.w = {k: v.detach().double().requires_grad_() for k, v in weights.items()}
        self.m, self.scale = m, scale
        self.more_values: Callable[[str, Tensor], Tensor | float] | None = None
        """What a method adds to the values [n, g, d] of an attention, by its name and input [n, H]."""
        self.table = self.w["embedding.word_embeddings.weight"][: m.vocab_size]
        self.head = self.table if m.tie_embeddings else self.w["output_layer.weight"][: m.vocab_size]
        self.depth = DepthAttention(m)
        self.routed: dict[str, list[Tensor]] = {}
        self.router_logits: dict[str, list[Tensor]] = {}
        self.loads: dict[str, list[Tensor]] = {}
        """Of a mixture's experts by router, over all runs."""

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"{name}.weight"]  # the engine's frozen ones are 1 and 0
        if self.m.norm == "rmsnorm":
            return x / (x.pow(2).mean(-1, keepdim=True) + self.m.norm_eps).sqrt() * weight
        return F.layer_norm(x, x.shape[-1:], weight, self.w[f"{name}.bias"], self.m.norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [rows, heads, d]: the first rotary_fraction of d turns, in halves or neighbouring channels."""
        if self.m.positions == "learned":
            return x
        width = int(x.shape[-1] * self.m.rotary_fraction)
        turned, rest = x[..., :width], x[..., width:]
        frequency, factor = self.frequencies(width)
        angle = positions.double()[:, None, None] * frequency
        if self.m.rotary_pairs == "adjacent":
            z = torch.view_as_complex(turned.reshape(*turned.shape[:-1], -1, 2).contiguous())
            z = z * torch.polar(torch.full_like(angle, factor), angle)
            return torch.cat([torch.view_as_real(z).flatten(-2), rest], dim=-1)
        a, b = turned.chunk(2, dim=-1)
        cos, sin = factor * angle.cos(), factor * angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def frequencies(self, width: int) -> tuple[Tensor, float]:
        """Of each pair of channels, one after the other, and the factor on what is turned."""
        base, scaling = self.m.rotary_base, self.m.rotary_scaling
        plain = [base ** (-2 * i / width) for i in range(width // 2)]
        kind, grown = scaling.get("rope_type"), 1.0
        if kind == "llama3":
            ends = scaling["low_freq_factor"], scaling["high_freq_factor"]
            for i, f in enumerate(plain):
                turns = scaling["original_max_position_embeddings"] * f / (2 * math.pi)
                share = min(max((turns - ends[0]) / (ends[1] - ends[0]), 0), 1)
                plain[i] = share * f + (1 - share) * f / scaling["factor"]
        elif kind == "yarn":
            assert {*scaling} == {"rope_type", "factor", "original_max_position_embeddings"}
            # 32 turns and more within the original length: as it is; one turn and less: divided
            long = scaling["original_max_position_embeddings"]
            first, last = (width * math.log(long / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (32, 1))
            first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
            for i, f in enumerate(plain):
                share = min(max((i - first) / (last - first), 0), 1)
                plain[i] = (1 - share) * f + share * f / scaling["factor"]
            grown = 0.1 * math.log(scaling["factor"]) + 1
        elif kind == "linear":
            plain = [f / scaling["factor"] for f in plain]
        return torch.tensor(plain, dtype=torch.float64), grown

    def attention(
        self, x: Tensor, positions: Tensor, name: str, logit_bias: Tensor | None = None, keys: Keys | None = None
    ) -> Tensor:
        """`logit_bias` [rows, keys] replaces the causal mask; `keys` may replace or extend this layer's k and v."""
        rows, m = x.shape[0], self.m
        per_group = m.num_heads // m.num_kv_heads
        qkv = self.linear(x, f"{name}.linear_qkv").view(rows, m.num_kv_heads, per_group + 2, -1)
        d = qkv.shape[-1]
        q, k = qkv[:, :, :per_group].reshape(rows, m.num_heads, d), qkv[:, :, per_group]
        if m.qkv_bias == "qk":
            q, k = q + self.w[f"{name}.q_bias.bias"].view(-1, d), k + self.w[f"{name}.k_bias.bias"].view(-1, d)
        if m.qk_norm == "head":
            q, k = self.norm(q, f"{name}.q_layernorm"), self.norm(k, f"{name}.k_layernorm")
        if m.qk_norm == "all":
            q = self.norm(q.reshape(rows, -1), f"{name}.q_layernorm").view_as(q)
            k = self.norm(k.reshape(rows, -1), f"{name}.k_layernorm").view_as(k)
        raw = q, k
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        if m.qk_norm == "rotated":  # the engine runs in FP32
            q, k = (y / (y.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() for y in (q, k))
        v = qkv[:, :, per_group + 1]
        v = v if self.more_values is None else v + self.more_values(name, x)
        if m.depth_attention:
            v = self.depth.mixed(name, q, k, v)
        if m.freqkv:
            assert keys is None and logit_bias is None
            o = {"sink": 4, "ratio": 0.5} | m.freqkv
            out = freqkv.attention(*raw, v, **o, rotate=self.rotate)
            return self.linear(out.reshape(rows, -1), f"{name}.linear_proj")
        k, v = (y.repeat_interleave(per_group, dim=1) for y in (k, v))
        if keys is not None:
            k, v = keys(name, k, v)
        logits = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
        if m.attention_window:  # all sets of keys have the same tokens
            tokens = positions.repeat(k.shape[0] // rows)
            logits = logits.masked_fill(tokens <= positions[:, None] - m.attention_window, -math.inf)
        p = (logits + (causal(rows) if logit_bias is None else logit_bias)).softmax(-1)
        return self.linear(torch.einsum("hij,jhd->ihd", p, v).reshape(rows, -1), f"{name}.linear_proj")

    def mixture(self, x: Tensor, name: str) -> Tensor:
        """Token by token; what the router did is kept for `balance`.

        Of several routers a row takes that of its pass, which is the number of times that the layer ran before, or of
        its slot where a token has several rows; the last one where there are no more.
        """
        o = {"score": "softmax", "renormalise": True, "scale": 1.0, "shared_ffn": 0, "bias_rate": 0} | self.m.moe
        routers = self.w[f"{name}.router.weight"].split(o["experts"])
        ran = len(self.routed.get(name, ()))
        steps = [ran if self.slots == 1 else row % self.slots for row in range(len(x))]
        z = torch.stack([routers[min(step, len(routers) - 1)] @ row for step, row in zip(steps, x, strict=True)])
        scores = z.softmax(-1) if o["score"] == "softmax" else z.sigmoid()
        self.router_logits.setdefault(name, []).append(z)
        biases = self.w.get(f"{name}.router.expert_bias", torch.zeros(len(routers) * o["experts"])).split(o["experts"])
        out, loads = [], self.loads.setdefault(name, [torch.zeros(o["experts"]) for _ in routers])
        for step, row, score in zip(steps, x, scores, strict=True):
            own = min(step, len(routers) - 1)
            best = (score + biases[own]).topk(o["top_k"]).indices
            loads[own][best] += 1
            p = score[best] / (score[best].sum() if o["renormalise"] else 1.0) * o["scale"]
            parts = [self.dense(row, f"{name}.experts.local_experts.{e}") for e in best]
            out.append(sum(weight * part for weight, part in zip(p, parts, strict=True)))
        self.routed.setdefault(name, []).append(scores / scores.sum(-1, keepdim=True))
        y = torch.stack(out)
        return y + self.dense(x, f"{name}.shared_experts") if o["shared_ffn"] else y

    def balance(self, mask: Tensor) -> Tensor:
        """Sum over layers, mean over passes, of E sum_e f_e P_e over the tokens of a mask, times their number; all rows
        of a token count."""
        total, (experts, k) = mask.new_zeros((), dtype=torch.float64), (self.m.moe["experts"], self.m.moe["top_k"])
        for passes in self.routed.values():
            for scores in passes:
                own = scores.unflatten(0, (len(mask), -1))[mask > 0].flatten(0, 1)
                f = torch.bincount(own.topk(k).indices.flatten(), minlength=experts) / (len(own) * k)
                total = total + int((mask > 0).sum()) * experts * (f * own.mean(0)).sum() / len(passes)
        return total

    def discipline(self, number: int, mask: Tensor) -> Tensor:
        """Sum over layers and the tokens of a mask, mean over passes, of -log of the softmax's mass on a discipline's
        experts."""
        total, k = mask.new_zeros((), dtype=torch.float64), self.m.moe["top_k"]
        for passes in self.router_logits.values():
            for z in passes:
                mass = z.softmax(-1)[:, number * k : (number + 1) * k].sum(-1)
                total = total - (mass.log().unflatten(0, (len(mask), -1)).mean(1) * mask).sum() / len(passes)
        return total

    def mlp(self, x: Tensor, name: str) -> Tensor:
        return self.mixture(x, name) if self.m.moe else self.dense(x, name)

    def dense(self, x: Tensor, name: str) -> Tensor:
        x = self.linear(x, f"{name}.linear_fc1")
        if self.m.activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        elif self.m.activation in ("relu", "relu2"):
            x = x.clamp(min=0) ** (2 if self.m.activation == "relu2" else 1)
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
        placement = self.m.norm_placement

        def before(y: Tensor, name: str) -> Tensor:
            return y if placement == "post" else self.norm(y, name)

        def step(y: Tensor, out: Tensor, name: str) -> Tensor:
            if placement == "pre":
                return y + out
            return self.norm(y + out, name) if placement == "stream" else y + self.norm(out, name)

        self.depth.begin_pass()
        self.slots = len(positions) // len(positions.unique())
        for i in range(self.m.num_layers) if layers is None else layers:
            at = f"decoder.layers.{i}"
            normed = before(x, f"{at}.input_layernorm")
            attended = self.attention(normed, positions, f"{at}.self_attention", logit_bias, keys)
            y = step(x, attended, f"{at}.post_self_attn_layernorm")
            inner = before(x if self.m.parallel_residual else y, f"{at}.pre_mlp_layernorm")
            x = step(y, self.mlp(inner, f"{at}.mlp"), f"{at}.post_mlp_layernorm")
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

        self.depth.layers.clear()
        self.routed.clear()
        self.router_logits.clear()
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
        self,
        ids_bn: Tensor,
        labels_bn: Tensor,
        mask_bn: Tensor,
        method: str,
        options: dict[str, Any],
        z: float,
        weights_bn: Tensor | None = None,
        disciplines: tuple[float, list[int]] | None = None,
    ) -> tuple[Tensor, Weights]:
        """Mean cross entropy over the valid targets of the batch, and the gradient of every weight, z-loss included.

        `weights_bn`: of the tokens in what is differentiated, auxiliary losses aside.  `disciplines`: weight of the
        routers' loss on them, and each sequence's number (-1: none).
        """
        total, objective = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        aux = torch.zeros((), dtype=torch.float64)
        each = mask_bn if weights_bn is None else weights_bn
        weight_of_labels, numbers = disciplines or (0.0, [-1] * len(ids_bn))
        labelled = sum(mask.sum() for mask, number in zip(mask_bn, numbers, strict=True) if number >= 0)
        for ids, labels, mask, weight, number in zip(ids_bn, labels_bn, mask_bn, each, numbers, strict=True):
            result = self.run(ids, method, options, labels)
            losses = F.cross_entropy(result.logits, labels, reduction="none")
            total = total + (losses * mask).sum()
            objective = objective + ((losses * weight).sum() if result.objective is None else result.objective(weight))
            if result.cost is not None:
                aux = aux + result.cost(mask)
            squares = result.logits.logsumexp(-1) ** 2 if result.squares is None else result.squares
            aux = aux + z * (squares * weight).sum()
            if self.m.moe:
                aux = aux + self.m.moe["aux_weight"] * self.balance(mask)
                if number >= 0:
                    aux = aux + weight_of_labels * self.discipline(number, mask) * mask_bn.sum() / labelled
        loss = total / mask_bn.sum()
        grads = torch.autograd.grad((objective + aux) / mask_bn.sum(), list(self.w.values()), allow_unused=True)
        return loss.detach(), {
            k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(self.w.items(), grads, strict=True)
        }
