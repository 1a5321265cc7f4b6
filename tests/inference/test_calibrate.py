"""Calibrated exits of tiny real models: repeated draws of texts, decoding token by token, and what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaponder.cli.main import main
from megaponder.decoding.model import CACHE_FIELD
from megaponder.export.load import load_folder
from megaponder.inference.calibrate import Measured, Texts, read_texts
from megaponder.inference.exit_rules import rule_of
from megaponder.inference.guarantee import fixed_sequence
from megaponder.inference.heldout import read_model
from tests.data_pipeline.make import write_documents
from tests.export import checkpoints, models
from tests.tolerance import PARITY


def drawn(documents: int, seed: int = 1) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(1, models.VOCAB - 1, int(draw.integers(6, 9))).tolist() for _ in range(documents)]


def texts_of(rows: list[list[int]]) -> Texts:
    return Texts([np.array([0, *row]) for row in rows], "drawn")


@pytest.fixture(scope="module")
def ponderlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A random confident_ponderlm whose tokens differ in confidence, and its configuration."""
    root = tmp_path_factory.mktemp("confident")
    net = models.model("llama", "confident_ponderlm", method_options={"steps": 3, "target": 0.0, "threshold": 1.0})
    with torch.no_grad():
        net.lm_head.weight *= 3
    return checkpoints.write(net, root / "run"), net


GRID = (0.9, 0.7, 0.6, 0.4)


def test_repeated_draws_on_a_real_model(ponderlm: tuple[Any, Any]) -> None:
    """Texts drawn again and again from a pool, whose mean risk is the true one: the bound is broken in at most 1 -
    confidence of the draws, and what is chosen differs from draw to draw."""
    cfg, net = ponderlm
    rule, pool, n, bound, confidence = rule_of(cfg, net, None, GRID), texts_of(drawn(90)), 60, 0.3, 0.9
    measured = Measured(net, rule, pool, "disagreement")
    risks = np.stack([measured.risks(x) for x in rule.grid])
    truth, draw, chosen = risks.mean(1), np.random.default_rng(5), []
    assert truth[0] < bound < truth[-1] and (np.diff(truth) >= -0.02).all()
    for _ in range(300):
        mean = risks[:, draw.integers(0, len(pool.ids), n)].mean(1)
        at, _ = fixed_sequence(range(len(GRID)), lambda i, mean=mean: float(mean[int(i)]), n, bound, confidence)
        chosen.append(-1 if at is None else at)
    broken = sum(truth[at] > bound for at in chosen if at >= 0)
    assert broken <= 30 + 3 * math.sqrt(300 * 0.1 * 0.9)
    assert len(set(chosen)) > 1 and max(chosen) >= 1


@torch.no_grad()
def decoded(net: Any, text: np.ndarray, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, passes) of a text that is decoded token by token."""
    cache, logits, depths = None, [], []
    for token in text[:-1].tolist():
        out = net(torch.tensor([[token]]), cache=cache, use_cache=True, output_depths=True, **given)
        cache = out[CACHE_FIELD]
        logits.append(out.logits[0, 0])
        depths.append(out.depths[0, 0])
    return torch.stack(logits), torch.stack(depths)


@pytest.mark.parametrize("measure", ["disagreement", "loss"])
def test_risks_are_those_of_decoding(ponderlm: tuple[Any, Any], measure: str) -> None:
    cfg, net = ponderlm
    texts, rule = texts_of(drawn(4, seed=3)), rule_of(cfg, net, "confidence")
    measured, expected, depths = Measured(net, rule, texts, measure, batch=4), [], []
    got = measured.risks(0.2)
    for text in texts.ids:
        target = torch.from_numpy(text[1:])
        full, _ = decoded(net, text, threshold=1.0)
        own, passes = decoded(net, text, threshold=0.2)
        depths.append(passes)
        if measure == "loss":
            costs = [torch.nn.functional.cross_entropy(x, target) for x in (own, full)]
            expected.append(float((costs[0] - costs[1]).clamp(0, 1)))
        else:
            expected.append(float((own.argmax(-1) != full.argmax(-1)).double().mean()))
    assert got == pytest.approx(expected, abs=1e-5) and max(expected) > 0
    assert measured.depths[0.2] == pytest.approx(float(torch.cat(depths).double().mean()))
    assert measured.full_depth == 4.0 > measured.depths[0.2] > 1.0  # type: ignore[operator]


def test_a_looped_core_is_measured_token_by_token(tmp_path: Path) -> None:
    options = models.METHODS["huginn"] | {"recurrence": 4}
    net = models.model("llama", "huginn", method_options=options)
    cfg, text = checkpoints.write(net, tmp_path / "run"), np.arange(7)
    rule = rule_of(cfg, net, "cosine", (0.3, 0.6, 0.9))
    measured = Measured(net, rule, Texts([text], "one"), "disagreement")
    [risk] = measured.risks(0.6)
    _, passes = decoded(net, text, exit_by="cosine", exit_below=0.6)
    assert measured.full_depth == 4.0 and measured.depths[0.6] == pytest.approx(float(passes.double().mean()))
    assert 0 <= risk <= 1 and rule.options(0.6) == {"exit_below": 0.6, "exit_by": "cosine"}


def test_an_export_stops_where_it_was_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ponderlm becomes a confident_ponderlm of the same weights; config, card and decoding know the exit."""
    net = models.model("llama", "ponderlm", method_options={"steps": 2})
    with torch.no_grad():
        net.lm_head.weight *= 3
    checkpoints.write(net, tmp_path / "run")
    data, hf = write_documents(tmp_path / "held", drawn(60)), tmp_path / "hf"
    assert main(["export", str(tmp_path / "run"), str(hf), "--tokenizer", "none"]) == 0
    before = load_folder(hf)(models.ids(2, 9), use_cache=False).logits
    words = ["calibrate", str(hf), "--data", data, "--risk", "0.3", "--length", "8", "--texts", "50"]
    words += ["--grid", "0.9", "0.7", "0.4"]
    for _ in range(2):  # again: the same, in place of the first
        assert main([*words, "--json", str(tmp_path / "exit.json")]) == 0
    said, config = capsys.readouterr().out, json.loads((hf / "config.json").read_text())
    told = config["confident_exit"]
    assert told == json.loads((tmp_path / "exit.json").read_text())
    assert (told["risk"], told["confidence"], told["texts"], told["data"]) == (0.3, 0.95, 50, "held")
    assert told["data_sha256"] == read_texts(data, 0, 50, 8, 0).checksum != read_texts(data, 0, 50, 8, 1).checksum
    assert config["method"] == "confident_ponderlm" and config["method_options"]["threshold"] == told["threshold"] < 1
    card = (hf / "README.md").read_text()
    assert card.count("Exit by confidence at") == 1 and said.count("it now stops there") == 2
    after = load_folder(hf)
    out = after(models.ids(2, 9), use_cache=False, output_depths=True)
    chosen = after(models.ids(2, 9), use_cache=False, threshold=told["threshold"]).logits
    full = after(models.ids(2, 9), use_cache=False, threshold=1.0).logits
    assert torch.equal(out.logits, chosen) and float(out.depths.float().mean()) < 3
    torch.testing.assert_close(full, before, rtol=0, atol=PARITY * float(before.abs().max()))
    assert read_model(hf)[0].ponder.options["threshold"] == told["threshold"]
    for more, words_of_error in (
        (["--texts", "8"], "held has 8 texts, and a risk of 0.3 with a confidence of 0.95 needs at least 9"),
        (["--grid", "0.01", "--risk", "0.08"], "at the safest, 0.01, it is"),
        (["--by", "entropy"], "confident_ponderlm stops by confidence; use confidence, or leave it out"),
        (["--risk", "1.5"], "more than 0 and less than 1; use 0.05"),
        (["--measure", "speed"], "disagreement or loss; use disagreement"),
    ):
        assert main([*words, *more]) == 2
        assert words_of_error in capsys.readouterr().err.replace("\n", " "), more
    assert json.loads((hf / "config.json").read_text()) == config


def test_the_threshold_of_a_budget_is_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"steps": 2, "target": 0.5, "gate_width": 2}
    net = models.model("llama", "adaponderlm", method_options=options)
    net.method["budget"].state.data = torch.tensor([-0.7, 0.1, 0.2, 0.0, 1.0, 0.5, 9.0])
    checkpoints.write(net, tmp_path / "run")
    data, hf = write_documents(tmp_path / "held", drawn(40)), tmp_path / "hf"
    words = ["export", str(tmp_path / "run"), str(hf), "--tokenizer", "none", "--dtype", "bfloat16"]
    assert main(words) == 0
    grid = ["--grid", "-0.9", "-0.072307", "0.2"]  # the second is none of BF16
    assert main(["calibrate", str(hf), "--data", data, "--risk", "0.3", "--length", "8", *grid]) == 0
    told = json.loads((hf / "config.json").read_text())["confident_exit"]
    state = load_folder(hf).method["budget"].state
    assert float(state[0]) == told["threshold"] != pytest.approx(-0.7) and float(state[1]) == pytest.approx(
        0.1, abs=1e-3
    )
    assert told["by"] == "score" and 1.0 <= told["depth"] < told["full_depth"] == 2.0
    capsys.readouterr()
    checkpoints.write(models.model("llama", "vanilla"), tmp_path / "plain")
    assert main(["calibrate", str(tmp_path / "plain"), "--data", data]) == 2
    assert "vanilla have no rule by which they stop early" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "plain"), str(tmp_path / "native"), "--tokenizer", "none"]) == 0
    assert main(["calibrate", str(tmp_path / "native"), "--data", data]) == 2
    assert "exports with megaponder's own modelling code" in capsys.readouterr().err
