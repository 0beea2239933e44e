# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Targets that are not a plain text model in one piece: multimodal, offloaded, quantised, with convolutions."""

import copy

import pytest
import torch
from batching import GoodBatchDraft, padded_batch
from contract import NEW_TOKENS, PROMPT, cached_target, good_draft, prompt_and_plain, spoil
from gpu_checks import checks
from helpers import MASK_TOKEN, VOCAB, make_draft, random_tokens, randomise
from test_generate_refusals import recurrent_target
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    cache_utils,
)

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
PATCHES = {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
QWEN_TEXT = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
QWEN_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
MULTIMODAL = {
    "qwen2_5_vl": {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION, **QWEN_TOKENS},
    "qwen3_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    },
    "gemma3": {
        "text_config": {"sliding_window": 16},
        "vision_config": {**VISION, **PATCHES},
        "image_token_index": 90,
        "mm_tokens_per_image": 4,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {**VISION, **PATCHES, "model_type": "clip_vision_model"},
        "image_token_index": 90,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": {**VISION, **PATCHES, "model_type": "pixtral"},
        "image_token_index": 90,
    },
}
LENGTHS = [9, 4, 13]


def multimodal_target(model_type: str):
    fields = dict(MULTIMODAL[model_type])
    fields["text_config"] = {**TEXT, **fields["text_config"]}
    target = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(model_type, **fields), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    randomise(target, seed=0, std=0.2)
    return target


def assert_batch_is_plain(target, lengths=LENGTHS, **options):
    """Padded rows of different acceptance, some of it high."""
    inputs, width = padded_batch(lengths, seed=3), max(lengths)
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, pad_token_id=MASK_TOKEN, **options)
    texts = [plain[row, width - length :].tolist() for row, length in enumerate(lengths)]
    spoiled = [{12, 20}, set(), {15}][: len(lengths)]
    draft = GoodBatchDraft.following(make_draft(target), target, texts, spoiled)
    output = target.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=MASK_TOKEN,
        assistant_model=draft,
        return_dict_in_generate=True,
        **options,
    )
    assert output.sequences.tolist() == plain.tolist()
    assert output.acceptance_lengths.float().mean() > 2, "blocks were hardly accepted, so little was tested"


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_a_multimodal_target_used_with_text(model_type):
    target = multimodal_target(model_type)
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    assert target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft).tolist() == plain.tolist()
    assert_batch_is_plain(target)


@pytest.mark.parametrize("lengths", [[9, 9, 9], LENGTHS], ids=["equal", "padded"])
def test_convolutions_are_rolled_back_in_a_batch(lengths):
    assert_batch_is_plain(recurrent_target("lfm2-convolution"), lengths)


@pytest.mark.parametrize(
    "config",
    [
        SynthIDTextWatermarkingConfig(keys=[1, 5, 7, 9], ngram_len=3),
        WatermarkingConfig(seeding_scheme="selfhash"),
        WatermarkingConfig(seeding_scheme="lefthash"),
    ],
    ids=["synthid", "selfhash", "lefthash"],
)
def test_a_watermark_is_the_same_with_a_draft(config):
    # SynthID remembers what it has seen, so it must be called as in plain decoding.
    assert_batch_is_plain(cached_target("qwen3", "sdpa"), watermarking_config=config)


PLACES = {
    "layers": {"model.layers.2": "disk", "model.layers.3": "disk"},
    "embedding": {"model.embed_tokens": "disk"},
    "output head": {"lm_head": "disk"},
}


@pytest.mark.parametrize("offloaded", PLACES)
def test_a_target_whose_parts_are_offloaded(offloaded, tmp_path):
    # Their weights are on no device but while they run.
    pytest.importorskip("accelerate")
    target = cached_target("qwen3", "sdpa", torch.float32)
    target.save_pretrained(tmp_path / "target")
    places = {f"model.layers.{i}": "cpu" for i in range(4)}
    places |= {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=places | PLACES[offloaded], offload_folder=tmp_path / "offloaded"
    )
    assert any(parameter.is_meta for parameter in spread.parameters())
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil())
    output = spread.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.acceptance_lengths.float().mean() > 2


class FakeStream:
    """Stands in for an accelerator's stream, on a machine that has none."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.mark.parametrize("rows", [1, 3])
def test_an_offloaded_cache(rows, monkeypatch):
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: FakeStream())
    moved = []
    monkeypatch.setattr(cache_utils.DynamicLayer, "offload", lambda layer: moved.append(layer))
    assert_batch_is_plain(cached_target("qwen3", "sdpa"), [9] * rows, cache_implementation="offloaded")
    assert moved, "nothing was offloaded"


class PackedLinear(nn.Module):
    """Two four-bit weights in a byte, as quantised linear layers keep them: neither shape nor dtype are the layer's."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(-1, keepdim=True) / 7)
        codes = (linear.weight.detach() / self.scale).round().add(8).to(torch.uint8).flatten()
        self.weight = nn.Parameter(codes[::2] * 16 + codes[1::2], requires_grad=False)

    def forward(self, hidden):
        assert hidden.is_floating_point()
        codes = torch.stack([self.weight // 16, self.weight % 16], -1).view(self.out_features, self.in_features)
        return nn.functional.linear(hidden, (codes.to(hidden.dtype) - 8) * self.scale.to(hidden.dtype))


def test_a_quantised_target():
    target = copy.deepcopy(cached_target("qwen3", "sdpa", torch.float32))
    draft_before = make_draft(target)
    for name, module in list(target.named_modules()):
        if isinstance(module, nn.Linear):
            target.set_submodule(name, PackedLinear(module))
    assert target.get_output_embeddings().weight.shape != (VOCAB, 32)
    prompt = random_tokens(1, PROMPT, seed=3)
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS)
    assert plain.tolist() != cached_target("qwen3", "sdpa", torch.float32).generate(prompt, max_new_tokens=24).tolist()
    for draft in (draft_before, draft_before.to(torch.bfloat16)):
        output = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft)
        assert output.tolist() == plain.tolist()


def test_the_checks_for_accelerators_pass_where_there_is_none(tmp_path):
    lengths = {name: run() for name, run in checks("cpu", tmp_path).items() if run is not None}
    # How much the schedule offers hangs on measured time; that its tokens are plain was checked all the same.
    assert lengths.pop("adaptive draft length") >= 1
    # Their draft is a random one, and they compare its rounds.
    for name in [name for name in lengths if "in a graph" in name]:
        assert lengths.pop(name) >= 1
    assert len(lengths) >= 10 and all(length > 2 for length in lengths.values()), lengths
