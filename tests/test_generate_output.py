# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What `generate` returns besides tokens, how many proposals it asks for, and the caches it takes and leaves."""

import re
from functools import partial

import pytest
import torch
from contract import (
    BLOCK,
    CACHE,
    DETAILS,
    NEW_TOKENS,
    PROMPT,
    PROPOSALS,
    cached_target,
    call,
    each_arch,
    each_door,
    good_draft,
    layers_of,
    prompt_and_plain,
    recorded_widths,
    spoil,
)
from helpers import (
    MASK_TOKEN,
    VOCAB,
    make_draft,
    make_target,
    random_tokens,
)
from test_generate_lossless import StopAfterToken, expected_acceptance
from transformers import (
    DynamicCache,
    GenerationConfig,
    StaticCache,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import StoppingCriteriaList

# Details of the output


def assert_same_nesting(ours, theirs, name):
    """Equal tuples of tuples of tensors: lengths, shapes, values (norms and softmax are float32 in any model)."""
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape, f"{name}: {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")
    elif theirs is None:
        assert ours is None, name
    else:
        assert isinstance(ours, tuple), name
        assert len(ours) == len(theirs), f"{name}: {len(ours)} entries, not {len(theirs)}"
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same_nesting(*pair, f"{name}[{i}]")


@pytest.mark.parametrize("detail", ["scores", "logits", "hidden_states", "attentions"])
@each_arch
def test_details_equal_plain_generate(arch, detail):
    target = cached_target(arch)
    # A processor, so that scores and logits differ.
    prompt, plain = prompt_and_plain(target, repetition_penalty=1.3, length=15, **DETAILS)
    draft = good_draft(target, plain.sequences, spoil(15))
    output = target.generate(
        prompt, max_new_tokens=NEW_TOKENS, repetition_penalty=1.3, assistant_model=draft, **DETAILS
    )
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert_same_nesting(getattr(output, detail), getattr(plain, detail), detail)


@each_door
@pytest.mark.parametrize("wanted", ["output_scores", "output_logits", "output_hidden_states", "output_attentions"])
def test_only_what_was_asked_for_is_returned(wanted, door):
    target = cached_target()
    asked = {"return_dict_in_generate": True, wanted: True}
    prompt, plain = prompt_and_plain(target, **asked)
    draft = good_draft(target, plain.sequences, spoil())
    output = call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS, **asked)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_same_nesting(getattr(output, name), getattr(plain, name), name)


def test_scores_and_logits_are_one_float_row_per_new_token():
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    output = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, **DETAILS)
    for rows in (output.scores, output.logits):
        assert [(tuple(row.shape), row.dtype) for row in rows] == [((1, VOCAB), torch.float32)] * NEW_TOKENS
    assert torch.cat(output.scores).argmax(dim=-1).tolist() == output.sequences[0, PROMPT:].tolist()


@pytest.mark.parametrize("spoiled", [set(), spoil(), set(range(100))], ids=["good", "partly-good", "always-wrong"])
@each_door
def test_acceptance_lengths_count_tokens_per_round_and_rounds_are_target_passes(door, spoiled):
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoiled)
    with recorded_widths(target) as widths:
        output = call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    lengths = output.acceptance_lengths
    assert isinstance(lengths, torch.Tensor) and lengths.dtype == torch.long and lengths.shape[0] == 1
    assert lengths[0].tolist() == expected_acceptance(PROMPT, NEW_TOKENS, PROPOSALS, spoiled)
    assert 1 + int(lengths.sum()) == NEW_TOKENS
    assert len(widths) == 1 + lengths.shape[1]


def test_a_single_token_takes_the_prefill_alone():
    target = cached_target()
    prompt, plain = prompt_and_plain(target, new_tokens=1)
    draft = make_draft(target)
    with recorded_widths(target) as widths:
        output = target.generate(prompt, max_new_tokens=1, assistant_model=draft, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.acceptance_lengths.dtype == torch.long and output.acceptance_lengths[0].tolist() == []
    assert widths == [PROMPT]


@pytest.mark.parametrize("new_tokens", range(1, 2 * BLOCK + 4))
def test_every_length_limit_gives_exactly_as_many_tokens(new_tokens):
    target = cached_target()
    prompt, plain = prompt_and_plain(target, new_tokens=40)
    draft = good_draft(target, plain)
    output = target.generate(
        prompt, max_new_tokens=new_tokens, assistant_model=draft, return_dict_in_generate=True, output_scores=True
    )
    assert output.sequences.tolist() == plain[:, : PROMPT + new_tokens].tolist()
    assert len(output.scores) == new_tokens
    assert output.acceptance_lengths[0].tolist() == expected_acceptance(PROMPT, new_tokens, PROPOSALS)


# Proposals per round


@pytest.mark.parametrize(
    ("shift_label", "asked", "proposals"),
    [
        (True, None, BLOCK - 1),
        (True, 1, 1),
        (True, 3, 3),
        (True, BLOCK - 1, BLOCK - 1),
        (True, BLOCK, BLOCK),
        (True, 100, BLOCK),
        (False, None, BLOCK - 1),
        (False, 2, 2),
        (False, BLOCK, BLOCK - 1),
        (False, 100, BLOCK - 1),
    ],
    ids=lambda value: str(value).lower(),
)
@each_door
def test_num_assistant_tokens_bounds_the_proposals_of_this_call(door, shift_label, asked, proposals):
    target = cached_target()
    prompt, plain = prompt_and_plain(target, new_tokens=40)
    draft = good_draft(target, plain, shift_label=shift_label)
    extra = {} if asked is None else {"num_assistant_tokens": asked}
    with recorded_widths(target) as widths:
        output = call(door, target, draft)(prompt, max_new_tokens=40, return_dict_in_generate=True, **extra)
    assert output.sequences.tolist() == plain.tolist()
    assert max(widths[1:]) == proposals + 1
    assert output.acceptance_lengths[0].tolist() == expected_acceptance(PROMPT, 40, proposals)


@each_door
def test_a_draft_may_bring_its_own_number_of_proposals_and_the_call_has_the_last_word(door):
    target = cached_target()
    prompt, plain = prompt_and_plain(target, new_tokens=40)
    draft = good_draft(target, plain)
    draft.generation_config = GenerationConfig(num_assistant_tokens=2)
    for extra, proposals in (({}, 2), ({"num_assistant_tokens": 4}, 4)):
        given = GenerationConfig(max_new_tokens=40, **extra)
        with recorded_widths(target) as widths:
            output = call(door, target, draft)(prompt, generation_config=given)
        assert output.tolist() == plain.tolist()
        assert max(widths[1:]) == proposals + 1
        assert given.num_assistant_tokens == extra.get("num_assistant_tokens")


@each_door
def test_a_block_longer_than_transformers_default_number_of_assistant_tokens_is_offered_whole(door):
    # `generate` fills `num_assistant_tokens` with 20 where a user left it out.
    target = cached_target()
    prompt, plain = prompt_and_plain(target, new_tokens=60)
    draft = good_draft(target, plain, block_size=25)
    with recorded_widths(target) as widths:
        output = call(door, target, draft)(prompt, max_new_tokens=60, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert max(widths[1:]) == 25
    assert output.acceptance_lengths[0].tolist() == expected_acceptance(PROMPT, 60, 24)


@pytest.mark.parametrize("new_tokens", range(1, 2 * BLOCK + 4))
def test_no_position_beyond_the_length_limit_is_touched(new_tokens):
    # Learned positions: the table ends with the last position that plain `generate` looks up.
    target = make_target("gpt2-learned-positions", n_positions=PROMPT + new_tokens - 1)
    prompt, plain = prompt_and_plain(target, new_tokens=new_tokens)
    for draft in (make_draft(target), good_draft(target, plain), good_draft(target, plain, spoil())):
        output = target.generate(prompt, max_new_tokens=new_tokens, assistant_model=draft)
        assert output.tolist() == plain.tolist()


def test_the_head_can_be_turned_off():
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain)
    # A correction so large that, with the head, nothing is proposed as planned.
    with torch.no_grad():
        draft.embed_proj[2].weight.normal_(std=1000.0, generator=torch.Generator().manual_seed(0))
    details = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    on = target.generate(prompt, custom_generate=partial(draft.decode, use_head=True), **details)
    off = target.generate(prompt, custom_generate=partial(draft.decode, use_head=False), **details)
    direct = target.generate(prompt, custom_generate=draft.decode, use_head=False, **details)
    assert direct.acceptance_lengths[0].tolist() == off.acceptance_lengths[0].tolist()
    assert on.sequences.tolist() == off.sequences.tolist() == direct.sequences.tolist() == plain.tolist()
    assert off.acceptance_lengths[0].tolist() == expected_acceptance(PROMPT, NEW_TOKENS, PROPOSALS)
    assert on.acceptance_lengths.shape[1] > off.acceptance_lengths.shape[1]


def test_only_the_first_proposals_are_uncorrected():
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    for prefix in range(4):
        draft = good_draft(target, plain, pure_draft_prefix_len=prefix)
        with torch.no_grad():
            draft.embed_proj[2].weight.normal_(std=1000.0, generator=torch.Generator().manual_seed(0))
        output = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain.tolist()
        # At least the prefix is right, and the corrected proposals are nearly always wrong.
        assert output.acceptance_lengths[0, :-1].min() == prefix + 1


@each_door
@each_arch
def test_a_mask_with_holes_is_plain_generates(arch, door):
    # `generate` masks a pad token wherever it stands, when it is given no mask; a user may pass any.
    # Eager attention gives a float64 model NaN at a row that sees nothing; Gemma 2 knows no other.
    target = cached_target(arch, "sdpa") if arch != "gemma2-softcap" else cached_target(arch, dtype=torch.float32)
    prompt = random_tokens(1, 17, seed=3)
    prompt[0, [0, 1, 5, 6, 11]] = 0
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    assert plain.tolist() != target.generate(prompt, max_new_tokens=NEW_TOKENS, pad_token_id=MASK_TOKEN).tolist()
    seen = torch.cat([plain[:, :17][:, prompt[0] != 0], plain[:, 17:]], dim=1)
    length = seen.shape[1] - NEW_TOKENS
    for spoiled in ((), spoil(length), range(100)):
        draft = good_draft(target, seen, spoiled)
        output = call(door, target, draft)(
            prompt, max_new_tokens=NEW_TOKENS, pad_token_id=0, return_dict_in_generate=True
        )
        assert output.sequences.tolist() == plain.tolist()
        assert output.acceptance_lengths[0].tolist() == expected_acceptance(length, NEW_TOKENS, PROPOSALS, spoiled)


# Caches


@each_door
@each_arch
def test_the_returned_cache_equals_plain_generates(arch, door):
    target = cached_target(arch)
    # Longer than the sliding windows, so that these layers hold their last entries only.
    prompt, plain = prompt_and_plain(target, length=17, return_dict_in_generate=True)
    draft = good_draft(target, plain.sequences, spoil(17))
    output = call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    ours, theirs = getattr(output, CACHE), getattr(plain, CACHE)
    assert ours.get_seq_length() == theirs.get_seq_length() == 17 + NEW_TOKENS - 1
    for i, (our_layer, their_layer) in enumerate(zip(layers_of(ours), layers_of(theirs), strict=True)):
        assert_same_nesting(our_layer, their_layer, f"layer {i}")


@pytest.mark.parametrize("stop", ["eos", "criterion"])
@pytest.mark.parametrize("offset", range(BLOCK))
def test_a_stop_inside_a_block_leaves_nothing_after_it_in_the_cache(offset, stop):
    target = cached_target("phi3-fused")
    prompt, text = prompt_and_plain(target)
    token = int(text[0, PROMPT + 1 + offset])
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    if stop == "eos":
        options |= {"eos_token_id": token, "pad_token_id": MASK_TOKEN}
    else:
        options["stopping_criteria"] = StoppingCriteriaList([StopAfterToken(token, 1, PROMPT)])
    plain = target.generate(prompt, **options)
    output = target.generate(prompt, assistant_model=good_draft(target, text), **options)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert plain.sequences.shape[1] < PROMPT + NEW_TOKENS
    for our_layer, their_layer in zip(layers_of(getattr(output, CACHE)), layers_of(getattr(plain, CACHE)), strict=True):
        assert_same_nesting(our_layer, their_layer, "layer")


@pytest.mark.parametrize("turns", ["draft-then-plain", "plain-then-draft", "draft-then-draft"])
@each_door
@each_arch
def test_a_second_turn_continues_from_the_returned_cache(arch, door, turns):
    target = cached_target(arch)
    details = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    prompt = random_tokens(1, 17, seed=3)
    first = target.generate(prompt, **details)
    question = torch.cat([first.sequences, random_tokens(1, 5, seed=4)], dim=1)
    second = target.generate(question, **{CACHE: getattr(first, CACHE)}, **details)
    length = question.shape[1]
    draft = good_draft(target, second.sequences, spoil(17) | spoil(length))
    plain_call, draft_call = target.generate, call(door, target, draft)

    who = turns.split("-then-")
    one = (draft_call if who[0] == "draft" else plain_call)(prompt, **details)
    two = (draft_call if who[1] == "draft" else plain_call)(question, **{CACHE: getattr(one, CACHE)}, **details)
    assert one.sequences.tolist() == first.sequences.tolist()
    assert two.sequences.tolist() == second.sequences.tolist()
    assert getattr(two, CACHE).get_seq_length() == length + NEW_TOKENS - 1
    # Also the shapes: a sliding layer that went on recording its past would keep everything.
    for our_layer, their_layer in zip(layers_of(getattr(two, CACHE)), layers_of(getattr(second, CACHE)), strict=True):
        assert_same_nesting(our_layer, their_layer, "layer")
    if who[1] == "draft":
        assert two.acceptance_lengths[0].tolist() == expected_acceptance(length, NEW_TOKENS, PROPOSALS, draft.spoiled)


@each_door
@pytest.mark.parametrize("arch", ["qwen3", "mistral-sliding", "gemma3-scaled-embedding", "gpt2-learned-positions"])
def test_a_text_cut_by_the_length_limit_is_continued_without_a_new_token(arch, door):
    target = cached_target(arch)
    details = {"return_dict_in_generate": True}
    prompt, plain = prompt_and_plain(target, length=17, new_tokens=3 * NEW_TOKENS)
    generate = call(door, target, good_draft(target, plain, spoil(17) | spoil(50)))
    output = generate(prompt, max_new_tokens=NEW_TOKENS, **details)
    for _ in range(2):
        cache = {CACHE: getattr(output, CACHE)}
        output = generate(output.sequences, max_new_tokens=NEW_TOKENS, **cache, **details)
    assert output.sequences.tolist() == plain.tolist()


@each_door
@pytest.mark.parametrize("arch", ["qwen3", "mistral-sliding"])
def test_a_static_cache_passed_in_is_honoured_or_refused(arch, door):
    target = cached_target(arch)
    prompt, plain = prompt_and_plain(target, length=17)
    cache = StaticCache(config=target.config, max_cache_len=17 + NEW_TOKENS)
    try:
        output = call(door, target, good_draft(target, plain, spoil(17)))(
            prompt, max_new_tokens=NEW_TOKENS, **{CACHE: cache}
        )
    except ValueError as error:
        assert re.search("cache", str(error), re.IGNORECASE), error
    else:
        assert output.tolist() == plain.tolist()


@each_door
def test_a_second_turn_may_pass_its_new_tokens_only(door):
    target = cached_target()
    details = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    prompt, question = random_tokens(1, 17, seed=3), random_tokens(1, 5, seed=4)
    results = []
    for generate in (target.generate, call(door, target, make_draft(target))):
        first = generate(prompt, **details)
        mask = torch.ones(1, first.sequences.shape[1] + question.shape[1], dtype=torch.long)
        results.append(generate(question, attention_mask=mask, **{CACHE: getattr(first, CACHE)}, **details))
    plain, output = results
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert getattr(output, CACHE).get_seq_length() == getattr(plain, CACHE).get_seq_length()


@each_door
@each_arch
def test_an_empty_cache_passed_in_is_the_one_that_is_filled(arch, door):
    target = cached_target(arch)
    prompt, plain = prompt_and_plain(target, length=17)
    cache = DynamicCache(config=target.config)
    output = call(door, target, good_draft(target, plain, spoil(17)))(
        prompt, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **{CACHE: cache}
    )
    assert output.sequences.tolist() == plain.tolist()
    assert getattr(output, CACHE) is cache
    assert cache.get_seq_length() == 17 + NEW_TOKENS - 1
