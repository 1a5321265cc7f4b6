"""Where the time of decoding one text goes on a GPU: forms of the step side by side, tiles, and kernels of one step.

    python -m benchmarks.one_row --sizes 1.4b 7b

The model has four fixed passes (`loop`) and random weights.  Writes one-row-cuda.{json,md} into the folder of results.
A form that fails is noted, and the others go on.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.command import add_output, number, parser, script, write
from benchmarks.decoding import GPU, SIZES, build, copy_rate, texts, timed, token_bytes, token_seconds
from benchmarks.report import origin
from megaponder.errors import UserError
from megaponder.inference import one_row
from megaponder.inference.batching import DepthBatch
from megaponder.inference.book import begin_step, end_step

TILES = ((2, 2048, 8), (4, 2048, 8), (1, 2048, 8), (2, 1024, 4), (4, 1024, 4), (4, 512, 4), (8, 512, 4))
"""Outputs and inputs of a program, and its warps."""
FORMS = ("dozens of kernels a step", "compiled", "kernels, one after the other", "kernels that overlap")


@contextmanager
def form(name: str, net: Any) -> Any:
    """An engine of the form."""
    kernels = name.startswith("kernels")
    engine = DepthBatch(net, rows=1, tokens=256, kernels=kernels)
    if name == FORMS[0]:  # as it was: every step with the head, and its bookkeeping in single operations
        engine._ends, engine._read = (begin_step, end_step), lambda rows: True  # type: ignore[method-assign]
    if not kernels:
        yield engine
        return
    module = one_row.kernels()
    before = module.overlaps
    if name == FORMS[2]:
        module.overlaps = lambda device: False
    try:
        yield engine
    finally:
        module.overlaps = before


def tiles(net: Any, rate: float, choices: int) -> list[dict[str, Any]]:
    """Each matrix of the layers by each tile: the time of all layers' one after the other, a layer; keeps the best."""
    kernels, rows = one_row.kernels(), one_row.OneRow(net.model)
    found: list[dict[str, Any]] = []
    x = {
        m.weight.shape[1]: torch.randn(m.weight.shape[1], device=net.device, dtype=net.dtype) for m in rows.matrices[0]
    }
    for i, name in enumerate(("qkv", "output", "gate and up", "down")):
        matrices = [layer[i] for layer in rows.matrices]
        outputs, inputs = matrices[0].weight.shape
        outputs //= 2 if i == 2 else 1
        best = None
        for shape in TILES[:choices]:
            kernels.TILES[outputs, inputs] = shape

            def work(matrices: Any = matrices, gated: bool = i == 2, x: Any = x[inputs]) -> None:
                for matrix in matrices:
                    kernels.product(x, *matrix, gated=gated)

            seconds = replayed(work) / len(matrices)
            size = matrices[0].weight.numel() * matrices[0].weight.element_size()
            row = {"matrix": name, "tile": shape, "us": 1e6 * seconds, "tb_s": size / seconds / 1e12,
                   "of_copy": size / seconds / rate}  # fmt: skip
            print(row, flush=True)
            found.append(row)
            best = row if best is None or row["us"] < best["us"] else best
        kernels.TILES[outputs, inputs] = best["tile"]
    return found


def replayed(work: Callable[[], None]) -> float:
    """Seconds of a captured graph of `work`."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return min(timed(graph.replay) for _ in range(5))


def profiled(engine: DepthBatch, args: Any) -> list[dict[str, Any]]:
    """Kernels of a text of 16 new tokens by name: how many a pass, and microseconds a pass in each."""
    from torch.profiler import ProfilerActivity, profile

    prompt, new = texts(1, 1, 1, args.vocab), 16
    engine.run(prompt, new)
    with profile(activities=[ProfilerActivity.CUDA] if GPU else [ProfilerActivity.CPU]) as found:
        engine.run(prompt, new)
    passes = 4 * new
    rows = [
        {"kernel": e.key[:90], "count": e.count / passes,
         "us": (e.self_device_time_total if GPU else e.self_cpu_time_total) / passes}
        for e in found.key_averages()
    ]  # fmt: skip
    rows = sorted((r for r in rows if r["us"] > 0), key=lambda r: -r["us"])
    print(
        f"{sum(r['count'] for r in rows):.0f} kernels a pass, {sum(r['us'] for r in rows):.0f} us in them", flush=True
    )
    for r in rows[:16]:
        print(f"  {r['us']:8.1f} us {r['count']:6.1f} x {r['kernel']}", flush=True)
    return rows


def measured(size: str, dtype: str, args: Any, keep: Callable[[dict[str, Any]], None]) -> None:
    """All forms of one model; each row is kept at once."""
    begin = time.perf_counter()
    rate = copy_rate()
    net = build(size, "loop", {"extra_passes": 3}, dtype, args.vocab)
    base, read = {"size": size, "dtype": dtype}, token_bytes(net)
    print(base, f"copy {rate / 1e12:.2f} TB/s, {read / 1e9:.2f} GB a token", flush=True)

    def attempt(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            keep({**base, "form": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})
        print(f"-- {name}: {time.perf_counter() - begin:.0f} s so far", flush=True)

    def run(name: str) -> None:
        with form(name, net) as engine:
            seconds = token_seconds(engine, args)
            row = {**base, "form": name, "ms_a_token": 1e3 * seconds, "copy_tb_s": rate / 1e12,
                   "read_tb_s": read / seconds / 1e12, "of_copy": read / seconds / rate}  # fmt: skip
            print(row, flush=True)
            keep(row)
            attempt(f"profile of {name}", lambda: keep({**base, "profile": name, "kernels": profiled(engine, args)}))

    if args.tiles and GPU:
        attempt("tiles", lambda: keep({**base, "tiles": tiles(net, rate, args.tiles)}))
    for name in args.forms:
        attempt(name, lambda name=name: run(name))  # type: ignore[misc]


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown report."""
    lines = [f"# One text\n\n{origin()}. Llama shapes, four fixed passes, random weights.\n"]
    lines += [
        "| model | form of a step | ms a token | weights read TB/s | copy TB/s | share |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        name = f"| {r['size']} {r['dtype']} |"
        if "ms_a_token" in r:
            lines.append(
                f"{name} {r['form']} | {r['ms_a_token']:.2f} | {r['read_tb_s']:.2f} | {r['copy_tb_s']:.2f} | "
                f"{r['of_copy']:.2f} |"
            )
        elif "error" in r:
            lines.append(f"{name} {r['form']}: {r['error'].splitlines()[0][:80]} | | | | |")
    lines += ["", "Kernels of a pass, where they take 1 % of it or more.\n", "| model | form | kernel | number | us |"]
    lines += ["|---|---|---|---|---|"]
    for r in rows:
        whole = sum(k["us"] for k in r.get("kernels", ()))
        for k in r.get("kernels", ()):
            if k["us"] >= 0.01 * whole:
                name = k["kernel"].replace("|", "\\|")
                lines.append(
                    f"| {r['size']} {r['dtype']} | {r['profile']} | `{name}` | {k['count']:.1f} | {k['us']:.1f} |"
                )
    lines += [
        "",
        "Matrices by tile (outputs, inputs, warps of a program).\n",
        "| model | matrix | tile | us | TB/s | share |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for r in rows:
        for t in r.get("tiles", ()):
            lines.append(
                f"| {r['size']} {r['dtype']} | {t['matrix']} | {tuple(t['tile'])} | {t['us']:.1f} | {t['tb_s']:.2f} | "
                f"{t['of_copy']:.2f} |"
            )
    return "\n".join(lines) + "\n"


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("one_row", __doc__)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["1.4b"], help="models")
    options.add_argument("--dtypes", nargs="+", choices=("bf16", "fp8", "fp32"), default=["bf16"], help="formats")
    options.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="forms of a step")
    for name, kind, value, what in (
        ("tiles", number(0), 7, "tiles to try"),
        ("vocab", number(32), 50304, "vocabulary"),
        ("new", number(1), 64, "new tokens"),
        ("rounds", number(1), 3, "timed rounds"),
    ):
        options.add_argument(f"--{name}", type=kind, default=value, help=f"{what}; default: {value}")
    add_output(options)
    args = options.parse_args(argv)
    if 3 * args.new + 16 > 256:
        raise UserError(f"--new {args.new}: three times as many tokens must fit into 240; use 80.")
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        write(args.output, "one-row-cuda" if GPU else "one-row-cpu", rows, table(rows))

    for size in args.sizes:
        for dtype in args.dtypes:
            measured(size, dtype, args, keep)


if __name__ == "__main__":
    sys.exit(main())
