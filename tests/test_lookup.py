# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: what a text proposes to itself, how far it is believed, and what becomes of it in a tree."""

import random
from collections import Counter
from fractions import Fraction

import pytest
import torch
from contract import recorded_widths
from helpers import MASK_TOKEN, VOCAB, make_draft, make_target, random_tokens
from test_generate_lossless import GoodDraft
from test_tree import constant_schedule, way_to

from domino_spec.generation.lookup import Continuation, PromptLookup
from domino_spec.generation.scorer import Scorer
from domino_spec.generation.tree import grow

CPU = torch.device("cpu")
LONGEST = 6
# As documented: hits out of 20, by how many tokens match.
PRIOR = [Fraction(hits) for hits in (0, 5, 10, 13, 14, 16, 18)]


def last_match(text):
    """The end of the longest n-gram (of six at most) that `text` ends with and has before; the last such one."""
    for length in range(min(LONGEST, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return length, end
    # Nothing matches: any place will do, and the last is taken.
    return 0, len(text) - 1


def slow_continuation(text, num_tokens):
    shared, end = last_match(text)
    going_on = list(text)
    for k in range(num_tokens):
        going_on.append(going_on[end + k])
    return [min(shared + k, LONGEST) for k in range(num_tokens)], going_on[len(text) :]


def random_text(rng):
    """Of few tokens, so that it repeats itself; now and then of a piece that comes again."""
    text = [rng.randrange(rng.choice([1, 2, 3, 10])) for _ in range(rng.randint(2, 30))]
    return text + text[: rng.randint(0, len(text))]


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_match_is_continued_and_the_last_of_several(seed):
    rng = random.Random(seed)
    text, num_tokens = random_text(rng), rng.randint(1, 12)
    shared, token_ids = slow_continuation(text, num_tokens)
    continuation = PromptLookup(CPU).continuation(torch.tensor(text), num_tokens)
    # Where nothing matches, any token will do.
    if shared[0] > 0:
        assert continuation.token_ids.tolist() == token_ids
    chances = [float(PRIOR[n] / 20) for n in shared]
    torch.testing.assert_close(continuation.chances, torch.tensor(chances))


def test_a_text_goes_on_in_circles():
    text = torch.tensor([7, 7, 4, 5, 6, 4, 5, 6])
    assert PromptLookup(CPU).continuation(text, 8).token_ids.tolist() == [4, 5, 6, 4, 5, 6, 4, 5]


def test_nothing_before_the_text_matches():
    """The text is shorter than the longest n-gram, so that places before its start are looked at."""
    continuation = PromptLookup(CPU).continuation(torch.tensor([3, 3]), 2)
    assert continuation.token_ids.tolist() == [3, 3]
    torch.testing.assert_close(continuation.chances, torch.tensor([0.25, 0.5]))


@pytest.mark.parametrize("seed", range(50))
def test_what_came_says_how_far_a_lookup_is_believed(seed):
    """Against plain counting, over rounds that commit any number of tokens, also more than were proposed."""
    rng = random.Random(seed)
    text, lookup = random_text(rng), PromptLookup(CPU)
    hits, tries = list(PRIOR), [Fraction(20)] * len(PRIOR)
    for _ in range(30):
        num_tokens = rng.randint(1, 8)
        continuation = lookup.continuation(torch.tensor(text), num_tokens)
        shared, _ = slow_continuation(text, num_tokens)
        chances = [float(hits[n] / tries[n]) for n in shared]
        torch.testing.assert_close(continuation.chances, torch.tensor(chances))
        proposed, before = continuation.token_ids.tolist(), len(text)
        # Some of them as proposed, then any.
        text += proposed[: rng.randint(0, num_tokens)]
        text += [rng.randrange(3) for _ in range(rng.randint(0 if len(text) > before else 1, 4))]
        for n, token, came in zip(shared, proposed, text[before:], strict=False):
            tries[n] += 1
            hits[n] += token == came
            if token != came:
                break


def test_no_chance_is_ever_certain_or_none_that_it_was_right_once():
    lookup, text = PromptLookup(CPU), torch.tensor([5] * 4000)
    for length in range(10, 4000, 7):
        chances = lookup.continuation(text[:length], 7).chances
        assert (chances < 1).all() and (chances > 0.5).all()
    assert chances[0] > 0.99


def test_counts_are_not_rounded_to_a_default_dtype():
    text = torch.tensor([5] * 3000)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        lookup = PromptLookup(CPU)
        for length in range(10, 3000, 7):
            chances = lookup.continuation(text[:length], 7).chances
    finally:
        torch.set_default_dtype(before)
    # 2,989 hits behind 18 of 20.
    assert chances[-1] > 0.999


# In a tree


def paths_of(tree):
    tokens, parents = [None, *tree.proposal_ids[0].tolist()], [None, *tree.parents.tolist()]
    assert all(parent < node for node, parent in enumerate(parents) if node)
    siblings = Counter(zip(parents[1:], tokens[1:], strict=True))
    assert set(siblings.values()) <= {1}
    return {tuple(tokens[i] for i in way_to(node, parents)[1:]) for node in range(1, len(tokens))}


def scored(draft, parts, hidden, anchor, path):
    """Log probability that the draft gives to a path."""
    score = 0.0
    for k, token in enumerate(path):
        logits = parts.logits(hidden[0, k])
        if k >= draft.config.pure_draft_prefix_len:
            read = torch.tensor([[int(anchor), *path[:k]]])
            logits = logits + draft.correction(hidden[0, k], draft.prefix_states(parts.embed(read))[0, -1])
        score += float(logits.float().log_softmax(-1)[token])
    return score


@pytest.mark.parametrize("size", [1, 2, 7, 15, 40])
@pytest.mark.parametrize("num_shared", [0, 1, 3])
@torch.no_grad()
def test_of_the_drafts_paths_and_the_texts_the_likeliest_are_kept(target, parts, size, num_shared):
    draft, generator = make_draft(target), torch.Generator().manual_seed(size)
    scorer, depth = Scorer(draft, parts, True), 4
    for _ in range(5):
        hidden = torch.randn(1, draft.config.block_size, draft.config.hidden_size, generator=generator).double()
        anchor = torch.randint(VOCAB, (1, 1), generator=generator)
        candidates = paths_of(grow(scorer, hidden, anchor, depth, size, constant_schedule()))
        scores = {path: scored(draft, parts, hidden, anchor, path) for path in candidates}
        # It goes along with the draft's likeliest path for so long.
        longest = max(candidates, key=lambda path: (len(path), scores[path]))
        token_ids = torch.randint(VOCAB, (6,), generator=generator)
        token_ids[: min(num_shared, len(longest))] = torch.tensor(longest[:num_shared])
        chances = torch.rand(6, generator=generator) * 0.8
        chance = 1.0
        for k in range(6):
            chance *= float(chances[k])
            path = tuple(token_ids[: k + 1].tolist())
            scores[path] = max(scores.get(path, -torch.inf), float(torch.tensor(chance).log()))
        tree = grow(scorer, hidden, anchor, depth, size, constant_schedule(), Continuation(token_ids, chances))
        ranked = sorted(scores, key=lambda path: -scores[path])
        assert paths_of(tree) == set(ranked[:size])
        assert tree.depth >= max(map(len, ranked[:size]))


@pytest.mark.parametrize("chance", [0.0, 1.0])
@torch.no_grad()
def test_a_text_can_be_believed_in_everything_or_nothing(target, parts, chance):
    draft = make_draft(target)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(1, draft.config.block_size, draft.config.hidden_size, generator=generator).double()
        token_ids, anchor = torch.randint(3, (9,), generator=generator), torch.ones(1, 1).long()
        args = Scorer(draft, parts, True), hidden, anchor, 3, 8, constant_schedule()
        paths = paths_of(grow(*args, Continuation(token_ids, torch.full((9,), chance))))
        along = {tuple(token_ids[:k].tolist()) for k in range(1, 9)}
        assert paths == along if chance else paths == paths_of(grow(*args))


# Whole answers


class Silent(GoodDraft):
    """Believes in a token that the target never writes."""

    def _state(self, position):
        return 30 * self.states[MASK_TOKEN]


@pytest.fixture
@torch.no_grad()
def repeating():
    """A target that looks at the last token alone, so that it ends up in a circle; a prompt there; and its answer."""
    target = make_target()
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
    answer = target.generate(random_tokens(1, 5, seed=1), max_new_tokens=115)
    return target, answer[:, :80], answer


def test_a_text_that_repeats_itself_needs_no_draft(repeating):
    target, prompt, answer = repeating
    draft = Silent.following(make_draft(target), target, answer[0], ())
    options = {"max_new_tokens": 40, "assistant_model": draft, "return_dict_in_generate": True}
    alone = target.generate(prompt, **options)
    assert alone.acceptance_lengths.max() == 1
    draft.use_tree(15)
    with recorded_widths(target) as widths:
        output = target.generate(prompt, **options)
    assert torch.equal(output.sequences, answer)
    # Longer than any block.
    assert output.acceptance_lengths.max() > draft.config.block_size
    assert output.acceptance_lengths.shape[1] < 8 and max(widths[1:]) == 16
    # How many may follow one another is the call's to say.
    for asked in (0, 1, 3):
        output = target.generate(prompt, num_assistant_tokens=asked, **options)
        assert torch.equal(output.sequences, answer)
        assert output.acceptance_lengths.max() == asked + 1


@torch.no_grad()
def test_a_text_proposes_nothing_past_the_limit():
    """Learned positions end where the answer does, and one more would raise."""
    target = make_target("gpt2-learned-positions")
    limit = target.config.max_position_embeddings
    # What the target keeps writing: the anchor alone decides.
    for layer in target.transformer.h:
        layer.attn.c_proj.weight.zero_()
        layer.mlp.c_proj.weight.zero_()
    target.transformer.wpe.weight.zero_()
    prompt = random_tokens(1, 5).expand(1, 5)
    plain = target.generate(prompt, max_length=limit)
    draft = Silent.following(make_draft(target), target, plain[0], ())
    draft.use_tree(15)
    output = target.generate(prompt, max_length=limit, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.acceptance_lengths.max() > draft.config.block_size


def test_all_proposals_can_be_left_to_the_draft(repeating):
    target, prompt, answer = repeating
    draft = Silent.following(make_draft(target), target, answer[0], ())
    draft.use_tree(15, prompt_lookup=False)
    output = target.generate(prompt, max_new_tokens=40, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, answer)
    # One of the draft's last choices may be right by chance.
    assert output.acceptance_lengths.shape[1] > 30


def test_prompt_lookup_as_an_option_of_the_call_says_what_to_do_instead(target):
    with pytest.raises(ValueError, match=r"prompt_lookup_num_tokens=3: .*draft\.use_tree\(\)"):
        target.generate(random_tokens(1, 5), assistant_model=make_draft(target), prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_prompt_lookup_is_on_or_off(target, value):
    with pytest.raises(ValueError, match=r"prompt_lookup.*True or False"):
        make_draft(target).use_tree(7, prompt_lookup=value)
