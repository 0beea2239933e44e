# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""SGLang's rules: official and own folders pass, every planted fault is found, and the command fits the draft."""

import argparse
import json
import math
import shlex
import struct

import pytest
import torch
from helpers import make_draft
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from domino_spec.configuration_domino import NESTED_FIELDS, DominoConfig
from domino_spec.serving import sglang
from domino_spec.serving.folders import expected_shapes
from domino_spec.serving.sglang import check_serving, launch_command

# The config of Huang2020/Qwen3-8B-Domino-b16, as sgl-project/SpecForge keeps it (configs/qwen3-8b-domino.json).
OFFICIAL = {
    "emb_dim": 256,
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": True,
    },
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LAYER = {
    "input_layernorm": (4096,),
    "mlp.down_proj": (4096, 12288),
    "mlp.gate_proj": (12288, 4096),
    "mlp.up_proj": (12288, 4096),
    "post_attention_layernorm": (4096,),
    "self_attn.k_norm": (128,),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "self_attn.q_norm": (128,),
    "self_attn.q_proj": (4096, 4096),
    "self_attn.v_proj": (1024, 4096),
}
# What lies in the published file.
SHAPES = {
    "fc.weight": (4096, 20480),
    "hidden_norm.weight": (4096,),
    "norm.weight": (4096,),
    "prefix_gru.weight_ih_l0": (3072, 4096),
    "prefix_gru.weight_hh_l0": (3072, 1024),
    "embed_proj.0.weight": (256, 5120),
    "embed_proj.2.weight": (151936, 256),
    **{f"layers.{i}.{name}.weight": shape for i in range(5) for name, shape in LAYER.items()},
}
# config.json of Qwen/Qwen3-8B, as far as it matters here.
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}


def write_header(path, shapes, dtype="BF16"):
    """A safetensors file of the right length without a byte of data in it: the file system leaves the hole out."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


# The official draft


@pytest.fixture
def official(tmp_path):
    folder = tmp_path / "official"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OFFICIAL))
    write_header(folder / "model.safetensors", SHAPES)
    (folder / "dflash.py").write_text("raise RuntimeError('ran')")
    return folder


@pytest.fixture
def qwen3_8b(tmp_path):
    Qwen3Config(**QWEN3_8B).save_pretrained(tmp_path / "qwen3-8b")
    return tmp_path / "qwen3-8b"


def test_the_official_config_gives_the_shapes_of_the_official_file():
    assert expected_shapes(DominoConfig(**OFFICIAL)) == SHAPES


def test_without_its_head_s_fields_it_gives_those_of_the_dflash_draft():
    nested = {name: OFFICIAL["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    config = {name: value for name, value in OFFICIAL.items() if name != "emb_dim"}
    shapes = expected_shapes(DominoConfig(**{**config, "dflash_config": nested}))
    assert len(shapes) == 58  # tensors of z-lab/Qwen3-8B-DFlash-b16
    assert shapes == {name: SHAPES[name] for name in shapes}


def test_the_official_folder_passes_by_its_headers_alone(official, qwen3_8b):
    assert check_serving(official, qwen3_8b) == []
    assert (official / "model.safetensors").stat().st_size > 2e9


def test_a_sharded_folder_passes_and_a_missing_shard_is_found(official, qwen3_8b):
    (official / "model.safetensors").unlink()
    names = sorted(SHAPES)
    index = {}
    for number in (1, 2):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_header(official / file, {name: SHAPES[name] for name in names[number - 1 :: 2]})
        index |= dict.fromkeys(names[number - 1 :: 2], file)
    (official / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    # SGLang leaves files out that the index does not name.
    write_header(official / "adapter.safetensors", {"unknown": (1,)})
    assert check_serving(official, qwen3_8b) == []
    (official / "model-00002-of-00002.safetensors").unlink()
    (finding,) = check_serving(official, qwen3_8b)
    assert finding.severity == "error" and "model-00002-of-00002.safetensors" in finding.rule


def test_the_command_for_the_official_draft():
    command = launch_command("Huang2020/Qwen3-8B-Domino-b16", "Qwen/Qwen3-8B", config=DominoConfig(**OFFICIAL))
    assert shlex.join(command) == (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --dtype bfloat16 --speculative-algorithm DFLASH "
        "--speculative-draft-model-path Huang2020/Qwen3-8B-Domino-b16 --speculative-dflash-block-size 16 "
        "--speculative-domino-candidate-pool-size 2048 --attention-backend flashinfer"
    )


# Our own folders


def save_tiny(target, folder, dtype=torch.bfloat16, **options):
    draft = make_draft(target, dtype=dtype, **{"target_layer_ids": [0, 1, 2], **options})
    draft.save_pretrained(folder)
    target.config.save_pretrained(folder.parent / "target")
    return folder


@pytest.fixture
def saved(target, tmp_path):
    return save_tiny(target, tmp_path / "draft")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shift_label": False},
        {"head": False, "shift_label": False},
        {"sliding_window": 5},
        {"attention_bias": True},
        {"block_size": 2},
    ],
    ids=str,
)
def test_a_folder_saved_here_passes(target, tmp_path, options):
    assert check_serving(save_tiny(target, tmp_path / "draft", **options), tmp_path / "target") == []


def test_the_embedded_draft_passes(tmp_path):
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152, "max_position_embeddings": 8192}
    LlamaConfig(**sizes, num_attention_heads=9).save_pretrained(tmp_path)
    assert check_serving("default", tmp_path) == []


@pytest.mark.parametrize("trust", [False, True], ids=["code left alone", "code trusted"])
def test_sglang_finds_every_field_with_and_without_our_code(saved, trust):
    # It reads the config through AutoConfig, then the nested section first and the top level next.
    config = AutoConfig.from_pretrained(saved, trust_remote_code=trust)
    nested = getattr(config, "dflash_config", None) or {}
    fields = [name for name in NESTED_FIELDS if name != "sliding_window_rule"] + ["block_size", "num_target_layers"]
    read = {name: nested.get(name, getattr(config, name, None)) for name in fields}
    assert read == {
        "mask_token_id": 95,
        "target_layer_ids": [0, 1, 2],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": True,
        "gru_hidden_dim": 12,
        "emb_dim": 10,
        "block_size": 6,
        "num_target_layers": 4,
    }
    assert config.architectures == ["DFlashDraftModel"] and config.model_type == "qwen3"


# Every rule by a fault: what is done to a good folder, the field that is named, and how bad it is


def rewrite(change):
    def spoil(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return spoil


def set_fields(**fields):
    """In both places where they stand."""

    def change(config):
        for name, value in fields.items():
            if name in config["dflash_config"]:
                config["dflash_config"][name] = value
            config[name] = value

    return rewrite(change)


def remove_fields(*names):
    def change(config):
        for name in names:
            config.pop(name, None)
            config["dflash_config"].pop(name, None)

    return rewrite(change)


def retensor(change):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors), folder / "model.safetensors")

    return spoil


def without(*names):
    return retensor(lambda tensors: {name: tensors[name] for name in tensors if not name.startswith(names)})


def renamed(change):
    return retensor(lambda tensors: {change(name): tensor for name, tensor in tensors.items()})


def with_tensor(name, *shape):
    return retensor(lambda tensors: {**tensors, name: torch.zeros(shape, dtype=torch.bfloat16)})


def cast(name, dtype):
    return retensor(lambda tensors: {n: t.to(dtype) if n.startswith(name) else t for n, t in tensors.items()})


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


HEAD_FIELDS = ("projector_type", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim")
FAULTS = {
    "SpecForge's class": (set_fields(architectures=["DominoDraftModel"]), "architectures", "error"),
    "no class": (remove_fields("architectures"), "architectures", "error"),
    "no model type": (remove_fields("model_type"), "model_type", "error"),
    "another activation": (set_fields(hidden_act="gelu"), "hidden_act", "error"),
    "prefix of 0": (set_fields(pure_draft_prefix_len=0), "pure_draft_prefix_len", "error"),
    "prefix not given": (remove_fields("pure_draft_prefix_len"), "pure_draft_prefix_len", "error"),
    "labels not given": (remove_fields("shift_label"), "shift_label", "error"),
    "labels as a number": (set_fields(shift_label=1), "config.json", "error"),
    "no width of the state": (remove_fields("gru_hidden_dim"), "config.json", "error"),
    "two widths": (rewrite(lambda config: config.update(emb_dim=11)), "config.json", "error"),
    "no layers of the target": (remove_fields("target_layer_ids"), "config.json", "error"),
    "a block of the anchor alone": (set_fields(block_size=1), "config.json", "error"),
    "no block size": (remove_fields("block_size"), "block_size", "warning"),
    "no depth": (remove_fields("num_target_layers"), "num_target_layers", "error"),
    "features of the last layer": (set_fields(target_layer_ids=[0, 1, 3]), "target_layer_ids", "warning"),
    "NeMo's window": (
        set_fields(layer_types=["sliding_attention"] * 2, sliding_window=5, sliding_window_rule="symmetric"),
        "sliding_window_rule",
        "error",
    ),
    "a backbone missing": (without("fc."), "weights", "error"),
    "a head missing": (without("prefix_gru.", "embed_proj."), "weights", "error"),
    "a head missing in part": (without("embed_proj.2."), "weights", "error"),
    "encoder names": (renamed(lambda name: name.replace("fc.", "encoder.fc.")), "weights", "error"),
    "an embedding of its own": (with_tensor("embed_tokens.weight", 96, 32), "weights", "warning"),
    "a vocabulary of another size": (set_fields(vocab_size=97), "embed_proj.2.weight", "error"),
    "float32": (cast("", torch.float32), "dtype", "error"),
    "float32 in part": (cast("prefix_gru.", torch.float32), "dtype", "error"),
    "a file cut off": (cut_off, "weights", "error"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights", "error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(saved, fault):
    spoil, field, severity = FAULTS[fault]
    spoil(saved)
    (finding,) = check_serving(saved)
    assert (finding.field, finding.severity) == (field, severity)
    assert str(finding).startswith(f"`{field}` is ") and finding.rule and finding.remedy


@pytest.mark.parametrize(
    ("options", "spoil", "field", "severity"),
    [
        ({"shift_label": True}, set_fields(), "shift_label", "error"),
        ({}, cast("", torch.float32), "dtype", "warning"),
        ({}, with_tensor("prefix_gru.weight_ih_l0", 36, 32), "weights", "error"),
    ],
    ids=["shifted labels", "float32", "a head that is not announced"],
)
def test_a_fault_of_a_draft_without_a_head_is_found(target, tmp_path, options, spoil, field, severity):
    folder = save_tiny(target, tmp_path / "draft", head=False, **{"shift_label": False, **options})
    spoil(folder)
    (finding,) = check_serving(folder)
    assert (finding.field, finding.severity) == (field, severity)


def test_names_with_the_prefix_that_sglang_takes_off_are_no_fault(saved):
    renamed(lambda name: f"model.{name}")(saved)
    assert check_serving(saved) == []


def test_errors_come_first_and_all_are_listed(saved):
    set_fields(target_layer_ids=[0, 1, 3], pure_draft_prefix_len=0)(saved)
    cast("", torch.float32)(saved)
    found = [(finding.field, finding.severity) for finding in check_serving(saved)]
    assert found == [("pure_draft_prefix_len", "error"), ("dtype", "error"), ("target_layer_ids", "warning")]


@pytest.mark.parametrize(
    ("changes", "fields", "severity"),
    [
        ({"vocab_size": 97}, ["vocab_size"], "error"),
        ({"vocab_size": 95}, ["vocab_size", "mask_token_id"], "error"),
        ({"hidden_size": 64}, ["hidden_size"], "error"),
        ({"num_hidden_layers": 5}, ["num_target_layers"], "error"),
        ({"max_position_embeddings": 2048}, ["max_position_embeddings"], "warning"),
        ({"max_position_embeddings": 512}, [], None),
    ],
    ids=str,
)
def test_a_draft_of_another_target_is_found(target, saved, tmp_path, changes, fields, severity):
    config = Qwen3Config(**{**target.config.to_dict(), "layer_types": None, **changes})
    config.save_pretrained(tmp_path / "other")
    findings = check_serving(saved, tmp_path / "other")
    assert [finding.field for finding in findings] == fields
    assert {finding.severity for finding in findings} <= {severity}


def test_a_target_without_a_head_s_demands_may_have_another_vocabulary(target, tmp_path):
    folder = save_tiny(target, tmp_path / "draft", head=False, shift_label=False)
    Qwen3Config(**{**target.config.to_dict(), "vocab_size": 128}).save_pretrained(tmp_path / "padded")
    assert check_serving(folder, tmp_path / "padded") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "vllm"}, r"'vllm' is not known.*sglang"),
        ({"folder": "./nowhere"}, "'./nowhere' is no folder"),
        ({"target": "./nowhere"}, "target './nowhere'"),
    ],
    ids=["engine", "draft", "target"],
)
def test_what_cannot_be_judged_is_named(saved, arguments, message):
    with pytest.raises(ValueError, match=message):
        check_serving(**{"folder": saved, **arguments})


# The command


def options_of(command):
    words = command[command.index("sglang.launch_server") + 1 :]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_options_reach_the_command(saved):
    options = options_of(launch_command(saved, "./a target", 4, 0, "triton", 1000))
    assert options == {
        "--model-path": "./a target",
        "--dtype": "bfloat16",
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": str(saved),
        "--speculative-dflash-block-size": "4",
        "--speculative-domino-candidate-pool-size": "0",
        "--attention-backend": "triton",
        "--context-length": "1000",
    }


def test_a_draft_without_a_head_gets_no_candidate_pool(target, tmp_path):
    folder = save_tiny(target, tmp_path / "draft", head=False, shift_label=False)
    assert "--speculative-domino-candidate-pool-size" not in launch_command(folder)
    with pytest.raises(ValueError, match=r"candidate_pool is 5.*no head"):
        launch_command(folder, candidate_pool=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size is 1.*2 to 6"),
        ({"block_size": 7}, "block_size is 7.*2 to 6"),
        ({"candidate_pool": -1}, "candidate_pool is -1"),
        ({"attention_backend": "torch_native"}, "torch_native.*flashinfer"),
        ({"engine": "tgi"}, "'tgi' is not known"),
    ],
    ids=str,
)
def test_an_option_that_does_not_fit_is_refused(saved, options, message):
    with pytest.raises(ValueError, match=message):
        launch_command(saved, **options)


def run(*arguments):
    parser = argparse.ArgumentParser()
    sglang.add_check_serving_arguments(parser)
    return sglang.run_check_serving(parser.parse_args([str(argument) for argument in arguments]))


def test_a_good_folder_prints_the_command_and_exits_with_0(saved, tmp_path, capsys):
    assert run(saved, "--target", tmp_path / "target", "--block-size", "5") == 0
    verdict, command = capsys.readouterr().out.splitlines()
    assert verdict == f"sglang will serve {saved}:"
    assert shlex.split(command) == launch_command(saved, str(tmp_path / "target"), 5)


def test_a_short_draft_is_served_with_a_limit(target, saved, tmp_path, capsys):
    Qwen3Config(**{**target.config.to_dict(), "max_position_embeddings": 4096}).save_pretrained(tmp_path / "long")
    assert run(saved, "--target", tmp_path / "long") == 0
    warning, _, command = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: `max_position_embeddings` is 1024: ")
    assert command.endswith("--context-length 1024")


def test_a_bad_folder_prints_every_finding_no_command_and_exits_with_1(saved, capsys):
    set_fields(pure_draft_prefix_len=0)(saved)
    assert run(saved) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("error: `pure_draft_prefix_len` is 0: ")
    assert lines[1:] == [f"sglang will not serve {saved}"]


@pytest.mark.parametrize("good", [True, False])
def test_json_for_scripts(saved, capsys, good):
    if not good:
        cast("", torch.float32)(saved)
    assert run(saved, "--json") == int(not good)
    document = json.loads(capsys.readouterr().out)
    assert document["served"] is good
    if good:
        assert document == {"served": True, "findings": [], "command": launch_command(saved)}
    else:
        assert document["command"] is None
        (finding,) = document["findings"]
        assert set(finding) == {"field", "value", "rule", "remedy", "severity"}
        assert finding["value"] == {"F32": len(load_file(saved / "model.safetensors"))}
