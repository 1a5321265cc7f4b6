"""A gentle start: with the weights of a vanilla model a pondering one has its loss, and its gate has a gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaponder.engine import cuda_on_cpu
from megaponder.errors import ConfigError
from megaponder.export.load import load_folder
from megaponder.export.to_hf import export
from megaponder.ponder.base import Shape
from megaponder.ponder.registry import build_method
from tests.export import checkpoints
from tests.layouts.cases import LENGTH, VOCAB, Case, disturb, run_config
from tests.layouts.layouts import LAYOUTS
from tests.tolerance import PARITY

cuda_on_cpu.install()

from megaponder.data.batch import MicroBatch  # noqa: E402
from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402

GATE = "method_modules.feedback_gate.weight"
CASES = {
    "ponderlm": {"steps": 2},
    "ponderlm-newest": {"steps": 2, "accumulate": False},
    "adaponderlm": {"steps": 2, "target": 0.0, "bottom_share": 0.0},
    "adaponderlm-halting": {"steps": 2, "target": 0.0, "threshold": 0.5, "bottom_share": 0.0},
    "adaponderlm-budget": {"steps": 2, "target": 0.6},
}


def engine(method: str, options: dict[str, Any]) -> Any:
    cfg = run_config(Case("llama", method, options), LAYOUTS["one-batch1"])
    built = build_engine(cfg, method_of(cfg), groups.init(cfg))
    disturb((n, p) for n, p in built.stage.named_parameters() if n != GATE)
    return built


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_vanilla_models(name: str) -> None:
    text = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    batch = MicroBatch(text[:, :-1], text[:, 1:], torch.ones(2, LENGTH))
    vanilla, pondering = engine("vanilla", {}), engine(name.partition("-")[0], CASES[name] | {"gentle_start": True})
    weights = dict(pondering.stage.named_parameters())
    with torch.no_grad():
        for key, weight in vanilla.stage.named_parameters():
            weights[key].copy_(weight)
    want = vanilla.logits(batch.ids_bn)
    torch.testing.assert_close(pondering.logits(batch.ids_bn), want, rtol=0, atol=PARITY * float(want.abs().max()))
    loss = vanilla.forward_backward([batch], 0, train=False).loss
    pondering.zero_grad()
    out = pondering.forward_backward([batch], 0, train=True)
    assert out.loss == pytest.approx(loss, rel=1e-5)
    assert float(weights[GATE].main_grad.abs()) > 1e-4, "the gate would stay closed"
    groups.shutdown()


def test_a_multiplied_embedding_is_not_the_vanilla_models() -> None:
    with pytest.raises(ConfigError, match=r"multiply_by_steps = True: with gentle_start .* use false"):
        build_method("ponderlm", {"gentle_start": True, "multiply_by_steps": True}, Shape("llama", 2, 8))


@pytest.mark.parametrize("method", ["ponderlm", "adaponderlm"])
def test_exports_carry_the_gate(tmp_path: Path, method: str) -> None:
    options = {"steps": 2, "gentle_start": True} | ({"target": 0.0} if method == "adaponderlm" else {})
    net = checkpoints.make("llama", method, tmp_path / "run", method_options=options)
    assert export(tmp_path / "run", tmp_path / "hf").max_difference < PARITY  # with and without cache
    loaded = load_folder(tmp_path / "hf")
    gate = float(loaded.method["feedback_gate"].weight)
    assert gate == float(net.method["feedback_gate"].weight) != 0
    ids = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = loaded(ids).logits
        loaded.method["feedback_gate"].weight.zero_()
        assert (loaded(ids).logits - before).abs().max() > 1e-3 * before.abs().max(), "the gate has no effect"
