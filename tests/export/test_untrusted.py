"""Folders from elsewhere: only compared bytes run, nothing outside the folder is read, and nothing is fetched."""

from __future__ import annotations

import importlib._bootstrap_external as external
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaponder import files
from megaponder.errors import UserError
from megaponder.export import code
from megaponder.export.from_hf import import_hf
from megaponder.export.load import load_folder
from megaponder.export.to_hf import export
from megaponder.inference.generate import generate
from tests.export import checkpoints, hf_models

FILE = "modeling_megaponder.py"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untrusted")
    data = {"tokenizer": "bytes", "eod_id": 256}
    checkpoints.make("pythia", "ponderlm", folder / "run", data=data, vocab_size=257)
    export(folder / "run", folder / "hf")
    return folder / "hf"


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "hf"))


def uses(folder: Path) -> list[Any]:
    """Every command that reads such a folder."""
    return [
        lambda: generate(folder, ["a"], max_new_tokens=1, temperature=0.0),
        lambda: import_hf(folder, folder.parent / "again", force=True),
    ]


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_only_the_text_that_was_compared_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiled file beside it, a copy in transformers' folder of modules, a module of its name that was imported."""
    evil = (folder / FILE).read_text() + "\nprint('POISONED')\n"
    source = folder / FILE
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir()
    compiled = compile(evil, str(source), "exec")
    digest = importlib.util.source_hash(source.read_bytes())
    cached.write_bytes(external._code_to_hash_pyc(compiled, digest, checked=False))  # type: ignore[attr-defined]
    modules = folder.parent / "modules"
    copy = modules / "transformers_modules" / "hf"
    copy.mkdir(parents=True)
    (copy / FILE).write_text(evil)
    monkeypatch.setenv("HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(folder))
    for name in (f"megaponder_export_{abs(hash(source.resolve())):x}", "modeling_megaponder"):
        monkeypatch.setitem(sys.modules, name, type(sys)("planted"))
    for use in uses(folder):
        use()
    assert "POISONED" not in capsys.readouterr().out


def test_a_file_that_changes_after_the_comparison_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, read = files.read_bounded, []

    def swapping(path: Path, most: int) -> bytes:
        content = honest(path, most)
        if Path(path).name == FILE:
            read.append(path)
            Path(path).write_text("raise SystemExit('the changed file runs')")
        return content

    monkeypatch.setattr(files, "read_bounded", swapping)
    load_folder(folder)
    assert len(read) == 1


def test_an_export_may_be_of_several_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = code.composed("ponderlm")
    ours["back.py"] = ours.pop(FILE)
    ours["front.py"] = b"from .back import MegaponderForCausalLM\nfrom . import beside\n"
    ours["beside.py"] = b"from . import front\n"  # in a circle
    monkeypatch.setattr(code, "composed", lambda method: ours)
    for name, content in ours.items():
        (folder / name).write_bytes(content)
    (folder / FILE).write_text("raise SystemExit('a file that nobody needs')")
    edit(folder, auto_map={"AutoModelForCausalLM": "front.MegaponderForCausalLM"})
    model = load_folder(folder)
    assert type(model).__module__.endswith(".back") and sys.modules[type(model).__module__].__name__ != "back"
    for name in ours:
        (folder / name).write_bytes(ours[name] + b"\n")
        with pytest.raises(UserError, match=rf"{name} is not a modelling file of this version"):
            load_folder(folder)
        (folder / name).write_bytes(ours[name])
    (folder / "beside.py").unlink()
    with pytest.raises(UserError, match=r"beside\.py is missing"):
        load_folder(folder)


@pytest.mark.parametrize(
    "reference", ["org/repo--modeling.Model", "..evil.Model", "a/b.Model", "os.path.join", "modeling", None, ["a.B"]]
)
def test_code_of_another_place_is_refused(folder: Path, reference: Any) -> None:
    edit(folder, auto_map={"AutoModelForCausalLM": reference})
    for trust in (False, True):
        with pytest.raises(UserError, match="does not name a class of a file in this folder"):
            load_folder(folder, trust_remote_code=trust)


@pytest.mark.parametrize("kind", ["ours", "llama_gqa"])
def test_nothing_that_a_config_names_is_fetched(
    kind: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, adapters, base models, code of tokenizers and of `generate`: no socket is opened, and nothing runs."""
    path = tmp_path / "hf"
    if kind == "ours":
        shutil.copytree(exported, path)
    else:
        hf_models.write(kind, path)
    want = load_folder(path)
    edit(
        path, attn_implementation="org/kernel", _attn_implementation="org/kernel", experts_implementation="org/kernel",
        _attn_implementation_internal="org/kernel", kernel_config={"RMSNorm": "org/kernel:Norm"}, use_kernels=True,
        _name_or_path="org/other", base_model_name_or_path="org/base", fusion_config={"x": True},
    )  # fmt: skip
    adapter = {"base_model_name_or_path": "org/base", "peft_type": "LORA", "auto_mapping": None}
    (path / "adapter_config.json").write_text(json.dumps(adapter))
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text("raise SystemExit('the code of generate runs')")
    (path / "generation_config.json").write_text(json.dumps({"cache_implementation": "org/x", "num_beams": 10**6}))
    words = {"auto_map": {"AutoTokenizer": [None, "tok.Tok"]}, "tokenizer_class": "org/tok--tok.Tok"}
    (path / "tokenizer_config.json").write_text(json.dumps(words))
    (path / "tok.py").write_text("raise SystemExit('the code of the tokenizer runs')")

    def connect(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is fetched")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    model = load_folder(path)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, want(ids).logits)
    assert model.config._attn_implementation in ("sdpa", "eager")
    if kind == "ours":
        generate(path, ["a"], max_new_tokens=1, temperature=0.0)


def test_a_dtype_that_does_not_exist_changes_nothing(folder: Path) -> None:
    """The caller says which numbers a model computes in."""
    edit(folder, dtype="bar", torch_dtype="foo")
    assert uses(folder)[0]()


def secret(folder: Path) -> Path:
    """Files of the same content outside the folder."""
    return Path(shutil.copytree(folder, folder.parent / "elsewhere" / "deep"))


@pytest.mark.parametrize("name", ["config.json", FILE, "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_links_do_not_leave_the_folder(folder: Path, name: str) -> None:
    other = secret(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(os.path.relpath(other / name, folder))
    for use in uses(folder):
        with pytest.raises(UserError, match=rf"{name} is a link to .*/elsewhere/deep/{name}, outside its folder"):
            use()
    (folder / name).unlink()
    shutil.copy(other / name, folder / f"own-{name}")
    (folder / name).symlink_to(f"own-{name}")
    uses(folder)[0]()  # a link within the folder is fine


def test_shards_do_not_leave_the_folder(folder: Path) -> None:
    other, tensors = secret(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("../elsewhere/deep/model.safetensors", str(other / "model.safetensors"), "..", "", "a\0b", "sub/x"):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
        for use in uses(folder):
            with pytest.raises(UserError, match=r"is not a file of this folder|sub/x"):
                use()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")}))
    uses(folder)[0]()
    index.unlink()
    index.symlink_to(other / "index.json")
    (other / "index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")}))
    with pytest.raises(UserError, match="outside its folder"):
        uses(folder)[0]()


def test_a_snapshot_of_the_hugging_face_cache_is_a_folder(folder: Path, tmp_path: Path) -> None:
    """There every file is a link to ../../blobs; a link to anything else of the cache is refused."""
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for path in folder.iterdir():
        path.rename(repo / "blobs" / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    want = generate(snapshot, ["a"], max_new_tokens=2, temperature=0.0)
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert generate(link, ["a"], max_new_tokens=2, temperature=0.0) == want
    other = tmp_path / "hub" / "models--org--private" / "blobs"
    other.mkdir(parents=True)
    shutil.copy(snapshot / "config.json", other / "x")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../models--org--private/blobs/x")
    with pytest.raises(UserError, match="outside its folder"):
        load_folder(snapshot)


def test_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse files of huge sizes, nesting, and headers: a sentence at once."""
    config = (folder / "config.json").read_text()
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"config\.json has 1,099,511,627,776 bytes; .* at most 67,108,864"):
        load_folder(folder)
    (folder / "config.json").write_text('{"a": ' + "[" * 10**6)
    with pytest.raises(UserError, match="is nested too deeply"):
        load_folder(folder)
    (folder / "config.json").write_text(config)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    weights.write_bytes((1 << 26).to_bytes(8, "little"))
    with weights.open("r+b") as file:
        file.truncate(1 << 27)
    with pytest.raises(UserError, match="its header has 67,108,864 bytes, more than 33,554,432"):
        load_folder(folder)
    with weights.open("r+b") as file:
        file.truncate(1 << 43)
    with pytest.raises(UserError, match=r"its weights take 8,796,093,022,208 bytes, but only .* of memory are free"):
        load_folder(folder)
    save_file(tensors, weights, metadata={"format": "pt"})
    with (folder / FILE).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="at most"):
        load_folder(folder)
