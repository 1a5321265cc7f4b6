"""FreqKV in training: every block of a text attends to itself and to a compressed memory of what came before.

What a block remembers depends on keys and values alone, not on what attention makes of them.  So the memories of all
blocks are made first, one from the other (`backbone.freqkv_memory`), and then all blocks attend at once: they are equal
in shape, hence one batch.  The first rows of a text, which no memory precedes, are plain attention.

    keys of block j    memory_j [F], its own tokens [D]                      rotated at 0 .. C - 1
    memory_0           the first F rows of the text
    memory_j+1         first s rows of memory_j; M (its others, block j)     before RoPE

What lies between projections, compressions and attention is copying, and on a GPU one kernel for each result.

Shapes: n rows of a sequence, b micro-batch, h heads, g key/value heads of this rank, d head size; C capacity, F memory,
        D hop, B blocks (see `decoding.freqkv_blocks`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaponder.backbone import fused
from megaponder.backbone.documents import Documents
from megaponder.backbone.freqkv_documents import Blocks
from megaponder.backbone.freqkv_memory import remembered
from megaponder.backbone.merged_attention import all_heads
from megaponder.decoding.freqkv_blocks import FreqKV


def turns(feature: FreqKV, turn: Tensor, documents: Documents | None) -> Tensor:
    """`fused.turns` of rows 0 .. C - 1 of a cache, `turn`, and with documents those of the n tokens behind them
    [2, C + n, b, 1, r]."""
    if documents is None:
        return turn
    tokens = turn[:, :, 0][:, documents.blocks(feature).slots]
    return torch.cat([turn.expand(-1, -1, tokens.shape[2], -1, -1), tokens], 1)


@fused.one_kernel
def _opened(
    q: Tensor, k: Tensor, v: Tensor, turn: Tensor, memory: int, adjacent: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of a text: rotated q and k, and v of its first F rows [F, b, heads, d]; rotated q of its full blocks
    [D, B', b, h, d], and of the tokens after them [t, b, h, d]; keys beside values of all blocks [B, C, b, g, 2 d],
    without memories."""
    hop = turn.shape[1] - memory
    tokens = (len(q) - memory) % hop
    end = len(q) - tokens
    both = torch.cat([k, v], -1)
    # after the last token come rows that nobody sees
    own = F.pad(both[memory:], (0, 0, 0, 0, 0, 0, 0, -tokens % hop)).unflatten(0, (-1, hop))
    memories = torch.cat([both[None, :memory], both.new_zeros(len(own) - 1, memory, *both.shape[1:])])
    blocks = q[memory:end].unflatten(0, (-1, hop)).transpose(0, 1)
    return (
        fused.rotated(q[:memory], turn[:, :memory], adjacent),
        fused.rotated(k[:memory], turn[:, :memory], adjacent),
        v[:memory].contiguous(),
        fused.rotated(blocks, turn[:, memory:, None], adjacent).contiguous(),
        fused.rotated(q[end:], turn[:, memory : memory + tokens], adjacent),
        torch.cat([memories, own], 1),
    )


@fused.one_kernel
def _apart_forward(both: Tensor, turn: Tensor, rows: int, adjacent: bool) -> tuple[Tensor, ...]:
    full = len(both) - bool(rows)
    k, v = both[:full].transpose(0, 1).chunk(2, -1)
    out = (fused.rotated(k, turn[:, :, None], adjacent).flatten(1, 2), v.flatten(1, 2).contiguous())
    if not rows:
        return out
    k, v = both[full, :rows].chunk(2, -1)
    return *out, fused.rotated(k, turn[:, :rows], adjacent), v.contiguous()


@fused.one_kernel
def _apart_backward(grads: list[Tensor], turn: Tensor, batch: int, adjacent: bool) -> Tensor:
    dk, dv = (x.unflatten(1, (-1, batch)) for x in grads[:2])
    both = torch.cat([fused.rotated(dk, turn[:, :, None], adjacent, -1.0), dv], -1).transpose(0, 1)
    if grads[2:]:
        dk, dv = grads[2:]
        last = torch.cat([fused.rotated(dk, turn[:, : len(dk)], adjacent, -1.0), dv], -1)
        both = torch.cat([both, F.pad(last, (0, 0, 0, 0, 0, 0, 0, both.shape[1] - len(last)))[None]])
    return both.contiguous()


class _KeysAndValues(torch.autograd.Function):
    """Rotated keys, and values [C, B' b, g, d] of full blocks, then those of the first rows of one that is not, of
    both [B, C, b, g, 2 d]; so is the gradient, in that order."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, turn: Tensor, rows: int, adjacent: bool) -> tuple[Tensor, ...]:
        ctx.save_for_backward(turn)
        ctx.batch, ctx.adjacent = both.shape[2], adjacent
        out: tuple[Tensor, ...] = _apart_forward(both, turn, rows, adjacent)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (turn,) = ctx.saved_tensors
        return _apart_backward([g.contiguous() for g in grads], turn, ctx.batch, ctx.adjacent), None, None, None


@fused.one_kernel
def _closed(head: Tensor, blocks: Tensor, last: Tensor) -> Tensor:
    """[n, b, h, d] of the first F rows [F, b, h, d], of full blocks [D, B' b, h, d] and the tokens after them."""
    return torch.cat([head, blocks.unflatten(1, (-1, head.shape[1])).transpose(0, 1).flatten(0, 1), last])


_rotated = fused.one_kernel(fused.rotated)


class FreqCore:
    """Attention of a layer's core through a memory, where texts are longer than it; q, k come before RoPE.

    turn: see `turns`.
    """

    def __init__(self, feature: FreqKV, core: Any, turn: Tensor, adjacent: bool):
        self._feature, self._core, self._adjacent = feature, core, adjacent
        self._of_rows, self._of_tokens = turn[:, : feature.capacity, :1], turn[:, feature.capacity :]

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

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every sequence is one text."""
        f = self._feature
        *head, own, last, both = _opened(q, k, v, self._of_rows, f.memory, self._adjacent)
        rows = f.memory + len(last) if len(last) else 0
        keys, values, *more = _KeysAndValues.apply(remembered(f, both), self._of_rows, rows, self._adjacent)
        # a last block of few tokens would cost what a full one does
        blocks, last = self._seen(own, keys, values), self._core.bottom_right(last, *more) if more else last
        out: Tensor = _closed(self._core(*head), blocks, last)
        return out

    def _seen(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[D, B b, h, d] of q [D, B, b, h, d] and keys and values [C, B b, g, d]."""
        out: Tensor = self._core.bottom_right(q.flatten(1, 2), keys, values)
        return out

    def _apart(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Every document begins anew."""
        f, places = self._feature, documents.blocks(self._feature)
        both = remembered(f, places.gather(torch.cat([k, v], -1)), places.first)
        q, k = (_rotated(x, self._of_tokens, self._adjacent) for x in (q, k))
        keys, values = _KeysAndValues.apply(both, self._of_rows, 0, self._adjacent)
        blocks = self._seen(places.gather_own(q).transpose(0, 1), keys, values)
        blocks = blocks.unflatten(1, (-1, q.shape[1])).transpose(0, 1)
        return places.scatter(blocks, self._heads(q, k, v, places))

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
