"""Retrofit: the recurrence of Huginn around the blocks of a pretrained model.

    e = Prelude(We[ids]),  s_0 = sigma z,  s_i = Core(Wa [s_{i-1} ; e])  (r times),  logits = N(Coda(s_r)) Wo^T

as in `huginn`, but embeddings are not scaled, no norm stands between core and coda, and Wa [H, 2H], the only
new weight, starts as a linear layer of PyTorch does.  The paper leaves layers out, of TinyLlama's 22 those from 4
to 9: import the model with `--layers 0-3,10-21` and train with `--checkpoint.load RUN`.  Its depth grows with the root
over the first part of training (`grow_steps`, `grow: root`).
Source: arXiv 2511.07384 and its official code.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megaponder.ponder.base import pass_count, register
from megaponder.ponder.methods.huginn.training import Recurrent, RecurrentOptions, layer_count, sigma


@register
class Retrofit(Recurrent):
    """Recurrent depth for a pretrained model."""

    name = "retrofit"
    summary = "a pretrained model split into prelude, a core that is repeated from a random state, and coda"

    @dataclass
    class Options(RecurrentOptions):
        prelude: int = layer_count(4)
        """First layers, which run once."""
        coda: int = layer_count(4)
        """Last layers, which run once; the layers between are the core."""
        recurrence: int = pass_count(4)
        """Recurrences of the core in evaluation, and around which training draws."""

    def state_std(self) -> float:
        return sigma(self.shape.hidden_size)

    def entry_modules(self) -> dict[str, nn.Module]:
        return {"adapter": nn.Linear(2 * self.shape.hidden_size, self.shape.hidden_size, bias=False)}
