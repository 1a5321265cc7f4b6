"""Adaptive methods of the modelling file, in float64: training's forward, pruning and decoding are one function."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaponder.checkpoint.weights import load_weights
from megaponder.decoding.backbone import weigh
from megaponder.decoding.cache import PonderCache
from megaponder.decoding.gates import Threshold
from megaponder.export import names
from megaponder.export.from_hf import import_hf
from megaponder.export.modeling_megaponder import MegaponderForCausalLM
from megaponder.export.to_hf import export
from tests.export import checkpoints, models
from tests.export.models import ids
from tests.oracles.reference import Oracle
from tests.tolerance import PARITY

TIGHT = 1e-10
SIZE = {"ponderlm2": "latents", "ponderlm3": "latents", "adaponderlm": "steps", "adaptive_cot": "steps"}
# every K, every family and grouped keys (llama) for each method
CASES = [
    (method, family, k)
    for i, method in enumerate(SIZE)
    for k in (1, 2, 3, 4)
    for family in (("pythia", "llama", "gpt2")[(i + k) % 3],)
]


def make(method: str, family: str, k: int, **options: Any) -> MegaponderForCausalLM:
    """The test model of a method in float64 with K latents or steps."""
    options = {**models.METHODS[method], SIZE[method]: k, **options}
    return models.model(family, method, method_options=options).double()


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def decode(net: MegaponderForCausalLM, tokens: Tensor, cache: PonderCache | None = None) -> tuple[Tensor, PonderCache]:
    """Logits of the tokens one by one; all through the recursion, not one forward over several."""
    cache = cache or PonderCache(net.config.num_hidden_layers)
    parts = [net(tokens[:, i : i + 1], past_key_values=cache, jacobi=0).logits for i in range(tokens.shape[1])]
    return torch.cat(parts, dim=1), cache


def rows(cache: PonderCache, sequence: int) -> list[int]:
    """Rows of each token in the cache that are alive for a sequence: the passes it took."""
    found = cache.depths()
    assert found is not None
    return (found[sequence] if len(found) > 1 else found[0]).tolist()


@pytest.mark.parametrize("method,family,k", CASES)
@torch.no_grad()
def test_decoding_is_the_forward(method: str, family: str, k: int) -> None:
    n = 6
    net, tokens = make(method, family, k), ids(3, n)
    mask = torch.ones(3, n, dtype=torch.long)
    stepwise, cache = decode(net, tokens)
    enough = n * k - k
    whole = net(tokens, use_cache=False, jacobi=enough).logits
    assert error(stepwise, whole) < TIGHT
    mask[0, :2] = 0  # left padding, and no jacobi given where training's forward is exact
    padded = net(tokens, attention_mask=mask, use_cache=False, jacobi="converge").logits
    assert error(padded[1:], whole[1:]) < TIGHT
    assert error(padded[:1, 2:], net(tokens[:1, 2:], jacobi=enough).logits) < TIGHT
    if method in ("adaponderlm", "adaptive_cot"):
        assert error(net(tokens, use_cache=False).logits, whole) < TIGHT
    if method in ("ponderlm3", "adaptive_cot"):
        depths = [rows(cache, i) for i in range(3)]
        assert 1 <= min(map(min, depths)) < max(map(max, depths)) <= k + 1  # some halt, at depths of their own


@pytest.mark.parametrize("method,family,k", CASES)
@torch.no_grad()
def test_forward_is_the_formula(method: str, family: str, k: int, tmp_path: Path) -> None:
    net, tokens = make(method, family, k), ids(2, 7)
    plain = dict(net.state_dict())
    if net.config.tie_word_embeddings:
        del plain["lm_head.weight"]
    cfg = checkpoints.run_config(net, tmp_path)
    oracle = Oracle(names.to_stage(plain, cfg.model), cfg.model, net.config.embedding_scale)
    whole = net(tokens).logits
    for row, got in zip(tokens, whole, strict=True):
        want = oracle.run(row, method, net.config.method_options)
        assert error(got, want.logits.detach()) < 1e-6  # float32 in cos and sin
        if method in ("adaptive_cot", "adaponderlm"):
            cache = PonderCache(2)
            net(row[None], past_key_values=cache)
            assert want.depth is not None and rows(cache, 0) == want.depth.tolist()


@pytest.mark.parametrize(
    "method,options",
    [
        ("pruned_ponderlm", {"steps": 3, "depth": 2.4}),
        ("pruned_ponderlm", {"steps": 2, "depth": 1.6, "by": "position"}),
        ("confident_ponderlm", {"steps": 2, "target": 0.0, "threshold": 0.06, "topk": 7}),
        ("ponderlm", {"steps": 2, "feedback": "hidden"}),
        ("ponderlm", {"steps": 2, "feedback": "projected"}),
        ("adaponderlm", {"steps": 3, "target": 0.0, "threshold": 0.7, "shared_gate": True}),
        ("adaponderlm", {"steps": 2, "target": 0.0, "threshold": 0.5, "router": "linear"}),
        ("adaponderlm", {"steps": 2, "target": 0.0, "router": "none"}),
        ("adaptive_cot", {"steps": 3, "target": 0.0, "threshold": 0.3, "router": "mlp"}),
        ("adaptive_cot", {"steps": 2, "target": 0.0, "router": "none"}),
    ],
)
@torch.no_grad()
def test_baselines_decode_by_the_formula(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    net, tokens = models.model("pythia", method, method_options=options).double(), ids(2, 9)
    cfg = checkpoints.run_config(net, tmp_path)
    oracle = Oracle(names.to_stage(dict(net.state_dict()), cfg.model), cfg.model, net.config.embedding_scale)
    stepwise, _ = decode(net, tokens)
    for row, got in zip(tokens, stepwise, strict=True):
        want = oracle.run(row, method, options)
        adapts = method != "ponderlm" and options.get("router") != "none"
        assert not adapts or (want.depth is not None and len(want.depth.unique()) > 1)
        assert error(got, want.logits.detach()) < 1e-6  # float32 in cos and sin


BUDGETS: list[tuple[str, dict[str, Any]]] = [
    ("adaponderlm", {"steps": 3, "target": 0.6, "gate_width": 2}),
    ("adaponderlm", {"steps": 3, "target": 0.75, "topk": 7}),
    ("adaptive_cot", {"steps": 3, "target": 0.6}),
    ("ponderlm3", {"latents": 2, "target": 0.7, "jacobi": 20}),
    ("confident_ponderlm", {"steps": 3, "target": 0.6}),
]


@pytest.mark.parametrize(("method", "options"), BUDGETS)
@torch.no_grad()
def test_budgets_decode_by_the_formula(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    """One token after the other, with the threshold that training left."""
    net, tokens = models.model("llama", method, method_options=options).double(), ids(2, 9)
    gates, found = net.method["budget"], []
    gates.reached = lambda score: found.append(score) or Threshold.reached(gates, score)
    net(tokens)
    order = found[0].flatten().sort().values
    gates.state[0] = (order[8] + order[9]) / 2  # between two tokens
    cfg = checkpoints.run_config(net, tmp_path)
    oracle = Oracle(names.to_stage(dict(net.state_dict()), cfg.model), cfg.model, net.config.embedding_scale)
    stepwise, cache = decode(net, tokens)
    for i, (row, got) in enumerate(zip(tokens, stepwise, strict=True)):
        want = oracle.run(row, method, options)
        assert want.depth is not None and len(want.depth.unique()) > 1
        assert error(got, want.logits.detach()) < 1e-6  # float32 in cos and sin
        assert rows(cache, i) == want.depth.tolist()


@pytest.mark.parametrize(("method", "options"), [BUDGETS[0], BUDGETS[3]])
def test_budgets_go_out_and_come_back(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    net = models.model("llama", method, method_options={**options, "jacobi": 2} if "jacobi" in options else options)
    net.method["budget"].state.data = torch.tensor([0.01, 0.02, 0.5, -0.1, 0.3, 0.4, 77.0])
    checkpoints.write(net, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "back")
    one, two = (load_weights(tmp_path / name)[1] for name in ("run", "back"))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert two["method_modules.budget.state"].tolist() == pytest.approx([0.01, 0.02, 0.5, -0.1, 0.3, 0.4, 77.0])


@pytest.mark.parametrize("method", models.LATENT)
@torch.no_grad()
def test_refinements_converge_to_decoding(method: str) -> None:
    """J refinements make the first K + J latents exact; a model that contracts gets close everywhere much sooner."""
    k, unpruned = 2, {"threshold": 0.0} if method == "ponderlm3" else {}
    net, tokens = make(method, "llama", k, **unpruned), ids(2, 8)
    exact, _ = decode(net, tokens)
    for j in (0, 2, 5):
        got = net(tokens, jacobi=j).logits
        prefix = (k + j) // k  # tokens whose latents are all among the first K + J
        assert error(got[:, :prefix], exact[:, :prefix]) < TIGHT
        assert error(got, exact) > 1e-4
    for layer in net.model.layers:
        layer.self_attn.o_proj.weight *= 0.3
        layer.mlp.down_proj.weight *= 0.3
    exact, _ = decode(net, tokens)
    trained = net(tokens).logits  # J = 2, soft
    errors = [error(net(tokens, jacobi=j).logits, exact) for j in range(8)]
    assert error(trained, net(tokens, jacobi=2).logits) < TIGHT  # nothing is pruned here
    assert all(after < 0.7 * before for before, after in itertools.pairwise(errors))
    assert errors[2] < 0.1 and errors[7] < 1e-3
    assert error(net(tokens, jacobi="converge").logits, exact) < TIGHT


@torch.no_grad()
def test_pruning_costs_what_the_threshold_allows() -> None:
    """PonderLM-3: hard against soft differs by O(threshold), and by nothing where the router is certain."""
    tokens, net = ids(3, 7), make("ponderlm3", "pythia", 3)
    net.method["router"].weight *= 3  # tail masses from 1 down to 1e-8
    net.ponder.options["threshold"] = 0.0
    soft, _ = decode(net, tokens)
    for threshold in (1e-5, 1e-4, 1e-3, 1e-2):
        net.ponder.options["threshold"] = threshold
        hard, cache = decode(net, tokens)
        assert error(hard, net(tokens, jacobi="converge").logits) < TIGHT
        assert 0 < error(hard, soft) < 2 * threshold
        assert min(min(rows(cache, i)) for i in range(3)) < max(max(rows(cache, i)) for i in range(3))
    for certain in range(4):
        net = make("ponderlm3", "pythia", 3, threshold=0.5)
        net.method["router"].weight.zero_()
        net.method["router"].bias.copy_(torch.eye(4)[certain] * 200)
        hard, cache = decode(net, tokens)
        assert rows(cache, 0) == [certain + 1] * 7
        assert error(net(tokens, jacobi=None).logits[:, :1], hard[:, :1]) < TIGHT  # soft; J = 2 is enough for one token
        net.ponder.options["jacobi"] = 18
        assert error(net(tokens).logits, hard) < TIGHT
        if certain == 0:
            pruned, cache = decode(make("ponderlm3", "pythia", 3, threshold=1.0), tokens)
            assert rows(cache, 0) == [1] * 7
            assert error(pruned, hard) < TIGHT  # a row that is left alone is read out as it is


@pytest.mark.parametrize("method", SIZE)
@torch.no_grad()
def test_halted_batches_are_not_computed(method: str) -> None:
    """A pass runs while any sequence takes it; nothing of a batch depends on its other sequences."""
    net, tokens = make(method, "gpt2", 3), ids(4, 6)
    calls: list[int] = []
    net.model.layers[0].register_forward_hook(lambda *_: calls.append(1))

    def passes(batch: Tensor) -> tuple[Tensor, list[int]]:
        cache, logits, counts = PonderCache(2), [], []
        for i in range(batch.shape[1]):
            calls.clear()
            logits.append(net(batch[:, i : i + 1], past_key_values=cache, jacobi=0).logits)
            counts.append(len(calls))
        return torch.cat(logits, dim=1), counts

    alone = [passes(row[None]) for row in tokens]
    together, counts = passes(tokens)
    assert error(together, torch.cat([logits for logits, _ in alone])) < TIGHT
    # the first token goes through a forward over sequences, which runs all passes of the latent methods
    assert counts[1:] == [max(c) for c in list(zip(*(c for _, c in alone), strict=True))[1:]]
    used = {c for _, depths in alone for c in depths[1:]}
    assert used == {4} if method == "ponderlm2" else len(used) > 1


@pytest.mark.parametrize("method", SIZE)
@torch.no_grad()
def test_the_future_changes_nothing(method: str) -> None:
    net, tokens = make(method, "llama", 3), ids(2, 7)
    other = tokens.clone()
    other[:, 4:] = ids(2, 3, seed=9)
    seen = []
    for batch in (tokens, other):
        cache = PonderCache(2)
        seen.append((net(batch, past_key_values=cache, jacobi="converge").logits, [rows(cache, i)[:4] for i in (0, 1)]))
    assert error(seen[0][0][:, :4], seen[1][0][:, :4]) < TIGHT
    assert error(seen[0][0][:, 4:], seen[1][0][:, 4:]) > 1e-3
    assert seen[0][1] == seen[1][1]
    assert error(net(tokens).logits[:, :4], net(other).logits[:, :4]) < TIGHT  # the approximation looks back as well


@pytest.mark.parametrize("method", SIZE)
@torch.no_grad()
def test_the_cache_follows_beams_and_crops(method: str) -> None:
    net, tokens = make(method, "llama", 3), ids(3, 8)
    want = net(tokens, use_cache=False, jacobi="converge").logits

    def start(batch: Tensor) -> PonderCache:
        cache = PonderCache(2)
        net(batch[:, :5], past_key_values=cache, jacobi="converge")
        return cache

    def goes_on(cache: PonderCache, order: list[int]) -> None:
        got = net(tokens[order, cache.tokens :], past_key_values=cache).logits
        assert error(got, want[order, -got.shape[1] :]) < TIGHT
        assert cache.get_seq_length() == 8

    cache = start(tokens)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    goes_on(cache, [2, 0, 0])
    cache.crop(-5)
    goes_on(cache, [2, 0, 0])
    cache.crop(6)
    goes_on(cache, [2, 0, 0])
    cache = start(tokens)
    cache.crop(1)
    cache.batch_select_indices(torch.tensor([1, 2]))
    goes_on(cache, [1, 2])
    cache = start(tokens[1:2])
    cache.batch_repeat_interleave(2)
    goes_on(cache, [1, 1])
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.rows
    net(tokens, past_key_values=cache, jacobi="converge")
    cache.crop(0)  # removes nothing, as in transformers
    assert cache.get_seq_length() == 8
    cache.crop(-8)
    assert error(net(tokens[:2], past_key_values=cache, jacobi="converge").logits, want[:2]) < TIGHT


@torch.no_grad()
def test_a_pruned_cache_holds_no_pruned_rows() -> None:
    for method in ("ponderlm3", "adaptive_cot"):
        net, tokens = make(method, "pythia", 3), ids(1, 7)
        cache = PonderCache(2)
        net(tokens, past_key_values=cache, jacobi="converge")
        assert sum(rows(cache, 0)) < 7 * 4
        assert all(part.alive is None for part in cache.rows.values())  # a mask is only needed in batches
        held = {i // 2: layer.keys.shape[2] for i, layer in enumerate(cache.layers)}
        assert held == {index: len(part.token) for index, part in cache.rows.items()}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_keys_are_exact_in_16_bits(kind: torch.dtype) -> None:
    weight = -torch.linspace(0, 12, 50)[None].exp().log1p()
    q, k = torch.zeros(1, 4, 3, 8, dtype=kind), torch.zeros(1, 2, 50, 8, dtype=kind)
    q, k, v = weigh(q, k, k, weight, 8**-0.5)
    scores = q[:, :2].float() @ k.float().transpose(-1, -2) * 8**-0.5
    torch.testing.assert_close(scores, weight[:, None, None].expand_as(scores), rtol=1e-6, atol=1e-6)
    assert v.shape[-1] == q.shape[-1] == 16 and not v.any()


@torch.no_grad()
def test_prompts_may_be_refined_a_given_number_of_times() -> None:
    net, tokens = make("ponderlm2", "pythia", 2), ids(1, 6)
    common = dict(max_new_tokens=1, do_sample=False, pad_token_id=0, eos_token_id=None)
    scores = dict(output_logits=True, return_dict_in_generate=True)
    for jacobi in (0, 3, "converge"):
        want = net(tokens, jacobi=jacobi).logits[:, -1]
        assert error(net.generate(tokens, jacobi=jacobi, **common, **scores).logits[0], want) < 1e-6
        net.config.prefill_jacobi = jacobi
        assert error(net.generate(tokens, **common, **scores).logits[0], want) < 1e-6
    for wrong in (-1, "often", 0.5):
        with pytest.raises(ValueError, match='it must be None, "converge", or a number of refinements'):
            net(tokens, jacobi=wrong)


@pytest.mark.parametrize("method", models.HALTING)
@torch.no_grad()
def test_only_rows_that_go_on_are_computed_and_stored(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts, batches and decoding: rows of the first layer and slots of the cache are the sum of depths."""
    net, n = make(method, "llama", 3), 40
    tokens, mask = ids(5, n), torch.ones(5, n, dtype=torch.long)
    for i, length in enumerate((40, 1, 17, 33, 8)):  # left padding
        mask[i, : n - length] = 0
    seen: list[int] = []
    net.model.layers[0].register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    cache = PonderCache(2)
    out = net(tokens, attention_mask=mask, past_key_values=cache, output_depths=True)
    assert len(out.depths[mask.bool()].unique()) == 4 and not out.depths[mask == 0].any()
    assert sum(seen) == out.depths.sum() == cache.slots.used
    assert torch.equal(cache.depths(), out.depths)
    longer = torch.cat([mask, mask.new_ones(5, 1)], dim=1)
    more = net(tokens[:, :1], attention_mask=longer, past_key_values=cache, output_depths=True)
    assert sum(seen) == out.depths.sum() + more.depths.sum() == cache.slots.used
    a_slot = 2 * 2 * net.config.num_key_value_heads * net.config.head_size * 8  # keys, values; layers; float64
    assert cache.slots.used * a_slot <= cache.slots.bytes <= 1.02 * cache.slots.used * a_slot
    for i in range(5):  # alone, each token has the same depth
        alone = net(tokens[i : i + 1, mask[i].bool()], output_depths=True)
        assert torch.equal(alone.depths[0], out.depths[i, mask[i].bool()])
        assert error(out.logits[i, mask[i].bool()], alone.logits[0]) < TIGHT
    monkeypatch.setattr("megaponder.decoding.packed.BLOCK", 7)  # rows in blocks, each with the keys that it needs
    blocks = net(tokens, attention_mask=mask, output_depths=True)
    assert torch.equal(blocks.depths, out.depths)
    assert error(blocks.logits[mask.bool()], out.logits[mask.bool()]) < TIGHT


@torch.no_grad()
def test_passes_and_thresholds_are_arguments() -> None:
    tokens = ids(2, 7)
    common = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    for method, option, change in (
        ("ponderlm", "steps", 1), ("loop", "extra_passes", 4), ("adaptive_cot", "steps", 1),
        ("adaptive_cot", "threshold", 0.6), ("adaponderlm", "threshold", 0.8),
        ("confident_ponderlm", "threshold", 0.05),
    ):  # fmt: skip
        net = models.model("llama", method)
        given = {"passes": change + 1} if option != "threshold" else {"threshold": change}
        got, text = net(tokens, **given).logits, net.generate(tokens, **given, **common)
        assert error(got, net(tokens).logits) > 1e-3
        net.ponder.options[option] = change
        assert torch.equal(got, net(tokens).logits) and torch.equal(text, net.generate(tokens, **common))
    net = models.model("llama", "adaponderlm")
    out = net.generate(tokens, passes=2, return_dict_in_generate=True, **common)
    assert out.past_key_values.depths().shape == (2, 11) and out.past_key_values.depths().max() == 2
    with pytest.raises(ValueError, match="passes = 5: it must be 1 to 4, the passes that the model was trained with"):
        net(tokens, passes=5)
    with pytest.raises(ValueError, match=r"threshold = 0.5: method loop has none"):
        models.model("llama", "loop")(tokens, threshold=0.5)


@pytest.mark.parametrize(
    ("method", "seed", "threshold"),
    [("confident_ponderlm", 0, 0.2), ("adaponderlm", 2, 0.5), ("adaptive_cot", 5, 0.25), ("adaptive_cot", 3, 0.8)],
)
@torch.no_grad()
def test_texts_side_by_side_are_those_alone(method: str, seed: int, threshold: float) -> None:
    """Also where each has one token left in a pass, at different places: none may see what follows it."""
    net = models.model("llama", method)
    net.lm_head.weight *= 3
    tokens = torch.randint(1, models.VOCAB - 1, (2, 6), generator=torch.Generator().manual_seed(seed))
    given: dict[str, Any] = dict(threshold=threshold, use_cache=False, output_depths=True)
    whole, alone = net(tokens, **given), [net(text[None], **given) for text in tokens]
    assert torch.equal(whole.depths, torch.cat([one.depths for one in alone]))
    assert error(whole.logits, torch.cat([one.logits for one in alone])) < PARITY
    left = [whole.depths > passes for passes in range(1, 4)]
    places = [going.nonzero()[:, 1].tolist() for going in left if going.sum(1).tolist() == [1, 1]]
    assert any(a != b for a, b in places), "the case shows nothing"
