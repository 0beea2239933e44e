# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""`domino-spec generate`: the answer is the target's own, however it is asked for and written."""

import io
import json

import pytest
import torch
from helpers import make_draft, make_target
from test_training_data import CHATML, tokenizer_with

from domino_spec import cli


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target with its tokenizer and of its draft, and the answer that the target alone gives to turns."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = tokenizer_with(CHATML)
    target = make_target("qwen3", dtype=torch.float32, vocab_size=len(tokenizer))
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_draft(target, mask_token_id=len(tokenizer) - 1).save_pretrained(folder / "draft")

    def answer(*messages, max_new_tokens=12):
        inputs = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--max-new-tokens", "12"], answer


def user(text):
    return {"role": "user", "content": text}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("way", ["argument", "file", "standard input"])
def test_the_answer_is_the_targets_own(pair, way, tmp_path, monkeypatch, capsys):
    options, answer = pair
    arguments = []
    if way == "argument":
        arguments = ["Why?"]
    elif way == "file":
        (tmp_path / "question.txt").write_text("Why?")
        arguments = ["--file", str(tmp_path / "question.txt")]
    else:
        monkeypatch.setattr("sys.stdin", io.StringIO("Why?"))
    assert cli.main(["generate", *arguments, *options]) == 0
    assert capsys.readouterr().out == answer(user("Why?")) + "\n"


def test_json_holds_the_answer_and_its_rounds(pair, capsys):
    options, answer = pair
    system = {"role": "system", "content": "Be brief."}
    assert cli.main(["generate", "Why?", "--system", "Be brief.", "--json", *options]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["prompt"] == "Why?" and row["text"] == answer(system, user("Why?"))
    # The first token is the prefill's.
    assert row["acceptance_length"] == pytest.approx((row["new_tokens"] - 1) / row["rounds"])
    assert row["finished"] == (row["new_tokens"] < 12)


def test_a_chat_remembers_its_turns_until_a_new_one(pair, monkeypatch, capsys):
    options, answer = pair
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\nWhy?\n/new\nWhy?\n"))
    assert cli.main(["generate", "--chat", "--json", *options]) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    first = answer(user("Who?"))
    second = answer(user("Who?"), {"role": "assistant", "content": first}, user("Why?"))
    assert texts == [first, second, answer(user("Why?"))]
    assert second != answer(user("Why?")), "turns before it must matter, or this shows nothing"


def test_a_terminal_gets_marks_and_a_line_about_the_rounds(pair, monkeypatch, capsys):
    options, answer = pair
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    assert cli.main(["generate", "Why?", "--no-color", *options]) == 0
    assert screen.getvalue().translate({ord(mark): None for mark in "{}⟦⟧"}) == answer(user("Why?")) + "\n"
    assert "rounds, acceptance length" in capsys.readouterr().err


def test_a_seed_repeats_a_sampled_answer(pair, capsys):
    options, _ = pair
    for seed in ("1", "1", "2"):
        assert cli.main(["generate", "Why?", "--temperature", "1.5", "--seed", seed, *options]) == 0
    first, again, other = capsys.readouterr().out.splitlines()
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], Terminal(), "there is no prompt"),
        ([], io.StringIO(" \n"), "the prompt is empty"),
        (["Why?", "--file", "x.txt"], None, "two prompts"),
        (["--file", "absent.txt"], None, "absent.txt"),
        (["Why?", "--chat"], None, "leave the prompt and --file out"),
        (["Why?", "--temperature", "-1"], None, "--temperature is -1.0"),
        (["Why?", "--temperature", "1", "--top-p", "2"], None, "--top-p is 2.0"),
        (["Why?", "--top-p", "0.9"], None, "--temperature 0 is greedy"),
        (["Why?", "--max-new-tokens", "0"], None, "'0' is not a whole number"),
        (["Why?", "--target", "./nowhere"], None, "cannot load the target './nowhere'"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_what_cannot_be_answered_is_refused_before_anything_is_loaded(
    monkeypatch, tmp_path, capsys, arguments, stdin, message
):
    monkeypatch.chdir(tmp_path)
    if stdin is not None:
        monkeypatch.setattr("sys.stdin", stdin)
    assert cli.main(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_code_of_a_target_is_never_run_nor_asked_about(pair, tmp_path, monkeypatch, capsys):
    (tmp_path / "conf.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "conf.Config"}}))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\nHello\n"))
    options, _ = pair
    assert cli.main(["generate", "--chat", "--json", *options, "--target", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "cannot load the target" in err
    assert cli.main(["info", options[3], "--target", str(tmp_path)]) == 2


def test_turns_need_a_chat_template(pair, tmp_path, capsys):
    options, _ = pair
    tokenizer = tokenizer_with(None)
    make_target("qwen3", dtype=torch.float32, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert cli.main(["generate", "Why?", "--system", "x", *options, "--target", str(tmp_path)]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert cli.main(["generate", "Why?", *options, "--target", str(tmp_path)]) == 0
