# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What `generate` promises besides its tokens, and keeps with a draft: streams, details, caches, configs, refusals."""

import copy
import dataclasses
import functools
import json
import logging
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    FIXTURE_FOLDER,
    MASK_TOKEN,
    VOCAB,
    load_fixture,
    make_draft,
    make_target,
    random_tokens,
    randomise,
)
from test_generate_lossless import GoodDraft, StopAfterToken, expected_acceptance, make_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

BLOCK = 6
PROPOSALS = BLOCK - 1
PROMPT = 9
NEW_TOKENS = 24
# transformers renamed the argument and the output's field in 5.24.
CACHE = next(f.name for f in dataclasses.fields(GenerateDecoderOnlyOutput) if f.name in ("cache", "past_key_values"))
DOORS = ("assistant_model", "custom_generate", "spec_generate")

each_arch = pytest.mark.parametrize("arch", ARCHITECTURES)
each_door = pytest.mark.parametrize("door", DOORS)


# Set-up


@functools.cache
def cached_target(arch="qwen3", attn_implementation="eager", dtype=torch.float64, seed=7):
    return make_target(arch, dtype=dtype, seed=seed, attn_implementation=attn_implementation)


def call(door, target, draft):
    """`generate` with `draft`, through one of its three doors."""
    if door == "assistant_model":
        return partial(target.generate, assistant_model=draft)
    if door == "custom_generate":
        return partial(target.generate, custom_generate=draft.decode)
    return partial(draft.spec_generate, target=target)


def good_draft(target, text, spoiled=(), **config):
    dtype = config.pop("dtype", None)
    return GoodDraft.following(make_draft(target, dtype=dtype, **config), target, text[0], spoiled)


def spoil(prompt_length=PROMPT, new_tokens=NEW_TOKENS):
    """Positions whose rejection cuts blocks at every offset, and leaves some whole."""
    return {prompt_length + i for i in (3, 4, 9, 16) if i < new_tokens}


def prompt_and_plain(target, seed=3, length=PROMPT, new_tokens=NEW_TOKENS, **kwargs):
    prompt = random_tokens(1, length, seed=seed)
    return prompt, target.generate(prompt, max_new_tokens=new_tokens, **kwargs)


@contextmanager
def recorded_widths(model):
    """Collects the number of input positions of every pass of `model`."""
    widths: list[int] = []

    def note(module, args, kwargs):
        tensor = next(kwargs[k] for k in ("input_ids", "inputs_embeds", "noise_embeds") if kwargs.get(k) is not None)
        widths.append(tensor.shape[1])

    def note_any(module, args, kwargs):
        if args:
            widths.append(args[0].shape[1])
        else:
            note(module, args, kwargs)

    handle = model.register_forward_pre_hook(note_any, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()


class RecordingStreamer(BaseStreamer):
    """Notes what it is given and, for each piece, how many target passes had run by then."""

    def __init__(self, passes=()):
        self.pieces, self.passes_before, self.passes, self.events = [], [], passes, []

    def put(self, value):
        self.pieces.append(value.clone())
        self.passes_before.append(len(self.passes))
        self.events.append("put")

    def end(self):
        self.events.append("end")


class Failing(LogitsProcessor, StoppingCriteria):
    """Raises at its n-th call, as processor, criterion or streamer."""

    def __init__(self, at, error=RuntimeError):
        self.at, self.error, self.calls = at, error, 0

    def _count(self):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("raised on purpose")

    def __call__(self, input_ids, scores):
        self._count()
        # As a processor it returns scores, as a criterion nobody is done.
        return scores if self.is_processor else torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def put(self, value):
        self._count()

    def end(self):
        pass

    is_processor = True


def traces(*models):
    """What a call could leave on a model: hooks, and attributes set on its modules."""
    found = {}
    for i, model in enumerate(models):
        for name, module in model.named_modules():
            hooks = [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks")]
            found[i, name] = (hooks, sorted(vars(module)), module.training)
    return found


def run_script(script, *arguments):
    """Run Python code in a new process that can import what this one can; its last line is JSON."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# Streams


@pytest.mark.parametrize("kind", ["good", "partly-good", "always-wrong", "random"])
def test_a_streamer_gets_the_prompt_once_then_every_token_once_then_one_end(kind):
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    spoiled = {"good": (), "partly-good": spoil(), "always-wrong": range(100)}
    draft = make_draft(target) if kind == "random" else good_draft(target, plain, spoiled[kind])
    streamer = RecordingStreamer()
    output = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, streamer=streamer)
    assert output.tolist() == plain.tolist()
    assert streamer.pieces[0].tolist() == prompt.tolist()
    assert torch.cat([piece.flatten() for piece in streamer.pieces]).tolist() == plain[0].tolist()
    assert streamer.events == ["put"] * len(streamer.pieces) + ["end"]
    assert all(piece.numel() for piece in streamer.pieces)


def test_tokens_are_streamed_in_the_round_that_decides_them():
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    with recorded_widths(target) as passes:
        streamer = RecordingStreamer(passes)
        target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, streamer=streamer)
    # Token i is known after the prefill and the rounds up to its own.
    lengths = expected_acceptance(PROMPT, NEW_TOKENS, PROPOSALS, spoil())
    known_after = [1] + [1 + number for number, length in enumerate(lengths, start=1) for _ in range(length)]
    seen = [n for piece, n in zip(streamer.pieces, streamer.passes_before, strict=True) for _ in range(piece.numel())]
    assert seen == [0] * PROMPT + known_after


# -1 is the prefill's own token: no round follows.
@pytest.mark.parametrize("offset", range(-1, BLOCK))
def test_a_stream_ends_with_an_eos_at_any_offset_of_a_block(offset):
    target = cached_target("phi3-fused")
    prompt, text = prompt_and_plain(target)
    # The first block begins after the prefill's token.
    eos = int(text[0, PROMPT + 1 + offset])
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=eos, pad_token_id=MASK_TOKEN)
    streamer = RecordingStreamer()
    output = target.generate(
        prompt,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=eos,
        pad_token_id=MASK_TOKEN,
        assistant_model=good_draft(target, text),
        streamer=streamer,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain.tolist()
    assert torch.cat([piece.flatten() for piece in streamer.pieces]).tolist() == plain[0].tolist()
    assert 1 + int(output.acceptance_lengths.sum()) == plain.shape[1] - PROMPT
    assert getattr(output, CACHE).get_seq_length() == plain.shape[1] - 1


def test_text_streamers_write_what_plain_generate_writes(capsys):
    target, tokenizer = cached_target(), make_tokenizer()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    texts = []
    for extra in ({}, {"assistant_model": draft}):
        target.generate(prompt, max_new_tokens=NEW_TOKENS, streamer=TextStreamer(tokenizer), **extra)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == tokenizer.decode(plain[0]) + "\n"


def test_an_iterator_streamer_joined_is_the_returned_text():
    target, tokenizer = cached_target(), make_tokenizer()
    prompt, plain = prompt_and_plain(target)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    kwargs = {"max_new_tokens": NEW_TOKENS, "assistant_model": good_draft(target, plain, spoil()), "streamer": streamer}
    thread = threading.Thread(target=target.generate, args=(prompt,), kwargs=kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(plain[0, PROMPT:])


def test_through_custom_generate_transformers_streams_only_the_prompt():
    # It hands no streamer to a callable: nothing we could do, but the ids must be right and nothing streamed twice.
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    streamer = RecordingStreamer()
    output = target.generate(prompt, max_new_tokens=NEW_TOKENS, custom_generate=draft.decode, streamer=streamer)
    assert output.tolist() == plain.tolist()
    assert [piece.tolist() for piece in streamer.pieces] == [prompt.tolist()]


class RepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """A user's own, with a stock name and a memory: forbids the tokens it chose before by counting its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, (self.calls * 7) % scores.shape[-1] :: 3] = -torch.inf
        return scores


def test_a_users_processor_with_a_stock_name_is_called_once_a_token():
    target = cached_target()
    options = [{"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor()])} for _ in range(2)]
    prompt, plain = prompt_and_plain(target, **options[0])
    draft = good_draft(target, plain, spoil())
    output = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, **options[1])
    assert output.tolist() == plain.tolist()
    assert options[1]["logits_processor"][0].calls == options[0]["logits_processor"][0].calls == NEW_TOKENS


def test_spec_generate_takes_the_stop_tokens_of_the_authors_script():
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    stop = [int(plain[0, PROMPT + 5]), int(plain[0, PROMPT + 12])]
    expected = target.generate(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=stop, pad_token_id=MASK_TOKEN)
    output = draft.spec_generate(prompt, target=target, max_new_tokens=NEW_TOKENS, stop_token_ids=stop)
    assert output.tolist() == expected.tolist()
    assert output.shape[1] < plain.shape[1]


# Details of the output


DETAILS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


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


def layers_of(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


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


# Nothing stays behind


@each_door
def test_generation_configs_are_as_before_the_call(door):
    target = make_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    passed = GenerationConfig(max_new_tokens=NEW_TOKENS, num_assistant_tokens=3, repetition_penalty=1.2)
    holders = [passed, target.config, draft.config, target.generation_config]
    # A draft need not have one.
    holders += [draft.generation_config] if getattr(draft, "generation_config", None) else []
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


def first_difference_is_tie(target, plain, other, steps: int = 32) -> bool:
    """
    Whether two greedy texts part at a numeric tie, as rounding allows, or by a fault.

    The target is asked for its logits where the texts part. Both tokens must lie within `steps` rounding steps of
    the best logit: then a pass over several tokens may prefer the other one. A text that just ends early is a fault.

    Args:
        plain, other: ids `[1, S]`, not equal, written by `target` without logits processors.
    """
    shared = min(plain.shape[1], other.shape[1])
    different = (plain[0, :shared] != other[0, :shared]).nonzero()
    if not len(different):
        if plain.shape[1] == other.shape[1]:
            raise ValueError("the texts are equal: there is no first difference")
        return False
    at = int(different[0])
    with torch.no_grad():
        logits = target(plain[:, :at]).logits[0, -1]
    step = torch.finfo(logits.dtype).eps * logits.abs().max()
    gap = logits.max() - logits[[int(plain[0, at]), int(other[0, at])]].min()
    return bool(gap <= steps * step)


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


# Refusals


def assert_refused_before_any_pass(run, target, draft, *names):
    """`run()` raises a ValueError with all `names` in it, and neither model has run by then."""
    with recorded_widths(target) as target_passes, recorded_widths(draft) as draft_passes:
        with pytest.raises(ValueError) as caught:
            run()
    message = str(caught.value)
    for name in names:
        assert re.search(name, message), f"{name!r} is not in: {message}"
    assert target_passes == [] and draft_passes == [], f"models ran before: {message}"
    return message


WAY_OUT = r"instead|without|leave|remove|drop|pass|set|use|=|one (row|sequence|at a time)"


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"num_beams": 2}, "num_beams"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_beams|num_return_sequences"),
        ({"num_beams": 2, "do_sample": True}, "num_beams|do_sample"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@each_door
def test_options_that_are_not_supported_are_refused_before_any_pass(door, option, named):
    target = cached_target()
    draft = make_draft(target)
    run = partial(call(door, target, draft), random_tokens(1, PROMPT), max_new_tokens=5, **option)
    assert_refused_before_any_pass(run, target, draft, named, WAY_OUT)


def misfit(case):
    """A draft and a target that do not belong together, and what of both must be in the message."""
    fitting = cached_target()
    if case == "hidden-size":
        return make_draft(fitting), make_target(hidden_size=48), (r"\b32\b", r"\b48\b", "hidden")
    if case == "larger-vocabulary":
        return make_draft(fitting), make_target(vocab_size=128), (r"\b96\b", r"\b128\b", "vocab")
    if case == "smaller-vocabulary":
        return make_draft(fitting), make_target(vocab_size=64), (r"\b96\b", r"\b64\b", "vocab")
    if case == "depth":
        return make_draft(fitting), make_target(num_hidden_layers=6), (r"\b4\b", r"\b6\b", "layers")
    if case == "layer-ids":
        draft = make_draft(fitting, num_target_layers=None, target_layer_ids=[0, 2, 7])
        return draft, fitting, (r"\b7\b", r"\b4\b", "target_layer_ids")
    draft = make_draft(fitting)
    draft.config.mask_token_id = 200
    return draft, fitting, (r"\b200\b", r"\b96\b", "mask_token_id")


@pytest.mark.parametrize(
    "case", ["hidden-size", "larger-vocabulary", "smaller-vocabulary", "depth", "layer-ids", "mask-token"]
)
@each_door
def test_a_draft_of_another_target_is_refused_before_any_pass(door, case):
    draft, target, names = misfit(case)
    run = partial(call(door, target, draft), random_tokens(1, PROMPT, vocab=60), max_new_tokens=5)
    assert_refused_before_any_pass(run, target, draft, *names, "draft", "target")


RECURRENT = {
    "mamba": ("mamba", {"state_size": 8, "intermediate_size": 64}),
    "recurrent-gemma": ("recurrent_gemma", {"lru_width": 32, "attention_window_size": 16, "num_key_value_heads": 1}),
    "qwen3-next": (
        "qwen3_next",
        {
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
    ),
    "lfm2-convolution": ("lfm2", {"full_attn_idxs": [1, 3]}),
}


@functools.cache
def recurrent_target(name):
    model_type, differs = RECURRENT[name]
    fields = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
    fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if name != "mamba":
        fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(model_type, **{**fields, **differs})
    # The experts of one of them know float32 at most.
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(target, seed=0, std=0.2)
    return target.eval()


@pytest.mark.parametrize("kind", ["good", "partly-good", "random"])
@each_door
@pytest.mark.parametrize("name", RECURRENT)
def test_a_target_with_recurrent_layers_is_refused_by_name_or_its_output_is_plain(name, door, kind):
    target = recurrent_target(name)
    prompt, plain = prompt_and_plain(target)
    draft = make_draft(target) if kind == "random" else good_draft(target, plain, spoil() if kind != "good" else ())
    try:
        output = call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS)
    except ValueError as error:
        layer_types = set(getattr(target.config, "layer_types", None) or ())
        names = {type(target).__name__, target.config.model_type} | (layer_types - {"full_attention"})
        assert any(name in str(error) for name in names), f"none of {names} in: {error}"
    else:
        assert output.tolist() == plain.tolist() or first_difference_is_tie(target, plain, output)


def _embedded(target, prompt):
    return {"inputs_embeds": target.get_input_embeddings()(prompt).detach()}


LATER = {
    "use_cache": lambda target, prompt: {"use_cache": False},
    "cache_implementation-static": lambda target, prompt: {"cache_implementation": "static"},
    "prefill_chunk_size": lambda target, prompt: {"prefill_chunk_size": 4},
    # Its processor runs the target itself, in the middle of a round.
    "guidance_scale": lambda target, prompt: {"guidance_scale": 1.5},
    "renormalize_logits": lambda target, prompt: {"renormalize_logits": True},
    "position_ids": lambda target, prompt: {"position_ids": torch.arange(PROMPT)[None] + 3},
    "inputs_embeds": _embedded,
}


@each_door
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("arch", ["qwen3", "mistral-sliding"])
def test_other_options_are_honoured_or_refused_but_never_ignored(arch, name, door):
    target = cached_target(arch)
    prompt = random_tokens(1, PROMPT, seed=3)
    options = {"max_new_tokens": NEW_TOKENS, **LATER[name](target, prompt)}
    inputs = () if name == "inputs_embeds" else (prompt,)
    plain = target.generate(*inputs, **options)
    draft = make_draft(target)
    if name != "inputs_embeds":
        draft = good_draft(target, plain, spoil())
    elif door == "spec_generate":
        inputs = (None,)
    try:
        output = call(door, target, draft)(*inputs, **options)
    except ValueError as error:
        assert name.split("-")[0] in str(error), error
    else:
        assert output.tolist() == plain.tolist()


# Other assistants, other copies of the package


@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
def test_speculation_type_dflash_runs_the_backbone_through_the_hosts_own_loop(head):
    # That loop reads offset k as the token at anchor + k, and knows no head.
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil(), shift_label=False, head=head)
    with recorded_widths(target) as widths:
        output = target.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            assistant_model=draft,
            speculation_type="dflash",
            return_dict_in_generate=True,
        )
    assert type(output) is GenerateDecoderOnlyOutput, "it went through our loop"
    assert output.sequences.tolist() == plain.tolist()
    assert len(widths) < NEW_TOKENS, "nothing was accepted"


STOCK = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

def run(folder):
    torch.set_num_threads(1)
    load = lambda name: AutoModelForCausalLM.from_pretrained(f"{folder}/{name}/target", attn_implementation="eager")
    target, small = load("shift1-prefix1").eval(), load("shift0-prefix0").eval()
    prompt = torch.arange(40)[None] % 7 + 3
    options = {
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "prompt lookup, sampled": {"prompt_lookup_num_tokens": 4, "do_sample": True},
        "small assistant": {"assistant_model": small},
        "small assistant, sampled": {"assistant_model": small, "do_sample": True, "temperature": 0.8},
        "the target as its own assistant": {"assistant_model": target},
        "plain": {},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
    }
    results = {}
    for name, kwargs in options.items():
        widths = []
        hook = lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1])
        handle = target.register_forward_pre_hook(hook, with_kwargs=True)
        torch.manual_seed(5)
        ids = target.generate(prompt, max_new_tokens=24, pad_token_id=0, **kwargs)
        handle.remove()
        results[name] = [ids.tolist(), widths]
    for name, kwargs, rows in (("several rows", {}, 2), ("return sequences", {"num_return_sequences": 2}, 1)):
        try:
            target.generate(prompt.repeat(rows, 1), max_new_tokens=4, assistant_model=small, do_sample=True, **kwargs)
            results[name] = "works"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results
"""


def test_other_assistants_behave_as_in_a_process_that_never_imported_the_package():
    namespace: dict = {}
    exec(STOCK, namespace)
    ours = namespace["run"](FIXTURE_FOLDER)
    script = STOCK + (
        "\nresults = run(sys.argv[1])"
        "\nassert not [name for name in sys.modules if name.split('.')[0] == 'domino_spec']"
        "\nprint(json.dumps(results))"
    )
    theirs = run_script(script, FIXTURE_FOLDER)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name
    for name in ("prompt lookup", "small assistant", "the target as its own assistant"):
        assert ours[name][0] == ours["plain"][0], name


COPIES = """
import importlib, importlib.util, inspect, json, pathlib, sys
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
import domino_spec, domino_spec.modeling_domino

torch.set_num_threads(1)
root = pathlib.Path(domino_spec.__file__).parent
folder = f"{sys.argv[1]}/shift1-prefix1"
target = AutoModelForCausalLM.from_pretrained(f"{folder}/target").eval()
prompt = torch.tensor(json.loads(sys.argv[2]))

def copy_under(name):
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.modeling_domino")

class Depth(LogitsProcessor):
    def __call__(self, input_ids, scores):
        depths.add(len(inspect.stack(0)))
        return scores

def depth(**kwargs):
    depths.clear()
    target.generate(prompt, max_new_tokens=8, logits_processor=LogitsProcessorList([Depth()]), **kwargs)
    return sorted(depths)

def decode(draft):
    output = target.generate(prompt, max_new_tokens=48, assistant_model=draft, return_dict_in_generate=True)
    return [output.sequences.tolist(), output.acceptance_lengths[0].tolist()]

depths = set()
drafts = {"package": domino_spec.modeling_domino.DominoDraftModel.from_pretrained(f"{folder}/draft").eval()}
before = {"draft": depth(assistant_model=drafts["package"]), "stock": depth(prompt_lookup_num_tokens=3)}
results = {"first": decode(drafts["package"])}
for name in ("domino_copy", "domino_other_copy", "domino_third_copy"):
    drafts[name] = copy_under(name).DominoDraftModel.from_pretrained(f"{folder}/draft").eval()
importlib.reload(domino_spec.modeling_domino)
for name in [name for name in sys.modules if name.split(".")[0] == "domino_spec"]:
    del sys.modules[name]
again = importlib.import_module("domino_spec.modeling_domino")
drafts["imported again"] = again.DominoDraftModel.from_pretrained(f"{folder}/draft").eval()
assert len({type(draft) for draft in drafts.values()}) == 5
results |= {name: decode(draft) for name, draft in drafts.items()}
after = {"draft": depth(assistant_model=drafts["package"]), "stock": depth(prompt_lookup_num_tokens=3)}
print(json.dumps({"results": results, "before": before, "after": after}))
"""


def test_copies_of_the_package_coexist_and_do_not_pile_up():
    expected = load_fixture("shift1-prefix1").expected
    report = run_script(COPIES, FIXTURE_FOLDER, json.dumps(expected["prompt_ids"].tolist()))
    assert len(report["results"]) == 6
    for name, (ids, lengths) in report["results"].items():
        assert ids == expected["spec_output_ids"].tolist(), name
        # All but the last, which the length limit cuts.
        assert lengths[:-1] == expected["acceptance_lengths"].tolist()[: len(lengths) - 1], name
    # Each import finds the dispatch in place: the calls under `generate` are as many as before the copies.
    assert report["after"] == report["before"]
