"""What the scores do not see, on tiny real models: each change first leaves the logits as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megaponder.errors import UserError
from megaponder.lineage import awm, huref, null, weights
from megaponder.lineage.weights import Model
from tests.export.models import ids as token_ids
from tests.lineage import models
from tests.lineage.models import Plain
from tests.tolerance import PARITY, difference

EXACT = 1e-9
"""Rounding of scores in float64."""
NET = models.net()
PLAIN = models.plain(NET)
BASE = models.read(NET, name="base")
UNIT = models.read(NET, models.unit_gains(PLAIN), "unit")
OTHER = models.read(models.net(1), name="other")


def awm_of(a: Model, b: Model, mode: awm.Mode) -> float:
    return awm.compare(a, b, weights.shared(a, b), mode).score


def terms_of(a: Model, b: Model, mode: awm.Mode) -> list[float]:
    """Correlations of qk, vo and ff: the lower of both layers."""
    both = [huref.fingerprint(m, rows, mode) for m, rows in zip((a, b), weights.shared(a, b), strict=True)]
    found = huref.compare(*both).correlations
    return [min(found[i::3]) for i in range(3)]


CHANGES: dict[str, tuple[Callable[[Plain], Plain], float, list[float]]] = {
    # change, official AWM at most, official HuRef (qk, vo, ff) at most; 1 means exactly 1
    "signed permutation": (models.signed_permutation, 1.0, [1.0, 1.0, 0.3]),
    "rotations in RoPE's planes, heads in another order, q c and k / c": (models.heads, 1.0, [1.0, 1.0, 1.0]),
    "neurons in another order, up c and down / c": (models.neurons, 1.0, [1.0, 1.0, 1.0]),
    "scales of heads": (models.head_scales, 0.9, [1.0, 1.0, 1.0]),
    "gains of norms": (models.gain_scales, 0.9, [0.9, 0.95, 0.9]),
    "rotation of the residual stream": (models.rotated, 0.2, [1.0, 1.0, 0.2]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_no_logit(name: str) -> None:
    change, official, terms = CHANGES[name]
    changed = change(PLAIN)
    tokens = token_ids(2, 12)
    assert difference(models.logits(NET, changed, tokens), models.logits(NET, PLAIN, tokens)) < PARITY
    assert any(not t.equal(PLAIN[n]) for n, t in changed.items())
    other = models.read(NET, changed)
    base = UNIT if change is models.rotated else BASE  # the official forms leave gains out
    for got, most in zip(
        [awm_of(base, other, "official"), *terms_of(base, other, "official")], [official, *terms], strict=True
    ):
        assert got == pytest.approx(1, abs=EXACT) if most == 1 else got < most
    for got in [awm_of(BASE, other, "robust"), *terms_of(BASE, other, "robust")]:
        assert got == pytest.approx(1, abs=EXACT)


def test_the_rotation_is_found_by_procrustes() -> None:
    found = awm.compare(BASE, models.read(NET, models.rotated(PLAIN)), weights.shared(BASE, BASE), "robust")
    assert found.alignment == "rotation" and found.agreement < 0.9


def test_noise_and_strangers() -> None:
    """Noise of 30 %: 1 / 1.09 of a Gram matrix, and its square of a product of four factors."""
    noisy = models.read(NET, models.noisy(PLAIN))
    for mode in awm.MODES:
        score = awm_of(BASE, noisy, mode)
        assert score == pytest.approx(1 / 1.09, abs=0.02) and score == pytest.approx(
            awm_of(noisy, BASE, mode), abs=EXACT
        )
        assert all(t == pytest.approx(1 / 1.09**2, abs=0.06) for t in terms_of(BASE, noisy, mode))
        assert abs(awm_of(BASE, OTHER, mode)) < 0.05 and max(map(abs, terms_of(BASE, OTHER, mode))) < 0.05


@pytest.mark.parametrize("mode", awm.MODES)
def test_the_null_is_that_of_strangers(mode: awm.Mode) -> None:
    ids = weights.shared(BASE, OTHER)
    random = null.of_awm(BASE, OTHER, ids, mode)
    assert null.verdict(awm_of(BASE, OTHER, mode), random) == "unrelated"
    noisy = models.read(NET, models.noisy(PLAIN))
    assert null.verdict(awm_of(BASE, noisy, mode), null.of_awm(BASE, noisy, ids, mode)) == "related"
    prints = [huref.fingerprint(m, ids[0], mode) for m in (BASE, OTHER, noisy)]
    for other, word in ((prints[1], "unrelated"), (prints[2], "related")):
        score = huref.compare(prints[0], other).score
        assert null.verdict(score, null.of_huref(prints[0], other)) == word


@pytest.mark.parametrize("mode", awm.MODES)
def test_other_ids_and_more_tokens(mode: awm.Mode) -> None:
    """The suspect has 40 more tokens and all ids shuffled, and its residual stream is permuted: names tell."""
    disguised = models.read(NET, models.signed_permutation(PLAIN))
    table = torch.cat([disguised.embedding, 0.1 * models.draw(40, models.WIDTH)])
    place = models.order(len(table))  # old id -> new id
    names = [f"t{i}" for i in range(len(table))]
    suspect = replace(
        disguised,
        embedding=torch.empty_like(table).index_copy(0, place, table),
        tokens={name: int(place[i]) for i, name in enumerate(names)},
    )
    base = replace(BASE, tokens={name: i for i, name in enumerate(names[: models.VOCAB])})
    assert awm_of(base, suspect, mode) == pytest.approx(1, abs=EXACT)
    qk, vo, _ = terms_of(base, suspect, mode)
    assert (qk, vo) == pytest.approx((1, 1), abs=EXACT)
    assert awm.compare(base, suspect, weights.shared(base, suspect, by_id=True), mode).score < 0.1


def test_more_tokens_with_the_same_ids() -> None:
    more = replace(BASE, embedding=torch.cat([BASE.embedding, models.draw(9, models.WIDTH)]))
    with pytest.raises(UserError, match=r"97 and 106 tokens.*--by-id"):
        weights.shared(BASE, more)
    ids = huref.choose(BASE, more, 4096, None, by_id=True)
    assert huref.compare(
        *(huref.fingerprint(m, i) for m, i in zip((BASE, more), ids, strict=True))
    ).score == pytest.approx(1)


@pytest.mark.parametrize("mode", awm.MODES)
def test_fewer_channels_and_fewer_layers(mode: awm.Mode) -> None:
    kept = models.order(models.WIDTH)[:30].sort().values
    thin = replace(
        BASE,
        embedding=BASE.embedding[:, kept],
        layers=tuple(
            replace(
                layer, q=layer.q[:, kept], k=layer.k[:, kept], v=layer.v[:, kept], up=layer.up[:, kept],
                gate=layer.gate[:, kept], attention_gain=layer.attention_gain[kept], mlp_gain=layer.mlp_gain[kept],
            )
            for layer in BASE.layers
        ),
    )  # fmt: skip
    shallow = replace(models.read(NET, models.noisy(PLAIN, 0.1)), layers=tuple(BASE.layers[i] for i in (0, 2)))
    for other, pairs, least in ((thin, [(0, 0), (1, 1), (2, 2)], 0.99), (shallow, [(0, 0), (2, 1)], 0.99)):
        found = awm.compare(BASE, other, weights.shared(BASE, other), mode)
        assert [(s.first, s.second) for s in found.layers] == pairs and found.score > least
        back = awm.compare(other, BASE, weights.shared(other, BASE), mode)
        assert back.score == pytest.approx(found.score, abs=EXACT)
        assert [(s.second, s.first) for s in back.layers] == [(j, i) for i, j in [(p[1], p[0]) for p in pairs]]


def test_grouped_keys_and_qk_norm() -> None:
    net = models.net(3, num_key_value_heads=2)
    grouped = models.read(net)
    with pytest.raises(UserError, match=r"no form for 2 key/value heads of 4 query heads; use --mode robust"):
        terms_of(grouped, grouped, "official")
    x, layer = grouped.embedding, grouped.layers[-1].folded()
    by_head = sum(
        x @ layer.q.view(4, 12, -1)[h].T @ layer.k.view(2, 12, -1)[h // 2] @ x.T for h in range(4)
    )  # the heads of a group share its keys
    torch.testing.assert_close(huref.terms(grouped, torch.arange(models.VOCAB), "robust")[3], by_head)
    normed = replace(BASE, qk_norm=True)
    assert awm.prepared(normed).layers[0].q.equal(BASE.layers[0].folded().q)
