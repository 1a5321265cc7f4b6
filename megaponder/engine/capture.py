"""Passes as CUDA graphs: captured once, forward and backward, then replayed with two launches instead of thousands.

A pass is a pure function of tensors: the micro-batch, its input, and what this stage kept from the previous pass.  The
first step with given shapes runs eagerly to warm up libraries and compilers, including those of the backward: in a
pipeline the second micro-batch comes before the first one's backward.  In the next step the pass is captured, forward
and backward together.  The backward graph adds parameter gradients to `main_grad` itself, so that the hooks of
DistributedDataParallel have nothing to do, and returns only gradients of the inputs.

    key     (pass, places for active tokens, slot and pool, which inputs are outputs of which graph)
    slot    micro-batch i uses the graphs of slot i modulo the number of micro-batches that are between their first
            forward and their last backward at once.  Without a pipeline there is one.
    pool    memory for a pass: as many as there are micro-batches between its forward and backward at once, often fewer
            than slots.  The slots of a pool share it in turn, as do the variants of a pass (sizes of a gathered one).
            Where the depth is drawn and only the last passes of a step have gradients, passes that are never among
            them together share one, too: memory follows their number, not the largest depth.

A graph reads from static tensors.  An input that is the output of another graph is read in place; all others are
copied.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from megaponder.config.in_flight import InFlight
from megaponder.data.batch import MicroBatch, tensors_of
from megaponder.engine.active_rows import most_active, places_for, unit_of
from megaponder.engine.model import PonderStage
from megaponder.engine.objective import Objective
from megaponder.engine.stash import PassState
from megaponder.ponder.base import Flow, Pass

Tree = Any


def _place(t: Tensor) -> tuple[Any, ...]:
    """A tensor's address and layout."""
    return t.data_ptr(), tuple(t.shape), t.stride(), t.dtype


def _shape(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.dtype, t.requires_grad


@dataclass
class _Graphs:
    """A captured pass."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    structure: Tree
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None
    """None: no output has a gradient."""
    grads_out: list[Tensor | None]
    """Where the backward graph reads each output's gradient; None: there is none."""
    grads_in: list[Tensor | None]
    """Where it stores each input's gradient."""


class _Replay(torch.autograd.Function):
    """Replays the forward graph now and the backward graph later.  `anchor` makes passes without such inputs
    differentiable."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, own: Any, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        for static, given in zip(graphs.inputs, inputs, strict=True):
            if static.data_ptr() != given.data_ptr():
                static.copy_(given)
        graphs.forward.replay()
        ctx.graphs, ctx.own = graphs, own
        out = tuple(o.detach() for o in graphs.outputs)
        ctx.mark_non_differentiable(*(o for o, g in zip(out, graphs.grads_out, strict=True) if g is None))
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graphs: _Graphs = ctx.graphs
        for static, given in zip(graphs.grads_out, grads, strict=True):
            if static is None:
                continue
            if given is None:
                static.zero_()
            elif static.data_ptr() != given.data_ptr():
                static.copy_(given)
        assert graphs.backward is not None
        graphs.backward.replay()
        return (None, None, None, *(None if g is None else ctx.own(g) for g in graphs.grads_in))


class Captures:
    """The captured passes of one stage."""

    def __init__(self, stage: PonderStage):
        self._stage = stage
        self.stream = torch.cuda.Stream()
        """The stream of all captures.  DistributedDataParallel must be created on it too: autograd remembers the stream
        on which a parameter's gradient is accumulated, and a capture must not touch another stream."""
        self._parameters = [p for p in stage.parameters() if p.requires_grad]
        self._graphs: dict[Any, _Graphs] = {}
        self._step = 0
        self._trained = 1
        """Passes of a step that have gradients; they follow each other."""
        self._seen: dict[Any, int] = {}
        """The step in which a pass with given shapes first ran."""
        self._numbers: dict[Any, int] = {}
        self._pools: dict[Any, Any] = {}
        self._owned: set[Any] = set()
        self.failure = ""
        """Why passes are no longer captured."""
        self._shared: dict[Any, _Graphs] = {}
        """The first variant of a pass: the others store their results in the same place, so that any variant can
        follow."""
        # in a pipeline gradient memory may be overwritten before a message or an earlier pass has read it
        self._gradient = Tensor.detach if stage.groups.pp_size == 1 else Tensor.clone
        self._anchor = torch.zeros((), device=stage.groups.device, requires_grad=True)

    @property
    def count(self) -> int:
        """Captured passes so far."""
        return len(self._graphs)

    def begin_step(self, passes: Sequence[Pass]) -> None:
        """A training step with this plan starts: passes that ran in earlier steps are warm."""
        self._step += 1
        self._trained = max(self._trained, sum(p.grad for p in passes))

    def close(self) -> None:
        """Destroy all graphs: since 2.26 NCCL hangs when a group is destroyed while a graph contains its calls."""
        torch.cuda.synchronize()
        for graphs in self._graphs.values():
            graphs.forward.reset()
            if graphs.backward is not None:
                graphs.backward.reset()
        self._graphs.clear()
        self._shared.clear()

    def run(
        self,
        p: Pass,
        microbatch: int,
        batch: MicroBatch,
        incoming: Flow | None,
        state: PassState,
        step: Tensor | None,
        tokens: Tensor,
        flight: InFlight,
    ) -> Flow | Objective:
        """`PonderStage.forward` with gradients: run, captured or replayed."""
        most, rows = self._most_active(p, batch, incoming)
        tree = _to_tree(batch, incoming, state, step, tokens)
        leaves, structure = _pytree.tree_flatten(tree)
        inputs = [t for t in leaves if t is not None]
        shapes = self._number(p, repr(structure), *(None if t is None else _shape(t) for t in leaves))
        where = self._number(*(at if (at := _place(t)) in self._owned else None for t in inputs))
        # the host waits for the previous pass here: everything that can be done earlier has been done
        places = places_for(most, rows, unit_of(self._stage.row_multiple, batch.ids_bn.shape[0]))
        if self.failure or self._seen.setdefault((shapes, places), self._step) == self._step:
            return self._as_it_is(places, p, batch, incoming, state, step, tokens)
        slot = microbatch % flight.micro_batches
        pool = (p.index % self._trained if p.grad else -1 - p.index, microbatch % flight.places[p.index])
        key = (shapes, places, slot, pool, where)
        if key not in self._graphs and not self._captured(key, p, places, leaves, structure):
            return self._as_it_is(places, p, batch, incoming, state, step, tokens)
        graphs = self._graphs[key]
        outputs = _Replay.apply(graphs, self._gradient, self._anchor, *inputs)
        return _from_tree(_pytree.tree_unflatten(list(outputs), graphs.structure), state)

    def _captured(self, key: Any, p: Pass, places: int, leaves: Sequence[Tensor | None], structure: Tree) -> bool:
        """Capture the pass; False, with a warning, if that is impossible."""
        *_, slot, pool, _ = key
        try:
            self._graphs[key] = self._capture(p, places, leaves, structure, slot, pool)
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
            warnings.warn(f"pass {p.index} cannot be captured, so passes run eagerly: {self.failure}", stacklevel=3)
        if self.failure:
            # before PyTorch 2.13 a recomputed layer interrupted by an error intercepts whatever is saved next, until
            # the error's frames are gone; they refer to each other
            gc.collect()
        return not self.failure

    def _as_it_is(self, places: int, p: Pass, *rest: Any) -> Flow | Objective:
        self._stage.places = places
        try:
            out: Flow | Objective = self._stage(p, *rest)
            return out
        finally:
            self._stage.places = None

    def _number(self, *what: Any) -> int:
        """A short name for a long key."""
        return self._numbers.setdefault(what, len(self._numbers))

    def _most_active(self, p: Pass, batch: MicroBatch, incoming: Flow | None) -> tuple[Tensor | int, int]:
        """(largest number of active tokens of a sequence, tokens of a sequence on this rank)."""
        stage = self._stage
        active = stage.method.active(p, incoming.riders) if stage.skip_halted and incoming is not None else None
        if active is None:
            return batch.ids_bn.shape[1], batch.ids_bn.shape[1]
        return most_active(active, stage.groups.tp if stage.config.sequence_parallel else None), active.shape[0]

    def _capture(
        self, p: Pass, places: int, leaves: Sequence[Tensor | None], structure: Tree, slot: int, pool: tuple[int, int]
    ) -> _Graphs:
        static: list[Tensor | None] = []
        for t in leaves:
            if t is None:
                static.append(None)
                continue
            here = t.detach() if _place(t) in self._owned else t.detach().clone()
            static.append(here.requires_grad_(t.requires_grad))
        batch, incoming, state, step, tokens = _from_input_tree(_pytree.tree_unflatten(static, structure))
        inputs = [t for t in static if t is not None]
        memory = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        earlier = self._shared.get((p, slot, pool))  # of another variant
        forward = torch.cuda.CUDAGraph()
        backward: torch.cuda.CUDAGraph | None = None
        grads_in: list[Tensor | None] = [None] * len(inputs)
        with self._recording(forward, memory):
            out = self._as_it_is(places, p, batch, incoming, state, step, tokens)
            made, shape = _pytree.tree_flatten(_output_tree(out, state))
            outputs = [o.detach() for o in made] if earlier is None else _copied(made, earlier.outputs)
        if earlier is None:
            grads_out = [torch.zeros_like(o) if o.requires_grad else None for o in made]
        else:
            grads_out = earlier.grads_out
        if any(g is not None for g in grads_out):
            backward = torch.cuda.CUDAGraph()
            with self._recording(backward, memory):
                grads_in = self._backward(inputs, made, grads_out)
                if earlier is not None:
                    grads_in = _copied(grads_in, earlier.grads_in)
        self._owned |= {_place(o) for o in outputs}
        graphs = _Graphs(inputs, outputs, shape, forward, backward, grads_out, grads_in)
        self._shared.setdefault((p, slot, pool), graphs)
        return graphs

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """Whatever runs inside is captured.  A compilation would break the capture, so uncompiled functions run
        eagerly."""
        stream = torch.cuda.current_stream()
        try:
            with (
                torch.compiler.set_stance("eager_on_recompile"),
                torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                yield
        except RuntimeError:
            torch.cuda.set_stream(stream)
            self._give_up(pool)
            raise

    def _give_up(self, pool: Any) -> None:
        """Make PyTorch leave a failed capture: its allocator and its random generator believe that it is still running.

        The allocator would not release cached memory, and the generator would refuse to draw numbers, as Transformer
        Engine's attention does.  Only the end of a capture resets the generator, so an empty one is made.
        """
        with suppress(RuntimeError):  # the allocator has already left it, and the graph will release the pool
            torch._C._cuda_endAllocateToPool(self._stage.groups.device.index, pool)
            torch._C._cuda_releasePool(self._stage.groups.device.index, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"):
            self._anchor.detach().clone()

    def _backward(
        self, inputs: list[Tensor], outputs: list[Tensor], grads_out: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the inputs' gradients; the parameters' are added to `main_grad`."""
        ends = [(o, g) for o, g in zip(outputs, grads_out, strict=True) if g is not None]
        wanted = [t for t in inputs if t.requires_grad]
        for parameter in self._parameters:
            parameter.grad_added_to_main_grad = False
        found = torch.autograd.grad(
            [o for o, _ in ends], [*wanted, *self._parameters], [g for _, g in ends], allow_unused=True
        )
        pairs = []
        for parameter, grad in zip(self._parameters, found[len(wanted) :], strict=True):
            # Transformer Engine's GEMMs have already added theirs
            if grad is not None and not parameter.grad_added_to_main_grad:
                pairs.append((parameter.main_grad, grad))
        _accumulate(pairs)
        left = iter(found[: len(wanted)])
        return [next(left) if t.requires_grad else None for t in inputs]


SMALL = 2**20
"""Gradients with at most this many elements are added together; each alone would be a kernel of microseconds."""


def _accumulate(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """sum += gradient for each pair: FP32 sums, gradients in the model's format."""
    small = [(total, grad) for total, grad in pairs if grad.numel() <= SMALL]
    for total, grad in pairs:
        if grad.numel() > SMALL:
            total.add_(grad)
    if small:
        wide = torch.cat([grad.flatten() for _, grad in small]).float()
        parts = [x.view_as(t) for x, (t, _) in zip(wide.split([g.numel() for _, g in small]), small, strict=True)]
        torch._foreach_add_([total for total, _ in small], parts)


def _copied(made: Sequence[Tensor | None], place: Sequence[Tensor | None]) -> list[Any]:
    """Copies tensors into the memory of others."""
    for new, there in zip(made, place, strict=True):
        if new is not None and there is not None:
            there.copy_(new.detach())
    return list(place)


def _flow(flow: Flow | None) -> Tree:
    return (None, None, ()) if flow is None else (flow.rows, flow.riders, flow.earlier)


def _to_tree(batch: MicroBatch, incoming: Flow | None, state: PassState, step: Tensor | None, tokens: Tensor) -> Tree:
    return tensors_of(batch), _flow(incoming), (list(state.kept), dict(state.entry), dict(state.exit)), step, tokens


def _from_input_tree(tree: Tree) -> tuple[MicroBatch, Flow | None, PassState, Tensor | None, Tensor]:
    parts, (rows, riders, earlier), (kept, entry, leave), step, tokens = tree
    incoming = None if rows is None else Flow(rows, riders, earlier)
    return MicroBatch(*parts), incoming, PassState(kept, entry, leave), step, tokens


def _output_tree(out: Flow | Objective, state: PassState) -> Tree:
    """Tensors only: missing riders are dropped."""
    if isinstance(out, Objective):
        return {"objective": (out.total, out.sums)}
    left = (list(state.kept), dict(state.entry), dict(state.exit))
    return {"flow": ([out.rows] if out.riders is None else [out.rows, out.riders], out.earlier, left)}


def _from_tree(tree: Tree, state: PassState) -> Flow | Objective:
    if "objective" in tree:
        total, sums = tree["objective"]
        # the next micro-batch's replay writes to the same place, and sums are read at the end of the step
        return Objective(total, {name: value.clone() for name, value in sums.items()})
    rows, earlier, (state.kept, state.entry, state.exit) = tree["flow"]
    return Flow(rows[0], rows[1] if len(rows) > 1 else None, earlier)
