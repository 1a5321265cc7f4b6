"""FreqKV in the engine: off, and up to its capacity, it is the plain model bit by bit; the future has no influence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megaponder.engine import cuda_on_cpu
from tests.layouts.cases import CASES, LENGTH, VOCAB, Case, disturb, run_config
from tests.layouts.layouts import LAYOUTS

cuda_on_cpu.install()

from megaponder.data.batch import MicroBatch  # noqa: E402
from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.engine.stash import PassState  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402
from tests.tolerance import RTOL  # noqa: E402

CASE = CASES["freqkv-gqa"]


def engine_of(case: Case) -> Any:
    cfg = run_config(case, LAYOUTS["one-batch1"])
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    disturb(engine.stage.named_parameters())
    return engine


def with_feature(**freqkv: Any) -> Case:
    return replace(CASE, model={**CASE.model, "freqkv": freqkv})


def test_off_and_up_to_its_capacity_it_is_the_plain_model() -> None:
    """Logits, loss and gradients; one row less makes the difference."""
    ids = torch.arange(LENGTH)[None] * 7 % VOCAB
    batch, found = MicroBatch(ids, ids.flip(1), torch.ones(ids.shape)), []
    plain = replace(CASE, model={k: v for k, v in CASE.model.items() if k != "freqkv"})
    for case in (plain, with_feature(), with_feature(capacity=LENGTH), with_feature(capacity=LENGTH - 1)):
        engine = engine_of(case)
        engine.zero_grad()
        loss = engine.forward_backward([batch], 0, train=True).loss
        named = {n: p.main_grad.clone() for n, p in engine.stage.named_parameters()}
        found.append((engine.logits(ids), loss, named))
    for logits, loss, grads in found[1:3]:
        assert torch.equal(logits, found[0][0]) and loss == found[0][1]
        assert grads.keys() == found[0][2].keys() and all(torch.equal(g, found[0][2][n]) for n, g in grads.items())
    short, whole = found[3][0], found[0][0]
    torch.testing.assert_close(short[:, :-1], whole[:, :-1], rtol=RTOL, atol=RTOL)
    assert not torch.allclose(short[:, -1], whole[:, -1], rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("at", [4, 8])
def test_the_future_has_no_influence(at: int) -> None:
    """Neither on values nor on gradients: every token of the text is another one, so rows of the table tell places."""
    engine = engine_of(CASE)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:LENGTH][None]
    other = ids.clone()
    other[:, at + 1 :] = ids[:, at + 1 :].flip(1)
    assert torch.equal(engine.logits(ids)[:, : at + 1], engine.logits(other)[:, : at + 1])
    assert not torch.allclose(engine.logits(ids)[:, at + 1 :], engine.logits(other)[:, at + 1 :])

    stage, state, out = engine.stage, PassState(), None
    batch = MicroBatch(ids, ids, torch.ones(ids.shape))
    for p in engine.passes(None):
        out = stage.run_pass(p, batch, out, state, None)
    (grad,) = torch.autograd.grad(out.hidden[at].sum(), stage.embedding.word_embeddings.weight)
    rows = grad[ids[0]].abs().amax(-1)
    assert (rows[: at + 1] > 0).all() and (rows[at + 1 :] == 0).all()
