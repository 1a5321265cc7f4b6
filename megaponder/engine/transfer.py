"""A learning rate and initial weights that were tuned on a narrower model, or with fewer passes: docs/optimizers.md.

With m = hidden_size / optimizer.tuned_width, and n = passes / optimizer.tuned_passes:

                                    std of initial weights     rate of AdamW      rate of Muon
    table of tokens, its scale c    c(tuned) / c               c(tuned) / c
    positions, norms, biases        1                          1
    matrices of the layers          1 / sqrt(m)                1 / (m sqrt(n))    1 / sqrt(m n)
    head                            1 / m                      1 / m
    linear layers of the method     its own                    1 / m

The columns of AdamW are muP in the form without multipliers in the model (Yang et al., arXiv 2203.03466, table 3), so
that nothing but training knows of it.  An update of Muon has a spectral norm of sqrt(H), where AdamW's has up to H,
hence its root.  The root of n is an assumption, by analogy with rates over depth (arXiv 2310.02244).  Decay keeps its
own pace: rate times decay is what it was.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import nn

from megaponder.backbone.init import global_names
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.ponder.base import PARAMETER_PREFIX, PLANS_SEEN, Method
from megaponder.ponder.settings import embedding_scale, method_of

TABLE, POSITIONS, HEAD, LAYERS = "embedding.word_embeddings.", "embedding.position_", "output_layer.", "decoder.layers."


@dataclass(frozen=True)
class Transfer:
    """What a run's initial weights and rates are multiplied by; 1 where nothing is carried over."""

    tuned: ModelConfig
    """The model at the width at which the rate was tuned; `width` and the factors scale its initial weights."""
    width: float = 1.0
    """m."""
    table: float = 1.0
    """c(tuned) / c."""
    passes: float = 1.0
    """n."""

    def std(self, name: str) -> float:
        """Factor on the standard deviation of a matrix or table of the backbone, by its global name."""
        if name.startswith((TABLE, POSITIONS)):
            return self.table if name.startswith(TABLE) else 1.0
        return 1 / self.width if name.startswith(HEAD) else self.width**-0.5

    def words(self, lr: float, muon: bool) -> str:
        """The rates that differ from `lr`, for a plan; empty where none does."""
        layers = self.width ** (-0.5 if muon else -1.0) * self.passes**-0.5
        named = {"matrices of layers": layers, "head": 1 / self.width, "token table": self.table}
        return ", ".join(f"{name} {lr * factor:.3g}" for name, factor in named.items() if factor != 1)

    def rates(self, stage: nn.Module, muon: Collection[nn.Parameter] = ()) -> dict[nn.Parameter, float]:
        """Factor on the learning rate of each parameter of a stage; `muon`: those that have Muon."""
        linear = {module.weight for module in stage.modules() if isinstance(module, nn.Linear)}
        found = {}
        for name, p in global_names(stage):
            factor = 1.0
            if name.startswith(TABLE):
                factor = self.table
            elif p in linear if name.startswith(PARAMETER_PREFIX) else p.dim() > 1 and not name.startswith(POSITIONS):
                factor = self.width ** (-0.5 if p in muon else -1.0)
            if name.startswith(LAYERS) and p.dim() > 1:
                factor *= self.passes**-0.5
            found[p] = factor
        return found


def transfer(cfg: RunConfig, method: Method) -> Transfer:
    """What `optimizer.tuned_width` and `optimizer.tuned_passes` ask for."""
    m, o = cfg.model, cfg.optimizer
    found = Transfer(m)
    if o.tuned_width is not None:
        assert m.hidden_size is not None
        then = replace(cfg, model=replace(m, hidden_size=o.tuned_width))
        before = embedding_scale(then.model, method_of(then))
        found = Transfer(then.model, m.hidden_size / o.tuned_width, before / embedding_scale(m, method))
    if o.tuned_passes is not None:
        passes = [len(method.passes(cfg.train.seed, step)) for step in range(PLANS_SEEN)]
        found = replace(found, passes=sum(passes) / len(passes) / o.tuned_passes)
    return found
