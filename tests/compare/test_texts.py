"""`megaponder compare` of texts: which data runs read, named sets, runs that repeat each other, losses of one text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaponder.cli.main import main
from megaponder.compare import depth, differences, results, table
from megaponder.compare.figure import _style, draw
from tests.compare.test_compare import evaluated, make


def read(run: Path, **identities: str) -> results.Result:
    """With a record of the datasets that the run read: path and what identifies the content."""
    datasets = {path: {"samples": content, "tokenizer": "t" * 64} for path, content in identities.items()}
    (run / "data.json").write_text(json.dumps({"datasets": datasets}))
    return results.read_run(run)


def groups_of(*found: results.Result) -> list[results.Group]:
    return results.grouped(found, differences.labels(found))


def test_other_content_under_the_same_path_is_another_text(tmp_path: Path) -> None:
    valid = {"valid": {"code": ["held"]}}
    first, rewritten, held, again = (
        read(make(tmp_path / name, "vanilla", seed=s, data=valid), text=text, held=looked)
        for s, (name, text, looked) in enumerate(
            (("a", "one", "x"), ("b", "other", "x"), ("c", "one", "y"), ("d", "one", "x"))
        )
    )
    groups = groups_of(first, rewritten, held, again)
    assert [[r.name[-1] for r in g.results] for g in groups] == [["a", "d"], ["b"], ["c"]]
    said = {s.partition(" differs")[0]: s for s in differences.warnings(groups)}
    assert {"data.train", "data.valid"} <= set(said)
    assert f"text ({rewritten.data['text'][:8]})" in said["data.train"]
    assert f"held ({held.data['held'][:8]})" in said["data.valid"]


def test_the_same_content_elsewhere_is_the_same_text(tmp_path: Path) -> None:
    here = read(make(tmp_path / "a", "vanilla"), text="one")
    there = read(make(tmp_path / "b", "vanilla", seed=2, data={"train": ["moved"]}), moved="one")
    unknown = results.read_run(make(tmp_path / "c", "ponderlm", data={"train": ["moved"]}))
    groups = groups_of(here, there, unknown)
    assert [len(g.results) for g in groups] == [2, 1]
    assert any(s.startswith("data.train differs: text (vanilla); moved") for s in differences.warnings(groups))


def test_another_tokenizer_is_told_of_runs_of_one_group(tmp_path: Path) -> None:
    group = groups_of(*(read(make(tmp_path / n, "vanilla", seed=s), other="one") for s, n in enumerate("ab")))
    assert len(group) == 1 and not differences.warnings(group)
    datasets = {"other": {"samples": "one", "tokenizer": "u" * 64}}  # not the text that it trained on
    (tmp_path / "b" / "data.json").write_text(json.dumps({"datasets": datasets}))
    group = groups_of(*(results.read_run(tmp_path / n) for n in "ab"))
    assert len(group) == 1 and "tokenizer differs" in differences.warnings(group)[0]


def test_a_split_that_nothing_reads_is_no_difference(tmp_path: Path) -> None:
    valid = {"valid": ["held"]}
    runs = [
        make(tmp_path / "a", "vanilla", data=valid),
        make(tmp_path / "b", "ponderlm", data=valid | {"split": "9,1"}),
    ]
    split = [make(tmp_path / "c", "vanilla"), make(tmp_path / "d", "ponderlm", data={"split": "90,10,0"})]
    told = [[s for s in differences.warnings(groups_of(*map(results.read_run, pair))) if "data.split" in s]
            for pair in (runs, split)]  # fmt: skip
    assert [len(t) for t in told] == [0, 1]


def test_named_sets_have_their_columns(tmp_path: Path) -> None:
    valid = {"valid": {"code": ["a"], "prose": ["b"]}}
    runs = [make(tmp_path / m, m, data=valid) for m in ("vanilla", "ponderlm")]
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows[-1] |= {"validation_loss_code": 3.25, "validation_loss_prose": 3.75}
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = groups_of(*map(results.read_run, runs))
    head, *lines = table.tables(groups)[0].rows
    assert (
        head[3:6] == ["loss", "loss, code", "loss, prose"]
        and [line[4:6] for line in lines] == [["3.2500", "3.7500"]] * 2
    )
    assert table.comma_separated(groups).splitlines()[0].startswith("method,run,tokens,loss,loss_code,loss_prose,")
    other = results.read_run(make(tmp_path / "other", "adaponderlm"))  # without sets
    assert "loss, code" not in table.tables(groups_of(*(r for g in groups for r in g.results), other))[0].rows[0]


def test_runs_that_repeat_each_other_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (results.read_run(make(tmp_path / name, "vanilla", seed=5)) for name in "ab")
    said = " ".join(results.notes_of(groups_of(a, b)))
    assert f"{a.name}, {b.name} have the same seed, 5: the spread of vanilla is too small." in said
    assert "the standard deviation over runs" in said
    alone = str(Path(os.path.relpath(tmp_path / "a")))  # one run under two names
    assert main(["compare", str(tmp_path / "a"), alone, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "±" not in out and "same seed" not in out


def test_a_run_that_diverged_is_shown_as_such(tmp_path: Path) -> None:
    run = make(tmp_path / "a", "vanilla")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["validation_loss"] = float("nan")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = results.read_run(run), results.read_run(make(tmp_path / "b", "ponderlm"))
    assert f"{run} has diverged: its last held-out loss is nan." in found[0].notes
    low, high = draw(groups_of(*found)).axes[0].get_ylim()
    assert 2 < low < high < 5
    draw(groups_of(found[0]))


def test_losses_of_different_texts_are_not_drawn_together(tmp_path: Path) -> None:
    runs = [make(tmp_path / m, m) for m in ("vanilla", "ponderlm")]
    (runs[1] / "eval.json").write_text(json.dumps(evaluated(2.0, ("1 pass", 2.5, 1e5))))
    some = draw(groups_of(*map(results.read_run, runs))).axes[2]
    assert not some.texts and not [line for line in some.lines if 2.5 in line.get_ydata()]
    (runs[0] / "eval.json").write_text(json.dumps(evaluated(2.2, ("1 pass", 2.6, 1e5))))
    both = draw(groups_of(*map(results.read_run, runs))).axes[2]
    assert both.texts and [line for line in both.lines if 2.5 in line.get_ydata()]
    (runs[0] / "eval.json").write_text(json.dumps(evaluated(2.2, ("1 pass", 9.0, 1e5))))
    assert 2.5 <= draw(groups_of(*map(results.read_run, runs))).axes[2].get_ylim()[1] < 3


def test_many_groups_have_styles_of_their_own() -> None:
    assert len({tuple(_style(i).items()) for i in range(60)}) == 60


def test_losses_by_depth_are_means_over_seeds_and_a_curve_only_of_the_same_tokens(tmp_path: Path) -> None:
    found = [results.read_run(make(tmp_path / f"{m}{s}", m, seed=s, shift=0.1 * s))
             for m in ("ponderlm", "adaponderlm") for s in (1, 2)]  # fmt: skip
    groups = groups_of(*found)
    assert depth.by_depth(groups[1])[2].mean == 3.0
    lines = draw(groups).axes[3].lines
    assert [(line.get_linestyle(), line.get_fillstyle()) for line in lines] == [("None", "none")]
