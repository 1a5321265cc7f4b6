"""`megaponder export`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands, add_plugin

SUMMARY = "write a checkpoint as a Hugging Face folder, and check its logits"

EPILOG = """\
examples
  megaponder export runs/first hf/first                     the newest checkpoint of a run
  megaponder export runs/first/checkpoints/step_00001000 hf/step1000 --dtype bfloat16
  megaponder export runs/ada hf/ada --refit data/wiki       the budget's threshold is set anew on held-out text
  megaponder export runs/loop hf/plain --target unrolled    a looped model for engines that know no loops

The folder holds safetensors, configuration, tokenizer and, for pondering models, its modelling code:

  from transformers import AutoModelForCausalLM
  AutoModelForCausalLM.from_pretrained("hf/first", trust_remote_code=True)

Vanilla models become folders of their family (GPT-NeoX, Llama, Qwen2, ...) that need no remote code.  The folder is
loaded again and its logits are compared with the checkpoint's; it is not published if they differ.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("export", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or run folder (its newest one)")
    parser.add_argument("out", metavar="OUT", help="output folder; it must not exist")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer to copy; default: data.tokenizer of the run")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="number format; default: the checkpoint's"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the moving average of the weights (optimizer.ema_decay), in FP32"
    )
    parser.add_argument(
        "--refit", metavar="PREFIX",
        help="for a model with a budget (ponder.options.target): a held-out dataset of `megaponder prepare`, on which "
        "the threshold is set so that tokens spend the budget in the mean",
    )  # fmt: skip
    parser.add_argument(
        "--refit-tokens", type=int, default=16384, metavar="N", help="tokens of it that are read (default 16384)"
    )
    parser.add_argument(
        "--target", choices=("unrolled", "nanbeige", "ouro", "huginn_raven", "vllm"),
        help="for engines that run no code from the folder: a copy of the layers for each pass (unrolled), or the "
        "format of the public Nanbeige, Ouro or Huginn models (docs/serving.md, docs/looped.md); vllm: the usual "
        "folder, with a second head where passes read it, as vLLM's transformers backend needs it",
    )  # fmt: skip
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja file; default: that of the tokenizer's folder")
    parser.add_argument("--license", metavar="NAME", help="licence of the weights, for the model card, as apache-2.0")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="X",
        help="largest difference of logits, as a fraction of the largest logit (default 1e-4)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from functools import partial

    from megaponder.errors import ConfigError
    from megaponder.export.to_hf import export

    refit = None
    if args.refit_tokens < 1:
        raise ConfigError("--refit-tokens", args.refit_tokens, "it must be at least 1", "use 16384")
    if args.refit is not None:
        from megaponder.inference.refit import refit as threshold

        refit = partial(threshold, prefix=args.refit, tokens=args.refit_tokens)
    print(
        export(
            args.checkpoint,
            args.out,
            tokenizer_path=args.tokenizer,
            dtype=args.dtype,
            target=args.target,
            chat_template=args.chat_template,
            licence=args.license,
            force=args.force,
            tolerance=args.tolerance,
            refit=refit,
            ema=args.ema,
        )
    )
    return 0
