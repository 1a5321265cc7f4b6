"""The engine against numbers of the public files of looped models: logits, loss and every gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, PonderConfig, RunConfig
from megaponder.engine import cuda_on_cpu
from tests.tolerance import RTOL

cuda_on_cpu.install()

from megaponder.data.batch import MicroBatch  # noqa: E402
from megaponder.decoding.noise import sequence_uniform  # noqa: E402
from megaponder.engine import groups, method_tools  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.export import looped, names, reference  # noqa: E402
from megaponder.ponder import drawn  # noqa: E402
from megaponder.ponder.methods.parcae import training as parcae_training  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402

FOLDER = Path(__file__).parents[1] / "fixtures" / "looped"
LLAMA = {"norm_1": "input_layernorm", "attn.proj": "self_attn.o_proj", "norm_2": "post_attention_layernorm"}
OUTER = {"wte": "model.embed_tokens", "ln_f": "model.norm", "adapter": "method_entry.adapter"}


def config(kind: str, c: dict[str, Any], kept: int = 0, steps: int = 0) -> RunConfig:
    """The fixture's model as a run configuration."""
    recurrent = {"prelude": 2, "coda": 1, "recurrence": steps, "kept": kept, "draw": "fixed"}
    if kind == "ouro":
        sizes = {"hidden_size": c["hidden_size"], "num_layers": c["layers"], "num_heads": c["num_heads"]}
        features = looped.FEATURES["ouro"] | {"rotary_base": 1e6, "norm_eps": 1e-6}
        ponder = PonderConfig("ouro", {"loops": c["loops"], "entropy_weight": 0.1})
    elif kind == "nanbeige":
        sizes = {"hidden_size": c["hidden_size"], "num_layers": c["layers"], "num_heads": c["num_heads"]}
        features = {"num_kv_heads": c["num_kv_heads"], "head_size": c["head_dim"]}
        features |= {"rotary_base": c["rope_theta"], "norm_eps": c["norm_eps"]}
        ponder = PonderConfig("nanbeige", {"loops": c["loops"]})
    else:
        sizes = {"hidden_size": c["n_embd"], "num_layers": 5, "num_heads": c["n_heads"]}
        features = {"rotary_base": c.get("rope_base", 5e4), "norm_eps": c.get("norm_eps", 1e-6)}
        features |= {"num_kv_heads": c["n_kv_heads"]}
        if kind == "huginn":
            features |= looped.FEATURES["huginn_raven"] | {"tie_embeddings": True}
        ponder = PonderConfig(kind, recurrent)
    model = ModelConfig(
        family="llama", vocab_size=60, vocab_multiple=32, ffn_size=48, max_positions=64, **sizes, **features
    )
    cfg = RunConfig(model=model, ponder=ponder)
    cfg.data.sequence_length, cfg.train.steps, cfg.train.global_batch, cfg.train.micro_batch = 11, 1, 2, 2
    return resolve(cfg)


def plain(kind: str, tensors: dict[str, Tensor], cfg: RunConfig) -> dict[str, Tensor]:
    """Plain tensors, of weights or of gradients."""
    if kind != "retrofit":
        return looped.to_plain({"huginn": "huginn_raven"}.get(kind, kind), tensors, cfg)
    out = {}
    for name, tensor in tensors.items():
        part = name.removeprefix("transformer.").removesuffix(".weight")
        if part in OUTER or part == "lm_head":
            out[f"{OUTER.get(part, part)}.weight"] = tensor
            continue
        place, number, rest = part.split(".", 2)
        at = f"model.layers.{ {'prelude': 0, 'core_block': 2, 'coda': 4}[place] + int(number) }"
        if rest == "attn.Wqkv":
            for x, t in zip("qkv", tensor.split([32, 16, 16]), strict=True):
                out[f"{at}.self_attn.{x}_proj.weight"] = t
        elif rest == "mlp.fc":
            out[f"{at}.mlp.gate_proj.weight"], out[f"{at}.mlp.up_proj.weight"] = tensor.chunk(2)
        else:
            out[f"{at}.{LLAMA.get(rest, 'mlp.down_proj')}.weight"] = tensor
    return out


def worst(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", ["ouro_mha", "huginn_truncated", "retrofit", "nanbeige_two"])
def test_public_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z = np.load(FOLDER / f"{name}.npz")
    meta, kind = json.loads(str(z["meta"])), name.partition("_")[0]
    cfg = config(kind, meta["config"], meta.get("n_grad", 0), meta.get("n_free", 0) + meta.get("n_grad", 0))
    ids = torch.tensor(z["ids"])
    weights, grads = ({k[2:]: torch.tensor(z[k]) for k in z.files if k.startswith(p)} for p in ("p/", "g/"))
    method = method_of(cfg)
    engine = build_engine(cfg, method, groups.init(cfg))
    reference.load(engine.stage, names.to_stage(plain(kind, weights, cfg), cfg.model))
    if "s0" in z.files:
        start = torch.tensor(z["s0"]).transpose(0, 1) / method.state_std()  # type: ignore[attr-defined]
        monkeypatch.setattr(method_tools.StageEntryTools, "noise", lambda self, seed: start)
    assert worst(engine.logits(ids), torch.tensor(z["logits"])) < RTOL
    for key in (k for k in z.files if k[0] == "q"):
        method.options.threshold = float(key[1:])
        assert worst(engine.logits(ids), torch.tensor(z[key])) < RTOL, key
    if "labels" not in z.files:  # a port without training
        return
    labels = torch.tensor(z["labels"])
    engine.zero_grad()
    out = engine.forward_backward([MicroBatch(ids, labels.clamp(min=0), (labels >= 0).float())], 0, train=True)
    assert out.stats.get("objective", out.loss) == pytest.approx(float(z["loss"]), rel=RTOL)
    largest = max(float(g.abs().max()) for g in grads.values())
    for key, grad in names.to_stage(plain(kind, grads, cfg), cfg.model).items():
        found = dict(engine.stage.named_parameters())[key].main_grad
        assert float((found - grad).abs().max()) < RTOL * largest, key


PARCAE = {
    "wte.weight": "model.embed_tokens.weight", "ln_f.weight": "model.norm.weight", "C.weight": "method.C.weight",
    "ln_prelude.weight": "method_entry.injection.norm", "adapter.A_log": "method_entry.injection.A_log",
    "adapter.dt_bias": "method_entry.injection.dt_bias", "adapter.B": "method_entry.injection.B.weight",
}  # fmt: skip
BLOCK = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj",
    "attn.c_q": "self_attn.q_proj", "attn.c_k": "self_attn.k_proj", "attn.c_v": "self_attn.v_proj",
    "mlp.fc": "mlp.up_proj", "mlp.proj": "mlp.down_proj",
}  # fmt: skip


def parcae(tensors: dict[str, Tensor], half: float) -> dict[str, Tensor]:
    """Plain tensors; the public MLP halves the square of its ReLU, here its last matrix is halved instead."""
    out = {}
    for name, tensor in tensors.items():
        part = name.removeprefix("transformer.")
        if part in PARCAE:
            out[PARCAE[part]] = tensor
            continue
        place, number, rest = part.removesuffix(".weight").split(".", 2) if part.count(".") > 2 else (part, "", "")
        if not rest:
            out[f"method_layers.{part.split('.')[1]}.value.table"] = tensor
            continue
        layer = {"prelude": 0, "core_block": 2, "coda": 4}[place] + int(number)
        if rest == "attn.ve_gate":
            out[f"method_layers.{layer}.value.gate"] = tensor
            continue
        out[f"model.layers.{layer}.{BLOCK[rest]}.weight"] = tensor * half if rest == "mlp.proj" else tensor
    return out


@pytest.mark.parametrize("name", ["parcae", "parcae_values"])
def test_sequences_of_different_depths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 5, 1 and 2 recurrences, of which the last two have gradients.

    With value embeddings they are numbers of the public file, else of a float64 program that equals it (2e-15).
    """
    z, values = np.load(FOLDER / f"{name}.npz"), name == "parcae_values"
    meta = json.loads(str(z["meta"]))
    sizes = {"n_embd": 64, "n_heads": 2, "n_kv_heads": 2} if values else {"n_embd": 32, "n_heads": 4, "n_kv_heads": 4}
    cfg = config("retrofit", sizes | {"norm_eps": 1e-5})
    model, options = cfg.model, {key: meta[key] for key in ("kept", "recurrence", "draw_to")}
    model.qk_norm, model.rotary_pairs, model.activation, model.tie_embeddings = "rotated", "adjacent", "relu2", True
    if values:
        model.num_layers, model.vocab_size, model.ffn_size = 6, 64, 96
    cfg.ponder = PonderConfig("parcae", {"prelude": 2, "coda": 1 + values, "value_embeddings": values} | options)
    cfg.train.global_batch = cfg.train.micro_batch = len(meta["totals"])
    method = method_of(cfg)
    engine = build_engine(cfg, method, groups.init(cfg))
    weights, grads = ({k[2:]: torch.tensor(z[k]) for k in z.files if k.startswith(p)} for p in ("p/", "g/"))
    reference.load(engine.stage, names.to_stage(parcae(weights, 0.5), cfg.model))
    start = torch.tensor(z["s0"]).transpose(0, 1) / method.state_std()  # type: ignore[attr-defined]
    monkeypatch.setattr("megaponder.ponder.methods.parcae.training.poisson", lambda *_: torch.tensor(meta["totals"]))
    ids, logits = torch.tensor(z["ids"]), torch.tensor(z["logits"])
    monkeypatch.setattr(method_tools.StageEntryTools, "noise", lambda self, seed: start)
    if not values:
        assert worst(engine.logits(ids), logits) < RTOL
    else:  # logits of each sequence at its own depth
        for i, method.options.recurrence in enumerate(meta["totals"]):
            assert worst(engine.logits(ids)[i], logits[i]) < RTOL
    labels = torch.tensor(z["labels"])
    engine.zero_grad()
    batch = MicroBatch(ids, labels.clamp(min=0), (labels >= 0).float())
    assert engine.forward_backward([batch], 0, train=True).loss == pytest.approx(float(z["loss"]), rel=RTOL)
    largest = max(float(g.abs().max()) for g in grads.values())
    seen = set()
    for key, grad in names.to_stage(parcae(grads, 2.0), cfg.model).items():
        found = dict(engine.stage.named_parameters())[key].main_grad
        assert float((found - grad).abs().max()) < RTOL * largest, key
        seen.add(key)
    assert not values or "method_layers.5.value.table" in seen


def test_drawn_depths() -> None:
    """The distribution function's inverse, in numbers of the device and in plain ones."""
    u = torch.linspace(0.001, 0.9999, 400)
    got = parcae_training.poisson(8, u, 16).tolist()
    assert got == [min(16, max(1, drawn.poisson(8, float(x)))) for x in u] and {1, 2, 16} <= set(got)
    ids = torch.arange(4000).reshape(1000, 4)
    first, second = (sequence_uniform(ids, 1, step) for step in (0, 1))
    assert abs(float(first.mean()) - 0.5) < 0.03 and abs(float(first.var()) * 12 - 1) < 0.1
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.1 and 0 < first.min() < first.max() < 1
