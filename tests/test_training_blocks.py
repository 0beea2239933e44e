# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Anchors, blocks and masks: against slow code."""

import math
import random

import pytest
import torch
from helpers import (
    BLOCK,
    MASK_TOKEN,
    draft_config,
    make_draft,
    random_tokens,
)
from torch.nn.attention.flex_attention import create_mask
from training_batches import (
    LENGTH,
    WINDOW_IDS,
    WINDOWS,
    close,
    every_labelling,
    features_of,
    random_batch,
    random_loss_mask,
)

from domino_spec.training.blocks import (
    block_attention_masks,
    build_blocks,
    pack_rows,
    position_decay,
    sample_anchors,
)
from domino_spec.training.objective import (
    domino_loss,
    teacher_forced_hidden,
)

# Anchors


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
