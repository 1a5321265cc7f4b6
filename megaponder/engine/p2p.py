"""Pipeline messages whose shape changes from pass to pass, without exchanging shapes.

megatron-core's schedule sends in the order of its own table, and messages between two ranks arrive in the order sent.
So the i-th message that a rank receives belongs to the i-th entry of the table that has a sender, and both sides know
its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megaponder.engine.groups import Groups
from megaponder.ponder.base import Pass

Shape = list[int]


def receive_orders(
    passes: Sequence[Pass], microbatches: int, group: int, groups: Groups
) -> tuple[list[tuple[Pass, bool]], list[tuple[Pass, bool]]]:
    """(forward, backward) messages in order of arrival, each as (pass, whether it is that pass's feedback).

    The first stage receives the feedback of passes 0..K-2, other stages the rows of their own pass; backward, the last
    stage receives the gradient of the feedback, other stages that of the rows they sent on.
    """
    table = get_schedule_table(microbatches, len(passes), group)
    forward, backward = [], []
    for _, chunk in table:
        p = passes[chunk]
        if not groups.is_first_stage:
            forward.append((p, False))
        elif not p.last:
            forward.append((p, True))
    for _, chunk in table:
        p = passes[len(passes) - 1 - chunk]
        if not groups.is_last_stage:
            backward.append((p, False))
        elif not p.last:
            backward.append((p, True))
    return forward, backward


class PassCommunicator(P2PCommunicator):
    """megatron-core's communicator; `variable_seq_lengths` makes it request shapes, which are looked up here."""

    def __init__(self, pp_group: Any, config: Any, forward: Iterator[Shape], backward: Iterator[Shape]):
        super().__init__(pp_group, config)
        self._forward, self._backward = forward, backward

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None

    def _communicate(self, *, tensor_send_next: Any, tensor_send_prev: Any, **kwargs: Any) -> Any:
        # a method may return a transposed view, and autograd a strided gradient; messages are flat memory
        sends = (None if t is None else t.contiguous() for t in (tensor_send_next, tensor_send_prev))
        nxt, prev = sends
        return super()._communicate(tensor_send_next=nxt, tensor_send_prev=prev, **kwargs)
