"""Bytes per GPU by part, for any stage of any layout.

Counts what a training step keeps.  Activation counts follow this system's layers (a test compares them with the tensors
that autograd actually saves); fragmentation and short-lived buffers beyond the largest one are not counted.
`overhead` is an assumption, not a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megaponder.config.in_flight import InFlight, in_flight, largest_sum
from megaponder.config.method_facts import MethodFacts, OwnParameters, PassLike
from megaponder.config.recompute import offloaded, recomputed_layers
from megaponder.config.rules.layout import choose_group
from megaponder.config.schema import ParallelConfig, PrecisionConfig, RunConfig
from megaponder.config.stages import run_in, stage_range
from megaponder.plan import zero
from megaponder.plan.depth_attention import made_bytes
from megaponder.plan.freqkv import copied_bytes
from megaponder.plan.layer import attention_bytes, mlp_bytes, norms_bytes, pre_norms_bytes
from megaponder.plan.parameters import NONE, Parameters, rank_parameters, trained_part

GIB = 2**30
OVERHEAD = 2 * GIB
"""CUDA context, NCCL buffers, cuBLAS workspaces and allocator slack on one GPU: an assumption."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU."""

    weights: int
    gradients: int
    optimizer: int
    """FP32 master weights (bf16 runs), two Adam moments (Muon: one) and a moving average, if any."""
    activations: int
    """Of all passes in flight."""
    vocabulary: int
    """Logits with their gradient, and the probabilities that mixtures keep (last stage)."""
    overhead: int = OVERHEAD

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def element_bytes(precision: PrecisionConfig) -> int:
    """Bytes of a parameter and of an activation."""
    return 2 if precision.dtype == "bf16" else 4


def layer_activations(cfg: RunConfig, rows: int, te: bool = False, active: float = 1.0) -> float:
    """Bytes that one layer keeps for its backward pass, for `rows` rows (sequences x tokens x slots) on one rank.

    Without recompute; a layer that is recomputed keeps its input (`layer_input`).  Where a gathered pass computes only
    a share `active` of the rows, attention still keeps all of them, and its active outputs once more.
    """
    model, e, tp = cfg.model, element_bytes(cfg.precision), cfg.parallel.tensor
    assert model.hidden_size and model.num_heads and model.ffn_size
    attention = attention_bytes(model, e, te)
    attention += copied_bytes(model, cfg.data.sequence_length, e, cfg.data.document_attention)
    log_sums = 4 * model.num_heads  # FP32, of the fused attention
    norms, inner = norms_bytes(model, e, te), attention + mlp_bytes(model, e, te) + log_sums
    if cfg.precision.fp8 != "none":  # what a linear layer reads is kept in FP8; attention's output in both formats
        q = _quantised_bytes(cfg.precision)
        norms -= 2 * model.hidden_size * (e - q)
        inner -= model.ffn_size * (e - q) - model.query_width * q
    if active < 1.0:
        inner = attention + active * (inner - attention + model.query_width * e)
        norms *= active
    return rows * (norms / _sequence_shards(cfg.parallel) + inner / tp)


def _sequence_shards(parallel: ParallelConfig) -> int:
    """Ranks over which the rows outside attention and MLP are split."""
    return parallel.tensor if parallel.sequence else 1


@dataclass(frozen=True)
class Job:
    """What a plan is of: a resolved, legal configuration whose vocabulary is known, on so many ranks."""

    cfg: RunConfig
    facts: MethodFacts
    passes: Sequence[PassLike]
    """Of a step."""
    world_size: int
    own: OwnParameters = NONE
    te: bool = False
    """Layers are Transformer Engine's, on a GPU."""

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return max(1, self.world_size // self.cfg.parallel.replica)

    @property
    def captured(self) -> bool:
        """Whether passes run as CUDA graphs."""
        cfg = self.cfg
        overlap = cfg.parallel.overlap_grad_reduce or cfg.gathers_ahead
        eager = overlap or cfg.parallel.context > 1 or bool(cfg.model.moe) or cfg.zero is not None
        eager = eager or cfg.parallel.offload_passes > 0
        return self.te and bool(cfg.precision.cuda_graphs) and not eager

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank."""
        return self.cfg.train.micro_batch * self.cfg.data.sequence_length // self.cfg.parallel.context


@dataclass(frozen=True)
class _Schedule:
    """How a stage's passes follow each other."""

    micro_batches: int
    group: int
    held: InFlight
    flight: int
    """Passes, or places of captured ones, that are held at once."""


def _schedule(job: Job, stage: int) -> _Schedule:
    par = job.cfg.parallel
    m = max(1, job.cfg.train.global_batch // (job.cfg.train.micro_batch * job.replicas))
    group = par.microbatch_group or choose_group(m, par.pipeline) or par.pipeline
    held = in_flight(stage, par.pipeline, len(job.passes), m, group)
    return _Schedule(m, group, held, sum(held.places) if job.captured else held.passes)


def rank_memory(job: Job, stage: int, active: Sequence[float] | None = None) -> Memory:
    """Memory of a rank of pipeline stage `stage`.

    `active`: the share of rows that each pass computes where halted tokens are skipped; without it nobody has halted.
    """
    cfg, e = job.cfg, element_bytes(job.cfg.precision)
    held, schedule = rank_parameters(cfg, job.facts, stage, job.own), _schedule(job, stage)
    if cfg.zero is None:
        moved = trained_part(cfg, held, len(stage_range(cfg, stage)))
        weights, gradients = held.total * e + _fp8_copies(cfg.precision, held), moved.total * 4
        optimizer = _optimizer(cfg, moved, job.replicas)
    else:
        weights, gradients, optimizer = zero.states(cfg, held, e, job.replicas)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=int(_activations(job, stage, schedule, active or [1.0] * len(job.passes))),
        vocabulary=int(_vocabulary(job, schedule)) if stage == cfg.parallel.pipeline - 1 else 0,
    )


def _activations(job: Job, stage: int, schedule: _Schedule, active: Sequence[float]) -> float:
    """What the layers of a stage keep of all passes in flight, and what one of them takes for a while."""
    cfg, passes, par, tokens = job.cfg, job.passes, job.cfg.parallel, job.tokens
    per_pass = [_of_pass(job, stage, p, share) for p, share in zip(passes, active, strict=True)]
    if not job.facts.free_passes:
        total = sum(per_pass) * schedule.flight / len(passes)
    elif job.captured:
        total = sum(kept * places for kept, places in zip(per_pass, schedule.held.places, strict=True))
    else:
        total = largest_sum(stage, par.pipeline, tuple(per_pass), schedule.micro_batches, schedule.group)
    if job.captured:  # each place has room of its own for what a layer's backward works with
        largest = max(p.slots for p in passes) * tokens
        total += (schedule.flight - 1) * _working(cfg, largest)
    if par.context > 1:
        total += max(_shared(cfg, p) for p in passes)
    if par.recompute == "layer":  # the layer whose backward runs has all of its own
        total += layer_activations(cfg, tokens * max(p.slots for p in passes), job.te)
    return total


def _of_pass(job: Job, stage: int, p: PassLike, active: float) -> float:
    """What one pass of a micro-batch keeps on a stage."""
    cfg, facts, rows = job.cfg, job.facts, job.tokens * p.slots
    own_layers = stage_range(cfg, stage)
    layers = len(own_layers)
    read = stage == cfg.parallel.pipeline - 1 and (p.last or facts.mixes_vocabulary)
    first = own_layers[: recomputed_layers(cfg, p.index, layers)]
    run, recomputed = (run_in(part, _trained_layers(facts, p)) for part in (own_layers, first))
    kept = _pass_activations(cfg, rows, run, recomputed, job.te, read, active)
    if offloaded(cfg, p.index):
        kept -= recomputed * layer_input(cfg, rows)
    # the outputs of a captured pass have a place of their own; what enters the core stays for its later passes
    held_back = facts.core is not None and stage == 0 and p.index == 0
    kept += layer_input(cfg, rows) * ((not p.grad and job.captured) + held_back)
    kept += _documents(cfg, facts, p, run - recomputed, job.te)
    if facts.keeps_kv and not p.last:
        kept += layers * _kept(job, rows)
    return kept


def _vocabulary(job: Job, schedule: _Schedule) -> float:
    """What the last stage keeps that is as wide as the vocabulary."""
    cfg, facts, passes = job.cfg, job.facts, job.passes
    columns, e = cfg.model.padded_vocab // cfg.parallel.tensor, element_bytes(cfg.precision)
    total = 2.0 * job.tokens * columns * e  # logits and their gradient
    if facts.reads_every_pass:
        total += job.tokens * columns * e * max(0, schedule.flight - schedule.held.of_pass[-1])
    if facts.mixes_vocabulary:
        mixing = sum(not p.last for p in passes) / len(passes)
        # each keeps its probabilities; captured, it has room of its own for the gradient's two steps besides
        total += job.tokens * columns * e * mixing * schedule.flight * (3 if job.captured else 1)
    return total


def _trained_layers(facts: MethodFacts, p: PassLike) -> tuple[int, int] | None:
    """The part of the stack whose backward a pass needs, as `Pass.layers` would say it."""
    if p.grad:
        return p.layers
    return (0, facts.core[0]) if p.index == 0 and facts.core is not None else (0, 0)


def fullest(job: Job) -> int:
    """Bytes of the fullest stage's GPU."""
    return max(rank_memory(job, stage).total for stage in range(job.cfg.parallel.pipeline))


def settle_graphs(job: Job, gpu_bytes: float) -> RunConfig:
    """Its configuration, in which `precision.cuda_graphs: auto` becomes false if captured passes do not fit on each
    stage's GPU but eager ones do."""
    cfg = job.cfg
    eager = replace(cfg, precision=replace(cfg.precision, cuda_graphs=False))

    def worst(one: RunConfig) -> int:
        return fullest(replace(job, cfg=one, te=True))

    return eager if cfg.precision.cuda_graphs == "auto" and worst(eager) <= gpu_bytes < worst(cfg) else cfg


def _working(cfg: RunConfig, rows: int) -> float:
    """Bytes that a layer's backward takes for a while: gradients inside the MLP, and of its input and output."""
    model, e, tp = cfg.model, element_bytes(cfg.precision), cfg.parallel.tensor
    assert model.hidden_size
    return rows * (mlp_bytes(model, e, True) / tp + e * 2 * model.hidden_size / _sequence_shards(cfg.parallel))


def _shared(cfg: RunConfig, p: PassLike) -> float:
    """Bytes that one layer's attention takes for a while where ranks share sequences: keys and values of whole ones for
    every head, with their gradients, and where no fused kernel knows who sees whom, that as a mask and as a bias."""
    model, e, par = cfg.model, element_bytes(cfg.precision), cfg.parallel
    rows = cfg.data.sequence_length * p.slots
    gathered = 4.0 * cfg.train.micro_batch * rows * p.key_sets * model.query_width * e / par.tensor
    fused = not cfg.data.document_attention and not model.attention_window and cfg.precision.dtype == "bf16"
    mask = 0.0 if fused else cfg.train.micro_batch * (rows / par.context) * rows * p.key_sets * (1.0 + e)
    return gathered + mask


def layer_input(cfg: RunConfig, rows: int) -> float:
    """Bytes that a recomputed layer keeps: the hidden states of its rows on one rank, and what it makes for later
    layers."""
    e = element_bytes(cfg.precision)
    made = made_bytes(cfg.model, e) / cfg.parallel.tensor
    return rows * ((cfg.model.hidden_size or 0) * e / _sequence_shards(cfg.parallel) + made)


def _pass_activations(
    cfg: RunConfig, rows: int, layers: int, recomputed: int, te: bool, read: bool, active: float
) -> float:
    """One pass of one micro-batch through a stage: its layers, and the norm where rows are read."""
    whole = (layers - recomputed) * layer_activations(cfg, rows, te, active) + recomputed * layer_input(cfg, rows)
    if read:
        norms = pre_norms_bytes(cfg.model, element_bytes(cfg.precision), te)
        whole += rows * norms / 2 / _sequence_shards(cfg.parallel)
    return whole


def _documents(cfg: RunConfig, facts: MethodFacts, p: PassLike, layers: int, te: bool) -> float:
    """What a pass keeps to hold the documents of a micro-batch apart (`data.document_attention`): rotary angles of
    each row and, where no kernel knows documents, a mask in each of its `layers`.  Ranks that share sequences keep
    neither (`_shared`)."""
    model, rows, b = cfg.model, cfg.data.sequence_length * p.slots, cfg.train.micro_batch
    if not cfg.data.document_attention or cfg.parallel.context > 1:
        return 0.0
    assert model.head_size
    angles = 4.0 * b * rows * model.head_size * (model.rotary_fraction or 0.0) * (model.positions == "rotary")
    windowed = 0 < (model.attention_window or 0) < cfg.data.sequence_length
    weighed = p.key_sets > 1 or (facts.weighs and p.index > 0)
    kernel = te and not (windowed or weighed or cfg.train.deterministic)
    return angles + (0 if kernel else layers * p.key_sets * b * rows**2 * element_bytes(cfg.precision))


def _kept(job: Job, rows: int) -> float:
    """Keys and values that a layer merges for the next pass, and on a GPU the place of their gradients (graphs)."""
    cfg, copies = job.cfg, 4 if job.captured else 2
    e = element_bytes(cfg.precision)
    return rows * cfg.model.key_width * e * copies / cfg.parallel.tensor


def _fp8_copies(precision: PrecisionConfig, held: Parameters) -> int:
    """FP8 weights, plain and transposed, which Transformer Engine keeps beside the BF16 ones."""
    return int(2 * (held.attention + held.mlp) * _quantised_bytes(precision)) if precision.fp8 != "none" else 0


def _quantised_bytes(precision: PrecisionConfig) -> float:
    """Bytes of an element in FP8 or FP4, with its share of a scale: of 32 elements in MXFP8, of 16 in NVFP4."""
    return {"mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}.get(precision.fp8, 1.0)


def _optimizer(cfg: RunConfig, held: Parameters, dp: int) -> int:
    """`dp`: ranks that hold the same weights and run other sequences."""
    each = 8 + (4 if cfg.precision.dtype == "bf16" else 0) + (4 if cfg.optimizer.ema_decay else 0)
    par = cfg.parallel
    alike, of_experts = dp * par.context, max(1, dp * par.context * par.tensor // (par.experts * par.expert_ranks))
    if not par.distributed_optimizer:
        alike = of_experts = 1
    if cfg.optimizer.kind == "muon":  # one moment, and ranks share matrices; what has AdamW lies on each of them
        matrices = held.attention + held.mlp
        return (held.total - matrices) * each - (-matrices * (each - 4) // alike)
    return -((held.experts - held.total) * each // alike) - (-held.experts * each // of_experts)
