# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""`domino-spec export`, `import`, `check-serving`, `doctor` and `load` as they are called; what they do is tested
elsewhere."""

import filecmp
import json

import pytest
import torch
from helpers import make_draft, make_target

from domino_spec import cli


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a draft of it that SGLang serves, and one whose first two proposals are not corrected."""
    folder = tmp_path_factory.mktemp("serving")
    target = make_target("qwen3", dtype=torch.float32)
    target.save_pretrained(folder / "target")
    make_draft(target, target_layer_ids=[0, 2]).to(torch.bfloat16).save_pretrained(folder / "draft")
    make_draft(target, pure_draft_prefix_len=2).to(torch.bfloat16).save_pretrained(folder / "prefix-2")
    (folder / "mine.jsonl").write_text('{"turns": ["Why?"]}\n')
    return folder


def test_a_draft_goes_to_another_project_and_comes_back(folders, tmp_path, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    target = str(folders / "target")
    assert cli.main(["export", str(folders / "draft"), str(there), "--format", "specforge", "--target", target]) == 0
    assert cli.main(["import", str(there), str(back)]) == 0
    assert str(back) in capsys.readouterr().out
    assert {path.name for path in there.iterdir()} == {"config.json", "model.safetensors"}
    comparison = filecmp.dircmp(folders / "draft", back)
    assert not (comparison.diff_files or comparison.left_only or comparison.right_only)


def test_a_draft_that_is_served_gets_its_command(folders, capsys):
    draft, target = str(folders / "draft"), str(folders / "target")
    assert cli.main(["check-serving", draft, "--target", target]) == 0
    assert f"--speculative-draft-model-path {draft}" in capsys.readouterr().out
    assert cli.main(["check-serving", draft, "--target", target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["served"]


def test_a_draft_that_is_not_served_is_status_1(folders, capsys):
    assert cli.main(["check-serving", str(folders / "prefix-2")]) == 1
    out = capsys.readouterr().out
    assert "pure_draft_prefix_len" in out and "sglang will not serve" in out and "launch_server" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("export DRAFT", "FOLDER"),
        ("export DRAFT new --format onnx", "onnx"),
        ("export ./nowhere new --format hub", "./nowhere"),
        ("export DRAFT TARGET --format hub", "not an empty folder"),
        ("export PREFIX-2 new --format sglang", "pure_draft_prefix_len"),
        ("export DRAFT new --format dflash", "--drop-head"),
        ("import DRAFT", "FOLDER"),
        ("import TARGET new", "Qwen3ForCausalLM"),
        ("import ./nowhere new", "./nowhere"),
        ("check-serving", "DRAFT"),
        ("check-serving ./nowhere", "./nowhere"),
        ("check-serving DRAFT --engine abacus", "abacus"),
        ("check-serving DRAFT --target ./nowhere", "./nowhere"),
        ("doctor", "TARGET"),
        ("doctor ./nowhere DRAFT", "cannot load the target './nowhere'"),
        ("doctor TARGET ./nowhere --device toaster", "--device toaster"),
        ("doctor TARGET DRAFT --prompts absent.jsonl", "absent.jsonl"),
        ("load --prompts PROMPTS", "--server"),
        ("load --server http://127.0.0.1:9 --prompts PROMPTS", "http://127.0.0.1:9"),
        ("load --server http://127.0.0.1:9 --prompts absent.jsonl", "absent.jsonl"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(folders, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    places = {name.upper(): str(folders / name) for name in ("target", "draft", "prefix-2")}
    places["PROMPTS"] = str(folders / "mine.jsonl")
    assert cli.main([places.get(word, word) for word in arguments.split()]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("domino-spec: error: ") and message in last
    assert not (tmp_path / "new").exists()
