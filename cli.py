# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `domino-spec`.

domino-spec demo                      watch the embedded draft at work, then see what it gains
domino-spec demo --prompt "..."       the same for one prompt of your own
domino-spec bench --prompts a.jsonl   measure acceptance, speed and equality of the output over prompt files
domino-spec regenerate --output a.jsonl --prompts p.jsonl   have the target write text to train on
domino-spec train recipe.yaml         train a draft, or an adapter for one
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .evaluation import benchmark, report
from .evaluation.benchmark import InputError, positive_int
from .evaluation.report import DOMINO, PLAIN, Prompt, PromptResult, format_number
from .training import regenerate as training_text

DEMO_PROMPTS = (
    Prompt("code", "demo", "Write a Python function that returns the second largest number in a list."),
    Prompt(
        "arithmetic",
        "demo",
        "A baker fills 12 trays with 8 rolls each and sells 70 rolls before noon. How many rolls are left?",
    ),
    Prompt("explanation", "demo", "Why does the moon seem to change its shape over a month?"),
    Prompt("story", "demo", "Tell a short story about a lighthouse keeper who makes friends with a seagull."),
)
DEMO_REPEATS = 2

_GREEN, _RESET = "\x1b[1;32m", "\x1b[0m"


class AcceptanceStreamer(BaseStreamer):
    """
    Writes an answer while it is generated, with the tokens that the draft proposed between two marks.

    It relies on how the Domino loop streams: the prompt first, then one call per round with the tokens the round
    committed, accepted proposals first and the target's own bonus token last. (In a round that an end token or the
    length limit cut short, the last token may be a proposal too; it counts as the target's here.) A character whose
    bytes are spread over several tokens is written, and marked, with the token that completes it.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
        write: takes each piece of text.
        marks: what to write before and after a stretch of accepted tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], Any], marks: tuple[str, str]):
        self.tokenizer = tokenizer
        self.write = write
        self.marks = marks
        self._reset()

    def _reset(self) -> None:
        self._prompt_expected = True
        self._marking = False
        self._tokens: list[int] = []  # of the current line; earlier lines need not be decoded again
        self._written = 0  # characters of their text that were written
        self._accepted = False  # whether the newest token was accepted

    def put(self, value: Tensor) -> None:
        """
        Takes the prompt, then the tokens of one round.

        Args:
            value: long [n] or [1, n].

        Raises:
            ValueError: if there is more than one row.
        """
        if value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(f"AcceptanceStreamer writes one row, but got a batch of {value.shape[0]}")
        if self._prompt_expected:
            self._prompt_expected = False
            return
        *accepted, bonus_token = value.flatten().tolist()
        for token in accepted:
            self._add(token, accepted=True)
        self._add(bonus_token, accepted=False)

    def end(self) -> None:
        """Writes what was held back and ends the line. The streamer can then be used for another answer."""
        self._write_text(self._decode()[self._written :])
        self._mark(False)
        self.write("\n")
        self._reset()

    def _add(self, token: int, accepted: bool) -> None:
        self._tokens.append(token)
        self._accepted = accepted
        text = self._decode()
        if text.endswith("\ufffd"):  # so far an incomplete character
            return
        self._write_text(text[self._written :])
        self._written = len(text)
        if text.endswith("\n"):
            # Some tokenizers drop the space before the first token they decode, so the newest one is kept.
            self._tokens = [token]
            self._written = len(self._decode())

    def _decode(self) -> str:
        return self.tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _write_text(self, text: str) -> None:
        if text:
            self._mark(self._accepted)
            self.write(text)

    def _mark(self, marking: bool) -> None:
        if marking != self._marking:
            self.write(self.marks[0] if marking else self.marks[1])
            self._marking = marking


def choose_marks(stream: TextIO, no_color: bool = False) -> tuple[str, str]:
    """
    Marks for accepted text on `stream`: bold green on a terminal, brackets where colour is unwanted (`no_color`, the
    environment variable NO_COLOR, a dumb terminal) or would end up in a file.
    """
    plain_wanted = no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if stream.isatty() and not plain_wanted:
        return _GREEN, _RESET
    try:
        "⟦⟧".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "{", "}"
    return "⟦", "⟧"


def format_demo_table(results: Sequence[PromptResult]) -> str:
    """One row per prompt and one over all: speeds, ratio of medians, acceptance length, equality of the output."""

    def row(name: str, members: Sequence[PromptResult]) -> list[str]:
        summary = report.summarise(members)
        plain, domino = summary["runs"][PLAIN], summary["runs"][DOMINO]
        return [
            name,
            format_number(plain["tokens_per_second"], 1),
            format_number(domino["tokens_per_second"], 1),
            format_number(domino["ratio"], 2, "x"),
            format_number(domino["acceptance_length"]["mean"]),
            "yes" if domino["identical"] == summary["prompts"] else "no",
        ]

    header = ["prompt", "tok/s plain", "tok/s domino", "ratio", "acceptance length", "identical"]
    return report.format_table(header, [row(result.prompt.id, [result]) for result in results], row("all", results))


def run_demo(args: argparse.Namespace) -> int:
    """
    Streams answers of the embedded draft with its target, then times them beside the target alone.

    Returns:
        0, or 1 if an answer differs from the target's own where the target's choice was no numeric tie.

    Raises:
        InputError: if the prompt is empty, or target or draft cannot be loaded.
    """
    prompts: Sequence[Prompt] = DEMO_PROMPTS
    if args.prompt is not None:
        if not args.prompt.strip():
            raise InputError("the prompt is empty: give some text, or leave it out for the built-in prompts")
        prompts = [Prompt("your prompt", "demo", args.prompt)]
    target, tokenizer, draft = benchmark.load_pair("default", "default", torch.float32)
    marks = choose_marks(sys.stdout, args.no_color)
    streamer = AcceptanceStreamer(tokenizer, _write, marks)
    runs = (PLAIN, DOMINO)

    print(f"\nSmolLM2-135M-Instruct with its Domino draft, greedy, float32, {torch.get_num_threads()} CPU threads.")
    print(
        f"{marks[0]}Marked like this{marks[1]}: proposed by the draft and accepted. The rest the target added itself."
    )
    benchmark.warm_up(target, draft, benchmark.encode(tokenizer, prompts[0].text), runs)
    results = []
    for index, prompt in enumerate(prompts):
        inputs = benchmark.encode(tokenizer, prompt.text)
        print(f"\n> {prompt.text}\n")
        target.generate(
            **inputs,
            assistant_model=draft,
            streamer=streamer,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
        )
        total = len(runs) * DEMO_REPEATS
        with tqdm(total=total, desc="timing plain and domino in turn", unit="call", leave=False, disable=None) as bar:
            results.append(
                benchmark.compare_runs(
                    target,
                    draft,
                    prompt,
                    inputs,
                    args.max_new_tokens,
                    repeats=DEMO_REPEATS,
                    names=runs,
                    first=index,
                    on_call=bar.update,
                )
            )

    print(f"\n{format_demo_table(results)}\n")
    print(f"tok/s: median of {DEMO_REPEATS} calls each, prompt included; acceptance length: tokens per target pass")
    for line in report.describe_differences(results):
        print(line)
    return int(report.summarise(results)["runs"][DOMINO]["unexplained"] > 0)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all other errors of the command."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `domino-spec`; the chosen subcommand's function is stored as `run`."""
    parser = _Parser(prog="domino-spec", description="Domino speculative decoding: try it, measure it.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="watch the embedded draft at work, then see what it gains")
    demo.add_argument("--prompt", metavar="TEXT", help="your own prompt instead of the built-in ones")
    demo.add_argument("--max-new-tokens", type=positive_int, default=96, help="per answer (default: %(default)s)")
    demo.add_argument("--no-color", action="store_true", help="mark accepted tokens with brackets instead of colour")
    demo.set_defaults(run=run_demo)

    bench = commands.add_parser(
        "bench",
        help="measure acceptance, speed and equality of the output",
        description=benchmark.__doc__,
        epilog=report.QUANTITIES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_arguments(bench)
    bench.set_defaults(run=benchmark.run)

    regenerate = commands.add_parser(
        "regenerate",
        help="have the target write text to train on",
        description=training_text.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    training_text.add_arguments(regenerate)
    regenerate.set_defaults(run=run_regenerate)

    # Its arguments are those of a recipe, which transformers' parser reads, `--help` included.
    train = commands.add_parser("train", help="train a draft, or an adapter for one", add_help=False)
    train.set_defaults(run=run_train)
    return parser


def run_regenerate(args: argparse.Namespace) -> int:
    """
    Has a target answer prompts, see [`training.regenerate`].

    Returns:
        0, or 1 if some prompts got no answer.

    Raises:
        InputError: if there is nothing to ask, or nobody to answer.
    """
    try:
        asked, unanswered = training_text.run(args)
    except (ImportError, OSError, ValueError) as error:
        raise InputError(str(error)) from error
    print(f"{asked - unanswered} of {asked} conversations are in {args.output}")
    return int(unanswered > 0)


def run_train(args: argparse.Namespace) -> int:
    """
    Trains as the recipe says, see [`training.recipe`].

    Raises:
        InputError: if the recipe or what it names cannot be used, or a package for training is missing.
    """
    try:
        from .training import recipe

        return recipe.main(args.rest)
    except (ImportError, OSError, ValueError) as error:
        raise InputError(str(error)) from error


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
    except InputError as error:
        print(f"domino-spec: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndomino-spec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has closed it (`| head`); the interpreter's own last flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
