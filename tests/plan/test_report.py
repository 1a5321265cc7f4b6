"""Time, JSON and tables of a plan."""

from __future__ import annotations

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megaponder.cli.main import main
from megaponder.config.gpus import GPUS, find_gpu
from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig
from megaponder.plan.build import Plan, build_plan
from megaponder.plan.memory import GIB
from megaponder.plan.report import duration, print_plan, si
from megaponder.ponder.facts import facts_of
from megaponder.ponder.settings import method_of
from tests.data_pipeline.make import random_documents, write_documents


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


def test_every_stage_of_zero_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """By the short name of the engine; 8 ranks."""
    path = str(Path(__file__).parents[2] / "configs" / "llama-1.4b-ponderlm.yaml")
    words = ["plan", path, "--engine", "deepspeed", "--world-size", "8", "--json"]
    assert main([*words, "--parallel.zero_stage", "3", "--parallel.offload", "weights"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = {(one["stage"], one["offload"]): one for one in plan["zero"]}
    assert list(found) == [(1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"),
                           (3, "weights")]  # fmt: skip
    totals = [found[stage, "none"]["total"] for stage in (1, 2, 3)]
    assert totals == sorted(totals, reverse=True)
    assert found[3, "weights"]["total"] == plan["stages"][0]["total"] < found[3, "optimizer"]["total"] < totals[-1]
    share = plan["stage_parameters"][0] / 8
    assert found[2, "optimizer"]["main"] == pytest.approx(16 * share)
    assert found[3, "weights"]["main"] == pytest.approx(18 * share)


def test_a_rate_of_a_wider_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, words = tmp_path / "c.yaml", "optimizer.tuned_width = 1024 is more than model.hidden_size = 768: rates"
    file.write_text("model: {preset: llama-125m}\ntrain: {steps: 10}\n")
    for width, told in ((1024, True), (768, False), (256, False)):
        assert main(["plan", str(file), "--optimizer.tuned_width", str(width)]) == 0
        assert (words in capsys.readouterr().out) == told


def test_json_has_the_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How often data are read, and what else a plan says in words."""
    write_documents(tmp_path / "text", random_documents([32] * 128))
    (tmp_path / "c.yaml").write_text(
        "model: {family: llama, num_layers: 1, hidden_size: 32, num_heads: 4, vocab_size: 100}\n"
        f"data: {{train: [{tmp_path}/text], sequence_length: 64, split: '1,0,0', eod_id: 0}}\n"
        "train: {epochs: 2, global_batch: 4, eval_batches: 0}\noptimizer: {tuned_width: 64}\n"
    )
    assert main(["plan", str(tmp_path / "c.yaml"), "--json"]) == 0
    width, often = json.loads(capsys.readouterr().out)["notes"]
    assert width.startswith("optimizer.tuned_width = 64 is more") and re.search(r"/text 2\.\d\d times\.$", often), often


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


def test_ranks_that_share_sequences_are_told() -> None:
    cfg = config(pipeline=1)
    cfg.parallel.context = 4
    assert "not counted" not in text_of(config(pipeline=1), 64)
    text = text_of(cfg, 64)
    assert "64 = tensor 2 x pipeline 1 x context 4 x data 8" in text and "not counted: what context ranks" in text
    assert "512 tokens of each sequence; attention reads the others' keys" in text


def test_parts_of_the_stack_and_how_often_they_run() -> None:
    """Of a core that draws its depth, of loops that repeat the middle, and of a whole stack."""
    tiny = {"family": "llama", "num_layers": 6, "hidden_size": 64, "num_heads": 4, "vocab_size": 128}

    def told(method: str, options: dict[str, Any], **model: Any) -> str:
        given = {"model": tiny | model, "ponder": {"method": method, "options": options}, "train": {"steps": 40}}
        return text_of(resolve(from_mapping(given)), 1)

    text = told("huginn", {"prelude": 1, "coda": 2, "recurrence": 4, "draw": "uniform", "grow_steps": 40})
    for words in ("prelude: layer 0, once", "core: layers 1 to 3, 4 times (in training ", " in the mean, 7 at most)"):
        assert words in text, words
    assert "coda: layers 4 to 5, once" in text and "together 15 executions of 6 layers" in text
    text = told("nanbeige", {"loops": 2, "middle": 2})  # a loop runs the layers of the middle (6 + 2) / 2 times
    for words in ("prelude: layers 0 to 1, 2 times", "core: layers 2 to 3, 8 times", "together 24 executions of 6 lay"):
        assert words in text, words
    assert "core: layers 2 to 3, 2 times (in training 5)" in told("parcae", {"recurrence": 2, "draw_to": 5})
    assert "stack: layers 0 to 5, 4 times" in told("loop", {"extra_passes": 3})
    assert "a token runs" not in told("vanilla", {})


def advised(cfg: RunConfig, world: int) -> list[tuple[str, Any]]:
    """Fields and values that are advised; each is planned again and must need what the advice says."""
    plan = plan_of(cfg, world)
    assert max(stage.total for stage in plan.stages) > plan.gpu_memory_gib * GIB
    for change in plan.savings:
        one = copy.deepcopy(cfg)
        section, _, name = change.field.partition(".")
        setattr(getattr(one, section), name, change.value)
        again = plan_of(one, change.world_size)
        assert max(stage.total for stage in again.stages) == change.total
        assert change.fits == (change.total <= again.gpu_memory_gib * GIB)
    text = text_of(cfg, world)
    shown = [c for c in plan.savings if f"--{c.field} " in text]
    assert shown == ([c for c in plan.savings if c.fits][:3] or list(plan.savings[:1]))
    return [(c.field, c.value) for c in shown]


def test_what_is_advised_fits() -> None:
    cfg = config(pipeline=2, micro=8)
    cfg.precision.cuda_graphs = True
    expected = [("precision.cuda_graphs", "auto"), ("train.micro_batch", 4), ("parallel.recompute", "layer")]
    assert advised(cfg, 4) == expected  # the least costly first


def test_what_is_in_use_is_not_advised() -> None:
    cfg = config(pipeline=1, micro=64)
    cfg.parallel.recompute = "layer"
    fields = {change.field for change in plan_of(cfg, 2).savings}
    assert not {"parallel.recompute", "parallel.distributed_optimizer"} & fields
    assert advised(cfg, 2) == [("train.micro_batch", 32), ("parallel.sequence", True), ("parallel.tensor", 4)]
    assert "--parallel.tensor 4 --world-size 4" in text_of(cfg, 2)  # more ranks than there are GPUs
    assert "--parallel.sequence true  " in text_of(cfg, 2)


def test_where_nothing_alone_is_enough_the_largest_saving_is_named() -> None:
    cfg = config(pipeline=1, micro=32)
    cfg.parallel.distributed_optimizer, cfg.train.tokens = False, None
    cfg.data.sequence_length = cfg.model.max_positions = 65536
    assert advised(cfg, 16) == [("train.micro_batch", 1)]
    assert "parallel.distributed_optimizer" in {change.field for change in plan_of(cfg, 16).savings}
    assert "no single change is enough; the most is saved by" in text_of(cfg, 16)


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
