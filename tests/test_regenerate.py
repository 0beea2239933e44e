# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Text that the target writes itself: in this process or behind a server, killed and gone on with, or badly served."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from helpers import make_target
from test_training_data import CHATML, tokenizer_with

from domino_spec import cli
from domino_spec.training.data import load_rows
from domino_spec.training.regenerate import LocalTarget, Prompt, Server, read_prompts, regenerate, self_instruct

TEXTS = ("hi", "hi there you", "bye", "you too there hi", "there")


def ask(*texts, temperature=0.0) -> list[Prompt]:
    return [Prompt(f"p{i}", [{"role": "user", "content": text}], temperature) for i, text in enumerate(texts)]


def rows(path) -> dict[str, dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in found}) == len(found), "a prompt was answered twice"
    return {row["id"]: row for row in found}


# The target in this process


@pytest.fixture(scope="module")
def pair():
    tokenizer = tokenizer_with(CHATML)
    target = make_target("qwen3", dtype=torch.float32, vocab_size=len(tokenizer), attn_implementation="sdpa")
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    target.generation_config.pad_token_id = tokenizer.eos_token_id
    return target, tokenizer


def test_rows_are_the_targets_own_answers(pair, tmp_path):
    target, tokenizer = pair
    path = tmp_path / "rows.jsonl"
    assert regenerate(LocalTarget(target, tokenizer, batch_size=2, max_new_tokens=7), ask(*TEXTS), path) == 0
    for i, text in enumerate(TEXTS):
        row = rows(path)[f"p{i}"]
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        alone = target.generate(**ids, max_new_tokens=7, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert row["messages"] == [
            {"role": "user", "content": text},
            {"role": "assistant", "content": tokenizer.decode(alone, skip_special_tokens=True)},
        ]
        assert row["finished"] == (len(alone) < 7) and row["temperature"] == 0.0
    # And what was written can be trained on.
    assert len(load_rows(str(path), tokenizer, 200, len(tokenizer))[0]) == len(TEXTS)


def test_every_turn_of_the_user_is_answered_in_turn(pair, tmp_path):
    class Short(LocalTarget):
        def _generate(self, conversations):
            seen.append([[message["role"] for message in c.messages] for c in conversations])
            return [(f"answer {len(c.messages)}", c.prompt.id != "cut") for c in conversations]

    seen: list = []
    turns = [{"role": "system", "content": "Be kind."}, *({"role": "user", "content": t} for t in ("a", "b"))]
    prompts = [Prompt("whole", turns), Prompt("cut", turns), Prompt("one", turns[1:2])]
    regenerate(Short(*pair), prompts, tmp_path / "rows.jsonl")
    found = rows(tmp_path / "rows.jsonl")
    roles = [message["role"] for message in found["whole"]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"] and found["whole"]["finished"]
    # Nobody goes on after an answer that was cut off.
    assert [m["role"] for m in found["cut"]["messages"]] == roles[:3] and not found["cut"]["finished"]
    assert len(seen) == 2 and len(seen[0]) == 3 and len(seen[1]) == 1


def test_a_killed_run_goes_on_where_it_stopped(pair, tmp_path):
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    answerer = LocalTarget(*pair, batch_size=2, max_new_tokens=5)
    regenerate(answerer, ask(*TEXTS), whole)
    lines = whole.read_text().splitlines(keepends=True)
    killed.write_text("".join(lines[:3]) + lines[3][:20])
    asked = []
    answer = answerer.answer
    answerer.answer = lambda prompts: asked.extend(prompts) or answer(prompts)
    regenerate(answerer, ask(*TEXTS), killed)
    assert rows(killed) == rows(whole) and len(asked) == 2


def test_sampled_answers_repeat_with_their_seed(pair, tmp_path):
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / name
        regenerate(LocalTarget(*pair, max_new_tokens=12, seed=seed), ask(*TEXTS, temperature=1.5), path)
        texts.append([row["messages"][1]["content"] for row in rows(path).values()])
    assert texts[0] == texts[1] != texts[2]


def test_the_target_makes_up_what_a_user_may_say(pair):
    target, tokenizer = pair
    prompts = self_instruct(target, tokenizer, 6, max_new_tokens=60, batch_size=8, seed=3)
    assert len(prompts) == len(set(prompts)) == 6
    assert all(prompt.strip() == prompt and "<|im" not in prompt for prompt in prompts)
    assert self_instruct(target, tokenizer, 6, max_new_tokens=60, batch_size=8, seed=3) == prompts


# Behind a server


@contextmanager
def serving(respond):
    """A server that answers `/v1/chat/completions` with what `respond(request, number of tries)` returns: a status and
    a reply, or an exception to drop the connection."""
    tries: Counter = Counter()
    lock, under_way, most = threading.Lock(), [0], [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                tries[request["messages"][-1]["content"]] += 1
                count = tries[request["messages"][-1]["content"]]
                under_way[0] += 1
                most[0] = max(most[0], under_way[0])
            try:
                status, text, reason = respond(request, count)
                choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
                body = json.dumps({"id": "x", "created": 0, "model": "m", "choices": [choice]}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except ConnectionAbortedError:
                self.connection.close()
            finally:
                with lock:
                    under_way[0] -= 1

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", tries, most
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_is_asked_with_as_many_requests_at_once_as_allowed(tmp_path):
    requests = []

    def respond(request, count):
        requests.append(request)
        time.sleep(0.05)
        return 200, f"answer to {request['messages'][-1]['content']}", "length" if count else "stop"

    with serving(respond) as (url, _, most):
        answerer = Server(url, "the-model", 4, max_new_tokens=9, template_kwargs={"enable_thinking": False})
        assert regenerate(answerer, ask(*map(str, range(12)), temperature=0.5), tmp_path / "rows.jsonl") == 0
    assert 2 <= most[0] <= 4
    found = rows(tmp_path / "rows.jsonl")
    assert all(row["messages"][1]["content"] == f"answer to {row['messages'][0]['content']}" for row in found.values())
    assert not any(row["finished"] for row in found.values())
    request = requests[0]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("the-model", 9, 0.5)
    assert request["chat_template_kwargs"] == {"enable_thinking": False}


def test_failures_are_tried_again_and_what_keeps_failing_is_left_out(tmp_path, caplog):
    def respond(request, count):
        text = request["messages"][-1]["content"]
        if text == "busy" and count < 3:
            return 503, "", "stop"
        if text == "dropped" and count < 2:
            raise ConnectionAbortedError
        if text == "broken":
            return 500, "", "stop"
        if text == "refused":
            return 400, "", "stop"
        if text == "silent":
            return 200, "", "stop"
        return 200, "fine", "stop"

    with serving(respond) as (url, tries, _):
        answerer = Server(url, "m", 3, retries=3, wait=0.01)
        prompts = ask("busy", "dropped", "broken", "refused", "silent", "good")
        assert regenerate(answerer, prompts, tmp_path / "rows.jsonl") == 3
        assert sorted(rows(tmp_path / "rows.jsonl")) == ["p0", "p1", "p5"]
        assert (tries["busy"], tries["broken"], tries["refused"]) == (3, 4, 1)
        for name in ("p2", "p3", "p4"):
            assert name in caplog.text
        # The next run asks for what is missing, and nothing else.
        before = Counter(tries)
        regenerate(answerer, prompts, tmp_path / "rows.jsonl")
        assert set(tries - before) == {"broken", "refused", "silent"}


def test_finished_rows_are_kept_when_a_run_is_interrupted(tmp_path):
    def respond(request, count):
        time.sleep(0.02 * int(request["messages"][-1]["content"]))
        return 200, "fine", "stop"

    class Interrupted(Server):
        def answer(self, prompts):
            for number, answered in enumerate(super().answer(prompts)):
                if number == 3:
                    raise KeyboardInterrupt
                yield answered

    with serving(respond) as (url, *_):
        with pytest.raises(KeyboardInterrupt):
            regenerate(Interrupted(url, "m", 2), ask(*map(str, range(9))), tmp_path / "rows.jsonl")
        assert len(rows(tmp_path / "rows.jsonl")) == 3
        assert regenerate(Server(url, "m", 2), ask(*map(str, range(9))), tmp_path / "rows.jsonl") == 0
    assert len(rows(tmp_path / "rows.jsonl")) == 9


def test_prompts_of_one_id_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"share ids \(p0\)"):
        regenerate(Server("http://localhost:1/v1", "m"), [*ask("a"), *ask("b")], tmp_path / "rows.jsonl")


# Prompts, and the command


def test_prompts_are_read_from_turns_and_from_answered_conversations(tmp_path):
    path = tmp_path / "prompts.jsonl"
    talk = [("system", "s"), ("user", "a"), ("assistant", "old"), ("user", "b"), ("assistant", "older")]
    path.write_text(
        json.dumps({"id": "x", "turns": ["one", "two"]})
        + "\n"
        + json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]})
        + "\n"
        + json.dumps({"turns": [""]})
    )
    first, second = read_prompts(str(path), temperatures=(0.0, 0.7))
    assert (first.id, [m["content"] for m in first.messages], first.temperature) == ("x", ["one", "two"], 0.0)
    assert (second.id, second.temperature) == (f"{path}:2", 0.7)
    assert [(m["role"], m["content"]) for m in second.messages] == [("system", "s"), ("user", "a"), ("user", "b")]


def test_the_command_writes_rows_and_says_how_many(pair, tmp_path, capsys):
    target, tokenizer = pair
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS))
    arguments = ["regenerate", "--target", str(tmp_path / "target"), "--dtype", "float32", "--device", "cpu"]
    arguments += ["--max-new-tokens", "6", "--output", str(tmp_path / "rows.jsonl")]
    assert cli.main([*arguments, "--prompts", str(tmp_path / "prompts.jsonl"), "--self-instruct", "3"]) == 0
    assert "8 of 8 conversations" in capsys.readouterr().out
    assert len(rows(tmp_path / "rows.jsonl")) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to ask"),
        (["--prompts", "gone.jsonl"], "gone.jsonl"),
        (["--server", "http://localhost:1/v1", "--self-instruct", "3"], "--self-instruct needs the target"),
    ],
    ids=["no prompts", "missing file", "made up by a server"],
)
def test_what_is_wrong_is_named_in_one_line(arguments, message, tmp_path, capsys):
    assert cli.main(["regenerate", "--output", str(tmp_path / "rows.jsonl"), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("domino-spec: error: ") and message in error
