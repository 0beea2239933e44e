# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
r"""What is a draft trained for? The base-anchored objective, as plain functions of tensors and steps.

    base_loss  = sum(w * CE(base logits))  / (sum(w) + 1e-6)
    final_loss = sum(w * CE(final logits)) / (sum(w) + 1e-6)
    loss       = (1 - lambda) * final_loss + lambda * base_loss

pooled over all rows and blocks of the micro-batch, with the position decay inside w. The base is learnt first, since
a head that trains from the start starves it. Source: arXiv 2605.29707, section on training; design of SpecForge.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..configuration_domino import DominoConfig
from ..generation.context import TargetParts
from ..modeling_domino import DominoDraftModel
from .blocks import Blocks, block_attention_masks


@dataclass(frozen=True)
class BaseAnchoredCurriculum:
    """
    The base weight lambda over a run: from `start` linearly to 0 over the first `decay_ratio` of all optimiser steps,
    then 0.

    Attributes:
        start (`float`): weight at step 0, in 0..1.
        decay_ratio (`float`, *optional*): share of the run after which it is 0; 0 trains the final loss from the second
            step on, `None` keeps the weight as it starts.
    """

    start: float = 1.0
    decay_ratio: float | None = 0.5

    def weight(self, step: int, total_steps: int) -> float:
        """Lambda after `step` of `total_steps` optimiser steps."""
        if self.decay_ratio is None:
            return self.start
        return self.start * (1.0 - min(step / max(1, int(total_steps * self.decay_ratio)), 1.0))


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
    documents: torch.LongTensor | None = None,
    objective: Callable[[torch.Tensor], Any] | None = None,
) -> Any:
    """
    One backbone pass over all blocks: draft hidden `[N, A, B, H]`, or what `objective` makes of it within the pass.

    Args:
        draft: the draft, or what a trainer has wrapped around it; then `config` is the draft's.
        target (`TargetParts`): lends the embedding.
        blocks, anchors: of the batch.
        context_hidden_states (`torch.Tensor` of shape `[N, S, T * H]`): features of every position.
        documents (`torch.LongTensor` of shape `[N, S]`, *optional*): of packed rows.
    """

    def finish(hidden: torch.Tensor) -> Any:
        hidden = hidden.view(*blocks.target_ids.shape, -1)
        return hidden if objective is None else objective(hidden)

    return draft(
        noise_embeds=target.embed(blocks.block_ids),
        context_hidden_states=context_hidden_states,
        position_ids=blocks.position_ids,
        attention_mask=block_attention_masks(
            anchors, blocks.keep, context_hidden_states.shape[1], config or draft.config, documents
        ),
        objective=finish,
    )


def corrected_offsets(draft: DominoDraftModel, device: torch.device) -> torch.BoolTensor:
    """`[B]`: block offsets whose prediction the head corrects (not the pure draft prefix, not an unused offset 0)."""
    config = draft.config
    first = int(config.pure_draft_prefix_len or 0) + (0 if config.shift_label else 1)
    return torch.arange(config.block_size, device=device) >= first


def in_shortlist(blocks: Blocks, token_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.LongTensor]:
    """Weights and labels `[N, A, B]` where only the sorted `token_ids` `[K]` are scored: labels are places in these,
    and those outside weigh nothing."""
    index = torch.searchsorted(token_ids, blocks.target_ids).clamp(max=len(token_ids) - 1)
    return blocks.weights * (token_ids[index] == blocks.target_ids), index


def domino_loss(
    draft: DominoDraftModel,
    target: TargetParts,
    blocks: Blocks,
    draft_hidden: torch.Tensor,
    lambda_base: float,
    token_ids: torch.LongTensor | None = None,
    chunk_size: int | None = None,
    total_weight: torch.Tensor | None = None,
    target_hidden: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
) -> ObjectiveOutput:
    """
    The objective of the module docstring, with the head teacher-forced.

    Logits are vocabulary-wide, so they are made for `chunk_size` positions at a time and turned into gradients there
    and then: memory grows with the chunk, not with the blocks, and no logits are computed twice.

    Args:
        draft, target: the draft, and the frozen parts it borrows.
        blocks (`Blocks`): labels and weights.
        draft_hidden (`torch.Tensor` of shape `[N, A, B, H]`): see [`teacher_forced_hidden`].
        lambda_base (`float`): base weight of this step.
        token_ids (`torch.LongTensor` of shape `[K]`, *optional*): score only these ids, sorted. Labels outside have
            no weight. A cheaper objective over the tokens that a target really writes.
        chunk_size (`int`, *optional*): positions whose logits exist at once; `None` for all of them.
        total_weight (`torch.FloatTensor` of shape `[]`, *optional*): what to divide by; default: the weights here.
            Processes that share a batch pass their mean, so that it is weighed as one.
        target_hidden (`torch.Tensor` of shape `[N, A, B, H]`, *optional*): the target's last hidden states, from which
            it chose the labels, see [`label_states`]; needed with a `distillation_weight`.
        distillation_weight (`float`): share of the loss that is the cross-entropy with the target's distribution over
            the scored ids, instead of with the label. 0 is the paper's objective.

    Returns:
        `ObjectiveOutput`; sums and counts for `accuracy`, `base_accuracy` (positions), `accept_len`,
        `base_accept_len` (blocks). A batch without any label gives a zero loss that still has gradients.
    """
    weights, labels = blocks.weights, blocks.target_ids
    if token_ids is not None:
        weights, labels = in_shortlist(blocks, token_ids)
    counted = weights > 0

    # Only positions with a label are worth their vocabulary-wide logits.
    labels, weight = labels[counted], weights[counted]
    inputs = [draft_hidden[counted]]
    if draft.config.has_head:
        inputs.append(_prefix_states(draft, target, blocks)[counted])
        corrected = corrected_offsets(draft, counted.device).expand_as(counted)[counted]
    teacher = None
    if distillation_weight:
        if target_hidden is None:
            raise ValueError(f"`distillation_weight` is {distillation_weight}, but `target_hidden` is not given.")
        teacher = target_hidden[counted]
    base_hit, final_hit = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(labels, dtype=torch.bool)
    base_sum, final_sum = weight.new_zeros(()), weight.new_zeros(())

    def loss_of(part: slice, hidden: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the loss over some positions; notes what the metrics need."""
        base_logits = target.logits(hidden, token_ids)
        soft = None
        if teacher is not None:
            with torch.no_grad():
                soft = target.logits(teacher[part], token_ids).float().softmax(-1)
        base_ce, base_soft, base_hit[part] = _cross_entropy(base_logits, labels[part], soft)
        final_ce, final_soft, final_hit[part] = base_ce, base_soft, base_hit[part]
        if states:
            correction = draft.correction(hidden, states[0], token_ids) * corrected[part, None]
            final_ce, final_soft, final_hit[part] = _cross_entropy(base_logits + correction, labels[part], soft)
        base, final = (base_ce * weight[part]).sum(), (final_ce * weight[part]).sum()
        base_sum.add_(base.detach())
        final_sum.add_(final.detach())
        loss = (1 - lambda_base) * final + lambda_base * base
        if soft is None:
            return loss
        mixed = (1 - lambda_base) * final_soft + lambda_base * base_soft
        return (1 - distillation_weight) * loss + distillation_weight * (mixed * weight[part]).sum()

    head = list(draft.embed_proj.parameters()) if draft.config.has_head else []
    loss = _sum_in_chunks(loss_of, inputs, head, chunk_size)
    total = (weight.sum() if total_weight is None else total_weight) + 1e-6
    output = ObjectiveOutput(loss=loss / total, base_loss=base_sum / total, final_loss=final_sum / total)
    for prefix, hit in (("", final_hit), ("base_", base_hit)):
        hits = torch.zeros_like(counted)
        hits[counted] = hit
        output.sums[prefix + "accuracy"], output.counts[prefix + "accuracy"] = hit.sum(), counted.sum()
        run = acceptance_lengths(hits, bool(draft.config.shift_label))[blocks.keep]
        output.sums[prefix + "accept_len"], output.counts[prefix + "accept_len"] = run.sum(), blocks.keep.sum()
    return output


def _sum_in_chunks(
    function: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    chunk_size: int | None,
) -> torch.Tensor:
    """
    `function(slice, *inputs[slice])` summed over all rows of `inputs`, `chunk_size` at a time.

    Args:
        function: differentiable in its tensors and in `parameters`, and in nothing else.
        inputs: `[M, ...]` each.
    """
    rows = len(inputs[0])
    if chunk_size is None or rows <= chunk_size:
        return function(slice(0, rows), *inputs)
    parts = [slice(start, min(start + chunk_size, rows)) for start in range(0, rows, chunk_size)]
    if not torch.is_grad_enabled():
        return torch.stack([function(part, *(tensor[part] for tensor in inputs)) for part in parts]).sum()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _ChunkedSum.apply(function, parts, len(inputs), *inputs, *trained)


class _ChunkedSum(torch.autograd.Function):
    """Takes each chunk's gradients as soon as its value is known, so that only one chunk's graph is ever alive."""

    @staticmethod
    def forward(ctx, function, parts, num_inputs, *tensors):
        inputs, parameters = tensors[:num_inputs], tensors[num_inputs:]
        needed = [i for i in range(len(tensors)) if ctx.needs_input_grad[3 + i]]
        gradients = [torch.zeros_like(tensors[i]) for i in needed]
        total = 0.0
        for part in parts:
            with torch.enable_grad():
                leaves = [tensor[part].detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
                value = function(part, *leaves)
                wanted = [leaves[i] if i < num_inputs else parameters[i - num_inputs] for i in needed]
                found = torch.autograd.grad(value, wanted, allow_unused=True)
            for i, gradient, new in zip(needed, gradients, found, strict=True):
                if new is not None:
                    (gradient[part] if i < num_inputs else gradient).add_(new)
            total = total + value.detach()
        ctx.needed, ctx.count = needed, len(tensors)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx, outer):
        gradients: list[torch.Tensor | None] = [None] * ctx.count
        for i, gradient in zip(ctx.needed, ctx.saved_tensors, strict=True):
            gradients[i] = outer * gradient
        return None, None, None, *gradients


def acceptance_lengths(hits: torch.BoolTensor, shift_label: bool) -> torch.LongTensor:
    """
    Simulated acceptance length of each block: 1 plus the leading run of right predictions.

    Args:
        hits (`torch.BoolTensor` of shape `[..., B]`): whether the prediction at each offset is the label.
        shift_label (`bool`): offset 0 predicts only when labels are shifted.
    """
    first = 0 if shift_label else 1
    return 1 + hits[..., first:].long().cumprod(-1).sum(-1)


def _cross_entropy(
    logits: torch.Tensor, labels: torch.LongTensor, soft: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.BoolTensor]:
    """Cross-entropy in float32 with the label and with the distribution `soft` `[M, V]` (or twice with the label), and
    whether the label has the best logit, in two passes over `[M, V]`: a separate argmax would cost as much as the
    loss itself."""
    logits = logits.float()
    label_logits = logits.gather(-1, labels[:, None])[:, 0]
    total = logits.logsumexp(-1)
    hard = total - label_logits
    return hard, hard if soft is None else total - (soft * logits).sum(-1), label_logits >= logits.detach().amax(-1)


def label_states(
    last_hidden_state: torch.Tensor, anchors: torch.LongTensor, block_size: int, shift_label: bool
) -> torch.Tensor:
    """
    The target's last hidden state `[N, A, B, H]` from which it chose the label of each block offset.

    Args:
        last_hidden_state (`torch.Tensor` of shape `[N, S, H]`): after the target's final norm.
        anchors (`torch.LongTensor` of shape `[N, A]`), block_size (`int`), shift_label (`bool`): of the blocks.
    """
    offsets = torch.arange(block_size, device=anchors.device) - (0 if shift_label else 1)
    positions = (anchors[..., None] + offsets).clamp(0, last_hidden_state.shape[1] - 1)
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand_as(positions)
    return last_hidden_state[rows, positions]


def _prefix_states(draft, target, blocks) -> torch.Tensor:
    """The state `[N, A, B, G]` that each block offset's correction reads."""
    states = draft.prefix_states(target.embed(blocks.prefix_ids.flatten(0, 1)))
    states = states.view(*blocks.prefix_ids.shape, -1)
    if not draft.config.shift_label:
        # Offset k predicts token anchor + k from the state after token anchor + k - 1; offset 0 predicts nothing.
        states = torch.cat([torch.zeros_like(states[..., :1, :]), states[..., :-1, :]], dim=-2)
    return states
