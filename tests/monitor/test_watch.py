"""The boards of `megaponder watch`: from rows on disk to terminal and page, half-written lines and no rows at all."""

from __future__ import annotations

import json
import math
import os
import pty
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megaponder.cli.main import main
from megaponder.monitor.board import spark
from megaponder.monitor.page import MOST_POINTS, page
from megaponder.monitor.series import overview
from tests.external import EXTERNAL

CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)


def write(run: Path, last: int, total: int = 400, tail: str = "") -> Path:
    run.mkdir(parents=True)
    lines = []
    for step in range(10, last + 1, 10):
        row = {"step": step, "sequences": 4 * step, "tokens": 512 * step, "loss": 7 * math.exp(-step / 200)}
        row |= {"step_seconds": 0.5, "tokens_per_second": 1024.0, "data_seconds": 0.01, "total_steps": total}
        row |= {"forward_backward_seconds": 0.4, "optimizer_seconds": 0.05, "ponder_mean_depth": 2.5}
        row |= {"ponder_active_pass0": 1.0, "ponder_active_pass1": 0.5, "grad_norm": 1.0}
        if step % 100 == 0:
            row["validation_loss"] = row["loss"] + 0.1
        lines.append(json.dumps(row) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines) + tail)
    return run


def test_a_run_at_work_whose_last_line_is_half_written(tmp_path: Path) -> None:
    found = overview(write(tmp_path / "r", 300, tail='{"step": 310, "lo'), now=0)
    assert (found.step, found.total, found.finished) == (300, 400, False)
    assert found.facts["step"] == "300 of 400 (75%)" and found.facts["time left"] == "0m50s"
    assert [p.title for p in found.panels] == [
        "loss", "mean depth (passes)", "share of tokens in each pass", "tokens/s", "seconds of a step", "gradient norm"
    ]  # fmt: skip
    assert len(found.panels[0].curves["training"]) == 30 and len(found.panels[0].curves["validation"]) == 3


def test_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "r", 400)
    assert main(["watch", str(run)]) == 0  # finished: it does not wait
    out = capsys.readouterr().out
    assert "400 of 400 (100%)" in out and "finished" in out and "loss: validation" in out and "█" in out
    assert main(["watch", str(write(tmp_path / "s", 20)), "--once"]) == 0
    assert "last row" in capsys.readouterr().out
    assert main(["watch", str(run), str(tmp_path / "s"), "--once", "--html", str(tmp_path / "both.html")]) == 0
    assert "step 400, 20;" in capsys.readouterr().out and "<h1>s</h1>" in (tmp_path / "both.html").read_text()
    assert main(["watch", str(run), str(tmp_path / "s"), "--once"]) == 0
    out = capsys.readouterr().out
    assert "400 of 400" in out and "20 of 400" in out


def test_a_terminal_is_renewed_until_the_run_has_ended(tmp_path: Path) -> None:
    run = write(tmp_path / "r", 100)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "megaponder", "watch", str(run), "--every", "0.1"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "110", "LINES": "40"}
    watching = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = ""
    try:
        while "100 of 400" not in seen:
            seen += os.read(ours, 65536).decode(errors="replace")
        assert watching.poll() is None
        (write(tmp_path / "s", 400) / "metrics.jsonl").replace(run / "metrics.jsonl")  # at no moment is it empty
        while "400 of 400" not in seen:
            seen += os.read(ours, 65536).decode(errors="replace")
        assert watching.wait(300) == 0
    finally:
        watching.kill()
        os.close(ours)
    assert "finished" in seen and "Traceback" not in seen


def test_blocks() -> None:
    assert spark([(0, 0.0), (1, 1.0), (2, math.nan)]) == "▁█x"
    assert spark([(float(i), float(i)) for i in range(100)], width=4) == "▁▃▆█"


def test_the_page_stands_alone(tmp_path: Path) -> None:
    run = write(tmp_path / "a<b", 300)
    text = page([overview(run)], refresh=5)
    assert '<meta http-equiv="refresh" content="5">' in text and "<title>a&lt;b</title>" in text
    assert not any(word in text for word in ("http:", "https:", "<script", "<link", "src=", "url("))
    for svg in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.partition("</svg>")[0] + "</svg>")
    assert 'http-equiv="refresh"' not in page([overview(write(tmp_path / "done", 400))], 5)


def test_long_runs_are_thinned_and_numbers_that_are_none_left_out(tmp_path: Path) -> None:
    run = tmp_path / "long"
    run.mkdir()
    rows = [{"step": s, "sequences": s, "tokens": s, "loss": math.nan if s == 5 else 1.0} for s in range(1, 3000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = page([overview(run)], 5)
    assert "nan" not in text.lower() and text.count(",") < 2 * MOST_POINTS


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "first", 10)
    (tmp_path / "empty").mkdir()
    for words, expected in (
        (["watch", str(tmp_path / "first2")], f"did you mean {tmp_path / 'first'}"),
        (["watch", str(tmp_path / "empty")], "has no metrics yet"),
        (["watch", str(tmp_path / "first"), "--html", "none/x.html"], "there is no folder none"),
        (["watch", str(tmp_path / "first"), "--html", str(tmp_path)], "this is a folder"),
        (["watch", str(tmp_path / "first"), "--every", "0"], "more than 0 seconds"),
        (["replay", str(tmp_path / "first")], "no tracker was chosen"),
        (["replay", str(tmp_path / "nothing"), "--tensorboard"], "no such run folder"),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert expected in err and err.count("\n") == 1


@EXTERNAL
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    target, shot = tmp_path / "board.html", tmp_path / "shot.png"
    assert main(["watch", str(write(tmp_path / "r", 300)), "--html", str(target), "--once"]) == 0
    common = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    size = "--window-size=1080,1180"
    done = subprocess.run(
        [*common, size, f"--screenshot={shot}", "--enable-logging=stderr", target.as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert shot.is_file(), done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr  # where the browser complains of a page
    colors = {"#1f77b4": (0x1F, 0x77, 0xB4), "#d9480f": (0xD9, 0x48, 0x0F)}
    from PIL import Image

    with Image.open(shot) as image:
        seen = {color for _, color in image.convert("RGB").getcolors(1 << 24) or []}
    assert set(colors.values()) <= seen, "both curves of the loss are drawn"
