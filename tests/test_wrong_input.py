"""Hundreds of generated mistakes: each is refused with one sentence, none with a traceback, none is let through."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaponder.checkpoint import manifest
from megaponder.checkpoint.choose import choose, locate
from megaponder.config import yaml_file
from megaponder.config.fields import accepts, all_fields
from megaponder.config.load import from_mapping, load_config
from megaponder.config.resolve import resolve
from megaponder.config.rules import Case, model
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.data.audit import audit
from megaponder.data.documents import Chunk, Problem, TxtRule, documents
from megaponder.data.prepare import PrepareOptions, prepare
from megaponder.errors import ConfigError, UserError
from megaponder.export.configs import PONDER_FIELDS, ponder_config
from megaponder.export.formats import FORMATS
from megaponder.export.from_hf import run_config
from megaponder.ponder.facts import facts_of
from megaponder.ponder.settings import method_of
from tests.checkpoint.test_folder import save
from tests.data_pipeline.make import jsonl

MANY = settings(max_examples=60)
FIELDS = {name: field for name, field in all_fields().items() if "." in name}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def one_sentence(error: UserError) -> str:
    words = str(error)
    assert "\n" not in words and words.endswith(".") and "Traceback" not in words, words
    return words


def wrong_for(name: str) -> st.SearchStrategy[Any]:
    """Values of a type that the field does not take."""
    kind = FIELDS[name].type
    kinds = {str: st.text(min_size=1, max_size=6), bool: st.booleans(), float: st.floats(0.1, 0.9)}
    wrong = [values for cls, values in kinds.items() if not accepts(kind, cls)]
    if not accepts(kind, int) and not accepts(kind, float):
        wrong.append(st.integers())
    if not accepts(kind, dict):
        wrong.append(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2))
    if not accepts(kind, list):
        wrong.append(st.lists(st.integers(), max_size=2))
    return st.one_of(wrong)


@MANY
@given(st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), wrong_for(name))))
def test_values_of_a_wrong_type(case: tuple[str, Any]) -> None:
    name, value = case
    section, _, field = name.partition(".")
    with pytest.raises(ConfigError) as caught:
        from_mapping({section: {field: value}})
    assert name in one_sentence(caught.value)
    if advice := re.fullmatch(r"(?:did you mean|the default is) (.*)", caught.value.fix):
        from_mapping({section: {field: yaml_file.parse(advice[1], "advice")}})


@MANY
@given(st.sampled_from(sorted(FIELDS)), st.integers(0, 20), st.characters(codec="ascii", categories=["Ll"]))
def test_misspelt_fields(name: str, at: int, letter: str) -> None:
    at = name.index(".") + 1 + at % len(name.partition(".")[2])
    wrong = name[:at] + letter + name[at:]
    if wrong in FIELDS:
        return
    section, _, field = wrong.partition(".")
    with pytest.raises(ConfigError, match="there is no such field") as caught:
        from_mapping({section: {field: 1}})
    assert one_sentence(caught.value).startswith(wrong)


@MANY
@given(st.dictionaries(st.text(max_size=8), plain, min_size=1, max_size=3))
def test_any_mapping_is_a_configuration_or_a_sentence(data: dict[str, Any]) -> None:
    try:
        from_mapping(data)
    except ConfigError as error:
        one_sentence(error)
    else:
        assert set(data) <= {name.partition(".")[0] for name in all_fields()}


@MANY
@given(st.text(max_size=40) | st.binary(max_size=40))
def test_any_text_is_a_configuration_or_a_sentence(text: str | bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
        try:
            load_config(path)
        except ConfigError as error:
            one_sentence(error)
        else:  # nothing but comments and blanks, or something that is a mapping of known names
            loaded = yaml_file.read(path)
            assert loaded is None or set(loaded) <= {name.partition(".")[0] for name in all_fields()}


@MANY
@given(
    st.lists(st.text(max_size=12) | st.sampled_from(["--", "--train.steps", "--x", "=", "--data.train="]), max_size=4)
)
def test_any_words_are_overrides_or_a_sentence(words: list[str]) -> None:
    try:
        load_config(None, words)
    except ConfigError as error:
        one_sentence(error)
    else:
        assert not words or words[0].startswith("--")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prepared dataset of 40 documents."""
    folder = tmp_path_factory.mktemp("dataset")
    source = jsonl(folder / "a.jsonl", [f"document {i} " * (i % 5 + 1) for i in range(40)])
    prepare(PrepareOptions([str(source)], str(folder / "set"), "bytes", workers=1))
    return str(folder / "set")


@pytest.fixture
def copied(dataset: str, tmp_path: Path) -> str:
    return _copy(dataset, tmp_path)


def _copy(dataset: str, folder: Path) -> str:
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(dataset + suffix, folder / f"set{suffix}")
    return str(folder / "set")


def harmed(data: bytes) -> st.SearchStrategy[bytes]:
    """Any other content: bytes changed, cut off, or put in."""
    places = st.integers(0, len(data) - 1)
    changed = st.tuples(places, st.integers(1, 255)).map(
        lambda c: data[: c[0]] + bytes([data[c[0]] ^ c[1]]) + data[c[0] + 1 :]
    )
    cut = places.map(lambda at: data[:at])
    more = st.tuples(places, st.binary(min_size=1, max_size=9)).map(lambda c: data[: c[0]] + c[1] + data[c[0] :])
    return st.one_of(changed, cut, more)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_harmed_datasets(dataset: str, copied: str, suffix: str) -> None:
    whole = Path(dataset + suffix).read_bytes()

    @MANY
    @given(harmed(whole))
    def refused(content: bytes) -> None:
        Path(copied + suffix).write_bytes(content)
        with pytest.raises(UserError) as caught:
            audit([copied])
        assert copied in one_sentence(caught.value)

    refused()


def test_harmed_descriptions(dataset: str, copied: str) -> None:
    whole = json.loads(Path(dataset + ".json").read_bytes())
    told = ("vocab_size", "eod_id", "max_id", "documents", "tokens", "dtype", "checksums", "sources", "format")

    @MANY
    @given(st.sampled_from(told), plain)
    def refused(name: str, value: Any) -> None:
        if value == whole[name] and type(value) is type(whole[name]):
            return
        legal = name == "vocab_size" and type(value) is int and value > whole["max_id"]  # a larger vocabulary is one
        legal |= name == "eod_id" and (value is None or (type(value) is int and 0 <= value < whole["vocab_size"]))
        legal |= name in ("checksums", "sources") and value in ({}, [])
        Path(copied + ".json").write_text(json.dumps(whole | {name: value}))
        if legal:
            return
        with pytest.raises(UserError) as caught:
            audit([copied])
        one_sentence(caught.value)

    refused()


broken_json = st.one_of(
    st.binary(min_size=1, max_size=30),
    plain.map(lambda value: json.dumps(value).encode()),
    plain.map(lambda value: json.dumps({"text": value}).encode()),
    st.text(max_size=10).map(lambda text: json.dumps({"text": text}).encode()[:-2]),
)


@MANY
@given(st.lists(broken_json, min_size=1, max_size=4))
def test_every_line_is_a_text_or_a_problem(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    found = list(documents(Chunk(0, 1, data), "jsonl", "text", TxtRule()))
    assert len(found) == sum(bool(line.strip()) for line in data.split(b"\n"))
    for number, item in found:
        line = data.split(b"\n")[number - 1]
        if isinstance(item, Problem):
            assert item.line == number and item.message
        else:
            assert json.loads(line)["text"] == item


@settings(max_examples=8)
@given(
    st.binary(min_size=1, max_size=30).filter(lambda line: b"\n" not in line and line.strip() and not _is_text(line))
)
def test_prepare_names_file_and_line(line: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = jsonl(Path(name) / "a.jsonl", ["good", "also good"])
        source.write_bytes(source.read_bytes() + line + b'\n{"text": "the last"}\n')
        options = PrepareOptions([str(source)], str(Path(name) / "set"), "bytes", workers=1)
        with pytest.raises(UserError) as caught:
            prepare(options)
        assert f"{source}:3: " in one_sentence(caught.value)
        assert not os.path.exists(options.output + ".idx")
        assert prepare(replace(options, on_error="skip")).meta.documents == 3


def _is_text(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line)["text"], str)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return False


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """A folder of two checkpoints, and the content of the newer one's files."""
    save(tmp_path, 1, 20)
    new = save(tmp_path, 2, 20)
    yield tmp_path, {path.name: path.read_bytes() for path in new.iterdir()}


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json", "manifest.json"])
def test_harmed_checkpoints(checkpoints: tuple[Path, dict[str, bytes]], name: str) -> None:
    root, whole = checkpoints
    new = root / "step_00000002"

    @MANY
    @given(harmed(whole[name]))
    def refused(content: bytes) -> None:
        (new / name).write_bytes(content)
        if name == manifest.MANIFEST and _same(content, whole[name]):
            return  # a space more or less
        assert choose(root).path == root / "step_00000001"
        with pytest.raises(UserError) as caught:
            locate(new)
        assert "step_00000002" in one_sentence(caught.value)

    refused()


def _same(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", ".."])
def test_a_manifest_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    listed = json.loads((path / manifest.MANIFEST).read_text())
    changed = copy.deepcopy(listed)
    changed["files"][name] = listed["files"]["state.json"]
    (path / manifest.MANIFEST).write_text(json.dumps(changed))
    assert "is not the name of a file in this folder" in str(manifest.damage(path))


HF: dict[str, dict[str, Any]] = {
    "gpt_neox": {"hidden_size": 32, "num_attention_heads": 4},
    "llama": {"hidden_size": 32, "num_attention_heads": 4},
    "gpt2": {},
    "qwen3": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
}


@settings(max_examples=300)
@given(st.data())
def test_odd_fields_of_imported_models(data: st.DataObject) -> None:
    """A model section that the rules accept, or a sentence."""
    kind = data.draw(st.sampled_from(sorted(HF)))
    form = FORMATS[kind]
    odd = ["model_type", "eos_token_id", "rope_scaling", "rope_parameters", "layer_types", "head_dim", "method"]
    names = st.sampled_from([*form.defaults, *form.required, *odd])
    values = plain | st.sampled_from(
        [0, -1, 1.5, True, 10**30, "4", ["x"], {"rope_theta": None}, {"type": 3}, "megaponder"]
    )
    changes = data.draw(st.dictionaries(names, values, min_size=1, max_size=2))
    try:
        cfg = run_config({"model_type": kind, **HF[kind], **changes}, Path("hf"), Path("run"), frozenset())
    except UserError as error:
        one_sentence(error)
    else:
        case = Case(cfg, facts_of(method_of(cfg)), 1)
        for rule in model.RULES:
            rule(case)


def test_an_imported_size_that_is_too_large_is_refused_at_once() -> None:
    """Its divisors, which advice would be taken from, would be searched for years."""
    hf = {"model_type": "llama", **HF["llama"], "hidden_size": 10**30 + 1}
    with pytest.raises(UserError, match=r"config.json: hidden_size = .* it must be at most 2,147,483,647"):
        run_config(hf, Path("hf"), Path("run"), frozenset())


@settings(max_examples=100)
@given(
    st.dictionaries(st.sampled_from([*sorted(PONDER_FIELDS.values()), "method", "method_options"]), plain, max_size=2)
)
def test_odd_fields_of_imported_exports(changes: dict[str, Any]) -> None:
    cfg = resolve(RunConfig(model=ModelConfig(preset="llama-125m", vocab_size=300)))
    with contextlib.suppress(UserError):
        whole = {"model_type": "megaponder", **ponder_config(cfg, "float32", None)}
        run_config(whole | changes, Path("hf"), Path("run"), frozenset())
