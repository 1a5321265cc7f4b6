"""Continuous batching of transformers (`generate_batch`): many texts in one row, keys and values in pages.

A pass is a layer of its own to the paged cache, and attention is computed by transformers' attention interface, which
knows the pages.  So it takes methods whose passes have one row for each token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megaponder.decoding.passes import Run, View


@dataclass
class PagedView(View):
    """A pass over the rows of a batch in pages."""

    attends: ClassVar[bool] = True
    pages: Any = None
    given: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the attention function."""

    def attend(self, module: Any, entry: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = dict(self.given)  # the cache changes it
        k, v = self.pages.update(k, v, entry, given)
        function = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        out, _ = function(module, q, k, v, self.mask, scaling=module.scaling, dropout=0.0, **given)
        return out.transpose(1, 2)  # theirs is [b, r, heads, d]


@dataclass
class PagedRun(Run):
    """The passes of one forward over such a batch."""

    pages: Any = None
    mask_of_batch: Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def real(self) -> Tensor:
        return torch.ones_like(self.positions, dtype=torch.bool)

    def view(self, index: int = 0, slots: int = 1, alive: Tensor | None = None, weight: Tensor | None = None) -> View:
        assert slots == 1 and alive is None and weight is None
        given = (self.positions, self.mask_of_batch, None, None, None, self.pages, self.arguments)
        return PagedView(*given, of_all=self.earlier)
