"""Dense models to a mixture and back: every identity is exact, and what is no copy of the base is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaponder.checkpoint.origin import Origin
from megaponder.checkpoint.state import TrainState
from megaponder.checkpoint.weights import load_weights
from megaponder.cli.main import main
from megaponder.engine import cuda_on_cpu
from megaponder.errors import ConfigError, UserError
from megaponder.export import reference
from megaponder.ponder.settings import method_of
from megaponder.upcycle import slices as cutting
from megaponder.upcycle.record import of_checkpoint
from tests.layouts.cases import CASES, VOCAB, disturb, run_config
from tests.layouts.layouts import LAYOUTS
from tests.tolerance import PARITY, difference

cuda_on_cpu.install()

from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.export.average import average  # noqa: E402
from megaponder.export.save import save_weights  # noqa: E402
from megaponder.lineage import awm, picture, tree, weights  # noqa: E402
from megaponder.upcycle.merge import merge  # noqa: E402
from megaponder.upcycle.split import split  # noqa: E402

K, NEURONS = 4, 46
"""Slices, and a width that they do not divide: blocks of 12, 12, 11 and 11 neurons, filled up to 16."""
IDS = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))
State = dict[str, Tensor]


@dataclass
class Models:
    """Run folders of a base and of copies of it, and what they compute."""

    root: Path
    states: dict[str, State]

    def of(self, *names: str) -> dict[str, Path]:
        return {name: self.root / name for name in names}

    def made(self, name: str, **options: object) -> Path:
        out = self.root / name
        if not out.exists():
            split(self.root / "base", self.of("art", "law"), out, slices=K, **options)  # type: ignore[arg-type]
        return out


def mlp(seed: int) -> Callable[[str, Tensor], None]:
    def change(name: str, weight: Tensor) -> None:
        if ".mlp.linear" in name:
            weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))

    return change


def one_more(where: str) -> Callable[[str, Tensor], None]:
    def change(name: str, weight: Tensor) -> None:
        if name == where:
            weight.view(-1)[3] += 0.25

    return change


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("upcycle")
    case = replace(CASES["loop-llama-gqa"], model={"num_kv_heads": 2, "ffn_size": NEURONS, "qkv_bias": True})
    cfg = run_config(case, LAYOUTS["one-batch1"])
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    disturb(engine.stage.named_parameters())
    start = {name: p.detach().clone() for name, p in engine.stage.named_parameters()}
    changes: dict[str, Callable[[str, Tensor], None]] = {
        "base": lambda name, weight: None, "art": mlp(1), "law": mlp(2), "same": lambda name, weight: None,
        "attention": one_more("decoder.layers.1.self_attention.linear_proj.weight"),
        "norms": one_more("decoder.layers.0.pre_mlp_layernorm.weight"),
        "words": one_more("embedding.word_embeddings.weight"),
    }  # fmt: skip
    states = {}
    for name, change in changes.items():
        with torch.no_grad():
            for own, p in engine.stage.named_parameters():
                p.copy_(start[own])
                change(own, p)
        save_weights(root / name / "checkpoints", replace(cfg, run=str(root / name)), engine.stage)
        states[name] = load_weights(root / name)[1]
    return Models(root, states)


def logits(path: Path, state: State | None = None, choose: Callable[[int], Tensor] | None = None) -> Tensor:
    """Of a run; `choose`: the experts that each of so many rows takes [rows, k], whatever the router says."""
    cfg, own = load_weights(path)
    with reference.engine(cfg, own if state is None else state) as engine:
        for layer in engine.stage.decoder.layers if choose else ():

            def forced(x: Tensor, _: object, router: torch.nn.Module = layer.mlp.router) -> Tensor:
                assert choose is not None
                z = torch.full((x[..., 0].numel(), router.options.experts), -1e4)
                return z.scatter(1, choose(len(z)), 0.0).view(*x.shape[:2], -1)

            layer.mlp.router.gating = forced
        return engine.logits(IDS)


def without_shared(path: Path) -> State:
    return {n: t * 0.0 if "shared_experts.linear_fc2" in n else t for n, t in load_weights(path)[1].items()}


@pytest.mark.parametrize("how", cutting.HOW)
def test_an_mlp_is_the_sum_of_its_slices(how: str) -> None:
    """In float64, whatever the width; and put together again it has the same bits."""
    draw = torch.Generator().manual_seed(1)
    for neurons, k in ((46, 4), (64, 4), (5, 5), (18, 7)):
        fc1, fc2, x = (
            torch.randn(shape, dtype=torch.float64, generator=draw)
            for shape in ((2 * neurons, 6), (6, neurons), (9, 6))
        )
        width = cutting.width_of(neurons, k)
        parts = cutting.blocks(neurons, k, how, 7, 0)
        assert width % cutting.UNIT == 0 and sorted(torch.cat(parts).tolist()) == list(range(neurons))
        assert (torch.cat(parts).tolist() == list(range(neurons))) == (how == "contiguous")

        def f(fc1: Tensor, fc2: Tensor, x: Tensor = x) -> Tensor:
            gate, up = (x @ fc1.T).chunk(2, dim=-1)
            return (F.silu(gate) * up) @ fc2.T

        cut = [cutting.cut(fc1, fc2, block, width) for block in parts]
        assert torch.allclose(sum(f(*one) for one in cut), f(fc1, fc2), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]
        again = cutting.join(*(torch.stack(one) for one in zip(*cut, strict=True)), parts)
        assert torch.equal(again[0], fc1) and torch.equal(again[1], fc2)


def test_a_disciplines_slices_are_its_dense_model(models: Models) -> None:
    path = models.made("sum", init="sum", slicing="random")
    for d, name in enumerate(("art", "law")):
        choose = lambda rows, d=d: torch.arange(d * K, (d + 1) * K).expand(rows, K)  # noqa: E731
        assert difference(logits(path, without_shared(path), choose), logits(models.root / name)) < PARITY


def test_a_mixture_of_copies_of_the_base_is_the_base(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    """With `average`, for every choice that has each slice once; others are not it."""
    path = models.root / "copies"
    split(models.root / "base", {"one": models.root / "base", "two": models.root / "same"}, path, slices=K)
    filled, equal = (one.message for one in caplog.records if one.name == split.__module__)
    assert "28% are zeros" in filled and "one and two have the same weights, so their experts start equal" in equal
    draw = torch.Generator().manual_seed(5)
    full = lambda rows: torch.arange(K) + K * torch.randint(2, (rows, K), generator=draw)  # noqa: E731
    twice = lambda rows: torch.tensor([0, 0 + K, 2, 3]).expand(rows, K)  # noqa: E731
    want = logits(models.root / "base")
    assert difference(logits(path, choose=full), want) < PARITY
    assert difference(logits(path, choose=twice), want) > 0.01
    assert difference(logits(path), want) > 0.01


def test_damped_to_nothing_is_the_base_bit_for_bit(models: Models) -> None:
    assert torch.equal(logits(models.made("damped", init="damped")), logits(models.root / "base"))


def test_all_else_is_the_bases(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    """Bits of everything but MLPs; the lineage of attention; the record, and how a tree of models reads it."""
    path = models.made("average")
    cfg, state = load_weights(path)
    kept = [name for name in models.states["base"] if ".mlp." not in name]
    assert len(kept) == 13 and all(torch.equal(state[name], models.states["base"][name]) for name in kept)
    assert cfg.model.ffn_size == 16 and cfg.model.moe == {"experts": 8, "top_k": 4, "shared_ffn": 46, "scale": 4.0}
    base, mixture = (weights.load(p) for p in (models.root / "base", path))
    ids = weights.shared(base, mixture, by_id=True)
    for mode in ("official", "robust"):
        assert awm.compare(base, mixture, ids, mode).score == pytest.approx(1.0, abs=1e-9)  # type: ignore[arg-type]
    record = of_checkpoint(next((path / "checkpoints").iterdir()))
    assert record is not None and [one.name for one in record.disciplines] == ["art", "law"]
    assert (record.slices, record.init, record.slicing, record.neurons) == (K, "average", "contiguous", NEURONS)
    copies = of_checkpoint(next((models.made("sum", init="sum", slicing="random") / "checkpoints").iterdir()))
    assert copies is not None and copies.base.sha256 == record.base.sha256 != record.disciplines[0].sha256
    average(path, models.root / "mean", last=1)  # the record goes on
    assert of_checkpoint(next((models.root / "mean" / "checkpoints").iterdir())) == record
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"upcycled from {record.base.path}: art, law, 4 contiguous slices each, average\n  art: " in said
    nodes = [tree.node(p) for p in (models.root / "base", path)]
    assert tree.source(nodes, 1) == ("upcycle", 0) and tree.source(nodes, 0) is None


def went_on(models: Models, name: str, start: str, seed: int, share: float = 0.1) -> Path:
    """A run that loaded another one and whose matrices have moved, as after a training."""
    draw, path = torch.Generator().manual_seed(seed), models.root / name
    cfg, state = load_weights(models.root / start)
    moved = {n: t + share * t.std() * torch.randn(t.shape, generator=draw) if t.dim() > 1 else t
             for n, t in state.items()}  # fmt: skip
    record = of_checkpoint(next((models.root / start / "checkpoints").iterdir()))
    cfg = replace(cfg, run=str(path), checkpoint=replace(cfg.checkpoint, load=str(models.root / start)))
    if "sft" in name:
        cfg = replace(cfg, data=replace(cfg.data, loss_mask="answers", document_attention=True))
    with reference.engine(cfg, moved) as engine:
        told = TrainState(upcycled=record.plain() if record else {})
        save_weights(path / "checkpoints", cfg, engine.stage, state=told)
    return path


def test_the_tree_of_a_family(models: Models) -> None:
    """A mixture, what it became and was merged to, an SFT and a stranger: branches and records, one of them false."""
    models.made("average")
    went_on(models, "trained", "average", 1)
    went_on(models, "sft", "base", 2)
    went_on(models, "sft-again", "sft", 3)
    went_on(models, "stranger", "same", 4, share=100.0)
    merge(models.root / "trained", models.root / "merged")
    names = ["merged", "sft-again", "trained", "stranger", "average", "sft", "base"]
    nodes = [tree.node(models.root / name) for name in names]
    truth = {"average": "base", "trained": "average", "merged": "trained", "sft": "base", "sft-again": "sft"}

    def edges(found: tree.Tree) -> dict[str, str]:
        at = [Path(n.name).name for n in found.nodes]
        return {at[e.child]: at[e.parent] for e in found.edges}

    assert [name for name, n in zip(names, nodes, strict=True) if ", 8 experts, step 0" in n.label] == [
        names[2],
        names[4],
    ]
    found = tree.grow(nodes)
    assert [sorted(names[i] for i in members) for members in found.families] == [
        sorted(set(names) - {"stranger"}), ["stranger"],
    ]  # fmt: skip
    assert edges(found) == truth
    assert len(set(picture.places(found).values())) == len(nodes)  # those of the same queries and keys, too
    assert [c.kind for c in found.checks if c.child != 3] == ["agrees"] * 5
    # the state of a mixture's checkpoint names its base where the run that it loaded is not here
    few = [nodes[i] for i in (2, 6, 3)]
    assert tree.source(few, 0) == ("upcycle", 1) and edges(tree.grow(few)) == {"trained": "base"}
    lying = replace(nodes[2], origin=Origin("load", (str(models.root / "stranger"),)))
    (lie,) = (c for c in tree.grow([lying, *few[1:]]).checks if c.child == 0)
    assert lie.kind == "disagrees" and "the weights are unrelated" in lie.words


def test_back_to_dense_models_with_the_same_bits(models: Models) -> None:
    for name, options in (("average", {}), ("sum", {"init": "sum", "slicing": "random"})):
        for take, want in (("shared", "base"), ("law", "law")):
            out = models.root / f"{name}-{take}"
            merge(models.made(name, **options), out, take)
            state = load_weights(out)[1]
            assert state.keys() == models.states[want].keys()
            assert all(torch.equal(state[n], t) for n, t in models.states[want].items())
    with pytest.raises(UserError, match="its experts were damped to 0, so art is lost; use --take shared"):
        merge(models.made("damped", init="damped"), models.root / "x", "art")
    with pytest.raises(UserError, match="it has no experts to merge; megaponder upcycle split makes some of dense"):
        merge(models.root / "base", models.root / "x")
    with pytest.raises(ConfigError, match=r"--take = 'lwa': it has shared, art, law; use law"):
        merge(models.made("average"), models.root / "x", "lwa")
    cfg, state = load_weights(models.made("average"))
    with reference.engine(cfg, state) as engine:  # the same mixture without its record
        save_weights(models.root / "unknown" / "checkpoints", cfg, engine.stage)
    with pytest.raises(UserError, match="it was not upcycled"):
        merge(models.root / "unknown", models.root / "x")


@pytest.mark.parametrize(
    ("copy", "tensor"),
    [
        ("attention", "decoder.layers.1.self_attention.linear_proj.weight"),
        ("norms", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"),
        ("words", "embedding.word_embeddings.weight"),
    ],
)
def test_what_is_no_copy_of_the_base_is_refused(models: Models, copy: str, tensor: str) -> None:
    with pytest.raises(UserError, match="only MLPs may") as found:
        split(models.root / "base", models.of("art", copy), models.root / "x", slices=K)
    assert f"{tensor} differs from the base's by up to 2.5e-01" in str(found.value)
    assert not (models.root / "x").exists()


@pytest.mark.parametrize(
    ("neurons", "slices", "share", "better"),
    [
        (64, 4, 0, 4), (64, 64, 15 / 16, 4), (64, 100, 0.96, 4), (64, 3, 1 / 3, 2),
        (46, 4, 18 / 64, 3), (46, 3, 2 / 48, 3), (20, 2, 12 / 32, 2), (18944, 8, 0, 8), (18944, 9, 64 / 19008, 8),
    ],
)  # fmt: skip
def test_slices_that_are_mostly_filling_are_told(neurons: int, slices: int, share: float, better: int) -> None:
    assert cutting.filling(neurons, slices) == pytest.approx(share, abs=1e-3)
    assert cutting.proposed(neurons, slices) == better
    told = cutting.filling_warning(neurons, slices)
    assert (told is None) == (share < 0.1)
    if told is not None:
        assert f"{share:.0%} are zeros" in told and ("--slices 4 it is 0%" in told) == (slices in (64, 100))


WRONG = {
    "--init delta": "need twice the width",
    "--init mean": "there are average, sum, damped; use average",
    "--slicing clustered": "need activations, which are not measured; use contiguous",
    "--slices 1": "a router that takes one expert alone has no gradient; the nearest is 2",
    "--slices 47": "the MLPs have 46 neurons; use 3",
    "--beta 0.5": "--init average has no such factor",
    "--init damped --beta -1": "it must be a number of at least 0",
    "--take law": "it belongs to megaponder upcycle merge",
    "--experts art": "each is NAME=RUN",
    "--experts art={root}/art art={root}/law": "art is named twice",
    "--experts base={root}/art": "is not base or shared",
    "--experts art={root}/average": "it has experts already",
    "--experts law={root}/law --out {root}/average": "average: it exists already; choose another folder",
    "--experts law={root}/law --out {root}/begun": "begun: it exists already; choose another folder",
    "--experts art={root}/nothing": "art = {root}/nothing: There is no checkpoint or run folder",
}


def test_mistakes_are_one_sentence(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    models.made("average")
    (models.root / "begun").mkdir()
    (models.root / "begun" / "config.yaml").touch()
    for words, said in WRONG.items():
        given = words.format(root=models.root).split()
        experts = [] if "--experts" in words else ["--experts", f"art={models.root / 'art'}"]
        out = [] if "--out" in words else ["--out", str(models.root / "x")]
        end = ["--base", str(models.root / "base"), *out, *experts]
        assert main(["upcycle", "split", *given, *end]) == 2
        found = capsys.readouterr().err
        assert said.format(root=models.root) in found and found.count("\n") == 1, (words, found)
    assert main(["upcycle", "merge", str(models.root / "average"), "--take", "x", "--out", str(models.root / "x")]) == 2
    assert "it has shared, art, law" in capsys.readouterr().err
    assert not (models.root / "x").exists()
