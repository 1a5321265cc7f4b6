"""Depth-Attention in the engine: the future has no influence, messages lose nothing, and the first layer is plain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megaponder.engine import cuda_on_cpu
from tests.layouts.cases import CASES, VOCAB, Case, Layout, disturb, run_config
from tests.layouts.layouts import LAYOUTS

cuda_on_cpu.install()

from megaponder.data.batch import MicroBatch  # noqa: E402
from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.engine.depth_attention import EarlierLayers  # noqa: E402
from megaponder.engine.stash import PassState  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402
from tests.tolerance import RTOL  # noqa: E402

CASE = CASES["depth-across-gqa"]


def engine_of(case: Case) -> Any:
    cfg = run_config(case, LAYOUTS["one-batch1"])
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    disturb(engine.stage.named_parameters())
    return engine


def test_the_future_has_no_influence() -> None:
    """Neither on values nor on gradients: every token of the text is another one, so rows of the table tell places."""
    engine, at = engine_of(CASE), 4
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:12][None]
    other = ids.clone()
    other[:, at + 1 :] = ids[:, at + 1 :].flip(1)
    assert torch.equal(engine.logits(ids)[:, : at + 1], engine.logits(other)[:, : at + 1])
    assert not torch.allclose(engine.logits(ids)[:, at + 2 :], engine.logits(other)[:, at + 2 :])

    stage, state, out = engine.stage, PassState(), None
    batch = MicroBatch(ids, ids, torch.ones(ids.shape))
    for p in engine.passes(None):
        out = stage.run_pass(p, batch, out, state, None)
    table = stage.embedding.word_embeddings.weight
    (grad,) = torch.autograd.grad(out.hidden[at].sum(), table)
    rows = grad[ids[0]].abs().amax(-1)
    assert (rows[: at + 1] > 0).all() and (rows[at + 1 :] == 0).all()


def test_off_and_in_one_layer_it_is_the_plain_model() -> None:
    ids = torch.arange(12)[None]

    shapes = []

    def logits(**model: Any) -> torch.Tensor:
        engine = engine_of(replace(CASE, method="vanilla", options={}, model=model))
        shapes.append({n: x.shape for n, x in engine.stage.state_dict().items() if x is not None})
        return engine.logits(ids)

    depth = {"sources": "all"}
    assert torch.equal(logits(depth_attention={}), logits())
    assert torch.equal(logits(num_layers=1, depth_attention=depth), logits(num_layers=1))
    assert not torch.allclose(logits(depth_attention=depth), logits(), rtol=RTOL)
    assert shapes[-2] == shapes[-1] and len(shapes[-1]) > 10, "there are no parameters"


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(tensor=2, sequence=True)], ids=str)
def test_a_message_brings_back_what_it_took(layout: Layout) -> None:
    cfg = run_config(CASE, layout)
    carrier, n, b = EarlierLayers(cfg), 8, 2
    heads, size = (cfg.model.num_kv_heads or 0) // layout.tensor, cfg.model.head_size or 0
    rows = torch.randn(n // (2 if layout.sequence else 1), b, 32 + 3)
    earlier = tuple(torch.randn(n, b, heads, size) for _ in range(6))
    message = carrier.pack(rows, earlier)
    passes = method_of(cfg).passes(0, 0)
    assert message.shape[2] - rows.shape[2] == carrier.widths(passes)[1][-1]  # last:3 of four layers so far
    back, found = carrier.unpack(message, 3)
    assert torch.equal(back, rows) and all(torch.equal(x, y) for x, y in zip(found, earlier, strict=True))
    assert carrier.pack(rows, ()) is rows and carrier.unpack(rows, 3)[1] == ()
