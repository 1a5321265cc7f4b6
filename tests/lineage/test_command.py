"""`megaponder lineage` on checkpoints and folders of several formats, and its mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaponder.cli.main import main
from megaponder.export.to_hf import write_model
from megaponder.lineage import huref, weights
from tests.distributed import run_workers
from tests.lineage import models


def saved(net: Any, out: Path, kind: str | None) -> Path:
    """A Hugging Face folder with the weights of `net`."""
    out.mkdir()
    write_model(models.config(net), {n: t.float() for n, t in net.state_dict().items()}, out, kind, eos=0)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    net = models.net()
    saved(net, root / "llama", "llama")
    saved(net, root / "own", None)
    net.load_state_dict(models.noisy(models.plain(net), 0.1))
    saved(net, root / "child", "llama")
    saved(models.net(5), root / "stranger", "llama")
    saved(models.net(5, vocab_size=90), root / "fewer", "llama")
    saved(models.net(num_key_value_heads=2), root / "grouped", "llama")
    return root


def test_formats_give_the_same_terms(folders: Path, tmp_path: Path) -> None:
    """Llama's names, this project's and, of GPT-NeoX, matrices that are fused by heads."""
    neox = models.net(family="pythia", intermediate_size=40)
    for net, kinds in ((models.net(), {"llama": "llama", "own": None}), (neox, {"neox": "gpt_neox", "plain": None})):
        want = weights.of_plain({n: t.float() for n, t in net.state_dict().items()}, models.config(net), "net")
        for name, kind in kinds.items():
            path = folders / name if kind != "gpt_neox" and name != "plain" else saved(net, tmp_path / name, kind)
            got = weights.load(path)
            assert got.layers[1].q.equal(want.layers[1].q) and (got.heads, got.groups) == (4, 4)
            ids = torch.arange(20)
            assert huref.terms(got, ids).equal(huref.terms(want, ids))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["lineage", *words])
    return code, *capsys.readouterr()


def test_awm_and_huref(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, child, stranger = (str(folders / n) for n in ("llama", "child", "stranger"))
    told = tmp_path / "told.json"
    for mode in ("official", "robust"):
        code, out, _ = run(["awm", base, child, "--mode", mode, "--json", str(told)], capsys)
        assert code == 0 and f"AWM ({mode})" in out and out.rstrip().endswith("related"), out
        assert json.loads(told.read_text())["score"] > 0.97
        code, out, _ = run(["huref", base, stranger, "--mode", mode], capsys)
        assert code == 1 and out.rstrip().endswith("unrelated"), out
    assert run(["huref", base, "--save", str(tmp_path / "base.npz"), "--count", "30"], capsys)[0] == 0
    code, out, _ = run(["huref", str(tmp_path / "base.npz"), child], capsys)
    assert code == 0 and "at 30 tokens" in out


MISTAKES = {
    "awm LLAMA nowhere": "There is no checkpoint, run or Hugging Face folder nowhere",
    "awm LLAMA": "it compares two models",
    "awm LLAMA FEWER": "their vocabularies have 97 and 90 tokens",
    "huref LLAMA GROUPED": "use --mode robust",
    "huref LLAMA CHILD --data nope": "nope.idx",
    "huref LLAMA CHILD --tokens nope": "there is no such file",
    "awm LLAMA CHILD --tokens nope": "it belongs to megaponder lineage huref",
    "awm LLAMA CHILD --draws 1": "the nearest is 2",
    "huref LLAMA nope.npz": "There is no fingerprint nope.npz",
    "tree LLAMA": "two models or more",
    "tree LLAMA LLAMA": "it is named twice",
    "tree LLAMA FEWER": "No two of these models can be compared",
    "tree LLAMA CHILD --mode official": "leave it out",
    "awm LLAMA CHILD --json no/x.json": "there is no folder no",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(words: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [str(folders / w.lower()) if w.isupper() else w for w in words.split()]
    code, out, err = run(named, capsys)
    assert code == 2 and not out and err.count("\n") == 1 and MISTAKES[words] in err, err


def test_pickles_are_refused(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((folders / "llama" / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    code, _, err = run(["awm", str(folders / "llama"), str(tmp_path)], capsys)
    assert code == 2 and "unpickling runs code" in err


def recorded(root: str) -> tuple[int, str]:
    """In a worker: checkpoints of a base, of a run that loaded it, and of an average; then the command's output."""
    from megaponder.checkpoint import origin
    from megaponder.config.schema import CheckpointConfig
    from megaponder.export import names, reference
    from megaponder.export.average import average
    from megaponder.export.save import save_weights

    net, at = models.net(), Path(root)
    base = models.plain(net)
    made = {
        "base": (base, None),
        "child": (models.noisy(base, 0.1), "base"),
        "stranger": (models.plain(models.net(9)), None),
    }
    for name, (plain, source) in made.items():
        cfg = models.config(net, str(at / name))
        cfg = replace(cfg, checkpoint=CheckpointConfig(load=None if source is None else str(at / source)))
        state = names.to_stage({n: t.float() for n, t in plain.items()}, cfg.model)
        with reference.engine(cfg, state) as engine:
            save_weights(at / name / "checkpoints", cfg, engine.stage)
    average(at / "child", at / "mean", last=1)
    assert origin.recorded(at / "mean", cfg) is not None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        words = [str(at / n) for n in ("child", "stranger", "mean", "base")]
        code = main(["lineage", "tree", *words, "--out", str(at / "out")])
    return code, out.getvalue()


def test_records_of_checkpoints(tmp_path: Path) -> None:
    code, out = run_workers("tests.lineage.test_command:recorded", 1, args={"root": str(tmp_path)})[0]
    assert code == 0, out
    assert f"agrees: {tmp_path / 'child'}: recorded as load of {tmp_path / 'base'}, as in the tree." in out
    assert f"agrees: {tmp_path / 'mean'}: recorded as average of {tmp_path / 'child'}, as in the tree." in out
    assert out.count("family") == 2 and (tmp_path / "out" / "tree.html").is_file()


def test_the_tool_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "tools/lineage.py", "awm", "nowhere"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2 and done.stderr.startswith("error: megaponder lineage awm")
