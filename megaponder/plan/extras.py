"""What options cost besides memory: the FLOPs of Muon's updates, and the bytes of local checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.plan.memory import Memory, element_bytes

NEWTON_SCHULZ = 5
"""Steps for each matrix (`training.muon`)."""


@dataclass(frozen=True)
class Extras:
    """Of the rank that has most; 0 where an option is not used."""

    muon_flops: float
    """Of a step, beside forward and backward."""
    local_bytes: int
    """Of a local checkpoint (`checkpoint.local`)."""


def extras(cfg: RunConfig, stage: Memory, layers: int, parameters: int, dp: int) -> Extras:
    """`stage`, `layers`, `parameters`: of the rank; `dp`: ranks that hold the same weights and run other sequences."""
    alike = dp * cfg.parallel.context if cfg.parallel.distributed_optimizer else 1
    muon = layers * sum(orthogonal(*m) for m in matrices(cfg.model)) / alike if cfg.optimizer.kind == "muon" else 0.0
    local = parameters * element_bytes(cfg.precision) + stage.optimizer if cfg.checkpoint.local else 0
    return Extras(muon, local)


def matrices(model: ModelConfig) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of a layer that Muon treats by themselves."""
    hidden, ffn = model.hidden_size, model.ffn_size
    assert hidden and ffn
    attention = [(model.query_width, hidden), (model.key_width, hidden), (model.key_width, hidden)]
    return [*attention, (hidden, model.query_width), *[(ffn, hidden)] * (2 if model.gated else 1), (hidden, ffn)]


def orthogonal(rows: int, columns: int) -> float:
    """FLOPs that bring the singular values of a matrix near 1: a step makes x x', its square, and a product with x."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ * (4.0 * short**2 * long + 2.0 * short**3)
