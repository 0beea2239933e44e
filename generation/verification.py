# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is kept of a proposal? The rule that makes the output exactly the target's own."""

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from .rollout import Proposal
from .sequences import Sequences


@dataclass
class Verification:
    """
    What a round commits.

    Attributes:
        num_new (`list[int]`): new tokens of each row: accepted proposals and the bonus token, or fewer where a stop
            or, in lockstep, another row cut them; 0 for a row that had stopped before.
        stopped (`list[bool]`): which rows end here, or have ended before.
        scores (`list[torch.Tensor]`): with `keep_scores`, the processed float32 scores of each offset `[n, V]`; only
            the entries of committed tokens mean anything.
    """

    num_new: list[int]
    stopped: list[bool]
    scores: list[torch.Tensor] = field(default_factory=list)


def verify(
    sequences: Sequences,
    proposal: Proposal,
    logits: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    stopped: list[bool],
    do_sample: bool,
    lockstep: bool,
    pad_token_id: torch.LongTensor | None = None,
    keep_scores: bool = False,
    past_scores: tuple[torch.Tensor, ...] | None = None,
) -> Verification:
    """
    Accept proposals by the target's word, then take one token of its own.

    Greedy: a proposal stands while it is the target's choice. Sampling: proposal x, drawn from q, stands with
    probability min(1, p(x) / q(x)), else a token is drawn from max(p - q, 0) renormalised; p and q are the processed
    distributions of target and draft (Leviathan et al., arXiv 2211.17192). Either way the tokens are distributed as
    token-by-token decoding distributes them.

    In lockstep, processors and criteria see exactly the calls that token-by-token decoding would make, in its order:
    the same prefixes, the whole batch, one call for each committed token and none beyond a stop. So also those that
    count or remember give the plain result. All rows then commit as many tokens as the first to be rejected. Out of
    lockstep each row goes as far as it can, and only what looks at single rows may be called.

    Args:
        sequences (`Sequences` of n rows): committed tokens, the anchor last. The new tokens are written behind them;
            committing is the caller's.
        proposal (`Proposal`): K tokens for each row; K may be 0.
        logits (`torch.FloatTensor` of shape `[n, K + 1, V]`): of the target, after the anchor and each proposal.
        logits_processor, stopping_criteria: as prepared by `generate`.
        stopped (`list[bool]`): rows that have ended before; they take padding in lockstep, nothing otherwise.
        do_sample (`bool`), lockstep (`bool`): as above.
        pad_token_id (`torch.LongTensor` of shape `[]`, *optional*): what ended rows write; `None` lets them go on.
        keep_scores (`bool`), past_scores: whether to return scores, and those of all earlier new tokens, which
            criteria may read.
    """
    num_rows, num_proposals = proposal.proposal_ids.shape
    rows = list(range(num_rows))
    stopped = list(stopped)
    num_new = [0] * num_rows
    live = [row for row in rows if lockstep or not stopped[row]]

    # Without processors all choices are known at once, for one synchronisation a round.
    choices = matches = None
    if not logits_processor and not do_sample:
        choices = logits.argmax(-1)
        matches = (choices[:, :-1] == proposal.proposal_ids).tolist()

    new_scores: list[torch.Tensor] = []
    for k in range(num_proposals + 1):
        has_proposal = k < num_proposals
        offered = proposal.proposal_ids[:, k] if has_proposal else None
        accepted = [False] * num_rows
        if keep_scores:
            new_scores.append(torch.zeros_like(logits[:, k]))
        for members, index, prefix in sequences.groups(live, k):
            scores = sequences.process(logits_processor, members, prefix, logits[index, k])
            if keep_scores:
                new_scores[k][index] = scores
            if choices is not None:
                choice = choices[index, k]
                stands = [matches[row][k] for row in members] if has_proposal else None
            elif do_sample:
                q = proposal.probabilities[index, k] if has_proposal else None
                choice, taken = sample(scores, offered[index] if has_proposal else None, q)
                stands = taken.tolist() if has_proposal else None
            else:
                choice = scores.argmax(-1)
                stands = (choice == offered[index]).tolist() if has_proposal else None
            ended = [stopped[row] for row in members]
            if pad_token_id is not None and any(ended):
                choice = torch.where(torch.tensor(ended, device=choice.device), pad_token_id, choice)
            sequences.put_rows(index, prefix.shape[1], choice)
            for row, stood in zip(members, stands or (), strict=False):
                accepted[row] = stood

        seen = None if past_scores is None else (*past_scores, *new_scores)
        for members, _, prefix in sequences.groups(live, k + 1):
            for row, stop in zip(members, stopping_criteria(prefix, seen).tolist(), strict=True):
                stopped[row] = stopped[row] or stop
        for row in live:
            num_new[row] = k + 1
        if lockstep:
            # Ended rows write padding and hold no one up, unless they have none to write.
            holding = [row for row in rows if not accepted[row] and (pad_token_id is None or not stopped[row])]
            if all(stopped) or holding:
                break
        else:
            live = [row for row in live if accepted[row] and not stopped[row]]
            if not live:
                break
    return Verification(num_new, stopped, new_scores)


def sample(
    scores: torch.Tensor, proposal_ids: torch.LongTensor | None, draft_probabilities: torch.Tensor | None
) -> tuple[torch.LongTensor, torch.BoolTensor | None]:
    """
    One step of rejection sampling.

    Args:
        scores (`torch.FloatTensor` of shape `[g, V]`): processed scores of the target.
        proposal_ids (`torch.LongTensor` of shape `[g]`, *optional*): drawn from `draft_probabilities`; `None` draws
            from the target alone.
        draft_probabilities (`torch.FloatTensor` of shape `[g, V]`, *optional*): q.

    Returns:
        The tokens `[g]`, and which of them are the proposals `[g]`.
    """
    p = scores.softmax(-1)
    if proposal_ids is None:
        return torch.multinomial(p, 1)[:, 0], None
    q = draft_probabilities.to(p)
    index = proposal_ids[:, None]
    p_proposal, q_proposal = p.gather(-1, index)[:, 0], q.gather(-1, index)[:, 0]
    accepted = torch.rand_like(p_proposal) * q_proposal < p_proposal
    residual = (p - q).clamp(min=0)
    # Where p and q are equal but for rounding, nothing is left over, and p itself is the limit.
    residual = torch.where(residual.sum(-1, keepdim=True) > 1e-9, residual, p)
    other = torch.multinomial(residual, 1)[:, 0]
    return torch.where(accepted, proposal_ids, other), accepted
