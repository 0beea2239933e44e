# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How is a running server asked? One that streams OpenAI's chat completions, and what each engine tells beside them."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..evaluation.benchmark import InputError
from ..evaluation.report import Prompt
from ..training.regenerate import retried

# Where the stream of an answer tells the accepted proposals and the rounds.
# SGLang: in an event of its own, for requests with `return_spec_tokens_details` (sgl-project/sglang#33518).
# vLLM: beside the usage (docs/features/speculative_decoding/acceptance_metrics.md).
_TOLD_IN_ANSWERS = (
    ("sglext", "spec_tokens_details", "spec_num_correct_drafts", "spec_verify_ct"),
    ("metrics", "speculative_decoding", "num_accepted_draft_tokens", "num_spec_steps"),
)
# Counters at /metrics. vLLM: v1/spec_decode/metrics.py, which gives the acceptance length as 1 + accepted / drafts.
# SGLang: observability/metrics_collector.py; counts an answer when it is finished, with the token of its prefill, which
# belongs to no round. (Its `avg_spec_accept_length` in /get_server_info is a mean over the server's whole life, and
# its gauges are means over the last interval: neither tells about the requests of a level.)
_VLLM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_VLLM_ROUNDS = "vllm:spec_decode_num_drafts_total"
_SGLANG_TOKENS = "sglang:generation_tokens_total"
_SGLANG_REQUESTS = "sglang:num_requests_total"
_SGLANG_ROUNDS = "sglang:spec_verify_calls_total"
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)")


class Rounds(NamedTuple):
    """Tokens that rounds committed, and how many rounds; divided last."""

    tokens: float
    rounds: float


@dataclass(frozen=True)
class Answer:
    """
    One request, in its last try.

    Attributes:
        prompt (`Prompt`): what was asked.
        error (`str`, *optional*): why there is no answer; then what follows says nothing.
        tokens (`int`): of the output, as the server counts them.
        seconds (`float`), first_text (`float`, *optional*): from sending to the end, and to the first text.
        text (`str`): the answer, reasoning included.
        rounds (`Rounds`, *optional*): of this answer, where the server tells them with it.
    """

    prompt: Prompt
    error: str | None = None
    tokens: int = 0
    seconds: float = 0.0
    first_text: float | None = None
    text: str = ""
    rounds: Rounds | None = None


class Stopped(Exception):
    """Nobody waits for the answer any more."""


class Client:
    """
    One server, and how it is asked.

    Args:
        url (`str`): its base, such as `http://localhost:30000/v1`.
        model (`str`, *optional*): the name it serves the target under; default: the first that it lists.
        options (`dict`): what every request says besides model and messages.
        retries (`int`): tries after a failed one, each after twice the wait.
        timeout (`float`): seconds without a byte that fail a try.
        api_key (`str`, *optional*): sent as bearer token.
    """

    wait = 1.0  # seconds before the first retry

    def __init__(
        self,
        url: str,
        model: str | None,
        options: Mapping[str, Any],
        retries: int = 3,
        timeout: float = 600.0,
        api_key: str | None = None,
    ):
        self.url, self.model, self.retries, self.timeout = url.rstrip("/"), model, retries, timeout
        self.options = {**options, "stream": True, "stream_options": {"include_usage": True}}
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.engine: str | None = None

    def connect(self, prompt: Prompt) -> None:
        """
        Finds out who is there, and has a first prompt answered, which is not measured.

        Raises:
            InputError: if no server answers, or none that streams chat completions.
        """
        import requests

        try:
            response = requests.get(f"{self.url}/models", headers=self.headers, timeout=30)
            _raise_for_status(response)
            listed = {model["id"]: model.get("owned_by") for model in response.json()["data"]}
        except (requests.RequestException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.url}/models lists no models ({_reason(error)}): is a server with OpenAI's API running there, "
                "and does its base end in /v1?"
            ) from error
        self.model = self.model or next(iter(listed), None)
        # SGLang and vLLM write their names there.
        self.engine = listed.get(self.model)
        if self.engine == "sglang":  # others may refuse what they do not know
            self.options["return_spec_tokens_details"] = True
        with requests.Session() as session:
            answer = self.ask(session, prompt, threading.Event())
        if answer.error:
            raise InputError(f"{self.url} does not answer a chat request for the model {self.model}: {answer.error}")

    def ask(self, session: Any, prompt: Prompt, stop: threading.Event) -> Answer:
        """
        A prompt's answer, or the reason why there is none.

        Raises:
            Stopped: once `stop` is set.
        """

        def sleep(seconds: float) -> None:
            if stop.wait(seconds):
                raise Stopped

        try:
            return retried(lambda: self._stream(session, prompt, stop), self.retries, self.wait, sleep)
        except Stopped:
            raise
        except Exception as error:
            return Answer(prompt, error=_reason(error))

    def _stream(self, session: Any, prompt: Prompt, stop: threading.Event) -> Answer:
        import requests

        url = f"{self.url}/chat/completions"
        body = {**self.options, "model": self.model, "messages": [{"role": "user", "content": prompt.text}]}
        first_text, texts, usage, rounds = None, [], None, None
        start, seconds = time.perf_counter(), 0.0
        with session.post(url, json=body, headers=self.headers, timeout=(30, self.timeout), stream=True) as response:
            _raise_for_status(response)
            for line in response.iter_lines(chunk_size=None):  # each as it comes
                if stop.is_set():
                    raise Stopped
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = json.loads(line[5:])
                seconds = time.perf_counter() - start
                if event.get("error"):
                    raise requests.RequestException(f"the server broke off: {event['error']}")
                for choice in event.get("choices") or ():
                    # Servers that take the reasoning out of an answer call it one or the other.
                    for part in ("reasoning_content", "reasoning", "content"):
                        if text := choice["delta"].get(part):
                            first_text = first_text or seconds
                            texts.append(text)
                usage = event.get("usage") or usage
                rounds = _rounds_told(event) or rounds
        if not usage:
            raise requests.RequestException("the stream ended without the number of its tokens (usage)")
        return Answer(prompt, None, int(usage["completion_tokens"]), seconds, first_text, "".join(texts), rounds)

    def counters(self) -> dict[str, float]:
        """The server's counters by name, summed over their labels; empty where it shows none."""
        import requests

        try:
            response = requests.get(f"{self.url.removesuffix('/v1')}/metrics", headers=self.headers, timeout=30)
        except requests.RequestException:
            return {}
        sums: dict[str, float] = {}
        for line in response.text.splitlines() if response.ok else ():
            with contextlib.suppress(ValueError):
                if sample := _SAMPLE.match(line):
                    sums[sample[1]] = sums.get(sample[1], 0.0) + float(sample[2])
        return sums


def _rounds_told(event: Mapping[str, Any]) -> Rounds | None:
    for group, name, accepted, rounds in _TOLD_IN_ANSWERS:
        details = (event.get(group) or {}).get(name) or {}
        if accepted in details and rounds in details:
            return Rounds(details[accepted] + details[rounds], details[rounds])
    return None


def rounds_between(before: Mapping[str, float], after: Mapping[str, float]) -> Rounds | None:
    """What a server's counters, read twice, say about the rounds between; None where they say nothing."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    if grown.get(_VLLM_ROUNDS, 0) > 0 and _VLLM_ACCEPTED in grown:
        return Rounds(grown[_VLLM_ROUNDS] + grown[_VLLM_ACCEPTED], grown[_VLLM_ROUNDS])
    if grown.get(_SGLANG_ROUNDS, 0) > 0 and {_SGLANG_TOKENS, _SGLANG_REQUESTS} <= grown.keys():
        return Rounds(grown[_SGLANG_TOKENS] - grown[_SGLANG_REQUESTS], grown[_SGLANG_ROUNDS])
    return None


def _raise_for_status(response: Any) -> None:
    """As the response's own method, but with what the server says."""
    import requests

    if not response.ok:
        said = " ".join(response.text.split())[:200]
        raise requests.HTTPError(f"{response.status_code} {response.reason}: {said}", response=response)


def _reason(error: BaseException) -> str:
    """What lies at the bottom of an error, in one line: the layers above it only repeat the address."""
    while below := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = below
    return " ".join(f"{type(error).__name__}: {error}".split())
