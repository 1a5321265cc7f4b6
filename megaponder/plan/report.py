"""A plan as tables for the terminal."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import timedelta
from itertools import groupby

from rich.console import Console
from rich.table import Table

from megaponder.config.load import show
from megaponder.config.schema import RunConfig
from megaponder.plan.build import Plan
from megaponder.plan.memory import GIB, Memory
from megaponder.plan.parameters import Parameters


def si(value: float) -> str:
    """1234567 -> '1.23 M'; FLOPs and parameters."""
    for limit, unit in (
        (1e24, "Y"),
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}" if value / limit < 100 else f"{value / limit:.0f} {unit}"
    return f"{value:g}"


def duration(seconds: float) -> str:
    """Days and h:mm:ss, seconds with a decimal below a minute, or more than 1,000 years."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    years = seconds / (365.25 * 86400)
    return f"{years:.2g} years" if years > 1000 else str(timedelta(seconds=round(seconds)))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _show(console: Console, table: Table) -> None:
    """The title on a line of its own (in the table rich would wrap it at the table's width), then the rows."""
    console.print(table.title, style="bold", highlight=False)
    table.title = None
    console.print(table)


def _words(field: str) -> str:
    return field.replace("_", " ")


def parameter_table(plan: Plan) -> Table:
    """Parameters by part."""
    table = _table("Parameters", "part", "number", "share")
    total = plan.parameters.total
    for f in fields(Parameters):
        count = getattr(plan.parameters, f.name)
        if count:
            table.add_row(_words(f.name), f"{count:,}", f"{count / total:.1%}")
    table.add_row("total", f"{total:,}", "")
    if plan.active_parameters < total:
        table.add_row("active", f"{plan.active_parameters:,}", f"{plan.active_parameters / total:.1%}")
    return table


def flops_table(plan: Plan) -> Table:
    """Forward FLOPs per token by pass and part."""
    columns = ("pass", "slots", "linear", "attention", "head", "extra", "total")
    what = ", of a step with the most passes" if abs(plan.mean_passes - len(plan.flops.passes)) > 1e-9 else ""
    table = _table(f"Forward FLOPs per token (multiply-add = 2, causal half){what}", *columns)
    size, unit = (1e9, "G") if plan.flops.forward >= 1e8 else (1e6, "M")
    for _, group in groupby(plan.flops.passes, key=lambda p: replace(p, index=0)):  # passes alike take one row
        alike = list(group)
        p, last = alike[0], alike[-1].index + 1
        row = [f"{x / size:.3f} {unit}" if x else "-" for x in (p.linear, p.attention, p.head, p.extra, p.total)]
        number = str(last) if len(alike) == 1 else f"{p.index + 1} to {last}"
        table.add_row(number, str(p.slots), *row)
    table.add_row("all", "", "", "", "", "", f"{plan.flops.forward / size:.3f} {unit}")
    return table


def memory_table(plan: Plan) -> Table:
    """Memory per GPU by part, one column a kind of stage."""
    shown = _stages_shown(plan)
    names = [f"stage {i + 1}" for i in shown] if len(plan.stages) > 1 else ["GiB"]
    table = _table("Memory per GPU, GiB (overhead is an assumption)", "part", *names)
    for f in fields(Memory):
        values = [getattr(plan.stages[i], f.name) / GIB for i in shown]
        if any(values):
            table.add_row(_words(f.name), *("<0.01" if 0 < v < 0.005 else f"{v:.2f}" for v in values))
    table.add_row("total", *(f"{plan.stages[i].total / GIB:.2f}" for i in shown))
    return table


def zero_table(plan: Plan) -> Table:
    """Memory per GPU by ZeRO's stage."""
    columns = ("parallel.zero_stage", "parallel.offload", "a GPU", "main memory of a rank")
    table = _table("Memory by ZeRO's stage, GiB", *columns)
    for one in plan.zero:
        main = f"{one.main / GIB:.2f}" if one.main else "-"
        table.add_row(str(one.stage), one.offload, f"{one.total / GIB:.2f}", main)
    return table


def _verdict(plan: Plan) -> str:
    """Whether the plan fits, and if not, the options that would help, with GiB of the fullest GPU."""
    worst = max(m.total for m in plan.stages) / GIB
    eager = " with passes that are not captured as CUDA graphs" if plan.gives_graphs_up else ""
    needs = f"the fullest GPU needs {worst:.1f} of {plan.gpu_memory_gib:.1f} GiB{eager}: "
    if worst <= plan.gpu_memory_gib:
        return needs + "fits"
    needs += "[bold red]does not fit[/bold red]; "
    helping = [c for c in plan.savings if c.fits][:3]
    if helping:
        needs += "it would with any one of"
    elif plan.savings:
        helping = [plan.savings[0]]
        needs += "no single change is enough; the most is saved by"
    else:
        needs += "no single change saves memory"
    for c in helping:
        option = f"--{c.field} {show(c.value)}"
        option += f" --world-size {c.world_size}" if c.world_size != plan.layout.world_size else ""
        needs += f"\n  {option:<50} {c.total / GIB:.1f} GiB"
    return needs


def _stages_shown(plan: Plan) -> list[int]:
    """First, second, middle and last: the stages between them differ only in the passes in flight."""
    n = len(plan.stages)
    return sorted({0, min(1, n - 1), n // 2, n - 1})


def print_plan(cfg: RunConfig, plan: Plan, console: Console) -> None:
    """Print all tables."""
    lay, est, t = plan.layout, plan.estimate, cfg.train
    name = cfg.model.preset or f"{cfg.model.family} {cfg.model.num_layers} x {cfg.model.hidden_size}"
    options = ", ".join(f"{k}={v}" for k, v in cfg.ponder.options.items())
    console.print(f"[bold]{name}[/bold], {cfg.ponder.method}" + (f" ({options})" if options else ""), end="\n\n")

    table = _table("Layout", "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    shared = f" x context {lay.context}" if lay.context > 1 else ""
    sizes = f"tensor {lay.tensor} x pipeline {lay.pipeline}{shared} x data {lay.data}"
    table.add_row("GPUs", f"{lay.world_size} = {sizes}")
    table.add_row("sequence parallel", "yes" if lay.sequence_parallel else "no")
    layers = [str(n) for n in lay.stage_layers]
    table.add_row("layers per stage", layers[0] if len(set(layers)) == 1 else ", ".join(layers))
    if lay.experts:
        table.add_row("experts", lay.experts)
    if len(plan.parts) > 1 or plan.parts[0].most_runs > 1:
        for i, part in enumerate(plan.parts):
            table.add_row("" if i else "a token runs", str(part))
        table.add_row(
            "", f"together {sum(p.executed for p in plan.parts)} executions of {sum(lay.stage_layers)} layers"
        )
    if lay.context > 1:
        share = cfg.data.sequence_length // lay.context
        table.add_row("a rank holds", f"{share:,} tokens of each sequence; attention reads the others' keys")
    most, length = len(plan.flops.passes), cfg.data.sequence_length
    varies = abs(plan.mean_passes - most) > 1e-9
    passes = f"{plan.mean_passes:.3g} passes each in the mean, {most} at most" if varies else f"{most} passes each"
    group = f", in groups of {lay.microbatch_group} per pass" if lay.microbatch_group else ""
    table.add_row(
        "a step",
        f"{t.global_batch} sequences x {length} tokens = {t.global_batch * length:,} tokens",
    )
    if cfg.data.document_attention:
        known = cfg.data.document_tokens
        seen = (
            "of unknown length: attention is counted for whole sequences" if known is None else f"{known:,.0f} tokens"
        )
        table.add_row("a token sees", f"its document, {seen}" + ("" if known is None else " in the mean over tokens"))
    table.add_row("on a rank", f"{lay.micro_batches} micro-batches of {t.micro_batch}, {passes}{group}")
    if plan.rates:
        table.add_row("learning rate", f"{cfg.optimizer.lr:g}; {plan.rates}")
    if (beside := plan.extras).muon_flops:
        more_work = (
            beside.muon_flops * lay.world_size / (plan.executed * cfg.train.global_batch * cfg.data.sequence_length)
        )
        table.add_row("Muon", f"{si(beside.muon_flops)} FLOPs a step on a rank beside its own, {more_work:.2%} of them")
    if beside.local_bytes:
        every = cfg.checkpoint.local_every
        table.add_row("local checkpoint", f"{beside.local_bytes / GIB:.2f} GiB of each rank every {every} steps")
    table.add_row("vocabulary", f"{cfg.model.vocab_size:,} in a table of {plan.table_rows:,} rows")
    table.add_row("pipeline idles", f"{est.bubble:.1%} of the time" if lay.pipeline > 1 else "never")
    _show(console, table)
    console.print()
    _show(console, parameter_table(plan))
    console.print()
    _show(console, flops_table(plan))
    if mixing := sum(p.mixing for p in plan.flops.passes):
        console.print(f"of these, Depth-Attention: {si(mixing)} a token, {mixing / plan.flops.forward:.3%}")
    if compression := sum(p.compression for p in plan.flops.passes):
        console.print(
            f"of these, FreqKV's transforms: {si(compression)} a token, {compression / plan.flops.forward:.3%}"
        )
    more = "a forward for scores" if plan.flops.scored else "recompute"
    more = f"recompute and {more}" if plan.flops.scored and any(plan.flops.again) else more
    again = f", executed {si(plan.executed)} with {more}" if plan.executed > plan.needed else ""
    how = "forward and backward" + (", mean over steps" if varies else "")
    if all(p.trained == 1.0 for p in plan.flops.passes):
        how = "mean over steps of 3 x forward" if varies else "3 x forward"
    console.print(f"training: needed {si(plan.needed)} a token ({how}){again}", end="\n\n")
    _show(console, memory_table(plan))
    if plan.main_memory:
        console.print(f"and in the main memory of a rank: {plan.main_memory / GIB:.2f} GiB of activations")
    if plan.zero:
        console.print()
        _show(console, zero_table(plan))
    if lay.context > 1:
        console.print("not counted: what context ranks were seen to hold beside what is allocated (docs/speed.md)")
    console.print(_verdict(plan), end="\n\n")
    table = _table(f"Time at {plan.mfu:.0%} MFU of {plan.peak_tflops:g} TFLOP/s (BF16 peak)", "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    table.add_row("steps", f"{est.steps:,}")
    table.add_row("tokens", f"{est.tokens:,} ({si(est.tokens)})")
    table.add_row("FLOPs", f"{est.flops:.3e} needed")
    table.add_row("speed", f"{est.tokens_per_second:,.0f} tokens/s per GPU, {duration(est.step_seconds)} a step")
    gpu_hours = est.seconds * lay.world_size / 3600
    table.add_row("time", f"{duration(est.seconds)} ({gpu_hours:,.0f} GPU hours), without evaluation and saving")
    _show(console, table)
