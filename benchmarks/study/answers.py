"""The study's questions, each with the table of the rows that answer it.

A kind that was trained at several learning rates is shown at the one with the lowest loss; of rates that differ by less
than `NOISE`, at the one with the most seeds.  "±" is the standard deviation over seeds; a kind with one seed has none,
and a difference of less than a few thousandths says nothing then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, stdev
from typing import Any

from megaponder.compare.results import kind as kind_of
from megaponder.inference.sweep import AS_TRAINED, RANDOM
from megaponder.plan.report import si

Row = dict[str, Any]
WINDOW = 200
"""Steps over which a budget has to hold."""
NOISE = 0.005
"""Losses that are closer than this say nothing about rates: two seeds of a row differed by 0.001 to 0.013."""
ADAPTIVE = ("adaponderlm", "confident_ponderlm", "adaptive_cot", "ponderlm3")
DRAWN = ("adaptive_cot", "ponderlm3")
"""Of these, the rows that are trained with random halting; `pruned-random` is that of the others."""
TARGETS = ("0.9", "0.7", "0.6")
SELECTING = ("vanilla", "eslm", "eslm-entropy", "eslm-0.3")
QUESTIONS = {
    "(a) N layers with passes against 2N layers": (
        "vanilla", "vanilla-sqrt_h", "vanilla-sqrt_2.5h", "vanilla-deeper", "loop", "ponderlm",
    ),
    "(b) Ways to spend passes, by inference FLOPs": (
        "vanilla-sqrt_h", "pause", "loop", "loop-random", "huginn-like", "ouro-like", "ponderlm", "ponderlm-hidden",
        "ponderlm-projected", "ponderlm2",
    ),
    "(c) AdaPonderLM that saves a tenth against PonderLM": ("ponderlm", "adaponderlm-0.9", "adaponderlm-paper"),
    "(d) Learned against random and positional halting": tuple(
        kind
        for t in TARGETS
        for kind in (
            *(f"{method}-{t}" for method in (*ADAPTIVE, "pruned-random", "pruned-position")),
            *(f"{method}-{t}-drawn" for method in DRAWN),
        )
    ),
    "(f) Adaptive CoT against PonderLM-2, by training FLOPs": (
        "ponderlm2", *(f"adaptive_cot-{t}" for t in TARGETS), "adaptive_cot-paper", "adaptive_cot-mlp",
        "adaptive_cot-none",
    ),
    "(g) Depth-Attention in plain and looped models": (
        "vanilla", "depth-attention", "loop", "loop-depth-attention",
    ),
    "(i) FreqKV from scratch, beside a window of as many keys": ("vanilla", "freqkv", "window"),
}  # fmt: skip


def text(rows: Sequence[Row]) -> str:
    """All questions as Markdown."""
    parts = [f"## {title}\n\n{_losses(rows, kinds)}" for title, kinds in QUESTIONS.items()]
    parts.insert(4, f"## (e) Who gets the passes\n\n{_who(rows)}")
    parts.insert(-1, f"## (h) Tokens to a target loss, with a part of the tokens trained on\n\n{_to_targets(rows)}")
    return "\n\n".join([*parts, f"## Budgets\n\n{_budgets(rows)}"]) + "\n"


def span(values: Sequence[float]) -> str:
    """The least and the greatest value, or the one that all are."""
    return " to ".join(dict.fromkeys(f"{n:.2f}" for n in (min(values), max(values))))


def equal_flops(rows: Sequence[Row]) -> str:
    """Rows whose training took the same FLOPs, at the best rate of each kind, the best loss first."""
    found = [_best(rows, kind) for kind in {row["kind"] for row in rows}]
    lines = [
        [
            seeds[0]["kind"],
            f"{seeds[0]['lr']:g}",
            f"{len(seeds)}",
            _spread([r["loss"] for r in seeds]),
            f"{mean(r['bits_per_byte'] for r in seeds):.4f}",
            f"{seeds[0]['tokens'] / 1e6:.0f} M",
            f"{seeds[0]['epochs']:.2f}",
            si(seeds[0]["needed_flops"]),
            si(seeds[0]["flops_per_token"]),
        ]
        for seeds in sorted(found, key=lambda seeds: mean(r["loss"] for r in seeds))
    ]
    head = [
        "row", "rate", "seeds", "loss", "bits per byte", "tokens", "epochs", "training FLOPs", "FLOPs a token",
    ]  # fmt: skip
    return f"## Equal training FLOPs\n\n{_table(head, lines)}\n"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], absent: Sequence[str] = ()) -> str:
    shown = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)] if lines else []
    if absent:
        shown += ["", f"Not run: {', '.join(absent)}."]
    return "\n".join(shown)


def _best(rows: Sequence[Row], kind: str) -> list[Row]:
    """The seeds of a kind at its best learning rate."""
    rates: dict[float, list[Row]] = {}
    for row in rows:
        if row["kind"] == kind:
            rates.setdefault(row["lr"], []).append(row)
    if not rates:
        return []
    losses = {lr: mean(r["loss"] for r in found) for lr, found in rates.items()}
    good = [lr for lr, loss in losses.items() if loss < min(losses.values()) + NOISE]
    return rates[max(good, key=lambda lr: (len(rates[lr]), -losses[lr]))]


def _spread(values: Sequence[float], form: str = ".4f") -> str:
    return format(mean(values), form) + (f" ± {format(stdev(values), form.lstrip('+'))}" if len(values) > 1 else "")


def at_random(row: Row) -> float | None:
    """The loss of the same model with as many passes spread at random, where its evaluation has that: measured on a
    part of the text, so the difference there is added to the loss of all text."""
    sweep = row.get("sweep", [])
    own, chance = (  # of those at random the first has the threshold of training
        [s["loss"] for s in sweep if (s.get("kind") or kind_of(s["variant"])) == which]
        for which in (AS_TRAINED, RANDOM)
    )
    return float(row["loss"] + chance[0] - own[0]) if own and chance else None


def _known(values: Sequence[float | None]) -> str:
    """The spread of those that are known, and how many they are where some are not."""
    known = [v for v in values if v is not None]
    told = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
    return _spread(known, ".4f") + told if known else ""


def _losses(rows: Sequence[Row], kinds: Sequence[str]) -> str:
    lines = []
    for kind in kinds:
        if found := _best(rows, kind):
            first = found[0]
            depth = "" if first["depth"] is None else f"{mean(r['depth'] for r in found):.2f}"
            bits = mean(r["bits_per_byte"] for r in found)
            costs = (si(first["needed_flops"]), si(first["flops_per_token"]))
            lines.append(
                [
                    kind,
                    f"{first['lr']:g}",
                    f"{len(found)}",
                    _spread([r["loss"] for r in found]),
                    _known([at_random(r) for r in found]),
                    f"{bits:.4f}",
                    depth,
                    *costs,
                ]
            )
    head = [
        "row", "rate", "seeds", "loss", "with random passes", "bits per byte", "depth", "training FLOPs",
        "FLOPs a token",
    ]  # fmt: skip
    if not any(line[4] for line in lines):  # nothing here decides about passes
        head, *lines = ([*line[:4], *line[5:]] for line in (head, *lines))
    return _table(head, lines, [kind for kind in kinds if not _best(rows, kind)])


def tokens_to(curve: Sequence[Row], target: float) -> float | None:
    """Tokens after which a curve of losses first reaches a target, on a line between two looks; None: it does not."""
    for before, now in zip([None, *curve], curve, strict=False):
        if now["loss"] <= target:
            if before is None:
                return float(now["tokens"])
            share = (before["loss"] - target) / (before["loss"] - now["loss"])
            return float(before["tokens"] + share * (now["tokens"] - before["tokens"]))
    return None


def _to_targets(rows: Sequence[Row]) -> str:
    """Tokens to the losses that vanilla with the same seed has half-way and at its end, by curves, and their share of
    vanilla's."""
    found = {kind: {r["seed"]: r for r in _best(rows, kind)} for kind in SELECTING}
    plain = found["vanilla"]
    if not plain:
        return _table([], [], SELECTING)
    at = [lambda curve: curve[(len(curve) - 1) // 2]["loss"], lambda curve: curve[-1]["loss"]]
    lines = []
    for kind, seeds in found.items():
        cells = []
        for of in at:
            pairs = [
                (tokens_to(r["curve"], of(plain[s]["curve"])), tokens_to(plain[s]["curve"], of(plain[s]["curve"])))
                for s, r in seeds.items()
                if s in plain
            ]
            reached = [(a, b) for a, b in pairs if a is not None and b is not None]
            missed = f", {len(pairs) - len(reached)} of {len(pairs)} not" if len(reached) < len(pairs) else ""
            ratio = _spread([a / b for a, b in reached], ".3f") if reached else "never"
            cells.append(f"{mean(a for a, _ in reached) / 1e6:.1f} M, {ratio}{missed}" if reached else "never")
        if seeds:
            losses = [r["loss"] for r in seeds.values()]
            lines.append([kind, f"{next(iter(seeds.values()))['lr']:g}", f"{len(seeds)}", _spread(losses), *cells])
    head = ["row", "rate", "seeds", "loss", "tokens to vanilla's loss half-way, of its own", "to that of its end"]
    return _table(head, lines, [kind for kind, seeds in found.items() if not seeds])


def _who(rows: Sequence[Row]) -> str:
    lines = []
    for kind in (f"{method}-{t}" for t in TARGETS for method in (*ADAPTIVE, "pruned-random")):
        found = [a for r in _best(rows, kind) if (a := r.get("evaluation", {}).get("analysis"))]
        if found:
            own = [a["policy"] for a in found]
            score = [d for a in found if "gain" in (d := a["decisions"][-1])]
            lines.append([
                kind,
                _mean(p["depth_nll_correlation"] for p in own),
                _mean(p["depth_benefit_rank_correlation"] for p in own),
                *(_mean((p[by]["minus_policy"] for p in own), "+.4f") for by in ("shuffled", "uniform")),
                _mean(d["rank_correlation"] for d in score),
            ])  # fmt: skip
    head = [
        "row", "r(depth, NLL)", "rank r(depth, benefit)", "shuffled depths cost", "uniform depth costs",
        "rank r(score, benefit), last decision",
    ]  # fmt: skip
    return _table(head, lines)


def _mean(values: Iterator[float | None], form: str = "+.3f") -> str:
    known = [v for v in values if v is not None]
    return _spread(known, form) if known else ""


def budget(row: Row) -> tuple[float, float, float, float]:
    """Of a row with a target: its budget, mean depth of training from the end of the ramp on, the largest error of any
    `WINDOW` steps of it (of all, where there are fewer), and held-out depth; in passes (rows of ponderlm3)."""
    options = row["config"]["ponder"]["options"]
    most = options["latents"] + 1 if "latents" in options else options["steps"] + 1
    wanted = row["target"] * most
    end = options.get("ramp_end", 0)
    seen = [d for d in row["depth_in_training"] if d["step"] > end]
    every = (seen[-1]["step"] - seen[0]["step"]) / max(1, len(seen) - 1)
    n = min(len(seen), max(1, round(WINDOW / every)))
    windows = [mean(d["depth"] for d in seen[i : i + n]) for i in range(len(seen) - n + 1)]
    return wanted, mean(d["depth"] for d in seen), max(abs(w - wanted) for w in windows), row["depth"]


def _budgets(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda r: (r["method"], -(r["target"] or 0), r["lr"], r["seed"])):
        if row["method"] in ADAPTIVE and row["target"]:
            wanted, trained, worst, held = budget(row)
            lines.append([
                row["kind"], f"{row['lr']:g}", str(row["seed"]), f"{wanted:.2f}", f"{trained:.3f}", f"{worst:.3f}",
                f"{held:.3f}", f"{held - wanted:+.3f}",
            ])  # fmt: skip
    head = [
        "row", "rate", "seed", "budget", "training", f"largest error of {WINDOW} steps", "held-out text", "error there",
    ]  # fmt: skip
    return _table(head, lines)
