"""AWM, HuRef and the assignment beside plain float64 programs of their definitions."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from megaponder.data.indexed import write_index
from megaponder.errors import UserError
from megaponder.lineage import awm, huref
from megaponder.lineage.assignment import assign
from megaponder.lineage.weights import Layer, Model


def test_assignment_is_the_best_of_all() -> None:
    draw = np.random.default_rng(0)
    for n, m, whole in itertools.product(range(1, 5), range(4), (False, True)):
        cost = draw.normal(size=(n, n + m))
        cost = cost.round() if whole else cost  # equal costs
        best = min(sum(cost[i, p[i]] for i in range(n)) for p in itertools.permutations(range(n + m), n))
        found = assign(cost)
        assert len(set(found)) == n and cost[np.arange(n), found].sum() == pytest.approx(best)


def test_a_large_assignment_is_optimal() -> None:
    """No exchange of two partners and no free column is cheaper; a hidden permutation is found."""
    draw = np.random.default_rng(1)
    cost = draw.normal(size=(60, 70))
    found = assign(cost)
    own = cost[np.arange(60), found]
    free = np.setdiff1d(np.arange(70), found)
    assert (cost[:, free] >= own[:, None]).all()
    assert (cost[:, found] + cost[:, found].T >= own[:, None] + own[None] - 1e-12).all()
    hidden = draw.permutation(60)
    cost = draw.random((60, 60))
    cost[np.arange(60), hidden] -= 1
    assert (assign(cost) == hidden).all()


def tiny(seed: int, width: int = 5) -> Model:
    draw = torch.Generator().manual_seed(seed)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    d, f = width, 7
    layers = tuple(Layer(w(4, d), w(4, d), w(4, d), w(d, 4), w(f, d), w(d, f), w(f, d), w(d), w(d)) for _ in range(2))
    return Model("tiny", w(11, d), layers, 2, 2)


def centred(w: np.ndarray) -> np.ndarray:
    """The definition, entry by entry."""
    n = w.shape[1]
    gram = [[sum(w[:, i] * w[:, j]) if i != j else 0.0 for j in range(n)] for i in range(n)]
    total = sum(map(sum, gram))
    mean = [sum(row) / (n - 2) - total / (2 * (n - 1) * (n - 2)) for row in gram]
    return np.array([[gram[i][j] - mean[i] - mean[j] if i != j else 0.0 for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("width", [5, 6])
def test_awm_as_defined(width: int) -> None:
    """The wider model's channels are chosen by trying all assignments."""
    a, b = tiny(0, width), tiny(1)
    ids = torch.tensor([0, 3, 4, 7, 9]), torch.tensor([1, 2, 3, 5, 8])
    left, right = a.embedding[ids[0]].numpy(), b.embedding[ids[1]].numpy()
    cosines = left.T @ right / np.outer(np.linalg.norm(left, axis=0), np.linalg.norm(right, axis=0))
    best = max(itertools.permutations(range(width), 5), key=lambda p: sum(abs(cosines[p[j], j]) for j in range(5)))
    signs = [np.sign(cosines[best[j], j]) for j in range(5)]
    scores = []
    for one, other in zip(a.layers, b.layers, strict=True):
        for letter in "qk":
            k, m = centred(getattr(one, letter).numpy()[:, best] * signs), centred(getattr(other, letter).numpy())
            scores.append((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))
    found = awm.compare(a, b, ids, "official")
    assert [s for layer in found.layers for s in (layer.q, layer.k)] == pytest.approx(scores)
    assert found.score == pytest.approx(np.mean(scores)) and found.flipped == signs.count(-1)


def test_huref_as_defined() -> None:
    a, ids = tiny(0), [2, 5, 6]
    want = []
    for layer in a.layers:
        q, k, v, o, up, down, gate = (getattr(layer, n).numpy() for n in ("q", "k", "v", "o", "up", "down", "gate"))
        x = a.embedding.numpy()[ids]
        for left, right in ((q, k), (v, o.T), (gate * up, down.T)):
            want.append([[sum((left @ x[s]) * (right @ x[t])) for t in range(3)] for s in range(3)])
    got = huref.terms(a, torch.tensor(ids), "official")
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-10)
    b = tiny(1)
    both = [huref.fingerprint(m, torch.tensor(ids)) for m in (a, b)]
    each = [
        np.corrcoef(s.numpy().ravel(), t.numpy().ravel())[0, 1]
        for s, t in zip(both[0].terms, both[1].terms, strict=True)
    ]
    assert huref.compare(*both).correlations == pytest.approx(each)


def test_fingerprints_in_files(tmp_path: Path) -> None:
    a, ids = tiny(0), torch.tensor([2, 5, 6])
    made = huref.fingerprint(a, ids)
    huref.save(made, tmp_path / "a.npz")
    again = huref.read(tmp_path / "a.npz")
    assert again.ids == (2, 5, 6) and huref.compare(made, again).score == pytest.approx(1)
    assert huref.of_tokens(a, again).terms.equal(made.terms)
    with pytest.raises(UserError, match="different tokens"):
        huref.compare(made, huref.fingerprint(a, ids[:2]))
    with pytest.raises(UserError, match="one has official terms, the other robust ones"):
        huref.compare(made, huref.fingerprint(a, ids, "robust"))
    np.savez(tmp_path / "b.npz", terms=np.array([{}], dtype=object), told=np.zeros(1, np.uint8))
    (tmp_path / "c.npz").write_bytes(b"no archive")
    for name in ("b", "c"):
        with pytest.raises(UserError, match=f"{name}.npz is not a fingerprint"):
            huref.read(tmp_path / f"{name}.npz")


def test_the_rarest_tokens_of_a_dataset(tmp_path: Path) -> None:
    ids = np.array([5, 5, 5, 2, 2, 7, 7, 9], dtype=np.uint16)
    ids.tofile(tmp_path / "text.bin")
    write_index(tmp_path / "text.idx", "uint16", np.array([3, 5]))
    order = huref.by_frequency(str(tmp_path / "text"), 11)
    assert order == [5, 7, 2, 9]  # of equally common ones the higher id first, as published
    assert huref.choose(tiny(0), tiny(1), 2, order)[0].tolist() == [2, 9]
    with pytest.raises(UserError, match="it has token 9"):
        huref.by_frequency(str(tmp_path / "text"), 9)


def test_tokens_of_a_file(tmp_path: Path) -> None:
    a = tiny(0)
    (tmp_path / "ids.txt").write_text("9\n1\n4\n")
    order = huref.listed(tmp_path / "ids.txt")
    assert [i.tolist() for i in huref.choose(a, a, 2, order)] == [[1, 4], [1, 4]]
    assert huref.choose(a, a, 2, None)[0].tolist() == [9, 10]
    (tmp_path / "ids.txt").write_text("nine\n")
    with pytest.raises(UserError, match="one token id in each line"):
        huref.listed(tmp_path / "ids.txt")
