"""Exports of pondering checkpoints: equal logits, equal text, nothing published that differs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaponder.checkpoint.state import TrainState
from megaponder.errors import UserError
from megaponder.export import compose, configs, requirements, to_hf
from megaponder.export.from_hf import import_hf
from megaponder.export.to_hf import export
from megaponder.upcycle.record import Record, Source, of_checkpoint
from tests import forks
from tests.export import checkpoints
from tests.export.models import ids
from tests.layouts.cases import WHOLE
from tests.tolerance import PARITY, difference

CASES = [
    ("pythia", "pause", {"method_options": {"pauses": 2, "pause_token_id": 100}}),  # the pause token is a padding row
    ("llama", "ponderlm_top", {"tie_word_embeddings": True}),
    ("gpt2", "vanilla", {"embedding_scale": 2.0}),  # a scaled, tied table: no native format holds it
    ("gpt2", "ponderlm3", {"max_position_embeddings": 16}),
    ("llama", "adaponderlm", {}),
    ("pythia", "adaptive_cot", {}),
    ("llama", "parcae", {"qk_norm": "rotated"}),
    # few positions, so that few refinements are enough
    ("llama", "ponderlm2", {"max_position_embeddings": 16, "qk_norm": "head", "head_size": 12}),
    (
        "llama",
        "ponderlm",
        {
            "moe": {"experts": 5, "top_k": 2, "score": "sigmoid", "scale": 1.5, "shared_ffn": 12, "bias_rate": 0.01},
            "intermediate_size": 20,
        },
    ),
    (
        "llama",
        "ponderlm2",
        {
            "max_position_embeddings": 16,
            "moe": {"experts": 4, "top_k": 2, "score": "sigmoid", "bias_rate": 0.01, "routers": 3},
            "intermediate_size": 12,
        },
    ),
    ("llama", "loop", {"norm_placement": "stream", "qkv_bias": "qk", "rotary_pairs": "adjacent", "activation": "relu"}),
]
if WHOLE:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
    CASES += [
        ("gpt2", "loop", {"norm": "rmsnorm", "activation": "swiglu", "output_bias": False, "head_size": 6}),
        ("pythia", "loop", {"norm_placement": "sandwich"}),
        ("pythia", "vanilla", {"num_key_value_heads": 2}),
        ("pythia", "loop", {}),
        ("llama", "vanilla", {"moe": {"experts": 4, "top_k": 3, "renormalise": False}, "qk_norm": "all"}),
        ("pythia", "ponderlm", {"parallel_residual": False}),
        ("llama", "pause", {}),
        ("gpt2", "loop", {}),
        ("gpt2", "ponderlm_top", {"tie_word_embeddings": False}),
        ("llama", "ponderlm2", {"max_position_embeddings": 16}),
        ("llama", "vanilla", {"norm_placement": "sandwich", "qk_norm": "head"}),
        ("pythia", "vanilla", {"qk_norm": "head", "activation": "gelu_tanh", "qkv_bias": False, "mlp_bias": False}),
        ("llama", "pause", {"attention_window": 7, "rotary_scaling": yarn}),
        ("llama", "ponderlm2", {"max_position_embeddings": 16, "attention_window": 5}),
        ("pythia", "ponderlm3", {"max_position_embeddings": 16, "attention_window": 5, "rotary_scaling": yarn}),
        ("pythia", "adaponderlm", {"attention_window": 7}),
        ("llama", "adaptive_cot", {"attention_window": 7}),
        ("llama", "ponderlm", {"attention_window": 7, "norm_placement": "stream"}),
        ("pythia", "vanilla", {"norm_placement": "post", "norm_affine": False, "qk_norm": "head", "qkv_bias": "qk"}),
        ("llama", "ponderlm2", {"max_position_embeddings": 16, "norm_placement": "post", "qk_norm": "all"}),
        ("pythia", "adaponderlm", {"qk_norm": "rotated", "rotary_pairs": "adjacent", "activation": "relu2"}),
    ]


@pytest.mark.parametrize("family,method,changes", CASES)
def test_pondering_export_round_trip(family: str, method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    length = changes.get("max_position_embeddings", 40)
    source = Source("math", "/home/me/runs/math/checkpoints/step_00000009", "ab")
    record = Record(source, (source,), 2, "contiguous", 1, "average", 0.0, 40) if "moe" in changes else None
    made = TrainState(upcycled=record.plain() if record else {})
    net = checkpoints.make(family, method, tmp_path / "run", {"sequence_length": length}, made, **changes)
    done = export(tmp_path / "run", tmp_path / "hf")
    assert not done.native and done.max_difference < PARITY
    assert done.files == tuple(sorted(p.name for p in (tmp_path / "hf").iterdir()))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    own = {k: v for k, v in net.state_dict().items() if k in tensors}
    assert tensors.keys() == net.state_dict().keys() - ({"lm_head.weight"} if net.config.tie_word_embeddings else set())
    assert all(torch.equal(tensors[k], v) for k, v in own.items())
    assert tensors["model.embed_tokens.weight"].shape[0] == net.config.vocab_size  # padding rows are gone
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for name in configs.PONDER_FIELDS.values():
        if hasattr(net.config, name):  # else a feature that `models` leaves out
            assert config[name] == getattr(net.config, name), name
    assert config["embedding_scale"] == net.config.embedding_scale

    again = import_hf(tmp_path / "hf", tmp_path / "again")
    assert again.max_difference < PARITY
    assert again.config.ponder.method == net.config.method
    if record is not None:  # of the machine that made it, no more than the run
        told = dataclasses.replace(source, path="math/checkpoints/step_00000009")
        record = dataclasses.replace(record, base=told, disciplines=(told,))
    assert of_checkpoint(again.checkpoint) == record
    export(tmp_path / "again", tmp_path / "hf2")
    assert (tmp_path / "hf2" / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()


FRESH = """
import os, sys, torch
for name in [name for name in sys.modules if name.split(".")[0] in ("megaponder", "megatron", "tests")]:
    del sys.modules[name]  # what the process that this one is forked from has
sys.modules["megaponder"] = None  # any import of this project fails
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, dynamic_module_utils
for words in (["a-model.v1", "saved", "out.pt"], ["saved", "again", "again.pt"]):
    child = os.fork()  # the second knows as little of the first as if it were started alone
    if not child:
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{words} failed")
    os.path.exists("gone") or os.rename("a-model.v1", "gone")
else:
    sys.exit()
sys.argv[1:] = words
dynamic_module_utils.HF_MODULES_CACHE = f"modules-{words[0]}"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert not any(name.startswith("megaponder.") for name in sys.modules)
ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
common = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
text = model.generate(ids, **common)
assert torch.equal(text, model.generate(ids, use_cache=False, **common))
model.save_pretrained(sys.argv[2])
again = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
assert torch.equal(again(ids).logits, model(ids).logits)
torch.save([model(ids).logits.detach(), text], sys.argv[3])
"""


def in_a_fresh_process(script: str, folder: Path) -> None:
    """Run a script that must not need this project."""
    (folder / "fresh.py").write_text(script)
    env = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([forks.python(), "fresh.py"], cwd=folder, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_folder_stands_on_its_own(tmp_path: Path) -> None:
    """In other processes, through AutoModel and trust_remote_code, without this project; saved and loaded again."""
    net = checkpoints.make("pythia", "ponderlm", tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "a-model.v1")
    code_files = {name for name in done.files if name.endswith(".py")}
    assert code_files == set(compose.files("ponderlm")) and "method_ponderlm.py" in code_files
    in_a_fresh_process(FRESH, tmp_path)
    assert {p.name for p in (tmp_path / "saved").glob("*.py")} == code_files
    for name in code_files:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "gone" / name).read_bytes()
    for first, second in zip(torch.load(tmp_path / "out.pt"), torch.load(tmp_path / "again.pt"), strict=True):
        assert torch.equal(first, second)
    logits, text = torch.load(tmp_path / "out.pt")
    batch = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    with torch.no_grad():
        assert difference(logits, net(batch).logits) < PARITY
        mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
        greedy = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        want = net.generate(batch, attention_mask=mask, **greedy)
    assert torch.equal(text, want)


def test_scale_of_an_untied_vanilla_model_is_folded(tmp_path: Path) -> None:
    net = checkpoints.make("pythia", "vanilla", tmp_path / "run", embedding_scale=3.0)
    assert export(tmp_path / "run", tmp_path / "hf").native
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(tensors["gpt_neox.embed_in.weight"], net.model.embed_tokens.weight * 3.0)


def test_bfloat16(tmp_path: Path) -> None:
    net = checkpoints.make("llama", "loop", tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "hf", dtype="bfloat16")
    assert done.max_difference < PARITY  # of the rounded weights
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    logits = to_hf_model(tmp_path / "hf")(ids(1, 9)).logits
    assert logits.dtype == torch.float32
    assert (logits - net(ids(1, 9)).logits).abs().max() < 0.1 * logits.abs().max()


def to_hf_model(path: Path) -> torch.nn.Module:
    from megaponder.export.load import load_folder

    return load_folder(path, dtype=torch.bfloat16)


def test_a_folder_that_differs_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.make("llama", "loop", tmp_path / "run")
    honest = to_hf.names.to_plain

    def swapped(*args: Any) -> dict[str, torch.Tensor]:
        plain = honest(*args)
        k, v = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "kv")
        return plain | {k: plain[v], v: plain[k]}

    monkeypatch.setattr(to_hf.names, "to_plain", swapped)
    with pytest.raises(UserError, match=r"hf: logits in one forward differ .* nothing was published"):
        export(tmp_path / "run", tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_cache_that_differs_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.make("llama", "loop", tmp_path / "run")
    files = compose.files("loop")
    broken = files["backbone.py"].replace("index * len(self.layers) + i", "i")  # all passes share one cache
    assert broken != files["backbone.py"]
    monkeypatch.setattr(compose, "files", lambda method: files | {"backbone.py": broken})
    with pytest.raises(UserError, match="logits with its cache differ"):
        export(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_existing_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.make("gpt2", "loop", tmp_path / "run")
    out = tmp_path / "hf"
    out.mkdir()
    (out / "diary.txt").write_text("not a model")
    with pytest.raises(UserError, match="hf already exists; choose another folder, or say --force"):
        export(tmp_path / "run", out)
    with pytest.raises(UserError, match=r"no config\.json, so it is not a model folder"):
        export(tmp_path / "run", out, force=True)
    (out / "config.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(to_hf.reference, "compare", lambda *a, **k: (_ for _ in ()).throw(UserError("differs")))
        with pytest.raises(UserError, match="differs"):
            export(tmp_path / "run", out, force=True)
    assert (out / "diary.txt").exists()  # a failed export leaves the old folder as it was
    export(tmp_path / "run", out, force=True)
    assert not (out / "diary.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]


def test_a_link_to_itself_is_a_sentence(tmp_path: Path) -> None:
    checkpoints.make("gpt2", "loop", tmp_path / "run")
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(UserError, match="link is a link to link, which does not exist"):
        export(tmp_path / "run", tmp_path / "link")


def test_every_model_field_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    configs.check_fields_known()
    newer = dataclasses.make_dataclass("ModelConfig", [("window", int, 0)], bases=(configs.ModelConfig,))
    monkeypatch.setattr(configs, "ModelConfig", newer)
    with pytest.raises(UserError, match=r"model\.window cannot be expressed in the exported configuration"):
        configs.check_fields_known()


def test_unknown_parameters_stop_the_export(tmp_path: Path) -> None:
    net = checkpoints.models.model("llama", "loop")
    cfg = checkpoints.run_config(net, tmp_path)
    with pytest.raises(UserError, match=r"decoder\.layers\.0\.mixer\.weight cannot be exported"):
        to_hf.names.to_plain({"decoder.layers.0.mixer.weight": torch.ones(2)}, cfg.model)


def test_transformers_is_named_where_it_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "megaponder\[export\]"'):
        export(tmp_path, tmp_path / "hf")


def test_a_methods_parameters_keep_their_places() -> None:
    net = checkpoints.models.model("llama", "loop")
    cfg = checkpoints.run_config(net, Path("run"))
    plain = dict(net.state_dict())
    own = {"method_entry.inject.weight": torch.ones(2), "method_layers.1.blend.bias": torch.ones(1)}
    stage = to_hf.names.to_stage(plain | own | {"method.gate.weight": torch.ones(3)}, cfg.model)
    assert {*own, "method_modules.gate.weight"} == {name for name in stage if name.startswith("method_")}
    back = to_hf.names.to_plain(stage, cfg.model)
    assert back.keys() == {*plain, *own, "method.gate.weight"}
