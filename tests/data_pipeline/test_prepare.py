"""`prepare`: the bytes depend on inputs and options alone, not on workers or interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from megaponder import processes
from megaponder.cli.main import main
from megaponder.data.audit import audit
from megaponder.data.indexed import read_index
from megaponder.data.info import inspect_dataset
from megaponder.data.prepare import PrepareOptions, PrepareProgress, prepare
from megaponder.errors import ConfigError, UserError
from tests.data_pipeline.make import huggingface_tokenizer, jsonl
from tests.full_disk import files_of_at_most

SUFFIXES = (".bin", ".idx", ".json")


def contents(prefix: str) -> list[bytes]:
    return [Path(prefix + s).read_bytes() for s in SUFFIXES]


def documents(prefix: str) -> list[list[int]]:
    index = read_index(prefix)
    ids = np.fromfile(prefix + ".bin", index.dtype)
    return [part.tolist() for part in np.split(ids, np.cumsum(index.lengths)[:-1])]


@pytest.fixture
def options(tmp_path: Path) -> PrepareOptions:
    texts = [f"the cat {i} sat " * (i % 5) for i in range(200)]
    inputs = [str(jsonl(tmp_path / f"{n}.jsonl", texts)) for n in "ab"]
    tokenizer = huggingface_tokenizer(tmp_path / "tokenizer.json")
    return PrepareOptions(inputs, str(tmp_path / "out" / "set"), str(tokenizer), workers=1, chunk_bytes=2000)


def test_result(options: PrepareOptions) -> None:
    seen: list[PrepareProgress] = []
    done = prepare(options, seen.append)
    meta = inspect_dataset(options.output).meta
    assert meta == done.meta and meta is not None
    assert meta.documents == 320 and meta.skipped == {"empty": 80} and meta.eod_id == 0
    assert meta.special_tokens == {"<|endoftext|>": 0}
    found = documents(options.output)
    assert len(found) == 320 and all(d[-1] == 0 and d.count(0) == 1 for d in found)
    assert meta.tokens == sum(map(len, found)) and meta.max_id == max(map(max, found))
    assert [s.path for s in meta.sources] == options.inputs
    assert seen[-1].read_bytes == seen[-1].total_bytes and seen[-1].documents == 320 and len(seen) > 5
    assert not Path(options.output + ".partial").exists()


def test_same_bytes_for_any_workers_and_chunks(options: PrepareOptions, tmp_path: Path) -> None:
    prepare(options)
    other = replace(options, output=str(tmp_path / "two"), workers=2, chunk_bytes=777, shard_bytes=500)
    prepare(other)
    assert contents(other.output) == contents(options.output)


def test_megatron_core_reads_it(options: PrepareOptions) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prepare(options)
    dataset = IndexedDataset(options.output)
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents(options.output)
    assert dataset.document_indices.tolist() == list(range(321)) and dataset.index.dtype == np.uint16


def test_wide_vocabulary_takes_int32(tmp_path: Path) -> None:
    tokenizer = huggingface_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(tokenizer.read_text())
    content["model"]["vocab"]["zzz"] = 70000
    tokenizer.write_text(json.dumps(content))
    out = str(tmp_path / "wide")
    meta = prepare(PrepareOptions([str(jsonl(tmp_path / "a.jsonl", ["cat"]))], out, str(tokenizer))).meta
    assert meta.dtype == "int32" and inspect_dataset(out).tokens == meta.tokens


def test_end_of_document(options: PrepareOptions, tmp_path: Path) -> None:
    text = [str(jsonl(tmp_path / "e.jsonl", ["cat<|endoftext|>", "cat", "<|endoftext|>"]))]
    one = replace(options, inputs=text, output=str(tmp_path / "one"), special_spellings="token")
    prepare(one)
    cat = documents(one.output)[1]
    assert documents(one.output) == [cat, cat, [0]] and cat[-1] == 0
    bare = replace(one, output=str(tmp_path / "bare"), append_eod=False)
    assert prepare(bare).meta.eod_id is None
    assert documents(bare.output) == [cat, cat[:-1], [0]]
    templated = huggingface_tokenizer(tmp_path / "t.json", template=True)
    twice = replace(one, output=str(tmp_path / "twice"), tokenizer=str(templated), special_tokens=True)
    prepare(twice)
    assert documents(twice.output)[1].count(0) == 1
    prepare(replace(one, output=str(tmp_path / "text"), special_spellings="text"))
    assert [d.count(0) for d in documents(str(tmp_path / "text"))] == [1, 1, 1]


def test_tokenizer_without_eod(options: PrepareOptions, tmp_path: Path) -> None:
    tokenizer = str(huggingface_tokenizer(tmp_path / "bare.json", special=["<pad>"]))
    with pytest.raises(UserError, match=r"bare\.json: this tokenizer does not name .*--eod TOKEN.*--no-append-eod"):
        prepare(replace(options, tokenizer=tokenizer))
    assert prepare(replace(options, tokenizer=tokenizer, eod="<pad>")).meta.eod_id == 0


def test_error_policy(options: PrepareOptions, tmp_path: Path) -> None:
    bad = Path(options.inputs[1])
    lines = bad.read_bytes().split(b"\n")
    lines[150], lines[160], lines[170] = b'{"text": "\xff"}', b"{", b'{"txt": ""}'
    bad.write_bytes(b"\n".join(lines))
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"b\.jsonl:151: byte 0xff is not valid UTF-8; .*--on-error skip"):
            prepare(replace(options, workers=workers))
    assert not Path(options.output + ".idx").exists()
    done = prepare(replace(options, on_error="skip"))  # goes on where the strict run stopped
    assert done.resumed_documents > 0
    assert done.meta.skipped == {"bad_field": 1, "empty": 77, "invalid_json": 1, "invalid_utf8": 1}
    assert [e.split(":")[1] for e in done.examples] == ["151", "161", "171"]
    fresh = replace(options, on_error="skip", output=str(tmp_path / "fresh"))
    prepare(fresh)
    assert contents(fresh.output) == contents(options.output)


def test_skipped_work_is_not_continued_strictly(options: PrepareOptions) -> None:
    first = Path(options.inputs[0])
    first.write_text("{\n" + first.read_text())
    _interrupt(replace(options, on_error="skip"), after=2)
    with pytest.raises(UserError, match="skipped 1 unreadable"):
        prepare(options)
    assert prepare(replace(options, restart=True, inputs=options.inputs[1:])).resumed_documents == 0


def test_existing_datasets_are_kept(options: PrepareOptions) -> None:
    prepare(options)
    before = contents(options.output)
    with pytest.raises(UserError, match="already exists"):
        prepare(options)
    assert not Path(options.output + ".partial").exists() and contents(options.output) == before
    prepare(replace(options, overwrite=True, inputs=options.inputs[:1]))
    assert inspect_dataset(options.output).documents == 160


def test_nothing_in_it(options: PrepareOptions, tmp_path: Path) -> None:
    empty = str(jsonl(tmp_path / "empty.jsonl", ["", ""]))
    with pytest.raises(UserError, match="no document contains any token"):
        prepare(replace(options, inputs=[empty]))
    assert list(Path(options.output).parent.iterdir()) == []


def test_impossible_options(options: PrepareOptions, tmp_path: Path) -> None:
    for change in ({"workers": 0}, {"on_error": "ignore"}, {"output": "a.bin"}, {"txt_split": ""}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            prepare(replace(options, **change))  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="where a folder should be"):
        prepare(replace(options, output=str(tmp_path / "file" / "set")))


class _StopError(Exception):
    pass


def _interrupt(options: PrepareOptions, after: int) -> None:
    """Run until `after` chunks are done, then end with an exception, as Ctrl-C does."""
    count = 0

    def stop(_: PrepareProgress) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise _StopError

    with pytest.raises(_StopError):
        prepare(options, stop)


def test_interrupted_run_continues(options: PrepareOptions, tmp_path: Path) -> None:
    whole = replace(options, output=str(tmp_path / "whole"))
    prepare(whole)
    for after in (1, 3, 2, 4):
        _interrupt(options, after)
        assert not any(Path(options.output + s).exists() for s in SUFFIXES)
    done = prepare(replace(options, workers=2))
    assert done.resumed_documents > 0 and contents(options.output) == contents(whole.output)


def test_other_options_do_not_mix(options: PrepareOptions) -> None:
    _interrupt(options, 2)
    for change in ({"inputs": options.inputs[:1]}, {"special_tokens": True}, {"append_eod": False}):
        with pytest.raises(UserError, match=r"other inputs or options .*--restart"):
            prepare(replace(options, **change))  # type: ignore[arg-type]
    os.utime(options.inputs[1], ns=(1, 1))
    with pytest.raises(UserError, match="other inputs or options"):
        prepare(options)
    assert prepare(replace(options, restart=True)).resumed_documents == 0


STOPS = """
import sys, pickle
from megaponder.data.prepare import prepare
options = pickle.loads(bytes.fromhex(sys.argv[1]))
shown = []
def show(p):
    shown.append(p)
    print(p.documents, flush=True)
    if len(shown) == 4:
        sys.stdin.read()
prepare(options, show)
"""

DIES = """
import os, signal, sys, pickle
from megaponder.data import workspace
from megaponder.data.prepare import prepare
options, at = pickle.loads(bytes.fromhex(sys.argv[1])), int(sys.argv[2])
calls, real = 0, os.replace
def replace(source, target):
    global calls
    if not str(source).endswith(".tmp"):
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
workspace.os.replace = replace
prepare(options)
"""


def _start(code: str, options: PrepareOptions, *args: str) -> subprocess.Popen[str]:
    import pickle

    command = [sys.executable, "-c", code, pickle.dumps(options).hex(), *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_kill_9_while_working(options: PrepareOptions, tmp_path: Path) -> None:
    whole = replace(options, output=str(tmp_path / "whole"))
    prepare(whole)
    killed = replace(options, workers=2, shard_bytes=1500)
    run = _start(STOPS, killed)
    assert run.stdout is not None
    for _ in range(4):
        assert run.stdout.readline()
    with pytest.raises(UserError, match="another process is preparing"):
        prepare(options)
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 2
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not any(Path(options.output + s).exists() for s in SUFFIXES)
    deadline = time.monotonic() + 300
    while any(processes.runs(child.pid) for child in children):
        assert time.monotonic() < deadline, "workers outlive a killed parent"
        time.sleep(0.05)
    done = prepare(killed)
    assert done.resumed_documents > 0 and contents(options.output) == contents(whole.output)


def test_kill_9_while_publishing(options: PrepareOptions, tmp_path: Path) -> None:
    whole = replace(options, output=str(tmp_path / "whole"))
    prepare(whole)
    for at in (1, 2, 3):
        run = _start(DIES, options, str(at))
        assert run.wait() == -signal.SIGKILL
        assert not Path(options.output + ".idx").exists()  # the .bin may be there: no reader takes it for a dataset
        assert prepare(options).meta.documents == 320
        assert contents(options.output) == contents(whole.output)
        for suffix in SUFFIXES:
            os.remove(options.output + suffix)


def test_command_line(options: PrepareOptions, capsys: pytest.CaptureFixture[str]) -> None:
    from megaponder.cli.main import main

    words = ["prepare", *options.inputs, "--tokenizer", options.tokenizer, "--output", options.output, "--workers", "1"]
    assert main(words) == 0
    assert "320 documents" in (out := capsys.readouterr().out) and "skipped 80 documents: empty" in out
    assert main(words) == 2
    assert "already exists" in capsys.readouterr().err


def test_special_tokens_that_are_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default no text can end a document in its middle; either way they are counted."""
    tokenizer = str(huggingface_tokenizer(tmp_path / "tok.json", ("<|endoftext|>", "<|pad|>")))
    texts = ["the cat <|endoftext|> sat", "on<|pad|>the<|pad|>mat<|endoftext|>", "plain <| text"]
    source, found = str(jsonl(tmp_path / "t.jsonl", texts)), {}
    for rule in ("text", "token"):
        command = ["prepare", source, "--tokenizer", tokenizer, "--output", str(tmp_path / rule)]
        assert main([*command, "--special-spellings", rule] if rule == "token" else command) == 0
        said = capsys.readouterr().out
        assert "spelled out in texts: <|endoftext|> 2, <|pad|> 2; " in said
        assert ("encoded as text" in said) == (rule == "text")
        meta = inspect_dataset(tmp_path / rule).meta
        assert meta is not None and meta.spelled == {"<|endoftext|>": 2, "<|pad|>": 2}
        (found[rule],) = audit([str(tmp_path / rule)])
        assert main(["inspect", str(tmp_path / rule)]) == 0 and "spelled out in texts" in capsys.readouterr().out
    assert (found["text"].inner_eods, found["token"].inner_eods) == (0, 1)
    assert main(["inspect", str(tmp_path / "token"), "--audit"]) == 0
    assert "EOD within documents 1: " in capsys.readouterr().out


def test_a_full_disk_names_the_file_and_the_work_goes_on_later(options: PrepareOptions) -> None:
    with files_of_at_most(1000), pytest.raises(UserError, match=r"File too large: '.*set\.partial/tokens\.bin'"):
        prepare(options)
    assert prepare(options).meta.documents == 320
