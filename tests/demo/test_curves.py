"""Curves, their plot and the sentence about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaponder.demo.curves import Curve, plot, read_curve, verdict
from megaponder.errors import UserError


def curve(name: str, losses: list[float], flops: float = 1e9) -> Curve:
    return Curve(name, flops, tuple(1000 * (i + 1) for i in range(len(losses))), tuple(losses))


def test_reads_only_rows_with_a_validation_loss(tmp_path: Path) -> None:
    rows = [{"step": 1, "tokens": 10, "loss": 5.0}, {"step": 2, "tokens": 20, "loss": 4.0, "validation_loss": 4.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = read_curve("a", tmp_path, 2e12)
    assert (found.tokens, found.losses) == ((20,), (4.5,))
    assert found.petaflops == pytest.approx([0.04])


def test_run_without_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl has no validation_loss"):
        read_curve("a", tmp_path, 1.0)


def test_plot_is_a_png_of_some_size(tmp_path: Path) -> None:
    path = tmp_path / "v.png"
    plot([curve("PonderLM", [5.0, 4.0], 4e9), curve("vanilla", [5.1, 4.2])], path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1200, 504)
    plot([curve("PonderLM", [5.0, 4.1], 4e9), curve("vanilla", [5.1, 4.2])], path)
    assert path.read_bytes() != data


@pytest.mark.parametrize(
    ("pondering", "matched", "words"),
    [
        (4.0, 4.2, "PonderLM is lower than matched vanilla by 0.200"),
        (4.3, 4.2, "PonderLM is HIGHER than matched vanilla by 0.100"),
        (4.2, 4.205, "no notable difference"),
    ],
)
def test_verdict_says_what_is(pondering: float, matched: float, words: str) -> None:
    control = curve("matched vanilla", [5.0, matched])
    text = verdict(curve("PonderLM", [5.0, pondering], 4e9), control, curve("vanilla", [5.0, 4.9]))
    assert words in text and "4.900 for vanilla as published" in text
    assert "4.0 times the compute" in text
