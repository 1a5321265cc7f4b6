"""The engine against float64 oracles and against the official code's numbers: logits, loss and every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.engine import cuda_on_cpu
from tests.layouts import official
from tests.layouts.cases import CASES, LENGTH, VOCAB, Case, disturb, run_config
from tests.layouts.layouts import LAYOUTS
from tests.oracles import eslm
from tests.oracles.reference import Oracle
from tests.tolerance import RTOL

cuda_on_cpu.install()

from megaponder.data.batch import MicroBatch  # noqa: E402
from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.ponder.settings import embedding_scale, method_of  # noqa: E402

ALL = {"sources": "all"}
ODD = {
    "llama-gqa-theta-eps": Case(
        "llama", "ponderlm", {"steps": 2}, {"num_kv_heads": 1, "rotary_base": 5e5, "norm_eps": 0.1}
    ),
    "pythia-sequential-rotary1": Case(
        "pythia", "loop", {"extra_passes": 1}, {"parallel_residual": False, "rotary_fraction": 1.0}
    ),
    "pythia-tied-topk": Case("pythia", "ponderlm", {"steps": 2, "topk": 9}, {"tie_embeddings": True}),
    "llama-xs": Case("llama", "ponderlm", {"steps": 3, "multiply_by_steps": True}),
    "qk-norm-layernorm": Case("pythia", "ponderlm", {"steps": 1}, {"qk_norm": "head"}),
    "qk-norm-learned-positions": Case("gpt2", "loop", {"extra_passes": 1}, {"qk_norm": "head", "norm": "rmsnorm"}),
    "sandwich-parallel": Case("pythia", "ponderlm", {"steps": 1}, {"norm_placement": "sandwich"}),
    "sandwich-qk-norm": Case(
        "gpt2", "vanilla", {}, {"norm_placement": "sandwich", "qk_norm": "head", "norm": "rmsnorm"}
    ),
    "ponderlm-hidden": Case("pythia", "ponderlm", {"steps": 2, "feedback": "hidden"}),
    "adaponderlm-shared": Case(
        "llama", "adaponderlm", {"target": 0.0, "threshold": 0.5, "shared_gate": True, "cost_weight": 0.3}
    ),
    "adaponderlm-linear": Case(
        "pythia", "adaponderlm", {"steps": 2, "target": 0.0, "threshold": 0.3, "router": "linear", "cost_weight": 0.3}
    ),
    "adaponderlm-no-router": Case("llama", "adaponderlm", {"steps": 2, "target": 0.0, "router": "none"}),
    "adaptive-cot-mlp": Case(
        "llama", "adaptive_cot", {"target": 0.0, "threshold": 0.3, "cost_weight": 1.0, "router": "mlp"}
    ),
    "adaptive-cot-no-router": Case("pythia", "adaptive_cot", {"steps": 2, "target": 0.0, "router": "none"}),
    "adaptive-cot-budget-no-router": Case(
        "llama", "adaptive_cot", {"target": 0.6, "explore": 0.5, "score_weight": 20.0, "router": "none"}
    ),
    "huginn-truncated": Case(
        "llama",
        "huginn",
        {"prelude": 1, "coda": 1, "recurrence": 4, "kept": 2, "draw": "fixed"},
        {"num_layers": 4, "tie_embeddings": True},
    ),
    "huginn-without-ends": Case(
        "pythia", "huginn", {"prelude": 0, "coda": 0, "recurrence": 3, "kept": 5, "draw": "fixed"}
    ),
    "nanbeige": Case("llama", "nanbeige", {"loops": 3, "norm_between": False}),
    "nanbeige-losses": Case("llama", "nanbeige", {"loops": 3, "loss_weights": [0.2, 0.3]}),
    "ouro-stage-2": Case("llama", "ouro", {"loops": 3, "stage": 2, "judges": "same"}, {"norm_placement": "sandwich"}),
    "ouro-stage-2-next": Case("llama", "ouro", {"loops": 2, "stage": 2, "judges": "next", "threshold": 0.6}),
    "window-pause": Case("llama", "pause", {"pauses": 2, "pause_token_id": 90}, {"attention_window": 4}),
    "window-latents": Case(
        "llama",
        "ponderlm3",
        {"latents": 2, "target": 0.0, "jacobi": 2, "threshold": 0.3, "cost_weight": 0.3},
        {"attention_window": 4},
    ),
    "window-merged": Case(
        "llama", "adaptive_cot", {"target": 0.0, "threshold": 0.3, "cost_weight": 1.0}, {"attention_window": 4}
    ),
    "window-aligned": Case(
        "pythia",
        "adaponderlm",
        {"target": 0.0, "threshold": 0.5, "steps": 2, "cost_weight": 0.3},
        {"attention_window": 4},
        skip=True,
    ),
    "llama3-adjacent": Case(
        "llama",
        "ponderlm",
        {"steps": 1},
        {
            "rotary_pairs": "adjacent",
            "rotary_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "linear-part": Case(
        "pythia", "loop", {"extra_passes": 1}, {"rotary_scaling": {"rope_type": "linear", "factor": 3.0}}
    ),
    "adjacent-part-rotated-norm": Case(
        "pythia", "loop", {"extra_passes": 1}, {"rotary_pairs": "adjacent", "qk_norm": "rotated", "activation": "relu2"}
    ),
    "post-parallel-qk-bias-norm": Case(
        "llama",
        "ponderlm",
        {"steps": 1},
        {"norm_placement": "post", "parallel_residual": True, "qkv_bias": "qk", "qk_norm": "head", "num_kv_heads": 2},
    ),
    "depth-all-raw-prob": Case(
        "qwen3",
        "vanilla",
        {},
        {"num_layers": 3, "num_kv_heads": 2, "depth_attention": {"values": "raw", "query": "mean_prob"}},
    ),
    "depth-stride-residual": Case(
        "pythia",
        "loop",
        {"extra_passes": 1},
        {"num_layers": 3, "depth_attention": {"sources": "stride:2", "own": "residual", "scale": 0.5}},
    ),
    "depth-listed-latents": Case(
        "llama",
        "ponderlm3",
        {"latents": 2, "target": 0.0, "jacobi": 2, "threshold": 0.3, "cost_weight": 0.3},
        {"num_layers": 3, "depth_attention": {"sources": [0, 1], "passes": "within"}, "num_kv_heads": 2},
    ),
    "depth-blocks-residual-prob": Case(
        "llama",
        "ponderlm",
        {"steps": 1},
        {
            "num_layers": 4,
            "num_kv_heads": 2,
            "depth_attention": {"own": "residual", "query": "mean_prob", "blocks": 2, "passes": "within"},
        },
    ),
    "depth-merged": Case(
        "llama",
        "adaptive_cot",
        {"target": 0.0, "threshold": 0.3, "cost_weight": 1.0},
        {"num_kv_heads": 2, "depth_attention": ALL},
    ),
    "depth-ouro": Case(
        "llama",
        "ouro",
        {"loops": 2, "entropy_weight": 0.2, "threshold": 0.7},
        {"norm_placement": "sandwich", "depth_attention": ALL},
    ),
    "freqkv-pythia": Case("pythia", "ponderlm", {"steps": 1}, {"freqkv": {"capacity": 5, "sink": 1}}),
    "freqkv-huginn": Case(
        "llama",
        "huginn",
        {"prelude": 1, "coda": 1, "recurrence": 3, "kept": 2, "draw": "fixed"},
        {"num_layers": 4, "rotary_pairs": "adjacent", "freqkv": {"capacity": 7, "sink": 0, "ratio": 0.4}},
    ),
    "freqkv-yarn-norms": Case(
        "llama",
        "ouro",
        {"loops": 2, "entropy_weight": 0.2, "threshold": 0.7},
        {
            "num_kv_heads": 1,
            "qk_norm": "all",
            "freqkv": {"capacity": 6, "sink": 2, "ratio": 0.7},
            "rotary_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
        },
    ),
    "moe-of-probabilities": Case(  # as in OLMoE
        "llama",
        "vanilla",
        {},
        {"qk_norm": "all", "moe": {"experts": 5, "top_k": 3, "renormalise": False, "aux_weight": 0.7}},
    ),
    "moe-one-parallel-post-freqkv": Case(
        "llama",
        "ponderlm",
        {"steps": 2},
        {
            "parallel_residual": True,
            "norm_placement": "post",
            "freqkv": {"capacity": 7, "sink": 1},
            "moe": {"experts": 3, "top_k": 1, "renormalise": False, "scale": 2.0, "shared_ffn": 8, "aux_weight": 0.4},
        },
    ),
    "moe-sigmoid-depth": Case(
        "qwen3",
        "loop",
        {"extra_passes": 1},
        {"depth_attention": ALL, "moe": {"experts": 4, "top_k": 2, "score": "sigmoid", "aux_weight": 0.5}},
    ),
    "moe-routers": Case(  # the third pass has the second one's
        "llama",
        "loop",
        {"extra_passes": 2},
        {"moe": {"experts": 4, "top_k": 2, "routers": 2, "shared_ffn": 24, "aux_weight": 0.5}},
        disciplines=0.7,
    ),
    "moe-routers-slots": Case(
        "llama",
        "pause",
        {"pauses": 2, "pause_token_id": 3},
        {"moe": {"experts": 4, "top_k": 2, "routers": 3, "aux_weight": 0.5}},
        disciplines=0.7,
    ),
    "frozen-norms-relu": Case("gpt2", "ponderlm", {"steps": 1}, {"norm_affine": False, "activation": "relu"}),
    "pythia-pause": Case("pythia", "pause", {"pauses": 1, "pause_token_id": 3}),
}
ORACLE_CASES = {
    k: v
    for k, v in CASES.items()
    if v.method not in ("sink", "halfway", "detached")
    and (v.steps == 1 or v.options.get("target"))
    and not (v.skip and "moe" in v.model)  # the oracle's balance counts all tokens
} | ODD


def _relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours.double() - reference.double()).abs().max() / reference.abs().max().clamp(min=1e-12))


def _batch() -> MicroBatch:
    draw = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=draw)
    mask = torch.ones(2, LENGTH)
    mask[1, 7:] = 0
    return MicroBatch(text[:, :-1], text[:, 1:], mask, disciplines_b=torch.tensor([-1, 1]))


@pytest.mark.parametrize("name", list(ORACLE_CASES))
def test_float64_oracle(name: str) -> None:
    case = ORACLE_CASES[name]
    cfg = run_config(case, LAYOUTS["one-batch1"])
    method = method_of(cfg)
    engine = build_engine(cfg, method, groups.init(cfg))
    disturb(engine.stage.named_parameters())
    batch, weights = _batch(), dict(engine.stage.named_parameters())
    oracle = Oracle(weights, cfg.model, embedding_scale(cfg.model, method))
    results = [oracle.run(ids, case.method, case.options) for ids in batch.ids_bn]
    assert _relative(engine.logits(batch.ids_bn), torch.stack([r.logits for r in results]).detach()) < RTOL
    engine.zero_grad()
    out = engine.forward_backward([batch], 0, train=True)
    trained = [
        oracle.run(ids, case.method, case.options, labels)
        for ids, labels in zip(batch.ids_bn, batch.labels_bn, strict=True)
    ]
    logits, count = torch.stack([r.logits for r in trained]).detach(), batch.loss_mask_bn
    if case.eslm:
        count = eslm.of_batches(logits, batch.labels_bn, batch.loss_mask_bn, case.eslm, [2])
        losses = eslm.scores(logits, batch.labels_bn, "loss")
        assert out.selected["selected_loss"] == pytest.approx(float((losses * count).sum() / out.tokens), rel=RTOL)
    loss, grads = oracle.loss_and_gradients(
        batch.ids_bn, batch.labels_bn, batch.loss_mask_bn, case.method, case.options, cfg.train.z_loss, count,
        (case.disciplines, batch.disciplines_b.tolist()),
    )  # fmt: skip
    assert out.loss == pytest.approx(float(loss), rel=RTOL)
    squares = logits.logsumexp(-1) ** 2
    z_loss = cfg.train.z_loss * float((squares * count).sum() / out.tokens)
    assert out.z_loss == pytest.approx(z_loss, rel=RTOL) and z_loss > 0
    if cfg.model.moe:
        total = 0.0
        for ids, mask in zip(batch.ids_bn, batch.loss_mask_bn, strict=True):
            oracle.run(ids, case.method, case.options)
            total += float(oracle.balance(mask)) / cfg.model.num_layers / out.tokens
        assert out.balance["moe_balance"] == pytest.approx(total, rel=RTOL) and total > 1.01
        if case.disciplines:  # those of the last sequence, which alone has one
            mean = oracle.discipline(1, batch.loss_mask_bn[1]) / batch.loss_mask_bn[1].sum() / cfg.model.num_layers
            assert out.balance["moe_discipline"] == pytest.approx(float(mean), rel=RTOL)
    if method.halts:
        depth = torch.stack([r.depth for r in trained]).float()  # type: ignore[misc]
        assert out.stats["depth"] == pytest.approx(float((depth * batch.loss_mask_bn).sum() / out.tokens), rel=RTOL)
        adapts = case.options.get("router") != "none" or bool(case.options.get("target"))
        assert (len(depth.unique()) > 1) == adapts, "tokens halt at one depth only: the case shows nothing"
    for key, grad in grads.items():
        if not weights[key].requires_grad:
            continue
        frozen = case.options.get("stage") == 2 and not key.startswith("method_")
        assert (float(grad.abs().max()) > 0) is not frozen, key
        assert _relative(weights[key].main_grad, grad) < RTOL, key


OFFICIAL = {
    "llama_loop_R3": ("llama", "loop", {"extra_passes": 3}),
    "llama_pause_M2": ("llama", "pause", {"pauses": 2, "pause_token_id": 93}),
    "llama_v2repo_ponderlm_S3": ("llama", "ponderlm", {"steps": 3, "accumulate": False}),
    "neox_ponderlm1_S3": ("pythia", "ponderlm", {"steps": 3}),
    "llama_ponderlm2_K1_J3": ("llama", "ponderlm2", {"latents": 1, "jacobi": 3}),
    "llama_ponderlm2_K2_J2": ("llama", "ponderlm2", {"latents": 2, "jacobi": 2}),
    "neox_ponderlm2_K1_J2": ("pythia", "ponderlm2", {"latents": 1, "jacobi": 2}),
}


def _official_config(family: str, method: str, options: dict[str, Any]) -> RunConfig:
    llama = family == "llama"
    cfg = RunConfig(
        model=ModelConfig(
            family=family,
            num_layers=3,
            hidden_size=32,
            num_heads=4,
            num_kv_heads=4,
            ffn_size=48 if llama else 128,
            vocab_size=96,
            vocab_multiple=32,
            max_positions=64,
            norm_eps=1e-5,
            rotary_fraction=1.0 if llama else 0.5,
            rotary_base=1e4,
            parallel_residual=not llama,
            tie_embeddings=False,
        )
    )
    cfg.ponder.method, cfg.ponder.options, cfg.data.sequence_length = method, options, 12
    return resolve(cfg)


@pytest.mark.parametrize("name", list(OFFICIAL))
def test_official_numbers(name: str) -> None:
    family, method, options = OFFICIAL[name]
    fixture = official.load(name)
    convert = official.llama_to_stage if family == "llama" else official.neox_to_stage
    part = {x: convert({k[2:]: v for k, v in fixture.items() if k.startswith(f"{x}/")}, 3, 4) for x in "wg"}
    cfg = _official_config(family, method, options)
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    weights = dict(engine.stage.named_parameters())
    assert set(weights) == set(part["w"])
    with torch.no_grad():
        for key, parameter in weights.items():
            parameter.copy_(part["w"][key])
    assert _relative(engine.logits(fixture["ids"]), fixture["logits"]) < RTOL
    ids = fixture["ids"]
    mask = torch.ones(ids.shape)
    mask[:, -1] = 0  # the official loss shifts the labels, so the last position has none
    engine.zero_grad()
    out = engine.forward_backward([MicroBatch(ids, ids.roll(-1, dims=1), mask)], 0, train=True)
    assert out.loss == pytest.approx(float(np.asarray(fixture["loss"])), rel=RTOL)
    for key, grad in part["g"].items():
        assert _relative(weights[key].main_grad, grad) < RTOL, key
