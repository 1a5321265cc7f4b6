"""The texts of `benchmarks.long_context`: bytes of a corpus, and facts in noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.study import corpus as texts
from megaponder.errors import UserError

SYMBOLS, FACTS, NOISE = 32, 8, 64
"""Keys are 0 .. 31, values 32 .. 63, noise 64 .. 127."""
Batch = Callable[[int, int], tuple[Tensor, Tensor]]
"""(texts, their length) -> ids [b, n + 1], and whether each id counts as a target [b, n + 1]."""


def corpus_bytes(corpus: Path, kept_bytes: int, longest: int, read: int) -> tuple[Tensor, Tensor]:
    """(Training text [bytes], held-out texts [b, longest + 1]); documents are joined by a 0."""
    kept, held = 0, []
    train: list[bytes] = []
    for path in texts.inputs(corpus, "train"):
        for document in texts.documents(path):
            if kept < kept_bytes:
                train.append(document["text"].encode() + b"\0")
                kept += len(train[-1])
    for path in texts.inputs(corpus, "heldout"):
        for document in texts.documents(path):
            if len(text := document["text"].encode()) > longest and len(held) < read:
                held.append(torch.frombuffer(bytearray(text[: longest + 1]), dtype=torch.uint8))
    if not held:
        raise UserError(f"--corpus {corpus}: none of its held-out texts has more than {longest} bytes.")
    return torch.frombuffer(bytearray(b"".join(train)), dtype=torch.uint8), torch.stack(held).long()


def crops(text: Tensor, device: str) -> Batch:
    """Pieces of a text at random places."""
    draw, text = torch.Generator().manual_seed(1), text.to(device)

    def batch(b: int, n: int) -> tuple[Tensor, Tensor]:
        begin = torch.randint(0, len(text) - n - 1, (b, 1), generator=draw).to(device)
        ids = text[begin + torch.arange(n + 1, device=device)].long()
        return ids, torch.ones_like(ids)

    return batch


def facts(device: str, seed: int = 2, once: bool = False) -> Batch:
    """Texts of noise with pairs (key, value) in the first half; the second repeats them, and there values count.

    The second half holds nothing else, so most answers were given some tokens before as well; `once`: it is noise too,
    and each pair comes again once.
    """
    draw = torch.Generator().manual_seed(seed)

    def batch(b: int, n: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(NOISE, 2 * NOISE, (b, n + 1), generator=draw)
        counts = torch.zeros_like(ids)
        keys = torch.rand(b, SYMBOLS, generator=draw).argsort(1)[:, :FACTS]
        values = torch.randint(SYMBOLS, 2 * SYMBOLS, (b, FACTS), generator=draw)
        told = 2 * torch.rand(b, n // 4, generator=draw).argsort(1)[:, :FACTS]  # even places of the first half
        again = (n // 2 + 2 * torch.arange(n // 4)).expand(b, -1)
        which = torch.randint(0, FACTS, again.shape, generator=draw)
        if once:
            again = n // 2 + 2 * torch.rand(b, n // 4, generator=draw).argsort(1)[:, :FACTS]
            which = torch.arange(FACTS).expand(b, -1)
        for at, key, value in ((told, keys, values), (again, keys.gather(1, which), values.gather(1, which))):
            ids.scatter_(1, at, key)
            ids.scatter_(1, at + 1, value)
        counts.scatter_(1, again + 1, 1)
        return ids.to(device), counts.to(device)

    return batch
