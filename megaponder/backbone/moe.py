"""Mixture of experts in training: megatron-core's experts and dispatchers, and a router that knows passes and batches.

megatron-core's own balance loss is a mean over micro-batches, so it depends on their size, and its counters count a
recomputed layer twice.  Here the router returns its statistics, and the balance loss is a sum over sequences that is
divided by the one denominator of all losses (`engine.balance`):

    aux = sum over sequences of  n E sum_e f_e P_e      f_e: share of the sequence's n k choices that are expert e
                                                        P_e: mean of its score, which sums to 1 over experts
    n: tokens of the sequence that count; a token with several rows is their mean; halted ones do not count

Only P has a gradient.  Where choices and scores are uniform, a token adds 1 to it.

Several routers are one matrix, one below the other: also a step that runs fewer passes then has a gradient for every
parameter.

Shapes: s rows, b micro-batch, H hidden, E experts, k chosen ones, R routers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from megaponder.backbone.parts import Parts
from megaponder.decoding.moe_options import Experts

NORMALISER = 1e-20
"""megatron-core's, in the sum of sigmoid scores."""


class Routed(NamedTuple):
    """What a layer's router did with the rows of this rank that count; the two losses alone have gradients."""

    aux: Tensor
    """This rank's part of the balance loss, a sum over tokens."""
    load: Tensor
    """Choices of each expert by each router [R, E], in tokens."""
    entropy: Tensor
    """Sum over tokens of the entropy of the scores, in nats."""
    discipline: Tensor | None = None
    """Sum over the tokens of labelled sequences of `config.disciplines`' loss, with gradient; None: nobody asks."""


class PonderRouter(TopKRouter):
    """megatron-core's router weights and choice; its statistics are returned instead of kept."""

    expert_bias: Tensor | None
    weight: nn.Parameter

    def __init__(self, *args: Any, options: Experts, **rest: Any):
        super().__init__(*args, **rest)
        self.options = options
        self._over = self.tp_cp_group if self.tp_cp_group.size() > 1 else None
        count = options.router_count
        if count > 1:
            one = self.weight
            self.weight = nn.Parameter(one.detach().repeat(count, 1))
            self.weight.sequence_parallel = one.sequence_parallel  # type: ignore[attr-defined]
            self.weight.copies = count  # type: ignore[attr-defined]  # at the start (`backbone.init`)
        if options.bias_rate:  # megatron-core's name; it would update the bias itself if it had made it
            del self.expert_bias
            biases = torch.zeros(count * options.experts, device=torch.cuda.current_device())
            self.register_buffer("expert_bias", biases)
        if self.tp_group.size() > 1 and not self.config.sequence_parallel:
            self.weight.register_hook(self._sum_of_ranks)  # each tensor rank routes its own rows

    def _sum_of_ranks(self, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=self.tp_group)
        return gradient

    def gating(self, x_sbh: Tensor, routers: Sequence[int] = (0,)) -> Tensor:
        """FP32 logits [s, b, E] of rows that have these routers in turn."""
        if self.options.router_count == 1:
            made: Tensor = super().gating(x_sbh) if moe_utils.HAVE_TE else _logits(x_sbh, self.weight)
            return made
        weights = self.weight.unflatten(0, (-1, self.options.experts))
        parts = x_sbh.unflatten(0, (-1, len(routers))).unbind(1)
        logits = [_logits(x.contiguous(), weights[i]) for x, i in zip(parts, routers, strict=True)]
        return torch.stack(logits, dim=1).flatten(0, 1)

    def _biases(self, routers: Sequence[int], s: int, b: int) -> Tensor | None:
        """What is added to the scores of rows that have these routers in turn: [E], or [s b, E]; None: nothing."""
        if self.expert_bias is None:
            return None
        biases = self.expert_bias.view(-1, self.options.experts)
        if len(routers) == 1:
            return biases[routers[0]]
        return torch.stack([biases[i] for i in routers]).repeat_interleave(b, dim=0).repeat(s // len(routers), 1)

    def forward(
        self,
        x_sbh: Tensor,
        counted_sb: Tensor,
        disciplines_b: Tensor | None = None,
        steps: Sequence[int] = (0,),
    ) -> tuple[Tensor, Tensor, Routed]:
        """Weights [s b, E], zero where an expert is not chosen, the choices as a mask, and statistics.

        `counted_sb`: share of a token that each row is; 0 if it does not count.  `disciplines_b`: which group of k
        experts a sequence's rows should take; -1: any.  `steps`: of the rows in turn, by which routers differ.
        """
        self._maintain_float32_expert_bias()
        o, routers = self.options, self.options.routers_of(steps)
        logits = self.gating(x_sbh, routers).flatten(0, 1)
        weights, chosen = moe_utils.topk_routing_with_score_function(
            logits,
            o.top_k,
            use_pre_softmax=not o.renormalise,
            scaling_factor=o.scale,
            score_function=o.score,
            expert_bias=self._biases(routers, *counted_sb.shape),
        )
        routed = self._routed(logits, chosen, counted_sb, routers)
        if disciplines_b is not None:
            routed = routed._replace(discipline=self._discipline(logits, counted_sb, disciplines_b))
        return weights, chosen, routed

    def _discipline(self, logits: Tensor, counted_sb: Tensor, disciplines_b: Tensor) -> Tensor:
        logarithms = logits.float().log_softmax(-1).view(*counted_sb.shape, -1, self.options.top_k).logsumexp(-1)
        own = disciplines_b.clamp(min=0)[None, :, None].expand(*counted_sb.shape, 1)
        return -(logarithms.gather(2, own)[..., 0] * counted_sb.float() * (disciplines_b >= 0)).sum()

    def _routed(self, logits: Tensor, chosen: Tensor, counted_sb: Tensor, routers: Sequence[int]) -> Routed:
        o, (s, b) = self.options, counted_sb.shape
        scores, logarithms = self._scores(logits.float())
        counted = counted_sb.float()[..., None]
        with torch.no_grad():
            parts = (chosen.view(s, b, -1) * counted).unflatten(0, (-1, len(routers))).sum(0)
            choices_be, load = parts.sum(0), parts.new_zeros(o.router_count, o.experts)
            for router, part in zip(routers, parts, strict=True):
                load[router] += part.sum(0)
            entropy = -(scores * logarithms).sum(-1).view(s, b, 1).mul(counted).sum()
            by_score = choices_be
            if self.expert_bias is not None:  # the balance of the scores, which the bias only corrects
                best = torch.zeros_like(scores).scatter(1, scores.topk(o.top_k, dim=1).indices, 1.0)
                by_score = (best.view(s, b, -1) * counted).sum(0)
            whole = torch.cat([by_score, counted.sum(0)], dim=-1)  # of the sequence, whose rows other ranks have too
            if self._over is not None:
                dist.all_reduce(whole, group=self._over)
            share_be = whole[:, :-1] / whole[:, -1:].clamp(min=1e-6) * (o.experts / o.top_k)
        aux = ((scores.view(s, b, -1) * counted).sum(0) * share_be).sum()
        return Routed(aux, load, entropy)

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores that sum to 1 over the experts, and their logarithms."""
        if self.options.score == "softmax":
            logarithms = logits.log_softmax(-1)
            return logarithms.exp(), logarithms
        scores = logits.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + NORMALISER)
        return scores, scores.clamp(min=NORMALISER).log()


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """FP32 logits of rows [..., H] by one router [E, H]; megatron-core 0.16 has them with Transformer Engine only."""
    if moe_utils.HAVE_TE:
        logits: Tensor = moe_utils.router_gating_linear(x, weight, None, torch.float32)
        if logits.requires_grad:  # its backward views what it gets, and slots' gradients lie between each other's
            logits.register_hook(Tensor.contiguous)
        return logits
    return F.linear(x.float(), weight.float())


class PonderMoE(MoELayer):
    """megatron-core's layer: router, dispatcher, experts and the shared expert."""

    router: Any
    shared_experts: Any

    def __init__(self, *args: Any, **rest: Any):
        super().__init__(*args, **rest)
        for name, p in self.experts.named_parameters():
            # Transformer Engine's do not say that they exist only here, so that norms of gradients would leave them out
            p.tensor_model_parallel, p.partition_stride = True, 1
            p.partition_dim = 1 if "linear_fc2" in name else 0

    def dispatch(self, hidden: Tensor, weights: Tensor) -> Any:
        """Rows to the ranks of their experts."""
        d: Any = self.token_dispatcher
        for name in ("input_splits", "output_splits"):
            counts = getattr(d, name, None)
            if torch.is_tensor(counts) and not counts.is_cuda:  # megatron-core makes numbers of those on GPUs only
                setattr(d, name, counts.tolist())
        return super().dispatch(hidden, weights)

    def _forget(self) -> None:
        """Drop what the dispatcher keeps of this forward's graph.

        The graph leads to the parameters, whose hooks lead back here: a circle that Python's collector cannot see, so
        that the memory of a model would never be freed.
        """
        d: Any = self.token_dispatcher
        for name, value in list(vars(d).items()):
            if torch.is_tensor(value) and value.requires_grad:
                setattr(d, name, None)

    def forward(
        self,
        x_sbh: Tensor,
        counted_sb: Tensor,
        disciplines_b: Tensor | None = None,
        steps: Sequence[int] = (0,),
    ) -> tuple[Tensor, Routed]:
        """The mixture for each row, and what the router did; the rest as in `PonderRouter.forward`."""
        x_sbh = x_sbh.contiguous()  # as dispatchers expect it
        own, shared = x_sbh, self.shared_experts_compute(x_sbh)
        alike = self.tp_group.size() > 1 and not self.config.sequence_parallel  # all tensor ranks hold all rows
        if alike:
            own = scatter_to_sequence_parallel_region(x_sbh, group=self.tp_group)
            counted_sb = counted_sb.chunk(self.tp_group.size())[self.tp_group.rank()]
        weights, chosen, routed = self.router(own, counted_sb, disciplines_b, steps)
        hidden, weights = self.preprocess(own, weights, chosen)
        hidden, weights = self.dispatch(hidden, weights)
        out, _ = self.routed_experts_compute(hidden, weights)
        out = self.postprocess(self.combine(out), None)
        self._forget()
        if alike:
            out = gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False, group=self.tp_group)
        return out if shared is None else out + shared, routed


class AddLoss(torch.autograd.Function):
    """Rows as they are; their backward adds the gradient of a loss that goes another way to the optimizer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.like


def moe_layer(options: Experts, parts: Parts) -> Any:
    """What megatron-core builds in place of an MLP."""
    matrices = MLPSubmodules(linear_fc1=parts.column, linear_fc2=parts.row)
    if parts.grouped is None:
        experts = _of(SequentialMLP, matrices)
    else:
        # one kernel for all experts where Transformer Engine has it (Hopper, BF16, forward and gradients of rows):
        # a launch for each of 32 experts takes the processor longer than its product takes the GPU
        os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
        experts = _of(TEGroupedMLP, MLPSubmodules(linear_fc1=parts.grouped[0], linear_fc2=parts.grouped[1]))
    router: Any = partial(PonderRouter, options=options)
    return _of(PonderMoE, MoESubmodules(experts, _of(SharedExpertMLP, matrices), router))


def _of(module: Any, submodules: Any) -> Any:
    """The class with its parts: megatron-core 0.16 expects a specification or a class, 0.19 something to call."""

    class Built(module):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, submodules=submodules, **options)

    Built.__name__ = Built.__qualname__ = module.__name__
    return Built
