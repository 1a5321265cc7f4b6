"""Every rule that a configuration must satisfy, checked before any process group is created.

A rule is a function of a `Case` that raises ConfigError (field, value, rule, nearest legal value) or does nothing.  The
order of the tables is the order of checking: the ranges that fields declare come first, so that later rules may divide
by what they read.
"""

from __future__ import annotations

from megaponder.config.method_facts import MethodFacts
from megaponder.config.rules import data, deepspeed, depth_attention, eslm, layout, model, moe, precision, run
from megaponder.config.rules.case import Case, Machine, Rule
from megaponder.config.rules.ranges import numbers_are_in_range
from megaponder.config.schema import RunConfig

RULES: tuple[Rule, ...] = (
    numbers_are_in_range,
    *model.RULES,
    *data.RULES,
    *run.RULES,
    moe.routers_have_passes,
    *deepspeed.RULES,
    *eslm.RULES,
    *layout.RULES,
    depth_attention.depth_attention_fits_stages,
    *precision.RULES,
)


def check(
    cfg: RunConfig, facts: MethodFacts, world_size: int, machine: Machine | None = None, needs_data: bool = False
) -> None:
    """Raise ConfigError for the first broken rule of a resolved configuration.

    `machine` is where the run will happen, for a plan one with the GPU that it counts on (None: not known; rules about
    devices and installed kernels are then left out).  `needs_data` asks for the dataset files too.
    """
    case = Case(cfg, facts, world_size, machine, needs_data)
    for rule in RULES:
        rule(case)


__all__ = ["RULES", "Case", "Machine", "MethodFacts", "check"]
