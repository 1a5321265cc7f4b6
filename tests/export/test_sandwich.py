"""Sandwich norms against transformers' GLM-4, which has them: Llama's block but for a norm on each branch, and RoPE
that turns neighbouring channels where ours turns the two halves of a head."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Glm4Config, Glm4ForCausalLM

from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM
from tests.tolerance import PARITY

HEADS, GROUPS, SIZE = 4, 2, 12
NORMS = {
    "post_self_attn_layernorm": "input_layernorm_2",
    "post_mlp_layernorm": "post_attention_layernorm_2",
}


def _in_halves(rows: Tensor) -> Tensor:
    """Channels 0, 2, 4, ... of each head, then 1, 3, 5, ...: those that turn together are half a head apart."""
    heads = rows.view(-1, SIZE, rows.shape[-1])
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).reshape(rows.shape)


def _ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in theirs.items():
        for old, new in NORMS.items():
            name = name.replace(old, new)
        if name.endswith("gate_up_proj.weight"):
            for part, value in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                out[name.replace("gate_up_proj", part)] = value
        else:
            out[name] = _in_halves(tensor) if "q_proj" in name or "k_proj" in name else tensor
    return out


@torch.no_grad()
def test_the_block_is_that_of_glm4() -> None:
    shape = dict(
        vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        intermediate_size=52, max_position_embeddings=40, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    theirs = Glm4ForCausalLM(
        Glm4Config(
            **shape, head_dim=SIZE, rms_norm_eps=0.1, attention_bias=False, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 1.0},
        )
    ).eval()  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.copy_((parameter.dim() == 1) + 0.2 * torch.randn(parameter.shape, generator=draw))
    ours = MegaponderForCausalLM(
        MegaponderConfig(
            **shape, family="llama", method="vanilla", head_size=SIZE, norm_eps=0.1, rotary_base=5e4,
            norm_placement="sandwich",
        )
    ).eval()  # fmt: skip
    ours.load_state_dict(_ours(theirs.state_dict()), strict=True)
    ids = torch.randint(61, (2, 17), generator=draw)
    want = theirs(ids).logits
    torch.testing.assert_close(ours(ids).logits, want, rtol=0, atol=PARITY * float(want.abs().max()))
