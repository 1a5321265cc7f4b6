"""Rules on the parallel layout: what divides what, and what the pipeline schedules can run."""

from __future__ import annotations

import math

from megaponder.config.rules import moe
from megaponder.config.rules.case import Case, Rule, divisors, nearest_divisor, nearest_multiple, require
from megaponder.config.stages import stage_sizes


def tensor_divides_widths(c: Case) -> None:
    """Each tensor rank holds complete heads and equal parts of the MLP."""
    m, tp = c.cfg.model, c.cfg.parallel.tensor
    assert m.num_heads and m.num_kv_heads and m.ffn_size
    widths = {"num_heads": m.num_heads, "num_kv_heads": m.num_kv_heads}
    if not m.moe:  # else `config.rules.moe` asks
        widths["ffn_size"] = m.ffn_size
    near = nearest_divisor(tp, *widths.values())
    for name, width in widths.items():
        rule = f"it must divide model.{name} = {width}"
        require(width % tp == 0, "parallel.tensor", tp, rule, f"the nearest is {near}")


def tensor_divides_vocabulary(c: Case) -> None:
    """Each tensor rank holds an equal part of the padded table, whose size may not depend on the layout."""
    tp, m = c.cfg.parallel.tensor, c.cfg.model
    if c.padded_vocab is not None:
        fix = f"the nearest is {math.lcm(m.vocab_multiple, tp)}"
        rule = f"it pads the vocabulary to {c.padded_vocab} rows, which parallel.tensor = {tp} does not divide"
        require(c.padded_vocab % tp == 0, "model.vocab_multiple", m.vocab_multiple, rule, fix)


def sequence_parallel_divides(c: Case) -> None:
    """Each tensor rank holds an equal part of the tokens between the blocks."""
    p, length = c.cfg.parallel, c.cfg.data.sequence_length
    if not p.sequence:
        return
    require(p.tensor > 1, "parallel.sequence", True, "it needs parallel.tensor of at least 2", "use false")
    rule = f"with sequence parallelism it must be a multiple of parallel.tensor = {p.tensor}"
    fix = f"the nearest is {nearest_multiple(length, p.tensor)}"
    require(length % p.tensor == 0, "data.sequence_length", length, rule, fix)


def context_divides_sequences(c: Case) -> None:
    """Each context rank holds an early and an equally long late part, and its tensor ranks equal parts of both."""
    p, length = c.cfg.parallel, c.cfg.data.sequence_length
    unit = p.context * math.lcm(2, p.tensor if p.sequence else 1)
    rule = f"it must be a multiple of {unit}, so that parallel.context = {p.context} ranks hold equal parts of it"
    ok = p.context == 1 or length % unit == 0
    require(ok, "data.sequence_length", length, rule, f"the nearest is {nearest_multiple(length, unit)}")


def pipeline_divides_layers(c: Case) -> None:
    """Each stage holds the same number of layers, or those that the configuration gives it."""
    pp, layers, sizes = c.cfg.parallel.pipeline, c.cfg.model.num_layers, c.cfg.parallel.stage_layers
    assert layers
    if sizes is None:
        rule = f"it must divide model.num_layers = {layers}"
        fix = f"the nearest is {nearest_divisor(pp, layers)}"
        fix += ", or set parallel.stage_layers" if pp <= layers else ""
        require(layers % pp == 0, "parallel.pipeline", pp, rule, fix)
        return
    even = [layers // pp + (i < layers % pp) for i in range(pp)]
    fix = f"for example {even}" if pp <= layers else "use a smaller parallel.pipeline"
    rule = f"it must list the layers of parallel.pipeline = {pp} stages"
    require(len(sizes) == pp, "parallel.stage_layers", sizes, rule, fix)
    rule = f"they add up to {sum(sizes)} and must add up to model.num_layers = {layers}"
    require(sum(sizes) == layers, "parallel.stage_layers", sizes, rule, fix)


def ends_hold_prelude_and_coda(c: Case) -> None:
    """What enters the core is computed on the first stage, what leaves it on the last."""
    if c.facts.core is None or c.cfg.parallel.pipeline == 1:
        return
    (begin, end), layers, sizes = c.facts.core, c.cfg.model.num_layers or 0, stage_sizes(c.cfg)
    for what, need, has, where in (("prelude", begin, sizes[0], "first"), ("coda", layers - end, sizes[-1], "last")):
        rule = f"the {where} stage holds {has} layers and must hold all {need} of the {what}"
        fix, given = f"give the {where} stage more layers with parallel.stage_layers", c.cfg.parallel.stage_layers
        if given is None:
            require(has >= need, "parallel.pipeline", c.cfg.parallel.pipeline, rule, fix)
        else:
            require(has >= need, "parallel.stage_layers", given, rule, f"give the {where} stage more layers")


def replica_divides_world(c: Case) -> None:
    """The world consists of complete replicas."""
    p, replica = c.cfg.parallel, c.ranks_per_replica
    require(c.world_size >= 1, "world size", c.world_size, "it must be at least 1", "the nearest is 1")
    names, sizes = "parallel.tensor x parallel.pipeline", f"{p.tensor} x {p.pipeline}"
    if p.context > 1:
        names, sizes = f"{names} x parallel.context", f"{sizes} x {p.context}"
    rule = f"it must be a multiple of {names} = {sizes}"
    fix = f"the nearest is {nearest_multiple(c.world_size, replica)} processes"
    require(c.world_size % replica == 0, "world size", c.world_size, rule, fix)


def batch_divides(c: Case) -> None:
    """Every rank gets complete micro-batches, in every step of a ramp-up."""
    t, unit = c.cfg.train, c.cfg.train.micro_batch * c.dp
    what = f"train.micro_batch x data-parallel size = {t.micro_batch} x {c.dp}"
    rule, near = f"it must be a multiple of {what}", nearest_multiple(t.global_batch, unit)
    require(t.global_batch % unit == 0, "train.global_batch", t.global_batch, rule, f"the nearest is {near}")
    if t.batch_rampup is not None:
        start, increment, length = t.batch_rampup
        fix = f"the nearest is [{nearest_multiple(start, unit)}, {nearest_multiple(increment, unit)}, {length}]"
        rule = f"start and increment must be multiples of {what}"
        require(start % unit == 0 and increment % unit == 0, "train.batch_rampup", t.batch_rampup, rule, fix)


def group_fits(micro_batches: int, pipeline: int, group: int) -> bool:
    """Whether the interleaved schedule runs M micro-batches of a rank in groups of N on P stages."""
    rest = micro_batches % group
    return group >= pipeline and (rest == 0 or rest >= pipeline)


def choose_group(micro_batches: int, pipeline: int) -> int | None:
    """The smallest legal group size N (least memory): P where it fits; None with fewer micro-batches than stages."""
    return next((n for n in range(pipeline, micro_batches + 1) if group_fits(micro_batches, pipeline, n)), None)


def passes_fill_the_pipeline(c: Case) -> None:
    """Several passes on several stages need at least as many micro-batches as stages, in groups that fit."""
    p, t = c.cfg.parallel, c.cfg.train
    if p.pipeline == 1 or c.facts.max_passes == 1:
        return  # passes inside one forward, or plain 1F1B: any number of micro-batches
    unit = t.micro_batch * c.dp
    for batch in c.batches:
        m = batch // unit
        ramp = batch != t.global_batch
        field, value = ("train.batch_rampup", t.batch_rampup) if ramp else ("train.global_batch", t.global_batch)
        what = (
            f"{m} micro-batches a rank at a global batch of {batch}" if ramp else f"it gives {m} micro-batches a rank"
        )
        least = unit * p.pipeline
        rule = f"{what}, and {c.facts.max_passes} passes on {p.pipeline} stages need at least {p.pipeline}"
        require(m >= p.pipeline, field, value, rule, _more_micro_batches(c, least, ramp))
        if p.microbatch_group is not None:
            legal = [n for n in range(p.pipeline, m + 1) if group_fits(m, p.pipeline, n)]
            near = min(legal, key=lambda n: (abs(n - (p.microbatch_group or 0)), n))
            rule = (
                f"it must be at least parallel.pipeline = {p.pipeline} and divide the {m} micro-batches of a rank with "
                f"remainder 0 or at least {p.pipeline}"
            )
            ok = group_fits(m, p.pipeline, p.microbatch_group)
            require(ok, "parallel.microbatch_group", p.microbatch_group, rule, f"the nearest is {near}")


def _more_micro_batches(c: Case, least: int, ramp: bool) -> str:
    if ramp:
        return f"start at {least} or more"
    smaller = [
        d
        for d in divisors(c.cfg.train.micro_batch)
        if c.cfg.train.global_batch // (d * c.dp) >= c.cfg.parallel.pipeline
    ]
    other = f", or train.micro_batch: {smaller[-1]}" if smaller else ""
    return f"the nearest is {least}{other}"


def overlap_has_what_it_needs(c: Case) -> None:
    """Parameters are gathered from optimizer shards, behind gradients that were reduced during backward."""
    p, field = c.cfg.parallel, "parallel.overlap_param_gather"
    if p.overlap_param_gather:
        fix = "set that to true, or this one to false"
        require(p.distributed_optimizer, field, True, "it needs parallel.distributed_optimizer", fix)
        require(p.overlap_grad_reduce, field, True, "it needs parallel.overlap_grad_reduce", fix)


def overlap_needs_all_gradients(c: Case) -> None:
    """megatron-core reduces a bucket when each of its gradients has arrived."""
    rule = f"with these options {c.cfg.ponder.method} trains its own parameters alone, and the others have no gradient"
    ok = not (c.cfg.parallel.overlap_grad_reduce and c.facts.frozen)
    require(ok, "parallel.overlap_grad_reduce", True, rule, "use false")


def skipping_needs_halting(c: Case) -> None:
    """Only a method whose halted tokens need no computation can leave them out."""
    rule = f"method {c.cfg.ponder.method} never halts tokens, so there are none to skip"
    ok = c.facts.skips or not c.cfg.ponder.skip_halted
    require(ok, "ponder.skip_halted", True, rule, "use false, or method adaponderlm or adaptive_cot")


def recompute_names_layers_and_passes(c: Case) -> None:
    """Partial recompute that is disabled, or larger than the model, would silently do nothing."""
    p, layers = c.cfg.parallel, max(stage_sizes(c.cfg))
    if p.recompute_passes is not None:
        rule = f"it counts passes from the first, which {c.cfg.ponder.method} runs without gradient"
        require(not c.facts.free_passes, "parallel.recompute_passes", p.recompute_passes, rule, "leave it out")
    for name, value, most, of in (
        ("recompute_layers", p.recompute_layers, layers, "layers of a pipeline stage"),
        ("recompute_passes", p.recompute_passes, c.facts.max_passes, "passes"),
    ):
        if value is not None:
            field = f"parallel.{name}"
            require(p.recompute == "layer", field, value, "it needs parallel.recompute: layer", "set that or omit this")
            require(value <= most, field, value, f"there are {most} {of}", f"the nearest is {most}")


def offload_follows_recompute(c: Case) -> None:
    """What lies in main memory is what recomputed layers keep; a pass that is captured cannot put it there."""
    p, name = c.cfg.parallel, "parallel.offload_passes"
    if not p.offload_passes:
        return
    rule = "only the inputs of recomputed layers are kept in main memory"
    require(p.recompute == "layer", name, p.offload_passes, rule, "set parallel.recompute: layer, or use 0")
    most = p.recompute_passes or c.facts.max_passes
    rule = f"the layers of {most} pass{'es' * (most != 1)} are recomputed"
    require(p.offload_passes <= most, name, p.offload_passes, rule, f"the nearest is {most}")
    rule = f"it counts passes from the first, which {c.cfg.ponder.method} runs without gradient"
    all_of_them = p.offload_passes == c.facts.max_passes
    require(not c.facts.free_passes or all_of_them, name, p.offload_passes, rule, f"use {c.facts.max_passes}, or 0")
    rule = "passes that are captured as CUDA graphs keep everything on the GPU"
    graphs = c.cfg.precision.cuda_graphs
    require(graphs is not True, "precision.cuda_graphs", graphs, rule, "use auto, or parallel.offload_passes: 0")


def gloo_keeps_outputs(c: Case) -> None:
    """gloo still reads a sent tensor after the send has been posted: freeing it corrupts the numbers silently."""
    on_cpu = c.machine is not None and c.machine.device == "cpu"
    rule = "gloo still reads outputs that are being sent, so freeing them corrupts the numbers"
    ok = not (c.cfg.parallel.deallocate_pipeline_outputs and on_cpu)
    require(ok, "parallel.deallocate_pipeline_outputs", True, rule, "use false or omit it")


RULES: tuple[Rule, ...] = (
    tensor_divides_widths,
    tensor_divides_vocabulary,
    sequence_parallel_divides,
    context_divides_sequences,
    pipeline_divides_layers,
    ends_hold_prelude_and_coda,
    replica_divides_world,
    moe.experts_fill_ranks,
    batch_divides,
    passes_fill_the_pipeline,
    overlap_has_what_it_needs,
    overlap_needs_all_gradients,
    skipping_needs_halting,
    recompute_names_layers_and_passes,
    offload_follows_recompute,
    gloo_keeps_outputs,
)
