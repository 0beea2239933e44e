# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches of blocks for the tests of training, and how their results are compared."""

import pytest
import torch
from helpers import (
    FIXTURES,
    make_draft,
    random_tokens,
)

from domino_spec.training.blocks import (
    build_blocks,
    sample_anchors,
)
from domino_spec.training.objective import teacher_forced_hidden

BACKENDS = ("eager", "sdpa")
GAMMA = 7.0  # of the fixtures
LENGTH = 20
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_fixture = pytest.mark.parametrize("name", FIXTURES)
every_labelling = pytest.mark.parametrize("shift_label", [True, False], ids=["shifted labels", "unshifted labels"])

WINDOWS = [{}, *({"sliding_window": w, "sliding_window_rule": r} for w in (4, 9) for r in ("causal", "symmetric"))]
WINDOWS.append({"sliding_window": 4, "sliding_window_rule": "none"})
WINDOW_IDS = [f"{w['sliding_window_rule']} window {w['sliding_window']}" if w else "full" for w in WINDOWS]


def close(left, right, atol, rtol=0.0):
    torch.testing.assert_close(left, right, atol=atol, rtol=rtol, check_dtype=False)


def random_loss_mask(rows, length, seed, share=0.6):
    return (torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < share).float()


def random_batch(seed, rows=3, length=LENGTH, num_anchors=4):
    ids, mask = random_tokens(rows, length, seed), random_loss_mask(rows, length, seed, share=0.8)
    # A row with fewer usable anchors than the others have slots.
    mask[-1, :4], mask[-1, 4:] = 1, 0
    return ids, mask, *sample_anchors(mask, num_anchors, range(seed, seed + rows))


def features_of(target, parts, ids, draft):
    with torch.no_grad(), parts.capture(draft.config.target_layer_ids) as capture:
        target(ids)
        return capture.take(target.device)


def small_pass(target, parts, seed=0, length=LENGTH, **config):
    draft = make_draft(target, attn_implementation="sdpa", **config)
    ids, mask, anchors, keep = random_batch(seed, length=length)
    blocks = build_blocks(ids, mask, anchors, keep, draft.config, 4.0)
    hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features_of(target, parts, ids, draft))
    return draft, blocks, hidden


def gradients(draft, loss, hidden=None):
    draft.zero_grad()
    loss.backward(retain_graph=True)
    return {name: None if p.grad is None else p.grad.clone() for name, p in draft.named_parameters()}
