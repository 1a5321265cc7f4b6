"""Everything that `megaponder plan` says about a run, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from megaponder.config.gpus import Gpu
from megaponder.config.method_facts import MethodFacts, OwnParameters
from megaponder.config.rules.layout import choose_group
from megaponder.config.schema import RunConfig
from megaponder.config.stages import stage_sizes
from megaponder.decoding.moe_options import read
from megaponder.plan import zero
from megaponder.plan.advice import Change, savings
from megaponder.plan.extras import Extras, extras
from megaponder.plan.flops import StepFlops, mean_executed, mean_needed, micro_batches, plan_flops, steps_seen
from megaponder.plan.memory import GIB, Job, Memory, element_bytes, rank_memory, settle_graphs
from megaponder.plan.moe import inactive
from megaponder.plan.parameters import Parameters, model_parameters, rank_parameters
from megaponder.plan.parts import Part, parts
from megaponder.plan.time import Estimate, estimate


@dataclass(frozen=True)
class Layout:
    """How the GPUs are divided."""

    world_size: int
    tensor: int
    pipeline: int
    context: int
    data: int
    sequence_parallel: bool
    stage_layers: tuple[int, ...]
    """Layers of each stage."""
    micro_batches: int
    """Micro-batches of one rank in a step with the full batch."""
    microbatch_group: int | None
    """Micro-batches per group of the interleaved schedule; None if it is not used."""
    experts: str = ""
    """Experts of a layer, and how ranks share them; empty without a mixture."""


@dataclass(frozen=True)
class ByStage:
    """Memory with one of ZeRO's stages."""

    stage: int
    offload: str
    total: int
    """Bytes of a GPU."""
    main: int
    """Bytes of main memory for each rank."""


@dataclass(frozen=True)
class Plan:
    """A planned run."""

    layout: Layout
    parts: tuple[Part, ...]
    """Which layers run how often."""
    parameters: Parameters
    active_parameters: int
    """Those that a row uses: all, or of a mixture's experts the chosen ones."""
    table_rows: int
    """Rows of the padded vocabulary."""
    flops: StepFlops
    """Of the longest plan of a step, which memory must hold."""
    mean_passes: float
    """Passes of a step, mean over steps."""
    needed: float
    """Training FLOPs per token, mean over steps."""
    executed: float
    stages: tuple[Memory, ...]
    stage_parameters: tuple[int, ...]
    estimate: Estimate
    rates: str
    """Learning rates that are scaled from a narrower model's or from fewer passes; empty where all are optimizer.lr."""
    mfu: float
    peak_tflops: float
    gpu_memory_gib: float
    gives_graphs_up: bool
    """Captured passes would not fit, and `precision.cuda_graphs: auto` runs them eagerly."""
    extras: Extras
    main_memory: int
    """Bytes of main memory for each rank, where activations move there (`parallel.offload_passes`)."""
    zero: tuple[ByStage, ...]
    """With DeepSpeed: every stage."""
    savings: tuple[Change, ...]
    """If the plan does not fit: single changes that save memory, those with which it fits first."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = asdict(self)
        data["parameters"]["total"] = self.parameters.total
        for stage, memory in zip(data["stages"], self.stages, strict=True):
            stage["total"] = memory.total
        for one, p in zip(data["flops"]["passes"], self.flops.passes, strict=True):
            one["total"] = p.total
        return data


def own_parameters(method: Any, layers: int) -> OwnParameters:
    """The method's own parameters, which are built to be counted."""
    from megaponder.ponder.facts import on_paper  # needs torch

    def count(build: Callable[[], dict[str, Any]]) -> int:
        return sum(p.numel() for module in on_paper(build).values() for p in module.parameters())

    return OwnParameters(
        count(method.entry_modules),
        tuple(count(partial(method.layer_modules, i)) for i in range(layers)),
        count(method.exit_modules),
    )


def _experts(cfg: RunConfig) -> str:
    o, par = read(cfg.model.moe), cfg.parallel
    if o is None:
        return ""
    split = f", each split over {par.expert_ranks}" if par.expert_ranks > 1 else ""
    return f"{o.experts} a layer, of which a row takes {o.top_k}; {o.experts // par.experts} a rank{split}"


def _by_stage(job: Job) -> tuple[ByStage, ...]:
    cfg = job.cfg
    if cfg.zero is None:
        return ()
    held, found = rank_parameters(cfg, job.facts, 0, job.own), []
    for stage, offload in zero.choices(cfg):
        one = zero.with_choice(cfg, stage, offload)
        total = rank_memory(replace(job, cfg=one), 0).total
        main = zero.main_memory(one, held, element_bytes(cfg.precision), job.world_size)
        found.append(ByStage(stage, offload, total, main))
    return tuple(found)


def build_plan(cfg: RunConfig, method: Any, facts: MethodFacts, world_size: int, mfu: float, gpu: Gpu) -> Plan:
    """The plan of a resolved and checked configuration with a known vocabulary.

    `method` is a built method; its own modules are counted.  The peak is logging.peak_tflops if that is set.
    """
    from megaponder.engine.transfer import transfer  # needs torch

    par = cfg.parallel
    assert cfg.model.num_layers and cfg.model.vocab_size
    dp = world_size // par.replica
    m = micro_batches(cfg, world_size)
    interleaved = par.pipeline > 1 and facts.max_passes > 1
    own = own_parameters(method, cfg.model.num_layers)
    passes = method.longest(cfg.train.seed)
    counts = [len(method.passes(cfg.train.seed, step)) for step in steps_seen(cfg, method)]
    te = cfg.precision.implementation != "local"
    stages = range(par.pipeline)
    room = gpu.memory_gib * GIB
    asked = Job(cfg, facts, passes, world_size, own, te)
    settled = settle_graphs(asked, room) if te else cfg
    job = replace(asked, cfg=settled)
    memory = tuple(rank_memory(job, stage) for stage in stages)
    fits = max(stage.total for stage in memory) <= room
    peak = cfg.logging.peak_tflops or gpu.bf16_tflops
    here = replace(settled, parallel=replace(par, offload_passes=0))
    whole = [rank_memory(replace(job, cfg=here), stage) for stage in stages]
    return Plan(
        layout=Layout(
            world_size=world_size,
            tensor=par.tensor,
            pipeline=par.pipeline,
            context=par.context,
            data=dp,
            sequence_parallel=par.sequence,
            stage_layers=tuple(stage_sizes(cfg)),
            micro_batches=m,
            microbatch_group=(par.microbatch_group or choose_group(m, par.pipeline)) if interleaved else None,
            experts=_experts(cfg),
        ),
        parts=parts(cfg, method),
        parameters=model_parameters(cfg.model, own),
        active_parameters=model_parameters(cfg.model, own).total - inactive(cfg.model),
        table_rows=cfg.model.padded_vocab,
        flops=plan_flops(cfg, method, passes, m),
        mean_passes=sum(counts) / len(counts),
        needed=mean_needed(cfg, method),
        executed=mean_executed(cfg, method, m),
        stages=memory,
        stage_parameters=tuple(rank_parameters(cfg, facts, stage, own).total for stage in stages),
        estimate=estimate(cfg, method, world_size, mfu, peak),
        rates=transfer(cfg, method).words(cfg.optimizer.lr, cfg.optimizer.kind == "muon"),
        mfu=mfu,
        peak_tflops=peak,
        gpu_memory_gib=gpu.memory_gib,
        gives_graphs_up=settled is not cfg,
        extras=extras(cfg, memory[0], stage_sizes(cfg)[0], rank_parameters(cfg, facts, 0, own).total, dp),
        main_memory=max(a.activations - b.activations for a, b in zip(whole, memory, strict=True)),
        zero=_by_stage(job),
        savings=() if fits else savings(asked, room),
    )
