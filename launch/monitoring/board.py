#!/usr/bin/env python3
"""Writes grafana/megaponder.json, the Grafana dashboard: `python launch/monitoring/board.py`.

Each row answers one question.  Every process that serves /metrics tells the run's values, so panels take the maximum
over nodes; what differs between nodes is shown by node.  DCGM_* comes from NVIDIA's dcgm-exporter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos, VariableRefresh

TARGET = Path(__file__).parent / "grafana" / "megaponder.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
RUN = '{run_id=~"$run_id"}'


@dataclass(frozen=True)
class Chart:
    """A panel: PromQL by legend.  `stat`: one number instead of curves."""

    title: str
    unit: str
    queries: dict[str, str]
    stat: bool = False


def of_run(name: str, *labels: str) -> str:
    """A value of the run: the same on all nodes."""
    return f"max by ({', '.join(('run_id', *labels))}) (megaponder_{name}{RUN})"


def rate(name: str, *labels: str) -> str:
    """Increase a second, of the node where it is largest."""
    return f"max by ({', '.join(('run_id', *labels))}) (rate(megaponder_{name}{RUN}[$__rate_interval]))"


STEP_SECONDS = f"{rate('step_duration_seconds_sum')} / {rate('step_duration_seconds_count')}"
BUCKETS = f"sum by (run_id, le) (rate(megaponder_step_duration_seconds_bucket{RUN}[$__rate_interval]))"

ROWS: dict[str, tuple[Chart, ...]] = {
    "Is it alive?": (
        Chart("Age of the last step", "s", {"": f"time() - {of_run('last_step_timestamp_seconds')}"}, stat=True),
        Chart("Step", "none", {"": of_run("step")}, stat=True),
        Chart(
            "Time left", "s", {"": f"({of_run('target_step')} - {of_run('step')}) * {STEP_SECONDS}"}, stat=True
        ),
        Chart("Restarts", "none", {"": of_run("restarts_total")}, stat=True),
        Chart("Up for", "s", {"": f"time() - {of_run('start_timestamp_seconds')}"}, stat=True),
        Chart(
            "Program", "none", {"{{run}} {{version}} {{git_sha}} {{config_hash}}":
            of_run("build_info", "run", "version", "git_sha", "config_hash")}, stat=True,
        ),
    ),
    "Is it learning?": (
        Chart("Loss (nats)", "none", {
            "training": of_run("loss"), "validation": of_run("validation_loss"),
            "auxiliary": of_run("auxiliary_loss"), "z-loss": of_run("z_loss"),
        }),
        Chart("Held-out loss by set (nats)", "none", {"{{set}}": of_run("validation_set_loss", "set")}),
        Chart("Tasks", "none", {"{{task}}": of_run("task_score", "task")}),
        Chart("Gradient norm", "none", {"": of_run("grad_norm")}),
        Chart("Learning rate", "none", {"": of_run("learning_rate")}),
        Chart("Skipped steps", "none", {"{{reason}}": of_run("skipped_steps_total", "reason")}),
        Chart("Tokens consumed", "short", {"": of_run("consumed_tokens_total")}),
        Chart("Without targets", "none", {
            "micro-batches": of_run("empty_micro_batches_total"), "evaluations in a row": of_run("empty_evaluations"),
        }),
        Chart("Training FLOPs", "none", {
            "needed": of_run("needed_flops_total"), "executed": of_run("executed_flops_total"),
        }),
        Chart("Training time", "s", {"": of_run("training_seconds_total")}),
        Chart("Sequences in a step", "none", {"": of_run("global_batch")}),
        Chart("Experts of a mixture (even: 1)", "none", {
            "tokens of the fullest": of_run("moe_load_max_ratio"), "of the emptiest": of_run("moe_load_min_ratio"),
            "balance loss": of_run("moe_balance"), "entropy of scores": of_run("moe_entropy_ratio"),
        }),
        Chart("Largest absolute values in FP8 layers", "none", {"{{tensor}}": of_run("fp8_amax", "tensor")}),
    ),
    "Is it pondering?": (
        Chart("Passes", "none", {
            "of a step": of_run("ponder_passes"), "mean of a token": of_run("ponder_passes_mean"),
            "expected of a token": of_run("ponder_expected_passes"),
        }),
        Chart("Share of tokens in each pass", "percentunit", {"pass {{pass}}": of_run("ponder_pass_tokens", "pass")}),
        Chart("Held-out loss by pass (nats)", "none",
              {"pass {{pass}}": of_run("ponder_validation_pass_loss", "pass")}),
        Chart("Loss by depth (nats)", "none", {
            "depth {{depth}}": of_run("ponder_depth_loss", "depth"),
            "held-out, depth {{depth}}": of_run("ponder_validation_depth_loss", "depth"),
        }),
        Chart("Saturated gate values", "percentunit", {
            "gate {{pass}}": of_run("ponder_gate_saturation_ratio", "pass"),
            "collapsed": of_run("ponder_gates_collapsed"),
        }),
        Chart("Reused keys and values", "percentunit", {"": of_run("ponder_kv_reuse_ratio")}),
        Chart("Correlation of depth with loss", "none", {"": of_run("ponder_depth_nll_correlation")}),
        Chart("Movement of the latents", "none",
              {"refinement {{iteration}}": of_run("ponder_jacobi_rmse", "iteration")}),
    ),
    "Is it fast?": (
        Chart("Tokens per second", "none", {
            "of a device": of_run("tokens_per_second_per_gpu"), "of the run": of_run("tokens_per_second"),
        }),
        Chart("FLOPs utilisation", "percentunit", {
            "MFU": of_run("model_flops_utilization_ratio"), "HFU": of_run("hardware_flops_utilization_ratio"),
        }),
        Chart("Step duration", "s", {
            "mean": STEP_SECONDS, "median": f"histogram_quantile(0.5, {BUCKETS})",
            "99 %": f"histogram_quantile(0.99, {BUCKETS})",
        }),
        Chart("Where the time goes (share of wall time)", "percentunit",
              {"{{phase}}": rate("phase_duration_seconds_sum", "phase")}),
        Chart("Duration of a phase", "s", {"{{phase}}": (
            f"{rate('phase_duration_seconds_sum', 'phase')} / {rate('phase_duration_seconds_count', 'phase')}"
        )}),
        Chart("Slowest node against the others", "none", {"": of_run("straggler_slowdown_ratio")}),
        Chart("Wait for data, by node", "percentunit", {"{{node}}": (
            f'sum by (node) (rate(megaponder_phase_duration_seconds_sum{{phase="data", {RUN[1:]}[$__rate_interval])) / '
            f"sum by (node) (rate(megaponder_step_duration_seconds_sum{RUN}[$__rate_interval]))"
        )}),
    ),
    "Is the machine well?": (
        Chart("Tensor cores active", "percentunit", {"{{Hostname}}": (
            "avg by (Hostname) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)"
        )}),
        Chart("Power", "watt", {"{{Hostname}}": "avg by (Hostname) (DCGM_FI_DEV_POWER_USAGE)"}),
        Chart("Hottest GPU and memory", "celsius", {
            "{{Hostname}}": "max by (Hostname) (DCGM_FI_DEV_GPU_TEMP)",
            "{{Hostname}} memory": "max by (Hostname) (DCGM_FI_DEV_MEMORY_TEMP)",
        }),
        Chart("XID and double-bit errors", "none", {
            "{{Hostname}} GPU {{gpu}} XID": "DCGM_FI_DEV_XID_ERRORS != 0",
            "{{Hostname}} ECC": "sum by (Hostname) (DCGM_FI_DEV_ECC_DBE_VOL_TOTAL)",
        }),
        Chart("NVLink errors a second", "none", {"{{Hostname}}": (
            "sum by (Hostname) (rate(DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL[$__rate_interval]))"
        )}),
        Chart("GPU memory", "bytes", {
            "{{node}} reserved by PyTorch": f"max by (node) (megaponder_cuda_memory_reserved_bytes{RUN})",
            "{{Hostname}} used": "max by (Hostname) (DCGM_FI_DEV_FB_USED) * 1048576",
        }),
        Chart("Allocation retries", "none",
              {"{{node}}": f"max by (node) (megaponder_cuda_alloc_retries_total{RUN})"}),
    ),
    "Are checkpoints written?": (
        Chart("Age of the newest", "s", {
            "": f"time() - {of_run('checkpoint_last_success_timestamp_seconds')}",
        }, stat=True),
        Chart("Steps between two", "none", {"": of_run("checkpoint_interval_steps")}, stat=True),
        Chart("Duration", "s", {"": of_run("checkpoint_duration_seconds")}),
        Chart("Size", "bytes", {"": of_run("checkpoint_bytes")}),
    ),
}  # fmt: skip
HEIGHT = {True: 4, False: 8}


def panel(chart: Chart, place: GridPos) -> Any:
    """The panel of a chart."""
    builder = stat.Panel() if chart.stat else timeseries.Panel()
    builder = builder.title(chart.title).unit(chart.unit).datasource(SOURCE).grid_pos(place)
    if chart.stat and any("{{" in legend for legend in chart.queries):
        builder = builder.text_mode("name")  # type: ignore[arg-type, assignment]  # the labels are what it tells
    for i, (legend, query) in enumerate(chart.queries.items()):
        target = prometheus.Dataquery().expr(query).ref_id(chr(ord("A") + i)).datasource(SOURCE)
        label = legend if legend else "{{run_id}}"
        builder = builder.with_target(target.legend_format(label))
    return builder


def build() -> Any:
    """The dashboard: rows of charts, laid out from left to right, 24 columns wide."""
    board = (
        dashboard.Dashboard("megaponder")
        .uid("megaponder")
        .tags(["megaponder"])
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run_id")
            .label("Run")
            .datasource(SOURCE)
            .query("label_values(megaponder_build_info, run_id)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
    )
    top = 0
    for title, charts in ROWS.items():
        board = board.with_row(dashboard.Row(title).grid_pos(GridPos(h=1, w=24, x=0, y=top)))
        top, left, height = top + 1, 0, 0
        for chart in charts:
            width = 4 if chart.stat else 8
            if left + width > 24:
                top, left, height = top + height, 0, 0
            board = board.with_panel(panel(chart, GridPos(h=HEIGHT[chart.stat], w=width, x=left, y=top)))
            left, height = left + width, max(height, HEIGHT[chart.stat])
        top += height
    return board.build()


def text() -> str:
    """The file's content; what the SDK leaves open is left out, so that Grafana takes its own default."""
    encoded = JSONEncoder().encode(build())
    plain = json.loads(encoded, object_hook=lambda d: {k: v for k, v in d.items() if v is not None})
    return json.dumps(plain, sort_keys=True, indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
