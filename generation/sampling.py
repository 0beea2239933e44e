# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How is a token drawn? From one distribution, or from the target's by way of the draft's."""

import torch
from torch.nn import functional as F


def draw(probabilities: torch.Tensor) -> torch.LongTensor:
    """
    One token `[g]` from each of `probabilities` `[g, V]`, which need not add up to 1; any token where they are NaN.

    It is the token that `torch.multinomial` draws. That judges the probabilities as well, for which it waits for the
    device, or lets the device end the process.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def draw_with(noise: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.LongTensor]:
    """
    The draw that `noise` makes, for kernels to be held against: token x with probability softmax(scores)[x].

    Args:
        noise (`torch.FloatTensor` of shape `[g, V]`): from the exponential distribution of mean 1.
        scores (`torch.FloatTensor` of shape `[g, V]`).

    Returns:
        The largest of `scores - log(noise)` `[g]`, and where it stands `[g]`.
    """
    # Zero would be more than -inf can bear, and raise a token that has no probability.
    return (scores - noise.clamp(min=1e-37).log()).max(-1)


def accept_or_draw(
    scores: torch.Tensor, proposal_ids: torch.LongTensor, draft_probabilities: torch.Tensor
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    One step of rejection sampling.

    Args:
        scores (`torch.FloatTensor` of shape `[g, V]`): processed scores of the target.
        proposal_ids (`torch.LongTensor` of shape `[g]`): drawn from `draft_probabilities`.
        draft_probabilities (`torch.FloatTensor` of shape `[g, V]`): q.

    Returns:
        The tokens `[g]`, and which of them are the proposals `[g]`.
    """
    p = scores.softmax(-1)
    q = draft_probabilities.to(p)
    if missing := q.shape[-1] - p.shape[-1]:
        # A processor of the user's has cut the target's vocabulary short.
        p = F.pad(p, (0, missing))
    index = proposal_ids[:, None]
    p_proposal, q_proposal = p.gather(-1, index)[:, 0], q.gather(-1, index)[:, 0]
    accepted = torch.rand_like(p_proposal) * q_proposal < p_proposal
    residual = (p - q).clamp(min=0)
    # Where p and q are equal but for rounding, nothing is left over, and p itself is the limit.
    residual = torch.where(residual.sum(-1, keepdim=True) > 1e-9, residual, p)
    return torch.where(accepted, proposal_ids, draw(residual)), accepted
