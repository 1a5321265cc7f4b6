"""Tokenizers in exports: the same ids as in training, whatever kind it was, and no token that training did not see."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from megaponder.checkpoint.state import Contents, TrainState, load_state, save_state
from megaponder.config.schema import DataConfig, ModelConfig, RunConfig
from megaponder.data.identity import Identity
from megaponder.data.tokenizer import load_tokenizer
from megaponder.errors import UserError
from megaponder.export import tokenizer
from megaponder.export.tokenizer import SAMPLES
from megaponder.training.same_data import SameData

TEXT = ["Hello world, this is a test of the tokenizer.", "def f(x): return x + 1", "naïve café — two  spaces\n"] * 20


def config(name: str | None, eod: int | None = None, vocab: int = 600) -> RunConfig:
    return RunConfig(model=ModelConfig(vocab_size=vocab, max_positions=64), data=DataConfig(tokenizer=name, eod_id=eod))


def bpe(folder: Path, template: bool) -> Path:
    """A byte-level BPE; with `template` it puts a BOS before each text, as Llama's tokenizers do."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXT, trainer)
    if template:
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
            ]
        )
    backend.enable_truncation(4)
    backend.add_special_tokens([AddedToken("<pad>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("template", [False, True])
def test_huggingface(tmp_path: Path, template: bool) -> None:
    path = bpe(tmp_path, template)
    out = tmp_path / "out"
    out.mkdir()
    assert tokenizer.write(config(str(path)), out, None).eos_id == 0
    exported = AutoTokenizer.from_pretrained(out)
    assert (exported.bos_token_id, exported.eos_token_id, exported.padding_side) == (0, 0, "left")
    assert exported.model_max_length == 64
    for text, want in zip(SAMPLES, load_tokenizer(str(path)).encode_batch(SAMPLES), strict=True):
        assert exported(text)["input_ids"] == want
        assert exported.decode(want) == text
    assert not exported("").input_ids  # nothing is added: an evaluation harness then puts BOS = EOD alone before it
    assert json.loads((out / "tokenizer_config.json").read_text())["add_bos_token"] is False
    assert load_tokenizer(str(out)).eod_id == 0


def test_bytes(tmp_path: Path) -> None:
    assert tokenizer.write(config("bytes", eod=256), tmp_path, None).eos_id == 256
    exported = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(1, 600)))
    assert exported(text)["input_ids"] == list(text.encode())
    assert exported.eos_token_id == 256
    assert exported.decode(list(text.encode())) == text


def test_sentencepiece(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    if sys.version_info < (3, 11):
        pytest.skip("the last transformers for Python 3.10 reads SentencePiece models wrongly: the export refuses them")
    import sentencepiece

    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT * 3), model_prefix=str(tmp_path / kind), vocab_size=340, model_type=kind,
            byte_fallback=True, character_coverage=1.0, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        out = tmp_path / f"out-{kind}"
        out.mkdir()
        assert tokenizer.write(config(str(tmp_path / f"{kind}.model")), out, None).eos_id == 2
        exported = AutoTokenizer.from_pretrained(out)
        mine = load_tokenizer(str(tmp_path / f"{kind}.model"))
        for line in TEXT[:3]:
            assert exported(line)["input_ids"] == mine.encode_batch([line])[0]


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"data\.tokenizer of the checkpoint: .*gone\.json.* or to 'none' to export without"
    ):
        tokenizer.write(config("gone.json"), tmp_path, None)
    assert tokenizer.write(config("gone.json", eod=3), tmp_path, "none") == tokenizer.TokenizerFiles(None, 3)
    assert not any(tmp_path.iterdir())
    path = bpe(tmp_path, False)
    with pytest.raises(UserError, match="vocabulary has 100; use the tokenizer that the model was trained with"):
        tokenizer.write(config(str(path), vocab=100), tmp_path, None)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match="no token of id 599"):
        tokenizer.write(config(str(path), eod=599), out, None)


def test_a_tokenizer_that_the_data_do_not_record_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = load_tokenizer("bytes")
    data = {"a": {"tokenizer": own.fingerprint}, "b": {"tokenizer": None}, "c": "of an earlier version"}
    for name, kept in (("known", data), ("unknown", {})):
        (tmp_path / name).mkdir()
        save_state(tmp_path / name, TrainState(), Contents(masters=False, data=kept))
    other = load_tokenizer(str(bpe(tmp_path, template=False)))
    known, unknown = (load_state(tmp_path / name)[1].tokenizers() for name in ("known", "unknown"))
    tokenizer.warn_of_another(own, tmp_path / "known", known)
    tokenizer.warn_of_another(other, tmp_path / "unknown", unknown)
    assert not [one for one in caplog.records if one.name == tokenizer.__name__]
    tokenizer.warn_of_another(other, tmp_path / "known", known)
    assert (
        f"is {other.fingerprint[:12]}, and the data of {tmp_path / 'known'} have {own.fingerprint[:12]}" in caplog.text
    )
    same = SameData.__new__(SameData)  # what it has read of its datasets, alone
    same.identities = {"a": Identity(1, 1, 1, "", other.fingerprint)}
    assert same.other_tokenizer({other.fingerprint}, tmp_path) == same.other_tokenizer(set(), tmp_path) == []
    [told] = same.other_tokenizer({own.fingerprint}, tmp_path)
    assert f"another tokenizer ({other.fingerprint[:12]}) than" in told
