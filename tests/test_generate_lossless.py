# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Greedy output with a draft equals plain `generate`, token for token: 500 random cases in float64.

A case draws architecture, draft, prompt length, length limit, options and the door it goes in by. `GoodDraft` makes
the acceptance an input of the case, so that blocks are cut in their middle as well as accepted whole; its acceptance
lengths are known beforehand and compared too.
"""

import functools
import json
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from helpers import ARCHITECTURES, MASK_TOKEN, VOCAB, make_draft, make_target, random_tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from domino_spec.modeling_domino import DominoDraftModel

SEEDS = range(50)
CASES_PER_SEED = 10

# A draft whose acceptance is chosen


@functools.cache
def steering_states(target) -> torch.Tensor:
    """Hidden states `[V, H]`: the target's output head gives row t its highest logit, clearly, at token t."""
    head = target.get_output_embeddings()
    weight = head.weight.detach().double()
    rows = torch.arange(weight.shape[0])
    states = torch.linalg.pinv(weight).T.clone()
    for _ in range(5000):
        logits = states @ weight.T
        own = logits[rows, rows].clone()
        logits[rows, rows] = -torch.inf
        rivals = logits.argmax(dim=-1)
        short = own - logits[rows, rivals] < 0.3 * own.abs().clamp(min=1.0)
        if not short.any():
            break
        states[short] += 0.1 * (weight[short] - weight[rivals[short]])
    else:
        raise AssertionError("the random output head has a token that no hidden state can make the best one")
    # Of a size that a soft-capped head still tells apart.
    return states * (8.0 / own)[:, None]


class GoodDraft(DominoDraftModel):
    """
    A draft that proposes a given text, except at the positions in `spoiled`, where it proposes another token.

    Only the backbone's output is replaced, and the head's correction is zero: loop, rollout, caches and verification
    are those of every draft. Which token to propose follows from the positions the loop passes.
    """

    text: torch.LongTensor
    spoiled: frozenset[int]
    states: torch.Tensor

    @classmethod
    def following(cls, draft: DominoDraftModel, target, text: torch.LongTensor, spoiled=()) -> "GoodDraft":
        """
        `draft` made good: same config and weights, other proposals.

        Args:
            text: ids `[S]` of prompt and continuation, without padding.
            spoiled: positions in `text` at which the proposal is wrong.
        """
        good = cls(draft.config).to(draft.dtype).eval()
        good.load_state_dict(draft.state_dict())
        if draft.config.has_head:
            with torch.no_grad():
                good.embed_proj[2].weight.zero_()
        good.text, good.spoiled, good.states = text, frozenset(spoiled), steering_states(target)
        return good

    def forward(
        self, noise_embeds, context_hidden_states, position_ids=None, attention_mask=None, cache=None, **kwargs
    ) -> BaseModelOutput:
        past = 0 if cache is None else cache.get_seq_length()
        hidden = (
            super()
            .forward(noise_embeds, context_hidden_states, position_ids, attention_mask, cache, **kwargs)
            .last_hidden_state
        )
        block = noise_embeds.shape[1]
        anchor = past + context_hidden_states.shape[1] if position_ids is None else int(position_ids[0, -block])
        first = anchor + 1 if self.config.shift_label else anchor
        states = torch.stack([self._state(first + k) for k in range(block)])
        return BaseModelOutput(last_hidden_state=states[None].to(hidden))

    def _state(self, position: int) -> torch.Tensor:
        return self.states[self._proposal(position)]

    def _proposal(self, position: int) -> int:
        token = int(self.text[position]) if position < len(self.text) else 0
        return (token + 1) % self.config.vocab_size if position in self.spoiled else token


def expected_acceptance(prompt_length: int, new_tokens: int, proposals: int, spoiled=()) -> list[int]:
    """Tokens per round of a `GoodDraft`, counted by hand: the first token is the prefill's, the last round is cut."""
    lengths, committed = [], 1
    while committed < new_tokens:
        anchor = prompt_length + committed - 1
        accepted = 0
        while accepted < proposals and anchor + 1 + accepted not in spoiled:
            accepted += 1
        lengths.append(min(accepted + 1, new_tokens - committed))
        committed += lengths[-1]
    return lengths


# Processors and criteria that notice how they are called


class Recorder(LogitsProcessor):
    """Leaves the scores alone and notes the ids of every call."""

    def __init__(self, calls: list):
        self.calls = calls

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids[0].tolist())
        return scores


class CountingProcessor(LogitsProcessor):
    """Stateful: forbids another token at every call, so one call too many changes the text."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, (self.calls * 7) % scores.shape[-1] :: 3] = -torch.inf
        return scores


class PrefixProcessor(LogitsProcessor):
    """Stateless but reads the whole prefix: favours tokens by a hash of it, so a wrong prefix changes the text."""

    def __call__(self, input_ids, scores):
        key = int((input_ids[0] * torch.arange(1, input_ids.shape[1] + 1)).sum()) % 5
        return scores + 2.0 * (torch.arange(scores.shape[-1]) % 5 == key)


class StopAfterToken(StoppingCriteria):
    """Stops when `token` was written for the `times`-th time after the prompt."""

    def __init__(self, token: int, times: int, prompt_length: int):
        self.token, self.times, self.prompt_length = token, times, prompt_length

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, self.prompt_length :] == self.token).sum(dim=-1) >= self.times


class StopAfterCalls(StoppingCriteria):
    """Stateful: stops at its n-th call, so it must be asked once a token; notes the lengths it saw."""

    def __init__(self, limit: int, calls: list):
        self.limit, self.calls = limit, calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), len(self.calls) >= self.limit)


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that writes every token as two letters: id 0 is "aA", id 27 is "bB"; nothing between them."""
    words = [chr(ord("a") + i % 26) + chr(ord("A") + (i * 7 + i // 26) % 26) for i in range(VOCAB)]
    assert len(set(words)) == VOCAB
    vocab = {word: i for i, word in enumerate(words)}
    # `StopStringCriteria` encodes a probe word; it may become anything that decodes to itself.
    vocab["abcdef"] = VOCAB
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="aA"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


# Options of `generate`: each gets (rng, plain continuation, prompt length) and returns a maker of fresh keyword
# arguments, since processors may be stateful. `calls` collects what recording objects saw.

Maker = Callable[[list], dict[str, Any]]
OPTIONS: dict[str, Callable[[random.Random, list[int], int], Maker]] = {}


def option(make):
    OPTIONS[make.__name__.replace("_", "-")] = make
    return make


@option
def nothing(rng, written, prompt_length):
    return lambda calls: {}


@option
def recorded(rng, written, prompt_length):
    return lambda calls: {"logits_processor": LogitsProcessorList([Recorder(calls)])}


@option
def eos(rng, written, prompt_length):
    return lambda calls, token=rng.choice(written): {"eos_token_id": token, "pad_token_id": MASK_TOKEN}


@option
def several_eos(rng, written, prompt_length):
    tokens = [rng.choice(written), rng.choice(written), rng.randrange(VOCAB)]
    return lambda calls: {"eos_token_id": tokens, "pad_token_id": tokens[0]}


@option
def min_new_tokens(rng, written, prompt_length):
    token, least = rng.choice(written[:8]), rng.randint(1, 12)
    return lambda calls: {"eos_token_id": token, "pad_token_id": MASK_TOKEN, "min_new_tokens": least}


@option
def min_length(rng, written, prompt_length):
    token, least = rng.choice(written[:8]), prompt_length + rng.randint(1, 12)
    return lambda calls: {"eos_token_id": token, "pad_token_id": MASK_TOKEN, "min_length": least}


@option
def forced_eos(rng, written, prompt_length):
    return lambda calls, token=rng.randrange(VOCAB): {
        "forced_eos_token_id": token,
        "eos_token_id": token,
        "pad_token_id": MASK_TOKEN,
    }


@option
def repetition_penalty(rng, written, prompt_length):
    return lambda calls, penalty=rng.choice([0.7, 1.2, 1.8]): {"repetition_penalty": penalty}


@option
def no_repeat_ngram_size(rng, written, prompt_length):
    return lambda calls, size=rng.choice([1, 2, 3]): {"no_repeat_ngram_size": size}


@option
def bad_words(rng, written, prompt_length):
    at = rng.randrange(len(written) - 2)
    words = [[rng.choice(written)], written[at : at + 2], written[at : at + 3]]
    return lambda calls, words=rng.sample(words, 2): {"bad_words_ids": words}


@option
def suppressed_tokens(rng, written, prompt_length):
    tokens, first = rng.sample(range(VOCAB), VOCAB // 3), [written[0], rng.randrange(VOCAB)]
    return lambda calls: {"suppress_tokens": tokens, "begin_suppress_tokens": first}


@option
def sequence_bias(rng, written, prompt_length):
    bias = [[[rng.randrange(VOCAB)], 4.0], [[written[0], rng.randrange(VOCAB)], 9.0]]
    return lambda calls: {"sequence_bias": bias}


@option
def exponential_decay(rng, written, prompt_length):
    token = rng.randrange(VOCAB)
    return lambda calls: {
        "exponential_decay_length_penalty": (3, 1.4),
        "eos_token_id": token,
        "pad_token_id": MASK_TOKEN,
    }


@option
def prefix_constraint(rng, written, prompt_length):
    def allowed(batch_id, ids):
        return [t for t in range(VOCAB) if (t + int(ids[-1])) % 3 != 0]

    return lambda calls: {"prefix_allowed_tokens_fn": allowed}


@option
def prefix_processor(rng, written, prompt_length):
    return lambda calls: {"logits_processor": LogitsProcessorList([PrefixProcessor(), Recorder(calls)])}


@option
def counting_processor(rng, written, prompt_length):
    return lambda calls: {"logits_processor": LogitsProcessorList([Recorder(calls), CountingProcessor()])}


@option
def stop_at_token(rng, written, prompt_length):
    token, times = rng.choice(written), rng.choice([1, 1, 2])
    return lambda calls: {"stopping_criteria": StoppingCriteriaList([StopAfterToken(token, times, prompt_length)])}


@option
def stop_after_calls(rng, written, prompt_length):
    limit = rng.randint(1, 14)
    return lambda calls: {"stopping_criteria": StoppingCriteriaList([StopAfterCalls(limit, calls)])}


@option
def stop_strings(rng, written, prompt_length):
    tokenizer, at = make_tokenizer(), rng.randrange(len(written) - 2)
    text = tokenizer.decode(written[at : at + 3])
    # From the middle of one token to the middle of another, or a whole token.
    strings = rng.choice([[text[1:5]], [text[1:3], "no such text"], [text[:2]]])
    return lambda calls: {"stop_strings": strings, "tokenizer": tokenizer}


@option
def no_time(rng, written, prompt_length):
    return lambda calls: {"max_time": 1e-9}


@option
def enough_time(rng, written, prompt_length):
    return lambda calls: {"max_time": 3600.0}


# Pairs that meet in practice.
COMBINATIONS = (
    ("eos", "repetition-penalty"),
    ("min-new-tokens", "counting-processor"),
    ("several-eos", "stop-after-calls"),
    ("no-repeat-ngram-size", "stop-at-token"),
    ("bad-words", "eos"),
    ("stop-strings", "suppressed-tokens"),
)


# One case


@functools.cache
def cached_target(arch: str, attn_implementation: str):
    return make_target(arch, seed=7, attn_implementation=attn_implementation)


@functools.cache
def cached_draft(target, seed: int, config: str):
    return make_draft(target, seed=seed, **json.loads(config))


@dataclass
class Case:
    arch: str
    attention: str
    draft: dict[str, Any]
    kind: str
    spoil: float
    prompt_length: int
    pads: int
    limit: dict[str, int]
    proposals: int | None
    options: tuple[str, ...]
    door: str
    details: bool
    seed: int


def draw_case(seed: int, index: int) -> Case:
    """Everything about a case, from its two numbers."""
    rng = random.Random(seed * 1000 + index)
    arch = ARCHITECTURES[seed % len(ARCHITECTURES)]
    block = rng.randint(2, 9)
    head = rng.random() < 0.7
    draft: dict[str, Any] = {"block_size": block, "head": head, "shift_label": rng.random() < 0.5}
    if head:
        draft["pure_draft_prefix_len"] = rng.choice([0, 1])
    if rng.random() < 0.3:
        draft |= {"sliding_window": rng.choice([4, 8]), "sliding_window_rule": rng.choice(["causal", "symmetric"])}
    if rng.random() < 0.2:
        draft["target_layer_ids"] = rng.choice([[1], [3], [3, 0], [0, 1, 2, 3]])
    options = (rng.choice(list(OPTIONS)),) if rng.random() < 0.75 else rng.choice(COMBINATIONS)
    prompt_length = rng.choice([1, 2, block - 1, block, block + 1, 11, 12, 13, rng.randint(14, 30), 41, 64])
    new_tokens = rng.choice([1, 2, block - 1, block, block + 1, 2 * block + 3, 2 * block + 3, 30])
    pads = rng.randint(1, 9) if rng.random() < 0.15 else 0
    attention = rng.choice(["eager", "sdpa"])
    if arch == "gemma2-softcap":
        # Needs eager attention, which gives a float64 model NaN at a row that sees nothing, as pads do.
        attention, pads = "eager", 0
    elif pads:
        attention = "sdpa"
    by_length = rng.random() < 0.2
    return Case(
        arch=arch,
        attention=attention,
        draft=draft,
        kind=rng.choice(["random", "good", "good", "good", "wrong"]),
        spoil=rng.choice([0.0, 0.1, 0.3, 0.5]),
        prompt_length=prompt_length,
        pads=pads,
        limit={"max_length": pads + prompt_length + new_tokens} if by_length else {"max_new_tokens": new_tokens},
        proposals=rng.choice([1, max(1, block - 2), block - 1, block, 50]) if rng.random() < 0.25 else None,
        options=options,
        # transformers keeps the tokenizer from a callable, and so stop strings out of that door.
        door=rng.choice(["assistant"] * 3 + ["custom", "spec"]) if "stop-strings" not in options else "assistant",
        details=rng.random() < 0.5,
        seed=rng.randrange(10**6),
    )


def check_case(seed: int, index: int, tree: int = 0):
    """Run case `index` of `seed` plain and with its draft, whose proposals form a `tree` of that size; raises where
    they differ."""
    case = draw_case(seed, index)
    rng = random.Random(case.seed)
    target = cached_target(case.arch, case.attention)
    prompt = random_tokens(1, case.prompt_length, seed=case.seed)
    inputs = {"input_ids": prompt}
    if case.pads:
        inputs["input_ids"] = torch.cat([torch.zeros(1, case.pads, dtype=torch.long), prompt], dim=1)
        inputs["attention_mask"] = (torch.arange(case.pads + case.prompt_length) >= case.pads).long()[None]
    length = case.pads + case.prompt_length

    # Options refer to tokens that are really written.
    written = target.generate(**inputs, max_new_tokens=20)[0, length:].tolist()
    makers = [OPTIONS[name](rng, written, length) for name in case.options]

    def arguments(calls):
        made: dict[str, Any] = dict(case.limit)
        for make in makers:
            made |= make(calls)
        return made

    plain_calls: list = []
    plain = target.generate(
        **inputs, **arguments(plain_calls), return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    assert torch.cat(plain.logits).isfinite().all(), f"nothing to compare: {case}"
    new_tokens = plain.sequences.shape[1] - length

    draft = cached_draft(target, seed % 3, json.dumps(case.draft))
    spoiled: set[int] = set()
    if case.kind != "random":
        text = plain.sequences[0, case.pads :]
        share = 1.0 if case.kind == "wrong" else case.spoil
        spoiled = {i for i in range(case.prompt_length, len(text)) if rng.random() < share}
        draft = GoodDraft.following(draft, target, text, spoiled)
    draft.use_tree(tree)

    calls: list = []
    extra = {} if case.proposals is None else {"num_assistant_tokens": case.proposals}
    if case.details:
        extra |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    if case.door == "assistant":
        call = partial(target.generate, assistant_model=draft)
    elif case.door == "custom":
        call = partial(target.generate, custom_generate=draft.decode)
    else:
        call = partial(draft.spec_generate, target=target)
    output = call(**inputs, **arguments(calls), **extra)

    sequences = output.sequences if case.details else output
    assert sequences.tolist() == plain.sequences.tolist(), f"tokens differ: {case}"
    assert calls == plain_calls, f"processors or criteria were called differently: {case}"
    if case.details:
        for name in ("scores", "logits"):
            ours, theirs = getattr(output, name), getattr(plain, name)
            assert len(ours) == len(theirs), f"{name}: {len(ours)} entries, not {len(theirs)}: {case}"
            torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=1e-4, atol=1e-4, equal_nan=True)
        lengths = output.acceptance_lengths[0].tolist()
        assert 1 + sum(lengths) == new_tokens, f"acceptance lengths {lengths} for {new_tokens} tokens: {case}"
        # What a tree holds besides, the draft's probabilities say.
        if case.kind != "random" and tree == 0:
            most = case.draft["block_size"] - (not case.draft["shift_label"])
            proposals = case.draft["block_size"] - 1 if case.proposals is None else min(case.proposals, most)
            counted = expected_acceptance(case.prompt_length, new_tokens, proposals, spoiled)
            assert lengths == counted, f"acceptance lengths {lengths}, by hand {counted}: {case}"


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"{ARCHITECTURES[seed % len(ARCHITECTURES)]}-seed{seed}")
def test_ten_random_cases_equal_plain_generate(seed):
    failures = []
    for index in range(CASES_PER_SEED):
        try:
            check_case(seed, index)
        except Exception:
            failures.append(f"check_case({seed}, {index}):\n{traceback.format_exc(limit=-3)}")
    assert not failures, f"{len(failures)} of {CASES_PER_SEED} cases:\n" + "\n".join(failures)


def test_random_cases_cover_every_option_and_setting():
    cases = [draw_case(seed, index) for seed in SEEDS for index in range(CASES_PER_SEED)]
    assert len(cases) == 500
    assert {name for case in cases for name in case.options} == set(OPTIONS)
    assert {case.arch for case in cases} == set(ARCHITECTURES)
    assert {case.draft["block_size"] for case in cases} == set(range(2, 10))
    assert {case.door for case in cases} == {"assistant", "custom", "spec"}
    assert {case.kind for case in cases} == {"random", "good", "wrong"}
    assert {(case.draft["head"], case.draft["shift_label"]) for case in cases} == {
        (head, shift) for head in (True, False) for shift in (True, False)
    }


# The helper must do what the cases rely on


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_steering_states_reach_every_token_through_the_targets_own_head(arch):
    target = cached_target(arch, "eager")
    logits = target.get_output_embeddings()(steering_states(target))
    assert logits.argmax(dim=-1).tolist() == list(range(VOCAB))


@pytest.mark.parametrize("shift_label", [True, False], ids=["shifted", "unshifted"])
@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
def test_a_good_draft_is_accepted_exactly_up_to_its_spoiled_positions(head, shift_label):
    target = cached_target("qwen3", "eager")
    prompt = random_tokens(1, 9, seed=3)
    plain = target.generate(prompt, max_new_tokens=40)
    # Blocks of 6 from position 9 on: 5 proposals, cut after 2, 0 and 4 of them, the others whole.
    spoiled = {12, 13, 18, 40}
    draft = make_draft(target, head=head, shift_label=shift_label)
    draft = GoodDraft.following(draft, target, plain[0], spoiled)
    output = target.generate(prompt, max_new_tokens=40, assistant_model=draft, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.acceptance_lengths[0].tolist() == [3, 1, 5, 6, 6, 6, 4, 6, 2]
    assert output.acceptance_lengths[0].tolist() == expected_acceptance(9, 40, 5, spoiled)


def test_a_draft_may_propose_the_mask_token():
    # To the target it is a token like any other, so what the target writes is output.
    target = cached_target("qwen3", "eager")
    texts = (target.generate(random_tokens(1, 5, seed=seed), max_new_tokens=30) for seed in range(100))
    plain = next(text for text in texts if MASK_TOKEN in text[0, 7:25])
    draft = GoodDraft.following(make_draft(target), target, plain[0])
    output = target.generate(plain[:, :5], max_new_tokens=30, assistant_model=draft, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.acceptance_lengths[0].tolist() == [6, 6, 6, 6, 5]
