"""A model as the lineage methods see it: float64 matrices by layer, whatever the layout or format it was stored in.

Fused matrices are taken apart by heads and groups, padding rows of the vocabulary are dropped, and matrices of GPT-2
are turned to [out, in], all by the code that imports and exports use.  Of a looped model these are the physical layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.data.tokenizer import load_tokenizer, vocabulary
from megaponder.errors import UserError
from megaponder.export import names
from megaponder.export.folder import has_tokenizer
from megaponder.inference.heldout import read_model
from megaponder.ponder.settings import table_rows

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_PLACES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "attention_gain": "input_layernorm", "mlp_gain": "post_attention_layernorm",
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Matrices of a layer, [out, in]; biases take no part."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    """None in an MLP without a gate."""
    attention_gain: Tensor | None = None
    """[d] Weight of the norm before q, k and v; None if nothing learned stands there."""
    mlp_gain: Tensor | None = None
    """[d] The same before gate and up."""

    def changed(self, change: Callable[[Tensor], Tensor]) -> Layer:
        """The layer with a function applied to each of its matrices."""
        there = {name: getattr(self, name) for name in MATRICES}
        return replace(self, **{name: change(t) for name, t in there.items() if t is not None})

    def folded(self) -> Layer:
        """The same function with the gains inside the matrices that read them."""
        a, m = self.attention_gain, self.mlp_gain
        q, k, v = ((w if a is None else w * a) for w in (self.q, self.k, self.v))
        up, gate = ((w if m is None or w is None else w * m) for w in (self.up, self.gate))
        assert up is not None
        return replace(self, q=q, k=k, v=v, up=up, gate=gate, attention_gain=None, mlp_gain=None)


@dataclass(frozen=True)
class Model:
    """What is compared."""

    name: str
    embedding: Tensor
    """[vocabulary, d]"""
    layers: tuple[Layer, ...]
    heads: int
    groups: int
    """Key/value heads."""
    qk_norm: bool = False
    """Queries and keys are normed, so that a scale of either is no freedom of the weights."""
    tokens: dict[str, int] | None = None
    """Ids by what the tokenizer calls them; None if no tokenizer is known."""
    config: RunConfig | None = None
    """Of the run that saved it, or what `megaponder import` would make of a folder."""

    @property
    def width(self) -> int:
        """Channels d of the residual stream."""
        return self.embedding.shape[1]

    def folded(self) -> Model:
        """The same function with all gains of norms inside the matrices that read them."""
        return replace(self, layers=tuple(layer.folded() for layer in self.layers))


def load(path: str | Path, tokenizer: str | None = None) -> Model:
    """A checkpoint, the newest one of a run, or a Hugging Face folder (safetensors only, no code of its own is run).

    `tokenizer` replaces the one that the folder has or the run names.  UserError for whatever cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"There is no checkpoint, run or Hugging Face folder {path}.")
    cfg, stage = read_model(path)
    return of_plain(names.to_plain(stage, cfg.model, table_rows(cfg)), cfg, str(path), _tokens(path, cfg, tokenizer))


def of_plain(plain: names.Tensors, cfg: RunConfig, name: str, tokens: dict[str, int] | None = None) -> Model:
    """A model of plain tensors (`megaponder.export.names`)."""
    m, layers = cfg.model, []
    assert m.num_heads is not None and m.num_kv_heads is not None
    for i in range(m.num_layers or 0):
        own = {role: plain.get(f"model.layers.{i}.{place}.weight") for role, place in _PLACES.items()}
        if m.moe:
            own |= _mixture(plain, f"model.layers.{i}.mlp", bool(m.moe.get("shared_ffn")))
        layers.append(Layer(**{role: t.double() for role, t in own.items() if t is not None}))
    table = plain["model.embed_tokens.weight"].double()
    return Model(name, table, tuple(layers), m.num_heads, m.num_kv_heads, m.qk_norm != "none", tokens, cfg)


def _mixture(plain: names.Tensors, at: str, shared: bool) -> dict[str, Tensor | None]:
    """The MLP of a mixture: its shared expert, as an upcycled model has it from its base, or else all experts side by
    side."""
    if shared:
        return {role: plain[f"{at}.shared_expert.{role}_proj.weight"] for role in ("gate", "up", "down")}
    found: dict[str, Tensor | None] = {}
    for role in ("gate", "up", "down"):
        parts = [t for name, t in plain.items() if name.startswith(f"{at}.experts.") and f".{role}_proj." in name]
        found[role] = torch.cat(parts, dim=1 if role == "down" else 0)
    return found


def _tokens(path: Path, cfg: RunConfig, named: str | None) -> dict[str, int] | None:
    """The vocabulary of a model's tokenizer; None if it names none, or one that is no longer there."""
    if named is not None:
        return vocabulary(load_tokenizer(named))
    if (path / "config.json").is_file() and has_tokenizer(path):
        return vocabulary(load_tokenizer(str(path)))
    own = cfg.data.tokenizer
    there = own is not None and (own == "bytes" or Path(own).exists())
    return vocabulary(load_tokenizer(own)) if own is not None and there else None


def shared(a: Model, b: Model, by_id: bool = False) -> tuple[Tensor, Tensor]:
    """Ids of the tokens that both models have, in the order of the first one's ids: [n] of each.

    Tokens are the same if their tokenizers call them the same.  Where a tokenizer is missing they are the same if their
    ids are, provided that the vocabularies are equally large, or with `by_id` up to the smaller one.
    UserError if that does not hold, or if no token is shared.
    """
    rows_a, rows_b = a.embedding.shape[0], b.embedding.shape[0]
    if a.tokens is not None and b.tokens is not None and not by_id:
        found = sorted((i, b.tokens[name]) for name, i in a.tokens.items() if name in b.tokens)
        pairs = torch.tensor([(i, j) for i, j in found if i < rows_a and j < rows_b]).reshape(-1, 2)
        if not len(pairs):
            raise UserError(f"{a.name} and {b.name}: their tokenizers share no token, so they cannot be compared.")
        return pairs[:, 0], pairs[:, 1]
    if rows_a != rows_b and not by_id:
        lacking = next(m.name for m in (a, b) if m.tokens is None)
        raise UserError(
            f"{a.name} and {b.name}: their vocabularies have {rows_a:,} and {rows_b:,} tokens, and {lacking} names no "
            "tokenizer that says which are the same; give --tokenizer, or say --by-id if equal ids are equal tokens."
        )
    ids = torch.arange(min(rows_a, rows_b))
    return ids, ids


def expanded(model: Model, layer: Layer) -> tuple[Tensor, Tensor]:
    """Keys and values with each group's rows repeated for the query heads that read them: as many heads as queries."""
    return _repeat(layer.k, model), _repeat(layer.v, model)


def _repeat(matrix: Tensor, model: Model) -> Tensor:
    if model.heads == model.groups:
        return matrix
    rows = matrix.view(model.groups, -1, matrix.shape[1])
    return rows.repeat_interleave(model.heads // model.groups, dim=0).flatten(0, 1)
