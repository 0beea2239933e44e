# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate` reproduces the public reference implementation: its tokens, proposals and acceptance lengths."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers import FIXTURES, load_fixture
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

NEW_TOKENS = 48
BLOCK = 8
RULES = ("causal", "symmetric", "none")
SUFFIX = {"causal": "", "symmetric": ".symmetric_window", "none": ".no_window"}
ATTENTION = ("eager", "sdpa")

# Fixture and window rule; the sliding fixture holds all rules.
SETTINGS = [(name, "causal") for name in FIXTURES] + [("sliding", "symmetric"), ("sliding", "none")]

each_setting = pytest.mark.parametrize(
    ("name", "rule"), SETTINGS, ids=[name + SUFFIX[rule].replace(".", "-") for name, rule in SETTINGS]
)
each_fixture = pytest.mark.parametrize("name", FIXTURES)
each_attention = pytest.mark.parametrize("attention", ATTENTION)


@contextmanager
def recorded_passes(target):
    """Collects the `input_ids` of every target pass: the prompt, then anchor and proposals of each round."""
    passes: list[list[int]] = []

    def note(module, args, kwargs):
        passes.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0])[0].tolist())

    handle = target.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def load(name, attention, rule="causal"):
    fixture = load_fixture(name)
    draft, target = fixture.draft(attention), fixture.target(attention)
    draft.config.sliding_window_rule = rule
    return fixture.expected, draft, target


def decode(target, draft, prompt_ids, **kwargs):
    return target.generate(
        prompt_ids, max_new_tokens=NEW_TOKENS, assistant_model=draft, return_dict_in_generate=True, **kwargs
    )


def clipped(lengths: list[int]) -> list[int]:
    """The reference's acceptance lengths cut at the length limit, as ours are: it may even run one round too many."""
    result: list[int] = []
    for length in lengths:
        if remaining := NEW_TOKENS - 1 - sum(result):
            result.append(min(length, remaining))
    return result


@each_attention
@each_setting
def test_output_and_acceptance_lengths_equal_the_reference(name, rule, attention):
    expected, draft, target = load(name, attention, rule)
    output = decode(target, draft, expected["prompt_ids"])
    assert output.sequences.tolist() == expected["spec_output_ids" + SUFFIX[rule]].tolist()
    assert output.sequences.tolist() == expected["ar_output_ids"].tolist()
    reference = expected["acceptance_lengths" + SUFFIX[rule]].tolist()
    assert output.acceptance_lengths.dtype == torch.long
    assert output.acceptance_lengths[0].tolist() == clipped(reference)
    # Only at the limit do the two differ.
    assert output.acceptance_lengths[0].tolist()[:-1] == reference[: output.acceptance_lengths.shape[1] - 1]


@each_attention
@each_setting
def test_the_target_sees_the_references_proposals_in_every_round(name, rule, attention):
    expected, draft, target = load(name, attention, rule)
    with recorded_passes(target) as passes:
        decode(target, draft, expected["prompt_ids"])
    prefill, *rounds = passes
    assert prefill == expected["prompt_ids"][0].tolist()
    reference = expected["spec_block_ids" + SUFFIX[rule]].tolist()
    assert rounds[0] == [expected["block_ids"][0, 0].item(), *expected["greedy_proposals" + SUFFIX[rule]][0].tolist()]
    # Near the length limit fewer proposals can still count; those that are sent are the reference's.
    lengths = clipped(expected["acceptance_lengths" + SUFFIX[rule]].tolist())
    assert len(rounds) == len(lengths)
    for number, ours in enumerate(rounds):
        assert ours == reference[number][: len(ours)]
        assert len(ours) >= min(BLOCK, NEW_TOKENS - 1 - sum(lengths[:number]))


@pytest.mark.parametrize("name", ["shift1-prefix1", "sliding"])
def test_a_shifted_draft_offers_a_whole_block_when_asked(name):
    expected, draft, target = load(name, "eager")
    with recorded_passes(target) as passes:
        output = decode(target, draft, expected["prompt_ids"], num_assistant_tokens=BLOCK)
    assert passes[1] == [expected["block_ids"][0, 0].item(), *expected["greedy_proposals_full"][0].tolist()]
    assert output.sequences.tolist() == expected["ar_output_ids"].tolist()


@each_attention
@each_fixture
def test_plain_generate_equals_the_reference(name, attention):
    expected, _, target = load(name, attention)
    plain = target.generate(expected["prompt_ids"], max_new_tokens=NEW_TOKENS)
    assert plain.tolist() == expected["ar_output_ids"].tolist()


@each_attention
@each_setting
def test_without_the_head_the_tokens_are_the_same_and_proposals_are_the_base_logits_choice(name, rule, attention):
    expected, draft, target = load(name, attention, rule)
    with recorded_passes(target) as passes:
        output = target.generate(
            expected["prompt_ids"],
            max_new_tokens=NEW_TOKENS,
            custom_generate=partial(draft.decode, use_head=False),
            return_dict_in_generate=True,
        )
    assert output.sequences.tolist() == expected["ar_output_ids"].tolist()
    assert 1 + output.acceptance_lengths.sum() == NEW_TOKENS
    base = expected["base_logits" + SUFFIX[rule]][0].argmax(dim=-1).tolist()
    base = base[:-1] if draft.config.shift_label else base[1:]
    assert passes[1] == [expected["block_ids"][0, 0].item(), *base]
    # The correction changes most first proposals of these fixtures (README), so a head that is still on shows.
    assert base != expected["greedy_proposals" + SUFFIX[rule]][0].tolist()


@each_fixture
def test_every_door_gives_the_reference(name):
    expected, draft, target = load(name, "eager")
    prompt_ids, details = expected["prompt_ids"], {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    outputs = {
        "assistant_model": target.generate(prompt_ids, assistant_model=draft, **details),
        "custom_generate": target.generate(prompt_ids, custom_generate=draft.decode, **details),
        "custom_generate, head stated": target.generate(
            prompt_ids, custom_generate=partial(draft.decode, use_head=True), **details
        ),
        "spec_generate": draft.spec_generate(prompt_ids, target=target, **details),
    }
    for door, output in outputs.items():
        assert output.sequences.tolist() == expected["spec_output_ids"].tolist(), door
        assert output.acceptance_lengths[0].tolist() == clipped(expected["acceptance_lengths"].tolist()), door
    ids = draft.spec_generate(prompt_ids, target=target, max_new_tokens=NEW_TOKENS)
    assert isinstance(ids, torch.Tensor) and ids.tolist() == expected["spec_output_ids"].tolist()


@each_attention
@each_fixture
def test_left_padding_changes_neither_tokens_nor_acceptance(name, attention):
    # Pads must not enter the draft's context, and positions count real tokens: then acceptance is the unpadded one.
    expected, draft, target = load(name, attention)
    prompt_ids, pads = expected["prompt_ids"], 5
    padded = torch.cat([torch.full((1, pads), 3), prompt_ids], dim=1)
    mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(prompt_ids)], dim=1)
    output = decode(target, draft, padded, attention_mask=mask)
    assert output.sequences[:, pads:].tolist() == expected["spec_output_ids"].tolist()
    assert output.acceptance_lengths[0].tolist() == clipped(expected["acceptance_lengths"].tolist())


class RunsTheTarget(LogitsProcessor, StoppingCriteria):
    """Runs the target itself and changes nothing, as classifier-free guidance does between a pass and its choice."""

    def __init__(self, target, ids):
        self.target, self.ids = target, ids

    def __call__(self, input_ids, scores):
        self.target(self.ids)
        # As a criterion it sees no scores unless they are recorded, and nobody is done.
        return scores if scores is not None else torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("role", ["logits_processor", "stopping_criteria"])
@each_fixture
def test_target_passes_of_others_do_not_enter_the_context(name, role):
    expected, draft, target = load(name, "eager")
    other = RunsTheTarget(target, expected["prompt_ids"][:, :5])
    lists = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
    output = decode(target, draft, expected["prompt_ids"], **{role: lists[role]([other])})
    assert output.sequences.tolist() == expected["spec_output_ids"].tolist()
    assert output.acceptance_lengths[0].tolist() == clipped(expected["acceptance_lengths"].tolist())
