# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Streamers get every token once, in order, in the round that decides it."""

import threading

import pytest
import torch
from contract import (
    BLOCK,
    CACHE,
    NEW_TOKENS,
    PROMPT,
    PROPOSALS,
    RecordingStreamer,
    cached_target,
    good_draft,
    prompt_and_plain,
    recorded_widths,
    spoil,
)
from helpers import (
    MASK_TOKEN,
    make_draft,
)
from test_generate_lossless import CountingProcessor, expected_acceptance, make_tokenizer
from transformers import (
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
)


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


class RepetitionPenaltyLogitsProcessor(CountingProcessor):
    """A user's own, with a stock name."""


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
