"""The tables of a comparison, as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaponder.compare import depth
from megaponder.compare.depth import Number
from megaponder.compare.results import PART, Group
from megaponder.inference.sweep import RANDOM
from megaponder.monitor.registry import amount


@dataclass(frozen=True)
class Table:
    """Rows of text, the first of which holds the titles; the first `words` columns are no numbers."""

    title: str
    rows: list[list[str]]
    words: int = 1


@dataclass(frozen=True)
class Column:
    """One number of each group."""

    title: str
    value: str
    """Name that `Group.mean` knows."""
    show: Callable[[float], str]
    spread: bool = False


def _loss(value: float) -> str:
    return f"{value:.4f}"


COLUMNS = (
    Column("tokens", "tokens", amount),
    Column("loss", "loss", _loss, spread=True),
    Column("bits/byte", "bits_per_byte", _loss, spread=True),
    Column("depth", "depth", lambda v: f"{v:.2f}"),
    Column("parameters", "parameters", amount),
    Column("needed FLOPs", "needed", lambda v: f"{v:.3g}"),
    Column("executed FLOPs", "executed", lambda v: f"{v:.3g}"),
    Column("seconds", "seconds", lambda v: f"{v:,.0f}"),
    Column("inference FLOPs/token", "inference", lambda v: f"{v:.3g}"),
)


def _columns(groups: Sequence[Group]) -> list[Column]:
    """Those of `COLUMNS`, and the loss of each named text that all runs have."""
    named = [r.named for g in groups for r in g.results]
    parts = [name for name in named[0] if all(name in one for one in named)]
    tokens, loss, *others = COLUMNS
    return [tokens, loss, *(Column(f"loss, {name}", PART + name, _loss, spread=True) for name in parts), *others]


def tables(groups: Sequence[Group]) -> list[Table]:
    """All tables that the groups can fill."""
    made = [_main(groups), _front(groups), _passes(groups), _policy(groups)]
    made += [_classes(groups, by) for by in ("text", "frequency")]
    return [table for table in made if len(table.rows) > 1]


def _cells(group: Group, columns: Sequence[Column]) -> list[str]:
    cells = [group.label, str(len(group.results))]
    for column in columns:
        mean, spread = group.mean(column.value), group.spread(column.value)
        text = "" if mean is None else column.show(mean)
        if column.spread and spread is not None:
            text += f" ± {column.show(spread)}"
        cells.append(text)
    return cells


def _main(groups: Sequence[Group]) -> Table:
    columns = [c for c in _columns(groups) if any(g.mean(c.value) is not None for g in groups)]
    titles = ["method", "runs", *(c.title for c in columns)]
    return Table("", [titles, *(_cells(g, columns) for g in groups)])


def _front(groups: Sequence[Group]) -> Table:
    """Points of all sweeps that no other one beats in both FLOPs and loss."""
    points = [(g.label, s) for g in groups for s in depth.sweeps(g) if s.kind != RANDOM]
    best = depth.front([(s.flops, s.loss) for _, s in points])
    rows = [
        [label, s.variant, f"{s.flops:.3g}", _loss(s.loss)]
        for label, s in sorted(points, key=lambda p: (p[1].flops, p[1].loss))
        if (s.flops, s.loss) in best
    ]
    return Table(
        "Best loss at every number of FLOPs of inference, on the sample of --depth",
        [["method", "at", "FLOPs/token", "loss"], *rows],
        2,
    )


def _passes(groups: Sequence[Group]) -> Table:
    """What passes bring, and how well the score of a decision predicts it."""
    titles = ["method", "passes", "loss", "next pass", "rank correlation", "by score", "at random", "in hindsight"]
    rows = []
    for g in groups:
        losses, benefits = depth.losses(g), depth.benefits(g)
        choices = {c.after: c for c in depth.choices(g)}
        for k, loss in enumerate(losses, 1) if len(losses) > 1 else ():
            c = choices.get(k)
            gains = (
                ["", "", "", ""]
                if c is None
                else [_of(n) for n in (c.rank_correlation, c.score, c.random, c.hindsight)]
            )
            rows.append([g.label, str(k), _of(loss), _of(benefits.get(k)), *gains])
    return Table(
        "What passes bring: the loss if all tokens stop after so many, what one more takes off it, and what is gained "
        "if half of the tokens go on (by the model's score, at random, in hindsight)",
        [titles, *rows],
        1,
    )  # fmt: skip


def _policy(groups: Sequence[Group]) -> Table:
    """Who gets the passes, against chance in the same model."""
    titles = ["method", "depth", "shuffled - own", "uniform - own", "r(depth, loss)"]
    rows = []
    for g in groups:
        shuffled, uniform = (depth.better_than(g, other) for other in ("shuffled", "uniform"))
        if shuffled is None and uniform is None:
            continue
        own = depth.over(g, lambda a: a["policy"]["depth"])
        correlation = depth.over(g, lambda a: a["policy"]["depth_nll_correlation"])
        rows.append([g.label, _of(own, 2), _signed(shuffled), _signed(uniform), _of(correlation, 2)])
    return Table(
        "Who gets the passes: loss with the same depths on other tokens, and with the mean depth for all, less the "
        "loss with the model's own choice (above 0: the choice is worth something)",
        [titles, *rows],
    )


def _classes(groups: Sequence[Group], by: str) -> Table:
    """Depth and benefit of kinds of tokens."""
    columns = [
        (f"{g.label}: {what}", depth.classes(g, by, what))
        for g in groups
        if len(depth.losses(g)) > 1
        for what in ("depth", "benefit")
    ]
    columns = [(title, numbers) for title, numbers in columns if numbers]
    names = list(dict.fromkeys(name for _, numbers in columns for name in numbers))
    rows = [[name, *(_of(n.get(name), 2 if t.endswith("depth") else 3) for t, n in columns)] for name in names]
    title = {"text": "Kinds of tokens", "frequency": "Common and rare tokens"}[by]
    title += ": mean depth, and what all passes beyond the first take off the loss"
    return Table(title, [["tokens", *(t for t, _ in columns)], *rows])


def _of(number: Number | None, digits: int = 4) -> str:
    return "" if number is None else f"{number.mean:.{digits}f}"


def _signed(number: Number | None) -> str:
    """With half of what surrounds it."""
    if number is None:
        return ""
    around = (number.high - number.low) / 2
    return f"{number.mean:+.4f}" + (f" ± {around:.4f}" if around else "")


def markdown(table: Table) -> str:
    """A table that is also easy to read as text."""
    lines = table.rows
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]

    def line(row: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if i < table.words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + ("-" if i < table.words else ":") for i, w in enumerate(widths))
    title = f"{table.title}:\n\n" if table.title else ""
    return title + "\n".join([line(lines[0]), f"|{rule}|", *map(line, lines[1:])]) + "\n"


def comma_separated(groups: Sequence[Group]) -> str:
    """One row a run, with all digits: for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    deepest = max((len(r.analysis["losses"]) for g in groups for r in g.results if r.analysis), default=0)
    passes = range(1, deepest + 1) if deepest > 1 else ()
    extra = [f"loss_after_{k}" for k in passes]
    extra += (
        [f"{name}_after_{k}" for k in passes[:-1] for name in ("benefit", "rank_correlation")] if deepest > 1 else []
    )
    extra += ["shuffled_minus_own", "uniform_minus_own"] if deepest > 1 else []
    columns = _columns(groups)
    writer.writerow(["method", "run", *(c.value for c in columns), *extra])
    for group in groups:
        for result in group.results:
            alone = Group(group.label, (result,))
            values = [result.value(c.value) for c in columns]
            found = _analysis(alone)
            values += [found.get(name) for name in extra]
            writer.writerow([group.label, result.name, *("" if v is None else repr(v) for v in values)])
    return out.getvalue()


def _analysis(alone: Group) -> dict[str, float]:
    """The numbers of a run's analysis by name."""
    found = {f"loss_after_{k}": n.mean for k, n in enumerate(depth.losses(alone), 1)}
    found |= {f"benefit_after_{k}": n.mean for k, n in depth.benefits(alone).items()}
    found |= {f"rank_correlation_after_{c.after}": c.rank_correlation.mean
              for c in depth.choices(alone) if c.rank_correlation}  # fmt: skip
    for other in ("shuffled", "uniform"):
        if better := depth.better_than(alone, other):
            found[f"{other}_minus_own"] = better.mean
    return found


def latex(table: Table) -> str:
    """A booktabs table, under its title as a comment."""
    cells = [[_escaped(cell) for cell in row] for row in table.rows]
    body = [" & ".join(row).replace("±", r"$\pm$") + r" \\" for row in cells]
    columns = "l" * table.words + "r" * (len(cells[0]) - table.words)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", body[0], r"\midrule", *body[1:]]
    title = [f"% {table.title}"] if table.title else []
    return "\n".join([*title, *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c) or (f"\\{c}" if c in "&%$#_{}" else c) for c in text)
