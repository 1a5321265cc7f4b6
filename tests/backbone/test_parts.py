"""What Transformer Engine is handed: strides as it compares them."""

from __future__ import annotations

import torch

from megaponder.engine import cuda_on_cpu

cuda_on_cpu.install()

from megaponder.backbone.parts import with_plain_strides  # noqa: E402


def test_one_sequence_has_the_strides_of_its_shape() -> None:
    drawn = torch.randn(48, dtype=torch.float64)
    odd = drawn.as_strided((6, 1, 2, 4), (8, 1, 4, 1)).requires_grad_()  # as a compiled kernel may leave it
    assert odd.is_contiguous(), "so `contiguous` does nothing"
    found = with_plain_strides(odd)
    assert found.stride() == (8, 8, 4, 1) and found.data_ptr() == odd.data_ptr() and torch.equal(found, odd)
    (found * drawn.view(6, 1, 2, 4)).sum().backward()
    assert odd.grad is not None and torch.equal(odd.grad.flatten(), drawn)
    part = torch.randn(6, 1, 3, 4)[:, :, :2]  # values inside of a projection
    assert with_plain_strides(part).stride() == (8, 8, 4, 1) and torch.equal(with_plain_strides(part), part)
    many = torch.randn(6, 2, 3, 4)[:, :, :2]
    assert with_plain_strides(many) is many
