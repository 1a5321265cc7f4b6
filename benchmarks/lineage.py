"""What do lineage scores say of models whose lineage is known?  Small models are trained in this process (layers of
64 channels, PyTorch alone): bases with seeds of their own on the same text, and their offspring on other text.

    python -m benchmarks.lineage --data PREFIX --domain PREFIX --instructions PREFIX

For each seed: a base; a continued pretraining of it on --domain; of that, a fine-tuning on --instructions; another one
of the base; and a ponderlm model with a gentle start from the base.  Every pair is scored by all four measures, between
families and within, and the tree of all models is compared with the truth.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import add_output, folder, number, parser, script, typed, write
from benchmarks.report import origin
from megaponder.config.schema import DataConfig, ModelConfig, PonderConfig, RunConfig
from megaponder.data.indexed import read_index

say = partial(print, flush=True)
LENGTH, BATCH, DRAWS = 32, 8, 4
GENTLE = {"steps": 2, "gentle_start": True}
RATES = {"base": 3e-3, "cpt": 1e-3, "sft": 3e-4, "sft-of-base": 3e-4, "gentle": 1e-3}
PARENTS = {"cpt": "base", "sft": "cpt", "sft-of-base": "base", "gentle": "base"}
SHARES = {"base": 1.0, "cpt": 0.3, "sft": 0.1, "sft-of-base": 0.1, "gentle": 0.2}
"""Of --steps."""


def configured(vocab: int, method: str) -> RunConfig:
    """A Llama with a gate, as many key/value heads as query heads, and a method."""
    from megaponder.config.resolve import resolve

    sizes = dict(num_layers=4, hidden_size=64, num_heads=4, ffn_size=160, max_positions=LENGTH)
    section = ModelConfig(family="llama", vocab_size=vocab, embedding_scale="none", **sizes)  # type: ignore[arg-type]
    ponder = PonderConfig(method, GENTLE if method == "ponderlm" else {})
    return resolve(RunConfig(run="-", model=section, ponder=ponder, data=DataConfig(sequence_length=LENGTH)))


def initial(vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """Weights as published for Llama: normal, std 0.02, gains of 1."""
    from megaponder.export.configs import ponder_config
    from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM

    net = MegaponderForCausalLM(MegaponderConfig(**ponder_config(configured(vocab, "vanilla"), "float32", None)))
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones_like(p) if p.dim() == 1 else 0.02 * torch.randn(p.shape, generator=draw)
        for name, p in net.state_dict().items()
    }


def train(
    weights: dict[str, torch.Tensor], vocab: int, method: str, text: np.ndarray, steps: int, lr: float, seed: int
) -> tuple[dict[str, torch.Tensor], float]:
    """Weights after AdamW on random windows of a text, and the mean loss of the last tenth of the steps."""
    from megaponder.export.load import build_model

    start = {name: t.clone() for name, t in weights.items()}
    if method == "ponderlm":
        start["method.feedback_gate.weight"] = torch.zeros(1)
    net = build_model(configured(vocab, method), start).train()
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    draw, losses = np.random.default_rng(seed), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, steps // 10))
        at = draw.integers(0, len(text) - LENGTH - 1, BATCH)
        ids = torch.from_numpy(np.stack([text[i : i + LENGTH].astype(np.int64) for i in at]))
        logits = net(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    late = losses[-max(1, steps // 10) :]
    return {name: t.detach().clone() for name, t in net.state_dict().items()}, sum(late) / len(late)


def scored(a: Any, b: Any) -> dict[str, Any]:
    """All four measures of a pair, with their nulls."""
    from megaponder.lineage import awm, huref, null, weights

    ids, found = weights.shared(a, b), {}
    for mode in awm.MODES:
        score, random = awm.compare(a, b, ids, mode).score, null.of_awm(a, b, ids, mode, DRAWS)
        found[f"awm {mode}"] = {"score": score, "z": random.z(score), "null": random.scores}
        one, other = (huref.fingerprint(m, rows, mode) for m, rows in zip((a, b), ids, strict=True))
        score, random = huref.compare(one, other).score, null.of_huref(one, other, DRAWS)
        found[f"huref {mode}"] = {"score": score, "z": random.z(score), "null": random.scores}
    return found


def table(pairs: list[dict[str, Any]]) -> list[str]:
    """Lowest, mean and highest scores of each measure and kind of pair."""
    lines = [
        "| measure | pairs | number | lowest score | mean | highest | lowest z | highest z |",
        "|---|---|" + "---|" * 6,
    ]
    kinds = list(dict.fromkeys(p["kind"] for p in pairs))
    for measure in pairs[0]["scores"]:
        for kind in kinds:
            found = [p["scores"][measure] for p in pairs if p["kind"] == kind]
            scores, z = [f["score"] for f in found], [f["z"] for f in found]
            lines.append(
                f"| {measure} | {kind} | {len(found)} | {min(scores):.4f} | {sum(scores) / len(scores):.4f} | "
                f"{max(scores):.4f} | {min(z):.1f} | {max(z):.1f} |"
            )
    return lines


def kind_of(a: str, b: str) -> str:
    """What lies between two models, of names SEED/KIND."""
    (seed_a, one), (seed_b, other) = a.split("/"), b.split("/")
    if seed_a != seed_b:
        return "independent, same text" if one == other == "base" else "independent, offspring"
    direct = PARENTS.get(one) == other or PARENTS.get(other) == one
    return "parent and child" if direct else "other relatives"


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("lineage", __doc__)
    for name in ("data", "domain", "instructions"):
        options.add_argument(f"--{name}", required=True, metavar="PREFIX", help="a dataset of megaponder prepare")
    options.add_argument("--steps", type=number(10), default=300, help="of a base; default: 300")
    options.add_argument("--seeds", type=number(2), default=3, help="families; default: 3")
    options.add_argument(
        "--work", type=folder, default=Path("runs/lineage"), help="trained models; default: %(default)s"
    )
    add_output(options)
    args = options.parse_args(argv)
    texts, vocab = {}, 0
    for name in ("data", "domain", "instructions"):
        prefix = getattr(args, name)
        index = read_index(prefix)
        texts[name] = np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r", shape=(index.tokens,))
        vocab = max(vocab, int(texts[name].max()) + 1)
    from safetensors import safe_open
    from safetensors.torch import save_file

    from megaponder.lineage import picture, tree, weights

    torch.set_num_threads(1)
    source = {"base": "data", "cpt": "domain", "sft": "instructions", "sft-of-base": "instructions", "gentle": "data"}
    made: dict[str, Any] = {}
    losses, nodes = {}, []
    for seed in range(1, args.seeds + 1):
        family = {"": initial(vocab, seed)}
        for number_, kind in enumerate(RATES):
            method, begin = ("ponderlm" if kind == "gentle" else "vanilla"), time.monotonic()
            steps = max(1, round(SHARES[kind] * args.steps))
            start = family[PARENTS.get(kind, "")]
            name = f"{seed}/{kind}"
            file = args.work / f"{vocab}-{args.steps}-{seed}-{kind}.safetensors"
            if file.is_file():
                say(f"{name}: trained before.")
                with safe_open(file, "pt") as stored:
                    trained = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
                    loss = float(stored.metadata()["loss"])
            else:
                text, lr = texts[source[kind]], RATES[kind]
                trained, loss = train(start, vocab, method, text, steps, lr, 10 * seed + number_)
                file.parent.mkdir(parents=True, exist_ok=True)
                save_file(trained, file, {"loss": str(loss)})
            family[kind] = trained
            losses[name] = loss
            made[name] = weights.of_plain(trained, configured(vocab, method), name)
            label = f"{method}, {steps} steps"
            nodes.append(tree.Node(made[name], label, Path(name), None, None, None))
            say(f"{name}: {steps} steps, loss {loss:.3f}, {time.monotonic() - begin:.0f} s")
    names = list(made)
    pairs = [
        {"first": a, "second": b, "kind": kind_of(a, b), "scores": scored(made[a], made[b])}
        for i, a in enumerate(names)
        for b in names[:i]
    ]
    found = tree.grow(nodes)
    truth = {f"{s}/{child}": f"{s}/{parent}" for s in range(1, args.seeds + 1) for child, parent in PARENTS.items()}
    said = {names[e.child]: names[e.parent] for e in found.edges}
    right = sum(said.get(child) == parent for child, parent in truth.items())
    neither = {frozenset(p) for p in truth.items()}
    undirected = sum(frozenset(p) in neither for p in said.items())
    whole = [sorted(names[i].split("/")[0] for i in members) for members in found.families]
    pure = "each of one seed" if all(len(set(seeds)) == 1 for seeds in whole) else "and some mix seeds"
    command = typed("lineage", argv)
    drawn = "\n".join(tree.lines(found))
    report = [
        "# Lineage scores of models whose lineage is known", "",
        f"`{command}`: {origin()}. Llama of 4 layers of 64 channels, {vocab} tokens, {args.steps} steps of {BATCH} x "
        f"{LENGTH} tokens for a base.", "", *table(pairs), "",
        f"Families found: {len(found.families)} of {args.seeds}, {pure}. Of {len(truth)} true edges the tree has "
        f"{undirected}, and {right} in the true direction (no records).", "",
        "```", drawn, "```", "",
    ]  # fmt: skip
    results = {"command": command, "losses": losses, "pairs": pairs, "tree": tree.plain(found)}
    write(args.output, "lineage", results, "\n".join(report))
    picture.write(args.output / "lineage", found)
    say("\n".join(report))


if __name__ == "__main__":
    raise SystemExit(main())
