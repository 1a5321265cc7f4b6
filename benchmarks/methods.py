"""Every method on the same text and seed, small enough for two CPU cores: loss, depth, FLOPs, depth against NLL.

    python -m benchmarks.methods --data demo-run/data/code demo-run/data/docs --steps 150

Trains a small model with each method through `megaponder train` in one process, one after the other, and writes
methods.{json,md,png} into the folder of results.  Depth and correlation come from the evaluation of the last step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.command import add_output, number, parser, script, write
from benchmarks.report import origin
from megaponder.data.indexed import read_index
from megaponder.data.tokenizer import load_tokenizer
from megaponder.errors import UserError

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
EVALUATIONS = 5
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("vanilla", {}),
    "loop": ("loop", {"extra_passes": 3}),
    "pause": ("pause", {"pauses": 3, "pause_token_id": 1023}),
    "ponderlm": ("ponderlm", {"steps": 3}),
    "ponderlm, 3 passes": ("ponderlm", {"steps": 2}),
    "ponderlm2": ("ponderlm2", {"latents": 1, "jacobi": 2}),
    "ponderlm3": ("ponderlm3", {"latents": 2, "jacobi": 1, "target": 0.0, "cost_weight": 0.05, "threshold": 0.05}),
    "adaponderlm": (
        "adaponderlm",
        {"steps": 3, "target": 0.0, "bottom_share": 0.3, "threshold": 0.5, "ramp_start": 0.2, "ramp_end": 0.5},
    ),
    "pruned, random": ("pruned_ponderlm", {"steps": 3, "depth": 3.1}),
    "pruned, by position": ("pruned_ponderlm", {"steps": 3, "depth": 3.1, "by": "position"}),
    "adaptive_cot": ("adaptive_cot", {"steps": 3, "target": 0.0, "cost_weight": 0.2, "threshold": 0.3}),
}


def command(name: str, folder: Path, args: argparse.Namespace) -> list[str]:
    """The training command of a method."""
    method, options = METHODS[name]
    options = {k: round(v * args.steps) if k.startswith("ramp_") else v for k, v in options.items()}
    blend = [x for path in args.data for x in (str(1 / len(args.data)), path)]
    return [
        *("train", str(CONFIG), "--run", str(folder)),
        *("--ponder.method", method, "--ponder.options", json.dumps(options)),
        *("--data.train", *blend, "--data.tokenizer", args.tokenizer),
        *("--train.steps", str(args.steps), "--train.eval_batches", "8"),
        *("--train.eval_every", str(args.steps // EVALUATIONS)),
        *("--checkpoint.every", str(args.steps), "--logging.every", "10", "--logging.tensorboard", "false"),
    ]


def run(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train one method; its last evaluation, FLOPs and time."""
    from megaponder.config.load import load_config
    from megaponder.config.resolve import resolve
    from megaponder.plan.flops import step_flops
    from megaponder.ponder.settings import method_of

    begin = time.perf_counter()
    args.runs.mkdir(parents=True, exist_ok=True)
    log = args.runs / f"{folder.name}.log"
    with log.open("w") as out:
        words = [sys.executable, "-m", "megaponder", *command(name, folder, args)]
        env = {"OMP_NUM_THREADS": "1"} | os.environ
        if code := subprocess.run(words, env=env, stdout=out, stderr=subprocess.STDOUT).returncode:
            raise UserError(f"{name}: training ended with exit code {code}; the end of {log} says why.")
    seconds = time.perf_counter() - begin
    print(f"{name}: {seconds:.0f} s", flush=True)
    cfg = resolve(load_config(folder / "config.yaml", []))
    method = method_of(cfg)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = next(row for row in reversed(rows) if "validation_loss" in row)
    passes = [p.total for p in step_flops(cfg, method).passes]
    active = (
        [last.get(f"ponder_valid_active_pass{k}", 1.0) for k in range(len(passes))]
        if method.skips
        else [1.0] * len(passes)
    )
    return {
        "method": name,
        "options": cfg.ponder.options,
        "validation_loss": last["validation_loss"],
        "curve": [(row["tokens"], row["validation_loss"]) for row in rows if "validation_loss" in row],
        "mean_depth": last.get("ponder_valid_mean_depth"),
        "depth_nll_correlation": last.get("ponder_valid_depth_nll_correlation"),
        "needed_mflops_per_token": sum(a * f for a, f in zip(active, passes, strict=True)) / 1e6,
        "seconds": seconds,
    }


def table(results: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The Markdown report."""
    lines = [
        "# Every method on the same text and seed\n",
        f"{origin()}, FP32, model and data of "
        f"`configs/demo.yaml`, {args.steps} steps. Command: `python -m benchmarks.methods --steps {args.steps}`.\n",
        "| method | validation loss | mean depth | needed MFLOPs a token (forward) | depth and NLL, correlation |",
        "|---|---|---|---|---|",
    ]
    for r in results:
        depth = "" if r["mean_depth"] is None else f"{r['mean_depth']:.2f}"
        corr = "" if r["depth_nll_correlation"] is None else f"{r['depth_nll_correlation']:+.2f}"
        lines.append(
            f"| {r['method']} | {r['validation_loss']:.3f} | {depth} | {r['needed_mflops_per_token']:.2f} | {corr} |"
        )
    lines.append(
        "\nHalted tokens do not count in adaponderlm, the pruned baselines and adaptive_cot; ponderlm3 trains all its "
        "latents and saves only in decoding, so its depth is what decoding would run at its threshold. Depth counts "
        "passes, of the latent methods rows of a token.\n"
        "\nWhat such a small run cannot show: which method is better. The models are tiny and see little text, with "
        "one seed and no tuning per method; thresholds and costs were chosen so that tokens really halt within so "
        "few steps, not from the papers."
    )
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Validation loss over needed FLOPs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for r in results:
        compute = [3 * r["needed_mflops_per_token"] * tokens / 1e9 for tokens, _ in r["curve"]]
        axes.plot(compute, [loss for _, loss in r["curve"]], marker="o", markersize=3, label=r["method"])
    axes.set(xlabel="needed training compute (PFLOP)", ylabel="validation loss (nats per token)", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("methods", __doc__)
    options.add_argument("--data", nargs="+", default=["demo-run/data/code", "demo-run/data/docs"], help="datasets")
    options.add_argument("--tokenizer", default="demo-run/tokenizer.json", help="theirs; default: %(default)s")
    options.add_argument("--steps", type=number(EVALUATIONS), default=150, help="of each method; default: 150")
    options.add_argument("--runs", type=Path, default=Path("runs/methods"), help="where the runs go")
    options.add_argument("--jobs", type=number(1), default=1, help="methods that train at a time; default: 1")
    options.add_argument("--only", nargs="+", default=list(METHODS), choices=list(METHODS), help="these methods")
    add_output(options)
    args = options.parse_args(argv)
    for path in args.data:  # here once, not in every method's run
        read_index(path)
    load_tokenizer(args.tokenizer)
    names = list(dict.fromkeys(args.only))  # two runs of a name would share their folder
    folders = [args.runs / name.replace(", ", "-").replace(" ", "-") for name in names]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda pair: run(*pair, args), zip(names, folders, strict=True)))
    write(args.output, "methods", results, table(results, args))
    if importlib.util.find_spec("matplotlib"):
        plot(results, args.output / "methods.png")


if __name__ == "__main__":
    sys.exit(main())
