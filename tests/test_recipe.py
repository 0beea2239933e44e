# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""`domino-spec train` on a tiny target: from a recipe to a draft, an adapter, or an error that names what is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import make_draft, make_target
from peft import PeftModel
from safetensors.torch import load_file
from test_training_data import CHATML, TALK, tokenizer_with

from domino_spec import DominoDraftModel, cli
from domino_spec.training.initialization import find_mask_token, spread_layer_ids
from domino_spec.training.recipe import parse_recipe

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with its tokenizer, and conversations."""
    folder = tmp_path_factory.mktemp("recipe")
    tokenizer = tokenizer_with(CHATML)
    tokenizer.add_tokens(["<spare>"])
    tokenizer.save_pretrained(folder / "target")
    target = make_target("qwen3", dtype=torch.float32, vocab_size=len(tokenizer))
    target.save_pretrained(folder / "target")
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, *TALK[1:2]]} for i in range(9)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return folder


def write_recipe(folder, name="recipe.yaml", **changes):
    recipe = {
        "target": str(folder / "target"),
        "target_dtype": "float32",
        "train_data": [str(folder / "chat.jsonl")],
        "eval_every": 4,
        "max_length": 60,
        "num_layers": 2,
        "target_layer_ids": [0, 2],
        "block_size": 4,
        "mask_token": "<spare>",
        "gru_hidden_dim": 12,
        "emb_dim": 10,
        "output_dir": str(folder / "draft"),
        "max_steps": 2,
        "num_anchors": 4,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    path = folder / name
    path.write_text(yaml.safe_dump({**recipe, **changes}))
    return str(path)


def train(folder, *arguments, **changes) -> int:
    return cli.main(["train", write_recipe(folder, **changes), *arguments])


class TestTraining:
    def test_a_recipe_gives_a_draft_that_generates_and_numbers_of_the_rows_held_out(self, folder, tmp_path):
        assert train(folder, "--output_dir", str(tmp_path), features_dir=str(tmp_path / "features")) == 0
        draft = DominoDraftModel.from_pretrained(tmp_path)
        target = make_target("qwen3", dtype=torch.float32, vocab_size=draft.config.vocab_size)
        assert (draft.config.block_size, draft.config.target_layer_ids) == (4, [0, 2])
        assert draft.config.mask_token_id == draft.config.vocab_size - 1
        prompt = torch.tensor([[1, 2, 3]])
        ours = target.generate(prompt, max_new_tokens=9, assistant_model=draft)
        assert ours.tolist() == target.generate(prompt, max_new_tokens=9).tolist()
        results = json.loads((tmp_path / "eval_results.json").read_text())
        assert results["eval_chat_accept_len"] >= 1 and "eval_chat_base_accept_len" in results
        assert sorted(p.name for p in (tmp_path / "features" / "chat").iterdir()) == ["eval", "train"]
        record = json.loads((tmp_path / "training.json").read_text())
        # Nine rows, of which each fourth is held out; their answer is ten bytes and the token that ends a turn.
        assert record["data"] == [{"source": "chat.jsonl", "rows": 6, "supervised_tokens": 6 * len("Fine, you?_")}]
        assert record["command"].startswith("domino-spec train ") and record["steps"] == 2

    def test_what_is_pushed_is_a_draft_with_its_card_and_its_record(self, folder, tmp_path, monkeypatch):
        pushed = []

        class Api:
            def upload_folder(self, repo_id, folder_path, **kwargs):
                pushed.append((repo_id, {path.name for path in Path(folder_path).iterdir()}))

        monkeypatch.setattr("transformers.trainer.hf_api", Api)
        monkeypatch.setattr(
            "transformers.trainer.Trainer.init_hf_repo",
            lambda self, token=None, private=None: setattr(self, "hub_model_id", "me/draft"),
        )
        assert train(folder, "--output_dir", str(tmp_path), push_to_hub=True) == 0
        repository, names = pushed[-1]
        assert repository == "me/draft"
        assert {"README.md", "training.json", "model.safetensors", "modeling_domino.py", "generation.py"} <= names
        card = (tmp_path / "README.md").read_text()
        assert "2 steps from `target`" in card and "- speculative-decoding" in card

    def test_labels_may_be_unshifted_and_the_draft_attend_otherwise(self, folder, tmp_path):
        assert train(folder, "--output_dir", str(tmp_path), shift_label=False, draft_attention="eager") == 0
        draft = DominoDraftModel.from_pretrained(tmp_path)
        assert draft.config.shift_label is False
        # How it was trained is not how it must be run.
        assert draft.config._attn_implementation == "sdpa"

    def test_features_on_the_fly_give_the_same_draft(self, folder, tmp_path):
        for name, features in (("cached", str(tmp_path / "features")), ("online", None)):
            assert train(folder, "--output_dir", str(tmp_path / name), features_dir=features) == 0
        cached, online = (load_file(tmp_path / name / "model.safetensors") for name in ("cached", "online"))
        for name, tensor in cached.items():
            torch.testing.assert_close(online[name], tensor, rtol=1e-3, atol=1e-3)

    def test_the_command_line_has_the_last_word(self, folder):
        target, data, draft, adapter, args = parse_recipe(
            [write_recipe(folder, chat_template_kwargs={"enable_thinking": False}), "--learning_rate", "0.5"]
        )
        assert args.learning_rate == 0.5 and args.max_steps == 2 and args.do_train
        assert json.loads(data.chat_template_kwargs) == {"enable_thinking": False}
        assert (target.target_dtype, draft.block_size, adapter.peft) == ("float32", 4, None)

    def test_a_dflash_draft_gets_a_head_and_keeps_its_base(self, folder, tmp_path):
        target = make_target("qwen3", dtype=torch.float32, vocab_size=len(tokenizer_with(CHATML)) + 1)
        start = make_draft(target, head=False, target_layer_ids=[0, 2])
        start.save_pretrained(tmp_path / "dflash")
        changes = {"start_from": str(tmp_path / "dflash"), "freeze_backbone": True, "pure_draft_prefix_len": 0}
        assert train(folder, "--output_dir", str(tmp_path / "domino"), lambda_base_start=0.0, **changes) == 0
        draft = DominoDraftModel.from_pretrained(tmp_path / "domino")
        assert draft.config.has_head and draft.config.shift_label and draft.config.pure_draft_prefix_len == 0
        for name, tensor in start.state_dict().items():
            assert torch.equal(draft.state_dict()[name], tensor), name
        assert draft.embed_proj[2].weight.abs().sum() > 0

    def test_a_draft_is_trained_further_or_given_a_new_head(self, folder, tmp_path):
        assert train(folder, "--output_dir", str(tmp_path / "first")) == 0
        first = load_file(tmp_path / "first" / "model.safetensors")
        for name, changes in (("on", {}), ("new", {"new_head": True}), ("scaled", {"head_scale": 0.0})):
            changes = {"start_from": str(tmp_path / "first"), "learning_rate": 0.0, **changes}
            assert train(folder, "--output_dir", str(tmp_path / name), **changes) == 0
            found = load_file(tmp_path / name / "model.safetensors")
            assert torch.equal(found["fc.weight"], first["fc.weight"])
            head_is_old = torch.equal(found["embed_proj.2.weight"], first["embed_proj.2.weight"])
            assert head_is_old == (name == "on")

    def test_an_adapter_alone_is_trained_and_saved(self, folder, tmp_path):
        assert train(folder, "--output_dir", str(tmp_path / "draft")) == 0
        before = (tmp_path / "draft" / "model.safetensors").read_bytes()
        arguments = ("--start_from", str(tmp_path / "draft"), "--peft", "head", "--lora_r", "4")
        assert train(folder, "--output_dir", str(tmp_path / "adapter"), *arguments) == 0
        adapter = PeftModel.from_pretrained(DominoDraftModel.from_pretrained(tmp_path / "draft"), tmp_path / "adapter")
        assert adapter.peft_config["default"].r == 4
        assert not (tmp_path / "adapter" / "model.safetensors").exists()
        assert (tmp_path / "draft" / "model.safetensors").read_bytes() == before

    def test_a_run_goes_on_from_its_last_checkpoint_or_from_one_by_name(self, folder, tmp_path):
        steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
        assert train(folder, "--output_dir", str(tmp_path / "whole"), **steps) == 0
        whole = load_file(tmp_path / "whole" / "model.safetensors")
        for asked in ("true", "false", str(tmp_path / "whole" / "checkpoint-2")):
            assert train(folder, "--output_dir", str(tmp_path / "whole"), **steps, resume_from_checkpoint=asked) == 0
            found = load_file(tmp_path / "whole" / "model.safetensors")
            assert all(torch.equal(found[name], tensor) for name, tensor in whole.items()), asked

    def test_a_draft_can_be_measured_without_training(self, folder, tmp_path):
        assert train(folder, "--output_dir", str(tmp_path / "draft")) == 0
        trained = json.loads((tmp_path / "draft" / "eval_results.json").read_text())
        arguments = ("--do_train", "false", "--start_from", str(tmp_path / "draft"))
        assert train(folder, "--output_dir", str(tmp_path / "measured"), *arguments) == 0
        measured = json.loads((tmp_path / "measured" / "eval_results.json").read_text())
        assert measured["eval_chat_final_loss"] == pytest.approx(trained["eval_chat_final_loss"], rel=1e-5)


WRONG = {
    "a misspelt name": ({"learning_rat": 1}, "'learning_rat', which is unknown: do you mean 'learning_rate'?"),
    "a word for a number": ({"max_steps": "many"}, "invalid int value: 'many'"),
    "no data": ({"train_data": []}, "`train_data` is empty"),
    "an adapter on nothing": ({"peft": "head"}, "`peft` is 'head', but a new draft has nothing to adapt"),
    "an unknown part": ({"peft": "tail", "start_from": "{draft}"}, "`part` is 'tail': choose one of head, backbone"),
    "a scaled base below an adapter": (
        {"peft": "head", "start_from": "{draft}", "head_scale": 0.5},
        "`head_scale` is 0.5, but an adapter leaves",
    ),
    "two sources of one name": ({"eval_data": ["elsewhere/chat.jsonl"]}, "name 'chat' twice"),
    "nothing to resume": ({"resume_from_checkpoint": "true"}, "holds no checkpoint"),
    "a head that is new anyway": ({"new_head": True}, "`new_head` is set, but"),
    "no mask token": ({"mask_token": None}, "No `mask_token` is given.*<spare>"),
    "a mask token of nowhere": ({"mask_token": "<gone>"}, "'<gone>' is no token of the target.*<spare>"),
    "a missing file": ({"train_data": ["gone.jsonl"]}, "gone.jsonl"),
    "a missing target": ({"target": "./gone"}, "gone"),
    "too many layers": ({"source_layers": [1, 9]}, r"`source_layers` names \[9\], but the target has layers 0..3"),
    "a value out of range": ({"num_anchors": 0}, "`num_anchors` is 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_in_one_line(case, folder, tmp_path, capsys):
    changes, message = WRONG[case]
    if "start_from" in changes:
        target = make_target("qwen3", dtype=torch.float32, vocab_size=len(tokenizer_with(CHATML)) + 1)
        make_draft(target, target_layer_ids=[0, 2]).save_pretrained(tmp_path / "draft")
        changes = {**changes, "start_from": str(tmp_path / "draft")}
    assert train(folder, "--output_dir", str(tmp_path), **changes) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("domino-spec: error: ")
    assert re.search(message, error), error


def test_a_file_that_is_no_recipe_is_named(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="is not a recipe"):
        parse_recipe([str(path)])


@pytest.mark.parametrize("name", ["smollm2-135m.yaml", "qwen3-8b.yaml"])
def test_the_ready_recipes_name_what_exists(name):
    _, data, draft, _, args = parse_recipe([str(RECIPES / name), "--train_data", "chat.jsonl", "--bf16", "false"])
    assert data.train_data == ["chat.jsonl"] and draft.start_from == "target" and args.do_train


def test_layers_are_read_as_dflash_drafts_read_them():
    assert spread_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    for depth in range(1, 40):
        for count in range(1, 8):
            ids = spread_layer_ids(depth, count)
            assert ids == sorted(set(ids)) and 1 <= len(ids) <= count and 0 <= ids[0] and ids[-1] < depth


def test_a_mask_token_may_be_named_by_id_and_defaults_to_the_tokenizers_own():
    tokenizer = tokenizer_with(CHATML)
    assert find_mask_token(tokenizer, "7") == 7
    assert find_mask_token(tokenizer, "<bos>") == tokenizer.convert_tokens_to_ids("<bos>")
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert find_mask_token(tokenizer, None) == tokenizer.mask_token_id


def run_benchmark(name, *arguments) -> str:
    """Run a script of `benchmarks/` in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "benchmarks" / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_script_for_a_gpu_runs_end_to_end_at_tiny_size(folder, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": [f"{i}?"]}) + "\n" for i in range(60)))
    sizes = {"text-seconds": 2, "text-batch": 32, "max-new-tokens": 12, "train-seconds": 2, "train-batch": 4}
    sizes |= {"timing-steps": 1, "num-anchors": 4, "eval-count": 1, "block-size": 4, "gru-hidden-dim": 12}
    sizes |= {"emb-dim": 10, "part-mb": 0.01, "max-length": 80, "mask-token": "<spare>"}
    arguments = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    arguments += ["--target", str(folder / "target"), "--device", "cpu", "--source-layers", "2", "3"]
    arguments += ["--target-layer-ids", "0", "2", "--prompts", str(tmp_path / "prompts.jsonl")]
    arguments += ["--eval-prompts", str(tmp_path / "prompts.jsonl")]
    output = tmp_path / "out"
    run_benchmark("train_default_gpu.py", "--output", str(output), *arguments)
    run_benchmark("train_default_gpu.py", "--join", str(output))
    report = json.loads((output / "report.json").read_text())
    assert report["text"]["supervised_tokens"] > 0 and report["training"]["steps"] >= 1
    assert report["tasks"]["prompts"]["head"] >= 1 and report["curve"]
    draft = DominoDraftModel.from_pretrained(output / "draft")
    assert draft.dtype == torch.bfloat16 and draft.config.block_size == 4


def test_variants_of_the_objective_are_compared_and_not_trained_twice(folder, tmp_path):
    recipe, results = write_recipe(folder, "objective.yaml"), tmp_path / "results.json"
    arguments = [str(recipe), "--work", str(tmp_path), "--steps", "2", "--seeds", "0", "1", "--results", str(results)]
    arguments += ["--variants", "base weight always 0", "D-PACE 0.5", "--learning_rate", "0.01"]
    first = run_benchmark("objective.py", *arguments)
    trained = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/trainer_state.json")}
    assert len(trained) == 4 and all(json.loads(path.read_text())["max_steps"] == 2 for path in trained)
    # What the training logs does not come again; the table does.
    table = run_benchmark("objective.py", *arguments)
    assert first.endswith(table) and "D-PACE 0.5" in table
    assert all(path.stat().st_mtime_ns == made for path, made in trained.items())
    runs = json.loads(results.read_text())["runs"]
    assert [(run["variant"], run["seed"]) for run in runs] == [
        (name, seed) for seed in (0, 1) for name in ("base weight always 0", "D-PACE 0.5")
    ]
    assert all(run["head"] >= 1 and run["base"] >= 1 for run in runs)
