"""FP8 linear layers by Transformer Engine: which layers, which recipe, and when weights and scales are updated.

A pondering step uses every weight K times per micro-batch.  Three rules make all those uses see the same numbers:

* weights are quantised once, at the start of an optimizer step (`Fp8.begin_step`), and not again in any pass;
* with delayed scaling the scales are constant within a step.  All passes and micro-batches contribute to one entry of
  the amax history (its maximum), and `Fp8.end_step` computes the next scales from it;
* attention, gates, mixtures, norms, embedding and head stay in BF16; the first and last layers optionally too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.config.schema import RunConfig


def recipe_of(name: str) -> Any:
    """Transformer Engine's recipe: E4M3 forward, E5M2 for gradients (delayed, current); E4M3 only (blockwise, mxfp8);
    E2M1 (nvfp4, with its defaults: Hadamard transforms, stochastic rounding of gradients, 16 x 16 blocks of weights).
    """
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=16, amax_compute_algo="max")
    names = {
        "current": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    return getattr(recipe, names[name])()


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
        self._modules: dict[str, Any] = {
            f"layers.{int(layer.layer_number) - 1}.{name}": m  # type: ignore[arg-type]
            for layer in self._in_fp8
            for name, m in layer.named_modules()
            if hasattr(m, "_fp8_workspaces") and hasattr(m, "weight")
        }
        self._layers = list(layers)

    def layer(self, index: int) -> Callable[[], AbstractContextManager[Any]]:
        """The context in which layer `index` of this stage runs."""
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
        """Delayed scaling has no history yet: neither from this process nor from a checkpoint."""
        if not self._delayed or not self._modules:
            return False
        return not any(bool(value.any()) for name, value in self.scales().items() if name.endswith(".amax_history"))

    def allocate(self) -> None:
        """Delayed scaling: create `scales` before the first step does, so that a checkpoint's can be loaded into
        them."""
        for module in self._modules.values() if self._delayed else ():
            module.fp8_meta["num_gemms"] = 1
            module.init_fp8_meta_tensors(self._recipe)

    def scales(self) -> dict[str, Tensor]:
        """The state of delayed scaling in place: scale [n] and amax_history [16, n] of each layer's n tensors.

        Names do not depend on the layout; values are equal on all ranks of a stage.  Empty before the first step and
        with other recipes, which have no state.
        """
        return {
            f"{name}.{kind}.{part}": getattr(module.fp8_meta[kind], part)
            for name, module in self._modules.items()
            for kind in ("scaling_fwd", "scaling_bwd")
            for part in ("scale", "amax_history")
            if self._delayed and kind in module.fp8_meta
        }

    @torch.no_grad()
    def load_scales(self, values: Mapping[str, Tensor]) -> None:
        """Set the tensors of `scales` in place: captured passes read them there."""
        own = self.scales()
        for name, value in values.items():
            own[name].copy_(value)

    @contextmanager
    def _on(self) -> Iterator[None]:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        # _graph: leaving the context does not change scales; not the first module: nor does its backward
        with te.autocast(enabled=True, recipe=self._recipe, amax_reduction_group=_amax_group(), _graph=True):
            State.IS_FIRST_FP8_MODULE = False
            yield

    @torch.no_grad()
    def begin_step(self) -> None:
        """Quantise the weights that have been used in FP8 before; others are quantised on first use."""
        for module in self._modules.values():
            stored = module._fp8_workspaces.get("weight")
            if stored is not None:
                stored._quantizer.set_usage(rowwise=True, columnwise=True)
                stored.quantize_(module.weight)

    def end_step(self) -> None:
        """Delayed scaling: the scales of the next step from the amax history, the same on all ranks."""
        if not self._delayed:
            return
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        for module in self._modules.values():
            if module.fp8_initialized:
                State.add_fp8_tensors_to_global_buffer(module.fp8_meta)
        State.reduce_and_update_fp8_tensors(forward=True)
        State.reduce_and_update_fp8_tensors(forward=False)

    def amax(self) -> dict[str, float]:
        """Largest absolute values of the last step by kind of tensor, of this stage's layers on all of its ranks.

        Empty before the first step and without delayed scaling, the only recipe that records them.
        """
        if not self._delayed:
            return {}
        metas: list[Any] = [m.fp8_meta for m in self._modules.values() if m.fp8_initialized]
        if not metas:
            return {}
        # the newest entry: `end_step` has rotated the history and cleared its first
        most = [torch.stack([m[key].amax_history[-1, column] for m in metas]).amax() for key, column in AMAX.values()]
        return dict(zip(AMAX, torch.stack(most).tolist(), strict=True))


def _chosen(cfg: RunConfig, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers that run in FP8: all of the model except the first and last `fp8_bf16_layers`."""
    edge, total = cfg.precision.fp8_bf16_layers, cfg.model.num_layers
    assert total is not None
    return [layer for layer in layers if edge < layer.layer_number <= total - edge]  # type: ignore[operator]
