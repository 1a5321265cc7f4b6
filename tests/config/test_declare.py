"""Fields declare their range, what may change at a resume and their earlier names; everything else reads that."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaponder.config import fields, yaml_file
from megaponder.config.declare import Declaration, RenamedField, declare
from megaponder.config.fields import accepts, all_fields, describe_type
from megaponder.config.load import dump, from_mapping, load_config, to_mapping
from megaponder.config.rules import Case, MethodFacts
from megaponder.config.rules.ranges import numbers_are_in_range
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError
from megaponder.ponder.base import Method
from megaponder.ponder.registry import parse_options
from megaponder.training.setup import refuse_other_model
from tests.config.make import config

IDENTITY = {
    "optimizer.kind", "train.only",
    "model.family", "model.num_layers", "model.hidden_size", "model.num_heads", "model.num_kv_heads", "model.head_size",
    "model.ffn_size", "model.vocab_size", "model.vocab_multiple", "model.norm", "model.norm_affine",
    "model.norm_placement", "model.qk_norm",
    "model.activation", "model.qkv_bias", "model.output_bias", "model.mlp_bias", "model.positions",
    "model.rotary_fraction", "model.rotary_base", "model.rotary_pairs",
    "model.rotary_scaling", "model.attention_window", "model.depth_attention",
    "model.freqkv", "model.moe",
    "model.parallel_residual", "model.tie_embeddings", "ponder.method",
}  # fmt: skip
"""Written once more, so that a declaration that is lost does not let a checkpoint of another model in."""


def test_what_a_weight_means_cannot_change() -> None:
    assert {name for name, f in all_fields().items() if f.declared.resume == "refused"} == IDENTITY
    free = {name for name in IDENTITY if all_fields()[name].declared.change_at_load != "refused"}
    asked = {"model.rotary_base", "model.rotary_scaling", "model.depth_attention", "model.freqkv"}
    assert free == {"ponder.method", "model.vocab_multiple", "optimizer.kind", "train.only", *asked}
    assert {name for name, f in all_fields().items() if f.declared.change_at_load == "asked"} == asked


def test_what_a_comparison_leaves_out() -> None:
    assert {name for name, f in all_fields().items() if not f.declared.compared} == {
        "run", "model.preset", "model.embedding_scale", "model.init", "model.init_std", "model.init_output_scale",
        "data.cache", "data.document_tokens", "data.tokenizer", "train.eval_every", "train.deterministic",
        "precision.cuda_graphs", "precision.grad_accum_fusion", "train.eval_depths_every", "train.tasks",
        "train.engine", "train.tasks_every", "train.tasks_folder", "train.tasks_limit",
    }  # fmt: skip


def test_every_number_of_the_schema_has_a_range() -> None:
    """Ids, ranks and steps to profile have rules of their own; so has the ramp-up."""
    open_ended = {
        name
        for name, f in all_fields().items()
        if (accepts(f.type, int) or accepts(f.type, float)) and not f.declared.range
    }
    assert open_ended == {"data.eod_id"}


@pytest.mark.parametrize("name", sorted(n for n, f in all_fields().items() if f.declared.range))
def test_each_end_of_each_range(name: str) -> None:
    """The last legal number passes, and the next one is refused; advice is legal."""
    field = all_fields()[name]
    said, whole = field.declared, accepts(field.type, int)

    def next_to(end: float, up: bool) -> Any:
        return int(end) + (1 if up else -1) if whole else math.nextafter(end, math.inf if up else -math.inf)

    def check(value: Any) -> ConfigError | None:
        try:
            said.check(name, value, field.default)
        except ConfigError as error:
            return error
        return None

    ends = [(said.ge, True, True), (said.gt, False, True), (said.le, True, False), (said.lt, False, False)]
    for end, legal, low in ends:
        if end is None:
            continue
        inside, outside = (end, next_to(end, not low)) if legal else (next_to(end, low), end)
        assert check(inside) is None
        error = check(outside)
        assert error is not None and said.range in error.rule
        word, _, advice = error.fix.rpartition(" is ")
        if word:
            assert check(yaml_file.parse(advice, "advice")) is None
        else:
            assert error.fix == "leave it out" and field.default is None
    assert check(field.default) is None


@given(st.integers() | st.floats(allow_nan=False), st.integers(-5, 5), st.integers(0, 5))
def test_a_range_means_what_it_says(number: float, low: int, width: int) -> None:
    for said, legal in (
        (Declaration(ge=low, le=low + width), low <= number <= low + width),
        (Declaration(gt=low, lt=low + width), low < number < low + width),
    ):
        for value in (number, [number]):
            try:
                said.check("x", value, 0)
            except ConfigError:
                assert not legal
            else:
                assert legal


def test_words_and_null_have_no_range() -> None:
    for value in (None, "auto", True, ["path", None]):
        Declaration(gt=5).check("x", value, None)


def test_values_that_code_and_presets_give_are_checked_too() -> None:
    cfg = config()
    cfg.optimizer = dataclasses.replace(cfg.optimizer, lr=-1.0)
    with pytest.raises(ConfigError, match=r"optimizer.lr = -1.0: it must be more than 0 and at most 1; the default is"):
        numbers_are_in_range(Case(cfg, MethodFacts(), 1))


def other_value(name: str, value: Any) -> Any:
    """Another legal value of about the same kind."""
    field = all_fields()[name]
    kind = describe_type(field.type)
    if isinstance(value, bool):
        return not value
    if name == "ponder.options":
        return {"steps": 7}
    if name == "model.depth_attention":
        return {"sources": "last:2"}
    if name == "train.eslm":
        return {"by": "loss"}
    if name == "train.only":
        return ["mlp"]
    if name == "train.disciplines":
        return {"data": {"math": []}}
    if name == "model.freqkv":
        return {"capacity": 64}
    if name == "model.moe":
        return {"experts": 8, "top_k": 2}
    if name == "model.rotary_scaling":
        return {"rope_type": "linear", "factor": 2.0}
    if name == "data.split":
        return "1,1,1"
    if name == "train.batch_rampup":
        return [128, 128, 1000]
    if name in ("data.train", "data.valid"):
        return ["elsewhere"]
    words = kind.removeprefix("one of ").replace(" or null", "").split(", ")
    if isinstance(value, str) and name != "ponder.method":
        return next(word for word in words if word != value)
    if isinstance(value, float):
        return value / 2 or 1.0
    return "loop" if name == "ponder.method" else (value or 1) * 2


@pytest.mark.parametrize("name", sorted(n for n, f in all_fields().items() if f.declared.resume != "free"))
def test_what_happens_at_a_resume(name: str, tmp_path: Path) -> None:
    """The resume check follows the declaration of each field that has one, also where only weights are loaded."""
    cfg = config(ponder__method="ponderlm")
    cfg.model.preset = None
    saved = to_mapping(cfg)
    section, _, field = name.partition(".")
    saved[section][field] = other_value(name, saved[section][field])
    yaml_file.write(saved, tmp_path / "config.yaml")
    said = all_fields()[name].declared
    for weights_only, change in ((False, said.resume), (True, said.change_at_load)):
        if change in ("refused", "asked"):
            with pytest.raises(ConfigError, match="was trained with") as caught:
                refuse_other_model(cfg, tmp_path, weights_only)
            assert caught.value.field == name
            assert (f"name {name} in checkpoint.load_changes" in str(caught.value)) == (change == "asked")
        if change == "asked":
            cfg.checkpoint.load_changes, change = [name], "warned"
        if change != "refused":
            warned = [w for w in refuse_other_model(cfg, tmp_path, weights_only) if w.startswith(f"Warning: {name} ")]
            assert len(warned) == (change == "warned"), warned


OPTIONS = {
    "huginn": ({"prelude": 1}, {"prelude": 2}, "prelude", True), "retrofit": ({"coda": 2}, {}, "coda", True),
    "nanbeige": ({}, {"norm_between": False}, "norm_between", True),
    "parcae": ({"value_embeddings": True}, {}, "value_embeddings", False),
    "ponderlm": ({}, {"feedback": "hidden"}, "feedback", True),
}  # fmt: skip


@pytest.mark.parametrize("method", OPTIONS)
def test_options_that_say_what_layers_compute_stay(method: str, tmp_path: Path) -> None:
    """Refused where a run goes on; where only weights are loaded, told, unless they are parameters of their own."""
    saved, now, name, told = OPTIONS[method]
    model = {"num_layers": 12, "hidden_size": 64, "num_heads": 4}
    section = {f"model__{key}": value for key, value in model.items()}
    yaml_file.write(
        to_mapping(config(ponder__method=method, ponder__options=saved, **section)), tmp_path / "config.yaml"
    )
    cfg = config(ponder__method=method, ponder__options=now, **section)
    with pytest.raises(ConfigError, match=r"was trained with .*; use that, or a new run folder\.") as caught:
        refuse_other_model(cfg, tmp_path)
    assert caught.value.field == f"ponder.options.{name}"
    assert len(refuse_other_model(cfg, tmp_path, weights_only=True)) == told
    cfg.ponder.method, cfg.ponder.options = "loop", {}
    assert not [w for w in refuse_other_model(cfg, tmp_path, weights_only=True) if name in w], "another method"


# renamed fields: a schema in which three have had other names


@dataclasses.dataclass
class Optimizer:
    lr: float = declare(3e-4, gt=0, was=("optimizer.rate", "adam.alpha", "lr"))
    """Peak learning rate."""
    names: list[str] = declare([], was=("optimizer.labels",))
    """A list."""


@dataclasses.dataclass
class Renamed(RunConfig):
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)  # type: ignore[assignment]


CACHED = (fields.all_fields, fields.sections, fields.renamed, fields.aliases)


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from megaponder.config import load

    for cache in (*CACHED, load._adapter):
        cache.cache_clear()
    monkeypatch.setattr(fields, "RunConfig", Renamed)
    monkeypatch.setattr(load, "RunConfig", Renamed)
    yield
    for cache in (*CACHED, load._adapter):
        cache.cache_clear()


@pytest.mark.usefixtures("renamed")
@pytest.mark.parametrize(
    ("data", "old"),
    [
        ({"optimizer": {"rate": 0.5}}, "optimizer.rate"),
        ({"adam": {"alpha": 0.5}}, "adam.alpha"),
        ({"lr": 0.5}, "lr"),
    ],
)
def test_an_earlier_name_is_read_with_a_warning(data: dict[str, Any], old: str, tmp_path: Path) -> None:
    yaml_file.write(data, tmp_path / "run.yaml")
    before = (tmp_path / "run.yaml").read_text()
    with pytest.warns(RenamedField, match=rf"^{old} is now called optimizer\.lr; please rename it\.$"):
        cfg = load_config(tmp_path / "run.yaml")
    assert cfg.optimizer.lr == 0.5 and (tmp_path / "run.yaml").read_text() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dump(cfg, tmp_path / "new.yaml")  # what is written has the present name
        assert load_config(tmp_path / "new.yaml").optimizer.lr == 0.5
        assert load_config(tmp_path / "new.yaml", ["--optimizer.lr", "0.25"]).optimizer.lr == 0.25


@pytest.mark.usefixtures("renamed")
def test_an_earlier_name_on_the_command_line(tmp_path: Path) -> None:
    yaml_file.write({"optimizer": {"rate": 0.5}}, tmp_path / "run.yaml")
    with pytest.warns(RenamedField):
        cfg = load_config(tmp_path / "run.yaml", ["--optimizer.lr", "0.25", "--optimizer.labels", "a", "b"])
    assert (cfg.optimizer.lr, cfg.optimizer.names) == (0.25, ["a", "b"])
    with pytest.warns(RenamedField), pytest.raises(ConfigError, match=r"optimizer.lr = .x.: it must be a number"):
        load_config(None, ["--adam.alpha=x"])


@pytest.mark.usefixtures("renamed")
def test_both_names_at_once_are_refused() -> None:
    with (
        pytest.warns(RenamedField),
        pytest.raises(ConfigError, match=r"optimizer.rate = 0.5: it is now called optimizer.lr, which is given too"),
    ):
        from_mapping({"optimizer": {"rate": 0.5, "lr": 0.1}})
    with pytest.raises(ConfigError, match=r"adam = .*: there is no such field"):
        from_mapping({"adam": {"beta": 1}})


@pytest.mark.usefixtures("renamed")
def test_one_process_of_many_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = from_mapping({"lr": 0.5})
    assert cfg.optimizer.lr == 0.5


class Toy(Method):
    name = "toy"

    @dataclasses.dataclass
    class Options:
        steps: int = declare(3, ge=1, le=1000, was=("rounds",))


def test_an_option_of_a_method_may_be_renamed_too() -> None:
    with pytest.warns(RenamedField, match=r"^ponder.options.rounds is now called ponder.options.steps; please"):
        assert parse_options(Toy, {"rounds": 5}) == Toy.Options(steps=5)
    with pytest.raises(ConfigError, match=r"rounds = 5: it is now called ponder.options.steps, which is given too"):
        parse_options(Toy, {"rounds": 5, "steps": 4})
    with pytest.raises(ConfigError, match=r"steps = 0: it must be at least 1 and at most 1,000; the nearest is 1"):
        parse_options(Toy, {"steps": 0})


def test_the_command_prints_one_sentence() -> None:
    program = (
        "import warnings; from megaponder.cli.main import keep_console_clean; "
        "from megaponder.config.declare import RenamedField; keep_console_clean(); "
        "warnings.warn('a.b is now called c.d.', RenamedField); warnings.warn('other')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[0] == "Warning: a.b is now called c.d." and "UserWarning: other" in done.stderr


def test_the_configuration_does_without_torch() -> None:
    program = (
        "import sys, megaponder.config.load, megaponder.config.rules, megaponder.config.pages; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
