"""Parameter counts against the published ones and against the modules that are really built."""

from __future__ import annotations

from typing import Any

import pytest

from megaponder.config.load import from_mapping
from megaponder.config.method_facts import MethodFacts
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig
from megaponder.plan.layer import linear_flops
from megaponder.plan.moe import inactive
from megaponder.plan.parameters import model_parameters, rank_parameters, trained_part
from megaponder.ponder.settings import method_of, with_routers

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "mistral-7b": 7_241_732_096,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmo2-1b": 1_484_916_736,
    "opt-125m": 125_239_296 - 2 * 768,  # OPT's table of positions has two rows that nothing reads
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "gpt2-small": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}


ACTIVE = {"olmoe-1b-7b": 1.28e9, "qwen3-30b-a3b": 3.3e9}
"""As the model cards say it, rounded."""


def config(**sections: Any) -> RunConfig:
    return resolve(from_mapping({"train": {"steps": 1}, **sections}))


@pytest.mark.parametrize("preset", sorted(PUBLISHED))
def test_published_counts(preset: str) -> None:
    assert model_parameters(config(model={"preset": preset}).model).total == PUBLISHED[preset]


@pytest.mark.parametrize("preset", sorted(ACTIVE))
def test_active_parameters_and_flops_are_those_of_the_chosen_experts(preset: str) -> None:
    model = config(model={"preset": preset}).model
    active = model_parameters(model).total - inactive(model)
    assert active == pytest.approx(ACTIVE[preset], rel=0.02)
    outside = 2 * (model.vocab_size or 0) * (model.hidden_size or 0)
    norms = model_parameters(model).norms
    assert (model.num_layers or 0) * linear_flops(model) == 2 * (active - outside - norms)


def test_routers_of_passes_are_counted_but_cost_no_row_more() -> None:
    moe = {"experts": 8, "top_k": 2, "shared_ffn": 96}
    sizes = {"family": "llama", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 96, "ffn_size": 48}
    ponder = {"method": "loop", "options": {"extra_passes": 2}}
    given = [config(model=sizes | {"moe": moe | more}, ponder=ponder) for more in ({}, {"routers": "per_pass"})]
    shared, own = (with_routers(cfg, method_of(cfg)) for cfg in given)
    assert own.model.moe == moe | {"routers": 3} and shared is given[0]
    one, three = model_parameters(shared.model), model_parameters(own.model)
    assert three.mlp - one.mlp == three.total - one.total == 2 * 4 * 8 * 32
    assert linear_flops(own.model) == linear_flops(shared.model) and inactive(own.model) == inactive(shared.model)
    own.train.only = ["routers"]
    assert trained_part(own, rank_parameters(own, MethodFacts(), 0), 4).total == 3 * 4 * 8 * 32


@pytest.mark.parametrize(
    ("method", "options", "routers"),
    [
        ("ponderlm2", {"latents": 2, "jacobi": 3}, 3),
        ("ponderlm3", {"latents": 4, "target": 0.0}, 5),
        ("pause", {"pauses": 2}, 3),
        ("adaponderlm", {"steps": 3, "target": 0.0}, 4),
        ("loop", {"extra_passes": 2, "draw": "lognormal", "draw_to": 6}, 3),
        ("vanilla", {}, "per_pass"),  # refused by a rule
        ("parcae", {"prelude": 1, "coda": 1}, "per_pass"),
    ],
)
def test_a_token_has_as_many_routers_as_steps(method: str, options: dict[str, Any], routers: int | str) -> None:
    moe = {"experts": 8, "top_k": 2, "routers": "per_pass"}
    cfg = config(model={"preset": "llama-125m", "moe": moe}, ponder={"method": method, "options": options})
    assert with_routers(cfg, method_of(cfg)).model.moe == moe | {"routers": routers}


def test_ranks_that_share_experts_add_up() -> None:
    cfg = config(model={"preset": "olmoe-1b-7b"}, parallel={"experts": 8, "pipeline": 2}, train={"steps": 1})
    whole = model_parameters(cfg.model, padded=True)
    stages = [rank_parameters(cfg, MethodFacts(), stage) for stage in range(2)]
    assert 8 * sum(s.experts for s in stages) == whole.experts
    assert sum(s.mlp for s in stages) == whole.mlp == 16 * 64 * 2048  # routers


@pytest.mark.parametrize(
    ("preset", "millions"), [("llama-410m", 406.6), ("llama-1.4b", 1420.3), ("llama-2.8b", 2634.5)]
)
def test_llama_counts(preset: str, millions: float) -> None:
    assert model_parameters(config(model={"preset": preset}).model).total / 1e6 == pytest.approx(millions, abs=0.25)


@pytest.mark.parametrize("preset", ["pythia-410m", "llama-1.4b", "gpt2-medium"])
def test_stages_and_tensor_ranks_add_up(preset: str) -> None:
    cfg = config(model={"preset": preset}, parallel={"tensor": 4, "pipeline": 2}, data={"sequence_length": 1024})
    cfg.parallel.tensor = 1
    stages = [rank_parameters(cfg, MethodFacts(), stage) for stage in range(2)]
    whole = model_parameters(cfg.model, padded=True)
    copies = sum(stage.copies for stage in stages)
    assert sum(stage.total for stage in stages) - copies == whole.total
    assert (copies > 0) == (preset == "gpt2-medium")
    cfg.parallel.tensor = 4
    quarter = [rank_parameters(cfg, MethodFacts(), stage) for stage in range(2)]
    assert 4 * sum(q.mlp for q in quarter) >= sum(s.mlp for s in stages)
    assert sum(q.norms for q in quarter) == sum(s.norms for s in stages)
    assert [4 * q.embedding for q in quarter] == [s.embedding for s in stages]


def test_a_mixture_needs_a_copy_of_the_table_on_the_last_stage() -> None:
    cfg = config(model={"preset": "llama-1.4b"}, parallel={"pipeline": 2})
    mixing = MethodFacts(max_passes=4, mixes_vocabulary=True)
    assert [rank_parameters(cfg, mixing, stage).copies for stage in range(2)] == [0, 50304 * 2048]
    cfg.parallel.pipeline = 1
    assert rank_parameters(cfg, mixing, 0).copies == 0


def test_a_methods_own_parameters_are_counted_where_they_lie() -> None:
    from megaponder.plan.build import own_parameters
    from megaponder.ponder.settings import method_of
    from tests.layouts import sink  # noqa: F401  registers the test method

    shape = {"family": "llama", "num_layers": 4, "hidden_size": 8, "num_heads": 2, "vocab_size": 50, "ffn_size": 16}
    cfg = config(model=shape, ponder={"method": "sink"}, parallel={"pipeline": 2})
    own = own_parameters(method_of(cfg), 4)
    assert (own.entry, own.layers, own.exit) == (8 * 8 + 8, (3, 0, 3, 3), 8 + 1)
    assert model_parameters(cfg.model, own).method == 72 + 9 + 9
    assert [rank_parameters(cfg, MethodFacts(), stage, own).method for stage in range(2)] == [72 + 3, 6 + 9]


@pytest.mark.parametrize("only", [["mlp"], ["routers"], ["attention", "norms", "embeddings", "experts", "routers"]])
def test_what_rests_has_no_gradient(only: list[str]) -> None:
    moe = {"experts": 8, "top_k": 2, "shared_ffn": 96}
    sizes = {"family": "llama", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 96, "moe": moe}
    cfg = config(model=sizes | {"ffn_size": 48}, parallel={"experts": 2}, train={"steps": 1, "only": only})
    experts, shared, routers = 4 * 3 * 32 * 48 * 4, 4 * 3 * 32 * 96, 4 * 8 * 32
    held = rank_parameters(cfg, MethodFacts(), 0)
    rest = held.total - experts - shared - routers
    want = {1: experts + shared if only == ["mlp"] else routers, 5: rest + experts + routers}[len(only)]
    assert trained_part(cfg, held, 4).total == want
    assert trained_part(config(model=sizes), held, 4) == held
