"""The catalog of what a configuration can name: presets and methods."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

from megaponder.config.load import from_mapping
from megaponder.config.presets import PRESETS
from megaponder.config.resolve import resolve
from megaponder.plan.parameters import model_parameters


def _table(*columns: tuple[str, bool]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", no_wrap=not name.startswith("*"))
    return table


def print_presets(console: Console) -> None:
    """Names, shapes and sizes of all presets."""
    numbers = ("layers", "hidden", "heads", "ffn", "vocabulary", "positions", "norm eps", "parameters")
    table = _table(("preset", False), *((n, True) for n in numbers))
    for name, p in PRESETS.items():
        cfg = resolve(from_mapping({"model": {"preset": name}}))
        total = model_parameters(cfg.model).total
        shape = (p.num_layers, p.hidden_size, p.num_heads, p.ffn_size, p.vocab_size, p.max_positions, f"{p.norm_eps:g}")
        table.add_row(name, *(str(x) for x in shape), f"{total / 1e6:,.1f} M" if total >= 1e6 else f"{total:,}")
    console.print(table)


def print_methods(console: Console) -> None:
    """Names, meanings and options of all pondering methods."""
    from megaponder.config.fields import attribute_docs
    from megaponder.ponder.registry import methods

    for name, cls in sorted(methods().items()):
        console.print(f"[bold]{name}[/bold]  {cls.summary}", highlight=False)
        docs = attribute_docs(cls.Options)
        for option in dataclasses.fields(cls.Options):
            text = f"    {option.name} = {option.default}  {docs.get(option.name, '')}"
            console.print(text, highlight=False, markup=False)
