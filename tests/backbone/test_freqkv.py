"""FreqKV's compression and its attention in training: in closed form, against the paper's loop, and who sees whom."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megaponder.backbone import freqkv_memory, fused
from megaponder.backbone.attention import SdpaCore
from megaponder.backbone.documents import Documents
from megaponder.backbone.freqkv import FreqCore, turns
from megaponder.backbone.freqkv_memory import remembered
from megaponder.decoding import freqkv, freqkv_blocks
from megaponder.decoding.freqkv_blocks import FreqKV
from tests.oracles import freqkv as oracle

DOUBLE: Any = {"dtype": torch.float64}
HEADS, GROUPS, SIZE = 4, 2, 4
FORMS = [FreqKV(8, 2, 0.5), FreqKV(7, 0, 0.3), FreqKV(9, 1, 0.8), FreqKV(5, 3, 0.5)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


# --- the compression --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "kept"), [(10, 5), (11, 4), (9, 8), (2, 1), (1364, 682), (1043, 333)])
def test_it_is_the_cosine_transform(n: int, kept: int) -> None:
    """Both forms, and their transposes; rows of the matrix sum to 1, and M M^T = (L / N) I."""
    x, g = draw(n, 2), draw(kept, 2, seed=1)
    m = freqkv.matrix(n, kept, torch.float64, x.device)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(m.sum(1), torch.ones(kept, **DOUBLE), **close)
    torch.testing.assert_close(m @ m.t(), kept / n * torch.eye(kept, **DOUBLE), **close)
    if n < 100:
        torch.testing.assert_close(m @ x, oracle.compress(x, kept), **close)
    torch.testing.assert_close(freqkv._by_fft(x, kept), m @ x, **close)
    torch.testing.assert_close(freqkv._by_fft(g, n), m.t() @ g, **close)
    torch.testing.assert_close(freqkv.resample(x, kept), m @ x, **close)
    signal = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((freqkv.resample(signal, kept) * g).sum(), signal)
    torch.testing.assert_close(grad, m.t() @ g, **close)


def test_what_it_keeps() -> None:
    n, kept = 64, 32
    place = torch.arange(n, **DOUBLE)
    assert torch.allclose(freqkv.resample(torch.full((n, 1), 3.0), kept), torch.full((kept, 1), 3.0))
    low = sum(a * torch.cos(math.pi * k / n * (place + 0.5)) for k, a in ((0, 2.0), (5, -1.0), (31, 0.5)))
    back = n / kept * freqkv.resample(freqkv.resample(low[:, None], kept), n)  # the transpose, which is L / N of it
    assert torch.allclose(back[:, 0], low), "low frequencies come back whole"
    short = freqkv.resample(torch.sin(place / 20)[:, None], kept)[1:-1, 0]
    assert torch.allclose(short, torch.sin((2 * place[:kept] + 0.5) / 20)[1:-1], atol=5e-3), "it is resampled"
    # in BF16 too it is computed in FP32: only the result is rounded
    rough = draw(700, 3).bfloat16()
    assert torch.equal(freqkv.resample(rough, 350), freqkv.resample(rough.float(), 350).bfloat16())
    assert torch.autograd.gradcheck(lambda x: freqkv.resample(x, 3), draw(8, 2).requires_grad_())
    assert freqkv.matrix(8, 3, torch.float32, rough.device).dtype is torch.float32


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("form", [FreqKV(1024, 4), FreqKV(701, 3, 0.3), FreqKV(12, 1, 0.9)], ids=str)
def test_bf16_matrices_have_together_the_digits_of_a_fine_one(form: FreqKV, forward: bool) -> None:
    """What multiplies BF16 on GPUs, both ways; the sinks go through unchanged."""
    x, s, m = draw(form.capacity, 16).bfloat16(), form.sink, freqkv.matrix(form.span, form.kept, **DOUBLE, device="cpu")
    rest = x[s:] if forward else x[s : form.memory]
    exact = torch.cat([x[:s].double(), (m if forward else m.t()) @ rest.double()])
    found = freqkv_memory.by_parts(form, x, forward)
    rows = form.memory if forward else form.capacity
    assert torch.equal(found.sum(0)[:s], x[:s].float()) and not found[:, rows:].any()
    wrong = [float((y[s:rows].double() - exact[s:]).norm() / exact[s:].norm()) for y in (found.sum(0), found[0])]
    assert wrong[0] < 3e-6 and wrong[1] > 3e-4, "the second matrix counts"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_memories_on_a_gpu_are_those_of_a_cpu() -> None:
    """In BF16, forward and backward, with documents and without: only roundings of single elements differ."""
    form, blocks, b = FreqKV(64, 3, 0.4), 5, 2
    first = torch.rand(blocks, b, generator=torch.Generator().manual_seed(1)) < 0.3
    given, weight = (draw(blocks, form.capacity, b, 3, 16, seed=i).bfloat16() for i in range(2))
    for documents in (None, first):
        found = []
        for device in ("cpu", "cuda"):
            x = given.to(device).requires_grad_()
            out = remembered(form, x * 1, None if documents is None else documents.to(device))
            (grad,) = torch.autograd.grad((out * weight.to(device)).sum(), x)
            found.append([y.detach().cpu().double() for y in (out, grad)])
        for want, got in zip(*found, strict=True):
            assert float((want - got).norm() / want.norm()) < 2e-3


def test_heads_that_share_keys_can_be_repeated_before_or_after() -> None:
    x = draw(10, 2, GROUPS, SIZE)
    again = freqkv.resample(x.repeat_interleave(3, 2), 5)
    torch.testing.assert_close(freqkv.resample(x, 5).repeat_interleave(3, 2), again, rtol=1e-12, atol=1e-12)


def test_where_tokens_lie() -> None:
    """The published setting, whose chunks are counted otherwise: C tokens, then hops."""
    f = FreqKV(4096)
    assert (f.span, f.kept, f.hop, f.memory) == (4092, 2046, 2046, 2050)
    for tokens in (1, 2050, 2051, 4096, 4097, 8192, 32768):
        assert f.events(tokens) == max(0, math.ceil((tokens - 4096) / f.hop)), tokens
    assert f.events(8192) == 3 and f.events(32768) == 15
    for form in FORMS:
        at = freqkv.slots(form, torch.arange(100))
        assert at.max() < form.capacity and torch.equal(at[: form.capacity], torch.arange(form.capacity))
    assert freqkv_blocks.read({}) is None and freqkv_blocks.read({"capacity": 9}) == FreqKV(9, 4, 0.5)
    with pytest.raises(ValueError, match="has no"):
        freqkv_blocks.read({"capacity": 9, "sinks": 4})


# --- attention --------------------------------------------------------------------------------------------------------
def turn_of(rows: int) -> Tensor:
    angles = torch.outer(torch.arange(rows, **DOUBLE), torch.tensor([1.0, 0.3], **DOUBLE)).repeat(1, 2)
    return fused.turns(angles[:, None, None])


def attend(form: FreqKV, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
    turn = turns(form, turn_of(form.capacity), documents)
    return FreqCore(form, SdpaCore(), turn, False)(q, k, v, documents=documents)


def expected(form: FreqKV, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def rotate(x: Tensor, at: Tensor) -> Tensor:
        assert at.max() < form.capacity
        return fused.rotated(x, turn_of(form.capacity)[:, at][:, :, 0])

    return oracle.attention(q, k, v, form.capacity, form.sink, form.ratio, rotate)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_blocks_at_once_are_the_loop(form: FreqKV) -> None:
    for n in (form.capacity + 1, 3 * form.hop + form.memory, 31):
        q, k, v = (draw(n, 2, heads, SIZE, seed=i) for i, heads in enumerate((HEADS, GROUPS, GROUPS)))
        if n <= form.capacity:
            continue
        found = attend(form, q, k, v)
        for b in range(2):
            torch.testing.assert_close(found[:, b], expected(form, q[:, b], k[:, b], v[:, b]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_documents_begin_anew(form: FreqKV) -> None:
    """Values and gradients of each document alone; documents of one row to several blocks, in two other orders."""
    lengths = ([1, 17, form.memory, form.memory + 1, 4], [form.capacity + 1, 2, 25])
    n = max(sum(x) for x in lengths)
    lengths = [[*x, n - sum(x)] for x in lengths]
    starts = torch.tensor([[sum(x[:i]) for i, m in enumerate(x) for _ in range(m)] for x in lengths])
    given = [draw(n, 2, heads, SIZE, seed=i).requires_grad_() for i, heads in enumerate((HEADS, GROUPS, GROUPS))]
    weight = draw(n, 2, HEADS, SIZE, seed=9)
    found = attend(form, *given, documents=Documents(starts, None))
    parts = []
    for b, each in enumerate(lengths):
        edges = [sum(each[:i]) for i in range(len(each) + 1)]
        alone = [expected(form, *(x[i:j, b] for x in given)) for i, j in pairwise(edges) if i < j]
        parts.append(torch.cat(alone))
    whole = torch.stack(parts, 1)
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad((x * weight).sum(), given) for x in (found, whole)]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


def test_derivatives_through_two_compressions() -> None:
    form = FreqKV(4, 1, 0.4)
    given = [draw(8, 1, heads, SIZE, seed=i).requires_grad_() for i, heads in enumerate((2, 1, 1))]
    assert form.events(8) == 2
    assert torch.autograd.gradcheck(lambda *x: attend(form, *x), given)


def test_nobody_sees_the_future() -> None:
    """By value: later rows change nothing before them; by gradient: nothing flows back from earlier rows."""
    form, at, n = FreqKV(8, 2, 0.5), 14, 25
    given = [draw(n, 1, heads, SIZE, seed=i).requires_grad_() for i, heads in enumerate((HEADS, GROUPS, GROUPS))]
    other = [torch.cat([x[: at + 1], draw(n - at - 1, 1, x.shape[2], SIZE, seed=7)]) for x in given]
    found = attend(form, *given)
    assert torch.equal(found[: at + 1], attend(form, *other)[: at + 1])
    for grad in torch.autograd.grad(found[: at + 1].sum(), given):
        assert (grad[at + 1 :] == 0).all() and (grad[:at] != 0).any()
    for grad in torch.autograd.grad(attend(form, *given)[at].sum(), given[1:]):
        assert (grad[: at + 1].abs().amax((1, 2, 3)) > 0).all(), "everything before is seen"


def test_the_memory_has_no_bias() -> None:
    """The public code's second path adds 1 to the logits of the memory; here equal keys weigh alike."""
    form, n = FreqKV(8, 2, 0.5), 20  # five rows of memory, five blocks of three
    v = draw(n, 1, 1, SIZE, seed=2)
    out = attend(form, draw(n, 1, 1, SIZE), torch.zeros(n, 1, 1, SIZE, **DOUBLE), v)
    last = n - 1
    own = v[form.memory :].unflatten(0, (-1, form.hop))
    held = remembered(form, torch.cat([v[None, : form.memory].expand(5, -1, -1, -1, -1), own], 1))[-1, : form.memory]
    assert form.blocks(n) == 5 and (last - form.memory) % form.hop == 2
    seen = torch.cat([held, v[last - 2 :]])
    assert torch.allclose(out[last, 0, 0], seen.mean(0)[0, 0])
