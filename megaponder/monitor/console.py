"""The line a person reads."""

from __future__ import annotations

from megaponder.monitor.row import Row


def line(row: Row, total_steps: int) -> str:
    """One line for a row of training metrics; what is not known is left out."""
    v = row.values
    parts = [f"step {row.step:>{len(str(total_steps))}}/{total_steps}", f"tokens {amount(row.tokens)}"]
    if "loss" in v:
        parts.append(f"loss {v['loss']:.4f}")
    if v.get("auxiliary_loss"):
        parts.append(f"aux {v['auxiliary_loss']:.4f}")
    if "mean_depth" in row.stats:
        parts.append(f"depth {row.stats['mean_depth']:.2f}")
    if "grad_norm" in v:
        parts.append(f"grad norm {v['grad_norm']:.3f}")
    if "learning_rate" in v:
        parts.append(f"lr {v['learning_rate']:.2e}")
    if "tokens_per_second" in v:
        parts.append(f"tokens/s {amount(v['tokens_per_second'])}")
        parts.append(f"TFLOP/s/device {v['tflops_per_device']:.4g}")
        if "mfu" in v:
            parts.append(f"MFU {100 * v['mfu']:.1f} % HFU {100 * v['hfu']:.1f} %")
        parts.append(f"ETA {duration((total_steps - row.step) * v['step_seconds'])}")
    if "validation_loss" in v:
        parts.append(f"validation loss {v['validation_loss']:.4f}")
    return " | ".join(parts)


def amount(value: float) -> str:
    """1234567 -> 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.2f}"


def duration(seconds: float) -> str:
    """3725 -> 1h02m."""
    seconds = round(seconds)
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds % 60:02}s"
