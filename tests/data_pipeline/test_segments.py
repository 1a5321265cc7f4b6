"""Encoding by segments gives the ids of the tokenizers library, and is used only where that is certain."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import megaponder.data.segments as segments
from megaponder.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from tests.data_pipeline.make import huggingface_tokenizer

ODD = "'sdtm don't I'll “x” <|endoftext|> <|end _a1b2 --½² ß中文 é\u0301\u0338=\U0001f600 \n\r\t"
ODD += "\x1c\x0b\x85\xa0\u2003\u3000"


def _neox_like(path: Path) -> Path:
    """NFC, and runs of spaces as added tokens, as the tokenizer of the Pythia models has them."""
    from tokenizers import AddedToken, Tokenizer, normalizers

    tokenizer = Tokenizer.from_file(str(huggingface_tokenizer(path)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True, special=False) for n in range(2, 8)])
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module", params=["gpt2", "neox"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make = huggingface_tokenizer if request.param == "gpt2" else _neox_like
    loaded = load_tokenizer(str(make(path)))
    assert isinstance(loaded, HuggingFaceTokenizer) and loaded._segments is not None
    return loaded


def check(tokenizer: HuggingFaceTokenizer, texts: list[str]) -> None:
    flat, lengths = tokenizer.encode_flat(texts)
    expected = [tokenizer._backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert lengths.tolist() == [len(ids) for ids in expected]
    assert flat.tolist() == [i for ids in expected for i in ids]


@settings(max_examples=300)
@given(texts=st.lists(st.text(st.sampled_from(sorted(set(ODD))), max_size=30), max_size=4))
@example(texts=["the  cat   sat\n\n on the mat,don't", ""])
@example(texts=["a\xa0  word", "=\u0338 =", "x<|endoftext|>  <|endoftext|>y", "a<|endoftext|"])
@example(texts=["it's 'tis isn't'", "a\u0301b", "abc\u0338", "foo.bar(baz_1)"])
def test_same_ids_on_odd_text(tokenizer: HuggingFaceTokenizer, texts: list[str]) -> None:
    check(tokenizer, texts)


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_same_ids_on_any_text(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    check(tokenizer, [text, "the cat" + text + "sat"])


def test_same_ids_on_every_character_beside_a_cut(tokenizer: HuggingFaceTokenizer) -> None:
    for base in (*range(0, 0x3200, 0x200), 0xFE00):
        check(tokenizer, ["".join(f"ab{c}c {c},{c} " for c in map(chr, range(base, base + 0x200)))])


def test_same_ids_on_source_text(tokenizer: HuggingFaceTokenizer) -> None:
    paths = sorted(Path(json.__file__).parent.parent.glob("*.py"))[:20]
    texts = [path.read_text(encoding="utf-8", errors="replace")[:20000] for path in paths]
    check(tokenizer, texts)
    check(tokenizer, texts)  # now from memory


def test_memory_is_bounded(tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_SEGMENTS", 10)
    for i in range(20):
        check(tokenizer, [f"word{i} and more{i}"])
    assert tokenizer._segments is not None and len(tokenizer._segments._known) <= 10


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"model": {"type": "Unigram"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"added_tokens": [{"content": "a b"}]},
        {"added_tokens": [{"content": "word<x"}]},
        {"added_tokens": [{"content": "<x>", "rstrip": True}]},
        {"added_tokens": [{"content": "<x>", "single_word": True}]},
    ],
)
def test_other_pipelines_are_left_to_the_library(change: dict[str, Any]) -> None:
    good = {
        "model": {"type": "BPE"},
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "added_tokens": [{"content": "<|endoftext|>"}, {"content": "   "}],
    }
    assert segments.supports(good) and not segments.supports(good | change)
