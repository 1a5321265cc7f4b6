"""The .bin/.idx pair: damage is found and named; descriptions must fit."""

import os
from pathlib import Path

import pytest

from megaponder.data.indexed import read_index
from megaponder.data.info import inspect_dataset
from megaponder.errors import UserError
from tests.data_pipeline.make import describe, random_documents, write_documents


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_documents(tmp_path / "set", random_documents([5, 0, 1, 17, 30]))


def test_inspect(prefix: str) -> None:
    info = inspect_dataset(prefix)
    assert (info.documents, info.tokens, info.dtype, info.shortest, info.longest) == (5, 53, "uint16", 0, 30)
    assert info.bin_bytes == 106 and info.meta is None
    describe(prefix, 5, 53)
    meta = inspect_dataset(prefix).meta
    assert meta is not None and meta.eod_id == 0


def test_tokens_in_ranges(prefix: str) -> None:
    index = read_index(prefix)
    assert [index.tokens_in(0, i) for i in range(6)] == [0, 5, 5, 6, 23, 53]
    assert index.tokens_in(2, 4) == 18 and index.max_id() < 100


def test_fingerprint_follows_the_lengths(tmp_path: Path) -> None:
    one = write_documents(tmp_path / "one", random_documents([5, 6, 7, 8] * 400))
    same = write_documents(tmp_path / "same", random_documents([5, 6, 7, 8] * 400, seed=1))
    other = write_documents(
        tmp_path / "other", random_documents([5, 6, 7, 8] * 199 + [5, 7, 6, 8] + [5, 6, 7, 8] * 200)
    )
    assert read_index(one).fingerprint() == read_index(same).fingerprint() != read_index(other).fingerprint()


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated(prefix: str, suffix: str) -> None:
    path = prefix + suffix
    for size in (os.path.getsize(path) - 1, 40, 3, 0):
        os.truncate(path, size)
        with pytest.raises(UserError, match=rf"set\{suffix}: .*(truncated|not the index)"):
            read_index(prefix)


def test_missing_names_neighbours(prefix: str) -> None:
    with pytest.raises(UserError, match=r"sat\.idx: no such file \(datasets in that folder: set\)"):
        read_index(prefix.replace("set", "sat"))
    os.remove(prefix + ".bin")
    with pytest.raises(UserError, match=r"set\.bin: no such file"):
        read_index(prefix)


def test_foreign_and_empty(prefix: str, tmp_path: Path) -> None:
    Path(prefix + ".idx").write_bytes(b"TNTIDX\x00\x00" + bytes(100))
    with pytest.raises(UserError, match="old lazy/cached format"):
        read_index(prefix)
    empty = write_documents(tmp_path / "empty", [])
    with pytest.raises(UserError, match="no documents"):
        read_index(empty)


def test_description_of_other_files(prefix: str) -> None:
    describe(prefix, 5, 54)
    with pytest.raises(UserError, match="belong to different datasets"):
        inspect_dataset(prefix)
    Path(prefix + ".json").write_text("{")
    with pytest.raises(UserError, match="Invalid JSON"):
        inspect_dataset(prefix)
    Path(prefix + ".json").write_text('{"format": "megaponder-dataset-1"}')
    with pytest.raises(UserError, match="Field required"):
        inspect_dataset(prefix)


def test_pipes_are_no_dataset(tmp_path: Path) -> None:
    """Opening one would wait for ever."""
    for suffix in (".idx", ".bin"):
        os.mkfifo(tmp_path / f"x{suffix}")
    with pytest.raises(UserError, match=r"x\.idx is a pipe or a device"):
        read_index(tmp_path / "x")
