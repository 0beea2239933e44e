# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Training passes: against the reference's numbers, and against decoding."""

from dataclasses import replace

import pytest
import torch
from helpers import (
    BLOCK,
    MASK_TOKEN,
    load_fixture,
    make_draft,
    random_tokens,
)
from training_batches import (
    GAMMA,
    LENGTH,
    WINDOW_IDS,
    WINDOWS,
    close,
    every_backend,
    every_fixture,
    every_labelling,
    features_of,
    random_batch,
)

from domino_spec.generation.context import TargetParts
from domino_spec.training.blocks import (
    block_attention_masks,
    build_blocks,
)
from domino_spec.training.objective import (
    domino_loss,
    teacher_forced_hidden,
)

# The reference's numbers


def fixture_blocks(expected, config):
    return build_blocks(
        expected["train_input_ids"],
        expected["train_loss_mask"],
        expected["anchor_positions"],
        expected["block_keep_mask"],
        config,
        GAMMA,
    )


@every_fixture
def test_blocks_equal_the_reference(name):
    fixture, expected = load_fixture(name), load_fixture(name).expected
    blocks = fixture_blocks(expected, fixture.draft().config)
    assert torch.equal(blocks.block_ids, expected["train_block_ids"])
    assert torch.equal(blocks.position_ids, expected["train_position_ids"])
    assert torch.equal(blocks.target_ids, expected["train_target_ids"])
    assert torch.equal(blocks.prefix_ids, expected["train_gru_input_ids"])
    assert torch.equal(blocks.keep, expected["block_keep_mask"])
    close(blocks.weights, expected["train_weight_mask"], atol=1e-7)
    close(blocks.weights.sum(), expected["loss_weight_sum"], atol=1e-4)


@every_fixture
def test_masks_equal_the_reference(name):
    config, expected = load_fixture(name).draft().config, load_fixture(name).expected
    length = expected["train_input_ids"].shape[1]
    masks = block_attention_masks(expected["anchor_positions"], expected["block_keep_mask"], length, config)
    known = {"full_attention": "train_attention_mask", "sliding_attention": "train_attention_mask_sliding"}
    assert set(masks) == set(config.layer_types)
    for layer_type, mask in masks.items():
        assert mask.dtype == torch.bool
        assert torch.equal(mask[:, 0], expected[known[layer_type]]), layer_type


def fixture_pass(name, backend, weight):
    """`(expected, draft, blocks, hidden, objective)` of the fixture's training batch."""
    fixture, expected = load_fixture(name), load_fixture(name).expected
    draft, target = fixture.draft(backend), TargetParts(fixture.target())
    blocks = fixture_blocks(expected, draft.config)
    hidden = teacher_forced_hidden(
        draft, target, blocks, expected["anchor_positions"], expected["train_context_features"]
    )
    return expected, draft, target, blocks, hidden, domino_loss(draft, target, blocks, hidden, weight)


@every_backend
@every_fixture
@torch.no_grad()
def test_hidden_and_cross_entropies_equal_the_reference(name, backend):
    expected, draft, target, blocks, hidden, _ = fixture_pass(name, backend, 0.5)
    known = expected["train_draft_hidden"].view_as(hidden)
    close(hidden[blocks.keep], known[blocks.keep], atol=1e-5)
    # Each position's cross entropy, seen through a weight on it alone.
    for n, a, k in (blocks.weights > 0).nonzero()[::7].tolist():
        weights = torch.zeros_like(blocks.weights)
        weights[n, a, k] = 1e4
        output = domino_loss(draft, target, replace(blocks, weights=weights), hidden, 0.5)
        close(output.base_loss, expected["train_base_ce"][n, a, k], atol=1e-5, rtol=1e-5)
        close(output.final_loss, expected["train_final_ce"][n, a, k], atol=1e-5, rtol=1e-5)


@every_backend
@every_fixture
@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0], ids=lambda weight: f"lambda {weight}")
def test_losses_equal_the_reference(name, backend, weight):
    expected, *_, output = fixture_pass(name, backend, weight)
    close(output.loss, expected[f"loss.lambda_{weight}"], atol=1e-5)
    close(output.base_loss, expected["base_loss"], atol=1e-5)
    close(output.final_loss, expected["final_loss"], atol=1e-5)


@every_backend
@every_fixture
def test_metrics_equal_the_reference(name, backend):
    expected, *_, output = fixture_pass(name, backend, 0.5)
    metrics = {"accuracy", "base_accuracy", "accept_len", "base_accept_len"}
    assert set(output.sums) == set(output.counts) == metrics
    for metric in metrics:
        close(output.sums[metric] / output.counts[metric], expected[metric], atol=1e-6)


@every_backend
@every_fixture
def test_gradients_equal_the_reference(name, backend):
    expected, draft, *_, output = fixture_pass(name, backend, 0.5)
    output.loss.backward()
    known = {key.removeprefix("grad."): value for key, value in expected.items() if key.startswith("grad.")}
    assert len(known) == 4
    for parameter, value in known.items():
        error = (draft.get_parameter(parameter).grad - value).norm() / value.norm()
        assert error < 1e-5, (parameter, float(error))
    for parameter, value in draft.named_parameters():
        # Unused slots see nothing at all; they must not spoil the others.
        assert value.grad is not None and value.grad.isfinite().all(), parameter


# Training against decoding


@every_backend
@pytest.mark.parametrize("window", WINDOWS, ids=WINDOW_IDS)
@torch.no_grad()
def test_each_training_block_equals_a_decoding_pass_at_its_anchor(target, parts, window, backend):
    draft = make_draft(target, attn_implementation=backend, **window)
    ids, mask, anchors, keep = random_batch(0)
    features = features_of(target, parts, ids, draft)
    blocks = build_blocks(ids, mask, anchors, keep, draft.config, None)
    hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features)
    for n, s in keep.nonzero().tolist():
        anchor = int(anchors[n, s])
        block = torch.full((1, BLOCK), MASK_TOKEN)
        block[0, 0] = ids[n, anchor]
        alone = draft(parts.embed(block), features[n : n + 1, :anchor]).last_hidden_state
        close(hidden[n, s], alone[0], atol=1e-5)


def slow_rollout(draft, parts, token, features):
    """Greedy proposals after `token`, as many as the block has predicting offsets, one by one with the head's step."""
    config = draft.config
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[0, 0] = token
    hidden = draft(parts.embed(block), features).last_hidden_state[0, 0 if config.shift_label else 1 :]
    state, made = None, [token]
    for j, at in enumerate(hidden):
        state = draft.step(parts.embed(made[-1][None]), state)
        logits = parts.logits(at)
        if j >= config.pure_draft_prefix_len:
            logits = logits + draft.correction(at, state[0])
        made.append(logits.argmax(-1))
    return torch.stack(made[1:])


@every_labelling
@pytest.mark.parametrize("prefix", [0, 1, 3], ids=lambda prefix: f"prefix {prefix}")
@pytest.mark.parametrize("window", [{}, {"sliding_window": 9}], ids=["full", "sliding"])
@torch.no_grad()
def test_a_draft_that_is_trained_on_its_own_proposals_is_always_right(target, parts, window, prefix, shift_label):
    # Mask, positions, labels, head input and prefix of training agree with decoding to the index, or this fails.
    draft = make_draft(target, shift_label=shift_label, pure_draft_prefix_len=prefix, **window)
    context = random_tokens(1, 9)
    features = features_of(target, parts, context, draft)
    anchor = 8
    proposals = slow_rollout(draft, parts, context[0, anchor], features[:, :anchor])
    ids = torch.cat([context, proposals[None]], dim=1)
    # No feature after the anchor may matter: a training batch would hold them, a decoding pass does not.
    features = torch.cat([features, torch.full((1, len(proposals), features.shape[-1]), 1e3)], dim=1)
    anchors, keep = torch.tensor([[anchor]]), torch.tensor([[True]])
    blocks = build_blocks(ids, torch.ones_like(ids), anchors, keep, draft.config, None)
    hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features)
    output = domino_loss(draft, parts, blocks, hidden, 0.0)
    assert len(proposals) == (BLOCK if shift_label else BLOCK - 1)
    assert output.counts["accuracy"] == output.sums["accuracy"] == len(proposals)
    assert output.sums["accept_len"] == 1 + len(proposals)
    if prefix == 0:
        # The head has a say, so the base alone is wrong somewhere.
        assert output.sums["base_accuracy"] < len(proposals)


# No leak


@every_backend
@pytest.mark.parametrize("window", WINDOWS[:3], ids=WINDOW_IDS[:3])
@torch.no_grad()
def test_nothing_at_or_after_an_anchor_changes_its_block_at_all(target, parts, window, backend):
    draft = make_draft(target, attn_implementation=backend, **window)
    ids = random_tokens(2, LENGTH)
    anchors = torch.tensor([[2, 4, 5, 13], [3, 3, 9, 17]])  # overlapping, even equal
    keep, mask = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, LENGTH)
    features = features_of(target, parts, ids, draft)

    def hidden_of(ids, features):
        blocks = build_blocks(ids, mask, anchors, keep, draft.config, None)
        return teacher_forced_hidden(draft, parts, blocks, anchors, features)

    before = hidden_of(ids, features)
    for n in range(2):
        for anchor in sorted(set(anchors[n].tolist())):
            other_ids, other_features = ids.clone(), features.clone()
            # The anchor's own token is the block's input; its features do not exist yet.
            other_ids[n, anchor + 1 :] = (other_ids[n, anchor + 1 :] + 1) % MASK_TOKEN
            other_features[n, anchor:] += 100.0
            after = hidden_of(other_ids, other_features)
            early = anchors[n] <= anchor
            assert torch.equal(after[n, early], before[n, early]), (n, anchor)
            assert torch.equal(parts.logits(after[n, early]), parts.logits(before[n, early]))
            assert torch.equal(after[1 - n], before[1 - n]), "another row changed"
            for s in (~early).nonzero().flatten().tolist():
                assert not torch.equal(after[n, s], before[n, s]), "the change was not seen by later blocks"


@every_backend
@torch.no_grad()
def test_what_a_block_holds_does_not_change_other_blocks_at_all(target, parts, backend):
    draft = make_draft(target, attn_implementation=backend, sliding_window=5)
    ids, anchors = random_tokens(1, LENGTH), torch.tensor([[4, 5, 6]])
    keep, mask = torch.ones(1, 3, dtype=torch.bool), torch.ones(1, LENGTH)
    features = features_of(target, parts, ids, draft)
    blocks = build_blocks(ids, mask, anchors, keep, draft.config, None)
    before = teacher_forced_hidden(draft, parts, blocks, anchors, features)
    for s in range(3):
        block_ids = blocks.block_ids.clone()
        block_ids[0, s * BLOCK : (s + 1) * BLOCK] = random_tokens(1, BLOCK, 9)[0]
        after = teacher_forced_hidden(draft, parts, replace(blocks, block_ids=block_ids), anchors, features)
        for other in range(3):
            assert torch.equal(after[0, other], before[0, other]) == (other != s)


def test_each_block_reads_all_features_before_its_anchor_and_no_other(target, parts):
    draft = make_draft(target)
    ids, anchors = random_tokens(1, LENGTH), torch.tensor([[0, 1, 7, 19]])
    keep, mask = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, LENGTH)
    features = features_of(target, parts, ids, draft).requires_grad_()
    blocks = build_blocks(ids, mask, anchors, keep, draft.config, None)
    for s, anchor in enumerate(anchors[0].tolist()):
        features.grad = None
        teacher_forced_hidden(draft, parts, blocks, anchors, features)[0, s].square().sum().backward()
        read = features.grad[0].abs().sum(-1) > 0
        assert read.tolist() == [position < anchor for position in range(LENGTH)]
