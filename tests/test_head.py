# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The head: unrolled as teacher-forced, by its equations, and over a shortlist."""

import pytest
import torch
from helpers import (
    BLOCK,
    HIDDEN,
    MASK_TOKEN,
    make_draft,
    random_tokens,
)
from passes import close


@pytest.mark.parametrize("seed", range(3))
def test_step_equals_prefix_states(target, parts, seed):
    draft = make_draft(target, seed=seed)
    embeds = parts.embed(random_tokens(4, BLOCK, seed))
    with torch.no_grad():
        states, state = draft.prefix_states(embeds), None
        assert states.shape == (4, BLOCK, draft.config.gru_hidden_dim)
        for k in range(BLOCK):
            state = draft.step(embeds[:, k], state)
            close(state, states[:, k], atol=1e-12)


def test_step_keeps_no_state_in_the_draft(target, parts):
    draft = make_draft(target)
    embeds = parts.embed(random_tokens(1, 2))
    with torch.no_grad():
        first = draft.step(embeds[:, 0], None)
        draft.step(embeds[:, 1], first)
        assert torch.equal(draft.step(embeds[:, 0], None), first)


def test_prefix_states_equal_the_gru_equations(target, parts):
    draft = make_draft(target)
    embeds = parts.embed(random_tokens(1, BLOCK))[0]
    gru, width = draft.prefix_gru, draft.config.gru_hidden_dim
    state = torch.zeros(width, dtype=draft.dtype)
    with torch.no_grad():
        states = draft.prefix_states(embeds[None])[0]
        for k in range(BLOCK):
            read, kept = gru.weight_ih_l0 @ embeds[k], gru.weight_hh_l0 @ state
            reset, update = (
                torch.sigmoid(read[i * width : (i + 1) * width] + kept[i * width : (i + 1) * width]) for i in (0, 1)
            )
            new = torch.tanh(read[2 * width :] + reset * kept[2 * width :])
            state = (1 - update) * new + update * state
            close(states[k], state, atol=1e-12)


def test_correction_fuses_hidden_then_state(target):
    draft = make_draft(target)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, HIDDEN, generator=generator, dtype=draft.dtype)
    state = torch.randn(2, 3, draft.config.gru_hidden_dim, generator=generator, dtype=draft.dtype)
    inner, outer = draft.embed_proj[0].weight, draft.embed_proj[2].weight
    with torch.no_grad():
        fused = hidden @ inner[:, :HIDDEN].T + state @ inner[:, HIDDEN:].T
        close(draft.correction(hidden, state), torch.nn.functional.silu(fused) @ outer.T, atol=1e-12)


def test_a_shortlist_scores_the_same_as_the_whole_vocabulary(target, parts):
    draft = make_draft(target)
    ids = torch.tensor([0, 3, 50, MASK_TOKEN])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, HIDDEN, generator=generator, dtype=draft.dtype)
    state = torch.randn(2, draft.config.gru_hidden_dim, generator=generator, dtype=draft.dtype)
    with torch.no_grad():
        close(draft.correction(hidden, state, ids), draft.correction(hidden, state)[:, ids], atol=1e-12)
        close(parts.logits(hidden, ids), parts.logits(hidden)[:, ids], atol=1e-12)
