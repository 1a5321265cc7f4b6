"""The console line."""

from __future__ import annotations

from megaponder.monitor.registry import METRICS, amount
from megaponder.monitor.row import Row


def line(row: Row, total_steps: int) -> str:
    """One line for a row of training metrics; unknown values are omitted."""
    parts = [f"step {row.step:>{len(str(total_steps))}}/{total_steps}", f"tokens {amount(row.tokens)}"]
    for metric in METRICS:
        values = row.stats if metric.ponder else row.values
        if metric.console is not None and metric.name in values:
            parts.append(metric.console(values[metric.name]))
    if "step_seconds" in row.values:
        parts.append(f"ETA {duration((total_steps - row.step) * row.values['step_seconds'])}")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """3725 -> 1h02m."""
    seconds = round(seconds)
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds % 60:02}s"
