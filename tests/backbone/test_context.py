"""Which rank holds which tokens of a sequence, and what they see."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

from megaponder.engine import cuda_on_cpu

cuda_on_cpu.install()

from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

from megaponder.backbone.context import part_of, parts_of, whole_of  # noqa: E402
from megaponder.backbone.documents import Documents  # noqa: E402
from megaponder.data.batch import make_micro_batch  # noqa: E402
from megaponder.engine.step import part_of_batch  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_parts_of_all_ranks_are_the_sequence(size: int) -> None:
    whole = torch.arange(48).view(24, 2)
    parts = [part_of(whole, size, rank) for rank in range(size)]
    assert torch.equal(torch.cat(parts), parts_of(whole, size))
    assert torch.equal(whole_of(torch.cat(parts), size), whole)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_holds_what_megatron_core_gives_it(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    for module, name in (
        (parallel_state, "context_parallel_"),
        (torch.distributed, ""),
    ):  # 0.16 asks one, 0.19 the other
        monkeypatch.setattr(module, f"get_{name}world_size", lambda *_: 3)
        monkeypatch.setattr(module, f"get_{name}rank", lambda *_: rank)
    batch = make_micro_batch(torch.arange(50).view(2, 25).numpy(), "plain", None)
    newer = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
    theirs = get_batch_on_this_cp_rank({"tokens": batch.ids_bn, "labels": batch.labels_bn}, **newer)
    ours = part_of_batch(batch, 3, rank)
    assert torch.equal(ours.ids_bn, theirs["tokens"]) and torch.equal(ours.labels_bn, theirs["labels"])
    assert ours.places_n is not None and torch.equal(ours.places_n, ours.ids_bn[0])


@pytest.mark.parametrize(("slots", "window"), [(1, 0), (2, 0), (3, 2)])
def test_a_part_sees_what_the_whole_sees(slots: int, window: int) -> None:
    text = torch.randint(1, 9, (2, 13), generator=torch.Generator().manual_seed(1))
    text[0, 4] = text[1, 9] = 0
    batch = make_micro_batch(text.numpy(), "plain", 0, document_attention=True)
    assert batch.starts_bn is not None
    whole = Documents(batch.starts_bn, batch.edges).visible(slots, window)
    for rank in range(3):
        part = part_of_batch(batch, 3, rank)
        seen = Documents(part.starts_bn, None, part.places_n, 3).visible(slots, window)
        assert torch.equal(seen, part_of(whole, 3, rank, dim=1))
