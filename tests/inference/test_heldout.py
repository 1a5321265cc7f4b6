"""`megaponder eval`: the loss of the exported model in transformers, on the same tokens; every token once; variants."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megaponder.cli.eval import by_depth, table
from megaponder.cli.main import main
from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, PonderConfig, RunConfig
from megaponder.data.indexed import read_index
from megaponder.data.info import DatasetMeta
from megaponder.errors import UserError
from megaponder.export.reference import engine as heldout_engine
from megaponder.export.to_hf import export
from megaponder.inference import fit, heldout, sweep, variants
from tests.data_pipeline.make import write_conversations
from tests.export import checkpoints, models
from tests.layouts.cases import WHOLE
from tests.tolerance import PARITY, difference
from tests.training import datasets

LENGTH = 16


def written(prefix: Path, tokens: int, seed: int = 3) -> tuple[str, np.ndarray]:
    """A dataset and its tokens behind one end-of-document token."""
    datasets.write(prefix, tokens, seed, vocabulary=models.VOCAB - 1)
    return str(prefix), np.concatenate([[datasets.EOD], np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64)])


def in_transformers(net: torch.nn.Module, stream: np.ndarray) -> tuple[float, int]:
    """Summed loss and number of targets that are no end of a document, in windows that do not overlap."""
    total, targets = 0.0, 0
    for begin in range(0, len(stream) - 1, LENGTH):
        part = torch.from_numpy(stream[begin : begin + LENGTH + 1])[None]
        with torch.no_grad():
            logits = net(part[:, :-1], use_cache=False).logits.double()
        losses = F.cross_entropy(logits[0], part[0, 1:], reduction="none")
        counts = part[0, 1:] != datasets.EOD
        total, targets = total + float(losses[counts].sum()), targets + int(counts.sum())
    return total, targets


@pytest.mark.parametrize(
    ("family", "method"),
    [("gpt2", "pause"), ("pythia", "adaponderlm"), ("llama", "ponderlm3")]
    + WHOLE * [("llama", "ponderlm"), ("llama", "adaptive_cot"), ("pythia", "ponderlm2"), ("llama", "vanilla")],
)  # fmt: skip
def test_the_loss_of_the_export_in_transformers(family: str, method: str, tmp_path: Path) -> None:
    checkpoints.make(family, method, tmp_path / "run", {"sequence_length": LENGTH})
    export(tmp_path / "run", tmp_path / "hf", tokenizer_path="none")
    from megaponder.export.load import load_folder

    prefix, stream = written(tmp_path / "text", 5 * LENGTH + 7)
    want, targets = in_transformers(load_folder(tmp_path / "hf"), stream)
    for path in ("run", "hf"):
        cfg, state = heldout.read_model(tmp_path / path)
        [score] = heldout.score_all(cfg, state, {"text": prefix}, heldout.Reading(2, LENGTH)).values()
        assert score.targets == targets
        loss = score.stats.get("soft_loss", score.loss)  # one forward weighs what decoding leaves out
        assert loss == pytest.approx(want / targets, rel=1e-5), path


def test_the_loss_of_conversations(tmp_path: Path) -> None:
    """Each conversation alone in the exported model, its answers alone; parts of it add up."""
    from megaponder.data.packing import read
    from megaponder.export.load import load_folder

    checkpoints.make("pythia", "adaponderlm", tmp_path / "run", {"sequence_length": LENGTH})
    export(tmp_path / "run", tmp_path / "hf", tokenizer_path="none")
    prefix = write_conversations(tmp_path / "talks", 9, LENGTH + 5, vocab=models.VOCAB)
    index, net = read_index(prefix), load_folder(tmp_path / "hf")
    want, targets = 0.0, 0
    for number in range(index.sequences):
        ids, mask = (torch.from_numpy(x)[None] for x in read(index, number, LENGTH + 1))
        with torch.no_grad():
            logits = net(ids[:, :-1], use_cache=False).logits.double()
        losses = F.cross_entropy(logits[0], ids[0, 1:], reduction="none")
        want, targets = want + float(losses[mask[0, 1:] > 0].sum()), targets + int(mask[0, 1:].sum())
    cfg, state = heldout.read_model(tmp_path / "run")
    score = heldout.score_all(cfg, state, {"talks": prefix}, heldout.Reading(2, LENGTH))["talks"]
    assert score.targets == targets and score.loss == pytest.approx(want / targets, rel=1e-5)
    first = heldout.score_all(cfg, state, {"talks": prefix}, heldout.Reading(2, LENGTH, limit=11))["talks"]
    with heldout_engine(cfg, state) as engine:
        rest = heldout.score(engine, cfg, prefix, heldout.Reading(3, LENGTH, skip=11))
    assert first.targets == 11 and first.nats + rest.nats == pytest.approx(want, rel=1e-5)


def test_the_part_about_depth_tells_targets_thresholds_and_scores() -> None:
    point = {"loss": 3.0, "depth": 2.0, "flops_per_token": 1e9}
    names = ["as trained", *(f"{who}, threshold {x}" for x in (0.2, -0.1, 0.1) for who in ("scores", "random"))]
    points = [point | {"variant": name} | ({"threshold": float(name.split()[-1])} if name != names[0] else {})
              for name in names]  # fmt: skip
    told = {"method": "adaponderlm", "sample": {"prefixes": ["a", "b"], "targets": 37}, "sweep": points,
            "analysis": {"targets": 45, "losses": [3.0]}}  # fmt: skip
    lines = list(by_depth(told))
    assert "on 45 targets of 2 datasets, at most 37 of each:" in lines[0]
    assert [line.split("|")[1].strip() for line in lines[3:10]] == [names[i] for i in (0, 3, 4, 5, 6, 1, 2)]
    assert "predicted gain of one more pass" in lines[10]
    told |= {"sample": {"prefixes": ["a"], "targets": 37}, "sweep": points[:1]}
    assert "on 45 targets:" in (short := list(by_depth(told)))[0] and len(short) == 4


def test_every_token_is_a_target_once(tmp_path: Path) -> None:
    prefix, stream = written(tmp_path / "text", 3 * LENGTH + 5)
    seen = [w[1 : real + 1] for w, real in heldout.windows(read_index(prefix), LENGTH, datasets.EOD)]
    np.testing.assert_array_equal(np.concatenate(seen), stream[1:])
    without = [w[: real + 1] for w, real in heldout.windows(read_index(prefix), LENGTH, None)]
    np.testing.assert_array_equal(np.concatenate([without[0][:1], *(w[1:] for w in without)]), stream[1:])
    part = [w[1 : real + 1] for w, real in heldout.windows(read_index(prefix), LENGTH, datasets.EOD, 20, LENGTH)]
    np.testing.assert_array_equal(np.concatenate(part), stream[LENGTH + 1 : LENGTH + 21])


def test_the_command_tells_datasets_variants_and_flops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.make("llama", "ponderlm", tmp_path / "run", {"sequence_length": LENGTH})
    one, _ = written(tmp_path / "one", 60)
    two, _ = written(tmp_path / "two", 40, seed=4)
    command = ["eval", str(tmp_path / "run"), "--data", f"a={one}", f"b={two}", "--passes", "1", "3"]
    assert main([*command, "--thresholds", "0.99", "--json", str(tmp_path / "table.json")]) == 0
    out = capsys.readouterr().out
    assert "| 3 passes" in out and "together" in out and "| 1 pass " in out
    told = {r["variant"]: r for r in json.loads((tmp_path / "table.json").read_text())["results"]}
    assert list(told) == ["as trained", "threshold 0.99", "1 pass", "3 passes"]
    whole = told["as trained"]["together"]
    parts = told["as trained"]["data"]
    assert whole["loss"] * whole["targets"] == pytest.approx(sum(p["loss"] * p["targets"] for p in parts.values()))
    assert whole["perplexity"] == pytest.approx(math.exp(whole["loss"])) and whole["bits_per_byte"] is None
    for same in ("3 passes", "threshold 0.99"):  # it has three passes, and is never that sure
        assert told[same]["together"]["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    # an early exit is what was read out after that pass
    assert told["1 pass"]["together"]["loss"] == pytest.approx(whole["loss_pass0"], rel=1e-6)
    assert told["1 pass"]["together"]["flops_per_token"] < whole["flops_per_token"] / 2


def test_fewer_passes_of_a_model_with_gates_are_all_tokens_stopping_there(tmp_path: Path) -> None:
    from megaponder.export import reference

    checkpoints.make("llama", "adaponderlm", tmp_path / "run", {"sequence_length": LENGTH}, method_options={
        "steps": 3, "target": 0.0, "threshold": 0.0,
    })  # fmt: skip
    prefix, _ = written(tmp_path / "text", 3 * LENGTH)
    cfg, state = heldout.read_model(tmp_path / "run")
    for passes in (1, 3):
        fewer = variants.with_passes(cfg, passes)
        [found] = heldout.score_all(fewer, state, {"text": prefix}).values()
        with reference.engine(cfg, state) as engine:
            engine.stage.method.forced = torch.tensor(passes)
            assert found.loss == pytest.approx(heldout.score(engine, cfg, prefix).loss, rel=1e-6)


def test_a_budgets_threshold_moves_the_depth(tmp_path: Path) -> None:
    checkpoints.make("llama", "adaponderlm", tmp_path / "run", {"sequence_length": LENGTH}, method_options={
        "steps": 3, "target": 0.6,
    })  # fmt: skip
    prefix, _ = written(tmp_path / "text", 3 * LENGTH)
    cfg, state = heldout.read_model(tmp_path / "run")
    made = variants.asked(cfg, state, [99.0, -99.0], [])  # no score is as large
    depths = [heldout.score_all(*v, {"text": prefix})["text"].stats["mean_depth"] for _, *v in made]
    assert depths[1:] == pytest.approx([2, 3]) and made[0][2] is state
    for thresholds, passes, sentence in (
        ([math.nan], [], "it must be a number"),
        ([], [4], "more than 3 passes in"),
    ):
        with pytest.raises(UserError, match=sentence):
            variants.asked(cfg, state, thresholds, passes)


@pytest.mark.parametrize("method", ["adaponderlm", "confident_ponderlm", "adaptive_cot"])
def test_passes_of_a_model_with_a_budget_are_those_of_all_tokens(method: str, tmp_path: Path) -> None:
    from megaponder.export import reference

    checkpoints.make("llama", method, tmp_path / "run", {"sequence_length": LENGTH}, method_options={
        "steps": 3, "target": 0.6,
    })  # fmt: skip
    prefix, _ = written(tmp_path / "text", 2 * LENGTH)
    cfg, state = heldout.read_model(tmp_path / "run")
    with reference.engine(cfg, state) as engine:
        for passes in (1, 2, 3):  # the budget's window is of 2 and 3
            [found] = heldout.score_all(variants.with_passes(cfg, passes), state, {"text": prefix}).values()
            engine.stage.method.forced = torch.tensor(passes)
            forced = heldout.score(engine, cfg, prefix)
            assert found.loss == pytest.approx(forced.loss, rel=1e-6) and forced.stats["mean_depth"] == passes


@pytest.mark.parametrize(("method", "passes"), [("huginn", 5), ("parcae", 1), ("ouro", 2), ("nanbeige", 1)])
def test_other_passes_of_looped_models_are_those_of_decoding(method: str, passes: int, tmp_path: Path) -> None:
    """A core of another number of recurrences, and fewer loops of a stack."""
    from megaponder.export import reference

    net = checkpoints.make("llama", method, tmp_path / "run", {"sequence_length": LENGTH})
    cfg, state = heldout.read_model(tmp_path / "run")
    other, ids = variants.with_passes(cfg, passes), models.ids(2, 7)
    with reference.engine(other, variants.own_weights(other, state)) as engine, torch.no_grad():
        assert difference(engine.logits(ids), net(ids, passes=passes).logits) < PARITY
        assert difference(engine.logits(ids), net(ids).logits) > 0.01


def test_other_numbers_of_passes_that_are_measured() -> None:
    def numbers(method: str, **options: object) -> list[int]:
        section = ModelConfig(family="llama", num_layers=6, hidden_size=32, num_heads=4, vocab_size=64)
        return sweep.other_passes(resolve(RunConfig(model=section, ponder=PonderConfig(method, dict(options)))))

    assert numbers("huginn", recurrence=3) == [1, 2, 4] and numbers("parcae") == [1, 2, 4, 8, 16]
    assert numbers("loop", extra_passes=1) == numbers("ouro", loops=2) == numbers("nanbeige") == [1, 2, 3, 4]
    assert numbers("nanbeige", middle=2) == numbers("ponderlm", multiply_by_steps=True) == numbers("vanilla") == []


def test_thresholds_are_fitted_to_a_mean_depth(tmp_path: Path) -> None:
    from megaponder.export import reference

    checkpoints.make("llama", "adaponderlm", tmp_path / "run", {"sequence_length": LENGTH})
    prefix, _ = written(tmp_path / "text", 40 * LENGTH)
    cfg, state = heldout.read_model(tmp_path / "run")
    for depth in (1.5, 2.5, 3.5) if WHOLE else (2.5,):
        with reference.engine(cfg, state) as engine:
            fitted = fit.fit_threshold(engine, cfg, [prefix], depth, heldout.Reading(8, limit=10_000))
            score = heldout.score(engine, variants.with_threshold(cfg, fitted), prefix)
        assert score.stats["mean_depth"] == pytest.approx(depth, abs=0.1)


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_tasks_without_lm_eval_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path), "--tasks", "piqa"]) == 2
    assert 'pip install "megaponder[eval]"' in capsys.readouterr().err


def test_datasets_of_one_file_name_are_all_read(tmp_path: Path) -> None:
    checkpoints.make("llama", "vanilla", tmp_path / "run", {"sequence_length": LENGTH})
    cfg, _ = heldout.read_model(tmp_path / "run")
    paths = []
    for folder in ("wiki", "code", "law"):
        (tmp_path / folder).mkdir()
        paths.append(written(tmp_path / folder / "valid", 40)[0])
    cfg.data.valid = {"a": [1.0, paths[0], 1.0, paths[1]], "law": [paths[2]]}
    assert heldout.datasets(cfg, []) == {"valid": paths[0], paths[1]: paths[1], "law": paths[2]}


def test_a_dataset_may_be_called_together() -> None:
    scores = {name: heldout.Score(10, nats, None, {}, 1e9) for name, nats in (("together", 20.0), ("other", 40.0))}
    *_, own, other, both = table([("", scores)])
    assert ["| together" in own, "| other" in other, "| all together" in both] == [True] * 3
    assert ["2.0000" in own, "4.0000" in other, "3.0000" in both] == [True] * 3


def test_what_cannot_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.make("llama", "loop", tmp_path / "run", {"sequence_length": LENGTH})
    cfg, _ = heldout.read_model(tmp_path / "run")
    prefix = datasets.write(tmp_path / "foreign", 50, 1, vocabulary=90)
    other, cfg.data.tokenizer = written(tmp_path / "other", 50)[0], "bytes"
    index = read_index(other)
    meta = DatasetMeta("elsewhere", "bytes", "c" * 64, 90, 0, index.max_id(), index.documents, 50, "uint16", 100)
    Path(f"{other}.json").write_bytes(meta.dump())
    bpe, exported = written(tmp_path / "bpe", 50)[0], written(tmp_path / "exported", 50)[0]
    for path, size in ((bpe, 90), (exported, 257)):  # 257: bytes, in the form in which an export holds them
        there = replace(meta, tokenizer_kind="huggingface", vocab_size=size)
        Path(f"{path}.json").write_bytes(there.dump())
    assert heldout.datasets(cfg, [exported]) == {Path(exported).name: exported}
    for words, sentence in (
        ([bpe], "another tokenizer"),
        ([], "--data is missing"),
        ([prefix], "it has token id"),
        ([other], "another tokenizer"),
        ([f"a={prefix}", f"a={prefix}2"], "the name a is given twice"),
        ([str(tmp_path / "none")], "no such file"),
    ):
        with pytest.raises(UserError, match=sentence):
            heldout.datasets(cfg, words)
    for word in ("none/table.json", "."):
        assert main(["eval", str(tmp_path / "run"), "--json", str(tmp_path / word)]) == 2
    assert "there is no folder" in (said := capsys.readouterr().err) and "this is a folder" in said
    for options, sentence in (
        (([0.5], []), "has no threshold"), (([], [0]), "at least 1"), (([math.nan], []), "between 0 and 1")
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            variants.asked(cfg, {}, *options)
    cfg.ponder.method, cfg.ponder.options = "nanbeige", {"loops": 2, "middle": 2}
    cfg.model.num_layers = 4
    with pytest.raises(UserError, match="no number of passes that may differ"):  # a loop is several passes
        variants.asked(cfg, {}, [], [1])
