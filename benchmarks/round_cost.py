# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Is the loop lean? A round's time against the passes it cannot do without, measured alone on the same shapes.

    python benchmarks/round_cost.py [--draft FOLDER] [--max-new-tokens 96] [--repeats 5] [--output results.json]
    python benchmarks/round_cost.py --context-lengths 512 2048 8000 --max-new-tokens 64
    python benchmarks/round_cost.py --long-run 4000

A round must run the target over anchor and proposals, the backbone over a block, and the output head over the
predicting positions. Rounds are timed by the streamer, which is called once in each; the passes are timed between the
`generate` calls, at the context lengths that these have, so that a machine whose speed drifts slows both alike.

With `--context-lengths`, prompts are cut to these lengths: a round must not grow faster with the context than the
target's own pass does. With `--long-run`, one answer of so many tokens is timed by quarters: its rounds must not slow
down beyond what the target's own pass does.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from domino_spec.evaluation.benchmark import encode, load_pair, provenance
from domino_spec.evaluation.demo import DEMO_PROMPTS
from domino_spec.evaluation.report import format_table
from domino_spec.generation.compat import CACHE_NAME
from domino_spec.generation.context import TargetParts
from domino_spec.generation.rollout import DraftState, draft_hidden


class RoundClock(BaseStreamer):
    """Takes the time of each call: the prompt's, the prefill token's, then one per round."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass

    def rounds(self) -> list[float]:
        """Seconds of each round."""
        # The first two calls are the prompt and the token of the prefill.
        return [later - earlier for earlier, later in zip(self.times[1:], self.times[2:], strict=False)]


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.inference_mode()
def time_passes(target, draft, context_length: int, new_context: int) -> dict[str, float]:
    """Seconds of each unavoidable pass, alone, with `context_length` tokens in the caches of target and draft."""
    parts, config = TargetParts(target), draft.config
    width = config.block_size
    cache = DynamicCache(config=target.config)
    target(torch.ones(1, context_length, dtype=torch.long), **{CACHE_NAME: cache}, use_cache=True)
    cache.activate_past_recording()
    state = DraftState(torch.zeros(1, dtype=torch.long), dense=True)
    features = torch.zeros(1, context_length, draft.fc.in_features)
    anchor = torch.ones(1, 1, dtype=torch.long)
    visible = torch.ones(features.shape[:2], dtype=torch.bool)
    hidden = draft_hidden(draft, parts, state, features, anchor, visible)

    block = torch.ones(1, width, dtype=torch.long)
    seconds = {
        "target": timed(lambda: target(block, **{CACHE_NAME: cache}, use_cache=True)),
        "backbone": timed(
            lambda: draft_hidden(draft, parts, state, features[:, :new_context], anchor, visible[:, :new_context])
        ),
        "output head": timed(lambda: parts.logits(hidden[:, : width - 1])),
    }
    return seconds


def measure(target, draft, prompts: list[dict], max_new_tokens: int, repeats: int) -> tuple[list, dict[str, list]]:
    """Seconds of every round, and of every pass alone in the middle of its answer; a repeat more warms up."""
    rounds: list[float] = []
    passes: dict[str, list[float]] = {"target": [], "backbone": [], "output head": []}
    for repeat in range(repeats + 1):
        for inputs in prompts:
            clock = RoundClock()
            output = target.generate(
                **inputs,
                assistant_model=draft,
                streamer=clock,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
            )
            middle = (inputs["input_ids"].shape[1] + output.sequences.shape[1]) // 2
            new_context = max(1, round(output.acceptance_lengths.float().mean().item()))
            del output  # its cache
            alone = [time_passes(target, draft, middle, new_context) for _ in range(8)]
            if repeat:
                rounds += clock.rounds()
                for name, seconds in passes.items():
                    seconds += [one[name] for one in alone]
    return rounds, passes


def summarise(rounds: list[float], passes: dict[str, list[float]]) -> dict[str, float]:
    """Medians in ms, and the round over the sum of its passes."""
    medians = {name: 1000 * statistics.median(seconds) for name, seconds in passes.items()}
    total, whole = sum(medians.values()), 1000 * statistics.median(rounds)
    return {**medians, "sum": total, "round": whole, "round / sum": whole / total}


def prompts_of_length(tokenizer, lengths: list[int]) -> dict[int, dict]:
    """The built-in prompts over and over, cut to each length."""
    ids = [token for prompt in DEMO_PROMPTS for token in encode(tokenizer, prompt.text)["input_ids"][0].tolist()]
    prompts = {}
    for length in lengths:
        text = torch.tensor([(ids * (length // len(ids) + 1))[:length]])
        prompts[length] = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    return prompts


def quarters(target, draft, inputs: dict, new_tokens: int) -> list[dict[str, float]]:
    """Of the rounds of one long answer, by quarters: ms a token, and ms of the target's pass alone there."""
    clock = RoundClock()
    output = target.generate(
        **inputs,
        assistant_model=draft,
        streamer=clock,
        max_new_tokens=new_tokens,
        min_new_tokens=0,
        eos_token_id=None,
        do_sample=False,
        return_dict_in_generate=True,
    )
    lengths = output.acceptance_lengths[0].tolist()
    del output
    found, seconds = [], clock.rounds()
    for quarter in range(4):
        part = slice(quarter * len(lengths) // 4, (quarter + 1) * len(lengths) // 4)
        middle = inputs["input_ids"].shape[1] + sum(lengths[: (part.start + part.stop) // 2])
        alone = [time_passes(target, draft, middle, 2)["target"] for _ in range(24)]
        found.append(
            {
                "context": middle,
                "ms a round": 1000 * statistics.median(seconds[part]),
                "ms a target pass": 1000 * statistics.median(alone),
                "acceptance length": statistics.fmean(lengths[part]),
            }
        )
    return found


def print_rows(first: str, rows: dict[str, dict[str, float]]):
    names = list(next(iter(rows.values())))
    print(format_table([first, *names], [[key, *(f"{row[name]:.2f}" for name in names)] for key, row in rows.items()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="default", help="`default` (the embedded one), a folder or a Hub id")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--context-lengths", type=int, nargs="+")
    parser.add_argument("--long-run", type=int, metavar="TOKENS")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    target, tokenizer, draft = load_pair("default", args.draft, torch.float32)
    prompts = [encode(tokenizer, prompt.text) for prompt in DEMO_PROMPTS]
    document = {**provenance("python benchmarks/round_cost.py"), "block_size": draft.config.block_size}
    if args.long_run:
        found = quarters(target, draft, prompts[0], args.long_run)
        print_rows("quarter", {str(i + 1): row for i, row in enumerate(found)})
        first, last = found[0], found[-1]
        kept = first["ms a round"] / last["ms a round"] * last["ms a target pass"] / first["ms a target pass"]
        print(f"rate kept, the target's own slow-down taken out: {kept:.3f}")
        document |= {"quarters": found, "rate_kept": kept}
    elif args.context_lengths:
        by_length = {
            str(length): summarise(*measure(target, draft, [inputs], args.max_new_tokens, args.repeats))
            for length, inputs in prompts_of_length(tokenizer, args.context_lengths).items()
        }
        print_rows("context", by_length)
        first, *_, last = by_length.values()
        growth = last["round"] / first["round"] / (last["target"] / first["target"])
        print(f"growth of a round over that of the target's pass: {growth:.3f}")
        document |= {"milliseconds": by_length, "growth": growth}
    else:
        found = summarise(*measure(target, draft, prompts, args.max_new_tokens, args.repeats))
        print_rows("ms", {"median": found})
        document |= {"milliseconds": found}
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
