"""What tells a dataset from another one of its name, and parts of it that were never written."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megaponder.cli.main import main
from megaponder.data import checked
from megaponder.data.check import check_data, identities, open_data
from megaponder.data.checked import CheckedFile
from megaponder.data.identity import WINDOW, different, identify, unwritten
from megaponder.data.indexed import read_index
from megaponder.data.stream import build_streams
from megaponder.errors import UserError
from tests.data_pipeline.make import config, random_documents, write_documents

LENGTHS = [40] * 500  # 40 kB of tokens


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_documents(tmp_path / "set", random_documents(LENGTHS))


def overwrite(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_equal_datasets_are_equal_wherever_they_lie(prefix: str, tmp_path: Path) -> None:
    copy = write_documents(tmp_path / "copy", random_documents(LENGTHS))
    assert identify(read_index(prefix), None) == identify(read_index(copy), None)
    other = write_documents(tmp_path / "other", random_documents(LENGTHS, seed=1))
    found = identify(read_index(other), None).difference(asdict(identify(read_index(prefix), None)))
    assert found is not None and found.startswith("its hash of sampled tokens is ")
    lengths = write_documents(tmp_path / "lengths", random_documents([39, 41] * 250))
    assert "CRC-32 of .idx" in str(
        identify(read_index(lengths), None).difference(asdict(identify(read_index(prefix), None)))
    )
    longer = write_documents(tmp_path / "longer", random_documents([*LENGTHS, 3]))
    assert "its size of .bin is 40,006, not 40,000" in str(
        identify(read_index(longer), None).difference(asdict(identify(read_index(prefix), None)))
    )


def test_every_kind_of_difference_is_told(prefix: str) -> None:
    one = identify(read_index(prefix), None)
    for name in asdict(one):
        changed = asdict(one) | {name: "x"}
        assert one.difference(changed) is not None
        assert different({"a": asdict(one)}, {"a": changed}) is not None
    assert one.difference(asdict(one)) is None and different({"a": asdict(one)}, {"a": asdict(one)}) is None


def test_a_hole_is_found_wherever_it_is(prefix: str) -> None:
    """As an interrupted copy, or a crash before the bytes reached the disk, leaves it."""
    assert unwritten(read_index(prefix)) is None
    tokens = np.tile(np.arange(1, 90, dtype=np.uint16), 300_000)[:20_000_000]
    big = write_documents(Path(prefix).parent / "big", [[1]])
    lengths = np.full(20_000, 1000, np.int32)
    from megaponder.data.indexed import write_index

    write_index(f"{big}.idx", "uint16", lengths)
    with open(f"{big}.bin", "wb") as file:  # 40 MB, of which 64 windows are a hundredth
        file.write(tokens[:4_000_000].tobytes())
        file.seek(8_000_000 + 64 * WINDOW)
        file.write(tokens[4_000_000 + 32 * WINDOW :].tobytes())
    found = unwritten(read_index(big))
    if found is None:
        pytest.skip("this file system has no holes")
    assert "never written (a hole in the file)" in found and "bytes 8,0" in found


def test_zeros_without_a_hole_are_found_in_windows(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    overwrite(f"{prefix}.bin", 8000, bytes(20_000))
    with pytest.raises(UserError, match=r"set\.bin: bytes 8,192 to 12,288 are all zero, .* data\.accept_zeros: \["):
        check_data(config(Path(prefix).parent, [prefix]))
    check_data(config(Path(prefix).parent, [prefix], accept_zeros=[prefix]))
    assert main(["inspect", prefix, "--audit"]) == 1
    assert (
        "zero-filled 8,192 tokens, the first number 4,096; an incompletely copied file has" in capsys.readouterr().out
    )


def test_few_zeros_are_data(tmp_path: Path) -> None:
    """Token 0 is a token; only so many in a row that no text has them are suspicious."""
    short = write_documents(tmp_path / "short", [[0] * 300, *random_documents([300] * 9)])
    assert unwritten(read_index(short)) is None
    assert main(["inspect", short, "--audit"]) == 0


@pytest.mark.parametrize("blocks", [50, 1000, 1 << 22])
def test_an_audit_counts_zeros_across_its_blocks(prefix: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megaponder.data import audit

    monkeypatch.setattr(audit, "_BLOCK_TOKENS", blocks)
    overwrite(f"{prefix}.bin", 8190, bytes(8200))
    (found,) = audit.audit([prefix])
    assert (found.zeros, found.first_zero) == (WINDOW, WINDOW)  # two windows of 2-byte tokens


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_cut_while_it_is_read(prefix: str, suffix: str) -> None:
    """A memory map would end the process with SIGBUS."""
    cfg = config(Path(prefix).parent, [prefix], split="1")
    cfg.train.eval_batches = 0
    stream = build_streams(cfg, 1000, 0).train
    stream.sequence(0)
    os.truncate(prefix + suffix, 50)
    sentence = rf"set\{suffix}: truncated while in use \(it has 50 bytes, and had [\d,]+ when it was opened\)"
    with pytest.raises(UserError, match=sentence):
        for i in range(1000):
            stream.sequence(i)


def test_a_cached_order_that_is_cut_while_it_is_read(prefix: str) -> None:
    cfg = config(Path(prefix).parent, [prefix], split="1")
    cfg.train.eval_batches = 0
    stream = build_streams(cfg, 1000, 0).train
    for path in Path(cfg.run, "cache").glob("order-*/*.npy"):
        os.truncate(path, 0)
    with pytest.raises(UserError, match=r"\.npy: truncated while in use"):
        stream.sequence(500)


def test_a_dataset_that_is_replaced_or_deleted_is_read_as_it_was(prefix: str, tmp_path: Path) -> None:
    cfg = config(tmp_path, [prefix], split="1")
    cfg.train.eval_batches = 0
    before = [build_streams(cfg, 100, 0).train.sequence(i).tolist() for i in range(100)]
    opened = open_data(cfg.data)
    other = write_documents(tmp_path / "other", random_documents([7] * 300, seed=3))
    os.replace(f"{other}.bin", f"{prefix}.bin")
    os.remove(f"{prefix}.idx")
    stream = build_streams(cfg, 100, 0, opened).train
    assert [stream.sequence(i).tolist() for i in range(100)] == before


def test_errors_of_a_file_system_are_sentences(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = CheckedFile(f"{prefix}.bin")

    def stale(*_: object) -> bytes:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "pread", stale)
    with pytest.raises(UserError, match=r"set\.bin: can no longer be read \(Stale file handle\)"):
        file.read(0, 8)


def test_more_files_than_a_process_may_open(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised as far as it may be; beyond that there is a sentence."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, limits[1]))
    try:
        assert len([CheckedFile(f"{prefix}.bin") for _ in range(100)]) == 100
        monkeypatch.setattr(checked.resource, "getrlimit", lambda _: (60, 60))
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, limits[1]))
        with pytest.raises(UserError, match=r"may open at most 60 files.*ulimit -Hn"):
            [CheckedFile(f"{prefix}.bin") for _ in range(100)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_identities_by_path(prefix: str, tmp_path: Path) -> None:
    cfg = config(tmp_path, [1.0, prefix, 0.0, str(tmp_path / "absent")])
    assert list(identities(open_data(cfg.data))) == [prefix]  # one of weight 0 need not even be there
