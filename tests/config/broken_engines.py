"""What breaks the rules of engines."""

from __future__ import annotations

from typing import Any

from megaponder.config.method_facts import MethodFacts
from megaponder.config.rules import Machine
from tests.config.make import Broken, broken

DEEPSPEED: dict[str, Any] = {"train__engine": "deepspeed"}

ENGINES: list[Broken] = [
    broken("parallel.zero_stage", "to train.engine: deepspeed; leave it out, or set train", parallel__zero_stage=2),
    broken("parallel.offload", "belongs to train.engine: deepspeed; use none", parallel__offload="optimizer"),
    broken("parallel.zero_stage", "at most 3; the nearest is 3", parallel__zero_stage=4, **DEEPSPEED),
    broken(
        "train.engine",
        "package deepspeed is not installed; install megaponder[deepspeed], or use megatron",
        machine=Machine("cpu", deepspeed=False),
        **DEEPSPEED,
    ),
    *(
        broken(
            f"parallel.{name}",
            "= deepspeed has data parallelism alone; the nearest is 1, or use train.engine: megatron",
            world=2,
            **{f"parallel__{name}": 2},
            **DEEPSPEED,
        )
        for name in ("tensor", "pipeline", "context")
    ),
    *(
        broken(field.replace("__", "."), f"does not have it; {fix}", **{field: value}, **DEEPSPEED)
        for field, value, fix in (
            ("precision__cuda_graphs", True, "use auto, or use train.engine: megatron"),
            ("precision__grad_accum_fusion", True, "use auto"),
            ("optimizer__kind", "muon", "use adamw"),
            ("faults__in_process_restarts", 1, "use 0"),
            ("parallel__offload_passes", 1, "use 0"),
            ("optimizer__ema_decay", 0.99, "use 0; megaponder average averages checkpoints"),
        )
    ),
    broken(
        "precision.fp8",
        "deepspeed does not have it; use none",
        **DEEPSPEED,
        precision__fp8="current",
        precision__dtype="bf16",
    ),
    broken("model.moe", "deepspeed does not have it; leave it out", model__moe={"experts": 4, "top_k": 2}, **DEEPSPEED),
    broken("train.only", "deepspeed does not have it; use []", train__only=["mlp"], **DEEPSPEED),
    broken(
        "train.method_only_steps",
        "deepspeed does not have it; use 0",
        facts=MethodFacts(max_passes=4, has_parameters=True),
        train__method_only_steps=3,
        **DEEPSPEED,
    ),
    broken(
        "checkpoint.local",
        "deepspeed does not have it; leave it out",
        checkpoint__local="/tmp",
        checkpoint__local_every=9,
        **DEEPSPEED,
    ),
    broken(
        "parallel.zero_stage",
        "asks for a sharded optimizer; the nearest is 1",
        parallel__zero_stage=0,
        parallel__distributed_optimizer=True,
        **DEEPSPEED,
    ),
    broken(
        "parallel.zero_stage",
        "FP32 masters of BF16 weights in ZeRO's stages alone; the nearest is 1",
        parallel__zero_stage=0,
        precision__dtype="bf16",
        **DEEPSPEED,
    ),
    broken(
        "parallel.zero_stage",
        "parallel.offload = optimizer needs a stage of at least 1; the nearest is 1",
        parallel__zero_stage=0,
        parallel__offload="optimizer",
        **DEEPSPEED,
    ),
    broken(
        "parallel.zero_stage",
        "parallel.offload = weights needs a stage of at least 3; the nearest is 3",
        parallel__offload="weights",
        **DEEPSPEED,
    ),
]
