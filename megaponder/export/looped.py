"""Folders of public looped models, in both directions: their names of tensors and fields.

    ouro            OuroForCausalLM: ByteDance's Ouro-1.4B and Ouro-2.6B
    huginn_raven    RavenForCausalLM: tomg-group-umd's huginn-0125
    nanbeige        NanbeigeForCausalLM: Nanbeige's Nanbeige4.2-3B; without norms between its loops it is method `loop`

transformers has no class for them, and their own modelling code is not run: the tensors are those of the methods
`ouro`, `huginn` and `nanbeige`.  `megaponder import` reads such a folder, and `megaponder export --target KIND` writes
one: the same tensors, and the fields of the imported config.json, which the run folder keeps.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaponder.config.load import show
from megaponder.config.model import FAMILIES
from megaponder.config.schema import ModelConfig, PonderConfig, RunConfig
from megaponder.errors import UserError
from megaponder.export import configs, kept
from megaponder.export.formats import FORMATS, Format
from megaponder.export.hf_fields import model_config
from megaponder.export.names import Tensors
from megaponder.ponder.settings import method_of

_LLAMA = replace(FORMATS["llama"], coded={"hidden_act": FORMATS["llama"].coded["hidden_act"]})
_LLAMA = replace(_LLAMA, required=_LLAMA.required | {"attention_bias": (False,), "mlp_bias": (False,)})
KINDS: dict[str, Format] = {
    "ouro": replace(
        _LLAMA,
        architecture="OuroForCausalLM",
        defaults=_LLAMA.defaults | {"max_position_embeddings": 65536},
        required=_LLAMA.required | {"early_exit_step": (None,)},
        idle=(*_LLAMA.idle, "auto_map", "total_ut_steps", "early_exit_threshold"),
    ),
    "nanbeige": replace(
        _LLAMA,
        architecture="NanbeigeForCausalLM",
        required=_LLAMA.required
        | dict.fromkeys(
            ("enable_mhc", "enable_hyper_connection", "enable_depth_attention", "qk_layernorm",
             "ngram_insert_all_layers"), (False, None),
        )
        | {"emb_neighbor_num": (None,), "insert_ngram_layer_idx": (None, [])},
        idle=(
            *_LLAMA.idle, "auto_map", "mhc_diff_for_loop", "kv_channels", "num_loops",
            "skip_loop_final_norm", "loop_loss_weights", "enable_double_loop_split", "loop_middle_layers",
            "loop_share_kv",
        ),
    ),
    "huginn_raven": Format(
        "llama",
        "RavenForCausalLM",
        {
            "vocab_size": "vocab_size", "n_embd": "hidden_size", "n_layers": "num_layers", "n_heads": "num_heads",
            "intermediate_size": "ffn_size", "block_size": "max_positions", "norm_eps": "norm_eps",
            "tie_embeddings": "tie_embeddings", "rope_base": "rotary_base",
        },
        {
            "vocab_size": 65536, "n_embd": 5280, "n_layers": 8, "n_heads": 55, "intermediate_size": 17920,
            "block_size": 4096, "norm_eps": 1e-6, "tie_embeddings": True, "rope_base": 50000.0,
        },
        required={
            "injection_type": ("linear",), "state_init": ("like-init",), "qk_bias": (True,), "bias": (False,),
            "block_class_name": ("SandwichBlock",), "norm_class_name": ("RMSNorm_llama",),
            "mlp_class_name": ("GatedMLP",), "nonlin_name": ("SiLU",), "test_time_noise": (0, 0.0),
            "sampling_scheme": ("poisson-lognormal-filling",),
        },
        idle=(
            "auto_map", "n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda", "mean_recurrence",
            "mean_backprop_depth", "num_key_value_heads", "num_attention_heads", "num_hidden_layers", "head_dim",
            "hidden_size", "max_position_embeddings", "padded_vocab_size", "padding_multiple",
            "effective_expected_depth", "init_strategy", "init_values", "init_orthogonal", "lockstep_n", "lockstep_k",
            "activation_checkpoint_impl", "architecture_class_name", "test_time_noise_type", "tie_word_embeddings",
        ),
    ),
}  # fmt: skip
"""By model_type."""
METHODS = {"ouro": "ouro", "huginn_raven": "huginn", "nanbeige": "nanbeige"}
FEATURES: dict[str, dict[str, Any]] = {
    "ouro": {"norm_placement": "sandwich"},
    "nanbeige": {},
    "huginn_raven": {"norm_placement": "stream", "qkv_bias": "qk", "rotary_pairs": "adjacent"},
}
"""What their blocks have beside Llama's."""


# --- config.json ------------------------------------------------------------------------------------------------------
def sections(hf: dict[str, Any], where: str) -> tuple[ModelConfig, PonderConfig]:
    """The model and the ponder section of a config.json; UserError for what cannot be represented."""
    kind = hf["model_type"]
    model = replace(model_config(hf, where, KINDS[kind]), **FEATURES[kind])
    if kind == "ouro":
        threshold = float(_number(hf, "early_exit_threshold", 1.0, where))
        # the sum of an exit distribution reaches 1.0 by rounding alone, so a threshold of 1 means "never"
        loops = _count(hf, "total_ut_steps", 4, where)
        return model, PonderConfig("ouro", {"loops": loops, "threshold": threshold})
    if kind == "nanbeige":
        return model, _nanbeige(hf, where)
    parts = [
        _count(hf, f"n_layers_in_{part}", size, where)
        for part, size in (("prelude", 2), ("recurrent_block", 4), ("coda", 2))
    ]
    if sum(parts) != model.num_layers:
        raise UserError(
            f"{where}: n_layers = {model.num_layers}: n_layers_in_prelude, _recurrent_block and _coda add up to "
            f"{sum(parts)}."
        )
    r, kept = (_count(hf, name, size, where) for name, size in (("mean_recurrence", 32), ("mean_backprop_depth", 8)))
    options = {"prelude": parts[0], "coda": parts[2], "recurrence": r, "kept": kept}
    return replace(model, embedding_scale="sqrt_h"), PonderConfig("huginn", options)


def _nanbeige(hf: dict[str, Any], where: str) -> PonderConfig:
    """Loops without anything between or beside them are `loop`; the others need the method `nanbeige`."""
    loops, norm_between = _count(hf, "num_loops", 1, where, least=1), not hf.get("skip_loop_final_norm", False)
    weights = hf.get("loop_loss_weights") or []
    if not isinstance(weights, list) or not all(type(w) in (int, float) for w in weights):
        raise UserError(f"{where}: loop_loss_weights = {weights!r}: it must be a list of numbers.")
    middle = _count(hf, "loop_middle_layers", 0, where) if hf.get("enable_double_loop_split") else 0
    if not (weights or middle) and (loops == 1 or not norm_between):
        return PonderConfig("loop", {"extra_passes": loops - 1}) if loops > 1 else PonderConfig()
    options = {"loops": loops, "norm_between": norm_between, "middle": middle}
    options["share_kv"] = bool(middle and hf.get("loop_share_kv"))
    return PonderConfig("nanbeige", options | {"loss_weights": [float(w) for w in weights]})


def _count(hf: dict[str, Any], name: str, default: int, where: str, least: int = 0) -> int:
    value = hf.get(name, default)
    if type(value) is not int or value < least:
        raise UserError(f"{where}: {name} = {value!r}: it must be an integer of at least {least}.")
    return value


def _number(hf: dict[str, Any], name: str, default: float, where: str) -> float:
    value = hf.get(name, default)
    if type(value) not in (int, float):
        raise UserError(f"{where}: {name} = {value!r}: it must be a number.")
    return float(value)


def refusal(cfg: RunConfig, kind: str) -> str:
    """All that keeps a model from being written in this format; empty if nothing does."""
    lacking = [f"ponder.method is {cfg.ponder.method}, the target needs {METHODS[kind]}"]
    return "; ".join([*(lacking if cfg.ponder.method != METHODS[kind] else []), *lacking_features(cfg, kind)])


def lacking_features(cfg: RunConfig, kind: str, folded: bool = False) -> list[str]:
    """What the backbone has otherwise than this format; `folded`: the embedding scale goes into the table."""
    own = FEATURES[kind] | {"rotary_scaling": {}}
    plain = replace(cfg.model, **{name: getattr(FAMILIES["llama"], name) for name in own})
    need = {name: value for name, value in own.items() if getattr(cfg.model, name) != value}
    need |= configs.needed(plain, KINDS[kind])
    out = [f"model.{name} is {show(getattr(cfg.model, name))}, the target needs {show(x)}" for name, x in need.items()]
    scale, word = (1.0, "none") if kind != "huginn_raven" else ((cfg.model.hidden_size or 0) ** 0.5, "sqrt_h")
    if not folded and abs(configs.scale_of(cfg) - scale) > 1e-6 * scale:
        out.append(f"model.embedding_scale is {configs.scale_of(cfg):g}, the target needs {word} ({scale:g})")
    return out


def config_json(cfg: RunConfig, kind: str, dtype: str, eos: int | None) -> dict[str, Any]:
    """config.json in this format: the imported one's fields, where the run has it, with this model's values."""
    m, o, form = cfg.model, method_of(cfg).options, KINDS[kind]
    made: dict[str, Any] = {"model_type": kind, "architectures": [form.architecture]}
    made |= {theirs: getattr(m, ours) for theirs, ours in form.taken.items()}
    made |= {"torch_dtype": dtype, **dict.fromkeys(kept.ENDS, eos)}
    if kind == "ouro":
        made |= {"total_ut_steps": o.loops, "early_exit_threshold": o.threshold}
        made |= {"hidden_act": "silu", "attention_dropout": 0.0}
    elif kind == "nanbeige":
        made |= {"num_loops": o.loops, "skip_loop_final_norm": not o.norm_between, "hidden_act": "silu"}
        if o.loss_weights:
            made["loop_loss_weights"] = o.loss_weights
        if o.middle:
            made |= {"enable_double_loop_split": True, "loop_middle_layers": o.middle, "loop_share_kv": o.share_kv}
    else:
        assert m.num_layers is not None and m.num_heads and m.hidden_size
        core = m.num_layers - o.prelude - o.coda
        made |= {
            "n_layers_in_prelude": o.prelude, "n_layers_in_recurrent_block": core, "n_layers_in_coda": o.coda,
            "mean_recurrence": o.recurrence, "mean_backprop_depth": o.kept, "head_dim": m.head_size,
            "num_key_value_heads": m.num_kv_heads, "padded_vocab_size": m.vocab_size,
            "effective_expected_depth": o.prelude + core * o.recurrence + o.coda,
        }  # fmt: skip
        made |= {name: legal[0] for name, legal in form.required.items()}
    made |= {"initializer_range": m.init_std or 0.02, "use_cache": True}
    return as_imported(cfg, kind, made)


def as_imported(cfg: RunConfig, kind: str, made: dict[str, Any]) -> dict[str, Any]:
    """The fields of the imported config.json with the values of `made`; `made` itself where nothing was imported."""
    before = imported(cfg, kind)
    if before is None:
        return made
    theirs = (*kept.ENDS, "initializer_range", "use_cache")  # not the model's, or said more exactly there
    ours = {name: value for name, value in made.items() if name not in theirs}
    ours["dtype"] = made.get("torch_dtype", made.get("dtype"))  # its name of late
    return before | {name: value for name, value in ours.items() if name in before and before[name] != value}


def imported(cfg: RunConfig, kind: str) -> dict[str, Any] | None:
    """The config.json from which this run was imported, if it was of this kind."""
    path = Path(cfg.run) / kept.CONFIG
    if kind not in KINDS or not path.is_file():
        return None
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) and found.get("model_type") == kind else None


# --- tensors ----------------------------------------------------------------------------------------------------------
_HUGINN_LAYER = {
    "norm_1.weight": "input_layernorm.weight", "attn.proj.weight": "self_attn.o_proj.weight",
    "norm_2.weight": "input_layernorm_2.weight", "norm_3.weight": "post_attention_layernorm.weight",
    "mlp.proj.weight": "mlp.down_proj.weight", "norm_4.weight": "post_attention_layernorm_2.weight",
}  # fmt: skip
_HUGINN_OUTER = {
    "transformer.wte.weight": "model.embed_tokens.weight", "transformer.ln_f.weight": "model.norm.weight",
    "transformer.adapter.weight": "method_entry.adapter.weight", "lm_head.weight": "lm_head.weight",
}  # fmt: skip
_GATE = ("model.early_exit_gate.", "method.gate.")
_THEIRS = re.compile(r"transformer\.(prelude|core_block|coda)\.(\d+)\.(.+)")
_OURS = re.compile(r"model\.layers\.(\d+)\.(.+)")
_FREQUENCIES = "freqs_cis"


def to_plain(kind: str, tensors: Tensors, cfg: RunConfig) -> Tensors:
    """Plain tensors of a folder's."""
    if kind == "nanbeige":
        return dict(tensors)
    if kind == "ouro":
        return {name.replace(*_GATE): tensor for name, tensor in tensors.items()}
    out: Tensors = {}
    first = _first_layers(cfg)
    for name, tensor in tensors.items():
        match = _THEIRS.fullmatch(name)
        if name == _FREQUENCIES:
            continue
        if match is None:
            if name not in _HUGINN_OUTER:
                raise UserError(f"this model has no parameter {name}, which the folder contains.")
            out[_HUGINN_OUTER[name]] = tensor
            continue
        at, part = f"model.layers.{first[match[1]] + int(match[2])}.", match[3]
        if part in _HUGINN_LAYER:
            out[at + _HUGINN_LAYER[part]] = tensor
        elif part == "attn.Wqkv.weight":
            out |= {f"{at}self_attn.{x}_proj.weight": t for x, t in zip("qkv", tensor.chunk(3), strict=True)}
        elif part == "attn.qk_bias":
            out |= {f"{at}self_attn.{x}_proj.bias": t.flatten() for x, t in zip("qk", tensor, strict=True)}
        elif part == "mlp.fc.weight":
            out |= {f"{at}mlp.{x}_proj.weight": t for x, t in zip(("gate", "up"), tensor.chunk(2), strict=True)}
        else:
            raise UserError(f"this model has no parameter {name}, which the folder contains.")
    return {name: tensor.contiguous() for name, tensor in out.items()}


def from_plain(kind: str, plain: Tensors, cfg: RunConfig) -> Tensors:
    """A folder's tensors of plain ones: the inverse of `to_plain`."""
    if kind == "nanbeige":
        return dict(plain)
    if kind == "ouro":
        return {name.replace(_GATE[1], _GATE[0]): tensor for name, tensor in plain.items()}
    m, first = cfg.model, _first_layers(cfg)
    assert m.num_heads and m.head_size and m.max_positions and m.rotary_base
    outer = {ours: theirs for theirs, ours in _HUGINN_OUTER.items()}
    inner = {ours: theirs for theirs, ours in _HUGINN_LAYER.items()}
    out: Tensors = {}
    for name, tensor in plain.items():
        match = _OURS.fullmatch(name)
        if match is None:
            out[outer[name]] = tensor
            continue
        number, part, before = int(match[1]), match[2], name[: -len(match[2])]
        where = next(p for p in ("coda", "core_block", "prelude") if first[p] <= number)
        at = f"transformer.{where}.{number - first[where]}."
        if part in inner:
            out[at + inner[part]] = tensor
        elif part == "self_attn.q_proj.weight":
            out[f"{at}attn.Wqkv.weight"] = torch.cat([plain[f"{before}self_attn.{x}_proj.weight"] for x in "qkv"])
        elif part == "self_attn.q_proj.bias":
            both = [plain[f"{before}self_attn.{x}_proj.bias"].view(1, m.num_heads, m.head_size) for x in "qk"]
            out[f"{at}attn.qk_bias"] = torch.stack(both)
        elif part == "mlp.up_proj.weight":
            out[f"{at}mlp.fc.weight"] = torch.cat([plain[f"{before}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    out[_FREQUENCIES] = _frequencies(m.head_size, m.max_positions, m.rotary_base)
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _first_layers(cfg: RunConfig) -> dict[str, int]:
    """Numbers of the first layers of prelude, core and coda."""
    options = method_of(cfg).options
    assert cfg.model.num_layers
    return {"prelude": 0, "core_block": options.prelude, "coda": cfg.model.num_layers - options.coda}


def _frequencies(size: int, length: int, base: float) -> Tensor:
    """The buffer of rotary turns that Huginn's file keeps among its tensors: [1, length, 1, size / 2, 2]."""
    frequency = 1.0 / (base ** (torch.arange(0, size, 2).float() / size))
    angle = torch.outer(torch.arange(length).float(), frequency)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[None, :, None]
