"""Trains the demo's byte-level BPE tokenizer on the demo's own text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"


def train_tokenizer(corpora: list[Path], path: Path, vocab_size: int) -> Path:
    """Writes a Hugging Face `tokenizer.json`: every byte is a token, so nothing is ever unknown.  Returns its path."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_texts(corpora), trainer)
    tokenizer.save(str(path))
    return path


def read_texts(corpora: list[Path]) -> Iterator[str]:
    """The texts of JSONL corpora in sequence."""
    for corpus in corpora:
        with open(corpus, "rb") as lines:
            for line in lines:
                yield orjson.loads(line)["text"]
