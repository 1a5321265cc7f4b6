"""Every metric of a run, once: its name in metrics.jsonl, in the trackers, in Prometheus and on the console.

A name with braces stands for a series of names: `active_pass{pass}` is active_pass0, active_pass1, ... in a row, and
one Prometheus metric with the label `pass`.  Row names come without the `ponder_` that metrics.jsonl puts before
statistics of the method.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

PREFIX = "megaponder_"
COMMON_LABELS = ("run_id", "job", "node")
"""Labels of every Prometheus metric.  Never a step: each value of a label is a separate series."""
BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
"""Upper ends of the step duration histogram's bins, in seconds."""
SKIP_REASONS = ("nonfinite", "spike", "no_targets")
"""Why an optimizer step may be skipped."""

Kind = Literal["gauge", "counter", "histogram", "summary", "info"]


@dataclass(frozen=True)
class Metric:
    """One metric.  An empty name means that it does not exist in that place."""

    name: str
    """In a row, and so in metrics.jsonl."""
    tag: str
    """In TensorBoard and Weights & Biases, grouped by the word before the slash."""
    prometheus: str
    """In Prometheus, without the prefix and without the `_total` of a counter."""
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    """Labels in Prometheus besides COMMON_LABELS."""
    console: Callable[[float], str] | None = None
    """Its text on the console line, in the order of `METRICS`; None: not shown there."""
    ponder: bool = False
    """A statistic of the pondering method."""

    @property
    def exposed(self) -> tuple[str, ...]:
        """Names of its samples at /metrics."""
        if not self.prometheus:
            return ()
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count"),
                    "info": ("_info",)}  # fmt: skip
        return tuple(PREFIX + self.prometheus + s for s in suffixes.get(self.kind, ("",)))


def amount(value: float) -> str:
    """1234567 -> 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.2f}"


def _ponder(name: str, prometheus: str, unit: str, help_: str, *labels: str) -> Metric:
    console = (lambda v: f"depth {v:.2f}") if name == "mean_depth" else None
    return Metric(name, f"ponder/{name}", prometheus, "gauge", unit, help_, labels, console, ponder=True)


METRICS: tuple[Metric, ...] = (
    # position
    Metric("step", "", "step", "gauge", "steps", "Optimizer steps done."),
    Metric("total_steps", "", "target_step", "gauge", "steps", "Step at which the budget is spent."),
    Metric("sequences", "", "", "counter", "sequences", "Sequences consumed by the run."),
    Metric("tokens", "train/tokens", "consumed_tokens", "counter", "tokens", "Tokens consumed by the run."),
    Metric("needed_flops", "train/needed_flops", "needed_flops", "counter", "FLOPs",
           "Training FLOPs that the run's steps needed."),
    Metric("executed_flops", "train/executed_flops", "executed_flops", "counter", "FLOPs",
           "Training FLOPs executed: with recomputed layers, and with halted tokens that were only masked."),
    Metric("training_seconds", "train/seconds", "training_seconds", "counter", "s",
           "Time of the run's steps, over all its starts."),
    # learning
    Metric("loss", "train/loss", "loss", "gauge", "nats", "Mean cross entropy of the step's tokens.",
           console=lambda v: f"loss {v:.4f}"),
    Metric("auxiliary_loss", "train/auxiliary_loss", "auxiliary_loss", "gauge", "nats",
           "What the method adds to the loss.", console=lambda v: f"aux {v:.4f}"),
    Metric("z_loss", "train/z_loss", "z_loss", "gauge", "nats",
           "train.z_loss times the mean square of the log of the softmax's normaliser.",
           console=lambda v: f"z-loss {v:.2e}"),
    Metric("selected_loss", "selection/loss", "", "gauge", "nats",
           "Mean cross entropy of the tokens that the step trained on (train.eslm); `loss` is the mean of all.",
           console=lambda v: f"selected loss {v:.4f}"),
    Metric("selected_share", "selection/share", "", "gauge", "share", "Share of the tokens that the step trained on."),
    Metric("selection_threshold", "selection/threshold", "", "gauge", "nats",
           "Score from which on a token was selected, mean over micro-batches."),
    Metric("selection_alpha", "selection/alpha", "", "gauge", "share", "Share of the tokens to be left out."),
    _ponder("mean_depth", "ponder_passes_mean", "passes", "Mean passes per token, for methods with halting."),
    Metric("grad_norm", "optimizer/grad_norm", "grad_norm", "gauge", "norm", "Global gradient norm before clipping.",
           console=lambda v: f"grad norm {v:.3f}"),
    Metric("learning_rate", "optimizer/learning_rate", "learning_rate", "gauge", "rate", "Learning rate of the step.",
           console=lambda v: f"lr {v:.2e}"),
    Metric("global_batch", "train/global_batch", "global_batch", "gauge", "sequences", "Sequences in the step."),
    Metric("skipped_{reason}", "train/skipped_{reason}", "skipped_steps", "counter", "steps",
           "Steps whose update was skipped since this process started.", ("reason",)),
    Metric("empty_micro_batches", "train/empty_micro_batches", "empty_micro_batches", "counter", "micro-batches",
           "Micro-batches in which no target counts, since this process started."),
    Metric("empty_evaluations", "valid/empty_evaluations", "empty_evaluations", "gauge", "evaluations",
           "Evaluations in a row, up to the last one, in which no target counts."),
    Metric("moe_balance", "moe/balance", "moe_balance", "gauge", "ratio",
           "Balance loss of a layer's experts, without its weight, mean over layers and passes; 1: even.",
           console=lambda v: f"balance {v:.3f}"),
    Metric("moe_load_max", "moe/load_max", "moe_load_max_ratio", "gauge", "ratio",
           "Tokens of the expert with the most in any layer, over the mean of its layer."),
    Metric("moe_load_min", "moe/load_min", "moe_load_min_ratio", "gauge", "ratio",
           "Tokens of the expert with the fewest in any layer, over the mean of its layer."),
    Metric("moe_load_max_pass{pass}", "moe/load_max_pass{pass}", "", "gauge", "ratio",
           "The same as moe_load_max of what the router of a pass chose (model.moe.routers).", ("pass",)),
    Metric("moe_load_min_pass{pass}", "moe/load_min_pass{pass}", "", "gauge", "ratio",
           "The same as moe_load_min of what the router of a pass chose (model.moe.routers).", ("pass",)),
    Metric("moe_entropy", "moe/entropy", "moe_entropy_ratio", "gauge", "ratio",
           "Mean entropy of a token's router scores over that of even ones."),
    Metric("moe_discipline", "moe/discipline", "", "gauge", "nats",
           "Routers' loss on the discipline of labelled sequences, without its weight, mean over layers and passes.",
           console=lambda v: f"discipline {v:.3f}"),
    Metric("fp8_amax_{tensor}", "fp8/amax_{tensor}", "fp8_amax", "gauge", "absolute value",
           "Largest absolute value in the last stage's FP8 layers, of input, weight and grad (delayed scaling).",
           ("tensor",)),
    # speed
    Metric("step_seconds", "throughput/step_seconds", "", "gauge", "s", "Mean time of a step."),
    Metric("tokens_per_second", "throughput/tokens_per_second", "tokens_per_second", "gauge", "tokens/s",
           "Tokens per second of the run.", console=lambda v: f"tokens/s {amount(v)}"),
    Metric("tokens_per_second_per_device", "throughput/tokens_per_second_per_device", "tokens_per_second_per_gpu",
           "gauge", "tokens/s", "Tokens per second of one device."),
    Metric("tflops_per_device", "throughput/tflops_per_device", "", "gauge", "TFLOP/s",
           "Needed TFLOP per second of one device.", console=lambda v: f"TFLOP/s/device {v:.4g}"),
    Metric("mfu", "throughput/mfu", "model_flops_utilization_ratio", "gauge", "ratio",
           "Needed FLOPs over the device's peak.", console=lambda v: f"MFU {100 * v:.1f} %"),
    Metric("hfu", "throughput/hfu", "hardware_flops_utilization_ratio", "gauge", "ratio",
           "Executed FLOPs (with recomputation) over the device's peak.", console=lambda v: f"HFU {100 * v:.1f} %"),
    Metric("data_seconds", "time/data_seconds", "", "gauge", "s", "Mean wait for a step's data."),
    Metric("forward_backward_seconds", "time/forward_backward_seconds", "", "gauge", "s",
           "Mean time of a step's forward and backward."),
    Metric("optimizer_seconds", "time/optimizer_seconds", "", "gauge", "s", "Mean time of a step's update."),
    Metric("agree_seconds", "time/agree_seconds", "", "gauge", "s", "Mean wait for the slowest rank before a step."),
    Metric("report_seconds", "time/report_seconds", "", "gauge", "s",
           "Mean time of judging a step, publishing checkpoints and writing rows."),
    Metric("straggler_slowdown", "throughput/straggler_slowdown", "straggler_slowdown_ratio", "gauge", "ratio",
           "A step's own time on the slowest node over the median of the others."),
    Metric("start_seconds", "start/seconds", "", "gauge", "s",
           "Time from the start of the process to the end of its first step."),
    Metric("start_{phase}_seconds", "start/{phase}_seconds", "", "gauge", "s", "Its parts.", ("phase",)),
    Metric("evaluation_seconds", "throughput/evaluation_seconds", "", "gauge", "s", "Time of the last evaluation."),
    Metric("checkpoint_seconds", "throughput/checkpoint_seconds", "", "gauge", "s",
           "Time for which the last checkpoint paused training."),
    Metric("", "", "phase_duration_seconds", "summary", "s", "Time in each phase of the run.", ("phase",)),
    Metric("", "", "step_duration_seconds", "histogram", "s", "Time of a step, without evaluation and checkpoint."),
    # held-out data
    Metric("validation_loss", "valid/loss", "validation_loss", "gauge", "nats", "Mean cross entropy of held-out data.",
           console=lambda v: f"validation loss {v:.4f}"),
    Metric("validation_loss_{set}", "valid/loss_{set}", "validation_set_loss", "gauge", "nats",
           "Mean cross entropy of a named set of held-out data.", ("set",)),
    Metric("task_{task}", "tasks/{task}", "task_score", "gauge", "score",
           "A metric of an lm-eval task, on the model as it is.", ("task",)),
    # pondering
    Metric("passes", "ponder/passes", "ponder_passes", "gauge", "passes", "Passes that the step ran."),
    _ponder("expected_depth", "ponder_expected_passes", "passes", "Mean passes per token expected by the router."),
    _ponder("active_pass{pass}", "ponder_pass_tokens", "ratio", "Share of the tokens that run the pass.", "pass"),
    _ponder("gate{pass}_saturation", "ponder_gate_saturation_ratio", "ratio",
            "Share of the gate's values below 0.1 or above 0.9.", "pass"),
    _ponder("loss_depth{depth}", "ponder_depth_loss", "nats", "Mean cross entropy of the tokens of a depth.", "depth"),
    _ponder("valid_loss_depth{depth}", "ponder_validation_depth_loss", "nats",
            "Mean cross entropy of the held-out tokens of a depth.", "depth"),
    _ponder("kv_reuse", "ponder_kv_reuse_ratio", "ratio", "Share of later token-passes that reuse keys and values."),
    _ponder("depth_nll_correlation", "ponder_depth_nll_correlation", "correlation",
            "Correlation of a token's passes with its loss."),
    _ponder("collapsed", "ponder_gates_collapsed", "boolean", "1 if nearly all tokens run the same number of passes."),
    _ponder("jacobi_rmse{iteration}", "ponder_jacobi_rmse", "root mean square",
            "How far the refinement moved the latents.", "iteration"),
    _ponder("valid_loss_pass{pass}", "ponder_validation_pass_loss", "nats",
            "Mean cross entropy of held-out data, read out after the pass.", "pass"),
    _ponder("gate{pass}_bin{bin}", "", "ratio", "Share of the gate's values in this tenth of [0, 1].", "pass", "bin"),
    # checkpoints
    Metric("checkpoint_bytes", "checkpoint/bytes", "checkpoint_bytes", "gauge", "bytes",
           "Size of the newest checkpoint."),
    Metric("", "", "checkpoint_duration_seconds", "gauge", "s", "From start to completion of the save."),
    Metric("", "", "checkpoint_last_success_timestamp_seconds", "gauge", "s",
           "When the newest checkpoint of this process was complete (Unix time)."),
    Metric("", "", "checkpoint_interval_steps", "gauge", "steps", "checkpoint.every; absent where it is 0."),
    # the process and its device
    Metric("", "", "last_step_timestamp_seconds", "gauge", "s", "When the last step ended (Unix time)."),
    Metric("", "", "start_timestamp_seconds", "gauge", "s", "When training began in this process (Unix time)."),
    Metric("", "", "restarts", "counter", "starts", "Starts of the run after its first."),
    Metric("cuda_memory_reserved_bytes", "memory/cuda_reserved_bytes", "cuda_memory_reserved_bytes", "gauge", "bytes",
           "GPU memory reserved by PyTorch's allocator."),
    Metric("cuda_alloc_retries", "memory/cuda_alloc_retries", "cuda_alloc_retries", "counter", "retries",
           "Allocations that succeeded only after cached memory was freed."),
    Metric("", "", "build", "info", "", "Version, source revision, configuration hash and folder name of the run.",
           ("version", "git_sha", "config_hash", "run")),
)  # fmt: skip
"""In the order of the console line."""


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)  # text, label, text, label, ...
    return re.compile("".join(re.escape(p) if i % 2 == 0 else rf"(?P<{p}_>\w+?)" for i, p in enumerate(parts)))


_PATTERNS = tuple((_pattern(m.name), m) for m in METRICS if m.name)


@cache
def find(name: str, ponder: bool = False) -> tuple[Metric, dict[str, str]] | None:
    """The metric of a row's value (`ponder`: of one of the method's statistics) and the labels in its name."""
    for pattern, metric in _PATTERNS:
        if metric.ponder == ponder and (match := pattern.fullmatch(name)):
            return metric, {k[:-1]: v for k, v in match.groupdict().items()}
    return None


def tag(name: str, ponder: bool = False) -> str:
    """Name in the trackers; a statistic known only to its method is ponder/<name>; any other value must be listed."""
    found = find(name, ponder)
    if found is None:
        if ponder:
            return f"ponder/{name}"
        raise KeyError(name)
    return found[0].tag.format(**found[1])
