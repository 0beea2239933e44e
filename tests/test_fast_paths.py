# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Every shorter way through a round gives what the longer one gives: the draft's cache, the head, the verification."""

import random
from collections import Counter

import pytest
import torch
from helpers import BLOCK, HIDDEN, VOCAB, make_draft, random_tokens
from passes import close
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

from domino_spec.generation import verification
from domino_spec.generation.backbone import Context, DraftState, draft_hidden
from domino_spec.generation.context import TargetParts
from domino_spec.generation.scorer import PlainHead, Scorer, UnrolledHead
from domino_spec.generation.sequences import Proposal, Sequences

# The draft's cache: each row at its own slots


@pytest.mark.parametrize("window", [None, 5], ids=["full", "sliding"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_any_pace_draft_as_they_would_alone_and_anew(target, parts, num_rows, window, seed):
    draft = make_draft(target, sliding_window=window)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    width = draft.fc.in_features
    origins = [rng.choice((0, 0, 7)) for _ in range(num_rows)]
    state, seen = DraftState(list(origins)), [torch.zeros(0, width).double() for _ in range(num_rows)]
    rows = list(range(num_rows))
    for turn in range(12):
        parts_of_turn = []
        for _ in range(rng.choice((1, 1, 2))):
            # Equal counts now and then: rows may fall into step again.
            counts = [rng.randint(1, 40 if turn == 0 else BLOCK) for _ in rows]
            counts = counts if rng.random() < 0.7 else [counts[0]] * len(rows)
            length = max(counts) + rng.randint(0, 1)
            features = torch.randn(len(rows), length, width, generator=generator, dtype=torch.float64)
            visible = torch.zeros(len(rows), length, dtype=torch.bool)
            for entry, (row, count) in enumerate(zip(rows, counts, strict=True)):
                # The prompt is padded on the left, a round on the right.
                shown = slice(length - count, length) if turn == 0 else slice(0, count)
                visible[entry, shown] = True
                seen[row] = torch.cat([seen[row], features[entry, shown]])
            parts_of_turn.append(Context(features, counts, visible))
        anchor = torch.randint(VOCAB, (len(rows), 1), generator=generator)
        with torch.no_grad():
            hidden = draft_hidden(draft, parts, state, Context.joined(parts_of_turn), anchor)
            assert state.cache.lengths == [len(seen[row]) for row in rows]
            for entry, row in enumerate(rows):
                fresh = DraftState([origins[row]])
                whole = Context(seen[row][None], [len(seen[row])], torch.ones(1, len(seen[row]), dtype=torch.bool))
                close(
                    hidden[entry], draft_hidden(draft, parts, fresh, whole, anchor[entry : entry + 1])[0], atol=1e-5
                )  # the softmax is float32's
        if len(rows) > 1 and turn in (4, 8):
            kept = sorted(rng.sample(range(len(rows)), len(rows) - 1))
            state.keep(kept)
            rows = [rows[entry] for entry in kept]


def test_the_drafts_cache_is_written_in_place(target, parts):
    draft, state = make_draft(target), DraftState([0])
    anchor, addresses = torch.ones(1, 1, dtype=torch.long), Counter()
    for _ in range(200):
        features = torch.zeros(1, 2, draft.fc.in_features, dtype=torch.float64)
        with torch.no_grad():
            draft_hidden(draft, parts, state, Context(features, [2], torch.ones(1, 2, dtype=torch.bool)), anchor)
        addresses[state.cache._buffers[0][0].data_ptr()] += 1
    assert state.cache.lengths == [400]
    assert len(addresses) <= 6


# The head: a cell, and one pass for what does not depend on the tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("token_ids", [None, torch.arange(0, VOCAB, 3)], ids=["all", "shortlist"])
def test_a_plain_head_computes_what_the_model_says(target, dtype, token_ids):
    draft = make_draft(target, dtype=dtype)
    assert PlainHead.suits(draft)
    plain, any_head = PlainHead(draft, token_ids), UnrolledHead(draft, token_ids)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, BLOCK, HIDDEN, generator=generator).to(dtype)
    embeds = torch.randn(3, BLOCK, HIDDEN, generator=generator).double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.15}[dtype]
    states = [None, None]
    with torch.no_grad():
        begun = [head.begin(hidden) for head in (plain, any_head)]
        for k in range(BLOCK):
            states = [head.step(embeds[:, k], state) for head, state in zip((plain, any_head), states, strict=True)]
            close(states[0], states[1], atol=tolerance)
            places = torch.stack([torch.randperm(30, generator=generator)[:7] for _ in range(3)])
            for candidates in (None, places):
                found, known = (
                    head.correction(known[:, k], state, candidates)
                    for head, known, state in zip((plain, any_head), begun, states, strict=True)
                )
                assert found.shape == known.shape and found.dtype == dtype
                close(found, known, atol=tolerance)


def hooked(draft):
    draft.embed_proj[2].register_forward_hook(lambda *_: None)


def offloaded(draft):
    draft.prefix_gru.to("meta")


def parametrised(draft):
    nn.utils.parametrizations.weight_norm(draft.prefix_gru, "weight_hh_l0")


def replaced(draft):
    draft.embed_proj[0] = nn.utils.parametrizations.orthogonal(draft.embed_proj[0])


@pytest.mark.parametrize("spoil", [hooked, offloaded, parametrised, replaced])
def test_a_head_that_is_more_than_its_weights_is_asked_itself(target, spoil):
    draft = make_draft(target)
    spoil(draft)
    assert not PlainHead.suits(draft)


def test_a_head_of_the_users_own_class_is_heard(target):
    draft = make_draft(target, pure_draft_prefix_len=0)
    wanted = 17

    class Stubborn(type(draft)):
        def correction(self, draft_hidden, prefix_state, token_ids=None):
            return 1e6 * nn.functional.one_hot(torch.full((len(prefix_state),), wanted), VOCAB).to(prefix_state)

    draft.__class__ = Stubborn
    scorer = Scorer(draft, TargetParts(target), use_head=True)
    with torch.no_grad():
        hidden = torch.ones(1, 1, HIDDEN).double()
        logits = scorer.head.correction(scorer.head.begin(hidden)[:, 0], torch.ones(1, 24).double(), None)
    assert logits.argmax() == wanted


# The pool of candidates


@pytest.mark.parametrize("shortlist", [None, range(0, VOCAB, 2)], ids=["all", "shortlist"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_pool_of_everything_changes_nothing_and_a_small_one_only_the_proposals(target, shortlist, num_rows):
    ids, draft = random_tokens(num_rows, 9, seed=5), make_draft(target)
    draft.config.set_shortlist(shortlist)
    plain = target.generate(ids, max_new_tokens=30, do_sample=False)
    outputs = {}
    for size in (None, VOCAB, 5, 1):
        draft.config.candidate_pool_size = size
        outputs[size] = target.generate(
            ids, max_new_tokens=30, do_sample=False, assistant_model=draft, return_dict_in_generate=True
        )
        assert torch.equal(outputs[size].sequences, plain)
    lengths = {size: output.acceptance_lengths.tolist() for size, output in outputs.items()}
    assert lengths[VOCAB] == lengths[None]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_proposals_are_the_best_of_the_pool_and_q_knows_no_others(target, do_sample, monkeypatch):
    from domino_spec.generation import loop

    real, seen = loop.rollout, []

    def spy(scorer, hidden, *args):
        proposal = real(scorer, hidden, *args)
        seen.append((scorer, hidden, proposal))
        return proposal

    monkeypatch.setattr(loop, "rollout", spy)
    draft, pool = make_draft(target, pure_draft_prefix_len=0), 4
    draft.config.candidate_pool_size = pool
    ids = random_tokens(2, 9)
    target.generate(ids, assistant_model=draft, max_new_tokens=12, do_sample=do_sample, top_k=0)
    corrected = 0
    for scorer, hidden, proposal in seen:
        base = scorer.target.logits(hidden)[:, : proposal.proposal_ids.shape[1]]
        best = base.topk(pool, dim=-1).indices
        assert (best == proposal.proposal_ids[..., None]).any(-1).all()
        corrected += int((best[..., 0] != proposal.proposal_ids).sum())
        if do_sample:
            inside = torch.zeros_like(proposal.probabilities, dtype=torch.bool).scatter(-1, best, True)
            assert (proposal.probabilities[~inside] == 0).all()
            close(proposal.probabilities.sum(-1), torch.ones(base.shape[:2]), atol=1e-5)
    assert corrected > 0


@pytest.mark.parametrize("size", [0, -3])
def test_a_pool_of_nothing_is_refused(target, size):
    with pytest.raises(Exception, match="candidate_pool_size"):
        make_draft(target, candidate_pool_size=size)


def test_a_pool_is_saved_with_the_draft(target, tmp_path):
    draft = make_draft(target, candidate_pool_size=12)
    draft.save_pretrained(tmp_path)
    assert type(draft).from_pretrained(tmp_path).config.candidate_pool_size == 12


# Verification: all at once, where criteria judge tokens by themselves


class Never(StoppingCriteria):
    """Stops nothing, and is nothing that we know: verification goes token by token."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("seed", range(60))
def test_verification_at_once_commits_what_token_by_token_does(seed):
    rng = random.Random(seed)
    num_rows, num_proposals, vocab = rng.choice((1, 1, 2, 5)), rng.randint(0, 6), rng.choice((3, 9))
    lockstep, keep_scores = num_rows == 1 and rng.random() < 0.5, rng.random() < 0.5
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (num_rows, 12), generator=generator)
    logits = torch.randn(num_rows, num_proposals + 1, vocab, generator=generator)
    near = torch.rand(num_rows, num_proposals, generator=generator) < 0.7
    proposal_ids = torch.where(
        near, logits[:, :-1].argmax(-1), torch.randint(vocab, (num_rows, num_proposals), generator=generator)
    )
    lengths = [rng.randint(3, 12) for _ in range(num_rows)]
    stopped = [not lockstep and num_rows > 1 and rng.random() < 0.2 for _ in range(num_rows)]
    criteria = [MaxLengthCriteria(12 + rng.randint(0, 5))]
    if rng.random() < 0.7:
        criteria.append(EosTokenCriteria(rng.sample(range(vocab), rng.choice((1, 2)))))
    pad = torch.tensor(0) if len(criteria) > 1 else None

    def run(*more):
        sequences = Sequences(ids)
        sequences.lengths = list(lengths)
        sequences.reserve(num_proposals + 1)
        verified = verification.verify(
            sequences,
            Proposal(proposal_ids, finite=torch.tensor(seed % 3 > 0)),
            logits,
            LogitsProcessorList(),
            StoppingCriteriaList([*criteria, *more]),
            stopped,
            False,
            lockstep,
            pad,
            keep_scores=keep_scores,
        )
        rows = []
        for row, count in enumerate(verified.num_new):
            sequences.lengths[row] += count
            rows.append(sequences.row(row).tolist())
        return verified, rows

    (quick, quick_rows), (slow, slow_rows) = run(), run(Never())
    assert quick_rows == slow_rows
    for name in ("num_new", "stopped", "rejected", "finite"):
        assert getattr(quick, name) == getattr(slow, name)
    for k, (one, other) in enumerate(zip(quick.scores, slow.scores, strict=True)):
        for row, count in enumerate(quick.num_new):
            if k < count:
                assert torch.equal(one[row], other[row])


@pytest.mark.parametrize(
    ("num_rows", "tree", "options"),
    [
        (1, 0, {"do_sample": False}),
        (3, 0, {"do_sample": False}),
        (1, 15, {"do_sample": False}),
        (1, 0, {"do_sample": True}),
        (3, 0, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}),
    ],
)
def test_a_round_waits_for_the_device_once(target, num_rows, tree, options, monkeypatch):
    """Whatever brings numbers to the host is counted, in our modules and in what of the host's they call."""
    monkeypatch.setattr(verification, "is_far", lambda device: True)
    # It waits inside of torch.
    monkeypatch.setattr(torch, "multinomial", None)
    draft, ids = make_draft(target), random_tokens(num_rows, 9)
    draft.use_tree(tree)
    waits, counting = Counter(), False
    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "__iter__", "cpu", "numpy"):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, _real=real, _name=name, **kwargs):
            waits[_name] += counting
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)

    from domino_spec.generation import loop

    rounds = Counter()
    real_propose = loop._Decoding.propose

    def propose(self):
        nonlocal counting
        counting = True
        rounds["all"] += 1
        return real_propose(self)

    real_result = loop._Decoding.result

    def result(self):
        nonlocal counting
        counting = False
        return real_result(self)

    monkeypatch.setattr(loop._Decoding, "propose", propose)
    monkeypatch.setattr(loop._Decoding, "result", result)
    target.generate(ids, assistant_model=draft, max_new_tokens=20, **options)
    assert rounds["all"] > 5
    assert sum(waits.values()) <= rounds["all"], dict(waits)
