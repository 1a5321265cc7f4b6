"""FreqKV in training: every block of a text attends to itself and to a compressed memory of what came before.

What a block remembers depends on keys and values alone, not on what attention makes of them.  So the memories of all
blocks are made first, one from the other, and then all blocks attend at once: they are equal in shape, hence one batch.
The first rows of a text, which no memory precedes, are plain attention.

    keys of block j    memory_j [F], its own tokens [D]                      rotated at 0 .. C - 1
    memory_0           the first F rows of the text
    memory_j+1         first s rows of memory_j; M (its others, block j)     before RoPE

Shapes: n rows of a sequence, b micro-batch, h heads, g key/value heads of this rank, d head size; C capacity, F memory,
        D hop, B blocks (see `decoding.freqkv_blocks`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megaponder.backbone import fused
from megaponder.backbone.documents import Documents
from megaponder.backbone.freqkv_documents import Blocks
from megaponder.backbone.merged_attention import all_heads
from megaponder.decoding.freqkv import resample, slots
from megaponder.decoding.freqkv_blocks import FreqKV


def memories(feature: FreqKV, head: Tensor, blocks: Tensor, first: Tensor | None = None) -> Tensor:
    """What each block remembers [B, F, b, ...], of the tokens of all blocks [B, D, b, ...].

    head: the first F rows of the text [F, b, ...]; with `first` [B, b], true where a block is the first of its
    document, those before each block [B, F, b, ...], which count there.
    """
    s, kept = feature.sink, feature.kept
    heads = [head] if first is None else head.unbind()
    found = [heads[0]]
    for j, block in enumerate(blocks.unbind()[:-1], start=1):  # indices would leave a gradient of all blocks each
        before = found[-1]
        memory = torch.cat([before[:s], resample(torch.cat([before[s:], block]), kept)])
        if first is not None:
            memory = torch.where(first[j].view(-1, *[1] * (memory.dim() - 2)), heads[j], memory)
        found.append(memory)
    return torch.stack(found)


def turns(feature: FreqKV, turn: Tensor, rows: int, documents: Documents | None) -> Tensor:
    """`fused.turns` of the F rows of a memory and then of the n = `rows` tokens [2, F + n, 1 or b, 1, r].

    turn: those of positions 0 .. C - 1.
    """
    memory = turn[:, : feature.memory]
    if documents is None:
        return torch.cat([memory, turn[:, slots(feature, torch.arange(rows, device=turn.device))]], 1)
    tokens = turn[:, :, 0][:, documents.blocks(feature).slots]
    return torch.cat([memory.expand(-1, -1, tokens.shape[2], -1, -1), tokens], 1)


_rotated = fused.one_kernel(fused.rotated)


class FreqCore:
    """Attention of a layer's core through a memory, where texts are longer than it; q, k come before RoPE.

    turn: see `turns`.
    """

    def __init__(self, feature: FreqKV, core: Any, turn: Tensor, adjacent: bool):
        self._feature, self._core, self._adjacent = feature, core, adjacent
        self._of_memory, self._of_tokens = turn[:, : feature.memory, :1], turn[:, feature.memory :]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None = None,
        slots: int = 1,
        documents: Documents | None = None,
        context: None = None,
    ) -> Tensor:
        """[n, b, h, d] of q [n, b, h, d] and k, v [n, b, g, d], n more than C."""
        assert key_bias is None and slots == 1  # see config.rules.freqkv
        return self._whole(q, k, v) if documents is None else self._apart(q, k, v, documents)

    def _rotated(self, x: Tensor, turn: Tensor) -> Tensor:
        """x [n, b, heads, d] at its positions."""
        out: Tensor = _rotated(x, turn, self._adjacent)
        return out

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every sequence is one text."""
        f, n, memory, hop = self._feature, len(q), self._feature.memory, self._feature.hop
        turned, q = self._rotated(k, self._of_tokens), self._rotated(q, self._of_tokens)
        out = self._core(*(x[:memory].clone() for x in (q, turned, v)))  # slices would keep all rows alive
        missing = memory + f.blocks(n) * hop - n  # rows after the last token, which none of them sees

        def cut(x: Tensor) -> Tensor:
            x = F.pad(x[memory:], (0, 0, 0, 0, 0, 0, 0, missing)) if missing else x[memory:]
            return x.unflatten(0, (-1, hop))

        both = torch.cat([k, v], -1)
        remembered = memories(f, both[:memory], cut(both))
        blocks = self._blocks(cut(q), cut(turned), cut(v), remembered)
        return torch.cat([out, blocks.flatten(0, 1)[: n - memory]])

    def _apart(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Every document begins anew."""
        f, memory, places = self._feature, self._feature.memory, documents.blocks(self._feature)
        turned, q = self._rotated(k, self._of_tokens), self._rotated(q, self._of_tokens)
        rows = places.gather(torch.cat([k, v, turned], -1))
        raw, own = rows[..., : 2 * k.shape[-1]], rows[:, memory:]
        remembered = memories(f, raw[:, :memory], raw[:, memory:], places.first)
        own_v, own_k = own[..., k.shape[-1] : 2 * k.shape[-1]], own[..., 2 * k.shape[-1] :]
        blocks = self._blocks(places.gather_own(q), own_k, own_v, remembered)
        return places.scatter(blocks, self._heads(q, turned, v, places))

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, remembered: Tensor) -> Tensor:
        """[B, D, b, h, d] of rotated q, k and of v [B, D, b, heads, d], and memories [B, F, b, g, 2 d]."""
        blocks, b = q.shape[0], q.shape[2]
        memory_k, memory_v = remembered.chunk(2, -1)
        memory_k = self._rotated(memory_k.transpose(0, 1).flatten(1, 2), self._of_memory)
        memory_k = memory_k.unflatten(1, (blocks, b)).transpose(0, 1)
        k, v = torch.cat([memory_k, k], 1), torch.cat([memory_v, v], 1)
        k, v = all_heads(k, q.shape[3]), all_heads(v, q.shape[3])
        q, k, v = (x.permute(0, 2, 3, 1, 4).flatten(0, 1) for x in (q, k, v))  # [B b, h, rows, d]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))
        return out.unflatten(0, (blocks, b)).permute(0, 3, 1, 2, 4)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, places: Blocks) -> Tensor:
        """Of the first F rows of each document, anything finite at the others: tiles of F rows see two tiles."""
        n, tile = len(q), min(self._feature.memory, len(q))
        missing = -n % tile

        heads = q.shape[2]

        def tiles(x: Tensor) -> Tensor:
            x = F.pad(all_heads(x, heads), (0, 0, 0, 0, 0, 0, 0, missing))
            return x.unflatten(0, (-1, tile)).permute(2, 0, 3, 1, 4)  # [b, tiles, h, tile, d]

        def two(x: Tensor) -> Tensor:
            x = tiles(x)
            return torch.cat([F.pad(x[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), x], 3)

        mask = places.seen_in_tiles(tile).flatten(0, 1)[:, None]
        b, (q, k, v) = q.shape[1], (x.flatten(0, 1) for x in (tiles(q), two(k), two(v)))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.unflatten(0, (b, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)[:n]
