"""Checkpoints of small random pondering models, written through the engine without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaponder.checkpoint.state import TrainState
from megaponder.config.model import FEATURES
from megaponder.config.resolve import resolve
from megaponder.config.schema import DataConfig, ModelConfig, PonderConfig, RunConfig
from megaponder.export import names, reference
from megaponder.export.modeling_megaponder import MegaponderForCausalLM
from megaponder.export.save import save_weights
from megaponder.ponder.settings import table_rows
from tests.export import models


def run_config(net: MegaponderForCausalLM, run: Path, **data: Any) -> RunConfig:
    """Our configuration of a test model."""
    c = net.config
    section = ModelConfig(
        family=c.family,
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        ffn_size=c.intermediate_size,
        vocab_size=c.vocab_size,
        max_positions=c.max_position_embeddings,
        head_size=c.head_size,
        **{name: getattr(c, name) for name in FEATURES if name != "tie_embeddings" and hasattr(c, name)},
        tie_embeddings=c.tie_word_embeddings,
        embedding_scale=c.embedding_scale,
    )
    ponder = PonderConfig(c.method, dict(c.method_options))
    data = {"sequence_length": 40, "eod_id": 0, **data}
    return resolve(RunConfig(run=str(run), model=section, ponder=ponder, data=DataConfig(**data)))


def write(net: MegaponderForCausalLM, run: Path, state: TrainState | None = None, **data: Any) -> RunConfig:
    """A run folder with one checkpoint that holds the weights of `net`."""
    cfg = run_config(net, run, **data)
    plain = dict(net.state_dict())
    if cfg.model.tie_embeddings:
        del plain["lm_head.weight"]
    with reference.engine(cfg, names.to_stage(plain, cfg.model, table_rows(cfg))) as engine:
        save_weights(run / "checkpoints", cfg, engine.stage, state=state)
    return cfg


def make(
    family: str,
    method: str,
    run: Path,
    data: dict[str, Any] | None = None,
    state: TrainState | None = None,
    **changes: Any,
) -> MegaponderForCausalLM:
    """Model and run folder at once."""
    net = models.model(family, method, **changes)
    write(net, run, state, **(data or {}))
    return net
