# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Anchors, blocks, masks and losses: against the reference's numbers, against slow code, and against decoding."""

import gc
import math
import random
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import (
    BLOCK,
    FIXTURES,
    MASK_TOKEN,
    VOCAB,
    draft_config,
    load_fixture,
    make_draft,
    make_target,
    random_tokens,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.attention.flex_attention import create_mask

from domino_spec.generation.context import TargetParts
from domino_spec.training.blocks import (
    Blocks,
    block_attention_masks,
    build_blocks,
    pack_rows,
    position_decay,
    sample_anchors,
)
from domino_spec.training.objective import (
    BaseAnchoredCurriculum,
    acceptance_lengths,
    corrected_offsets,
    domino_loss,
    teacher_forced_hidden,
)

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


# Anchors


def random_loss_mask(rows, length, seed, share=0.6):
    return (torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < share).float()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_anchors", [1, 4, 100])
def test_sampled_anchors_are_sorted_distinct_supervised_and_as_many_as_can_be(num_anchors, seed):
    mask = random_loss_mask(6, 15, seed)
    mask[0] = 0
    mask[1] = 1
    anchors, keep = sample_anchors(mask, num_anchors, range(seed, seed + 6))
    usable = [[a for a in range(14) if row[a] and row[a + 1]] for row in mask.tolist()]
    counts = [min(len(row), num_anchors) for row in usable]
    assert anchors.shape == keep.shape == (6, max(counts))
    assert anchors.dtype == torch.long and keep.dtype == torch.bool
    for row in range(6):
        kept = anchors[row][keep[row]].tolist()
        assert len(kept) == counts[row]
        assert kept == sorted(set(kept))
        assert set(kept) <= set(usable[row])
        assert anchors[row][~keep[row]].tolist() == [0] * (max(counts) - counts[row])
        # Real blocks first, padding after.
        assert keep[row].tolist() == sorted(keep[row].tolist(), reverse=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32], ids=str)
def test_a_loss_mask_of_any_dtype_gives_the_same_anchors(dtype):
    mask = random_loss_mask(3, 15, 0)
    expected = sample_anchors(mask, 4, [1, 2, 3])
    for left, right in zip(sample_anchors(mask.to(dtype), 4, [1, 2, 3]), expected, strict=True):
        assert torch.equal(left, right)


def test_a_row_s_anchors_hang_on_its_seed_alone():
    mask = random_loss_mask(3, 40, 0)
    state = torch.get_rng_state()
    first, again = (sample_anchors(mask, 5, [1, 2, 3])[0] for _ in range(2))
    other = sample_anchors(mask, 5, [1, 4, 3])[0]
    assert torch.equal(first, again)
    assert torch.equal(first[[0, 2]], other[[0, 2]]) and not torch.equal(first[1], other[1])
    # Alone, and in a batch of longer rows.
    alone, _ = sample_anchors(mask[1:2], 5, [2])
    padded, _ = sample_anchors(torch.nn.functional.pad(mask, (0, 300)), 5, [1, 2, 3])
    assert torch.equal(alone[0], first[1]) and torch.equal(padded, first)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_usable_position_is_equally_likely():
    rows = 20000
    mask = torch.tensor([0, 1, 1, 1, 1, 0, 1, 1, 0, 1]).expand(rows, -1)
    anchors, keep = sample_anchors(mask, 2, range(rows))
    assert keep.all()
    shares = torch.bincount(anchors.flatten(), minlength=10) / rows
    # Usable are 1, 2, 3 and 6; each is one of the two in half of the draws.
    expected = torch.tensor([0, 0.5, 0.5, 0.5, 0, 0, 0.5, 0, 0, 0])
    close(shares, expected, atol=0.02)
    assert shares[[0, 4, 5, 7, 8, 9]].sum() == 0
    pairs = torch.bincount(anchors[:, 0] * 10 + anchors[:, 1])
    close(pairs[pairs > 0] / rows, torch.full((6,), 1 / 6), atol=0.02)


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(2, 8), torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1]]), torch.ones(2, 1)],
    ids=["nothing supervised", "no two in a row", "one token"],
)
def test_without_a_usable_anchor_there_is_one_unused_slot(mask):
    anchors, keep = sample_anchors(mask, 4, [0, 1])
    assert anchors.tolist() == [[0], [0]] and keep.tolist() == [[False], [False]]


# Blocks and masks against slow code


def random_batch(seed, rows=3, length=LENGTH, num_anchors=4):
    ids, mask = random_tokens(rows, length, seed), random_loss_mask(rows, length, seed, share=0.8)
    # A row with fewer usable anchors than the others have slots.
    mask[-1, :4], mask[-1, 4:] = 1, 0
    return ids, mask, *sample_anchors(mask, num_anchors, range(seed, seed + rows))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [None, 4.0], ids=["no decay", "decay"])
@every_labelling
def test_blocks_equal_a_loop(shift_label, gamma, seed):
    config = draft_config(shift_label=shift_label)
    ids, mask, anchors, keep = random_batch(seed)
    blocks = build_blocks(ids, mask, anchors, keep, config, gamma)
    first = 0 if shift_label else 1
    rows, slots = anchors.shape
    assert slots > 1 and not keep.all()
    assert blocks.position_ids[:, :LENGTH].tolist() == [list(range(LENGTH))] * rows
    for n in range(rows):
        for s in range(slots):
            anchor, real = int(anchors[n, s]), bool(keep[n, s])
            span = slice(s * BLOCK, (s + 1) * BLOCK)
            masks = [MASK_TOKEN] * (BLOCK - 1)
            assert blocks.block_ids[n, span].tolist() == [int(ids[n, anchor]) if real else MASK_TOKEN, *masks]
            positions = blocks.position_ids[n, LENGTH:][span].tolist()
            assert positions == list(range(anchor, anchor + BLOCK))
            for k in range(BLOCK):
                label = anchor + k + (1 if shift_label else 0)
                weight = 0.0
                if real and k >= first and label < LENGTH and mask[n, label]:
                    weight = 1.0 if gamma is None else math.exp(-(k - first) / gamma)
                assert float(blocks.weights[n, s, k]) == pytest.approx(weight, abs=1e-6)
                if weight:
                    assert blocks.target_ids[n, s, k] == ids[n, label]
                    # What the head reads before it predicts this label.
                    assert blocks.prefix_ids[n, s, :k].tolist() == ids[n, anchor : anchor + k].tolist()


@every_labelling
def test_label_k_and_proposal_k_name_the_same_token(shift_label):
    # Proposal j stands at anchor + 1 + j. Shifted labels train B of them, unshifted ones B - 1.
    config = draft_config(shift_label=shift_label)
    ids, anchor = random_tokens(1, LENGTH), 7
    blocks = build_blocks(ids, torch.ones(1, LENGTH), torch.tensor([[anchor]]), torch.tensor([[True]]), config, None)
    labels = blocks.target_ids[0, 0][blocks.weights[0, 0] > 0]
    assert len(labels) == (BLOCK if shift_label else BLOCK - 1)
    assert labels.tolist() == ids[0, anchor + 1 : anchor + 1 + len(labels)].tolist()


@every_labelling
@pytest.mark.parametrize("gamma", [None, 4.0, 7.0], ids=str)
def test_position_decay_starts_at_one_and_skips_the_anchor(shift_label, gamma):
    decay = position_decay(BLOCK, gamma, shift_label)
    predicting = decay if shift_label else decay[1:]
    expected = [1.0 if gamma is None else math.exp(-j / gamma) for j in range(len(predicting))]
    assert predicting.tolist() == pytest.approx(expected)
    if not shift_label:
        assert decay[0] == 0


def slow_masks(anchors, keep, length, config):
    """The rule of the design, one query and one key at a time."""
    (rows, slots), size = anchors.shape, config.block_size
    masks = {}
    for layer_type in set(config.layer_types):
        sliding, window, rule = layer_type == "sliding_attention", config.sliding_window, config.sliding_window_rule
        mask = torch.zeros(rows, slots * size, length + slots * size, dtype=torch.bool)
        for n in range(rows):
            for s, k in ((s, k) for s in range(slots) if keep[n, s] for k in range(size)):
                position = int(anchors[n, s]) + k
                seen = mask[n, s * size + k]
                for key in range(int(anchors[n, s])):
                    inside = position - key < window if sliding and rule != "none" else True
                    seen[key] = inside
                for other in range(size):
                    distance = k - other
                    if not sliding or rule == "none":
                        inside = True
                    elif rule == "causal":
                        inside = 0 <= distance < window
                    else:
                        inside = abs(distance) < window
                    seen[length + s * size + other] = inside
        masks[layer_type] = mask[:, None]
    return masks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", WINDOWS, ids=WINDOW_IDS)
def test_masks_equal_a_double_loop(window, seed):
    config = draft_config(**window)
    _, _, anchors, keep = random_batch(seed)
    masks = block_attention_masks(anchors, keep, LENGTH, config)
    expected = slow_masks(anchors, keep, LENGTH, config)
    assert set(masks) == set(expected)
    for layer_type in expected:
        assert torch.equal(masks[layer_type], expected[layer_type]), layer_type


# Packed rows, and masks that are never made as a whole


def packed_batch(seed, pack_length=60):
    """Rows of different lengths: their lengths, and `(ids, mask, anchors, keep)` of them alone and packed."""
    rng = random.Random(seed)
    lengths = [rng.randint(8, 30) for _ in range(6)]
    ids, mask = random_tokens(6, max(lengths), seed), random_loss_mask(6, max(lengths), seed, share=0.8)
    for row, length in enumerate(lengths):
        ids[row, length:], mask[row, length:] = 0, 0
    seeds = list(range(seed, seed + 6))
    packed, documents, packs = pack_rows({"ids": ids, "mask": mask}, lengths, pack_length)
    own = [[seeds[row] for row in pack] for pack in packs]
    return (
        lengths,
        (ids, mask, *sample_anchors(mask, 3, seeds)),
        (packed["ids"], packed["mask"], *sample_anchors(packed["mask"], 3, own, documents), documents, packs),
    )


@pytest.mark.parametrize("seed", range(4))
def test_packing_loses_nothing_and_wastes_little(seed):
    lengths, (ids, mask, *_), (packed_ids, packed_mask, _, _, documents, packs) = packed_batch(seed)
    assert sorted(row for pack in packs for row in pack) == list(range(6)) and len(packs) < 6
    for pack, ids_, mask_, numbers in zip(packs, packed_ids, packed_mask, documents, strict=True):
        assert sum(lengths[row] for row in pack) <= 60
        for number, row in enumerate(pack):
            place = numbers == number
            assert ids_[place].tolist() == ids[row, : lengths[row]].tolist()
            assert mask_[place].tolist() == mask[row, : lengths[row]].tolist()
        assert (mask_[numbers == -1] == 0).all()
    # A row longer than a pack stays alone.
    _, _, alone = pack_rows({"ids": ids}, lengths, 5)
    assert sorted(alone) == [[row] for row in range(6)]


@every_labelling
@pytest.mark.parametrize("window", WINDOWS, ids=WINDOW_IDS)
@pytest.mark.parametrize("seed", range(2))
def test_a_packed_row_trains_as_its_rows_do_alone(target, parts, seed, window, shift_label):
    draft = make_draft(target, attn_implementation="sdpa", shift_label=shift_label, **window)
    lengths, (ids, mask, anchors, keep), (*packed, documents, packs) = packed_batch(seed)
    features = features_of(target, parts, ids, draft)
    together, _, _ = pack_rows({"features": features}, lengths, 60)
    blocks = build_blocks(ids, mask, anchors, keep, draft.config, 4.0)
    packed_blocks = build_blocks(*packed, draft.config, 4.0, documents)
    alone = teacher_forced_hidden(draft, parts, blocks, anchors, features)
    hidden = teacher_forced_hidden(draft, parts, packed_blocks, packed[2], together["features"], documents=documents)
    for n, pack in enumerate(packs):
        slot = 0
        for row in pack:
            for s in range(int(keep[row].sum())):
                close(hidden[n, slot], alone[row, s], atol=1e-5)
                close(packed_blocks.weights[n, slot], blocks.weights[row, s], atol=0)
                slot += 1
        assert slot == int(packed[3][n].sum())
    one, other = (domino_loss(draft, parts, b, h, 0.4) for b, h in ((blocks, alone), (packed_blocks, hidden)))
    close(one.loss, other.loss, atol=1e-5)
    assert {k: int(v) for k, v in one.sums.items()} == {k: int(v) for k, v in other.sums.items()}


@pytest.mark.parametrize("window", WINDOWS, ids=WINDOW_IDS)
def test_sparse_masks_hold_the_rule_of_dense_ones(window):
    _, _, (_, _, anchors, keep, documents, _) = packed_batch(0)
    config = draft_config(**window)
    dense = block_attention_masks(anchors, keep, documents.shape[1], config, documents)
    config._attn_implementation = "flex_attention"
    sparse = block_attention_masks(anchors, keep, documents.shape[1], config, documents)
    for layer_type, mask in dense.items():
        rule = sparse[layer_type].mask_mod
        (rows, _, queries, keys) = mask.shape
        assert torch.equal(create_mask(rule, rows, 1, queries, keys, device="cpu"), mask)
        # And no block that holds something to see is left out.
        listed = sparse[layer_type].to_dense()
        size = sparse[layer_type].BLOCK_SIZE
        for n, _, q, k in mask.nonzero().tolist():
            assert listed[n, 0, q // size[0], k // size[1]] == 1


# Training against decoding


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3")


@pytest.fixture(scope="module")
def parts(target):
    return TargetParts(target)


def features_of(target, parts, ids, draft):
    with torch.no_grad(), parts.capture(draft.config.target_layer_ids) as capture:
        target(ids)
        return capture.take(target.device)


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


# The objective


def small_pass(target, parts, seed=0, length=LENGTH, **config):
    draft = make_draft(target, attn_implementation="sdpa", **config)
    ids, mask, anchors, keep = random_batch(seed, length=length)
    blocks = build_blocks(ids, mask, anchors, keep, draft.config, 4.0)
    hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features_of(target, parts, ids, draft))
    return draft, blocks, hidden


@every_labelling
@pytest.mark.parametrize("prefix", [0, 1, 3], ids=lambda prefix: f"prefix {prefix}")
@torch.no_grad()
def test_the_head_reads_exactly_the_tokens_before_the_label(target, parts, shift_label, prefix):
    draft, blocks, hidden = small_pass(target, parts, length=40, shift_label=shift_label, pure_draft_prefix_len=prefix)
    n, s = (blocks.weights > 0).sum(-1).eq(BLOCK if shift_label else BLOCK - 1).nonzero()[0].tolist()
    first = 0 if shift_label else 1
    for k in range(first, BLOCK):
        weights = torch.zeros_like(blocks.weights)
        weights[n, s, k] = 1.0

        def losses(prefix_ids, weights=weights):
            output = domino_loss(draft, parts, replace(blocks, weights=weights, prefix_ids=prefix_ids), hidden, 0.0)
            return output.final_loss.item(), output.base_loss.item()

        before = losses(blocks.prefix_ids)
        for token in range(BLOCK):
            changed = blocks.prefix_ids.clone()
            changed[n, s, token] = (changed[n, s, token] + 1) % MASK_TOKEN
            after = losses(changed)
            # Proposal j = k - first has read the anchor and j tokens more; the first `prefix` are not corrected.
            matters = k - first >= prefix and token <= k - first
            assert (after[0] != before[0]) == matters, (k, token)
            assert after[1] == before[1]


@every_labelling
@pytest.mark.parametrize("prefix", [0, 1, 3, BLOCK], ids=lambda prefix: f"prefix {prefix}")
def test_corrected_offsets_leave_out_the_pure_draft_prefix(target, shift_label, prefix):
    draft = make_draft(target, shift_label=shift_label, pure_draft_prefix_len=prefix)
    first = 0 if shift_label else 1
    expected = [k - first >= prefix for k in range(BLOCK)]
    assert corrected_offsets(draft, torch.device("cpu")).tolist() == expected


@every_labelling
def test_losses_equal_a_loop(target, parts, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label, pure_draft_prefix_len=1)
    first = 0 if shift_label else 1
    total, base, final = 0.0, 0.0, 0.0
    with torch.no_grad():
        for n, s, k in (blocks.weights > 0).nonzero().tolist():
            weight, label = float(blocks.weights[n, s, k]), int(blocks.target_ids[n, s, k])
            logits = parts.logits(hidden[n, s, k])
            total += weight
            base += weight * float(logits.logsumexp(-1) - logits[label])
            if k - first >= 1:
                state = None
                for token in blocks.prefix_ids[n, s, : k - first + 1]:
                    state = draft.step(parts.embed(token[None]), state)
                logits = logits + draft.correction(hidden[n, s, k], state[0])
            final += weight * float(logits.logsumexp(-1) - logits[label])
    for weight in (1.0, 0.3, 0.0):
        output = domino_loss(draft, parts, blocks, hidden, weight)
        expected = {"base_loss": base / (total + 1e-6), "final_loss": final / (total + 1e-6)}
        assert float(output.base_loss) == pytest.approx(expected["base_loss"], rel=1e-5)
        assert float(output.final_loss) == pytest.approx(expected["final_loss"], rel=1e-5)
        mixed = (1 - weight) * expected["final_loss"] + weight * expected["base_loss"]
        assert output.loss.item() == pytest.approx(mixed, rel=1e-5)
        assert output.loss.requires_grad
        assert not output.base_loss.requires_grad and not output.final_loss.requires_grad


def gradients(draft, loss, hidden=None):
    draft.zero_grad()
    loss.backward(retain_graph=True)
    return {name: None if p.grad is None else p.grad.clone() for name, p in draft.named_parameters()}


def test_the_base_loss_alone_leaves_the_head_alone(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    base = gradients(draft, domino_loss(draft, parts, blocks, hidden, 1.0).loss)
    final = gradients(draft, domino_loss(draft, parts, blocks, hidden, 0.0).loss)
    for name in base:
        head = name.startswith(("prefix_gru", "embed_proj"))
        assert (base[name].abs().sum() == 0) == head, name
        assert final[name].abs().sum() > 0, name


def test_without_a_head_both_losses_are_the_base_s(target, parts):
    draft, blocks, hidden = small_pass(target, parts, head=False)
    outputs = [domino_loss(draft, parts, blocks, hidden, weight) for weight in (0.0, 1.0)]
    for output in outputs:
        assert output.final_loss == output.base_loss
        close(output.loss, output.base_loss, atol=1e-6)
        assert output.sums["accuracy"] == output.sums["base_accuracy"]
        assert output.sums["accept_len"] == output.sums["base_accept_len"]


def test_sums_and_counts_of_rows_add_up_to_those_of_the_batch(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    whole = domino_loss(draft, parts, blocks, hidden, 0.5)
    rows = []
    for n in range(len(hidden)):
        fields = {name: value[n : n + 1] for name, value in vars(blocks).items()}
        rows.append(domino_loss(draft, parts, Blocks(**fields), hidden[n : n + 1], 0.5))
    for name in whole.sums:
        assert sum(int(row.sums[name]) for row in rows) == whole.sums[name], name
        assert sum(int(row.counts[name]) for row in rows) == whole.counts[name], name
    assert whole.counts["accept_len"] == blocks.keep.sum()
    assert whole.counts["accuracy"] == (blocks.weights > 0).sum()


def test_acceptance_length_is_hand_counted():
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert acceptance_lengths(hits, shift_label=True).tolist() == [3, 1, 5, 1]
    # Offset 0 predicts nothing: what stands there does not count.
    assert acceptance_lengths(hits, shift_label=False).tolist() == [2, 4, 4, 1]


# Slots without a block, batches without a label


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_an_unused_slot_does_not_spoil_the_others(dtype, backend):
    # Its queries may look nowhere, which softmax turns into NaN where nobody takes care.
    target = make_target("qwen3", dtype=dtype)
    parts, draft = TargetParts(target), make_draft(target, attn_implementation=backend)
    ids, mask = random_tokens(1, LENGTH), torch.ones(1, LENGTH)
    features = features_of(target, parts, ids, draft)
    results = []
    for anchors in (torch.tensor([[5]]), torch.tensor([[5, 0, 0]])):
        keep = anchors > 0
        blocks = build_blocks(ids, mask, anchors, keep, draft.config, 4.0)
        hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features)
        output = domino_loss(draft, parts, blocks, hidden, 0.5)
        results.append((output.loss, gradients(draft, output.loss)))
    (alone, alone_gradients), (padded, padded_gradients) = results
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    close(padded, alone, atol=tolerance, rtol=tolerance)
    for name, gradient in padded_gradients.items():
        assert gradient.isfinite().all(), name
        assert (gradient - alone_gradients[name]).norm() <= 5 * tolerance * alone_gradients[name].norm(), name


@every_backend
@pytest.mark.parametrize("head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("why", ["no kept slot", "no supervised label"])
def test_a_batch_without_labels_is_a_finite_zero_with_gradients(target, parts, head, why, backend):
    draft = make_draft(target, head=head, attn_implementation=backend)
    ids, mask = random_tokens(2, LENGTH), torch.zeros(2, LENGTH)
    anchors = torch.tensor([[3, 8], [0, 2]]) if why == "no supervised label" else torch.zeros(2, 2).long()
    keep = torch.full((2, 2), why == "no supervised label")
    blocks = build_blocks(ids, mask, anchors, keep, draft.config, 4.0)
    hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features_of(target, parts, ids, draft))
    output = domino_loss(draft, parts, blocks, hidden, 0.5)
    assert output.loss == output.base_loss == output.final_loss == 0
    assert output.counts["accuracy"] == output.sums["accuracy"] == 0
    output.loss.backward()
    for name, parameter in draft.named_parameters():
        # Other ranks wait for a gradient of every parameter.
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


# Chunks of logits


@every_labelling
@pytest.mark.parametrize("head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 10_000])
def test_chunks_change_neither_values_nor_gradients(target, parts, chunk_size, head, shift_label):
    draft, blocks, hidden = small_pass(target, parts, head=head, shift_label=shift_label)
    whole = domino_loss(draft, parts, blocks, hidden, 0.3)
    chunked = domino_loss(draft, parts, blocks, hidden, 0.3, chunk_size=chunk_size)
    for name in ("loss", "base_loss", "final_loss"):
        close(getattr(chunked, name), getattr(whole, name), atol=1e-5)
    assert chunked.sums == whole.sums and chunked.counts == whole.counts
    left, right = (gradients(draft, output.loss * 3) for output in (chunked, whole))
    for name in right:
        close(left[name], right[name], atol=1e-6)
    with torch.no_grad():
        silent = domino_loss(draft, parts, blocks, hidden, 0.3, chunk_size=chunk_size)
    close(silent.loss, whole.loss, atol=1e-5)
    assert not silent.loss.requires_grad


def test_chunks_honour_what_is_frozen_and_what_is_adapted(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    adapted = get_peft_model(
        draft, LoraConfig(r=3, target_modules=["embed_proj.0", "embed_proj.2"], init_lora_weights=False)
    )
    results = []
    for chunk_size in (None, 9):
        output = domino_loss(adapted, parts, blocks, hidden.detach(), 0.2, chunk_size=chunk_size)
        results.append(gradients(adapted, output.loss))
    trained = [name for name, gradient in results[0].items() if gradient is not None]
    assert len(trained) == 4 and all("lora" in name for name in trained)
    for name in trained:
        close(results[1][name], results[0][name], atol=1e-6)
    assert {name for name, gradient in results[1].items() if gradient is not None} == set(trained)


class Kept:
    """A tensor that autograd keeps for the backward pass; without its history, which would keep it for ever."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


def test_no_more_logits_than_a_chunk_are_kept_at_once(target, parts, monkeypatch):
    draft, blocks, hidden = small_pass(target, parts)
    kept, most, calls = weakref.WeakSet(), [], []
    weights = {p.untyped_storage().data_ptr() for model in (target, draft) for p in model.parameters()}

    def keep(tensor):
        held = Kept(tensor)
        if tensor.shape[-1:] == (VOCAB,) and tensor.untyped_storage().data_ptr() not in weights:
            kept.add(held)
        sizes = {held.tensor.untyped_storage().data_ptr(): held.tensor.numel() for held in kept}
        most.append(sum(sizes.values()) // VOCAB)
        return held

    def logits(hidden, token_ids=None):
        calls.append(len(hidden))
        return TargetParts.logits(parts, hidden, token_ids)

    monkeypatch.setattr(parts, "logits", logits)
    peaks = {}
    for chunk_size in (None, 24, 8):
        gc.collect()
        most.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
            domino_loss(draft, parts, blocks, hidden, 0.3, chunk_size=chunk_size).loss.backward(retain_graph=True)
        peaks[chunk_size] = max(most)
    assert max(calls[1:]) <= 24 and sum(calls[1:]) == 2 * calls[0], "each position's logits are made once"
    # Base and final logits of one chunk, whatever the blocks are.
    assert peaks == {None: 2 * calls[0], 24: 2 * 24, 8: 2 * 8}


def test_shares_of_a_batch_weigh_as_the_whole(target, parts):
    """Two processes that divide by their mean weight, and whose gradients are averaged, train as one."""
    draft, blocks, hidden = small_pass(target, parts)
    whole = domino_loss(draft, parts, blocks, hidden, 0.5)
    mean = blocks.weights.sum() / len(hidden)
    losses = []
    for n in range(len(hidden)):
        share = Blocks(**{name: value[n : n + 1] for name, value in vars(blocks).items()})
        losses.append(domino_loss(draft, parts, share, hidden[n : n + 1], 0.5, total_weight=mean).loss)
    close(torch.stack(losses).mean(), whole.loss, atol=1e-5)


# Distillation


@every_labelling
@pytest.mark.parametrize("chunk_size", [None, 9])
def test_distillation_takes_the_targets_distribution_in_place_of_its_token(target, parts, chunk_size, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label)
    states = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    counted = blocks.weights > 0
    plain = domino_loss(draft, parts, blocks, hidden, 0.3)
    for share in (0.25, 1.0):
        output = domino_loss(
            draft, parts, blocks, hidden, 0.3, None, chunk_size, target_hidden=states, distillation_weight=share
        )
        # By hand, with the base alone and the final logits that a one-hot weight shows.
        with torch.no_grad():
            soft = parts.logits(states[counted]).softmax(-1)
            base = -(soft * parts.logits(hidden[counted]).log_softmax(-1)).sum(-1)
            weights = blocks.weights[counted]
            expected_base = (base * weights).sum() / (weights.sum() + 1e-6)
        only_base = domino_loss(
            draft, parts, blocks, hidden, 1.0, None, chunk_size, target_hidden=states, distillation_weight=share
        )
        close(only_base.loss, (1 - share) * plain.base_loss + share * expected_base, atol=1e-5)
        close(output.base_loss, plain.base_loss, atol=1e-5)
        close(output.final_loss, plain.final_loss, atol=1e-5)
    # Its minimum is where the draft says what the target says.
    perfect = domino_loss(
        draft, parts, blocks, states.requires_grad_(), 1.0, target_hidden=states, distillation_weight=1.0
    )
    perfect.loss.backward()
    assert states.grad.abs().max() < 1e-6


def test_distillation_without_the_targets_states_is_refused(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    with pytest.raises(ValueError, match="`target_hidden` is not given"):
        domino_loss(draft, parts, blocks, hidden, 0.3, distillation_weight=0.5)


# Shortlist of tokens


@every_labelling
def test_the_whole_vocabulary_as_shortlist_equals_no_shortlist(target, parts, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label)
    plain = domino_loss(draft, parts, blocks, hidden, 0.5)
    listed = domino_loss(draft, parts, blocks, hidden, 0.5, token_ids=torch.arange(VOCAB))
    close(listed.loss, plain.loss, atol=1e-6)
    for name in plain.sums:
        assert (listed.sums[name], listed.counts[name]) == (plain.sums[name], plain.counts[name])
    left, right = (gradients(draft, output.loss) for output in (listed, plain))
    for name in right:
        close(left[name], right[name], atol=1e-6)


@every_labelling
def test_labels_outside_the_shortlist_have_no_weight(target, parts, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label)
    token_ids = torch.arange(1, VOCAB, 2)
    inside = blocks.target_ids % 2 == 1
    listed = domino_loss(draft, parts, blocks, hidden, 0.5, token_ids=token_ids)
    counted = (blocks.weights > 0) & inside
    assert 0 < counted.sum() < (blocks.weights > 0).sum()
    assert listed.counts["accuracy"] == counted.sum()
    # The same as the plain objective on those labels, with all other logits out of the way.
    with torch.no_grad():
        weights, labels = blocks.weights[counted], blocks.target_ids[counted]
        logits = parts.logits(hidden[counted])[:, token_ids].float()
        ce = logits.logsumexp(-1) - logits[torch.arange(len(labels)), labels // 2]
        close(listed.base_loss, (ce * weights).sum() / (weights.sum() + 1e-6), atol=1e-5)


def test_a_shortlist_without_any_label_is_a_finite_zero(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    output = domino_loss(draft, parts, blocks, hidden, 0.5, token_ids=torch.tensor([MASK_TOKEN]))
    assert output.loss == 0
    output.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in draft.parameters())


# Tied heads


def test_a_tied_target_trains_against_its_embedding_not_fresh_weights():
    fixture = load_fixture("shift0-prefix0")
    stored = load_file(fixture.target_path / "model.safetensors")
    assert not any("lm_head" in name for name in stored)
    parts = TargetParts(fixture.target())
    assert parts.output_head.weight is parts.embedding.weight
    assert torch.equal(parts.output_head.weight, stored["model.embed_tokens.weight"])


def test_the_base_loss_follows_a_tied_embedding():
    tied = make_target("llama-tied")
    parts = TargetParts(tied)
    draft, blocks, hidden = small_pass(tied, parts)
    before = domino_loss(draft, parts, blocks, hidden, 1.0).loss
    with torch.no_grad():
        tied.get_input_embeddings().weight.mul_(0.5)
    after = domino_loss(draft, parts, blocks, hidden, 1.0).loss
    logits = hidden[blocks.weights > 0] @ tied.get_input_embeddings().weight.T
    weights, labels = blocks.weights[blocks.weights > 0], blocks.target_ids[blocks.weights > 0]
    ce = logits.logsumexp(-1) - logits.gather(1, labels[:, None])[:, 0]
    close(after, (ce * weights).sum() / (weights.sum() + 1e-6), atol=1e-5)
    assert not torch.allclose(after.float(), before.float(), atol=1e-3)


# Curriculum


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.8), (1, 0.8 * 49 / 50), (25, 0.4), (49, 0.8 / 50), (50, 0.0), (51, 0.0), (100, 0.0)],
    ids=lambda value: str(value),
)
def test_lambda_falls_linearly_to_zero_and_stays(step, expected):
    curriculum = BaseAnchoredCurriculum(start=0.8, decay_ratio=0.5)
    assert curriculum.weight(step, total_steps=100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("total", "ratio", "steps", "expected"),
    [
        (10, 1.0, [0, 5, 10], [1.0, 0.5, 0.0]),
        (10, 0.0, [0, 1, 5], [1.0, 0.0, 0.0]),
        (3, 0.1, [0, 1], [1.0, 0.0]),
        (7, 0.5, [0, 1, 2, 3], [1.0, 2 / 3, 1 / 3, 0.0]),
        (0, 0.5, [0, 1], [1.0, 0.0]),
    ],
    ids=["whole run", "no decay time", "less than a step", "rounded down", "no steps"],
)
def test_lambda_at_odd_lengths(total, ratio, steps, expected):
    curriculum = BaseAnchoredCurriculum(decay_ratio=ratio)
    assert [curriculum.weight(step, total) for step in steps] == pytest.approx(expected)


def test_without_a_decay_lambda_stays():
    curriculum = BaseAnchoredCurriculum(0.5, None)
    assert [curriculum.weight(step, 10) for step in range(11)] == [0.5] * 11


def test_lambda_never_rises_and_stays_within_its_start():
    rng = random.Random(0)
    for _ in range(50):
        total, start, ratio = rng.randint(1, 200), rng.random(), rng.random()
        values = [BaseAnchoredCurriculum(start, ratio).weight(step, total) for step in range(total + 1)]
        assert values[0] == start
        assert values == sorted(values, reverse=True)
        assert values[-1] == 0
