"""The study at its smallest size: rows side by side, cut off, resumed, evaluated; the same text for all."""

from __future__ import annotations

import gzip
import json
import lzma
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from benchmarks.study import answers, corpus, queue, run
from benchmarks.study.__main__ import chosen, main
from benchmarks.study.rows import SIZES, rows
from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.errors import UserError
from megaponder.plan.flops import mean_needed
from megaponder.ponder.settings import method_of
from tests import forks

WORDS = "one thinks twice before the other speaks and then once more of it".split()  # noqa: SIM905


def write(folder: Path, documents: int = 150) -> Path:
    dice = random.Random(1)
    folder.mkdir(exist_ok=True)
    for part, count in (("train", documents), ("heldout", documents // 5)):
        lines = []
        for i in range(count):
            text = " ".join(dice.choices(WORDS, k=120)) + "."
            lines.append(json.dumps({"text": text, "source": f"s{i % 3}", "cat": ("prose", "gov law")[i % 2]}))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "SOURCES.md").write_text("# where it comes from\n")
    return folder


def test_the_first_part_of_every_source(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    whole, share = corpus.first_part(folder, None)
    assert share == 1.0 and len(whole) == 150
    part, share = corpus.first_part(folder, 0.4 * sum(len(d["text"]) for d in whole))
    assert share == pytest.approx(0.4, abs=0.03)
    counts = {s: sum(d["source"] == s for d in part) for s in ("s0", "s1", "s2")}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [d for d in whole if d in part] == part
    packed = corpus.pack(folder, None, tmp_path / "packed")
    assert corpus.first_part(packed, None)[0] == whole and (packed / "SOURCES.md").is_file()
    with pytest.raises(UserError, match=r"there is no train.jsonl"):
        corpus.first_part(tmp_path, None)
    for line in ('{"text": 3}', '{"text": "a", "source": []}', "a"):
        (folder / "train.jsonl").write_text(f"{line}\n")
        with pytest.raises(UserError, match="line 1: it must be a JSON object"):
            corpus.first_part(folder, None)
    for suffix, pack in ((".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstandard.compress)):
        packed_file = tmp_path / f"train.jsonl{suffix}"
        packed_file.write_bytes(pack(b'{"text": "a"}\n{"text": "b"}\n'))
        assert [d["text"] for d in corpus.documents(packed_file)] == ["a", "b"]
        packed_file.write_bytes(packed_file.read_bytes()[:-9])
        with pytest.raises(UserError, match="truncated"):
            list(corpus.documents(packed_file))
    for name, text in (("train", '{"text": ""}\n'), ("heldout", "")):
        write(folder)
        (folder / f"{name}.jsonl").write_text(text)
        with pytest.raises(UserError, match="text is empty"):
            corpus.ready(folder, None, 300, tmp_path / "work")


def test_rows_differ_in_what_they_say_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", documents=60)
    text = corpus.ready(folder, None, SIZES["tiny"].vocab - 1, tmp_path / "work", workers=1)
    assert set(text.heldout) == {"all", "prose", "gov-law"} and "SOURCES.md" in text.files
    every = rows("tiny")
    assert len({row.name for row in every}) == len(every)
    configs = {row.name: row.config(text, "run", cuda=False) for row in every}
    for name, config in configs.items():
        changes = {section: values for section, values in config.items() if values != configs[every[0].name][section]}
        assert changes.keys() <= {"model", "ponder", "optimizer", "train"}, name
        assert config["data"]["shuffle_seed"] == 1234
    [first] = chosen("tiny", None, ["loop"])
    assert first.short == "loop.lr0.006.seed1"
    assert [r.seed for r in chosen("tiny", None, ["loop.lr0.006.*"])] == [1, 2, 3]
    with pytest.raises(UserError, match="no row of size tiny has such a name"):
        chosen("tiny", None, ["lop"])
    plain, loop = chosen("tiny", None, ["vanilla", "loop"], 1e10)  # one step of 256 tokens costs 0.1e9 FLOPs or more
    assert plain.tokens > 2 * loop.tokens and loop.name == "tiny.1e-05PFLOP.loop.lr0.006.seed1"
    spent = [r.config(text, "run", cuda=False) for r in (plain, loop)]
    costs = [mean_needed(cfg, method_of(cfg)) for cfg in (resolve(from_mapping(config)) for config in spent)]
    assert [cost * r.tokens for cost, r in zip(costs, (plain, loop), strict=True)] == pytest.approx(
        [1e10] * 2, rel=0.03
    )


def test_answers_show_the_best_rate_with_its_seeds() -> None:
    def row(lr: float, seed: int, loss: float) -> dict[str, object]:
        told = {"kind": "loop", "method": "loop", "target": None, "lr": lr, "seed": seed, "loss": loss, "depth": None}
        return told | {"bits_per_byte": 1.0, "needed_flops": 1e9, "flops_per_token": 1e6}

    three = [row(0.006, seed, loss) for seed, loss in ((1, 3.33), (2, 3.34), (3, 3.35))]
    told = answers.text([*three, row(0.012, 1, 3.339), row(0.003, 1, 3.4)])
    assert told.count("| loop | 0.006 | 3 | 3.3400 ± 0.0100 | 1.0000 |") == 3  # in (a), (b) and (g)
    assert "| loop | 0.012 | 1 | 3.3340 | " in answers.text([*three, row(0.012, 1, 3.334)])
    assert all(f"## ({letter}) " in told for letter in "abcdefg")
    swept = [{"kind": "as trained", "loss": 3.0}, {"kind": "random", "loss": 3.25}, {"kind": "random", "loss": 9.0}]
    options = {"ponder": {"options": {"steps": 3}}}
    budgeted = row(0.006, 1, 3.5) | {
        "kind": "adaptive_cot-0.6-drawn", "method": "adaptive_cot", "target": 0.6, "depth": 2.4, "sweep": swept,
        "depth_in_training": [{"step": n, "depth": 2.5} for n in (1, 2)], "config": options,
    }  # fmt: skip
    told_of_depth = answers.text([*three, budgeted])
    assert "| adaptive_cot-0.6-drawn | 0.006 | 1 | 3.5000 | 3.7500 | 1.0000 | 2.40 |" in told_of_depth
    assert "| adaptive_cot-0.6-drawn | 0.006 | 1 | 2.40 | 2.500 | 0.100 | 2.400 | +0.000 |" in told_of_depth
    told_of_depth = answers.text([budgeted, budgeted | {"seed": 2, "sweep": []}])
    assert "| 2 | 3.5000 ± 0.0000 | 3.7500 (1 of 2) |" in told_of_depth
    named = [{"variant": v, "loss": 3.0 + 0.1 * i} for i, v in enumerate(("as trained", "scores, 0.1", "random, 0.1"))]
    assert answers.at_random(budgeted | {"sweep": named}) == pytest.approx(3.7)  # earlier rows tell no kinds
    more = {"tokens": 88_000_000, "epochs": 1.94}
    other = row(0.012, 1, 3.3) | {"kind": "vanilla", "tokens": 2_000_000, "epochs": 0.04}
    *_, best, second = answers.equal_flops([*(r | more for r in three), other]).strip().splitlines()
    assert best.startswith("| vanilla | 0.012 | 1 | 3.3000 | 1.0000 | 2 M | 0.04 |")
    assert second.startswith("| loop | 0.006 | 3 | 3.3400 ± 0.0100 | 1.0000 | 88 M | 1.94 |")


def test_tokens_to_a_target_lie_on_the_curve() -> None:
    def row(kind: str, losses: list[float]) -> dict[str, Any]:
        told = {"kind": kind, "lr": 0.003, "seed": 1, "loss": losses[-1]}
        return told | {"curve": [{"tokens": 1_000_000 * (i + 1), "loss": x} for i, x in enumerate(losses)]}

    plain = row("vanilla", [6.0, 5.0, 4.5, 4.0])
    assert answers.tokens_to(plain["curve"], 5.25) == 1_750_000 and answers.tokens_to(plain["curve"], 3.9) is None
    assert answers.tokens_to(plain["curve"], 7.0) == 1_000_000
    told = answers._to_targets([plain, row("eslm", [5.5, 4.5, 4.0, 3.5]), row("eslm-0.3", [5.0, 4.9, 4.8, 4.7])])
    assert "| vanilla | 0.003 | 1 | 4.0000 | 2.0 M, 1.000 | 4.0 M, 1.000 |" in told
    assert "| eslm | 0.003 | 1 | 3.5000 | 1.5 M, 0.750 | 3.0 M, 0.750 |" in told
    assert "| eslm-0.3 | 0.003 | 1 | 4.7000 | 1.0 M, 0.500 | never |" in told and "Not run: eslm-entropy." in told


def test_a_row_waits_for_memory() -> None:
    def job(gib: float) -> queue.Job:
        return queue.Job(f"{gib}", Path(), Path(), 0.0, gib)

    big, small = job(60), job(20)
    assert queue.place([big, small], [], 2, 100) == (big, 0)
    assert queue.place([big], [(big, 0)], 2, 100) == (big, 1)
    assert queue.place([big, small], [(big, 0), (big, 1)], 2, 100) == (small, 0)
    assert queue.place([small], [(big, 0), (small, 0), (big, 1)], 2, 100) == (small, 1)
    assert queue.place([small], [(job(90), 0)], 1, 100) is None
    assert queue.place([job(200)], [], 1, 100) is not None  # alone it may try


TRAIN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("trains", flush=True)
time.sleep(float(sys.argv[1]))
"""
ROW = f"""
import subprocess, sys, time
from pathlib import Path
from benchmarks.study import evaluation, run

real, words = subprocess.Popen, [sys.executable, "-c", {TRAIN!r}, sys.argv[2]]
run.subprocess.Popen = lambda *_, **__: real(words)
evaluation.prepare = lambda: None
evaluation.evaluate = lambda *_: (print("evaluates", flush=True), time.sleep(999))
sys.exit(run.main(Path(sys.argv[1])))
"""


def test_rows_end_with_the_queue(tmp_path: Path) -> None:
    """One that trains after saving, one that is evaluated at once, and one that does not listen."""
    task = tmp_path / "row.json"
    queue.write(task, {"config": {"run": str(tmp_path / "run")}, "corpus": None})
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(999)"
    )
    lines = ([ROW, str(task), "999"], [ROW, str(task), "0"], [deaf])
    every = [
        subprocess.Popen([sys.executable, "-c", *line], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for line in lines
    ]
    for process, last in zip(every, ("trains", "evaluates", "deaf"), strict=True):
        assert process.stdout is not None
        while process.stdout.readline() != f"{last}\n":
            assert process.poll() is None
    every[1].send_signal(run.SAVE)  # time is nearly up: what is evaluated may end
    with pytest.raises(subprocess.TimeoutExpired):
        every[1].wait(0.3)
    queue.end_all(every[:2], 300)
    queue.end_all(every[2:], 0.1)
    assert [process.returncode for process in every] == [run.STOPPED, run.STOPPED, -signal.SIGKILL]


def test_a_row_whose_queue_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "row.json"
    queue.write(task, {"config": {"run": str(tmp_path / "run")}, "corpus": None})
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setenv(run.QUEUE, str(gone.pid))
    process = subprocess.run([sys.executable, "-c", ROW, str(task), "999"], stdout=subprocess.DEVNULL, timeout=300)
    assert process.returncode == run.STOPPED


def test_a_failed_row_is_told_by_the_error_of_its_own_start(tmp_path: Path) -> None:
    job, log = queue.Job("row", tmp_path / "row.json", tmp_path / "row.log", 1.0), tmp_path / "train.log"
    log.write_text("error: an earlier one.\n")
    job.logged = log.stat().st_size
    assert queue._last_words(job) == f"see {job.log}"
    log.write_text(log.read_text() + "error: this one.\nstep 3/4 of another process\n")
    assert queue._last_words(job) == f"{log}: error: this one."


def test_a_row_trains_and_is_evaluated_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", forks.python())
    folder = write(tmp_path / "c", documents=60)
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    words = ["--corpus", str(folder), "--size", "tiny", *places]
    assert main([*words, "--rows", "ponderlm", "--minutes", "0.5"]) == 0
    assert "not started" in capsys.readouterr().out  # it cannot end in time
    assert main([*words, "--rows", "ponderlm"]) == 0
    assert "ponderlm.lr0.006.seed1: done in " in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "tiny.ponderlm.lr0.006.seed1.json").read_text())
    assert result["curve"][-1]["tokens"] == 4096 and result["curve"][-1]["needed_flops"] == result["needed_flops"]
    assert set(result["kinds"]) == {"prose", "gov-law"} and 0 < result["bits_per_byte"] < 8
    assert result["corpus"]["files"]["train.jsonl"] == corpus.sha256(folder / "train.jsonl")
    variants = {s["variant"].partition(",")[0]: s for s in result["sweep"]}
    assert variants["passes 4"]["loss"] == pytest.approx(variants["as trained"]["loss"], rel=1e-6)
    assert variants["share 0.6"]["depth"] < variants["share 0.9"]["depth"] < 4
    analysis = result["evaluation"]["analysis"]
    assert len(analysis["losses"]) == 4 and {c["by"] for c in analysis["classes"]} == {"text", "frequency"}
    place = tmp_path / "work" / result["name"]
    assert json.loads((place / "eval.json").read_text()) == result["evaluation"]
    assert main([*words, "--rows", "ponderlm"]) == 0
    told = capsys.readouterr().out
    assert "done before" in told and "started" not in told
    assert main([*words, "--report"]) == 0
    assert "| ponderlm " in (tmp_path / "out" / "tiny" / "compare.md").read_text()
    assert "| ponderlm | 0.006 | 1 | " in (tmp_path / "out" / "tiny" / "answers.md").read_text()
    assert main([*words, "--report", "--tokens", "12"]) == 2
    assert "with other numbers: 4096" in capsys.readouterr().err
