"""FP8 linear layers by Transformer Engine: which layers, which recipe, and when weights and scales are renewed.

A pondering step uses every weight K times per micro-batch.  Three rules make all those uses see the same numbers:

* weights are quantised once, at the start of an optimizer step (`Fp8.begin_step`); no pass does it again;
* with delayed scaling the scales stay as they are within a step.  All passes and micro-batches add to one entry of the
  amax history (its maximum), and `Fp8.end_step` makes the next scales of it;
* attention, gates, mixtures, norms, embedding and head stay in BF16, and the first and last layers by option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megaponder.config.schema import RunConfig


def recipe_of(name: str) -> Any:
    """Transformer Engine's recipe: E4M3 forward, E5M2 for gradients (delayed, current); E4M3 only (blockwise)."""
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=16, amax_compute_algo="max")
    return {"current": recipe.Float8CurrentScaling, "blockwise": recipe.Float8BlockScaling}[name]()


AMAX = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "grad": ("scaling_bwd", 0)}
"""Tensor of a linear layer -> its place in Transformer Engine's amax history."""


def _amax_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_amax_reduction_group(with_context_parallel=True)


class Fp8:
    """The FP8 state of one pipeline stage's layers."""

    def __init__(self, cfg: RunConfig, layers: Sequence[nn.Module]):
        self._recipe, self._delayed = recipe_of(cfg.precision.fp8), cfg.precision.fp8 == "delayed"
        self._enabled = True
        self._in_fp8 = _chosen(cfg, layers)
        self._modules = [
            m
            for layer in self._in_fp8
            for m in layer.modules()
            if hasattr(m, "_fp8_workspaces") and hasattr(m, "weight")
        ]
        self._layers = list(layers)

    def layer(self, index: int) -> Callable[[], AbstractContextManager[Any]]:
        """What layer `index` of this stage runs in."""
        return self._on if self._enabled and self._layers[index] in self._in_fp8 else nullcontext

    @contextmanager
    def off(self) -> Iterator[None]:
        """All layers in BF16 inside."""
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    @property
    def lacks_history(self) -> bool:
        """Delayed scaling has seen no numbers yet: neither in this process nor in a checkpoint."""
        if not self._delayed:
            return False
        metas = [m.fp8_meta.get("scaling_fwd") for m in self._modules]  # type: ignore[operator, union-attr]
        return not any(meta is not None and bool(meta.amax_history.any()) for meta in metas)

    @contextmanager
    def _on(self) -> Iterator[None]:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        # _graph: leaving the context changes no scale; not the first module: nor does its backward
        with te.autocast(enabled=True, recipe=self._recipe, amax_reduction_group=_amax_group(), _graph=True):
            State.IS_FIRST_FP8_MODULE = False
            yield

    @torch.no_grad()
    def begin_step(self) -> None:
        """Quantise the weights that have been used in FP8 before; others are quantised at their first use."""
        for module in self._modules:
            stored = module._fp8_workspaces.get("weight")  # type: ignore[union-attr, operator]
            if stored is not None:
                stored._quantizer.set_usage(rowwise=True, columnwise=True)
                stored.quantize_(module.weight)

    def end_step(self) -> None:
        """Delayed scaling: the scales of the next step from the amax history, the same on all ranks."""
        if not self._delayed:
            return
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        for module in self._modules:
            if module.fp8_initialized:
                State.add_fp8_tensors_to_global_buffer(module.fp8_meta)
        State.reduce_and_update_fp8_tensors(forward=True)
        State.reduce_and_update_fp8_tensors(forward=False)

    def amax(self) -> dict[str, float]:
        """Largest absolute values of the last step by kind of tensor, of this stage's layers on all of its ranks.

        Empty without delayed scaling, which alone keeps them, and before the first step.
        """
        if not self._delayed:
            return {}
        metas: list[Any] = [m.fp8_meta for m in self._modules if m.fp8_initialized]
        if not metas:
            return {}
        # the newest entry: `end_step` has turned the history and cleared its first
        most = [torch.stack([m[key].amax_history[-1, column] for m in metas]).amax() for key, column in AMAX.values()]
        return dict(zip(AMAX, torch.stack(most).tolist(), strict=True))


def _chosen(cfg: RunConfig, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers that run in FP8: all of the model but the first and last `fp8_bf16_layers`."""
    edge, total = cfg.precision.fp8_bf16_layers, cfg.model.num_layers
    assert total is not None
    return [layer for layer in layers if edge < layer.layer_number <= total - edge]  # type: ignore[operator]
