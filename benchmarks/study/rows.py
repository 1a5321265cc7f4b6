"""The rows of the study: a method with its controls, at a size, with a seed and a learning rate, some at a target.

Everything that a comparison must match is here, the same for all: data and order, tokens, batch, schedule, optimizer.
Where the papers give a method another embedding scale or initialisation than vanilla, vanilla has a row with each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from benchmarks.study.corpus import Corpus
from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.plan.flops import mean_needed
from megaponder.ponder.registry import methods
from megaponder.ponder.settings import method_of

STEPS = 3
"""Pondering steps of the methods that count them: four passes."""
TARGETS = (0.9, 0.7, 0.6)
"""Shares of the passes that adaptive methods may spend."""
SEEDS = (1, 2, 3)
ORDER = 1234
"""Seed of the order of text: one for all rows."""


@dataclass(frozen=True)
class Size:
    """A backbone and its budget."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    """Rows of the embedding table: the tokenizer's ids and one for the pause token."""
    length: int
    batch: int
    tokens: int
    rate: float = 1.0
    """Factor on the learning rates of 6x256."""


SIZES = {
    "tiny": Size(3, 32, 2, 512, 32, 8, 4096),
    "6x128": Size(6, 128, 2, 8192, 512, 64, 88_000_000, 2.0),
    "6x256": Size(6, 256, 4, 8192, 512, 64, 88_000_000),
    "6x512": Size(6, 512, 8, 8192, 512, 64, 88_000_000, 0.25),
}
LEARNING_RATES = {
    "vanilla": 3e-3, "matched": 12e-3, "loop": 6e-3, "pause": 3e-3, "ponderlm": 6e-3, "ponderlm2": 6e-3,
    "huginn": 6e-3, "ouro": 3e-3,
}  # fmt: skip
"""Of each family the best known one at 6x256 (docs/evidence.md, table of rates); huginn and ouro wait for `GRID`."""
GRID = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Kind:
    """What differs between rows besides size, seed and learning rate."""

    name: str
    method: str
    family: str
    """Rows that share a learning rate."""
    options: dict[str, Any] = field(default_factory=dict)
    scale: str = "auto"
    """Embedding scale; anything but auto goes with the initialisation of the pondering methods."""
    deeper: int = 1
    """Factor on the number of layers."""
    target: float | None = None
    ramped: bool = False
    """The method's options ramp_start and ramp_end are 10 and 40 % of the steps."""
    model: dict[str, Any] = field(default_factory=dict)
    """Features of the backbone."""
    eslm: dict[str, Any] = field(default_factory=dict)
    """Which tokens are trained on (`train.eslm`)."""
    matched: str = ""
    """An option that is chosen so that a token costs as many training FLOPs as ponderlm's."""
    impossible: str = ""
    """Why the row cannot be trained yet."""


def _kinds() -> Iterator[Kind]:
    yield Kind("vanilla", "vanilla", "vanilla")
    yield Kind("vanilla-sqrt_h", "vanilla", "matched", scale="sqrt_h")
    yield Kind("vanilla-sqrt_2.5h", "vanilla", "matched", scale="sqrt_2.5h")
    yield Kind("vanilla-deeper", "vanilla", "matched", scale="sqrt_2.5h", deeper=2)
    yield Kind("loop", "loop", "loop", {"extra_passes": STEPS})
    yield Kind("loop-random", "loop", "loop", {"draw": "uniform"}, matched="extra_passes")
    ends = {"prelude": 1, "coda": 1, "kept": STEPS + 1}
    block = {"norm_placement": "stream", "qkv_bias": "qk", "rotary_pairs": "adjacent"}
    yield Kind("huginn-like", "huginn", "huginn", ends, model=block, matched="recurrence")
    sandwich = {"norm_placement": "sandwich"}
    yield Kind("ouro-like", "ouro", "ouro", {}, model=sandwich, matched="loops")
    yield Kind("pause", "pause", "pause", {"pauses": STEPS})
    yield Kind("ponderlm", "ponderlm", "ponderlm", {"steps": STEPS})
    drawn = {"jacobi": 3, "jacobi_from": 2, "jacobi_to": 3}
    yield Kind("ponderlm2", "ponderlm2", "ponderlm2", {"latents": 1, **drawn})
    latents = {"latents": 2, **drawn}
    for t in TARGETS:
        yield _budgeted("adaponderlm", "ponderlm", {"steps": STEPS}, t)
        yield _budgeted("adaptive_cot", "ponderlm2", {"steps": STEPS}, t)
        yield _budgeted("ponderlm3", "ponderlm2", latents, t)
        yield _budgeted("confident_ponderlm", "ponderlm", {"steps": STEPS}, t)
        for by in ("random", "position"):
            depth = {"steps": STEPS, "depth": round(t * (STEPS + 1), 3), "by": by}
            yield Kind(f"pruned-{by}-{t}", "pruned_ponderlm", "ponderlm", depth, target=t)
    # trained with random halting: what `pruned-random` is to methods that pass on as PonderLM does, of the other two
    at_random = {"explore": 1.0}
    yield _budgeted("adaponderlm", "ponderlm", {"steps": STEPS, **at_random}, 0.6, "-drawn")
    for t in TARGETS:
        yield _budgeted("adaptive_cot", "ponderlm2", {"steps": STEPS, **at_random}, t, "-drawn")
        yield _budgeted("ponderlm3", "ponderlm2", {**latents, **at_random}, t, "-drawn")
    # the published forms, which have no budget
    published: dict[str, Any] = {"steps": STEPS, "target": 0.0}
    yield Kind("ponderlm3", "ponderlm3", "ponderlm2", {**latents, "target": 0.0})
    saved = published | {"bottom_share": 0.1}
    yield Kind("adaponderlm-paper", "adaponderlm", "ponderlm", saved, ramped=True)
    yield Kind("adaptive_cot-paper", "adaptive_cot", "ponderlm2", published)
    # ablations of the papers
    for what in ("hidden", "projected"):
        yield Kind(f"ponderlm-{what}", "ponderlm", "ponderlm", {"steps": STEPS, "feedback": what})
    for gates in ({"shared_gate": True}, {"router": "linear"}, {"bottom_share": 1.0}):
        told = {"shared_gate": "shared", "router": "linear", "bottom_share": "all-gates"}[next(iter(gates))]
        yield Kind(f"adaponderlm-{told}", "adaponderlm", "ponderlm", {**saved, **gates}, ramped=True)
    for router in ("mlp", "none"):
        yield Kind(f"adaptive_cot-{router}", "adaptive_cot", "ponderlm2", published | {"router": router})
    # features of attention
    yield Kind("depth-attention", "vanilla", "vanilla", model={"depth_attention": {"sources": "all"}})
    near = {"depth_attention": {"sources": "last:6"}}  # as many as the stack of 6 x 256 has layers
    yield Kind("loop-depth-attention", "loop", "loop", {"extra_passes": STEPS}, model=near)
    near = {"freqkv": {"capacity": 128}}  # a quarter of a text of 6 x 256; beside it as many keys without compression
    yield Kind("freqkv", "vanilla", "vanilla", model=near)
    yield Kind("window", "vanilla", "vanilla", model={"attention_window": 128})
    # experts, of which a row takes as much as an MLP of 6 x 256 has: one router for all passes, or one for each
    for name, routers in (("loop-moe", "shared"), ("loop-moe-routers", STEPS + 1)):
        mixture = {"ffn_size": 352, "moe": {"experts": 8, "top_k": 2, "routers": routers}}
        yield Kind(name, "loop", "loop", {"extra_passes": STEPS}, model=mixture)
    # losses on a part of the tokens
    for name, given in {
        "eslm": {"by": "loss", "alpha": 0.1}, "eslm-entropy": {"by": "entropy", "alpha": 0.1},
        "eslm-0.3": {"by": "loss", "alpha": 0.3},
    }.items():  # fmt: skip
        yield Kind(name, "vanilla", "vanilla", eslm=given)


def _budgeted(method: str, family: str, options: dict[str, Any], target: float, told: str = "") -> Kind:
    known = {f.name for f in fields(methods()[method].Options)}
    why = "" if "target" in known else f"{method} has no option that holds a budget"
    ramped = {"ramp_start", "ramp_end"} <= known
    name, given = f"{method}-{target}{told}", {**options, "target": target}
    return Kind(name, method, family, given, target=target, ramped=ramped, impossible=why)


@dataclass(frozen=True)
class Row:
    """One run of the study."""

    kind: Kind
    size: str
    seed: int
    factor: float
    """On the family's learning rate."""
    tokens: int
    flops: float | None = None
    """The training FLOPs that `tokens` were chosen for."""

    @property
    def name(self) -> str:
        """Of its result and its run folder."""
        told = "" if self.tokens == SIZES[self.size].tokens else f".{self.tokens / 1e6:g}M"
        told = told if self.flops is None else f".{budget(self.flops)}"
        return f"{self.size}{told}.{self.short}"

    def spending(self, flops: float) -> Row:
        """The same row with whole steps for so many training FLOPs."""
        size, (model, options) = SIZES[self.size], self.described()
        step = size.batch * size.length
        each = _needed(model, size.length, self.kind.method, options)
        return replace(self, tokens=max(1, round(flops / each / step)) * step, flops=flops)

    @property
    def short(self) -> str:
        """The name without size and tokens."""
        return f"{self.kind.name}.lr{self.lr:g}.seed{self.seed}"

    @cached_property
    def lr(self) -> float:
        """Peak learning rate."""
        return LEARNING_RATES[self.kind.family] * SIZES[self.size].rate * self.factor

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        size = SIZES[self.size]
        return -(-self.tokens // (size.batch * size.length))

    def described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model and the method's options, as a file would give them."""
        s, k = SIZES[self.size], self.kind
        layers = s.layers * k.deeper
        options = dict(k.options)
        if k.method == "pause":
            options["pause_token_id"] = s.vocab - 1
        if k.ramped:
            options |= {"ramp_start": round(0.1 * self.steps), "ramp_end": round(0.4 * self.steps)}
        model: dict[str, Any] = {
            "family": "llama", "num_layers": layers, "hidden_size": s.hidden, "num_heads": s.heads,
            "vocab_size": s.vocab, "max_positions": s.length, "tie_embeddings": False,
        }  # fmt: skip
        if k.scale != "auto":
            model |= {"embedding_scale": k.scale, "init": "trunc_normal", "init_output_scale": (2 * layers) ** -0.5}
        model |= k.model
        if k.matched:
            options[k.matched] = _matching(
                tuple(sorted(model.items())), s.length, k.method, tuple(sorted(options.items())), k.matched
            )
        return model, options

    def config(self, corpus: Corpus, run: str, cuda: bool) -> dict[str, Any]:
        """The run's configuration, as a file would give it."""
        s, steps, (model, options) = SIZES[self.size], self.steps, self.described()
        looks = min(20, steps)
        return {
            "run": run,
            "model": model,
            "ponder": {"method": self.kind.method, "options": options},
            "data": {
                "train": [corpus.path("train")], "valid": [corpus.path("heldout")], "sequence_length": s.length,
                "tokenizer": corpus.path("tokenizer.json"), "shuffle_seed": ORDER,
            },
            "precision": {"dtype": "bf16" if cuda else "fp32"},
            "optimizer": {"lr": self.lr},
            "schedule": {"kind": "cosine", "warmup_fraction": 0.05, "min_lr_fraction": 0.1},
            "train": {
                "steps": steps, "global_batch": s.batch, "micro_batch": s.batch, "seed": self.seed,
                "eval_every": max(1, steps // looks), "eval_batches": 8,
                "eslm": self.kind.eslm,
            },
            "checkpoint": {"every": max(1, steps // 8), "keep_last": 1},
            "logging": {"every": max(1, steps // 200), "tensorboard": False},
        }  # fmt: skip


def budget(flops: float) -> str:
    """Training FLOPs in the names of rows and reports, in units of 10^15."""
    return f"{flops / 1e15:g}PFLOP"


@lru_cache
def _ponderlm(size: tuple[tuple[str, Any], ...], length: int) -> float:
    return _needed(dict(size), length, "ponderlm", {"steps": STEPS})


def _needed(model: dict[str, Any], length: int, method: str, options: dict[str, Any]) -> float:
    ponder = {"method": method, "options": options}
    cfg = resolve(from_mapping({"model": model, "ponder": ponder, "data": {"sequence_length": length}}))
    return mean_needed(cfg, method_of(cfg))


@lru_cache
def _matching(
    model: tuple[tuple[str, Any], ...], length: int, method: str, options: tuple[tuple[str, Any], ...], name: str
) -> int:
    """The value of the option with which a token's training FLOPs come nearest to ponderlm's."""
    aim = _ponderlm(model, length)
    return min(range(2, 33), key=lambda n: abs(_needed(dict(model), length, method, dict(options) | {name: n}) - aim))


def rows(size: str, tokens: int | None = None) -> list[Row]:
    """All rows of a size, in the order in which they are run: every kind once, then rates, then seeds, then both.

    Other rates: for the first kind of each family, for the deeper model, for kinds that are matched by one of their
    options, for methods that have to keep a budget, and for those that halt at random beside them.
    """
    kinds, n = list(_kinds()), SIZES[size].tokens if tokens is None else tokens
    first = [Row(k, size, SEEDS[0], 1.0, n) for k in kinds]
    seen: set[str] = set()
    heads = [k for k in kinds if not (k.family in seen or seen.add(k.family))]  # type: ignore[func-returns-value]
    budgets = [k for k in kinds if k.target is not None and k.options.get("by") != "position"]
    heads += [k for k in kinds if k not in heads and (k.deeper > 1 or k.matched or k in budgets)]
    rates = [Row(k, size, SEEDS[0], f, n) for k in heads for f in GRID if f != 1.0]
    seeds = [Row(k, size, seed, 1.0, n) for seed in SEEDS[1:] for k in kinds]
    both = [Row(k, size, seed, f, n) for seed in SEEDS[1:] for k in heads for f in GRID if f != 1.0]
    return [*first, *rates, *seeds, *both]
