"""Which layers keep only their input for the backward pass and are run again there."""

from __future__ import annotations

from megaponder.config.schema import RunConfig


def recomputed_layers(cfg: RunConfig, pass_index: int, layers: int) -> int:
    """How many of a stage's first layers, of `layers` in all, are recomputed in this pass."""
    par = cfg.parallel
    if par.recompute == "none" or (par.recompute_passes is not None and pass_index >= par.recompute_passes):
        return 0
    return layers if par.recompute_layers is None else min(layers, par.recompute_layers)


def offloaded(cfg: RunConfig, pass_index: int) -> bool:
    """Whether what recomputed layers keep of this pass lies in main memory."""
    return pass_index < cfg.parallel.offload_passes
