"""Readers: the same documents from every packing, chunk size and starting point; damage is named."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megaponder.data.documents import Problem, TxtRule, documents
from megaponder.data.readers import Limits, Position, Read, kind_of, list_inputs, read_chunks
from megaponder.errors import ConfigError, UserError


def texts(files: list[Path], rule: str = "file", chunk: int = 1 << 20, start: Position | None = None) -> list[str]:
    out: list[str] = []
    for read in read_chunks(files, start or Position(), "text", TxtRule(rule), chunk):
        kind = kind_of(files[read.chunk.file]) or ""
        for _, item in documents(read.chunk, kind, "text", TxtRule(rule)):
            assert isinstance(item, str)
            out.append(item)
    return out


LINES = [f"document {i} " + "x" * (i % 50) for i in range(400)]


def test_every_packing_and_chunk_size(tmp_path: Path) -> None:
    raw = "".join(json.dumps({"text": t}) + "\n" for t in LINES).encode()[:-1]  # no newline at the end
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + raw)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(raw[:5000]) + gzip.compress(raw[5000:]))
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "c.jsonl.zst").write_bytes(pack(raw[:7000]) + pack(b"") + pack(raw[7000:]))
    (tmp_path / "d.jsonl").write_bytes(raw.replace(b"\n", b"\r\n\r\n"))
    for name in "abcd":
        files = list(tmp_path.glob(f"{name}.*"))
        for chunk in (1, 100, 4096, 1 << 20):
            assert texts(files, chunk=chunk) == LINES, (name, chunk)


def test_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": LINES, "n": list(range(400))}), path, row_group_size=150)
    reads = list(read_chunks([path], Position(), "text", TxtRule()))
    assert texts([path]) == LINES and len(reads) > 1
    assert texts([path], start=reads[0].end) == LINES[reads[0].end.offset :]
    assert texts([path], start=Position(0, 300, 301)) == LINES[300:]
    with pytest.raises(UserError, match="column 'n' has type int64"):
        list(read_chunks([path], Position(), "n", TxtRule()))
    with pytest.raises(UserError, match=r"no column 'body' \(columns: text, n\)"):
        list(read_chunks([path], Position(), "body", TxtRule()))
    path.write_bytes(b"no")
    with pytest.raises(UserError, match="not a readable parquet"):
        list(read_chunks([path], Position(), "text", TxtRule()))


TXT = "one\r\nmore\n\n\n  two\n \t\nthree\n===\n===\nfour ===\nfive\n"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("file", [TXT]),
        ("line", ["one", "more", "  two", "three", "===", "===", "four ===", "five"]),
        ("blank", ["one\r\nmore", "  two", "three\n===\n===\nfour ===\nfive\n"]),
        ("===", ["one\r\nmore\n\n\n  two\n \t\nthree", "four ===\nfive\n"]),
    ],
)
def test_txt_rules(tmp_path: Path, rule: str, expected: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TXT.encode())
    for chunk in (1, 3, 7, 1000):
        assert texts([path], rule, chunk) == expected


@settings(max_examples=30)
@given(
    text=st.text(alphabet="ab \n\r=", max_size=60),
    rule=st.sampled_from(["line", "blank", "==", "file"]),
    chunk=st.integers(1, 20),
)
def test_chunks_do_not_change_txt_documents(tmp_path: Path, text: str, rule: str, chunk: int) -> None:
    path = tmp_path / "h.txt"
    path.write_bytes(text.encode())
    assert texts([path], rule, chunk) == texts([path], rule)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_reading_on_from_any_chunk(tmp_path: Path, suffix: str) -> None:
    raw = "".join(json.dumps({"text": t}) + "\n" for t in LINES).encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(Path(suffix).suffix, bytes)
    files = [tmp_path / f"{n}{suffix}" for n in "ab"]
    for path in files:
        path.write_bytes(pack(raw))
    reads = list(read_chunks(files, Position(), "text", TxtRule(), 3000))
    done = 0
    for read in reads:
        done += read.chunk.data.count(b"\n")
        assert read.end.line == done - 400 * read.end.file + 1
        if done % 7 == 0 or done in (400, 800):
            assert texts(files, start=read.end) == (LINES * 2)[done:]


def test_truncated_archives(tmp_path: Path) -> None:
    raw = json.dumps({"text": "x" * 1000}).encode() * 50
    for name, pack in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.ZstdCompressor().compress)):
        path = tmp_path / name
        path.write_bytes(pack(raw)[:-9])
        with pytest.raises(UserError, match=rf"{name}: truncated"):
            texts([path])
        path.write_bytes(b"not packed at all")
        with pytest.raises(UserError, match=f"{name}: not valid"):
            texts([path])


def test_inputs_are_bounded(tmp_path: Path) -> None:
    """Windows, documents and blocks that unpack to far more than they are: a sentence, in little memory."""
    zeros = pack(bytes(1 << 30), window_log=20)  # a gigabyte in some 30 kB
    assert len(zeros) < 1 << 17
    tracemalloc.start()
    path = tmp_path / "a.jsonl.zst"
    raw = b"".join(json.dumps({"text": t}).encode() + b"\n" for t in LINES)
    path.write_bytes(pack(raw, window_log=28))
    with pytest.raises(
        UserError, match=r"a\.jsonl\.zst: decompressing it needs a window of more than 128 MiB; .*--zstd-window"
    ):
        texts([path])
    reads = read_chunks([path], Position(), "text", TxtRule(), limits=Limits(window=1 << 28))
    assert [x for r in reads for x in items(r)] == LINES
    path.write_bytes(pack(raw, window_log=20) + zeros)
    small = Limits(document=8 << 20)
    with pytest.raises(UserError, match=r"a\.jsonl\.zst:401: the document that starts here is larger than 8 MiB"):
        list(read_chunks([path], Position(), "text", TxtRule(), limits=small))
    for name, data in (
        ("b.jsonl", raw + b'{"text": "' + b"x" * (9 << 20)),
        ("b.jsonl.gz", gzip.compress(bytes(9 << 20))),
    ):
        (tmp_path / name).write_bytes(data)
        line = 401 if name == "b.jsonl" else 1
        with pytest.raises(UserError, match=rf"{name}:{line}: the document that starts here is larger than 8 MiB"):
            list(read_chunks([tmp_path / name], Position(), "text", TxtRule(), limits=small))
    long = tmp_path / "c.jsonl"  # just below the limit, among others
    lines = [*LINES, "y" * (7 << 20), *LINES]
    long.write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    got = [x for r in read_chunks([long], Position(), "text", TxtRule(), limits=small) for x in items(r)]
    assert got == lines
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 400 << 20  # 128 MiB of one block, and what is waiting


def pack(data: bytes, window_log: int) -> bytes:
    """A frame whose header asks for this window, as a stream's does that does not know its own length."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return packer.compress(data) + packer.flush()


def items(read: Read) -> list[str]:
    return [str(item) for _, item in documents(read.chunk, "jsonl", "text", TxtRule())]


def test_large_rows_of_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["short", "z" * 5000]}), path)
    with pytest.raises(UserError, match=r"a\.parquet:1: the document that starts here is larger than"):
        list(read_chunks([path], Position(), "text", TxtRule(), limits=Limits(document=4096)))
    damaged = bytearray(path.read_bytes())
    damaged[8:40] = b"\xff" * 32
    path.write_bytes(bytes(damaged))
    with pytest.raises(UserError, match=r"a\.parquet: damaged, or too large for memory"):
        list(read_chunks([path], Position(), "text", TxtRule()))


def test_problems_name_line_and_reason() -> None:
    from megaponder.data.documents import Chunk

    data = b"\n".join(
        [
            b'{"text": "ok"}',
            b'{"text": "\xff"}',
            b'{"text": "ok"',
            b"",
            b'{"body": "no", "id": 1}',
            b'{"text": 5}',
            b"[1]",
            b'{"text": "\\ud800"}',
        ]
    )
    found = [(n, i.reason, i.message) for n, i in documents(Chunk(0, 11, data), "jsonl", "text", TxtRule())
             if isinstance(i, Problem)]  # fmt: skip
    assert [(n, r) for n, r, _ in found] == [
        (12, "invalid_utf8"),
        (13, "invalid_json"),
        (15, "bad_field"),
        (16, "bad_field"),
        (17, "bad_field"),
        (18, "invalid_json"),
    ]
    assert "fields: body, id" in found[2][2] and "is a number" in found[3][2] and "0xff" in found[0][2]
    txt = list(documents(Chunk(0, 1, b"good\n\nba\nd\xfe\n"), "txt", "text", TxtRule("blank")))
    assert txt[0] == (1, "good") and isinstance(txt[1][1], Problem) and txt[1][1].line == 4


def test_inputs(tmp_path: Path) -> None:
    for name in ("z.txt", "sub/b.jsonl", "sub/c.jsonl.zst", "sub/readme.md", "d.tar.gz", "e.parquet.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [p.name for p in list_inputs([str(tmp_path)])] == ["b.jsonl", "c.jsonl.zst", "z.txt"]
    with pytest.raises(UserError, match="named twice"):
        list_inputs([str(tmp_path), str(tmp_path / "z.txt")])
    with pytest.raises(UserError, match="does not tell its format"):
        list_inputs([str(tmp_path / "d.tar.gz")])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"pipe\.jsonl is a pipe or a device"):
        list_inputs([str(tmp_path / "pipe.jsonl")])
    with pytest.raises(UserError, match="no such file"):
        list_inputs([str(tmp_path / "none.jsonl")])
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="no input file"):
        list_inputs([str(tmp_path / "bare")])
    with pytest.raises(ConfigError, match="nothing to read"):
        list_inputs([])
