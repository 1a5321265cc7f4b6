"""The commands of README and tour: all of them are legal, and the cheap ones print what is shown."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megaponder.cli.main import main, parse
from megaponder.config.load import load_config
from megaponder.config.resolve import resolve
from megaponder.config.rules import check
from megaponder.ponder.facts import facts_of
from megaponder.ponder.settings import method_of

ROOT = Path(__file__).resolve().parents[1]
README, TOUR = ((ROOT / page).read_text() for page in ("README.md", "docs/tour.md"))
SHORTENED = " ..."
"""Ends a printed line that was cut; alone on a line it stands for lines left out."""


@dataclass
class Shown:
    """A command of a fenced block and the lines below it."""

    command: str
    printed: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The words, without a comment behind them."""
        return shlex.split(self.command, comments=True)


def commands() -> list[Shown]:
    """All commands of fenced blocks: lines that begin with a prompt, or with the name of a program."""
    found: list[Shown] = []
    variables: dict[str, str] = {}
    for block in re.findall(r"^```\n(.*?)^```$", README + TOUR, re.DOTALL | re.MULTILINE):
        current: Shown | None = None
        for line in block.replace("\\\n", " ").splitlines():
            if assigned := re.fullmatch(r'\$ ([A-Z]+)="(.*)"', line):
                variables[f"${assigned[1]}"] = assigned[2]
                continue
            for name, value in variables.items():
                line = line.replace(name, value)
            if line.startswith(("$ ", "make ", "torchrun ", "megaponder ")):
                current = Shown(line.removeprefix("$ "))
                found.append(current)
            elif current is not None and line.strip() and line.strip() != SHORTENED.strip():
                current.printed.append(line)
    return found


COMMANDS = commands()
CHEAP = [c for c in COMMANDS if c.words[:2] == ["megaponder", "plan"] and c.printed]


def megaponder_words(words: list[str]) -> tuple[list[str], int]:
    """Arguments of megaponder and the number of processes."""
    if words[0] == "torchrun":
        begin = words.index("megaponder")
        assert words[words.index("-m") + 1 : begin] in ([], ["--"])
        return words[begin + 1 :], int(words[words.index("--nproc-per-node") + 1])
    assert words[0] == "megaponder", words
    return words[1:], 1


def test_the_readme_takes_five_minutes() -> None:
    assert len(README.split()) < 1000, "details belong to docs/"


def test_every_kind_of_command_is_shown() -> None:
    first = {tuple(c.words[:2]) for c in COMMANDS}
    shown = {name for _, name in first}
    assert {"prepare", "plan", "train", "inspect", "generate", "export", "import"} <= shown
    assert {("make", "demo"), ("make", "test")} <= first and any(c.words[0] == "torchrun" for c in COMMANDS)
    assert len(CHEAP) >= 2


@pytest.mark.parametrize("shown", COMMANDS, ids=lambda c: c.command[:60])
def test_the_command_is_legal(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shown.words
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
        return
    arguments, world = megaponder_words(words)
    args, module = parse(arguments)
    assert module is not None
    if "overrides" not in args:
        return
    cfg = resolve(load_config(args.config, args.overrides))  # the file is there, and every field exists
    if not any(line.startswith("error: ") for line in shown.printed):
        method = method_of(cfg)
        check(cfg, facts_of(method), getattr(args, "world_size", None) or world)


@pytest.mark.parametrize("shown", CHEAP, ids=lambda c: c.command[:60])
def test_it_prints_what_is_shown(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code = main(megaponder_words(shown.words)[0])
    out, err = capsys.readouterr()
    assert code == (2 if err else 0)
    real = [line.rstrip() for line in (out + err).splitlines()]  # tables end in spaces
    assert shown.printed
    for line in shown.printed:  # in the order in which they come
        found = next((i for i, text in enumerate(real) if _same(line, text)), None)
        assert found is not None, f"not printed, or not here: {line!r}"
        real = real[found + 1 :]


def _same(shown: str, real: str) -> bool:
    return real.startswith(shown[: -len(SHORTENED)]) if shown.endswith(SHORTENED) else real == shown
