"""The results of the study as a page with figures: which rows there are, what they reached, and at which cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.study import answers
from benchmarks.study.rows import SIZES, budget
from megaponder.compare import page
from megaponder.compare.results import Group, Point, Result, Sweep, kind
from megaponder.errors import UserError

NEAR = 0.05
"""Share by which the training FLOPs of rows may differ that are compared at equal ones."""


def _results(folder: Path, size: str) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(folder.glob(f"{size}.*.json"))]


def read(folder: Path, size: str, tokens: int) -> list[dict[str, Any]]:
    """The results of a size that saw so many tokens; UserError where there is none."""
    every = _results(folder, size)
    found = [row for row in every if row["tokens"] == tokens]
    if not found:
        others = ", ".join(f"{n}" for n in sorted({row["tokens"] for row in every})) or "none"
        raise UserError(
            f"--out {folder}: it has no result of size {size} with --tokens {tokens} (with other numbers: {others})."
        )
    return found


def spending(folder: Path, size: str, flops: float) -> list[dict[str, Any]]:
    """The results of a size whose training took so many FLOPs, within `NEAR`; UserError where there is none."""
    found = [row for row in _results(folder, size) if abs(row["needed_flops"] / flops - 1) < NEAR]
    if not found:
        raise UserError(f"--out {folder}: it has no result of size {size} whose training took {flops:g} FLOPs.")
    return found


def result(row: dict[str, Any]) -> Result:
    """A row as `megaponder compare` knows runs; its loss is that of all held-out text, the curve's that of a part."""
    points = tuple(
        Point(p["tokens"], p["loss"], p["needed_flops"], p["executed_flops"], p.get("training_seconds"))
        for p in row["curve"]
    )
    return Result(
        name=row["name"],
        method=row["method"],
        points=points,
        whole=row["loss"],
        inference=row["flops_per_token"],
        parameters=row.get("parameters"),
        depth=row["depth"],
        by_depth={},
        bits_per_byte=row["bits_per_byte"],
        sweep=tuple(
            Sweep(s["variant"], s.get("kind") or kind(s["variant"]), s["flops_per_token"], s["loss"])
            for s in row["sweep"]
        ),
        analysis=row.get("evaluation", {}).get("analysis"),
    )


def groups(rows: Sequence[dict[str, Any]]) -> list[Group]:
    """Rows that differ in their seed alone, the best loss first."""
    found: dict[str, list[Result]] = {}
    several = {row["kind"] for row in rows if len({r["lr"] for r in rows if r["kind"] == row["kind"]}) > 1}
    for row in rows:
        label = row["kind"] + (f", lr {row['lr']:g}" if row["kind"] in several else "")
        found.setdefault(label, []).append(result(row))
    made = [Group(label, tuple(members)) for label, members in found.items()]
    return sorted(made, key=lambda g: g.mean("loss") or 0.0)


def write(folder: Path, size: str, tokens: int | None, flops: float | None = None) -> list[Path]:
    """Figure, tables, answers and page of a size, in `folder`; their paths.

    Of the rows with so many tokens (default: the size's), or of those whose training took so many FLOPs.
    """
    usual = SIZES[size].tokens
    rows = read(folder, size, usual if tokens is None else tokens) if flops is None else spending(folder, size, flops)
    made = groups(rows)
    first = rows[0]
    corpus = first["corpus"]
    origins = sorted({row["origin"] for row in rows})
    epochs = answers.span([row["epochs"] for row in rows])
    notes = [
        f"Text: {corpus['train_bytes'] / 1e6:.1f} MB, {corpus['train_tokens']:,} tokens of a BPE with "
        f"{corpus['vocab_size']:,} ids, {epochs} epochs; held out: "
        f"{corpus['heldout']['all']['bytes'] / 1e6:.2f} MB. sha256: "
        + ", ".join(f"{name} {value[:16]}" for name, value in corpus["files"].items()) + ".",
        f"From: {'; '.join(origins)}.",
        "Losses are in nats per token. Those in the first table are of all held-out text, with the standard deviation "
        "over seeds; those in the curves, and all numbers about depth, are of a part of it.",
    ]  # fmt: skip
    if flops is not None:
        out, told = folder / f"{size}.{budget(flops)}", answers.equal_flops(rows)
    else:
        out = folder / (size if tokens in (None, usual) else f"{size}.{first['tokens'] / 1e6:g}M")
        told = answers.text(rows)
    written = page.write(out, f"The study at {size}", made, [], notes)
    (out / "answers.md").write_text(f"# The study's questions at {size}\n\n{notes[0]}\n\n{told}")
    return [out / "answers.md", *written]
