# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The draft's two parts against the reference's numbers, what it borrows from a target, and its weights on disk."""

import copy
import inspect
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    BLOCK,
    FIXTURES,
    HIDDEN,
    MASK_TOKEN,
    TARGET_LAYERS,
    draft_config,
    load_fixture,
    make_draft,
    make_target,
    random_tokens,
    randomise,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from domino_spec.generation.context import TargetParts
from domino_spec.modeling_domino import DominoDraftModel, window_mask

BACKENDS = ("eager", "sdpa")
TOLERANCE = 1e-5


def close(left, right, atol=TOLERANCE):
    torch.testing.assert_close(left, right, atol=atol, rtol=0, check_dtype=False)


# The reference's numbers


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
every_backend = pytest.mark.parametrize("backend", BACKENDS)


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


# Backbone against itself


def block_ids(rows=1, size=BLOCK, seed=5):
    ids = torch.full((rows, size), MASK_TOKEN)
    ids[:, 0] = random_tokens(rows, 1, seed)[:, 0]
    return ids


def random_features(draft, rows, length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, draft.fc.in_features, generator=generator, dtype=draft.dtype)


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


# Head


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


# What a draft borrows from its target

# Targets that scale embeddings or logits in ways of their own, beside the common architectures.
SCALING = {
    "hyperclovax (multiplies logits)": (
        "hyperclovax",
        {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    ),
    "cohere (scales logits)": ("cohere", {"logit_scale": 0.25}),
    "afmoe (scales embeddings)": (
        "afmoe",
        {"mup_enabled": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def any_target(name):
    if name in ARCHITECTURES:
        return make_target(name)
    model_type, fields = SCALING[name]
    shape = {k: getattr(make_target("qwen3").config, k) for k in ("vocab_size", "hidden_size", "intermediate_size")}
    shape |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(model_type, **{**shape, **ids, **fields})
    # Some experts compute in no more than float32.
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(target, seed=0)
    return target.eval()


@contextmanager
def raw_layers(target):
    """`(inputs, outputs)` of every decoder layer of the next pass, from hooks set independently of the package."""
    inputs, outputs, handles = {}, {}, []
    modules = dict(target.named_modules())
    path = next(name for name in ("model.layers", "transformer.h") if name in modules)
    for i, layer in enumerate(modules[path]):

        def keep(module, args, kwargs, output, i=i):
            inputs[i] = args[0] if args else kwargs["hidden_states"]
            outputs[i] = output[0] if isinstance(output, tuple) else output

        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
    yield inputs, outputs
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *SCALING])
def test_borrowed_parts_equal_the_target_s_own(arch):
    target = any_target(arch)
    parts, ids = TargetParts(target), random_tokens(2, 9)
    with torch.no_grad(), raw_layers(target) as (inputs, _):
        output = target(ids, output_hidden_states=True)
        embeds = parts.embed(ids)
        if arch.startswith("gpt2"):
            # Learned positions are added to the token embeddings; a draft has rotary positions of its own.
            inputs[0] = inputs[0] - target.transformer.wpe.weight[: ids.shape[1]]
        close(embeds, inputs[0])
        close(parts.logits(output.hidden_states[-1]), output.logits)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_context_features_are_the_raw_outputs_of_the_named_layers(arch):
    target = make_target(arch)
    parts, ids, layer_ids = TargetParts(target), random_tokens(2, 9), [3, 0, 2]
    with torch.no_grad(), raw_layers(target) as (_, outputs), parts.capture(layer_ids) as capture:
        states = target(ids, output_hidden_states=True).hidden_states
        features = capture.take(target.device)[:, 2:7]
    # Layer i is entry i + 1 of `hidden_states`, except that the last entry is taken after the final norm.
    assert torch.equal(features[..., HIDDEN : 2 * HIDDEN], states[1][:, 2:7])
    assert torch.equal(features[..., 2 * HIDDEN :], states[3][:, 2:7])
    assert torch.equal(features, torch.cat([outputs[i][:, 2:7] for i in layer_ids], dim=-1))
    assert not torch.allclose(features[..., :HIDDEN], states[4][:, 2:7])


def test_passes_are_captured_one_after_another(target, parts):
    # A prompt may be read in chunks; positions count over all that was read since the last `take`.
    chunks = [random_tokens(1, length, length) for length in (4, 5, 2)]
    with torch.no_grad(), parts.capture([0, 3]) as capture:
        alone = []
        for chunk in chunks:
            target(chunk)
            alone.append(capture.take(target.device))
        for chunk in chunks:
            target(chunk)
        assert torch.equal(capture.take(target.device)[:, 2:10], torch.cat(alone, dim=1)[:, 2:10])


def test_a_layer_named_twice_is_captured_twice(target, parts):
    # The config takes such a list, so `fc` has been made for it.
    with torch.no_grad(), parts.capture([1, 1]) as capture:
        states = target(random_tokens(1, 5), output_hidden_states=True).hidden_states[2]
        assert torch.equal(capture.take(target.device), torch.cat([states, states], dim=-1))


def test_a_closed_capture_leaves_no_hook(target, parts):
    def hooks():
        # transformers may keep some of its own.
        return [list(layer._forward_hooks) for layer in target.model.layers]

    before = hooks()
    with parts.capture([0, 3]):
        assert hooks() != before
    assert hooks() == before
    with pytest.raises(RuntimeError, match="stop"), parts.capture([0]):
        raise RuntimeError("stop")
    assert hooks() == before


def test_two_threads_capture_only_their_own_pass(target, parts):
    ids = [random_tokens(1, 5, seed) for seed in (1, 2)]
    barrier, got = threading.Barrier(2), {}

    def run(i):
        with torch.no_grad(), parts.capture([1]) as capture:
            barrier.wait()
            target(ids[i])
            barrier.wait()
            got[i] = capture.take(target.device)

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for i in (0, 1):
            assert torch.equal(got[i], target(ids[i], output_hidden_states=True).hidden_states[2])


def test_a_tied_head_is_the_embedding():
    target = make_target("llama-tied")
    parts = TargetParts(target)
    assert parts.output_head.weight is parts.embedding.weight
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    close(parts.logits(hidden), hidden @ target.get_input_embeddings().weight.T, atol=1e-12)


def test_a_bare_backbone_is_refused(target):
    with pytest.raises(ValueError, match="output head"):
        TargetParts(target.model)


# Weights: names, loading, saving

CONTRACT = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            "self_attn.q_norm",
            "self_attn.k_norm",
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
            "input_layernorm",
            "post_attention_layernorm",
        )
    ),
}
HEAD = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
BIASES = {f"layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkvo"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, CONTRACT | HEAD),
        ({"head": False}, CONTRACT),
        ({"attention_bias": True}, CONTRACT | HEAD | BIASES),
        ({"sliding_window": 5}, CONTRACT | HEAD),
    ],
    ids=["head", "no head", "attention bias", "sliding"],
)
def test_weight_names_are_exactly_the_contract_s(target, tmp_path, options, names):
    draft = make_draft(target, **options)
    assert set(draft.state_dict()) == names
    draft.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names


@pytest.mark.parametrize("name", FIXTURES)
def test_loaded_tensors_equal_the_file_byte_for_byte(name):
    fixture = load_fixture(name)
    assert_same_bytes(fixture.draft().state_dict(), load_file(fixture.draft_path / "model.safetensors"))


def assert_same_bytes(left, right):
    assert set(left) == set(right)
    for name in right:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


def write_draft(folder, tensors, config=None, rename=lambda name: name):
    """A draft's folder as someone else might write it."""
    folder.mkdir(exist_ok=True)
    save_file({rename(name): t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    fixture = load_fixture("shift1-prefix1")
    config = json.loads((fixture.draft_path / "config.json").read_text()) if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fixture_tensors():
    return load_file(load_fixture("shift1-prefix1").draft_path / "model.safetensors")


def encoder_names(name):
    return {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(name, name)


FOREIGN = {
    "prefixed by model.": lambda name: "model." + name,
    "encoder names": encoder_names,
    "encoder names, prefixed": lambda name: "model." + encoder_names(name),
    "our own": lambda name: name,
}


@pytest.mark.parametrize("layout", FOREIGN)
def test_foreign_names_load_and_are_saved_under_the_contract_s(tmp_path, layout):
    tensors = fixture_tensors()
    folder = write_draft(tmp_path / "foreign", tensors, rename=FOREIGN[layout])
    draft, info = DominoDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert_same_bytes(draft.state_dict(), tensors)

    draft.save_pretrained(tmp_path / "once")
    assert_same_bytes(load_file(tmp_path / "once" / "model.safetensors"), tensors)
    DominoDraftModel.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    assert_same_bytes(load_file(tmp_path / "twice" / "model.safetensors"), tensors)
    once, twice = ((tmp_path / n / "config.json").read_text() for n in ("once", "twice"))
    assert once == twice


def test_a_saved_draft_computes_the_same(target, parts, tmp_path):
    draft = make_draft(target, dtype=torch.float32, sliding_window=5)
    draft.save_pretrained(tmp_path)
    again = DominoDraftModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert not torch.equal(make_draft(target, dtype=torch.float32, sliding_window=5, seed=9).fc.weight, draft.fc.weight)
    features, embeds = random_features(draft, 1, 7), parts.embed(block_ids())
    with torch.no_grad():
        first, second = (model(embeds, features).last_hidden_state for model in (draft, again))
        assert torch.equal(first, second)
        states = draft.prefix_states(embeds)
        assert torch.equal(again.prefix_states(embeds), states)
        assert torch.equal(again.correction(first, states), draft.correction(first, states))


def headless_config(**changes):
    config = json.loads((load_fixture("shift1-prefix1").draft_path / "config.json").read_text())
    del config["emb_dim"]
    config["dflash_config"] = {
        k: v for k, v in config["dflash_config"].items() if k in ("mask_token_id", "target_layer_ids")
    }
    return {**config, **changes}


def test_a_pure_dflash_checkpoint_loads_without_a_head(tmp_path):
    tensors = {name: t for name, t in fixture_tensors().items() if name not in HEAD}
    draft, info = DominoDraftModel.from_pretrained(
        write_draft(tmp_path / "dflash", tensors, headless_config()), output_loading_info=True
    )
    assert not draft.config.has_head
    assert draft.config.shift_label is False
    assert not hasattr(draft, "prefix_gru") and not hasattr(draft, "embed_proj")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_bytes(draft.state_dict(), tensors)
    draft.save_pretrained(tmp_path / "saved")
    assert_same_bytes(load_file(tmp_path / "saved" / "model.safetensors"), tensors)


def test_a_head_that_the_config_does_not_announce_is_left_out(tmp_path):
    # What the error about a missing head advises, the other way round.
    draft, info = DominoDraftModel.from_pretrained(
        write_draft(tmp_path / "draft", fixture_tensors(), headless_config()), output_loading_info=True
    )
    assert set(info["unexpected_keys"]) == HEAD
    assert set(draft.state_dict()) == CONTRACT


@pytest.mark.parametrize("missing", sorted(HEAD), ids=str)
def test_an_announced_head_with_a_tensor_missing_is_an_error(tmp_path, missing):
    tensors = fixture_tensors()
    del tensors[missing]
    with pytest.raises(ValueError, match=missing.replace(".", r"\.")) as error:
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", tensors))
    assert "projector_type" in str(error.value)


def test_an_announced_head_that_is_not_there_is_an_error(tmp_path):
    tensors = {name: t for name, t in fixture_tensors().items() if name not in HEAD}
    with pytest.raises(ValueError, match="projector_type") as error:
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", tensors))
    assert all(name in str(error.value) for name in HEAD)


@pytest.mark.parametrize("missing", ["fc.weight", "layers.1.self_attn.q_norm.weight"], ids=str)
def test_a_missing_backbone_tensor_is_an_error(tmp_path, missing):
    tensors = fixture_tensors()
    del tensors[missing]
    with pytest.raises(ValueError, match=missing.replace(".", r"\.")):
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", tensors))


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.0.self_attn.k_proj.weight", "prefix_gru.weight_hh_l0", "embed_proj.2.weight"], ids=str
)
def test_a_wrong_shape_is_an_error_that_names_both(tmp_path, name):
    tensors = fixture_tensors()
    good = tuple(tensors[name].shape)
    tensors[name] = tensors[name][:-1]
    with pytest.raises((RuntimeError, ValueError)) as error:
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", tensors))
    message = str(error.value)
    assert name in message
    for shape in (good, (good[0] - 1, *good[1:])):
        numbers = str(list(shape))
        assert numbers in message or str(shape) in message, message


def test_a_config_of_another_size_is_an_error_that_names_both_shapes(tmp_path):
    # The embedding is the target's, so a wrong vocabulary shows in the head only.
    config = headless_config(
        emb_dim=24,
        vocab_size=300,
        dflash_config=json.loads((load_fixture("shift1-prefix1").draft_path / "config.json").read_text())[
            "dflash_config"
        ],
    )
    with pytest.raises((RuntimeError, ValueError), match=r"embed_proj\.2\.weight") as error:
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", fixture_tensors(), config))
    assert "256" in str(error.value) and "300" in str(error.value)


@pytest.mark.parametrize("layout", FOREIGN)
def test_a_sharded_checkpoint_loads(tmp_path, layout):
    tensors = fixture_tensors()
    folder = write_draft(tmp_path / "draft", {}, rename=str)
    (folder / "model.safetensors").unlink()
    index = {}
    for number in (1, 2):
        part = {n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % 2 == number - 1}
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({FOREIGN[layout](n): t for n, t in part.items()}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys((FOREIGN[layout](n) for n in part), file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    assert_same_bytes(DominoDraftModel.from_pretrained(folder).state_dict(), tensors)


def test_a_draft_saved_in_shards_loads(target, tmp_path):
    draft = make_draft(target, dtype=torch.float32)
    draft.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_bytes(DominoDraftModel.from_pretrained(tmp_path).state_dict(), draft.state_dict())


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, None], ids=["auto", "bfloat16", "not given"])
def test_a_bfloat16_checkpoint_loads_byte_for_byte(tmp_path, dtype):
    tensors = {name: t.bfloat16() for name, t in fixture_tensors().items()}
    config = json.loads((load_fixture("shift1-prefix1").draft_path / "config.json").read_text())
    folder = write_draft(tmp_path / "draft", tensors, {**config, "dtype": "bfloat16"})
    draft = DominoDraftModel.from_pretrained(folder, **({} if dtype is None else {"dtype": dtype}))
    assert draft.dtype == torch.bfloat16
    assert_same_bytes(draft.state_dict(), tensors)
    draft.save_pretrained(tmp_path / "saved")
    assert_same_bytes(load_file(tmp_path / "saved" / "model.safetensors"), tensors)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"


def test_attention_bias_loads_and_takes_part(target, parts, tmp_path):
    draft = make_draft(target, attention_bias=True)
    features, embeds = random_features(draft, 1, 5), parts.embed(block_ids())
    with torch.no_grad():
        draft.save_pretrained(tmp_path)
        again = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
        assert again.config.attention_bias
        hidden = draft(embeds, features).last_hidden_state
        assert torch.equal(again(embeds, features).last_hidden_state, hidden)
        for name in sorted(BIASES):
            before = again.get_parameter(name).clone()
            again.get_parameter(name).zero_()
            moved = not torch.allclose(again(embeds, features).last_hidden_state, hidden, atol=1e-6)
            assert moved, name
            again.get_parameter(name).copy_(before)


def test_a_fresh_draft_is_initialised_everywhere(target):
    torch.manual_seed(0)
    draft = DominoDraftModel(draft_config(target.config))
    for name, parameter in draft.named_parameters():
        assert parameter.isfinite().all(), name
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert 0.005 < parameter.std() < 0.5, name


def test_every_parameter_gets_a_gradient(target, parts):
    draft = make_draft(target, attention_bias=True, sliding_window=5)
    hidden = draft(parts.embed(block_ids(2)), random_features(draft, 2, 7)).last_hidden_state
    states = draft.prefix_states(parts.embed(random_tokens(2, BLOCK)))
    logits = parts.logits(hidden) + draft.correction(hidden, states)
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_target_layers_of_the_default_draft_are_first_middle_last():
    # What the tests above rely on when they speak of the last layer.
    assert draft_config().target_layer_ids == [0, TARGET_LAYERS // 2, TARGET_LAYERS - 1]
