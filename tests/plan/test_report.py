"""Time, JSON and tables of a plan."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from megaponder.config.facts import facts_of
from megaponder.config.gpus import GPUS, find_gpu
from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig
from megaponder.plan.build import Plan, build_plan
from megaponder.plan.report import duration, print_plan, si
from megaponder.ponder.settings import method_of


def config(pipeline: int = 4, micro: int = 4) -> RunConfig:
    return resolve(
        from_mapping(
            {
                "model": {"preset": "llama-1.4b"},
                "ponder": {"method": "ponderlm", "options": {"steps": 3}},
                "precision": {"dtype": "bf16"},
                "parallel": {"tensor": 2, "pipeline": pipeline, "distributed_optimizer": True},
                "train": {"tokens": 26_214_400_000, "global_batch": 256, "micro_batch": micro},
            }
        )
    )


def plan_of(cfg: RunConfig, world: int = 64) -> Plan:
    method = method_of(cfg)
    return build_plan(cfg, method, facts_of(method), world, 0.4, GPUS["h100-sxm"])


def test_time_by_hand() -> None:
    e = plan_of(config()).estimate
    needed = 3 * 11.962e9
    assert e.steps == 50_000 and e.tokens == 26_214_400_000
    assert e.tokens_per_second == pytest.approx(0.4 * 989.4e12 / needed, rel=1e-3)
    assert e.seconds == pytest.approx(26.2144e9 * needed / (64 * 0.4 * 989.4e12), rel=1e-3)
    assert e.step_seconds == pytest.approx(e.seconds / 50_000)
    # 8 micro-batches, 4 passes, 4 stages: 3 idle slots for 32 of work
    assert e.bubble == pytest.approx(3 / 35)


def test_the_peak_of_the_configuration_wins() -> None:
    cfg = config()
    cfg.logging.peak_tflops = 100.0
    assert plan_of(cfg).peak_tflops == 100.0


def test_json_is_complete() -> None:
    data = json.loads(json.dumps(plan_of(config()).as_dict()))
    assert data["layout"]["data"] == 8 and data["layout"]["microbatch_group"] == 4
    assert data["parameters"]["total"] == 1_420_396_544
    assert len(data["stages"]) == 4 and all(stage["total"] > 2**30 for stage in data["stages"])
    assert sum(p["total"] for p in data["flops"]["passes"]) * 3 == pytest.approx(data["needed"])


def text_of(cfg: RunConfig, world: int) -> str:
    out = io.StringIO()
    print_plan(cfg, plan_of(cfg, world), Console(file=out, width=120, highlight=False))
    return out.getvalue()


def test_tables_say_what_matters() -> None:
    text = text_of(config(), 64)
    for words in (
        "64 = tensor 2 x pipeline 4 x data 8", "8 micro-batches of 4, 4 passes each, in groups of 4 per pass",
        "1,420,396,544", "11.962 G", "stage 1", "stage 4", "26,214,400,000", "GPU hours", "fits",
    ):  # fmt: skip
        assert words in text, words
    assert "does not fit" in text_of(config(pipeline=1, micro=32), 16)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA B200", "b200"), ("NVIDIA L40S", "l40s"),
    ],
)  # fmt: skip
def test_gpus_by_name(name: str, key: str) -> None:
    assert find_gpu(name) is GPUS[key]
    assert find_gpu("Some other device") is None


def test_gpus_with_an_fp8_peak_are_those_that_run_fp8() -> None:
    assert {name for name, gpu in GPUS.items() if gpu.fp8_tflops} == {
        n for n, g in GPUS.items() if g.capability >= (8, 9)
    }


def test_numbers_for_people() -> None:
    assert [si(x) for x in (0, 999, 1_420_396_544, 26.2e12, 9.4e20)] == ["0", "999", "1.42 G", "26.2 T", "940 E"]
    assert [duration(x) for x in (0.74, 59, 3600, 90061)] == ["0.74 s", "59 s", "1:00:00", "1 day, 1:01:01"]
