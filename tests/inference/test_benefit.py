"""What passes bring and who gets them: against losses that are computed token by token, and against known cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megaponder.data.batch import MicroBatch
from megaponder.data.indexed import read_index
from megaponder.data.token_classes import BANDS, CLASSES, TextClasses, bands
from megaponder.data.tokenizer import load_tokenizer
from megaponder.export import reference
from megaponder.inference import benefit, evaluation, heldout, variants
from tests.export import checkpoints
from tests.inference.test_heldout import LENGTH, written


def test_classes_of_tokens() -> None:
    text = "The cat, 42  naïve.\nIt\x00"
    ids = np.array([[*text.encode(), 256]])
    found = [CLASSES[i] for i in TextClasses(load_tokenizer("bytes")).of(ids)[0]]
    assert found[:4] == ["word start", "continuation", "continuation", "whitespace"]
    at = text.index(",")
    assert found[at] == "punctuation" and found[at + 2 : at + 4] == ["digits", "digits"]
    wide = text.index("ï")
    assert found[wide : wide + 2] == ["part of a character"] * 2 and found[-1] == "special"
    counts = np.array([5, 9, *[1] * 30])
    band, names = bands(counts)
    assert names[band[1]] == f"rank 1 to {BANDS[0]}" and np.bincount(band).tolist() == [10, 22]


def test_rank_correlation_and_gain() -> None:
    a = np.array([1.0, 2.0, 2.0, 4.0])
    assert benefit.spearman(a, a**3) == pytest.approx(1.0)
    assert benefit.spearman(a, -a) == pytest.approx(-1.0)
    assert benefit.spearman(a, np.ones(4)) is None
    # ties share their mean rank: Pearson of (1, 2.5, 2.5, 4) with (1, 2, 3, 4)
    assert benefit.spearman(a, np.arange(4.0)) == pytest.approx(4.5 / (4.5 * 5.0) ** 0.5)
    gained = np.array([0.0, 1.0, 3.0, 8.0])
    assert benefit._gain(gained, gained, 0.5) == pytest.approx(11 / 4)
    assert benefit._gain(np.zeros(4), gained, 0.5) == pytest.approx(0.5 * 3.0)  # no score, as at random
    assert benefit._gain(-gained, gained, 0.3) == pytest.approx((0.0 + 0.2 * 1.0) / 4)  # 1.2 tokens of four
    assert benefit._gain(gained, gained, 1.0) == pytest.approx(3.0)


@pytest.mark.parametrize(("family", "method"), [("pythia", "adaponderlm"), ("llama", "adaptive_cot")])
def test_losses_by_passes_and_the_models_own_depths(family: str, method: str, tmp_path: Path) -> None:
    checkpoints.make(family, method, tmp_path / "run", {"sequence_length": LENGTH})
    prefix, _ = written(tmp_path / "text", 12 * LENGTH)
    cfg, state = heldout.read_model(tmp_path / "run")
    with reference.engine(cfg, state) as engine:
        found = benefit.analyse(engine, cfg, [prefix], None, heldout.Reading(5))
        assert engine.stage.method.forced is None
        whole = heldout.score(engine, cfg, prefix)
        assert found["loss"] == pytest.approx(whole.loss, rel=1e-6) and found["targets"] == whole.targets
        assert found["policy"]["depth"] == pytest.approx(whole.stats["mean_depth"], rel=1e-6)
        for k in range(1, 5):  # every token at one depth, by the engine's own loss
            engine.stage.method.forced = torch.tensor(k)
            assert found["losses"][k - 1] == pytest.approx(heldout.score(engine, cfg, prefix).loss, rel=1e-6)
        engine.stage.method.forced = None
    policy = found["policy"]
    by_depth = sum(policy["share_at_depth"][int(k) - 1] * loss for k, loss in policy["loss_by_depth"].items())
    assert by_depth == pytest.approx(found["loss"], rel=1e-9)
    assert policy["shuffled"]["loss"] - found["loss"] == pytest.approx(policy["shuffled"]["minus_policy"], abs=1e-9)
    assert policy["shuffled"]["minus_policy"] != 0 and policy["uniform"]["standard_error"] > 0
    for decision in found["decisions"]:
        k = decision["after"]
        assert decision["benefit"] == pytest.approx(found["losses"][k - 1] - found["losses"][k], abs=1e-9)
        for gain in decision["gain"]:
            assert gain["score"] <= gain["hindsight"] + 1e-12 and gain["random"] <= gain["hindsight"] + 1e-12
    classes = [c for c in found["classes"] if c["by"] == "frequency"]
    assert sum(c["share"] for c in classes) == pytest.approx(1.0)
    assert sum(c["share"] * c["loss"] for c in classes) == pytest.approx(found["loss"], rel=1e-9)


def test_ponderlm_is_read_out_after_each_pass_and_says_how_sure_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaponder.inference.sweep.SHARES", (0.8, 0.5))
    checkpoints.make("llama", "ponderlm", tmp_path / "run", {"sequence_length": LENGTH})
    prefixes = tuple(written(tmp_path / f"text{seed}", 12 * LENGTH, seed)[0] for seed in (3, 4))
    cfg, state = heldout.read_model(tmp_path / "run")
    sample = evaluation.Sample(prefixes, 6 * LENGTH, 2 * LENGTH)
    told, reading = evaluation.by_depth(cfg, state, sample, batch=6), sample.reading(6, LENGTH)
    points = {p["variant"]: p for p in told["sweep"]}
    found = told["analysis"]
    assert [points[f"passes {k}"]["loss"] for k in (1, 2, 3)] == pytest.approx(found["losses"], rel=1e-6)
    assert {p["kind"] for p in told["sweep"]} == {"as trained", "passes", "halting"} and len(points) == 1 + 5 + 2
    # the score of the decision is the doubt: recomputed from the logits of one pass
    with reference.engine(variants.with_passes(cfg, 1), state) as engine:
        parts = [b for p in prefixes for b, _ in heldout.batches(read_index(p), cfg, reading)]
        doubt = [-engine.logits(b.ids_bn).softmax(-1).amax(-1)[b.loss_mask_bn > 0] for b in parts]
    rank = benefit.spearman(torch.cat(doubt).double().numpy(), _benefit(cfg, state, parts))
    assert found["decisions"][0]["rank_correlation"] == pytest.approx(rank, abs=1e-3)


def _benefit(cfg, state, parts: list[MicroBatch]) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Loss after one pass less loss after two, from models of one and two passes."""
    losses = []
    for passes in (1, 2):
        with reference.engine(variants.with_passes(cfg, passes), state) as engine:
            found = [engine.token_losses(b)[1][-1].t()[b.loss_mask_bn > 0] for b in parts]
        losses.append(torch.cat(found).double().numpy())
    return losses[0] - losses[1]


def test_pruned_latents_are_its_number_and_weighed_ones_stand_beside(tmp_path: Path) -> None:
    checkpoints.make("pythia", "ponderlm3", tmp_path / "run", {"sequence_length": LENGTH})
    prefix, _ = written(tmp_path / "text", 4 * LENGTH)
    cfg, state = heldout.read_model(tmp_path / "run")
    with reference.engine(cfg, state) as engine:
        score, method, losses = heldout.score(engine, cfg, prefix), engine.stage.method, {}

        def loss() -> float:
            sums = [
                (engine.forward_backward([b], 0, train=False).loss * n, n)
                for b, n in heldout.batches(read_index(prefix), cfg, heldout.Reading(8, LENGTH))
            ]
            return sum(s for s, _ in sums) / sum(n for _, n in sums)

        for method.hard in (True, False):
            losses[method.hard] = loss()
        method.hard, method.options.threshold = True, 1.0  # one row for every token
        pruned = loss()
        method.forced = torch.tensor(1)
        assert loss() == pytest.approx(pruned, rel=1e-6)
        method.hard, method.forced = False, None
        router = engine.stage.method_modules["router"]
        router.weight.data.zero_()
        router.bias.data.copy_(200 * torch.eye(len(router.bias))[0])  # the whole mass on that row
        assert loss() == pytest.approx(pruned, rel=1e-6)
    assert score.loss == pytest.approx(losses[True], rel=1e-6)
    assert score.stats["soft_loss"] == pytest.approx(losses[False], rel=1e-6)
    assert abs(losses[True] - losses[False]) > 1e-3
