"""Every rule refuses what breaks it, with a sentence, and its nearest legal value is legal."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaponder.config.method_facts import MethodFacts
from megaponder.config.rules import RULES, Machine, check
from megaponder.config.rules.layout import choose_group, group_fits
from megaponder.errors import ConfigError
from megaponder.ponder.base import Shape
from megaponder.ponder.facts import facts_of
from megaponder.ponder.registry import build_method
from tests.config.broken_attention import ATTENTION
from tests.config.broken_data import DATA
from tests.config.broken_engines import ENGINES
from tests.config.broken_moe import MOE
from tests.config.make import PASSES4, Broken, broken, config

CPU = Machine("cpu")
H100 = Machine("cuda", (9, 0), transformer_engine=True, grad_accum_kernel=False)
L40S = Machine("cuda", (8, 9), transformer_engine=True)
A100 = Machine("cuda", (8, 0), transformer_engine=True)
RTX5090 = Machine("cuda", (12, 0), transformer_engine=True)
FP8 = {"precision__fp8": "current", "precision__dtype": "bf16"}

BROKEN: list[Broken] = [
    *ATTENTION,
    *DATA,
    *ENGINES,
    *MOE,
    broken(
        "precision.grad_accum_fusion",
        "not Muon: other gradient buffers are not aligned; use auto",
        optimizer__kind="muon",
        parallel__distributed_optimizer=True,
        precision__grad_accum_fusion=True,
    ),
    broken(
        "optimizer.tuned_width",
        "need different rates; set model.tie_embeddings: false, or leave it out",
        optimizer__tuned_width=256,
        model__tie_embeddings=True,
    ),
    broken("parallel.offload_passes", "set parallel.recompute: layer, or use 0", parallel__offload_passes=1),
    broken(
        "parallel.offload_passes",
        "the layers of 2 passes are recomputed; the nearest is 2",
        parallel__offload_passes=3,
        parallel__recompute="layer",
        parallel__recompute_passes=2,
    ),
    broken(
        "precision.cuda_graphs",
        "keep everything on the GPU; use auto, or parallel.offload_passes: 0",
        parallel__offload_passes=1,
        parallel__recompute="layer",
        precision__cuda_graphs=True,
    ),
    broken("model.num_layers", "at least 1", model__num_layers=0),
    broken("data.shuffle_seed", "at least 0", data__shuffle_seed=-1),
    broken("parallel.microbatch_group", "at least 1", parallel__microbatch_group=0),
    broken("logging.profile_ranks", "ranks from 0 to", logging__profile_ranks=[99999]),
    broken("run", "the root of the file system", run="/"),
    broken("model.vocab_size", "at least 2", model__vocab_size=1),
    broken("model.num_heads", "divide model.hidden_size = 768; the nearest is 6", model__num_heads=7),
    broken("model.num_kv_heads", "divide model.num_heads = 12; the nearest is 4", model__num_kv_heads=5),
    broken("model.head_size", "at least 1", model__head_size=0),
    broken("model.rotary_fraction", "more than 0 and at most 1; the nearest is 1", model__rotary_fraction=1.5),
    broken("model.rotary_fraction", "even number of the 64", model__rotary_fraction=0.3),
    broken("model.rotary_fraction", "not 18.56; the nearest is 0.28125", model__rotary_fraction=0.29),
    broken("model.rotary_base", "more than 0; leave it out", model__rotary_base=0.0),
    broken("model.rotary_fraction", "even number of the 6", model__head_size=6, model__rotary_fraction=0.5),
    broken(
        "model.parallel_residual",
        "sum of each step; use false",
        model__norm_placement="stream",
        model__parallel_residual=True,
    ),
    broken("model.qk_norm", "model.norm = layernorm; use head", model__qk_norm="all", model__norm="layernorm"),
    broken("model.rotary_scaling", "rope_type must be one of linear, dynamic", model__rotary_scaling={"factor": 2.0}),
    broken("model.rotary_scaling", "yarn needs factor", model__rotary_scaling={"rope_type": "yarn"}),
    broken(
        "model.rotary_scaling.factr",
        "truncate; did you mean factor",
        model__rotary_scaling={"rope_type": "yarn", "factr": 2.0},
    ),
    broken("model.rotary_scaling.factor", "at least 1", model__rotary_scaling={"rope_type": "linear", "factor": 0.5}),
    broken(
        "train.eslm.share", "its options are by, alpha, scope, warmup, adapt, alpha_range", train__eslm={"share": 1}
    ),
    broken(
        "train.eslm", "it needs by, the score of a token: loss or entropy; add by: loss", train__eslm={"alpha": 0.2}
    ),
    broken("train.eslm.by", "loss or entropy; use loss", train__eslm={"by": "margin"}),
    broken("train.eslm.scope", "micro or global; use micro", train__eslm={"by": "loss", "scope": "batch"}),
    broken("train.eslm.alpha", "less than 1", train__eslm={"by": "loss", "alpha": 1.0}),
    broken("train.eslm.warmup", "a whole number of steps", train__eslm={"by": "loss", "warmup": 0.1}),
    broken("train.eslm.adapt", "at least 0 and at most 10", train__eslm={"by": "loss", "adapt": -1}),
    broken("train.eslm.alpha", "which is [0, 0.5]", train__eslm={"by": "loss", "adapt": 1, "alpha": 0.6}),
    broken("train.eslm.alpha_range", "two numbers", train__eslm={"by": "loss", "adapt": 1, "alpha_range": [0.2, 0.5]}),
    broken("train.eslm.alpha_range", "adapt is 0; take", train__eslm={"by": "loss", "alpha_range": [0.0, 0.5]}),
    broken(
        "train.eslm",
        "also train its gates, which then would know the selected tokens only; use {}",
        facts=MethodFacts(trains_exits=True),
        train__eslm={"by": "loss"},
    ),
    broken("model.norm_affine", "RMSNorm always learns", model__norm="rmsnorm", model__norm_affine=False),
    broken("model.norm_eps", "more than 0", model__norm_eps=0.0),
    broken("model.init_std", "more than 0", model__init_std=-1.0),
    broken("model.embedding_scale", "more than 0; the default is auto", model__embedding_scale=0.0),
    broken("faults.max_without_targets", "it must be at least 0", faults__max_without_targets=-1),
    broken("faults.spike_window", "at least 4", faults__spike_window=3),
    broken("faults.spike_sd", "more than 0", faults__spike_sd=0.0),
    broken("faults.straggler_ratio", "at least 1", faults__straggler_ratio=0.5),
    broken("faults.max_rollbacks", "at least 1", faults__max_rollbacks=0),
    broken("faults.rollback_after", "at least 0", faults__rollback_after=-1),
    broken("faults.rollback_after", "no fault leads to a skipped step", faults__rollback_after=3),
    broken("faults.skip_data", "only after a rollback", faults__skip_data=True, faults__spike="skip"),
    broken("faults.hang_minutes", "less than parallel.timeout_minutes = 10; half", faults__hang_minutes=10.0),
    broken("model.hidden_size", "at most 2,147,483,647", model__hidden_size=10**21),
    broken("train.steps", "at most 2,147,483,647", train__steps=10**20),
    broken("train.steps", "at least 1; the nearest is 1", train__steps=-(10**20)),
    broken("logging.profile_ranks", "at least -2,147,483,647", logging__profile_ranks=[-(10**20)]),
    broken("train.tokens", "at most 1,000,000,000,000,000", train__tokens=10**15 + 1, train__steps=None),
    broken("parallel.timeout_minutes", "at most 1,000,000; the nearest is 1000000", parallel__timeout_minutes=1e300),
    broken("optimizer.lr", "more than 0", optimizer__lr=0.0),
    broken("optimizer.lr", "at most 1", optimizer__lr=3.0),
    broken("optimizer.beta2", "less than 1", optimizer__beta2=1.0),
    broken("optimizer.weight_decay", "at least 0", optimizer__weight_decay=-0.1),
    broken("schedule.warmup_fraction", "less than 1", schedule__warmup_fraction=1.0),
    broken("schedule.min_lr_fraction", "at most 1", schedule__min_lr_fraction=1.1),
    broken("schedule.decay_fraction", "nearest is 0.99", schedule__kind="wsd", schedule__decay_fraction=1.0),
    broken("train.steps", "at least 1", train__steps=0),
    broken("train.steps", "a run needs a budget", train__steps=None),
    broken("train.steps", "only one of the two", train__tokens=1000000000),
    broken("train.method_only_steps", "at least 0", train__method_only_steps=-1),
    broken("train.method_only_steps", "no parameters of its own to train alone; use 0", train__method_only_steps=5),
    broken("train.method_lr", "of which there are none; leave it out", train__method_lr=1e-2),
    broken("train.eval_batches", "at least 0", train__eval_batches=-1),
    broken("train.batch_rampup", "three positive integers", train__batch_rampup=[1, 2]),
    broken("train.batch_rampup", "start below", train__batch_rampup=[256, 8, 100]),
    broken("train.batch_rampup", "nearest is [46, 30, 100]", train__batch_rampup=[32, 30, 100]),
    broken("train.batch_rampup", "multiples of", world=32, train__batch_rampup=[16, 16, 100]),
    broken("checkpoint.keep_every", "nearest is 2000", checkpoint__keep_every=1500),
    broken("checkpoint.keep_last", "at least 1", checkpoint__keep_last=0),
    broken("checkpoint.load", "never used", checkpoint__load="x", checkpoint__resume="must"),
    broken("checkpoint.load_changes", "nothing is loaded", checkpoint__load_changes=["model.rotary_base"]),
    broken(
        "checkpoint.load_changes",
        "these may: model.rotary_base, model.rotary_scaling",
        checkpoint__load_changes=["model.norm"],
    ),
    broken("logging.every", "at least 1", logging__every=0),
    broken("logging.peak_tflops", "more than 0", logging__peak_tflops=0.0),
    broken("run", "must be a folder", run=" "),
    broken("run", "a file has this name", run=__file__),
    broken("parallel.tensor", "at least 1", parallel__tensor=0),
    broken("parallel.tensor", "divide model.num_heads = 12; the nearest is 4", world=5, parallel__tensor=5),
    broken("parallel.tensor", "model.num_kv_heads = 2", world=4, parallel__tensor=4, model__num_kv_heads=2),
    broken("parallel.tensor", "model.ffn_size = 2065", world=6, parallel__tensor=6, model__ffn_size=2065),
    broken(
        "model.vocab_multiple",
        "nearest is 300",
        world=3,
        parallel__tensor=3,
        model__vocab_multiple=100,
        model__vocab_size=101,
    ),
    broken("parallel.sequence", "needs parallel.tensor", parallel__sequence=True),
    broken(
        "data.sequence_length",
        "nearest is 2048",
        world=2,
        parallel__sequence=True,
        parallel__tensor=2,
        data__sequence_length=2047,
    ),
    broken("parallel.pipeline", "divide model.num_layers = 12; the nearest is 4", world=5, parallel__pipeline=5),
    broken("world size", "nearest is 8 processes", world=6, parallel__tensor=4),
    broken("train.global_batch", "1 x 3; the nearest is 255", world=3),
    broken(
        "train.global_batch",
        "need at least",
        world=4,
        parallel__pipeline=4,
        train__global_batch=8,
        train__micro_batch=4,
    ),
    broken("train.batch_rampup", "start at 4 or more", world=4, parallel__pipeline=4, train__batch_rampup=[2, 2, 100]),
    broken(
        "parallel.microbatch_group",
        "nearest is 3",
        world=2,
        parallel__pipeline=2,
        train__global_batch=5,
        parallel__microbatch_group=2,
    ),
    broken("parallel.overlap_param_gather", "distributed_optimizer", parallel__overlap_param_gather=True),
    broken("parallel.recompute_layers", "needs parallel.recompute: layer", parallel__recompute_layers=1),
    broken(
        "parallel.recompute_layers",
        "there are 6 layers of a pipeline stage; the nearest is 6",
        world=2,
        parallel__pipeline=2,
        parallel__recompute="layer",
        parallel__recompute_layers=7,
    ),
    broken(
        "parallel.recompute_passes",
        "there are 4 passes; the nearest is 4",
        parallel__recompute="layer",
        parallel__recompute_passes=5,
    ),
    broken(
        "parallel.overlap_param_gather",
        "overlap_grad_reduce",
        parallel__overlap_param_gather=True,
        parallel__distributed_optimizer=True,
    ),
    broken(
        "parallel.recompute_passes",
        "runs without gradient; leave it out",
        facts=MethodFacts(max_passes=4, free_passes=True),
        parallel__recompute="layer",
        parallel__recompute_passes=1,
    ),
    broken("parallel.pipeline", "or set parallel.stage_layers", world=5, parallel__pipeline=5),
    broken("parallel.stage_layers", "for example [6, 6]", world=2, parallel__pipeline=2, parallel__stage_layers=[12]),
    broken("parallel.stage_layers", "add up to 11", world=2, parallel__pipeline=2, parallel__stage_layers=[5, 6]),
    broken("parallel.stage_layers", "at least 1", world=2, parallel__pipeline=2, parallel__stage_layers=[0, 12]),
    broken(
        "parallel.pipeline",
        "the first stage holds 3 layers and must hold all 4 of the prelude",
        world=4,
        facts=MethodFacts(max_passes=4, core=(4, 10)),
        parallel__pipeline=4,
    ),
    broken(
        "parallel.stage_layers",
        "the last stage holds 1 layers and must hold all 2 of the coda",
        world=2,
        facts=MethodFacts(max_passes=4, core=(4, 10)),
        parallel__pipeline=2,
        parallel__stage_layers=[11, 1],
    ),
    broken(
        "parallel.overlap_grad_reduce",
        "the others have no gradient",
        facts=MethodFacts(frozen=True, has_parameters=True),
        train__method_only_steps=10**6,
        parallel__overlap_grad_reduce=True,
    ),
    broken(
        "train.method_only_steps",
        "trains its own parameters alone, in every step",
        facts=MethodFacts(frozen=True, has_parameters=True),
        train__steps=50,
    ),
    broken("ponder.skip_halted", "never halts tokens", ponder__skip_halted=True),
    broken("parallel.deallocate_pipeline_outputs", "gloo", machine=CPU, parallel__deallocate_pipeline_outputs=True),
    broken("parallel.timeout_minutes", "more than 0", parallel__timeout_minutes=0.0),
    broken("precision.cuda_graphs", "cannot start", precision__cuda_graphs=True, parallel__overlap_grad_reduce=True),
    broken("precision.grad_accum_fusion", "not aligned", machine=H100, precision__grad_accum_fusion=True),
    *(
        broken(field.replace("__", "."), "it is empty, as an unset shell variable is; set it", **{field: ""})
        for field in ("checkpoint__local", "checkpoint__load", "data__cache", "data__tokenizer", "train__tasks_folder")
    ),
    broken(
        "parallel.offload_passes",
        "the layers of 1 pass are recomputed; the nearest is 1",
        parallel__offload_passes=2,
        parallel__recompute="layer",
        parallel__recompute_passes=1,
    ),
    broken("checkpoint.local_every", "needs checkpoint.local", checkpoint__local_every=10),
    broken("checkpoint.local", "for example to 100", checkpoint__local="/tmp/local"),
    broken("logging.profile_steps", "first and the last", logging__profile_steps=[5, 4]),
    broken("precision.fp8_bf16_layers", "at least 0", precision__fp8_bf16_layers=-1),
    broken("precision.fp8_bf16_layers", "would be left for fp8", precision__fp8_bf16_layers=6, **FP8),
    broken("precision.fp8_canary", "at least 0", precision__fp8_canary=-0.5),
    broken("precision.fp8", "needs precision.dtype = bf16", precision__fp8="delayed"),
    broken("precision.fp8", "local", precision__implementation="local", **FP8),
    broken("precision.fp8", "missing here", machine=CPU, **FP8),
    broken("precision.fp8", "8.9 (Ada) or newer, and the GPU has 8.0; use none", machine=A100, **FP8),
    broken(
        "precision.fp8",
        "9.0 (Hopper) or newer, and the GPU has 8.9; the nearest is current",
        machine=L40S,
        precision__fp8="blockwise",
        precision__dtype="bf16",
    ),
    broken(
        "precision.fp8", "the GPU has 9.0; the nearest is blockwise", machine=H100, **FP8 | {"precision__fp8": "nvfp4"}
    ),
    broken("precision.fp8", "from compute capability 12.0 on", machine=RTX5090, **FP8 | {"precision__fp8": "mxfp8"}),
    broken("precision.implementation", "missing here", machine=CPU, precision__implementation="te"),
    broken(
        "precision.grad_accum_fusion",
        "apex",
        machine=H100,
        precision__grad_accum_fusion=True,
        precision__implementation="local",
        parallel__distributed_optimizer=True,
    ),
    broken("model.ffn_size", "multiple of 16 on each of parallel.tensor = 4", world=4, parallel__tensor=4, **FP8),
    broken("data.sequence_length", "nearest is 2000", data__sequence_length=2001, **FP8),
    broken("model.ffn_size", "must be a multiple of 32", **FP8 | {"precision__fp8": "mxfp8"}),
]


@pytest.mark.parametrize(("field", "words", "world", "facts", "machine", "changes"), BROKEN)
def test_refusal(
    field: str, words: str, world: int, facts: MethodFacts, machine: Machine | None, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(**changes), facts, world, machine)
    assert caught.value.field == field
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_every_rule_has_a_case_here() -> None:
    """A new rule needs a line in BROKEN: each rule must be the first to refuse one of them (or be tested below)."""
    refusing = set()
    for _, _, world, facts, machine, changes in BROKEN:
        try:
            check(config(**changes), facts, world, machine)
        except ConfigError as error:
            frames, trace = [], error.__traceback__
            while trace is not None:
                frames.append(trace.tb_frame.f_code.co_name)
                trace = trace.tb_next
            refusing |= set(frames)
    assert {rule.__name__ for rule in RULES} - refusing == {"datasets_exist"}
    assert all(rule.__doc__ and rule.__doc__.count("\n") == 0 for rule in RULES)


@pytest.mark.parametrize(
    ("world", "facts", "machine", "changes"),
    [
        (1, PASSES4, CPU, {}),
        (16, PASSES4, H100, {"parallel__tensor": 2, "parallel__pipeline": 4, "parallel__sequence": True}),
        (2, PASSES4, CPU, {"parallel__pipeline": 2, "train__global_batch": 5}),
        (2, MethodFacts(), CPU, {"parallel__pipeline": 2, "train__global_batch": 1}),  # 1F1B runs any number
        (8, PASSES4, H100, {**FP8, "parallel__distributed_optimizer": True, "precision__implementation": "te"}),
        (1, PASSES4, L40S, FP8),
        (1, PASSES4, None, {"train__batch_rampup": [32, 32, 5000]}),
        (1, MethodFacts(), None, {"train__tokens": 10 * 256 * 2048, "train__steps": 10}),
        (1, MethodFacts(), None, {"data__train": [0.2, "a", 0.8, "b"], "data__valid": ["c"]}),
        (1, MethodFacts(has_parameters=True), None, {"train__method_only_steps": 5}),
        (4096, PASSES4, None, {"parallel__tensor": 4, "parallel__pipeline": 4, "train__global_batch": 4096}),
    ],
)
def test_legal(world: int, facts: MethodFacts, machine: Machine | None, changes: dict[str, Any]) -> None:
    check(config(**changes), facts, world, machine)


@settings(max_examples=60)
@given(
    tensor=st.integers(1, 40), pipeline=st.integers(1, 30), batch=st.integers(1, 300), micro=st.integers(1, 9),
    world=st.integers(1, 64), passes=st.integers(1, 5), kv=st.integers(1, 24), vocab=st.integers(2, 60000),
)  # fmt: skip
def test_following_the_advice_ends_in_a_legal_layout(
    tensor: int, pipeline: int, batch: int, micro: int, world: int, passes: int, kv: int, vocab: int
) -> None:
    """Taking 'the nearest is N' again and again repairs any layout."""
    changes: dict[str, Any] = {
        "parallel__tensor": tensor, "parallel__pipeline": pipeline, "train__global_batch": batch,
        "train__micro_batch": micro, "model__num_kv_heads": kv, "model__vocab_size": vocab,
    }  # fmt: skip
    for _ in range(10):
        try:
            check(config(**changes), MethodFacts(max_passes=passes), world)
            return
        except ConfigError as error:
            near = re.search(r"the nearest is (\d+)", error.fix)
            assert near, error
            if error.field == "world size":
                world = int(near[1])
            else:
                changes[error.field.replace(".", "__")] = int(near[1])
    raise AssertionError(f"no legal layout in ten steps: {changes}, world {world}")


@given(m=st.integers(1, 64), stages=st.integers(1, 12))
def test_the_chosen_group_is_legal_and_smallest(m: int, stages: int) -> None:
    group = choose_group(m, stages)
    legal = [n for n in range(1, m + 1) if group_fits(m, stages, n)]
    assert group == (legal[0] if legal else None)
    assert (group is None) == (m < stages)


def test_datasets_must_exist(tmp_path: Path) -> None:
    (tmp_path / "wiki.bin").touch()
    (tmp_path / "wiki.idx").touch()
    check(config(data__train=[str(tmp_path / "wiki")]), PASSES4, 1, needs_data=True)
    for path, words in (("wikis", "did you mean"), ("wiki.bin", "did you mean"), ("none/x", "has no dataset")):
        with pytest.raises(ConfigError) as caught:
            check(config(data__train=[str(tmp_path / path)]), PASSES4, 1, needs_data=True)
        assert caught.value.field == "data.train" and words in str(caught.value)
    with pytest.raises(ConfigError, match="training needs a dataset"):
        check(config(), PASSES4, 1, needs_data=True)
    with pytest.raises(ConfigError, match="there is no such folder"):
        check(config(checkpoint__load="nowhere", data__train=[str(tmp_path / "wiki")]), PASSES4, 1, needs_data=True)


class Drawn:
    """A method whose number of passes depends on the step."""

    name, options = "drawn", None
    rider_channels, mixes_vocabulary, keeps_kv, skips = 2, True, True, False
    core, reads_every_pass, trains_exits, weighs = None, False, False, False

    class Pass:
        def __init__(self, slots: int):
            self.index, self.last, self.slots, self.feedback_slots = 0, False, slots, 1
            self.layers, self.grad = None, True

    def longest(self, seed: int) -> list[Drawn.Pass]:
        return self.passes(seed, 1 - seed)

    def passes(self, seed: int, step: int) -> list[Drawn.Pass]:
        return [self.Pass(1), *[self.Pass(2)] * (2 + (seed + step) % 2)]

    def extra_flops(self, p: Any, vocab_size: int) -> float:
        return 0.0

    def feedback_flops(self, p: Any, vocab_size: int) -> float:
        return 0.0

    def training_flops(self, p: Any, vocab_size: int) -> float:
        return 0.0


def test_facts_of_a_method() -> None:
    assert facts_of(Drawn()) == MethodFacts(4, 2, 2, True, True)
    shape = Shape("llama", 2, 8)
    with_budget = {"target": 0.6, "ramp_start": 1, "ramp_end": 5}
    for name, options, own in (
        ("ponderlm", {}, False),
        ("ponderlm", {"feedback": "projected"}, True),
        ("adaponderlm", {"target": 0.0}, True),
        ("adaponderlm", with_budget, True),
        ("confident_ponderlm", with_budget, True),
        ("confident_ponderlm", {"target": 0.0}, False),
    ):
        assert facts_of(build_method(name, options, shape)).has_parameters == own, (name, options)


def test_a_file_where_checkpoints_go_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ConfigError, match="no checkpoint could be saved"):
        check(config(run=str(tmp_path)), PASSES4, 1)


def test_a_file_where_profiles_go_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("")
    with pytest.raises(ConfigError, match="is a file, and profiles"):
        check(config(run=str(tmp_path), logging__profile_steps=[4, 5]), PASSES4, 1)
    check(config(run=str(tmp_path)), PASSES4, 1)


def test_a_pipe_in_the_run_folder_is_refused(tmp_path: Path) -> None:
    """Whoever reads it would wait for ever."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"metrics.jsonl is a pipe or a device; move it away"):
        check(config(run=str(tmp_path)), PASSES4, 1)


def test_options_that_count_passes_are_bounded() -> None:
    with pytest.raises(ConfigError, match="at most 1,000"):
        build_method("ponderlm", {"steps": 10**11}, Shape("llama", 2, 64))
