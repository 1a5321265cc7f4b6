"""Fill every None that follows from the preset, the family or another field."""

from __future__ import annotations

import copy
import math
from typing import Any

from megaponder.config import budget
from megaponder.config.model import FAMILIES, FEATURES, ModelConfig
from megaponder.config.presets import NORMAL_STD, Preset, default_ffn, find_preset
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError


def resolve(cfg: RunConfig) -> RunConfig:
    """A copy of the configuration with its defaults filled in.

    Explicit fields override the preset, the preset overrides the family's defaults.  Left open: model.vocab_size
    without a preset, data.eod_id and data.tokenizer (they come with the dataset), parallel.deallocate_pipeline_outputs
    (it depends on the backend) and parallel.microbatch_group (it depends on the world size).  Resolving twice changes
    nothing.
    """
    cfg = copy.deepcopy(cfg)
    preset = find_preset(cfg.model.preset) if cfg.model.preset is not None else None
    if preset is not None:
        _from_preset(cfg.model, preset)
    _from_family(cfg)
    if cfg.data.shuffle_seed is None:
        cfg.data.shuffle_seed = cfg.train.seed
    if cfg.data.cache is None:
        cfg.data.cache = f"{cfg.run.rstrip('/')}/cache"
    if cfg.faults.hang_minutes is None:
        cfg.faults.hang_minutes = cfg.parallel.timeout_minutes / 2
    if cfg.data.loss_mask == "answers":
        cfg.data.document_attention = True  # conversations have nothing to do with each other
    _fill_budget(cfg)
    return cfg


def _from_preset(model: ModelConfig, preset: Preset) -> None:
    if model.family is not None and model.family != preset.family:
        raise ConfigError(
            "model.family", model.family, f"preset {model.preset} belongs to family {preset.family}", "omit it"
        )
    # with another width the preset's FFN is meaningless: fall back to the family's ratio
    resized = model.hidden_size is not None and model.hidden_size != preset.hidden_size
    for name in (
        "family", "num_layers", "hidden_size", "num_heads", "ffn_size", "vocab_size", "max_positions", "norm_eps",
    ):  # fmt: skip
        if getattr(model, name) is None and not (resized and name == "ffn_size"):
            setattr(model, name, getattr(preset, name))
    for name, value in preset.more.items():
        # other heads are other groups
        if getattr(model, name) is None and not (name == "num_kv_heads" and model.num_heads != preset.num_heads):
            setattr(model, name, copy.copy(value))


def _from_family(cfg: RunConfig) -> None:
    model = cfg.model
    if model.family is None:
        fix = f"set model.preset, or one of {', '.join(FAMILIES)}"
        raise ConfigError("model.family", None, "a model needs a preset or a family", fix)
    for name in ("num_layers", "hidden_size", "num_heads"):
        if getattr(model, name) is None:
            raise ConfigError(f"model.{name}", None, "a model without a preset needs it", "set it or model.preset")
    assert model.hidden_size is not None and model.num_heads is not None
    for name in FEATURES:
        if getattr(model, name) is None:
            setattr(model, name, copy.copy(getattr(FAMILIES[model.family], name)))
    whole_heads = model.num_heads > 0 and model.hidden_size % model.num_heads == 0  # else the rules say so
    defaults: dict[str, Any] = {
        "num_kv_heads": model.num_heads,
        "head_size": model.hidden_size // model.num_heads if whole_heads else None,
        "ffn_size": default_ffn(model),
        "max_positions": cfg.data.sequence_length,
    }
    for name, value in defaults.items():
        if getattr(model, name) is None:
            setattr(model, name, value)


def init_std(model: ModelConfig, kind: str) -> float:
    """Standard deviation of matrices and embeddings under an initialisation family.

    `kind` is normal (the preset's initializer_range, else 0.02) or trunc_normal (sqrt(2 / (5 H)), cut at 3 std).  It is
    computed once the method is known, because model.init = auto takes the method's family.
    """
    if model.init_std is not None:
        return model.init_std
    assert model.hidden_size is not None
    if kind == "trunc_normal":
        return math.sqrt(2 / (5 * model.hidden_size))
    return find_preset(model.preset).normal_std if model.preset else NORMAL_STD


def _fill_budget(cfg: RunConfig) -> None:
    """train.steps from train.tokens; the rules reject a file in which the two disagree."""
    train = cfg.train
    if train.steps is None and train.tokens is not None and train.global_batch > 0 and cfg.data.sequence_length > 0:
        if train.batch_rampup is not None and (len(train.batch_rampup) != 3 or min(train.batch_rampup) <= 0):
            return  # the rule on batch_rampup reports it
        train.steps = budget.steps_for_tokens(cfg, train.tokens)
