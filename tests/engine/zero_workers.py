"""Steps of both engines on the same weights and batches, in worker processes."""

from __future__ import annotations

import copy
from typing import Any

from tests.layouts.cases import CASES, Layout, run_config
from tests.layouts.workers import batches

Choice = tuple[int, str, str]
"""ZeRO's stage, what is kept in main memory, and what is recomputed."""
SHAPE = Layout(data=2, batch=1)
BF16 = ", bf16"
CARRIED = ("ponderlm2-llama-gqa", "adaponderlm-budget-skip")
"""Cases whose parameters have several rates."""
REJECTED = 4
"""A step whose gradients one rank spoils."""


def configured(case: str, choice: Choice | None) -> Any:
    """The run of a case; one that ends with `BF16` is in that precision."""
    cfg = run_config(CASES[case.removesuffix(BF16)], SHAPE)
    cfg.precision.dtype = "bf16" if case.endswith(BF16) else "fp32"
    if case in CARRIED:
        cfg.optimizer.tuned_width, cfg.optimizer.tuned_passes = 16, 1
    if choice is not None:
        cfg.train.engine = "deepspeed"
        cfg.parallel.zero_stage, cfg.parallel.offload, cfg.parallel.recompute = choice  # type: ignore[assignment]
    return cfg


def steps(case: str, choice: Choice | None, count: int, spoil: bool = False) -> dict[str, Any]:
    """Loss, auxiliary loss, gradient norm and passes of each step, and what the last one left.

    `spoil`: in step REJECTED one rank's gradients are NaN; no update follows, and the step is repeated.
    """
    import torch

    from megaponder.engine import groups as engine_groups
    from megaponder.ponder.settings import method_of
    from megaponder.training import engines
    from megaponder.training.optimizer import set_lr
    from megaponder.training.step import gradient_norm, update

    cfg = configured(case, choice)
    groups = engine_groups.init(cfg)
    engine, optimizer = engines.build(cfg, method_of(cfg), groups)
    rows: list[tuple[float, ...]] = []
    bad: list[float] = []

    def once(step: int) -> tuple[Any, float]:
        engine.zero_grad()
        optimizer.zero_grad()
        out = engine.forward_backward(batches(SHAPE, groups.dp_rank), step, train=True)
        set_lr(optimizer, cfg, 1e-3 * step, step)
        return out, gradient_norm(optimizer)

    def not_a_number(module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and groups.dp_rank:
            output.register_hook(lambda grad: grad * float("nan"))

    for step in range(1, count + 1):
        if spoil and step == REJECTED:
            hook = engine.stage.final_norm.register_forward_hook(not_a_number)
            bad.append(once(step)[1])
            hook.remove()
        out, norm = once(step)
        update(optimizer, norm)
        engine.settle(out, step)
        rows.append((out.loss, out.aux, norm, float(out.passes)))
    evaluated = engine.forward_backward(batches(SHAPE, groups.dp_rank), 0, train=False).loss
    held = bytes_held(engine, optimizer) if choice is not None else None
    engine.close()
    return {"rows": rows, "evaluated": evaluated, "bad": bad, "held": held}


def bytes_held(engine: Any, optimizer: Any) -> dict[str, int]:
    """Weights and optimizer state of this rank, as they lie in memory between two steps."""
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in engine.stage.parameters() if p.numel()}
    shards = [p.ds_tensor for p in engine.stage.parameters() if hasattr(p, "ds_tensor")]
    states = [t for p in optimizer._held() for t in (p, *optimizer.adam.state[p].values()) if t.dim()]
    return {
        "weights": sum(weights.values()),
        "shards": sum(t.numel() * t.element_size() for t in shards),
        "optimizer": sum(t.numel() * t.element_size() for t in states),
    }


def both(cases: dict[str, list[Choice]], count: int) -> dict[tuple[str, Choice | None], dict[str, Any]]:
    """Each case on megatron-core, and with each choice on DeepSpeed."""
    import torch

    from megaponder.engine.cuda_on_cpu import install

    torch.set_num_threads(1)
    install()
    from tests.layouts import sink  # noqa: F401  registers the test method

    found: dict[tuple[str, Choice | None], dict[str, Any]] = {}
    for case, choices in cases.items():
        found[case, None] = steps(case, None, count)
        for choice in choices:
            found[case, choice] = steps(case, choice, count, spoil=True)
    return found


def most_whole(case: str, layers: int) -> dict[str, int]:
    """Elements of sharded weights that are whole at once in a step of stage 3 that keeps none for later."""
    from megaponder.engine import groups as engine_groups
    from megaponder.engine import zero
    from megaponder.engine.cuda_on_cpu import install

    install()
    from megaponder.ponder.settings import method_of
    from megaponder.training import engines

    zero.LIVE, zero.BUCKET = 0, 1
    cfg = configured(case, (3, "none", "none"))
    cfg = copy.deepcopy(cfg)
    cfg.model.num_layers = layers
    groups = engine_groups.init(cfg)
    engine, _ = engines.build(cfg, method_of(cfg), groups)
    sharded: list[Any] = [p for p in engine.stage.parameters() if not p.ds_persist]  # type: ignore[attr-defined]
    seen: dict[str, int] = {"forward": 0, "backward": 0, "model": sum(p.ds_numel for p in sharded)}
    offload = engine.engine.optimizer.parameter_offload  # type: ignore[attr-defined]

    def watched(name: str, fetch: Any) -> Any:
        def fetched(module: Any) -> None:
            fetch(module)
            whole = sum(p.ds_numel for p in sharded if p.data.numel())
            seen[name] = max(seen[name], whole)

        return fetched

    offload.pre_sub_module_forward_function = watched("forward", offload.pre_sub_module_forward_function)
    offload.pre_sub_module_backward_function = watched("backward", offload.pre_sub_module_backward_function)
    for step in (1, 2):
        engine.forward_backward(batches(SHAPE, groups.dp_rank), step, train=True)
    engine.close()
    return seen
