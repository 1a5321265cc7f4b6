"""Most and least pondered tokens of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megaponder.config.schema import RunConfig
from megaponder.engine import depth
from megaponder.monitor.pondered import NAME, Pondered


def _seen() -> torch.Tensor:
    ids = torch.tensor([[65, 65, 65, 66], [66, 66, 67, 67]]).t()
    depths = torch.tensor([[4, 4, 3, 1], [1, 1, 2, 2]]).t()
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).t()
    return depth.by_token(depths, ids, valid, 256)


def test_sums_count_valid_tokens_only() -> None:
    sums, counts = _seen()
    assert [float(sums[i]) for i in (65, 66, 67)] == [11.0, 3.0, 2.0]
    assert [float(counts[i]) for i in (65, 66, 67)] == [3.0, 3.0, 1.0]


def test_lists_and_resume(tmp_path: Path) -> None:
    cfg = RunConfig(run=str(tmp_path))
    cfg.data.tokenizer = "bytes"
    told = Pondered(cfg, 0, logs=True)
    sentence = told.write(5, _seen())
    assert sentence == "Pondered most: 'A' 3.67, 'B' 1.00; least: 'B' 1.00, 'A' 3.67."  # C occurs once: too rarely
    told.write(10, _seen())
    Pondered(cfg, 7, logs=True)  # a run that goes on from step 7
    rows = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert [row["step"] for row in rows] == [5]
    assert rows[0]["most"][0] == {"id": 65, "text": "A", "depth": 11 / 3, "count": 3}


def test_no_sentence_where_all_tokens_have_one_depth(tmp_path: Path) -> None:
    cfg = RunConfig(run=str(tmp_path))
    same = depth.by_token(torch.full((9, 1), 2), torch.arange(9)[:, None] // 3, torch.ones(9, 1), 16)
    assert Pondered(cfg, 0, logs=True).write(1, same) is None
    assert Pondered(cfg, 0, logs=False).write(2, same) is None
    row = json.loads((tmp_path / NAME).read_text())
    assert row["step"] == 1 and row["least"][0]["text"] == "0"
