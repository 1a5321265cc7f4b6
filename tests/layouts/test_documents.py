"""A packed sequence computes what its documents compute alone: loss, statistics and every gradient, for every method;
and nothing of a document reaches another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megaponder.engine import cuda_on_cpu
from tests.layouts import sink  # noqa: F401  registers the test methods
from tests.layouts.cases import CASES, LENGTH, VOCAB, WHOLE, disturb, run_config
from tests.layouts.layouts import LAYOUTS
from tests.tolerance import ATOL, RTOL

cuda_on_cpu.install()

from megaponder.backbone.init import global_names  # noqa: E402
from megaponder.data.batch import MicroBatch, make_micro_batch  # noqa: E402
from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.ponder.plugins import load_plugin  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402
from tests.layouts.workers import HALFWAY  # noqa: E402

load_plugin(HALFWAY)

EOD = 3
LENGTHS = ([5, 1, 6], [2, 10])
"""Of the documents of two sequences; the last of each is cut off."""


def packed() -> MicroBatch:
    """Two sequences of several documents, some of whose targets count."""
    draw = torch.Generator().manual_seed(11)
    text = torch.randint(EOD + 1, VOCAB, (2, LENGTH + 1), generator=draw)
    for row, lengths in enumerate(LENGTHS):
        text[row, np.cumsum(lengths)[:-1] - 1] = EOD
    out = make_micro_batch(text.numpy(), "plain", EOD, document_attention=True)
    out.loss_mask_bn[torch.rand(2, LENGTH, generator=draw) < 0.2] = 0.0
    return out


def alone(batch: MicroBatch) -> list[MicroBatch]:
    """Each document of `packed` as a sequence of its own."""
    parts = []
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            at = (slice(row, row + 1), slice(end - length, end))
            parts.append(MicroBatch(batch.ids_bn[at], batch.labels_bn[at], batch.loss_mask_bn[at]))
    return parts


CHOSEN = (
    "vanilla-llama-tied",
    "pause-gpt2",
    "ponderlm-topk-gpt2-tied",
    "ponderlm2-llama-gqa",
    "ponderlm3-pythia-deep",
    "adaponderlm-llama-gqa",
    "adaponderlm-budget",
    "adaptive-cot-llama-gqa",
    "adaptive-cot-skip-gqa",
    "ponderlm3-budget",
    "pruned-gpt2-skip",
    "confident-budget-skip",
    "window-yarn-gqa",
    "depth-skip",
    "freqkv-gqa",
    "parcae-llama",
    "retrofit-llama",
    "ouro-sandwich",
    "nanbeige-split",
    "everything-llama",
)
NAMES = [name for name in CASES if not name.startswith("eslm")] if WHOLE else list(CHOSEN)
"""ESLM chooses among all tokens of a batch, whichever document they are of."""


def each(name: str, *runs: list[MicroBatch]) -> list[dict[str, Any]]:
    """For each list of micro-batches the last of the case's training steps, and an evaluation, from equal weights."""
    case, found = CASES[name], []
    cfg = run_config(case, LAYOUTS["one-batch1"])
    if cfg.model.moe:  # how even experts are loaded is judged by whole sequences
        cfg.model.moe |= {"aux_weight": 0.0, "bias_rate": 0.0}
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    disturb(global_names(engine.stage))
    start = {n: p.detach().clone() for n, p in engine.stage.named_parameters() if not p.requires_grad}
    for batches in runs:
        for n, p in engine.stage.named_parameters():  # thresholds follow the steps
            if n in start:
                p.data.copy_(start[n])
        for step in range(case.steps):
            engine.zero_grad()
            out = engine.forward_backward(batches, step, train=True)
            engine.settle(out, step)
        grads = {n: p.main_grad.clone() for n, p in engine.stage.named_parameters() if p.requires_grad}
        seen = engine.forward_backward(batches, 0, train=False)
        numbers = {"loss": out.loss, "aux": out.aux, "z": out.z_loss, "eval": seen.loss}
        stats = out.stats | {f"eval {n}": x for n, x in seen.stats.items()}
        found.append({"numbers": numbers, "stats": stats, "grads": grads})
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("numbers", "stats"):
        assert found[what] == pytest.approx(expected[what], rel=RTOL, abs=ATOL), what
    for key, grad in expected["grads"].items():
        worst = (found["grads"][key] - grad).abs().max() / grad.abs().max().clamp(min=ATOL)
        assert worst < RTOL, key


@pytest.mark.parametrize("name", NAMES)
def test_packed_is_alone(name: str) -> None:
    batch = packed()
    compare(*each(name, [batch], alone(batch)))


@pytest.mark.parametrize("name", [n for n in NAMES if WHOLE or CASES[n].method in ("adaptive_cot", "ponderlm2")])
def test_nothing_of_a_document_reaches_another(name: str) -> None:
    """One document has targets; the others' tokens change, and neither its loss nor any gradient does."""
    batch = packed()
    batch.loss_mask_bn[:] = 0.0
    first = LENGTHS[1][0]
    batch.loss_mask_bn[1, first:-1] = 1.0
    other = batch.ids_bn.clone()
    other[0, :3], other[1, : first - 1] = 7, 9
    changed = MicroBatch(other, batch.labels_bn, batch.loss_mask_bn, batch.starts_bn, batch.edges)
    compare(*each(name, [changed], [batch]))


def test_documents_matter() -> None:
    """Without them the same sequences have another loss: the comparisons above are not empty."""
    batch = packed()
    plain = MicroBatch(batch.ids_bn, batch.labels_bn, batch.loss_mask_bn)
    apart, joined = each("vanilla-pythia", [batch], [plain])
    assert abs(apart["numbers"]["loss"] - joined["numbers"]["loss"]) > 1e-2
