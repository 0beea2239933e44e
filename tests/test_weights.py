# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: names of the contract, foreign layouts, what is missing or of another shape, and their training."""

import json

import pytest
import torch
from helpers import (
    BLOCK,
    FIXTURES,
    TARGET_LAYERS,
    draft_config,
    load_fixture,
    make_draft,
    random_tokens,
)
from passes import block_ids, random_features
from safetensors.torch import load_file, save_file

from domino_spec.modeling_domino import DominoDraftModel

CONTRACT = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            "self_attn.q_norm",
            "self_attn.k_norm",
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
            "input_layernorm",
            "post_attention_layernorm",
        )
    ),
}
HEAD = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
BIASES = {f"layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkvo"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, CONTRACT | HEAD),
        ({"head": False}, CONTRACT),
        ({"attention_bias": True}, CONTRACT | HEAD | BIASES),
        ({"sliding_window": 5}, CONTRACT | HEAD),
    ],
    ids=["head", "no head", "attention bias", "sliding"],
)
def test_weight_names_are_exactly_the_contract_s(target, tmp_path, options, names):
    draft = make_draft(target, **options)
    assert set(draft.state_dict()) == names
    draft.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names


@pytest.mark.parametrize("name", FIXTURES)
def test_loaded_tensors_equal_the_file_byte_for_byte(name):
    fixture = load_fixture(name)
    assert_same_bytes(fixture.draft().state_dict(), load_file(fixture.draft_path / "model.safetensors"))


def assert_same_bytes(left, right):
    assert set(left) == set(right)
    for name in right:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


def write_draft(folder, tensors, config=None, rename=lambda name: name):
    """A draft's folder as someone else might write it."""
    folder.mkdir(exist_ok=True)
    save_file({rename(name): t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    fixture = load_fixture("shift1-prefix1")
    config = json.loads((fixture.draft_path / "config.json").read_text()) if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fixture_tensors():
    return load_file(load_fixture("shift1-prefix1").draft_path / "model.safetensors")


def encoder_names(name):
    return {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(name, name)


FOREIGN = {
    "prefixed by model.": lambda name: "model." + name,
    "encoder names": encoder_names,
    "encoder names, prefixed": lambda name: "model." + encoder_names(name),
    "our own": lambda name: name,
}


@pytest.mark.parametrize("layout", FOREIGN)
def test_foreign_names_load_and_are_saved_under_the_contract_s(tmp_path, layout):
    tensors = fixture_tensors()
    folder = write_draft(tmp_path / "foreign", tensors, rename=FOREIGN[layout])
    draft, info = DominoDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert_same_bytes(draft.state_dict(), tensors)

    draft.save_pretrained(tmp_path / "once")
    assert_same_bytes(load_file(tmp_path / "once" / "model.safetensors"), tensors)
    DominoDraftModel.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    assert_same_bytes(load_file(tmp_path / "twice" / "model.safetensors"), tensors)
    once, twice = ((tmp_path / n / "config.json").read_text() for n in ("once", "twice"))
    assert once == twice


def test_a_saved_draft_computes_the_same(target, parts, tmp_path):
    draft = make_draft(target, dtype=torch.float32, sliding_window=5)
    draft.save_pretrained(tmp_path)
    again = DominoDraftModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert not torch.equal(make_draft(target, dtype=torch.float32, sliding_window=5, seed=9).fc.weight, draft.fc.weight)
    features, embeds = random_features(draft, 1, 7), parts.embed(block_ids())
    with torch.no_grad():
        first, second = (model(embeds, features).last_hidden_state for model in (draft, again))
        assert torch.equal(first, second)
        states = draft.prefix_states(embeds)
        assert torch.equal(again.prefix_states(embeds), states)
        assert torch.equal(again.correction(first, states), draft.correction(first, states))


def headless_config(**changes):
    config = json.loads((load_fixture("shift1-prefix1").draft_path / "config.json").read_text())
    del config["emb_dim"]
    config["dflash_config"] = {
        k: v for k, v in config["dflash_config"].items() if k in ("mask_token_id", "target_layer_ids")
    }
    return {**config, **changes}


def test_a_pure_dflash_checkpoint_loads_without_a_head(tmp_path):
    tensors = {name: t for name, t in fixture_tensors().items() if name not in HEAD}
    draft, info = DominoDraftModel.from_pretrained(
        write_draft(tmp_path / "dflash", tensors, headless_config()), output_loading_info=True
    )
    assert not draft.config.has_head
    assert draft.config.shift_label is False
    assert not hasattr(draft, "prefix_gru") and not hasattr(draft, "embed_proj")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_bytes(draft.state_dict(), tensors)
    draft.save_pretrained(tmp_path / "saved")
    assert_same_bytes(load_file(tmp_path / "saved" / "model.safetensors"), tensors)


def test_a_head_that_the_config_does_not_announce_is_left_out(tmp_path):
    # What the error about a missing head advises, the other way round.
    draft, info = DominoDraftModel.from_pretrained(
        write_draft(tmp_path / "draft", fixture_tensors(), headless_config()), output_loading_info=True
    )
    assert set(info["unexpected_keys"]) == HEAD
    assert set(draft.state_dict()) == CONTRACT


@pytest.mark.parametrize("missing", sorted(HEAD), ids=str)
def test_an_announced_head_with_a_tensor_missing_is_an_error(tmp_path, missing):
    tensors = fixture_tensors()
    del tensors[missing]
    with pytest.raises(ValueError, match=missing.replace(".", r"\.")) as error:
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", tensors))
    assert "projector_type" in str(error.value)


def test_an_announced_head_that_is_not_there_is_an_error(tmp_path):
    tensors = {name: t for name, t in fixture_tensors().items() if name not in HEAD}
    with pytest.raises(ValueError, match="projector_type") as error:
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", tensors))
    assert all(name in str(error.value) for name in HEAD)


@pytest.mark.parametrize("missing", ["fc.weight", "layers.1.self_attn.q_norm.weight"], ids=str)
def test_a_missing_backbone_tensor_is_an_error(tmp_path, missing):
    tensors = fixture_tensors()
    del tensors[missing]
    with pytest.raises(ValueError, match=missing.replace(".", r"\.")):
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", tensors))


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.0.self_attn.k_proj.weight", "prefix_gru.weight_hh_l0", "embed_proj.2.weight"], ids=str
)
def test_a_wrong_shape_is_an_error_that_names_both(tmp_path, name):
    tensors = fixture_tensors()
    good = tuple(tensors[name].shape)
    tensors[name] = tensors[name][:-1]
    with pytest.raises((RuntimeError, ValueError)) as error:
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", tensors))
    message = str(error.value)
    assert name in message
    for shape in (good, (good[0] - 1, *good[1:])):
        numbers = str(list(shape))
        assert numbers in message or str(shape) in message, message


def test_a_config_of_another_size_is_an_error_that_names_both_shapes(tmp_path):
    # The embedding is the target's, so a wrong vocabulary shows in the head only.
    config = headless_config(
        emb_dim=24,
        vocab_size=300,
        dflash_config=json.loads((load_fixture("shift1-prefix1").draft_path / "config.json").read_text())[
            "dflash_config"
        ],
    )
    with pytest.raises((RuntimeError, ValueError), match=r"embed_proj\.2\.weight") as error:
        DominoDraftModel.from_pretrained(write_draft(tmp_path / "draft", fixture_tensors(), config))
    assert "256" in str(error.value) and "300" in str(error.value)


@pytest.mark.parametrize("layout", FOREIGN)
def test_a_sharded_checkpoint_loads(tmp_path, layout):
    tensors = fixture_tensors()
    folder = write_draft(tmp_path / "draft", {}, rename=str)
    (folder / "model.safetensors").unlink()
    index = {}
    for number in (1, 2):
        part = {n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % 2 == number - 1}
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({FOREIGN[layout](n): t for n, t in part.items()}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys((FOREIGN[layout](n) for n in part), file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    assert_same_bytes(DominoDraftModel.from_pretrained(folder).state_dict(), tensors)


def test_a_draft_saved_in_shards_loads(target, tmp_path):
    draft = make_draft(target, dtype=torch.float32)
    draft.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_bytes(DominoDraftModel.from_pretrained(tmp_path).state_dict(), draft.state_dict())


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, None], ids=["auto", "bfloat16", "not given"])
def test_a_bfloat16_checkpoint_loads_byte_for_byte(tmp_path, dtype):
    tensors = {name: t.bfloat16() for name, t in fixture_tensors().items()}
    config = json.loads((load_fixture("shift1-prefix1").draft_path / "config.json").read_text())
    folder = write_draft(tmp_path / "draft", tensors, {**config, "dtype": "bfloat16"})
    draft = DominoDraftModel.from_pretrained(folder, **({} if dtype is None else {"dtype": dtype}))
    assert draft.dtype == torch.bfloat16
    assert_same_bytes(draft.state_dict(), tensors)
    draft.save_pretrained(tmp_path / "saved")
    assert_same_bytes(load_file(tmp_path / "saved" / "model.safetensors"), tensors)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"


def test_attention_bias_loads_and_takes_part(target, parts, tmp_path):
    draft = make_draft(target, attention_bias=True)
    features, embeds = random_features(draft, 1, 5), parts.embed(block_ids())
    with torch.no_grad():
        draft.save_pretrained(tmp_path)
        again = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
        assert again.config.attention_bias
        hidden = draft(embeds, features).last_hidden_state
        assert torch.equal(again(embeds, features).last_hidden_state, hidden)
        for name in sorted(BIASES):
            before = again.get_parameter(name).clone()
            again.get_parameter(name).zero_()
            moved = not torch.allclose(again(embeds, features).last_hidden_state, hidden, atol=1e-6)
            assert moved, name
            again.get_parameter(name).copy_(before)


def test_a_fresh_draft_is_initialised_everywhere(target):
    torch.manual_seed(0)
    draft = DominoDraftModel(draft_config(target.config))
    for name, parameter in draft.named_parameters():
        assert parameter.isfinite().all(), name
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert 0.005 < parameter.std() < 0.5, name


def test_every_parameter_gets_a_gradient(target, parts):
    draft = make_draft(target, attention_bias=True, sliding_window=5)
    hidden = draft(parts.embed(block_ids(2)), random_features(draft, 2, 7)).last_hidden_state
    states = draft.prefix_states(parts.embed(random_tokens(2, BLOCK)))
    logits = parts.logits(hidden) + draft.correction(hidden, states)
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_target_layers_of_the_default_draft_are_first_middle_last():
    # What the tests above rely on when they speak of the last layer.
    assert draft_config().target_layer_ids == [0, TARGET_LAYERS // 2, TARGET_LAYERS - 1]
