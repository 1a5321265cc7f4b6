"""One step with and without activations in main memory, in a worker process."""

from __future__ import annotations

from typing import Any

from tests.layouts.cases import CASES, Layout, run_config
from tests.layouts.workers import batches

SHAPE = Layout(batch=4)


def step(case: str, passes: int) -> dict[str, Any]:
    """Loss and gradients, and shapes of what moved, of a step whose first `passes` keep nothing on the device."""
    import torch

    from megaponder.engine import groups as engine_groups
    from megaponder.ponder.settings import method_of
    from megaponder.training import engines

    moved: list[tuple[int, ...]] = []
    back: list[tuple[int, ...]] = []

    class Watched(torch.autograd.graph.saved_tensors_hooks):
        """PyTorch's own, which on a CPU would move nothing: what comes back are copies."""

        def __init__(self, pin_memory: bool):
            def pack(x: torch.Tensor) -> torch.Tensor:
                moved.append(tuple(x.shape))
                return x.clone()

            def unpack(x: torch.Tensor) -> torch.Tensor:
                back.append(tuple(x.shape))
                return x

            super().__init__(pack, unpack)

    original, torch.autograd.graph.save_on_cpu = torch.autograd.graph.save_on_cpu, Watched  # type: ignore[misc,assignment]
    try:
        cfg = run_config(CASES[case], SHAPE)
        cfg.parallel.recompute, cfg.parallel.offload_passes = "layer", passes
        groups = engine_groups.init(cfg)
        engine, _ = engines.build(cfg, method_of(cfg), groups)
        engine.zero_grad()
        loss = engine.forward_backward(batches(SHAPE, 0), 1, train=True).loss
        named: Any = engine.stage.named_parameters()
        gradients = {name: p.main_grad.clone().numpy() for name, p in named}
        engine.close()
    finally:
        torch.autograd.graph.save_on_cpu = original  # type: ignore[misc]
    return {"loss": loss, "gradients": gradients, "moved": moved, "back": back}


def steps(choices: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """`step` of each case and number of passes."""
    import torch

    from megaponder.engine.cuda_on_cpu import install

    torch.set_num_threads(1)
    install()
    return [step(*choice) for choice in choices]
