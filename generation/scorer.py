# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What may a draft propose, and how likely is each? Base logits, and the head's correction of them token by token."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import logging

from .context import TargetParts, is_plain_linear

logger = logging.get_logger(__name__)


class UnrolledHead:
    """
    The head of a draft, one token at a time, whatever it is made of: adapters have their say.

    Args:
        draft (`DominoDraftModel`): whose head it is.
        token_ids (`torch.LongTensor` of shape `[V]`, *optional*): the only ids to score.
    """

    def __init__(self, draft, token_ids: torch.LongTensor | None):
        self.draft, self.token_ids = draft, token_ids

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a block's draft hidden `[n, K, H]` alone says: `[n, K, ...]`, whose entry k goes to `correction`."""
        return hidden

    def step(self, token_embeds: torch.Tensor, prefix_state: torch.Tensor | None) -> torch.Tensor:
        """The prefix state `[n, G]` after one more token, of target embeddings `[n, H]`."""
        return self.draft.step(token_embeds, prefix_state)

    def correction(
        self, begun: torch.Tensor, prefix_state: torch.Tensor, places: torch.LongTensor | None
    ) -> torch.Tensor:
        """
        Correction logits `[n, V]`.

        Args:
            begun (`torch.Tensor` of shape `[n, ...]`): of the position, an entry of `begin`.
            prefix_state (`torch.Tensor` of shape `[n, G]`): after the tokens before it.
            places (`torch.LongTensor` of shape `[n, V]`, *optional*): the only ones to score of what may be proposed.
        """
        token_ids = None if self.token_ids is None else self.token_ids.to(begun.device)
        logits = self.draft.correction(begun, prefix_state, token_ids)
        return logits if places is None else logits.gather(-1, places)


class PlainHead:
    """
    [`UnrolledHead`] for a head of plain matrices, with less to do in each step: the share of the bottleneck that does
    not depend on the tokens is computed for the whole block at once, and the GRU is called as a cell.
    """

    def __init__(self, draft, token_ids: torch.LongTensor | None):
        first, last = draft.embed_proj[0], draft.embed_proj[2]
        width = draft.config.hidden_size
        self.weight_ih, self.weight_hh = draft.prefix_gru.weight_ih_l0, draft.prefix_gru.weight_hh_l0
        self.weight_hidden, self.weight_state = (
            part.contiguous() for part in first.weight.split([width, first.in_features - width], dim=1)
        )
        self.weight_out = last.weight if token_ids is None else last.weight[token_ids.to(last.weight.device)]

    @staticmethod
    def suits(draft) -> bool:
        """Whether the head of `draft` is nothing but its own weights, at hand."""
        gru, projection = draft.prefix_gru, draft.embed_proj
        # A class of the user's may compute another head with them.
        names = ("prefix_states", "step", "correction", "bottleneck")
        makers = {next(cls for cls in type(draft).__mro__ if name in vars(cls)) for name in names}
        return (
            len(makers) == 1
            and type(gru) is nn.GRU
            and type(projection) is nn.Sequential
            and all(is_plain_linear(projection[i]) for i in (0, 2))
            and not any(module._forward_hooks or module._forward_pre_hooks for module in (gru, *projection.modules()))
            and all(type(weight) is nn.Parameter and not weight.is_meta for weight in gru.parameters())
        )

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight_hidden)

    def step(self, token_embeds: torch.Tensor, prefix_state: torch.Tensor | None) -> torch.Tensor:
        token_embeds = token_embeds.to(self.weight_ih)
        if prefix_state is None:
            prefix_state = token_embeds.new_zeros(len(token_embeds), self.weight_hh.shape[1])
        return torch.gru_cell(token_embeds, prefix_state, self.weight_ih, self.weight_hh)

    def correction(
        self, begun: torch.Tensor, prefix_state: torch.Tensor, places: torch.LongTensor | None
    ) -> torch.Tensor:
        bottleneck = F.silu(begun + F.linear(prefix_state, self.weight_state))
        if places is None:
            return F.linear(bottleneck, self.weight_out)
        return torch.einsum("nve,ne->nv", self.weight_out[places], bottleneck)


class Scorer:
    """
    Scores what a draft may propose: all ids, or those of its shortlist; at each position all of these, or a pool of the
    likeliest by the base logits.

    Made once for a call of `generate`, with copies of the rows that a shortlist leaves of the two projections onto the
    vocabulary (the target's output head, the last of the draft's own head).

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        use_head (`bool`): `False` scores by the base logits alone (DFlash).
    """

    def __init__(self, draft, target: TargetParts, use_head: bool):
        self.draft, self.target = draft, target
        self.token_ids: torch.LongTensor | None = None
        self.head: UnrolledHead | PlainHead | None = None
        if (shortlist := draft.config.shortlist_ids) is not None:
            token_ids = torch.tensor(shortlist)
            if (narrow := target.narrowed(token_ids)) is None:
                logger.warning_once(
                    "The draft's shortlist is of no effect: the target's output head is not a matrix at hand (it is "
                    "quantised, offloaded, shared among devices, or has an adapter), so that its rows cannot be taken "
                    "out."
                )
            else:
                self.target, self.token_ids = narrow, token_ids.to(target.output_head.weight.device)
        if use_head and draft.config.has_head:
            self.head = (PlainHead if PlainHead.suits(draft) else UnrolledHead)(draft, self.token_ids)

    def base(self, hidden: torch.Tensor, pool: int | None = None) -> tuple[torch.Tensor, torch.LongTensor | None]:
        """
        Base logits `[n, K, V]` of draft hidden `[n, K, H]`, and where they stand among all that may be proposed
        (`[n, K, V]`) when they are a pool of candidates: of the draft's own `candidate_pool_size`, or of `pool`.
        """
        logits, pool = self.target.logits(hidden), self.draft.config.candidate_pool_size or pool
        # Without a head there is nothing to correct, so nothing to spare.
        if self.head is None or pool is None or pool >= logits.shape[-1]:
            return logits, None
        return logits.topk(pool, dim=-1)

    def ids(self, chosen: torch.LongTensor, places: torch.LongTensor | None = None) -> torch.LongTensor:
        """The ids of what was chosen among all that may be proposed, or `[n]` among candidates at `places` `[n, V]`."""
        if places is not None:
            chosen = places.gather(1, chosen[:, None])[:, 0]
        return chosen if self.token_ids is None else self.token_ids[chosen]

    def spread(self, logits: torch.Tensor, places: torch.LongTensor | None) -> torch.Tensor:
        """Logits `[n, V]` over the whole vocabulary, where what may not be proposed has none; `places` as for `ids`."""
        if self.token_ids is None and places is None:
            return logits
        whole = logits.new_full((len(logits), self.draft.config.vocab_size), -torch.inf)
        if places is None:
            whole[:, self.token_ids] = logits
            return whole
        return whole.scatter_(1, places if self.token_ids is None else self.token_ids[places], logits)
