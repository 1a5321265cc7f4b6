"""Tiny real models for the lineage tests, and changes of their weights that do not change what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaponder.config.resolve import resolve
from megaponder.config.schema import DataConfig, ModelConfig, PonderConfig, RunConfig
from megaponder.export.modeling_megaponder import MegaponderForCausalLM
from megaponder.lineage.weights import Model, of_plain
from tests.export import models

WIDTH, LAYERS, HEADS, VOCAB = 48, 3, 4, 97
Plain = dict[str, Tensor]
READS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
WRITES = ("self_attn.o_proj", "mlp.down_proj")


def net(seed: int = 0, family: str = "llama", **changes: Any) -> MegaponderForCausalLM:
    """A vanilla model in float64, with as many key/value heads as query heads unless changed."""
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=VOCAB, num_key_value_heads=HEADS)
    return models.model(family, "vanilla", seed, **sizes | {"norm_eps": 1e-5} | changes).double()


def plain(model: MegaponderForCausalLM) -> Plain:
    return {name: t.clone() for name, t in model.state_dict().items()}


def config(model: MegaponderForCausalLM, run: str = "-", **more: Any) -> RunConfig:
    """Our configuration of a test model."""
    c = model.config
    section = ModelConfig(
        family=c.family, num_layers=c.num_hidden_layers, hidden_size=c.hidden_size, num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads, ffn_size=c.intermediate_size, vocab_size=c.vocab_size,
        max_positions=c.max_position_embeddings, rotary_fraction=c.rotary_fraction, rotary_base=c.rotary_base,
        norm_eps=c.norm_eps, tie_embeddings=c.tie_word_embeddings,
    )  # fmt: skip
    data = DataConfig(sequence_length=16, eod_id=0)
    return resolve(RunConfig(run=run, model=section, ponder=PonderConfig("vanilla"), data=data, **more))


def read(model: MegaponderForCausalLM, weights: Plain | None = None, name: str = "model") -> Model:
    """What the lineage methods see of a model, or of other weights of its shape."""
    return of_plain(plain(model) if weights is None else weights, config(model), name)


def logits(model: MegaponderForCausalLM, weights: Plain, ids: Tensor) -> Tensor:
    """Of a model with these weights."""
    other = type(model)(model.config).double().eval()
    other.load_state_dict(weights)
    with torch.no_grad():
        return other(ids, use_cache=False).logits


def draw(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def order(n: int, seed: int = 7) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def _each(weights: Plain, change: Any) -> Plain:
    return {name: change(name, t) for name, t in weights.items()}


def signed_permutation(w: Plain) -> Plain:
    """Of the residual stream."""
    p, s = order(WIDTH), draw(WIDTH, seed=8).sign()

    def change(name: str, t: Tensor) -> Tensor:
        if name.endswith("norm.weight"):
            return t[p]
        if any(part in name for part in WRITES):
            return t[p] * s[:, None]
        return t[:, p] * s

    return _each(w, change)


def _by_layer(w: Plain, change: Any) -> Plain:
    out = dict(w)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        for name, t in change({n[len(at) :]: x for n, x in w.items() if n.startswith(at)}, i).items():
            out[at + name] = t
    return out


def heads(w: Plain) -> Plain:
    """Rotations inside RoPE's planes, a permutation of heads, and global q c, k / c."""
    size, half = WIDTH // HEADS, WIDTH // HEADS // 2

    def turned(t: Tensor, angle: Tensor) -> Tensor:
        rows = t.view(HEADS, 2, half, -1)
        c, s = angle.cos()[..., None], angle.sin()[..., None]
        both = torch.stack([rows[:, 0] * c - rows[:, 1] * s, rows[:, 0] * s + rows[:, 1] * c], dim=1)
        return both.view(HEADS, size, -1)

    def change(layer: Plain, i: int) -> Plain:
        angle, p = draw(HEADS, half, seed=20 + i), order(HEADS, 30 + i)
        out = {
            f"self_attn.{x}_proj.weight": (turned(layer[f"self_attn.{x}_proj.weight"], angle)[p] * c).flatten(0, 1)
            for x, c in (("q", 1.7), ("k", 1 / 1.7))
        }
        out["self_attn.v_proj.weight"] = layer["self_attn.v_proj.weight"].view(HEADS, size, -1)[p].flatten(0, 1)
        out["self_attn.o_proj.weight"] = layer["self_attn.o_proj.weight"].view(-1, HEADS, size)[:, p].flatten(1)
        return out

    return _by_layer(w, change)


def head_scales(w: Plain) -> Plain:
    """Per head q c_h, k / c_h."""
    size = WIDTH // HEADS

    def change(layer: Plain, i: int) -> Plain:
        c = draw(HEADS, seed=40 + i).exp().repeat_interleave(size)[:, None]
        return {
            "self_attn.q_proj.weight": layer["self_attn.q_proj.weight"] * c,
            "self_attn.k_proj.weight": layer["self_attn.k_proj.weight"] / c,
        }

    return _by_layer(w, change)


def neurons(w: Plain) -> Plain:
    """The MLP's neurons in another order, and up c, down / c."""

    def change(layer: Plain, i: int) -> Plain:
        n = layer["mlp.up_proj.weight"].shape[0]
        p, c = order(n, 50 + i), draw(n, seed=60 + i).exp()[:, None]
        return {
            "mlp.gate_proj.weight": layer["mlp.gate_proj.weight"][p],
            "mlp.up_proj.weight": (layer["mlp.up_proj.weight"] * c)[p],
            "mlp.down_proj.weight": (layer["mlp.down_proj.weight"] / c.T)[:, p],
        }

    return _by_layer(w, change)


def gain_scales(w: Plain) -> Plain:
    """Per channel: gains of norms c, the weights that read them 1 / c."""

    def change(layer: Plain, i: int) -> Plain:
        c, out = draw(WIDTH, seed=70 + i).exp(), {}
        for name, t in layer.items():
            if name.endswith("norm.weight"):
                out[name] = t * c
            elif any(part in name for part in READS):
                out[name] = t / c
        return out

    return _by_layer(w, change)


def unit_gains(w: Plain) -> Plain:
    """All gains inside the weights that read them; afterwards they are 1."""

    def change(layer: Plain, i: int) -> Plain:
        out = {n: torch.ones_like(t) for n, t in layer.items() if n.endswith("norm.weight")}
        for name, t in layer.items():
            norm = "input_layernorm" if name.startswith("self_attn") else "post_attention_layernorm"
            if any(part in name for part in READS):
                out[name] = t * layer[f"{norm}.weight"]
        return out

    out = _by_layer(w, change)
    out["lm_head.weight"] = w["lm_head.weight"] * w["model.norm.weight"]
    return out | {"model.norm.weight": torch.ones(WIDTH, dtype=torch.float64)}


def rotated(w: Plain) -> Plain:
    """Gains folded, then a full rotation of the residual stream."""
    turn = torch.linalg.qr(draw(WIDTH, WIDTH))[0]

    def change(name: str, t: Tensor) -> Tensor:
        if name.endswith("norm.weight"):
            return t
        return turn.T @ t if any(part in name for part in WRITES) else t @ turn

    return _each(unit_gains(w), change)


def noisy(w: Plain, share: float = 0.3, seed: int = 80) -> Plain:
    """Gaussian noise with that share of each matrix's standard deviation."""
    return {
        name: t if t.dim() == 1 else t + share * t.std() * draw(*t.shape, seed=seed + n)
        for n, (name, t) in enumerate(w.items())
    }
