"""`megaponder prepare`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands
from megaponder.data.info import learnt, spellings

SUMMARY = "turn text into an indexed dataset"

EPILOG = """\
examples
  megaponder prepare pile/*.jsonl.zst --tokenizer neox/tokenizer.json --output data/pile
  megaponder prepare notes/ --tokenizer bytes --txt-split blank --output data/notes
  megaponder prepare alpaca.json chats.jsonl --template chatml --tokenizer qwen/ --output data/sft
  megaponder prepare c4.jsonl.gz --field content --on-error skip --tokenizer llama/ --output data/c4

It writes data/pile.bin and data/pile.idx, which megatron-core and related tools read, and data/pile.json, which holds
tokenizer, vocabulary size, EOD id, counts and source files.  The bytes do not depend on --workers.

documents    .jsonl: the text field of each line.  .json: of each item of a list.  .parquet: the text column of each
             row.  .txt: see --txt-split.  Files may be compressed as .gz or .zst.  A folder stands for all such files
             below it except .json, in order of their paths.  A document without any token is skipped and counted.
chats        With --template a line or item is a conversation: {"messages": [{"role", "content"}]}, {"conversations":
             [{"from", "value"}]} or {"instruction", "input", "output"}.  data/sft.mask then marks the tokens that
             are learnt: those of the assistant, with the token that ends each answer (docs/sft.md).
end          Every document ends with one EOD: the token named by --eod, otherwise the tokenizer's own end-of-sequence
             token, otherwise the first of <|endoftext|>, </s> and the like.  If a text spells it out, it stays text;
             with --special-spellings token it becomes the token, and a text that ends with it gets no second one.
interrupted  Ctrl-C, a crash or kill -9 leave data/pile.partial; the same command continues from there.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("prepare", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file or folder")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the dataset without .bin/.idx")
    parser.add_argument(
        "--tokenizer", required=True, metavar="PATH", help='tokenizer.json, .model, a folder with one, or "bytes"'
    )
    parser.add_argument("--eod", metavar="TOKEN", help="token that ends every document")
    parser.add_argument("--no-append-eod", dest="append_eod", action="store_false", help="add no EOD to documents")
    parser.add_argument(
        "--special-tokens", action="store_true", help="let the tokenizer's template add BOS/EOS to each document"
    )
    parser.add_argument(
        "--special-spellings", choices=("text", "token"), default="text",
        help="a special token such as <|endoftext|> that is spelled out in a text is encoded as text "
        "(text, the default), or becomes the token (token), which may split a document",
    )  # fmt: skip
    parser.add_argument(
        "--field",
        default="text",
        help="field or column with the text (default: text), or of conversations with the messages",
    )
    parser.add_argument(
        "--template", metavar="T",
        help="the inputs are conversations: alpaca, chatml, tokenizer (its folder's chat template), or a Jinja file",
    )  # fmt: skip
    parser.add_argument(
        "--txt-split", default="file", metavar="RULE",
        help="a document of a .txt file is the whole file (file, the default), each line (line), the parts between "
        "blank lines (blank), or between lines that equal RULE",
    )  # fmt: skip
    parser.add_argument(
        "--on-error", choices=("fail", "skip"), default="fail",
        help="invalid UTF-8 or JSON, or a missing or non-string text: stop with file and line (fail, the default), or "
        "skip and count the document (skip)",
    )  # fmt: skip
    parser.add_argument(
        "--max-document", type=int, default=256, metavar="MIB", help="largest document, decompressed (default 256)"
    )
    parser.add_argument(
        "--zstd-window", type=int, default=128, metavar="MIB",
        help="largest window that a .zst file may require (default 128; files made with `zstd --long=31` need 2048)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenize; default: all CPUs")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset of that name")
    parser.add_argument("--restart", action="store_true", help="discard what an interrupted run left")


def run(args: argparse.Namespace) -> int:
    from megaponder.data.prepare import PrepareOptions, prepare
    from megaponder.data.progress import show_progress

    names = PrepareOptions.__dataclass_fields__
    options = PrepareOptions(**{name: value for name, value in vars(args).items() if name in names})
    with show_progress() as on_progress:
        done = prepare(options, on_progress)
    meta, rate = done.meta, done.text_bytes / max(done.seconds, 1e-9) / 1e6
    print(f"{done.prefix}: {meta.documents:,} documents, {meta.tokens:,} tokens ({meta.dtype}), EOD {meta.eod_id}")
    print(f"{done.text_bytes / 1e6:.3g} MB of text in {done.seconds:.1f} s ({rate:.2g} MB/s)", end="")
    print(f"; {done.resumed_documents:,} documents came from an earlier run" if done.resumed_documents else "")
    for reason, count in meta.skipped.items():
        print(f"skipped {count:,} documents: {reason}")
    if meta.spelled:
        print(spellings(meta))
    if meta.conversations is not None:
        print(learnt(meta))
    if done.unended:
        print(
            f"warning: {done.unended:,} answers end with no special token, so a model does not learn to stop after "
            "them; let the template write one behind each answer"
        )
    for example in done.examples:
        print(f"  {example}")
    return 0
