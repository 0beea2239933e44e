# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Where does training text come from? From the target itself: a draft must learn what the target will write.

    domino-spec regenerate --prompts prompts.jsonl --output answers.jsonl
    domino-spec regenerate --server http://localhost:30000/v1 --model Qwen/Qwen3-8B --prompts chat.jsonl --output ...
    domino-spec regenerate --self-instruct 2000 --output answers.jsonl

The target answers every user turn, loaded here (in batches) or behind any OpenAI-compatible server, such as SGLang or
vLLM. Each row is written as soon as it is finished, and a run that was killed goes on where it stopped.
"""

import argparse
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from .data import DataReport, read_conversations

logger = logging.get_logger(__name__)

Messages = list[dict[str, str]]
T = TypeVar("T")


@dataclass
class Prompt:
    """
    What the target is asked.

    Attributes:
        id (`str`): by which a row is known to be done.
        messages (`list[dict]`): the turns before and between the target's answers, in order.
        temperature (`float`): 0 is greedy.
    """

    id: str
    messages: Messages
    temperature: float = 0.0


@dataclass
class Answered:
    """A conversation with the target's answers; `finished` says whether the last one came to its own end."""

    prompt: Prompt
    messages: Messages
    finished: bool


class Answerer(Protocol):
    """Who answers: yields conversations as they are finished, in any order."""

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answered]: ...


def regenerate(answerer: Answerer, prompts: Sequence[Prompt], path: str | Path) -> int:
    """
    Have `prompts` answered and append a row for each to `path` as it is finished: `{"id", "messages", "finished",
    "temperature"}`. Rows whose id `path` holds already are not made again; a line that a kill cut short is dropped
    first.

    Returns:
        How many prompts got no answer; each is named in a warning.

    Raises:
        ValueError: when two prompts have one id: the second would pass for done.
    """
    path = Path(path)
    if doubled := [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]:
        raise ValueError(f"Prompts share ids ({', '.join(doubled[:5])}): give each its own, or leave `id` out.")
    done = _finished_ids(path)
    missing = [prompt for prompt in prompts if prompt.id not in done]
    unanswered = {prompt.id for prompt in missing}
    with (
        open(path, "a", encoding="utf-8") as file,
        tqdm(total=len(prompts), initial=len(prompts) - len(missing), unit="row", desc="answers") as bar,
    ):
        for answered in answerer.answer(missing):
            row = {
                "id": answered.prompt.id,
                "messages": answered.messages,
                "finished": answered.finished,
                "temperature": answered.prompt.temperature,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            unanswered.discard(answered.prompt.id)
            bar.update()
    return len(unanswered)


def _finished_ids(path: Path) -> set[str]:
    """Ids of the complete rows of `path`; what follows the last line break is cut off."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return {str(json.loads(line).get("id")) for line in whole.splitlines() if line.strip()}


class LocalTarget:
    """
    The target in this process, batch by batch; prompts of like length share one.

    Args:
        target, tokenizer: the pair, with a chat template.
        batch_size (`int`): conversations answered at once.
        max_new_tokens (`int`): longest answer, in tokens.
        top_k (`int`): tokens that sampling chooses from; 0 for all.
        seed (`int`): of the sampling, together with the prompts of the batch.
        template_kwargs (`dict`, *optional*): for the chat template.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 64,
        max_new_tokens: int = 256,
        top_k: int = 40,
        seed: int = 0,
        template_kwargs: dict[str, Any] | None = None,
    ):
        self.target, self.tokenizer, self.batch_size, self.seed = target, tokenizer, batch_size, seed
        self.max_new_tokens, self.top_k = max_new_tokens, top_k
        self.template_kwargs = template_kwargs or {}

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answered]:
        by_kind: dict[float, list[Prompt]] = {}
        for prompt in sorted(prompts, key=lambda prompt: len(prompt.messages[0]["content"])):
            by_kind.setdefault(prompt.temperature, []).append(prompt)
        for kind in by_kind.values():
            for start in range(0, len(kind), self.batch_size):
                yield from self._answer_batch(kind[start : start + self.batch_size])

    def _answer_batch(self, prompts: list[Prompt]) -> list[Answered]:
        open_ = [Answered(prompt, [], True) for prompt in prompts]
        answered = []
        while open_:
            for conversation in open_:
                _ask(conversation)
            for conversation, (text, finished) in zip(open_, self._generate(open_), strict=True):
                conversation.messages.append({"role": "assistant", "content": text})
                conversation.finished = finished
            answered += [c for c in open_ if _is_over(c)]
            open_ = [c for c in open_ if not _is_over(c)]
        # What the target would not answer teaches nothing.
        return [c for c in answered if all(m["content"].strip() for m in c.messages)]

    @torch.inference_mode()
    def _generate(self, conversations: list[Answered]) -> list[tuple[str, bool]]:
        prompts = [
            self.tokenizer.apply_chat_template(
                conversation.messages, add_generation_prompt=True, return_dict=True, **self.template_kwargs
            )["input_ids"]
            for conversation in conversations
        ]
        # Padded here, since a tokenizer may know no padding; which token it is makes no difference.
        width, pad = max(map(len, prompts)), self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        temperature = conversations[0].prompt.temperature
        set_seed(_seed(self.seed, [conversation.prompt.id for conversation in conversations]))
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": bool(temperature),
            "pad_token_id": pad,
        }
        if temperature:
            options |= {"temperature": temperature, "top_k": self.top_k}
        device = self.target.device
        output = self.target.generate(ids.to(device), attention_mask=mask.to(device), **options)
        eos = self.target.generation_config.eos_token_id
        ends = set(eos) if isinstance(eos, list) else {eos}
        results = []
        for row in output[:, width:].tolist():
            length = next((k for k, token in enumerate(row) if token in ends), len(row))
            results.append((self.tokenizer.decode(row[:length], skip_special_tokens=True), length < len(row)))
        return results


class Server:
    """
    The target behind an OpenAI-compatible server.

    Args:
        url (`str`): its base, such as `http://localhost:30000/v1`.
        model (`str`): the name it serves the target under.
        concurrency (`int`): requests under way at once.
        max_new_tokens (`int`): longest answer, in tokens.
        retries (`int`): tries after a failed one, each after twice the wait; a prompt that fails them all is left out.
        template_kwargs (`dict`, *optional*): for the chat template, sent as `chat_template_kwargs`.
        api_key (`str`, *optional*), timeout (`float`, seconds): of the requests.
        wait (`float`): seconds before the first retry.
    """

    def __init__(
        self,
        url: str,
        model: str,
        concurrency: int = 32,
        max_new_tokens: int = 256,
        retries: int = 5,
        template_kwargs: dict[str, Any] | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        wait: float = 1.0,
    ):
        self.url, self.timeout = f"{url.rstrip('/')}/chat/completions", timeout
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model, self.concurrency, self.retries, self.wait = model, concurrency, retries, wait
        self.max_new_tokens = max_new_tokens
        self.extra = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answered]:
        with ThreadPoolExecutor(self.concurrency) as pool:
            waiting = {pool.submit(self._answer_one, prompt): prompt for prompt in prompts}
            try:
                for future in as_completed(waiting):
                    try:
                        answered = future.result()
                    except Exception as error:
                        logger.warning(f"{waiting[future].id}: no answer ({type(error).__name__}: {error}).")
                        continue
                    if all(message["content"].strip() for message in answered.messages):
                        yield answered
                    else:
                        logger.warning(f"{waiting[future].id}: an empty answer; left out.")
            except BaseException:
                # Nobody waits for the rest any more.
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _answer_one(self, prompt: Prompt) -> Answered:
        conversation = Answered(prompt, [], True)
        while not _is_over(conversation):
            _ask(conversation)
            choice = self._request(conversation)
            conversation.messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})
            conversation.finished = choice["finish_reason"] != "length"
        return conversation

    def _request(self, conversation: Answered) -> dict[str, Any]:
        # Not needed without a server, nor installed with the package alone.
        import requests

        body: Any = {
            "model": self.model,
            "messages": conversation.messages,
            "max_tokens": self.max_new_tokens,
            "temperature": conversation.prompt.temperature,
            **self.extra,
        }

        def post() -> dict[str, Any]:
            response = requests.post(self.url, json=body, headers=self.headers, timeout=self.timeout)
            response.raise_for_status()
            return response.json()["choices"][0]

        return retried(post, self.retries, self.wait)


def retried(request: Callable[[], T], retries: int, wait: float, sleep: Callable[[float], Any] = time.sleep) -> T:
    """
    What `request()` returns, made again where it fails: after `wait` seconds, then each time after twice as long.

    Args:
        request: raises a `requests.RequestException` where it fails.
        retries (`int`): tries after the first.
        sleep: waits so many seconds.

    Raises:
        requests.RequestException: of the last try, or of the first that the server refused.
    """
    import requests

    for attempt in range(retries + 1):
        try:
            return request()
        except requests.RequestException as error:
            status = None if error.response is None else error.response.status_code
            # What the server will not take now, it will not take later either.
            refused = status is not None and 400 <= status < 500 and status not in (408, 429)
            if refused or attempt == retries:
                raise
        # Spread out, so that all do not come back at once.
        sleep(wait * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returns or raises")


def _ask(conversation: Answered):
    """Add the turns up to the next answer."""
    asked = conversation.prompt.messages
    done = sum(message["role"] != "assistant" for message in conversation.messages)
    for message in asked[done:]:
        conversation.messages.append(dict(message))
        if message["role"] == "user":
            return


def _is_over(conversation: Answered) -> bool:
    """Whether all turns are answered; none follows an answer that was cut off, or is empty."""
    if not conversation.messages:
        return False
    done = sum(message["role"] != "assistant" for message in conversation.messages)
    silent = conversation.messages[-1]["role"] == "assistant" and not conversation.messages[-1]["content"].strip()
    return done == len(conversation.prompt.messages) or not conversation.finished or silent


def _seed(seed: int, ids: list[str]) -> int:
    return int.from_bytes(hashlib.blake2b(repr((seed, ids)).encode(), digest_size=4).digest(), "big")


def read_prompts(source: str, temperatures: Sequence[float] = (0.0,), split: str = "train") -> list[Prompt]:
    """
    Prompts of a file or dataset: rows with `turns` (user turns, in order), or with `messages`, whose answers are
    dropped. Prompt i is asked at `temperatures[i % len(temperatures)]`.

    Raises:
        ValueError: when nothing of the source can be asked.
    """
    report = DataReport()
    prompts: list[Prompt] = []
    for place, row in read_conversations(source, report, split, answered=False):
        messages = [message for message in row["messages"] if message["role"] in ("system", "developer", "user")]
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            report.leave_out(place, "no turn of the user")
            continue
        temperature = temperatures[len(prompts) % len(temperatures)]
        prompts.append(Prompt(str(row.get("id") or place), messages, temperature))
    if not prompts:
        raise ValueError(f"Nothing of {source} can be asked: {report}")
    return prompts


@torch.inference_mode()
def self_instruct(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[str]:
    """
    User turns that the target itself thinks likely: it is shown its chat template up to where the user would speak,
    and goes on from there. Source: Magpie, arXiv 2406.08464.

    Args:
        target, tokenizer: the pair, with a chat template.
        count (`int`): distinct prompts wanted; fewer where the target repeats itself.
        max_new_tokens (`int`): longest prompt, in tokens; what is not finished by then is dropped.
        batch_size (`int`), temperature (`float`), seed (`int`): of the sampling.
    """
    mark = "\x00"
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False))
    before = text[: text.index(mark)]
    # The template ends a turn with a token of its own, or with the end of sequence.
    after = tokenizer(text[text.index(mark) + 1 :], add_special_tokens=False)["input_ids"]
    ends = {token for token in (*after[:1], tokenizer.eos_token_id) if token is not None}
    inputs = tokenizer(before, add_special_tokens=False, return_tensors="pt").to(target.device)
    prompts: dict[str, None] = {}
    with tqdm(total=count, unit="prompt", desc="prompts of the target's own") as bar:
        for number in range(4 * -(-count // batch_size)):
            set_seed(seed + number)
            output = target.generate(
                **inputs,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                num_return_sequences=batch_size,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(ends),
                pad_token_id=min(ends),
            )
            for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
                length = next((k for k, token in enumerate(ids) if token in ends), None)
                prompt = "" if length is None else tokenizer.decode(ids[:length], skip_special_tokens=True).strip()
                if prompt and prompt not in prompts and len(prompts) < count:
                    prompts[prompt] = None
                    bar.update()
            if len(prompts) == count:
                break
    return list(prompts)


def add_arguments(parser: argparse.ArgumentParser):
    """The arguments of `domino-spec regenerate`."""
    parser.add_argument("--output", required=True, help="jsonl file to extend")
    parser.add_argument("--prompts", nargs="+", default=[], help="files or Hub ids: rows with `turns` or `messages`")
    parser.add_argument("--self-instruct", type=int, metavar="N", help="ask N prompts that the target made up")
    parser.add_argument("--target", default="default", help="Hub id or folder (default: the embedded draft's target)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--server", metavar="URL", help="have an OpenAI-compatible server answer instead")
    parser.add_argument("--model", help="the name it serves the target under (default: --target)")
    parser.add_argument("--concurrency", type=int, default=32, help="requests under way at once")
    parser.add_argument("--batch-size", type=int, default=64, help="conversations at once, without a server")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="taken in turn; 0 is greedy")
    parser.add_argument("--chat-template-kwargs", type=json.loads, help='JSON, such as {"enable_thinking": false}')
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """
    Carry out `domino-spec regenerate`.

    Returns:
        0, or 1 if some prompts got no answer.

    Raises:
        ValueError: when there is nothing to ask, or the server cannot make prompts up.
    """
    if not args.prompts and not args.self_instruct:
        raise ValueError("there is nothing to ask: give --prompts, or --self-instruct")
    if args.server and args.self_instruct:
        raise ValueError("--self-instruct needs the target in this process: make the prompts first, without --server")
    prompts = [prompt for source in args.prompts for prompt in read_prompts(source, args.temperatures)]
    answerer: Answerer
    if args.server:
        answerer = Server(
            args.server,
            args.model or args.target,
            args.concurrency,
            args.max_new_tokens,
            template_kwargs=args.chat_template_kwargs,
        )
    else:
        from .recipe import TargetArguments, load_target

        target, tokenizer = load_target(TargetArguments(args.target, args.dtype))
        target = target.to(args.device)
        if args.self_instruct:
            made = self_instruct(target, tokenizer, args.self_instruct, seed=args.seed)
            prompts += [
                Prompt(
                    f"self/{args.seed}/{i}",
                    [{"role": "user", "content": text}],
                    args.temperatures[i % len(args.temperatures)],
                )
                for i, text in enumerate(made)
            ]
        answerer = LocalTarget(
            target,
            tokenizer,
            args.batch_size,
            args.max_new_tokens,
            seed=args.seed,
            template_kwargs=args.chat_template_kwargs,
        )
    unanswered = regenerate(answerer, prompts, args.output)
    print(f"{len(prompts) - unanswered} of {len(prompts)} conversations are in {args.output}")
    return int(unanswered > 0)
