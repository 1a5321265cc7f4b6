"""Parameters by part, for the whole model and for one rank of a layout."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megaponder.config.method_facts import MethodFacts, OwnParameters
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.config.stages import stage_range
from megaponder.decoding.moe_options import read
from megaponder.plan.layer import layer_parameters, norm_parameters

NONE = OwnParameters()


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by part."""

    embedding: int = 0
    """Token table."""
    positions: int = 0
    """Learned positions."""
    attention: int = 0
    mlp: int = 0
    """With a mixture of experts: routers and shared experts."""
    experts: int = 0
    norms: int = 0
    """Of the layers and the final one."""
    head: int = 0
    """Output head; 0 if it is tied to the token table."""
    method: int = 0
    """The pondering method's own modules."""
    copies: int = 0
    """A last stage's copy of the token table (not in the model's total)."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def model_parameters(model: ModelConfig, own: OwnParameters = NONE, padded: bool = False) -> Parameters:
    """The whole model, with the true vocabulary or with the padded table of training."""
    assert model.num_layers and model.vocab_size
    rows = model.padded_vocab if padded else model.vocab_size
    return _parts(model, 1, 1, model.num_layers, rows, first=True, last=True, method=own.on(slice(None), True, True))


def rank_parameters(cfg: RunConfig, facts: MethodFacts, stage: int, own: OwnParameters = NONE) -> Parameters:
    """What one rank of pipeline stage `stage` holds."""
    assert cfg.model.num_layers
    tp, pp = cfg.parallel.tensor, cfg.parallel.pipeline
    first, last = stage == 0, stage == pp - 1
    rows = cfg.model.padded_vocab // tp
    layers = stage_range(cfg, stage)
    method = own.on(slice(layers.start, layers.stop), first, last)
    shares = cfg.parallel.experts * cfg.parallel.expert_ranks
    parts = _parts(cfg.model, tp, shares, len(layers), rows, first, last, method)
    copied = last and not first and (facts.mixes_vocabulary or bool(cfg.model.tie_embeddings))
    return _with(parts, copies=rows * (cfg.model.hidden_size or 0) if copied else 0)


def trained_part(cfg: RunConfig, held: Parameters, layers: int) -> Parameters:
    """Of what a rank holds in so many layers, what `train.only` trains."""
    only, moe = cfg.train.only, read(cfg.model.moe)
    if not only:
        return held
    routers = 0 if moe is None else layers * moe.router_count * moe.experts * (cfg.model.hidden_size or 0)
    others = held.mlp - routers if "mlp" in only or "shared_expert" in only else 0
    words = held.embedding, held.positions, held.head, held.copies
    table, positions, head, copies = words if "embeddings" in only else (0, 0, 0, 0)
    return Parameters(
        embedding=table,
        positions=positions,
        attention=held.attention if "attention" in only else 0,
        mlp=others + (routers if "routers" in only else 0),
        experts=held.experts if "mlp" in only or "experts" in only else 0,
        norms=held.norms if "norms" in only else 0,
        head=head,
        method=held.method if "method" in only else 0,
        copies=copies,
    )


def _parts(
    model: ModelConfig, tp: int, shares: int, layers: int, rows: int, first: bool, last: bool, method: int
) -> Parameters:
    one = layer_parameters(model, tp, shares)
    h = model.hidden_size or 0
    return Parameters(
        embedding=rows * h if first else 0,
        positions=model.learned_positions * h if first else 0,
        attention=layers * one.attention,
        mlp=layers * one.mlp,
        experts=layers * one.experts,
        norms=layers * one.norms + (norm_parameters(model, h) if last else 0),
        head=rows * h if last and not model.tie_embeddings else 0,
        method=method,
    )


def _with(parts: Parameters, **changes: int) -> Parameters:
    return Parameters(**{**{f.name: getattr(parts, f.name) for f in fields(parts)}, **changes})
