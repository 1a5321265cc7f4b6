"""Families are sets of features; files of earlier versions, which name the family alone, mean the same model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megaponder.config import yaml_file
from megaponder.config.load import dump, from_mapping, load_config, to_mapping
from megaponder.config.model import FAMILIES, FEATURES, ModelConfig
from megaponder.config.resolve import resolve
from megaponder.config.rules.depth_attention import unreached_sources
from megaponder.decoding import configuration
from megaponder.errors import ConfigError
from megaponder.training.setup import refuse_other_model
from tests.config.make import config

EARLIER = ("norm", "activation", "qkv_bias", "output_bias", "mlp_bias", "positions", "head_size")
"""Fields that the first version did not have."""


def test_every_family_has_every_feature() -> None:
    for family in FAMILIES.values():
        assert all(getattr(family, name) is not None for name in FEATURES)
        others = {f.name for f in dataclasses.fields(ModelConfig)} - {*FEATURES}
        assert all(getattr(family, name) == getattr(ModelConfig(), name) for name in others)
        from_mapping({"model": to_mapping(from_mapping({}))["model"] | dataclasses.asdict(family)})  # legal values


@pytest.mark.parametrize(
    ("layers", "passes", "depth", "words"),
    [
        (1, 1, {"sources": "all"}, "with sources all no layer has an earlier one to mix with"),
        (1, 2, {"sources": "all", "passes": "within"}, "no layer has an earlier one"),
        (3, 1, {"sources": [2]}, "with sources [2] no layer"),
        (3, 1, {"sources": "stride:3"}, "with sources stride:3 no layer"),
        (3, 2, {"sources": "last:99"}, "no layer has more than 5 before it, so sources last:99 are all of them"),
        (4, 2, {"sources": "last:2", "passes": "within", "blocks": 2}, "more than 1 before it"),
        (1, 2, {"sources": "all"}, ""),
        (3, 2, {"sources": "last:5"}, ""),
        (3, 1, {"sources": "stride:2"}, ""),
        (1, 1, {}, ""),
    ],
)
def test_sources_that_no_layer_has_are_told(layers: int, passes: int, depth: dict[str, Any], words: str) -> None:
    cfg = config(model__num_layers=layers, model__depth_attention=depth)
    told = unreached_sources(cfg, [None] * passes)
    assert words in told if words else told == ""


def test_a_feature_beats_the_family() -> None:
    model = config(model__preset="llama-125m", model__norm="layernorm", model__head_size=32).model
    assert (model.norm, model.activation, model.head_size, model.query_width) == ("layernorm", "swiglu", 32, 384)


def test_a_family_cannot_be_put_on_a_resolved_file(tmp_path: Path) -> None:
    dump(config(model__preset="llama-125m"), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", ["--model.family", "llama"]).model.family == "llama"
    with pytest.raises(ConfigError, match="sets every feature, which overrides a family"):
        load_config(tmp_path / "config.yaml", ["--model.family", "gpt2"])


def test_exports_know_the_families_of_earlier_folders() -> None:
    for name, features in configuration.FAMILIES.items():
        assert features == {feature: getattr(FAMILIES[name], feature) for feature in features}


@pytest.mark.parametrize("family", ["pythia", "llama", "gpt2"])
def test_the_configuration_of_an_earlier_checkpoint_is_the_same_model(family: str, tmp_path: Path) -> None:
    shape = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 99}
    now = resolve(from_mapping({"model": {"family": family, **shape}}))
    model = {name: value for name, value in to_mapping(now)["model"].items() if name not in EARLIER}
    yaml_file.write(to_mapping(now) | {"model": model}, tmp_path / "config.yaml")
    assert refuse_other_model(now, tmp_path) == []
    other = dataclasses.replace(now, model=dataclasses.replace(now.model, qkv_bias=not now.model.qkv_bias))
    with pytest.raises(ConfigError, match=r"model\.qkv_bias"):
        refuse_other_model(other, tmp_path)


def test_the_table_is_padded_whatever_the_layout() -> None:
    assert ModelConfig(vocab_size=97, vocab_multiple=32).padded_vocab == 128
