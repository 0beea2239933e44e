# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a draft learn from? Conversations, with the assistant's own tokens supervised. What cannot be used is
named by file and line, counted and left out."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
# Problems of one kind that are named one by one; of more, the number is enough.
_NAMED = 5


@dataclass
class ChatRow:
    """
    One tokenised conversation, or a part of it.

    Attributes:
        input_ids (`list[int]`): S token ids.
        loss_mask (`list[int]`): S entries, 1 where the assistant wrote the token.
    """

    input_ids: list[int]
    loss_mask: list[int]


@dataclass
class DataReport:
    """
    What became of the conversations that were read.

    Attributes:
        num_read, num_rows (`int`): conversations found, and training rows made of them. Some chat templates rewrite
            earlier turns; then each answer is a row.
        num_cut (`int`): rows longer than allowed, whose end was cut off.
        problems (`dict[str, list[str]]`): places (`file:line`) of what was left out, by reason.
    """

    num_read: int = 0
    num_rows: int = 0
    num_cut: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, place: str, reason: str, detail: str = ""):
        """Count a conversation as unusable, and say so."""
        places = self.problems.setdefault(reason, [])
        places.append(place)
        if len(places) <= _NAMED:
            logger.warning(f"{place}: {reason}{f' ({detail})' if detail else ''}; left out.")

    @property
    def num_left_out(self) -> int:
        return sum(map(len, self.problems.values()))

    def __str__(self) -> str:
        lines = [f"{self.num_read} conversations read, {self.num_left_out} left out, {self.num_rows} rows made"]
        if self.num_cut:
            lines[0] += f", {self.num_cut} of them cut to length"
        lines += [
            f"  {reason}: {len(places)} ({', '.join(places[:_NAMED])}{', ...' if len(places) > _NAMED else ''})"
            for reason, places in self.problems.items()
        ]
        return "\n".join(lines)


def load_rows(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    vocab_size: int,
    mask_reasoning: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    split: str = "train",
) -> tuple[list[ChatRow], DataReport]:
    """
    All usable rows of a source, and what became of the others.

    Args:
        source (`str`): a jsonl or parquet file, or the id of a dataset on the Hub, with a column `messages`: lists of
            `{"role", "content"}`. A column `finished` may say whether the last answer came to its own end.
        tokenizer: of the target, with its chat template.
        max_length (`int`): tokens kept of a row.
        vocab_size (`int`): of the target: ids beyond it cannot be read.
        mask_reasoning (`bool`): do not supervise what stands between `<think>` and `</think>`.
        template_kwargs (`dict`, *optional*): for the chat template, as at generation time (`enable_thinking`, ...).
        split (`str`): of a Hub dataset.

    Raises:
        FileNotFoundError: when a file is not there.
        ValueError: when nothing of the source can be used; the message holds the report.
        ImportError: when parquet or the Hub needs `datasets`, which is not installed.
    """
    report, rows = DataReport(), []
    for place, conversation in read_conversations(source, report, split):
        try:
            encoded = encode_conversation(
                tokenizer,
                conversation["messages"],
                conversation.get("finished", True),
                mask_reasoning,
                template_kwargs,
            )
        except ValueError as error:
            report.leave_out(place, "the chat template refuses it", str(error))
            continue
        for row in encoded:
            if (highest := max(row.input_ids, default=0)) >= vocab_size:
                report.leave_out(place, "a token outside the target's vocabulary", f"{highest} of {vocab_size}")
                break
            cut = ChatRow(row.input_ids[:max_length], row.loss_mask[:max_length])
            if not any(a and b for a, b in zip(cut.loss_mask, cut.loss_mask[1:], strict=False)):
                report.leave_out(place, "no two supervised tokens in a row", f"within {max_length} tokens")
                continue
            report.num_cut += len(row.input_ids) > max_length
            report.num_rows += 1
            rows.append(cut)
    if not rows:
        raise ValueError(f"Nothing of {source} can be trained on: {report}")
    return rows, report


def read_conversations(
    source: str, report: DataReport, split: str = "train", answered: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    `(place, conversation)` for each usable conversation of a source (see [`load_rows`]); the others are reported.
    Without `answered`, those that have no answer yet are usable too, also as `turns`: what the user says, in order.
    """
    if Path(source).suffix in (".jsonl", ".json"):
        found = _read_jsonl(source, report)
    else:
        found = _read_dataset(source, split)
    for place, conversation in found:
        report.num_read += 1
        if not answered and isinstance(conversation, dict) and isinstance(conversation.get("turns"), list):
            turns = [{"role": "user", "content": turn} for turn in conversation["turns"]]
            conversation = {**conversation, "messages": turns}
        problem = _problem_of(conversation, answered)
        if problem is None:
            yield place, conversation
        else:
            report.leave_out(place, *problem)


def _read_jsonl(path: str, report: DataReport) -> Iterator[tuple[str, Any]]:
    # Read as bytes: one line in a foreign encoding must not cost the others.
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield place, json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                report.num_read += 1
                report.leave_out(place, "not UTF-8", str(error))
            except json.JSONDecodeError as error:
                report.num_read += 1
                report.leave_out(place, "not JSON", str(error))


def _read_dataset(source: str, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"Reading {source} needs the package datasets: pip install datasets.") from error
    if Path(source).suffix == ".parquet":
        if not Path(source).exists():
            raise FileNotFoundError(f"No such file: {source}")
        rows = datasets.Dataset.from_parquet(source)
    else:
        rows = datasets.load_dataset(source, split=split)
    for number, row in enumerate(rows):
        yield f"{source}:{number}", row


def _problem_of(conversation: Any, answered: bool) -> tuple[str, ...] | None:
    """Why a conversation cannot be used: reason and detail."""
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not isinstance(messages, list) or not messages:
        return ("no list of `messages`",)
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            return "a turn without a known `role`", f"turn {number} has {role!r}"
        content = message.get("content")
        if not isinstance(content, str):
            return "a turn whose `content` is not text", f"turn {number} has {type(content).__name__}"
        if not content.strip():
            return "an empty turn", f"turn {number}, of the {role}"
    if answered and not any(message["role"] == "assistant" for message in messages):
        return ("no turn of the assistant",)
    return None


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    finished: bool = True,
    mask_reasoning: bool = False,
    template_kwargs: dict[str, Any] | None = None,
) -> list[ChatRow]:
    """
    Tokenise a conversation and mark what the assistant wrote, its end-of-turn token included.

    Where the template marks generated text itself (`{% generation %}`), its word is taken. Else each answer is what
    the template adds to the conversation so far with its generation prompt. Templates that render earlier turns
    otherwise than last ones (they drop old reasoning, say) give one row for each answer, after the prompt that the
    target gets for it; so every token has the context that it has at generation time.

    An unfinished last answer ends with its own last token: the template's end of turn was never written.

    Args:
        tokenizer: with a chat template.
        messages: roles and contents.
        finished (`bool`): whether the last answer came to its own end.
        mask_reasoning (`bool`): do not supervise what stands between `<think>` and `</think>`.
        template_kwargs (`dict`, *optional*): for the chat template.

    Raises:
        ValueError: when the tokenizer has no chat template, or the template refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template")
    messages = list(messages)

    def render(upto: int, prompt: bool = False, **kwargs) -> Any:
        try:
            return tokenizer.apply_chat_template(
                messages[:upto],
                add_generation_prompt=prompt,
                tokenize=True,
                return_dict=True,
                **kwargs,
                **(template_kwargs or {}),
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"{type(error).__name__}: {error}") from error

    if re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)):
        rows = [_encode_marked(tokenizer, messages, render, finished)]
    else:
        whole = _encode_appended(tokenizer, messages, render, finished)
        if whole is not None:
            rows = [whole]
        else:
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            rows = [_encode_answer(tokenizer, messages, render, i, finished or i < turns[-1]) for i in turns]
    if mask_reasoning:
        for row in rows:
            _mask_reasoning(tokenizer, row)
    return rows


def _encode_marked(tokenizer, messages, render, finished: bool) -> ChatRow:
    encoded = render(len(messages), return_assistant_tokens_mask=True)
    input_ids, mask = list(encoded["input_ids"]), [int(m) for m in encoded["assistant_masks"]]
    if not finished and 1 in mask:
        start = _start_of_last_run(mask)
        stop = start + _written_length(tokenizer, input_ids[start:], messages[-1]["content"])
        input_ids, mask = input_ids[:stop], mask[:stop]
    return ChatRow(input_ids, mask)


def _start_of_last_run(mask: list[int]) -> int:
    stop = len(mask) - mask[::-1].index(1)
    return stop - next((i for i, m in enumerate(reversed(mask[:stop])) if not m), stop)


def _encode_appended(tokenizer, messages, render, finished: bool) -> ChatRow | None:
    """The whole conversation as one row, or `None` where the template does more than append."""
    input_ids: list[int] = []
    loss_mask: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = list(render(i, prompt=True)["input_ids"]), list(render(i + 1)["input_ids"])
        if after[: len(before)] != before or before[: len(input_ids)] != input_ids:
            return None
        answer = _answer_of(tokenizer, after[len(before) :], message["content"], finished or i < len(messages) - 1)
        loss_mask += [0] * (len(before) - len(input_ids)) + answer.loss_mask
        input_ids = before + answer.input_ids
    return ChatRow(input_ids, loss_mask)


def _encode_answer(tokenizer, messages, render, turn: int, finished: bool) -> ChatRow:
    """One turn after the prompt that the target gets for it."""
    content = messages[turn]["content"]
    before, after = list(render(turn, prompt=True)["input_ids"]), list(render(turn + 1)["input_ids"])
    if after[: len(before)] == before:
        answer = _answer_of(tokenizer, after[len(before) :], content, finished)
    else:
        # The prompt opens what the template drops from a finished turn (reasoning): what follows is the target's own.
        ids = list(tokenizer(content, add_special_tokens=False)["input_ids"])
        ids += [tokenizer.eos_token_id] * finished
        answer = ChatRow(ids, [1] * len(ids))
    return ChatRow(before + answer.input_ids, [0] * len(before) + answer.loss_mask)


def _answer_of(tokenizer, ids: list[int], content: str, finished: bool) -> ChatRow:
    """An answer as rendered, supervised up to and including its end of turn, which an unfinished one loses."""
    if not finished:
        ids = ids[: _written_length(tokenizer, ids, content)]
    ends = [i for i, token in enumerate(ids) if token in tokenizer.all_special_ids]
    # The line break that templates put behind the end of turn is not written.
    written = ends[0] + 1 if ends else len(ids)
    return ChatRow(ids, [1] * written + [0] * (len(ids) - written))


def _written_length(tokenizer, ids: list[int], content: str) -> int:
    """How many tokens of a rendered answer are the content itself: what follows is the template's end of turn."""
    ends = [i for i, token in enumerate(ids) if token in tokenizer.all_special_ids]
    return ends[0] if ends else len(tokenizer(content, add_special_tokens=False)["input_ids"])


def _mask_reasoning(tokenizer, row: ChatRow):
    """Take reasoning out of the supervised tokens, its tags included."""
    pieces = [tokenizer.decode([token]) for token in row.input_ids]
    ends, length = [], 0
    for piece in pieces:
        length += len(piece)
        ends.append(length)
    for match in re.finditer(r"<think>.*?(</think>|\Z)\s*", "".join(pieces), re.DOTALL):
        for i, (piece, end) in enumerate(zip(pieces, ends, strict=True)):
            if end > match.start() and end - len(piece) < match.end():
                row.loss_mask[i] = 0
