# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The draft's two parts give the numbers of the public reference implementation."""

import copy
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    FIXTURES,
    load_fixture,
)
from passes import close, every_backend
from transformers import DynamicCache

from domino_spec.generation.context import TargetParts


@dataclass(frozen=True)
class Case:
    """One fixture under one window rule, whose tensors carry `suffix`."""

    name: str
    suffix: str = ""
    rule: str = "causal"

    def __str__(self):
        return self.name + self.suffix

    def expected(self, tensor):
        """The rule's own tensor, or the common one where no rule takes part."""
        known = load_fixture(self.name).expected
        return known.get(tensor + self.suffix, known[tensor])

    def draft(self, attn_implementation="eager"):
        return load_fixture(self.name).draft(attn_implementation, sliding_window_rule=self.rule)

    def target(self):
        return load_fixture(self.name).target()


CASES = [
    *(Case(name) for name in FIXTURES),
    Case("sliding", ".symmetric_window", "symmetric"),
    Case("sliding", ".no_window", "none"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_backend
@every_case
@torch.no_grad()
def test_first_step_equals_the_reference(case, backend):
    draft, target, expected = case.draft(backend), TargetParts(case.target()), case.expected
    embeds = target.embed(expected("block_ids"))
    hidden = draft(embeds, expected("context_features"), expected("position_ids")).last_hidden_state
    close(hidden, expected("draft_hidden"))
    close(target.logits(hidden), expected("base_logits"))
    # Positions need not be given: those of the first pass start at 0.
    assert torch.equal(draft(embeds, expected("context_features")).last_hidden_state, hidden)


@every_backend
@every_case
@torch.no_grad()
def test_second_step_with_the_cache_equals_the_reference(case, backend):
    draft, target, expected = case.draft(backend), TargetParts(case.target()), case.expected
    cache = DynamicCache()
    draft(target.embed(expected("block_ids")), expected("context_features"), cache=cache)
    cache.crop(-draft.config.block_size)
    assert cache.get_seq_length() == expected("prompt_ids").shape[1]

    embeds, positions = target.embed(expected("step2_block_ids")), expected("step2_position_ids")
    given, default = copy.deepcopy(cache), cache
    hidden = draft(embeds, expected("step2_context_features"), positions, cache=given).last_hidden_state
    close(hidden, expected("step2_draft_hidden"))
    assert given.get_seq_length() == int(positions.max()) + 1
    # Without positions they go on from the cache's length.
    again = draft(embeds, expected("step2_context_features"), cache=default).last_hidden_state
    assert torch.equal(again, hidden)


@pytest.mark.parametrize("name", FIXTURES)
@torch.no_grad()
def test_context_features_equal_the_reference(name):
    fixture = load_fixture(name)
    target = fixture.target()
    with TargetParts(target).capture(fixture.draft().config.target_layer_ids) as capture:
        target(fixture.expected["prompt_ids"])
        # The residual stream holds large values, so float noise is larger than elsewhere.
        close(capture.take(target.device), fixture.expected["context_features"], atol=1e-4)


@pytest.mark.parametrize(
    ("case", "proposals"),
    [
        (case, name)
        for case in CASES
        for name in ("greedy_proposals", "greedy_proposals_full")
        # A block without shifted labels holds no B-th proposal.
        if name in load_fixture(case.name).expected
    ],
    ids=lambda value: {"greedy_proposals": "B-1", "greedy_proposals_full": "B"}.get(value, str(value)),
)
@torch.no_grad()
def test_head_teacher_forced_with_the_reference_s_proposals_gives_its_logits(case, proposals):
    draft, target, expected = case.draft(), TargetParts(case.target()), case.expected
    tokens = torch.cat([expected("block_ids")[:, :1], expected(proposals)], dim=1)
    count = tokens.shape[1] - 1
    states = draft.prefix_states(target.embed(tokens))
    # Proposal j comes from offset j (shifted) or j + 1, and from the state after the anchor and j proposals.
    first = 0 if draft.config.shift_label else 1
    hidden = expected("draft_hidden")[:, first : first + count]
    corrected = torch.arange(count)[None, :, None] >= draft.config.pure_draft_prefix_len
    logits = target.logits(hidden) + draft.correction(hidden, states[:, :count]) * corrected
    close(logits, expected(proposals.replace("greedy_proposals", "corrected_logits")))
    assert torch.equal(logits.argmax(-1), expected(proposals))
    if not case.suffix:
        known = expected("gru_states")
        both = min(known.shape[1], states.shape[1])
        close(states[:, :both], known[:, :both])


@every_case
@torch.no_grad()
def test_head_unrolled_step_by_step_makes_the_reference_s_proposals(case):
    draft, target, expected = case.draft(), TargetParts(case.target()), case.expected
    config = draft.config
    token, state, made = expected("block_ids")[:, 0], None, []
    for j in range(config.block_size - 1):
        state = draft.step(target.embed(token), state)
        hidden = expected("draft_hidden")[:, j if config.shift_label else j + 1]
        logits = target.logits(hidden)
        if j >= config.pure_draft_prefix_len:
            logits = logits + draft.correction(hidden, state)
        token = logits.argmax(-1)
        made.append(token)
    assert torch.equal(torch.stack(made, dim=1), expected("greedy_proposals"))
