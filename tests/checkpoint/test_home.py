"""A run's tokenizer and datasets are found from another folder than the one that it was started in."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaponder.checkpoint.home import at_home
from megaponder.config.schema import DataConfig, RunConfig


def test_paths_start_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    for name in ("words/tokenizer.json", "data/a.idx", "data/b.idx"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    (home / "bytes").touch()
    (away / "data").mkdir(parents=True)
    (away / "data/b.idx").touch()
    monkeypatch.chdir(away)

    def seen(run: str, place: Path, **data: object) -> DataConfig:
        data = {"tokenizer": "words", **data}
        cfg = RunConfig(run=run, data=DataConfig(**data))  # type: ignore[arg-type]
        return at_home(cfg, place / "checkpoints" / "step_00000001").data

    place = home / "runs/first"
    found = seen("runs/first", place, train=[0.5, "data/a", "2", "data/b.bin"], valid={"a": ["data/a.idx", "data/c"]})
    assert found.tokenizer == str(home / "words")
    assert found.train == [0.5, str(home / "data/a"), "2", "data/b.bin"], "what is found from here stays"
    assert found.valid == {"a": [str(home / "data/a.idx"), "data/c"]}
    assert seen("./runs/../runs/first/", Path("../home/runs/first")).tokenizer == str(home / "words")
    assert seen(".", home).tokenizer == str(home / "words")
    assert seen("runs/first", place, tokenizer="bytes").tokenizer == "bytes"
    for run, there in ((str(place), place), ("runs/first", home / "copies/first"), ("../first", place)):
        assert seen(run, there).tokenizer == "words", "its place does not tell where it was started"
