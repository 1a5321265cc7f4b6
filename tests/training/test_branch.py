"""Branches take the steps that the run would have taken, or cool down; averages are the means that they say."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from megaponder.checkpoint import folder
from megaponder.checkpoint.state import CONFIG, TrainState
from megaponder.checkpoint.weights import load_weights
from megaponder.cli.main import main
from megaponder.config.load import dump, from_mapping
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError
from megaponder.export.average import Averaged
from megaponder.training.branch import _cooling, _refuse_other_model
from tests.training.conftest import Base, run

ROWS = ("loss", "grad_norm", "learning_rate", "sequences", "tokens")


def test_a_branch_goes_on_as_the_run_did_or_cools_down(base: Base, capsys: pytest.CaptureFixture[str]):
    same, cool = base.root / "branch-same", base.root / "branch-cool"
    assert main(["branch", str(base.run), "3", "--out", str(same), "--checkpoint.every", "4"]) == 0
    assert main(["branch", str(base.run), "3", "--out", str(cool), "--cooldown", "4"]) == 0
    rate = base.rows()[3]["learning_rate"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{same}: continues after step 3 up to step 8."
    assert said[2:] == [
        f"{cool}: continues after step 3 up to step 7; the learning rate falls from {rate:g} to 0.",
        f"Train it: megaponder train {cool}/config.yaml",
    ]
    assert not list(base.root.glob(".branch*"))
    _, output = run("run_files", 1, paths=[str(same / "config.yaml"), str(cool / "config.yaml")])
    assert f"Warning: optimizer.lr was 0.01 up to this checkpoint and is {rate!r} from here on." in output
    whole = base.rows()
    for step, row in base.rows("branch-same").items():
        assert [row[name] for name in ROWS] == [whole[step][name] for name in ROWS], step
    for path in (base.run, same):
        assert folder.published(path / "checkpoints").keys() >= {3, 8}
    ends = [load_weights(path)[1] for path in (base.run, same)]
    assert all((ends[1][name] == tensor).all() for name, tensor in ends[0].items())

    rows = base.rows("branch-cool")
    assert list(rows) == list(range(1, 8))
    np.testing.assert_allclose([rows[s]["learning_rate"] for s in range(4, 8)], rate * np.array([0.75, 0.5, 0.25, 0]))
    # the data are those of the run: the first step's loss does not depend on its own rate
    assert rows[4]["loss"] == whole[4]["loss"] and rows[7]["loss"] != whole[7]["loss"]


def test_a_cooldown_replaces_any_budget() -> None:
    cfg = resolve(from_mapping({"model": {"preset": "llama-tiny"}, "train": {"steps": 8, "tokens": 9, "epochs": 2}}))
    train = _cooling(cfg, TrainState(step=3, sequences=12, tokens=0), 4).train
    assert (train.steps, train.tokens, train.epochs) == (7, None, None)


def test_a_branch_of_a_plugins_run_does_not_run_its_code(tmp_path: Path) -> None:
    ponder = {"method": "elsewhere", "options": {"n": 3}, "plugin": str(tmp_path / "none.py")}
    cfg = resolve(from_mapping({"model": {"preset": "llama-tiny"}, "train": {"steps": 8}, "ponder": ponder}))
    dump(cfg, tmp_path / CONFIG)
    _refuse_other_model(cfg, cfg.ponder, tmp_path)
    other = resolve(from_mapping({"model": {"preset": "llama-tiny", "num_layers": 3}, "ponder": ponder}))
    with pytest.raises(ConfigError, match=r"model\.num_layers = 3: checkpoint .* was trained with"):
        _refuse_other_model(other, cfg.ponder, tmp_path)


def test_a_branch_keeps_the_methods_tensors(tmp_path: Path) -> None:
    def options(**changed: int) -> RunConfig:
        ponder = {"method": "adaponderlm", "options": {"steps": 2, "target": 0.0, "gate_width": 4} | changed}
        return resolve(from_mapping({"model": {"preset": "llama-tiny"}, "train": {"steps": 8}, "ponder": ponder}))

    saved = options()
    dump(saved, tmp_path / CONFIG)
    _refuse_other_model(options(threshold=0.25), saved.ponder, tmp_path)
    for changed in ({"steps": 3}, {"steps": 1}, {"gate_width": 2}):
        with pytest.raises(ConfigError, match=r"^ponder\.options = .* was trained with .*; use those, or a new run"):
            _refuse_other_model(options(**changed), saved.ponder, tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["5", "--out", "NEW"], "STEP = 5: RUN has no checkpoint of this step; the nearest is 6 (it has 3, 6, 8)."),
        (["3", "--out", "NEW", "--cooldown", "0"], "--cooldown = 0: it must be at least 1; the nearest is 1."),
        (["3", "--out", "RUN"], "--out = RUN: it exists already; choose another folder."),
        (["8", "--out", "NEW"], "train.steps = 8: the branch begins at step 8, where this budget is spent; "
         "the nearest is 9, or use --cooldown N."),
        (["8", "--out", "NEW", "--run", "x"], "--run: the folder of the branch is --out = NEW; leave --run out."),
        (["8", "--out", "NEW", "--optimizer.lrr", "1"], "did you mean --optimizer.lr"),
        (["x", "--out", "NEW"], "STEP = x: give a step; RUN has 3, 6, 8."),
        *(
            (["3", "--out", "NEW", "--cooldown", "4", *words],
             f"{words[0]} = {told}: --cooldown 4 sets the schedule and the budget (schedule.*, train.steps, "
             "train.tokens) itself; leave it out, or leave out --cooldown.")
            for *words, told in (
                ("--train.steps", "50", 50),
                ("--train.tokens", "5000", 5000),
                ("--schedule.kind", "cosine", "'cosine'"),
                ("--schedule.warmup_fraction", ".9", 0.9),
            )
        ),
        (["3", "--out", "NEW/in", "--optimizer.kind", "muon"], "was trained with 'adamw'; use that, or a"),
        (["3", "--out", "NEW/in", "--model.num_layers", "4"], "model.num_layers = 4: checkpoint"),
        (["3", "--out", "NEW/in", "--ponder.method", "lop"], "ponder.method = 'lop': checkpoint"),
        (["3", "--out", "NEW/in", "--ponder.method", "vanilla"], "ponder.method = 'vanilla': checkpoint"),
    ],
)  # fmt: skip
def test_branches_that_cannot_be(base: Base, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]):
    names = {"RUN": str(base.run), "NEW": str(base.root / "no-branch")}
    for name, path in names.items():
        expected = expected.replace(name, path)
    words = [word.replace("NEW", names["NEW"]) for word in words]
    assert main(["branch", str(base.run), *(names.get(word, word) for word in words)]) == 2
    assert expected in capsys.readouterr().err
    assert not list(base.root.glob("*no-branch*"))


def test_means_of_checkpoints_and_the_moving_average(base: Base, capsys: pytest.CaptureFixture[str]):
    source = base.root / "averaged"
    shutil.copytree(base.run, source)
    _, output = run("average_and_export", 1, run=str(source), last=2)
    assert "the mean of 2 checkpoints, step_00000008, step_00000006, in FP32." in output
    six, eight = (load_weights(folder.final(source / "checkpoints", step))[1] for step in (6, 8))
    mean, ema = (load_weights(Path(f"{source}-{name}"))[1] for name in ("mean", "ema"))
    want = load_weights(source, ema=True)[1]
    assert mean.keys() == ema.keys() == eight.keys()
    for name, tensor in eight.items():
        assert (mean[name] == ((six[name].double() + tensor.double()) / 2).float()).all(), name
        assert (ema[name] == want[name]).all() and (ema[name] != tensor).any(), name
    exported = load_file(f"{source}-hf/model.safetensors")["model.embed_tokens.weight"]
    assert (exported == ema["embedding.word_embeddings.weight"][: len(exported)]).all()

    one = Averaged(Path("new"), (Path("step_8"),), ema=False)
    assert str(one) == "new: the mean of 1 checkpoint, step_8, in FP32."
    capsys.readouterr()
    for words, expected in (
        (["--last", "4"], f"--last = 4: {source} has 3 checkpoints; the nearest is 3."),
        ([], "say either --last N or --ema."),
        (["--last", "2"], f"--out = {source}-mean: it exists already; choose another folder."),
        (["--last", "0"], "--last = 0: it must be at least 1; the nearest is 1."),
    ):
        assert main(["average", str(source), *words, "--out", f"{source}-mean"]) == 2
        assert expected in capsys.readouterr().err
    assert main(["average", f"{source}-mean", "--ema", "--out", f"{source}-x"]) == 2
    assert "it has no moving average of the weights, since optimizer.ema_decay was 0" in capsys.readouterr().err
