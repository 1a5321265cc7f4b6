"""Decoding with latent thoughts: slots 0 .. K of a token are its embedding and its latents, each the output at the slot
before it; slot K is read out.

Every slot reads all slots before it, so a token's latents are defined by a recursion over slots.  Decoding evaluates it
directly (exact given the cache), one row after the other.  A forward over whole sequences runs K passes of 1 .. K
slots, then Jacobi refinements of all slots, then the pass that is read out and stored.  Each pass makes one more slot
exact, so n K - K refinements are always enough; models trained this way need few.

`forward(jacobi=None)`, the default, does what training does: a fixed number of refinements, and in ponderlm3 soft
weights instead of pruning.  That approximates the recursion, as well as training made it converge.
`forward(jacobi="converge")` refines until nothing changes and prunes as decoding does: the recursion itself; a number
refines that many times, and prunes.  It has no effect on tokens that follow a cache.  `generate` takes
`config.prefill_jacobi`, "converge" unless set to a number of refinements.

Shapes: b batch, n tokens of this call, K latents, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaponder.decoding.backbone import wide
from megaponder.decoding.cache import Rows
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run, View
from megaponder.decoding.steps import State, Stepwise, flag


class Latents(DecodingMethod):
    """The common part of ponderlm2 and ponderlm3; the latter routes and weights the latents."""

    why_not_plain = "each token takes several rows, one after the other"
    arguments = ("jacobi",)
    config_fields = {"prefill_jacobi": "converge"}
    as_decoded = {"jacobi": "converge"}
    note = """
A forward of this method finds the latents of a text by $jacobi parallel refinements, as in training; decoding runs the
exact recursion.  `generate` refines prompts until nothing changes, so that text does not depend on the cache; set
`prefill_jacobi` in config.json to a number for a faster, approximate start.
"""

    def check(self, given: dict[str, Any]) -> None:
        jacobi = given["jacobi"]
        if not (jacobi is None or jacobi == "converge" or (isinstance(jacobi, int) and jacobi >= 0)):
            raise ValueError(f'jacobi = {jacobi!r}: it must be None, "converge", or a number of refinements')

    def in_generation(self) -> dict[str, Any]:
        return {"jacobi": getattr(self.config, "prefill_jacobi", "converge")}

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        words = model.model.embed(model.model.words(ids), run.positions)
        if run.past == 0:
            return self._sequences(model, words, run)
        rows = [self._token(model, words[:, i : i + 1], run.single(i)) for i in range(words.shape[1])]
        return torch.cat(rows, dim=1)

    def feed(self, model: Any, h: Tensor) -> Tensor:
        """What a slot's state contributes to the next slot."""
        return h

    def route(self, model: Any, h: Tensor) -> Tensor | None:
        """Router logits [b, n, K + 1] of the states of slot 0 [b, n, H]; None: all latents count fully."""
        return None

    def weights(self, a: Tensor | None, slots: slice, hard: bool) -> dict[str, Any]:
        """`weight` and `alive` of the rows of some slots, [b, rows]."""
        return {}

    def readout(self, h: Tensor, a: Tensor | None, hard: bool) -> Tensor:
        """[b, n, H] of the states of the slots [b, n, slots, H]."""
        return h[:, :, -1]

    def granted(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(weight, whether it is run, share of the read-out) [..., K + 1] of every slot, by router logits."""
        raise NotImplementedError

    def stepwise(self) -> Stepwise:
        return SlotSteps(self)

    def _sequences(self, model: Any, words: Tensor, run: Run) -> Tensor:
        net, most, jacobi = model.model, self.options["latents"], run.given["jacobi"]
        hard, converge = jacobi is not None, jacobi == "converge"
        refine: Any = self.options["jacobi"] if jacobi is None else jacobi
        if converge:
            refine = words.shape[1] * most - most
        stages, a = [words], None

        def states(view: Callable[..., View]) -> Tensor:
            slots = len(stages)
            rows = torch.stack(stages, dim=2).flatten(1, 2)
            seen = view(slots=slots, **self.weights(a, slice(slots), hard))
            return net.norm(net.stack(rows, 0, seen, steps=range(slots))).unflatten(1, (-1, slots))

        for i in range(most + refine):
            h = states(run.draft)
            a = self.route(model, h[:, :, 0])
            latents = [self.feed(model, h[:, :, s]) for s in range(min(i + 1, most))]
            settled = converge and i >= most and self._settled(stages[1:], latents, run.real)
            stages = [words, *latents]
            if settled:
                break
        h = states(run.view)
        a = self.route(model, h[:, :, 0])
        self._store(a, run)
        return self.readout(h, a, hard)

    def _store(self, a: Tensor | None, run: Run) -> None:
        """Prune the cache as decoding would have: by the last router logits."""
        if run.cache is not None and a is not None:
            run.cache.rows[0] = Rows(run.rows[0].token, **self.weights(a, slice(None), True))
            run.cache.drop_dead(0)

    @staticmethod
    def _settled(old: list[Tensor], new: list[Tensor], real: Tensor) -> bool:
        """Whether nothing changed by more than rounding."""
        x, y = (torch.stack(z, dim=2)[real] for z in (old, new))
        return bool((x - y).abs().max() <= 2 * torch.finfo(x.dtype).eps * y.abs().max())

    def _token(self, model: Any, x: Tensor, run: Run) -> Tensor:
        """[b, 1, H] of one token's embedding, after those in the cache."""
        net, a, states = model.model, None, []
        for slot in range(self.options["latents"] + 1):
            row = self.weights(a, slice(slot, slot + 1), True)
            alive = row.get("alive")
            if alive is not None and not (alive & run.real).any():
                break  # no sequence of the batch has more latents here
            h = net.norm(net.stack(x, 0, run.view(**row), steps=(slot,)))
            if slot == 0:
                a = self.route(model, h)
            states.append(h)
            x = self.feed(model, h)
        return self.readout(torch.stack(states, dim=2), a, hard=True)


class SlotSteps(Stepwise):
    """The recursion itself: slot after slot, each a pass whose row reads all rows before it."""

    merge = every = True

    def __init__(self, form: Latents):
        self.form, self.config, self.options = form, form.config, form.options
        self.routed = type(form).granted is not Latents.granted

    @property
    def halts(self) -> bool:  # type: ignore[override]
        return self.routed

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        return self.routed

    def using(self, given: dict[str, Any]) -> SlotSteps:
        if any(value is not None for value in given.values()):
            raise ValueError(f"method {self.form.name} takes no passes or threshold")
        return self

    def trained(self) -> int:
        return int(self.options["latents"]) + 1

    def begin(self, model: Any, ids: Tensor, positions: Tensor) -> State:
        state = super().begin(model, ids, positions)
        if not self.routed:
            return state
        x = state["x"]
        key = wide(torch.zeros_like(x[..., 0]))
        logits = key.new_zeros(*key.shape, self.trained())
        return {**state, "out": torch.zeros_like(x), "key": key, "logits": logits}

    def leave(self, model: Any, index: int | Tensor, h: Tensor, state: State, positions: Tensor) -> bool | Tensor:
        h = state["h"] = model.model.norm(h)
        if not self.routed:
            state["out"] = h
            return index + 1 < self.deepest()
        a = self.form.route(model, h)
        assert a is not None
        state["logits"] = torch.where(flag(index == 0, h)[..., None], a.to(state["logits"].dtype), state["logits"])
        weight, alive, share = self.form.granted(state["logits"])
        now = torch.as_tensor(index, device=h.device).expand(h.shape[:-1])[..., None]
        following = (now + 1).clamp(max=self.trained() - 1)
        state["out"] = state["out"] + share.gather(-1, now).to(h.dtype) * h
        state["key"] = weight.gather(-1, following)[..., 0]
        return alive.gather(-1, following)[..., 0] & flag(index + 1 < self.deepest(), h)

    def enter(self, model: Any, index: int | Tensor, state: State) -> None:
        state["x"] = self.form.feed(model, state["h"])
