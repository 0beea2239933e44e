# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What cannot be supported is refused before any compute, and nothing is silently ignored."""

import functools
import re
from functools import partial

import pytest
import torch
from contract import (
    CACHE,
    NEW_TOKENS,
    PROMPT,
    cached_target,
    call,
    each_door,
    first_difference_is_tie,
    good_draft,
    prompt_and_plain,
    recorded_widths,
    spoil,
)
from helpers import (
    VOCAB,
    make_draft,
    make_target,
    random_tokens,
    randomise,
)
from test_generate_lossless import make_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    cache_utils,
)


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


# Each option, and what its refusal must say: what it is, and the way out.
REFUSED = {
    "beams": ({"num_beams": 2}, r"num_beams=2: pass num_beams=1, or drop the draft"),
    "sampled beams": ({"num_beams": 2, "do_sample": True}, r"num_beams=2: pass num_beams=1, or drop the draft"),
    "beams, all returned": ({"num_beams": 2, "num_return_sequences": 2}, r"num_beams=2: pass num_beams=1"),
    "greedy answers": (
        {"num_return_sequences": 2},
        r"do_sample.*num_return_sequences",
    ),
    "no cache": ({"use_cache": False}, r"use_cache=False: leave use_cache on"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens=3: one source .* leave it unset"),
    "early exit": ({"assistant_early_exit": 2}, r"assistant_early_exit=2: one source .* leave it unset"),
    "the target's own multi-token head": ({"use_mtp": True}, r"use_mtp=True: one source .* leave it unset"),
    "DoLa": ({"dola_layers": "low"}, r"dola_layers"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha=0.6|Contrastive Search requires"),
    "forced words": ({"force_words_ids": [[3]], "num_beams": 2}, r"num_beams=2|Constrained Beam Search requires"),
    "sliding static cache": ({"cache_implementation": "static"}, r"Static\w*Layer.*Leave `cache_implementation` unset"),
}


@pytest.mark.parametrize("name", REFUSED)
@each_door
def test_options_that_are_not_supported_are_refused_before_any_pass(door, name):
    # Its static cache drops what its windows have passed.
    target = cached_target("mistral-sliding")
    draft = make_draft(target)
    option, message = REFUSED[name]
    run = partial(call(door, target, draft), random_tokens(1, 30), max_new_tokens=5, **option)
    assert_refused_before_any_pass(run, target, draft, message)


@each_door
def test_constraints_without_beams_are_refused_too(door):
    target = cached_target()
    draft = make_draft(target)
    config = GenerationConfig(force_words_ids=[[3]], max_new_tokens=5)
    run = partial(call(door, target, draft), random_tokens(1, PROMPT), generation_config=config)
    assert_refused_before_any_pass(run, target, draft, "prefix_allowed_tokens_fn|Constrained Beam Search requires")


def test_a_tokenizer_of_the_assistants_own_is_refused():
    target = cached_target()
    draft, tokenizer = make_draft(target), make_tokenizer()
    run = partial(
        target.generate,
        random_tokens(1, PROMPT),
        max_new_tokens=5,
        assistant_model=draft,
        tokenizer=tokenizer,
        assistant_tokenizer=tokenizer,
    )
    assert_refused_before_any_pass(run, target, draft, "leave assistant_tokenizer out")


@pytest.mark.parametrize("layer", ["QuantoQuantizedLayer", "HQQQuantizedLayer"])
@each_door
def test_a_quantised_cache_is_refused_by_the_name_of_its_layers(door, layer):
    # Without the quantisation libraries: all that matters is that the layers say they cannot be cropped.
    target = cached_target()
    draft = make_draft(target)
    cache = DynamicCache(config=target.config)
    kind = getattr(cache_utils, layer)
    cache.layers = [kind.__new__(kind) for _ in cache.layers]
    run = partial(call(door, target, draft), random_tokens(1, PROMPT), max_new_tokens=5, **{CACHE: cache})
    assert_refused_before_any_pass(run, target, draft, layer, "cannot forget rejected proposals", "without the draft")


@pytest.mark.parametrize("door", ["assistant_model", "custom_generate"])
def test_an_encoder_decoder_is_refused(door):
    config = AutoConfig.for_model(
        "t5",
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    target = AutoModelForSeq2SeqLM.from_config(config).eval()
    draft = make_draft(cached_target())
    run = partial(call(door, target, draft), random_tokens(1, PROMPT), max_new_tokens=5)
    with (
        recorded_widths(target.decoder) as passes,
        pytest.raises(ValueError, match=r"T5.*encoder-decoder.*decoder-only"),
    ):
        run()
    assert passes == []


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
    with recorded_widths(target) as passes:
        try:
            output = call(door, target, draft)(prompt, max_new_tokens=NEW_TOKENS)
        except ValueError as error:
            refusal = str(error)
        else:
            refusal = None
    if refusal is not None:
        assert passes == [], "it ran before it was refused"
        layer_types = set(getattr(target.config, "layer_types", None) or ())
        names = {type(target).__name__, target.config.model_type} | (layer_types - {"full_attention"})
        assert any(name in refusal for name in names), f"none of {names} in: {refusal}"
    else:
        assert output.tolist() == plain.tolist() or first_difference_is_tie(target, plain, output)


def _embedded(target, prompt):
    return {"inputs_embeds": target.get_input_embeddings()(prompt).detach()}


LATER = {
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
