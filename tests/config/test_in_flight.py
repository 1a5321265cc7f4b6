"""What a stage holds at once: by hand, and against a run of megatron-core's schedule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megaponder.config.in_flight import InFlight, counted, in_flight
from megaponder.config.rules.layout import choose_group
from tests.distributed import run_workers


@pytest.mark.parametrize(
    ("stage", "stages", "passes", "micro_batches", "group", "expected"),
    [
        (0, 1, 4, 8, 1, 4),  # all passes of one micro-batch, then its backward
        (0, 4, 1, 8, 4, 4),  # 1F1B: as many micro-batches as stages to go
        (3, 4, 1, 8, 4, 1),
        (0, 4, 1, 2, 4, 2),
        (0, 2, 3, 4, 2, 2 + 2 * 2 + 1),  # interleaved: (P - r - 1) 2 + (K - 1) N + 1
        (1, 2, 3, 4, 2, 2 * 2 + 1),
        (0, 2, 3, 5, 3, 2 + 2 * 3 + 1),
        (0, 4, 2, 4, 4, 8),  # never more than there are
    ],
)
def test_passes(stage: int, stages: int, passes: int, micro_batches: int, group: int, expected: int) -> None:
    assert in_flight(stage, stages, passes, micro_batches, group).passes == expected


def test_places_let_a_micro_batch_keep_its_number() -> None:
    assert in_flight(1, 2, 4, 8, 2) == InFlight(7, 4, (4, 3, 2, 1))
    assert in_flight(1, 2, 4, 8, 2).places == (4, 4, 2, 1)
    assert in_flight(0, 1, 3, 8, 1).places == (1, 1, 1)


SHAPES = [(2, 4), (2, 5), (2, 2), (1, 5), (4, 9), (3, 7)]
"""Further passes, micro-batches of a rank."""


def watch(shapes: list[tuple[int, int]]) -> list[tuple[int, int, list[int], bool]]:
    """In a worker: most passes, micro-batches and micro-batches of each pass at once; whether no place is taken twice.

    Of each shape, by the calls that the schedule really makes on this stage.
    """
    import torch

    from megaponder.config.resolve import resolve
    from megaponder.config.schema import ModelConfig, RunConfig
    from megaponder.data.batch import MicroBatch
    from megaponder.engine import groups
    from megaponder.engine.cuda_on_cpu import install

    install()
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    found = []
    for further, micro_batches in shapes:
        cfg = RunConfig(model=ModelConfig(preset="llama-tiny", vocab_size=96))
        cfg.ponder.method, cfg.ponder.options = "loop", {"extra_passes": further}
        cfg.data.sequence_length, cfg.train.steps, cfg.parallel.pipeline = 8, 1, 2
        cfg.train.global_batch, cfg.train.micro_batch = micro_batches, 1
        cfg = resolve(cfg)
        place = groups.init(cfg)
        engine = build_engine(cfg, method_of(cfg), place)
        now: set[tuple[int, int]] = set()
        seen: list[set[tuple[int, int]]] = []
        run = engine._runner.__class__.__call__

        def watched(self: Any, p: Any, index: int, *rest: Any, run: Any = run, now: Any = now, seen: Any = seen) -> Any:
            now.add((p.index, index))
            seen.append(set(now))
            out = run(self, p, index, *rest)
            end = out.total if p.last and hasattr(out, "total") else out.rows
            end.register_hook(lambda _: now.discard((p.index, index)))
            return out

        engine._runner.__class__ = type("Watched", (engine._runner.__class__,), {"__call__": watched})
        texts = torch.randint(0, 90, (micro_batches, 1, 9))
        engine.forward_backward([MicroBatch(t[:, :-1], t[:, 1:], torch.ones(1, 8)) for t in texts], 0, train=True)
        flight = in_flight(place.pp_rank, 2, further + 1, micro_batches, choose_group(micro_batches, 2) or 2)
        apart = all(
            len({(p, i % flight.places[p]) for p, i in at}) == len(at)
            and len({i % flight.micro_batches for p, i in at if p == 0}) == sum(p == 0 for p, _ in at)
            for at in seen
        )
        of_pass = [max(sum(q == p for q, _ in at) for at in seen) for p in range(further + 1)]
        found.append((max(map(len, seen)), max(sum(p == 0 for p, _ in at) for at in seen), of_pass, apart))
    return found


def test_it_is_what_the_schedule_does() -> None:
    ranks = run_workers("tests.config.test_in_flight:watch", 2, args={"shapes": SHAPES})
    for stage, rank in enumerate(ranks):
        for (further, m), (passes, micro_batches, of_pass, apart) in zip(SHAPES, rank, strict=True):
            flight = in_flight(stage, 2, further + 1, m, choose_group(m, 2) or 2)
            assert (passes, micro_batches, tuple(of_pass)) == (flight.passes, flight.micro_batches, flight.of_pass)
            assert apart


def test_many_micro_batches_are_as_a_few_groups() -> None:
    """The count of a long schedule is not walked through: it ends at once, and is that of the whole walk."""
    assert in_flight(0, 1, 3, 2**31 - 1, 1).passes == 3
    for stages, passes, group in itertools.product((1, 2, 3), (1, 3), (3, 4)):
        for stage, m in itertools.product(range(stages), range(60, 70)):
            assert in_flight(stage, stages, passes, m, group) == counted(stage, stages, passes, m, group)
