"""What only reading a whole dataset tells."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megaponder.cli.main import main
from megaponder.data import audit as module
from megaponder.data.audit import audit
from megaponder.data.prepare import PrepareOptions, prepare
from megaponder.errors import UserError
from tests.data_pipeline.make import jsonl, random_documents, write_documents


@pytest.fixture
def options(tmp_path: Path) -> PrepareOptions:
    texts = [f"document {i % 90} " * (i % 7 + 1) for i in range(100)]  # 90 % 7 = 6: only some repeat exactly
    inputs = [
        str(jsonl(tmp_path / "a.jsonl", texts)),
        str(jsonl(tmp_path / "b.jsonl", [*texts[:5], "other", "x" * 500])),
    ]
    return PrepareOptions(inputs, str(tmp_path / "set"), "bytes", workers=1, chunk_bytes=700, shard_bytes=2000)


def test_shares_duplicates_and_longest(options: PrepareOptions, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(options)
    (found,) = audit([options.output])
    assert found.verified and found.meta is not None
    assert [s.documents for s in found.meta.sources] == [100, 7]
    assert sum(s.tokens for s in found.meta.sources) == found.tokens and found.documents == 107
    lines = [line for path in options.inputs for line in Path(path).read_text().splitlines()]
    assert found.duplicates == len(lines) - len(set(lines)) >= 5
    assert found.longest[0] == (501, 106)
    assert main(["inspect", options.output, "--audit"]) == 0
    said = capsys.readouterr().out
    assert "checksums agree" in said and f"duplicates {found.duplicates} with" in said
    assert "b.jsonl: 7 documents" in said and "501 tokens (number 106)" in said


def test_the_same_in_small_blocks(options: PrepareOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(options)
    (whole,) = audit([options.output])
    monkeypatch.setattr(module, "_BLOCK_TOKENS", 50)
    seen: list[tuple[int, int]] = []
    (parts,) = audit([options.output], lambda done, total: seen.append((done, total)))
    assert parts.hashes.tolist() == whole.hashes.tolist() and len(seen) > 50
    assert replace(parts, hashes=whole.hashes) == whole and seen[-1] == (whole.tokens, whole.tokens)


def test_duplicates_among_datasets(tmp_path: Path) -> None:
    documents = random_documents([9] * 20)
    one = write_documents(tmp_path / "one", [*documents[:12], []])
    two = write_documents(tmp_path / "two", [[], *documents[10:], documents[-1]])
    first, second = audit([one, two])
    assert (first.duplicates, second.duplicates, second.duplicate_tokens) == (0, 3, 27)
    assert not first.verified and (first.empty, second.empty) == (1, 1)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_flipped_bit_is_found(options: PrepareOptions, suffix: str) -> None:
    prepare(options)
    path = Path(options.output + suffix)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"set\{suffix}: .*(changed after it was written|damaged)"):
        audit([options.output])


def test_interrupted_work_has_the_same_checksums(options: PrepareOptions, tmp_path: Path) -> None:
    whole = prepare(options).meta

    def stop(progress: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    left, other = 6, replace(options, output=str(tmp_path / "other"))
    with pytest.raises(KeyboardInterrupt):
        prepare(other, stop)
    assert os.path.isdir(other.output + ".partial")
    done = prepare(other)
    assert done.resumed_documents and done.meta == whole


def test_only_datasets_are_compared(options: PrepareOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "a", "b"]) == 2 and "--audit" in capsys.readouterr().err
    assert main(["inspect", "a", "--audit"]) == 2 and "no such file" in capsys.readouterr().err
