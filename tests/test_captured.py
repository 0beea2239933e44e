# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The draft phase with fixed shapes, which a GPU replays as a CUDA graph: here it is run instead, call for call."""

import copy
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from batching import GoodBatchDraft, padded_batch
from helpers import ARCHITECTURES, MASK_TOKEN, kept_captures, make_draft, make_target, random_tokens
from peft import LoraConfig, get_peft_model
from sampling_draws import draw_transitions, exact_transitions, make_forgetful_pair, transitions_p
from test_generate_sampling import COMBINATIONS

from domino_spec.generation import captured as captured_module
from domino_spec.generation.captured import CapturedDraft, Captures


@pytest.fixture(autouse=True)
def as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(captured_module, "can_capture", lambda device: True)


@pytest.fixture
def phases(monkeypatch):
    """Of each round that was captured: its rows and proposals."""
    seen, real = [], CapturedDraft.propose

    def propose(self, *args):
        proposal = real(self, *args)
        seen.append(tuple(proposal.proposal_ids.shape))
        return proposal

    monkeypatch.setattr(CapturedDraft, "propose", propose)
    return seen


def lengths_of(output):
    return output.acceptance_lengths.tolist()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("input_table", [False, True], ids=["", "table"])
def test_every_round_but_the_first_is_captured_and_proposes_the_same(arch, input_table, phases):
    target = make_target(arch)
    draft, ids = make_draft(target), random_tokens(1, 9)
    options = {"max_new_tokens": 40, "assistant_model": draft, "return_dict_in_generate": True}
    eager = target.generate(ids, **options)
    draft.use_cuda_graphs(input_table=input_table)
    output = target.generate(ids, **options)
    assert torch.equal(output.sequences, eager.sequences)
    assert lengths_of(output) == lengths_of(eager)
    # The last rounds have no room for all proposals.
    num_proposals = draft.config.block_size - 1
    assert len(phases) >= len(lengths_of(eager)[0]) - 1 - num_proposals
    assert set(phases) == {(1, num_proposals)}


@pytest.mark.parametrize(
    "overrides", [{"shift_label": False}, {"pure_draft_prefix_len": 0}, {"pure_draft_prefix_len": 3}]
)
@pytest.mark.parametrize("window", [None, 5], ids=["full", "sliding"])
def test_labels_prefixes_and_windows_are_kept(target, overrides, window, phases):
    draft, ids = make_draft(target, sliding_window=window, **overrides), random_tokens(1, 9)
    draft.config.set_shortlist(range(0, 96, 2))
    options = {"max_new_tokens": 40, "assistant_model": draft, "return_dict_in_generate": True}
    eager = target.generate(ids, **options)
    draft.use_cuda_graphs()
    output = target.generate(ids, **options)
    assert lengths_of(output) == lengths_of(eager) and phases


def test_rows_of_their_own_pace_leave_one_by_one(target, phases):
    inputs = padded_batch([9, 4, 13, 30], seed=3)
    plain = target.generate(**inputs, max_new_tokens=40, pad_token_id=MASK_TOKEN, eos_token_id=None)
    # One that ends a row some way into its text, and no other before.
    rows = plain[:, 30:].tolist()
    firsts = {token: min(row.index(token) for row in rows if token in row) for row in rows for token in row}
    end = next(token for token, first in firsts.items() if 10 < first < 30)
    options = {"max_new_tokens": 40, "pad_token_id": MASK_TOKEN, "eos_token_id": end}
    plain = target.generate(**inputs, **options)
    texts = [plain[row, 30 - length :].tolist() for row, length in enumerate((9, 4, 13, 30))]
    draft = GoodBatchDraft.following(make_draft(target), target, texts, [{12, 20}, set(), {15, 30}, {40, 41, 50}])
    options |= {"assistant_model": draft, "return_dict_in_generate": True}
    eager = target.generate(**inputs, **options)
    draft.use_cuda_graphs()
    for _ in range(2):
        phases.clear()
        output = target.generate(**inputs, **options)
        assert torch.equal(output.sequences, plain)
        assert lengths_of(output) == lengths_of(eager)
        assert len({rows for rows, _ in phases}) > 1


def test_what_was_captured_serves_the_next_call_and_not_another_room(target, monkeypatch):
    made, real = [], CapturedDraft.__init__

    def init(self, *args, **kwargs):
        real(self, *args, **kwargs)
        made.append(self.room)

    monkeypatch.setattr(CapturedDraft, "__init__", init)
    draft = make_draft(target)
    draft.use_cuda_graphs()
    plain = [target.generate(random_tokens(1, 9, seed=i), max_new_tokens=20) for i in range(4)]
    for i, answer in enumerate(plain):
        assert torch.equal(
            target.generate(random_tokens(1, 9, seed=i), max_new_tokens=20, assistant_model=draft), answer
        )
    assert made == [512]
    target.generate(random_tokens(1, 9), max_new_tokens=600, assistant_model=draft)
    assert made == [512, 1024]


def test_changed_weights_are_noticed(target):
    draft, ids = make_draft(target), random_tokens(1, 9)
    options = {"max_new_tokens": 30, "assistant_model": draft, "return_dict_in_generate": True}
    draft.use_cuda_graphs(input_table=True)
    target.generate(ids, **options)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1.5)
    output = target.generate(ids, **options)
    draft.use_cuda_graphs(False)
    assert lengths_of(output) == lengths_of(target.generate(ids, **options))


def test_one_that_comes_back_after_the_weights_changed_is_let_go(target, monkeypatch):
    draft, ids = make_draft(target), random_tokens(1, 9)
    draft.use_cuda_graphs()
    captures, real = Captures.of(target, draft), Captures.give_back

    def late(self, one):
        # As if another call had begun with changed weights.
        self._weights = ()
        real(self, one)

    monkeypatch.setattr(Captures, "give_back", late)
    target.generate(ids, max_new_tokens=20, assistant_model=draft)
    assert not kept_captures(captures)


def test_calls_at_once_do_not_share_one(target):
    draft = make_draft(target)
    draft.use_cuda_graphs()
    prompts = [random_tokens(1, 9, seed=i) for i in range(6)]
    plain = [target.generate(ids, max_new_tokens=40) for ids in prompts]
    found: dict[int, torch.Tensor] = {}

    def run(i):
        found[i] = target.generate(prompts[i], max_new_tokens=40, assistant_model=draft)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], plain[i]) for i in range(6))


@pytest.mark.parametrize(
    "options",
    [
        {"eta_cutoff": 0.01, "do_sample": True},
        {"repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 3, "do_sample": True},
        {"renormalize_logits": True},
        {"num_assistant_tokens_schedule": "heuristic"},
        {"assistant_confidence_threshold": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_calls_go_on_as_they_are(target, options, phases):
    draft, ids = make_draft(target), random_tokens(1, 9)
    draft.use_cuda_graphs()
    torch.manual_seed(0)
    output = target.generate(ids, assistant_model=draft, max_new_tokens=20, **options)
    assert output.shape == (1, 29) and not phases


def test_an_adapter_goes_its_own_way(target, phases):
    draft, ids = make_draft(target), random_tokens(1, 9)
    adapted = get_peft_model(draft, LoraConfig(r=2, target_modules=["fc"], init_lora_weights=False))
    draft.use_cuda_graphs()
    plain = target.generate(ids, max_new_tokens=20)
    assert torch.equal(target.generate(ids, max_new_tokens=20, assistant_model=adapted), plain) and not phases


def test_the_pair_can_be_let_go_and_copied(target):
    target, draft = copy.deepcopy(target), make_draft(target)
    draft.use_cuda_graphs()
    target.generate(random_tokens(1, 9), max_new_tokens=20, assistant_model=draft)
    assert copy.deepcopy(draft).capture_options is not None
    of_draft, of_target = weakref.ref(draft), weakref.ref(target)
    held = Captures.of(target, draft)
    assert len(kept_captures(held)) == 1
    del draft, held
    gc.collect()
    assert of_draft() is None
    del target
    gc.collect()
    assert of_target() is None


def test_the_tables_size_is_announced(target, monkeypatch):
    said = []
    monkeypatch.setattr(captured_module.logger, "warning", said.append)
    draft = make_draft(target)
    draft.use_cuda_graphs(input_table=True)
    for _ in range(2):
        target.generate(random_tokens(1, 9), max_new_tokens=20, assistant_model=draft)
    assert len(said) == 1 and "MiB" in said[0]


# Sampling


@pytest.fixture(scope="module")
def forgetful():
    return make_forgetful_pair()


def broken(draft):
    """The same draft with weights that make no numbers."""
    draft = copy.deepcopy(draft)
    with torch.no_grad():
        draft.fc.weight[0, 0] = torch.nan
    return draft


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("plain", ""),
        ("plain", "shortlist"),
        ("temperature and top-k", ""),
        ("temperature and top-k", "other probabilities"),
        ("top-p", ""),
        ("top-p", "shortlist"),
        ("typical", "broken"),
    ],
)
def test_tokens_are_distributed_as_the_target_alone_distributes_them(forgetful, name, case, phases, monkeypatch):
    target, draft = forgetful
    if case == "broken":
        draft = broken(draft)
    draft.config.set_shortlist([1, 2, 5, 6] if case == "shortlist" else None)
    if case == "other probabilities":
        real = CapturedDraft.propose

        def propose(self, *args):
            proposal = real(self, *args)
            proposal.probabilities = (2 * proposal.probabilities).softmax(-1)
            return proposal

        monkeypatch.setattr(CapturedDraft, "propose", propose)
    draft.use_cuda_graphs()
    try:
        drawn = [draw_transitions((target, draft), COMBINATIONS[name], 8, seed) for seed in range(8)]
    finally:
        draft.config.set_shortlist(None)
        draft.use_cuda_graphs(False)
    p_value = transitions_p(sum(counts for counts, _, _ in drawn), exact_transitions(target, COMBINATIONS[name]))
    assert (p_value < 1e-6) if case == "other probabilities" else (p_value > 0.01 / 6)
    rounds = sum(rounds for _, _, rounds in drawn)
    # One call for all rows: these are rounds of the batch.
    assert len(phases) > rounds / 8 / 2, "hardly any round was captured"
    assert case == "broken" or sum(committed for _, committed, _ in drawn) / rounds > 1.3


def test_the_same_seed_draws_the_same(target, phases):
    draft, ids = make_draft(target), random_tokens(1, 9)
    draft.use_cuda_graphs()
    answers = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        answers.append(target.generate(ids, max_new_tokens=40, assistant_model=draft, do_sample=True, top_k=20))
    assert phases
    assert torch.equal(answers[0], answers[1]) and not torch.equal(answers[0], answers[2])


def test_proposals_are_drawn_from_what_warpers_leave(target, monkeypatch):
    seen, real = [], CapturedDraft.propose

    def propose(self, *args):
        proposal = real(self, *args)
        seen.append((proposal.proposal_ids.clone(), proposal.probabilities.clone()))
        return proposal

    monkeypatch.setattr(CapturedDraft, "propose", propose)
    draft = make_draft(target)
    draft.use_cuda_graphs()
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}
    for shortlist in (None, range(0, 96, 3)):
        draft.config.set_shortlist(shortlist)
        seen.clear()
        target.generate(random_tokens(2, 9), max_new_tokens=40, assistant_model=draft, **options)
        assert seen
        for ids, q in seen:
            torch.testing.assert_close(q.sum(-1), torch.ones(ids.shape), atol=1e-5, rtol=0)
            assert ((q > 0).sum(-1) <= 5).all()
            assert (q.gather(-1, ids[..., None]) > 0).all()
            assert shortlist is None or q.nonzero()[:, 2].remainder(3).eq(0).all()
        assert len({int(n) for _, q in seen for n in (q > 0).sum(-1).flatten()}) > 1, "top-p has no say"


def test_graphs_are_kept_for_the_last_few_ways_to_choose(target):
    draft, ids = make_draft(target), random_tokens(1, 9)
    draft.use_cuda_graphs()
    held = Captures.of(target, draft)

    def temperatures():
        return sorted({one.temperature for one in kept_captures(held)})

    def sample(temperature):
        target.generate(ids, max_new_tokens=20, assistant_model=draft, do_sample=True, top_k=0, temperature=temperature)

    for temperature in (0.5, 0.6, 0.7, 0.8):
        sample(temperature)
    assert temperatures() == [0.5, 0.6, 0.7, 0.8]
    # Used again, so that it is not the oldest any more.
    sample(0.5)
    sample(0.9)
    assert temperatures() == [0.5, 0.7, 0.8, 0.9]
    target.generate(ids, max_new_tokens=20, assistant_model=draft)
    assert len(kept_captures(held)) == 4 and sum(one.warpers is None for one in kept_captures(held)) == 1


def test_rows_that_are_sampled_leave_one_by_one(target, phases):
    draft = make_draft(target)
    draft.use_cuda_graphs()
    torch.manual_seed(3)
    options = {"max_new_tokens": 60, "pad_token_id": MASK_TOKEN, "eos_token_id": [7, 8, 9], "do_sample": True}
    output = target.generate(random_tokens(4, 9), **options, assistant_model=draft)
    assert len({rows for rows, _ in phases}) > 1
    ends = [next((i for i, token in enumerate(row) if token in (7, 8, 9)), 59) for row in output[:, 9:].tolist()]
    assert len(set(ends)) > 1 and max(ends) + 10 == output.shape[1]


_WITH_KERNELS = """
import sys
sys.path.insert(0, {tests!r})
import torch
from helpers import make_draft, make_target, random_tokens
from domino_spec.generation import captured, kernels

captured.can_capture = lambda device: True
runs = []
real = kernels.HeadKernels._score
kernels.HeadKernels._score = lambda self, *args, **kwargs: (runs.append(1), real(self, *args, **kwargs))
target = make_target(dtype=torch.float32)
options = dict(max_new_tokens=11, return_dict_in_generate=True)
for prefix, shortlist, table in ((1, None, True), (0, range(0, 96, 2), False)):
    draft = make_draft(target, pure_draft_prefix_len=prefix)
    draft.config.set_shortlist(shortlist)
    options["assistant_model"] = draft
    eager = target.generate(random_tokens(2, 9), **options)
    draft.use_cuda_graphs(input_table=table)
    output = target.generate(random_tokens(2, 9), **options)
    assert output.acceptance_lengths.tolist() == eager.acceptance_lengths.tolist()
    assert output.sequences.tolist() == eager.sequences.tolist()
    for warpers in (dict(top_k=0), dict(top_k=0, temperature=0.6), dict(top_k=20, top_p=0.9, temperature=0.6)):
        found = []
        for has_kernels in (True, False):
            captured.is_available = lambda device: has_kernels
            draft.use_cuda_graphs(input_table=table)
            captured.Captures.of(target, draft)._idle.clear()
            torch.manual_seed(2)
            before = len(runs)
            output = target.generate(random_tokens(2, 9), do_sample=True, **warpers, **options)
            assert (len(runs) > before) == has_kernels
            found.append((output.sequences.tolist(), output.acceptance_lengths.tolist()))
        assert found[0] == found[1], warpers
        captured.is_available = kernels.is_available
assert len(runs) > 20
print("as without")
"""


def test_with_the_kernels_interpreted_proposals_are_the_same():
    pytest.importorskip("triton")
    # A process of its own: the interpreter must be on before Triton is imported.
    code = _WITH_KERNELS.format(tests=str(Path(__file__).parent))
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert result.stdout.strip().endswith("as without"), result.stderr[-2000:]
