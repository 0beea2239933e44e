# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is decided so far? The token ids of a batch whose rows may differ in length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from transformers import LogitsProcessorList

from .processors import process

# Rows of a batch, to index a tensor's first dimension with.
Rows: TypeAlias = torch.LongTensor | slice


@dataclass
class Proposal:
    """
    Tokens offered after the anchors.

    Attributes:
        proposal_ids (`torch.LongTensor` of shape `[n, K]`): on the target's device.
        probabilities (`torch.FloatTensor` of shape `[n, K, V]`, *optional*): when sampling, the distribution that
            each was drawn from.
        finite (`torch.BoolTensor` of shape `[]`, *optional*): whether the logits they come from are finite numbers.
        seconds (`float`): wall-clock time of making them.
    """

    proposal_ids: torch.LongTensor
    probabilities: torch.Tensor | None = None
    finite: torch.Tensor | None = None
    seconds: float = 0.0


class Sequences:
    """
    Committed tokens of each row; behind them, the proposals under verification.

    Args:
        input_ids (`torch.LongTensor` of shape `[n, S]`): the prompts.

    Attributes:
        lengths (`list[int]`): committed tokens of each row, left padding of the prompt included.
        rows (`list[int]`): which rows of the batch these are; ended ones may have been let go.
    """

    def __init__(self, input_ids: torch.LongTensor):
        self._tokens = input_ids.long()
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]
        self.rows = list(range(input_ids.shape[0]))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    def reserve(self, extra: int):
        """Make room for `extra` tokens behind each row."""
        missing = max(self.lengths) + extra - self._tokens.shape[1]
        if missing > 0:
            # Grown by more than asked, so that a long answer is not copied at every round.
            space = self._tokens.new_zeros(len(self), max(missing, self._tokens.shape[1] // 2, 64))
            self._tokens = torch.cat([self._tokens, space], dim=1)

    def groups(self, rows: list[int], offset: int) -> Iterator[tuple[list[int], Rows, torch.LongTensor]]:
        """
        `rows` by length: the rows, an index for them and their tokens `[g, length + offset]`, proposals up to
        `offset` included.
        """
        by_length: dict[int, list[int]] = {}
        for row in rows:
            by_length.setdefault(self.lengths[row], []).append(row)
        for length, members in by_length.items():
            index = slice(None) if len(members) == len(self) else torch.tensor(members, device=self.device)
            yield members, index, self._tokens[index, : length + offset].contiguous()

    def process(
        self, logits_processor: LogitsProcessorList, members: list[int], prefix: torch.LongTensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Processed scores of a group, which is the whole batch unless all processors are row-wise."""
        if not logits_processor:
            return logits
        return process(logits_processor, [self.rows[row] for row in members], prefix, logits)

    def put(self, token_ids: torch.LongTensor, offset: int):
        """Write `token_ids` `[n]` at `offset` behind the committed tokens of each row, without committing them."""
        if len(set(self.lengths)) == 1:
            self._tokens[:, self.lengths[0] + offset] = token_ids
        else:
            columns = torch.tensor(self.lengths, device=self.device) + offset
            self._tokens[torch.arange(len(self), device=self.device), columns] = token_ids

    def put_block(self, token_ids: torch.LongTensor):
        """Write `token_ids` `[n, k]` behind the committed tokens of each row, without committing them."""
        if len(set(self.lengths)) == 1:
            self._tokens[:, self.lengths[0] : self.lengths[0] + token_ids.shape[1]] = token_ids
        else:
            first = torch.tensor(self.lengths, device=self.device)[:, None]
            self._tokens.scatter_(1, first + torch.arange(token_ids.shape[1], device=self.device), token_ids)

    def put_rows(self, rows: Rows, length: int, token_ids: torch.LongTensor):
        """Write `token_ids` `[g]` as token number `length` of `rows`."""
        self._tokens[rows, length] = token_ids

    def last(self) -> torch.LongTensor:
        """The anchors `[n, 1]`."""
        if len(set(self.lengths)) == 1:
            return self._tokens[:, self.lengths[0] - 1 : self.lengths[0]]
        columns = torch.tensor(self.lengths, device=self.device) - 1
        return self._tokens.gather(1, columns[:, None])

    def prefix(self, extra: int = 0) -> torch.LongTensor:
        """Committed tokens of all rows and `extra` behind them, `[n, length + extra]`, where rows are of one length."""
        return self._tokens[:, : self.lengths[0] + extra]

    def row(self, row: int) -> torch.LongTensor:
        """Committed tokens of one row, `[length]`."""
        return self._tokens[row, : self.lengths[row]]

    def keep(self, rows: list[int]):
        """Forget all other rows."""
        self._tokens = self._tokens[torch.tensor(rows, device=self.device)]
        self.lengths = [self.lengths[row] for row in rows]
        self.rows = [self.rows[row] for row in rows]
