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
domino-spec card FOLDER --base-model ID       write the model card, and upload the folder
domino-spec completion bash                   complete these in your shell

`domino-spec COMMAND --help` has examples. Exit status: 0 done, 1 done and something is wrong with what was measured,
2 not done, with one line on standard error that says why.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import shtab

from .evaluation import answer, benchmark, cost, demo, doctor, report
from .evaluation.benchmark import InputError
from .serving import formats, hub, load, sglang
from .training import regenerate


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all other errors of the command."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")


class _Command(NamedTuple):
    """What a command is for, its arguments, what it does with them (the result is the exit status), and its help."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    description: str | None
    epilog: str | None = None


_COMMANDS = {
    "demo": _Command(
        "watch the embedded draft at work, then see what it gains", demo.add_arguments, demo.run, demo.__doc__
    ),
    "generate": _Command("answer a prompt, or hold a conversation", answer.add_arguments, answer.run, answer.__doc__),
    "info": _Command("what a draft is, and what a round with it costs", cost.add_arguments, cost.run, cost.__doc__),
    "bench": _Command(
        "measure acceptance, speed and equality of the output",
        benchmark.add_arguments,
        benchmark.run,
        benchmark.__doc__,
        report.QUANTITIES,
    ),
    "doctor": _Command("find out why the acceptance length is low", doctor.add_arguments, doctor.run, doctor.__doc__),
    "regenerate": _Command(
        "have the target write text to train on", regenerate.add_arguments, regenerate.run, regenerate.__doc__
    ),
    "export": _Command(
        "write a draft as another engine wants it", formats.add_export_arguments, formats.run_export, formats.__doc__
    ),
    "import": _Command(
        "read another project's draft", formats.add_import_arguments, formats.run_import, formats.__doc__
    ),
    "check-serving": _Command(
        "will SGLang serve this draft, and how is it started?",
        sglang.add_check_serving_arguments,
        sglang.run_check_serving,
        sglang.__doc__,
    ),
    "load": _Command(
        "measure a running server, with the draft and without",
        load.add_arguments,
        load.run,
        load.__doc__,
        load.QUANTITIES,
    ),
    "card": _Command("write the model card of a folder, and upload both", hub.add_arguments, hub.run, hub.__doc__),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of `domino-spec`; the chosen command's function is stored as `run`."""
    parser = _Parser(prog="domino-spec", description="Domino speculative decoding: try, measure, train, serve.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.summary,
            description=command.description,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    # Its arguments are those of a recipe, which transformers' parser reads, `--help` included.
    train = commands.add_parser("train", help="train a draft, or an adapter for one", add_help=False)
    train.set_defaults(run=run_train)
    completion = commands.add_parser("completion", help="print a script that completes this command in your shell")
    completion.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    completion.set_defaults(run=run_completion)
    return parser


def run_completion(args: argparse.Namespace) -> int:
    """Prints the completion script of a shell: `eval "$(domino-spec completion bash)"` in its start-up file."""
    print(shtab.complete(build_parser(), args.shell))
    return 0


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
    # Closed streams are None.
    sys.stdin, sys.stdout = sys.stdin or open(os.devnull), sys.stdout or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold characters that the terminal lacks
    try:
        args, rest = build_parser().parse_known_args(argv)
        if rest and args.run is not run_train:
            raise InputError(f"unrecognized arguments: {' '.join(rest)} (see `domino-spec --help`)")
        args.argv, args.rest = argv, rest
        status = args.run(args)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return status
    except KeyboardInterrupt:
        print("\ndomino-spec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has closed it (`| head`); the interpreter's own last flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("DOMINO_SPEC_TRACEBACK"):
            raise
        text = " ".join(str(error).split())
        if not isinstance(error, (ImportError, OSError, ValueError)):
            # None of our own words: say what it is and how to see more.
            text = f"{type(error).__name__}: {text} (DOMINO_SPEC_TRACEBACK=1 shows where it comes from)"
        print(f"domino-spec: error: {text}", file=sys.stderr)
        return 2
