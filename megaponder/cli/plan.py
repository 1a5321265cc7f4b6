"""`megaponder plan`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands, add_engine, with_engine
from megaponder.config.gpus import DEFAULT_GPU, GPUS

SUMMARY = "what a run would need: layout, parameters, FLOPs by pass, memory per GPU, time"
OVERRIDES = True

EPILOG = """\
examples
  megaponder plan configs/llama-1.4b-ponderlm.yaml --world-size 64
  megaponder plan configs/llama-1.4b-ponderlm.yaml --world-size 2048 --mfu 0.45 --gpu h200 \\
      --parallel.tensor 2 --parallel.pipeline 8 --train.global_batch 2048
  megaponder plan --presets
  megaponder plan --methods

It needs neither a GPU nor a process group: any layout can be planned anywhere, and every rule is checked.  Overrides of
the configuration work as in `megaponder train`.  MFU counts needed FLOPs (each pass once, causal half, no recompute)
against the dense BF16 peak.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help=SUMMARY,
        description="Print what a run would need, without starting anything.",
        usage="megaponder plan CONFIG [--world-size N] [--mfu X] [--gpu NAME] [--json] [--section.field value ...]",
        epilog=EPILOG,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file; see configs/")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="GPUs; default: one replica (tensor x context x pipeline)"
    )
    add_engine(parser)
    parser.add_argument("--mfu", type=float, default=0.4, metavar="X", help="model FLOPs utilisation (default 0.4)")
    parser.add_argument("--gpu", choices=tuple(GPUS), default=DEFAULT_GPU, help=f"device (default {DEFAULT_GPU})")
    parser.add_argument("--json", action="store_true", help="print plain data instead of tables")
    parser.add_argument("--presets", action="store_true", help="list the named backbones and stop")
    parser.add_argument("--methods", action="store_true", help="list the pondering methods with their options and stop")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megaponder.errors import ConfigError

    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    if args.presets or args.methods:
        from megaponder.config.load import load_config
        from megaponder.plan.catalog import print_methods, print_presets

        if (plugin := load_config(args.config, args.overrides).ponder.plugin) is not None:
            from megaponder.ponder.plugins import load_plugin

            load_plugin(plugin)
        (print_presets if args.presets else print_methods)(console)
        return 0
    if not 0 < args.mfu <= 1:
        raise ConfigError("--mfu", args.mfu, "it must be more than 0 and at most 1", "use 0.4")
    from megaponder.cli.configuration import of_data, planned
    from megaponder.config.rules.run import tuned_wider

    cfg, method, facts, world_size = planned(args.config, with_engine(args), args.world_size, GPUS[args.gpu])
    from megaponder.plan.build import build_plan
    from megaponder.plan.report import print_plan

    plan = build_plan(cfg, method, facts, world_size, args.mfu, GPUS[args.gpu])
    notes = [*filter(None, [tuned_wider(cfg)]), *of_data(cfg)]
    if args.json:
        import json

        print(json.dumps(plan.as_dict() | {"notes": notes}, indent=2))
    else:
        print_plan(cfg, plan, console)
        for sentence in notes:
            console.print(sentence)
    return 0
