"""Tokenizer files of an export: the same ids as in training, with BOS and EOS as the model has seen them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.state import load_state
from megaponder.config.schema import RunConfig
from megaponder.data.chat import Chat
from megaponder.data.template import read_template, template_of
from megaponder.data.tokenizer import Tokenizer, load_tokenizer
from megaponder.errors import UserError
from megaponder.export.folder import has_tokenizer, write_json
from megaponder.export.kept import ENDS

log = logging.getLogger(__name__)
FINGERPRINTS = "tokenizer_fingerprints"
"""Field of config.json: the tokenizers of the data that the model was trained on."""
NONE = "none"
"""Used instead of a path: export without a tokenizer."""
FIX = f"set --tokenizer to its path, or to {NONE!r} to export without one"
SAMPLES = ("Hello world", "  two  spaces\n\n\ttab", "naïve café — 東京 🙂", "def f(x):\n    return x[0] + 1\n", "")


@dataclass(frozen=True)
class TokenizerFiles:
    """What was written, and the id that ends a document."""

    source: str | None
    eos_id: int | None
    fingerprint: str | None = None
    """Of the tokenizer that they were made from."""


def find(cfg: RunConfig, path: str | Path | None, fix: str = FIX) -> Tokenizer | None:
    """The tokenizer of a run: `path`, or data.tokenizer; None for the word "none" or if neither is set.

    `fix`: what to do where data.tokenizer cannot be read, for the UserError.
    """
    name = cfg.data.tokenizer if path is None else str(path)
    if name is None or name == NONE:
        return None
    try:
        return load_tokenizer(name)
    except UserError as error:
        if path is not None:
            raise
        raise UserError(f"data.tokenizer of the checkpoint: {str(error).rstrip('.')}; {fix}.") from error


def of_text(cfg: RunConfig, source: str | Path, path: str | Path | None) -> Tokenizer:
    """The same for a command that cannot do without; UserError, naming the model, if there is none."""
    refuse_none(path)
    if (tokenizer := find(cfg, path, "set --tokenizer to its path")) is None:
        raise UserError(f"{source} does not name a tokenizer (data.tokenizer); set one with --tokenizer.")
    if path is not None:
        warn_of_another(tokenizer, locate(source), load_state(locate(source))[1].tokenizers())
    return tokenizer


def warn_of_another(tokenizer: Tokenizer, source: Path, known: set[str]) -> None:
    """A warning where the data that a checkpoint or an export was trained on record other tokenizers (`known`, their
    fingerprints) alone.  The same ids may have another fingerprint, as in an export, so that this is no error."""
    if known and tokenizer.fingerprint not in known:
        log.warning(
            "--tokenizer %s: its fingerprint is %s, and the data of %s have %s, so its ids may mean other texts; leave "
            "it out to use the model's own.",
            tokenizer.name, tokenizer.fingerprint[:12], source, ", ".join(sorted(one[:12] for one in known)),
        )  # fmt: skip


def recorded(config: dict[str, Any], path: Path) -> set[str]:
    """Fingerprints of an export: those in its config.json and, beside them, that of its own files; {}: it has none."""
    named = config.get(FINGERPRINTS)
    found = {one for one in named if isinstance(one, str)} if isinstance(named, list) else set()
    if found and has_tokenizer(path):
        found.add(load_tokenizer(str(path)).fingerprint)
    return found


def refuse_none(path: str | Path | None) -> None:
    """UserError for the word "none" where text is read."""
    if path is not None and str(path) == NONE:
        raise UserError(f"--tokenizer {NONE}: text needs a tokenizer; leave it out, or give the path of one.")


def write(
    cfg: RunConfig,
    out: Path,
    path: str | Path | None,
    chat_template: str | Path | None = None,
    before: dict[str, Any] | None = None,
    fix: str = FIX,
    chat: Chat | None = None,
) -> TokenizerFiles:
    """Write tokenizer.json and tokenizer_config.json into `out`.

    Training puts nothing but EOD between documents, so EOD is both BOS and EOS, and no token is added to a text
    (add_bos_token false): with any other rule evaluation scores change by orders of magnitude.  The chat template is
    the given file, else the one that the model was trained with (`chat`), else that of the tokenizer's folder.
    `before` has the special ids of a folder that was imported and not trained since: they stay, and so does what its
    tokenizer adds to a text.
    UserError if the written files do not give the same ids as in training on sample texts, or, with `fix`, if
    data.tokenizer cannot be read.
    """
    tokenizer = find(cfg, path, fix)
    eos = tokenizer.eod_id if tokenizer is not None and cfg.data.eod_id is None else cfg.data.eod_id
    assert cfg.model.vocab_size is not None
    if eos is not None and not 0 <= eos < cfg.model.vocab_size:
        raise UserError(
            f"data.eod_id = {eos}: it becomes eos_token_id, which the model could never write; it must lie below "
            f"model.vocab_size = {cfg.model.vocab_size}."
        )
    if tokenizer is None:
        if chat_template is not None:
            raise UserError(f"--chat-template {chat_template}: it needs a tokenizer; set --tokenizer as well.")
        return TokenizerFiles(None, eos)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but the model's vocabulary has "
            f"{cfg.model.vocab_size}; use the tokenizer that the model was trained with."
        )
    content = {"bytes": _bytes, "huggingface": _huggingface, "sentencepiece": _sentencepiece}[tokenizer.kind](tokenizer)
    if before is not None and tokenizer.kind == "huggingface":
        content["post_processor"] = json.loads(source_file(tokenizer, "tokenizer.json").read_bytes())["post_processor"]
    write_json(out / "tokenizer.json", content)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": cfg.model.max_positions,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    if before is None:
        settings |= {"add_bos_token": False, "add_eos_token": False}
    ids = dict.fromkeys(ENDS, eos) if before is None else before
    for name in ENDS:
        index = ids.get(name)
        index = index[0] if isinstance(index, list) and index else index
        if type(index) is int and index >= 0 and (token := _token(out / "tokenizer.json", index)) is not None:
            settings[name.removesuffix("_id")] = token
    if chat_template is None and chat is not None:
        settings["chat_template"] = chat.template.text
        settings |= {"bos_token": chat.template.bos} if chat.template.bos else {}
    elif (template := _chat_template(tokenizer, chat_template)) is not None:
        settings["chat_template"] = template
    write_json(out / "tokenizer_config.json", settings)
    _check(out, tokenizer, eos, trained=before is None)
    return TokenizerFiles(tokenizer.name, eos, tokenizer.fingerprint)


def _chat_template(tokenizer: Tokenizer, given: str | Path | None) -> Any:
    """The text of a chat template, or several with their names: from a file, or from the tokenizer's folder."""
    return template_of(tokenizer) if given is None else read_template(Path(given))


def _token(path: Path, index: int) -> str | None:
    from tokenizers import Tokenizer as Backend

    token: str | None = Backend.from_file(str(path)).id_to_token(index)
    return token


def source_file(tokenizer: Tokenizer, *names: str) -> Path:
    """The file of a tokenizer that was given as a file or folder."""
    path = Path(tokenizer.name)
    return path if path.is_file() else next(found for name in names for found in sorted(path.glob(name)))


def _huggingface(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json without padding, truncation and the template that adds special tokens."""
    content = json.loads(source_file(tokenizer, "tokenizer.json").read_bytes())
    content["padding"] = content["truncation"] = None
    content["post_processor"] = _without_template(content.get("post_processor"))
    return dict(content)


def _without_template(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    if processor is None or processor["type"] != "Sequence":
        adds = processor is not None and processor["type"] not in ("ByteLevel",)
        return None if adds else processor
    kept = [p for p in (_without_template(p) for p in processor["processors"]) if p is not None]
    return {**processor, "processors": kept} if kept else None


def _bytes(tokenizer: Tokenizer) -> dict[str, Any]:
    """Bytes as a byte-level BPE without merges; the printable characters for bytes are the library's."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {_stand_in(byte): byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = letters, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<EOD>", special=True, normalized=False)])
    return dict(json.loads(backend.to_str()))


def _stand_in(byte: int) -> str:
    """The character that byte-level tokenizers use for a byte: itself if printable, otherwise 256, 257, ... in
    order."""

    def printable(b: int) -> bool:
        return 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255

    return chr(byte) if printable(byte) else chr(256 + sum(not printable(b) for b in range(byte)))


def _sentencepiece(tokenizer: Tokenizer) -> dict[str, Any]:
    """A sentencepiece model as tokenizer.json, by transformers' converter."""
    from tokenizers import AddedToken

    path = source_file(tokenizer, "tokenizer.model", "*.model")
    try:
        from transformers.convert_slow_tokenizer import SpmConverter, import_protobuf

        proto, build = import_protobuf().ModelProto(), SpmConverter.build_tokenizer_from_spm_proto
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{path}: converting it needs pip install protobuf and a newer transformers ({error})."
        ) from error
    proto.ParseFromString(path.read_bytes())
    unigram = proto.trainer_spec.model_type == 1
    vocab = [(p.piece, p.score) for p in proto.pieces] if unigram else {p.piece: i for i, p in enumerate(proto.pieces)}
    backend = build(proto, vocab)
    control = [p.piece for p in proto.pieces if p.type in (2, 3)]  # unknown and control pieces
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    return dict(json.loads(backend.to_str()))


def _check(out: Path, tokenizer: Tokenizer, eos: int | None, trained: bool) -> None:
    """Reject an export whose tokenizer differs from the one used in training on any sample, or after training adds
    tokens."""
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(out)
    for text, want in zip(SAMPLES, tokenizer.encode_batch(SAMPLES), strict=True):
        if (got := exported(text, add_special_tokens=trained)["input_ids"]) != want:
            raise UserError(
                f"the tokenizer {tokenizer.name} cannot be exported: {text!r} gives ids {got[:8]} instead of "
                f"{want[:8]}; use --tokenizer {NONE} to export without a tokenizer."
            )
    if trained and eos is not None and exported.eos_token_id != eos:
        raise UserError(f"the tokenizer {tokenizer.name} has no token of id {eos}, which ended documents in training.")
