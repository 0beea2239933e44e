# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The Hub: a card that says what is known and no more, an upload that pins what its snippets load."""

import ast
import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from helpers import make_draft, make_target
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import GenerationConfig

from domino_spec import cli
from domino_spec.serving import hub

BASE = "Qwen/Qwen3-8B"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def run_numbers(mean, rate, **more):
    length = {"mean": mean, "histogram": {"1": 20, "2": 10, "4": 10}}
    return {"acceptance_length": length, "tokens_per_second": rate, **more}


def bench_results():
    runs = {
        "plain": {"tokens_per_second": 20.0},
        "domino": run_numbers(2.345, 31.0, ratio=1.55, identical=7),
        "base_only": run_numbers(2.1, 29.0, ratio=1.45),
    }
    found = {"prompts": 8, "runs": runs}
    return {
        "command": "domino-spec bench --prompts gsm8k.jsonl",
        "settings": {"dtype": "float32", "max_new_tokens": 128},
        "machine": {"gpu": None, "cpu": "Some CPU", "cores": 2},
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "tasks": {"gsm8k": found},
        "overall": found,
    }


@pytest.fixture
def folder(tmp_path):
    target = make_target("qwen3", dtype=torch.float32)
    make_draft(target).to(torch.bfloat16).save_pretrained(tmp_path / "my-draft")
    return tmp_path / "my-draft"


def test_the_cards_head_is_what_the_hub_reads(folder):
    data = hub.model_card(folder, BASE, license="apache-2.0").data.to_dict()
    assert (data["base_model"], data["license"], data["library_name"]) == (BASE, "apache-2.0", "transformers")
    assert set(data["tags"]) == {"speculative-decoding", "domino"}
    assert hub.model_card(folder, BASE).data.license is None


def test_a_draft_pushed_by_hand_is_the_whole_folder_with_our_tags(monkeypatch):
    pushed = {}

    class Host:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, operations, **kwargs):
            pushed.update({op.path_in_repo: Path(op.path_or_fileobj).read_bytes() for op in operations})

    def no_card(*args, **kwargs):
        raise EntryNotFoundError("no card yet")

    monkeypatch.setattr("transformers.utils.hub.hf_api", Host)
    monkeypatch.setattr("transformers.utils.hub.ModelCard.load", no_card)
    make_draft(make_target("qwen3", dtype=torch.float32)).push_to_hub("me/my-draft")
    code = {"configuration_domino.py", "modeling_domino.py", "generation.py", "custom_generate/generate.py"}
    assert set(pushed) == {"README.md", "config.json", "model.safetensors", *code}
    assert all(f"- {tag}" in pushed["README.md"].decode() for tag in hub.TAGS)


def test_nothing_is_claimed_that_is_not_known(folder):
    text = hub.model_card(folder, BASE).text
    assert "Not measured." in text and "Not recorded." in text
    assert "| gsm8k |" not in text


def test_numbers_stand_with_their_conditions(folder):
    text = hub.model_card(folder, BASE, bench=bench_results()).text
    assert "| gsm8k | 8 | 2.35 | 2.10 | 20.0 | 31.0 | 1.55 |" in text or "| gsm8k | 8 | 2.34 | 2.10 | 20.0" in text
    assert "| proposal | 1 | 2 | 3 |\n|---|---|---|---|\n| head | 0.50 | 0.50 | 1.00 |" in text
    for condition in ("float32", "at most 128 new tokens", "7 of 8 answers", "2 cores of Some CPU", "torch 2.13.0"):
        assert condition in text, condition
    assert "trees of" not in text
    results = bench_results()
    results["settings"]["tree"] = 7
    assert "Greedy, trees of 7 proposals, float32" in hub.model_card(folder, BASE, bench=results).text


def test_training_is_told_from_what_training_left(folder):
    record = {
        "command": "domino-spec train recipe.yaml",
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "start_from": "target",
        "data": [{"source": "chat.jsonl", "rows": 1200, "supervised_tokens": 250_000}],
        "steps": 6500,
        "epochs": 5.25,
    }
    (folder / "training.json").write_text(json.dumps(record))
    (folder / "eval_results.json").write_text(
        json.dumps({"eval_chat_accept_len": 1.871, "eval_chat_base_accept_len": 1.762, "epoch": 5.0})
    )
    text = hub.model_card(folder, BASE).text
    assert "6,500 steps" in text and "1,200 rows of `chat.jsonl`" in text and "250,000 supervised tokens" in text
    assert "| chat | 1.87 | 1.76 |" in text


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_snippets_are_python_and_load_the_pinned_revision(folder):
    text = hub.model_card(folder, BASE, "me/my-draft", COMMIT).text
    blocks = python_blocks(text)
    assert len(blocks) == 2
    for block in blocks:
        ast.parse(block)
    assert 'AutoModel.from_pretrained("me/my-draft", trust_remote_code=True' in blocks[0]
    assert f'revision="{COMMIT}")' in blocks[0]


@pytest.mark.parametrize(("prefix", "served"), [(1, True), (0, False)], ids=["prefix length 1", "prefix length 0"])
def test_a_launch_command_is_given_only_where_sglang_serves(tmp_path, prefix, served):
    draft = make_draft(make_target("qwen3", dtype=torch.float32), pure_draft_prefix_len=prefix)
    draft.to(torch.bfloat16).save_pretrained(tmp_path)
    text = hub.model_card(tmp_path, BASE).text
    assert ("--speculative-algorithm" in text) == served
    assert ("SGLang does not serve it" in text) != served


def test_a_draft_without_head_is_called_so(tmp_path):
    make_draft(make_target("qwen3", dtype=torch.float32), head=False).save_pretrained(tmp_path)
    text = hub.model_card(tmp_path, BASE).text
    assert "It has no head" in text and "GRU" not in text


class Api:
    """What `huggingface_hub.HfApi` was asked, in order."""

    calls: ClassVar[list] = []

    def __init__(self, token=None):
        pass

    def create_repo(self, repo_id, private, exist_ok):
        self.calls.append(("create", repo_id, private))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, repo_id, folder_path, allow_patterns):
        self.calls.append(("folder", repo_id, folder_path, allow_patterns))
        return SimpleNamespace(oid=COMMIT)

    def upload_file(self, repo_id, path_or_fileobj, path_in_repo):
        self.calls.append(("file", repo_id, path_in_repo, path_or_fileobj.decode()))


@pytest.fixture
def api(monkeypatch):
    Api.calls = []
    monkeypatch.setattr(hub, "HfApi", Api)
    return Api.calls


def test_a_published_card_pins_the_upload_before_it(folder, api, capsys):
    before = files_of(folder)
    for name in (".env", "optimizer.pt", "features/shard-0.safetensors", "checkpoint-5/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not for the Hub")
    assert cli.main(["card", str(folder), "--base-model", BASE, "--push-to", "my-draft"]) == 0
    create, upload, card = api
    assert create == ("create", "my-draft", None)
    assert upload[1:3] == ("me/my-draft", folder)
    # A star does not cross a folder's border there, but does here.
    patterns = [pattern for pattern in upload[3] if "/" in pattern or not pattern.count("*")]
    patterns += [name for pattern in upload[3] for name in before if "/" not in name and fnmatch(name, pattern)]
    taken = {name for name in files_of(folder) if name in patterns}
    # Training leaves more than a draft in its folder.
    assert taken == before
    assert card[1:3] == ("me/my-draft", "README.md")
    assert f'revision="{COMMIT}"' in card[3] and 'from_pretrained("me/my-draft"' in card[3]
    assert COMMIT in capsys.readouterr().out
    assert f'revision="{COMMIT}"' in ModelCard.load(folder / "README.md").text


def test_a_target_in_a_folder_is_named_but_not_linked(folder, tmp_path):
    base = tmp_path / "my-target"
    base.mkdir()
    card = hub.model_card(folder, str(base), "me/my-draft")
    assert card.data.base_model is None
    assert "draft for my-target:" in card.text and str(tmp_path) not in card.text


def test_a_draft_saved_and_pushed_at_once_is_the_whole_folder(monkeypatch, tmp_path):
    pushed = set()

    class Host:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, operations, **kwargs):
            pushed.update(op.path_in_repo for op in operations)

    def no_card(*args, **kwargs):
        raise EntryNotFoundError("no card yet")

    monkeypatch.setattr("transformers.utils.hub.hf_api", Host)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", Host, raising=False)
    monkeypatch.setattr("transformers.utils.hub.ModelCard.load", no_card)
    draft = make_draft(make_target("qwen3", dtype=torch.float32))
    draft.generation_config = GenerationConfig(num_assistant_tokens=2)
    draft.save_pretrained(tmp_path / "draft", push_to_hub=True, repo_id="me/draft")
    assert {"config.json", "generation_config.json", "modeling_domino.py", "custom_generate/generate.py"} <= pushed


@pytest.mark.parametrize("lacking", ["model.safetensors", "generation.py"])
def test_an_incomplete_folder_is_not_uploaded(folder, api, capsys, lacking):
    (folder / lacking).unlink()
    assert cli.main(["card", str(folder), "--base-model", BASE, "--push-to", "me/x"]) == 2
    assert lacking.replace("model", "*") in capsys.readouterr().err.replace("model.safetensors", "*.safetensors")
    assert api == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FOLDER"], "--base-model"),
        (["./nowhere", "--base-model", BASE], "nowhere"),
        (["FOLDER", "--base-model", BASE, "--bench", "absent.json"], "absent.json"),
        (["FOLDER", "--base-model", BASE, "--bench", "broken.json"], "broken.json is not JSON"),
        (["FOLDER", "--base-model", BASE, "--bench", "other.json"], "not a results file of `domino-spec bench"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_card_cannot_use_is_one_line(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text("{}")
    capsys.readouterr()  # a progress bar of saving
    assert cli.main(["card", *(str(folder) if a == "FOLDER" else a for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (folder / "README.md").exists()


def test_the_card_of_a_folder_that_moved_still_names_it(folder, tmp_path):
    shutil.move(folder, tmp_path / "elsewhere")
    assert hub.model_card(tmp_path / "elsewhere", BASE).text.lstrip().startswith("# elsewhere")
