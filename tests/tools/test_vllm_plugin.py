"""The vLLM plugin takes what it computes and refuses everything else; `benchmarks.serving` runs it in vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaponder.config.model import FAMILIES, FEATURES
from megaponder.export import compose
from megaponder.export.configs import PONDER_FIELDS
from tests.export import checkpoints
from tests.export.models import config

sys.path.append(str(Path(__file__).parents[2] / "tools" / "vllm_plugin"))

from megaponder_vllm import options


@pytest.mark.parametrize("method", options.KNOWN)
def test_every_default_is_taken(method: str) -> None:
    """All options of the method as they are written into config.json, and all features of the backbone."""
    form = compose.decoding_class(method)
    given = {**form.defaults, **dict.fromkeys(form.training_only, 7)}
    got = options.options_of(SimpleNamespace(method=method, method_options=given))
    assert got == {name: given[name] for name in options.KNOWN[method]}
    options.refuse_unknown(config("llama", method).to_diff_dict())
    fields = checkpoints.run_config(checkpoints.models.model("gpt2", method), Path("run")).model
    options.refuse_unknown({PONDER_FIELDS[name]: getattr(fields, name) for name in FEATURES})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("adaponderlm", {"target": 0.5}, "method_options.target = 0.5: it must be 0.0"),
    ("ponderlm", {"feedback": "hidden"}, "feedback = 'hidden': it must be 'mixture'"),
    ("ponderlm", {"accumulate": False}, "accumulate = False: it must be True"),
    ("ponderlm", {"newest": True}, "newest = True: this plugin does not know it"),
    ("pause", {}, "method pause: this plugin has loop, ponderlm, adaponderlm"),
]


@pytest.mark.parametrize("method,given,words", REFUSED)
def test_refusals(method: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options.options_of(SimpleNamespace(method=method, method_options=given))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_a_feature_is_computed_or_refused(family: str) -> None:
    """Families that need no other feature are taken; values that another block has are refused by name."""
    fields = {PONDER_FIELDS[name]: getattr(FAMILIES[family], name) for name in FEATURES}
    if family in ("mistral", "olmo2", "opt"):
        with pytest.raises(ValueError, match="this plugin knows"):
            options.refuse_unknown(fields)
    else:
        options.refuse_unknown(fields)
    for name, value in (
        *(("activation", "relu"), ("qkv_bias", "qk"), ("norm_affine", False), ("rotary_pairs", "adjacent")),
        *(
            ("rotary_scaling", {"rope_type": "linear", "factor": 2.0}),
            ("attention_window", 8),
            ("depth_attention", {"sources": "all"}),
            ("freqkv", {"capacity": 64}),
            ("norm_placement", "post"),
        ),
    ):
        with pytest.raises(ValueError, match=f"{name} = .*: this plugin knows"):
            options.refuse_unknown({name: value})
    with pytest.raises(ValueError, match="window = 8: this plugin does not know it"):
        options.refuse_unknown({"window": 8})
