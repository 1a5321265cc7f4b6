"""A mixture of experts holds no memory of its model, and where all experts are one the model is a plain one."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from megaponder.engine import cuda_on_cpu
from tests.layouts.cases import CASES, disturb, run_config
from tests.layouts.layouts import LAYOUTS
from tests.layouts.workers import batches

cuda_on_cpu.install()

from megatron.core.transformer.moe import moe_utils  # noqa: E402

from megaponder.backbone.init import global_names  # noqa: E402
from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.inference.variants import with_passes  # noqa: E402
from megaponder.ponder.settings import embedding_scale, method_of  # noqa: E402
from tests.oracles.reference import Oracle  # noqa: E402
from tests.tolerance import RTOL  # noqa: E402

ONE = LAYOUTS["one-batch1"]
CASE = CASES["moe-loop-gqa"]


def test_a_model_that_is_left_is_freed() -> None:
    cfg = run_config(CASE, ONE)
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    engine.forward_backward(batches(ONE, 0), 0, train=True)
    stage = weakref.ref(engine.stage)
    del engine
    gc.collect()
    assert stage() is None


def test_rows_may_lie_in_any_order_in_memory() -> None:
    """A gathered pass of several sequences, for example, has them one after the other."""
    cfg = run_config(CASE, ONE)
    mixture = build_engine(cfg, method_of(cfg), groups.init(cfg)).stage.decoder.layers[0].mlp
    rows = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    assert torch.equal(mixture(rows, torch.ones(5, 3))[0], mixture(rows.contiguous(), torch.ones(5, 3))[0])


def test_equal_experts_are_one_mlp() -> None:
    """Whichever rows they take: weights add up to one, so the mixture of copies of an MLP is that MLP."""
    moe = {"experts": 4, "top_k": 2, "aux_weight": 0.0}
    found = []
    for model in ({"num_kv_heads": 2, "moe": moe}, {"num_kv_heads": 2}):
        cfg = run_config(replace(CASE, model=model, disciplines=0.0), ONE)
        engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
        disturb(engine.stage.named_parameters())
        named = dict(global_names(engine.stage))
        for name, parameter in named.items():
            if ".experts.local_experts." in name or name.endswith((".mlp.linear_fc1.weight", ".mlp.linear_fc2.weight")):
                generator = torch.Generator().manual_seed(int("linear_fc2" in name))
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
        engine.zero_grad()
        out = engine.forward_backward(batches(ONE, 0), 0, train=True)
        found.append((out.loss, {n: p.main_grad.clone() for n, p in named.items()}))
    (loss, grads), (plain, expected) = found
    assert loss == pytest.approx(plain, rel=RTOL)
    for layer in range(2):
        for matrix in ("linear_fc1", "linear_fc2"):
            at = f"decoder.layers.{layer}.mlp"
            total = sum(grads[f"{at}.experts.local_experts.{e}.{matrix}.weight"] for e in range(4))
            want = expected[f"{at}.{matrix}.weight"]
            assert float((total - want).abs().max() / want.abs().max()) < RTOL


def test_biases_rest_with_their_routers() -> None:
    for only, moved in ((["routers"], True), (["experts"], False)):
        cfg = run_config(CASES["moe-bias-latents"], ONE)
        cfg.train.only = only
        engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
        engine.settle(engine.forward_backward(batches(ONE, 0), 0, train=True), 0)
        trained = {name for name, p in engine.stage.named_parameters() if p.requires_grad}
        assert trained and all(({"routers": ".router.", "experts": ".experts."}[only[0]]) in name for name in trained)
        assert all(bool(layer.mlp.router.expert_bias.any()) == moved for layer in engine.stage.decoder.layers)


def test_routers_of_passes_start_equal_as_the_one_of_a_shared_model() -> None:
    found = []
    for routers in ("shared", 3):
        cfg = run_config(replace(CASE, model=CASE.model | {"moe": CASE.model["moe"] | {"routers": routers}}), ONE)
        stage = build_engine(cfg, method_of(cfg), groups.init(cfg)).stage
        found.append([p.detach() for n, p in stage.named_parameters() if n.endswith("router.weight")])
    for one, three in zip(*found, strict=True):
        assert torch.equal(three, one.repeat(3, 1)) and one.any()


def test_other_numbers_of_passes_take_the_first_routers_and_the_last() -> None:
    cfg = run_config(replace(CASE, model=CASE.model | {"moe": CASE.model["moe"] | {"routers": 3}}), ONE)
    trained = build_engine(cfg, method_of(cfg), groups.init(cfg))
    disturb(trained.stage.named_parameters())
    weights = dict(trained.stage.named_parameters())
    ids = batches(ONE, 0)[0].ids_bn[:1]
    for passes in (1, 2, 5):
        other = with_passes(cfg, passes)
        engine = build_engine(other, method_of(other), groups.init(other))
        for name, parameter in engine.stage.named_parameters():
            parameter.data.copy_(weights[name].data)
        oracle = Oracle(weights, cfg.model, embedding_scale(cfg.model, method_of(cfg)))
        want = oracle.logits(ids[0], "loop", {"extra_passes": passes - 1}).detach()
        assert float((engine.logits(ids)[0] - want).abs().max() / want.abs().max()) < RTOL


def test_routers_of_slots_have_gradients_by_megatron_cores_product_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes logits from Transformer Engine where that is there, and on a CPU PyTorch's."""
    cfg = run_config(replace(CASE, model=CASE.model | {"moe": CASE.model["moe"] | {"routers": 3}}), ONE)
    router = build_engine(cfg, method_of(cfg), groups.init(cfg)).stage.decoder.layers[0].mlp.router
    draw = torch.Generator().manual_seed(2)
    rows, toward = (torch.randn(12, 2, width, generator=draw) for width in (32, 4))
    found = []
    for there in (False, True):
        monkeypatch.setattr(moe_utils, "HAVE_TE", there)
        monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        x = rows.clone().requires_grad_()
        logits = router.gating(x, (0, 1, 2))
        found.append([logits, *torch.autograd.grad((logits * toward).sum(), (x, router.weight))])
    for plain, by_function in zip(*found, strict=True):
        torch.testing.assert_close(by_function, plain)


def test_biases_move_towards_even_loads_of_their_routers() -> None:
    """And then take part in the choice alone: the formula in float64, before a step and after it."""
    moe = {"experts": 4, "top_k": 2, "score": "sigmoid", "bias_rate": 0.3, "routers": 2}
    cfg = run_config(replace(CASE, model={"num_kv_heads": 2, "moe": moe}, disciplines=0.0), ONE)
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    disturb(engine.stage.named_parameters())
    data, state = batches(ONE, 0), engine.stage.state_dict
    engine.settle(engine.forward_backward(data, 0, train=True), 0)

    def oracle() -> Oracle:
        weights = {n: t for n, t in state().items() if torch.is_tensor(t)}
        return Oracle(weights, cfg.model, embedding_scale(cfg.model, method_of(cfg)))

    before = oracle()
    biases = {n: before.w.pop(n) for n in list(before.w) if n.endswith("expert_bias")}
    for batch in data:
        for ids, mask in zip(batch.ids_bn, batch.loss_mask_bn, strict=True):
            plain = before.logits(ids[: int(mask.sum())], "loop", CASE.options)  # those that count come first
    for name, moved in biases.items():
        loads = before.loads[name.removesuffix(".router.expert_bias")]
        want = torch.cat([0.3 * (load.mean() - load).sign() for load in loads])
        assert torch.allclose(moved.float(), want.float()) and want.any() and len(want) == 8
    now = oracle().logits(ids, "loop", CASE.options)
    assert float((now[: len(plain)] - plain).abs().max()) > 0.01  # other experts are chosen
    got = engine.logits(ids[None])[0]
    assert float((got - now).abs().max() / now.abs().max()) < RTOL
