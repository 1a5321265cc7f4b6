"""Statistics of halting: sums over valid tokens, reduced with the losses, and the metrics derived from them.

Sums are in the ranks' own tokens, so they add up over micro-batches, data-parallel and sequence-parallel ranks alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megaponder.decoding.window import Window

BINS = 10
"""Bins of the gates' histograms, between 0 and 1."""
COLLAPSED = 0.98
"""Share of tokens at one depth above which the gates count as collapsed."""


_AT, _OF_DEPTH = re.compile(r"at\d+"), re.compile(r"(at|nll)\d+")
MOMENTS = ("depth", "depth_sq", "nll_sq", "depth_nll")


def names(deepest: int) -> list[str]:
    """Sums that a method with halting adds: depth moments, tokens of each depth and their losses, gate histograms."""
    at = [f"{what}{k}" for what in ("at", "nll") for k in range(1, deepest + 1)]
    return [*MOMENTS, *at, *(f"gate{i}/{b}" for i in range(deepest - 1) for b in range(BINS))]


@torch.no_grad()
def sums(
    depth_sb: Tensor, nll_sb: Tensor, valid_sb: Tensor, gates: Sequence[tuple[Tensor, Tensor]], deepest: int
) -> dict[str, Tensor]:
    """The sums of one micro-batch over this rank's tokens; all inputs [tokens of this rank, b]."""
    depth, nll, valid = depth_sb.float(), nll_sb.float(), valid_sb.float()
    out = {
        "depth": (depth * valid).sum(),
        "depth_sq": (depth.square() * valid).sum(),
        "nll_sq": (nll.square() * valid).sum(),
        "depth_nll": (depth * nll * valid).sum(),
    }
    for k in range(1, deepest + 1):
        here = (depth == k) * valid
        out |= {f"at{k}": here.sum(), f"nll{k}": (nll * here).sum()}
    for i, (values, asked) in enumerate(gates):
        weight = asked * valid
        index = (values * BINS).long().clamp(0, BINS - 1)
        histogram = torch.zeros(BINS, device=depth.device).index_add_(0, index.flatten(), weight.float().flatten())
        out |= {f"gate{i}/{b}": histogram[b] for b in range(BINS)}
    return out


@torch.no_grad()
def by_token(depth_sb: Tensor, ids_sb: Tensor, valid_sb: Tensor, vocab_size: int) -> Tensor:
    """Per vocabulary entry, the sum of depths and the number of its valid tokens: FP32 [2, V]."""
    out = torch.zeros(2, vocab_size, device=depth_sb.device)
    valid = valid_sb.float().flatten()
    out[0].index_add_(0, ids_sb.flatten(), depth_sb.float().flatten() * valid)
    out[1].index_add_(0, ids_sb.flatten(), valid)
    return out


def metrics(means: Mapping[str, float], loss: float) -> dict[str, float]:
    """From means over tokens to metrics.

    mean_depth; loss_depth{k}, the loss of the tokens of depth k; active_pass{k}, the share of tokens that run pass k;
    kv_reuse, the share of later token-passes that reuse keys and values; depth_nll_correlation; collapsed, 1.0 where
    nearly all tokens have one depth; gate{k}_bin{j}, the share of gate values between j/10 and (j+1)/10;
    gate{k}_saturation, the share in the first and the last bin; and the method's own statistics, with the root of the
    means whose name has `_rmse`.
    """
    out = {k: v for k, v in means.items() if k not in MOMENTS and not _OF_DEPTH.fullmatch(k) and "/" not in k}
    out |= {k: math.sqrt(max(0.0, v)) for k, v in out.items() if "_rmse" in k}
    at = [means[name] for name in sorted(filter(_AT.fullmatch, means), key=lambda k: int(k[2:]))]
    if not at:
        return out
    depth = means["depth"]
    var_depth, var_nll = means["depth_sq"] - depth**2, means["nll_sq"] - loss**2
    varies = (
        var_depth > 1e-5 * means["depth_sq"]
    )  # one token in 10,000 differing by a pass; less is rounding of FP32 sums
    spread = math.sqrt(max(var_depth, 0.0) * max(var_nll, 0.0))
    active = [min(1.0, sum(at[k:])) for k in range(len(at))]  # the shares at each depth were rounded one by one
    out |= {
        "mean_depth": depth,
        "depth_nll_correlation": (means["depth_nll"] - depth * loss) / spread if varies and spread > 1e-9 else 0.0,
        "collapsed": float(max(at) >= COLLAPSED),
        "kv_reuse": 1.0 - sum(active[1:]) / max(1, len(active) - 1),
    }
    out |= {f"active_pass{k}": share for k, share in enumerate(active)}
    out |= {f"loss_depth{k}": means[f"nll{k}"] / share for k, share in enumerate(at, 1) if share and f"nll{k}" in means}
    gate = 0
    while f"gate{gate}/0" in means:
        counts = [means[f"gate{gate}/{b}"] for b in range(BINS)]
        if total := sum(counts):
            out |= {f"gate{gate}_bin{b}": c / total for b, c in enumerate(counts)}
            out[f"gate{gate}_saturation"] = (counts[0] + counts[-1]) / total
        gate += 1
    return out


def active_shares(metrics: Mapping[str, float]) -> list[float]:
    """Share of tokens that run each pass, from `metrics`; empty for methods without halting."""
    shares: list[float] = []
    while (name := f"active_pass{len(shares)}") in metrics:
        shares.append(metrics[name])
    return shares


def shares_that_go_on(metrics: Mapping[str, float], window: Window | None) -> list[float]:
    """Of the tokens that are asked at each open decision (without a window: at each), the share that went on, from
    `metrics`."""
    active = active_shares(metrics)
    least, most = (1, len(active)) if window is None else (window.least, window.most)
    return [active[k] / max(active[k - 1], 1e-9) for k in range(least, most)]


def collapse_warning(metrics: Mapping[str, float]) -> str | None:
    """A sentence if nearly all tokens run the same number of passes."""
    shares = active_shares(metrics)
    if not metrics.get("collapsed"):
        return None
    what = "never halt" if shares[-1] >= COLLAPSED else "halt at the same pass"
    return (
        f"The gates are collapsed: at least {COLLAPSED:.0%} of the tokens {what} (mean depth "
        f"{metrics['mean_depth']:.2f} of {len(shares)}), so this step is not adaptive."
    )
