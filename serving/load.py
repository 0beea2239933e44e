# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a draft gain in a running server, with one request at a time and with many at once?

    domino-spec load --server http://localhost:30000/v1 --prompts mt-bench.jsonl
    domino-spec load --server http://localhost:30000/v1 --baseline http://localhost:30001/v1 \\
        --prompts gsm8k.jsonl mt-bench.jsonl --concurrency 1 4 16 --repeats 3 --output load.json

The servers are yours and run already: SGLang, vLLM, `transformers serve` or any other that streams OpenAI's chat
completions, `--server` with the draft and `--baseline` without it. Both get the same requests, by turns at every
concurrency, so that a machine whose speed drifts slows both alike. Ctrl-C ends the requests under way; what was
measured until then is printed and kept. A key in the environment variable OPENAI_API_KEY is sent along.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from tqdm.auto import tqdm

from ..evaluation.benchmark import InputError, add_prompt_arguments, open_prompts, positive_int, provenance
from ..evaluation.report import Prompt, format_number, format_table
from .client import Answer, Client, Rounds, Stopped, rounds_between

SERVER, BASELINE = "server", "baseline"

QUANTITIES = """\
What the table shows, for each number of requests under way at once:
    requests    answered ones: every prompt once, or prompts in turn up to twice the concurrency, in every repeat
    errors      requests that were not answered, after all retries
    tok/s       output tokens, as the server counts them / seconds of all the requests; the median over repeats
    ratio       median of the server / median of the baseline
    req/s       answered requests / seconds of all the requests; the median over repeats
    first, p95  ms until the first text of an answer: median and 95th percentile
    ms/tok      ms per output token after the first text; the median over requests
    tau         acceptance length: tokens / rounds, where the server tells them. SGLang and vLLM tell in each answer
                (vLLM: --per-request-spec-decode-metrics summary) or, with the requests of others, at /metrics
                (SGLang: --enable-metrics)
    identical   answers equal to the first one that the baseline (without one: the server) gave to the same prompt,
                at temperature 0. The baseline's own row shows how well it repeats itself when requests share passes.

A server that keeps prompts in a cache gives the first text of a repeated one sooner: switch that off (SGLang:
--disable-radix-cache, vLLM: --no-enable-prefix-caching), or read `first` with it in mind.
"""

_GRACE = 2.0  # seconds in which requests under way may end themselves
_PATIENCE = 8  # failures in a row, beyond one of every request under way, after which a server counts as gone
_SETTINGS = ("prompts", "num_prompts", "concurrency", "max_new_tokens", "temperature", "no_thinking", "repeats")


@dataclass
class Level:
    """
    The requests to one server at one concurrency, in one repeat.

    Attributes:
        server (`str`): `"server"` or `"baseline"`.
        answers (`list[Answer]`): in order of arrival.
        seconds (`float`, *optional*): of all of them together; None if that was interrupted.
        counted (`Rounds`, *optional*): what the server's counters counted meanwhile, requests of others included.
    """

    server: str
    concurrency: int
    repeat: int
    answers: list[Answer] = field(default_factory=list)
    seconds: float | None = None
    counted: Rounds | None = None

    @property
    def answered(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]


# ---- Measuring -----------------------------------------------------------------------------------------------------


def measure(client: Client, level: Level, prompts: Sequence[Prompt], on_answer: Callable[[], Any]) -> None:
    """
    Has `prompts` answered, `level.concurrency` at once. Answers are in `level` as soon as they arrive, also when an
    exception such as KeyboardInterrupt ends the waiting.

    Args:
        on_answer: called after each, for a progress bar.

    Raises:
        InputError: if so many requests fail in a row that the server seems to be gone.
    """
    import requests

    todo, arrived, stop = deque(prompts), queue.SimpleQueue[Answer](), threading.Event()

    def work() -> None:
        with requests.Session() as session, contextlib.suppress(Stopped, IndexError):  # the latter: all is done
            while not stop.is_set():
                arrived.put(client.ask(session, todo.popleft(), stop))

    # Not a pool's threads, for which a process waits when it ends.
    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(level.concurrency, len(prompts)))]
    before = client.counters()
    start, failed = time.perf_counter(), 0
    try:
        for worker in workers:
            worker.start()
        while len(level.answers) < len(prompts):
            answer = arrived.get()
            level.answers.append(answer)
            on_answer()
            failed = failed + 1 if answer.error else 0
            if failed >= level.concurrency + _PATIENCE:
                raise InputError(f"{client.url}: {failed} requests failed in a row, the last with {answer.error}")
        level.seconds = time.perf_counter() - start
    finally:
        stop.set()
        deadline = time.monotonic() + _GRACE
        for worker in filter(threading.Thread.is_alive, workers):
            worker.join(max(0.0, deadline - time.monotonic()))
    level.counted = rounds_between(before, client.counters())


def measure_all(
    clients: Mapping[str, Client],
    prompts: Sequence[Prompt],
    concurrencies: Sequence[int],
    repeats: int,
    levels: list[Level],
    on_level: Callable[[], Any],
) -> None:
    """Fills `levels`, the servers by turns; each is in there from its beginning. Raises as [`measure`] does."""
    # Every prompt once, but enough of them that the concurrency is kept up for a while.
    plans = {n: [prompts[i % len(prompts)] for i in range(max(len(prompts), 2 * n))] for n in concurrencies}
    total = repeats * len(clients) * sum(map(len, plans.values()))
    with tqdm(total=total, unit="request", file=sys.stderr) as bar:
        for repeat in range(repeats):
            for step, (concurrency, plan) in enumerate(plans.items()):
                names = list(clients)
                for name in names if (repeat + step) % 2 == 0 else reversed(names):  # nobody is always the first
                    bar.set_description(f"{name}, {concurrency} at once")
                    levels.append(Level(name, concurrency, repeat))
                    measure(clients[name], levels[-1], plan, bar.update)
                    on_level()


# ---- Sums ----------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of the values that `percent` of them do not exceed; None without any."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1] if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def summarise(levels: Sequence[Level], references: Mapping[str, str]) -> dict[str, Any]:
    """
    The `QUANTITIES` over levels of one server and concurrency, but for the ratio; None where there is nothing to tell.

    Args:
        references: answers to compare with, by the prompt's text.
    """
    answered = [answer for level in levels for answer in level.answered]
    whole = [(level.answered, level.seconds) for level in levels if level.seconds]
    token_rates = [sum(answer.tokens for answer in answers) / seconds for answers, seconds in whole]
    request_rates = [len(answers) / seconds for answers, seconds in whole]
    started = [(answer, answer.first_text) for answer in answered if answer.first_text]
    waits = [first for _, first in started]
    steps = [(answer.seconds - first) / (answer.tokens - 1) for answer, first in started if answer.tokens > 1]
    # Of these requests alone where the answers tell, else of all that the server did meanwhile.
    told = [answer.rounds for answer in answered if answer.rounds]
    parts = told or [level.counted for level in levels if level.counted]
    tokens, rounds = sum(part.tokens for part in parts), sum(part.rounds for part in parts)
    compared = [a.text == references[a.prompt.text] for a in answered if a.prompt.text in references]
    return {
        "requests": len(answered),
        "errors": sum(len(level.answers) for level in levels) - len(answered),
        "output_tokens": sum(answer.tokens for answer in answered),
        "tokens_per_second": _median(token_rates),
        "requests_per_second": _median(request_rates),
        "first_text_seconds": {"median": _median(waits), "p95": percentile(waits, 95)},
        "seconds_per_token": _median(steps),
        "acceptance_length": {"tokens": tokens, "rounds": rounds, "mean": tokens / rounds if rounds else None},
        "identical": sum(compared),
        "compared": len(compared),
    }


def summarise_all(levels: Sequence[Level], greedy: bool) -> list[dict[str, Any]]:
    """
    A [`summarise`] of each server at each concurrency, with `concurrency`, `server`, and the `ratio` of its tokens per
    second to those of the baseline. Texts are compared if the answers are `greedy`.
    """
    names = [name for name in (BASELINE, SERVER) if any(level.server == name for level in levels)]
    references: dict[str, str] = {}
    for level in levels:
        if greedy and level.server == names[0]:
            for answer in level.answered:
                references.setdefault(answer.prompt.text, answer.text)
    rows = []
    for concurrency in dict.fromkeys(level.concurrency for level in levels):
        base: float | None = None
        for name in names:
            members = [level for level in levels if (level.server, level.concurrency) == (name, concurrency)]
            row = summarise(members, references)
            rate = row["tokens_per_second"]
            ratio = rate / base if rate and base else None
            rows.append({"concurrency": concurrency, "server": name, "ratio": ratio, **row})
            base = rate
    return rows


def format_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of `domino-spec load`, from the output of [`summarise_all`]."""

    def ms(seconds: float | None) -> str:
        return format_number(None if seconds is None else 1000 * seconds, 1)

    def line(row: Mapping[str, Any]) -> list[str]:
        return [
            str(row["concurrency"]),
            row["server"],
            str(row["requests"]),
            str(row["errors"]),
            format_number(row["tokens_per_second"], 1),
            format_number(row["ratio"], 2, "x"),
            format_number(row["requests_per_second"]),
            ms(row["first_text_seconds"]["median"]),
            ms(row["first_text_seconds"]["p95"]),
            ms(row["seconds_per_token"]),
            format_number(row["acceptance_length"]["mean"]),
            f"{row['identical']}/{row['compared']}" if row["compared"] else "-",
        ]

    header = "at once,server,requests,errors,tok/s,ratio,req/s,first,p95,ms/tok,tau,identical".split(",")
    return format_table(header, list(map(line, rows)))


# ---- Command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec load`."""
    base = "base of a running server, such as http://localhost:30000/v1"
    name = "the name it serves the target under (default: the first that it lists)"
    parser.add_argument("--server", required=True, metavar="URL", help=f"{base}; with the draft")
    parser.add_argument("--model", help=name)
    parser.add_argument("--baseline", metavar="URL", help=f"{base}; without the draft")
    parser.add_argument("--baseline-model", metavar="MODEL", help=name)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        metavar="N",
        help="requests under way at once (default: 1 2 4 8 16 32)",
    )
    parser.add_argument("--max-new-tokens", type=positive_int, default=256, help="per answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--no-thinking", action="store_true", help="pass enable_thinking=False to the chat template")
    parser.add_argument("--repeats", type=positive_int, default=1, help="of everything (default: %(default)s)")
    parser.add_argument("--retries", type=int, default=3, help="tries after a failed one (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds without a byte that fail a try (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """
    Measures the servers, prints the table and writes `args.output`, which is written after every level already.

    Args:
        args: the options of [`add_arguments`], and as `argv` the arguments as typed, for the record.

    Returns:
        0, or 1 if some requests were not answered.

    Raises:
        InputError: if something asked for cannot be had, before anything is measured; or if a server is gone, when
            what was measured is printed and written.
        KeyboardInterrupt: on Ctrl-C or SIGTERM, likewise.
    """
    if importlib.util.find_spec("requests") is None:
        raise InputError('this command needs the package requests: pip install "domino-spec[train]"')
    if args.retries < 0:
        raise InputError(f"--retries {args.retries}: it cannot be less than 0")
    prompts = open_prompts(args)
    options: dict[str, Any] = {"max_tokens": args.max_new_tokens, "temperature": args.temperature}
    if args.no_thinking:
        options["chat_template_kwargs"] = {"enable_thinking": False}
    asked = {BASELINE: (args.baseline, args.baseline_model), SERVER: (args.server, args.model)}
    key = os.environ.get("OPENAI_API_KEY")
    clients = {
        name: Client(url, model, options, args.retries, args.timeout, key)
        for name, (url, model) in asked.items()
        if url is not None
    }
    for client in clients.values():
        client.connect(prompts[0])

    levels: list[Level] = []
    document: dict[str, Any] = {
        **provenance("domino-spec", args.argv),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "servers": {name: {"url": c.url, "model": c.model, "engine": c.engine} for name, c in clients.items()},
        "complete": False,
    }

    def sum_up() -> None:
        document["summary"] = summarise_all(levels, greedy=args.temperature == 0)
        document["levels"] = list(map(_record, levels))

    def keep() -> None:
        sum_up()
        if args.output is not None:
            args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    ending: BaseException | None = None
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # who ends it otherwise keeps the results too
    try:
        measure_all(clients, prompts, args.concurrency, args.repeats, levels, keep)
        document["complete"] = True
    except (KeyboardInterrupt, InputError, OSError) as error:  # the last: no room for the results
        ending = error
    finally:
        signal.signal(signal.SIGTERM, previous)
    sum_up()
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        for name, client in clients.items():
            print(f"{name}: {client.model} at {client.url}{f' ({client.engine})' if client.engine else ''}")
        print(f"{args.max_new_tokens} new tokens at most, temperature {args.temperature:g}")
        print(f"\n{format_summary(document['summary'])}\n")
        print("What the columns mean: domino-spec load --help")
        for reason in dict.fromkeys(answer.error for level in levels for answer in level.answers if answer.error):
            print(f"not answered: {reason}")
    keep()
    if ending:
        raise ending
    return int(any(row["errors"] for row in document["summary"]))


def _record(level: Level) -> dict[str, Any]:
    """What the results file keeps of a level: the counts and times of every request, but no text."""
    record = asdict(level)
    for answer in record["answers"]:
        del answer["text"]
        answer["prompt"] = answer["prompt"]["id"]
    return record
