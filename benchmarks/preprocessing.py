"""How fast `prepare` makes an indexed dataset, against a loop that gives the tokenizer one document at a time.

    python -m benchmarks.preprocessing                                     the standard library's sources
    python -m benchmarks.preprocessing a.jsonl --tokenizer tokenizer.json --megabytes 20

Every round runs all contenders on the same file, one after the other, and ratios are taken inside a round, so that a
machine that is busy slows them alike.  Writes preprocessing.{json,md} into the folder of results.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import orjson
import tokenizers

from benchmarks.command import add_output, number, parser, script, write
from megaponder.data.documents import TxtRule, documents
from megaponder.data.indexed import best_dtype, write_index
from megaponder.data.prepare import PrepareOptions, prepare
from megaponder.data.readers import Position, kind_of, list_inputs, read_chunks
from megaponder.data.tokenizer import load_tokenizer
from megaponder.errors import UserError

EOD = "<|endoftext|>"


def standard_library() -> list[str]:
    """Sources of the Python standard library, one text a file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    return [p.read_text(encoding="utf-8", errors="replace") for p in paths]


def texts_of(inputs: list[str]) -> list[str]:
    """All documents of the input files (.txt: a line each)."""
    files, rule = list_inputs(inputs), TxtRule("line")
    return [
        item
        for read in read_chunks(files, Position(), "text", rule)
        for _, item in documents(read.chunk, kind_of(files[read.chunk.file]) or "", "text", rule)
        if isinstance(item, str)
    ]


def write_corpus(texts: list[str], path: Path, megabytes: float) -> list[str]:
    """Write texts as JSON lines until there are `megabytes` (each at most once); returns those."""
    size, used = 0, []
    with path.open("wb") as out:
        for text in texts:
            if size >= megabytes * 1e6:
                break
            out.write(orjson.dumps({"text": text}) + b"\n")
            size += len(text.encode())
            used.append(text)
    return used


def check_tokenizer(path: str) -> None:
    """UserError unless the plain loop can use it."""
    if load_tokenizer(path).kind != "huggingface" or not Path(path).is_file():
        raise UserError(f"{path}: the plain loop reads a file tokenizer.json; give one.")
    if tokenizers.Tokenizer.from_file(path).token_to_id(EOD) is None:
        raise UserError(f"{path}: it has no token {EOD}, which ends the documents here; give one that has.")


def train_tokenizer(texts: Iterable[str], path: Path) -> None:
    """A byte-level BPE of 16k ids on the corpus itself."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=16384, special_tokens=[EOD], show_progress=False)
    tokenizer.save(str(path))


def one_by_one(corpus: Path, tokenizer_file: Path, prefix: Path) -> None:
    """The plain loop: read a line, tokenize it, write it.  Same reading of JSON, same files written."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    eod, dtype = tokenizer.token_to_id(EOD), best_dtype(tokenizer.get_vocab_size())
    lengths = []
    with corpus.open("rb") as lines, open(f"{prefix}.bin", "wb") as out:
        for line in lines:
            ids = tokenizer.encode(orjson.loads(line)["text"], add_special_tokens=False).ids
            if ids:
                ids.append(eod)
                out.write(np.array(ids, dtype).tobytes())
                lengths.append(len(ids))
        out.flush()
        os.fsync(out.fileno())
    write_index(f"{prefix}.idx", dtype, np.array(lengths, np.int32))


def measure(corpus: Path, tokenizer: Path, folder: Path, rounds: int, workers: list[int]) -> dict[str, list[float]]:
    """Seconds of each contender in each round; also checks that all wrote the same bytes."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        written = []
        for name in ["one by one", *(f"prepare, {n} worker{'s' * (n > 1)}" for n in workers)]:
            prefix = folder / name.replace(" ", "-")
            began = time.perf_counter()
            if name == "one by one":
                one_by_one(corpus, tokenizer, prefix)
            else:
                count = int(name.split()[1])
                prepare(PrepareOptions([str(corpus)], str(prefix), str(tokenizer), workers=count, overwrite=True))
            seconds.setdefault(name, []).append(time.perf_counter() - began)
            written.append([Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")])
        if any(files != written[0] for files in written):
            raise SystemExit("error: the contenders wrote different datasets; these times mean nothing.")
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "# Preprocessing",
        "",
        f"{result['megabytes']:.1f} MB of text ({result['corpus']}), tokenizer {result['tokenizer']} with "
        f"{result['vocab_size']:,} ids, {result['rounds']} rounds, all contenders in each round; all wrote the "
        f"same bytes.",
        f"{result['machine']}, load average {result['load_before']:.1f} before and {result['load_after']:.1f} after.",
        "",
        "| | seconds, median (range) | MB/s | against one by one, median (range) |",
        "|---|---|---|---|",
    ]
    for name, row in result["contenders"].items():
        s, r = row["seconds"], row["ratio"]
        lines.append(
            f"| {name} | {s['median']:.2f} ({s['min']:.2f} to {s['max']:.2f}) | "
            f"{result['megabytes'] / s['median']:.2f} | {r['median']:.2f}x ({r['min']:.2f} to {r['max']:.2f}) |"
        )
    if "scaling" in result:
        r = result["scaling"]
        lines += ["", f"From 1 to 2 workers: {r['median']:.2f}x ({r['min']:.2f} to {r['max']:.2f})."]
    lines += ["", "Times include starting the processes and loading the tokenizer in each.", ""]
    return "\n".join(lines)


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("preprocessing", __doc__)
    options.add_argument("inputs", nargs="*", help="text files; default: the standard library's sources")
    options.add_argument("--tokenizer", help="tokenizer.json; default: a BPE of 16k ids trained on the text")
    options.add_argument("--megabytes", type=number(0.001), default=16.0, help="text to use; default: 16")
    options.add_argument("--rounds", type=number(1), default=3, help="runs of each contender; default: 3")
    options.add_argument("--workers", type=number(1), nargs="+", default=[1, 2], help="of `prepare`; default: 1 2")
    add_output(options)
    args = options.parse_args(argv)
    if args.tokenizer:
        check_tokenizer(args.tokenizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = texts_of(args.inputs) if args.inputs else standard_library()
        if not any(texts):
            raise UserError(f"{', '.join(args.inputs)}: there is no text in it; name files that hold some.")
        texts = write_corpus(texts, folder / "corpus.jsonl", args.megabytes)
        tokenizer = Path(args.tokenizer) if args.tokenizer else folder / "tokenizer.json"
        if not args.tokenizer:
            train_tokenizer(texts, tokenizer)
        load = os.getloadavg()[0]
        seconds = measure(folder / "corpus.jsonl", tokenizer, folder, args.rounds, list(dict.fromkeys(args.workers)))
        base, (one, two) = seconds["one by one"], (seconds.get(f"prepare, {k}") for k in ("1 worker", "2 workers"))
        result = {
            "corpus": ", ".join(Path(i).name for i in args.inputs) or "Python standard library",
            "megabytes": sum(len(text.encode()) for text in texts) / 1e6,
            "tokenizer": Path(args.tokenizer).name if args.tokenizer else "byte-level BPE trained on the corpus",
            "vocab_size": tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab_size(),
            "rounds": args.rounds,
            "machine": f"{os.cpu_count()} CPUs ({platform.machine()}), Python {platform.python_version()}, tokenizers "
            f"{tokenizers.__version__}",
            "load_before": load,
            "load_after": os.getloadavg()[0],
            "contenders": {
                key: {
                    "seconds": spread(values),
                    "ratio": spread([b / v for b, v in zip(base, values, strict=True)]),
                    "rounds": values,
                }
                for key, values in seconds.items()
            },
        }
        if one and two:
            result["scaling"] = spread([a / b for a, b in zip(one, two, strict=True)])
    write(args.output, "preprocessing", result, report(result))
    print(report(result))


if __name__ == "__main__":
    sys.exit(main())
