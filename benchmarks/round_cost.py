# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Is the loop lean? A round's time against the passes it cannot do without, measured alone on the same shapes.

    python benchmarks/round_cost.py [--draft FOLDER] [--max-new-tokens 96] [--repeats 5] [--output results.json]
    python benchmarks/round_cost.py --context-lengths 512 2048 8000 --max-new-tokens 64
    python benchmarks/round_cost.py --batch-sizes 1 2 4 8 16 32
    python benchmarks/round_cost.py --block-sizes 4 5 8 16 32
    python benchmarks/round_cost.py --long-run 4000

A round must run the target over anchor and proposals, the backbone over a block, and the output head, for the ids that
the draft may propose, over the predicting positions. A round is timed from one call of the target to the next; the
passes are timed between the `generate` calls, at the context lengths that these have, so that a machine whose speed
drifts slows both alike. The head's steps and the verification are part of a round, and no pass.

With `--context-lengths`, the prompt is cut to these lengths; with `--batch-sizes`, a batch has so many rows of 128
tokens, and rounds count for as long as no row has ended; with `--block-sizes`, a block has so many positions. A round
must not grow faster than the target's own pass does, but for the head, which takes a step for each position. Only the
time of a round means anything where a block is not the one that the draft was trained for. With `--long-run`, one
answer of so many tokens is timed by quarters: its rounds must not slow down beyond what the target's own pass does.
Answers run to the limit, end tokens notwithstanding. Tables hold medians in ms.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from transformers import DynamicCache

from domino_spec.evaluation.benchmark import encode, load_pair, positive_int, provenance
from domino_spec.evaluation.demo import DEMO_PROMPTS
from domino_spec.evaluation.report import format_table
from domino_spec.generation.compat import CACHE_NAME
from domino_spec.generation.context import TargetParts
from domino_spec.generation.scorer import Scorer

PASSES = ("target", "backbone", "output head")
PROMPT_LENGTH = 128


@contextlib.contextmanager
def pass_times(target) -> Iterator[list[list[float]]]:
    """When each call of the target begins and ends: the prefill's, then one in each round."""
    times: list[list[float]] = []
    handles = [
        target.register_forward_pre_hook(lambda *_: times.append([time.perf_counter()])),
        target.register_forward_hook(lambda *_: times[-1].append(time.perf_counter())),
    ]
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()


def decode(target, draft, inputs: dict, max_new_tokens: int) -> tuple[torch.LongTensor, list[float], list[float]]:
    """
    Acceptance lengths `[N, rounds]` of a batch, and the seconds of each round in which all rows took part, and of the
    target's pass in it.
    """
    with pass_times(target) as times:
        output = target.generate(
            **inputs,
            assistant_model=draft,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
    lengths = output.acceptance_lengths
    whole = int((lengths > 0).all(0).sum())
    # A round ends where the next begins, so the last one has no end.
    rounds = [after[0] - this[0] for this, after in pairwise(times[1:])][: whole - 1]
    return lengths, rounds, [end - start for start, end in times[1:whole]]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def time_passes(
    target, draft, rows: int, context_length: int, new_context: int, repeats: int
) -> dict[str, list[float]]:
    """
    Seconds of each unavoidable pass, alone, with `context_length` tokens of each row in the caches of target and
    draft. The draft reads `new_context` tokens more, as after a round.
    """
    parts, width = TargetParts(target), draft.config.block_size
    # What the loop scores with: of a draft with a shortlist, just these rows of the target's output head.
    proposing = Scorer(draft, parts, use_head=False).target
    cache, draft_cache = DynamicCache(config=target.config), DynamicCache()
    target(torch.ones(rows, context_length, dtype=torch.long), **{CACHE_NAME: cache}, use_cache=True)
    cache.activate_past_recording()
    features = torch.zeros(rows, context_length, draft.fc.in_features)
    block = torch.full((rows, width), draft.config.mask_token_id)

    def backbone(features: torch.Tensor) -> torch.Tensor:
        return draft(parts.embed(block), features, cache=draft_cache).last_hidden_state

    hidden = backbone(features)
    draft_cache.crop(-width)
    seconds: dict[str, list[float]] = {name: [] for name in PASSES}
    for _ in range(repeats):
        seconds["target"].append(timed(lambda: target(block, **{CACHE_NAME: cache}, use_cache=True)))
        cache.crop(-width)
        seconds["backbone"].append(timed(lambda: backbone(features[:, :new_context])))
        draft_cache.crop(-(new_context + width))
        seconds["output head"].append(timed(lambda: proposing.logits(hidden[:, : width - 1])))
    return seconds


def measure(target, draft, batches: list[dict], max_new_tokens: int, repeats: int) -> dict[str, float]:
    """
    Medians in ms of a round and of each pass alone in the middle of the answers, the round over their sum, and the
    target's pass within the round.
    """
    rounds: list[float] = []
    within: list[float] = []
    passes: dict[str, list[float]] = {name: [] for name in PASSES}
    # A repeat more warms up.
    for repeat in range(repeats + 1):
        for inputs in batches:
            lengths, seconds, in_rounds = decode(target, draft, inputs, max_new_tokens)
            rows, prompt = inputs["input_ids"].shape
            # The row that took most decides how much context the draft reads next.
            new_context = max(1, round(lengths.max(0).values.float().mean().item()))
            alone = time_passes(target, draft, rows, prompt + max_new_tokens // 2, new_context, repeats=8)
            if repeat:
                rounds += seconds
                within += in_rounds
                for name in PASSES:
                    passes[name] += alone[name]
    medians = {name: 1000 * statistics.median(seconds) for name, seconds in passes.items()}
    total, whole = sum(medians.values()), 1000 * statistics.median(rounds)
    in_round = 1000 * statistics.median(within)
    return {**medians, "sum": total, "round": whole, "round / sum": whole / total, "target in it": in_round}


def batch_of(tokenizer, rows: int, length: int) -> dict[str, torch.Tensor]:
    """So many rows of just `length` tokens: the built-in prompts over and over, each row from another token on."""
    ids = [token for prompt in DEMO_PROMPTS for token in encode(tokenizer, prompt.text)["input_ids"][0].tolist()]
    firsts = [17 * number % len(ids) for number in range(rows)]
    ids *= length // len(ids) + 2
    text = torch.tensor([ids[first : first + length] for first in firsts])
    return {"input_ids": text, "attention_mask": torch.ones_like(text)}


def by_context_length(target, tokenizer, draft, lengths: list[int], *limits: int) -> dict[str, dict[str, float]]:
    return {str(length): measure(target, draft, [batch_of(tokenizer, 1, length)], *limits) for length in lengths}


def by_batch_size(target, tokenizer, draft, sizes: list[int], *limits: int) -> dict[str, dict[str, float]]:
    return {str(rows): measure(target, draft, [batch_of(tokenizer, rows, PROMPT_LENGTH)], *limits) for rows in sizes}


def by_block_size(target, tokenizer, draft, sizes: list[int], *limits: int) -> dict[str, dict[str, float]]:
    trained, found = draft.config.block_size, {}
    for size in sizes:
        draft.config.block_size = size
        found[str(size)] = measure(target, draft, [batch_of(tokenizer, 1, PROMPT_LENGTH)], *limits)
    draft.config.block_size = trained
    return found


def by_quarter(target, draft, inputs: dict, new_tokens: int) -> dict[str, dict[str, float]]:
    """
    Of the rounds of one long answer, by quarters: ms a round, and ms of the target's pass in it. Not of a pass alone:
    the target's cache grows at every pass of an answer, which costs it more than to read one of the same length.
    """
    lengths, rounds, passes = decode(target, draft, inputs, new_tokens)
    lengths = lengths[0].tolist()
    found = {}
    for quarter in range(4):
        part = slice(quarter * len(rounds) // 4, (quarter + 1) * len(rounds) // 4)
        found[str(quarter + 1)] = {
            "context": inputs["input_ids"].shape[1] + sum(lengths[: (part.start + part.stop) // 2]),
            "round": 1000 * statistics.median(rounds[part]),
            "target in it": 1000 * statistics.median(passes[part]),
            "acceptance length": statistics.fmean(lengths[part]),
        }
    return found


def report(first: str, rows: dict[str, dict[str, float]]) -> dict:
    """Print a table and how a round's time grows over its rows beside the target's pass; return what to store."""
    start, end = next(iter(rows.values())), next(reversed(rows.values()))
    cells = [[key, *(f"{value:.2f}" for value in row.values())] for key, row in rows.items()]
    print(format_table([first, *start], cells))
    if len(rows) == 1:
        return {"rows": rows}
    # In the same rounds: a machine that is slower for a while is so for both.
    growth = end["round"] / start["round"] / (end["target in it"] / start["target in it"])
    print(f"growth of a round over that of the target's pass: {growth:.3f}\n")
    return {"rows": rows, "growth": growth}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default", help="`default` (the embedded one), a folder or a Hub id")
    parser.add_argument("--draft", default="default", help="the same")
    parser.add_argument("--max-new-tokens", type=positive_int, default=96)
    parser.add_argument("--repeats", type=positive_int, default=5)
    parser.add_argument("--context-lengths", type=positive_int, nargs="+", metavar="TOKENS")
    parser.add_argument("--batch-sizes", type=positive_int, nargs="+", metavar="ROWS")
    parser.add_argument("--block-sizes", type=positive_int, nargs="+", metavar="POSITIONS")
    parser.add_argument("--long-run", type=positive_int, metavar="TOKENS")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    target, tokenizer, draft = load_pair(args.target, args.draft, torch.float32)
    target.generation_config.eos_token_id = None
    prompts = [encode(tokenizer, prompt.text) for prompt in DEMO_PROMPTS]
    limits = args.max_new_tokens, args.repeats
    tables = {}
    if args.context_lengths:
        tables["context"] = by_context_length(target, tokenizer, draft, args.context_lengths, *limits)
    if args.batch_sizes:
        tables["batch"] = by_batch_size(target, tokenizer, draft, args.batch_sizes, *limits)
    if args.block_sizes:
        tables["block"] = by_block_size(target, tokenizer, draft, args.block_sizes, *limits)
    if args.long_run:
        tables["quarter"] = by_quarter(target, draft, prompts[0], args.long_run)
    if not tables:
        tables["prompts"] = {"all": measure(target, draft, prompts, *limits)}
    document = {**provenance("python benchmarks/round_cost.py"), "block_size": draft.config.block_size}
    document |= {first: report(first, rows) for first, rows in tables.items()}
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
