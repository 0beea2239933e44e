# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The backbone against itself and against slow, obvious code: caches, masks, windows, dtypes."""

import copy
import inspect

import pytest
import torch
from helpers import (
    BLOCK,
    HIDDEN,
    load_fixture,
    make_draft,
)
from passes import block_ids, close, every_backend, random_features
from transformers import DynamicCache

from domino_spec.generation.context import TargetParts
from domino_spec.modeling_domino import DominoDraftModel, window_mask

WINDOWS = [{}, *({"sliding_window": 5, "sliding_window_rule": rule} for rule in ("causal", "symmetric", "none"))]
WINDOW_IDS = ["full", "causal window", "symmetric window", "ignored window"]


@every_backend
@pytest.mark.parametrize("window", WINDOWS, ids=WINDOW_IDS)
@pytest.mark.parametrize("chunks", [(12,), (7, 5), (1,) * 12, (3, 0, 9)], ids=str)
def test_context_in_several_calls_through_the_cache_equals_one_call(target, parts, window, chunks, backend):
    draft = make_draft(target, attn_implementation=backend, **window)
    features, embeds = random_features(draft, 2, 12), parts.embed(block_ids(2))
    with torch.no_grad():
        whole = draft(embeds, features).last_hidden_state
        cache = DynamicCache()
        for chunk in features.split(list(chunks), dim=1):
            hidden = draft(embeds, chunk, cache=cache).last_hidden_state
            cache.crop(-BLOCK)
    close(hidden, whole)
    assert cache.get_seq_length() == 12


def test_a_cropped_round_leaves_no_trace(target, parts):
    # Another block is drafted at each position on the way: what it wrote into the cache must be gone.
    draft = make_draft(target, sliding_window=5)
    features = random_features(draft, 1, 9)
    with torch.no_grad():
        whole = draft(parts.embed(block_ids()), features).last_hidden_state
        cache = DynamicCache()
        for i, chunk in enumerate(features.split(3, dim=1)):
            last = i == 2
            hidden = draft(
                parts.embed(block_ids() if last else block_ids(seed=20 + i)), chunk, cache=cache
            ).last_hidden_state
            cache.crop(-BLOCK)
    close(hidden, whole)


@pytest.mark.parametrize(
    "make_cache",
    [lambda draft: DynamicCache(), lambda draft: DynamicCache(config=draft.config)],
    ids=["plain cache", "cache made from the config"],
)
@pytest.mark.parametrize("window", WINDOWS, ids=WINDOW_IDS)
@torch.no_grad()
def test_any_dynamic_cache_will_do(target, parts, window, make_cache):
    # transformers' own DFlash loop makes its cache from the draft's config, so sliding layers get a cache of their own
    # that forgets what lies before the window, and records the past so that it can be cropped.
    draft = make_draft(target, **window)
    features, embeds = random_features(draft, 1, 12), parts.embed(block_ids())
    cache = make_cache(draft)
    cache.activate_past_recording()
    if any(cache.is_sliding) and draft.config.sliding_window_rule == "none":
        # What such a cache forgets, this draft would still look at.
        with pytest.raises(ValueError, match="make the cache without a config"):
            draft(embeds, features, cache=cache)
        return
    for chunk in features.split(4, dim=1):
        hidden = draft(embeds, chunk, cache=cache).last_hidden_state
        cache.crop(-BLOCK)
    close(hidden, draft(embeds, features).last_hidden_state)


LONG, SHORT = 9, 6  # Context of the first row and of the second.


@every_backend
@pytest.mark.parametrize("window", WINDOWS, ids=WINDOW_IDS)
@torch.no_grad()
def test_a_left_padded_row_equals_the_row_alone(target, parts, window, backend):
    draft = make_draft(target, attn_implementation=backend, **window)
    block, features, pads = block_ids(2), random_features(draft, 2, LONG), LONG - SHORT
    padding = torch.ones(2, LONG + BLOCK, dtype=torch.long)
    padding[1, :pads] = 0
    positions = torch.arange(LONG + BLOCK).repeat(2, 1)
    positions[1] = (positions[1] - pads).clamp(min=0)
    hidden = draft(parts.embed(block), features, positions, padding).last_hidden_state
    close(hidden[:1], draft(parts.embed(block[:1]), features[:1]).last_hidden_state)
    close(hidden[1:], draft(parts.embed(block[1:]), features[1:, pads:]).last_hidden_state)


@every_backend
@pytest.mark.parametrize("window", WINDOWS, ids=WINDOW_IDS)
@torch.no_grad()
def test_a_row_with_a_masked_hole_equals_the_row_alone(target, parts, window, backend):
    # Rejected entries of a ragged row stay in the cache; the block's positions go on after the real ones. A window
    # counts positions and not cache slots, so a sliding draft is given masks for each layer type.
    draft = make_draft(target, attn_implementation=backend, **window)
    block, features = block_ids(2), random_features(draft, 2, LONG)
    padding = torch.ones(2, LONG + BLOCK, dtype=torch.long)
    padding[1, SHORT:LONG] = 0
    positions = torch.arange(LONG + BLOCK).repeat(2, 1)
    positions[1, LONG:] -= LONG - SHORT
    mask = padding
    if window:
        distance = positions[:, LONG:, None] - positions[:, None]
        near = {
            "causal": (distance >= 0) & (distance < window["sliding_window"]),
            "symmetric": distance.abs() < window["sliding_window"],
            "none": torch.ones_like(distance, dtype=torch.bool),
        }[window["sliding_window_rule"]]
        seen = padding[:, None].bool().expand(-1, BLOCK, -1)
        mask = {"full_attention": seen[:, None], "sliding_attention": (seen & near)[:, None]}
    hidden = draft(parts.embed(block), features, positions, mask).last_hidden_state
    close(hidden[:1], draft(parts.embed(block[:1]), features[:1]).last_hidden_state)
    close(hidden[1:], draft(parts.embed(block[1:]), features[1:, :SHORT]).last_hidden_state)


def test_masked_positions_do_not_matter_at_all(target, parts):
    draft = make_draft(target)
    features = random_features(draft, 1, 8)
    padding = torch.ones(1, 8 + BLOCK, dtype=torch.long)
    padding[0, :3] = 0
    changed = features.clone()
    changed[0, :3] = 1e3
    with torch.no_grad():
        first, second = (
            draft(parts.embed(block_ids()), f, attention_mask=padding).last_hidden_state for f in (features, changed)
        )
    assert torch.equal(first, second)


@every_backend
def test_rows_of_a_batch_equal_their_solo_runs(target, parts, backend):
    draft = make_draft(target, sliding_window=5, attn_implementation=backend)
    features, embeds = random_features(draft, 3, 7), parts.embed(block_ids(3))
    with torch.no_grad():
        together = draft(embeds, features).last_hidden_state
        for row in range(3):
            close(together[row : row + 1], draft(embeds[row : row + 1], features[row : row + 1]).last_hidden_state)


def test_an_empty_context_is_legal(target, parts):
    # A prompt of one token: the anchor stands at position 0 and nothing is before it.
    draft = make_draft(target)
    with torch.no_grad():
        hidden = draft(parts.embed(block_ids()), random_features(draft, 1, 0)).last_hidden_state
    assert hidden.shape == (1, BLOCK, HIDDEN)
    assert hidden.isfinite().all()


def test_block_is_bidirectional_in_full_layers(target, parts):
    draft = make_draft(target)
    features, embeds = random_features(draft, 1, 4), parts.embed(block_ids()).detach().requires_grad_()
    draft(embeds, features).last_hidden_state[0, 0].sum().backward()
    assert (embeds.grad[0].abs().sum(-1) > 0).all()


def test_block_is_causal_in_sliding_layers(target, parts):
    draft = make_draft(target, num_hidden_layers=1, sliding_window=BLOCK + 4)
    features, embeds = random_features(draft, 1, 4), parts.embed(block_ids()).detach().requires_grad_()
    for k in range(BLOCK):
        embeds.grad = None
        draft(embeds, features).last_hidden_state[0, k].sum().backward()
        assert (embeds.grad[0].abs().sum(-1) > 0).tolist() == [j <= k for j in range(BLOCK)]


@pytest.mark.parametrize(
    ("wrong", "name"), [("noise", "noise_embeds"), ("context", "context_hidden_states")], ids=lambda value: value
)
def test_inputs_of_another_target_are_refused_with_both_widths(target, parts, wrong, name):
    draft = make_draft(target)
    embeds, features = parts.embed(block_ids()), random_features(draft, 1, 4)
    if wrong == "noise":
        embeds, both = embeds[..., :-1], (HIDDEN - 1, HIDDEN)
    else:
        features, both = features[..., :-1], (draft.fc.in_features - 1, draft.fc.in_features)
    with pytest.raises(ValueError, match=name) as error:
        draft(embeds, features)
    assert all(str(width) in str(error.value) for width in both)


def test_forward_has_the_keyword_names_of_transformers_own_dflash_drafts():
    names = set(inspect.signature(DominoDraftModel.forward).parameters)
    assert {"noise_embeds", "context_hidden_states", "position_ids", "attention_mask", "cache"} <= names


# Masks against a double loop


@pytest.mark.parametrize("rule", ["none", "causal", "symmetric"])
@pytest.mark.parametrize(
    ("window", "size", "keys"), [(8, 8, 8), (8, 8, 30), (5, 3, 12), (16, 8, 48), (1, 2, 5), (100, 4, 9)], ids=str
)
def test_window_mask_equals_a_double_loop(rule, window, size, keys):
    positions = torch.arange(keys)
    mask = window_mask(rule, window, positions[-size:], positions)
    if rule == "none":
        assert mask is None
        return
    start = keys - size
    for k in range(size):
        for key in range(keys):
            position = start + k
            if rule == "causal":
                # Context from position - (window - 1) on; inside the block offsets up to its own.
                seen = position - (window - 1) <= key <= position
            else:
                seen = abs(position - key) < window
            assert bool(mask[k, key]) == seen, (k, key)


# Dtype


def frequencies(draft):
    return {name: buffer for name, buffer in draft.named_buffers() if "inv_freq" in name}


CASTS = {
    "to(bfloat16)": lambda draft: draft.to(torch.bfloat16),
    "bfloat16()": lambda draft: draft.bfloat16(),
    "half()": lambda draft: draft.half(),
    "to twice": lambda draft: draft.to(torch.bfloat16).to(torch.float32).to(torch.float16),
    "deepcopy, then to": lambda draft: copy.deepcopy(draft).to(torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_keeps_the_rotary_frequencies_in_float32(target, cast):
    draft = make_draft(target, dtype=torch.float32)
    before = {name: buffer.clone() for name, buffer in frequencies(draft).items()}
    after = frequencies(CASTS[cast](draft))
    assert before and before.keys() == after.keys()
    for name, buffer in after.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, before[name]), name


def test_loading_in_bfloat16_keeps_the_rotary_frequencies_in_float32():
    fixture = load_fixture("shift1-prefix1")
    whole, half = fixture.draft(), fixture.draft(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    for name, buffer in frequencies(half).items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, frequencies(whole)[name]), name


def test_a_bfloat16_draft_is_near_the_float32_one_far_from_the_start():
    fixture, expected = load_fixture("shift1-prefix1"), load_fixture("shift1-prefix1").expected
    target = TargetParts(fixture.target())
    positions = expected["position_ids"] + 400
    with torch.no_grad():
        whole, half = (
            fixture.draft(dtype=dtype)(target.embed(expected["block_ids"]), expected["context_features"], positions)
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert half.last_hidden_state.dtype == torch.bfloat16
    error = (half.last_hidden_state.float() - whole.last_hidden_state).norm() / whole.last_hidden_state.norm()
    assert error < 0.05


def test_inputs_are_cast_to_the_draft_s_dtype(target, parts):
    draft = make_draft(target, dtype=torch.float32)
    with torch.no_grad():
        embeds = parts.embed(block_ids())
        assert embeds.dtype == torch.float64
        hidden = draft(embeds, random_features(draft, 1, 4).to(torch.float16)).last_hidden_state
        assert hidden.dtype == torch.float32
        assert draft.step(embeds[:, 0], None).dtype == torch.float32
        assert draft.prefix_states(embeds).dtype == torch.float32
        assert parts.logits(hidden).dtype == torch.float64
