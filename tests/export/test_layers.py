"""Imports with layers left out: the model is that of the layers which are kept, and a retrofit starts from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megaponder.checkpoint.weights import load_weights
from megaponder.errors import ConfigError
from megaponder.export.from_hf import import_hf
from megaponder.export.load import load_folder
from megaponder.export.to_hf import export
from tests.distributed import run_workers
from tests.export import hf_models
from tests.export.models import ids
from tests.tolerance import PARITY, RTOL


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Llama of six layers."""
    out, config = tmp_path_factory.mktemp("six") / "hf", LlamaConfig(**hf_models.LLAMA | {"num_hidden_layers": 6})
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(out)
    return out, model


def losses(checkpoint: Path, pipeline: int) -> list[float]:
    """In a worker: losses of the layers that are kept, as they are and as a retrofit, at a number of stages."""
    from megaponder.checkpoint.restore import load
    from megaponder.checkpoint.state import CONFIG
    from megaponder.config.load import load_config
    from megaponder.data.batch import make_micro_batch
    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    out = []
    text = ids(2, 18).numpy()
    for method in ("vanilla", "retrofit"):
        options = "{prelude: 1, coda: 1, recurrence: 3, kept: 2, draw: fixed}" if method == "retrofit" else "{}"
        said = ["--ponder.method", method, "--ponder.options", options, "--parallel.pipeline", str(pipeline)]
        cfg = load_config(checkpoint / CONFIG, said)
        engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
        lacking, left = load(checkpoint, engine.stage)
        assert not left and lacking == (["method_entry.adapter.weight"] if method == "retrofit" else [])
        out.append(engine.forward_backward([make_micro_batch(text, "plain", None)] * 2, 0, train=False).loss)
    return out


def test_the_layers_that_are_kept(theirs: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = theirs
    done = import_hf(folder, tmp_path / "run", only="0,2, 4-5")
    assert done.config.model.num_layers == 4 and "layers 0,2, 4-5 of 6 are kept" in str(done)
    assert done.parameters == sum(t.numel() for t in load_weights(tmp_path / "run")[1].values())
    layers = model.model.layers
    model.model.layers = nn.ModuleList(layers[i] for i in (0, 2, 4, 5))
    export(tmp_path / "run", tmp_path / "hf")
    tokens = ids(2, 18)
    with torch.no_grad():
        want = model(tokens, use_cache=False).logits
        loss = float(model(tokens, labels=tokens, use_cache=False).loss)
        got = load_folder(tmp_path / "hf")(tokens).logits
    model.model.layers = layers
    torch.testing.assert_close(got, want, rtol=0, atol=PARITY * float(want.abs().max()))
    one, *both = (
        result
        for pipeline in (1, 2)
        for result in run_workers(
            "tests.export.test_layers:losses",
            pipeline,
            args={"checkpoint": done.checkpoint, "pipeline": pipeline},
        )
    )
    assert one[0] == pytest.approx(loss, rel=RTOL) and one[1] != pytest.approx(loss, rel=0.01)
    for result in both:
        assert result == pytest.approx(one, rel=RTOL)


@pytest.mark.parametrize("said", ["", "1-", "3-1", "2,1", "0,0", "0-6", "a"])
def test_what_names_no_layers(said: str, theirs: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--layers = .*; use 0-5 for all"):
        import_hf(theirs[0], tmp_path / "run", only=said)
    assert not (tmp_path / "run").exists()
