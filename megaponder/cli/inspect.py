"""`megaponder inspect`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megaponder.cli.parser import Commands, add_plugin
from megaponder.data.blend import prefix_of
from megaponder.errors import UserError

SUMMARY = "show what a checkpoint, a run or a dataset contains, and whether it is intact"

UNWRITTEN = "; an incompletely copied file has such regions"
EPILOG = """\
examples
  megaponder inspect data/pile                              a dataset: path without .bin/.idx
  megaponder inspect data/pile data/c4 --audit              read everything: checksums, duplicates, shares
  megaponder inspect runs/first                             the newest complete checkpoint of a run
  megaponder inspect runs/first/checkpoints/step_00001000 --tensors
  megaponder inspect runs/ada --depth "The capital of France is" --figure depth.png
  megaponder inspect runs/ada --depth "The capital of France is" --html depth.html

Checksums are compared: a damaged or unfinished checkpoint is named with the reason, and the exit code is 2.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("inspect", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument(
        "paths", metavar="PATH", nargs="+",
        help="dataset prefix, run folder or checkpoint folder; with --html also an exported folder",
    )  # fmt: skip
    parser.add_argument(
        "--audit", action="store_true",
        help="of one or more datasets: compare checksums, count documents that occur twice (also in two datasets), "
        "list the longest ones and what each input file contributed",
    )  # fmt: skip
    parser.add_argument("--depth", metavar="TEXT", help="show how many passes each token of TEXT runs")
    parser.add_argument("--figure", metavar="FILE", default="depth.png", help="where --depth draws (default depth.png)")
    parser.add_argument(
        "--html", metavar="FILE", help="with --depth: a page that shows each token's passes: NLL, gates, predictions"
    )
    parser.add_argument("--tokenizer", metavar="T", help="for --depth: tokenizer, if the checkpoint does not name one")
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="with --html: run an exported folder's modelling code whatever its version",
    )  # fmt: skip
    parser.add_argument("--tensors", action="store_true", help="list name, shape and type of every stored tensor")


def run(args: argparse.Namespace) -> int:
    if args.audit:
        return _audit([prefix_of(path) for path in args.paths])
    if len(args.paths) > 1:
        raise UserError(f"{args.paths[1]}: only one path can be inspected at a time; use --audit to compare several.")
    path = Path(args.paths[0])
    if args.depth is not None:
        if args.html is not None:
            return _page(path, args.depth, Path(args.html), args.tokenizer, args.trust_remote_code)
        return _depth(path, args.depth, Path(args.figure), args.tokenizer)
    if args.html is not None:
        raise UserError(f"--html {args.html}: it needs a text; add --depth TEXT.")
    prefix = Path(prefix_of(str(path)))
    if os.path.lexists(f"{prefix}.idx"):
        return _dataset(prefix)
    if path.is_dir():
        return _checkpoint(path, args.tensors)
    raise UserError(f"{path} is neither a dataset (there is no {prefix}.idx) nor a folder; {_nearby(path)}.")


def _nearby(path: Path) -> str:
    from megaponder.config.fields import nearest

    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either"
    there = sorted(p.name.removesuffix(".idx") for p in folder.iterdir() if p.is_dir() or p.suffix == ".idx")
    close = nearest(path.name, there)
    if close:
        return f"did you mean {folder / close}"
    return f"{folder} has {', '.join(there[:8]) or 'nothing of that kind'}"


def _page(path: Path, text: str, html: Path, tokenizer: str | None, trusted: bool) -> int:
    from megaponder.inference import depth_page

    if not html.parent.is_dir():
        raise UserError(f"--html {html}: there is no folder {html.parent}.")
    seen = depth_page.look(path, text, tokenizer, trusted)
    depth_page.write(seen, html)
    mean = sum(token.depth for token in seen.tokens) / len(seen.tokens)
    print(f"{html}: {len(seen.tokens)} tokens, mean depth {mean:.2f} of {seen.deepest}; open it in a browser.")
    return 0


def _depth(path: Path, text: str, figure: Path, tokenizer: str | None) -> int:
    from rich.console import Console

    from megaponder.inference import depth

    if not figure.parent.is_dir():
        raise UserError(f"--figure {figure}: there is no folder {figure.parent}.")
    depths = depth.read_depths(path, text, tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    console.print(depth.view(depths))
    if len({t.depth for t in depths.tokens}) == 1:
        console.print("\nall tokens have the same depth")
    for name, rows in zip(("most", "least"), depth.extremes(depths), strict=True):
        if rows[0][1] == rows[-1][1]:
            continue  # a list of equal depths says nothing
        listed = ", ".join(f"{text!r} {mean:.2f} ({count}x)" for text, mean, count in rows)
        console.print(f"\n{name} pondered: {listed}", markup=False)
    depth.plot(depths, figure)
    console.print(f"\nfigure: {figure}", markup=False)
    return 0


def _dataset(prefix: Path) -> int:
    from megaponder.data.info import inspect_dataset, learnt, spellings

    info = inspect_dataset(prefix)
    print(f"dataset {info.prefix}")
    print(f"  {info.documents:,} documents, {info.tokens:,} tokens ({info.dtype}, {info.bin_bytes / 1e6:,.1f} MB)")
    print(f"  sequences of {info.shortest:,} to {info.longest:,} tokens")
    if info.meta is None:
        print("  no description: written by another tool; data.eod_id and model.vocab_size must be set")
        return 0
    meta = info.meta
    print(f"  tokenizer {meta.tokenizer} ({meta.tokenizer_kind}), fingerprint {meta.tokenizer_fingerprint[:16]}")
    print(f"  vocabulary {meta.vocab_size:,}, EOD {meta.eod_id}, largest id {meta.max_id:,}")
    if meta.special_tokens:
        print("  special tokens " + ", ".join(f"{token} {i}" for token, i in meta.special_tokens.items()))
    if meta.spelled:
        print(f"  {spellings(meta)}")
    elif meta.special_spellings is None and meta.tokenizer_kind == "huggingface":
        print(
            "  prepared by an earlier version: special tokens spelled out in texts became tokens (--audit counts EOD)"
        )
    print(f"  {meta.text_bytes / 1e6:,.1f} MB of text from {len(meta.sources)} files")
    if meta.conversations is not None:
        print(f"  {learnt(meta)}; most end with id {meta.conversations.end_id}")
    for reason, count in meta.skipped.items():
        print(f"  skipped {count:,} documents: {reason}")
    return 0


def _audit(prefixes: list[str]) -> int:
    from megaponder.data.audit import audit
    from megaponder.data.progress import reading

    with reading("tokens") as on_progress:
        found = audit(prefixes, on_progress)
    total = sum(one.tokens for one in found)
    for one in found:
        share = f", {one.tokens / total:.1%} of all" if len(found) > 1 else ""
        print(f"{one.prefix}: {one.documents:,} documents, {one.tokens:,} tokens{share}")
        print("  checksums agree" if one.verified else "  no checksums: it was written by another tool or version")
        part = one.duplicate_tokens / max(1, one.tokens)
        print(f"  duplicates {one.duplicates:,} with {one.duplicate_tokens:,} tokens ({part:.1%})")
        print("  longest " + ", ".join(f"{tokens:,} tokens (number {number:,})" for tokens, number in one.longest))
        if one.empty:
            print(f"  empty {one.empty:,}")
        if one.inner_eods:
            print(f"  EOD within documents {one.inner_eods:,}: texts that spelled it out became several documents")
        if one.zeros:
            why = "" if one.verified else UNWRITTEN
            print(f"  zero-filled {one.zeros:,} tokens, the first number {one.first_zero:,}{why}")
        for source in one.meta.sources if one.meta else []:
            part = source.tokens / max(1, one.tokens)
            print(f"  {part:6.1%} from {source.path}: {source.documents:,} documents, {source.tokens:,} tokens")
    return int(any(one.zeros and not one.verified for one in found))


def _checkpoint(path: Path, tensors: bool) -> int:
    from megaponder.checkpoint import manifest, reader
    from megaponder.checkpoint.choose import locate
    from megaponder.checkpoint.info import count_parameters
    from megaponder.checkpoint.state import load_state
    from megaponder.checkpoint.weights import read_config
    from megaponder.upcycle.record import of_checkpoint

    folder = locate(path)
    state, contents = load_state(folder)
    cfg = read_config(folder)
    found = reader.parameters(folder)
    m = cfg.model
    count = sum(count_parameters(found, m.vocab_size).values())
    options = ", ".join(f"{k} {v}" for k, v in cfg.ponder.options.items())
    print(f"checkpoint {folder} (complete, {manifest.size(folder) / 1e6:,.1f} MB)")
    print(f"  step {state.step:,}, {state.sequences:,} sequences, {state.tokens:,} tokens")
    print(f"  {m.preset or m.family}: {m.num_layers} layers x {m.hidden_size}, vocabulary {m.vocab_size:,}")
    print(f"  method {cfg.ponder.method}" + (f" ({options})" if options else ""))
    print(f"  {count:,} parameters in {len(found)} tensors" + (", with optimizer state" if contents.optimizer else ""))
    saved = ", ".join(f"{name} {size}" for name, size in contents.layout.items())
    print(f"  saved at {saved}; it loads in any layout" if saved else "  it loads in any layout")
    if (record := of_checkpoint(folder)) is not None:
        print(f"  {record}")
        for one in record.disciplines:
            print(f"  {one.name}: {one.path}, sha256 {one.sha256[:16]}")
    if tensors:
        for name, meta in sorted(reader.tensors(folder).items()):
            kind = str(meta.properties.dtype).removeprefix("torch.")
            print(f"  {name}  {list(meta.size)}  {kind}")
    return 0
