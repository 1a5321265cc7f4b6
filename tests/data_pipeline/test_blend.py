"""Blends and splits: what is read, what is refused."""

from itertools import pairwise

import pytest

from megaponder.data.blend import Source, parse_blend, parse_split, split_ranges, unread
from megaponder.errors import ConfigError


def test_plain_paths_and_weights() -> None:
    assert parse_blend(["a", "dir/b.bin", "c.idx"], "f") == [
        Source("a", None),
        Source("dir/b", None),
        Source("c", None),
    ]
    assert parse_blend([0.3, "a", "0.7", "b"], "f") == [Source("a", 0.3), Source("b", 0.7)]
    assert parse_blend(["1", "a"], "f") == [Source("a", 1.0)]
    assert parse_blend([], "f") == []


def test_sources_of_weight_0_are_not_read() -> None:
    assert parse_blend([0, "a", 0.7, "b.bin", "0", "c.idx"], "f") == [Source("b", 0.7)]
    assert unread([0, "a", 0.7, "b.bin", "0", "c.idx"]) == ["a", "c"] and unread(["a", "b"]) == []


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([0.3, "a", "b"], "alternating weights and paths"),
        (["a", 0.3], "alternating weights and paths"),
        ([0.3, 0.7, "a", "b"], "alternating weights and paths"),
        ([0.0, "a"], "all its weights are 0"),
        ([-1, "a"], "must be a finite number of at least 0"),
        (["nan", "a"], "must be a finite number of at least 0"),
        (["inf", "a"], "must be a finite number of at least 0"),
        ([1e308, "a", 1e308, "b"], "less than a billionth"),
        ([1e308, "a", 1, "b"], "the weight of b is less than a billionth"),
        ([1e-320, "a", 1, "b"], "the weight of a is less than a billionth"),
        ([x for i in range(32767) for x in (1, f"d{i}")], "at most"),
    ],
)
def test_refused_blends(items: list[str | float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_blend(items, "data.train")


def test_split_covers_everything_once() -> None:
    for elements in (1, 7, 33, 1000, 123457):
        ranges = split_ranges("969,30,1", elements)
        assert ranges[0][0] == 0 and ranges[-1][1] == elements
        assert all(a[1] == b[0] for a, b in pairwise(ranges))


@pytest.mark.parametrize("split", ["", "a,b", "0,1", "-1,2", "1,2,3,4", "969/30/1"])
def test_refused_splits(split: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.split"):
        parse_split(split)
