# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Measuring a running server: `transformers serve` with and without a draft, and small ones that fail as told."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
from helpers import make_draft, make_target
from test_training_data import CHATML, tokenizer_with

from domino_spec import cli
from domino_spec.evaluation.benchmark import InputError
from domino_spec.serving import load

PROMPTS = ("Hi", "How are you today?", "Why?")


def command(*arguments) -> int:
    """`domino-spec load`."""
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)
    argv = [str(argument) for argument in arguments]
    args = parser.parse_args(argv)
    args.argv = ["load", *argv]
    return load.run(args)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "turns": [text]}) + "\n" for i, text in enumerate(PROMPTS)))
    return path


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(load.Client, "wait", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def cells(table: str) -> dict[tuple[int, str], dict[str, str]]:
    """The printed table's rows by concurrency and server."""
    lines = table.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("at once"))
    header = lines[start].replace("at once", "at_once").split()
    found = {}
    for line in lines[start + 2 :]:
        if not line:
            break
        row = dict(zip(header, line.split(), strict=True))
        found[int(row["at_once"]), row["server"]] = row
    return found


# A real server

# transformers loads this file with the weights beside it, and calls it as the model's `generate`.
WITH_DRAFT = """
from pathlib import Path

from domino_spec import DominoDraftModel
from transformers import GenerationMixin

draft = DominoDraftModel.from_pretrained({draft!r})


def generate(model, streamer, **kwargs):
    output = GenerationMixin.generate(
        model, assistant_model=draft, streamer=streamer, return_dict_in_generate=True, **kwargs
    )
    with Path({log!r}).open("a") as file:
        print(output.acceptance_lengths.sum().item(), file=file)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`transformers serve` in a process of its own: its URL, the folders that it serves with a draft and without, and
    where it logs the tokens that each request's rounds committed."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = tokenizer_with(CHATML)
    target = make_target(dtype=torch.float32, vocab_size=len(tokenizer), attn_implementation="sdpa")
    # Answers of different lengths: many a token ends them.
    target.generation_config.eos_token_id = list(range(0, len(tokenizer), 9))
    for name in ("plain", "domino"):
        target.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    make_draft(target).save_pretrained(folder / "draft")
    code = folder / "domino" / "custom_generate" / "generate.py"
    code.parent.mkdir()
    log = folder / "rounds.log"
    code.write_text(WITH_DRAFT.format(draft=str(folder / "draft"), log=str(log)))

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    argv = ["serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--trust-remote-code"]
    with (folder / "server.log").open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", "from transformers.cli.transformers import main; main()", *argv],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=output,
        )
    try:
        answering = False
        while not answering:
            assert server.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.1)
            with suppress(requests.ConnectionError):
                answering = requests.get(f"http://127.0.0.1:{port}/health", timeout=60).ok
        yield f"http://127.0.0.1:{port}/v1", folder / "plain", folder / "domino", log
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            raise


def test_a_server_with_a_draft_answers_as_the_one_without(served, prompts, tmp_path, capsys):
    url, plain, domino, log = served
    arguments = ["--server", url, "--model", domino, "--baseline", url, "--baseline-model", plain]
    arguments += ["--prompts", prompts, "--concurrency", 1, 2, "--max-new-tokens", 24, "--repeats", 2]
    assert command(*arguments, "--output", tmp_path / "load.json") == 0
    rows = cells(capsys.readouterr().out)
    assert list(rows) == [(1, "baseline"), (1, "server"), (2, "baseline"), (2, "server")]
    for (concurrency, name), row in rows.items():
        count = 2 * max(len(PROMPTS), 2 * concurrency)
        assert (row["requests"], row["errors"], row["identical"]) == (str(count), "0", f"{count}/{count}")
        assert all(float(row[column]) > 0 for column in ("tok/s", "req/s", "first", "p95", "ms/tok"))
        # This server tells nothing about its rounds.
        assert row["tau"] == "-" and (row["ratio"] == "-") == (name == "baseline")

    document = json.loads((tmp_path / "load.json").read_text())
    assert document["complete"] and document["servers"]["server"] == {"url": url, "model": str(domino), "engine": None}
    assert document["command"].startswith("domino-spec load --server ") and document["machine"]["cores"] >= 1
    by_server = {
        name: [request for level in document["levels"] if level["server"] == name for request in level["answers"]]
        for name in ("server", "baseline")
    }
    # The draft was at work, and what the server counts are tokens, not the events that carry them.
    committed = [int(line) + 1 for line in log.read_text().splitlines()]
    counted = sorted(request["tokens"] for request in by_server["server"])
    assert sorted(committed[1:]) == counted == sorted(request["tokens"] for request in by_server["baseline"])
    assert len(set(counted)) > 1 and max(counted) <= 24
    assert all(0 < r["first_text"] <= r["seconds"] for r in by_server["server"] if r["first_text"])


# Servers that do as told

DROP = "drop"


def answer(text="fine", tokens=3, *told):
    """The events of a streamed answer, usage last; `told` comes before it, or is part of its event."""
    deltas = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in text)]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None} for delta in deltas]
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    return [*events, *told[:-1], {"choices": [], "usage": usage, **(told[-1] if told else {})}, "[DONE]"]


@contextmanager
def serving(respond=lambda text, tries: answer(), owner="somebody", metrics=lambda: None, listed=("m",)):
    """
    A server whose chat requests do what `respond(text, tries)` says: an int is a status, a list is gone through, events
    sent, seconds waited, functions called, the connection dropped. Yields its URL and the requests it got.
    """
    got, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, status, body=b""):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            if self.path == "/v1/models":
                models = [{"id": name, "object": "model", "owned_by": owner} for name in listed]
                self.reply(200, json.dumps({"object": "list", "data": models}).encode())
            elif self.path == "/metrics" and metrics() is not None:
                self.reply(200, metrics().encode())
            else:
                self.reply(404, b"no such page")

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = request["messages"][0]["content"]
            with lock:
                got.append({**request, "text": text, "key": self.headers["Authorization"]})
                tries = sum(other["text"] == text for other in got)
            steps = respond(text, tries)
            if isinstance(steps, int):
                self.reply(steps, b"said\nso")
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for step in steps:
                if callable(step):
                    step()
                elif isinstance(step, float):
                    time.sleep(step)
                elif step == DROP:
                    self.close_connection = True
                    return
                else:
                    data = f"data: {step if isinstance(step, str) else json.dumps(step)}\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *args: None  # clients that are gone
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", got
    finally:
        server.shutdown()
        server.server_close()


def document_of(capsys, *arguments):
    """Exit status and document of a run with `--json`."""
    status = command(*arguments, "--json")
    return status, json.loads(capsys.readouterr().out)


def test_tokens_are_those_of_the_usage_and_times_those_of_the_events(prompts, capsys):
    def respond(text, tries):
        role, *rest = answer("ab", 11)
        return [role, 0.05, rest[0], 0.3, *rest[1:]]

    with serving(respond) as (url, got):
        status, document = document_of(capsys, "--server", url, "--prompts", prompts, "--concurrency", 1)
    (row,) = document["summary"]
    assert status == 0 and (row["requests"], row["output_tokens"]) == (3, 33)
    assert 0.05 <= row["first_text_seconds"]["median"] <= row["first_text_seconds"]["p95"] < 0.3
    assert 0.03 <= row["seconds_per_token"] < 0.1  # 0.3 s for the ten tokens after the first text
    assert 33 / 4 < row["tokens_per_second"] <= 33 / 1.05 and row["requests_per_second"] <= 3 / 1.05
    # The first request is not measured. Nobody is asked more than every server knows.
    assert len(got) == 4 and set(got[0]) - {"text", "key"} == {
        *("model", "messages", "max_tokens", "temperature", "stream", "stream_options"),
    }
    assert (got[0]["model"], got[0]["max_tokens"], got[0]["temperature"]) == ("m", 256, 0.0)
    assert got[0]["key"] is None


def test_the_command_measures_and_its_status_tells(prompts, capsys):
    with serving() as (url, _):
        assert cli.main(["load", "--server", url, "--prompts", str(prompts), "--concurrency", "2"]) == 0
    assert cells(capsys.readouterr().out)[2, "server"]["requests"] == "4"


def test_options_and_the_key_go_into_the_request(prompts, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(listed=("m", "n")) as (url, got):
        arguments = [
            "--server",
            url + "/",
            "--prompts",
            prompts,
            "--num-prompts",
            1,
            "--concurrency",
            1,
            "--model",
            "n",
        ]
        arguments += ["--no-thinking", "--temperature", 0.5, "--max-new-tokens", 7]
        _, document = document_of(capsys, *arguments)
    assert got[0]["chat_template_kwargs"] == {"enable_thinking": False} and got[0]["key"] == "Bearer secret"
    assert (got[0]["model"], got[0]["max_tokens"], got[0]["temperature"]) == ("n", 7, 0.5)
    assert "secret" not in json.dumps(document)
    assert document["summary"][0]["compared"] == 0  # what is drawn may differ


@pytest.mark.parametrize(("concurrency", "requests_each"), [(1, 3), (4, 8)])
def test_the_concurrency_is_kept_up_and_the_servers_take_turns(concurrency, requests_each, prompts, capsys):
    def together():
        meeting, under_way, most = threading.Barrier(concurrency), [], []

        def respond(text, tries):
            if (text, tries) == (PROMPTS[0], 1):  # not measured
                return answer()
            under_way.append(text)
            return [
                lambda: meeting.wait(20),
                lambda: most.append(len(under_way)),
                *answer()[:-1],
                under_way.pop,
                "[DONE]",
            ]

        return respond, most

    (plain, most_plain), (draft, most_draft) = together(), together()
    with serving(plain) as (baseline, _), serving(draft) as (server, _):
        arguments = ["--server", server, "--baseline", baseline, "--prompts", prompts, "--repeats", 2]
        _, document = document_of(capsys, *arguments, "--concurrency", concurrency, "--retries", 0)
    assert [(row["requests"], row["errors"]) for row in document["summary"]] == [(2 * requests_each, 0)] * 2
    assert max(most_plain) == max(most_draft) == concurrency
    assert [level["server"] for level in document["levels"]] == ["baseline", "server", "server", "baseline"]


SGLANG = [{"choices": [], "sglext": {"spec_tokens_details": {"spec_num_correct_drafts": 6, "spec_verify_ct": 4}}}, {}]
VLLM = [{"metrics": {"speculative_decoding": {"num_accepted_draft_tokens": 9, "num_spec_steps": 3}}}]


@pytest.mark.parametrize(
    ("owner", "told", "counters", "rounds", "mean"),
    [
        ("sglang", SGLANG, {}, 12, 2.5),
        ("vllm", VLLM, {}, 9, 4.0),
        ("vllm", VLLM, {"vllm:spec_decode_num_drafts": 1, "vllm:spec_decode_num_accepted_tokens": 9}, 9, 4.0),
        ("vllm", [], {"vllm:spec_decode_num_drafts": 4, "vllm:spec_decode_num_accepted_tokens": 6}, 12, 2.5),
        (
            "sglang",
            [],
            {"sglang:spec_verify_calls": 2, "sglang:generation_tokens": 7, "sglang:num_requests": 1},
            6,
            3.0,
        ),
        ("vllm", [], {"vllm:generation_tokens": 5}, 0, None),
        ("vllm", [{"metrics": {"speculative_decoding": {"other": 1}}}], {"vllm:spec_decode_num_drafts": 4}, 0, None),
        ("sglang", [{"sglext": None, "metrics": {"speculative_decoding": None}}], {}, 0, None),
        ("somebody", [], None, 0, None),
    ],
    ids=[
        *("SGLang's answers", "vLLM's answers", "answers before counters", "vLLM's counters", "SGLang's counters"),
        *("counters without a draft", "half of what is needed", "answers without a draft", "nothing"),
    ],
)
def test_the_acceptance_length_is_what_the_server_tells(owner, told, counters, rounds, mean, prompts, capsys):
    answered = []

    def respond(text, tries):
        answered.append(text)
        return answer("fine", 3, *told)

    def metrics():
        """Counters that grow by `counters` with each answer, on two engines, after a long life."""
        if counters is None:
            return None
        lines = ["# HELP words", 'python_info{version="3 {x}"} 1.0', "broken NaNs", "process_seconds 1e3"]
        for name, value in counters.items():
            lines.append(f"# TYPE {name} counter")
            lines.append(f'{name}_total{{engine="0",model_name="a {{b}} c"}} {1e6 + value * len(answered)}')
            lines.append(f'{name}_total{{engine="1",model_name="a {{b}} c"}} 1.5e6')
        return "\n".join(lines) + "\n"

    with serving(respond, owner, metrics) as (url, got):
        arguments = ["--server", url, "--prompts", prompts, "--concurrency", 1]
        assert command(*arguments) == 0
        assert got[0].get("return_spec_tokens_details", False) == (owner == "sglang")
        table = cells(capsys.readouterr().out)
        assert table[1, "server"]["tau"] == ("-" if mean is None else f"{mean:.2f}")
        _, document = document_of(capsys, *arguments)
    assert document["servers"]["server"]["engine"] == owner
    length = document["summary"][0]["acceptance_length"]
    assert (length["rounds"], length["mean"]) == (rounds, mean)


def test_answers_that_differ_are_counted(prompts, capsys):
    plain = lambda text, tries: answer(f"about {text}" if tries < 4 else "something else")  # noqa: E731
    draft = lambda text, tries: answer("no idea" if text == "Why?" else f"about {text}")  # noqa: E731
    with serving(plain) as (baseline, _), serving(draft) as (server, _):
        assert command("--server", server, "--baseline", baseline, "--prompts", prompts, "--concurrency", 1, 3) == 0
    rows = cells(capsys.readouterr().out)
    assert rows[1, "baseline"]["identical"] == "3/3" and rows[1, "server"]["identical"] == "2/3"
    # Nor does the baseline repeat itself for ever: its fourth answer to the first prompt is another one.
    assert rows[3, "baseline"]["identical"] == "5/6"
    assert rows[3, "server"]["identical"] == "4/6"


def test_reasoning_belongs_to_the_answer(prompts, capsys):
    def thinking(key):
        events = answer("ab", 4)
        events[1]["choices"][0]["delta"] = {key: "hm", "content": None}
        return lambda text, tries: [events[0], events[1], 0.2, *events[2:]]

    arguments = ["--prompts", prompts, "--num-prompts", 1, "--concurrency", 1]
    with serving(thinking("reasoning_content")) as (one, _), serving(thinking("reasoning")) as (other, _):
        _, document = document_of(capsys, "--server", one, "--baseline", other, *arguments)
    assert [row["identical"] for row in document["summary"]] == [2, 2]
    assert all(row["first_text_seconds"]["p95"] < 0.2 for row in document["summary"])


# What goes wrong


def failing(text, tries):
    if text == "Hi":  # the first request of all is not measured
        return answer() if tries == 1 else 500 if tries < 4 else answer()
    if text == "Why?":
        return (
            [*answer()[:3], DROP] if tries == 1 else [{"error": {"message": "oh"}}] if tries == 2 else answer("ok", 2)
        )
    return [DROP] if tries < 3 else 429 if tries == 3 else answer()


def test_failures_are_tried_again(prompts, capsys):
    with serving(failing) as (url, got):
        arguments = ["--server", url, "--prompts", prompts, "--concurrency", 2, "--output", prompts.with_suffix(".out")]
        assert command(*arguments) == 0
    row = cells(capsys.readouterr().out)[2, "server"]
    assert (row["requests"], row["errors"]) == ("4", "0")
    tries = {text: sum(request["text"] == text for request in got) for text in PROMPTS}
    assert tries == {"Hi": 1 + 3 + 1, "How are you today?": 4, "Why?": 3}
    # What a try that failed had got of an answer is forgotten.
    level = json.loads(prompts.with_suffix(".out").read_text())["levels"][0]
    assert sorted(answer["tokens"] for answer in level["answers"]) == [2, 3, 3, 3]


def test_what_keeps_failing_is_counted_and_named(prompts, capsys):
    def respond(text, tries):
        return {"Why?": 400, "How are you today?": 503}.get(text) or answer()

    with serving(respond) as (url, got):
        assert command("--server", url, "--prompts", prompts, "--concurrency", 1, "--retries", 2) == 1
    out = capsys.readouterr().out
    row = cells(out)[1, "server"]
    assert (row["requests"], row["errors"], row["identical"]) == ("1", "2", "1/1")
    assert "not answered: HTTPError: 503 Service Unavailable: said so\n" in out and "400 Bad Request" in out
    tries = {text: sum(request["text"] == text for request in got) for text in PROMPTS}
    assert tries == {"Hi": 2, "How are you today?": 3, "Why?": 1}


def test_a_server_that_goes_away_ends_the_measurement_with_what_there_is(prompts, capsys):
    alive = []

    def respond(text, tries):
        alive.append(text)
        return answer() if len(alive) <= 4 else 500

    path = prompts.with_suffix(".out")
    arguments = ["--prompts", prompts, "--concurrency", 1, 16, "--retries", 0, "--output", path]
    with serving(respond) as (url, _), pytest.raises(InputError, match=f"{url}: 24 requests failed in a row.*500"):
        command("--server", url, *arguments)
    rows = cells(capsys.readouterr().out)
    assert rows[1, "server"]["requests"] == "3" and rows[1, "server"]["tok/s"] != "-"
    assert rows[16, "server"]["requests"] == "0" and rows[16, "server"]["tok/s"] == "-"
    assert not json.loads(path.read_text())["complete"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "kill"])
def test_an_interruption_keeps_what_was_measured(number, prompts, capsys, monkeypatch):
    monkeypatch.setattr(load, "_GRACE", 0.3)
    interrupt, over = threading.Event(), threading.Event()

    def respond(text, tries):
        if tries <= 4:  # all of the first level, and some of the second
            return answer()
        interrupt.set()
        return [*answer()[:2], over.wait, *answer()]

    def kill():
        interrupt.wait(20)
        time.sleep(0.1)
        os.kill(os.getpid(), number)

    path = prompts.with_suffix(".out")
    before = signal.signal(signal.SIGTERM, lambda *args: pytest.fail("SIGTERM would have ended the process"))
    # What runs in the background of a shell ignores it.
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=kill, daemon=True).start()
        start = time.perf_counter()
        with serving(respond) as (url, _), pytest.raises(KeyboardInterrupt):
            try:
                command("--server", url, "--prompts", prompts, "--concurrency", 1, 8, "--output", path)
            finally:
                over.set()
        assert time.perf_counter() - start < 10
        assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ctrl_c)
    rows = cells(capsys.readouterr().out)
    assert rows[1, "server"]["requests"] == "3" and rows[1, "server"]["tok/s"] != "-"
    # Of the level that was cut there are answers, and their latencies, but no rates.
    assert int(rows[8, "server"]["requests"]) >= 1 and rows[8, "server"]["first"] != "-"
    assert rows[8, "server"]["tok/s"] == rows[8, "server"]["req/s"] == "-"
    document = json.loads(path.read_text())
    assert not document["complete"] and [level["seconds"] is None for level in document["levels"]] == [False, True]


def test_an_interruption_ends_the_requests_under_way(prompts):
    """In a process of its own: it ends at once, and the server hears of it."""
    waiting, gone = threading.Barrier(5), threading.Semaphore(0)

    def endless():
        try:
            yield from answer()[:2]
            yield lambda: waiting.wait(60)
            for _ in range(1000):
                yield 0.02
                yield answer()[1]
        finally:
            gone.release()

    def respond(text, tries):
        return answer() if (text, tries) == (PROMPTS[0], 1) else endless()

    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import argparse; from domino_spec.serving import load; parser = argparse.ArgumentParser(); "
        "load.add_arguments(parser); args = parser.parse_args(); args.argv = ['load']; load.run(args)"
    )
    with serving(respond) as (url, _):
        arguments = ["--server", url, "--prompts", str(prompts), "--concurrency", "4"]
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        waiting.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert all(gone.acquire(timeout=5) for _ in range(4))
    assert process.returncode != 0 and "KeyboardInterrupt" in err
    assert cells(out)[4, "server"]["requests"] == "0"


def test_a_server_that_is_not_there_is_named_in_one_line(prompts):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    with pytest.raises(
        InputError, match=f"^{url}/models lists no models \\(ConnectionRefusedError: .*refused"
    ) as caught:
        command("--server", url, "--prompts", prompts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("respond", "end", "message"),
    [
        (lambda text, tries: answer(), "", "lists no models .HTTPError: 404 Not Found: no such page.*end in /v1"),
        (lambda text, tries: 404, "/v1", "does not answer a chat request for the model m: HTTPError: 404 .*: said so"),
        (lambda text, tries: answer()[:-2], "/v1", "without the number of its tokens"),
        (lambda text, tries: ["this is no JSON"], "/v1", "JSONDecodeError"),
        (lambda text, tries: [{"choices": [{}]}], "/v1", "KeyError: 'delta'"),
    ],
    ids=["another base", "no chat", "no usage", "no JSON", "no answer"],
)
def test_a_server_that_cannot_be_measured_is_refused_before_any_work(respond, end, message, prompts):
    with serving(respond) as (url, got):
        with pytest.raises(InputError, match=message) as caught:
            command("--server", url.removesuffix("/v1") + end, "--prompts", prompts)
        assert "\n" not in str(caught.value) and len({request["text"] for request in got}) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "localhost:30000"], "No connection adapters|Invalid URL"),
        (["--server", "http://localhost:1/v1", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["--server", "http://localhost:1/v1", "--retries", "-1"], "--retries -1"),
        (["--server", "http://localhost:1/v1", "--output", "no/such/folder.json"], "no/such/folder.json"),
    ],
    ids=["no URL", "no prompts", "fewer than no retries", "no place for the output"],
)
def test_what_cannot_be_had_is_refused(arguments, message, prompts):
    with pytest.raises(InputError, match=message):
        command("--prompts", prompts, *arguments)
