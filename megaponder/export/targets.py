"""What a checkpoint becomes for other engines: `export --target unrolled`, `nanbeige` and `vllm`.

    unrolled    a plain model with a copy of the layers for each pass; every engine that runs the backbone's format
    nanbeige    the layers once, and `num_loops`; the Llama-like format of Nanbeige, which some engines run in loops
    vllm        the usual folder with its modelling code, and where passes read the head, a second copy of that: what
                vLLM's transformers backend builds has none

The first two are exact where a method does nothing between its passes but run the same layers again.  Methods of public
looped models (`nanbeige` among them) have targets of their own: `looped`.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from megaponder.config.schema import PonderConfig, RunConfig
from megaponder.decoding import moe_options
from megaponder.errors import UserError
from megaponder.export import compose, configs, looped
from megaponder.export.names import Tensors
from megaponder.ponder.settings import method_of

NANBEIGE, VLLM = "nanbeige", "vllm"
"""Targets; the first is a model_type as well."""
TARGETS = ("unrolled", VLLM, *looped.KINDS)
SECOND = "second_head.weight"
"""The copy of the head in a folder for vLLM."""
_TABLE, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
ROUTER = ("mlp.gate.", "mlp.expert_bias")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def check(cfg: RunConfig, target: str) -> None:
    """UserError, before any work, if `target` is unknown or cannot compute this model."""
    if target not in TARGETS:
        raise UserError(f"target = {target!r}: it must be {', '.join(TARGETS)}, or left out.")
    if public(cfg, target):
        if lost := looped.refusal(cfg, target):
            raise UserError(f"--target {target}: {lost}; leave --target out.")
        return
    if target == VLLM:
        if configs.native_format(cfg)[0] is not None:
            raise UserError("--target vllm: vLLM runs this model's own format; leave --target out.")
        if lost := _for_engines(cfg).lost:
            raise UserError(f"--target vllm: {lost}; leave --target out for a folder that transformers runs.")
        return
    if not passes(cfg):
        form = compose.decoding_class(cfg.ponder.method)
        raise UserError(
            f"--target {target}: method {cfg.ponder.method} cannot be written as a plain model, because "
            f"{form.why_not_plain}; leave --target out for a folder with its modelling code."
        )
    if target == NANBEIGE:
        if lacking := looped.lacking_features(cfg, target, folded=True):
            raise UserError(f"--target {target}: {'; '.join(lacking)}; leave --target out.")
    elif lost := configs.native_format(_plain(cfg))[1]:
        raise UserError(f"--target {target}: no such format has {lost}; leave --target out.")


@dataclass(frozen=True)
class _ForEngines:
    lost: str
    """Why an engine that keeps keys and values itself cannot run the model; empty if it can."""
    second_head: bool
    """Whether it needs a copy of the head."""


def _for_engines(cfg: RunConfig) -> _ForEngines:
    from megaponder.decoding import headless  # needs transformers
    from megaponder.decoding.configuration import MegaponderConfig

    config = MegaponderConfig(**configs.ponder_config(cfg, "float32", None))
    form = compose.decoding_class(cfg.ponder.method)(config)
    return _ForEngines(headless.why_not(form), headless.second_head(form))


def with_second_head(cfg: RunConfig, plain: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Fields of config.json and all tensors of a folder for vLLM."""
    if not _for_engines(cfg).second_head:
        return {}, plain
    return {SECOND.partition(".")[0]: True}, {**plain, SECOND: plain["lm_head.weight"].clone()}


def without_second_head(tensors: Tensors) -> Tensors:
    """The tensors of such a folder without the copy; UserError if it is none."""
    head, second = tensors.get("lm_head.weight"), tensors.get(SECOND)
    if second is not None and (head is None or not second.equal(head)):
        raise UserError(
            f"{SECOND} differs from lm_head.weight, whose copy it must be; delete it in a copy of the folder."
        )
    return {name: tensor for name, tensor in tensors.items() if name != SECOND}


def public(cfg: RunConfig, target: str | None) -> bool:
    """The target holds a method of its own.  Nanbeige's also holds `loop`, as loops without norms in between."""
    return target in looped.KINDS and (target != NANBEIGE or cfg.ponder.method == NANBEIGE)


def passes(cfg: RunConfig) -> int:
    """How often the layers run, if that is all the method does; otherwise 0."""
    return compose.decoding_class(cfg.ponder.method).repeats(vars(method_of(cfg).options))


def fold(cfg: RunConfig, state: Tensors, untied: bool = False) -> tuple[RunConfig, Tensors]:
    """The same model with an embedding scale of 1: its table (of a stage, before any cast) is multiplied instead.

    A tied table becomes two if it has a scale, or if it shall be `untied`.  Only for methods that do not read the table
    other than by looking tokens up.
    """
    scale = configs.scale_of(cfg)
    cfg, state, table = copy.deepcopy(cfg), dict(state), state[_TABLE]
    if cfg.model.tie_embeddings and (untied or scale != 1.0):
        cfg.model.tie_embeddings, state[_HEAD] = False, table
    if scale != 1.0:
        state[_TABLE] = table.float() * scale
    cfg.model.embedding_scale = "none"
    return cfg, state


def _plain(cfg: RunConfig) -> RunConfig:
    """The configuration of the unrolled model, with its scale folded in."""
    tied = cfg.model.tie_embeddings and configs.scale_of(cfg) == 1.0
    new = copy.deepcopy(cfg)
    assert new.model.num_layers is not None
    new.model.num_layers *= passes(cfg)
    new.model.tie_embeddings, new.model.embedding_scale = tied, "none"
    new.ponder = PonderConfig("vanilla", {})
    new.model.moe = {name: value for name, value in (new.model.moe or {}).items() if name != "routers"}
    return new


def unroll(cfg: RunConfig, plain: Tensors) -> tuple[RunConfig, Tensors]:
    """A vanilla model of passes x layers from one whose scale is folded; every copy has memory of its own.

    Where passes have routers of their own, a layer's copy has that of its pass.
    """
    layers, out, experts = cfg.model.num_layers, {}, moe_options.read(cfg.model.moe)
    assert layers is not None
    for name, tensor in plain.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            out[name] = tensor
            continue
        for index in range(passes(cfg)):
            own = tensor
            if experts is not None and match[2].startswith(ROUTER):
                own = tensor.unflatten(0, (-1, experts.experts))[experts.routers_of([index])[0]]
            out[f"model.layers.{index * layers + int(match[1])}.{match[2]}"] = own.clone()
    return _plain(cfg), out


def nanbeige_config(cfg: RunConfig, dtype: str, eos: int | None) -> dict[str, Any]:
    """config.json of a looped model whose scale is folded and whose table is not tied."""
    made = configs.native_config(cfg, "llama", dtype, eos) | {
        "model_type": NANBEIGE,
        "architectures": ["NanbeigeForCausalLM"],
        "num_loops": passes(cfg),
        "skip_loop_final_norm": True,  # False puts the final norm between passes as well
    }
    return looped.as_imported(cfg, NANBEIGE, made)
