# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a draft do? Answers of the embedded pair with its share marked, then their speed beside the target's.

    domino-spec demo
    domino-spec demo --prompt "Why is the sky blue?"

Needs no network but for the first install, and no GPU.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from tqdm.auto import tqdm

from . import benchmark, report
from .benchmark import InputError, positive_int
from .report import DOMINO, PLAIN, Prompt, PromptResult, format_number
from .streaming import AcceptanceStreamer, choose_marks, write_now

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec demo`."""
    parser.add_argument("--prompt", metavar="TEXT", help="your own prompt instead of the built-in ones")
    parser.add_argument("--max-new-tokens", type=positive_int, default=96, help="per answer (default: %(default)s)")
    parser.add_argument("--no-color", action="store_true", help="mark accepted tokens with brackets instead of colour")


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


def run(args: argparse.Namespace) -> int:
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
    streamer = AcceptanceStreamer(tokenizer, write_now, marks)
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
