"""Training steps on GPUs: tokens/s, MFU and memory of one table of configurations, all measured in one process.

    python -m benchmarks.training methods                     one GPU
    torchrun --nproc-per-node 2 -m benchmarks.training two-gpus
    torchrun --nproc-per-node 2 -m benchmarks.training long --steps 2 --warm 1
    torchrun --nproc-per-node 2 -m benchmarks.training engines
    python -m benchmarks.training --list

A step is forward, backward, gradient reduction, clipping and AdamW of `--micro-batches` micro-batches of random tokens,
sequence 2048 unless the row names another, in BF16 with FP32 master weights and the distributed optimizer.  Rows of a
table run one after the other in one process; each is warmed up, then timed by the host around a device synchronisation,
median of `--steps`.  The rows of plain megatron-core are its own GPTModel with its Transformer Engine spec, DDP,
optimizer and schedule.
Writes training-TABLE.{json,md} into the folder of results.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.command import add_output, number, parser, script, write
from benchmarks.report import origin
from benchmarks.training_rows import LENGTH, TABLES, WORLDS, Row
from megaponder.backbone.depth_attention import kernel as fused_depth
from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.errors import ConfigError, UserError

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as launch/torchrun.sh sets it
VOCAB = 50304
PATIENCE = 5.0
"""Minutes after which a collective that not all ranks have joined ends the processes."""
LOST = datetime.timedelta(minutes=2)
"""How long a rank that is done with a row waits for the others."""
PEAK = 989.4e12
"""Dense BF16 peak of an H100 or H200 (SXM) by the datasheet; MFU refers to it in every precision."""


def config(row: Row, micro_batches: int, world: int | None = None) -> RunConfig:
    """The row as a run configuration, for as many GPUs as the launcher started or `world`."""
    world = world or int(os.environ.get("WORLD_SIZE", "1"))
    cfg = RunConfig(model=ModelConfig(preset=row.preset, vocab_size=VOCAB, vocab_multiple=128, **row.features))
    cfg.ponder.method, cfg.ponder.options, cfg.ponder.skip_halted = row.method, dict(row.options), row.skip
    cfg.data.sequence_length = row.length
    p = cfg.parallel
    p.tensor, p.pipeline, p.context, p.sequence = row.tensor, row.pipeline, row.context, row.tensor > 1
    p.experts = row.experts
    p.distributed_optimizer, p.recompute = True, "layer" if row.recompute else "none"
    p.offload_passes = row.offloaded
    p.timeout_minutes = PATIENCE
    if row.zero is not None:
        cfg.train.engine, p.zero_stage, p.offload = "deepspeed", row.zero, row.offload  # type: ignore[assignment]
        p.overlap_grad_reduce = True
    dp = world // p.replica
    cfg.train.steps, cfg.train.micro_batch = 100, row.batch
    cfg.train.global_batch = row.batch * micro_batches * dp
    cfg.precision.dtype, cfg.precision.implementation, cfg.precision.fp8 = "bf16", "te", row.fp8  # type: ignore[assignment]
    cfg.precision.cuda_graphs = row.graphs
    return resolve(cfg)


def batches(row: Row, micro_batches: int, draw: torch.Generator) -> list[Any]:
    from megaponder.data.batch import MicroBatch

    out = []
    for _ in range(micro_batches):
        text = torch.randint(0, VOCAB, (row.batch, row.length + 1), generator=draw, device="cuda")
        ids, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        out.append(MicroBatch(ids, labels, torch.ones(row.batch, row.length, device="cuda")))
    return out


def ours(row: Row, micro_batches: int) -> tuple[Callable[[int], float], dict[str, Any]]:
    """A function that takes training steps of this system, and what is known of the row."""
    from megaponder.backbone import depth_attention
    from megaponder.engine import build, groups
    from megaponder.plan import flops
    from megaponder.ponder.settings import method_of
    from megaponder.training import engines
    from megaponder.training.step import gradient_norm, update

    cfg = config(row, micro_batches)
    place = groups.init(cfg)
    method = method_of(cfg)
    if row.halted is not None:
        _halt_at_random(method, row.halted)
    build.initialise = _quick_weights  # type: ignore[assignment]
    depth_attention.kernel = (lambda: None) if row.unfused else fused_depth  # type: ignore[assignment]
    engine, optimizer = engines.build(cfg, method, place)
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    draw = torch.Generator("cuda").manual_seed(1 + place.dp_rank)
    data = batches(row, micro_batches, draw)

    def step(number: int) -> float:
        engine.zero_grad()
        optimizer.zero_grad()
        loss = engine.forward_backward(data, number, train=True).loss
        update(optimizer, gradient_norm(optimizer))
        return loss

    needed, executed = flops.mean_needed(cfg, method), flops.mean_executed(cfg, method)
    if method.skips and row.halted is not None:
        parts = [p.total for p in flops.step_flops(cfg, method).passes]
        needed = 3 * sum(a * f for a, f in zip(active_shares(row, len(parts)), parts, strict=True))
    planned = planned_gib(row, cfg, place.world_size, place.pp_rank)
    return step, {"needed": needed, "executed": executed, "planned_gib": planned, "engine": engine}


def active_shares(row: Row, passes: int) -> list[float]:
    """Share of tokens that go into each pass: all into the first, equally many into the others."""
    return [1.0] + [1.0 - (row.halted or 0.0) * passes / (passes - 1)] * (passes - 1)


def planned_gib(row: Row, cfg: RunConfig, world_size: int, stage: int) -> float:
    """What `plan` expects of a GPU of that stage; where halted tokens are skipped, with the row's share of them."""
    from megaponder.engine.active_rows import places_for
    from megaponder.plan import memory
    from megaponder.ponder.facts import facts_of
    from megaponder.ponder.settings import method_of

    method = method_of(cfg)
    passes = method.passes(cfg.train.seed, 0)
    computed = None
    if row.skip:
        shares = active_shares(row, len(passes))
        computed = [places_for(math.ceil(share * row.length), row.length) / row.length for share in shares]
    expected = memory.rank_memory(memory.Job(cfg, facts_of(method, 1), passes, world_size, te=True), stage, computed)
    return expected.total / memory.GIB


def _quick_weights(stage: torch.nn.Module, **_: Any) -> None:
    """Weights of the right size made on the GPU: the run's own, the same in every layout, take the CPU a minute."""
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.startswith("method_"):
                continue
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _halt_at_random(method: Any, share: float) -> None:
    """Tokens go on or halt by a fixed draw instead of their gates, which still run: the same share of later passes."""
    decide, passes = method.decide, method.max_depth()
    later = share * passes / (passes - 1)  # of the passes after the first

    def drawn(p: Any, state: Any, active: Any, carry: Any, tools: Any) -> Any:
        s, _ = decide(p, state, active, carry, tools)
        n, b = s.shape
        order = torch.arange(n, device=s.device)[:, None] * 7919 + torch.arange(b, device=s.device) * 31
        return s, (order % 1000) >= 1000 * later

    method.decide = drawn


def plain(row: Row, micro_batches: int) -> tuple[Callable[[int], float], dict[str, Any]]:
    """The same with megatron-core alone."""
    import torch.nn.functional as F
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.transformer import TransformerConfig

    from megaponder.engine import groups
    from megaponder.plan import flops
    from megaponder.ponder.settings import method_of

    cfg = config(row, micro_batches)
    groups.init(cfg)
    m = cfg.model
    core = TransformerConfig(
        num_layers=m.num_layers, hidden_size=m.hidden_size, num_attention_heads=m.num_heads,
        ffn_hidden_size=m.ffn_size, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=True, apply_rope_fusion=True, bias_dropout_fusion=True, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, cross_entropy_loss_fusion=True,
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(
        core, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda().bfloat16()  # fmt: skip
    ddp = DistributedDataParallel(
        core, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [ddp],
    )  # fmt: skip
    core.finalize_model_grads_func = finalize_model_grads
    data = batches(row, micro_batches, torch.Generator("cuda").manual_seed(1))
    positions = torch.arange(LENGTH, device="cuda").expand(row.batch, -1)

    def forward(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        losses = chunk(batch.ids_bn, positions, None, labels=batch.labels_bn)
        return losses, lambda out: (out.mean(), {"loss": out.detach().mean()})

    def step(_: int) -> float:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        seen = forward_backward_no_pipelining(
            forward_step_func=forward, data_iterator=iter(data), model=ddp, num_microbatches=micro_batches,
            seq_length=LENGTH, micro_batch_size=row.batch,
        )  # fmt: skip
        optimizer.step()
        return float(torch.stack([s["loss"] for s in seen]).mean())

    needed = flops.mean_needed(cfg, method_of(cfg))
    return step, {"needed": needed, "executed": needed, "planned_gib": None, "engine": None}


def measure(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Times one row."""
    count = row.micro_batches or args.micro_batches or (4 if "410m" in row.preset else 2)
    torch.cuda.reset_peak_memory_stats()
    # by earlier rows: communicators and live tensors; what else the allocator has kept, this row can use
    left = _in_use() - torch.cuda.memory_reserved() - args.context + torch.cuda.memory_allocated()
    begin = time.perf_counter()
    step, facts = (plain if row.plain else ours)(row, count)
    losses = [step(i) for i in range(args.warm)]
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin
    if args.profile:
        _profile(step, row, args)
    times = []
    for i in range(args.steps):
        start = time.perf_counter()
        losses.append(step(args.warm + i))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    devices = dist.get_world_size()
    seconds = statistics.median(times)
    tokens = row.batch * count * row.length * (devices // (row.tensor * row.pipeline * row.context))
    engine = facts.pop("engine")
    if row.zero is not None:
        engine.close()
    rate = tokens / seconds / devices
    return {
        "name": row.name, "row": vars(row), "micro_batches": count, "devices": devices,
        "seconds": seconds, "spread": (max(times) - min(times)) / seconds, "tokens_per_second_per_gpu": rate,
        "mfu": rate * facts["needed"] / PEAK, "hfu": rate * facts["executed"] / PEAK,
        "graphs": engine._runner.captures.count if engine is not None and engine._runner.captures else 0,
        "peak_gib": (_in_use() - left) / 2**30, "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "active_gib": torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**30,  # also what another stream still uses
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "planned_gib": facts["planned_gib"], "set_up_s": ready, "loss": losses[-1], "first_loss": losses[0],
    }  # fmt: skip


def _in_use() -> int:
    """Bytes of the GPU that are taken, by whatever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _profile(step: Callable[[int], float], row: Row, args: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step(args.warm)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        events = seen.key_averages()
        text = events.table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)
        args.profile.mkdir(parents=True, exist_ok=True)
        (args.profile / f"{row.name.replace(' ', '-').replace(',', '')}.txt").write_text(text)


def table(results: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The Markdown report."""
    from importlib.metadata import version

    launcher = " under torchrun" if dist.get_world_size() > 1 else ""
    lines = [
        f"# Training steps: {args.table}\n",
        f"{origin()}, megatron-core {version('megatron-core')}, Transformer Engine {version('transformer-engine')}, "
        f"{dist.get_world_size()} GPU(s). Command: `python -m benchmarks.training {args.table}`{launcher}. "
        f"Sequence {LENGTH} unless told, random tokens, AdamW and distributed optimizer in every step. MFU: needed "
        "FLOPs (multiply-add = 2, causal half of attention, no recompute) over the BF16 peak of 989.4 TFLOP/s, "
        "whatever the precision.\n",
        "| row | micro-batch x number | tokens/s/GPU | MFU | step ms | spread | graphs | peak GiB | planned GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if "error" in r:
            lines.append(f"| {r['name']} | failed: {r['error']} |")
            continue
        planned = "" if r["planned_gib"] is None else f"{r['planned_gib']:.1f}"
        size = f"{r['row']['batch']} x {r['micro_batches']}"
        lines.append(
            f"| {r['name']} | {size} | {r['tokens_per_second_per_gpu']:,.0f} | {r['mfu']:.1%} | "
            f"{1e3 * r['seconds']:.0f} | {r['spread']:.1%} | {r['graphs']} | {r['peak_gib']:.1f} | {planned} |"
        )
    return "\n".join([*lines, *_idle(results)]) + "\n"


def _idle(results: list[dict[str, Any]]) -> list[str]:
    """How long pipelines wait, where a layout was measured with several numbers of micro-batches M.

    A step takes a + b M; b is the slope between the smallest and the largest M, so that a, over b M, is what a step
    waits (with the optimizer's time) beside its work.
    """
    series: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        if "error" not in r and r["row"]["pipeline"] > 1:
            series.setdefault(r["name"].partition(", M=")[0], []).append(r)
    lines = []
    for name, rows in series.items():
        rows.sort(key=lambda r: r["micro_batches"])
        first, last = rows[0], rows[-1]
        if first["micro_batches"] == last["micro_batches"]:
            continue
        slope = (last["seconds"] - first["seconds"]) / (last["micro_batches"] - first["micro_batches"])
        for r in rows:
            passes = 1 + r["row"]["options"].get("steps", r["row"]["options"].get("extra_passes", 0))
            expected = (r["row"]["pipeline"] - 1) / (passes * r["micro_batches"])
            seen = r["seconds"] / (slope * r["micro_batches"]) - 1
            lines.append(f"| {name} | {r['micro_batches']} | {seen:.1%} | {expected:.1%} |")
    if not lines:
        return []
    head = "| layout | M | beside its work | (P - 1) / (K M) |"
    told = "What a step of M micro-batches takes beside its work, the optimizer included, and the bubble in theory:"
    return ["", told, "", head, "|---|---|---|---|", *lines]


def chosen(table: str, parts: Sequence[str]) -> list[Row]:
    """The rows of a table whose name contains one of `parts`, in the order of the parts."""
    found: dict[str, Row] = {}
    for part in parts:
        named = {row.name: row for row in TABLES[table] if part in row.name}
        if not named:
            names = "; ".join(row.name for row in TABLES[table])
            raise ConfigError("--only", part, f"no row of {table} contains it", f"its rows are: {names}")
        found |= {name: row for name, row in named.items() if name not in found}
    return list(found.values())


def may_go_on(number: int, failed: bool) -> bool:
    """Whether the next row can be measured: among several ranks, if this one failed on none.  All ranks call this.

    A rank that failed alone leaves the others in a collective for ever: it then ends, and the launcher ends them.
    """
    from megaponder.config import launcher
    from megaponder.engine import groups

    here = launcher.place()
    if here.world_size == 1:
        return True
    store, keys = groups.shared_store(), [f"benchmarks.training/{number}/{r}" for r in range(here.world_size)]
    store.set(keys[here.rank], "failed" if failed else "measured")
    try:
        store.wait(keys, LOST)
    except RuntimeError:
        print(f"rank {here.rank}: another rank is not done with the row; all end here.", file=sys.stderr, flush=True)
        os._exit(1)
    return all(store.get(key) == b"measured" for key in keys)


def check_gpus(table: str) -> int:
    """The GPU of this process; UserError where there is none."""
    local, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if (cards := torch.cuda.device_count()) <= local:
        raise UserError(f"benchmarks.training needs a GPU for each of its processes; this machine has {cards}.")
    if world != (needed := WORLDS.get(table, 1)):
        launcher = f"torchrun --nproc-per-node {needed} -m" if needed > 1 else "python -m"
        fix = f"{launcher} benchmarks.training {table}"
        raise UserError(f"{table}: {world} process(es), where its rows need {needed}; start it with {fix}.")
    return local


@script
def main(argv: list[str] | None = None) -> int:
    options = parser("training", __doc__)
    options.add_argument("table", nargs="?", choices=list(TABLES))
    options.add_argument("--list", action="store_true", help="rows of every table")
    options.add_argument(
        "--only", nargs="+", default=[""], metavar="PART", help="rows whose name contains one of these, in this order"
    )
    options.add_argument("--steps", type=number(1), default=5, help="timed steps; default: 5")
    options.add_argument("--warm", type=number(0), default=3, help="steps before; default: 3")
    options.add_argument(
        "--micro-batches",
        type=number(1),
        help="of a step, in rows that set no number of their own; default: 4 of 410M, 2 of 1.4B",
    )
    options.add_argument(
        "--profile", type=Path, help="also write a kernel table of one step of each row to this folder"
    )
    add_output(options)
    args = options.parse_args(argv)
    if args.list or not args.table:
        for name, rows in TABLES.items():
            print(name, *(f"    {row.name}" for row in rows), sep="\n")
        return 0
    rows = chosen(args.table, args.only)
    torch.cuda.set_device(check_gpus(args.table))
    args.context = _in_use()
    results: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        try:
            results.append(measure(row, args))
        except Exception as error:  # the other rows shall still be measured
            traceback.print_exc()
            results.append({"name": row.name, "row": vars(row), "error": f"{type(error).__name__}: {error}"[:300]})
        if int(os.environ.get("RANK", "0")) == 0:
            r = results[-1]
            line = r.get("error") or (
                f"{r['tokens_per_second_per_gpu']:,.0f} tok/s {r['mfu']:.1%} {r['peak_gib']:.1f} GiB, "
                f"set up {r['set_up_s']:.0f} s, a step {r['seconds']:.1f} s, loss {r['loss']:.3f}"
            )
            print(f"{row.name}: {line}", flush=True)
            if any("error" not in r for r in results):  # failures alone replace no table
                write(args.output, f"training-{args.table}", results, table(results, args))
        if not may_go_on(i, "error" in results[-1]):
            left = " ".join(repr(row.name) for row in rows[i + 1 :])
            print(f"Process groups cannot be used after this row. Left: --only {left}", file=sys.stderr, flush=True)
            os._exit(1)  # they may not end, either
        gc.collect()
        torch.cuda.empty_cache()
    if dist.is_initialized():  # some row came so far
        dist.destroy_process_group()
    return int(any("error" in r for r in results))


if __name__ == "__main__":
    sys.exit(main())
