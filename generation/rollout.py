# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft propose? One backbone pass for the block, then the head's rollout, token by token."""

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicCache

from .context import TargetParts


@dataclass
class Proposal:
    """
    Tokens offered after the anchor.

    Attributes:
        proposal_ids (`torch.LongTensor` of shape `[1, K]`): on the target's device.
        finite (`torch.BoolTensor` of shape `[]`): whether the logits they come from are finite numbers.
    """

    proposal_ids: torch.LongTensor
    finite: torch.Tensor


class DraftState:
    """
    What one call of `generate` keeps about a draft: its key/value cache and how many positions that covers.

    A draft holds no per-call state itself, so that threads may share it.

    Args:
        position (`int`): absolute position of the first context token that the draft will be shown.
    """

    def __init__(self, position: int):
        # Without a config every layer is of the growing kind: sliding layers mask, so that a block can be cropped off.
        self.cache = DynamicCache()
        self.position = position


def draft_hidden(
    draft, target: TargetParts, state: DraftState, context_hidden_states: torch.Tensor, anchor: torch.LongTensor
) -> torch.Tensor:
    """
    One backbone pass: append the new context to the draft's cache and return draft hidden `[1, B, H]`.

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        state (`DraftState`): extended by the context, in place.
        context_hidden_states (`torch.Tensor` of shape `[1, L, T * H]`): features of the positions verified since the
            last pass. The anchor's own features do not exist yet.
        anchor (`torch.LongTensor` of shape `[1, 1]`): the last committed token.
    """
    size, context_length = draft.config.block_size, context_hidden_states.shape[1]
    block_ids = anchor.new_full((1, size), draft.config.mask_token_id)
    block_ids[:, :1] = anchor
    positions = torch.arange(state.position, state.position + context_length + size, device=draft.device)[None]
    hidden = draft(
        noise_embeds=target.embed(block_ids).to(draft.device),
        context_hidden_states=context_hidden_states,
        position_ids=positions,
        cache=state.cache,
    ).last_hidden_state
    # The block's own keys and values are of use to this pass only.
    state.cache.crop(-size)
    state.position += context_length
    return hidden


def greedy_rollout(
    draft,
    target: TargetParts,
    hidden: torch.Tensor,
    anchor: torch.LongTensor,
    num_proposals: int,
    prefix_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    use_head: bool,
) -> Proposal:
    """
    Choose proposals one after another: base logits, plus the head's correction given the tokens before.

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        hidden (`torch.Tensor` of shape `[1, B, H]`): from [`draft_hidden`].
        anchor (`torch.LongTensor` of shape `[1, 1]`): the last committed token.
        num_proposals (`int`): K, at most B with shifted labels, else B - 1.
        prefix_ids (`torch.LongTensor` of shape `[1, S]`): all committed tokens, the anchor last.
        logits_processor: applied to the final logits, so that proposals obey what the target's choice will obey.
        use_head (`bool`): `False` takes the base logits alone (DFlash).
    """
    config = draft.config
    first = 0 if config.shift_label else 1
    hidden = hidden[:, first : first + num_proposals]
    base_logits = target.logits(hidden)
    use_head = use_head and config.has_head
    finite = torch.isfinite(base_logits.amax())

    if not use_head and not logits_processor:
        return Proposal(base_logits.argmax(-1).to(anchor.device), finite)

    token, prefix_state, proposal_ids = anchor[:, 0], None, prefix_ids
    for k in range(num_proposals):
        final_logits = base_logits[:, k]
        if use_head:
            # The state reads every token, those of the pure draft prefix too.
            prefix_state = draft.step(target.embed(token).to(draft.device), prefix_state)
            if k >= config.pure_draft_prefix_len:
                final_logits = final_logits + draft.correction(hidden[:, k], prefix_state).to(final_logits)
                finite = finite & torch.isfinite(final_logits.amax())
        if logits_processor:
            final_logits = logits_processor(proposal_ids, final_logits.float().to(anchor.device))
        token = final_logits.argmax(-1).to(anchor.device)
        proposal_ids = torch.cat([proposal_ids, token[:, None]], dim=-1)
    return Proposal(proposal_ids[:, prefix_ids.shape[1] :], finite)
