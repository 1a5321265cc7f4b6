"""`megaponder compare`: groups of seeds, compute from the rows, every setting that differs, all its files."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from megaponder.cli.main import main
from megaponder.compare import depth, differences, results
from megaponder.compare.figure import draw
from megaponder.config.load import dump, from_mapping
from megaponder.config.resolve import resolve
from megaponder.errors import UserError
from megaponder.plan.flops import mean_needed
from megaponder.ponder.settings import method_of

MODEL = {"family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 64}
LOSSES = {"vanilla": (4.0, 3.5, 3.2), "ponderlm": (4.2, 3.4, 3.0), "adaponderlm": (4.1, 3.45, 3.1)}


def make(run: Path, method: str, seed: int = 1, shift: float = 0.0, flops: bool = True, **sections: Any) -> Path:
    """A run folder as training leaves it: 10, 20 and 30 steps of 8 sequences of 16 tokens."""
    values: dict[str, Any] = {
        "run": str(run), "model": MODEL | sections.pop("model", {}), "ponder": {"method": method},
        "data": {"train": ["text"], "sequence_length": 16}, "train": {"steps": 30, "global_batch": 8, "seed": seed},
    }  # fmt: skip
    for section, fields in sections.items():
        values[section] = values.get(section, {}) | fields
    cfg = resolve(from_mapping(values))
    run.mkdir(parents=True)
    dump(cfg, run / "config.yaml")
    needed = mean_needed(cfg, method_of(cfg))
    with open(run / "metrics.jsonl", "w") as file:
        for step, loss in zip((10, 20, 30), LOSSES[method], strict=True):
            row: dict[str, Any] = {"step": step, "sequences": 8 * step, "tokens": 128 * step, "loss": loss}
            row |= {"validation_loss": loss + shift}
            if method == "adaponderlm":
                row |= {f"ponder_valid_active_pass{k}": 1.0 if k < 2 else 0.25 for k in range(4)}
                row |= {
                    "ponder_valid_mean_depth": 2.5,
                    "ponder_valid_loss_depth2": 3.0,
                    "ponder_valid_loss_depth4": 3.6,
                }
            if flops:
                row |= {"needed_flops": 0.9 * needed * row["tokens"], "executed_flops": needed * row["tokens"]}
                row |= {"training_seconds": 2.0 * step}
            file.write(json.dumps(row) + "\n")
    return run


def evaluated(loss: float, *others: tuple[str, float, float], analysis: Any = None) -> dict[str, Any]:
    """What `megaponder eval` writes of a model and its variants (name, loss, FLOPs)."""
    results = []
    for name, value, flops in (("as trained", loss, 2e5), *others):
        values = {"loss": value, "flops_per_token": flops, "bits_per_byte": value / 2.4, "targets": 500}
        results.append({"variant": name, "data": {"text": values}, "together": values})
    return {"results": results} | ({} if analysis is None else {"analysis": analysis})


def test_two_runs_become_files_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make(tmp_path / m, m) for m in LOSSES]
    (runs[1] / "eval.json").write_text(json.dumps(evaluated(3.0, ("1 pass", 3.3, 1e5))))
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "| vanilla " in out and "3.2000" in out and "1.2500" not in out  # bits per byte of one run alone
    assert f"{runs[0]}, {runs[2]} have none" in out
    assert "warning: besides the method, embedding scale differs: 1 (vanilla); 5.657 (ponderlm, adaponderlm)." in out
    assert "initialisation differs" in out and "data.train" not in out and "train.seed" not in out
    folder = tmp_path / "out"
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(folder / "compare.svg")
    page = (folder / "compare.html").read_text()
    assert "embedding scale differs" in page and "<svg" in page and "<script" not in page
    assert r"\toprule" in (folder / "compare.tex").read_text() and "compare.png" in (folder / "compare.md").read_text()
    rows = list(csv.DictReader((folder / "compare.csv").open()))
    assert [r["method"] for r in rows] == ["vanilla", "ponderlm", "adaponderlm"] and float(rows[0]["tokens"]) == 3840
    found = results.read_run(runs[2])
    assert found.by_depth == {2: 3.0, 4: 3.6} and found.depth == 2.5
    assert float(rows[2]["inference"]) < float(rows[1]["inference"])  # tokens that halt cost less
    assert float(rows[1]["needed"]) == pytest.approx(0.9 * float(rows[1]["executed"]))


def analysis(shift: float = 0.0, depth: float = 1.6) -> dict[str, Any]:
    """What `megaponder eval --depth` tells of a model with three passes, in part."""

    def gain(share: float) -> dict[str, float]:
        return {"share": share, "score": 0.06 + shift, "random": 0.04, "hindsight": 0.1}

    decisions = [
        {"after": k, "benefit": b, "standard_error": 0.001, "rank_correlation": 0.3 + shift, "gain": [gain(0.5)]}
        for k, b in ((1, 0.2), (2, 0.1))
    ]
    kinds = [
        {"by": by, "class": name, "share": 0.5, "depth": d, "loss": 3.0, "losses": [3.3, 3.1, 3.0]}
        for by, name, d in (
            ("text", "word start", depth + 0.2),
            ("text", "digits", depth - 0.2),
            ("frequency", "rank 1 to 10", depth),
        )
    ]
    chance = {"loss": 3.1, "minus_policy": 0.02 + shift, "standard_error": 0.002}
    policy = {"depth": depth, "depth_nll_correlation": -0.1, "shuffled": chance, "uniform": chance}
    return {"losses": [3.3 + shift, 3.1, 3.0], "decisions": decisions, "classes": kinds, "policy": policy}


def test_what_passes_bring_and_who_gets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make(tmp_path / f"a{s}", "adaponderlm", seed=s) for s in (1, 2)] + [make(tmp_path / "v", "vanilla")]
    for s, run in enumerate(runs[:2]):
        told = evaluated(3.1, analysis=analysis(0.02 * s))
        told["sweep"] = [
            {"variant": v, "kind": kind, "loss": loss, "flops_per_token": flops}
            for v, kind, loss, flops in (
                ("as trained", "as trained", 3.1, 2e5), (f"share 0.6, threshold {s}", "halting", 3.2 + 0.1 * s, 1e5),
                ("random, threshold 1", "random", 2.9, 1e5), ("share 0.8", "halting", 3.3, 1.5e5),
            )
        ]  # fmt: skip
        (run / "eval.json").write_text(json.dumps(told))
    (runs[2] / "eval.json").write_text(json.dumps(evaluated(3.4)))
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "Losses in the tables are of text (500 targets)" in out and "3.1000 ± 0.0000" in out and "1.4167" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "| adaponderlm | 1 | 3.3100 | 0.2000 | 0.3100 | 0.0700 | 0.0400 | 0.1000 |" in lines
    assert "| adaponderlm | 1.60 | +0.0300 ± 0.0100 | +0.0300 ± 0.0100 | -0.10 |" in lines
    assert "| word start | 1.80 | 0.300 |" in lines
    # chance is no candidate for the best; what is dearer and worse is left out
    best = [line for line in lines if line.startswith("| adaponderlm | share")]
    assert best == ["| adaponderlm | share 0.6, threshold 0 | 1e+05 | 3.2500 |"]
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.count("<table>") == 6 and "Does the score know whom a pass helps?" in page
    latex = (tmp_path / "out" / "compare.tex").read_text()
    assert latex.count(r"\begin{tabular}") == 6
    rows = list(csv.DictReader((tmp_path / "out" / "compare.csv").open()))
    assert [float(r["shuffled_minus_own"] or "nan") for r in rows[:2]] == pytest.approx([0.02, 0.04])
    assert rows[2]["loss_after_1"] == ""


def test_seeds_are_one_curve_with_its_spread(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"v{s}", "vanilla", seed=s, shift=0.1 * s) for s in (1, 2, 3)]
    runs += [make(tmp_path / f"p{s}", "ponderlm", seed=s) for s in (1, 2, 3)]
    found = [results.read_run(run) for run in runs]
    groups = results.grouped(found, differences.labels(found))
    assert [(g.label, len(g.results)) for g in groups] == [("vanilla", 3), ("ponderlm", 3)]
    assert groups[0].mean("loss") == pytest.approx(3.4) and groups[0].spread("loss") == pytest.approx(0.1)
    tokens, mean, low, high = groups[0].curve("tokens")[-1]
    assert (tokens, mean, low, high) == pytest.approx((3840, 3.4, 3.3, 3.5))
    assert not [w for w in differences.warnings(groups) if "seed" in w]  # the order of text follows the seeds in both
    bands = [c for axes in draw(groups).axes[:2] for c in axes.collections]
    assert len(bands) == 4
    same = depth.number([0.1] * 3)  # whose sum divided by 3 is more
    assert same.low == same.mean == same.high == 0.1


def test_every_setting_that_differs_is_named(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / "a", "vanilla", model={"embedding_scale": "sqrt_h", "init": "trunc_normal"}),
        make(
            tmp_path / "b", "ponderlm", optimizer={"lr": 1e-3}, schedule={"kind": "linear"}, data={"train": ["other"]}
        ),
        make(tmp_path / "c", "ponderlm", optimizer={"lr": 2e-3}, logging={"every": 3}, parallel={"timeout_minutes": 3}),
    ]
    found = [results.read_run(run) for run in runs]
    labels = differences.labels(found)
    assert list(labels.values())[1].startswith("ponderlm, ") and "lr 0.002" in labels[str(runs[2])]
    said = differences.warnings(results.grouped(found, labels))
    names = {sentence.partition(" differs")[0] for sentence in said}
    assert names == {"optimizer.lr", "schedule.kind", "data.train", "initialisation"}  # scales are equal; x 0.5 is not
    assert any('0.001 ("ponderlm, ' in s and "0.0003 (vanilla)" in s for s in said)


def test_runs_that_start_from_the_same_weights_do_not_differ_in_what_was_never_drawn(tmp_path: Path) -> None:
    def said(*loads: str) -> set[str]:
        runs = [
            make(tmp_path / "-".join((method, *loads)), method, checkpoint={"load": load})
            for method, load in zip(("vanilla", "ponderlm"), loads, strict=True)
        ]
        found = [results.read_run(run) for run in runs]
        groups = results.grouped(found, differences.labels(found))
        return {sentence for sentence in differences.warnings(groups) if sentence.startswith("initialisation")}

    assert not said("imported", "imported")
    (other,) = said("imported", "another")
    assert "the weights of another (ponderlm" in other


def test_long_labels_are_folders_and_equal_ones_are_told_apart(tmp_path: Path) -> None:
    near = [make(tmp_path / f"n{i}", "vanilla", optimizer={"lr": lr}) for i, lr in enumerate((1e-3, 1.00001e-3))]
    far = [make(tmp_path / f"f{i}", "ponderlm", data={"train": ["ab"[i] * 70]}) for i in (0, 1)]
    found = [results.read_run(run) for run in (*near, *far)]
    labels = list(differences.labels(found).values())
    assert labels[0] == "vanilla, lr 0.001" and labels[1:] == [
        f"vanilla: {near[1]}", f"ponderlm: {far[0]}", f"ponderlm: {far[1]}"
    ]  # fmt: skip


def test_numbers_that_cannot_be_compared_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other tokenizers, an evaluation of an earlier step, a run that is not finished."""
    runs = [make(tmp_path / m, m) for m in ("vanilla", "ponderlm")]
    for run, tokenizer in zip(runs, ("a" * 64, "b" * 64), strict=True):
        (run / "data.json").write_text(json.dumps({"datasets": {"text": {"tokenizer": tokenizer}}}))
        (run / "eval.json").write_text(json.dumps(evaluated(2.5) | {"step": 30 if run is runs[0] else 20}))
    metrics = runs[0] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 30', '"total_steps": 40, "step": 30'))
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "tokenizer differs: aaaaaaaa (vanilla); bbbbbbbb (ponderlm). Losses per token cannot be compared" in out
    assert f"{runs[0]} is not finished: it is at step 30 of 40." in out
    assert f"{runs[1] / 'eval.json'} is of step 20, and the run at 30: not used" in out and "2.5000" not in out


def test_runs_without_flops_are_told(tmp_path: Path) -> None:
    run = make(tmp_path / "old", "vanilla", flops=False)
    found = results.read_run(run)
    assert found.config is not None
    assert found.last.needed == pytest.approx(3840 * mean_needed(found.config, method_of(found.config)))
    assert "do not tell FLOPs" in found.notes[0] and found.last.seconds is None


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        results.read_run(tmp_path / "none")
    run = make(tmp_path / "run", "vanilla")
    assert main(["compare", *(str(tmp_path / name) for name in ("none", "run", "nor"))]) == 2
    assert f"{tmp_path / 'none'}, {tmp_path / 'nor'}: there are no such run folders." in capsys.readouterr().err
    (run / "eval.json").write_text("[]")
    with pytest.raises(UserError, match="is not what `megaponder eval --json` writes"):
        results.read_run(run)
    (run / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"config.yaml is missing"):
        results.read_run(run)
    rows = (run / "metrics.jsonl").read_text().replace("validation_loss", "other")
    (run / "metrics.jsonl").write_text(rows)
    with pytest.raises(UserError, match="no validation_loss"):
        results.read_run(run)
