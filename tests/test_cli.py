# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: what is streamed, what is refused, and how `make demo` hands over a prompt."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import domino_spec
from domino_spec import cli
from domino_spec.evaluation import benchmark, demo, streaming
from domino_spec.evaluation.report import DOMINO, PLAIN, Call, Difference, PromptResult

MARKS = ("<", ">")
PROMPT_IDS = torch.tensor([[72, 105]])
END_TOKEN = 256


class ByteTokenizer:
    """One token per byte, so that a character beyond ASCII spans several; id 256 is a special end token."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return bytes(token for token in tokens if token != END_TOKEN).decode(errors="replace")


def stream(*rounds, two_dimensional=False):
    """What the streamer writes for rounds given as text or ids, after a prompt."""
    pieces = []
    streamer = streaming.AcceptanceStreamer(ByteTokenizer(), pieces.append, MARKS)
    streamer.put(PROMPT_IDS)
    for ids in rounds:
        value = torch.tensor(list(ids.encode()) if isinstance(ids, str) else ids)
        streamer.put(value[None] if two_dimensional else value)
    streamer.end()
    return "".join(pieces)


@pytest.mark.parametrize("two_dimensional", [False, True], ids=["[n]", "[1, n]"])
def test_accepted_tokens_are_marked_and_the_bonus_token_is_not(two_dimensional):
    assert stream("O", "nce u", "p", "on", two_dimensional=two_dimensional) == "O<nce >up<o>n\n"


def test_the_prompt_is_not_written():
    assert stream("a") == "a\n"


def test_without_its_marks_the_stream_is_the_answer():
    answer = "Ünï©ødé – 日本語 🙂\nand a second line\n\nend"
    data = list(answer.encode())
    for size in (1, 2, 3, 5, 7):
        text = stream(*(data[start : start + size] for start in range(0, len(data), size)))
        assert text.translate({ord(mark): None for mark in MARKS}) == answer + "\n", size


def test_a_character_is_marked_with_the_token_that_completes_it():
    first, *middle, last = "🙂".encode()
    assert stream([first], [*middle, last]) == "🙂\n"
    assert stream([first], [*middle, last, ord("!")]) == "<🙂>!\n"


def test_an_incomplete_character_is_flushed_at_the_end():
    assert stream("a", [*b"b", *"é".encode()[:1]]) == "a<b>\ufffd\n"


def test_special_tokens_write_nothing_and_open_no_mark():
    assert stream("a", [ord("b"), END_TOKEN]) == "a<b>\n"
    assert stream("a", [END_TOKEN, END_TOKEN]) == "a\n"


def test_an_open_mark_is_closed_before_the_end_of_the_line():
    assert stream("a", [ord("b"), ord("c"), END_TOKEN]) == "a<bc>\n"


def test_one_streamer_writes_several_answers():
    pieces = []
    streamer = streaming.AcceptanceStreamer(ByteTokenizer(), pieces.append, MARKS)
    for _ in range(2):
        streamer.put(PROMPT_IDS)
        streamer.put(torch.tensor([97, 98]))
        streamer.end()
    assert "".join(pieces) == "<a>b\n" * 2


def test_a_batch_is_refused():
    with pytest.raises(ValueError, match="batch of 2"):
        streaming.AcceptanceStreamer(ByteTokenizer(), print, MARKS).put(torch.zeros(2, 3, dtype=torch.long))


class Stream(io.StringIO):
    def __init__(self, terminal, encoding):
        super().__init__()
        self.terminal, self._encoding = terminal, encoding

    encoding = property(lambda self: self._encoding)

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "encoding", "environment", "no_color", "opening"),
    [
        (True, "utf-8", {}, False, "\x1b[1;32m"),
        (True, "utf-8", {}, True, "⟦"),
        (True, "utf-8", {"NO_COLOR": "1"}, False, "⟦"),
        (True, "utf-8", {"NO_COLOR": ""}, False, "\x1b[1;32m"),
        (True, "utf-8", {"TERM": "dumb"}, False, "⟦"),
        (False, "utf-8", {}, False, "⟦"),
        (False, "ascii", {}, False, "{"),
    ],
    ids=["terminal", "--no-color", "NO_COLOR", "empty NO_COLOR", "dumb terminal", "file", "ascii file"],
)
def test_marks_fit_the_output(monkeypatch, terminal, encoding, environment, no_color, opening):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert streaming.choose_marks(Stream(terminal, encoding), no_color)[0] == opening


def test_the_demo_table_has_a_row_per_prompt_and_a_total():
    results = [
        PromptResult(
            prompt,
            5,
            {PLAIN: [Call((1, 2, 3, 4), 2.0)], DOMINO: [Call((1, 2, 3, 4), 1.0, (3,))]},
            [Difference(prompt.id, DOMINO, 0, 1, 2)] if prompt.id == "story" else [],
        )
        for prompt in demo.DEMO_PROMPTS
    ]
    rows = [line.split() for line in demo.format_demo_table(results).splitlines()]
    assert rows[2] == ["code", "2.0", "4.0", "2.00x", "3.00", "yes"]
    assert rows[5][0] == "story" and rows[5][-1] == "no"
    assert rows[-1] == ["all", "2.0", "4.0", "2.00x", "3.00", "no"]


def cannot_load(*args):
    raise ImportError("the weights\nare missing: `pip install them`")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["sing"], "sing"),
        (["demo", "--prompt", " \n"], "the prompt is empty"),
        (["demo", "--max-new-tokens", "0"], "'0' is not a whole number of at least 1"),
        (["demo", "--max-new-tokens", "many"], "'many' is not a whole number"),
        (["demo", "--loud"], "--loud"),
        (["demo"], "cannot load the target 'default': the weights are missing: `pip install them`"),
        (["bench"], "--prompts"),
        (["bench", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["bench", "--prompts", "two\nlines.jsonl"], "two lines.jsonl"),
        (["bench", "--prompts", "good.jsonl", "--output", "no/such/folder.json"], "no/such/folder.json"),
        (["bench", "--prompts", "good.jsonl", "--output", "."], "--output . cannot be written"),
        (["bench", "--prompts", "text.jsonl"], "text.jsonl:1 has an empty first turn, or one that is not text"),
        (["bench", "--prompts", "good.jsonl", "--device", "toaster"], "--device toaster"),
        (["bench", "--prompts", "good.jsonl", "--dtype", "int8"], "int8"),
        (["bench", "--prompts", "good.jsonl", "--target", "./nowhere"], "cannot load the target './nowhere'"),
    ],
    ids=lambda value: " ".join(value).replace("\n", "\\n") or "nothing" if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line_and_status_2(monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(benchmark, "load_default_target", cannot_load)
    Path("good.jsonl").write_text(json.dumps({"id": 0, "turns": ["Hello"]}))
    Path("text.jsonl").write_text(json.dumps({"turns": "Hello"}))
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("domino-spec: error: ") and err.count("\n") == 1 and message in err


def test_an_interruption_leaves_no_traceback(monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "load_default_target", interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "\ndomino-spec: interrupted\n"


COMMANDS = "demo generate info bench doctor regenerate export import check-serving load card train completion".split()


def run_script(*arguments, **environment):
    """The installed command, in a process of its own."""
    script = Path(sys.executable).parent / "domino-spec"
    return subprocess.run(
        [script, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_the_installed_command_lists_all_others_and_says_what_went_wrong():
    done = run_script("--help")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ") and line[4] != " "] == (
        COMMANDS
    )
    done = run_script("info", "./nowhere", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("domino-spec: error: cannot load the draft './nowhere'")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "completion")])
def test_help_shows_how_a_command_is_called(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"    domino-spec {command}" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_learns_the_commands_and_their_options(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("check-serving", "--max-new-tokens", "--candidate-pool"))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_what_nobody_foresaw_is_one_line_too(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_COMMANDS", {"info": cli._COMMANDS["info"]._replace(run=lambda args: {}["x"])})
    assert cli.main(["info", "default"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("domino-spec: error: KeyError: 'x' (DOMINO_SPEC_TRACEBACK=1") and err.count("\n") == 1


def test_a_reader_that_is_gone_leaves_no_complaint():
    script = Path(sys.executable).parent / "domino-spec"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", f"'{script}' completion bash | true; exit ${{PIPESTATUS[0]}}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_record_holds_no_secrets():
    argv = [
        "--hub_token",
        "hf_x",
        "--hub-token=hf_y",
        "--api-key",
        "k",
        "--mask_token",
        "<mask>",
        "--max-new-tokens",
        "5",
    ]
    command = benchmark.provenance("domino-spec train", argv)["command"]
    assert command == (
        "domino-spec train --hub_token '***' '--hub-token=***' --api-key '***' --mask_token '<mask>' --max-new-tokens 5"
    )


def test_where_an_error_comes_from_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("DOMINO_SPEC_TRACEBACK", "1")
    with pytest.raises(ValueError, match="cannot load the draft"):
        cli.main(["info", "./nowhere"])


@pytest.fixture
def fake_environment(tmp_path):
    """An installed environment, as far as the Makefile can tell, whose command writes its arguments to a file."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    command = folder / "bin" / "domino-spec"
    command.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {tmp_path}/arguments\n")
    command.chmod(0o755)
    for made in (folder / "bin" / "pip", folder / "installed-demo"):
        made.touch()
    return folder


def make_demo(environment_folder, *arguments, **environment):
    subprocess.run(
        [shutil.which("make"), "demo", f"VENV={environment_folder}", *arguments],
        cwd=Path(domino_spec.__file__).parent,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        timeout=60,
    )
    return (environment_folder.parent / "arguments").read_bytes().decode().split("\0")[:-1]


@pytest.mark.parametrize(
    "prompt",
    [
        'What is a "quine"? Don\'t `guess`',
        "It costs $5, $(shell touch made-by-make) $HOME ${HOME} $$ #1 \\",
        "two\nlines",
        "--help",
        "日本語",
        "",
    ],
    ids=["quotes", "dollars", "newline", "like an option", "beyond ASCII", "empty"],
)
def test_make_hands_over_a_prompt_as_it_is(fake_environment, prompt):
    assert make_demo(fake_environment, f"PROMPT={prompt}") == ["demo", f"--prompt={prompt}"]
    assert not (Path(domino_spec.__file__).parent / "made-by-make").exists()


def test_make_ignores_a_shell_variable_of_that_name(fake_environment):
    assert make_demo(fake_environment, PROMPT="%n@%m %# ") == ["demo"]
