"""Folders of the public PonderLM and PonderLM-2 code: import, one training step, export, import again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megaponder.cli.main import main
from megaponder.config.load import load_config
from megaponder.errors import UserError
from megaponder.export.from_hf import import_hf
from megaponder.export.import_config import run_config
from megaponder.export.load import load_folder
from megaponder.export.to_hf import export
from tests.layouts import official
from tests.layouts.cases import WHOLE
from tests.tolerance import PARITY, RTOL, difference

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 96, "max_position_embeddings": 64, "max_sequence_length": 2048, "rms_norm_eps": 1e-5,
    "eos_token_id": 0, "pad_token_id": 1, "pretraining_tp": 1,
}  # fmt: skip
NEOX = {
    "model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64, "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5, "rope_theta": 10000, "rotary_emb_base": 10000, "eos_token_id": 0,
    "classifier_dropout": 0.1,
}  # fmt: skip
V1 = {"ponderinglm": True, "pondering_steps": 3, "mutiply_pondering_steps": False, "scale_embeds": True}
V2 = {
    "recurrent_model": True, "num_latent_thoughts": 3, "num_jacobi_iterations": 3, "random_jacobi_iterations": False,
    "interpolation": False, "interpolation_use_topk": False, "scale_embeds": True,
}  # fmt: skip
FOLDERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "neox_ponderlm1_S3": (NEOX | V1 | {"checkpoint_num_layers": 0}, None),
    "llama_v2repo_ponderlm_S3": (LLAMA | V2 | {"interpolation": True}, "ponderlm"),
    "llama_ponderlm2_K2_J2": (LLAMA | V2 | {"num_latent_thoughts": 2, "num_jacobi_iterations": 2}, "ponderlm2"),
    "neox_ponderlm2_K1_J2": (NEOX | V2 | {"num_latent_thoughts": 1, "num_jacobi_iterations": 2}, "ponderlm2"),
    "llama_loop_R3": (LLAMA | V2, "loop"),
    "llama_pause_M2": (LLAMA | V2 | {"num_latent_thoughts": 2, "pause_token_id": 93}, "pause"),
}


def write(folder: Path, fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def training_step(checkpoint: Path, ids: torch.Tensor) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Logits, loss and gradients of a run that starts from a checkpoint."""
    from megaponder.checkpoint import restore
    from megaponder.data.batch import MicroBatch
    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    cfg = load_config(checkpoint / "config.yaml")
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    restore.load(checkpoint, engine.stage)
    mask = torch.ones(ids.shape)
    mask[:, -1] = 0  # the official loss shifts the labels, so the last position has none
    logits = engine.logits(ids)
    engine.zero_grad()
    out = engine.forward_backward([MicroBatch(ids, ids.roll(-1, dims=1), mask)], 0, train=True)
    gradients = {name: p.main_grad for name, p in engine.stage.named_parameters()}
    groups.shutdown()
    return logits, out.loss, gradients


@pytest.mark.parametrize("name", FOLDERS if WHOLE else ["neox_ponderlm1_S3", "neox_ponderlm2_K1_J2", "llama_pause_M2"])
def test_logits_and_a_training_step_are_the_official_codes(tmp_path: Path, name: str) -> None:
    (fields, method), fixture = FOLDERS[name], official.load(name)
    weights, gradients = ({k[2:]: v for k, v in fixture.items() if k[:2] == part} for part in ("w/", "g/"))
    assert ("adapter.weight" in weights) == (name == "neox_ponderlm1_S3")
    done = import_hf(write(tmp_path / "hf", fields, weights), tmp_path / "run", method=method)
    assert done.config.data.loss_mask == "ignore_eod_target"
    logits, loss, got = training_step(done.checkpoint, fixture["ids"])
    assert difference(logits, fixture["logits"]) < PARITY
    assert loss == pytest.approx(float(fixture["loss"]), rel=1e-5)
    convert = official.llama_to_stage if "llama" in name else official.neox_to_stage
    want = convert(gradients, 3, 4)
    assert want.keys() == got.keys()
    for key, gradient in want.items():
        assert difference(got[key][: len(gradient)], gradient) < RTOL, key
    if "ponderlm_S3" in name:
        export(done.checkpoint, tmp_path / "back")
        with torch.no_grad():
            theirs = load_folder(tmp_path / "back")(fixture["ids"]).logits
        assert difference(theirs, fixture["logits"]) < PARITY
        again = import_hf(tmp_path / "back", tmp_path / "again").config
        assert again.ponder.options["accumulate"] is False and again.ponder.options["steps"] == 3


def config(fields: dict[str, Any], method: str | None = None, ignore: tuple[str, ...] = ()) -> Any:
    return run_config(fields, Path("hf"), Path("run"), frozenset(ignore), method)


@pytest.mark.parametrize(
    "fields,method,want,scale",
    [
        (LLAMA | V1 | {"mutiply_pondering_steps": True, "softmax_temperature": 1.0}, None,
         ("ponderlm", {"steps": 3, "multiply_by_steps": True}), "sqrt_h"),
        (NEOX | V1 | {"scale_embeds": False}, None, ("ponderlm", {"steps": 3, "multiply_by_steps": False}), "none"),
        ({"model_type": "gpt2", "vocab_size": 96} | V1 | {"recurrent_model": True}, None,
         ("ponderlm", {"steps": 3, "multiply_by_steps": False}), "sqrt_h"),
        (LLAMA | V1 | {"ponderinglm": False}, None, ("vanilla", {}), "none"),
        (LLAMA | V2 | {"random_jacobi_iterations": True}, "ponderlm2",
         ("ponderlm2", {"latents": 3, "jacobi": 3, "jacobi_from": 2, "jacobi_to": 3}), "sqrt_2.5h"),
        (NEOX | V2 | {"random_jacobi_iterations": True, "interpolation": True, "interpolation_use_topk": True,
                      "interpolation_topk": 7, "recurrent_model": False}, "ponderlm2",
         ("ponderlm2", {"latents": 3, "jacobi": 3, "jacobi_from": 2, "jacobi_to": 4, "softmax_feedback": True,
                        "topk": 7}), "sqrt_h"),
        (LLAMA | V2 | {"interpolation": True, "residual_interpolated_embeds": True, "scale_embeds": False}, "ponderlm",
         ("ponderlm", {"steps": 3, "accumulate": True}), "none"),
        (NEOX | V2 | {"interpolation": True}, "ponderlm", ("ponderlm", {"steps": 3, "feedback": "hidden"}), "none"),
        (NEOX | V2 | {"scale_embeds": False}, "loop", ("loop", {"extra_passes": 3}), "sqrt_2.5h"),
        (NEOX | V2 | {"scale_embeds": False, "vocab_size": 50304, "auto_map": {"AutoConfig": "x.Y"}}, "pause",
         ("pause", {"pauses": 3, "pause_token_id": 50288}), "none"),
        (LLAMA | V2 | {"recurrent_model": False, "num_latent_thoughts": 0}, None, ("vanilla", {}), "none"),
    ],
)  # fmt: skip
def test_fields_become_options(fields: dict[str, Any], method: str | None, want: Any, scale: str) -> None:
    cfg = config(fields, method)
    assert (cfg.ponder.method, cfg.ponder.options) == want and cfg.model.embedding_scale == scale


KIND = "config.json: this is a pondering model of"


@pytest.mark.parametrize(
    "fields,method,ignore,words",
    [
        (LLAMA | V2, None, (), f"{KIND} PonderLM-2: its config.json does not say by which .* ponderlm2"),
        (LLAMA, "loop", (), "--method loop: this folder says itself how it ponders"),
        (LLAMA | V1, "ponderlm", (), "--method ponderlm: this folder says itself how it ponders"),
        (LLAMA | V1, None, ("pondering_steps",), f"{KIND} PonderLM, and pondering_steps says what it computes, so"),
        (LLAMA | V2, "loop", ("interpolation",), f"{KIND} PonderLM-2, and interpolation says"),
        (LLAMA | V1 | {"softmax_temperature": 0.5}, None, (), f"{KIND} PonderLM: softmax_temperature = 0.5 changes"),
        (LLAMA | V1 | {"pondering_steps": "3"}, None, (), "pondering_steps = '3': it must be an integer"),
        (LLAMA | V1 | {"pondering_steps": 0}, None, (), r"ponder.options.steps = 0: it must be at least 1"),
        (LLAMA | V1 | {"scale_embeds": 1}, None, (), "scale_embeds = 1: it must be true or false"),
        ({"model_type": "gpt2", "vocab_size": 96} | V1, None, (), "its GPT-2 ponders only where recurrent_model"),
        ({"model_type": "gpt2"} | V2, "loop", (), "its code has no model_type 'gpt2'"),
        (LLAMA | V2 | {"recurrent_model": False}, "loop", (), "without recurrent_model it does not run loop"),
        (LLAMA | V2 | {"hidden_layer_num": 2}, "ponderlm", (), "hidden_layer_num = 2 changes what it computes"),
        (LLAMA | V2, "pause", (), "pause_token_id = 50288: it must be an id below vocab_size"),
        (LLAMA | {"logit_scale": 0.5}, None, ("logit_scale",), "--ignore logit_scale: only fields that are known to"),
    ],
)  # fmt: skip
def test_what_would_change_the_computation_is_refused(
    fields: dict[str, Any], method: str | None, ignore: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        config(fields, method, ignore)


def test_a_public_folder_is_never_taken_for_a_vanilla_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixture = official.load("neox_ponderlm1_S3")
    folder = write(tmp_path / "hf", NEOX | V1, {k[2:]: v for k, v in fixture.items() if k[:2] == "w/"})
    with pytest.raises(UserError, match="pondering model of PonderLM, which transformers would run as a vanilla one"):
        load_folder(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    assert "pytorch_model.bin is pickled, and unpickling runs code; convert it" in capsys.readouterr().err
