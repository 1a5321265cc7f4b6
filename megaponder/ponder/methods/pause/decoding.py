"""Decoding with pause tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run


class Pause(DecodingMethod):
    """Each token is followed by `pauses` pause tokens at its position; the last one is read out.

    The pause token is a row of the table, or a separate row if its id is beyond the vocabulary.
    """

    name = "pause"
    why_not_plain = "each token takes several rows that share its position"
    why_not_batched = "all rows of a token run in one pass"
    defaults = {"pauses": 3, "pause_token_id": 50288}

    def modules(self) -> dict[str, nn.Module]:
        beyond = self.options["pause_token_id"] >= self.config.vocab_size
        return {"pause": nn.Embedding(1, self.config.hidden_size)} if beyond else {}

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, slots, pause = model.model, self.options["pauses"] + 1, self.options["pause_token_id"]
        own = "pause" in model.method
        row = model.method["pause"].weight[0] if own else net.embed_tokens.weight[pause]
        pauses = row.expand(*ids.shape[:2], slots - 1, -1)
        words = torch.cat([net.words(ids)[:, :, None], pauses], dim=2).flatten(1, 2)
        view = run.view(0, slots)
        x = net.stack(net.embed(words, view.positions), 0, view, steps=range(slots))
        return net.norm(x[:, slots - 1 :: slots])
