"""Changing token t' > t changes neither the logits nor the depth of token t."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaponder.engine import cuda_on_cpu
from tests.layouts.cases import CASES, VOCAB, disturb, run_config
from tests.layouts.layouts import LAYOUTS

cuda_on_cpu.install()

from megaponder.data.batch import MicroBatch  # noqa: E402
from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402

HALTING = [name for name, case in CASES.items() if case.method.startswith(("ada", "ponderlm3", "confident", "pruned"))]
LATENT = ["ponderlm2-llama-gqa"]


def _forward(engine: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = engine.readout(MicroBatch(ids, ids.roll(-1, 1), torch.ones(ids.shape)))
    with torch.no_grad():
        return engine.stage.local_logits(out.hidden)[..., :VOCAB], out.depth


@pytest.mark.parametrize("name", [n for n in [*HALTING, *LATENT] if "deep" not in n])
def test_the_future_changes_nothing(name: str) -> None:
    case = CASES[name]
    depths: set[float] = set()

    @settings(max_examples=4)
    @given(st.integers(0, 2**20), st.integers(1, 40), st.floats(0.05, 0.8), st.floats(0, 1))
    @example(1, 40, 0.5, 0.5)  # tokens of several depths
    @example(1, 40, 0.1, 0.5)
    def check(seed: int, length: int, threshold: float, place: float) -> None:
        cfg = run_config(case, LAYOUTS["one-batch1"])
        cfg.train.seed, cfg.data.sequence_length, cfg.model.max_positions = seed, length, 40
        if "threshold" in cfg.ponder.options:
            cfg.ponder.options["threshold"] = threshold
        engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
        disturb(engine.stage.named_parameters())
        if name == "confident-budget-skip":  # its threshold follows the budget in training; at first all tokens go on
            engine.stage.method_modules["budget"].state[0] = 1 - threshold / 8
        ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))
        cut = round(place * (length - 1))
        other = ids.clone()
        other[:, cut + 1 :] = (other[:, cut + 1 :] + 1) % VOCAB
        (logits, depth), (logits2, depth2) = _forward(engine, ids), _forward(engine, other)
        assert (logits[: cut + 1] - logits2[: cut + 1]).abs().max() < 1e-4 * logits.abs().max()
        if depth is not None:
            assert torch.equal(depth[: cut + 1], depth2[: cut + 1])
            depths.update(depth.flatten().tolist())

    check()
    assert len(depths) != 1, "all tokens had one depth: nothing was shown"
