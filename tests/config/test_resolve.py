"""Presets and defaults."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from megaponder.config import budget
from megaponder.config.load import from_mapping
from megaponder.config.presets import LLAMA_EPS, PRESETS
from megaponder.config.resolve import init_std, resolve
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError
from tests.config.make import config

OPEN = {"vocab_size", "preset", "init_std"}
"""Model fields that may stay None: known with the dataset, absent, known with the method."""


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_nothing_of_the_model_stays_open(preset: str) -> None:
    model = config(model__preset=preset).model
    assert {f.name for f in dataclasses.fields(model) if getattr(model, f.name) is None} <= OPEN
    assert model.hidden_size and model.num_heads and model.hidden_size % model.num_heads == 0


def test_explicit_fields_beat_the_preset() -> None:
    model = config(model__preset="llama-410m", model__norm_eps=1e-5, model__num_layers=3).model
    assert (model.norm_eps, model.num_layers, model.hidden_size, model.ffn_size) == (1e-5, 3, 1024, 2752)


def test_a_changed_width_takes_the_family_ratio_for_the_mlp() -> None:
    assert config(model__preset="llama-410m", model__hidden_size=512).model.ffn_size == 1376
    assert config(model__preset="pythia-410m", model__hidden_size=512).model.ffn_size == 2048


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p.norm_eps == LLAMA_EPS and "tiny" not in n])
def test_the_default_mlp_width_is_the_published_one(name: str) -> None:
    p = PRESETS[name]
    shape = {"family": "llama", "num_layers": 1, "hidden_size": p.hidden_size, "num_heads": p.num_heads}
    assert resolve(from_mapping({"model": shape})).model.ffn_size == p.ffn_size


def test_family_defaults() -> None:
    shape = {"num_layers": 2, "hidden_size": 64, "num_heads": 4}
    found = {f: resolve(from_mapping({"model": {"family": f, **shape}})).model for f in ("pythia", "llama", "gpt2")}
    assert [m.rotary_fraction for m in found.values()] == [0.25, 1.0, 1.0]
    assert [m.parallel_residual for m in found.values()] == [True, False, False]
    assert [m.tie_embeddings for m in found.values()] == [False, False, True]
    assert [m.num_kv_heads for m in found.values()] == [4, 4, 4]
    assert found["gpt2"].max_positions == 2048


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "a model needs a preset or a family"),
        ({"family": "llama"}, "model.num_layers = None"),
        ({"preset": "lama-125m"}, "did you mean llama-125m"),
        ({"preset": "llama-125m", "family": "gpt2"}, "preset llama-125m belongs to family llama"),
    ],
)
def test_refusals(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(from_mapping({"model": model}))
    assert words in str(caught.value)


def test_the_input_is_not_changed() -> None:
    cfg = from_mapping({"model": {"preset": "llama-125m"}})
    resolve(cfg)
    assert cfg == from_mapping({"model": {"preset": "llama-125m"}})


def test_initial_deviations() -> None:
    assert init_std(config(model__preset="llama-410m").model, "normal") == 0.02
    assert init_std(config(model__preset="llama-834m").model, "normal") == 0.01
    assert init_std(config(model__preset="gpt2-xl").model, "normal") == 0.02
    assert init_std(config(model__preset="llama-410m").model, "trunc_normal") == math.sqrt(2 / 5 / 1024)
    assert init_std(config(model__init_std=0.5).model, "trunc_normal") == 0.5


def test_tokens_become_whole_steps() -> None:
    cfg = config(train={"tokens": 26_214_400_000, "global_batch": 256})
    assert cfg.train.steps == 50_000 and budget.total_tokens(cfg) == 26_214_400_000
    assert config(train={"tokens": 26_214_400_001, "global_batch": 256}).train.steps == 50_001


def ramped(**train: Any) -> RunConfig:
    return config(train={"global_batch": 8, "batch_rampup": [2, 2, 30], **train})


def test_ramp_up_by_hand() -> None:
    # three increments from 2 to 8 over 30 sequences: 2 until 10, 4 until 20, 6 until 30
    cfg, consumed, seen = ramped(steps=20), 0, []
    for step in range(12):
        assert budget.sequences_after(cfg.train, step) == consumed
        seen.append(budget.batch_at(cfg.train, consumed))
        consumed += seen[-1]
    assert seen == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8, 8]


@pytest.mark.parametrize("sequences", [1, 2, 3, 29, 30, 31, 100])
def test_a_token_budget_with_ramp_up_is_just_enough(sequences: int) -> None:
    cfg = ramped(tokens=sequences * 2048)
    assert cfg.train.steps is not None
    assert (
        budget.sequences_after(cfg.train, cfg.train.steps)
        >= sequences
        > budget.sequences_after(cfg.train, cfg.train.steps - 1)
    )
