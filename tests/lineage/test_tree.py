"""The tree of models whose lineage is known, and records beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megaponder.checkpoint.origin import Origin
from megaponder.lineage import picture, tree
from megaponder.lineage.tree import Node
from tests.lineage import models
from tests.lineage.models import Plain

NET = models.net()


def drifted(weights: Plain, seed: int, share: float = 0.1) -> Plain:
    return models.noisy(weights, share, 100 * seed)


def family() -> list[Node]:
    """base -> cpt -> sft, base -> other, a disguise of sft, and a stranger; some with records, one of them wrong."""
    base = models.plain(NET)
    cpt = drifted(base, 2, 0.2)
    sft = drifted(cpt, 3)
    made = {"sft": sft, "stranger": models.plain(models.net(9)), "base": base, "other": drifted(base, 4), "cpt": cpt}
    made["disguised"] = models.rotated(models.head_scales(drifted(sft, 5)))
    sources = {"cpt": "base", "sft": "cpt", "other": "stranger", "base": "gone"}
    return [
        Node(
            models.read(NET, weights, name), "vanilla", Path(f"/runs/{name}/x"),
            Path(f"/runs/{name}"), 1, Origin("load", (f"/runs/{sources[name]}",)) if name in sources else None,
        )
        for name, weights in made.items()
    ]  # fmt: skip


def test_families_parents_and_records(tmp_path: Path) -> None:
    nodes = family()
    found = tree.grow(nodes, draws=16)
    names = [n.name for n in nodes]
    assert [[names[i] for i in members] for members in found.families] == [
        ["base", "other", "cpt", "sft", "disguised"],
        ["stranger"],
    ]
    edges = {names[e.child]: names[e.parent] for e in found.edges}
    assert edges == {"cpt": "base", "sft": "cpt", "other": "base", "disguised": "sft"}
    said = {names[c.child]: (c.kind, c.words) for c in found.checks}
    assert said["cpt"] == ("agrees", "cpt: recorded as load of base, as in the tree.")
    assert said["sft"][0] == "agrees" and said["base"] == (
        "agrees",
        "base: its source (load of /runs/gone) is not here.",
    )
    assert (
        said["other"][0] == "disagrees"
        and "recorded as load of stranger, but the weights are unrelated" in said["other"][1]
    )
    text = "\n".join(tree.lines(found))
    assert "family 2\n  stranger (vanilla)" in text and "disagrees: other" in text
    paths = picture.write(tmp_path / "out", found)
    assert [p.name for p in paths] == ["tree.png", "tree.svg", "tree.html"]
    page = paths[-1].read_text()
    assert page.count("<svg") == 1 and "<script" not in page and "as in the tree" in page
    spots = picture.places(found)
    assert len(set(spots.values())) == len(nodes) and spots[names.index("cpt")][0] > spots[names.index("base")][0] == 0


def test_the_root_without_records_and_with_wrong_ones() -> None:
    nodes = family()
    silent = [replace(n, origin=None) for n in nodes]
    found = tree.grow([silent[0], silent[2], silent[4]])
    assert [found.nodes[i].name for i in found.guessed] == ["cpt"] and "is a guess" in tree.lines(found)[0]
    # the spanning tree is the same; a record that contradicts it is named
    wrong = replace(nodes[0], origin=Origin("load", ("/runs/base",)))
    found = tree.grow([wrong, nodes[4], nodes[2]])
    assert [c.words for c in found.checks if c.kind == "family only"] == [
        "sft: recorded as load of base, but the tree puts it under cpt."
    ]


def test_the_same_weights() -> None:
    base = family()[2]
    place, run = Path("/runs/copy/x"), Path("/runs/copy")
    copy = replace(base, place=place, run=run, origin=Origin("branch", ("/runs/base",)))
    assert [(c.child, c.kind) for c in tree.grow([base, copy]).checks] == [(0, "agrees"), (1, "agrees")]
