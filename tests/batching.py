# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches for tests: left-padded prompts, and a draft whose acceptance is chosen row by row."""

import torch
from helpers import MASK_TOKEN, random_tokens
from test_generate_lossless import steering_states
from transformers.modeling_outputs import BaseModelOutput

from domino_spec.modeling_domino import DominoDraftModel


class GoodBatchDraft(DominoDraftModel):
    """
    A draft that proposes given texts, except at the positions in `spoiled`.

    Only the backbone's output is replaced, and the head's correction is zero: loop, rollout, caches and verification
    are those of every draft. The row is told by anchor and position, since rows come and go; where several texts
    agree on those, any will do.
    """

    texts: list[list[int]]
    spoiled: list[frozenset[int]]

    @classmethod
    def following(cls, draft: DominoDraftModel, target, texts, spoiled) -> "GoodBatchDraft":
        """`texts` are ids of prompt and continuation without padding, `spoiled` positions in them, one set a text."""
        good = cls(draft.config).to(draft.dtype).eval()
        good.load_state_dict(draft.state_dict())
        if draft.config.has_head:
            with torch.no_grad():
                good.embed_proj[2].weight.zero_()
        good.texts, good.spoiled = [list(text) for text in texts], [frozenset(places) for places in spoiled]
        good.states, good.embedding = steering_states(target), target.get_input_embeddings()
        return good

    def forward(
        self, noise_embeds, context_hidden_states, position_ids=None, attention_mask=None, cache=None, **kwargs
    ) -> BaseModelOutput:
        hidden = (
            super()
            .forward(noise_embeds, context_hidden_states, position_ids, attention_mask, cache, **kwargs)
            .last_hidden_state
        )
        block, vocab = noise_embeds.shape[1], self.config.vocab_size
        known = self.embedding(torch.arange(vocab, device=self.embedding.weight.device)).to(noise_embeds.device)
        anchors = torch.cdist(noise_embeds[:, 0].double(), known.double()).argmin(-1).tolist()
        rows = []
        for anchor, position in zip(anchors, position_ids.expand(len(anchors), -1)[:, -block].tolist(), strict=True):
            matches = [i for i, text in enumerate(self.texts) if position < len(text) and text[position] == anchor]
            row = matches[0] if matches else 0
            first = position + (1 if self.config.shift_label else 0)
            rows.append(torch.stack([self.states[self._proposal(row, first + k)] for k in range(block)]))
        return BaseModelOutput(last_hidden_state=torch.stack(rows).to(hidden))

    def _proposal(self, row: int, position: int) -> int:
        text = self.texts[row]
        token = text[position] if position < len(text) else 0
        return (token + 1) % self.config.vocab_size if position in self.spoiled[row] else token


def padded_batch(lengths: list[int], seed: int, pad: int = MASK_TOKEN) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the left: `input_ids` and `attention_mask` `[N, max(lengths)]`."""
    width = max(lengths)
    ids = random_tokens(len(lengths), width, seed=seed)
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    return {"input_ids": torch.where(mask.bool(), ids, pad), "attention_mask": mask}
