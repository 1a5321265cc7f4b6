"""Tokenizers: EOD rules, fingerprints, refusals."""

import io
import json
from pathlib import Path

import pytest

from megaponder.data.tokenizer import load_tokenizer
from megaponder.errors import ConfigError, UserError
from tests.data_pipeline.make import huggingface_tokenizer


def sentencepiece_model(path: Path, eos_id: int = 2) -> Path:
    import sentencepiece

    model = io.BytesIO()
    sentences = iter(["the cat sat on the mat", "a small amount of text", "more of the same text"] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_writer=model,
        vocab_size=28,
        hard_vocab_limit=False,
        eos_id=eos_id,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return path


def test_bytes() -> None:
    t = load_tokenizer("bytes")
    assert t.encode_batch(["aé", ""]) == [[97, 0xC3, 0xA9], []] and (t.vocab_size, t.eod_id) == (257, 256)
    assert t.special_tokens == {"<EOD>": 256}
    assert t.decode([97, 0xC3, 0xA9, 256]) == "aé<EOD>"
    with pytest.raises(ConfigError, match="eod"):
        load_tokenizer("bytes", eod="x")


def test_huggingface_file_and_folder(tmp_path: Path) -> None:
    path = huggingface_tokenizer(tmp_path / "tokenizer.json", ("<pad>", "<|endoftext|>"))
    t, same = load_tokenizer(str(path)), load_tokenizer(str(tmp_path))
    assert t.fingerprint == same.fingerprint and t.eod_id == 1 and t.kind == "huggingface"
    assert t.special_tokens == {"<pad>": 0, "<|endoftext|>": 1}
    ids = t.encode_batch(["the cat", "sat\n on"])
    assert [t.decode(i) for i in ids] == ["the cat", "sat\n on"] and max(max(i) for i in ids) < t.vocab_size
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<pad>"}}))
    assert load_tokenizer(str(tmp_path)).eod_id == 0  # the tokenizer's own word counts more than a well-known name
    assert load_tokenizer(str(tmp_path), eod="<|endoftext|>").eod_id == 1
    with pytest.raises(ConfigError, match="no such token"):
        load_tokenizer(str(tmp_path), eod="<nope>")


@pytest.mark.parametrize("special", [True, False])
def test_an_eod_that_is_spelled_out_is_text(tmp_path: Path, special: bool) -> None:
    """Also where tokenizer.json does not call the token special."""
    path = huggingface_tokenizer(tmp_path / "tokenizer.json", template=True)
    content = json.loads(path.read_text())
    content["added_tokens"][0]["special"] = special
    path.write_text(json.dumps(content))
    texts = ["the cat<|endoftext|>sat", "on <|endoftext|> the\nmat", "<|endoftext|>", "no token <| here"]
    as_token, as_text = load_tokenizer(str(path)), load_tokenizer(str(path), specials_as_text=True)
    assert as_token.eod_id == as_text.eod_id == 0 and as_token.fingerprint == as_text.fingerprint
    assert [0 in ids for ids in as_token.encode_batch(texts)] == [True, True, True, False]
    encoded = as_text.encode_batch(texts)
    assert not any(0 in ids for ids in encoded) and [as_text.decode(ids) for ids in encoded] == texts
    flat, lengths = as_text.encode_flat(texts)  # the fast way
    assert flat.tolist() == [i for ids in encoded for i in ids] and lengths.tolist() == list(map(len, encoded))
    templated = load_tokenizer(str(path), special_tokens=True, specials_as_text=True)
    assert templated.encode_batch(texts) == [[*ids, 0] for ids in encoded]


def test_fingerprint_ignores_layout_not_content(tmp_path: Path) -> None:
    path = huggingface_tokenizer(tmp_path / "tokenizer.json")
    content, print_ = json.loads(path.read_text()), load_tokenizer(str(path)).fingerprint
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    path.write_text(json.dumps(dict(reversed(content.items())), indent=3))
    other = load_tokenizer(str(path))
    assert other.fingerprint == print_ and len(other.encode_batch(["the cat sat on the mat"])[0]) > 4
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).fingerprint != print_


def test_ids_with_gaps_count(tmp_path: Path) -> None:
    path = huggingface_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zzz"] = 5000
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).vocab_size == 5001


def test_template(tmp_path: Path) -> None:
    path = huggingface_tokenizer(tmp_path / "tokenizer.json", template=True)
    plain, templated = load_tokenizer(str(path)), load_tokenizer(str(path), special_tokens=True)
    assert templated.encode_batch(["cat"])[0] == [*plain.encode_batch(["cat"])[0], 0]


def test_sentencepiece(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "tokenizer.model")
    t = load_tokenizer(str(tmp_path))
    assert (t.kind, t.vocab_size, t.eod_id) == ("sentencepiece", 28, 2)
    assert t.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert [t.decode(i) for i in t.encode_batch(["the cat", "text"])] == ["the cat", "text"]
    assert load_tokenizer(str(path), eod="<s>").eod_id == 1
    with pytest.raises(ConfigError, match="no such token"):
        load_tokenizer(str(path), eod="<none>")
    assert load_tokenizer(str(sentencepiece_model(tmp_path / "other.model", eos_id=-1))).eod_id is None


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such tokenizer"):
        load_tokenizer(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="neither"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "bad.model").write_text("x")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="sentencepiece"):
        load_tokenizer(str(tmp_path / "bad.model"))
