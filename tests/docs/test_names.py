"""Every file, field, command and symbol that the documentation names in `code` exists."""

from __future__ import annotations

import importlib
import re
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

from megaponder.cli.main import COMMANDS
from megaponder.config.fields import FREE, all_fields, sections
from megaponder.config.rules import depth_attention, freqkv, moe
from megaponder.ponder.registry import methods

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SUFFIXES = {
    "bin", "cfg", "distcp", "gz", "html", "idx", "jsonl", "json", "md", "model", "parquet", "png", "py", "sbatch", "sh",
    "svg", "toml", "txt", "yaml", "yml", "zst",
}  # fmt: skip
SCRIPTS = (".py", ".sh", ".sbatch")
MADE = re.compile(
    r"(RUN|PREFIX|FOLDER|CHECKPOINT|OUT)\b.*|\.\w+|.*\.(html|bin|idx|distcp|jsonl)"
    r"|(data|state|manifest|tokenizer|origin|(\w+_)?config)\.json|config\.yaml|(ranks|stacks)/(\d+\.\w+)?|depth\.png|tree\.(png|svg)|validation\.png|data/.*|site/|runs/.*|hf/.*|demo-run/.*"
)
"""Files that commands write or that a user has, and suffixes alone."""


def spans(page: Path) -> list[str]:
    """Inline code of a page, without fenced and indented blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return re.findall(r"`([^`]+)`", " ".join(text.split("\n")))


@lru_cache
def words() -> frozenset[str]:
    """All words of tracked files that are not documentation."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    texts = [
        ROOT / name for name in listed if name.endswith((".py", ".sh", ".sbatch", ".yaml", ".yml", ".toml", "run"))
    ]
    texts += [ROOT / "Makefile", ROOT / "docker" / "cpu.Dockerfile"]
    own = [p for p in texts if p.is_file() and p != Path(__file__)]
    return frozenset(word for p in own for word in re.findall(r"\w+", p.read_text()))


def problem(span: str) -> str | None:
    """Why a piece of inline code is wrong, if it is one of the kinds that can be checked."""
    for check in (_file, _field, _command, _option, _symbol):
        found = check(span)
        if found is not None:
            return found or None
    return None


def _file(span: str) -> str | None:
    if not re.fullmatch(r"[\w./-]*[\w-](\.[\w-]+)+|\.?[\w.-]+(/[\w.-]+)*/", span):
        return None
    if not (span.endswith("/") or span.rpartition(".")[2] in SUFFIXES):
        return None
    if MADE.fullmatch(span):
        return ""
    there = (ROOT / span).exists() or any(any(ROOT.glob(f"{'*/' * depth}{span}")) for depth in (1, 2, 4))
    return "" if there else f"there is no file {span}"


PARTS = {
    "model.depth_attention": depth_attention.KNOWN,
    "model.freqkv": freqkv.OPTIONS,
    "model.moe": moe.OPTIONS,
    "train.disciplines": moe.DISCIPLINE_OPTIONS,
}
"""What mappings other than a method's options may have."""


def _field(span: str) -> str | None:
    name = re.split(r"[:= ]", span.removeprefix("--"))[0]
    section, dot, rest = name.partition(".")
    if not dot or section not in sections() or not re.fullmatch(r"[\w.]+", rest):
        return None
    if name in all_fields() or name == FREE or any(f.startswith(name + ".") for f in all_fields()):
        return ""
    if name.startswith(FREE + "."):
        options = {o for cls in methods().values() for o in cls.Options.__dataclass_fields__}
        return "" if name.rpartition(".")[2] in options else f"no method has the option {name}"
    whole, _, part = name.rpartition(".")
    if whole in PARTS:
        return "" if part in PARTS[whole] else f"{whole} has no part {part}"
    return "" if _resolves(name) else f"there is no field {name}"


def _resolves(name: str) -> bool:
    """Whether a dotted name, with or without the package before it, is a module or something in one."""
    parts = name.removeprefix("megaponder.").split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["megaponder", *parts[:cut]]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def _command(span: str) -> str | None:
    if not re.match(r"megaponder \w", span):
        return None
    command = span.split()[1]
    return "" if command in COMMANDS else f"there is no command {command}"


def _option(span: str) -> str | None:
    match = re.fullmatch(r"--([a-z][\w-]*)( .*)?", span)
    if not match:
        return None
    known = set(re.findall(r"--[a-z][\w-]*", " ".join((ROOT / p).read_text() for p in _with_options())))
    return "" if f"--{match[1]}" in known or match[1] == "run" else f"there is no option {span}"


@lru_cache
def _with_options() -> tuple[str, ...]:
    folders = ("megaponder", "benchmarks", "launch", "tests/launch")
    return tuple(str(p) for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in SCRIPTS)


def _symbol(span: str) -> str | None:
    """Names with an underscore, a capital inside or a dot: words of the source."""
    name = span.removesuffix("()")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        return None
    if not ("_" in name or "." in name or re.search(r"[a-z][A-Z]", name)) or name in FOREIGN:
        return None
    if name.startswith(("megaponder_", "ponder_")):
        return None  # a metric: tests/monitor compares the table with the registry
    if name.startswith("megaponder.") and not _resolves(name):
        return f"there is no {name}"
    unknown = [part for part in name.split(".") if part not in words()]
    return f"no source has the word {unknown[0]}" if unknown else ""


FOREIGN = {"SignalException", "ChildFailedError", "megaponder.methods"}
"""torchrun's, and an entry-point group."""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert {span: why for span in spans(page) if (why := problem(span))} == {}


@pytest.mark.parametrize(
    "span",
    [
        "megaponder/engine/nowhere.py", "nowhere/", "train.step_s", "ponder.options.stepz", "megaponder bake",
        "--nowhere", "NoSuchClass", "no_such_function", "megaponder.ponder.base.Nothing",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(span: str) -> None:
    assert problem(span)


@pytest.mark.parametrize(
    "span",
    [
        "README.md", "configs/", "launch/torchrun.sh", "train.steps", "--train.steps 10", "ponder.options",
        "model.family", "ponder.options.latents", "megaponder plan --presets", "--audit", "PonderStage",
        "megaponder.ponder.base.Method",
    ],
)  # fmt: skip
def test_what_exists_is_not_complained_of(span: str) -> None:
    assert problem(span) is None
