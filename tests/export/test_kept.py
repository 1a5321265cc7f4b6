"""An import that was not trained goes out with the special ids, sampling defaults and tokenizer that it came with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from megaponder.errors import UserError
from megaponder.export import kept
from megaponder.export.from_hf import import_hf
from megaponder.export.to_hf import export
from tests.export import hf_models
from tests.export.test_tokenizer import bpe


def test_ids_and_sampling_defaults_and_what_the_tokenizer_adds(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    ids = {"eos_token_id": [0, 7, 320], "pad_token_id": 9}  # 320 is no token
    theirs = LlamaConfig(**hf_models.LLAMA | {"vocab_size": 320} | ids)
    hf_models.make(LlamaForCausalLM(theirs), hf)
    bpe(hf, template=True)
    (hf / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 1, "eos_token_id": [0, 7, 8]}
    (hf / "generation_config.json").write_text(json.dumps(sampling | {"cache_implementation": "elsewhere/cache"}))
    assert "the vocabulary has 320 tokens: eos_token_id = 320." in str(import_hf(hf, tmp_path / "first"))
    run = (tmp_path / "first").rename(tmp_path / "moved")
    out = export(run, tmp_path / "out").folder
    config = json.loads((out / "config.json").read_text())
    assert [config[name] for name in kept.ENDS] == [1, [0, 7], 9]
    assert json.loads((out / "generation_config.json").read_text()) == sampling
    assert GenerationConfig.from_pretrained(out).temperature == 0.6
    before, after = (AutoTokenizer.from_pretrained(path) for path in (hf, out))
    assert before("Hello world")["input_ids"] == after("Hello world")["input_ids"]
    assert after("Hello world")["input_ids"][0] == after.bos_token_id == 1
    assert (after.eos_token_id, after.pad_token_id) == (0, 9)
    assert "imported and not trained since" in " ".join((out / "README.md").read_text().split())
    # what trained on end-of-document ids alone has seen no other ids, nor has another tokenizer
    assert kept.of(run, 8) is None
    (tmp_path / "plain").mkdir()
    other = export(run, tmp_path / "other", tokenizer_path=bpe(tmp_path / "plain", template=False)).folder
    config = json.loads((other / "config.json").read_text())
    assert [config[name] for name in kept.ENDS] == [0, 0, None]
    assert AutoTokenizer.from_pretrained(other)("Hello world")["input_ids"][0] != 1
    (hf / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read"):
        import_hf(hf, tmp_path / "third")
    assert not (tmp_path / "third").exists()
    (hf / "generation_config.json").unlink()
    import_hf(hf, run, force=True)
    out = export(run, tmp_path / "again").folder  # ids of config.json are all that is left
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [0, 7],
        "pad_token_id": 9,
    }
