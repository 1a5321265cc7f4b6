"""Files and command lines become configurations, or one sentence."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from itertools import pairwise as pairs
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaponder.config import yaml_file
from megaponder.config.fields import all_fields, describe_type
from megaponder.config.load import dump, from_mapping, load_config, to_mapping
from megaponder.config.presets import PRESETS
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), list(overrides))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return caught.value


def test_yaml_1_2_scalars(tmp_path: Path) -> None:
    text = "optimizer: {lr: 3e-4, eps: 1.0e-8}\nlogging: {wandb: off}\ntrain: {tokens: 300_000_000_000}\n"
    cfg = load_config(write(tmp_path, text), [])
    assert (cfg.optimizer.lr, cfg.optimizer.eps, cfg.logging.wandb) == (3e-4, 1e-8, "off")
    assert cfg.train.tokens == 300_000_000_000


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), []) == RunConfig() == load_config(None, [])


def test_overrides_win_and_reach_the_options_of_the_method(tmp_path: Path) -> None:
    path = write(tmp_path, "ponder: {method: ponderlm, options: {steps: 3, topk: 100}}\ntrain: {steps: 5}\n")
    words = ["--ponder.options.steps", "2", "--train.global_batch=64", "--parallel.sequence", "true", "--run", "2024"]
    words += ["--data.train", "0.3", "wiki", "0.7", "books", "--model.init_output_scale", "0.5", "--data.valid", "held"]
    cfg = load_config(path, words)
    assert cfg.ponder.options == {"steps": 2, "topk": 100}
    assert (cfg.train.global_batch, cfg.train.steps, cfg.parallel.sequence, cfg.run) == (64, 5, True, "2024")
    assert cfg.data.train == [0.3, "wiki", 0.7, "books"] and cfg.data.valid == ["held"]
    assert cfg.model.init_output_scale == 0.5


def test_paths_on_the_command_line_are_what_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {valid: [x]}\n")
    for name in ("a #b", "- a", "#h", ": x", "new\nline", "tab\tx", "*x", "!x", "%x", "set ", " set", "?0", "{a: b}"):
        assert load_config(path, ["--data.train", name]).data.train == [name]
        assert load_config(path, ["--data.train", "1e0", name, "2", "b"]).data.train == [1.0, name, 2, "b"]
    assert load_config(path, ["--data.train", "[0.5, 'a #b', 2, c]"]).data.train == [0.5, "a #b", 2, "c"]
    assert load_config(path, ["--data.train", '"a\\tb"']).data.train == ["a\tb"]


def test_text_is_unicode(tmp_path: Path) -> None:
    """JSON writes what lies beyond 16 bits as two halves; alone they are no text."""
    assert load_config(write(tmp_path, r'run: "x\ud83d\ude00"'), []).run == "x\U0001f600"
    assert "not valid Unicode" in str(refusal(tmp_path, r'run: "x\ud83d"'))
    assert "not valid Unicode" in str(refusal(tmp_path, r'data: {train: ["x\ude00\ud83d"]}'))
    assert "not valid Unicode" in str(refusal(tmp_path, "", "--run", "x\udcff"))


def test_a_pipe_with_a_name_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="it is a pipe or a device"):
        load_config(tmp_path / "pipe.yaml", [])
    reading, writing = os.pipe()
    os.write(writing, b"run: from-a-shell")
    os.close(writing)
    assert load_config(f"/dev/fd/{reading}", []).run == "from-a-shell"
    os.close(reading)


def test_a_budget_on_the_command_line_replaces_the_other(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {tokens: 1000}\n")
    assert load_config(path, ["--train.steps", "3"]).train.tokens is None
    both = load_config(path, ["--train.steps", "3", "--train.tokens", "7"]).train
    assert (both.steps, both.tokens) == (3, 7)


def test_other_data_or_samples_drop_what_a_run_has_measured_on_those_of_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {document_attention: true, document_tokens: 300.0, sequence_length: 512}\n")
    assert load_config(path, ["--data.tokenizer", "bytes"]).data.document_tokens == 300
    for words in (["--data.sequence_length", "256"], ["--data.train", "wiki"], ["--data.document_attention", "false"]):
        assert load_config(path, words).data.document_tokens is None
    assert load_config(path, ["--data.document_tokens", "9.0", "--data.train", "wiki"]).data.document_tokens == 9


def test_a_part_of_a_mapping_joins_the_others(tmp_path: Path) -> None:
    """Those of the file, of the command line in whatever order, or of the preset, which stays as it is."""
    path = write(tmp_path, "model: {moe: {experts: 8, top_k: 2}, freqkv: {capacity: 64}}\ntrain: {disciplines: {}}\n")
    words = [
        "--model.moe.routers",
        "per_pass",
        "--model.freqkv.ratio=0.25",
        "--model.depth_attention.sources",
        "[0, 1]",
    ]
    cfg = load_config(path, [*words, "--train.disciplines.data.math", "[a]"])
    assert cfg.model.moe == {"experts": 8, "top_k": 2, "routers": "per_pass"}
    assert cfg.model.freqkv == {"capacity": 64, "ratio": 0.25} and cfg.model.depth_attention == {"sources": [0, 1]}
    assert cfg.train.disciplines == {"data": {"math": ["a"]}}
    whole = load_config(path, ["--model.moe.top_k", "3", "--model.moe", "{experts: 4}"])
    assert whole.model.moe == {"experts": 4, "top_k": 3}
    before = dict(PRESETS["olmoe-1b-7b"].more["moe"])
    for words in (["--model.preset", "olmoe-1b-7b"], ["--model.preset=olmoe-1b-7b", "--model.moe", "null"]):
        made = load_config(write(tmp_path, ""), ["--model.moe.routers", "per_pass", *words])
        assert made.model.moe == before | {"routers": "per_pass"} and PRESETS["olmoe-1b-7b"].more["moe"] == before


def test_null_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {tokens: 1000}\ndata: {tokenizer: here}\n")
    cfg = load_config(path, ["--train.tokens", "null", "--data.tokenizer", "null"])
    assert cfg.train.tokens is None and cfg.data.tokenizer is None


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("model: {num_layer: 3}", "model.num_layer", "did you mean model.num_layers"),
        ("modle: {num_layers: 3}", "modle", "did you mean model"),
        ("optimizer: {learning_rate: 1}", "optimizer.learning_rate", "did you mean optimizer.lr"),
        ("train: {seq_length: 1}", "train.seq_length", "did you mean data.sequence_length"),
        ("num_layers: 3", "num_layers", "did you mean model.num_layers"),
        ("ponder: {recurrence: 3}", "ponder.recurrence", "did you mean ponder.options.recurrence"),
        ("data: {zzzz: 3}", "data.zzzz", "legal here: data.train"),
        ("model: {num_layers: abc}", "model.num_layers", "it must be an integer"),
        ("model: {num_layers: '3'}", "model.num_layers", "it must be an integer"),
        ("model: {num_layers: true}", "model.num_layers", "it must be an integer"),
        ("model: {num_layers: 2.5}", "model.num_layers", "it must be an integer"),
        ("train: {tokens: 3e9}", "train.tokens", "write 3000000000"),
        ("train: {global_batch: null}", "train.global_batch", "it must be an integer; the default is 256"),
        ("optimizer: {lr: .nan}", "optimizer.lr", "nan: it must be a finite number"),
        ("model: {norm_eps: .inf}", "model.norm_eps", "inf: it must be a finite number"),
        (
            "model: {freqkv: {ratio: .nan}}",
            "model.freqkv.ratio",
            "finite number; use a number such as 0.5, or leave it",
        ),
        ("data: {train: [.nan, a]}", "data.train", "nan: it must be a finite number"),
        ("optimizer: {lr: abc}", "optimizer.lr", "it must be a number"),
        ("parallel: {sequence: 1}", "parallel.sequence", "it must be true or false"),
        ("precision: {dtype: bf61}", "precision.dtype", "one of fp32, bf16; did you mean bf16"),
        ("precision: {dtype: BF16}", "precision.dtype", "did you mean bf16"),
        ("precision: {dtype: bfloat16}", "precision.dtype", "did you mean bf16"),
        ("precision: {implementation: transformer_engine}", "precision.implementation", "did you mean te"),
        ("precision: {cuda_graphs: yes}", "precision.cuda_graphs", "true, false or auto; did you mean true"),
        ("precision: {cuda_graphs: 0}", "precision.cuda_graphs", "did you mean false"),
        ("precision: {cuda_graphs: 1.0}", "precision.cuda_graphs", "the default is auto"),
        ("train: {deterministic: Off}", "train.deterministic", "true or false; did you mean false"),
        ("logging: {profile_steps: [a, 2]}", "logging.profile_steps", "a list of integers; the default is []"),
        ("logging: {profile_steps: [1.5, 2]}", "logging.profile_steps", "a list of integers; the default is []"),
        ("logging: {profile_steps: [1, 2.0]}", "logging.profile_steps", "a list of integers; write 2."),
        ("logging: {profile_ranks: [a]}", "logging.profile_ranks", "a list of integers; the default is [0]"),
        ("logging: {profile_ranks: a}", "logging.profile_ranks", "a list of integers; the default is [0]"),
        ("logging: {profile_ranks: 3}", "logging.profile_ranks", "a list of integers; write [3]"),
        ("model: {init_output_scale: foo}", "model.init_output_scale", "a number or auto"),
        ("data: {train: wiki}", "data.train", "it must be a list of texts or numbers; write [wiki]"),
        ("data: {train: [[a]]}", "data.train", "it must be a list"),
        (
            "train: {batch_rampup: [1, 2.5, 3]}",
            "train.batch_rampup",
            "it must be a list of integers or null; the default is null",
        ),
        ("ponder: {options: 3}", "ponder.options", "it must be a mapping"),
        ("run: 3", "run", "it must be text"),
        ("model: 3", "model", "this is a section; its fields are: model.preset"),
        ("model:", "model", "this is a section"),
    ],
)
def test_refusals_name_field_value_rule_and_what_is_legal(tmp_path: Path, text: str, field: str, words: str) -> None:
    error = refusal(tmp_path, text)
    assert error.field == field and words in str(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: b: c", "not YAML (line 1, column 5"),
        ("train: {steps: 3, steps: 4}", 'duplicate key "steps");'),
        ("train: [", "not YAML (line 1"),
        ("- 3", "it must contain sections"),
        ("ponder: &p {method: loop, options: *p}", "Circular reference"),
        ("[" * 1200, "it is nested too deeply"),
        ("train: {steps: " + "1" * 5000 + "}", "Exceeds the limit"),
        ('run: "a\\0b"', "run = 'a\\x00b': text must not contain a null character"),
        ("just text", "it must contain sections"),
    ],
)
def test_bad_yaml_is_placed(tmp_path: Path, text: str, words: str) -> None:
    assert words in str(refusal(tmp_path, text))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model.numlayers", "3"], "did you mean --model.num_layers"),
        (["--data.valid.code", "a"], "data.valid is given as a whole; write --data.valid '{code: a}', with all"),
        (["--model.num_layers"], "it needs a value"),
        (["--model", "3"], "this is a section, not a field"),
        (["--precision.params", "fp32"], "the fields of precision are: --precision.dtype, --precision.fp8,"),
        (["--train.steps", "3", "4"], "it takes one value"),
        (["--ponder.recurrence", "4"], "did you mean --ponder.options.recurrence"),
        (["--ponder.steps", "4"], "did you mean --ponder.options.steps"),
        (["--ponder.option.recurrence", "4"], "did you mean --ponder.options.recurrence"),
        (["--ponder.methods", "huginn"], "did you mean --ponder.method"),
        (["3"], "this value has no field"),
        (["--train.steps", "x"], "train.steps = 'x': it must be an integer"),
        (["--train.steps", "[1"], "--train.steps = '[1': not YAML"),
    ],
)
def test_bad_overrides(tmp_path: Path, words: list[str], expected: str) -> None:
    assert expected in str(refusal(tmp_path, "", *words))


def test_aliases_and_sizes_are_bounded(tmp_path: Path) -> None:
    """At once: what unfolds to hundreds of millions of values, by lists, by merges or on the command line."""
    began = time.process_time()  # of this process: the machine may be busy
    for row, use in (
        ("[x,x,x,x,x,x,x,x,x]", "[{0},{0},{0},{0},{0},{0},{0},{0},{0}]"),
        ("{k: 1}", "{{<<: [{0},{0},{0}]}}"),
    ):
        lines = [f"a0: &a0 {row}"]
        lines += [f"a{i}: &a{i} {use.format(f'*a{i - 1}')}" for i in range(1, 9 if row[0] == "[" else 30)]
        error = refusal(tmp_path, "\n".join([*lines, "run: runs/bomb"]))
        assert "its aliases expand to" in str(error) and "at most 200,000 are allowed" in str(error)
    bomb = "[&a [1,1,1,1,1,1,1,1,1,1]" + "".join(
        f",&{c} [{','.join('*' + b for _ in range(10))}]" for b, c in pairs("abcdefg")
    )
    assert "its aliases expand to" in str(refusal(tmp_path, "", "--data.train", bomb + "]"))
    assert "it is larger than 2,097,152 bytes" in str(refusal(tmp_path, "#" * (1 << 22)))
    with (tmp_path / "run.yaml").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="it is larger than"):
        load_config(tmp_path / "run.yaml", [])
    assert time.process_time() - began < 10
    shared = "data: {train: &d [data/a], valid: *d}\noptimizer: &o {lr: 0.5}\n"
    assert load_config(write(tmp_path, shared), []).data.valid == ["data/a"]  # ordinary aliases are fine


def test_missing_files_name_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "llama.yaml").write_text("")
    for name, words in (
        ("lama.yaml", "did you mean"),
        ("zzzzzzzzz", "has llama.yaml"),
        ("none/x.yaml", "no YAML file"),
    ):
        with pytest.raises(ConfigError, match="there is no such file") as caught:
            load_config(tmp_path / name, [])
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=f"this is a folder; name a file, for example {tmp_path / 'llama.yaml'}"):
        load_config(tmp_path, [])
    (tmp_path / "llama.yaml").rename(tmp_path / ".hidden.yaml")
    with pytest.raises(ConfigError, match="this is a folder; name a YAML file; it has none"):
        load_config(tmp_path, [])
    with pytest.raises(ConfigError, match="has no YAML file"):
        load_config(tmp_path / "hidden.yaml", [])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml", [])


def test_a_preset_cannot_be_put_on_a_resolved_file(tmp_path: Path) -> None:
    cfg = resolve(from_mapping({"model": {"preset": "llama-125m"}, "train": {"steps": 1}}))
    dump(cfg, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="overrides a preset"):
        load_config(tmp_path / "config.yaml", ["--model.preset", "llama-410m"])


@pytest.mark.parametrize("preset", ["pythia-160m", "llama-1.4b", "gpt2-xl"])
def test_dump_and_load_give_the_same_configuration(tmp_path: Path, preset: str) -> None:
    cfg = from_mapping(
        {
            "run": "runs/ä b",
            "model": {"preset": preset},
            "ponder": {"method": "ponderlm", "options": {"steps": 3, "multiply_by_steps": True}},
            "data": {"train": [0.1, "a b/c", 1 / 3, "yes"], "sequence_length": 64},
            "optimizer": {"lr": 1e-7, "eps": 1e-8},
            "train": {"tokens": 300_000_000_000},
            "logging": {"wandb": "off"},
        }
    )
    for one in (cfg, resolve(cfg)):
        dump(one, tmp_path / "config.yaml")
        assert load_config(tmp_path / "config.yaml", []) == one
    assert resolve(resolve(cfg)) == resolve(cfg)


@settings(max_examples=12)
@given(
    lr=st.floats(min_value=0, allow_nan=False, allow_infinity=False), run=st.text(min_size=1), weight=st.floats(0, 1)
)
@example(lr=0.0, run="?0", weight=0.0)
@example(lr=0.0, run=": 0", weight=0.0)
def test_any_number_and_text_survives(lr: float, run: str, weight: float) -> None:
    run = "".join(c for c in run if c.isprintable()) or "x"
    cfg = from_mapping({"run": run, "optimizer": {"lr": lr}, "data": {"train": [weight, run]}})
    back = from_mapping(yaml_file.parse(yaml_file.to_text(to_mapping(cfg)), "text"))
    assert back == cfg and math.copysign(1, back.optimizer.lr) == math.copysign(1, lr)


def test_what_is_written_is_text_to_other_readers_too() -> None:
    """YAML 1.1 reads some words as truths and minutes; characters that no line shows are escaped."""
    for text in ("yes", "On", "n", "1:30", "12:30:45", "\x85y", "a\u2028b", "x\r\n y", "\x01"):
        written = yaml_file.to_text({"run": text})
        assert written[5] in "'\"" and written.rstrip("\n").isprintable()
        assert yaml_file.parse(written, "text") == {"run": text}


def test_writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    dump(RunConfig(), path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        dump(RunConfig(run="other"), path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_every_field_is_documented_and_describable() -> None:
    fields = all_fields()
    assert len(fields) > 60
    for name, field in fields.items():
        assert field.doc.endswith((".", ")")), f"{name} has no docstring"
        assert "typing" not in describe_type(field.type) and "<" not in describe_type(field.type)
    assert set(dataclasses.asdict(RunConfig())) == {n.partition(".")[0] for n in fields}
