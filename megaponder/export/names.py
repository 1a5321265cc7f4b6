"""Parameter names and layouts: those of a one-process training stage and the plain ones of exports.

Stage (megatron-core)                          plain (megaponder.decoding; for llama also transformers' own)
embedding.word_embeddings.weight [V padded]    model.embed_tokens.weight [V]
embedding.position_embeddings.weight           model.embed_positions.weight
decoder.layers.I.input_layernorm               model.layers.I.input_layernorm
decoder.layers.I.self_attention.linear_qkv     model.layers.I.self_attn.{q,k,v}_proj  (stage: group's q heads, k, v)
decoder.layers.I.self_attention.linear_proj    model.layers.I.self_attn.o_proj
decoder.layers.I.pre_mlp_layernorm             model.layers.I.post_attention_layernorm
decoder.layers.I.mlp.linear_fc1                model.layers.I.mlp.{gate_proj, up_proj}  (gate: SwiGLU only)
decoder.layers.I.mlp.linear_fc2                model.layers.I.mlp.down_proj
decoder.layers.I.mlp.router                    model.layers.I.mlp.gate
decoder.layers.I.mlp.router.expert_bias        model.layers.I.mlp.expert_bias
decoder.layers.I.mlp.experts.local_experts.E   model.layers.I.mlp.experts.E  (with linear_fc1 and linear_fc2 as above)
decoder.layers.I.mlp.shared_experts            model.layers.I.mlp.shared_expert
final_norm, output_layer [V padded]            model.norm, lm_head [V]
method_modules.X                               method.X  (router.weight, gates.I.0.weight, ...)
method_entry.X, method_layers.I.X              the same
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megaponder.backbone.init import is_norm
from megaponder.config.schema import ModelConfig
from megaponder.errors import UserError
from megaponder.export.formats import LAYER_NAMES

Tensors = dict[str, Tensor]

_BESIDE = re.compile(r"self_attn\.[kv]_proj|mlp\.((experts\.\d+|shared_expert)\.)?gate_proj")
"""Matrices that are a part of another's."""
_QK_BIASES = {"self_attention.q_bias": "self_attn.q_proj", "self_attention.k_bias": "self_attn.k_proj"}
_TABLES = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
_OUTER = {
    **_TABLES,
    "embedding.position_embeddings.weight": "model.embed_positions.weight",
    "final_norm.weight": "model.norm.weight",
    "final_norm.bias": "model.norm.bias",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias|expert_bias)")
_PLAIN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias|expert_bias)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc(.)")
_PLAIN_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)_proj")
NO_ROWS: Mapping[str, int] = {}
_SAME = ("method_entry.", "method_layers.")
_METHOD, _PLAIN_METHOD = "method_modules.", "method."


def split_qkv(fused: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per group [its q heads, k, v] -> q, k, v with their heads in order; weights [rows, H] or biases [rows]."""
    per = heads // groups
    size = fused.shape[0] // (heads + 2 * groups)
    rows = fused.view(groups, per + 2, size, *fused.shape[1:])
    return rows[:, :per].flatten(0, 2), rows[:, per].flatten(0, 1), rows[:, per + 1].flatten(0, 1)


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int) -> Tensor:
    """Inverse of `split_qkv`."""
    per, size = heads // groups, k.shape[0] // groups
    parts = [x.view(groups, n, size, *x.shape[1:]) for x, n in ((q, per), (k, 1), (v, 1))]
    return torch.cat(parts, dim=1).flatten(0, 2)


def to_plain(stage: Tensors, model: ModelConfig, rows: Mapping[str, int] = NO_ROWS) -> Tensors:
    """Plain tensors of a stage's state dict; padding rows of the tables are dropped.

    `rows` are the method's own parameters in the token table, by name: one that lies in a padding row, beyond the true
    vocabulary, becomes method.NAME.weight [1, H].
    Raises UserError for a tensor that cannot be exported.
    """
    assert model.num_heads is not None and model.num_kv_heads is not None and model.vocab_size is not None
    out: Tensors = {}
    for name, tensor in stage.items():
        match = _LAYER.fullmatch(name)
        inner = _mlp_of(match[2]) if match else ""
        if not model.norm_affine and is_norm(name):
            continue
        if name in _OUTER:
            out[_OUTER[name]] = tensor[: model.vocab_size] if name in _TABLES else tensor
        elif name.startswith(_SAME):
            out[name] = tensor
        elif name.startswith(_METHOD):
            out[_PLAIN_METHOD + name[len(_METHOD) :]] = tensor
        elif match and match[3] == "expert_bias":
            out[f"model.layers.{match[1]}.mlp.expert_bias"] = tensor
        elif match and match[2] in LAYER_NAMES:
            out[f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"] = tensor
        elif match and inner and match[2].endswith(".linear_fc2"):
            out[f"model.layers.{match[1]}.{inner}.down_proj.{match[3]}"] = tensor
        elif match and match[2] in _QK_BIASES:
            out[f"model.layers.{match[1]}.{_QK_BIASES[match[2]]}.bias"] = tensor
        elif match and match[2] == "self_attention.linear_qkv":
            for letter, part in zip("qkv", split_qkv(tensor, model.num_heads, model.num_kv_heads), strict=True):
                out[f"model.layers.{match[1]}.self_attn.{letter}_proj.{match[3]}"] = part
        elif match and inner:
            parts = tensor.chunk(2) if model.gated else (tensor,)
            for part, side in zip(reversed(parts), ("up", "gate"), strict=False):
                out[f"model.layers.{match[1]}.{inner}.{side}_proj.{match[3]}"] = part
        else:
            raise UserError(f"the checkpoint's parameter {name} cannot be exported; it belongs to a newer format.")
    for parameter, row in rows.items():
        if row >= model.vocab_size:
            out[f"method.{parameter}.weight"] = stage["embedding.word_embeddings.weight"][row][None]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _mlp_of(name: str) -> str:
    """The plain name of the MLP that a stage's matrix belongs to; empty if it belongs to none."""
    if name == "mlp.linear_fc1":
        return "mlp"
    if name == "mlp.shared_experts.linear_fc1":
        return "mlp.shared_expert"
    return f"mlp.experts.{expert[1]}" if (expert := _EXPERT.fullmatch(name)) else ""


def _stage_mlp(name: str) -> str:
    """The inverse: of a plain matrix."""
    if expert := _PLAIN_EXPERT.fullmatch(name):
        return f"mlp.experts.local_experts.{expert[1]}"
    return {"mlp.up_proj": "mlp", "mlp.shared_expert.up_proj": "mlp.shared_experts"}.get(name, "")


def to_stage(plain: Tensors, model: ModelConfig, rows: Mapping[str, int] = NO_ROWS) -> Tensors:
    """A stage's tensors (padded tables) of plain ones: the inverse of `to_plain`."""
    assert model.num_heads is not None and model.num_kv_heads is not None
    outer = {new: old for old, new in _OUTER.items()}
    inner = {new: old for old, new in LAYER_NAMES.items()}
    in_table = {f"method.{parameter}.weight": row for parameter, row in rows.items()}
    biases = {new: old for old, new in _QK_BIASES.items()} if model.qkv_bias == "qk" else {}
    out: Tensors = {} if model.norm_affine else _constant_norms(model)
    for name, tensor in plain.items():
        match = _PLAIN_LAYER.fullmatch(name)
        of = _stage_mlp(match[2]) if match else ""
        if match and match[3] == "expert_bias":
            out[f"decoder.layers.{match[1]}.mlp.router.expert_bias"] = tensor
        elif match and match[2] in biases and match[3] == "bias":
            out[f"decoder.layers.{match[1]}.{biases[match[2]]}.bias"] = tensor
        elif name in outer:
            out[outer[name]] = _pad_rows(tensor, model.padded_vocab) if outer[name] in _TABLES else tensor
        elif name in in_table:
            continue
        elif name.startswith(_SAME):
            out[name] = tensor
        elif name.startswith(_PLAIN_METHOD):
            out[_METHOD + name[len(_PLAIN_METHOD) :]] = tensor
        elif match and match[2] in inner:
            out[f"decoder.layers.{match[1]}.{inner[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] == "self_attn.q_proj":
            k, v = (_beside(plain, name, "q_proj", f"{x}_proj") for x in "kv")
            fused = fuse_qkv(tensor, k, v, heads=model.num_heads, groups=model.num_kv_heads)
            out[f"decoder.layers.{match[1]}.self_attention.linear_qkv.{match[3]}"] = fused
        elif match and of and match[2].endswith(".down_proj"):
            out[f"decoder.layers.{match[1]}.{of}.linear_fc2.{match[3]}"] = tensor
        elif match and of and match[2].endswith(".up_proj"):
            gate = [_beside(plain, name, "up_proj", "gate_proj")] if model.gated else []
            out[f"decoder.layers.{match[1]}.{of}.linear_fc1.{match[3]}"] = torch.cat([*gate, tensor])
        elif not (match and _BESIDE.fullmatch(match[2])):
            raise UserError(f"this model has no parameter {name}, which the folder contains.")
    for name, row in in_table.items():
        if name in plain:
            out["embedding.word_embeddings.weight"][row] = plain[name][0]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _beside(plain: Tensors, name: str, own: str, other: str) -> Tensor:
    """The tensor that has `other` for `own` in its name."""
    if (wanted := name.replace(own, other)) not in plain:
        raise UserError(f"the folder's weights do not fit its config.json: {wanted} is missing.")
    return plain[wanted]


def _constant_norms(model: ModelConfig) -> Tensors:
    """Weights of 1 and biases of 0 of all norms of a model whose norms learn nothing."""
    layer = {"input_layernorm", "pre_mlp_layernorm"} if model.norm_placement != "post" else set()
    if model.norm_placement != "pre":
        layer |= {"post_self_attn_layernorm", "post_mlp_layernorm"}
    widths = dict.fromkeys(layer, model.hidden_size)
    if model.qk_norm == "head":
        widths |= dict.fromkeys(("self_attention.q_layernorm", "self_attention.k_layernorm"), model.head_size)
    norms = {
        f"decoder.layers.{i}.{name}": width for i in range(model.num_layers or 0) for name, width in widths.items()
    }
    norms["final_norm"] = model.hidden_size
    ones = {f"{name}.weight": torch.ones(width or 0) for name, width in norms.items()}
    return ones | {name.replace(".weight", ".bias"): torch.zeros_like(weight) for name, weight in ones.items()}


def _pad_rows(table: Tensor, rows: int) -> Tensor:
    """Zero rows up to the padded vocabulary: no softmax ever reads their logits."""
    return torch.cat([table, table.new_zeros(rows - table.shape[0], table.shape[1])])
