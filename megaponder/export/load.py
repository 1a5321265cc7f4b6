"""Models in memory: from an export folder, or straight from a checkpoint's weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaponder.config.schema import RunConfig
from megaponder.errors import UserError, first_line
from megaponder.export import code, configs, folder, looped, names, native
from megaponder.export.formats import FORMATS
from megaponder.export.hf_fields import refuse_bad_ids
from megaponder.export.import_config import run_config
from megaponder.export.public_code import kind_of, ponders
from megaponder.ponder.registry import methods

if TYPE_CHECKING:
    from megaponder.export.modeling_megaponder import MegaponderForCausalLM


def load_folder(path: Path, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """The model of an export folder, in evaluation mode; weights from safetensors only.

    A folder with modelling code is loaded through that code.  If it is not this installation's, it is run only on
    request; an earlier version's is replaced by the current one.  Nothing outside the folder is read, fetched or run.
    UserError for a folder that is not a valid model, or one whose weights are not finite.
    """
    try:
        model, notes = _load(path, dtype, trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # whatever transformers and the modelling code raise for wrong fields
        first = first_line(error).rstrip(".")
        raise UserError(f"{path}: its model cannot be loaded ({type(error).__name__}: {first}).") from error
    for kind, why in MISFITS.items():
        for key in sorted(notes.get(kind, ()), key=str):
            name, *shapes = (key,) if isinstance(key, str) else key
            seen = f" ({list(shapes[0])} instead of {list(shapes[1])})" if len(shapes) > 1 else ""
            raise UserError(f"{path}: the weights do not fit config.json: {name} {why}{seen}.")
    if not isinstance(scale := getattr(model.config, "embedding_scale", 1.0), int | float):
        raise UserError(f"{path}: its model cannot be loaded (embedding_scale = {scale!r} is not a number).")
    if bad := next((name for name, p in model.named_parameters() if not p.isfinite().all()), None):
        raise UserError(f"{path}: {bad} has values that are not finite.")
    return model.eval()


MISFITS = {
    "mismatched_keys": "has another shape",
    "missing_keys": "is missing",
    "unexpected_keys": "is not a parameter of this model",
}
"""What transformers says of weights -> a sentence about one of them."""
ELSEWHERE = ("implementation", "kernel", "name_or_path", "auto_map", "commit_hash", "base_model", "fusion")
"""Substrings of names of settings that make transformers fetch, run or swap in something outside the folder."""


def _load(path: Path, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """transformers gets a class, a configuration and tensors, never the folder, whose references it would follow."""
    from transformers.utils import logging

    fields = folder.read_config(path)
    if fields.get("model_type") in looped.KINDS:
        return _looped(path, fields, dtype), {}
    refuse_bad_ids(fields, str(path / "config.json"))
    cls = _class(path, fields, trust_remote_code)
    tensors = folder.read_weights(path)
    if "auto_map" not in fields:
        tensors = native.without_buffers(tensors)
    refuse_too_large(path, fields, tensors)
    left_out = ("dtype", *ELSEWHERE)  # the caller says which dtype
    own = {name: value for name, value in fields.items() if not any(part in name for part in left_out)}
    config = cls.config_class.from_dict(own)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > 2 * (stored := sum(t.numel() for t in tensors.values())):
        raise UserError(
            f"{path}: config.json describes a model of {size:,} parameters, but the weights have {stored:,}."
        )
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of mismatches is returned in the notes and reported in a sentence
    try:
        return cls.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **{"dtype" if hasattr(config, "dtype") else "torch_dtype": dtype},  # the latter before 4.56
        )
    finally:
        logging.set_verbosity(before)


def _looped(path: Path, fields: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model of a public looped folder, in the exports' class: its own modelling code is not run."""
    cfg, tensors = run_config(fields, path, path, frozenset()), folder.read_weights(path)
    refuse_too_large(path, fields, tensors)
    plain = looped.to_plain(fields["model_type"], tensors, cfg)
    if cfg.model.tie_embeddings:
        plain.pop("lm_head.weight", None)
    return build_model(cfg, {name: tensor.to(dtype) for name, tensor in plain.items()})


def _class(path: Path, fields: dict[str, Any], trust_remote_code: bool) -> Any:
    """The class from the folder's own modelling code, or transformers' own class for a known family."""
    import transformers

    if "auto_map" in fields:
        if not trust_remote_code and fields.get("method") not in list(methods()):
            run_config(fields, path, path, frozenset())  # says so
        named = fields["auto_map"]
        reference = named.get("AutoModelForCausalLM") if isinstance(named, dict) else named
        method = str(fields.get("method"))
        reference, sources = code.read(path, reference, method, trust_remote_code)
        earlier = code.is_earlier(sources)
        if earlier or code.is_ours(sources, method):
            run_config(fields, path, path, frozenset())  # bounds passes and sizes
        if earlier:
            from megaponder.export.modeling_megaponder import MegaponderForCausalLM

            return MegaponderForCausalLM
        return code.load(path, reference, sources)
    if ponders(fields):
        raise UserError(
            f"{path}: this is a pondering model of {kind_of(fields)}, which transformers would run as a vanilla one; "
            "make a run of it with megaponder import, and use that."
        )
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        known = ", ".join([*FORMATS, "megaponder"])
        raise UserError(f"{path}: model_type = {kind!r}: this model cannot be loaded; it must be one of {known}.")
    return getattr(transformers, FORMATS[kind].architecture)


def refuse_too_large(path: Path, fields: dict[str, Any], tensors: names.Tensors) -> None:
    """UserError for more layers than the weights have tensors, before anything is allocated per layer."""
    for name in ("num_hidden_layers", "n_layer", "n_layers"):
        layers = fields.get(name)
        if isinstance(layers, int | float) and layers > len(tensors):
            raise UserError(f"{path}: config.json has {layers:,} layers, but the weights have {len(tensors)} tensors.")


def build_model(cfg: RunConfig, plain: names.Tensors, eos: int | None = None) -> MegaponderForCausalLM:
    """A checkpoint's model in the exports' class, in the tensors' dtype, without writing anything.

    `plain` comes from `names.to_plain`; its tensors become the model's parameters.
    """
    from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM

    dtype = str(plain["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    fields = configs.ponder_config(cfg, dtype, eos)
    with torch.device("meta"):
        model = MegaponderForCausalLM(MegaponderConfig(**fields))
    tied = {"lm_head.weight": plain["model.embed_tokens.weight"]} if cfg.model.tie_embeddings else {}
    try:
        model.load_state_dict({**plain, **tied}, strict=True, assign=True)
    except RuntimeError as error:
        first = [line.strip() for line in str(error).splitlines()][1:2]
        raise UserError(f"The checkpoint's weights do not fit its configuration: {' '.join(first)}") from None
    model.tie_weights()
    return model.eval()
