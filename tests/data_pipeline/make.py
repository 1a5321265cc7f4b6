"""Small datasets, configurations and tokenizers for the tests of the data pipeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megaponder.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from megaponder.data.indexed import best_dtype, write_index
from megaponder.data.info import DatasetMeta

EOD = 0


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> str:
    """An indexed dataset of these documents, as a tool without descriptions would write it."""
    np.array([i for d in documents for i in d], dtype).tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", dtype, np.array([len(d) for d in documents], np.int32))
    return str(prefix)


def random_documents(lengths: Sequence[int], seed: int = 0, vocab: int = 100) -> list[list[int]]:
    """Documents of these lengths, each ending with EOD."""
    rng = np.random.default_rng(seed)
    return [[*rng.integers(1, vocab, n - 1).tolist(), EOD] if n else [] for n in lengths]


def describe(prefix: str, documents: int, tokens: int, **changes: object) -> None:
    """Write the JSON of a dataset with `changes`."""
    values: dict[str, object] = {
        "tokenizer": "tok.json",
        "tokenizer_kind": "huggingface",
        "tokenizer_fingerprint": "f" * 64,
        "vocab_size": 100,
        "eod_id": EOD,
        "max_id": 99,
        "documents": documents,
        "tokens": tokens,
        "dtype": best_dtype(100),
        "text_bytes": 1,
    }
    Path(f"{prefix}.json").write_bytes(DatasetMeta(**(values | changes)).dump())  # type: ignore[arg-type]


def config(tmp_path: Path, train: list[str | float], **data: object) -> RunConfig:
    """A run on `train` with 16 tokens a sequence."""
    values = {"sequence_length": 16, "split": "8,2", "eod_id": EOD} | data
    return RunConfig(
        run=str(tmp_path / "run"),
        model=ModelConfig(vocab_size=100),
        data=DataConfig(train=train, **values),  # type: ignore[arg-type]
        train=TrainConfig(eval_batches=1),
    )


def huggingface_tokenizer(path: Path, special: Sequence[str] = ("<|endoftext|>",), template: bool = False) -> Path:
    """Train a byte-level BPE on a little text and save it as tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "a small amount of text"] * 4, trainer)
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {special[0]}", special_tokens=[(special[0], tokenizer.token_to_id(special[0]))]
        )
    tokenizer.save(str(path))
    return path


def jsonl(path: Path, texts: Sequence[str]) -> Path:
    """One {"text": ...} a line."""
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def write_conversations(prefix: Path, count: int, longest: int, seed: int = 0, vocab: int = 90) -> str:
    """A dataset of `count` conversations of 2 to `longest` tokens: one to three turns of prompt and answer, each answer
    ending with EOD."""
    rng = np.random.default_rng(seed)
    documents, marks = [], []
    for _ in range(count):
        length = int(rng.integers(2, longest + 1))
        ids, mask = rng.integers(1, vocab, length), np.zeros(length, np.int8)
        turns = int(rng.integers(1, 1 + min(3, length // 2)))
        edges = [*np.sort(rng.choice(np.arange(1, length), 2 * turns - 1, replace=False)), length]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            mask[begin:end] = 1
            ids[end - 1] = EOD
        documents.append(ids.tolist())
        marks += mask.tolist()
    write_documents(prefix, documents)
    np.array(marks, np.int8).tofile(f"{prefix}.mask")
    return str(prefix)
