"""A mistake in a command of benchmarks/ is one sentence and exit code 2, and leaves the tables of before."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.command import RESULTS, write
from benchmarks.training import _idle, chosen, config, planned_gib
from benchmarks.training_rows import TABLES, WORLDS
from megaponder.errors import UserError
from tests.distributed import Workers, run_workers

SCRIPTS = (
    "attention",
    "budgets",
    "calibrate",
    "compare_commits",
    "gentle_start",
    "decoding",
    "documents",
    "domain",
    "family",
    "halting",
    "interrupted",
    "lineage",
    "long_context",
    "methods",
    "one_row",
    "preprocessing",
    "serving",
    "training",
    "transfer",
    "upcycle",
)

REFUSED = {
    "training nothing": "there is no such choice",
    "training baseline --only nothing": "no row of baseline contains it; its rows are: megatron-core 410m; vanilla",
    "training baseline --steps 0": "--steps: 0: it must be at least 1; use 1",
    "training baseline --warm -1": "--warm: -1: it must be at least 0; use 0",
    "training baseline --micro-batches 0": "--micro-batches: 0: it must be at least 1; use 1",
    "training two-gpus --steps 1.5": "--steps = 1.5: it must be an integer; the nearest is 2",
    "training baseline --output pyproject.toml": "--output: 'pyproject.toml': it must be a folder",
    "training baseline --output ''": "--output: '': it must be a folder",
    "attention --rounds 0": "--rounds: 0: it must be at least 1; use 1",
    "attention --nothing": "--nothing",
    "budgets nothing 0.6 --data nope": "there is no such choice",
    "budgets adaponderlm 0.6 --data nope": "nope.idx: no such file",
    "budgets adaponderlm 0.6 --data nope --steps 9": "--steps: 9: it must be at least 250; use 250",
    "documents --corpus nope": "there is no train.jsonl",
    "family --data nope --domain nope --instructions nope --tokenizer x": "nope.idx: no such file",
    "domain --corpus nope": "there is no train.jsonl",
    "upcycle --corpus nope": "there is no train.jsonl",
    "documents --corpus nope --length 1": "--length: 1: it must be at least 2; use 2",
    "gentle_start --corpus nope": "there is no train.jsonl",
    "gentle_start --corpus nope --kinds nothing": "there is no such choice",
    "decoding depth --rounds 0": "--rounds: 0: it must be at least 1; use 1",
    "decoding nothing": "there is no such choice",
    "long_context --corpus nope": "there is no train.jsonl",
    "long_context --corpus nope --steps 1": "--steps: 1: it must be at least 2; use 2",
    "halting --layers 0": "--layers: 0: it must be at least 1; use 1",
    "halting --layers -1": "--layers: -1: it must be at least 1; use 1",
    "halting --hidden 33": "--hidden: 33: it must be at least 64; use 64",
    "halting --hidden 200": "--hidden: 200: it must be a multiple of 64; use 192",
    "halting --rounds 0": "--rounds: 0: it must be at least 1; use 1",
    "halting --batch 0": "--batch: 0: it must be at least 1; use 1",
    "halting --length 0": "--length: 0: it must be at least 1; use 1",
    "halting --vocab 0": "--vocab: 0: it must be at least 2; use 2",
    "interrupted nope.yaml --corpus nope": "nope.yaml: no such file; name a configuration",
    "interrupted configs/tiny-loop.yaml --corpus nope": "there is no train.jsonl",
    "interrupted configs/tiny-loop.yaml --corpus nope --layouts tensor2 pipeline=2": "--layouts tensor2: a layout",
    "interrupted configs/tiny-loop.yaml --corpus nope --kill 200": "use --every N <= --kill < --steps",
    "interrupted configs/tiny-loop.yaml --corpus nope --every 111": "use --every N <= --kill < --steps",
    "interrupted configs/tiny-loop.yaml --corpus nope --processes 1": "--processes: 1: it must be at least 2; use 2",
    "methods --data nope": "nope.idx: no such file",
    "methods --steps 0": "--steps: 0: it must be at least 5; use 5",
    "methods --jobs 0": "--jobs: 0: it must be at least 1; use 1",
    "methods --only": "--only: it needs a value; choose from vanilla, ",
    "methods --only nothing": "--only = nothing: there is no such choice",
    "preprocessing nope.txt": "nope.txt: no such file",
    "preprocessing --megabytes 0": "--megabytes: 0: it must be at least 0.001; use 0.001",
    "preprocessing --megabytes nan": "--megabytes: nan: it must be at least 0.001; use 0.001",
    "preprocessing --rounds 0": "--rounds: 0: it must be at least 1; use 1",
    "preprocessing --workers 0": "--workers: 0: it must be at least 1; use 1",
    "preprocessing --workers 2 0": "--workers: 0: it must be at least 1; use 1",
    "preprocessing --tokenizer none.json": "none.json: no such tokenizer",
    "preprocessing --tokenizer bytes": "bytes: the plain loop reads a file tokenizer.json",
    "serving": "no engine is given; name at least one",
    "serving --vllm nope": "--vllm: nope: no such file or folder",
    "serving --llama nope pyproject.toml": "'pyproject.toml': it must be a folder",
    "compare_commits tests": "tests: this folder holds no tree of megaponder; name a commit",
    "compare_commits no-such-commit": "no-such-commit is neither a folder nor a commit that git can check out here",
    "compare_commits HEAD --only nothing": "no case contains it; the cases are: vanilla, loop",
    "compare_commits HEAD --jobs 0": "--jobs: 0: it must be at least 1; use 1",
    "transfer width": "--corpus is missing: name a folder with train.jsonl",
    "transfer width --corpus nope": "there is no train.jsonl",
    "transfer nothing": "there is no such choice",
    "transfer width --report --output docs": "docs: it has no result of these sweeps; leave out --report to run them",
    "calibrate nope --depth 2": "no checkpoint or run folder nope",
    "calibrate run": "required: --depth",
    "calibrate run --depth 9": "run has 4 passes, and the depth must lie between 1 and 4; use 4",
    "calibrate run --depth 0": "between 1 and 4; use 1",
    "calibrate run --depth nan": "between 1 and 4; use 1",
    "calibrate run --depth 2 --tries 0": "--tries: 0: it must be at least 1; use 1",
    "calibrate run --depth 2 --batches 0": "--batches: 0: it must be at least 1; use 1",
    "calibrate vanilla --depth 2": "method vanilla; calibration needs ponderlm",
}


def main(script: str, *words: str) -> int:
    return import_module(f"benchmarks.{script}").main(list(words))


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder: when it was written, and what it holds."""
    return {
        str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture(autouse=True)
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands are given in the repository's root, and none here touches the results."""
    monkeypatch.chdir(RESULTS.parents[1])
    before = files(RESULTS)
    yield
    assert files(RESULTS) == before


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` of ponderlm and `vanilla`, where no checkpoint lies; other names are as they are."""
    calibrate = import_module("benchmarks.calibrate")
    load, methods = calibrate.load_weights, {"run": "ponderlm", "vanilla": "vanilla"}

    def loaded(path: Path) -> Any:
        if str(path) not in methods:
            return load(path)
        return SimpleNamespace(ponder=SimpleNamespace(method=methods[str(path)], options={"steps": 3})), None

    monkeypatch.setattr(calibrate, "load_weights", loaded)


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    out, told = capsys.readouterr()
    assert out == "" and told.startswith("error: ") and told.count("\n") == 1 and told.endswith(".\n"), (out, told)
    return told


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line: str, runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*shlex.split(line)) == 2
    assert REFUSED[line] in one_sentence(capsys)


@pytest.mark.parametrize("table", TABLES)
def test_training_without_gpu(table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main("training", table) == 2
    assert "needs a GPU" in one_sentence(capsys)


@pytest.mark.parametrize(
    ("table", "world", "fix"), [("two-gpus", 1, "torchrun --nproc-per-node 2"), ("passes", 2, "python -m benchmarks")]
)
def test_a_table_needs_its_launcher(
    table: str, world: int, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert main("training", table) == 2
    assert fix in one_sentence(capsys)


@pytest.mark.parametrize("table", [name for name, world in WORLDS.items() if world > 2])
def test_rows_of_many_gpus_are_legal_and_fit_an_h200(table: str) -> None:
    for row in TABLES[table]:
        assert row.micro_batches
        cfg = config(row, row.micro_batches, WORLDS[table])
        for stage in {0, row.pipeline - 1}:
            assert planned_gib(row, cfg, WORLDS[table], stage) < 130, row.name


def test_a_pipeline_is_compared_with_its_bubble() -> None:
    def measured(count: int, seconds: float) -> dict[str, Any]:
        row = {"pipeline": 4, "options": {"steps": 3}}
        return {"name": f"PP4, M={count}", "row": row, "micro_batches": count, "seconds": seconds}

    lines = _idle([measured(8, 2 * 8 + 1), measured(32, 2 * 32 + 1)])
    assert lines[-2:] == ["| PP4 | 8 | 6.2% | 9.4% |", "| PP4 | 32 | 1.6% | 2.3% |"]
    assert _idle([measured(8, 1.0)]) == []


@pytest.mark.parametrize("works", ["none", "vanilla 410m, captured"])
def test_rows_that_all_fail_replace_no_table(works: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training-baseline.md").write_text("measured")
    before, seen = files(tmp_path), []

    def measure(row: Any, args: Any) -> Any:
        seen.append(row.name)
        if row.name != works:
            raise RuntimeError("no memory")
        return dict(
            name=row.name, tokens_per_second_per_gpu=1.0, mfu=0.1, peak_gib=1.0, set_up_s=1.0, seconds=1.0, loss=1.0
        )

    monkeypatch.setattr("benchmarks.training.measure", measure)
    monkeypatch.setattr("benchmarks.training.table", lambda rows, args: f"{len(rows)} rows")
    monkeypatch.setattr("benchmarks.training._in_use", lambda: 0)
    for name, given in {"device_count": 1, "set_device": None, "empty_cache": None}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, given=given: given)
    assert main("training", "baseline", "--output", str(tmp_path)) == 1
    assert seen == [row.name for row in TABLES["baseline"]]
    if works == "none":
        assert files(tmp_path) == before
    else:
        assert (tmp_path / "training-baseline.md").read_text() == "6 rows"


def test_a_row_that_failed_on_one_rank_is_the_last() -> None:
    here = "tests.benchmarks.measured_workers:rows"
    assert run_workers(here, 2, args={"fails": True}) == [[True, False]] * 2
    workers = Workers(here, 2, {"fails": False})
    try:
        while workers.poll()[0] is None:  # rank 1 never comes
            time.sleep(0.05)
        assert workers.poll()[0] == 1 and "another rank is not done with the row" in workers.output(0)
    finally:
        workers.kill()


def test_rows_are_chosen_by_several_names() -> None:
    names = [row.name for row in chosen("long", ["four passes, 3", "one pass"])]
    assert names[:2] == ["CP=2, 32k tokens, four passes, 3 offloaded", "CP=2, 128k tokens, four passes, 3 offloaded"]
    assert len(names) == 6 and all("one pass" in name for name in names[2:])


def test_a_method_that_fails_leaves_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any) -> Any:
        raise UserError("It went wrong.")

    for name, function in {"run": run, "read_index": len, "load_tokenizer": len}.items():
        monkeypatch.setattr(f"benchmarks.methods.{name}", function)
    assert main("methods", "--only", "loop", "--output", str(tmp_path / "out")) == 2
    assert "It went wrong." in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


def test_results_are_written_both_or_none(tmp_path: Path) -> None:
    write(tmp_path, "a", [1], "first\n")
    before = files(tmp_path)
    assert sorted(before) == ["a.json", "a.md"]
    (tmp_path / "a.md.partial").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path, "a", [2], "second\n")
    assert {name: (tmp_path / name).read_bytes() for name in before} == {
        name: text for name, (_, text) in before.items()
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(script, "--help")
    told = capsys.readouterr().out
    assert ended.value.code == 0 and f"python -m benchmarks.{script}" in told
    assert ("--output" in told) == (script not in ("budgets", "calibrate", "compare_commits"))  # which only print


def test_every_script_is_tried() -> None:
    parts = {"command", "long_roads", "long_texts", "one_tree", "report", "training_rows"}
    assert {p.stem for p in RESULTS.parent.glob("*.py")} == {*SCRIPTS, *parts}
