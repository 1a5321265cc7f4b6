"""Which method is worth its passes: the same text, order, tokens and schedule for all, one JSON a row.

    python -m benchmarks.study --corpus CORPUS --list
    python -m benchmarks.study --corpus CORPUS --rows 'vanilla*.lr0.003.seed1' loop ponderlm --parallel 7 --minutes 9
    python -m benchmarks.study --corpus CORPUS --size tiny --rows ponderlm     (two CPU cores, some seconds)

CORPUS is a folder with train.jsonl and heldout.jsonl (also .gz, .zst, .xz): a line has `text` and may have `source` and
`cat`.  The tokenizer learns from that text; it and the indexed datasets are made once in the work folder.  Rows whose
JSON lies in the folder of results are not run again; one that was cut off goes on from its checkpoint in the work
folder.  --rows takes names without the size, patterns of them, or kinds (their first row); none: all, in the order of
--list.  --report draws what is there.

With --flops each row has as many tokens as so many training FLOPs buy, and the report compares all rows that spent them
(within 5 %):

    python -m benchmarks.study --corpus CORPUS --flops 19.4e15 --rows vanilla-deeper.lr0.012.seed1 loop
    python -m benchmarks.study --flops 19.4e15 --report
"""

from __future__ import annotations

import fnmatch
import signal
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.command import RESULTS, folder, number, parser, script, typed
from benchmarks.study import answers, queue, report
from benchmarks.study import corpus as texts
from benchmarks.study import run as rows_run
from benchmarks.study.rows import SIZES, Row, rows
from megaponder.errors import UserError

say = partial(print, flush=True)


def chosen(size: str, tokens: int | None, patterns: list[str] | None, flops: float | None = None) -> list[Row]:
    """The rows that the patterns name, in their order, for so many training FLOPs where they are given.

    UserError for a pattern that names none.
    """
    every = rows(size, tokens)
    if not patterns:
        return every if flops is None else [row.spending(flops) for row in every]
    found: list[Row] = []
    for pattern in patterns:
        short = {row.short: row for row in every}
        plain = next((row.short for row in every if row.kind.name == pattern), None)  # a kind: its first row
        names = [plain] if plain else [n for n in short if fnmatch.fnmatchcase(n, pattern)]
        if not names:
            raise UserError(f"--rows {pattern}: no row of size {size} has such a name; --list shows them.")
        found += [short[n] for n in names]
    unique = list({row.name: row for row in found}.values())
    return unique if flops is None else [row.spending(flops) for row in unique]


def job_of(row: Row, task: dict, run: Path) -> queue.Job:  # type: ignore[type-arg]
    """The row for the queue, with the training FLOPs that it still needs and the memory that it takes."""
    from megaponder.config.load import from_mapping
    from megaponder.config.resolve import resolve
    from megaponder.plan.build import own_parameters
    from megaponder.plan.flops import mean_needed
    from megaponder.plan.memory import Job, fullest
    from megaponder.ponder.facts import facts_of
    from megaponder.ponder.settings import method_of

    cfg = resolve(from_mapping(task["config"]))
    method = method_of(cfg)
    saved = sorted((Path(cfg.run) / "checkpoints").glob("step_*"))
    done = int(saved[-1].name[5:]) / row.steps if saved else 0.0
    own = own_parameters(method, cfg.model.num_layers or 0)
    planned = fullest(Job(cfg, facts_of(method, row.seed), method.longest(row.seed), 1, own, te=True))
    flops = mean_needed(cfg, method) * row.tokens * (1 - done)
    return queue.Job(row.name, run / "row.json", run / "row.log", flops, queue.MORE * planned + queue.CONTEXT)


@script
def main(argv: list[str] | None = None) -> None:
    import torch

    options = parser("study", __doc__)
    options.add_argument("--corpus", type=Path, metavar="FOLDER", help="the text")
    options.add_argument(
        "--bytes",
        type=number(1.0),
        metavar="N",
        help="train on the first N bytes of all sources, of each at least one document",
    )
    options.add_argument("--size", choices=list(SIZES), default="6x256", help="backbone; default: 6x256")
    options.add_argument("--tokens", type=number(1), metavar="N", help="training tokens; default: the size's")
    options.add_argument("--flops", type=number(1.0), metavar="F", help="training FLOPs of each row, for --tokens")
    options.add_argument("--rows", nargs="+", metavar="NAME", help="names of rows, or patterns")
    options.add_argument("--list", action="store_true", help="show the rows and what is known of them, and stop")
    options.add_argument(
        "--parallel", type=number(1), metavar="N", help="rows at a time; default: 7 for each GPU, else 1"
    )
    options.add_argument("--minutes", type=number(0.1), metavar="M", help="time that there is; default: no limit")
    options.add_argument("--work", type=folder, default=Path("runs/study"), help="runs; default: %(default)s")
    options.add_argument("--out", type=folder, default=RESULTS / "study", help="results; default: %(default)s")
    options.add_argument("--pack", type=folder, metavar="FOLDER", help="write the corpus's part as a folder, and stop")
    options.add_argument("--report", action="store_true", help="write figure and tables of the results, and stop")
    args = options.parse_args(argv)
    begin = time.monotonic()
    if args.tokens and args.flops:
        raise UserError("--flops and --tokens exclude each other: --flops chooses the tokens of each row.")
    if args.report:
        say(f"{report.write(args.out, args.size, args.tokens, args.flops)[-1]}: open it in a browser.")
        return
    wanted = chosen(args.size, args.tokens, args.rows, args.flops)
    if args.list:
        for row in wanted:
            state = "done" if (args.out / f"{row.name}.json").is_file() else row.kind.impossible or "to do"
            say(f"{row.name:60} {state}")
        return
    if args.corpus is None:
        raise UserError("--corpus is missing: name a folder with train.jsonl and heldout.jsonl.")
    if args.pack:
        say(f"{texts.pack(args.corpus, args.bytes, args.pack)}: packed.")
        return
    text = texts.ready(args.corpus, args.bytes, SIZES[args.size].vocab - 1, args.work)
    epochs = answers.span([row.tokens / text.train_tokens for row in wanted])
    say(
        f"{text.folder}: {text.train_bytes / 1e6:.1f} MB of text ({text.share:.0%} of the corpus), "
        f"{text.train_tokens:,} tokens, so {epochs} epochs; ready after {time.monotonic() - begin:.0f} s."
    )
    cuda = torch.cuda.is_available()
    words = typed("study", argv)
    jobs = []
    for row in wanted:
        out, run = args.out / f"{row.name}.json", args.work / row.name
        if out.is_file():
            say(f"{row.name}: done before.")
        elif row.kind.impossible:
            say(f"{row.name}: not possible yet: {row.kind.impossible}.")
        else:
            task = rows_run.task(row, text, run, out, cuda, words)
            queue.write(run / "row.json", task)
            jobs.append(job_of(row, task, run))
    minutes = None if args.minutes is None else args.minutes - (time.monotonic() - begin) / 60
    gpus = max(1, torch.cuda.device_count())
    rate = queue.RATES["cuda" if cuda else "cpu"] * gpus
    room = float(torch.cuda.mem_get_info()[1]) if cuda else float("inf")
    done = queue.run(jobs, args.parallel or (7 * gpus if cuda else 1), minutes, rate, say, gpus, room)
    if len(done) < len(jobs):
        say(f"{len(jobs) - len(done)} of {len(jobs)} rows remain; the same command goes on.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that the rows are told
    sys.exit(main())
