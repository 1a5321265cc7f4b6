"""The demo's text and tokenizer."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from tokenizers import Tokenizer

from megaponder.demo import corpus
from megaponder.demo.tokenizer import END_OF_DOCUMENT, train_tokenizer

MODULE = '''"""Module text."""
import os


class Box:
    """A box
    of two lines."""

    size = """not a docstring"""

    def open(self):
        """Opens."""
        return os.name
'''


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return corpus.gather(tmp_path_factory.mktemp("text"), 150_000)


def texts(path: Path) -> list[str]:
    return [orjson.loads(line)["text"] for line in path.read_bytes().splitlines()]


def test_docstrings_leave_the_code(tmp_path: Path) -> None:
    path = tmp_path / "box.py"
    path.write_text(MODULE)
    split = corpus.split_module(path)
    assert split is not None
    code, docs = split
    assert docs == "Module text.\n\nBox: A box\nof two lines.\n\nopen: Opens.\n"
    assert code == (
        'import os\n\n\nclass Box:\n\n    size = """not a docstring"""\n\n    def open(self):\n        return os.name\n'
    )


@pytest.mark.parametrize("content", [b"x = (", b"s = '\xe9'", b"\0"], ids=["syntax", "encoding", "null"])
def test_what_is_not_python_is_left_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.py"
    path.write_bytes(content)
    assert corpus.split_module(path) is None


def test_two_corpora_of_real_text(gathered: dict[str, Path]) -> None:
    assert set(gathered) == {"code", "docs"}
    code, docs = texts(gathered["code"]), texts(gathered["docs"])
    assert 100_000 < sum(map(len, code)) < 400_000
    assert any("def " in text for text in code)
    assert len(docs) > 10
    assert all(len(text) >= corpus.SHORTEST_DOCUMENT for text in code + docs)


def test_same_python_same_bytes(gathered: dict[str, Path], tmp_path: Path) -> None:
    again = corpus.gather(tmp_path, 150_000)
    assert {n: p.read_bytes() for n, p in again.items()} == {n: p.read_bytes() for n, p in gathered.items()}
    assert not list(tmp_path.glob("*.partial"))


def test_tokenizer_loses_nothing(gathered: dict[str, Path], tmp_path: Path) -> None:
    path = train_tokenizer(list(gathered.values()), tmp_path / "tokenizer.json", 600)
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size() == 600
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == 0
    text = "def f(x):\n\treturn 'zoë 日本 \x00'  # 🙂"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
