# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a pair say? One answer, or a conversation, written while it is generated.

    domino-spec generate "Why is the sky blue?"
    domino-spec generate --file question.txt --temperature 0.7 --seed 1
    echo "Why is the sky blue?" | domino-spec generate --json
    domino-spec generate --chat

On a terminal the tokens that the draft proposed are marked and a line about the rounds follows; elsewhere, or with
`--plain`, the answer stands alone. In a chat every line is a turn; `/new` forgets the turns before it, and the end of
the input (Ctrl-D) ends the chat.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..modeling_domino import DominoDraftModel
from .benchmark import InputError, add_pair_arguments, encode, encode_conversation, open_pair, positive_int
from .streaming import AcceptanceStreamer, choose_marks, write_now

NEW_CHAT = "/new"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec generate`."""
    parser.add_argument("prompt", nargs="?", help="what to answer (default: standard input)")
    parser.add_argument("--file", type=Path, help="read it from this file instead")
    parser.add_argument("--chat", action="store_true", help="answer one line after the other, as a conversation")
    parser.add_argument("--system", metavar="TEXT", help="system message before the first turn")
    add_pair_arguments(parser)
    parser.add_argument("--max-new-tokens", type=positive_int, default=512, help="per answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float, help="sample from the likeliest tokens that hold this much probability")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="write the answer alone")
    parser.add_argument("--no-color", action="store_true", help="mark proposed tokens with brackets, not colour")
    parser.add_argument("--json", action="store_true", help="print one JSON object an answer, instead of streaming it")


def run(args: argparse.Namespace) -> int:
    """
    Answers what is asked.

    Returns:
        0.

    Raises:
        InputError: if there is nothing to answer, or a model or option cannot be used; before anything is generated.
    """
    turns = _turns(args)
    options = _sampling_options(args)
    target, tokenizer, draft, template = open_pair(args)
    if (args.chat or args.system) and tokenizer.chat_template is None:
        raise InputError(f"the target {args.target!r} has no chat template: leave --chat and --system out")
    rich = sys.stdout.isatty() and not args.plain and not args.json
    marks = choose_marks(sys.stdout, args.no_color) if rich else ("", "")
    streamer = None if args.json else AcceptanceStreamer(tokenizer, write_now, marks)
    set_seed(args.seed)

    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    for text in turns:
        if args.chat and text.strip() == NEW_CHAT:
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": text})
        if tokenizer.chat_template is None:
            inputs = encode(tokenizer, text, target.device)
        else:
            inputs = encode_conversation(tokenizer, messages, target.device, **template)
        answer = answer_one(target, tokenizer, draft, inputs, streamer=streamer, **options)
        messages.append({"role": "assistant", "content": answer["text"]})
        if args.json:
            print(json.dumps({"prompt": text, **answer}), flush=True)
        elif rich:
            print(describe(answer), file=sys.stderr)
    return 0


def answer_one(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: DominoDraftModel,
    inputs: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:
    """
    One `generate` call.

    Args:
        inputs: `input_ids` and `attention_mask`, long [1, S].
        options: of `generate`.

    Returns:
        `text`; `new_tokens`; `finished`, whether the answer came to its own end; `rounds`; `acceptance_length`, tokens
        per round (None without a round); `seconds`.

    Raises:
        InputError: when `generate` refuses the options.
    """
    start = time.perf_counter()
    try:
        output = target.generate(**inputs, assistant_model=draft, return_dict_in_generate=True, **options)
    except ValueError as error:
        raise InputError(str(error)) from error
    seconds = time.perf_counter() - start
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    ends = target.generation_config.eos_token_id
    lengths = output.acceptance_lengths[0].tolist()
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "new_tokens": len(tokens),
        "finished": bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends]),
        "rounds": len(lengths),
        "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
        "seconds": round(seconds, 3),
    }


def describe(answer: dict[str, Any]) -> str:
    """One line about an answer of [`answer_one`]."""
    rate = answer["new_tokens"] / answer["seconds"] if answer["seconds"] else 0.0
    length = "-" if answer["acceptance_length"] is None else f"{answer['acceptance_length']:.2f}"
    cut = "" if answer["finished"] else ", cut off at --max-new-tokens"
    tokens, rounds = answer["new_tokens"], answer["rounds"]
    return f"[{tokens} tokens in {rounds} rounds, acceptance length {length}, {rate:.1f} tok/s{cut}]"


def _turns(args: argparse.Namespace) -> Iterator[str]:
    """The user's turns: one, or in a chat one for each line that is typed."""
    if args.chat:
        if args.prompt is not None or args.file is not None:
            raise InputError("--chat reads turns from standard input: leave the prompt and --file out")
        return _typed_lines()
    if args.prompt is not None and args.file is not None:
        raise InputError(f"there are two prompts: the one given and --file {args.file}; leave one out")
    if args.file is not None:
        try:
            text = args.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the prompt from --file {args.file}: {error}") from error
    elif args.prompt is not None:
        text = args.prompt
    elif sys.stdin.isatty():
        raise InputError("there is no prompt: give one, or --file, or pipe it in, or --chat")
    else:
        text = sys.stdin.read()
    if not text.strip():
        raise InputError("the prompt is empty: give some text")
    return iter([text])


def _typed_lines() -> Iterator[str]:
    """Lines of standard input that hold something, asked for with a mark where somebody types them."""
    asking = sys.stdin.isatty()
    while True:
        if asking:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if not 0 <= args.temperature < math.inf:
        raise InputError(f"--temperature is {args.temperature}, but must be 0 (greedy) or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise InputError(f"--top-p is {args.top_p}, but must be above 0 and at most 1")
    if args.top_p is not None and not args.temperature:
        raise InputError("--top-p narrows sampling, but --temperature 0 is greedy: give a temperature above 0")
    if args.temperature:
        options |= {"temperature": args.temperature, "top_p": 1.0 if args.top_p is None else args.top_p, "top_k": 0}
    return options
