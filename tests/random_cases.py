# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Random batches: greedy output with a draft equals plain `generate`, in float64.

    PYTHONPATH=tests python tests/random_cases.py 0 10000

A case draws architecture, draft, rows, prompt lengths, limit and options, and how good the draft is in each row. The
test suite runs some of them; this script runs any range, and names those that fail.
"""

import argparse
import functools
import json
import random
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from batching import GoodBatchDraft, padded_batch
from helpers import ARCHITECTURES, MASK_TOKEN, make_draft
from test_generate_lossless import COMBINATIONS, OPTIONS, cached_target


@dataclass
class BatchCase:
    arch: str
    attention: str
    draft: dict[str, Any]
    good: bool
    spoil: list[float]
    prompt_lengths: list[int]
    new_tokens: int
    drafting: dict[str, Any]
    options: tuple[str, ...]
    details: bool
    seed: int


@functools.cache
def cached_draft(target, seed: int, config: str):
    return make_draft(target, seed=seed, **json.loads(config))


def draw_batch_case(seed: int) -> BatchCase:
    """Everything about a case, from its number."""
    rng = random.Random(seed)
    arch = rng.choice(ARCHITECTURES)
    block = rng.randint(2, 9)
    head = rng.random() < 0.7
    draft: dict[str, Any] = {"block_size": block, "head": head, "shift_label": rng.random() < 0.5}
    if head:
        draft["pure_draft_prefix_len"] = rng.choice([0, 1])
    if rng.random() < 0.4:
        draft |= {"sliding_window": rng.choice([4, 8]), "sliding_window_rule": rng.choice(["causal", "symmetric"])}
    rows = rng.randint(1, 8)
    lengths = [rng.choice([1, 2, 5, block, 11, 12, 13, rng.randint(14, 40)]) for _ in range(rows)]
    attention = "sdpa"
    if arch == "gemma2-softcap":
        # Needs eager attention, which gives a float64 model NaN at a row that sees nothing, as pads do.
        attention, lengths = "eager", [lengths[0]] * rows
    elif rng.random() < 0.3:
        attention, lengths = rng.choice(["eager", "sdpa"]), [lengths[0]] * rows
    return BatchCase(
        arch=arch,
        attention=attention,
        draft=draft,
        good=rng.random() < 0.8,
        spoil=[rng.choice([0.0, 0.1, 0.3, 0.6]) for _ in range(rows)],
        prompt_lengths=lengths,
        new_tokens=rng.choice([1, 2, block, 2 * block + 3, 30, 30, 45]),
        drafting=rng.choice(
            [
                {},
                {},
                {"num_assistant_tokens": rng.choice([1, block - 1, block, 50])},
                {"assistant_confidence_threshold": rng.choice([0.05, 0.3, 0.8])},
                {"num_assistant_tokens_schedule": "heuristic"},
            ]
        ),
        options=(rng.choice(list(OPTIONS)),) if rng.random() < 0.8 else rng.choice(COMBINATIONS),
        details=rng.random() < 0.5,
        seed=rng.randrange(10**6),
    )


def check_batch_case(seed: int):
    """Run case `seed` plain and with its draft; raises where they differ."""
    case = draw_batch_case(seed)
    rng = random.Random(case.seed)
    target = cached_target(case.arch, case.attention)
    inputs = padded_batch(case.prompt_lengths, case.seed)
    rows, width = inputs["input_ids"].shape
    written = target.generate(**inputs, max_new_tokens=20, pad_token_id=MASK_TOKEN)[:, width:]
    written = written[rng.randrange(rows)].tolist()
    makers = [OPTIONS[name](rng, written, width) for name in case.options]

    def arguments(calls):
        made: dict[str, Any] = {"max_new_tokens": case.new_tokens, "pad_token_id": MASK_TOKEN}
        for make in makers:
            made |= make(calls)
        return made

    plain_calls: list = []
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = target.generate(**inputs, **arguments(plain_calls), **wanted, output_hidden_states=case.details)
    assert torch.cat(plain.logits).isfinite().all(), f"nothing to compare: {case}"

    draft = cached_draft(target, seed % 3, json.dumps(case.draft))
    if case.good:
        texts = [plain.sequences[row, width - length :].tolist() for row, length in enumerate(case.prompt_lengths)]
        spoiled = [
            {i for i in range(length, len(text)) if rng.random() < share}
            for text, length, share in zip(texts, case.prompt_lengths, case.spoil, strict=True)
        ]
        draft = GoodBatchDraft.following(draft, target, texts, spoiled)

    calls: list = []
    extra: dict[str, Any] = dict(case.drafting)
    if case.details:
        extra |= {**wanted, "output_hidden_states": True}
    output = target.generate(**inputs, **arguments(calls), **extra, assistant_model=draft)

    sequences = output.sequences if case.details else output
    assert sequences.tolist() == plain.sequences.tolist(), f"tokens differ: {case}"
    assert calls == plain_calls, f"processors or criteria were called differently: {case}"
    if case.details:
        check_details(case, plain, output, arguments([]).get("eos_token_id"), width)


def check_details(case, plain, output, eos, width):
    """Scores, logits, hidden states, cache and acceptance lengths against those of plain `generate`."""
    ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
    new = plain.sequences[:, width:].tolist()
    counts = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in new]
    for name in ("scores", "logits"):
        ours, theirs = getattr(output, name), getattr(plain, name)
        assert len(ours) == len(theirs), f"{name}: {len(ours)} entries, not {len(theirs)}: {case}"
        for row, count in enumerate(counts):
            pair = (torch.stack([step[row] for step in side[:count]]) for side in (ours, theirs))
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert len(output.hidden_states) == len(plain.hidden_states), case
    for step, (ours, theirs) in enumerate(zip(output.hidden_states, plain.hidden_states, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape, f"hidden states of step {step}: {one.shape}, not {other.shape}: {case}"
            live = [row for row, count in enumerate(counts) if step < count]
            if step:
                torch.testing.assert_close(one[live], other[live], rtol=1e-4, atol=1e-4)
    lengths = output.acceptance_lengths
    assert lengths.shape[0] == len(new), case
    if len(ends) or len(set(counts)) == 1:
        most = [max(counts)] * len(counts) if not ends else counts
        # In lockstep, ended rows are counted on while the others run.
        assert all(1 + int(row.sum()) in (count, max(counts)) for row, count in zip(lengths, most, strict=True)), case
    total = width + max(len(row) for row in new) - 1
    for ours, theirs in zip(_cache(output).layers, _cache(plain).layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape, f"cache of {ours.keys.shape}, not {theirs.keys.shape}: {case}"
        for row, length in enumerate(case.prompt_lengths):
            # All but the padding before the prompt; a sliding layer holds the last entries only.
            seen = slice(max(0, ours.keys.shape[2] - (total - width + length)), None)
            for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(one[row, :, seen], other[row, :, seen], rtol=1e-4, atol=1e-4)


def _cache(output):
    return output.cache if "cache" in output else output.past_key_values


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed, started = [], time.time()
    for seed in range(args.first, args.stop):
        try:
            check_batch_case(seed)
        except Exception:
            failed.append(seed)
            print(f"check_batch_case({seed}):\n{traceback.format_exc(limit=-3)}", flush=True)
        if (seed + 1) % 500 == 0:
            print(f"up to {seed}: {len(failed)} failed, {time.time() - started:.0f} s", flush=True)
    print(f"{args.stop - args.first} cases, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
