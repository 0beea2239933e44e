# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
r"""What is a draft trained for? The base-anchored curriculum, as plain functions of tensors and steps.

    base_loss  = sum(w * CE(base logits))  / (sum(w) + 1e-6)
    final_loss = sum(w * CE(final logits)) / (sum(w) + 1e-6)
    loss       = (1 - lambda) * final_loss + lambda * base_loss

pooled over all rows and blocks of the micro-batch, with the position decay inside w. The base is learnt first, since
a head that trains from the start starves it. Source: arXiv 2605.29707, section on training; design of SpecForge.
"""

from dataclasses import dataclass, field

import torch

from ..configuration_domino import DominoConfig
from ..generation.context import TargetParts
from ..modeling_domino import DominoDraftModel
from .blocks import Blocks, block_attention_masks


def lambda_base(step: int, total_steps: int, start: float, decay_ratio: float) -> float:
    """
    Base weight at an optimiser step: from `start` linearly to 0 over the first `decay_ratio` of all steps, then 0.

    Args:
        step (`int`): optimiser steps done.
        total_steps (`int`): optimiser steps of the run.
        start (`float`): weight at step 0, in 0..1.
        decay_ratio (`float`): share of the run after which it is 0.
    """
    return start * (1.0 - min(step / max(1, int(total_steps * decay_ratio)), 1.0))


@dataclass
class ObjectiveOutput:
    """
    Losses of one micro-batch and what the metrics need.

    Attributes:
        loss (`torch.FloatTensor` of shape `[]`): what to minimise.
        base_loss, final_loss (`torch.FloatTensor` of shape `[]`): the two parts, detached.
        sums (`dict[str, torch.Tensor]`): metrics as sums, to be divided last by the entry of `counts`.
        counts (`dict[str, torch.Tensor]`): positions or blocks that the sums run over.
    """

    loss: torch.Tensor
    base_loss: torch.Tensor
    final_loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)


def teacher_forced_hidden(
    draft: DominoDraftModel,
    target: TargetParts,
    blocks: Blocks,
    anchors: torch.LongTensor,
    context_hidden_states: torch.Tensor,
    config: DominoConfig | None = None,
) -> torch.Tensor:
    """
    One backbone pass over all blocks: draft hidden `[N, A, B, H]`.

    Args:
        draft: the draft, or what a trainer has wrapped around it; then `config` is the draft's.
        target (`TargetParts`): lends the embedding.
        blocks, anchors: of the batch.
        context_hidden_states (`torch.Tensor` of shape `[N, S, T * H]`): features of every position.
    """
    masks = block_attention_masks(anchors, blocks.keep, context_hidden_states.shape[1], config or draft.config)
    hidden = draft(
        noise_embeds=target.embed(blocks.block_ids),
        context_hidden_states=context_hidden_states,
        position_ids=blocks.position_ids,
        attention_mask=masks,
    ).last_hidden_state
    return hidden.view(*blocks.target_ids.shape, -1)


def corrected_offsets(draft: DominoDraftModel, device: torch.device) -> torch.BoolTensor:
    """`[B]`: block offsets whose prediction the head corrects (not the pure draft prefix, not an unused offset 0)."""
    config = draft.config
    first = int(config.pure_draft_prefix_len or 0) + (0 if config.shift_label else 1)
    return torch.arange(config.block_size, device=device) >= first


def domino_loss(
    draft: DominoDraftModel,
    target: TargetParts,
    blocks: Blocks,
    draft_hidden: torch.Tensor,
    lambda_base: float,
    token_ids: torch.LongTensor | None = None,
) -> ObjectiveOutput:
    """
    The objective of the module docstring, with the head teacher-forced.

    Args:
        draft, target: the draft, and the frozen parts it borrows.
        blocks (`Blocks`): labels and weights.
        draft_hidden (`torch.Tensor` of shape `[N, A, B, H]`): see [`teacher_forced_hidden`].
        lambda_base (`float`): base weight of this step.
        token_ids (`torch.LongTensor` of shape `[K]`, *optional*): score only these ids, sorted. Labels outside have
            no weight. A cheaper objective over the tokens that a target really writes.

    Returns:
        `ObjectiveOutput`; sums and counts for `accuracy`, `base_accuracy` (positions), `accept_len`,
        `base_accept_len` (blocks). A batch without any label gives a zero loss that still has gradients.
    """
    weights, labels = blocks.weights, blocks.target_ids
    if token_ids is not None:
        index = torch.searchsorted(token_ids, labels).clamp(max=len(token_ids) - 1)
        weights = weights * (token_ids[index] == labels)
        labels = index
    counted = weights > 0

    # Only positions with a label are worth their vocabulary-wide logits.
    hidden, labels, weight = draft_hidden[counted], labels[counted], weights[counted]
    base_logits = target.logits(hidden, token_ids)
    base_ce, base_hit = _cross_entropy(base_logits, labels)
    final_ce, final_hit = base_ce, base_hit
    if draft.config.has_head:
        final_logits = base_logits + _correction(draft, target, blocks, draft_hidden, counted, token_ids)
        final_ce, final_hit = _cross_entropy(final_logits, labels)

    total = weight.sum() + 1e-6
    base_loss, final_loss = (base_ce * weight).sum() / total, (final_ce * weight).sum() / total
    output = ObjectiveOutput(
        loss=(1 - lambda_base) * final_loss + lambda_base * base_loss,
        base_loss=base_loss.detach(),
        final_loss=final_loss.detach(),
    )
    for prefix, hit in (("", final_hit), ("base_", base_hit)):
        hits = torch.zeros_like(counted)
        hits[counted] = hit
        output.sums[prefix + "accuracy"], output.counts[prefix + "accuracy"] = hit.sum(), counted.sum()
        run = acceptance_lengths(hits, bool(draft.config.shift_label))[blocks.keep]
        output.sums[prefix + "accept_len"], output.counts[prefix + "accept_len"] = run.sum(), blocks.keep.sum()
    return output


def acceptance_lengths(hits: torch.BoolTensor, shift_label: bool) -> torch.LongTensor:
    """
    Simulated acceptance length of each block: 1 plus the leading run of right predictions.

    Args:
        hits (`torch.BoolTensor` of shape `[..., B]`): whether the prediction at each offset is the label.
        shift_label (`bool`): offset 0 predicts only when labels are shifted.
    """
    first = 0 if shift_label else 1
    return 1 + hits[..., first:].long().cumprod(-1).sum(-1)


def _cross_entropy(logits: torch.Tensor, labels: torch.LongTensor) -> tuple[torch.Tensor, torch.BoolTensor]:
    """Cross-entropy in float32 and whether the label has the best logit, in two passes over `[M, V]`: a separate
    argmax would cost as much as the loss itself."""
    logits = logits.float()
    label_logits = logits.gather(-1, labels[:, None])[:, 0]
    return logits.logsumexp(-1) - label_logits, label_logits >= logits.detach().amax(-1)


def _correction(draft, target, blocks, draft_hidden, counted, token_ids):
    config = draft.config
    states = draft.prefix_states(target.embed(blocks.prefix_ids.flatten(0, 1)))
    states = states.view(*blocks.prefix_ids.shape, -1)
    if not config.shift_label:
        # Offset k predicts token anchor + k from the state after token anchor + k - 1; offset 0 predicts nothing.
        states = torch.cat([torch.zeros_like(states[..., :1, :]), states[..., :-1, :]], dim=-2)
    corrected = corrected_offsets(draft, counted.device).expand_as(counted)[counted]
    logits = draft.correction(draft_hidden[counted], states[counted], token_ids)
    return logits * corrected[:, None]
