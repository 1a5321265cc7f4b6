"""How fields of a Hugging Face config.json are handled: adopted, required to have a value, or without effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megaponder.config.fields import nearest
from megaponder.config.model import SCALINGS
from megaponder.config.schema import ModelConfig
from megaponder.errors import UserError
from megaponder.export import kept
from megaponder.export.formats import FORMATS, Coded, Format
from megaponder.export.public_code import FIELDS, kind_of

# without effect on the forward pass of a causal language model, whatever their value
IGNORED = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_bos_token",
    "architectures", "bos_token_id", "classifier_dropout", "dtype", "eos_token_id", "finetuning_task", "id2label",
    "init_std", "initializer_range", "is_decoder", "label2id", "max_sequence_length", "megaponder_version",
    "model_type", "n_ctx", "name_or_path", "num_labels", "output_attentions", "output_hidden_states", "pad_token_id",
    "predict_special_tokens", "pretraining_tp", "problem_type", "reorder_and_upcast_attn", "return_dict",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params",
    "tokenizer_class", "tokenizer_fingerprints", "torch_dtype", "transformers_version", "unk_index", "upcycled",
    "use_cache", "vocab_pad_to",
    # training regularisation; the backbones here train without dropout
    "attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "hidden_dropout", "layerdrop", "resid_pdrop",
    # how to sample, which older releases of transformers keep here
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip


def refuse_ignored(hf: dict[str, Any], ignore: frozenset[str], where: str) -> None:
    """UserError for a field that the user wants to ignore although it may change what the model computes."""
    for name in sorted(ignore - IGNORED):
        if (kind := kind_of(hf)) and name in FIELDS[kind]:
            raise UserError(
                f"{where}: this is a pondering model of {kind}, and {name} says what it computes, so --ignore cannot "
                "name it; without --ignore it is imported as what it is."
            )
        raise UserError(
            f"{where}: --ignore {name}: only fields that are known to be without effect may be ignored, which this is "
            "not; if you know that it has no effect, delete it in a copy of the folder."
        )


def refuse_bad_ids(hf: dict[str, Any], where: str) -> None:
    """UserError for an id that is no id: transformers' own sentence about it does not name the file."""
    for name in kept.ENDS:
        value = hf.get(name)
        listed = isinstance(value, list) and name == "eos_token_id" and all(type(part) is int for part in value)
        if value is not None and type(value) is not int and not listed:
            raise UserError(f"{where}: {name} = {value!r}: it must be the id of a token, or null.")


def model_config(hf: dict[str, Any], where: str, form: Format | None = None) -> ModelConfig:
    """The model section for a config.json; UserError for the first field that the backbones cannot represent.

    `form` says what the fields mean where that does not follow from the model_type.
    """
    kind = hf.get("model_type")
    if form is None and (not isinstance(kind, str) or kind not in FORMATS):
        known = ", ".join([*FORMATS, "megaponder"])
        raise UserError(f"{where}: model_type = {kind!r} cannot be imported; it must be one of {known}.")
    form = form or FORMATS[str(kind)]
    hf = {name: value for name, value in hf.items() if name not in {*IGNORED, *form.idle}}
    rope, scaling = _rope(hf, form, where)
    coded = {
        name: value for theirs, code in form.coded.items() for name, value in _decoded(hf, theirs, code, form, where)
    }
    for name, legal in form.required.items():
        value = hf.pop(name, legal[0])
        if value not in legal:
            raise UserError(f"{where}: {name} = {value!r}: it must be {legal[0]!r} for model_type {kind}.")
    values = {name: hf.pop(name, default) for name, default in form.defaults.items()} | rope
    for name, value in values.items():
        _refuse_other_type(name, value, form.defaults[name], where)
    heads, hidden = values[_theirs(form, "num_heads")], values[_theirs(form, "hidden_size")]
    if "head_dim" not in form.taken and hf.pop("head_dim", None) not in (None, hidden // heads):
        raise UserError(f"{where}: head_dim: heads must be hidden_size / num_attention_heads = {hidden // heads} wide.")
    for name in form.same_width:
        if (width := hf.pop(name, hidden)) != hidden:
            raise UserError(
                f"{where}: {name} = {width!r}: it must equal hidden_size = {hidden}; there is no projection."
            )
    experts = _experts(hf, form, where)
    window = _window(hf, form, values[_theirs(form, "num_layers")], where)
    if left := sorted(name for name, value in hf.items() if value not in (None, False, {}, [])):
        raise UserError(
            f"{where}: {left[0]} = {hf[left[0]]!r} is unknown for model_type {kind}, so its effect would be lost; if "
            "you know that it has none, delete it in a copy of the folder."
        )
    ours = coded | {form.taken[name]: value for name, value in values.items()}
    if scaling:
        original, needed = "original_max_position_embeddings", SCALINGS[scaling["rope_type"]][0]
        ours["rotary_scaling"] = ({original: ours["max_positions"]} if original in needed else {}) | scaling
    if form.window:
        ours["attention_window"] = window
    if experts:
        ours["moe"] = experts
    ours["num_kv_heads"] = ours.get("num_kv_heads") or ours["num_heads"]
    ours["ffn_size"] = ours["ffn_size"] or 4 * hidden
    return ModelConfig(family=form.family, embedding_scale="none", **ours)  # type: ignore[arg-type]


def _decoded(hf: dict[str, Any], theirs: str, code: Coded, form: Format, where: str) -> Iterator[tuple[str, Any]]:
    """Our fields for a coded one, which is taken out of `hf`."""
    value = hf.pop(theirs, next(iter(code.values)))
    found = [ours for legal, ours in code.values.items() if legal == value and type(legal) is type(value)]
    if not found:
        legal = " or ".join(repr(x) for x in code.values)
        raise UserError(f"{where}: {theirs} = {value!r}: it must be {legal} for family {form.family}.")
    yield from ((name, found[0]) for name in code.ours)


def _experts(hf: dict[str, Any], form: Format, where: str) -> dict[str, Any]:
    """The options of a mixture; what says so is taken out of `hf`."""
    found: dict[str, Any] = {}
    for theirs, (ours, default) in form.experts.items():
        same = hf.pop("num_local_experts", default) if theirs == "num_experts" else default  # its name from 5.0 on
        found[ours] = hf.pop(theirs, same)
        _refuse_other_type(theirs, found[ours], default, where)
    return found


def _window(hf: dict[str, Any], form: Format, layers: int, where: str) -> int:
    """Tokens of the sliding window, 0 for none; what says so is taken out of `hf`."""
    types = hf.pop("layer_types", None) or []
    if not isinstance(types, list):
        raise UserError(f"{where}: layer_types = {types!r}: it must be a list with one entry for each layer.")
    if not form.window:
        if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
            raise UserError(f"{where}: layer_types: every layer must be full_attention.")
        return 0
    if isinstance(types, list) and types and len(types) != layers:
        raise UserError(f"{where}: layer_types has {len(types)} entries for {layers} layers.")
    size = hf.pop("sliding_window", 4096)
    if form.window == "switched":
        on, first = hf.pop("use_sliding_window", False), hf.pop("max_window_layers", 28)
        if not on:
            size, types = None, [kind for kind in types if kind != "full_attention"]
        elif not types:
            types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if not isinstance(types, list) or any(kind != "sliding_attention" for kind in types) or (types and size is None):
        raise UserError(f"{where}: layer_types: either all layers must have the sliding window, or none.")
    if size is not None and (type(size) is not int or size < 1):
        raise UserError(f"{where}: sliding_window = {size!r}: it must be a positive integer or null.")
    return size or 0


def _refuse_other_type(name: str, value: Any, default: Any, where: str) -> None:
    """UserError for a value whose type differs from the default's; sizes must be positive, and None counts as a
    size."""
    if isinstance(default, bool):
        ok, want = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        ok, want = type(value) in (int, float) and 0 < value < math.inf, "a positive number"
    else:
        ok, want = (type(value) is int and value > 0) or (value is default is None), "a positive integer"
    if not ok:
        raise UserError(f"{where}: {name} = {value!r}: it must be {want}.")


def _theirs(form: Format, ours: str) -> str:
    return next(theirs for theirs, name in form.taken.items() if name == ours)


ROTARY = {"rope_theta": "rotary_base", "partial_rotary_factor": "rotary_fraction"}
"""Rotary settings under the names that transformers has for every model_type -> ours."""


def _rope(hf: dict[str, Any], form: Format, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary settings from `rope_parameters` (current releases) and from names that repeat the format's own, and the
    scaling; all taken out of `hf`."""
    found: dict[str, Any] = {}
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = hf.pop(name, None) or {}
        if not isinstance(rope, dict):
            raise UserError(f"{where}: {name} = {rope!r}: it must be an object.")
        rope = dict(rope)
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        if kind != "default":
            if not isinstance(kind, str) or kind not in SCALINGS or not form.rotary:
                known = ", ".join(["default", *SCALINGS] if form.rotary else ["default"])
                raise UserError(f"{where}: {name} of type {kind!r} is not supported; it must be one of {known}.")
            own = {key for keys in SCALINGS[kind] for key in keys}
            scaling = {"rope_type": kind} | {key: rope.pop(key) for key in own & rope.keys() if rope[key] is not None}
            rope = {key: value for key, value in rope.items() if value is not None}
        _take_rotary(rope, f"{name}.", hf, form, where, found)
        if rope:
            legal = ["rope_type", *ROTARY, *(key for keys in SCALINGS.get(kind, ()) for key in keys)]
            near = nearest(min(rope), legal)
            meant = f"; did you mean {near}" if near else ""
            raise UserError(f"{where}: {name} has {min(rope)}, which is unknown, so its effect would be lost{meant}.")
    repeated = {name: hf.pop(name) for name in ROTARY if name in hf and name not in form.taken and form.rotary}
    _take_rotary(repeated, "", hf, form, where, found)
    return found, scaling


def _take_rotary(
    rope: dict[str, Any], place: str, hf: dict[str, Any], form: Format, where: str, found: dict[str, Any]
) -> None:
    """Move rotary settings from `rope`, which lies at `place`, to `found`, under the format's names; UserError where
    two places disagree."""
    for theirs, ours in ROTARY.items():
        if theirs not in rope or not form.rotary:
            continue
        value = rope.pop(theirs)
        if ours not in form.taken.values():
            if value != 1.0:
                raise UserError(f"{where}: {theirs} = {value!r}: a {form.family} block rotates full heads.")
            continue
        name = _theirs(form, ours)
        other = found.get(name, hf.get(name, value))
        if other != value:
            raise UserError(f"{where}: {name} = {other!r}, but {place}{theirs} = {value!r}: the two must be equal.")
        found[name] = value
