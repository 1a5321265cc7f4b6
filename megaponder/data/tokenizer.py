"""Tokenizers behind one small protocol: Hugging Face tokenizer.json, sentencepiece .model, raw bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from megaponder.data.segments import SegmentEncoder, supports
from megaponder.errors import ConfigError, UserError
from megaponder.files import read_bounded

EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<eod>", "<EOD>", "<|end|>", "[EOS]")
"""Tokens that end a document if a tokenizer does not name one, most specific first."""

LARGEST = 1 << 28
"""Maximum bytes of a tokenizer file; the largest published ones have a seventh of this."""

Flat = tuple[np.ndarray, np.ndarray]
"""Concatenated ids of all texts (integers), and how many belong to each text (int32)."""


class Tokenizer(Protocol):
    """What the rest of the program needs from a tokenizer."""

    kind: str
    """huggingface, sentencepiece or bytes."""
    name: str
    """File or folder as given."""
    spells_specials: bool
    """Special tokens have spellings that can occur in a text and could be mistaken for them."""

    @property
    def vocab_size(self) -> int:
        """Largest id that can be produced, plus one."""

    @property
    def eod_id(self) -> int | None:
        """Id that ends a document, or None."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """Tokens that stand for no text (EOD, padding, unknown), with their ids, by id."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the content that determines ids, however the file is laid out."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without any EOD except what the tokenizer's own template adds."""

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The same ids in one array: faster for large amounts of text."""

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text whose spelled special tokens are meant, and the character at which each begins."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""


def _apart(
    tokenizer: Tokenizer, text: str, encode: Callable[[str], tuple[list[int], list[int]]]
) -> tuple[list[int], list[int]]:
    """`encode_marked` of a tokenizer that reads no special token from a text: what lies between them, by `encode`."""
    ids: list[int] = []
    begins: list[int] = []
    tokens = sorted(tokenizer.special_tokens, key=len, reverse=True)
    at = 0
    for part in re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]:
        found, places = ([tokenizer.special_tokens[part]], [0]) if part in tokenizer.special_tokens else encode(part)
        ids += found
        begins += [at + place for place in places]
        at += len(part)
    return ids, begins


def _flat(encoded: Sequence[Sequence[int]]) -> Flat:
    lengths = np.fromiter(map(len, encoded), np.int32, len(encoded))
    return np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum(dtype=np.int64))), lengths


class BytesTokenizer:
    """UTF-8 bytes as ids 0-255, and 256 for EOD.  Text can never contain the EOD."""

    kind = name = "bytes"
    spells_specials = False
    vocab_size = 257
    eod_id: int | None = 256
    special_tokens: ClassVar[dict[str, int]] = {"<EOD>": 256}
    fingerprint = hashlib.sha256(b"utf-8 bytes 0-255, end of document 256").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        encoded = [text.encode() for text in texts]
        return np.frombuffer(b"".join(encoded), np.uint8), np.fromiter(map(len, encoded), np.int32, len(encoded))

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        def characters(part: str) -> tuple[list[int], list[int]]:
            each = [character.encode() for character in part]
            return list(b"".join(each)), [at for at, one in enumerate(each) for _ in one]

        return _apart(self, text, characters)

    def decode(self, ids: Sequence[int]) -> str:
        pieces: list[bytes] = [bytes([i]) if i < 256 else b"<EOD>" for i in ids]
        return b"".join(pieces).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, by the `tokenizers` library (one thread: `prepare` has processes)."""

    kind = "huggingface"
    spells_specials = True

    def __init__(self, path: Path, name: str, eod: str | None, special_tokens: bool, specials_as_text: bool):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Backend

        text = read_bounded(path, LARGEST)
        try:
            content = json.loads(text)
            self._backend = Backend.from_buffer(text)
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise UserError(f"{path}: not a tokenizer.json that the tokenizers library can read ({error}).") from error
        if specials_as_text:
            self._backend = _with_special(self._backend, content, eod or _configured_eos(path.parent))
            self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.name, self._special_tokens = name, special_tokens
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        named = eod if eod is not None else _configured_eos(path.parent)
        self.eod_id = _find_eod(vocab.get, named, eod is not None, name)
        added = sorted(self._backend.get_added_tokens_decoder().items())
        self.special_tokens = {token.content: i for i, token in added if token.special}
        self.fingerprint = hashlib.sha256(_canonical(content)).hexdigest()
        fast = not special_tokens and supports(content)
        self._segments = SegmentEncoder(self._encode_bytes) if fast else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # "fast": without character offsets, which are not needed here
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=self._special_tokens)
        return [encoding.ids for encoding in encodings]

    def _encode_bytes(self, texts: list[str]) -> list[bytes]:
        return [array("i", ids).tobytes() for ids in self.encode_batch(texts)]

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        if self._segments is None:
            return _flat(self.encode_batch(texts))
        encoded = self._segments(texts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // 4
        return np.frombuffer(b"".join(encoded), np.int32), lengths.astype(np.int32)

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        encoded = self._backend.encode(text, add_special_tokens=False)
        return list(encoded.ids), [begin for begin, _ in encoded.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


def _with_special(backend: Any, content: dict[str, Any], eod: str | None) -> Any:
    """The backend, with the token that ends documents marked as special even if its file does not say so."""
    ends = {eod} if eod is not None else set(EOD_TOKENS)
    plain = [t for t in content.get("added_tokens") or [] if t["content"] in ends and not t.get("special")]
    if not plain:
        return backend
    added = [token | {"special": True} if token in plain else token for token in content["added_tokens"]]
    return type(backend).from_str(json.dumps(content | {"added_tokens": added}))


class SentencePieceTokenizer:
    """A sentencepiece .model, which never reads a control token from a text."""

    kind = "sentencepiece"
    spells_specials = False

    def __init__(self, path: Path, name: str, eod: str | None, special_tokens: bool, specials_as_text: bool):
        from sentencepiece import SentencePieceProcessor

        content = read_bounded(path, LARGEST)
        try:
            self._backend = SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as error:
            raise UserError(f"{path}: not a sentencepiece model ({error}).") from error
        self.name, self._special_tokens = name, special_tokens
        self.vocab_size = int(self._backend.get_piece_size())
        eos = self._backend.eos_id()
        named = eod if eod is not None else (self._backend.id_to_piece(eos) if eos >= 0 else None)
        self.eod_id = _find_eod(self._piece_id, named, eod is not None, name)
        pieces = self._backend
        special = [i for i in range(self.vocab_size) if pieces.is_control(i) or pieces.is_unknown(i)]
        self.special_tokens = {pieces.id_to_piece(i): i for i in special}
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def _piece_id(self, piece: str) -> int | None:
        found = self._backend.piece_to_id(piece)
        return found if self._backend.id_to_piece(found) == piece else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        extra = self._special_tokens
        return self._backend.encode(list(texts), out_type=int, num_threads=1, add_bos=extra, add_eos=extra)

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        return _flat(self.encode_batch(texts))

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        if not hasattr(self._backend, "encode_as_offset_mapping"):
            raise UserError(f"{self.name}: conversations in a sentencepiece model need sentencepiece 0.2.3 or newer.")

        def pieces(part: str) -> tuple[list[int], list[int]]:
            found = self._backend.encode(part, out_type="offset_mapping")
            return list(found["ids"]), [begin for begin, _ in found["offsets"]]

        return _apart(self, text, pieces)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids)))


def _find_eod(token_id: Any, named: str | None, must: bool, name: str) -> int | None:
    """Id of the token `named`, otherwise of the first well-known one; ConfigError if a required one does not exist."""
    for token in [named] if must else [named, *EOD_TOKENS]:
        found = token_id(token) if token is not None else None
        if found is not None:
            return int(found)
    if must:
        raise ConfigError("eod", named, f"the tokenizer {name} has no such token", "use one from its vocabulary")
    return None


def _configured_eos(folder: Path) -> str | None:
    """eos_token of a tokenizer_config.json in `folder`."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        token = json.loads(read_bounded(path, LARGEST)).get("eos_token")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}).") from error
    return token.get("content") if isinstance(token, dict) else token


def _canonical(content: dict[str, Any]) -> bytes:
    """tokenizer.json without parts that do not affect ids or differ between writers of the same tokenizer."""
    content = {key: value for key, value in content.items() if key not in ("truncation", "padding", "version")}
    model = {key: value for key, value in content.get("model", {}).items() if value not in (None, False)}
    if "merges" in model:  # "a b" in older files, ["a", "b"] in newer ones
        model["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    content["model"] = model
    return json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Every token's id by the name that the tokenizer has for it; bytes are called by their numbers."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return dict(tokenizer._backend.get_vocab(with_added_tokens=True))
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {tokenizer._backend.id_to_piece(i): i for i in range(tokenizer.vocab_size)}
    return {str(i): i for i in range(256)} | tokenizer.special_tokens


def load_tokenizer(
    name: str, eod: str | None = None, special_tokens: bool = False, specials_as_text: bool = False
) -> Tokenizer:
    """Load a tokenizer by file, folder or the word "bytes".

    eod: the token that ends a document; default: the tokenizer's own EOS, otherwise the first of EOD_TOKENS that it
    has. special_tokens: let the tokenizer's template add its BOS/EOS to each text.
    specials_as_text: a special token that is spelled out in a text is encoded character by character; otherwise it
    becomes the token, and an EOD would end a document in its middle.
    Raises UserError for a missing or unreadable file, ConfigError for an `eod` that it does not have.
    """
    if name == "bytes":
        if eod is not None:
            raise ConfigError("eod", eod, "the byte-level tokenizer has its own (256)", "omit the option")
        return BytesTokenizer()
    path = Path(name)
    if path.is_dir():
        candidates = [path / "tokenizer.json", path / "tokenizer.model", *sorted(path.glob("*.model"))]
        found = next((p for p in candidates if p.is_file()), None)
        if found is None:
            raise UserError(f"{name}: the folder contains neither tokenizer.json nor a sentencepiece .model.")
        path = found
    if not path.is_file():
        raise UserError(f'{name}: no such tokenizer; give a tokenizer.json, a .model, a folder with one, or "bytes".')
    loader = SentencePieceTokenizer if path.suffix == ".model" else HuggingFaceTokenizer
    return loader(path, name, eod, special_tokens, specials_as_text)
