# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `domino-spec`.

domino-spec demo                              watch the embedded draft at work, then see what it gains
domino-spec generate "Why is the sky blue?"   one answer, or a conversation
domino-spec info DRAFT --target TARGET        what a draft is, and what a round costs
domino-spec bench --prompts a.jsonl           measure acceptance, speed and equality of the output
domino-spec doctor TARGET DRAFT               find out why the acceptance length is low
domino-spec regenerate --output a.jsonl ...   have the target write text to train on
domino-spec train recipe.yaml                 train a draft, or an adapter for one
domino-spec export DRAFT FOLDER --format F    write a draft as another engine wants it
domino-spec import DRAFT FOLDER               read another engine's draft
domino-spec check-serving FOLDER              will SGLang serve this folder?
domino-spec load --server URL ...             measure a running server

`domino-spec COMMAND --help` has examples. Exit status: 0 done, 1 done and something is wrong with what was measured,
2 not done, with one line on standard error that says why.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from .evaluation import answer, benchmark, cost, demo, report
from .evaluation.benchmark import InputError
from .training import regenerate


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all other errors of the command."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")


# Each module has `add_arguments(parser)` and `run(args)`, which returns the exit status; its docstring is the help.
_COMMANDS: dict[str, tuple[str, ModuleType]] = {
    "demo": ("watch the embedded draft at work, then see what it gains", demo),
    "generate": ("answer a prompt, or hold a conversation", answer),
    "info": ("what a draft is, and what a round with it costs", cost),
    "bench": ("measure acceptance, speed and equality of the output", benchmark),
    "regenerate": ("have the target write text to train on", regenerate),
}
_EPILOGS = {"bench": report.QUANTITIES}


def build_parser() -> argparse.ArgumentParser:
    """The parser of `domino-spec`; the chosen command's function is stored as `run`."""
    parser = _Parser(prog="domino-spec", description="Domino speculative decoding: try, measure, train, serve.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (summary, module) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            epilog=_EPILOGS.get(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    # Its arguments are those of a recipe, which transformers' parser reads, `--help` included.
    train = commands.add_parser("train", help="train a draft, or an adapter for one", add_help=False)
    train.set_defaults(run=run_train)
    return parser


def run_train(args: argparse.Namespace) -> int:
    """Trains as the recipe says, see [`training.recipe`]."""
    # Needs packages that the other commands do without.
    from .training import recipe

    return recipe.main(args.rest)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs one command.

    Args:
        argv: arguments without the program's name; default: those of the process.

    Returns:
        The exit status: the command's own, or 2 with one line on standard error if it cannot be carried out.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold characters that the terminal lacks
    try:
        args, rest = build_parser().parse_known_args(argv)
        if rest and args.run is not run_train:
            raise InputError(f"unrecognized arguments: {' '.join(rest)} (see `domino-spec --help`)")
        args.argv, args.rest = argv, rest
        return args.run(args)
    except KeyboardInterrupt:
        print("\ndomino-spec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has closed it (`| head`); the interpreter's own last flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, OSError, ValueError) as error:
        if os.environ.get("DOMINO_SPEC_TRACEBACK"):
            raise
        print(f"domino-spec: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
