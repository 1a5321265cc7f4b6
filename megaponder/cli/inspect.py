"""`megaponder inspect`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaponder.cli.parser import Commands
from megaponder.errors import UserError

SUMMARY = "say what a checkpoint, a run or a dataset holds, and whether it is whole"

EPILOG = """\
examples
  megaponder inspect data/pile                              a dataset: path without .bin/.idx
  megaponder inspect runs/first                             the newest whole checkpoint of a run
  megaponder inspect runs/first/checkpoints/step_00001000 --tensors
  megaponder inspect runs/ada --depth "The capital of France is" --figure depth.png

Checksums are compared: a damaged or unfinished checkpoint is named with the reason, and the exit code is 2.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("inspect", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    parser.add_argument("path", metavar="PATH", help="dataset prefix, run folder or checkpoint folder")
    parser.add_argument("--depth", metavar="TEXT", help="show how many passes each token of TEXT runs")
    parser.add_argument("--figure", metavar="FILE", default="depth.png", help="where --depth draws (default depth.png)")
    parser.add_argument("--tokenizer", metavar="T", help="for --depth: tokenizer, if the checkpoint names none")
    parser.add_argument("--tensors", action="store_true", help="list name, shape and type of every stored tensor")


def run(args: argparse.Namespace) -> int:
    path = Path(args.path)
    if args.depth is not None:
        return _depth(path, args.depth, Path(args.figure), args.tokenizer)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if Path(f"{prefix}.idx").is_file():
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


def _depth(path: Path, text: str, figure: Path, tokenizer: str | None) -> int:
    from rich.console import Console

    from megaponder.inference import depth

    if not figure.parent.is_dir():
        raise UserError(f"--figure {figure}: there is no folder {figure.parent}.")
    depths = depth.read_depths(path, text, tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    console.print(depth.view(depths))
    for name, rows in zip(("most", "least"), depth.extremes(depths), strict=True):
        listed = ", ".join(f"{text!r} {mean:.2f} ({count}x)" for text, mean, count in rows)
        console.print(f"\n{name} pondered: {listed}", markup=False)
    depth.plot(depths, figure)
    console.print(f"\nfigure: {figure}", markup=False)
    return 0


def _dataset(prefix: Path) -> int:
    from megaponder.data.info import inspect_dataset

    info = inspect_dataset(prefix)
    print(f"dataset {info.prefix}")
    print(f"  {info.documents:,} documents, {info.tokens:,} tokens ({info.dtype}, {info.bin_bytes / 1e6:,.1f} MB)")
    print(f"  sequences of {info.shortest:,} to {info.longest:,} tokens")
    if info.meta is None:
        print("  no description: written by another tool; data.eod_id and model.vocab_size must be given")
        return 0
    meta = info.meta
    print(f"  tokenizer {meta.tokenizer} ({meta.tokenizer_kind}), fingerprint {meta.tokenizer_fingerprint[:16]}")
    print(f"  vocabulary {meta.vocab_size:,}, EOD {meta.eod_id}, largest id {meta.max_id:,}")
    if meta.special_tokens:
        print("  special tokens " + ", ".join(f"{token} {i}" for token, i in meta.special_tokens.items()))
    print(f"  {meta.text_bytes / 1e6:,.1f} MB of text from {len(meta.sources)} files")
    for reason, count in meta.skipped.items():
        print(f"  skipped {count:,} documents: {reason}")
    return 0


def _checkpoint(path: Path, tensors: bool) -> int:
    from megaponder.checkpoint import manifest, stored
    from megaponder.checkpoint.choose import locate
    from megaponder.checkpoint.state import CONFIG, load_state
    from megaponder.config.load import load_config

    folder = locate(path)
    state, contents = load_state(folder)
    cfg = load_config(folder / CONFIG, [])
    found = stored.parameters(folder)
    count = sum(m.size.numel() for m in found.values())
    m = cfg.model
    options = ", ".join(f"{k} {v}" for k, v in cfg.ponder.options.items())
    print(f"checkpoint {folder} (whole, {manifest.size(folder) / 1e6:,.1f} MB)")
    print(f"  step {state.step:,}, {state.sequences:,} sequences, {state.tokens:,} tokens")
    print(f"  {m.preset or m.family}: {m.num_layers} layers x {m.hidden_size}, vocabulary {m.vocab_size:,}")
    print(f"  method {cfg.ponder.method}" + (f" ({options})" if options else ""))
    print(f"  {count:,} parameters in {len(found)} tensors" + (", with optimizer state" if contents.optimizer else ""))
    saved = ", ".join(f"{name} {size}" for name, size in contents.layout.items())
    print(f"  saved at {saved}; it loads at any layout" if saved else "  it loads at any layout")
    if tensors:
        for name, meta in sorted(stored.tensors(folder).items()):
            kind = str(meta.properties.dtype).removeprefix("torch.")
            print(f"  {name}  {list(meta.size)}  {kind}")
    return 0
