# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does `return_dict_in_generate` ask for? Kept here token by token, as plain `generate` gives it."""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer


class Record:
    """
    Scores, logits, hidden states and attentions, one entry per new token; `None` where not asked for.

    Args:
        config (`GenerationConfig`): says what is asked for.
        num_rows (`int`): rows of the batch (N). Where a row has no token any more, entries hold zeros.
    """

    def __init__(self, config: GenerationConfig, num_rows: int):
        self.num_rows = num_rows
        wanted = config.return_dict_in_generate
        self.scores: list | None = [] if wanted and config.output_scores else None
        self.logits: list | None = [] if wanted and config.output_logits else None
        self.hidden_states: list | None = [] if wanted and config.output_hidden_states else None
        self.attentions: list | None = [] if wanted and config.output_attentions else None

    def add_prefill(self, outputs: Any, logits: torch.Tensor, scores: list[torch.Tensor]):
        """The pass over the prompt: its states stay whole. `logits` is `[N, 1, V]`."""
        if self.scores is not None:
            self.scores.append(scores[0])
        if self.logits is not None:
            self.logits.append(logits[:, 0])
        if self.hidden_states is not None:
            self.hidden_states.append(outputs.hidden_states)
        if self.attentions is not None:
            self.attentions.append(outputs.attentions)

    def add_round(self, outputs: Any, cache: Cache, logits: torch.Tensor, scores: list[torch.Tensor], num_new: int):
        """
        A round that all rows leave with equally many tokens.

        Args:
            outputs: of the target, over anchors and proposals.
            cache: of the target; knows which layers slide.
            logits (`torch.Tensor` of shape `[N, K + 1, V]`): unprocessed.
            scores (`list` of `[N, V]`): processed, for each offset.
            num_new (`int`): how many tokens each row committed.
        """
        if self.scores is not None:
            self.scores += scores[:num_new]
        if self.logits is not None:
            self.logits += [logits[:, k] for k in range(num_new)]
        if self.hidden_states is not None:
            self.hidden_states += [tuple(s[:, k : k + 1] for s in outputs.hidden_states) for k in range(num_new)]
        if self.attentions is not None:
            # Attention backends that keep no maps give an empty tuple.
            pairs = list(zip(outputs.attentions, cache.layers, strict=False))
            self.attentions += [tuple(_row(attention, k, layer) for attention, layer in pairs) for k in range(num_new)]

    def add_ragged_round(
        self,
        outputs: Any,
        logits: torch.Tensor,
        scores: list[torch.Tensor],
        rows: list[int],
        first: list[int],
        num_new: list[int],
    ):
        """
        A round in which each row advances at its own pace; attentions cannot be had from it.

        Args:
            outputs, logits, scores: as above, for the n rows that still run.
            rows (`list[int]`): which rows of the batch these are.
            first (`list[int]`): the number of each row's first new token in this round.
            num_new (`list[int]`): how many tokens each committed.
        """
        for entry, (row, start, count) in enumerate(zip(rows, first, num_new, strict=True)):
            for k in range(count):
                if self.scores is not None:
                    self._put(self.scores, start + k, row, scores[k][entry])
                if self.logits is not None:
                    self._put(self.logits, start + k, row, logits[entry, k])
                if self.hidden_states is not None:
                    if len(self.hidden_states) == start + k:
                        self.hidden_states.append(
                            tuple(s.new_zeros(self.num_rows, 1, s.shape[-1]) for s in outputs.hidden_states)
                        )
                    for whole, states in zip(self.hidden_states[start + k], outputs.hidden_states, strict=True):
                        whole[row] = states[entry, k : k + 1]

    def _put(self, entries: list[torch.Tensor], number: int, row: int, value: torch.Tensor):
        if len(entries) == number:
            entries.append(value.new_zeros(self.num_rows, *value.shape))
        entries[number][row] = value

    def as_output(self) -> dict[str, tuple | None]:
        """The four fields of `generate`'s output."""
        fields = ("scores", "logits", "hidden_states", "attentions")
        return {name: None if (kept := getattr(self, name)) is None else tuple(kept) for name in fields}


def _row(attention: torch.Tensor, k: int, layer: CacheLayerMixin) -> torch.Tensor:
    """What token k of a round saw: `[N, heads, 1, keys]`, without the proposals after it and the keys out of reach."""
    row = attention[:, :, k : k + 1]
    if isinstance(layer, StaticLayer):
        # As many keys as there is room for, also in plain decoding; those not yet written have no weight.
        return row
    stop = attention.shape[-1] - (attention.shape[-2] - 1 - k)
    return row[..., max(0, stop - layer.sliding_window) if layer.is_sliding else 0 : stop]
