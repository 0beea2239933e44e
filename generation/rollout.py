# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft propose? One backbone pass for the block, then the head's rollout, token by token."""

import torch
from torch import nn
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from .cache import RaggedCache
from .context import TargetParts, linear_rows
from .sampling import draw
from .schedule import Schedule
from .sequences import Proposal, Sequences

logger = logging.get_logger(__name__)


class DraftState:
    """
    What one call of `generate` keeps about a draft: its key/value cache and which positions that covers.

    A draft holds no per-call state itself, so that threads may share it.

    Args:
        position (`torch.LongTensor` of shape `[n]`): absolute position of the first context token of each row that
            the draft will be shown.
        dense (`bool`): whether all rows will always be shown tokens that follow one another without padding; then no
            mask is needed.
    """

    def __init__(self, position: torch.LongTensor, dense: bool):
        # Without a config every layer is of the growing kind: sliding layers mask, so that a block can be cropped off.
        self.cache = DynamicCache()
        self.position = position
        nothing = position.new_empty(len(position), 0)
        self.ragged = None if dense else RaggedCache(self.cache, nothing, nothing.bool())

    def keep(self, rows: torch.LongTensor):
        """Forget all other rows."""
        self.position = self.position[rows]
        if self.ragged is not None:
            self.ragged.keep(rows)


def draft_hidden(
    draft,
    target: TargetParts,
    state: DraftState,
    context_hidden_states: torch.Tensor,
    anchor: torch.LongTensor,
    visible: torch.BoolTensor,
) -> torch.Tensor:
    """
    One backbone pass: append the new context to the draft's cache and return draft hidden `[n, B, H]`.

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        state (`DraftState`): extended by the context, in place.
        context_hidden_states (`torch.Tensor` of shape `[n, L, T * H]`): features of the positions verified since the
            last pass, on the draft's device. The anchor's own features do not exist yet.
        anchor (`torch.LongTensor` of shape `[n, 1]`): the last committed token of each row.
        visible (`torch.BoolTensor` of shape `[n, L]`): `False` where a row has no such position; a dense state has
            them all.
    """
    size, context_length = draft.config.block_size, context_hidden_states.shape[1]
    block_ids = anchor.new_full((len(anchor), size), draft.config.mask_token_id)
    block_ids[:, :1] = anchor
    device, start, masks = context_hidden_states.device, state.position[:, None], None
    if state.ragged is None:
        positions = start + torch.arange(context_length + size, device=device)
        state.position = state.position + context_length
    else:
        context = start + (visible.cumsum(-1) - 1).clamp(min=0)
        state.position = state.position + visible.sum(-1)
        block = state.position[:, None] + torch.arange(size, device=device)
        positions = torch.cat([context, block], dim=-1)
        state.ragged.append(context, visible)
        masks = draft.layer_masks(
            block,
            torch.cat([state.ragged.positions, block], dim=-1),
            torch.cat([state.ragged.visible, torch.ones_like(block, dtype=torch.bool)], dim=-1),
        )
    hidden = draft(
        noise_embeds=target.embed(block_ids).to(device),
        context_hidden_states=context_hidden_states,
        position_ids=positions,
        attention_mask=masks,
        cache=state.cache,
    ).last_hidden_state
    # The block's own keys and values are of use to this pass only.
    state.cache.crop(-size)
    if state.ragged is not None:
        state.ragged.tidy()
    return hidden


class Scorer:
    """
    Scores what a draft may propose: all ids, or those of its shortlist.

    Made once for a call of `generate`, with copies of the rows that a shortlist leaves of the two projections onto the
    vocabulary (the target's output head, the last of the draft's own head).

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        use_head (`bool`): `False` scores by the base logits alone (DFlash).
    """

    def __init__(self, draft, target: TargetParts, use_head: bool):
        self.draft, self.target = draft, target
        self.use_head = use_head and draft.config.has_head
        self.token_ids: torch.LongTensor | None = None
        # The rows of the head's last projection; `None` where the draft scores by itself.
        self._rows: nn.Linear | None = None
        shortlist = draft.config.shortlist_ids
        if shortlist is None:
            return
        token_ids = torch.tensor(shortlist)
        if (narrow := target.narrowed(token_ids)) is None:
            logger.warning_once(
                "The draft's shortlist is of no effect: the target's output head is not a matrix at hand (it is "
                "quantised, offloaded, shared among devices, or has an adapter), so that its rows cannot be taken out."
            )
            return
        self.target, self.token_ids = narrow, token_ids.to(target.output_head.weight.device)
        if self.use_head and type(draft.embed_proj) is nn.Sequential:
            self._rows = linear_rows(draft.embed_proj[2], token_ids)

    def base(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits `[n, K, V]` of draft hidden `[n, K, H]`, V being what may be proposed."""
        return self.target.logits(hidden)

    def correction(self, hidden: torch.Tensor, prefix_state: torch.Tensor) -> torch.Tensor:
        """What the head adds for hidden `[n, H]` after the tokens of `prefix_state` `[n, G]`: `[n, V]`."""
        if self._rows is not None:
            return self._rows(self.draft.bottleneck(hidden, prefix_state))
        token_ids = None if self.token_ids is None else self.token_ids.to(hidden.device)
        return self.draft.correction(hidden, prefix_state, token_ids)

    def ids(self, places: torch.LongTensor) -> torch.LongTensor:
        """The ids whose scores stand at `places`."""
        return places if self.token_ids is None else self.token_ids[places]

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[n, V]` over the whole vocabulary, where what may not be proposed has none."""
        if self.token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.draft.config.vocab_size), -torch.inf)
        whole[:, self.token_ids] = logits
        return whole


def rollout(
    scorer: Scorer,
    hidden: torch.Tensor,
    sequences: Sequences,
    num_proposals: int,
    logits_processor: LogitsProcessorList,
    do_sample: bool,
    schedule: Schedule,
) -> Proposal:
    """
    Choose proposals one after another: base logits, plus the head's correction given the tokens before.

    Args:
        scorer (`Scorer`): of the two models.
        hidden (`torch.Tensor` of shape `[n, B, H]`): from [`draft_hidden`].
        sequences (`Sequences` of n rows): committed tokens, the anchors last; proposals are written behind them.
        num_proposals (`int`): K, at most B with shifted labels, else B - 1.
        logits_processor: applied to the final logits, so that proposals obey what the target's choice will obey.
        do_sample (`bool`): draw each proposal from its processed distribution, rather than take the likeliest.
        schedule (`Schedule`): may end the rollout before K proposals are made.
    """
    draft, config = scorer.draft, scorer.draft.config
    anchor = sequences.last()
    first = 0 if config.shift_label else 1
    hidden = hidden[:, first : first + num_proposals]
    base_logits = scorer.base(hidden)
    peaks = [base_logits.amax()]

    if not scorer.use_head and not logits_processor and not do_sample and not schedule.watches:
        proposal_ids = scorer.ids(base_logits.argmax(-1)).to(anchor.device)
        return Proposal(proposal_ids, finite=torch.isfinite(peaks[0]))

    # Processors and draws see the whole vocabulary, as the target's own choice does.
    spreads = bool(logits_processor) or do_sample
    rows = list(range(len(sequences)))
    token, prefix_state, proposal_ids, probabilities = anchor[:, 0], None, [], []
    for k in range(num_proposals):
        logits = base_logits[:, k]
        if scorer.use_head:
            # The state reads every token, those of the pure draft prefix too.
            prefix_state = draft.step(scorer.target.embed(token).to(hidden.device), prefix_state)
            if k >= config.pure_draft_prefix_len:
                logits = logits + scorer.correction(hidden[:, k], prefix_state).to(logits)
                peaks.append(logits.amax())
        if spreads:
            logits = scorer.spread(logits).float().to(anchor.device)
        if logits_processor:
            processed = torch.empty_like(logits)
            for members, index, prefix in sequences.groups(rows, k):
                processed[index] = sequences.process(logits_processor, members, prefix, logits[index])
            logits = processed
        if not schedule.is_worth(logits):
            break
        if do_sample:
            q = logits.softmax(-1)
            # Where nothing is left to draw from, any draw is as good as another: the target has the last word.
            q = torch.where(q.isnan(), 1 / q.shape[-1], q)
            place = draw(q)
            probabilities.append(q)
        else:
            place = logits.argmax(-1)
        token = (place if spreads else scorer.ids(place)).to(anchor.device)
        sequences.put(token, k)
        proposal_ids.append(token)
        if k + 1 < num_proposals and not schedule.goes_on(logits, place):
            break
    if not proposal_ids:
        return Proposal(anchor.new_empty(len(sequences), 0), finite=torch.isfinite(torch.stack(peaks)).all())
    return Proposal(
        torch.stack(proposal_ids, dim=-1),
        torch.stack(probabilities, dim=1) if do_sample else None,
        torch.isfinite(torch.stack(peaks)).all(),
    )
