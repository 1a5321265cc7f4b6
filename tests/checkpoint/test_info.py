"""inspect_checkpoint on a checkpoint that PyTorch alone has written: no process group, no megatron-core."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megaponder.checkpoint import choose, folder, inspect_checkpoint, load_weights, manifest
from megaponder.checkpoint.damage import damage
from megaponder.checkpoint.state import CONFIG, Contents, TrainState, save_state
from megaponder.config.load import dump
from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.errors import UserError


def build(root: Path) -> Path:
    path = folder.create(root, 5)
    tensors = {
        "embedding.word_embeddings.weight": torch.randn(96, 8),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": torch.randn(8),
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.randn(24, 8),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": torch.randn(8),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(64, 8),
        "final_norm.weight": torch.randn(8),
        "output_layer.weight": torch.randn(96, 8),
        "method_modules.gate.weight": torch.randn(1, 8),
        "optimizer.state.exp_avg.final_norm.weight": torch.randn(8),
        "random.torch": torch.zeros(1, 16, dtype=torch.uint8),
    }
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(str(path)), no_dist=True)
    model = ModelConfig(family="llama", num_layers=1, hidden_size=8, num_heads=2, vocab_size=90)
    dump(resolve(RunConfig(model=model)), path / CONFIG)
    for name in ("common.pt", "metadata.json"):  # megatron-core's, which nothing here reads
        (path / name).write_text(name)
    save_state(path, TrainState(5, 20, 320), Contents(False, {"tensor": 2, "pipeline": 1, "data": 4}))
    return folder.publish(path, root, 5)


def test_info(tmp_path):
    info = inspect_checkpoint(build(tmp_path))
    assert (info.step, info.sequences, info.tokens, info.damage) == (5, 20, 320, None)
    assert info.layout == {"tensor": 2, "pipeline": 1, "data": 4} and info.dtype == "float32"
    assert info.parameters == {
        "embedding": 90 * 8, "attention": 24 * 8, "mlp": 64 * 8, "norms": 3 * 8, "head": 90 * 8, "method": 8,
    }  # fmt: skip
    assert info.total == sum(info.parameters.values()) and "1 layers, hidden 8" in info.model
    assert info.bytes > 4 * info.total


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (CONFIG, "", "model.family = None"),
        (
            CONFIG,
            "model: {family: llama, num_layers: 1, hidden_size: 8, num_heads: 3, vocab_size: 90}",
            "it must divide",
        ),
        ("__0_0.distcp", "junk", ".metadata expects "),
        ("__0_0.distcp", "junk" * 10_000, "cannot be loaded (rank 0: UnpicklingError"),
    ],
)
def test_what_was_changed_with_its_manifest_is_a_sentence(tmp_path, name, content, words):
    path = build(tmp_path)
    (path / name).write_text(content)
    manifest.seal(path)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        load_weights(path)
    assert str(path) in str(caught.value)


def hide_chunks(index: Metadata) -> None:
    index.state_dict_metadata["final_norm.weight"].chunks.clear()


def lose_a_place(index: Metadata) -> None:
    del index.storage_data[next(i for i in index.storage_data if i.fqn == "final_norm.weight")]


def grow(index: Metadata) -> None:
    index.state_dict_metadata["final_norm.weight"].size = torch.Size([10**9])


def forget_the_size(index: Metadata) -> None:
    index.state_dict_metadata["final_norm.weight"].size = "abc"


@pytest.mark.parametrize("harm", [hide_chunks, lose_a_place, grow, forget_the_size])
def test_an_index_that_does_not_say_where_all_of_a_tensor_is(tmp_path, harm):
    """Loaded, the rest of the tensor would be whatever memory holds."""
    path = build(tmp_path)
    index = pickle.loads((path / ".metadata").read_bytes())
    harm(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    manifest.seal(path)
    words = "its .metadata does not cover all of final_norm.weight"
    assert damage(path) == words
    for read in (inspect_checkpoint, load_weights):
        with pytest.raises(UserError, match=re.escape(words)):
            read(path)


def test_a_damaged_one_is_described_and_says_so(tmp_path):
    path = build(tmp_path)
    (path / "state.json").write_bytes((path / "state.json").read_bytes() + b" ")
    assert "state.json has" in (inspect_checkpoint(path).damage or "")
    (path / CONFIG).unlink()
    with pytest.raises(UserError, match=r"cannot be read \(config\.yaml is missing"):
        inspect_checkpoint(path)
    with pytest.raises(UserError, match="is not a checkpoint"):
        inspect_checkpoint(tmp_path)


def test_weights_come_under_the_models_names(tmp_path):
    path = build(tmp_path)
    cfg, weights = load_weights(tmp_path)
    assert cfg.model.vocab_size == 90 and load_weights(path)[1].keys() == weights.keys()
    assert (
        "decoder.layers.0.input_layernorm.weight" in weights and "decoder.layers.0.pre_mlp_layernorm.weight" in weights
    )
    assert not any(n.startswith(("optimizer", "random")) for n in weights)


def test_an_export_is_told_from_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is a Hugging Face folder, neither a checkpoint nor a run"):
        choose.named(tmp_path)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, megaponder.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
