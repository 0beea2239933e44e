# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How many proposals a round offers: what was asked for, or what pays. Time is simulated, so that tests know it."""

import gc

import pytest
import torch
from batching import GoodBatchDraft
from helpers import make_draft, make_target, random_tokens
from transformers import GenerationConfig

from domino_spec.generation.schedule import Experience, Schedule

PROMPT, NEW_TOKENS, PROPOSALS = 9, 120, 5


class Clock:
    """Stands in for `time.perf_counter`: passes move it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def timed_pair(clock, fixed, per_token, draft_seconds, spoiled):
    """A target whose pass over n tokens takes `fixed + per_token * n` seconds, its draft, and what they saw."""
    target = make_target(attn_implementation="sdpa")
    prompt = random_tokens(1, PROMPT, seed=3)
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS)
    draft = GoodBatchDraft.following(make_draft(target), target, plain.tolist(), [spoiled])
    widths, drafted = [], []

    def target_pass(module, args, kwargs):
        widths.append(kwargs["input_ids"].shape[1])
        clock.now += fixed + per_token * widths[-1]

    def draft_pass(module, args, kwargs):
        drafted.append(len(widths))
        clock.now += draft_seconds

    target.register_forward_pre_hook(target_pass, with_kwargs=True)
    draft.register_forward_pre_hook(draft_pass, with_kwargs=True)

    def generate(**options):
        widths.clear()
        drafted.clear()
        output = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, **options)
        assert output.tolist() == plain.tolist()
        return widths[1:], list(drafted)

    return generate


def experience(**seconds):
    """Passes over so many tokens, named `w1`, `w2`, and so on, took these seconds."""
    known = Experience()
    for name, value in seconds.items():
        for _ in range(3):
            known.add_pass(int(name[1:]), value)
    return known


def test_what_is_not_known_of_costs_lies_between_what_is():
    known = experience(w1=0.011)
    assert known.pass_seconds([1]) is None
    known = experience(w1=0.011, w5=0.015, w9=0.013)
    assert known.pass_seconds([1, 2, 5, 7, 9]) == pytest.approx([0.011, 0.012, 0.015, 0.014, 0.013])
    assert known.pass_seconds([13, 40]) == pytest.approx([0.013, 0.013]), "wider is never quicker"
    assert experience(w2=0.010, w4=0.020).pass_seconds([1, 6]) == pytest.approx([0.005, 0.030])
    assert experience(w2=0.010, w4=0.008).pass_seconds([1, 6]) == pytest.approx([0.010, 0.008])


def test_costs_are_of_the_last_passes_and_forgive_a_slow_one():
    known = experience(w1=0.010, w5=0.015)
    known.add_pass(5, 9.0)
    assert known.pass_seconds([5]) == pytest.approx([0.015])
    for _ in range(9):
        known.add_pass(5, 0.031)
    assert known.pass_seconds([5]) == pytest.approx([0.031])


def test_a_width_is_believed_only_after_some_passes():
    known = experience(w1=0.010, w5=0.014)
    known.add_pass(3, 7.0)
    assert known.pass_seconds([3]) == pytest.approx([0.012])


def test_by_default_every_round_offers_the_whole_block(clock):
    widths, drafted = timed_pair(clock, 1.0, 1.0, 5.0, set(range(500)))()
    assert set(widths[:-PROPOSALS]) == {PROPOSALS + 1}
    assert len(drafted) == len(widths) - 1


def test_where_the_draft_is_always_wrong_it_is_left_out(clock):
    generate = timed_pair(clock, 1.0, 0.05, 0.3, set(range(500)))
    generate(num_assistant_tokens_schedule="heuristic")
    widths, drafted = generate(num_assistant_tokens_schedule="heuristic")
    # Of 119 rounds: the first, and one in 32 to see whether it would pay by now.
    assert len(widths) == NEW_TOKENS - 1
    assert len(drafted) <= 1 + NEW_TOKENS // 32
    assert widths.count(1) > 110


def test_a_draft_that_comes_right_is_followed_at_once(clock):
    generate = timed_pair(clock, 1.0, 0.05, 0.3, set(range(PROMPT + 80)))
    widths, drafted = generate(num_assistant_tokens_schedule="heuristic")
    # The 97th round looks whether it pays by now, and the 22 tokens that are left then take four more.
    assert drafted[-5:] == [len(widths) + number for number in range(-4, 1)]
    assert len(widths) < 105


def test_where_the_draft_is_always_right_and_width_is_cheap_whole_blocks_are_offered(clock):
    generate = timed_pair(clock, 1.0, 0.001, 0.1, set())
    generate(num_assistant_tokens_schedule="heuristic")
    widths, drafted = generate(num_assistant_tokens_schedule="heuristic")
    assert set(widths[:-1]) == {PROPOSALS + 1}
    assert len(drafted) == len(widths)


def test_where_width_costs_as_much_as_a_pass_rollouts_end_early(clock):
    # Every third proposal is wrong, and each token of a pass costs as much as a pass.
    generate = timed_pair(clock, 0.001, 1.0, 0.01, set(range(0, 500, 3)))
    generate(num_assistant_tokens_schedule="heuristic")
    widths, _ = generate(num_assistant_tokens_schedule="heuristic")
    fixed, _ = generate()
    assert sum(widths) < 0.8 * sum(fixed)


def test_a_threshold_ends_a_rollout_after_a_proposal_that_is_not_believed(clock):
    generate = timed_pair(clock, 1.0, 1.0, 1.0, set())
    sure, _ = generate(assistant_confidence_threshold=1e-6)
    unsure, _ = generate(assistant_confidence_threshold=1.0)
    assert set(sure[:-1]) == {PROPOSALS + 1}
    assert set(unsure[:-1]) == {2}, "one proposal, then the threshold"


def test_confidences_are_corrected_by_how_often_they_came_true():
    known = Experience()
    before = known.chance(0.95)
    for _ in range(30):
        known.add_proposals([0.95, 0.95], 0, rejected=True)
    assert before == pytest.approx(0.95)
    assert known.chance(0.95) < 0.2
    assert known.chance(0.15) == pytest.approx(0.15), "nothing was learnt about the unsure ones"
    for _ in range(300):
        known.add_proposals([0.95, 0.95, 0.95], 2, rejected=False)
    assert known.chance(0.95) > 0.8, "what was learnt is not for ever"


def test_calls_share_what_they_know_of_a_pair_and_forget_it_with_either_model():
    target = make_target()
    draft = make_draft(target)
    known = Experience.of(target, draft)
    assert Experience.of(target, draft) is known
    assert Experience.of(make_target(), draft) is not known and Experience.of(target, make_draft(target)) is not known
    gc.collect()
    targets = len(Experience._known)
    assert len(Experience._known[target]) == 1
    del draft
    gc.collect()
    assert len(Experience._known[target]) == 0
    del target
    gc.collect()
    assert len(Experience._known) == targets - 1


def test_a_draft_is_given_some_rounds_before_it_is_judged_and_may_win_its_place_back():
    known, passes = Experience(), [1.0, 1.5, 4.0]
    for _ in range(15):
        known.add_drafted(1, seconds=0.5, num_proposals=1, gain=0.0)
        assert known.pays(1, 1.0, passes)
    known.add_drafted(1, seconds=0.5, num_proposals=1, gain=0.0)
    assert not known.pays(1, 1.0, passes)
    for _ in range(20):
        known.add_drafted(1, seconds=0.5, num_proposals=1, gain=2.0)
    # 40 tokens of 32 rounds, each of them a second; drafting and a wider pass took a second a round.
    assert known.pays(1, 1.0, passes) and not known.pays(1, 0.79, passes)
    # Of a batch every row gains. What its drafting took is not known; that of the nearest size is.
    assert known.pays(2, 0.79, passes)
    # Half of the rounds had two proposals, for which this call's passes take longer.
    for _ in range(16):
        known.add_drafted(1, seconds=0.5, num_proposals=2, gain=2.0)
    assert known.pays(1, 1.13, passes) and not known.pays(1, 1.12, passes)
    assert known.pays(1, 0.51, passes[:2]), "a call of fewer proposals"


@pytest.mark.parametrize("place", [0, 10, 19])
def test_no_single_round_rules(place):
    idle, slow = Experience(), Experience()
    for number in range(20):
        idle.add_drafted(1, 1.0, 0, gain=1.2 * (number != place))
        slow.add_drafted(1, 1.0 if number != place else 60.0, 0, gain=1.2)
    assert idle.pays(1, 1.0, [1.0]) and slow.pays(1, 1.0, [1.0])


SURE, UNSURE = torch.tensor([[9.0, 0.0, 0.0]]), torch.zeros(1, 96)


def heuristic(known, lockstep=False):
    options = GenerationConfig(num_assistant_tokens_schedule="heuristic")
    schedule = Schedule(options, PROPOSALS, known, lockstep)
    assert schedule.budget(1) == PROPOSALS
    return schedule


def test_a_proposal_is_judged_before_it_is_drawn():
    """Which token is drawn must not decide whether it is offered: what remains would not be distributed as drawn."""
    schedule = heuristic(experience(w1=0.011, w6=0.036))
    assert schedule.is_worth(SURE)
    assert not schedule.is_worth(UNSURE)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_width_that_is_slower_than_wider_ones_is_passed_over(lockstep):
    # Two or three tokens cost more than six, as some matrix products do.
    known = experience(w1=0.010, w2=0.030, w3=0.030, w4=0.016, w5=0.018, w6=0.018)
    schedule = heuristic(known, lockstep)
    assert schedule.is_worth(SURE), "not for itself: for those that follow"
    assert schedule.is_worth(UNSURE) and schedule.is_worth(UNSURE), "to stop here would cost more"
    assert not schedule.is_worth(UNSURE), "nothing is gained by going on"
    assert not heuristic(known, lockstep).is_worth(UNSURE), "one token is cheapest where nothing is to be hoped for"


def test_rows_of_a_batch_are_weighed_together(clock):
    target = make_target(attn_implementation="sdpa")
    prompts = random_tokens(3, PROMPT, seed=4)
    plain = target.generate(prompts, max_new_tokens=60)
    draft = GoodBatchDraft.following(make_draft(target), target, plain.tolist(), [set(), {20}, set(range(300))])
    options = {"num_assistant_tokens_schedule": "heuristic", "max_new_tokens": 60, "assistant_model": draft}
    for _ in range(2):
        assert target.generate(prompts, **options).tolist() == plain.tolist()
    torch.manual_seed(0)
    assert target.generate(prompts, do_sample=True, **options).shape == (3, PROMPT + 60)
