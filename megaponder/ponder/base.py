"""The interface of all pondering methods.

A *pass* is one traversal of the layer stack.  A token takes part in it with one or more *slots* (rows of the sequence,
token-major: row = token * slots + slot; all slots of a token share its RoPE position).  What pass k sends back to the
first stage for pass k+1 is its *feedback*; per-row values that every stage must know are *riders*.

    first stage            enter    tokens, feedback of the last pass -> input rows, riders
    every layer            attend   q, k, v, riders, what this layer kept in the last pass -> output, what it keeps
    last stage             leave    output rows -> feedback, riders for the next pass
    last stage, last pass  readout  output rows -> one hidden state per token, auxiliary loss

A method never sees ranks, groups or shards: `EntryTools` and `ExitTools` come from the engine, the exporter's tests
or the oracles' harness.  `carry` is a dict of tensors that stays on its stage between the passes of one
micro-batch; what a pass puts in, the next pass on the same stage sees, with its gradient.

Shapes: s rows of this rank (sequence-sharded under sequence parallelism), b micro-batch, H hidden, R riders,
        h heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from megaponder.config.declare import declare
from megaponder.config.presets import NEOX_RECIPE
from megaponder.decoding.window import Window
from megaponder.errors import UserError

PLANS_SEEN = 64
"""Steps whose plans are looked at for the longest: enough to see every one that is drawn from a few."""
PARAMETER_PREFIX = "method_"
"""How the names of a method's own parameters begin (method_entry, method_layers, method_modules): a start from weights
alone may lack them or leave them out."""


@dataclass(frozen=True)
class Pass:
    """One traversal of the stack in a step's plan."""

    index: int
    """Position in the plan, from 0."""
    last: bool
    """Nothing is fed back after this one; its output is read out."""
    slots: int = 1
    """Rows per token in this pass."""
    feedback_slots: int = 1
    """Rows per token in what this pass sends back (unused in the last pass)."""
    reads: tuple[int, ...] | None = None
    """Slots whose output `leave` or `readout` uses, None for all: the last layer computes only these rows (after its
    attention, where the others still serve as keys), and the method receives only these."""
    layers: tuple[int, int] | None = None
    """The first layer that this pass runs and the one after its last, counted over the model; None: all.  A stage runs
    those that it holds."""
    grad: bool = True
    """False: its layers run without gradient and keep nothing for a backward (truncated backpropagation through depth).
    Such passes come first in a plan.  In pass 0 `enter`, the layers before the core and `into_core` do have gradients,
    so that what later passes use of `carry` trains them; `leave` has gradients for what it puts into `carry`."""
    key_sets: int = 1
    """Sets of keys, of as many rows as the pass has, that a row attends to (for the FLOPs count)."""

    @property
    def steps(self) -> tuple[int, ...]:
        """By which routers of experts may differ: the pass or, where a token has several rows, the slot of each."""
        return (self.index,) if self.slots == 1 else tuple(range(self.slots))


class EntryTools(Protocol):
    """What the first stage offers to `enter`."""

    @property
    def modules(self) -> nn.ModuleDict:
        """What `entry_modules` built."""

    def embed(self, ids_bn: Tensor, factor: float = 1.0) -> Tensor:
        """Embeddings [s, b, H] of ids [b, n*slots]: factor * scale * table[ids], plus learned positions if any."""

    def uniform(self, seed: int) -> Tensor | None:
        """A number in (0, 1) for each sequence, FP32 [b], a function of seed, step and the sequence's ids, for what a
        sequence draws in training; where documents are apart, for the document of each token [tokens of this rank, b].
        None in evaluation."""

    def noise(self, seed: int) -> Tensor:
        """Standard normal numbers cut off at 3, FP32 [s, b, H], a function of seed, step, position and id: the same in
        every layout, after a resume, and in decoding (`decoding.noise.token_noise`); evaluation is step -1."""


class ExitTools(Protocol):
    """What the last stage offers to `leave` and `readout`."""

    @property
    def modules(self) -> nn.ModuleDict:
        """What `exit_modules` built."""

    def norm(self, h_sbh: Tensor) -> Tensor:
        """The final norm."""

    def mixture(self, h_sbh: Tensor, topk: int = 0) -> Tensor:
        """softmax(h Wo^T) (scale * We) over the true vocabulary, or over its `topk` largest; h is final-normed."""

    @property
    def valid_sb(self) -> Tensor:
        """1.0 where a token's target counts in the loss, else 0.0: [tokens of this rank, b]."""

    @property
    def step(self) -> Tensor | None:
        """Training step, FP64 scalar (for ramps); None in evaluation, where an auxiliary loss has its final weight.

        A tensor, since a captured pass (CUDA graph) would freeze a plain number.
        """

    @property
    def positions_sb(self) -> Tensor:
        """Position of each of this rank's tokens in its sequence, or in its document where those are apart, [tokens of
        this rank, b]."""

    @property
    def starts_nb(self) -> Tensor | None:
        """The first token of each token's document, int64 [n, b] of all tokens; None where documents are not apart.

        What mixes the values of several tokens must stay within documents, as attention and `total` do."""

    def total(self, x_sb: Tensor) -> Tensor:
        """Sums over each sequence, without gradient [1, b]; where documents are apart, over the document of each token
        [tokens of this rank, b]."""

    @property
    def ids_sb(self) -> Tensor:
        """Ids of this rank's tokens, [tokens of this rank, b]."""

    def broadcast(self, x: Tensor) -> Tensor:
        """x with the same bits on all ranks that hold these tokens; required for every input to a decision."""

    def on(self, active: Tensor, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """compute(x) for the active tokens (bool [s, b]) and 0 for the others, which may be skipped.

        x [s, b, H]; `compute` maps rows to rows independently.
        """

    def target_probability(self, h_sbh: Tensor, active: Tensor) -> Tensor:
        """Probability of each active token's target under the head, FP32 without gradient [tokens of this rank, b]."""

    def target_loss(self, h_sbh: Tensor, active: Tensor) -> Tensor:
        """Cross entropy of each active token's target, FP32 without gradient [tokens of this rank, b]."""

    def losses(self, h_sbh: Tensor) -> Tensor:
        """Cross entropy of each token's target under the head, FP32 with gradient [tokens of this rank, b]; h is
        final-normed."""

    def confidence(self, h_sbh: Tensor, active: Tensor) -> Tensor:
        """Each active token's largest next-token probability under the head, FP32 without gradient [tokens of this
        rank, b]."""

    def gather(self, x_sb: Tensor) -> Tensor:
        """Values of all tokens of each sequence, without gradient: [n, b, ...] from [tokens of this rank, b, ...]."""

    def scatter(self, x_nb: Tensor) -> Tensor:
        """The inverse of `gather`: this rank's tokens of a value per token."""


class CoreAttention(Protocol):
    """Softmax attention of q rows over k rows, causal from the bottom right; `key_bias` [k rows, b] adds to logits."""

    @property
    def layer(self) -> int:
        """The layer's number in the model, from 0."""

    @property
    def modules(self) -> nn.ModuleDict:
        """What `layer_modules` built for this layer."""

    @property
    def groups(self) -> slice:
        """The key/value heads of this rank, among those of the model."""

    @property
    def ids(self) -> Tensor:
        """Ids of all tokens of each sequence [n, b]."""

    def inputs(self, channels: int) -> Tensor:
        """The first channels of the rows [rows, b, channels] that the layer's queries, keys and values are made of."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None) -> Tensor: ...

    def merged(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], alive: Sequence[Tensor | None]
    ) -> Tensor:
        """One softmax over several key sets of all tokens; a token sees the living keys of itself and earlier
        tokens."""

    def scatter(self, new: Tensor, old: Tensor | None = None) -> Tensor:
        """Rows of all tokens from rows of this pass: `new` at active tokens, `old` (None: anything) at halted ones.

        Halted tokens may be absent from q, k and v: only what went through `scatter` has a row for each token.
        """


@dataclass
class Flow:
    """What travels between stages: rows [s, b, H] and, if the method has riders, [s, b, R] beside them."""

    rows: Tensor
    riders: Tensor | None = None
    """FP32 in every precision: they cross pipeline stages without rounding."""
    earlier: tuple[Tensor, ...] = ()
    """The engine's: keys and values of earlier layers in turn, of all rows and this rank's heads (Depth-Attention)."""


@dataclass
class Readout:
    """What the last pass passes to the head."""

    hidden: Tensor
    """[n rows of this rank, b, H], final-normed: one row per token."""
    aux: Tensor | None = None
    """Auxiliary loss: a SUM over this rank's valid tokens; the engine divides by the global token count."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Sums over this rank's valid tokens, for metrics; divided by the global token count."""
    depth: Tensor | None = None
    """Passes (or steps) that were actually run for each token [tokens of this rank, b]; set by methods with `halts`."""
    gates: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Per gated pass (gate values in [0, 1], mask of tokens for which the gate was evaluated), [tokens of this rank,
    b]."""
    scores: dict[int, Tensor] = field(default_factory=dict)
    """With `Method.forced`: by number of passes, what decides whether a token runs one more; more passes for higher
    values [tokens, b]."""
    losses: Tensor | None = None
    """Beside `loss`: `ExitTools.losses(hidden)`, if the method has computed it; the head then does not run again."""
    loss: Tensor | None = None
    """The method's own loss of each token [tokens of this rank, b], which replaces the cross entropy of `hidden`; the
    engine sums over valid tokens.  The reported loss stays the cross entropy."""


@dataclass(frozen=True)
class Shape:
    """What a method may know of the backbone when it is built."""

    family: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int = 0
    head_size: int = 0
    vocab_size: int = 0
    """Ids of text, 0 while the tokenizer is unknown."""

    @property
    def neox_recipe(self) -> bool:
        """The published models of this backbone were initialised by the papers' GPT-NeoX code."""
        return self.family in NEOX_RECIPE


class Method:
    """Base of all methods; the defaults are those of a plain language model (one pass)."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @dataclass
    class Options:
        """No options."""

    rider_channels: int = 0
    """R: per-row values that ride with the rows through every stage."""
    mixes_vocabulary: bool = False
    """`leave` calls tools.mixture: the last stage then holds a copy of the input table."""
    reads_every_pass: bool = False
    """`leave` calls tools.losses: logits of every pass are kept for their backward."""
    trains_exits: bool = False
    """The method's own loss also trains who stops when: no token may then be left out of it."""
    scales_up: bool = False
    """SwiGLU's up matrices are drawn like the output projections, where `initialisation` is left to the method."""
    keeps_kv: bool = False
    """`attend` keeps tensors for the next pass."""
    halts: bool = False
    """Each token has its own number of passes: `readout` sets `Readout.depth`."""
    skips: bool = False
    """A halted token needs no computation in training either: needed FLOPs count the active share of each pass.  The
    first rider is then the mask: 1.0 where a token takes part in the pass.  `enter` passes it on unchanged."""
    stats: tuple[str, ...] = ()
    """Names that `readout` fills in `Readout.stats`, the same on all ranks (see `stat_names`).  For names with
    `_rmse`, the root of the mean is reported."""

    forced: Tensor | None = None
    """Evaluation: passes (or rows) that replace the decisions; a scalar for all tokens, in any layout, or [n, b] for
    one micro-batch in one process.  For methods with `halts`; a token never runs more than `max_depth`."""
    chooses: bool = False
    """Tokens halt by what they hold, so that evaluation compares with as many passes spread `at_random`."""
    at_random: Sequence[float] | None = None
    """Evaluation of a method that `chooses`: the share of tokens that goes on at each decision (at each open one, if it
    has a window), at random."""
    weighs: bool = False
    """Training and `forward` weigh what decoding leaves out, with a bias on keys from the second pass on."""
    hard: bool = False
    """Evaluation: what decoding leaves out is left out, where training and `forward` weigh it instead."""
    window: Window | None = None
    """Depths that a budget leaves open; None: there is no budget."""

    core: tuple[int, int] | None = None
    """For methods that repeat the middle of the stack: the first layer of the core and the one after its last.  Layers
    before it, the prelude, must lie on the first stage, those after it, the coda, on the last; `Pass.layers` says which
    passes run them."""

    def __init__(self, options: Any, shape: Shape):
        self.options, self.shape = options, shape

    # --- the plan -----------------------------------------------------------------------------------------------------
    def check_run(self) -> None:
        """ConfigError for options that are legal by themselves, but without effect or sense together: asked where a run
        is planned or started, while a checkpoint is read all the same."""

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        """The passes of a step: a pure function of (seed, step), so that all ranks agree; step None: evaluation."""
        return (Pass(0, last=True),)

    def longest(self, seed: int) -> tuple[Pass, ...]:
        """The plan of a training step that takes the most rows, which memory must hold; by default of the first
        steps."""
        plans = (self.passes(seed, step) for step in range(PLANS_SEEN))
        return max(plans, key=lambda plan: sum(p.slots for p in plan))

    def max_depth(self) -> int:
        """The maximum number of passes (or steps) of a token."""
        return len(self.passes(0, None))

    def stat_names(self, plan: Sequence[Pass]) -> tuple[str, ...]:
        """Statistics of a step with this plan."""
        return self.stats

    # --- published settings that belong to the method -----------------------------------------------------------------
    def embedding_scale(self) -> float:
        """Factor on token embeddings if the config says `auto`."""
        return 1.0

    def initialisation(self) -> tuple[str, float]:
        """(family, factor on output projections) if the config says `auto`: normal or trunc_normal."""
        return "normal", 1.0

    # --- the method's own parameters, replicated over the tensor group ------------------------------------------------
    def entry_modules(self) -> dict[str, nn.Module]:
        """Modules on the first stage: `EntryTools.modules`."""
        return {}

    def layer_modules(self, layer: int) -> dict[str, nn.Module]:
        """Modules of one layer of the model, counted from 0: `CoreAttention.modules`.

        Under tensor parallelism `attend` sees a part of the heads, so these modules must not mix heads.
        """
        return {}

    def exit_modules(self) -> dict[str, nn.Module]:
        """Modules on the last stage: `ExitTools.modules`."""
        return {}

    # --- the computation ----------------------------------------------------------------------------------------------
    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        """Rows that enter pass p on the first stage; `feedback` is None in pass 0."""
        return Flow(tools.embed(ids_bn))

    def into_core(self, p: Pass, rows: Tensor, carry: dict[str, Tensor], tools: EntryTools) -> Tensor:
        """Rows that enter the core, on the first stage; `rows` are what `enter` gave, in passes that run the prelude
        its output."""
        return rows

    def into_coda(self, p: Pass, rows: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> Tensor:
        """Rows that enter the coda, on the last stage in the last pass."""
        return rows

    def active(self, p: Pass, riders: Tensor | None) -> Tensor | None:
        """Tokens that take part in pass p, bool [s, b], from the riders; None: all."""
        return None if not self.skips or p.index == 0 or riders is None else riders[..., 0] > 0.5

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
        """Attention of one layer.

        q [rows, b, h, d], k and v [rows, b, h_kv, d] after RoPE; `riders` [rows, b, R] of the whole sequence; `kept`
        is what this layer kept in the previous pass (empty in pass 0).  Returns [rows, b, h, d] and what to keep.
        Where halted tokens are skipped, q, k and v hold active rows only; `core.scatter` returns rows of all tokens.
        """
        return core(q, k, v), ()

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        """Feedback after pass p on the last stage; `rows` come before the final norm."""
        raise NotImplementedError(f"{self.name} has one pass: nothing is fed back")

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        """Hidden states for the head, after the last pass on the last stage; `rows` come before the final norm."""
        return Readout(tools.norm(rows))

    def settle(self, exit_modules: nn.ModuleDict | None, means: Mapping[str, float], step: int) -> dict[str, float]:
        """After an optimizer step: update what follows from the step's statistics, the same on every rank.

        `exit_modules`: those of the last stage, None on the others.  Returns more statistics to report.
        """
        return {}

    def budget(self, step: int) -> float | None:
        """Passes (or rows) that a token may spend in the mean at a training step; None: there is no such aim."""
        return None

    # --- decoding ----------------------------------------------------------------------------------------------------
    def decides(self) -> bool:
        """Whether a token's path depends on comparisons (a threshold, a top k) that rounding may flip."""
        return False

    def towards_decoding(self, tokens: int) -> Iterator[Any]:
        """Options that bring a forward over this many tokens ever closer to what decoding computes.

        Empty if every forward already computes the same.
        """
        return iter(())

    # --- accounting ---------------------------------------------------------------------------------------------------
    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        """Forward FLOPs per token that pass p adds to the stack and the head (mixtures, gates), multiply-add = 2."""
        return 0.0

    def feedback_flops(self, p: Pass, vocab_size: int) -> float:
        """The part of `extra_flops` that a token which halts after pass p is spared: what it would feed back."""
        return 0.0

    def training_flops(self, p: Pass, vocab_size: int) -> float:
        """FLOPs per token that pass p costs in training alone, forward and backward: losses beside the last pass's."""
        return 0.0


MOST_PASSES = 1000
"""Maximum of an option that counts passes or slots; a longer plan would only exhaust the host."""


def pass_count(default: int) -> int:
    """An option that counts passes or slots: a field of `Options` with that default, of at most `MOST_PASSES`."""
    return declare(default, le=MOST_PASSES)


def token_count(default: int) -> int:
    """An option that counts tokens of the vocabulary, such as a top k; the rules compare the two."""
    made: int = field(default=default, metadata={"counts_tokens": True})
    return made


def token_row(default: int, parameter: str) -> int:
    """An option that names a row of the token table, used by the method as its own parameter.

    The rules ensure that the row exists; in an export, a row beyond the text's vocabulary is `method.PARAMETER`.
    """
    made: int = field(default=default, metadata={"parameter": parameter})
    return made


REGISTERED: dict[str, type[Method]] = {}
"""By name; `ponder.registry` ensures that all are loaded."""


def register(cls: type[Method]) -> type[Method]:
    """Class decorator: registers a method by its name; UserError if the name is taken."""
    other = REGISTERED.setdefault(cls.name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UserError(
            f"{cls.__module__}: the method name {cls.name!r} is taken by {other.__module__}; choose another."
        )
    REGISTERED[cls.name] = cls
    return cls


def depth_scaled(shape: Shape, passes: int) -> tuple[str, float]:
    """The papers' initialisation: truncated normal, output projections divided by sqrt(2 L passes)."""
    return "trunc_normal", (2 * shape.num_layers * passes) ** -0.5


def repeated(extra: int) -> tuple[Pass, ...]:
    """The plan of a first pass and `extra` more, all of one row per token."""
    return tuple(Pass(i, last=i == extra) for i in range(extra + 1))


def interleave(stages: list[Tensor]) -> Tensor:
    """Token-major interleave of k row blocks [s, b, H] -> [s*k, b, H]."""
    s, b, h = stages[0].shape
    return torch.stack(stages, dim=1).reshape(s * len(stages), b, h)


def slot(rows: Tensor, slots: int, i: int) -> Tensor:
    """Rows of slot i: [s*slots, b, H] -> [s, b, H]."""
    return rows.unflatten(0, (-1, slots))[:, i]
