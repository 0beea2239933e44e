# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a draft learn from? Chat rows, with the assistant's own tokens supervised."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass
class ChatRow:
    """
    One tokenised conversation.

    Attributes:
        input_ids (`list[int]`): S token ids.
        loss_mask (`list[int]`): S entries, 1 where the assistant wrote the token.
    """

    input_ids: list[int]
    loss_mask: list[int]


def read_chat_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """
    Rows of a jsonl file, each `{"messages": [{"role", "content"}, ...], "finished": bool}`; `finished` is optional
    and says whether the last answer came to its own end.

    Raises:
        ValueError: naming file and line, when a row is not JSON or its messages lack a role or content.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is not JSON ({error}).") from error
            messages = row.get("messages") if isinstance(row, dict) else None
            if not messages or not all(isinstance(m, dict) and m.get("role") and m.get("content") for m in messages):
                raise ValueError(
                    f"{path}:{number} has no usable `messages`: each needs a non-empty `role` and `content`."
                )
            yield row


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], max_length: int, finished: bool = True
) -> ChatRow:
    """
    Tokenise a conversation and mark what the assistant wrote, its end-of-turn token included.

    Each answer is found as what the template adds to the conversation so far (with its generation prompt). An
    unfinished last answer ends with its own last token: the template's end of turn was never written by the target.

    Args:
        tokenizer: with a chat template.
        messages: roles and contents.
        max_length (`int`): tokens kept; the rest of the row is cut.
        finished (`bool`): whether the last answer came to its own end.

    Raises:
        ValueError: when the template rewrites earlier turns, so that an answer has no span of its own.
    """

    def render(upto: int, prompt: bool) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            messages[:upto], add_generation_prompt=prompt, tokenize=True, return_dict=True
        )
        return list(encoded["input_ids"])

    input_ids: list[int] = []
    loss_mask: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(i, True), render(i + 1, False)
        if after[: len(before)] != before or before[: len(input_ids)] != input_ids:
            raise ValueError(
                f"The chat template renders turn {i} differently once more turns follow, so the answer's tokens "
                "cannot be told apart. Use a template that only appends."
            )
        last = i == len(messages) - 1
        answer = after[len(before) :]
        if last and not finished:
            answer = answer[: _written_length(tokenizer, answer, message["content"])]
        loss_mask += [0] * (len(before) - len(input_ids)) + _supervised(tokenizer, answer)
        input_ids = before + answer
    return ChatRow(input_ids[:max_length], loss_mask[:max_length])


def _written_length(tokenizer, answer: list[int], content: str) -> int:
    """How many tokens of `answer` are the content itself: what follows is the template's end of turn."""
    ends = [i for i, token in enumerate(answer) if token in tokenizer.all_special_ids]
    return ends[0] if ends else len(tokenizer(content, add_special_tokens=False)["input_ids"])


def _supervised(tokenizer, answer: list[int]) -> list[int]:
    """1 up to and including the end-of-turn token; the line break that templates put behind it is not written."""
    ends = [i for i, token in enumerate(answer) if token in tokenizer.all_special_ids]
    length = ends[0] + 1 if ends else len(answer)
    return [1] * length + [0] * (len(answer) - length)
