"""A method that uses everything the interface offers at once; the layout matrix runs on it like on any other.

Growing slots, feedback of several slots, riders with and without gradient, key bias, K/V carried between passes,
carries on both ends, a vocabulary mixture, modules on the first stage, in layers and on the last stage, an auxiliary
loss and a statistic.
"""

from __future__ import annotations

import torch
from torch import nn

from megaponder.ponder.base import Flow, Method, Pass, Readout, interleave, register, slot


@register
class Sink(Method):
    name = "sink"
    summary = "test method"
    rider_channels = 2  # log weight of a key, hard mask
    mixes_vocabulary = True
    keeps_kv = True
    stats = ("active",)

    def passes(self, seed: int, step: int) -> tuple[Pass, ...]:
        return (Pass(0, False, 1, 1), Pass(1, False, 2, 2), Pass(2, True, 2))

    def entry_modules(self) -> dict[str, nn.Module]:
        return {"inject": nn.Linear(self.shape.hidden_size, self.shape.hidden_size)}

    def layer_modules(self, layer: int) -> dict[str, nn.Module]:
        return {"blend": nn.Linear(2, 1)} if layer != 1 else {}

    def exit_modules(self) -> dict[str, nn.Module]:
        return {"gate": nn.Linear(self.shape.hidden_size, 1)}

    def enter(self, p, ids_bn, feedback, carry, tools):  # type: ignore[no-untyped-def]
        if feedback is None:
            carry["e"] = tools.embed(ids_bn)
            return Flow(carry["e"], torch.zeros_like(carry["e"][..., :2]))
        e = carry["e"]
        nothing = torch.zeros_like(feedback.riders[: e.shape[0]])
        if p.index == 1:
            return Flow(interleave([e, feedback.rows]), interleave([nothing, feedback.riders]))
        latent = slot(feedback.rows, 2, 1) + tools.modules["inject"](slot(feedback.rows, 2, 0))
        return Flow(interleave([e, latent]), interleave([nothing, slot(feedback.riders, 2, 1)]))

    def attend(self, p, q, k, v, riders, kept, core):  # type: ignore[no-untyped-def]
        bias, active = riders[..., 0], riders[..., 1] > 0.5
        if p.index == 1:
            before = kept[1].repeat_interleave(2, dim=0)
            mixed = 0.3 * before
            if "blend" in core.modules:
                mixed = core.modules["blend"](torch.stack([v, before], dim=-1))[..., 0]
            v = v + mixed
        if p.index == 2:
            keep = active[..., None, None]
            k, v = torch.where(keep, k, kept[0]), torch.where(keep, v, kept[1])
        return core(q, k, v, key_bias=bias), (k, v)

    def leave(self, p, rows, riders, carry, tools):  # type: ignore[no-untyped-def]
        h = tools.norm(rows)
        gate = tools.modules["gate"](h)
        cost = slot(gate, p.slots, p.slots - 1)[..., 0].sigmoid() * tools.valid_sb
        carry["cost"] = carry["cost"] + cost if "cost" in carry else cost
        carry["active"] = (slot(gate, p.slots, 0)[..., 0] > 0).float() * tools.valid_sb
        signals = torch.cat([torch.nn.functional.logsigmoid(gate), (gate > 0).to(gate.dtype)], dim=-1)
        return Flow(h + tools.mixture(h, topk=7), signals)

    def readout(self, p, rows, riders, carry, tools):  # type: ignore[no-untyped-def]
        h = tools.norm(rows)
        weight = tools.modules["gate"](slot(h, 2, 0)).sigmoid()
        hidden = weight * slot(h, 2, 0) + (1 - weight) * slot(h, 2, 1)
        return Readout(hidden, 0.3 * carry["cost"].sum(), {"active": carry["active"].sum()})


@register
class Detached(Method):
    name, summary = "detached", "test method: nothing that it feeds back or reads out has a gradient to the pass before"

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        return (Pass(0, False), Pass(1, False), Pass(2, True))

    def exit_modules(self) -> dict[str, nn.Module]:
        return {"gate": nn.Linear(self.shape.hidden_size, 1)}

    def enter(self, p, ids_bn, feedback, carry, tools):  # type: ignore[no-untyped-def]
        return Flow(tools.embed(ids_bn) + (0 if feedback is None else feedback.rows))

    def leave(self, p, rows, riders, carry, tools):  # type: ignore[no-untyped-def]
        h = tools.norm(rows.detach())
        return Flow(h * tools.modules["gate"](h).sigmoid() if p.index else h.detach())
