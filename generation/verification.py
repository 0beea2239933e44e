# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is kept of a proposal? The rule that makes the output exactly the target's own."""

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList


@dataclass
class Verification:
    """
    The tokens that a round commits.

    Attributes:
        input_ids (`torch.LongTensor` of shape `[1, S + n]`): all tokens, the n new ones included.
        num_new (`int`): n, accepted proposals and the bonus token, or fewer where a stop cut them.
        stopped (`bool`): whether generation ends here.
        scores (`list[torch.Tensor]`): processed float32 scores `[1, V]` of each new token, where asked for.
    """

    input_ids: torch.LongTensor
    num_new: int
    stopped: bool
    scores: list[torch.Tensor] = field(default_factory=list)


def verify_greedy(
    input_ids: torch.LongTensor,
    proposal_ids: torch.LongTensor,
    logits: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    scores: tuple[torch.Tensor, ...] | None,
) -> Verification:
    """
    Accept proposals while they are the target's own choice, then take that choice.

    Processors and stopping criteria see exactly the calls that token-by-token decoding would make, in its order: the
    same prefixes, one call for each committed token and none beyond a stop. So also those that count or remember
    give the plain result.

    Args:
        input_ids (`torch.LongTensor` of shape `[1, S]`): committed tokens, the anchor last.
        proposal_ids (`torch.LongTensor` of shape `[1, K]`): what the draft offers; K may be 0.
        logits (`torch.FloatTensor` of shape `[1, K + 1, V]`): of the target, after the anchor and each proposal.
        logits_processor, stopping_criteria: as prepared by `generate`.
        scores (`tuple` of `torch.Tensor`, *optional*): scores of all earlier new tokens, `None` unless asked for.
    """
    length, num_proposals = input_ids.shape[1], proposal_ids.shape[1]
    tokens = torch.cat([input_ids, proposal_ids, proposal_ids.new_zeros(1, 1)], dim=-1)
    # Without processors all choices are known at once, for one synchronisation a round.
    choices = None if logits_processor else logits.argmax(-1)
    wanted = num_proposals
    if choices is not None:
        matches = (choices[:, :-1] == proposal_ids).long().cumprod(-1).sum(-1)
        wanted = int(matches)
        tokens[:, length : length + wanted + 1] = choices[:, : wanted + 1]

    new_scores: list[torch.Tensor] = []
    for k in range(num_proposals + 1):
        prefix = tokens[:, : length + k]
        if choices is None:
            token_scores = logits_processor(prefix, logits[:, k])
            choice = token_scores.argmax(-1)
            accepted = k < num_proposals and bool(choice == proposal_ids[:, k])
            tokens[:, length + k] = choice
        else:
            token_scores = logits[:, k]
            accepted = k < wanted
        if scores is not None:
            new_scores.append(token_scores)
        seen = None if scores is None else (*scores, *new_scores)
        stopped = bool(stopping_criteria(tokens[:, : length + k + 1], seen).all())
        if stopped or not accepted:
            break
    return Verification(tokens[:, : length + k + 1], k + 1, stopped, new_scores)
