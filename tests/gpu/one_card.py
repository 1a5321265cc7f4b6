"""More ranks than GPUs, which NCCL refuses: each set of ranks that has a GPU each calls itself a host.

NCCL compares a card's address only among ranks of one host, and a host's name is NCCL_HOSTID; such hosts talk over
sockets.  So the layouts of several GPUs can be tried on one, with the collectives that a cluster runs.

With MEGAPONDER_TEST_MESSAGES=late, groups carry tensors through the host and gloo instead.  Like NCCL's, an operation
starts when the stream that it was called on gets there, runs beside what that stream does next, and `wait` makes the
stream wait.  Messages are read late on purpose, so that who overwrites one before `wait` sends garbage.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LATE = 0.02
"""Seconds by which a message is read late."""


class _Work(dist.Work):
    """Done when `finish` has run, in the thread that waits."""

    def __init__(self, finish: Callable[[], None]):
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        return self._finish is None


class OneCard(dist.ProcessGroup):
    """The operations that megatron-core and the engine use."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._letters: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._post, daemon=True).start()

    def getBackendName(self) -> str:  # noqa: N802
        return "onecard"

    # --- messages ---
    def _post(self) -> None:
        stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        while True:
            tensor, ready, to, tag, sent = self._letters.get()
            time.sleep(LATE)
            if stream is None:
                letter = tensor.clone()
            else:
                with torch.cuda.stream(stream):
                    stream.wait_event(ready)
                    letter = tensor.cpu()
            self._gloo.send([letter], to, tag).wait()
            sent.set()

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Any:
        ready, sent = None, threading.Event()
        if tensors[0].is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._letters.put((tensors[0].detach(), ready, to, tag, sent))
        return _Work(lambda: (sent.wait(), None)[1])

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Any:
        letter = torch.empty_like(tensors[0], device="cpu")
        work = self._gloo.recv([letter], source, tag)

        def finish() -> None:
            work.wait()
            tensors[0].detach().copy_(letter)

        return _Work(finish)

    # --- collectives: done when they return ---
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for t in tensors:
            here = t.detach().cpu()
            chosen = dist.AllreduceOptions()
            chosen.reduceOp = op
            self._gloo.allreduce([here], chosen).wait()
            t.detach().copy_(here)
        return _Work(lambda: None)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for t in tensors:
            here = t.detach().cpu()
            self._gloo.broadcast([here], opts).wait()
            t.detach().copy_(here)
        return _Work(lambda: None)

    def gather(self, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], opts: Any) -> Any:
        here = [[torch.empty_like(o, device="cpu") for o in out] for out in outputs]
        self._gloo.gather(here, [t.detach().cpu() for t in given], opts).wait()
        for out, arrived in zip(outputs, here, strict=True):
            for o, h in zip(out, arrived, strict=True):
                o.detach().copy_(h)
        return _Work(lambda: None)

    def scatter(self, outputs: Sequence[Tensor], given: Sequence[Sequence[Tensor]], opts: Any) -> Any:
        here = [torch.empty_like(o, device="cpu") for o in outputs]
        self._gloo.scatter(here, [[t.detach().cpu() for t in each] for each in given], opts).wait()
        for o, h in zip(outputs, here, strict=True):
            o.detach().copy_(h)
        return _Work(lambda: None)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for out, given in zip(outputs, inputs, strict=True):
            here = [torch.empty_like(o, device="cpu") for o in out]
            self._gloo.allgather([here], [given.detach().cpu()]).wait()
            for o, h in zip(out, here, strict=True):
                o.detach().copy_(h)
        return _Work(lambda: None)

    def _allgather_base(self, out: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.allgather([list(out.detach().view(self.size(), -1).unbind())], [given.reshape(-1)])

    all_gather_single = _allgather_base  # its name since torch 2.13

    def allgather_into_tensor_coalesced(self, outs: Sequence[Tensor], given: Sequence[Tensor], *_: Any) -> Any:
        for o, g in zip(outs, given, strict=True):
            self._allgather_base(o, g)
        return _Work(lambda: None)

    def _reduce_scatter_base(self, out: Tensor, given: Tensor, opts: Any = None) -> Any:
        whole = given.detach().clone()
        self.allreduce([whole], opts)
        out.detach().copy_(whole.view(self.size(), -1)[self.rank()].view_as(out))
        return _Work(lambda: None)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outs: Sequence[Tensor], given: Sequence[Tensor], opts: Any) -> Any:
        for o, g in zip(outs, given, strict=True):
            self._reduce_scatter_base(o, g, opts)
        return _Work(lambda: None)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(dist.BarrierOptions() if opts is None else opts)


def share() -> None:
    """In a worker, before any group exists: where there are fewer GPUs than ranks, let ranks share them."""
    ranks, gpus = int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    if gpus == 0 or ranks <= gpus:
        return
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % gpus)
    if not late():
        os.environ |= {"NCCL_HOSTID": f"host{rank // gpus}", "NCCL_SOCKET_IFNAME": "lo"}
    elif not dist.is_initialized():
        dist.Backend.register_backend(
            "onecard", lambda store, rank, size, timeout: OneCard(store, rank, size, timeout), devices=["cpu", "cuda"]
        )
        dist.init_process_group("onecard")


def late() -> bool:
    """Whether ranks that share a GPU are to send messages late, which NCCL cannot."""
    return os.environ.get("MEGAPONDER_TEST_MESSAGES") == "late"
