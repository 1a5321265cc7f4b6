"""The configurations that transformers itself starts from, and odd ones: two layers come in and go out again."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from megaponder.export import configs, native
from megaponder.export.formats import FORMATS
from megaponder.export.import_config import run_config
from megaponder.export.kept import ENDS
from megaponder.export.load import load_folder
from megaponder.export.names import to_plain as of_stage
from megaponder.export.names import to_stage
from megaponder.export.plain import to_plain
from megaponder.plan.parameters import model_parameters
from tests.export import hf_models
from tests.export.test_round_trip import round_trip, same_config
from tests.layouts.cases import WHOLE

FEW_IDS = {"vocab_size": 97, "bos_token_id": 3, "eos_token_id": 5, "pad_token_id": 1}
"""Of a small vocabulary; all of them different."""


def default(kind: str, **changes: Any) -> Any:
    """Two layers of what transformers has without arguments."""
    return AutoConfig.for_model(kind, **{"num_hidden_layers": 2} | changes)


def on_paper(theirs: Any) -> None:
    """Fields, names and shapes, without weights: what comes in, the training stage's own, and what goes out."""
    fields, form = theirs.to_dict(), FORMATS[theirs.model_type]
    cfg = run_config(fields, Path("hf"), Path("run"), frozenset())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    tensors = hf_models.as_stored(dict(model.state_dict()))
    if cfg.model.tie_embeddings:
        tensors = {n: t for n, t in tensors.items() if n not in ("lm_head.weight", "embed_out.weight")}
    plain = to_plain(fields, tensors, cfg, Path("hf"))
    stage = to_stage(plain, cfg.model)
    assert cfg.model.num_heads
    back = native.to_native(of_stage(stage, cfg.model), form, cfg.model.num_heads)
    # late releases call the head of GPT-NeoX lm_head, and read either name
    named = {"lm_head.weight": "embed_out.weight"} if theirs.model_type == "gpt_neox" else {}
    assert shapes(back) == {named.get(name, name): shape for name, shape in shapes(tensors).items()}
    unused = form.layout.unused_positions * theirs.hidden_size if form.layout else 0
    of_norms = 0 if cfg.model.norm_affine else sum(t.numel() for n, t in stage.items() if "norm" in n)
    assert model_parameters(cfg.model).total == sum(t.numel() for t in tensors.values()) - unused + of_norms
    made = configs.native_config(cfg, theirs.model_type, "float32", None)
    said_elsewhere = (*ENDS, "dtype", "torch_dtype", "initializer_range", "init_std")
    same_config(theirs, AutoConfig.for_model(**made), but=said_elsewhere)


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_default_sizes(kind: str) -> None:
    on_paper(default(kind))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_small_default_comes_back(kind: str, tmp_path: Path) -> None:
    """Everything that is no size is as transformers has it."""
    theirs = default(kind)
    widths = ("hidden_size", "intermediate_size", "moe_intermediate_size", "ffn_dim", "word_embed_proj_dim")
    parts = dict.fromkeys((*widths, "num_experts"), 16)
    parts |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 4)
    parts = {name: by for name, by in parts.items() if name not in FORMATS[kind].idle}
    small = {name: getattr(theirs, name) // by for name, by in parts.items() if getattr(theirs, name, None)}
    config = default(kind, **small, **FEW_IDS)
    assert config.hidden_size == theirs.hidden_size // 16
    model = getattr(transformers, FORMATS[kind].architecture)(config)
    round_trip(hf_models.make(model, tmp_path / "hf"), tmp_path)


@pytest.mark.skipif(not WHOLE, reason="reads and writes up to 11 GB, and takes as much memory")
@pytest.mark.parametrize("kind", FORMATS)
def test_the_default_comes_back(kind: str, tmp_path: Path) -> None:
    """In full, but for the vocabulary of the wide ones."""
    config = default(kind)
    if config.hidden_size > 1000:
        config = default(kind, **FEW_IDS)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    # most at once: a state, the engine's own copy of it and its gradients; the source lies in the mapped file
    if (need := 3 * 4 * size) > psutil.virtual_memory().available - 2e9:
        pytest.skip(f"it takes {need / 1e9:.0f} GB of memory")
    # projections as large as those of the small models: with larger ones attention picks one key, and rounding decides
    std = 0.2 * min(1.0, (64 / config.hidden_size) ** 0.5)
    hf_models.make(getattr(transformers, FORMATS[kind].architecture)(config), tmp_path / "hf", std=std)
    gc.collect()  # what was made is in the folder alone
    round_trip(load_folder(tmp_path / "hf"), tmp_path)
    shutil.rmtree(tmp_path)


SCALINGS: list[dict[str, Any]] = [
    {},
    {"rope_type": "linear", "factor": 1.7},
    {"rope_type": "dynamic", "factor": 2.3},
    hf_models.YARN,
    hf_models.YARN | {"mscale": 0.9, "mscale_all_dim": 0.4},
    hf_models.LLAMA3 | {"original_max_position_embeddings": 9},
]


def scalings(kind: str) -> list[dict[str, Any]]:
    """Those that this release's configuration takes: OLMo2's of 4.51 wants a type and a factor under older names."""
    old = not hasattr(transformers.LlamaConfig(), "rope_parameters")
    return [{}] if old and kind == "olmo2" else SCALINGS


def odd(kind: str, seed: int) -> Any:
    """A configuration with a legal value of every field that the format takes, drawn by the seed."""
    draw, form = random.Random(f"{kind} {seed}"), FORMATS[kind]
    groups, per, size = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.choice([4, 6, 10, 20])
    heads, free = groups * per, "head_size" in form.taken.values()
    sizes = {
        "vocab_size": draw.randrange(50, 130),
        "hidden_size": heads * (draw.choice([3, 5, 14]) if free else size),
        "num_layers": 2,
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_size": size,
        "ffn_size": draw.randrange(21, 60),
        "max_positions": draw.randrange(20, 50),
        "norm_eps": draw.choice([1e-7, 1e-5, 0.1]),
        "tie_embeddings": draw.random() < 0.5,
        "parallel_residual": draw.random() < 0.5,
    }
    fields: dict[str, Any] = {theirs: sizes[ours] for theirs, ours in form.taken.items() if ours in sizes}
    for theirs, code in form.coded.items():
        names = {value: name for name, value in reversed(code.values.items())}  # one name for each meaning
        fields[theirs] = draw.choice([*names.values()])
    if form.experts:
        fields |= {"num_experts": draw.randrange(3, 9), "num_experts_per_tok": draw.choice([2, 3])}
        fields |= {"norm_topk_prob": draw.random() < 0.5, "router_aux_loss_coef": draw.choice([0.001, 0.3])}
    if form.rotary:
        fraction = {} if "rotary_pct" not in form.taken else {"partial_rotary_factor": draw.choice([4, size]) / size}
        fields |= hf_models.rope(draw.choice([1e3, 5e5]), **fraction, **draw.choice(scalings(kind)))
    if form.window:
        fields["sliding_window"] = window = draw.choice([None, 5])
        if form.window == "switched" and window:
            fields |= {"use_sliding_window": True, "max_window_layers": 0}
    if kind == "opt":
        fields["word_embed_proj_dim"] = sizes["hidden_size"]
    ends = {name: draw.randrange(50) for name in ENDS if draw.random() < 0.7}
    return AutoConfig.for_model(kind, **fields, **ends, initializer_range=draw.choice([0.02, 0.3]))


@pytest.mark.parametrize("kind", FORMATS)
def test_odd_sizes(kind: str) -> None:
    for seed in range(10):
        on_paper(odd(kind, seed))


@pytest.mark.skipif(not WHOLE, reason="a sample is on paper, and in test_round_trip")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", FORMATS)
def test_odd_ones_come_back(kind: str, seed: int, tmp_path: Path) -> None:
    model = getattr(transformers, FORMATS[kind].architecture)(odd(kind, seed))
    round_trip(hf_models.make(model, tmp_path / "hf"), tmp_path)
