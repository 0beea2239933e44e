# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampled output with a draft is distributed as the target alone distributes it.

On a vocabulary of seven tokens every answer can be counted out beforehand: its probability is the product of the
processed distributions along it. Draws with a draft are compared with those by a chi-square test. Seeds are fixed, so
a test either always passes or always fails; its level is set for the number of tests in this file.
"""

import math

import pytest
import torch
from helpers import make_draft, make_target, random_tokens
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from domino_spec.generation import verification
from domino_spec.generation.sampling import accept_or_draw, draw
from domino_spec.generation.sequences import Proposal, Sequences
from domino_spec.generation.verification import verify

VOCAB = 7
PROMPT = 4
NEW_TOKENS = 3
# One in a hundred that any test of this file fails by chance, had the seeds been others.
LEVEL = 0.01 / 40


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """P-value of `counts` under `expected` (same sum); cells that expect fewer than five draws are pooled."""
    counts, expected = counts.double(), expected.double()
    assert counts[expected == 0].sum() == 0, "an answer was drawn that has no probability"
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 5:
        merged = expected[-2] + expected[-1], counts[-2] + counts[-1]
        expected, counts = torch.cat([expected[:-2], merged[0][None]]), torch.cat([counts[:-2], merged[1][None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if len(expected) > 1 else 1.0


def test_the_chi_square_test_tells_distributions_apart():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.double)
    draws = torch.multinomial(p, 20000, replacement=True, generator=torch.Generator().manual_seed(0)).bincount()
    assert chi_square_p(draws, p * 20000) > 0.01
    assert chi_square_p(draws, torch.tensor([0.46, 0.34, 0.15, 0.05]) * 20000) < 1e-6


# One step of rejection sampling


DISTRIBUTIONS = {
    "overlapping": ([2.0, 1.0, 0.5, 0.1, 3.0], [0.5, 2.0, 0.5, 1.0, 1.0]),
    "q misses what p has": ([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 0.0, 0.0, 1.0]),
    "all mass is rejected": ([0.0, 0.0, 1.0, 2.0, 1.0], [1.0, 3.0, 0.0, 0.0, 0.0]),
    "p is one token": ([0.0, 0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]),
    "p is one token that q never offers": ([0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0, 1.0]),
    "q is one token": ([1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0]),
    "equal": ([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0]),
}


@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_a_step_draws_from_the_target_and_accepts_what_the_distributions_share(case):
    p, q = (torch.tensor(values) / sum(values) for values in DISTRIBUTIONS[case])
    torch.manual_seed(11)
    draws = 1_000_000
    proposals = torch.multinomial(q, draws, replacement=True)
    tokens, accepted = accept_or_draw(p.log().expand(draws, -1), proposals, q.expand(draws, -1))
    assert torch.equal(tokens[accepted], proposals[accepted])
    assert chi_square_p(tokens.bincount(minlength=5), p * draws) > LEVEL
    # A proposal stands with probability sum(min(p, q)).
    share, deviation = float(torch.minimum(p, q).sum()), 0.5 / math.sqrt(draws)
    assert abs(float(accepted.double().mean()) - share) < 5 * deviation


def test_a_draft_that_is_the_target_is_always_believed():
    torch.manual_seed(5)
    logits = torch.randn(64, 4, VOCAB)
    probabilities = logits[:, :3].softmax(-1)
    proposal = Proposal(
        torch.stack([torch.multinomial(probabilities[:, k], 1)[:, 0] for k in range(3)], 1), probabilities
    )
    sequences = Sequences(random_tokens(64, PROMPT, vocab=VOCAB))
    sequences.reserve(4)

    def never(ids, scores):
        return torch.zeros(len(ids), dtype=torch.bool)

    for lockstep in (False, True):
        verified = verify(sequences, proposal, logits, LogitsProcessorList(), never, [False] * 64, True, lockstep)
        assert verified.num_new == [4] * 64


# Whole answers against exact enumeration


class Unknown(LogitsProcessor):
    """Changes nothing; but as it might count its calls, a batch goes in lockstep, as a single row does."""

    def __call__(self, input_ids, scores):
        return scores


def allow_by_last(batch_id, input_ids):
    return [token for token in range(VOCAB) if (token + int(input_ids[-1])) % 3 != 0]


COMBINATIONS = {
    "plain": {"temperature": 1.0, "top_k": 0},
    "temperature and top-k": {"temperature": 0.7, "top_k": 4},
    "top-p": {"temperature": 1.3, "top_k": 0, "top_p": 0.8},
    "min-p and repetition penalty": {"top_k": 0, "min_p": 0.15, "repetition_penalty": 1.5},
    "typical": {"top_k": 0, "typical_p": 0.8},
    "epsilon and eta": {"top_k": 0, "epsilon_cutoff": 0.05, "eta_cutoff": 0.05},
    "bad words and bias": {"top_k": 0, "bad_words_ids": [[2], [3, 1]], "sequence_bias": [[[5], 1.0], [[1, 4], -2.0]]},
    "no repeated pairs": {"top_k": 0, "no_repeat_ngram_size": 2, "temperature": 0.8},
    "prefix constraint": {"top_k": 0, "prefix_allowed_tokens_fn": allow_by_last},
    "watermark": {"top_k": 0, "watermarking_config": WatermarkingConfig(bias=2.0, seeding_scheme="lefthash")},
    "end token": {"top_k": 0, "eos_token_id": 4, "min_new_tokens": 2},
    "one token left": {"top_k": 0, "suppress_tokens": [0, 1, 2, 3, 5, 6]},
}


@pytest.fixture(scope="module")
def pair():
    """A target and a draft of seven tokens whose distributions leave something to draw, and to reject."""
    target = make_target("qwen3", dtype=torch.float32, seed=3, vocab_size=VOCAB, attn_implementation="sdpa")
    draft = make_draft(target, seed=4, attn_implementation="sdpa", mask_token_id=0, block_size=4)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
    return target, draft


def caught_processors(target, prompt, new_tokens: int, options) -> LogitsProcessorList:
    """What `generate` makes of sampling `options`."""
    caught = []

    def catch(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        caught.append(logits_processor)
        return input_ids

    target.generate(prompt, custom_generate=catch, do_sample=True, max_new_tokens=new_tokens, **options)
    return caught[0]


def exact_distribution(target, prompt, options) -> dict[tuple[int, ...], float]:
    """Every answer of `NEW_TOKENS` tokens, with padding after an end token, and its probability."""
    processors = caught_processors(target, prompt, NEW_TOKENS, options)
    end, answers = options.get("eos_token_id"), {(): 1.0}
    for _ in range(NEW_TOKENS):
        longer = {}
        for answer, probability in answers.items():
            if end is not None and end in answer:
                longer[(*answer, 0)] = probability
                continue
            ids = torch.cat([prompt, torch.tensor([answer], dtype=torch.long)], dim=1)
            with torch.no_grad():
                scores = processors(ids, target(ids).logits[:, -1].float())
            for token, p in enumerate(scores.softmax(-1)[0].tolist()):
                longer[(*answer, token)] = probability * p
        answers = longer
    return answers


def compare_with_exact(pair, name: str, sizes: list[int], lockstep: bool = False) -> tuple[float, float]:
    """
    Draw answers with a draft, in calls of these `sizes` (rows).

    Returns:
        The p-value of their chi-square test against the exact distribution, and the mean acceptance length.
    """
    target, draft = pair
    prompt = random_tokens(1, PROMPT, seed=9, vocab=VOCAB)
    exact = exact_distribution(target, prompt, COMBINATIONS[name])
    assert sum(exact.values()) == pytest.approx(1, abs=1e-4)
    expected = torch.zeros(VOCAB**NEW_TOKENS, dtype=torch.double)
    for answer, probability in exact.items():
        expected[sum(token * VOCAB**i for i, token in enumerate(answer))] += probability
    # The padding is a token of the prompt too.
    options = {**COMBINATIONS[name], "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    if lockstep:
        options["logits_processor"] = LogitsProcessorList([Unknown()])
    counts, accepted, rounds = torch.zeros(VOCAB**NEW_TOKENS, dtype=torch.long), 0, 0
    for size in sizes:
        output = target.generate(
            prompt,
            assistant_model=draft,
            do_sample=True,
            num_return_sequences=size,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            **options,
        )
        answers = output.sequences[:, PROMPT:]
        answers = torch.nn.functional.pad(answers, (0, NEW_TOKENS - answers.shape[1]))
        counts += (answers * VOCAB ** torch.arange(NEW_TOKENS)).sum(-1).bincount(minlength=VOCAB**NEW_TOKENS)
        accepted += int(output.acceptance_lengths.sum())
        rounds += int((output.acceptance_lengths > 0).sum())
    return chi_square_p(counts, expected / expected.sum() * counts.sum()), accepted / rounds


@pytest.fixture
def as_if_far(monkeypatch):
    """All that a round may need is worked out at once, as on a GPU."""
    seen, real = [], verification._verify_at_once
    monkeypatch.setattr(verification, "is_far", lambda device: True)
    monkeypatch.setattr(verification, "_verify_at_once", lambda *args: (seen.append(1), real(*args))[1])
    return seen


@pytest.mark.parametrize("name", ["plain", "temperature and top-k", "top-p", "typical", "end token"])
def test_answers_that_are_verified_at_once_are_distributed_so_too(pair, name, as_if_far):
    torch.manual_seed(18)
    p_value, acceptance_length = compare_with_exact(pair, name, [1] * 100 + [4] * 50 + [1000] * 6)
    assert p_value > LEVEL
    assert acceptance_length > 1, "no proposal was ever accepted, so nothing was tested"
    # The end token comes with a least length, which is read from the text.
    assert bool(as_if_far) == (name != "end token")


@pytest.mark.parametrize("far", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("reached", [False, True], ids=["not reached", "reached"])
def test_logits_that_are_no_numbers_matter_only_where_a_token_is_drawn_from_them(far, reached, monkeypatch):
    monkeypatch.setattr(verification, "is_far", lambda device: far)
    torch.manual_seed(0)
    logits = torch.randn(2, 3, VOCAB)
    logits[0, 2, 4] = torch.nan
    logits[1] = torch.nan
    probabilities = torch.full((2, 2, VOCAB), 1 / VOCAB)
    if not reached:
        # The first proposal cannot stand.
        probabilities = torch.nn.functional.one_hot(torch.zeros(2, 2, dtype=torch.long), VOCAB).float()
        logits[0, 0, 0] = -torch.inf
    else:
        logits[0, :2, 0] = 100.0
    sequences = Sequences(random_tokens(2, PROMPT, vocab=VOCAB))
    sequences.reserve(3)
    criteria = StoppingCriteriaList([MaxLengthCriteria(PROMPT + 10)])
    proposal = Proposal(torch.zeros(2, 2, dtype=torch.long), probabilities)
    arguments = (sequences, proposal, logits, LogitsProcessorList(), criteria, [False, True], True, False)
    if reached:
        with pytest.raises(RuntimeError, match=f"Token {PROMPT + 2} cannot be drawn"):
            verify(*arguments)
    else:
        # The other row has ended before.
        assert verify(*arguments).num_new == [1, 0]


def test_a_draw_is_that_of_multinomial():
    probabilities = torch.rand(50, 1000, generator=torch.Generator().manual_seed(0))
    probabilities[:, ::2] = 0
    torch.manual_seed(3)
    expected = torch.multinomial(probabilities, 1)[:, 0]
    torch.manual_seed(3)
    assert draw(probabilities).tolist() == expected.tolist()


@pytest.mark.parametrize("lockstep", [False, True], ids=["ragged", "lockstep"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_answers_are_distributed_as_the_target_alone_distributes_them(pair, name, lockstep):
    torch.manual_seed(17)
    # Rows in lockstep advance by the slowest of them: few rows, so that blocks are accepted at all.
    in_lockstep = lockstep or name == "prefix constraint"
    sizes = [1] * 200 + [4] * 150 if in_lockstep else [4] * 50 + [1000] * 6
    p_value, acceptance_length = compare_with_exact(pair, name, sizes, lockstep)
    assert p_value > LEVEL
    assert acceptance_length > 1, "no proposal was ever accepted, so nothing was tested"


@pytest.mark.parametrize("name", ["temperature and top-k", "prefix constraint"])
def test_a_draft_with_a_shortlist_changes_no_distribution(pair, name):
    target, _ = pair
    draft = make_draft(target, seed=4, mask_token_id=0, block_size=4)
    draft.config.set_shortlist([1, 2, 5])
    torch.manual_seed(23)
    p_value, acceptance_length = compare_with_exact((target, draft), name, [4] * 150 + [100] * 20, lockstep=False)
    assert p_value > LEVEL
    assert acceptance_length > 1


# Long answers, as `sampling_draws.py` counts them by the million


@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
def test_counted_transitions_tell_a_faulty_step_from_a_sound_one(faulty, monkeypatch):
    # Here, as that script takes from this file.
    from sampling_draws import COMBINATIONS, draw_transitions, exact_transitions, make_forgetful_pair, transitions_p

    def without_residual(scores, proposal_ids, draft_probabilities):
        """Rejected proposals are made up for from p, as if nothing had been offered."""
        p = scores.softmax(-1)
        index = proposal_ids[:, None]
        ratio = (p.gather(-1, index) / draft_probabilities.gather(-1, index))[:, 0]
        accepted = torch.rand_like(ratio) < ratio
        return torch.where(accepted, proposal_ids, torch.multinomial(p, 1)[:, 0]), accepted

    if faulty:
        monkeypatch.setattr("domino_spec.generation.verification.accept_or_draw", without_residual)
    pair, options = make_forgetful_pair(), COMBINATIONS["typical"]
    counts = sum(draw_transitions(pair, options, 8, seed)[0] for seed in range(8))
    p_value = transitions_p(counts, exact_transitions(pair[0], options))
    assert (p_value < 1e-6) if faulty else (p_value > LEVEL)


# What users see


def test_a_seed_repeats_the_answer_and_another_gives_another(pair):
    target, draft = pair
    prompt = random_tokens(3, PROMPT, seed=1, vocab=VOCAB)

    def answer(seed):
        torch.manual_seed(seed)
        return target.generate(prompt, assistant_model=draft, do_sample=True, max_new_tokens=24, top_k=0).tolist()

    assert answer(1) == answer(1) != answer(2)


def test_sequences_are_returned_for_each_prompt_in_order(pair):
    target, draft = pair
    prompts = random_tokens(2, PROMPT, seed=2, vocab=VOCAB)
    torch.manual_seed(0)
    ids = target.generate(prompts, assistant_model=draft, do_sample=True, max_new_tokens=9, num_return_sequences=3)
    assert ids.shape == (6, PROMPT + 9)
    assert ids[:, :PROMPT].tolist() == prompts.repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in ids.tolist()}) > 2


def test_a_draft_whose_logits_are_not_finite_changes_no_distribution_and_does_not_fail(pair):
    target, _ = pair
    draft = make_draft(target, seed=4, mask_token_id=0, block_size=4)
    with torch.no_grad():
        draft.norm.weight.fill_(torch.nan)
    prompt = random_tokens(1, PROMPT, seed=9, vocab=VOCAB)
    torch.manual_seed(0)
    output = target.generate(
        prompt, assistant_model=draft, do_sample=True, num_return_sequences=4000, max_new_tokens=1 + 1, top_k=0
    )
    exact = exact_distribution(target, prompt, {"top_k": 0})
    expected = torch.zeros(VOCAB, VOCAB, dtype=torch.double)
    for answer, probability in exact.items():
        expected[answer[0], answer[1]] += probability
    counts = (output[:, PROMPT] * VOCAB + output[:, PROMPT + 1]).bincount(minlength=VOCAB**2)
    assert chi_square_p(counts, expected.flatten() / expected.sum() * 4000) > LEVEL
