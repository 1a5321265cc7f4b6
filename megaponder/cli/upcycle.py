"""`megaponder upcycle`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands, add_plugin
from megaponder.errors import ConfigError, UserError

SUMMARY = "make a mixture of experts of dense models that share a base, or a dense model of such a mixture"

EPILOG = """\
examples
  megaponder upcycle split --base runs/base --experts math=runs/math law=runs/law --slices 8 --out runs/mixture
  megaponder upcycle merge runs/mixture --out runs/dense
  megaponder upcycle merge runs/mixture --take math --out runs/math-again

split: the base's MLP becomes the shared expert, each discipline's is cut into slices, the experts, of which a row takes
as many as make up one MLP.  Disciplines are copies of the base that were trained with train.only: [mlp].  --init says
what shared expert and slices add up to at first: average (half of each), sum, damped (slices times --beta).
merge: the inverse.  OUT is a run with one checkpoint without optimizer state, and OUT/config.yaml starts a training
from it.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("upcycle", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument("what", choices=("split", "merge"), help="dense models to a mixture, or back")
    parser.add_argument("mixture", metavar="MIXTURE", nargs="?", help="merge: run or checkpoint of a mixture")
    parser.add_argument("--out", metavar="OUT", required=True, help="run folder to write")
    parser.add_argument("--base", metavar="RUN", help="split: run or checkpoint of the dense base")
    parser.add_argument("--experts", metavar="NAME=RUN", nargs="+", help="split: disciplines, copies of the base")
    parser.add_argument("--slices", type=int, metavar="K", help="split: experts of a discipline (default 8)")
    parser.add_argument("--init", metavar="HOW", help="split: average (default), sum or damped")
    parser.add_argument("--beta", type=float, metavar="B", help="split: factor of --init damped (default 0)")
    parser.add_argument("--slicing", metavar="HOW", help="split: contiguous (default) or random neurons")
    parser.add_argument("--seed", type=int, metavar="N", help="split: of routers and random slices (default 1234)")
    parser.add_argument("--take", metavar="NAME", help="merge: a discipline (default: shared)")


OPTIONS = {"split": ("slices", "init", "beta", "slicing", "seed"), "merge": ("take",)}


def run(args: argparse.Namespace) -> int:
    other = "merge" if args.what == "split" else "split"
    for name in (*OPTIONS[other], *(("base", "experts") if other == "split" else ("mixture",))):
        if getattr(args, name) is not None:
            flag = "MIXTURE" if name == "mixture" else f"--{name}"
            raise UserError(f"{flag} {getattr(args, name)}: it belongs to megaponder upcycle {other}; leave it out.")
    given = {name: getattr(args, name) for name in OPTIONS[args.what] if getattr(args, name) is not None}
    if args.what == "merge":
        if args.mixture is None:
            raise UserError("megaponder upcycle merge: name the mixture, as in upcycle merge RUN --out OUT.")
        from megaponder.upcycle.merge import merge

        print(merge(args.mixture, args.out, **given))
        return 0
    if args.base is None or args.experts is None:
        raise UserError("megaponder upcycle split: say --base RUN and --experts NAME=RUN.")
    experts: dict[str, str] = {}
    for word in args.experts:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise ConfigError("--experts", word, "each is NAME=RUN", "for example math=runs/math")
        if name in experts:
            raise ConfigError("--experts", word, f"{name} is named twice", "give each discipline a name of its own")
        experts[name] = path
    from megaponder.upcycle.split import split

    print(split(args.base, experts, args.out, **given))
    return 0
