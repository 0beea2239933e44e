# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft propose? Token by token, each corrected by those before it."""

import torch
from transformers import LogitsProcessorList

from .sampling import draw
from .schedule import Schedule
from .scorer import Scorer
from .sequences import Proposal, Sequences


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
        sequences (`Sequences` of n rows): committed tokens, the anchors last; what lies behind them is overwritten.
        num_proposals (`int`): K, at most B with shifted labels, else B - 1.
        logits_processor: applied to the final logits, so that proposals obey what the target's choice will obey.
        do_sample (`bool`): draw each proposal from its processed distribution, rather than take the likeliest.
        schedule (`Schedule`): may end the rollout before K proposals are made.
    """
    config, head = scorer.draft.config, scorer.head
    anchor = sequences.last()
    first = 0 if config.shift_label else 1
    hidden = hidden[:, first : first + num_proposals]
    base_logits, pool = scorer.base(hidden)
    peaks = [base_logits.amax()]

    if head is None and not logits_processor and not do_sample and not schedule.watches:
        proposal_ids = scorer.ids(base_logits.argmax(-1)).to(anchor.device)
        return Proposal(proposal_ids, finite=torch.isfinite(peaks[0]))

    # Processors and draws see the whole vocabulary, as the target's own choice does.
    spreads = bool(logits_processor) or do_sample
    rows = list(range(len(sequences)))
    token, prefix_state, proposal_ids, probabilities = anchor[:, 0], None, [], []
    begun = hidden if head is None else head.begin(hidden)
    for k in range(num_proposals):
        logits, places = base_logits[:, k], None if pool is None else pool[:, k]
        if head is not None:
            # The state reads every token, those of the pure draft prefix too.
            prefix_state = head.step(scorer.target.embed(token).to(hidden.device), prefix_state)
            if k >= config.pure_draft_prefix_len:
                corrected = None if places is None else places.to(hidden.device)
                logits = logits + head.correction(begun[:, k], prefix_state, corrected).to(logits)
                peaks.append(logits.amax())
        if spreads:
            logits = scorer.spread(logits, places).float().to(anchor.device)
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
            chosen = draw(q)
            probabilities.append(q)
        else:
            chosen = logits.argmax(-1)
        token = (chosen if spreads else scorer.ids(chosen, places)).to(anchor.device)
        if logits_processor:
            # They read the text up to the proposal that they process.
            sequences.put(token, k)
        proposal_ids.append(token)
        if k + 1 < num_proposals and not schedule.goes_on(logits, chosen):
            break
    if not proposal_ids:
        return Proposal(anchor.new_empty(len(sequences), 0), finite=torch.isfinite(torch.stack(peaks)).all())
    return Proposal(
        torch.stack(proposal_ids, dim=-1),
        torch.stack(probabilities, dim=1) if do_sample else None,
        torch.isfinite(torch.stack(peaks)).all(),
    )
