# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tokens of an answer came from the draft? A streamer that shows it while the answer is written."""

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

_GREEN, _RESET = "\x1b[1;32m", "\x1b[0m"


class AcceptanceStreamer(BaseStreamer):
    """
    Writes an answer while it is generated, with the tokens that the draft proposed between two marks.

    It relies on how the Domino loop streams: the prompt first, then one call per round with the tokens the round
    committed, accepted proposals first and the target's own bonus token last. (In a round that an end token or the
    length limit cut short, the last token may be a proposal too; it counts as the target's here.) A character whose
    bytes are spread over several tokens is written, and marked, with the token that completes it.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
        write: takes each piece of text.
        marks: what to write before and after a stretch of accepted tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], Any], marks: tuple[str, str]):
        self.tokenizer = tokenizer
        self.write = write
        self.marks = marks
        self._reset()

    def _reset(self) -> None:
        self._prompt_expected = True
        self._marking = False
        self._tokens: list[int] = []  # of the current line; earlier lines need not be decoded again
        self._written = 0  # characters of their text that were written
        self._accepted = False  # whether the newest token was accepted

    def put(self, value: Tensor) -> None:
        """
        Takes the prompt, then the tokens of one round.

        Args:
            value: long [n] or [1, n].

        Raises:
            ValueError: if there is more than one row.
        """
        if value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(f"AcceptanceStreamer writes one row, but got a batch of {value.shape[0]}")
        if self._prompt_expected:
            self._prompt_expected = False
            return
        *accepted, bonus_token = value.flatten().tolist()
        for token in accepted:
            self._add(token, accepted=True)
        self._add(bonus_token, accepted=False)

    def end(self) -> None:
        """Writes what was held back and ends the line. The streamer can then be used for another answer."""
        self._write_text(self._decode()[self._written :])
        self._mark(False)
        self.write("\n")
        self._reset()

    def _add(self, token: int, accepted: bool) -> None:
        self._tokens.append(token)
        self._accepted = accepted
        text = self._decode()
        if text.endswith("\ufffd"):  # so far an incomplete character
            return
        self._write_text(text[self._written :])
        self._written = len(text)
        if text.endswith("\n"):
            # Some tokenizers drop the space before the first token they decode, so the newest one is kept.
            self._tokens = [token]
            self._written = len(self._decode())

    def _decode(self) -> str:
        return self.tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _write_text(self, text: str) -> None:
        if text:
            self._mark(self._accepted)
            self.write(text)

    def _mark(self, marking: bool) -> None:
        if marking != self._marking:
            self.write(self.marks[0] if marking else self.marks[1])
            self._marking = marking


def choose_marks(stream: TextIO, no_color: bool = False) -> tuple[str, str]:
    """
    Marks for accepted text on `stream`: bold green on a terminal, brackets where colour is unwanted (`no_color`, the
    environment variable NO_COLOR, a dumb terminal) or would end up in a file.
    """
    plain_wanted = no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if stream.isatty() and not plain_wanted:
        return _GREEN, _RESET
    try:
        "⟦⟧".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "{", "}"
    return "⟦", "⟧"


def write_now(text: str) -> None:
    """Write to standard output without waiting for the line to end."""
    sys.stdout.write(text)
    sys.stdout.flush()
