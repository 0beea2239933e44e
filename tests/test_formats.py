# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Other projects' layouts: out and back without a bit lost, and refused where a reader would compute something else."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from helpers import MASK_TOKEN, load_fixture, make_draft, make_target
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, GenerationConfig

from domino_spec.checkpoints import default_draft_path
from domino_spec.configuration_domino import AUTO_MAP
from domino_spec.modeling_domino import DominoDraftModel
from domino_spec.serving import formats
from domino_spec.serving.formats import LAYOUTS, export_draft, import_draft, load_draft

# No reader but ours knows what is taken from the last layer, which the drafts of `helpers` read.
LAYERS = {"target_layer_ids": [0, 1, 2]}
DRAFTS = {
    "head": {},
    "head, unshifted": {"shift_label": False},
    "no head": {"head": False, "shift_label": False},
    "biases": {"attention_bias": True},
    "sliding": {"sliding_window": 5},
    "scaled rotation": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "rope_theta": 5e5,
        }
    },
}
FORMATS = {name: [f for f in LAYOUTS if f != "dflash" or name == "no head"] for name in DRAFTS}


def tiny(target, dtype=torch.bfloat16, **options):
    return make_draft(target, dtype=dtype, **{**LAYERS, **options})


def files_of(folder: Path):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path):
    return json.loads((folder / "config.json").read_text())


def write_folder(folder: Path, tensors, config, shards=1):
    """A draft's folder as someone else might write it, with code that must not run."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("dflash.py", "domino.py", "modeling_dflash.py", "utils.py"):
        (folder / name).write_text(f"open({str(folder / 'it ran')!r}, 'w').close()\nraise RuntimeError('it ran')\n")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index = {}
    for shard in range(shards):
        part = dict(sorted(tensors.items())[shard::shards])
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def same_bytes(left, right):
    assert set(left) == set(right)
    for name in right:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)), name


# Out and back


@pytest.mark.parametrize(("draft", "format"), [(d, f) for d, names in FORMATS.items() for f in names])
def test_a_round_trip_gives_the_same_folder_to_the_byte(target, tmp_path, draft, format):
    tiny(target, **DRAFTS[draft]).save_pretrained(tmp_path / "ours")
    notes = export_draft(tmp_path / "ours", tmp_path / "theirs", format)
    assert notes == [] and import_draft(tmp_path / "theirs", tmp_path / "back") == []
    assert files_of(tmp_path / "back") == files_of(tmp_path / "ours")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_dtypes_survive_as_they_are(target, tmp_path, dtype):
    draft = tiny(target, dtype=dtype)
    export_draft(draft, tmp_path / "theirs", "specforge")
    import_draft(tmp_path / "theirs", tmp_path / "back")
    same_bytes(load_file(tmp_path / "back" / "model.safetensors"), draft.state_dict())


def test_the_embedded_draft_goes_to_sglang_and_back(tmp_path):
    assert export_draft("default", tmp_path / "sglang", "sglang") == []
    import_draft(tmp_path / "sglang", tmp_path / "back")
    folders = (default_draft_path(), tmp_path / "back")
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    same_bytes(first, second)
    first, second = ({**config_of(folder), "transformers_version": None} for folder in folders)
    assert first == second


def test_a_draft_that_came_as_remote_code_is_exported_too(target, tmp_path):
    draft = tiny(target)
    draft.save_pretrained(tmp_path / "ours")
    remote = AutoModel.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    assert not isinstance(remote, DominoDraftModel)
    export_draft(remote, tmp_path / "theirs", "specforge")
    same_bytes(load_file(tmp_path / "theirs" / "model.safetensors"), draft.state_dict())


# What the readers find: field names as in the files that `LAYOUTS` cites


@pytest.mark.parametrize("format", LAYOUTS)
def test_only_our_own_folder_holds_code(target, tmp_path, format):
    export_draft(tiny(target, head=False, shift_label=False), tmp_path / "out", format)
    code = {path.name for path in (tmp_path / "out").rglob("*.py")}
    assert bool(code) == (format == "hub")


@pytest.mark.parametrize(
    ("format", "head", "architecture", "auto_map"),
    [
        ("hub", True, "DFlashDraftModel", AUTO_MAP),
        ("sglang", True, "DFlashDraftModel", None),
        ("specforge", True, "DominoDraftModel", {"AutoModel": "domino.DominoDraftModel"}),
        ("specforge", False, "DFlashDraftModel", {"AutoModel": "dflash.DFlashDraftModel"}),
        ("dflash", False, "DFlashDraftModel", None),
    ],
)
def test_every_reader_finds_its_class(target, tmp_path, format, head, architecture, auto_map):
    export_draft(tiny(target, head=head, shift_label=head), tmp_path / "out", format)
    config = config_of(tmp_path / "out")
    assert config["architectures"] == [architecture] and config.get("auto_map") == auto_map
    assert config["model_type"] == "qwen3" and config["block_size"] == 6 and config["num_target_layers"] == 4


def test_specforge_finds_the_head_s_fields_in_the_nested_section(target, tmp_path):
    export_draft(tiny(target), tmp_path / "out", "specforge")
    config = config_of(tmp_path / "out")
    assert config["dflash_config"] == {
        **LAYERS,
        "mask_token_id": MASK_TOKEN,
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": True,
        "gru_hidden_dim": 12,
        "emb_dim": 10,
    }
    assert config["emb_dim"] == 10
    assert not {"mask_token_id", "target_layer_ids", "projector_type", "shift_label", "gru_hidden_dim"} & set(config)


def test_dflash_readers_find_two_fields_and_no_trace_of_a_head(target, tmp_path):
    draft = tiny(target, shift_label=False)
    notes = export_draft(draft, tmp_path / "out", "dflash", drop_head=True)
    assert len(notes) == 1 and "head was left out" in notes[0]
    config = config_of(tmp_path / "out")
    assert config["dflash_config"] == {**LAYERS, "mask_token_id": MASK_TOKEN}
    assert not {"projector_type", "shift_label", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"} & set(config)
    state = draft.state_dict()
    backbone = {name: state[name] for name in state if not name.startswith(("prefix_gru.", "embed_proj."))}
    same_bytes(load_file(tmp_path / "out" / "model.safetensors"), backbone)
    assert draft.config.has_head and set(draft.state_dict()) > set(backbone), "the draft itself was changed"
    assert not load_draft(tmp_path / "out").config.has_head


# Foreign folders


def zlab_config(draft):
    """The keys of z-lab/Qwen3-8B-DFlash-b16, with the sizes of a tiny draft."""
    raw = draft.config.to_dict()
    copied = (
        "attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size initializer_range "
        "intermediate_size layer_types max_position_embeddings max_window_layers num_attention_heads num_hidden_layers "
        "num_key_value_heads num_target_layers rms_norm_eps sliding_window tie_word_embeddings use_cache "
        "use_sliding_window vocab_size block_size"
    )
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": {"mask_token_id": MASK_TOKEN, **LAYERS},
        "dtype": "bfloat16",
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000,
        "transformers_version": "4.57.1",
        **{name: raw[name] for name in copied.split()},
    }


NAMES = {
    "as published": lambda name: name,
    "prefixed by model.": lambda name: f"model.{name}",
    "encoder names": lambda name: (
        {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}.get(
            name.removesuffix(".weight"), name.removesuffix(".weight")
        )
        + ".weight"
    ),
}


@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "sharded"])
@pytest.mark.parametrize("names", NAMES)
def test_a_dflash_folder_is_read_and_its_code_does_not_run(target, tmp_path, names, shards):
    draft = tiny(target, head=False, shift_label=False)
    tensors = draft.state_dict()
    renamed = {NAMES[names](name): tensor for name, tensor in tensors.items()}
    folder = write_folder(tmp_path / "zlab", renamed, zlab_config(draft), shards)
    assert import_draft(folder, tmp_path / "ours") == []
    assert not (folder / "it ran").exists()
    same_bytes(load_file(tmp_path / "ours" / "model.safetensors"), tensors)
    loaded = DominoDraftModel.from_pretrained(tmp_path / "ours")
    assert not loaded.config.has_head and loaded.config.shift_label is False
    assert loaded.config.target_layer_ids == LAYERS["target_layer_ids"] and loaded.config.block_size == 6
    assert loaded.config.rope_parameters["rope_theta"] == 1000000


@pytest.mark.parametrize("prefix", ["", "logit_head."], ids=["today's names", "early names of the head"])
def test_a_specforge_folder_is_read_and_its_code_does_not_run(tmp_path, prefix):
    path = load_fixture("shift1-prefix1").draft_path
    tensors = load_file(path / "model.safetensors")
    renamed = {prefix + n if n.startswith(("prefix_gru.", "embed_proj.")) else n: t for n, t in tensors.items()}
    folder = write_folder(tmp_path / "theirs", renamed, config_of(path))
    import_draft(folder, tmp_path / "ours")
    assert not (folder / "it ran").exists()
    same_bytes(load_file(tmp_path / "ours" / "model.safetensors"), tensors)
    written, back = config_of(path), config_of(tmp_path / "ours")
    assert {name: back["dflash_config"][name] for name in written["dflash_config"]} == written["dflash_config"]


@pytest.mark.parametrize(
    ("section", "fields", "expected"),
    [
        ("dflash_config", {"sample_from_anchor": True}, {"shift_label": True}),
        ("dflash_config", {"sample_from_anchor": False}, {"shift_label": False}),
        (None, {"query_zero_predicts_next": True}, {"shift_label": True}),
        ("dflash_config", {"projector_type": "dflash"}, {"projector_type": None}),
        ("dflash_config", {"num_target_layers": 4}, {"num_target_layers": 4}),
    ],
    ids=str,
)
def test_other_words_for_the_same_thing_are_understood(target, tmp_path, section, fields, expected):
    draft = tiny(target, head=False, shift_label=False)
    config = zlab_config(draft)
    (config if section is None else config[section]).update(fields)
    loaded = load_draft(write_folder(tmp_path / "theirs", draft.state_dict(), config))
    assert {name: getattr(loaded.config, name) for name in expected} == expected


def test_a_separate_section_for_the_head_is_understood(tmp_path):
    path = load_fixture("shift1-prefix1").draft_path
    config = config_of(path)
    head = {name: config["dflash_config"].pop(name) for name in ("gru_hidden_dim", "emb_dim", "shift_label")}
    folder = write_folder(tmp_path / "a", load_file(path / "model.safetensors"), {**config, "domino_config": head})
    assert load_draft(folder).config.to_dict()["dflash_config"] == {**config["dflash_config"], **head}


def change(**fields):
    return lambda tensors, config: config.update(fields)


def nest(**fields):
    return lambda tensors, config: config["dflash_config"].update(fields)


def mix_dtypes(tensors, config):
    tensors["norm.weight"] = tensors["norm.weight"].float()


def quantise(tensors, config):
    for name in tensors:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def add_a_tensor(tensors, config):
    tensors["candidate_selector.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)


def lose_a_tensor(tensors, config):
    del tensors["fc.weight"]


def add_a_head(tensors, config):
    tensors["prefix_gru.weight_ih_l0"] = torch.zeros(2, 2, dtype=torch.bfloat16)


NO_DRAFTS = {
    "weights of two dtypes": (mix_dtypes, r"torch\.bfloat16, torch\.float32.*which dtype"),
    "quantised weights": (quantise, "F8_E4M3.*before they were quantised"),
    "a tensor that we do not compute": (add_a_tensor, r"candidate_selector\.weight.*another kind"),
    "a head that the config does not announce": (add_a_head, r"prefix_gru.*lacks `projector_type`"),
    "a tensor too few": (lose_a_tensor, r"fc\.weight"),
    "sizes that differ": (change(hidden_size=16), r"fc\.weight.*\[32, 96\].*\[16, 48\]"),
    "another architecture": (change(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel.*DominoDraftModel"),
    "a field that we do not compute": (nest(conv_kernel_size=2), "conv_kernel_size.*do not know"),
    "an unknown head": (nest(projector_type="dspark"), "projector_type.*dspark"),
    "no mask token": (nest(mask_token_id=None), "mask_token_id"),
    "two block sizes": (nest(block_size=8), "block_size.*6.*8"),
    "two depths": (nest(num_target_layers=5), "num_target_layers.* 4 .*5"),
    "two readings of offset 0": (
        nest(shift_label=False, sample_from_anchor=True),
        "sample_from_anchor.*True.*shift_label.*False",
    ),
    "features of the last layer": (nest(target_layer_ids=[0, 1, 3]), r"\[0, 1, 3\].*norm.*context_features"),
}


@pytest.mark.parametrize("case", NO_DRAFTS)
def test_what_we_would_not_compute_as_trained_is_not_imported(target, tmp_path, case):
    spoil, message = NO_DRAFTS[case]
    draft = tiny(target, head=False, shift_label=False)
    tensors, config = dict(draft.state_dict()), zlab_config(draft)
    spoil(tensors, config)
    folder = write_folder(tmp_path / "theirs", tensors, config)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        import_draft(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_config_that_states_what_it_takes_from_the_last_layer_is_read(target, tmp_path):
    draft = tiny(target, head=False, shift_label=False, target_layer_ids=[0, 1, 3])
    config = {**zlab_config(draft), "context_features": "layer_output"}
    config["dflash_config"]["target_layer_ids"] = [0, 1, 3]
    loaded = load_draft(write_folder(tmp_path / "theirs", draft.state_dict(), config))
    assert loaded.config.target_layer_ids == [0, 1, 3]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json"),
        ({"config.json": "[]"}, "no JSON object"),
        ({"config.json": "{"}, "config.json"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "target_layer_ids"),
    ],
    ids=["empty", "a list", "cut off", "nothing in it"],
)
def test_a_folder_without_a_draft_is_named(tmp_path, files, message):
    (tmp_path / "theirs").mkdir()
    for name, text in files.items():
        (tmp_path / "theirs" / name).write_text(text)
    with pytest.raises(ValueError, match=f"theirs.*{message}"):
        load_draft(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["./nowhere", "someone/something"])
def test_a_source_that_cannot_be_had_is_named(name):
    with pytest.raises(ValueError, match=f"{name}.*no folder"):
        load_draft(name)


# Refused exports

SLIDING = {"sliding_window": 5, "sliding_window_rule": "symmetric"}
PLAIN = {"head": False, "shift_label": False}
REFUSED = {
    "sglang, prefix of 0": ("sglang", {"pure_draft_prefix_len": 0}, {}, "pure_draft_prefix_len.* 0"),
    "sglang, float32": ("sglang", {"dtype": torch.float32}, {}, "dtype.*F32.*bfloat16"),
    "sglang, no head but shifted": ("sglang", {"head": False}, {}, "shift_label"),
    "sglang, another window": ("sglang", SLIDING, {}, "sliding_window_rule.*symmetric"),
    "dflash, head": ("dflash", {"shift_label": False}, {}, "projector_type.*domino.*--drop-head"),
    "dflash, head that hides a shifted backbone": ("dflash", {}, {}, "projector_type.*shift_label.*one off"),
    "dflash, shifted backbone": ("dflash", {}, {"drop_head": True}, "shift_label.*one off"),
    "dflash, another window": ("dflash", {**PLAIN, **SLIDING}, {}, "sliding_window_rule"),
    "dflash, last layer": ("dflash", {**PLAIN, "target_layer_ids": [1, 3]}, {}, r"target_layer_ids.*\[1, 3\].*norm"),
    "specforge, shifted backbone": ("specforge", {"head": False}, {}, "shift_label"),
    "specforge, another window": ("specforge", SLIDING, {}, "sliding_window_rule"),
    "specforge, last layer": ("specforge", {"target_layer_ids": [3]}, {}, "target_layer_ids"),
    "unknown format": ("gguf", {}, {}, r"gguf.*\['hub', 'sglang', 'specforge', 'dflash'\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_reader_would_compute_otherwise_is_refused_and_nothing_written(target, tmp_path, case):
    format, options, how, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        export_draft(tiny(target, **options), tmp_path / "out", format, **how)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", LAYOUTS)
@pytest.mark.parametrize(("field", "value"), [("vocab_size", 97), ("hidden_size", 64), ("num_hidden_layers", 5)])
def test_a_target_of_other_sizes_is_refused(target, tmp_path, format, field, value):
    config = target.config.__class__(**{**target.config.to_dict(), "layer_types": None, field: value})
    config.save_pretrained(tmp_path / "target")
    head = format != "dflash"
    options = {} if head else PLAIN
    if (field, head) == ("vocab_size", False):  # without a head nothing is as large as the vocabulary
        export_draft(tiny(target, **options), tmp_path / "out", format, target=tmp_path / "target")
        return
    name = "num_target_layers" if field == "num_hidden_layers" else field
    with pytest.raises(ValueError, match=rf"`{name}` is \d+.*{value}"):
        export_draft(tiny(target, **options), tmp_path / "out", format, target=tmp_path / "target")
    target.config.save_pretrained(tmp_path / "right")
    assert export_draft(tiny(target, **options), tmp_path / "out", format, target=tmp_path / "right") == []


def test_a_folder_that_is_not_empty_is_left_alone(target, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="empty"):
            export_draft(tiny(target), place, "hub")
    assert files_of(tmp_path) == {"notes.txt": b"mine"}
    (tmp_path / "empty").mkdir()
    export_draft(tiny(target), tmp_path / "empty", "hub")


def test_a_draft_with_an_adapter_is_refused_until_it_is_merged(target, tmp_path):
    adapted = get_peft_model(tiny(target), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        export_draft(adapted, tmp_path / "out", "sglang")
    export_draft(adapted.merge_and_unload(), tmp_path / "out", "sglang")


# Dtypes


def test_a_conversion_is_asked_for_and_said(target, tmp_path):
    draft = tiny(target, dtype=torch.float32)
    draft.save_pretrained(tmp_path / "ours")
    for number, source in enumerate((draft, tmp_path / "ours")):
        notes = export_draft(source, tmp_path / f"{number}", "sglang", dtype=torch.bfloat16)
        assert notes == ["The weights were converted from torch.float32 to torch.bfloat16."]
        expected = {name: tensor.bfloat16() for name, tensor in draft.state_dict().items()}
        same_bytes(load_file(tmp_path / f"{number}" / "model.safetensors"), expected)
        assert config_of(tmp_path / f"{number}")["dtype"] == "bfloat16"
    assert draft.dtype == torch.float32, "the draft itself was changed"
    assert export_draft(draft, tmp_path / "same", "hub", dtype=torch.float32) == []


def test_weights_of_two_dtypes_are_converted_when_asked(target, tmp_path):
    draft = tiny(target, **PLAIN)
    tensors = dict(draft.state_dict())
    mix_dtypes(tensors, None)
    folder = write_folder(tmp_path / "theirs", tensors, zlab_config(draft))
    notes = import_draft(folder, tmp_path / "ours", dtype=torch.bfloat16)
    assert notes == ["The weights were converted from torch.bfloat16, torch.float32 to torch.bfloat16."]
    same_bytes(load_file(tmp_path / "ours" / "model.safetensors"), draft.state_dict())


def test_quantised_weights_are_not_converted(target, tmp_path):
    draft = tiny(target, **PLAIN)
    tensors = dict(draft.state_dict())
    quantise(tensors, None)
    folder = write_folder(tmp_path / "theirs", tensors, zlab_config(draft))
    with pytest.raises(ValueError, match="quantised"):
        import_draft(folder, tmp_path / "ours", dtype=torch.bfloat16)


def test_a_dtype_in_the_config_that_is_not_the_file_s_converts_nothing(target, tmp_path):
    draft = tiny(target, **PLAIN)
    folder = write_folder(tmp_path / "theirs", draft.state_dict(), {**zlab_config(draft), "dtype": "float32"})
    import_draft(folder, tmp_path / "ours")
    same_bytes(load_file(tmp_path / "ours" / "model.safetensors"), draft.state_dict())
    assert config_of(tmp_path / "ours")["dtype"] == "bfloat16"


# Commands


def run(command, *arguments):
    parser = argparse.ArgumentParser()
    getattr(formats, f"add_{command}_arguments")(parser)
    return getattr(formats, f"run_{command}")(parser.parse_args([str(argument) for argument in arguments]))


def test_the_commands_say_what_was_changed_and_where_it_is(target, tmp_path, capsys):
    tiny(target, dtype=torch.float32, shift_label=False).save_pretrained(tmp_path / "ours")
    target.config.save_pretrained(tmp_path / "target")
    how = ("--format", "dflash", "--drop-head", "--dtype", "bfloat16", "--target", tmp_path / "target")
    assert run("export", tmp_path / "ours", tmp_path / "dflash", *how) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "float32 to torch.bfloat16" in lines[0] and "head was left out" in lines[1]
    assert lines[2:] == [f"The draft is in {tmp_path / 'dflash'}"]
    assert run("import", tmp_path / "dflash", tmp_path / "back") == 0
    assert capsys.readouterr().out == f"The draft is in {tmp_path / 'back'}\n"
    assert load_draft(tmp_path / "back").dtype == torch.bfloat16


def test_generation_defaults_go_along_or_are_said_to_stay_behind(tmp_path):
    draft = make_draft(make_target("qwen3", dtype=torch.float32), target_layer_ids=[0, 2])
    draft.generation_config = GenerationConfig(num_assistant_tokens=2)
    assert export_draft(draft, tmp_path / "hub", "hub") == []
    assert load_draft(tmp_path / "hub").generation_config.num_assistant_tokens == 2
    notes = export_draft(draft, tmp_path / "specforge", "specforge")
    assert notes == ["The draft's generation defaults were left out: this reader has none."]
    assert not (tmp_path / "specforge" / "generation_config.json").exists()


def test_an_export_that_is_cut_off_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(formats, "read_config", interrupt)
    draft = make_draft(make_target("qwen3", dtype=torch.float32), target_layer_ids=[0, 2])
    with pytest.raises(KeyboardInterrupt):
        export_draft(draft, tmp_path / "half", "specforge")
    assert list(tmp_path.iterdir()) == []
