"""Text from a checkpoint or an export folder: the same cached decoding as the exported model's."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from megaponder.config.yaml_file import is_unicode
from megaponder.data.chat import Chat
from megaponder.data.chat import read as read_chat
from megaponder.data.conversations import BadRecordError, listed
from megaponder.data.template import OF_TOKENIZER, find_template, template_of
from megaponder.data.tokenizer import Tokenizer, load_tokenizer
from megaponder.decoding.backbone import feature
from megaponder.errors import ConfigError, UserError
from megaponder.export.requirements import require_transformers

GENERATION = "generation_config.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """One prompt and what followed it."""

    prompt: str
    text: str
    """The new text alone."""
    tokens: int
    """New tokens, the end-of-document token included."""
    ended: bool
    """The model emitted the end-of-document token."""
    depths: tuple[int, ...] | None = None
    """On request: passes (rows, for methods with latents) of each token of prompt and text but the last."""
    rounds: int | None = None
    """With speculation: rounds of drafting and verifying."""


@dataclass(frozen=True)
class Source:
    """A model ready to generate."""

    model: Any
    tokenizer: Tokenizer
    eos_id: int | None
    max_positions: int
    has_cache: bool = True
    close: Callable[[], None] = lambda: None
    chat: Chat | None = None
    """How it is talked to, if it has a chat template."""


def generate(
    source: str | Path,
    prompts: list[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    tokenizer: str | None = None,
    device: str | None = None,
    use_cache: bool = True,
    trust_remote_code: bool = False,
    passes: int | None = None,
    threshold: float | None = None,
    exit_below: float | None = None,
    exit_by: str | None = None,
    kv_budget: int | None = None,
    depths: bool = False,
    rows: int | None = None,
    speculate: int | None = None,
    on_text: Callable[[Generation], None] | None = None,
    chat: bool = False,
) -> list[Generation]:
    """Continue `prompts` with a checkpoint, a run's newest checkpoint, or an export folder.

    temperature 0 is greedy; top_k 0 and top_p 1 keep the whole distribution.  All prompts run as one left-padded batch.
    An empty prompt starts as a document does in training: after an end-of-document token.
    `tokenizer` defaults to the source's own; `device` to cuda if available.  Without `use_cache` every token recomputes
    the full text: slow, with the same result, for checking.  `trust_remote_code` runs the modelling
    code of an export folder even if it is not this version's.  A checkpoint whose method has no decoding form runs
    the full text through the training forward for every token, with a warning.

    passes: of a token, at most (exactly, for methods of fixed depth); threshold: of halting; exit_below, exit_by: when
    a core stops (docs/looped.md); kv_budget: passes whose keys and values a token keeps; depths: tell each token's.
    rows: batch by depth, with so many texts at once (`inference.batching`); the greedy text is the same, sampled text
    is not.  speculate: the same greedy text, with so many tokens a round drafted by their first pass.
    on_text: with rows, takes each text as soon as it and those of all prompts before it have ended.
    chat: a prompt is what a user says, or a list of messages as JSON, and the model's chat template is put around it.
    Raises UserError for values out of range, a source without tokenizer, or text that exceeds the longest sequence.
    """
    require_transformers("megaponder generate")
    _check(prompts, max_new_tokens, temperature, top_k, top_p, seed)
    if speculate is not None:
        _check_speculation(speculate, temperature, rows, depths, use_cache)
    loaded = load(source, tokenizer, device, trust_remote_code)
    chosen = dict(passes=passes, threshold=threshold, exit_below=exit_below, exit_by=exit_by, kv_budget=kv_budget)
    given = _given(loaded, {name: value for name, value in chosen.items() if value is not None})
    if seed is not None:
        torch.manual_seed(seed)
    if chat:
        loaded, asked = _talked(loaded, prompts, str(source))
    else:
        asked = loaded.tokenizer.encode_batch(prompts)
    if rows is not None or speculate is not None:
        words = _fitting(loaded, asked, max_new_tokens)
        if speculate is not None:
            return _speculated(loaded, prompts, words, max_new_tokens, speculate, given)
        options = {**given, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        return _by_depth(loaded, prompts, words, max_new_tokens, rows, depths, on_text or (lambda text: None), options)
    ids, mask = _batch(loaded, _fitting(loaded, asked, max_new_tokens))
    sampling: dict[str, Any] = dict(do_sample=False)
    if temperature > 0:
        sampling = dict(do_sample=True, temperature=float(temperature), top_k=top_k, top_p=float(top_p))
    pad = 0 if loaded.eos_id is None else loaded.eos_id
    try:
        out = loaded.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=loaded.eos_id,
            pad_token_id=pad,
            use_cache=use_cache and loaded.has_cache,
            return_dict_in_generate=True,
            **given,
            **sampling,
        )
    finally:
        loaded.close()
    texts = out.sequences[:, ids.shape[1] :].tolist()
    if not depths:
        return [_finish(loaded, p, row) for p, row in zip(prompts, texts, strict=True)]
    from megaponder.decoding.model import CACHE_FIELD

    cache = out.get(CACHE_FIELD)
    found = cache.depths() if hasattr(cache, "depths") else None
    if found is None:
        raise UserError(f"{source}: its depths are not known; depths need a pondering model and the cache.")
    begin = (mask == 0).sum(1).tolist()
    return [
        _finish(loaded, prompt, row, found[i % len(found), begin[i] :].tolist(), ids.shape[1] - begin[i])
        for i, (prompt, row) in enumerate(zip(prompts, texts, strict=True))
    ]


def _given(loaded: Source, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of decoding that are given; ConfigError for what the model's method does not take."""
    method = getattr(loaded.model, "ponder", None)
    for name, value in given.items():
        if method is None or name not in method.arguments:
            raise ConfigError(name, value, "this model's method does not take it", "leave it out")
    try:
        if method is not None:
            method.using(given)
    except ValueError as error:
        raise UserError(f"{error}.") from None
    return given


def _by_depth(
    loaded: Source,
    prompts: list[str],
    words: list[list[int]],
    new: int,
    rows: int | None,
    depths: bool,
    on_text: Callable[[Generation], None],
    options: Any,
) -> list[Generation]:
    from megaponder.inference.batching import DepthBatch

    if rows is None or rows < 1:
        raise ConfigError("rows", rows, "it must be at least 1", "use 32")
    if not hasattr(loaded.model, "ponder"):
        raise UserError("a model of transformers itself has no passes to batch by; leave the batch out.")
    tokens = max(map(len, words)) + new
    batch = DepthBatch(loaded.model, rows=min(rows, len(words)), tokens=tokens, eos=loaded.eos_id, **options)
    texts = []
    for prompt, ids, x in zip(prompts, words, batch.stream(words, new), strict=True):
        texts.append(_finish(loaded, prompt, x.tokens, x.depths if depths else None, len(ids)))
        on_text(texts[-1])
    return texts


def _speculated(
    loaded: Source, prompts: list[str], words: list[list[int]], new: int, drafted: int, given: dict[str, Any]
) -> list[Generation]:
    from megaponder.inference.speculate import speculate

    if not hasattr(loaded.model, "ponder"):
        raise UserError("a model of transformers itself has no early passes that could draft.")
    found = [speculate(loaded.model, ids, new, drafted=drafted, eos=loaded.eos_id, **given) for ids in words]
    texts = [_finish(loaded, prompt, x.tokens) for prompt, x in zip(prompts, found, strict=True)]
    return [replace(text, rounds=x.rounds) for text, x in zip(texts, found, strict=True)]


def load(
    source: str | Path, tokenizer: str | None = None, device: str | None = None, trust_remote_code: bool = False
) -> Source:
    """Model and tokenizer of an export folder (it has a config.json), of a checkpoint or of a run folder."""
    path = Path(source)
    device = device_of(device)
    if (path / "config.json").is_file():
        return _from_export(path, tokenizer, device, trust_remote_code)
    return _from_checkpoint(path, tokenizer, device)


def device_of(name: str | None) -> str:
    """A device of this machine, by default cuda if there is one; ConfigError for another."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    legal = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    if name not in legal:
        raise ConfigError("device", name, "this machine has no such device", f"use {' or '.join(legal)}")
    return name


def longest_text(config: Any) -> int:
    """Tokens that a text may have, by the model's config.json; FreqKV sets no limit."""
    return sys.maxsize if feature(config, "freqkv") else int(config.max_position_embeddings)


def _from_export(path: Path, tokenizer: str | None, device: str, trust_remote_code: bool) -> Source:
    from megaponder.export.folder import has_tokenizer, read_config, read_json
    from megaponder.export.load import load_folder
    from megaponder.export.to_hf import DTYPES
    from megaponder.export.tokenizer import recorded, refuse_none, warn_of_another

    refuse_none(tokenizer)
    config = read_config(path)
    if tokenizer is None and not has_tokenizer(path):
        raise UserError(f"{path} has no tokenizer.json; set one with --tokenizer.")
    dtype = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    model = load_folder(path, dtype if device != "cpu" else torch.float32, trust_remote_code).to(device)
    words = load_tokenizer(tokenizer or str(path))
    if tokenizer is not None:
        warn_of_another(words, path, recorded(config, path))
    eos = config.get("eos_token_id")
    said = read_json(path, GENERATION) if (path / GENERATION).is_file() else {}
    ends = said.get("eos_token_id", eos)
    end = ends[0] if isinstance(ends, list) and ends else ends
    return Source(model, words, eos, longest_text(model.config), chat=_chat(words, end))


def _chat(words: Tokenizer, end: Any) -> Chat | None:
    """By the template of a tokenizer's folder."""
    has = template_of(words) is not None and type(end) is int
    return Chat(find_template(OF_TOKENIZER, words), end) if has else None


def _from_checkpoint(path: Path, tokenizer: str | None, device: str) -> Source:
    from megaponder.checkpoint.choose import locate
    from megaponder.checkpoint.weights import load_weights
    from megaponder.export import names
    from megaponder.export.load import build_model
    from megaponder.export.tokenizer import of_text
    from megaponder.inference.training_forward import TrainingForward
    from megaponder.ponder.registry import decoding_class
    from megaponder.ponder.settings import table_rows

    cfg, state = load_weights(path)
    words = of_text(cfg, path, tokenizer)
    eos = words.eod_id if cfg.data.eod_id is None else cfg.data.eod_id
    assert cfg.model.max_positions is not None
    talked = read_chat(locate(path).parent.parent) or _chat(words, eos)
    if decoding_class(cfg.ponder.method) is None:
        log.warning(
            "Method %s has no decoding form: each token runs the training forward over the full text.",
            cfg.ponder.method,
        )
        slow = TrainingForward(cfg, state)
        return Source(slow, words, eos, cfg.model.max_positions, has_cache=False, close=slow.close, chat=talked)
    plain = names.to_plain(state, cfg.model, table_rows(cfg))
    model = build_model(cfg, {name: t.float() if device == "cpu" else t for name, t in plain.items()}).to(device)
    return Source(model, words, eos, longest_text(model.config), chat=talked)


COLDEST = 1e-4
"""Below this, logits divided by the temperature exceed the range of FP32."""


def _check(
    prompts: list[str], max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int | None
) -> None:
    if not prompts:
        raise UserError("there is no prompt; give at least one (it may be empty).")
    for prompt in prompts:
        if not is_unicode(prompt):
            raise ConfigError("prompt", prompt, "it is not valid UTF-8", "write it in UTF-8")
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError("seed", seed, "it must be at least 0 and less than 2^63", "use 0")
    if max_new_tokens < 1:
        raise ConfigError("max_new_tokens", max_new_tokens, "it must be at least 1", "use 1 or more")
    if not (temperature == 0 or COLDEST <= temperature < math.inf):
        rule = f"it must be 0, or at least {COLDEST:g}"
        raise ConfigError("temperature", temperature, rule, "use 0 for greedy text")
    if top_k < 0:
        raise ConfigError("top_k", top_k, "it must not be negative", "use 0 to keep every token")
    if not 0 < top_p <= 1:
        raise ConfigError("top_p", top_p, "it must be above 0 and at most 1", "use 1 to keep every token")


def _check_speculation(drafted: int, temperature: float, rows: int | None, depths: bool, use_cache: bool) -> None:
    if drafted < 1:
        raise ConfigError("speculate", drafted, "it must be at least 1", "use 4, or leave it out")
    for name, value, given, why in (
        ("temperature", temperature, temperature > 0, "it writes greedy text"),
        ("rows", rows, rows is not None, "it writes one text after the other"),
        ("depths", depths, depths, "it does not tell depths"),
        ("use_cache", use_cache, not use_cache, "it needs the cache"),
    ):
        if given:
            raise ConfigError(name, value, f"speculate = {drafted} excludes it, since {why}", "leave one of them out")


def _talked(source: Source, prompts: list[str], name: str) -> tuple[Source, list[list[int]]]:
    """The ids of each prompt in the chat template, and the source that stops where an answer ends."""
    if source.chat is None:
        if (Path(name) / "config.json").is_file():  # it does not say what its model was trained on
            why = "neither it nor its tokenizer has one; export the run again with --tokenizer if it was trained on "
            raise UserError(f"{name} has no chat template: {why}conversations, or leave out --chat.")
        why = "it was not trained on conversations, and its tokenizer has none"
        raise UserError(f"{name} has no chat template: {why}; leave out --chat.")
    rows = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        if prompt.lstrip().startswith("["):
            try:
                messages = listed(orjson.loads(prompt), "messages")
            except orjson.JSONDecodeError as error:  # perhaps a text that begins with a bracket
                if re.match(r"\s*\[\s*\{", prompt):
                    raise UserError(f"prompt {prompt[:40]!r}: a list of messages must be JSON ({error}).") from None
            except BadRecordError as error:
                raise UserError(f"prompt {prompt[:40]!r}: {error}.") from None
        rows.append(source.tokenizer.encode_marked(source.chat.template.prompt(messages))[0])
    return replace(source, eos_id=source.chat.end_id), rows


def _fitting(source: Source, rows: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Token ids of each prompt; UserError where they do not fit the model."""
    start = [] if source.eos_id is None else [source.eos_id]
    rows = [row or start for row in rows]
    if not all(rows):
        raise UserError("an empty prompt needs an end-of-document token to start from, and the tokenizer has none.")
    largest, size = max(map(max, rows)), source.model.config.vocab_size
    if largest >= size:
        raise UserError(
            f"the tokenizer gives token id {largest}, but the model has {size} ids; use the model's own tokenizer."
        )
    longest = max(map(len, rows))
    number = 1 + [len(row) for row in rows].index(longest)
    which = f"prompt {number}, of {longest} tokens," if len(rows) > 1 else f"a prompt of {longest} tokens"
    if longest >= source.max_positions:
        raise UserError(
            f"{which} leaves no room in the model's longest sequence of {source.max_positions}; shorten it."
        )
    if longest + max_new_tokens > source.max_positions:
        raise UserError(
            f"{which} and {max_new_tokens} new ones exceed the model's longest sequence of "
            f"{source.max_positions}; request at most {source.max_positions - longest}."
        )
    return rows


def _batch(source: Source, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Left-padded ids and mask [b, n] on the model's device."""
    longest = max(map(len, rows))
    pad = 0 if source.eos_id is None else source.eos_id
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=source.model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=source.model.device)
    return ids, mask


def _finish(source: Source, prompt: str, row: list[int], depths: list[int] | None = None, begin: int = 0) -> Generation:
    """`depths` of the tokens of a prompt of `begin` tokens and of the row."""
    ended = source.eos_id is not None and source.eos_id in row
    tokens = row.index(source.eos_id) + 1 if ended else len(row)  # type: ignore[arg-type]
    told = None if depths is None else tuple(depths[: begin + tokens - 1])
    return Generation(prompt, source.tokenizer.decode(row[: tokens - ended]), tokens, ended, told)
