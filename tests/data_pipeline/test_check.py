"""Data mistakes are one sentence, before any process group and without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaponder.data.check import check_data, fill_from_data
from megaponder.errors import ConfigError, UserError
from tests.data_pipeline.make import config, describe, huggingface_tokenizer, random_documents, write_documents


@pytest.fixture
def a(tmp_path: Path) -> str:
    return write_documents(tmp_path / "a", random_documents([20] * 50))


@pytest.fixture
def b(tmp_path: Path) -> str:
    return write_documents(tmp_path / "b", random_documents([10] * 50, seed=1))


def test_facts(tmp_path: Path, a: str, b: str) -> None:
    facts = check_data(config(tmp_path, [a, b]))
    assert [(s.documents, s.tokens) for s in facts.train] == [(40, 800), (40, 400)]
    assert [(s.documents, s.tokens) for s in facts.valid[""]] == [(10, 200), (10, 100)]
    assert [round(s.weight, 6) for s in facts.train] == [0.666667, 0.333333]
    assert [s.weight for s in check_data(config(tmp_path, [1, a, 3, b])).train] == [0.25, 0.75]
    assert facts.train_tokens == 1200 and facts.eod_id == 0 and facts.vocab_size == 100


def test_separate_validation_uses_all_documents(tmp_path: Path, a: str, b: str) -> None:
    facts = check_data(config(tmp_path, [a], valid=[b]))
    assert facts.train[0].documents == 50 and facts.valid[""][0].tokens == 500


def test_description_fills_the_config(tmp_path: Path, a: str) -> None:
    describe(a, 50, 1000)
    cfg = config(tmp_path, [a], eod_id=None)
    cfg.model.vocab_size = None
    filled = fill_from_data(cfg, check_data(cfg))
    assert filled.model.vocab_size == 100 and filled.data.eod_id == 0 and cfg.model.vocab_size is None


def test_tokenizers_of_a_blend_must_agree(tmp_path: Path, a: str, b: str) -> None:
    describe(a, 50, 1000)
    for change in ({"tokenizer_fingerprint": "0" * 64}, {"vocab_size": 101}, {"eod_id": 5}):
        describe(b, 50, 500, **change)
        with pytest.raises(UserError, match=f"share one tokenizer: {next(iter(change))} .*/b"):
            check_data(config(tmp_path, [a, b], eod_id=None))


def test_vocabulary(tmp_path: Path, a: str) -> None:
    cfg = config(tmp_path, [a])
    cfg.model.vocab_size = 50
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 50: .*/a contains token id 99; use 100 or more"):
        check_data(cfg)
    cfg.model.vocab_size = None
    with pytest.raises(ConfigError, match=r"model\.vocab_size = None"):
        check_data(cfg)
    describe(a, 50, 1000)
    cfg.model.vocab_size = 99
    with pytest.raises(ConfigError, match="the datasets have 100 ids; use 100 or more"):
        check_data(cfg)


def test_eod(tmp_path: Path, a: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.eod_id = None: loss_mask ignore_eod_target requires it"):
        check_data(config(tmp_path, [a], eod_id=None))
    assert check_data(config(tmp_path, [a], eod_id=None, loss_mask="plain")).eod_id is None
    with pytest.raises(
        ConfigError, match=r"data\.document_attention = True: .* do not say what it is; set data\.eod_id"
    ):
        check_data(config(tmp_path, [a], eod_id=None, loss_mask="plain", document_attention=True))
    with pytest.raises(ConfigError, match="token id below 100"):
        check_data(config(tmp_path, [a], eod_id=100))
    describe(a, 50, 1000)
    with pytest.raises(ConfigError, match=r"data\.eod_id = 7: the datasets end documents with 0"):
        check_data(config(tmp_path, [a], eod_id=7))


def test_splits_without_documents(tmp_path: Path, a: str) -> None:
    small = write_documents(tmp_path / "small", random_documents([9, 9]))
    with pytest.raises(UserError, match=r"small has 2 documents, which leaves none with text for the validation part"):
        check_data(config(tmp_path, [a, small], split="969,30,1"))
    with pytest.raises(UserError, match="validation part"):
        check_data(config(tmp_path, [a], split="1"))
    cfg = config(tmp_path, [small], split="1")
    cfg.train.eval_batches = 0
    assert check_data(cfg).valid == {}
    empty = write_documents(tmp_path / "empty", [[], [], [1]])
    with pytest.raises(UserError, match="empty has 3 documents"):
        check_data(config(tmp_path, [empty], split="2,1"))


def test_other_tokenizer(tmp_path: Path, a: str) -> None:
    path = huggingface_tokenizer(tmp_path / "tokenizer.json")
    describe(a, 50, 1000)
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .*made with another tokenizer"):
        check_data(config(tmp_path, [a], tokenizer=str(path)))


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        check_data(config(tmp_path, []))


def test_checks_and_prepare_import_no_torch() -> None:
    code = "import sys, megaponder.data.check, megaponder.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
