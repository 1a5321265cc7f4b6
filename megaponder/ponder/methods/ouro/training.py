"""Ouro (LoopLM): the stack runs T times on its own normed output, and a gate learns after which loop to stop.

    h_t = N(Stack(h_{t-1})),  h_0 = c We[ids];  lambda_t = sigmoid(w_g h_t + b_g)
    p_t = lambda_t prod_{j<t} (1 - lambda_j) for t < T,  p_T = prod_{j<T} (1 - lambda_j)
    stage 1:  loss = mean over tokens of  sum_t p_t CE_t - entropy_weight H(p)
    stage 2:  loss = mean over tokens and t = 2..T of  BCE(1 - lambda, sigmoid(50 (gain_t - 0.005)))
              gain_t = max(0, CE_{t-1} - CE_t), a constant

Stage 1 trains everything.  Stage 2 trains the gate alone (set `train.method_only_steps` to the number of steps): no
pass needs a backward below the head, so the layers run without gradient.  The reported loss is CE_T; `objective` is
what is minimised, `exit_loop{t}` the mean of p_t.  Logits are those of loop T, or with `threshold` below 1 those
of the first loop at which the sum of p reaches it.

Published: forward, p and the read-out (the public modelling file).  Second-hand, through other projects: both losses;
whether stage 2 pairs gain_t with gate t (`judges: same`) or t - 1 (`judges: next`) is not certain.  The published
blocks are Llama's with sandwich norms (`model.norm_placement: sandwich`).  Source: arXiv 2510.25741.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaponder.decoding.kv_budget import budget_mistake
from megaponder.errors import ConfigError
from megaponder.ponder.base import EntryTools, ExitTools, Flow, Method, Pass, Readout, pass_count, register
from megaponder.ponder.halting import as_decoded, at_least, linear32, refuse


@register
class Ouro(Method):
    """Loops of the whole stack with a learned exit distribution."""

    name = "ouro"
    summary = "the stack runs loops times on its own normed output; a gate weighs the losses of all loops"
    reads_every_pass = True
    trains_exits = True

    @dataclass
    class Options:
        loops: int = pass_count(4)
        """T: loops of the stack."""
        stage: int = 1
        """1 trains everything, 2 the gate alone."""
        entropy_weight: float = 0.1
        """Weight of the exit distribution's entropy in stage 1; at 0 the gate collapses onto the first loop."""
        judges: str = "same"
        """Stage 2: gain_t is the target of gate t (same) or of gate t - 1 (next)."""
        gain_scale: float = 50.0
        """Stage 2: steepness of the target."""
        gain_from: float = 0.005
        """Stage 2: the gain at which the target is one half."""
        threshold: float = 1.0
        """Evaluation and decoding read out the first loop at which the sum of p reaches this; 1: always the last."""
        skips_loops: bool = False
        """With a threshold below 1, decoding leaves out the loops after a token's exit: later tokens then see its last
        keys and values there, which is an approximation."""
        kv_budget: int = pass_count(0)
        """Decoding keeps the keys and values of so many loops of a token, the newest, which later tokens read; 0: of
        all.  A prompt that runs at once is computed as without, and keeps as many."""

        def __post_init__(self) -> None:
            at_least(self, "loops", 1)
            at_least(self, "entropy_weight", 0)
            as_decoded(self, "threshold", "kv_budget")
            if self.stage not in (1, 2):
                raise ConfigError("ponder.options.stage", self.stage, "it must be 1 or 2", "use 1")
            if self.judges not in ("same", "next"):
                raise ConfigError("ponder.options.judges", self.judges, "it must be same or next", "use same")
            if self.stage == 2 and self.loops == 1:
                rule = "stage 2 compares each loop with the one before"
                raise ConfigError("ponder.options.loops", self.loops, rule, "use at least 2, or stage 1")

    def check_run(self) -> None:
        refuse(budget_mistake(self.options.kv_budget, self.options.loops))

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        last = self.options.loops - 1
        return tuple(Pass(i, i == last, grad=self.options.stage == 1) for i in range(last + 1))

    def stat_names(self, plan: Sequence[Pass]) -> tuple[str, ...]:
        return ("objective", "exit_entropy", *(f"exit_loop{p.index + 1}" for p in plan))

    def exit_modules(self) -> dict[str, nn.Module]:
        gate = nn.Linear(self.shape.hidden_size, 1)
        nn.init.normal_(gate.weight, std=0.02)
        nn.init.zeros_(gate.bias)
        return {"gate": gate}

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        return Flow(tools.embed(ids_bn)) if feedback is None else feedback

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        h = tools.norm(rows)
        self._judge(p, h, carry, tools)
        return Flow(h)

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        h = tools.norm(rows)
        losses = self._judge(p, h, carry, tools)
        valid = tools.valid_sb
        found = {name: (carry[name] * valid).sum() for name in self.stat_names(self.passes(0, None))}
        if "read" in carry:
            return Readout(carry["read"], loss=carry["objective"], stats=found)
        return Readout(h, losses=losses, loss=carry["objective"], stats=found)

    def decides(self) -> bool:
        return bool(self.options.threshold < 1)

    def _judge(self, p: Pass, h: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> Tensor:
        """The cross entropies of a loop; adds its share to what `carry` holds of each token [s, b]."""
        o, seen = self.options, h if self.options.stage == 1 else h.detach()
        with torch.set_grad_enabled(torch.is_grad_enabled() and o.stage == 1):
            losses = tools.losses(seen)
        gate = linear32(tools.modules["gate"], seen)[..., 0]
        survival = carry.get("survival", torch.zeros_like(gate))  # the log of prod (1 - lambda)
        log_p = survival if p.last else survival + F.logsigmoid(gate)
        entropy = -log_p.exp() * log_p
        carry[f"exit_loop{p.index + 1}"] = log_p.detach().exp()
        carry["exit_entropy"] = carry.get("exit_entropy", 0) + entropy.detach()
        if o.stage == 1:
            share = log_p.exp() * losses - o.entropy_weight * entropy
        else:
            share = self._worth(p, gate, losses, carry)
        carry["objective"] = carry.get("objective", 0) + share
        carry["survival"] = survival + F.logsigmoid(-gate)
        if tools.step is None and o.threshold < 1:
            self._read(p, h, carry, tools)
        return losses

    def _read(self, p: Pass, h: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> None:
        """Evaluation with a threshold: keep the state of the loop at which each token stops."""
        stops = tools.broadcast(-torch.expm1(carry["survival"])) >= self.options.threshold
        if p.index:
            h, stops = torch.where(carry["stopped"][..., None], carry["read"], h), stops | carry["stopped"]
        carry["read"], carry["stopped"] = h, stops

    def _worth(self, p: Pass, gate: Tensor, losses: Tensor, carry: dict[str, Tensor]) -> Tensor:
        """Stage 2: how wrong the gate is about what a loop takes off the loss."""
        o, share = self.options, torch.zeros_like(gate)
        if p.index:
            target = (o.gain_scale * ((carry["before"] - losses).clamp(min=0) - o.gain_from)).sigmoid()
            judge = gate if o.judges == "same" else carry["gate"]
            goes_on = target * F.logsigmoid(-judge) + (1 - target) * F.logsigmoid(judge)
            share = -goes_on / (o.loops - 1)
        carry["before"], carry["gate"] = losses, gate
        return share

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        return 2.0 * self.shape.hidden_size

    def training_flops(self, p: Pass, vocab_size: int) -> float:
        losses = 0.0 if p.last else 2.0 * vocab_size * self.shape.hidden_size
        return losses * (3 if p.grad else 1)
