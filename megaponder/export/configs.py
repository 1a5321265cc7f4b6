"""config.json of an export: every field of the model section is written to it, or the export stops."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megaponder.config.model import FAMILIES, FEATURES
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.decoding.moe_options import Experts, read
from megaponder.errors import UserError
from megaponder.export import compose
from megaponder.export.formats import FORMATS, Coded, Format
from megaponder.ponder.settings import embedding_scale, method_of

# our field -> the modelling code's; features keep their names, and `embedding_scale` is written as a number
PONDER_FIELDS = {
    "family": "family",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_size",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    **{name: name for name in FEATURES},
    "tie_embeddings": "tie_word_embeddings",
}
UPCYCLED = "upcycled"
"""Field beside the model's: `checkpoint.state.TrainState.upcycled`."""
# initialisation and checkpoint layout: meaningless in an export
TRAINING_ONLY = {"preset", "vocab_multiple", "init", "init_std", "init_output_scale"}


def check_fields_known() -> None:
    """Refuse to export while the configuration has a model field that this module does not know."""
    unknown = {f.name for f in fields(ModelConfig)} - PONDER_FIELDS.keys() - TRAINING_ONLY - {"embedding_scale"}
    if unknown:
        raise UserError(
            f"model.{min(unknown)} cannot be expressed in the exported configuration (megaponder.export.configs)."
        )


def scale_of(cfg: RunConfig) -> float:
    """The factor on token embeddings as a number."""
    return embedding_scale(cfg.model, method_of(cfg))


def native_format(cfg: RunConfig) -> tuple[str | None, str]:
    """The model_type of transformers that can represent this model, and "" or the reason why there is none."""
    if cfg.ponder.method != "vanilla":
        return None, f"method {cfg.ponder.method}"
    if scale_of(cfg) != 1.0 and cfg.model.tie_embeddings:
        return None, f"embedding scale {scale_of(cfg):g} on a tied table"
    own_first = sorted(FORMATS.items(), key=lambda item: item[1].family != cfg.model.family)
    reasons = {kind: what_is_lost(cfg.model, form) for kind, form in own_first}
    fitting = next((kind for kind, reason in reasons.items() if not reason), None)
    own = next((reasons[kind] for kind, form in FORMATS.items() if form.family == cfg.model.family), "its features")
    return fitting, "" if fitting else own


def what_is_lost(m: ModelConfig, form: Format) -> str:
    """The first feature of a model that a format cannot represent; empty if there is none."""
    for name in needed(m, form):
        what = name.replace("_", " ")
        if name in ("num_kv_heads", "head_size"):
            what = "grouped key/value heads" if name == "num_kv_heads" else f"heads of {m.head_size} channels"
        return f"{what if name not in FEATURES else f'{what} {getattr(m, name)}'} in a {form.family} block"
    return ""


def needed(m: ModelConfig, form: Format) -> dict[str, Any]:
    """The fields of a model that a format cannot represent, with the values that it needs."""
    held, family = set(form.taken.values()), FAMILIES[form.family]
    held |= {"attention_window"} if form.window else set()
    held |= {"rotary_scaling"} if form.rotary else set()
    for code in form.coded.values():
        if _code(m, code) is not None:
            held.update(code.ours)
    found: dict[str, Any] = {}
    if form.experts:
        held.add("moe")
        if (own := _held_experts(m, form)) != (m.moe or {}):
            found["moe"] = own
    assert m.hidden_size and m.num_heads
    if "num_kv_heads" not in held and m.num_kv_heads != m.num_heads:
        found["num_kv_heads"] = m.num_heads
    if "head_size" not in held and m.query_width != m.hidden_size:
        found["head_size"] = m.hidden_size // m.num_heads
    for name in FEATURES:
        without_effect = name.startswith("rotary") and m.positions != "rotary"
        if name not in held and not without_effect and getattr(m, name) != getattr(family, name):
            found[name] = getattr(family, name)
    return found


def _held_experts(m: ModelConfig, form: Format) -> dict[str, Any]:
    """A model's mixture, if a format with experts can represent it, or else the nearest that it can."""
    o, plain = read(m.moe), dict(form.experts.values())
    if o is None:
        return plain
    told = Experts(**{name: getattr(o, name) for name in plain})
    return {name: getattr(o, name) for name in plain} if told != o else dict(m.moe or {})


def _code(m: ModelConfig, code: Coded) -> Any:
    """Their value for ours; None if there is none."""
    ours = [getattr(m, name) for name in code.ours]
    return next((theirs for theirs, value in code.values.items() if all(x == value for x in ours)), None)


def _common(model: ModelConfig, dtype: str, eos: int | None) -> dict[str, Any]:
    # documents are separated by one EOD: it precedes every text, so it is also the BOS
    return {
        "dtype": dtype,
        "initializer_range": model.init_std or 0.02,
        "use_cache": True,
        "bos_token_id": eos,
        "eos_token_id": eos,
        "pad_token_id": None,
    }


def _mapped(model: ModelConfig, names: dict[str, str]) -> dict[str, Any]:
    out = {}
    for ours, theirs in names.items():
        value = getattr(model, ours)
        if value is None:
            raise UserError(f"model.{ours} is not set in the checkpoint's configuration, so it cannot be exported.")
        out[theirs] = value
    return out


def ponder_config(cfg: RunConfig, dtype: str, eos: int | None) -> dict[str, Any]:
    """config.json of an export with its own modelling code."""
    check_fields_known()
    form, options = compose.decoding_class(cfg.ponder.method), method_of(cfg).options
    return {
        "model_type": "megaponder",
        "architectures": ["MegaponderForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{compose.CONFIGURATION}.MegaponderConfig",
            "AutoModel": f"{compose.ENTRY}.MegaponderModel",
            "AutoModelForCausalLM": f"{compose.ENTRY}.MegaponderForCausalLM",
        },
        "method": cfg.ponder.method,
        "method_options": {f.name: getattr(options, f.name) for f in fields(options)},
        "embedding_scale": scale_of(cfg),
        **form.config_fields,
        **_mapped(cfg.model, PONDER_FIELDS),
        **_common(cfg.model, dtype, eos),
    }


def native_config(cfg: RunConfig, kind: str, dtype: str, eos: int | None) -> dict[str, Any]:
    """config.json for transformers' own class of a model_type (vanilla models)."""
    check_fields_known()
    m, form = cfg.model, FORMATS[kind]
    out: dict[str, Any] = {"model_type": kind, "architectures": [form.architecture]}
    out |= _mapped(m, {ours: theirs for theirs, ours in form.taken.items()}) | _common(m, dtype, eos)
    out |= {name: legal[0] for name, legal in form.required.items()} | dict.fromkeys(form.without_dropout, 0.0)
    out |= {theirs: _code(m, code) for theirs, code in form.coded.items()}
    out |= dict.fromkeys(form.same_width, m.hidden_size)
    if (experts := read(m.moe)) is not None:
        out |= {theirs: getattr(experts, ours) for theirs, (ours, _) in form.experts.items()}
    if form.window:
        out["sliding_window"] = m.attention_window or None
    if form.window == "switched":
        kind = "sliding_attention" if m.attention_window else "full_attention"
        out |= {"use_sliding_window": bool(m.attention_window), "layer_types": [kind] * (m.num_layers or 0)}
        out["max_window_layers"] = 0 if m.attention_window else 28  # of 28 or more there is no effect
    if form.rotary:  # newer releases of transformers read this, older ones the fields beside it
        scaling = m.rotary_scaling or {}
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": m.rotary_base} | scaling
        if scaling:
            out["rope_scaling"] = scaling
        if "rotary_fraction" in form.taken.values():
            out["rope_parameters"]["partial_rotary_factor"] = m.rotary_fraction
    return out
