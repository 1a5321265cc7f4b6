"""pondered.jsonl: after every evaluation of a method with halting, the tokens that were pondered most and least."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from megaponder import files
from megaponder.config.schema import RunConfig
from megaponder.monitor import jsonl

NAME = "pondered.jsonl"
SHOWN = 10
"""Tokens in each list."""
FEWEST = 3
"""Minimum occurrences for a token's mean depth to be shown."""


class Pondered:
    """Appends one object per evaluation; rows beyond the step from which a run continues are dropped."""

    def __init__(self, cfg: RunConfig, step: int, logs: bool):
        self._path, self._logs, self._cfg = Path(cfg.run) / NAME, logs, cfg
        self._words: Any = None
        if logs and self._path.exists():
            kept = [row for row in jsonl.read(self._path, ("step",)) if row["step"] <= step]
            files.write_bytes(self._path, "".join(json.dumps(row) + "\n" for row in kept).encode())

    def write(self, step: int, by_token: Tensor) -> str | None:
        """Writes both lists of `by_token` (sums of depths and occurrences, [2, V]); returns a sentence about them."""
        if not self._logs:
            return None
        most, least = self._lists(by_token)
        with files.naming(self._path), self._path.open("a") as file:
            file.write(json.dumps({"step": step, "most": most, "least": least}) + "\n")
        if not most or most[0]["depth"] == least[0]["depth"]:
            return None  # nothing is adaptive: all tokens have the same depth
        named = [", ".join(f"{row['text']!r} {row['depth']:.2f}" for row in rows[:3]) for rows in (most, least)]
        return f"Pondered most: {named[0]}; least: {named[1]}."

    def _lists(self, by_token: Tensor) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        depths, counts = by_token.tolist()
        rows = [(d / n, int(n), i) for i, (d, n) in enumerate(zip(depths, counts, strict=True)) if n >= FEWEST]
        most = sorted(rows, key=lambda r: (-r[0], -r[1], r[2]))[:SHOWN]
        least = sorted(rows, key=lambda r: (r[0], -r[1], r[2]))[:SHOWN]
        return [self._entry(r) for r in most], [self._entry(r) for r in least]

    def _entry(self, row: tuple[float, int, int]) -> dict[str, Any]:
        mean, count, token = row
        return {"id": token, "text": self._text(token), "depth": mean, "count": count}

    def _text(self, token: int) -> str:
        """The token as text; its id if the run's tokenizer is not known."""
        if self._words is None:
            self._words = _tokenizer(self._cfg.data.tokenizer) or ()
        return f"{token}" if self._words == () else self._words.decode([token])


def _tokenizer(path: str | None) -> Any:
    from megaponder.data.tokenizer import load_tokenizer
    from megaponder.errors import UserError

    if path is None:
        return None
    try:
        return load_tokenizer(path)
    except UserError:  # moved away since: ids will do
        return None
