"""Hugging Face -> checkpoint -> Hugging Face, through the real engine: logits, weights and configuration stay."""

from __future__ import annotations

import copy
import gc
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from megaponder.checkpoint.weights import load_weights
from megaponder.export.formats import FORMATS
from megaponder.export.from_hf import import_hf
from megaponder.export.hf_fields import model_config
from megaponder.export.load import load_folder
from megaponder.export.requirements import TESTED
from megaponder.export.to_hf import export
from tests.export import hf_models
from tests.layouts.cases import WHOLE
from tests.tolerance import PARITY

ROOT = Path(__file__).parents[2]


def same_logits(a: torch.nn.Module, b: torch.nn.Module, vocab: int) -> None:
    ids = torch.randint(vocab, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want, got = a(ids).logits, b(ids).logits
    torch.testing.assert_close(got, want, rtol=0, atol=PARITY * float(want.abs().max()))


def same_config(theirs: PretrainedConfig, ours: PretrainedConfig, but: Sequence[str] = ()) -> None:
    """Every field that transformers has for this model_type; exports are without dropout, and name the MLP's width."""
    before, after = theirs.to_dict(), ours.to_dict()
    for config in (before, after):
        config.pop("_attn_implementation_autoset", None)
        if config.get("use_sliding_window") is False:  # transformers 4.51 keeps a size without effect
            config.pop("sliding_window")
        config["n_inner"] = config.get("n_inner") or 4 * config.get("n_embd", 0)
    for name in before.keys() - {"_name_or_path", "architectures", *but}:
        if "pdrop" not in name and "dropout" not in name:
            assert after[name] == before[name], name


@pytest.mark.parametrize("case", [*hf_models.CASES, *(hf_models.MORE if WHOLE else ())])
def test_round_trip(case: str, tmp_path: Path) -> None:
    round_trip(hf_models.write(case, tmp_path / "hf"), tmp_path)


def round_trip(theirs: Any, tmp_path: Path) -> None:
    """From the folder `hf` of `tmp_path`, which has the model `theirs`, to a run, and back."""
    done = import_hf(tmp_path / "hf", tmp_path / "run")
    assert done.max_difference < PARITY
    assert done.checkpoint == tmp_path / "run" / "checkpoints" / "step_00000000"
    cfg, state = load_weights(tmp_path / "run")
    assert state["embedding.word_embeddings.weight"].shape[0] % 128 == 0  # padded
    assert ("output_layer.weight" in state) is not bool(cfg.model.tie_embeddings)
    del state
    gc.collect()  # the import's engine, whose parts refer to each other

    back = export(tmp_path / "run", tmp_path / "back")
    assert back.native and back.max_difference < PARITY
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(ours) is type(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        unused = 2 if type(theirs).__name__.startswith("OPT") and "embed_positions" in name else 0
        assert torch.equal(ours.state_dict()[name][unused:], tensor[unused:]), name
    same_logits(theirs, ours, theirs.config.vocab_size)
    same_config(theirs.config, ours.config)
    assert not (tmp_path / "back" / "modeling_megaponder.py").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_folder_comes_in_and_goes_out(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = hf_models.write("llama_gqa", tmp_path / "whole")
    for parameter in theirs.parameters():
        parameter.data = parameter.to(dtype).float()  # the import computes in FP32, with rounded weights
    copy.deepcopy(theirs).to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert import_hf(tmp_path / "hf", tmp_path / "run").max_difference < PARITY
    export(tmp_path / "run", tmp_path / "back", shard_bytes=20_000)
    files = sorted(p.name for p in (tmp_path / "back").glob("*.safetensors"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    back = {name: tensor for file in files for name, tensor in load_file(tmp_path / "back" / file).items()}
    for name, tensor in theirs.state_dict().items():
        assert back[name].dtype == dtype and torch.equal(back[name].float(), tensor), name
    same_logits(theirs, load_folder(tmp_path / "back"), 77)


def test_the_page_names_every_format_and_every_case() -> None:
    """With the release that runs this, every family goes in and out: here, and by its default configuration."""
    page = (ROOT / "docs" / "families.md").read_text()
    head = next(row.split("|") for row in page.splitlines() if row.startswith("| model_type"))
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == [*FORMATS]
    assert [row[2].strip(" `") for row in rows] == [form.family for form in FORMATS.values()]
    cases = hf_models.CASES | hf_models.MORE
    for row in rows:
        named = re.findall(r"`(\w+)`", row[5])
        assert {cases[name][1]().model_type for name in named} == {row[1].strip(" `")}
        assert set(named) & hf_models.CASES.keys(), "none of its cases runs with both releases"
        cases = {name: case for name, case in cases.items() if name not in named}
    assert not cases
    releases = [name.strip() for name in head[6:-1]]
    assert len(releases) == len(TESTED) and all(
        f"{name}.".startswith(f"{tested}.") for name, tested in zip(releases, TESTED, strict=True)
    )
    here = ".".join(transformers.__version__.split(".")[:2])
    column = head.index(next(cell for cell in head[6:-1] if f"{cell.strip()}.".startswith(f"{here}.")))
    assert {row[column].strip() for row in rows} == {"in, out"}


def test_both_releases_run_these_tests() -> None:
    """`make test` runs them a second time, with the release that the page names first."""
    makefile = (ROOT / "Makefile").read_text()
    page = (ROOT / "docs" / "families.md").read_text()
    both = re.search(r"^BOTH := (.+)$", makefile, re.MULTILINE)
    assert both and {"tests/export/test_round_trip.py", "tests/export/test_defaults.py"} <= set(both[1].split())
    assert re.search(r"^\tPYTHONPATH=\$\(OLDEST\) .*pytest .*\$\(BOTH\)$", makefile, re.MULTILINE)
    oldest = re.search(r"transformers==([\d.]+)", makefile)
    assert oldest and f"| {oldest[1]} |" in page


@pytest.mark.parametrize("kind", FORMATS)
def test_the_defaults_are_those_of_transformers(kind: str) -> None:
    """A file that leaves everything out means what transformers makes of it."""
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    said, unsaid = model_config(theirs, kind), model_config({"model_type": kind}, kind)
    for section in (said, unsaid):
        section.head_size = section.head_size or section.hidden_size // section.num_heads
    assert said == unsaid
