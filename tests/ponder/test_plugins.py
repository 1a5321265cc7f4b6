"""Methods from outside the package: found, exported, decoded with and without a decoding form, run only on consent."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megaponder.errors import ConfigError, UserError
from megaponder.export import names, reference
from megaponder.export.load import load_folder
from megaponder.export.save import save_weights
from megaponder.export.to_hf import export
from megaponder.inference.generate import generate
from megaponder.ponder import plugins
from megaponder.ponder.plugins import load_plugin
from megaponder.ponder.registry import methods
from tests.export import checkpoints
from tests.export.models import VOCAB, model
from tests.tolerance import PARITY

HALFWAY = Path(__file__).with_name("halfway")
"""The worked example of CONTRIBUTING.md."""


def copy(folder: Path, name: str, *files: str) -> Path:
    """The worked example under another name."""
    folder.mkdir()
    for file in files:
        (folder / file).write_text((HALFWAY / file).read_text().replace('"halfway"', repr(name)))
    return folder


def test_with_and_without_a_decoding_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plugin is exported; without its decoding form a checkpoint gives the same text through training's forward."""
    load_plugin(copy(tmp_path / "fast", "fast_halfway", "training.py", "decoding.py"))
    load_plugin(copy(tmp_path / "slow", "slow_halfway", "training.py"))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    data = {"tokenizer": str(tmp_path / "tokenizer.json")}
    net = checkpoints.make("llama", "fast_halfway", tmp_path / "run", data)
    cfg = checkpoints.run_config(net, tmp_path / "other", **data)
    cfg.ponder.method = "slow_halfway"
    with reference.engine(cfg, names.to_stage(dict(net.state_dict()), cfg.model)) as engine:
        save_weights(tmp_path / "other" / "checkpoints", cfg, engine.stage)

    done = export(tmp_path / "run", tmp_path / "hf")
    assert "method_fast_halfway.py" in done.files and done.max_difference < PARITY
    assert load_folder(tmp_path / "hf").config.method == "fast_halfway"
    prompts = ["w5 w6 w7 w8 w9", "w10 w11"]  # of two lengths, so that one is padded
    fast = generate(tmp_path / "run", prompts, max_new_tokens=6, temperature=0.0)
    assert "decoding form" not in caplog.text
    slow = generate(tmp_path / "other", prompts, max_new_tokens=6, temperature=0.0)
    assert slow == fast
    assert "slow_halfway has no decoding form: each token runs the training forward" in caplog.text
    with pytest.raises(UserError, match="slow_halfway': it has no decoding form, so it cannot be exported"):
        export(tmp_path / "other", tmp_path / "none")


def test_code_that_a_checkpoint_names_is_not_run(tmp_path: Path) -> None:
    net = model("llama", "loop")
    cfg = checkpoints.run_config(net, tmp_path / "run")
    state = names.to_stage(dict(net.state_dict()), cfg.model)
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for run, method in (("run", "evil"), ("shipped", "loop")):
        with reference.engine(cfg, state) as engine:
            cfg.ponder.method, cfg.ponder.plugin = method, str(evil)
            save_weights(tmp_path / run / "checkpoints", cfg, engine.stage)
        cfg.ponder.method, cfg.ponder.plugin = "loop", None
    with pytest.raises(UserError, match=r"it comes from the plugin .*evil\.py, whose code is run only if you name it"):
        generate(tmp_path / "run", ["a"])
    export(tmp_path / "shipped", tmp_path / "hf")  # this method is there without the plugin
    assert not (tmp_path / "ran").exists()


def test_an_installed_package_registers_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy(tmp_path / "installed_halfway", "installed_halfway", "training.py")
    info = tmp_path / "installed-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    points = f"[{plugins.GROUP}]\ngood = installed_halfway.training\nbad = installed_halfway.absent\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.load_installed.cache_clear()
    assert methods()["installed_halfway"].summary == "a second pass that a gate mixes in"
    assert "The method bad of package installed cannot be used (ModuleNotFoundError" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"ponder\.plugin = .*: there is no Python file .*mine\.py"),
        ("x = 1", "it registers no method; mark a class with @register"),
        ("x = 1\ny = x / 0", r"it cannot be run \(ZeroDivisionError: division by zero, .*mine\.py line 2\)"),
        (
            (HALFWAY / "training.py").read_text().replace("halfway", "loop"),
            "the method name 'loop' is taken by megaponder",
        ),
    ],
)
def test_mistakes(tmp_path: Path, text: str | None, words: str) -> None:
    before = methods()
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises((ConfigError, UserError), match=words):
        load_plugin(tmp_path / "mine.py")
    assert methods() == before
