# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What do batches and the adaptive draft length bring? Tokens per second beside plain batched `generate`.

    python benchmarks/batches.py --prompts gsm8k.jsonl mbpp.jsonl [--batch-sizes 1 2 4 8] [--output results.json]

For each batch size, three runs take turns on the same prompts: plain, the draft with whole blocks, and the draft with
`num_assistant_tokens_schedule="heuristic"`. They are made twice: with the draft as it is, and with one that reads no
context and so is nearly always wrong, the worst a user may meet. Tokens count up to each row's end.

`round / step` is what a round of whole blocks takes in plain steps of the same batch: rows of equal luck gain where
their acceptance length is more than that, and 1.2 times plain where it is 1.2 times as much.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from domino_spec.evaluation.benchmark import encode_batch, load_pair, provenance, read_prompts
from domino_spec.evaluation.report import format_table

RUNS = {"plain": None, "whole blocks": {}, "heuristic": {"num_assistant_tokens_schedule": "heuristic"}}


def spoil(draft):
    """A copy of `draft` that sees no context."""
    poor = copy.deepcopy(draft)
    torch.nn.init.zeros_(poor.fc.weight)
    return poor


class StepClock(LogitsProcessor):
    """Takes the time of each step of plain decoding, and changes nothing."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores):
        self.times.append(time.perf_counter())
        return scores


@dataclass
class Call:
    """
    One call of `generate`.

    Attributes:
        seconds (`float`): of the call; round_seconds (`float`): of a round, or of a plain step, after the prefill.
        rows (`list[list[int]]`): new tokens of each row up to its end.
        lengths (`list[int]`): tokens committed in each round of each row.
    """

    seconds: float
    round_seconds: float
    rows: list[list[int]]
    lengths: list[int]


def timed_call(target, draft, inputs, options, max_new_tokens) -> Call:
    """Run and time one batch: plain where `options` is `None`."""
    clock = StepClock()
    extra = (
        {"logits_processor": LogitsProcessorList([clock])} if options is None else {"assistant_model": draft, **options}
    )
    start = time.perf_counter()
    output = target.generate(
        **inputs, **extra, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True
    )
    seconds = time.perf_counter() - start
    ends = target.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    rows = []
    for row in output.sequences[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    if options is None:
        return Call(seconds, statistics.fmean(b - a for a, b in pairwise(clock.times)), rows, [])
    lengths, parts = output.acceptance_lengths, output.seconds
    round_seconds = (sum(parts.values()) - parts["prefill"]) / lengths.shape[1]
    return Call(seconds, round_seconds, rows, [length for length in lengths.flatten().tolist() if length])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--prompts", nargs="+", required=True, type=Path)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--num-prompts", type=int, default=4, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    target, tokenizer, draft = load_pair(args.target, args.draft, torch.float32)
    # One of each file in turn, so that every batch is mixed.
    files = [read_prompts(path, args.num_prompts) for path in args.prompts]
    texts = [prompt.text for group in zip(*files, strict=True) for prompt in group]
    drafts = {"as it is": draft, "without context": spoil(draft)}
    measured = []
    for size in args.batch_sizes:
        batches = [texts[i : i + size] for i in range(0, len(texts) - size + 1, size)]
        for kind, assistant in drafts.items():
            calls: dict[str, list[Call]] = {name: [] for name in RUNS}
            for turn, batch in enumerate(batches):
                inputs = encode_batch(tokenizer, batch)
                names = list(RUNS)[turn % 3 :] + list(RUNS)[: turn % 3]
                for name in names:
                    calls[name].append(timed_call(target, assistant, inputs, RUNS[name], args.max_new_tokens))
                same = all(calls[name][-1].rows == calls["plain"][-1].rows for name in RUNS)
                print(f"batch of {size}, draft {kind}: {turn + 1}/{len(batches)}, identical {same}", file=sys.stderr)
            rates = {name: [sum(map(len, call.rows)) / call.seconds for call in made] for name, made in calls.items()}
            measured.append(
                {
                    "batch_size": size,
                    "draft": kind,
                    "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
                    # Of each batch on its own, so that a machine whose speed drifts slows both alike.
                    "ratio": {
                        name: statistics.median(a / b for a, b in zip(rates[name], rates["plain"], strict=True))
                        for name in RUNS
                    },
                    "round_over_step": {
                        name: statistics.median(
                            a.round_seconds / b.round_seconds for a, b in zip(made, calls["plain"], strict=True)
                        )
                        for name, made in calls.items()
                    },
                    "acceptance_length": {
                        name: statistics.fmean(length for call in made for length in call.lengths)
                        for name, made in calls.items()
                        if name != "plain"
                    },
                }
            )
    header = ["batch", "draft", "plain tok/s", "whole blocks", "heuristic", "tau", "tau heuristic", "round / step"]
    rows = [
        [
            str(entry["batch_size"]),
            entry["draft"],
            f"{entry['tokens_per_second']['plain']:.1f}",
            f"{entry['ratio']['whole blocks']:.2f}x",
            f"{entry['ratio']['heuristic']:.2f}x",
            f"{entry['acceptance_length']['whole blocks']:.2f}",
            f"{entry['acceptance_length']['heuristic']:.2f}",
            f"{entry['round_over_step']['whole blocks']:.2f}",
        ]
        for entry in measured
    ]
    print(format_table(header, rows))
    if args.output is not None:
        document = {
            **provenance("python benchmarks/batches.py"),
            "measured": measured,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
