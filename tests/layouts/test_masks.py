"""No rank disagrees about who halts: what rides is equal bit for bit on all tensor and pipeline ranks, in BF16 too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_workers
from tests.gpu import one_card
from tests.layouts.cases import CASES, WHOLE, run_config
from tests.layouts.layouts import LAYOUTS

HALTING = ["adaponderlm-llama-gqa", "adaptive-cot-llama-gqa", "ponderlm3-llama-gqa", "adaptive-cot-skip-gqa"]
SHAPES = ["one-batch1", *(["tp2-pp2"] if WHOLE else []), "tp2-sp-pp2-recompute"]


def riders(layout: str, dtype: str) -> dict[str, dict[int, np.ndarray]]:
    """In a worker: case -> pass -> riders of all micro-batches, as this rank's first layer sees them."""
    from megaponder.backbone.init import global_names
    from megaponder.engine import groups as engine_groups
    from megaponder.engine.cuda_on_cpu import install

    install()
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of
    from tests.layouts.cases import disturb
    from tests.layouts.workers import batches

    torch.set_num_threads(1)
    found: dict[str, dict[int, np.ndarray]] = {}
    for name in HALTING:
        cfg = run_config(CASES[name], LAYOUTS[layout])
        cfg.precision.dtype, cfg.precision.implementation = dtype, "local"  # type: ignore[assignment]
        cfg.train.micro_batch = 2
        groups = engine_groups.init(cfg)
        method = method_of(cfg)
        engine = build_engine(cfg, method, groups)
        disturb(global_names(engine.stage))
        seen: dict[int, list[Any]] = {}
        run = engine.stage._layers

        def watched(p: Any, flow: Any, *rest: Any, seen: Any = seen, run: Any = run, engine: Any = engine) -> Any:
            whole = engine.stage._riders_in_attention(flow.riders)
            seen.setdefault(p.index, []).append(whole.detach().float().cpu().numpy())
            return run(p, flow, *rest)

        engine.stage._layers = watched
        layout2 = LAYOUTS["tp2"]  # micro-batches of 2, one replica
        engine.forward_backward(batches(layout2, 0), 0, train=True)
        found[name] = {p: np.concatenate(parts, axis=1) for p, parts in seen.items()}
    return found


def all_riders(layout: str, dtypes: list[str]) -> dict[str, Any]:
    """In a worker: `riders` in each precision."""
    one_card.share()
    return {dtype: riders(layout, dtype) for dtype in dtypes}


@pytest.fixture(scope="module")
def seen() -> dict[str, list[dict[str, Any]]]:
    args = {"dtypes": ["fp32", "bf16"]}
    return {
        name: run_workers("tests.layouts.test_masks:all_riders", LAYOUTS[name].world, args={"layout": name} | args)
        for name in SHAPES
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", HALTING)
def test_all_ranks_have_the_same_bits(seen: Any, case: str, dtype: str) -> None:
    for layout in SHAPES[1:]:
        ranks = [rank[dtype][case] for rank in seen[layout]]
        for p, values in ranks[0].items():
            assert all(np.array_equal(values, other[p]) for other in ranks[1:]), (layout, p)


@pytest.mark.parametrize("case", HALTING)
def test_every_layout_halts_the_same_tokens(seen: Any, case: str) -> None:
    reference = seen["one-batch1"][0]["fp32"][case]
    for layout in SHAPES[1:]:
        for p, values in seen[layout][0]["fp32"][case].items():
            if CASES[case].method == "ponderlm3":
                assert np.abs(values - reference[p]).max() < 1e-4
            else:
                assert np.array_equal(values, reference[p]), (layout, p)
                assert p == 0 or 0 < values.mean() < 1 or p > 1, "nobody, or everybody, halts in the first pass"
