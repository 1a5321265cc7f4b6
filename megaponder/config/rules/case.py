"""What a rule sees, and the arithmetic of nearest legal values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from megaponder.config.method_facts import MethodFacts
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Where a run happens."""

    device: str
    """cpu or cuda."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU."""
    transformer_engine: bool = False
    grad_accum_kernel: bool = False
    """NVIDIA apex's fused_weight_gradient_mlp_cuda can be imported."""
    deepspeed: bool = True
    """DeepSpeed can be imported."""
    gpu: str | None = None
    """Of a plan: the name of the GPU that it counts on."""


def this_machine() -> Machine:
    """The machine of this process; imports torch."""
    import importlib.util

    import torch

    cuda = torch.cuda.is_available() and torch.version.cuda is not None
    return Machine(
        device="cuda" if cuda else "cpu",
        capability=torch.cuda.get_device_capability() if cuda else None,
        transformer_engine=cuda and importlib.util.find_spec("transformer_engine") is not None,
        deepspeed=importlib.util.find_spec("deepspeed") is not None,
        grad_accum_kernel=cuda and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )


@dataclass(frozen=True)
class Case:
    """A resolved configuration, its method's facts and the world it is meant for."""

    cfg: RunConfig
    facts: MethodFacts
    world_size: int
    machine: Machine | None = None
    needs_data: bool = False

    @property
    def ranks_per_replica(self) -> int:
        """TP x CP x PP."""
        return self.cfg.parallel.replica

    @property
    def dp(self) -> int:
        """Data-parallel size; asked for only after the world size has been checked."""
        return max(1, self.world_size // self.ranks_per_replica)

    @property
    def batches(self) -> list[int]:
        """Every global batch of the run: one, or those of the ramp-up."""
        full, ramp = self.cfg.train.global_batch, self.cfg.train.batch_rampup
        return [full] if ramp is None else [*range(ramp[0], full, ramp[1]), full]

    @property
    def padded_vocab(self) -> int | None:
        """Rows of the embedding table; None while the vocabulary is not known."""
        return None if self.cfg.model.vocab_size is None else self.cfg.model.padded_vocab


Rule = Callable[[Case], None]


def require(holds: bool, field: str, value: Any, rule: str, fix: str) -> None:
    """Raise ConfigError unless the rule holds."""
    if not holds:
        raise ConfigError(field, value, rule, fix)


def require_option(section: str, name: str, value: Any, known: Collection[str]) -> None:
    """Raise ConfigError unless a section has an option of this name."""
    require(name in known, f"{section}.{name}", value, f"its options are {', '.join(known)}", "take it out")


def require_number(holds: bool, field: str, value: Any, rule: str, fix: str) -> None:
    """`require` of a number ("it must be ..."), which says if text stands there and how the number in it is written."""
    if isinstance(value, str):
        rule = f"it is text, and {rule.removeprefix('it ')}"
        with contextlib.suppress(ValueError):
            fix = f"write {value} without quotes" if math.isfinite(float(value)) else fix
    require(holds, field, value, rule, fix)


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_divisor(value: int, *numbers: int) -> int:
    """The common divisor of the numbers that is closest to a value (the smaller one of two)."""
    return min(divisors(math.gcd(*numbers)), key=lambda d: (abs(d - value), d))


def nearest_multiple(value: int, unit: int) -> int:
    """The positive multiple of a unit that is closest to a value."""
    return max(unit, (value + unit // 2) // unit * unit)
