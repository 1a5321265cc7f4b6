"""From a checkpoint to a Hugging Face folder that gives the same logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megaponder import __version__
from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.state import load_state
from megaponder.checkpoint.weights import read_weights
from megaponder.config.schema import RunConfig
from megaponder.data import chat
from megaponder.errors import UserError
from megaponder.export import card, compose, configs, folder, kept, looped, names, native, reference, targets, tokenizer
from megaponder.export.formats import FORMATS
from megaponder.export.requirements import require_transformers
from megaponder.ponder.settings import table_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Refitted:
    """A budget's threshold that was set anew on held-out text."""

    data: str
    """Name of the dataset."""
    targets: int
    """Tokens of it that were read."""
    budget: float
    """Passes (or rows) that a token may spend in the mean."""
    depth_before: float
    """Passes with the threshold that training left."""
    depth: float
    """Passes with the new one."""
    threshold: float

    def __str__(self) -> str:
        missed = "" if abs(self.depth - self.budget) <= 0.1 else "; no threshold meets the budget better"
        return (
            f"The threshold was refitted on {self.targets:,} tokens of {self.data}: {self.depth:.2f} passes a token "
            f"(budget {self.budget:.2f}, before {self.depth_before:.2f}){missed}."
        )


Refit = Callable[[RunConfig, dict[str, Tensor], torch.dtype], Refitted]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    native: bool
    """In transformers' own format; otherwise the folder contains its modelling code (trust_remote_code=True)."""
    why_not_native: str
    """Empty if it is."""
    files: tuple[str, ...]
    parameters: int
    max_difference: float
    """Largest difference from the logits of the checkpoint's own forward, over the largest logit."""
    refitted: Refitted | None = None
    target: str | None = None
    """One of targets.TARGETS, if asked for."""
    lacks_chat: bool = False
    """The model was trained on conversations, but without a tokenizer its chat template could not be written."""

    def __str__(self) -> str:
        if self.target == targets.NANBEIGE:
            kind = "in Nanbeige's format, which llama.cpp, MLX and SGLang run, but transformers alone does not"
        elif self.target in looped.KINDS:
            kind = f"in the format of {looped.KINDS[self.target].architecture}, which transformers alone does not run"
        elif self.target == targets.VLLM:
            kind = "with its modelling code (trust_remote_code=True), also for vLLM's transformers backend"
        elif self.target:
            kind = "in transformers' own format, with a copy of the layers for each pass"
        elif self.native:
            kind = "in transformers' own format"
        else:
            kind = f"with its modelling code (trust_remote_code=True) because of {self.why_not_native}"
        more = "" if self.refitted is None else f" {self.refitted}"
        if self.lacks_chat:
            more += (
                "\nThe model was trained on conversations, but without its tokenizer (data.tokenizer) the folder has "
            )
            more += "no chat template; export again with --tokenizer."
        return (
            f"{self.folder}: {self.parameters:,} parameters {kind}.\n"
            f"Logits with and without cache equal the checkpoint's: largest difference {self.max_difference:.1e} of "
            f"the largest logit.{more}"
        )


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    tokenizer_path: str | Path | None = None,
    dtype: str | None = None,
    target: str | None = None,
    chat_template: str | Path | None = None,
    licence: str | None = None,
    force: bool = False,
    shard_bytes: int = folder.SHARD_BYTES,
    tolerance: float = 1e-4,
    refit: Refit | None = None,
    ema: bool = False,
) -> Exported:
    """Write the Hugging Face folder `out` of a checkpoint (or of a run's newest one).

    Vanilla models become GPT-NeoX, Llama or GPT-2 folders that load without remote code if these classes can represent
    them; everything else contains its modelling code.  `dtype` (float32, bfloat16, float16) defaults to
    the stored one, or for an untrained import to that of its folder; `tokenizer_path` to data.tokenizer; `target` (see
    `targets`) asks for a form that engines without
    remote code run; `chat_template` (a Jinja file) replaces the tokenizer's own, and `licence` goes into the model
    card.  The folder is loaded again and its logits, with and without
    cache, are compared with the checkpoint's own forward (FP32, one process) before it is published.  If
    decoding computes exactly what a forward approximates (PonderLM-2 and PonderLM-3), the cached logits are compared
    with those of a close enough approximation.  `refit` (`inference.refit`) may replace the threshold of a budget; what
    it tells is in config.json and the model card.  `ema`: the moving average of the weights.
    Raises UserError if they differ by more than `tolerance` of the largest logit, if `target` cannot compute the same,
    or if `out` exists.
    """
    require_transformers("megaponder export")
    reference.check_tolerance(tolerance)
    source = locate(checkpoint)
    cfg, state = read_weights(source, ema)
    (at, contents), run = load_state(source), source.parent.parent
    cfg = replace(cfg, run=str(run))  # it may have been moved
    talked = chat.read(run)
    before = kept.of(run, at.step) if tokenizer_path in (None, tokenizer.NONE) else None
    compose.decoding_class(cfg.ponder.method)  # raises its error first
    if tokenizer_path is not None and (given := tokenizer.find(cfg, tokenizer_path)) is not None:
        tokenizer.warn_of_another(given, source, contents.tokenizers())
    if dtype is None and before is not None and _exact(state, before.dtype):
        dtype = before.dtype
    dtype = dtype or str(state["embedding.word_embeddings.weight"].dtype).removeprefix("torch.")
    refitted = None if refit is None else refit(cfg, state, dtype_of(dtype))
    kind, reason = configs.native_format(cfg)
    trained, written = (cfg, state), cfg
    if target is not None:
        targets.check(cfg, target)
    public = targets.public(cfg, target)
    if not public and target != targets.VLLM and (target is not None or kind is not None):
        written, state = targets.fold(cfg, state, untied=target == targets.NANBEIGE)
    state = cast(state, dtype)
    out = Path(out)
    with folder.published(out, force) as temporary:
        plain = names.to_plain(state, written.model, table_rows(cfg))
        compared = trained if dtype == "float32" else (written, state)  # a scaled table is rounded once, not twice
        extra_fields: dict[str, Any] = {} if refitted is None else {"refitted": asdict(refitted)}
        if at.upcycled:
            extra_fields[configs.UPCYCLED] = _published(at.upcycled)
        if target in looped.KINDS:
            kind, reason = target, ""
        elif target == targets.VLLM:
            fields, plain = targets.with_second_head(cfg, plain)
            extra_fields |= fields
        elif target is not None:
            written, plain = targets.unroll(written, plain)
            kind, reason = configs.native_format(written)
        theirs = before.config if before else None
        tokens = tokenizer.write(cfg, temporary, tokenizer_path, chat_template, theirs, chat=talked)
        if known := contents.tokenizers() or {one for one in [tokens.fingerprint] if one}:
            extra_fields[tokenizer.FINGERPRINTS] = sorted(known)
        write_model(
            written,
            plain,
            temporary,
            kind,
            eos=tokens.eos_id,
            answer_end=None if talked is None else talked.end_id,
            extra_fields=extra_fields,
            before=before,
            shard_bytes=shard_bytes,
        )
        count = sum(t.numel() for name, t in plain.items() if name != targets.SECOND)
        del plain
        worst = check(*compared, temporary, out, tolerance)
        card.write(
            cfg,
            temporary,
            native=kind is not None,
            target=target,
            state=at,
            run=run,
            untrained=before is not None,
            licence=licence,
            parameters=count,
            tokens=tokens,
            difference=worst,
            refitted="" if refitted is None else str(refitted),
        )
        files = tuple(sorted(p.name for p in temporary.iterdir()))
    lacks_chat = talked is not None and tokens.source is None
    return Exported(out, kind is not None, reason, files, count, worst, refitted, target, lacks_chat)


def _published(record: Any) -> Any:
    """The record of what a mixture was made of, with run folders in place of paths of the machine that made it."""
    if isinstance(record, dict):
        return {
            name: "/".join(Path(value).parts[-3:]) if name == "path" else _published(value)
            for name, value in record.items()
        }
    return [_published(one) for one in record] if isinstance(record, list) else record


def dtype_of(name: str) -> torch.dtype:
    """UserError for a dtype that exports cannot have."""
    if name not in DTYPES:
        raise UserError(f"dtype = {name!r}: it must be one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _exact(state: dict[str, Tensor], dtype: str) -> bool:
    """Whether the tensors are those of this dtype to the bit: an import stores them in FP32."""
    kind = DTYPES.get(dtype)
    return kind is not None and all(tensor.to(kind).to(tensor.dtype).equal(tensor) for tensor in state.values())


def cast(state: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The tensors in one dtype."""
    return {name: tensor.to(dtype_of(dtype)) for name, tensor in state.items()}


def write_model(
    cfg: RunConfig,
    plain: names.Tensors,
    path: Path,
    kind: str | None,
    *,
    eos: int | None,
    answer_end: int | None = None,
    extra_fields: Mapping[str, Any] = MappingProxyType({}),
    before: kept.Kept | None = None,
    shard_bytes: int = folder.SHARD_BYTES,
) -> None:
    """Weights, config.json, generation_config.json and, if no model_type `kind` represents it, the modelling code.

    With a `kind`, the embedding scale is 1 (`targets.fold`).  `answer_end`: the token that ends an answer; generation
    stops there, too.  `extra_fields` of config.json stand beside those of the model.  `before`: from the folder of an
    untrained model.
    """
    assert cfg.model.num_heads is not None
    dtype = str(plain["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    if targets.public(cfg, kind):
        assert kind is not None
        config, tensors = looped.config_json(cfg, kind, dtype, eos), looped.from_plain(kind, plain, cfg)
    elif kind == targets.NANBEIGE:
        config, tensors = targets.nanbeige_config(cfg, dtype, eos), plain
    elif kind is not None:
        config = configs.native_config(cfg, kind, dtype, eos)
        tensors = native.to_native(plain, FORMATS[kind], cfg.model.num_heads)
    else:
        config, tensors = configs.ponder_config(cfg, dtype, eos), plain
        for name, text in compose.files(cfg.ponder.method).items():
            (path / name).write_bytes(text.encode())
    if kind is None or looped.imported(cfg, kind) is None:  # else the folder's own fields, and no others
        config |= {"megaponder_version": __version__, **extra_fields, **(before.config if before else {})}
    folder.write_json(path / "config.json", config)
    generation: dict[str, Any] = dict.fromkeys(kept.ENDS, eos)
    if answer_end not in (None, eos):
        generation["eos_token_id"] = [answer_end, eos] if eos is not None else answer_end
    if before is not None:
        generation = before.generation or {name: config.get(name) for name in kept.ENDS}
    folder.write_json(path / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    folder.write_weights(path, tensors, shard_bytes)


def check(cfg: RunConfig, state: dict[str, Tensor], path: Path, name: Path, tolerance: float) -> float:
    """Compare the folder's logits with the engine's; returns the largest relative difference."""
    from megaponder.export.load import load_folder

    prompts = reference.prompts(cfg)
    want = reference.checkpoint_logits(cfg, state, prompts, tolerance)
    model = load_folder(path)
    got = [reference.export_logits(model, ids) for ids in prompts]
    return reference.agree(name, want, got, tolerance)
