"""Blends: `path path ...` or `weight path weight path ...`, as Megatron-family tools write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megaponder.config.schema import DataConfig
from megaponder.errors import ConfigError

LEAST_SHARE = 1e-9
MAX_SOURCES = 32766  # megatron-core numbers the sources of a blend in int16


@dataclass(frozen=True)
class Source:
    """One dataset of a blend."""

    path: str
    """Prefix: path without .bin/.idx."""
    weight: float | None
    """Share of the sequences, not normalised; None: proportional to the dataset's tokens."""


def _number(item: str | float) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None


def prefix_of(path: str) -> str:
    """The path of a dataset without .bin/.idx."""
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def parse_blend(items: Sequence[str | float], field: str) -> list[Source]:
    """Sources of a blend given as a flat list, excluding those of weight 0 (`unread`).

    Either no item is a number (plain paths) or every second one is, beginning with the first (weights).
    Raises ConfigError, naming `field`, for any other list.
    """
    numbers = [_number(item) for item in items]
    if not any(number is not None for number in numbers):
        sources = [Source(prefix_of(str(item)), None) for item in items]
    else:
        weighted = len(items) % 2 == 0 and all((number is not None) == (i % 2 == 0) for i, number in enumerate(numbers))
        if not weighted:
            number = next(item for item, n in zip(items, numbers, strict=True) if n is not None)
            where = next((i for i, n in enumerate(numbers) if (n is not None) != (i % 2 == 0)), len(items) - 1)
            raise ConfigError(
                field,
                items[where],
                f"a blend is either paths only or alternating weights and paths (item {where + 1} breaks this)",
                f"write `weight path weight path ...`; put a folder before a path that looks like a number: ./{number}",
            )
        sources = []
        weights = [number for number in numbers if number is not None]
        for weight, path in zip(weights, items[1::2], strict=True):
            if not (math.isfinite(weight) and weight >= 0):
                rule = f"the weight of {path} must be a finite number of at least 0"
                raise ConfigError(field, weight, rule, "use 0 to leave the source unread")
            if weight > 0:
                sources.append(Source(prefix_of(str(path)), weight))
        weights = [weight for weight in weights if weight > 0]
        if not weights:
            raise ConfigError(
                field, 0.0, "all its weights are 0, so nothing would be read", "give a source a positive weight"
            )
        total, least = sum(weights), min(weights)
        if not math.isfinite(total) or least < LEAST_SHARE * total:
            path = sources[weights.index(least)].path
            rule = f"the weight of {path} is less than a billionth of all, so it would never be read"
            raise ConfigError(field, least, rule, "remove the source, or use weights of similar size")
    if len(sources) > MAX_SOURCES:
        raise ConfigError(field, len(sources), f"a blend has at most {MAX_SOURCES} sources", "merge some of them")
    return sources


def valid_sources(data: DataConfig) -> dict[str, list[Source]]:
    """`parse_blend` of each of the blends for validation, by name."""
    return {name: parse_blend(items, data.valid_field(name)) for name, items in data.valid_blends().items()}


def unread(items: Sequence[str | float]) -> list[str]:
    """Paths of a blend's sources of weight 0, which are never opened."""
    return [prefix_of(str(path)) for weight, path in zip(items[::2], items[1::2], strict=False) if _number(weight) == 0]


def parse_split(split: str) -> tuple[float, float, float]:
    """Parts of training, validation and test, summing to 1, of a string such as "969,30,1".

    Raises ConfigError for anything except one to three numbers >= 0 whose first is above 0.
    """
    parts = [_number(part) for part in split.split(",")]
    if not 1 <= len(parts) <= 3 or not all(p is not None and math.isfinite(p) and p >= 0 for p in parts):
        raise ConfigError(
            "data.split", split, "must be one to three numbers >= 0, separated by commas", 'try "969,30,1"'
        )
    values = [part or 0.0 for part in parts] + [0.0] * (3 - len(parts))
    if values[0] == 0:
        raise ConfigError("data.split", split, "the training part must be above 0", 'try "969,30,1"')
    total = sum(values)
    return values[0] / total, values[1] / total, values[2] / total


def split_ranges(split: str, elements: int) -> list[tuple[int, int]]:
    """[begin, end) of each part among `elements` sequences; the rounding is megatron-core's."""
    edge, ranges = 0.0, []
    for part in parse_split(split):
        ranges.append((round(edge * elements), round((edge + part) * elements)))
        edge += part
    return ranges
