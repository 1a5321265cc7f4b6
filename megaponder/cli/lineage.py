"""`megaponder lineage`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaponder.cli.parser import Commands, add_plugin
from megaponder.errors import ConfigError, UserError

if TYPE_CHECKING:
    from megaponder.lineage.awm import Mode
    from megaponder.lineage.null import Null
    from megaponder.lineage.weights import Model

SUMMARY = "say from the weights whether models come from each other, and draw the tree of many"

EPILOG = """\
examples
  megaponder lineage awm runs/base hf/suspect                      alignment of query and key matrices
  megaponder lineage awm runs/base hf/suspect --mode robust        also against rotations and scales of the weights
  megaponder lineage huref runs/base runs/sft --data data/wiki     products of matrices at that text's rarest tokens
  megaponder lineage huref runs/base --save base.npz               a fingerprint, to be compared later
  megaponder lineage huref base.npz hf/suspect
  megaponder lineage tree runs/base runs/cpt runs/sft hf/other     families, parents, and whether records agree

A model is a checkpoint, a run (its newest checkpoint) or a Hugging Face folder with safetensors.  Scores are compared
with those of the same models when their tokens are paired at random.

exit code  0 related (tree: no record is contradicted)   1 unrelated (tree: a record names an unrelated source)
           2 a mistake   3 inconclusive
"""
CODES = {"related": 0, "unrelated": 1, "inconclusive": 3}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("lineage", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument(
        "what", choices=("awm", "huref", "tree"),
        help="what is compared of two models: query and key matrices (awm), or products of matrices at rare tokens "
        "(huref); tree: awm of many models, as families",
    )  # fmt: skip
    parser.add_argument("models", metavar="MODEL", nargs="+", help="two models (huref: also fingerprints), or many")
    parser.add_argument(
        "--mode", choices=("official", "robust"),
        help="as published (official, the default), or also against rotations and scales that hide where weights come "
        "from (robust); tree: robust",
    )  # fmt: skip
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer of all models, if they name none")
    parser.add_argument("--by-id", action="store_true", help="equal ids are equal tokens, whatever tokenizers say")
    parser.add_argument(
        "--draws",
        type=int,
        default=8,
        metavar="N",
        help="random pairings of tokens to compare a score with (default 8)",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--data", metavar="PREFIX", help="huref: take the rarest tokens of this dataset")
    parser.add_argument("--tokens", metavar="FILE", help="huref: token ids, one a line, the commonest first")
    parser.add_argument("--count", type=int, default=4096, metavar="N", help="huref: how many tokens (default 4096)")
    parser.add_argument("--save", metavar="FILE", help="huref: write the first model's fingerprint (.npz)")
    parser.add_argument("--out", metavar="FOLDER", default="lineage", help="tree: folder to write (default lineage)")


def run(args: argparse.Namespace) -> int:
    _refuse(args)
    return {"awm": _awm, "huref": _huref, "tree": _tree}[args.what](args)


_OF = {"data": "huref", "tokens": "huref", "save": "huref"}


def _refuse(args: argparse.Namespace) -> None:
    """UserError for options that do not fit together."""
    for name, what in _OF.items():
        if getattr(args, name) is not None and args.what != what:
            raise UserError(f"--{name} {getattr(args, name)}: it belongs to megaponder lineage {what}; leave it out.")
    if args.draws < 2:
        raise ConfigError("--draws", args.draws, "a spread needs two pairings", "the nearest is 2")
    if args.count < 2:
        raise ConfigError("--count", args.count, "a correlation needs two tokens", "the nearest is 2")
    if args.data is not None and args.tokens is not None:
        raise UserError("--data and --tokens both choose tokens; leave one out.")
    if args.what == "tree" and args.mode == "official":
        raise UserError("--mode official: a tree needs scores that disguises do not change; leave it out.")
    alone = args.what == "huref" and args.save is not None
    wanted = {"awm": (2,), "huref": (1, 2) if alone else (2,)}.get(args.what, range(2, 10**6))
    if len(args.models) not in wanted:
        count = "two models or more" if args.what == "tree" else "two models"
        raise UserError(f"megaponder lineage {args.what}: it compares {count}, and {len(args.models)} is named.")
    for name in ("json", "save"):
        if getattr(args, name) is not None and not Path(getattr(args, name)).parent.is_dir():
            raise UserError(f"--{name} {getattr(args, name)}: there is no folder {Path(getattr(args, name)).parent}.")


def _awm(args: argparse.Namespace) -> int:
    from megaponder.lineage import awm, null, weights

    mode: Mode = args.mode or "official"
    a, b = (_load(path, args) for path in args.models)
    ids = weights.shared(a, b, args.by_id)
    found = awm.compare(a, b, ids, mode)
    print(f"AWM ({mode}): q {found.q:.4f}, k {found.k:.4f} over {len(found.layers)} pairs of layers")
    print(
        f"  aligned by a {found.alignment} from {len(ids[0]):,} tokens; mean |cosine| {found.agreement:.3f}, "
        f"{found.flipped} of {min(a.width, b.width)} signs flipped"
    )
    moved = [f"{s.first}-{s.second}" for s in found.layers if s.first != s.second]
    if moved:
        print(f"  layers that changed places: {', '.join(moved)}")
    random = null.of_awm(a, b, ids, mode, args.draws)
    layers = [vars(s) for s in found.layers]
    return _said(args, f"awm {mode}", found.score, random, {"layers": layers, "alignment": found.alignment})


def _huref(args: argparse.Namespace) -> int:
    from megaponder.lineage import huref, null

    sources = [huref.read(Path(p)) if p.endswith(".npz") else _load(p, args) for p in args.models]
    prints = _fingerprints(sources, args)
    if args.save is not None:
        huref.save(prints[0], Path(args.save))
        print(f"{args.save}: the terms of {prints[0].name} at {len(prints[0].ids):,} tokens; keep it as private as it.")
    if len(prints) == 1:
        return 0
    found = huref.compare(prints[0], prints[1])
    names = [f"{name} {c:.4f}" for name, c in zip(huref.TERMS * huref.LAYERS, found.correlations, strict=False)]
    print(f"HuRef ({prints[0].mode}): {', '.join(names)} at {found.tokens:,} tokens")
    told = {"correlations": found.correlations, "tokens": found.tokens}
    return _said(args, f"huref {prints[0].mode}", found.score, null.of_huref(prints[0], prints[1], args.draws), told)


def _load(path: str, args: argparse.Namespace) -> Model:
    from megaponder.lineage import weights

    return weights.load(path, args.tokenizer)


def _fingerprints(sources: list[Any], args: argparse.Namespace) -> list[Any]:
    """Of models over tokens that all share, or over those of a fingerprint that was read."""
    from megaponder.lineage import huref

    if made := next((s for s in sources if isinstance(s, huref.Fingerprint)), None):
        if args.mode not in (None, made.mode):
            raise UserError(f"--mode {args.mode}: {made.name}'s fingerprint has {made.mode} terms; leave it out.")
        if args.data is not None or args.tokens is not None:
            raise UserError("--data and --tokens: a fingerprint has its own tokens; leave them out.")
        return [s if isinstance(s, huref.Fingerprint) else huref.of_tokens(s, made) for s in sources]
    order = None
    if args.data is not None:
        order = huref.by_frequency(args.data, len(sources[0].embedding))
    elif args.tokens is not None:
        order = huref.listed(Path(args.tokens))
    ids = huref.choose(sources[0], sources[-1], args.count, order, args.by_id)
    mode: Mode = args.mode or "official"
    return [huref.fingerprint(model, rows, mode) for model, rows in zip(sources, ids, strict=False)]


def _said(args: argparse.Namespace, kind: str, score: float, random: Null, told: dict[str, Any]) -> int:
    """Print and write a score beside its null; returns the exit code."""
    from megaponder import files
    from megaponder.lineage import null

    word = null.verdict(score, random)
    print(
        f"score {score:.4f}; tokens paired at random {random.mean:.4f} +- {random.sd:.4f} "
        f"({len(random.scores)} draws); z {random.z(score):.1f}: {word}"
    )
    if args.json is not None:
        measured = {"score": score, "null": random.scores, "z": random.z(score), "verdict": word}
        files.write_json(args.json, {"models": args.models, "kind": kind, **measured, **told})
    return CODES[word]


def _tree(args: argparse.Namespace) -> int:
    from megaponder.lineage import picture, tree

    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: a file has this name; name a folder.")
    models = [tree.node(path, args.tokenizer) for path in args.models]
    found = tree.grow(models, args.by_id, args.draws)
    for line in tree.lines(found):
        print(line)
    paths = picture.write(out, found)
    if args.json is not None:
        from megaponder import files

        files.write_json(args.json, tree.plain(found))
    print(f"{paths[-1]}: open it in a browser; figure in {out / 'tree.png'}.")
    return int(any(check.kind == "disagrees" for check in found.checks))
