"""Runs cases in a layout and brings loss and whole gradients home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu import one_card
from tests.layouts.cases import CASES, LENGTH, SEQUENCES, VOCAB, WHOLE, Layout, cases_of, disturb, run_config
from tests.layouts.layouts import LAYOUTS

EOD = 3
HALFWAY = Path(__file__).parents[1] / "ponder" / "halfway"
"""The worked example of CONTRIBUTING.md, which is loaded as a user's plugin is."""


def batches(layout: Layout, dp_rank: int) -> list[Any]:
    """This rank's micro-batches of one fixed global batch with ragged masks."""
    import torch

    from megaponder.data.batch import MicroBatch, document_edges, document_starts

    draw = torch.Generator().manual_seed(7)
    text = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=draw)
    lengths = torch.randint(1, LENGTH + 1, (SEQUENCES, 1), generator=draw)
    mask = (torch.arange(LENGTH)[None] < lengths).float()
    starts = None
    if layout.documents:
        text[torch.rand(text.shape, generator=draw) < 0.2] = EOD
        starts = torch.from_numpy(document_starts(text[:, :-1].numpy(), EOD))

    def made(c: slice) -> MicroBatch:
        rest = () if starts is None else (starts[c], torch.from_numpy(document_edges(starts[c].numpy())))
        return MicroBatch(text[c, :-1], text[c, 1:], mask[c], *rest, disciplines_b=disciplines[c])

    disciplines = torch.tensor([1, -1, 0, 1])

    cut = [slice(i, i + layout.batch) for i in range(0, SEQUENCES, layout.batch)]
    return [made(c) for j, c in enumerate(cut) if j % layout.data == dp_rank]


def _whole_gradients(engine: Any) -> None:
    """Under the distributed optimizer a rank's buffer holds its shard only: gather the others' in place."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = [(engine.ddp.buffers, engine.groups.dp_cp)]
    groups.append((engine.ddp.expert_parallel_buffers, parallel_state.get_expert_data_parallel_group()))
    for bucket, group in ((b, g) for buffers, g in groups for buffer in buffers for b in buffer.buckets):
        if group.size() > 1:
            shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            parts = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(parts, shard, group=group)
            bucket.grad_data.copy_(torch.cat(parts))


def run_layout(layout: str, cases: list[str]) -> dict[str, Any]:
    """Loss, auxiliary loss, statistics and this rank's gradients (numpy, global names) of each case."""
    import torch
    from megatron.core import parallel_state

    from megaponder.backbone.init import global_names
    from megaponder.engine import groups as engine_groups
    from megaponder.engine.cuda_on_cpu import install

    torch.set_num_threads(1)
    install()
    from megaponder.engine.build import build_engine
    from megaponder.ponder.plugins import load_plugin
    from megaponder.ponder.settings import method_of
    from tests.layouts import sink  # noqa: F401  registers the test method

    load_plugin(HALFWAY)

    shape, results = LAYOUTS[layout], {}
    for name in cases:
        cfg = run_config(CASES[name], shape)
        groups = engine_groups.init(cfg)
        engine = build_engine(cfg, method_of(cfg), groups)
        disturb(global_names(engine.stage))
        steps = list(range(CASES[name].steps))
        if torch.cuda.is_available():  # once more: passes are captured in the second step that has them
            steps.append(steps[-1])
        for step in steps:
            engine.zero_grad()
            out = engine.forward_backward(batches(shape, groups.dp_rank), step, train=True)
            engine.settle(out, step)
        evaluated, eval_stats, by_token = None, None, None
        if shape.evaluate or WHOLE:
            seen = engine.forward_backward(batches(shape, groups.dp_rank), 0, train=False)
            evaluated, eval_stats = seen.loss, seen.stats
            by_token = None if seen.by_token is None else seen.by_token.numpy()
        if shape.distributed_optimizer:
            _whole_gradients(engine)
        grads, settled = {}, None
        for key, parameter in global_names(engine.stage):
            if not parameter.requires_grad:
                settled = parameter.tolist()
                continue
            own = (key, "copy") if getattr(parameter, "shared", False) else (key, "own")
            dim = int(parameter.partition_dim) if getattr(parameter, "tensor_model_parallel", False) else None
            grads[own] = (parameter.main_grad.float().cpu().numpy().copy(), dim)
        at = parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
        place = (groups.dp_rank * groups.cp_size + groups.cp_rank, groups.pp_rank, groups.tp_rank)
        results[name] = {
            "place": place,
            "place_of_experts": at,
            "loss": out.loss,
            "aux": out.aux,
            "z": out.z_loss,
            "selected": out.selected,
            "stats": out.stats | out.balance,
            "eval": evaluated,
            "eval_stats": eval_stats,
            "by_token": by_token,
            "grads": grads,
            "settled": settled,
        }
    return results


def run_layouts(layouts: list[str]) -> dict[str, Any]:
    """Several layouts of one world size in one launch, since imports dominate."""
    one_card.share()
    return {layout: run_layout(layout, cases_of(LAYOUTS[layout])) for layout in layouts}


def assemble(parts: list[dict[str, Any]], gated: bool, replica: int = 0) -> dict[tuple[str, str], np.ndarray]:
    """Whole gradients from ranks that together hold the weights once, or more often: then of one replica.

    Experts have replicas of their own, fewer where ranks share them.
    """
    shards: dict[tuple[str, str], dict[int, tuple[np.ndarray, int | None]]] = {}
    for part in parts:
        for key, value in part["grads"].items():
            number, *_, shard = part["place_of_experts" if ".experts." in key[0] else "place"]
            if number == replica:
                shards.setdefault(key, {})[shard] = value
    whole = {}
    for key, by_rank in shards.items():
        arrays, dim = [by_rank[r][0] for r in sorted(by_rank)], by_rank[0][1]
        if dim is None or len(arrays) == 1:
            whole[key] = arrays[0]
        elif gated and "linear_fc1" in key[0]:  # gate and up are sharded separately
            halves = [np.split(a, 2) for a in arrays]
            whole[key] = np.concatenate([h[0] for h in halves] + [h[1] for h in halves])
        else:
            whole[key] = np.concatenate(arrays, axis=dim)
    return whole
