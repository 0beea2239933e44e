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
from itertools import pairwise
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


@dataclass(frozen=True)
class ObjectiveOptions:
    """
    What may be changed in the paper's objective; the defaults change nothing.

    Attributes:
        distillation_weight (`float`): share of the loss that is the cross-entropy with the target's distribution over
            the scored ids, instead of with the label.
        label_smoothing (`float`): share of the label's mass that is spread evenly over the scored ids.
        dpace_alpha (`float`, *optional*): multiply the weights by those of D-PACE (arXiv 2605.18810, equations 7 and
            8), which fall as the draft's own confidence does: with `q` the probability of each label in the final
            logits and `r = (1 - dpace_alpha) * q + dpace_alpha`, offset j weighs
            `sum over m >= j of r_1 * ... * r_m`. For blocks built without position decay, which they replace.
    """

    distillation_weight: float = 0.0
    label_smoothing: float = 0.0
    dpace_alpha: float | None = None


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
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda total: total,
    target_hidden: torch.Tensor | None = None,
    options: ObjectiveOptions | None = None,
) -> ObjectiveOutput:
    """
    The objective of the module docstring, with the head teacher-forced.

    Logits are vocabulary-wide, so they are made for `chunk_size` positions at a time, in whole blocks, and turned
    into gradients there and then: memory grows with the chunk, not with the blocks, and no logits are computed twice.

    Args:
        draft, target: the draft, and the frozen parts it borrows.
        blocks (`Blocks`): labels and weights.
        draft_hidden (`torch.Tensor` of shape `[N, A, B, H]`): see [`teacher_forced_hidden`].
        lambda_base (`float`): base weight of this step.
        token_ids (`torch.LongTensor` of shape `[K]`, *optional*): score only these ids, sorted. Labels outside have
            no weight. A cheaper objective over the tokens that a target really writes.
        chunk_size (`int`, *optional*): positions whose logits exist at once, but a block's at least; `None` for all.
        reduce (`Callable`): makes of the sum of the weights here what to divide by. Processes that share a batch give
            their mean, so that it is weighed as one.
        target_hidden (`torch.Tensor` of shape `[N, A, B, H]`, *optional*): the target's last hidden states, from which
            it chose the labels, see [`label_states`]; needed to distil.
        options (`ObjectiveOptions`, *optional*): departures from the paper's objective.

    Returns:
        `ObjectiveOutput`; sums and counts for `accuracy`, `base_accuracy` (positions), `accept_len`,
        `base_accept_len` (blocks). A batch without any label gives a zero loss that still has gradients.
    """
    options = options or ObjectiveOptions()
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
    if options.distillation_weight:
        if target_hidden is None:
            raise ValueError(
                f"`distillation_weight` is {options.distillation_weight}, but `target_hidden` is not given."
            )
        teacher = target_hidden[counted]
    base_hit, final_hit = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(labels, dtype=torch.bool)
    base_sum, final_sum, weight_sum = (weight.new_zeros(()) for _ in range(3))
    flat = counted.flatten(0, 1)

    def loss_of(part: _Part, hidden: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the loss over some blocks; notes what the metrics need."""
        at = part.positions
        base_logits, correction, places, soft = target.logits(hidden, token_ids), None, None, None
        if states:
            places = corrected[at].nonzero()[:, 0]
            correction = draft.correction(hidden[places], states[0][places], token_ids)
        if teacher is not None:
            with torch.no_grad():
                soft = target.logits(teacher[at], token_ids).float().softmax(-1)
        base, final, base_hard, final_hard, base_hit[at], final_hit[at] = _CrossEntropies.apply(
            base_logits, correction, places, labels[at], soft, options
        )
        scale = weight[at]
        if options.dpace_alpha is not None:
            scale = scale * dpace_weights((-final_hard).exp(), flat[part.blocks], options.dpace_alpha)
        weight_sum.add_(scale.sum())
        base_sum.add_((base_hard * scale).sum())
        final_sum.add_((final_hard * scale).sum())
        return (((1 - lambda_base) * final + lambda_base * base) * scale).sum()

    head = list(draft.embed_proj.parameters()) if draft.config.has_head else []
    loss = _sum_in_chunks(loss_of, inputs, head, _cut(flat, chunk_size))
    total = reduce(weight_sum) + 1e-6
    output = ObjectiveOutput(loss=loss / total, base_loss=base_sum / total, final_loss=final_sum / total)
    for prefix, hit in (("", final_hit), ("base_", base_hit)):
        hits = torch.zeros_like(counted)
        hits[counted] = hit
        output.sums[prefix + "accuracy"], output.counts[prefix + "accuracy"] = hit.sum(), counted.sum()
        run = acceptance_lengths(hits, bool(draft.config.shift_label))[blocks.keep]
        output.sums[prefix + "accept_len"], output.counts[prefix + "accept_len"] = run.sum(), blocks.keep.sum()
    return output


def dpace_weights(confidence: torch.Tensor, counted: torch.BoolTensor, alpha: float) -> torch.Tensor:
    """
    Weights of D-PACE, see [`ObjectiveOptions`]: how many tokens hang on a position, as far as the draft trusts itself.

    Args:
        confidence (`torch.FloatTensor` of shape `[M]`): probability of the label at each counted position, in order.
        counted (`torch.BoolTensor` of shape `[A, B]`): which offsets of each block those positions are.
        alpha (`float`): confidence is lifted by it: at 1, weights only count the offsets still to come.

    Returns:
        `torch.FloatTensor` of shape `[M]`.
    """
    lifted = torch.ones(counted.shape, dtype=confidence.dtype, device=confidence.device)
    lifted[counted] = (1 - alpha) * confidence + alpha
    reached = lifted.cumprod(-1) * counted
    return reached.flip(-1).cumsum(-1).flip(-1)[counted]


@dataclass(frozen=True)
class _Part:
    """Some blocks `[A, B]`, and their counted positions among all counted ones `[M]`."""

    blocks: slice
    positions: slice


def _cut(counted: torch.BoolTensor, chunk_size: int | None) -> list[_Part]:
    """Cut blocks `[A, B]` into parts of at most `chunk_size` counted positions, but of a block at least."""
    ends = [0, *counted.sum(-1).cumsum(0).tolist()]
    cuts = [0]
    for block in range(1, len(ends) - 1):
        if chunk_size is not None and ends[block + 1] - ends[cuts[-1]] > chunk_size:
            cuts.append(block)
    cuts.append(len(ends) - 1)
    return [_Part(slice(start, end), slice(ends[start], ends[end])) for start, end in pairwise(cuts)]


def _sum_in_chunks(
    function: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    parts: list[_Part],
) -> torch.Tensor:
    """
    The sum over `parts` of `function(part, *inputs[part.positions])`.

    Args:
        function: differentiable in its tensors and in `parameters`, and in nothing else.
        inputs: `[M, ...]` each.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (trained or any(tensor.requires_grad for tensor in inputs)):
        return torch.stack([function(part, *(tensor[part.positions] for tensor in inputs)) for part in parts]).sum()
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
                leaves = [tensor[part.positions].detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
                value = function(part, *leaves)
                wanted = [leaves[i] if i < num_inputs else parameters[i - num_inputs] for i in needed]
                found = torch.autograd.grad(value, wanted, allow_unused=True)
            for i, gradient, new in zip(needed, gradients, found, strict=True):
                if new is not None:
                    (gradient[part.positions] if i < num_inputs else gradient).add_(new)
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


class _CrossEntropies(torch.autograd.Function):
    """
    Cross-entropies of base and final logits, in float32.

    Logits are read and written as seldom as can be, as all of this waits for memory: probabilities are kept for the
    gradient, which is made in their place (so there is one backward pass only), gradients of both losses for the base
    logits are added up there and then, and where nothing is corrected, the final loss is the base's.

    Takes base logits `[M, V]`, the correction `[P, V]` of those at `places` `[P]` (or `None` for both), labels `[M]`,
    probabilities to distil `[M, V]` or `None`, and the options. Gives, base before final, the losses that the options
    make `[M]`, those with the labels alone `[M]`, and whether the label has the best logit `[M]`.
    """

    @staticmethod
    def forward(ctx, base_logits, correction, places, labels, soft, options):
        logits = base_logits.float()
        probabilities, *base = _cross_entropy(logits, labels, soft, options)
        final, corrected = [values.clone() for values in base], None
        if correction is not None:
            soft_there = None if soft is None else soft[places]
            corrected, *new = _cross_entropy(logits[places].add_(correction), labels[places], soft_there, options)
            for values, there in zip(final, new, strict=True):
                values[places] = there
        ctx.save_for_backward(probabilities, corrected, places, labels, soft)
        ctx.options = options
        ctx.mark_non_differentiable(*base[1:], *final[1:])
        return tuple(value for pair in zip(base, final, strict=True) for value in pair)

    @staticmethod
    def backward(ctx, base_outer, final_outer, *_):
        probabilities, corrected, places, labels, soft = ctx.saved_tensors
        of_base = of_correction = None
        if corrected is not None:
            soft_there = None if soft is None else soft[places]
            of_correction = _to_gradient(corrected, labels[places], soft_there, ctx.options, final_outer[places])
            final_outer = final_outer.index_fill(0, places, 0.0)
        # The backbone may be frozen, and only the head be trained.
        if ctx.needs_input_grad[0]:
            of_base = _to_gradient(probabilities, labels, soft, ctx.options, base_outer + final_outer)
            if of_correction is not None:
                of_base.index_add_(0, places, of_correction)
        return of_base, of_correction, None, None, None, None


def _cross_entropy(
    logits: torch.Tensor, labels: torch.LongTensor, soft: torch.Tensor | None, options: ObjectiveOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Of logits `[M, V]` in float32: probabilities `[M, V]`, the loss that the options make `[M]`, the loss with the label
    alone `[M]`, and whether the label has the best logit `[M]`.
    """
    highest, best = logits.max(-1)
    probabilities = logits.softmax(-1)
    total = highest - probabilities.gather(-1, best[:, None])[:, 0].log()
    label_logits = logits.gather(-1, labels[:, None])[:, 0]
    hard = total - label_logits
    trained = hard.clone()
    if smoothing := options.label_smoothing:
        trained = (1 - smoothing) * trained + smoothing * (total - logits.mean(-1))
    if soft is not None:
        share = options.distillation_weight
        trained = (1 - share) * trained + share * (total - torch.einsum("mv,mv->m", soft, logits))
    return probabilities, trained, hard, label_logits >= highest


def _to_gradient(
    probabilities: torch.Tensor,
    labels: torch.LongTensor,
    soft: torch.Tensor | None,
    options: ObjectiveOptions,
    outer: torch.Tensor,
) -> torch.Tensor:
    """Turns probabilities `[M, V]`, in place, into the gradient of [`_cross_entropy`]'s loss, times `outer` `[M]`."""
    kept, smoothing = 1.0, options.label_smoothing
    if soft is not None:
        probabilities.sub_(soft, alpha=options.distillation_weight)
        kept -= options.distillation_weight
    if smoothing:
        probabilities.sub_(kept * smoothing / probabilities.shape[-1])
    probabilities.mul_(outer[:, None])
    return probabilities.scatter_add_(1, labels[:, None], -(kept * (1 - smoothing) * outer)[:, None])


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
