"""The model without its head, as vLLM's transformers backend builds and calls it.

A stand-in for the engine keeps keys and values by layer, gives several texts at once, and prompts in parts; vLLM itself
runs in tests/benchmarks/test_serving.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megaponder.decoding.headless import PonderModel
from megaponder.errors import UserError
from megaponder.export import compose, targets
from megaponder.export.from_hf import import_hf
from megaponder.export.load import load_folder
from megaponder.export.to_hf import export
from tests.export import checkpoints
from tests.export.models import EVERY, METHODS, config, ids, model
from tests.export.test_decoding import close
from tests.tolerance import PARITY

TAKEN = [("llama", "loop"), ("gpt2", "ponderlm"), ("llama", "ponderlm_top"), ("pythia", "nanbeige"), ("llama", "ouro")]


class Engine:
    """Keys and values of two texts, by text and layer."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.texts: list[int] = []
        """The text of each row of this step."""

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        out = torch.empty_like(q)
        for text in set(self.texts):
            rows = [i for i, other in enumerate(self.texts) if other == text]
            key = (text, module.layer_idx)
            new = (k[:, :, rows], v[:, :, rows])
            if before := self.kept.get(key):
                new = (torch.cat([before[0], new[0]], 2), torch.cat([before[1], new[1]], 2))
            self.kept[key] = new
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in new)
            read = torch.ones(len(rows), keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - len(rows))
            out[:, :, rows] = F.scaled_dot_product_attention(q[:, :, rows], keys, values, read, scale=scaling)
        return out.transpose(1, 2).reshape(q.shape[2], -1), None  # as vLLM gives it


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    ALL_ATTENTION_FUNCTIONS.register("vllm", made.attend)
    yield made
    del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]


def headless(method: str, fields: Any) -> PonderModel:
    """The class that an export of this method has, for a configuration as the engine prepares it."""
    fields._attn_implementation = "vllm"
    form = compose.decoding_class(method.removesuffix("_top"))
    return type("MegaponderModel", (PonderModel,), {"decoding": form})(fields).eval()


@pytest.mark.parametrize("family,method", TAKEN)
@torch.no_grad()
def test_an_engine_gets_the_same_rows(family: str, method: str, engine: Engine) -> None:
    changes: dict[str, Any] = {"second_head": True} | ({"head_size": 12} if method == "loop" else {})
    whole, fields = model(family, method, **changes), config(family, method, **changes)
    headless(method, fields)  # engines build one to look at first
    net = headless(method, fields)
    passes = whole.ponder.kv_passes()
    assert fields.num_hidden_layers == 2 * passes == len(net.attentions) and len(net.layers) == 2
    assert not any(isinstance(part, torch.nn.Linear) for part in net.method.modules())  # which vLLM packs
    state = {name.removeprefix("model."): x for name, x in whole.state_dict().items() if name != "lm_head.weight"}
    if net.second_head is not None:
        state["second_head.weight"] = whole.lm_head.weight
    net.embed_tokens.weight = torch.nn.Parameter(F.pad(net.embed_tokens.weight, (0, 0, 0, 3)))  # as vLLM pads tables
    state["embed_tokens.weight"] = F.pad(state["embed_tokens.weight"], (0, 0, 0, 3), value=7.0)
    net.load_state_dict(state)
    first, second = ids(1, 7), ids(1, 5, seed=2)
    steps = [([0] * 4, range(4)), ([0, 1, 0, 1], (4, 0, 5, 1)), ([1, 1, 1, 0], (2, 3, 4, 6))]
    out: dict[int, list[Tensor]] = {0: [], 1: []}
    for texts, positions in steps:
        engine.texts = texts
        tokens = torch.tensor([[(first, second)[t][0, p].item() for t, p in zip(texts, positions, strict=True)]])
        (rows,) = net(
            input_ids=tokens, position_ids=torch.tensor([list(positions)]), use_cache=False, return_dict=False
        )
        for text, row in zip(texts, rows[0], strict=True):
            out[text].append(row)
    for text, tokens in ((0, first), (1, second)):
        close(whole.lm_head(torch.stack(out[text]))[None], whole(tokens).logits)


@torch.no_grad()
def test_a_rank_may_have_some_of_the_heads(engine: Engine) -> None:
    """As tensor parallelism leaves it: what half of the heads add, which is what all add if the others add nothing."""
    whole, half = (headless("loop", config("llama", "loop")) for _ in range(2))
    half.load_state_dict(whole.state_dict())
    for one, other in zip(whole.layers, half.layers, strict=True):
        one.self_attn.o_proj.weight[:, 16:] = 0
        other.self_attn.o_proj.weight.data = other.self_attn.o_proj.weight[:, :16]
        for part in (other.self_attn.q_proj, other.self_attn.k_proj, other.self_attn.v_proj):
            part.weight.data = part.weight[: len(part.weight) // 2]
    rows = []
    for text, net in enumerate((whole, half)):
        engine.texts = [text] * 6
        rows.append(net(input_ids=ids(1, 6), position_ids=torch.arange(6)[None], return_dict=False)[0])
    close(*rows)


@torch.no_grad()
def test_it_is_one_graph(engine: Engine) -> None:
    """vLLM compiles it without leave to fall back on Python."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **_: Any) -> Any:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scaling)
        return out.transpose(1, 2).reshape(q.shape[2], -1), None

    ALL_ATTENTION_FUNCTIONS.register("vllm", attend)  # without a cache that dynamo would trace
    shape = {"num_hidden_layers": 1, "method_options": {"steps": 1}}
    net = headless("ponderlm", config("gpt2", "ponderlm", **shape))
    given = dict(input_ids=ids(1, 7), position_ids=torch.arange(7)[None], return_dict=False)
    compiled = torch.compile(net, backend="eager", fullgraph=True, dynamic=True)
    close(compiled(**given)[0], net(**given)[0])


@pytest.mark.parametrize("method", EVERY)
def test_what_it_takes(method: str, engine: Engine) -> None:
    """The methods whose tokens have one row in each pass; the others are refused with that reason."""
    fields = config("gpt2", method)
    if method in {"vanilla", "ponderlm", *(name for _, name in TAKEN)}:
        assert len(headless(method, fields).attentions) == fields.num_hidden_layers
    else:
        with pytest.raises(ValueError, match=f"method {method} does not have exactly one row"):
            headless(method, fields)


def test_refusals(engine: Engine) -> None:
    for changes, words in (
        ({"method_options": METHODS["ouro"] | {"kv_budget": 1}}, "method ouro does not have exactly one row"),
        ({"attention_window": 8}, "attention_window = 8"),
        ({"freqkv": {"capacity": 8, "sink": 1, "ratio": 0.5}}, "FreqKV compresses keys"),
        ({"moe": {"experts": 3, "top_k": 2}}, "mixtures of experts were not tried"),
        ({"rotary_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic rotary scaling"),
    ):
        with pytest.raises(ValueError, match=words):
            headless("ouro", config("llama", "ouro", **changes))
    with pytest.raises(ValueError, match=r"AutoModel: .* use AutoModelForCausalLM"):
        type("Plain", (PonderModel,), {"decoding": compose.decoding_class("loop")})(config("llama", "loop"))
    with pytest.raises(ValueError, match="export the model with --target vllm"):
        headless("ponderlm", config("llama", "ponderlm"))
    net, step = headless("ponderlm", config("gpt2", "ponderlm")), torch.zeros(1, 2, dtype=torch.long)
    net.embed_tokens.weight = torch.nn.Parameter(net.embed_tokens.weight[:31])  # half of the table, as on a rank of two
    with pytest.raises(ValueError, match=r"tensor parallelism: .* the plugin"):
        net(step, position_ids=step)
    net.layers[1] = torch.nn.Identity()
    with pytest.raises(ValueError, match="pipeline parallelism"):
        net(step, position_ids=step)


def test_a_folder_for_vllm(tmp_path: Path, engine: Engine) -> None:
    """It has a copy of the head for the passes; transformers runs it as the others, and it comes back."""
    net = checkpoints.make("llama", "ponderlm", tmp_path / "run")
    folder = tmp_path / "for-vllm"
    done = export(tmp_path / "run", folder, target="vllm")
    assert done.max_difference < PARITY and "vLLM" in str(done)
    assert done.parameters == sum(p.numel() for p in net.parameters())
    tensors, fields = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert torch.equal(tensors["second_head.weight"], tensors["lm_head.weight"]) and fields["second_head"] is True
    close(load_folder(folder)(ids(1, 5)).logits, net(ids(1, 5)).logits)
    assert import_hf(folder, tmp_path / "back").max_difference < PARITY
    given = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    given._attn_implementation = "vllm"
    built = AutoModel.from_config(given, trust_remote_code=True)  # the class that the engine finds
    assert {f"model.{name}" for name in built.state_dict()} >= {n for n in tensors if n.startswith("model.")}
    assert built.is_backend_compatible() and built.get_decoder() is built and built.tp_plan
    save_file(tensors | {"second_head.weight": tensors["lm_head.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"second_head\.weight differs from lm_head.weight"):
        import_hf(folder, tmp_path / "other")
    tied = checkpoints.make("gpt2", "ponderlm", tmp_path / "tied")
    assert tied.config.tie_word_embeddings
    cfg = checkpoints.run_config(tied, tmp_path / "tied")
    assert targets.with_second_head(cfg, {}) == ({}, {})
    plain = checkpoints.run_config(model("llama", "vanilla"), tmp_path / "plain")
    with pytest.raises(UserError, match="--target vllm: vLLM runs this model's own format"):
        targets.check(plain, "vllm")
    with pytest.raises(UserError, match="--target vllm: method adaponderlm does not have exactly one row"):
        targets.check(checkpoints.run_config(model("llama", "adaponderlm"), tmp_path / "ada"), "vllm")
