"""The page of a text's depths: the numbers of the training forward, in a browser as well."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megaponder.cli.main import main
from megaponder.export.to_hf import export
from megaponder.inference.depth import read_depths
from megaponder.inference.depth_page import look, page
from tests.export import checkpoints
from tests.external import EXTERNAL
from tests.monitor.test_watch import CHROMIUM

TEXT = "The quick <brown> fox & co."


def make(method: str, folder: Path) -> Path:
    data = {"tokenizer": "bytes", "eod_id": 256}
    checkpoints.make("llama", method, folder / method, data=data, vocab_size=257)
    return folder / method


@pytest.mark.parametrize("method", ["adaponderlm", "adaptive_cot"])
def test_numbers_are_those_of_the_training_forward(method: str, tmp_path: Path) -> None:
    run = make(method, tmp_path)
    seen, want = look(run, TEXT), read_depths(run, TEXT)
    assert [t.depth for t in seen.tokens] == [t.depth for t in want.tokens]
    assert len({t.depth for t in seen.tokens}) > 1
    assert "".join(t.text for t in seen.tokens) == TEXT
    for token, other in zip(seen.tokens[:-1], want.tokens, strict=False):
        assert token.passes[-1].nll == pytest.approx(other.nll, rel=1e-4)
        assert all(1 >= p.best[0][1] >= p.best[1][1] >= p.best[2][1] > 0 for p in token.passes)
    assert seen.tokens[-1].passes[-1].nll is None
    gates = [p.gate for t in seen.tokens for p in t.passes[: seen.deepest - 1]]
    threshold = checkpoints.models.METHODS[method]["threshold"]
    assert None not in gates
    for token in seen.tokens:  # it went on exactly while its gate was open
        opened = [p.gate >= threshold for p in token.passes if p.gate is not None]
        assert opened == [True] * (token.depth - 1) + [False] * (token.depth < seen.deepest)


def test_passes_of_fixed_depth(tmp_path: Path) -> None:
    run = make("ponderlm", tmp_path)
    seen = look(run, TEXT)
    assert {t.depth for t in seen.tokens} == {3} and all(p.gate is None for t in seen.tokens for p in t.passes)
    export(run, tmp_path / "hf")
    again = look(tmp_path / "hf", TEXT)
    assert [t.depth for t in again.tokens] == [t.depth for t in seen.tokens], "by the code that the folder carries"
    shown = page(seen)
    assert "&lt;" in shown and "<brown>" not in shown and "<script" not in shown and "http" not in shown


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path), "--html", "x.html"]) == 2
    assert "--html x.html: it needs a text; add --depth TEXT." in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--depth", "a", "--html", "nowhere/x.html"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err
    run = make("pause", tmp_path)
    assert main(["inspect", str(run), "--depth", "a", "--html", str(tmp_path / "x.html")]) == 2
    assert "pause has no passes that could be shown one by one" in capsys.readouterr().err


@EXTERNAL
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_a_token(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    run, target, shot = make("adaponderlm", tmp_path), tmp_path / "depth.html", tmp_path / "shot.png"
    assert main(["inspect", str(run), "--depth", TEXT, "--html", str(target)]) == 0
    common = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    address = f"{target.as_uri()}#t4"  # the same as pointing at a token
    told = ["--window-size=900,400", "--enable-logging=stderr"]
    done = subprocess.run(
        [*common, *told, f"--screenshot={shot}", address], capture_output=True, text=True, timeout=300
    )
    assert shot.is_file(), done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
    from PIL import Image

    with Image.open(shot) as image:
        colours = {c: n for n, c in image.convert("RGB").getcolors(1 << 24) or []}
    shades = re.findall(
        r'class="t" id="t\d+" tabindex="0" style="background: hsl\(212, 80%, (\d+)%\)', target.read_text()
    )
    assert len(set(shades)) > 1
    import colorsys

    for shade in set(shades):
        want = tuple(round(255 * x) for x in colorsys.hls_to_rgb(212 / 360, int(shade) / 100, 0.8))
        assert any(max(abs(a - b) for a, b in zip(want, c, strict=True)) <= 1 for c in colours), shade
    dark = sum(n for c, n in colours.items() if max(c) < 60)
    hidden = subprocess.run(
        [*common, *told, f"--screenshot={shot}", target.as_uri()], capture_output=True, text=True, timeout=300
    )
    assert hidden.returncode == 0
    with Image.open(shot) as image:
        without = sum(n for n, c in image.convert("RGB").getcolors(1 << 24) or [] if max(c) < 60)
    assert dark > without + 300  # the letters of the token's table are there only when it is pointed at
