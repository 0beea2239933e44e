# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Corners in which decoding by blocks, or rows of different lengths, could part from plain decoding."""

import pytest
import torch
from batching import GoodBatchDraft
from contract import CACHE, DETAILS, NEW_TOKENS, PROMPT, cached_target, good_draft, prompt_and_plain, spoil
from helpers import MASK_TOKEN, VOCAB, make_draft, make_target, random_tokens, randomise
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from test_generate_refusals import assert_refused_before_any_pass
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessor,
    LogitsProcessorList,
)

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SPOILED = [set(), {22, 26, 30, 35}, set(range(20, 60, 2))]


def tiny(model_type, attention="eager", dtype=torch.float64, std=0.3, **fields):
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    target = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    randomise(target, seed=7, std=std)
    return target


def batch_draft(target, plain, spoiled=SPOILED):
    return GoodBatchDraft.following(make_draft(target), target, plain.tolist(), spoiled)


# Where a row stands in the cache


def gpt_neo():
    kinds = {"attention_types": [[["global", "local"], 2]], "window_size": 6, "num_layers": 4, "num_heads": 4}
    return tiny("gpt_neo", max_position_embeddings=512, **kinds)


WINDOWED = {
    "a sliding target with a cache that forgets nothing": (
        lambda: cached_target("mistral-sliding", "sdpa"),
        lambda: {CACHE: DynamicCache()},
    ),
    "a target with windows of its own making": (gpt_neo, dict),
}


@pytest.mark.parametrize("case", WINDOWED)
def test_windows_counted_in_entries_of_the_cache_are_not_shifted_by_holes(case):
    make, options = WINDOWED[case]
    target, ids = make(), random_tokens(3, 20, seed=4)
    plain = target.generate(ids, max_new_tokens=40, **options())
    ours = target.generate(ids, max_new_tokens=40, **options(), assistant_model=batch_draft(target, plain))
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("pads", ["masked", "seen"])
def test_a_second_turn_finds_the_end_token_and_the_padding_of_rows_that_had_ended(pads):
    target, ids = cached_target("qwen3", "sdpa"), random_tokens(3, 8, seed=4)
    options = {"max_new_tokens": 14, "pad_token_id": MASK_TOKEN}
    options["eos_token_id"] = int(target.generate(ids, **options)[0, 12])
    plain = target.generate(ids, **options)
    assert (plain == MASK_TOKEN).any()

    def two_turns(**draft):
        cache = DynamicCache(config=target.config)
        first = target.generate(ids, **options, **{CACHE: cache}, **draft)
        both = torch.cat([first, random_tokens(3, 3, seed=0)], dim=1)
        mask = (both != MASK_TOKEN).long() if pads == "masked" else torch.ones_like(both)
        return target.generate(both, attention_mask=mask, **options, **{CACHE: cache}, **draft).tolist()

    assert two_turns(assistant_model=batch_draft(target, plain)) == two_turns()


class Ensemble(LogitsProcessor):
    """Rows read one another's scores."""

    def __call__(self, input_ids, scores):
        return scores + 0.5 * scores.flip(0)


def test_in_lockstep_the_target_reads_the_padding_that_ended_rows_commit():
    target, ids = cached_target("qwen3", "sdpa"), random_tokens(2, 12, seed=0)

    def options(**more):
        return {"logits_processor": LogitsProcessorList([Ensemble()]), "max_new_tokens": 30, "pad_token_id": 3, **more}

    eos = int(target.generate(ids, **options())[0, 16])
    plain = target.generate(ids, **options(eos_token_id=eos))
    draft = batch_draft(target, plain, [{17, 22}, {15, 19, 27}])
    ours = target.generate(ids, **options(eos_token_id=eos), assistant_model=draft)
    assert ours.tolist() == plain.tolist()


def test_the_cache_of_a_batch_in_lockstep_is_plain_decodings_though_rows_end_early():
    target, ids = cached_target("mistral-sliding", "sdpa"), random_tokens(4, 20, seed=9)
    options = {"max_new_tokens": 15, "pad_token_id": 3, "eos_token_id": [94, 3, 70, 20, 16]}
    plain = target.generate(ids, **options, return_dict_in_generate=True)
    draft = batch_draft(target, plain.sequences, [{i for i in range(99) if i % (4 + k) == 1} for k in range(4)])
    ours = target.generate(ids, **options, return_dict_in_generate=True, assistant_model=draft)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for one, other in zip(getattr(ours, CACHE).layers, getattr(plain, CACHE).layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-5, atol=1e-5)


# Arguments along the sequence


def test_new_tokens_take_the_type_of_the_last_one():
    target = cached_target("gpt2-learned-positions")
    types = torch.tensor([[0, 0, 0, 0, 5, 5, 5, 7, 7]])
    prompt, plain = prompt_and_plain(target, token_type_ids=types)
    draft = good_draft(target, plain, spoil())
    ours = target.generate(prompt, max_new_tokens=NEW_TOKENS, token_type_ids=types, assistant_model=draft)
    assert ours.tolist() == plain.tolist()


def test_ids_may_be_of_any_integer_type():
    target, ids = cached_target("qwen3", "sdpa"), random_tokens(3, 8, seed=4)
    plain = target.generate(ids.int(), max_new_tokens=9)
    ours = target.generate(ids.int(), max_new_tokens=9, assistant_model=make_draft(target))
    assert ours.tolist() == plain.tolist() and ours.dtype == plain.dtype


def test_positions_may_be_given_once_for_all_rows():
    target, ids = cached_target("qwen3", "sdpa"), random_tokens(3, 8, seed=4)
    options = {"max_new_tokens": 20, "position_ids": torch.arange(8)[None] + 2, "pad_token_id": MASK_TOKEN}
    options["eos_token_id"] = int(target.generate(ids, **options)[1, 8])
    plain = target.generate(ids, **options)
    ours = target.generate(ids, **options, assistant_model=batch_draft(target, plain))
    assert ours.tolist() == plain.tolist()


# Rotations that hang on the length

LONG = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 1.5],
        "original_max_position_embeddings": 24,
        "partial_rotary_factor": 1.0,
    },
}
DYNAMIC = {
    "max_position_embeddings": 24,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_rotations_that_change_with_the_length_are_plain_or_refused_before_any_pass(name):
    target = tiny("phi3", **LONG) if name == "longrope" else tiny("llama", **DYNAMIC)
    draft = make_draft(target, max_position_embeddings=256)
    for length, new, works in ((15, 9, True), (15, 10, False), (30, 20, name == "longrope")):
        ids = random_tokens(1, length, seed=3)

        def run(ids=ids, new=new):
            return target.generate(ids, max_new_tokens=new, assistant_model=draft)

        if works:
            assert run().tolist() == target.generate(ids, max_new_tokens=new).tolist()
        else:
            assert_refused_before_any_pass(run, target, draft, f"{name} RoPE", "24", "max_length")


# Functions of the user's


def test_a_prefix_function_is_called_as_in_plain_decoding():
    # It knows what may follow what the target writes, and nothing behind the end.
    target = cached_target()
    prompt, free = prompt_and_plain(target)
    eos, calls = int(free[0, 15]), {}

    def generate(name, **draft):
        seen = calls.setdefault(name, [])

        def allowed(row, ids):
            seen.append(ids.tolist())
            return [] if len(ids) > PROMPT and ids[-1] == eos else [v for v in range(VOCAB) if (v + len(seen)) % 3]

        return target.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=eos,
            pad_token_id=eos,
            prefix_allowed_tokens_fn=allowed,
            **draft,
        ).tolist()

    plain = generate("plain")
    assert generate("ours", assistant_model=good_draft(target, torch.tensor(plain))) == plain
    assert calls["ours"] == calls["plain"]


class Double(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.double()


class Narrow(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores[:, :50]


@pytest.mark.parametrize("processor", [Double(), Narrow()], ids=["wider dtype", "fewer tokens"])
def test_scores_are_what_processors_make_of_them(processor):
    target = cached_target(dtype=torch.float32)
    options = {"logits_processor": LogitsProcessorList([processor]), "return_dict_in_generate": True}
    prompt, plain = prompt_and_plain(target, **options, output_scores=True)
    draft = good_draft(target, plain.sequences, spoil())
    ours = target.generate(prompt, max_new_tokens=NEW_TOKENS, **options, output_scores=True, assistant_model=draft)
    for one, other in zip(ours.scores, plain.scores, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    sampled = target.generate(prompt, max_new_tokens=5, do_sample=True, **options, assistant_model=draft)
    assert sampled.sequences.shape == (1, PROMPT + 5)


@pytest.mark.parametrize("case", ["no maps", "static cache"])
def test_attentions_are_what_the_backend_gives(case):
    target = cached_target("qwen3", "sdpa" if case == "no maps" else "eager")
    options = dict(DETAILS)
    if case == "static cache":
        options["cache_implementation"] = "static"
    prompt, plain = prompt_and_plain(target, **options)
    draft = good_draft(target, plain.sequences, spoil())
    try:
        ours = target.generate(prompt, max_new_tokens=NEW_TOKENS, **options, assistant_model=draft)
    except ValueError as error:
        # In the earlier versions such a cache cannot be cropped.
        assert case == "static cache" and "StaticLayer" in str(error)
        return
    assert [len(step) for step in ours.attentions] == [len(step) for step in plain.attentions]
    for step, other in zip(ours.attentions[1:], plain.attentions[1:], strict=True):
        for one, same in zip(step, other, strict=True):
            torch.testing.assert_close(one, same, rtol=1e-4, atol=1e-5)


# Wrappers and odd targets


def lora():
    return LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


def test_each_row_of_a_batch_may_have_an_adapter_of_its_own():
    torch.manual_seed(0)
    wrapped = get_peft_model(make_target("qwen3", seed=7, attn_implementation="sdpa"), lora(), adapter_name="a")
    wrapped.add_adapter("b", lora())
    wrapped.eval()
    options = {
        "input_ids": random_tokens(3, 12, seed=9),
        "adapter_names": ["a", "b", "__base__"],
        "max_new_tokens": 40,
        "pad_token_id": MASK_TOKEN,
    }
    options["eos_token_id"] = int(wrapped.generate(**options)[0, 20])
    plain = wrapped.generate(**options)
    draft = batch_draft(wrapped.get_base_model(), plain)
    assert wrapped.generate(**options, assistant_model=draft).tolist() == plain.tolist()


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig], ids=["prompt tuning", "prefix tuning"])
def test_a_target_with_learnt_prompts_is_refused_before_any_pass(kind):
    base = make_target("qwen3", seed=7, attn_implementation="sdpa", dtype=torch.float32)
    draft, ids = make_draft(base), random_tokens(1, 12)
    wrapped = get_peft_model(base, kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()

    def run():
        wrapped.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, assistant_model=draft)

    assert_refused_before_any_pass(run, base, draft, "prompt, prefix or P-tuning", "use LoRA")


def test_a_draft_wrapped_for_data_parallelism_is_used():
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = torch.nn.DataParallel(good_draft(target, plain, spoil()))
    output = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist() and output.acceptance_lengths.max() > 1


def projected():
    return tiny("opt", word_embed_proj_dim=16, ffn_dim=48, max_position_embeddings=128)


REFUSED = {
    "an embedding of another width": (projected, dict, "16 wide.*hidden size 32"),
    "no cache": (lambda: tiny("openai-gpt", n_embd=32, n_layer=4, n_head=4, n_positions=128), dict, "keeps no cache"),
    "the cache of an encoder-decoder": (
        lambda: tiny("gpt2", n_positions=128),
        lambda: {CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())},
        "EncoderDecoderCache.*pass a DynamicCache",
    ),
    "a schedule of no such name": (
        lambda: cached_target(),
        lambda: {"num_assistant_tokens_schedule": "heuristc"},
        "'heuristc'.*choose one of constant, heuristic",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_any_pass(case):
    make, options, message = REFUSED[case]
    target = make()
    draft = make_draft(target)

    def run():
        target.generate(random_tokens(1, PROMPT), max_new_tokens=5, assistant_model=draft, **options())

    assert_refused_before_any_pass(run, target, draft, message)
