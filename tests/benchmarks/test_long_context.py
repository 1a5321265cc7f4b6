"""The benchmark of longer texts: its questions have answers, its means are means, and every road is legal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.long_context import perplexities, report, result_of, run
from benchmarks.long_roads import SIZES, roads
from benchmarks.long_texts import FACTS, SYMBOLS, facts


def test_questions_have_answers() -> None:
    """Each target follows a key of the second half, and is what followed that key in the first."""
    for n, once in ((32, False), (32, True), (512, False), (512, True)):
        ids, counts = facts("cpu", once=once)(5, n)
        assert ids.shape == (5, n + 1) and int(counts.sum()) == 5 * (FACTS if once else n // 4)
        assert int((ids[:, n // 2 :] < SYMBOLS).sum()) == int(counts.sum()), "nothing else in that half names a key"
        for row, of in zip(ids.tolist(), counts.tolist(), strict=True):
            told = {row[i]: row[i + 1] for i in range(0, n // 2, 2) if row[i] < SYMBOLS}
            assert len(told) == 8
            for i, counted in enumerate(of):
                assert not counted or (i > n // 2 and row[i] == told[row[i - 1]] >= SYMBOLS)
    assert torch.equal(facts("cpu")(2, 64)[0], facts("cpu")(2, 64)[0]), "the same for every road"


def test_means_and_the_table() -> None:
    size = SIZES["tiny"]
    found = torch.cat([torch.full((2, 128), math.log(2.0)), torch.full((2, 128), math.log(8.0))], 1)
    seen = perplexities(found, size)
    assert seen == pytest.approx({32: 2.0, 64: 2.0, 128: 2.0, 256: 4.0})
    held = {"loss": 1.0, "uncached": 1.1, "bytes": dict.fromkeys(seen, 4096)}
    row = {"road": "freqkv", "length": 256, "seconds": 1.0, "perplexity": seen, "last": 8.0, "read": 2, "cached": held}
    told = {"size": vars(size), "name": "tiny", "command": "c", "origin": "o", "text": [row]}
    assert "Facts" not in report(told)
    text = report(told | {"facts": [{"road": "plain", "length": 32, "right": {32: 0.5}}]})
    assert "| freqkv | 256 | 1 | 2.000 | 2.000 | 2.000 | 4.000 | 8.000 |" in text and "| plain | 32 | 50.0% |" in text
    assert "| freqkv | 1.0000 | 1.1000 | 4,096 | 4,096 | 4,096 | 4,096 |" in text


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    for i, road in enumerate(roads(SIZES["tiny"], 256)):
        (tmp_path / result_of(road)).write_text(f'{{"road": "{road.name}", "seconds": {i}}}')
    found = run(tmp_path, SIZES["tiny"], 256, facts("cpu"), False, lambda *_: {}, pytest.fail)
    assert [row["seconds"] for row in found] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", SIZES)
def test_roads_go_as_far_as_they_say(name: str) -> None:
    size = SIZES[name]
    made = roads(size, size.longest)
    assert size.longest == 32 * size.window or name == "tiny"
    assert [r.length for r in made] == [size.window, size.longest, 8 * size.window, size.longest]
    assert made[1].features["rotary_scaling"]["factor"] * size.window == size.longest
    assert FACTS < SYMBOLS
