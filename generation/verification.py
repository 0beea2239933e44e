# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is kept of a proposal? The rule that makes the output exactly the target's own."""

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .processors import read_logits_alone, warp
from .sampling import accept_or_draw, draw
from .sequences import Proposal, Rows, Sequences


@dataclass
class Verification:
    """
    What a round commits.

    Attributes:
        num_new (`list[int]`): new tokens of each row: accepted proposals and the bonus token, or fewer where a stop
            or, in lockstep, another row cut them; 0 for a row that had stopped before.
        stopped (`list[bool]`): which rows end here, or have ended before.
        rejected (`list[bool]`): in which rows the last new token stands in place of a proposal.
        finite (`bool`): whether the proposals came from logits that are numbers.
        scores (`list[torch.Tensor]`): with `keep_scores`, the processed scores of each offset `[n, V]`; only
            the entries of committed tokens mean anything.
    """

    num_new: list[int]
    stopped: list[bool]
    rejected: list[bool]
    finite: bool = True
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
    alone = num_rows == 1 or not lockstep
    is_plain = not do_sample and not logits_processor
    at_once = is_plain or (is_far(logits.device) and read_logits_alone(logits_processor))
    if alone and at_once and _stop_by_token(stopping_criteria, sequences, num_proposals):
        scores = warp(logits_processor, logits.flatten(0, 1)).view_as(logits)
        return _verify_at_once(sequences, proposal, scores, stopping_criteria, stopped, do_sample, keep_scores)
    rows = list(range(num_rows))
    stopped = list(stopped)
    num_new, rejected = [0] * num_rows, [False] * num_rows
    ended_before = [pad_token_id is not None and stop for stop in stopped]
    live = [row for row in rows if lockstep or not stopped[row]]

    # Without processors all choices are known at once.
    choices = logits.argmax(-1) if is_plain else None
    matches = [] if choices is None else (choices[:, :-1] == proposal.proposal_ids).tolist()

    def choose(k: int, members: list[int], index: Rows, scores: torch.Tensor) -> tuple[torch.LongTensor, list[bool]]:
        """The tokens of a group at offset k, and which of them are the proposals."""
        if choices is not None:
            tokens = choices[index, k]
            return tokens, [matches[row][k] for row in members] if k < num_proposals else [False] * len(members)
        if do_sample:
            for row, drawable in zip(members, _are_drawable(scores).tolist(), strict=True):
                if not (drawable or stopped[row]):
                    raise _nothing_to_draw(sequences.lengths[row] + k)
        if k == num_proposals:
            tokens = draw(scores.softmax(-1)) if do_sample else scores.argmax(-1)
            return tokens, [False] * len(members)
        offered = proposal.proposal_ids[index, k]
        if do_sample:
            assert proposal.probabilities is not None
            tokens, stand = accept_or_draw(scores, offered, proposal.probabilities[index, k])
        else:
            tokens = scores.argmax(-1)
            stand = tokens == offered
        return tokens, stand.tolist()

    new_scores: list[torch.Tensor] = []
    for k in range(num_proposals + 1):
        accepted = [False] * num_rows
        for members, index, prefix in sequences.groups(live, k):
            scores = sequences.process(logits_processor, members, prefix, logits[index, k])
            if keep_scores and isinstance(index, slice):
                new_scores.append(scores)
            elif keep_scores:
                if len(new_scores) == k:
                    new_scores.append(torch.zeros_like(logits[:, k]))
                new_scores[k][index] = scores
            tokens, stand = choose(k, members, index, scores)
            ended = [stopped[row] for row in members]
            if pad_token_id is not None and any(ended):
                tokens = torch.where(torch.tensor(ended, device=tokens.device), pad_token_id, tokens)
            sequences.put_rows(index, prefix.shape[1], tokens)
            for row, stands in zip(members, stand, strict=True):
                accepted[row] = stands

        seen = None if past_scores is None else (*past_scores, *new_scores)
        for members, _, prefix in sequences.groups(live, k + 1):
            for row, stop in zip(members, stopping_criteria(prefix, seen).tolist(), strict=True):
                stopped[row] = stopped[row] or stop
        for row in live:
            num_new[row], rejected[row] = k + 1, k < num_proposals and not accepted[row]
        if lockstep:
            # Rows that had ended before write padding and hold no one up. One that ends here does: the target has
            # read its proposals, and not the padding that follows.
            over = [pad_token_id is not None and stopped[row] for row in rows]
            holding = [row for row in rows if not accepted[row] and not over[row]]
            if all(stopped) or holding or over != ended_before:
                break
        else:
            live = [row for row in live if accepted[row] and not stopped[row]]
            if not live:
                break
    finite = proposal.finite is None or bool(proposal.finite)
    return Verification(num_new, stopped, rejected, finite, new_scores)


def is_far(device: torch.device) -> bool:
    """Whether waiting for a word from `device` takes longer than its work on what may turn out not to be needed."""
    return device.type != "cpu"


def _stop_by_token(criteria: StoppingCriteriaList, sequences: Sequences, num_proposals: int) -> bool:
    """Whether all `criteria` judge a token by itself and its place: a limit, or an end token."""
    longest = max(sequences.lengths) + num_proposals + 1
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            # Past the model's positions it has a warning to give.
            if criterion.max_position_embeddings is not None and longest > criterion.max_position_embeddings:
                return False
        elif type(criterion) is not EosTokenCriteria:
            return False
    return True


def _verify_at_once(
    sequences: Sequences,
    proposal: Proposal,
    scores: torch.Tensor,
    criteria: StoppingCriteriaList,
    stopped: list[bool],
    do_sample: bool,
    keep_scores: bool,
) -> Verification:
    """
    [`verify`] of rows that hold no other up, by processed scores `[n, K + 1, V]` and criteria of tokens: one wait for
    the device a round.
    """
    num_rows, width = scores.shape[:2]
    drawable = torch.ones(num_rows, width, dtype=torch.bool, device=scores.device)
    if do_sample:
        # What is never reached may be anything: other tokens than these might have come before it.
        drawable = _are_drawable(scores)
        scores = torch.where(drawable[..., None], scores, 0)
    choices, stand = _choices(proposal, scores, do_sample)
    matches, ends = torch.zeros_like(choices, dtype=torch.bool), torch.zeros_like(choices, dtype=torch.bool)
    matches[:, :-1] = stand
    limit: float = float("inf")
    for criterion in criteria:
        if isinstance(criterion, MaxLengthCriteria):
            limit = min(limit, criterion.max_length)
        else:
            ends |= torch.isin(choices, criterion.eos_token_id.to(choices.device))
    finite = matches.new_ones(()) if proposal.finite is None else proposal.finite.to(matches.device)
    flags = torch.stack([matches, ends, drawable]).flatten()
    *found, is_finite = torch.cat([flags, finite[None]]).tolist()
    # What is accepted is among the choices, so they are all there is to write.
    sequences.put_block(choices)

    num_new, rejected, stopped = [0] * num_rows, [False] * num_rows, list(stopped)
    for row in range(num_rows):
        if stopped[row]:
            continue
        stands, is_end, can_be_drawn = (found[(part * num_rows + row) * width :][:width] for part in range(3))
        for k in range(width):
            if not can_be_drawn[k]:
                raise _nothing_to_draw(sequences.lengths[row] + k)
            num_new[row] = k + 1
            stopped[row] = is_end[k] or sequences.lengths[row] + k + 1 >= limit
            rejected[row] = k < width - 1 and not stands[k]
            if stopped[row] or not stands[k]:
                break
    kept = [scores[:, k] for k in range(max(num_new))] if keep_scores else []
    return Verification(num_new, stopped, rejected, is_finite, kept)


def _are_drawable(scores: torch.Tensor) -> torch.BoolTensor:
    """Which of processed scores `[..., V]` are a distribution."""
    return scores.amax(-1).isfinite()


def _nothing_to_draw(place: int) -> RuntimeError:
    return RuntimeError(
        f"Token {place} cannot be drawn: the target's logits there are NaN or infinite, or its processors left none. "
        "Try another dtype for the target, or other options."
    )


def _choices(proposal: Proposal, scores: torch.Tensor, do_sample: bool) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """Tokens `[n, K + 1]`, of which a row takes those up to the first that is no proposal; which ones are, `[n, K]`."""
    if not do_sample:
        choices = scores.argmax(-1)
        return choices, choices[:, :-1] == proposal.proposal_ids
    bonus = draw(scores[:, -1].softmax(-1))[:, None]
    if proposal.probabilities is None:
        return bonus, torch.zeros_like(proposal.proposal_ids, dtype=torch.bool)
    tokens, stand = accept_or_draw(
        scores[:, :-1].flatten(0, 1), proposal.proposal_ids.flatten(), proposal.probabilities.flatten(0, 1)
    )
    return torch.cat([tokens.view_as(proposal.proposal_ids), bonus], dim=1), stand.view_as(proposal.proposal_ids)
