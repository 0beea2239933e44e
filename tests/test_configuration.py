# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The config: both layouts in, both layouts out, and nothing wrong in silence."""

import copy
import json
import logging

import pytest
import torch
from helpers import FIXTURES, MASK_TOKEN, draft_config, load_fixture
from huggingface_hub.errors import StrictDataclassError
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from domino_spec.configuration_domino import DominoConfig
from domino_spec.modeling_domino import DominoDraftModel

# What design and checkpoints call the nested section, with values that differ from every default.
NESTED = {
    "mask_token_id": 95,
    "target_layer_ids": [0, 2, 3],
    "projector_type": "domino",
    "pure_draft_prefix_len": 1,
    "shift_label": True,
    "gru_hidden_dim": 12,
    "emb_dim": 10,
}
OTHER = {
    "mask_token_id": 94,
    "target_layer_ids": [0, 1, 3],
    "pure_draft_prefix_len": 2,
    "shift_label": False,
    "gru_hidden_dim": 11,
    "emb_dim": 9,
}
BACKBONE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "block_size": 6,
    "num_target_layers": 4,
}
ROPE = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "linear": {"rope_type": "linear", "factor": 2.0},
}
THETA = 5e5

REFUSED = (StrictDataclassError, ValueError)


def saved_json(config, folder):
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


# Reading


@pytest.mark.parametrize(
    "written",
    [{"dflash_config": NESTED}, NESTED, {**NESTED, "dflash_config": NESTED}],
    ids=["nested only", "flat only", "both"],
)
def test_either_layout_is_read(written):
    config = DominoConfig(**BACKBONE, **written)
    assert {name: getattr(config, name) for name in NESTED} == NESTED
    assert config.has_head
    assert config.shift_label is True


def test_an_explicit_null_at_the_top_level_leaves_the_nested_value():
    config = DominoConfig(**BACKBONE, **dict.fromkeys(NESTED), dflash_config=NESTED)
    assert {name: getattr(config, name) for name in NESTED} == NESTED


def test_without_labels_settings_dflash_labelling_holds():
    config = draft_config(shift_label=None, pure_draft_prefix_len=None)
    assert config.shift_label is False
    assert config.pure_draft_prefix_len == 0


@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_contradiction_is_an_error_that_names_both(name):
    with pytest.raises(REFUSED) as error:
        DominoConfig(**BACKBONE, **{**NESTED, "dflash_config": {**NESTED, name: OTHER[name]}})
    for part in (name, repr(NESTED[name]), repr(OTHER[name]), "dflash_config"):
        assert part in str(error.value)


def test_a_contradicting_sliding_window_rule_is_an_error():
    with pytest.raises(REFUSED, match="sliding_window_rule"):
        draft_config(
            sliding_window=8, sliding_window_rule="causal", dflash_config={**NESTED, "sliding_window_rule": "symmetric"}
        )


def test_a_block_size_in_the_nested_section_is_read():
    # Some engines read the block size there, and fall back to 16 without a word.
    fields = {k: v for k, v in BACKBONE.items() if k != "block_size"}
    assert DominoConfig(**fields, dflash_config={**NESTED, "block_size": 6}).block_size == 6


def test_a_contradicting_block_size_is_an_error_that_names_both():
    with pytest.raises(REFUSED) as error:
        DominoConfig(**BACKBONE, dflash_config={**NESTED, "block_size": 8})
    for part in ("block_size", "6", "8"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shift_label", 1),
        ("shift_label", "true"),
        ("mask_token_id", "95"),
        ("mask_token_id", 95.0),
        ("target_layer_ids", "0,2,3"),
        ("target_layer_ids", [0, 2.0, 3]),
        ("pure_draft_prefix_len", True),
        ("gru_hidden_dim", 12.0),
        ("emb_dim", "10"),
        ("projector_type", "dominoes"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", ["flat", "nested"])
def test_a_wrong_type_is_refused_and_named(name, value, place):
    fields = {**NESTED, name: value}
    with pytest.raises(StrictDataclassError, match=name):
        DominoConfig(**BACKBONE, **(fields if place == "flat" else {"dflash_config": fields}))


@pytest.mark.parametrize(("name", "value"), [("block_size", "6"), ("block_size", 6.0), ("num_target_layers", "4")])
def test_a_wrong_type_of_a_top_level_field_is_refused(name, value):
    with pytest.raises(StrictDataclassError, match=name):
        DominoConfig(**{**BACKBONE, name: value}, dflash_config=NESTED)


def test_an_unknown_nested_key_warns(caplog):
    with caplog.at_level(logging.WARNING):
        DominoConfig(**BACKBONE, dflash_config={**NESTED, "shift_labels": True})
    assert "shift_labels" in caplog.text


def test_known_nested_keys_do_not_warn(caplog):
    with caplog.at_level(logging.WARNING):
        DominoConfig(**BACKBONE, dflash_config=NESTED)
        DominoConfig(**draft_config(sliding_window=8).to_dict())
    assert not caplog.records


@pytest.mark.parametrize("name", FIXTURES)
def test_a_public_checkpoint_is_read(name):
    path = load_fixture(name).draft_path
    written = json.loads((path / "config.json").read_text())
    config = DominoConfig.from_pretrained(path)
    for field, value in written["dflash_config"].items():
        assert getattr(config, field) == value, field
    for field in ("block_size", "layer_types", "sliding_window", "head_dim", "num_target_layers", "vocab_size"):
        assert getattr(config, field) == written[field], field
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": written["rope_theta"]}


# Rules


IMPOSSIBLE = {
    "mask token beyond the vocabulary": ({"mask_token_id": 96}, "mask_token_id.*96"),
    "mask token below zero": ({"mask_token_id": -1}, "mask_token_id.*-1"),
    "target layer beyond the last": ({"target_layer_ids": [0, 4]}, r"target_layer_ids.*\[4\].*4"),
    "target layer below zero": ({"target_layer_ids": [-1, 2]}, r"target_layer_ids.*\[-1\]"),
    "no target layer": ({"target_layer_ids": []}, "target_layer_ids"),
    "block of the anchor alone": ({"block_size": 1}, "block_size.*1"),
    "prefix longer than the block": ({"pure_draft_prefix_len": 7}, "pure_draft_prefix_len.*7"),
    "prefix below zero": ({"pure_draft_prefix_len": -1}, "pure_draft_prefix_len.*-1"),
    "head without state width": ({"gru_hidden_dim": None}, "gru_hidden_dim"),
    "head without bottleneck width": ({"emb_dim": None}, "emb_dim"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "sliding layer without window": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None},
        "sliding_window",
    ),
    "layer type that is not computed": ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    "unknown window rule": ({"sliding_window_rule": "both"}, "sliding_window_rule"),
    "features of another kind": ({"context_features": "final_norm"}, "context_features"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_fields_that_cannot_be_are_refused(case):
    overrides, message = IMPOSSIBLE[case]
    with pytest.raises(REFUSED, match=message):
        DominoConfig(**{**BACKBONE, **NESTED, **overrides})


@pytest.mark.parametrize(
    "overrides",
    [
        {"mask_token_id": 0},
        {"target_layer_ids": [0]},
        {"target_layer_ids": [3]},
        {"target_layer_ids": [3, 0]},
        {"block_size": 2},
        {"pure_draft_prefix_len": 6},
        {"pure_draft_prefix_len": 0},
    ],
    ids=str,
)
def test_fields_at_the_edge_are_taken(overrides):
    config = draft_config(**overrides)
    assert {name: getattr(config, name) for name in overrides} == overrides


@pytest.mark.parametrize("switch", [{}, {"use_sliding_window": False}], ids=["absent", "off"])
def test_sliding_layers_keep_their_window_without_use_sliding_window(switch):
    layers = ["sliding_attention", "full_attention"]
    config = draft_config(layer_types=layers, sliding_window=8, **switch)
    assert (config.sliding_window, config.layer_types, config.sliding_window_rule) == (8, layers, "causal")


def test_the_window_survives_a_round_trip(tmp_path):
    config = draft_config(sliding_window=8, sliding_window_rule="symmetric")
    written = saved_json(config, tmp_path)
    assert written["sliding_window"] == 8
    assert written["use_sliding_window"] is True
    assert written["sliding_window_rule"] == written["dflash_config"]["sliding_window_rule"] == "symmetric"
    again = DominoConfig.from_pretrained(tmp_path)
    assert (again.sliding_window, again.sliding_window_rule) == (8, "symmetric")
    assert again.layer_types == config.layer_types


@pytest.mark.parametrize("missing", ["mask_token_id", "target_layer_ids"])
def test_an_incomplete_config_can_be_made_but_gives_no_model(missing):
    config = draft_config(**{missing: None})
    with pytest.raises(ValueError, match=missing):
        DominoDraftModel(config)


def test_an_incomplete_config_names_all_that_is_missing():
    with pytest.raises(ValueError, match=r"target_layer_ids.*mask_token_id"):
        DominoConfig().require_complete()


# Writing


def test_json_is_what_the_checkpoint_contract_says(tmp_path):
    written = saved_json(draft_config(rope_parameters={"rope_type": "default", "rope_theta": THETA}), tmp_path)
    assert written["model_type"] == "qwen3"
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["auto_map"] == {
        "AutoConfig": "configuration_domino.DominoConfig",
        "AutoModel": "modeling_domino.DominoDraftModel",
    }
    assert written["dflash_config"] == NESTED
    assert written["dflash_config"]["shift_label"] is True
    expected = {
        **BACKBONE,
        "emb_dim": 10,
        "target_layer_ids": [0, 2, 3],
        "mask_token_id": MASK_TOKEN,
        "layer_types": ["full_attention", "full_attention"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": THETA,
        "rope_scaling": None,
    }
    assert {name: written.get(name) for name in expected} == expected
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": THETA}


def test_values_equal_to_the_defaults_are_written_too(tmp_path):
    written = saved_json(draft_config(block_size=16, shift_label=False, pure_draft_prefix_len=0), tmp_path)
    assert written["block_size"] == 16
    assert written["dflash_config"]["shift_label"] is False
    assert written["dflash_config"]["pure_draft_prefix_len"] == 0


def test_a_draft_without_a_head_announces_none(tmp_path):
    written = saved_json(draft_config(head=False), tmp_path)
    assert set(written["dflash_config"]) == {"mask_token_id", "target_layer_ids", "shift_label"}
    for name in ("projector_type", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"):
        assert name not in written
    again = DominoConfig.from_pretrained(tmp_path)
    assert not again.has_head
    assert again.shift_label is True


@pytest.mark.parametrize(
    "config",
    [
        draft_config(),
        draft_config(head=False, shift_label=False),
        draft_config(sliding_window=8),
        draft_config(rope_parameters={**ROPE["yarn"], "rope_theta": THETA}),
        DominoConfig(),
    ],
    ids=["head", "no head", "sliding", "yarn", "incomplete"],
)
def test_to_dict_and_files_are_stable(config, tmp_path):
    first = config.to_dict()
    assert DominoConfig(**copy.deepcopy(first)).to_dict() == first
    assert config.to_dict() == first, "to_dict changed the config"
    written = saved_json(config, tmp_path / "a")
    again = DominoConfig.from_pretrained(tmp_path / "a")
    assert again.to_dict() == {**first, "_name_or_path": again.to_dict()["_name_or_path"]}
    assert saved_json(again, tmp_path / "b") == written


@pytest.mark.parametrize("name", FIXTURES)
def test_a_public_checkpoint_is_written_back_with_its_own_values(name, tmp_path):
    path = load_fixture(name).draft_path
    original = json.loads((path / "config.json").read_text())
    written = saved_json(DominoConfig.from_pretrained(path), tmp_path)
    nested = {k: v for k, v in written["dflash_config"].items() if k != "sliding_window_rule"}
    assert nested == original["dflash_config"]
    ours = ("architectures", "auto_map", "dflash_config")
    assert {k: written.get(k) for k in original if k not in ours} == {
        k: v for k, v in original.items() if k not in ours
    }


# Rotary settings: what is saved describes the rotation that the draft computes


@pytest.mark.parametrize("kind", sorted(ROPE))
@pytest.mark.parametrize("layout", ["old", "old with `type`", "new"])
def test_scaled_rope_survives_a_round_trip_in_both_layouts(kind, layout, tmp_path):
    scaling = dict(ROPE[kind])
    expected = {**scaling, "rope_theta": THETA}
    if layout == "new":
        fields = {"rope_parameters": dict(expected)}
    else:
        if layout == "old with `type`":
            scaling["type"] = scaling.pop("rope_type")
        fields = {"rope_theta": THETA, "rope_scaling": scaling}
    config = draft_config(**fields)
    assert {k: config.rope_parameters[k] for k in expected} == expected

    written = saved_json(config, tmp_path)
    assert written["rope_theta"] == THETA
    assert {k: written["rope_scaling"][k] for k in ROPE[kind]} == ROPE[kind]
    assert {k: written["rope_parameters"][k] for k in expected} == expected

    again = DominoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters
    # A reader of the old names alone and a reader of the new names alone see the same rotation.
    plain = {k: v for k, v in BACKBONE.items() if k not in ("block_size", "num_target_layers")}
    old = Qwen3Config(**plain, rope_theta=written["rope_theta"], rope_scaling=written["rope_scaling"])
    new = Qwen3Config(**plain, rope_parameters=written["rope_parameters"])
    frequencies = [Qwen3RotaryEmbedding(c).inv_freq for c in (old, new)]
    frequencies += [DominoDraftModel(c).rotary_emb.inv_freq for c in (config, again)]
    for other in frequencies[1:]:
        assert torch.equal(frequencies[0], other)
    default = Qwen3RotaryEmbedding(Qwen3Config(**plain, rope_theta=THETA)).inv_freq
    assert not torch.equal(frequencies[0], default)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}},
        {"rope_theta": THETA, "partial_rotary_factor": 0.5},
    ],
    ids=["new layout", "old layout"],
)
def test_a_partial_rotation_is_computed_or_refused_or_not_announced(fields, tmp_path):
    # Copied from a target's config, say. A saved config that announces half a rotation must belong to one.
    try:
        config = draft_config(**fields)
        rotated = 2 * DominoDraftModel(config).rotary_emb.inv_freq.numel()
    except REFUSED as error:
        assert "partial_rotary_factor" in str(error)
        return
    written = saved_json(config, tmp_path)
    announced = written.get("partial_rotary_factor") or written["rope_parameters"].get("partial_rotary_factor") or 1.0
    assert rotated == int(config.head_dim * announced)


def test_a_rotation_for_each_layer_type_is_refused_with_a_message():
    # Gemma's way of writing; all layers of a draft share one rotation.
    nested = {kind: {"rope_type": "default", "rope_theta": THETA} for kind in ("full_attention", "sliding_attention")}
    with pytest.raises(REFUSED, match="rope_parameters"):
        DominoDraftModel(draft_config(sliding_window=8, rope_parameters=nested))
