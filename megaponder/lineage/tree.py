"""The families of a set of models and a tree of each, from weights; then what checkpoints record beside it.

    distance(a, b) = arccos of the robust AWM score          families: models that are related, directly or over others
    branches: the minimum spanning tree of a family

Training moves weights away from where they are, and what is moved further adds up, so neighbours in the spanning tree
are parent and child.  Which of the two is the parent the distance does not say, so records decide the root: it is the
model that most others name as their source, directly or over others.  Where nothing is recorded, it is the model with
the least sum of distances, which is a guess and marked as one.  Records also choose among parents that have the same
queries and keys, as a base has and the mixture that was upcycled from it.  All else is the weights'.  These rules are
this project's; `benchmarks.lineage` and `benchmarks.family` say how often they are right on small models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.origin import Origin, recorded
from megaponder.checkpoint.state import load_state
from megaponder.errors import UserError
from megaponder.lineage import awm, null, weights
from megaponder.lineage.weights import Model
from megaponder.upcycle.record import of_checkpoint

SAME = 1e-3
"""Distance (radians) below which two models have the same queries and keys; rounding to BF16 stays below it."""


@dataclass(frozen=True)
class Node:
    """A model of the set."""

    model: Model
    label: str
    """Method and size in a few words."""
    place: Path
    """Resolved path of the checkpoint, or of the Hugging Face folder."""
    run: Path | None
    """Resolved run folder; None of a Hugging Face folder."""
    step: int | None
    origin: Origin | None
    upcycled: Origin | None = None
    """Base and disciplines of the mixture that it is, or that it went on from, as its checkpoint's state has them."""

    @property
    def name(self) -> str:
        return self.model.name


@dataclass(frozen=True)
class Edge:
    """Numbers of nodes; what lies between them."""

    parent: int
    child: int
    score: float

    @property
    def distance(self) -> float:
        return angle(self.score)


@dataclass(frozen=True)
class Check:
    """A record beside the tree."""

    parent: int | None
    """None: the recorded source is not in the set."""
    child: int
    kind: str
    """agrees; family only: related, but elsewhere in the tree, which may well be the one that errs; disagrees: they are
    unrelated."""
    words: str


@dataclass(frozen=True)
class Tree:
    """What was found."""

    nodes: tuple[Node, ...]
    scores: tuple[tuple[float, ...], ...]
    null: null.Null
    families: tuple[tuple[int, ...], ...]
    """Nodes of each, its root first."""
    edges: tuple[Edge, ...]
    checks: tuple[Check, ...]
    guessed: tuple[int, ...]
    """Roots of families in which nothing is recorded."""
    notes: tuple[str, ...] = ()


def node(path: str | Path, tokenizer: str | None = None) -> Node:
    """A model with what its folder records; UserError as `weights.load`."""
    model = weights.load(path, tokenizer)
    path, run, step, origin, upcycled = Path(path), None, None, None, None
    cfg = model.config
    assert cfg is not None
    if not (path / "config.json").is_file():
        path = locate(path)
        run, step = path.parent.parent.resolve(), load_state(path)[0].step
        origin = recorded(run, cfg)
        if made := of_checkpoint(path):
            upcycled = Origin("upcycle", tuple(one.path for one in (made.base, *made.disciplines)))
    label = f"{cfg.ponder.method}, {len(model.layers)} x {model.width}"
    label += f", {cfg.model.moe['experts']} experts" if cfg.model.moe else ""
    label += "" if step is None else f", step {step:,}"
    return Node(model, label, path.resolve(), run, step, origin, upcycled)


def grow(nodes: Sequence[Node], by_id: bool = False, draws: int = null.DRAWS) -> Tree:
    """Compare all pairs (n (n - 1) / 2 times AWM), and build the tree.

    `draws` random pairings are shared out to the pairs of models, two to each at least, and are one null.
    """
    twice = {n.name for n in nodes if sum(other.place == n.place for other in nodes) > 1}
    if twice:
        raise UserError(f"{min(twice)}: it is named twice; name each model once.")
    n, notes = len(nodes), []
    random: list[float] = []
    pairs = [(i, j) for i in range(n) for j in range(i)]
    scores = torch.eye(n, dtype=torch.float64)
    each = max(2, -(-draws // len(pairs)))
    for i, j in pairs:
        a, b = nodes[i].model, nodes[j].model
        try:
            ids = weights.shared(a, b, by_id)
        except UserError as error:
            notes.append(f"Not compared: {error}")
            continue
        scores[i, j] = scores[j, i] = awm.compare(a, b, ids, "robust").score
        random += null.of_awm(a, b, ids, "robust", each).scores
    if not random:
        raise UserError(f"No two of these models can be compared. {notes[0]}")
    measured = null.Null(tuple(random))
    related = {p for p in pairs if null.verdict(float(scores[p]), measured) == "related"}
    families, edges, guessed = [], [], []
    for members in _components(n, related):
        root = _recorded_root(nodes, members)
        if root is None:
            root = min(members, key=lambda i: sum(angle(float(scores[i, j])) for j in members))
            guessed += [root] if len(members) > 1 else []
        ordered, found = _branches(nodes, members, scores, root)
        families.append(ordered)
        edges += found
    checks = _checks(nodes, scores, families, edges)
    rows = tuple(tuple(row) for row in scores.tolist())
    return Tree(tuple(nodes), rows, measured, tuple(families), tuple(edges), checks, tuple(guessed), tuple(notes))


def _components(n: int, related: set[tuple[int, int]]) -> list[list[int]]:
    """Nodes that are related directly or over others, in order of their first one."""
    family = list(range(n))
    for i, j in related:
        old, new = sorted((family[i], family[j]), reverse=True)
        family = [new if f == old else f for f in family]
    return [[i for i in range(n) if family[i] == f] for f in sorted(set(family))]


def angle(score: float) -> float:
    """Radians."""
    return math.acos(max(-1.0, min(1.0, score)))


def _recorded_root(nodes: Sequence[Node], members: list[int]) -> int | None:
    """The member that is the recorded ancestor of most others; None if no member's source is among them."""
    above = {i: said[1] for i in members if (said := source(nodes, i)) is not None and said[1] in members}
    count = dict.fromkeys(members, 0)
    for i in above:
        seen, at = {i}, i
        while at in above and above[at] not in seen:
            at = above[at]
            seen.add(at)
            count[at] += 1
    return max(members, key=lambda i: (count[i], -i)) if above else None


def _branches(
    nodes: Sequence[Node], members: list[int], scores: Tensor, root: int
) -> tuple[tuple[int, ...], list[Edge]]:
    """Prim's tree from the root: nodes in the order in which they join, and edges."""
    joined, edges = [root], []
    claims = {(said[1], j) for j in members if (said := source(nodes, j)) is not None}
    while len(joined) < len(members):
        options = [(angle(float(scores[i, j])), i, j) for i in joined for j in members if j not in joined]
        # of models with the same queries and keys one is as near as the other: a record tells, or else the first one
        # that joined is the parent
        nearest = min(options)[0]
        near = [(i, j) for distance, i, j in options if distance <= nearest + SAME]
        i, j = next((pair for pair in near if pair in claims), near[0])
        edges.append(Edge(i, j, float(scores[i, j])))
        joined.append(j)
    return tuple(joined), edges


def _checks(
    nodes: Sequence[Node], scores: Tensor, families: Sequence[tuple[int, ...]], edges: Sequence[Edge]
) -> tuple[Check, ...]:
    """Every record of a source beside the families and the tree."""
    parents = {edge.child: edge.parent for edge in edges}
    family = {i: f for f, members in enumerate(families) for i in members}
    found = []
    for child, node in enumerate(nodes):
        said = source(nodes, child)
        if said is None:
            continue
        how, parent = said
        if parent is None:
            record = node.origin or node.upcycled
            assert record is not None
            words = f"{node.name}: its source ({how} of {record.sources[0]}) is not here."
            found.append(Check(None, child, "agrees", words))
            continue
        claim = f"{node.name}: recorded as {how} of {nodes[parent].name}"
        if family[parent] != family[child]:
            words = f"{claim}, but the weights are unrelated (score {float(scores[parent, child]):.3f})."
            found.append(Check(parent, child, "disagrees", words))
        elif parents.get(child) == parent:
            found.append(Check(parent, child, "agrees", f"{claim}, as in the tree."))
        elif angle(float(scores[parent, child])) <= SAME:
            found.append(Check(parent, child, "agrees", f"{claim}; both have the same queries and keys."))
        elif parents.get(parent) == child:
            found.append(Check(parent, child, "family only", f"{claim}, but the tree has it the other way round."))
        else:
            other = f"under {nodes[parents[child]].name}" if child in parents else "at the root"
            found.append(Check(parent, child, "family only", f"{claim}, but the tree puts it {other}."))
    return tuple(found)


def source(nodes: Sequence[Node], child: int) -> tuple[str, int | None] | None:
    """How a node was made and from which of the others: an earlier checkpoint of its run, or what its run records."""
    me = nodes[child]
    earlier = [
        i for i, n in enumerate(nodes) if n.run is not None and n.run == me.run and (n.step or 0) < (me.step or 0)
    ]
    if earlier:
        return "continuation", max(earlier, key=lambda i: nodes[i].step or 0)
    records = [one for one in (me.origin, me.upcycled) if one is not None]
    for how, path in ((one.how, Path(word)) for one in records for word in one.sources):
        exact = [i for i, n in enumerate(nodes) if i != child and n.place == path.resolve()]
        run = path.parent.parent if path.parent.name == "checkpoints" else path
        same = [i for i, n in enumerate(nodes) if i != child and n.run is not None and n.run == run.resolve()]
        # runs may have been moved together: then their folders' names must tell
        moved = [i for i, n in enumerate(nodes) if i != child and (n.run or n.place).name == run.name]
        for there in (exact, same, moved if len({nodes[i].run for i in moved}) == 1 else []):
            if there:
                return how, max(there, key=lambda i: nodes[i].step or 0)
    return (records[0].how, None) if records else None


def lines(tree: Tree) -> list[str]:
    """The tree as text."""
    children: dict[int, list[Edge]] = {}
    for edge in tree.edges:
        children.setdefault(edge.parent, []).append(edge)
    out = []

    def walk(i: int, before: str, lead: str, said: str) -> None:
        out.append(f"{before}{lead}{tree.nodes[i].name} ({tree.nodes[i].label}){said}")
        below = children.get(i, [])
        deeper = before + {"": "", "|- ": "|  ", "`- ": "   "}[lead]
        for edge in below:
            last = edge is below[-1]
            walk(edge.child, deeper, "`- " if last else "|- ", f"  score {edge.score:.4f}")

    for number, family in enumerate(tree.families, 1):
        guess = family[0] in tree.guessed
        out.append(f"family {number}" + (" (nothing is recorded, so its root is a guess)" if guess else ""))
        walk(family[0], "  ", "", "")
    out.append(
        f"tokens paired at random: {tree.null.mean:.4f} +- {tree.null.sd:.4f} ({len(tree.null.scores)} draws); related "
        f"from {max(null.RELATED_SCORE, tree.null.mean + null.RELATED * tree.null.sd):.3f} on"
    )
    out += [f"{c.kind}: {c.words}" for c in tree.checks]
    return [*out, *tree.notes]


def plain(tree: Tree) -> dict[str, Any]:
    """The tree as plain data."""
    return {
        "models": [
            {"name": n.name, "label": n.label, "step": n.step,
             "origin": None if n.origin is None else vars(n.origin)}
            for n in tree.nodes
        ],
        "scores": tree.scores,
        "null": tree.null.scores,
        "families": tree.families,
        "guessed_roots": tree.guessed,
        "edges": [vars(e) for e in tree.edges],
        "checks": [vars(c) for c in tree.checks],
        "notes": tree.notes,
    }  # fmt: skip
