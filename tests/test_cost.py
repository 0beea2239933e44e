# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""`domino-spec info`: sizes counted by hand, and what cannot be told."""

import json

import pytest
import torch
from helpers import make_draft, make_target

from domino_spec import cli
from domino_spec.evaluation.cost import cost_of

V, H, G, E = 96, 32, 24, 20  # of the pair in `helpers`


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = make_target("qwen3", dtype=torch.float32)
    target.save_pretrained(folder / "target")
    make_draft(target, gru_hidden_dim=G, emb_dim=E).to(torch.bfloat16).save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")


def test_the_parts_of_a_draft_add_up_to_its_file(folders):
    target = make_target("qwen3", dtype=torch.float32)
    draft = make_draft(target, gru_hidden_dim=G, emb_dim=E)
    cost = cost_of(draft.config, target.config)
    assert cost.head == 3 * G * (H + G) + (H + G) * E + E * V
    assert cost.backbone + cost.head == draft.num_parameters()
    assert cost.draft_bytes == 4 * draft.num_parameters()
    # Two layers, two key/value heads of width 8, keys and values.
    assert cost.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("tied", [False, True], ids=["own output head", "tied"])
def test_a_round_reads_target_backbone_output_head_and_the_head_for_each_correction(tied):
    target = make_target("qwen3", dtype=torch.float32, tie_word_embeddings=tied)
    draft = make_draft(target)  # blocks of 6: five proposals, the first uncorrected
    cost = cost_of(draft.config, target.config)
    step = sum(p.numel() for n, p in target.named_parameters() if tied or n != "model.embed_tokens.weight")
    assert cost.corrected == 4
    assert cost.step_bytes == 4 * step
    assert cost.round_bytes == 4 * (step + V * H + cost.backbone + 4 * cost.head)
    assert cost.break_even == cost.round_bytes / cost.step_bytes


def test_a_shortlist_leaves_rows_of_both_projections_unread():
    target = make_target("qwen3", dtype=torch.float32)
    draft = make_draft(target)
    whole = cost_of(draft.config, target.config)
    draft.config.set_shortlist(range(0, V, 4))
    listed = cost_of(draft.config, target.config)
    saved = V * 3 // 4 * (H + 4 * draft.config.emb_dim)
    assert listed.round_bytes == whole.round_bytes - 4 * saved
    assert listed.draft_bytes == whole.draft_bytes


def test_a_draft_without_head_corrects_nothing():
    target = make_target("qwen3", dtype=torch.float32)
    cost = cost_of(make_draft(target, head=False).config, target.config)
    assert (cost.head, cost.corrected) == (0, 0)


def test_the_command_prints_what_the_functions_say(folders, capsys):
    target, draft = folders
    assert cli.main(["info", draft, "--target", target, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["gru_hidden_dim"] == G and shown["config"]["dtype"] == "bfloat16"
    assert cli.main(["info", draft, "--target", target]) == 0
    table = capsys.readouterr().out
    assert f"{shown['cost']['break_even']:.2f}" in table
    assert cli.main(["info", draft]) == 0
    assert "plain step" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "draft"),
        (["./nowhere"], "cannot load the draft './nowhere'"),
        (["DRAFT", "--target", "./nowhere"], "cannot load the target './nowhere'"),
        (["DRAFT", "--target", "OTHER"], "target whose depth is 4"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_what_cannot_be_told_is_one_line(folders, tmp_path, capsys, arguments, message):
    make_target("qwen3", dtype=torch.float32, num_hidden_layers=2).save_pretrained(tmp_path)
    names = {"DRAFT": folders[1], "OTHER": str(tmp_path)}
    capsys.readouterr()  # a progress bar of saving
    assert cli.main(["info", *(names.get(a, a) for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
