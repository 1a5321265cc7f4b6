"""PonderLM-3: latent thoughts of which each token takes as many as a router grants it.

    a_t = W_r h_{t,0} + b_r;  s_t = softmax(a_t) over 0 .. K;  tail mass w_{t,k} = sum_{j >= k} s_{t,j}
    attention: log w_{t,k} is added to every logit of the key of latent k;  readout: sum_k s_{t,k} h_{t,k}
    decoding: token t runs latents 1 .. max{k : w_{t,k} >= tau};  loss = CE + weight * mean of sum_{k>=1} w_{t,k}

Known from arXiv 2603.02023: router on the step-0 state, log tail mass on keys, hard pruning at tau = 1e-4, exit-mass
readout.  This project's choices (no public code): a linear router with b_K = +2; the bias in a pass comes from the
logits of the pass before (the router's input exists only after the last layer); it holds for the token's own row too;
the exit masses are not renormalised after pruning; the cost is the expected number of latents, or what exceeds
`target_depth` on a sequence's mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaponder.ponder.base import (
    CoreAttention,
    EntryTools,
    ExitTools,
    Flow,
    Pass,
    Readout,
    interleave,
    pass_count,
    register,
    slot,
)
from megaponder.ponder.halting import at_least, fraction, linear32, ordered, ramp
from megaponder.ponder.methods.latents.training import LatentMethod, LatentOptions


def log_tails(a: Tensor) -> Tensor:
    """log of the tail masses w_k = sum_{j >= k} softmax(a)_j; the first is exactly 0."""
    tails = torch.logcumsumexp(a.flip(-1), dim=-1).flip(-1)
    return tails - tails[..., :1]


@register
class PonderLM3(LatentMethod):
    """Latent thoughts with a router."""

    name = "ponderlm3"
    summary = "latent thoughts, as many for each token as its router grants"
    rider_channels = 1  # log tail mass of the row, added to its key's logits
    halts = True
    stats = ("expected_depth",)

    @dataclass
    class Options(LatentOptions):
        latents: int = pass_count(3)
        """K: the most latent thoughts of a token."""
        threshold: float = 1e-4
        """tau: decoding runs the latents whose tail mass is at least this."""
        cost_weight: float = 0.01
        """Weight of the expected number of latents in the loss."""
        target_depth: float = 0.0
        """Penalise only what a sequence's mean number of latents exceeds this by; 0: penalise all."""
        ramp_start: int = 0
        """Step at which the cost leaves 0."""
        ramp_end: int = 0
        """Step from which on the cost has its full weight."""
        router_bias: float = 2.0
        """Start of the router's bias for the full number of latents."""

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("cost_weight", "target_depth"):
                at_least(self, name, 0)
            fraction(self, "threshold")
            ordered(self, "ramp_start", "ramp_end")

    def max_depth(self) -> int:
        return int(self.options.latents) + 1

    def exit_modules(self) -> dict[str, nn.Module]:
        router = nn.Linear(self.shape.hidden_size, self.options.latents + 1)
        nn.init.zeros_(router.weight)
        nn.init.zeros_(router.bias)
        with torch.no_grad():
            router.bias[-1] = self.options.router_bias
        return {"router": router}

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        rows = super().enter(p, ids_bn, feedback, carry, tools).rows
        nothing = torch.zeros(*carry["embedding"].shape[:2], 1, device=rows.device)
        if feedback is None:
            return Flow(rows, nothing)
        assert feedback.riders is not None
        latents = p.slots - 1
        return Flow(rows, interleave([nothing, *(slot(feedback.riders, latents, i) for i in range(latents))]))

    def attend(
        self,
        p: Pass,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        riders: Tensor | None,
        kept: tuple[Tensor, ...],
        core: CoreAttention,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if p.index == 0:
            return core(q, k, v), ()
        assert riders is not None
        return core(q, k, v, key_bias=riders[..., 0]), ()

    def _route(self, p: Pass, h: Tensor, tools: ExitTools) -> Tensor:
        """Router logits [n, b, K + 1] from the states of slot 0."""
        slots = len(p.reads) if p.reads is not None else p.slots
        return tools.broadcast(linear32(tools.modules["router"], slot(h, slots, 0)))

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        h = tools.norm(rows)
        self._watch(p, h, carry, tools)
        log_w = log_tails(self._route(p, h, tools))[..., 1 : p.feedback_slots + 1]
        return Flow(h, log_w.transpose(1, 2).flatten(0, 1)[..., None])

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        h = tools.norm(rows)
        a = self._route(p, h, tools)
        s, w = a.softmax(-1), log_tails(a).exp()[..., 1:]
        hidden = torch.stack([slot(h, p.slots, k) * s[..., k, None].to(h.dtype) for k in range(p.slots)]).sum(0)
        depth = 1.0 + (w.detach() >= self.options.threshold).sum(-1)  # w falls with k: the count is the largest k
        expected = w.sum(-1)
        stats = {"expected_depth": ((1.0 + expected) * tools.valid_sb).sum(), **self._residuals(carry)}
        gates = [(w[..., k], torch.ones_like(depth, dtype=torch.bool)) for k in range(w.shape[-1])]
        return Readout(hidden, self._cost(expected, tools), stats, depth, gates)

    def _cost(self, expected: Tensor, tools: ExitTools) -> Tensor:
        valid = tools.valid_sb
        excess = (expected - self.options.target_depth) * valid
        if self.options.target_depth:
            # relu of a sequence's mean, times its tokens; whole sequences decide, so no layout matters
            excess = excess * (tools.gather(excess).sum(0) > 0)
        weight = self.options.cost_weight * ramp(tools.step, self.options.ramp_start, self.options.ramp_end)
        return weight * excess.sum()

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        return 2.0 * self.shape.hidden_size * (self.options.latents + 1)
