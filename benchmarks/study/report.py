"""The results of the study as a page with figures: which rows there are, what they reached, and at which cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.study import answers
from benchmarks.study.rows import SIZES
from megaponder.compare import page
from megaponder.compare.results import Group, Point, Result, Sweep, kind
from megaponder.errors import UserError


def read(folder: Path, size: str, tokens: int) -> list[dict[str, Any]]:
    """The results of a size that saw so many tokens; UserError where there is none."""
    every = [json.loads(p.read_text()) for p in sorted(folder.glob(f"{size}.*.json"))]
    found = [row for row in every if row["tokens"] == tokens]
    if not found:
        others = ", ".join(f"{n}" for n in sorted({row["tokens"] for row in every})) or "none"
        raise UserError(
            f"--out {folder}: it has no result of size {size} with --tokens {tokens} (with other numbers: {others})."
        )
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


def write(folder: Path, size: str, tokens: int | None) -> list[Path]:
    """Figure, tables, answers and page of a size, in `folder`; their paths."""
    usual = SIZES[size].tokens
    rows = read(folder, size, usual if tokens is None else tokens)
    made = groups(rows)
    first = rows[0]
    corpus = first["corpus"]
    origins = sorted({row["origin"] for row in rows})
    notes = [
        f"Text: {corpus['train_bytes'] / 1e6:.1f} MB, {corpus['train_tokens']:,} tokens of a BPE with "
        f"{corpus['vocab_size']:,} ids, {first['epochs']:.2f} epochs; held out: "
        f"{corpus['heldout']['all']['bytes'] / 1e6:.2f} MB. sha256: "
        + ", ".join(f"{name} {value[:16]}" for name, value in corpus["files"].items()) + ".",
        f"From: {'; '.join(origins)}.",
        "Losses are in nats per token. Those in the first table are of all held-out text, with the standard deviation "
        "over seeds; those in the curves, and all numbers about depth, are of a part of it.",
    ]  # fmt: skip
    out = folder / (size if tokens in (None, usual) else f"{size}.{rows[0]['tokens'] / 1e6:g}M")
    written = page.write(out, f"The study at {size}", made, [], notes)
    (out / "answers.md").write_text(f"# The study's questions at {size}\n\n{notes[0]}\n\n{answers.text(rows)}")
    return [out / "answers.md", *written]
