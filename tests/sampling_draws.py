# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Is sampling lossless over a million draws? Chi-square tests of tokens in long answers against exact enumeration.

    PYTHONPATH=tests python tests/sampling_draws.py --batch 1 --draws 1000000 --state draws-1.json

The target's attention is silenced, so that what it says next depends on the last token alone, and the prompt holds the
whole vocabulary of seven. The distribution that the processors leave is then a function of the last two tokens: all 49
of them are computed exactly, and a million tokens, drawn in calls of `--batch` rows, are counted by the two before
them. (Answers of a target with attention, counted out whole, are in `test_generate_sampling.py`.) Fails where the
smallest p-value is below 0.01 after Bonferroni's correction. With `--state`, counts are kept in a file and a run that
was cut off goes on with the same draws; `--only` divides the work among processes, each with a file of its own.
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from helpers import make_draft, make_target
from test_generate_sampling import COMBINATIONS as ANSWER_COMBINATIONS
from test_generate_sampling import VOCAB, caught_processors
from test_trainer import make_trainer

from domino_spec.training.data import ChatRow
from domino_spec.training.features import cache_features

# Those that look back two tokens at most, or only at which tokens have been seen at all.
COMBINATIONS = {
    name: ANSWER_COMBINATIONS[name]
    for name in (
        "temperature and top-k",
        "top-p",
        "min-p and repetition penalty",
        "typical",
        "epsilon and eta",
        "bad words and bias",
        "prefix constraint",
        "watermark",
    )
}
NEW_TOKENS = 250
PROMPT = torch.arange(VOCAB)[None]


def make_forgetful_pair():
    """A target that knows the last token only, and a draft that has learnt a little of it: both often agree."""
    target = make_target(
        "qwen3", dtype=torch.float32, seed=3, vocab_size=VOCAB, attn_implementation="sdpa", num_hidden_layers=1
    )
    draft = make_draft(
        target,
        seed=4,
        attn_implementation="sdpa",
        mask_token_id=0,
        block_size=8,
        num_hidden_layers=1,
        target_layer_ids=[0],
    )
    with torch.no_grad():
        target.lm_head.weight.mul_(0.4)
        target.model.layers[0].self_attn.o_proj.weight.zero_()
    torch.manual_seed(0)
    texts = target.generate(PROMPT.repeat(64, 1), do_sample=True, top_k=0, max_new_tokens=90, pad_token_id=0)
    rows = [ChatRow(text, [0] * VOCAB + [1] * 90) for text in texts.tolist()]
    with TemporaryDirectory() as folder:
        cache_features(target, rows, [0], folder)
        options = {"max_steps": 200, "num_anchors": 16, "lambda_base_start": 0.5, "logging_steps": 200}
        make_trainer(target, folder, folder, draft, **options).train()
    return target, draft.eval()


def exact_transitions(target, options) -> torch.Tensor:
    """Probability of each token after each two, `[VOCAB, VOCAB, VOCAB]`."""
    prompt = PROMPT.to(target.device)
    processors = caught_processors(target, prompt, NEW_TOKENS, options)
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    table = torch.zeros(VOCAB**2, VOCAB, dtype=torch.double)
    for row, pair in enumerate(pairs):
        ids = torch.cat([prompt, pair[None].to(prompt)], dim=1)
        with torch.no_grad():
            table[row] = processors(ids, target(ids).logits[:, -1].float()).softmax(-1)[0]
    return table.view(VOCAB, VOCAB, VOCAB)


def draw_transitions(pair, options, batch: int, seed: int) -> tuple[torch.Tensor, int, int]:
    """
    Write one answer of `NEW_TOKENS` tokens in each of `batch` rows.

    Returns:
        How often each token came after each two `[VOCAB, VOCAB, VOCAB]`; tokens that rounds committed; rounds.
    """
    target, draft = pair
    torch.manual_seed(seed)
    prompt = PROMPT.to(target.device)
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=draft,
        do_sample=True,
        num_return_sequences=batch,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        return_dict_in_generate=True,
        **options,
    )
    ids = output.sequences[:, VOCAB - 2 :].cpu()
    index = (ids[:, :-2] * VOCAB + ids[:, 1:-1]) * VOCAB + ids[:, 2:]
    counts = index.flatten().bincount(minlength=VOCAB**3).view(VOCAB, VOCAB, VOCAB)
    lengths = output.acceptance_lengths
    return counts, int(lengths.sum()), int((lengths > 0).sum())


def transitions_p(counts: torch.Tensor, exact: torch.Tensor) -> float:
    """P-value of counted transitions under the exact ones; tokens that expect fewer than five draws are pooled."""
    statistic, freedom = 0.0, 0
    for seen, p in zip(counts.view(-1, VOCAB).double(), exact.view(-1, VOCAB), strict=True):
        assert seen[p == 0].sum() == 0, "a token was drawn that has no probability"
        expected = seen.sum() * p
        # The last cell holds what is rare; alone too rare to count, it joins the most common one.
        rare = expected < 5
        cells = torch.stack([torch.cat([v[~rare], v[rare].sum()[None]]) for v in (seen, expected)])
        if cells[1, -1] < 5:
            most = int(cells[1].argmax())
            if most == cells.shape[1] - 1:
                continue
            cells[:, most] += cells[:, -1]
            cells = cells[:, :-1]
        statistic += float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
        freedom += cells.shape[1] - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2))) if freedom else 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--state", type=Path)
    parser.add_argument(
        "--only", nargs="+", choices=COMBINATIONS, default=list(COMBINATIONS), help="of the eight, these"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    pair, p_values = make_forgetful_pair(), {}
    calls = -(-args.draws // (args.batch * NEW_TOKENS))
    state = json.loads(args.state.read_text()) if args.state is not None and args.state.exists() else {}
    for number, (name, options) in enumerate(COMBINATIONS.items()):
        if name not in args.only:
            continue
        key = f"{name}, batch {args.batch}"
        kept = state.setdefault(key, {"calls": 0, "counts": [0] * VOCAB**3, "committed": 0, "rounds": 0})
        counts = torch.tensor(kept["counts"]).view(VOCAB, VOCAB, VOCAB)
        for call in range(kept["calls"], calls):
            new, committed, rounds = draw_transitions(pair, options, args.batch, seed=number * 10**7 + call)
            counts += new
            kept["committed"] += committed
            kept["rounds"] += rounds
            if args.state is not None and (call % 50 == 49 or call == calls - 1):
                kept |= {"calls": call + 1, "counts": counts.flatten().tolist()}
                args.state.with_suffix(".new").write_text(json.dumps(state))
                args.state.with_suffix(".new").replace(args.state)
        p_values[name] = transitions_p(counts, exact_transitions(pair[0], options))
        length = kept["committed"] / kept["rounds"]
        print(f"{key}: {counts.sum()} draws, p {p_values[name]:.4f}, acceptance length {length:.2f}", flush=True)
    level, worst = 0.01 / len(COMBINATIONS), min(p_values.values())
    print(f"{len(p_values)} tests: smallest p {worst:.5f}, level {level:.5f}")
    sys.exit(worst < level)


if __name__ == "__main__":
    main()
