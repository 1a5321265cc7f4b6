"""FLOPs per token by pass and by part.

Conventions (printed with every number that depends on them): a multiply-add is 2; attention counts the causal half;
backward is twice forward; *needed* FLOPs count each pass once (no recompute), *executed* ones add recomputation.
The unit is one real token: a pass with m slots a token runs m rows of the stack for it.

    linear      2 L (2 H H_q + 2 H H_kv + nm H F) a row     nm = 3 (SwiGLU) or 2 (GELU); H_q, H_kv: all heads together
                less 2 (H H_q + nm H F) in the last layer for a row whose output is not read
    attention   4 L H_q a visible key; row i of m n rows sees i + 1 keys of each key set, within the window if any;
                with documents, n is `data.document_tokens`; what Depth-Attention mixes (`plan.depth_attention`); with
                FreqKV the keys of its memory and block, and the compressions (`plan.freqkv`)
    head        2 V H, in the last pass, for every token
    extra       as given by the method (`extra_flops`): vocabulary mixtures, of tokens that run the next pass; gates
    training    as given by the method (`training_flops`), forward and backward: losses of passes before the last
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megaponder.config import eslm
from megaponder.config.method_facts import MethodLike, PassLike
from megaponder.config.recompute import recomputed_layers
from megaponder.config.schema import DataConfig, ModelConfig, RunConfig
from megaponder.config.stages import run_in, stage_range
from megaponder.plan.depth_attention import mixing_flops
from megaponder.plan.freqkv import compression_flops, mean_keys
from megaponder.plan.layer import key_flops, linear_flops, unread_flops

BACKWARD = 2.0
"""Backward FLOPs per forward FLOP: the gradients of input and weight."""
PLANS_AVERAGED = 256
"""Steps over which plans are averaged where they differ from step to step."""


@dataclass(frozen=True)
class PassFlops:
    """Forward FLOPs per token of one pass."""

    index: int
    slots: int
    linear: float
    attention: float
    head: float
    extra: float
    feedback: float = 0.0
    """Part of `extra` that only tokens which run the next pass need."""
    training: float = 0.0
    """FLOPs of training alone, with their backward; in no other number of the pass."""
    mixing: float = 0.0
    """Part of `attention`: Depth-Attention."""
    compression: float = 0.0
    """Part of `attention`: FreqKV's transforms."""
    trained: float = 1.0
    """Share of them that has a backward: all, or in passes without gradient the prelude of the first one."""

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head + self.extra


@dataclass(frozen=True)
class StepFlops:
    """FLOPs per token of a step's passes."""

    passes: tuple[PassFlops, ...]
    again: tuple[float, ...]
    """Share of the stack's layers that the backward of each pass recomputes."""
    scored: bool = False
    """A forward for the tokens' scores comes before the one that is trained on (`train.eslm`)."""

    @property
    def forward(self) -> float:
        """Forward, all passes."""
        return sum(p.total for p in self.passes)

    @property
    def needed(self) -> float:
        """Training without recompute: the numerator of MFU."""
        return self.needed_of([1.0] * len(self.passes))

    @property
    def executed(self) -> float:
        """Training with recompute and a forward for scores: the numerator of HFU."""
        return self.executed_of([1.0] * len(self.passes))

    def needed_of(self, active: Sequence[float]) -> float:
        """`needed`, if only these shares of the tokens take part in each pass."""
        parts = zip(active, forward_of(self.passes, active), self.passes, strict=True)
        return sum((1 + BACKWARD * p.trained) * forward + a * p.training for a, forward, p in parts)

    def executed_of(self, active: Sequence[float]) -> float:
        """`executed`, if only these shares of the tokens are computed in each pass."""
        parts = zip(active, self.again, self.passes, strict=True)
        again = sum(a * s * (p.linear + p.attention) for a, s, p in parts)
        return self.needed_of(active) + again + self.scored * sum(forward_of(self.passes, active))


def forward_of(passes: Sequence[PassFlops], active: Sequence[float]) -> list[float]:
    """Forward FLOPs per token of each pass, if only these shares of the tokens take part in them.

    Every token is read out, wherever it halted; one that halts feeds nothing back.
    """
    parts = zip(passes, active, [*active[1:], 0.0], strict=True)
    return [a * (p.linear + p.attention + p.extra - p.feedback) + on * p.feedback + p.head for p, a, on in parts]


def attention_flops(model: ModelConfig, tokens: float, slots: float, layers: int | None = None) -> float:
    """Attention FLOPs of the stack (or of `layers` layers) per token, forward, causal half: m rows a token, each of m n
    rows sees its past."""
    assert model.num_layers
    window = min(model.attention_window or tokens, tokens)
    beyond = slots * (tokens - window) * (tokens - window + 1) / (2 * tokens)  # keys before the window
    keys = mean_keys(model, tokens) or (slots * tokens + 1) / 2 - beyond
    return (model.num_layers if layers is None else layers) * key_flops(model) * slots * keys


def seen_together(data: DataConfig) -> float:
    """Tokens of a sequence that attend to each other: all, or those of a document, mean over tokens, if it is known."""
    if data.document_attention and data.document_tokens is not None:
        return data.document_tokens
    return data.sequence_length


def pass_flops(cfg: RunConfig, method: MethodLike, p: PassLike, before: Sequence[PassLike] = ()) -> PassFlops:
    """FLOPs of one pass of a resolved configuration whose vocabulary is known; `before`: earlier ones of its step."""
    model = cfg.model
    assert model.vocab_size and model.hidden_size and model.num_layers
    unread = 0 if p.reads is None else p.slots - len(p.reads)
    layers, mixing = run_in(range(model.num_layers), p.layers), mixing_flops(model, [*before, p])
    tokens = seen_together(cfg.data)
    compression = layers * compression_flops(model, tokens)
    made = PassFlops(
        index=p.index,
        slots=p.slots,
        linear=p.slots * layers * linear_flops(model) - unread * unread_flops(model),
        attention=p.key_sets * attention_flops(model, tokens, p.slots, layers) + mixing + compression,
        mixing=mixing,
        compression=compression,
        head=2.0 * model.vocab_size * model.hidden_size if p.last else 0.0,
        extra=method.extra_flops(p, model.vocab_size),
        feedback=method.feedback_flops(p, model.vocab_size),
        training=method.training_flops(p, model.vocab_size),
    )
    if p.grad:
        return made
    prelude = method.core[0] if p.index == 0 and method.core is not None else 0
    return replace(made, trained=prelude / layers * (made.linear + made.attention) / made.total)


def micro_batches(cfg: RunConfig, world_size: int) -> int:
    """Micro-batches of a rank in a step with the full batch."""
    return cfg.train.global_batch // (cfg.train.micro_batch * max(1, world_size // cfg.parallel.replica))


def step_flops(cfg: RunConfig, method: MethodLike, step: int = 0, each: int = 1) -> StepFlops:
    """FLOPs of the plan of one step; `each`: micro-batches of a rank."""
    return plan_flops(cfg, method, method.passes(cfg.train.seed, step), each)


def plan_flops(cfg: RunConfig, method: MethodLike, plan: Sequence[PassLike], each: int = 1) -> StepFlops:
    """FLOPs of a plan, after the warm-up of `train.eslm`; `each`: micro-batches of a rank."""
    made = tuple(pass_flops(cfg, method, p, plan[:i]) for i, p in enumerate(plan))
    selects = eslm.read(cfg.train.eslm)
    scored = selects is not None and selects.alpha > 0 and selects.scores_first(each)
    return StepFlops(made, tuple(_again(cfg, p) for p in plan), scored)


def _again(cfg: RunConfig, p: PassLike) -> float:
    """Share of the layers of a pass that its backward recomputes."""
    if not p.grad:
        return 0.0
    stages = [stage_range(cfg, i) for i in range(cfg.parallel.pipeline)]
    again = sum(run_in(layers[: recomputed_layers(cfg, p.index, len(layers))], p.layers) for layers in stages)
    return again / sum(run_in(layers, p.layers) for layers in stages)


def mean_needed(cfg: RunConfig, method: MethodLike) -> float:
    """Needed training FLOPs per token, averaged over the run's plans."""
    return _mean(cfg, method, lambda flops: flops.needed)


def mean_executed(cfg: RunConfig, method: MethodLike, each: int = 1) -> float:
    """Executed training FLOPs per token, averaged over the run's plans; `each`: micro-batches of a rank."""
    return _mean(cfg, method, lambda flops: flops.executed, each)


def steps_seen(cfg: RunConfig, method: MethodLike) -> list[int]:
    """Steps whose plans stand for the run's: one if all are the same, else many, evenly spread over the run."""
    total = cfg.train.steps or PLANS_AVERAGED
    count = min(PLANS_AVERAGED, total)
    spread = [i * total // count for i in range(count)]
    plans = {tuple(method.passes(cfg.train.seed, step)) for step in spread}
    return [0] if len(plans) == 1 else spread


def _mean(cfg: RunConfig, method: MethodLike, value: Callable[[StepFlops], float], each: int = 1) -> float:
    """Over the run's plans, each of which is looked at once."""
    plans = [tuple(method.passes(cfg.train.seed, step)) for step in steps_seen(cfg, method)]
    known = {plan: value(plan_flops(cfg, method, plan, each)) for plan in set(plans)}
    return sum(known[plan] for plan in plans) / len(plans)


def inference_flops(cfg: RunConfig, method: MethodLike, active: Sequence[float] = ()) -> float:
    """Forward FLOPs of one token in cached decoding, of a resolved configuration whose vocabulary is known.

    `active`: the share of tokens that take part in each pass, or, of methods with latents, that run each row; empty:
    all do.  Latents are decoded one after another, without refinements: a token costs its rows, each once, and sees
    the rows that tokens run on average.  The text is one document.
    """
    cfg = replace(cfg, data=replace(cfg.data, document_attention=False))
    plan = method.passes(cfg.train.seed, None)
    passes = [pass_flops(cfg, method, p, plan[:i]) for i, p in enumerate(plan)]
    if len(passes) > 1 and passes[-1].slots > 1:
        last, model = passes[-1], cfg.model
        shares = list(active) if len(active) == last.slots else [1.0] * last.slots
        rows = sum(shares)
        assert model.num_layers
        stack = rows * model.num_layers * linear_flops(model) + attention_flops(model, cfg.data.sequence_length, rows)
        stack += rows * mixing_flops(model, plan[:1])  # of the first pass, which has one row
        feedback = sum(shares[1:]) * passes[0].extra  # of one row: pass 0 feeds back one
        return stack + last.head + last.extra + feedback
    shares = list(active) if len(active) == len(passes) else [1.0] * len(passes)
    return sum(forward_of(passes, shares))
