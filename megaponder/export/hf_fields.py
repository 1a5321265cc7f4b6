"""How fields of a Hugging Face config.json are handled: adopted, required to have a value, or without effect."""

from __future__ import annotations

import math
from typing import Any

from megaponder.config.schema import ModelConfig
from megaponder.errors import UserError
from megaponder.export.formats import FORMATS, Format
from megaponder.export.public_code import FIELDS, kind_of

# without effect on the forward pass of a causal language model, whatever their value
IGNORED = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_bos_token",
    "architectures", "bos_token_id", "classifier_dropout", "dtype", "eos_token_id", "finetuning_task", "id2label",
    "initializer_range", "is_decoder", "label2id", "max_sequence_length", "megaponder_version", "model_type", "n_ctx",
    "name_or_path",
    "num_labels", "output_attentions", "output_hidden_states", "pad_token_id", "predict_special_tokens",
    "pretraining_tp", "problem_type", "reorder_and_upcast_attn", "return_dict", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unk_index", "use_cache", "vocab_pad_to",
    # training regularisation; the backbones here train without dropout
    "attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "resid_pdrop",
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


def model_config(hf: dict[str, Any], where: str) -> ModelConfig:
    """The model section for a config.json; UserError for the first field that the backbones cannot represent."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        known = ", ".join([*FORMATS, "megaponder"])
        raise UserError(f"{where}: model_type = {kind!r} cannot be imported; it must be one of {known}.")
    form = FORMATS[kind]
    hf = {name: value for name, value in hf.items() if name not in {*IGNORED, *form.idle}}
    rope = _rope(hf, form, where)
    for name, legal in form.required.items():
        value = hf.pop(name, legal[0])
        if value not in legal:
            raise UserError(f"{where}: {name} = {value!r}: a {form.family} block supports only {legal[0]!r}.")
    values = {name: hf.pop(name, default) for name, default in form.defaults.items()} | rope
    for name, value in values.items():
        _refuse_other_type(name, value, form.defaults[name], where)
    heads, hidden = values[_theirs(form, "num_heads")], values[_theirs(form, "hidden_size")]
    if "head_dim" not in form.taken and hf.pop("head_dim", None) not in (None, hidden // heads):
        raise UserError(f"{where}: head_dim: heads must be hidden_size / num_attention_heads = {hidden // heads} wide.")
    layers = hf.pop("layer_types", None) or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise UserError(f"{where}: layer_types: every layer must be full_attention.")
    if left := sorted(name for name, value in hf.items() if value not in (None, False, {}, [])):
        raise UserError(
            f"{where}: {left[0]} = {hf[left[0]]!r} is unknown for model_type {kind}, so its effect would be lost; if "
            "you know that it has none, delete it in a copy of the folder."
        )
    ours = {form.taken[name]: value for name, value in values.items()}
    ours["num_kv_heads"] = ours.get("num_kv_heads") or ours["num_heads"]
    ours["ffn_size"] = ours["ffn_size"] or 4 * hidden
    return ModelConfig(family=form.family, embedding_scale="none", **ours)  # type: ignore[arg-type]


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


def _rope(hf: dict[str, Any], form: Format, where: str) -> dict[str, Any]:
    """Rotary settings from `rope_parameters` (current releases) and from names that repeat the format's own, taken out
    of `hf`; scaling is refused."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = hf.pop(name, None) or {}
        if not isinstance(rope, dict):
            raise UserError(f"{where}: {name} = {rope!r}: it must be an object.")
        rope = dict(rope)
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        if kind != "default":
            raise UserError(f"{where}: {name} of type {kind!r}: rotary scaling is not supported; it must be default.")
        _take_rotary(rope, hf, form, where, found)
        if rope:
            raise UserError(f"{where}: {name} has {min(rope)}, which is unknown, so its effect would be lost.")
    repeated = {name: hf.pop(name) for name in ROTARY if name in hf and name not in form.taken and form.rotary}
    _take_rotary(repeated, hf, form, where, found)
    return found


def _take_rotary(rope: dict[str, Any], hf: dict[str, Any], form: Format, where: str, found: dict[str, Any]) -> None:
    """Move rotary settings from `rope` to `found`, under the format's names; UserError where two places disagree."""
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
            raise UserError(f"{where}: {name} = {other!r}, but {theirs} = {value!r}: the two must be equal.")
        found[name] = value
