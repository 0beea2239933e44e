# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Is the loop lean? A round's time against the passes it cannot do without, measured alone on the same shapes.

    python benchmarks/round_cost.py [--draft FOLDER] [--max-new-tokens 96] [--repeats 5] [--output results.json]

A round must run the target over anchor and proposals, the backbone over a block, and the output head over the
predicting positions. Rounds are timed by the streamer, which is called once in each; the passes are timed between the
`generate` calls, at the context lengths that these have, so that a machine whose speed drifts slows both alike.
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="default", help="`default` (the embedded one), a folder or a Hub id")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    target, tokenizer, draft = load_pair("default", args.draft, torch.float32)
    rounds: list[float] = []
    passes: dict[str, list[float]] = {"target": [], "backbone": [], "output head": []}
    for repeat in range(args.repeats + 1):
        for prompt in DEMO_PROMPTS:
            inputs = encode(tokenizer, prompt.text)
            clock = RoundClock()
            output = target.generate(
                **inputs,
                assistant_model=draft,
                streamer=clock,
                max_new_tokens=args.max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
            )
            middle = (inputs["input_ids"].shape[1] + output.sequences.shape[1]) // 2
            lengths = output.acceptance_lengths.float()
            alone = [time_passes(target, draft, middle, max(1, round(lengths.mean().item()))) for _ in range(8)]
            # The first repeat warms up.
            if repeat:
                rounds += clock.rounds()
                for name, seconds in passes.items():
                    seconds += [one[name] for one in alone]

    medians = {name: statistics.median(seconds) for name, seconds in passes.items()}
    total, whole = sum(medians.values()), statistics.median(rounds)
    rows = [[name, f"{1000 * seconds:.2f}"] for name, seconds in medians.items()]
    rows += [["sum", f"{1000 * total:.2f}"], ["round", f"{1000 * whole:.2f}"]]
    print(format_table(["median of", "ms"], rows, ["round / sum", f"{whole / total:.3f}"]))
    if args.output is not None:
        document = {
            **provenance("python benchmarks/round_cost.py"),
            "block_size": draft.config.block_size,
            "rounds": len(rounds),
            "milliseconds": {name: 1000 * seconds for name, seconds in medians.items()},
            "round_milliseconds": 1000 * whole,
            "round_over_sum": whole / total,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
