# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""A call leaves nothing behind, threads share models, and dtypes differ without changing the output."""

import copy
import logging
import re
import threading

import pytest
import torch
from contract import (
    CACHE,
    DETAILS,
    NEW_TOKENS,
    PROMPT,
    PROPOSALS,
    Failing,
    cached_target,
    call,
    each_door,
    first_difference_is_tie,
    good_draft,
    layers_of,
    prompt_and_plain,
    spoil,
    traces,
)
from helpers import (
    ARCHITECTURES,
    MASK_TOKEN,
    load_fixture,
    make_draft,
    make_target,
)
from test_generate_lossless import expected_acceptance
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
)
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.utils import logging as transformers_logging

# Nothing stays behind


@each_door
def test_generation_configs_are_as_before_the_call(door):
    target = make_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    passed = GenerationConfig(max_new_tokens=NEW_TOKENS, num_assistant_tokens=3, repetition_penalty=1.2)
    draft.generation_config = GenerationConfig(assistant_confidence_threshold=0.1)
    holders = [passed, target.config, draft.config, target.generation_config, draft.generation_config]
    before = [copy.deepcopy(holder.to_dict()) for holder in holders]
    call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS, num_assistant_tokens=2)
    call(door, target, draft)(prompt, generation_config=passed)
    call(door, target, draft)(prompt, generation_config=passed, eos_token_id=[1, 2], pad_token_id=MASK_TOKEN)
    assert [holder.to_dict() for holder in holders] == before


@each_door
def test_a_call_leaves_no_hook_and_no_attribute_behind(door):
    target = make_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    # transformers leaves hooks of its own when it is first asked for hidden states.
    target.generate(prompt, max_new_tokens=2, **DETAILS)
    before = traces(target, draft)
    call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS, **DETAILS)
    assert traces(target, draft) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("role", ["logits_processor", "stopping_criteria", "streamer"])
# In the prefill, in the middle of a block, and much later.
@pytest.mark.parametrize("at", [1, 4, 15])
def test_an_exception_inside_a_call_leaves_no_hook_and_the_next_call_works(role, at, error):
    target = make_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    before = traces(target, draft)
    failing = Failing(at if role != "streamer" else min(at, 5), error)
    failing.is_processor = role == "logits_processor"
    argument = {
        "logits_processor": LogitsProcessorList([failing]),
        "stopping_criteria": StoppingCriteriaList([failing]),
        "streamer": failing,
    }[role]
    with pytest.raises(error, match="raised on purpose"):
        target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, **{role: argument})
    assert traces(target, draft) == before
    assert target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft).tolist() == plain.tolist()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@each_door
def test_nothing_requires_grad_in_any_autograd_mode(door, mode):
    target = make_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    assert all(p.requires_grad for model in (target, draft) for p in model.parameters())
    with mode():
        output = call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS, **DETAILS)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert output.sequences.tolist() == plain.tolist()
    tensors = [*output.scores, *output.logits]
    tensors += [state for step in (*output.hidden_states, *output.attentions) for state in step]
    tensors += [tensor for layer in layers_of(getattr(output, CACHE)) for tensor in layer]
    assert not any(tensor.requires_grad for tensor in tensors)
    # Plain use of the target afterwards: nothing was turned into an inference tensor for good.
    target(prompt).logits.sum().backward()


@each_door
def test_threads_share_a_draft_and_targets(door):
    fixture = load_fixture("shift1-prefix1")
    draft, first = fixture.draft(), fixture.target()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.lm_head.weight.add_(0.01 * torch.randn(second.lm_head.weight.shape, generator=torch.manual_seed(0)))
    prompt = fixture.expected["prompt_ids"]
    jobs = [(target, prompt[:, :length]) for length in (12, 7) for target in (first, second)]

    def decode(target, ids):
        output = call(door, target, draft)(ids, max_new_tokens=30, return_dict_in_generate=True)
        return output.sequences.tolist(), output.acceptance_lengths[0].tolist()

    alone = [decode(*job) for job in jobs]
    assert alone[0] != alone[1]
    together: dict[int, list] = {}
    barrier = threading.Barrier(len(jobs))

    def work(number):
        barrier.wait()
        together[number] = [decode(*jobs[number]) for _ in range(2)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together.get(number) for number in range(len(jobs))] == [[result] * 2 for result in alone]


# Numeric ties: the only excuse for a difference in float32


def test_a_tie_is_told_from_a_fault():
    target = make_target(dtype=torch.float32)
    _, plain = prompt_and_plain(target)
    at = PROMPT + 5
    token, twin = int(plain[0, at]), 50
    assert twin not in plain
    other = plain.clone()
    other[0, at] = twin
    assert not first_difference_is_tie(target, plain, other), "a token with a clearly lower logit is a fault"
    assert not first_difference_is_tie(target, plain, plain[:, :at]), "a text that ends early is a fault"
    with pytest.raises(ValueError, match="equal"):
        first_difference_is_tie(target, plain, plain.clone())
    # Give the twin the same row of the output head, but for one rounding step: now nothing tells the two apart.
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[token] * (1 + torch.finfo(torch.float32).eps)
    assert first_difference_is_tie(target, plain, other)
    # The same gap is a fault in double precision.
    assert not first_difference_is_tie(target.double(), plain, other)


@pytest.mark.parametrize(
    ("arch", "attention"),
    # Gemma 2 knows eager attention only.
    [
        (arch, name)
        for arch in ARCHITECTURES
        for name in ("eager", "sdpa")
        if (arch, name) != ("gemma2-softcap", "sdpa")
    ],
)
def test_float32_output_differs_at_ties_only(arch, attention):
    target = cached_target(arch, attention, torch.float32)
    for seed in range(5):
        prompt, plain = prompt_and_plain(target, seed=seed, length=5 + 7 * seed, new_tokens=40)
        draft = good_draft(target, plain, spoil(5 + 7 * seed, 40))
        output = target.generate(prompt, max_new_tokens=40, assistant_model=draft)
        if output.tolist() != plain.tolist():
            assert first_difference_is_tie(target, plain, output), f"seed {seed}: a fault, not a tie"


# Dtypes


@pytest.mark.parametrize(
    ("target_dtype", "draft_dtype"),
    [
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
@each_door
def test_draft_and_target_keep_their_own_dtypes(door, head, target_dtype, draft_dtype):
    target = cached_target(dtype=target_dtype)
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil(), dtype=draft_dtype, head=head)
    output = call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    # A wrong cast shows in the acceptance.
    assert output.acceptance_lengths[0].tolist() == expected_acceptance(PROMPT, NEW_TOKENS, PROPOSALS, spoil())
    assert {p.dtype for p in draft.parameters()} == {draft_dtype}
    assert {p.dtype for p in target.parameters()} == {target_dtype}
    random = make_draft(target, dtype=draft_dtype, head=head)
    assert call(door, target, random)(prompt, max_new_tokens=NEW_TOKENS).tolist() == plain.tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("part", ["norm", "fc", "prefix_gru", "embed_proj"])
def test_non_finite_draft_logits_are_reported_and_the_output_is_plain(part, value, caplog, recwarn):
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = make_draft(target)
    with torch.no_grad():
        next(getattr(draft, part).parameters()).fill_(value)
    if hasattr(transformers_logging.warning_once, "cache_clear"):
        transformers_logging.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        output = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft)
    assert output.tolist() == plain.tolist()
    messages = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in recwarn]
    reports = [message for message in messages if re.search(r"finite|\bnan\b", message, re.IGNORECASE)]
    assert reports, f"nothing said about the draft's logits: {messages}"
    assert len(reports) <= 2, "one report a call is enough"


def test_a_finite_draft_is_silent(caplog, recwarn):
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    with caplog.at_level(logging.WARNING):
        target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=make_draft(target), pad_token_id=MASK_TOKEN)
        target.generate(
            prompt, max_new_tokens=NEW_TOKENS, assistant_model=good_draft(target, plain), pad_token_id=MASK_TOKEN
        )
    ours = [record for record in caplog.records if "domino" in record.name]
    assert not ours
    assert not [warning for warning in recwarn if "domino" in str(warning.filename)]
