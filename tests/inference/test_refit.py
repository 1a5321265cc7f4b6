"""Exports whose threshold is set anew: on other text of the kind, and token by token, the budget is met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaponder.cli.main import main
from megaponder.export.load import load_folder
from megaponder.inference.heldout import read_model, score_all
from tests.data_pipeline.make import write_documents
from tests.export import checkpoints, models
from tests.layouts.cases import WHOLE

BUDGETS: list[tuple[str, dict[str, Any]]] = [
    ("adaponderlm", {"steps": 2, "target": 0.5, "gate_width": 2}),
]
if WHOLE:
    BUDGETS += [
        ("confident_ponderlm", {"steps": 3, "target": 0.7}),
        ("adaponderlm", {"steps": 3, "target": 0.75, "gate_width": 2}),
        ("adaptive_cot", {"steps": 3, "target": 0.85}),
        ("ponderlm3", {"latents": 2, "jacobi": 4, "target": 0.5}),
    ]


def text(prefix: Path, seed: int, documents: int = 24) -> str:
    draw = np.random.default_rng(seed)
    return write_documents(prefix, [draw.integers(1, models.VOCAB - 1, 39).tolist() for _ in range(documents)])


@pytest.mark.parametrize(("method", "options"), BUDGETS)
def test_the_budget_is_met_on_other_text(
    method: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = models.model("llama", method, method_options=options)
    net.method["budget"].state.data = torch.tensor([-0.7, 0.1, 0.2, 0.0, 1.0, 0.5, 9.0])  # too low: nearly all go on
    cfg = checkpoints.write(net, tmp_path / "run")
    held, other = text(tmp_path / "held", 1), text(tmp_path / "other", 2)
    words = ["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--tokenizer", "none"]
    dtype = "bfloat16" if method == "adaponderlm" else "float32"
    assert main([*words, "--dtype", dtype, "--refit", held, "--refit-tokens", "800"]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    told, budget = config["refitted"], options["target"] * (options.get("steps", options.get("latents", 0)) + 1)
    assert told["data"] == "held" and told["targets"] == 800 and told["budget"] == pytest.approx(budget)
    assert abs(told["depth"] - budget) < 0.02 < abs(told["depth_before"] - budget)
    sentence = f"The threshold was refitted on 800 tokens of held: {told['depth']:.2f} passes a token"
    assert sentence in capsys.readouterr().out and sentence in (tmp_path / "hf" / "README.md").read_text()
    back, state = read_model(tmp_path / "hf")
    assert back.ponder.options["target"] == cfg.ponder.options["target"]
    assert abs(score_all(back, state, {"x": other})["x"].stats["mean_depth"] - budget) < 0.1
    if method != "ponderlm3":
        assert abs(_decoded(tmp_path / "hf") - budget) < 0.1


@torch.no_grad()
def _decoded(folder: Path) -> float:
    """Mean number of passes of tokens that are decoded one by one, with the cache."""
    model, cache, depths = load_folder(folder), None, []
    tokens = torch.randint(1, models.VOCAB - 1, (40, 20), generator=torch.Generator().manual_seed(3))
    for i in range(tokens.shape[1]):
        out = model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True, output_depths=True)
        cache = out.past_key_values
        depths.append(out.depths.float().mean())
    return float(torch.stack(depths).mean())


def test_a_model_without_a_budget_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.make("pythia", "ponderlm", tmp_path / "run")
    words = ["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--refit", text(tmp_path / "held", 1)]
    assert main(words) == 2
    assert "method ponderlm has no budget that a threshold could meet" in capsys.readouterr().err
    assert main([*words, "--refit-tokens", "0"]) == 2
