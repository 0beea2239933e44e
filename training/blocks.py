# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Which blocks does a training pass hold? Anchors, labels, weights and the attention mask (design: one pass, many
blocks of one row, each seeing the context before its own anchor and itself).

Shape symbols: N rows, S tokens of a row, A anchors of a row, B positions of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..configuration_domino import DominoConfig
from ..modeling_domino import window_mask


@dataclass
class Blocks:
    """
    All blocks of a batch, ready for one backbone pass.

    Attributes:
        block_ids (`torch.LongTensor` of shape `[N, A * B]`): anchor token and masks, blocks one after another.
        position_ids (`torch.LongTensor` of shape `[N, S + A * B]`): of the context, then of the blocks.
        target_ids (`torch.LongTensor` of shape `[N, A, B]`): the label of each block offset.
        weights (`torch.FloatTensor` of shape `[N, A, B]`): its weight in the loss; 0 where no label counts.
        prefix_ids (`torch.LongTensor` of shape `[N, A, B]`): true tokens from the anchor on, the head's input.
        keep (`torch.BoolTensor` of shape `[N, A]`): which blocks are real; the others are padding.
    """

    block_ids: torch.LongTensor
    position_ids: torch.LongTensor
    target_ids: torch.LongTensor
    weights: torch.Tensor
    prefix_ids: torch.LongTensor
    keep: torch.BoolTensor


def sample_anchors(
    loss_mask: torch.Tensor, num_anchors: int, seeds: Sequence[int]
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    Anchor positions, uniform without replacement among those where this token and the next are supervised.

    A row's anchors hang on its own seed alone: not on the other rows, their padding or what was drawn before.

    Args:
        loss_mask (`torch.Tensor` of shape `[N, S]`): non-zero where a token is supervised.
        num_anchors (`int`): upper bound for a row.
        seeds (`Sequence[int]` of length N): of the rows.

    Returns:
        `(anchors [N, A] sorted, keep [N, A])` on the CPU, A the most that any row has, at least 1; unused slots hold 0
        and `False`.
    """
    supervised = loss_mask.bool().cpu()
    rows = []
    for usable, seed in zip(supervised[:, :-1] & supervised[:, 1:], seeds, strict=True):
        positions = usable.nonzero()[:, 0]
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))
        rows.append(positions[order[:num_anchors]].sort().values)
    anchors = torch.zeros(len(rows), max([1, *map(len, rows)]), dtype=torch.long)
    keep = torch.zeros_like(anchors, dtype=torch.bool)
    for row, chosen in enumerate(rows):
        anchors[row, : len(chosen)], keep[row, : len(chosen)] = chosen, True
    return anchors, keep


def position_decay(block_size: int, gamma: float | None, shift_label: bool) -> torch.Tensor:
    """
    Weight of each block offset k, `[B]`: `exp(-(k - o) / gamma)` with o the first predicting offset; 1 when `gamma`
    is `None`; 0 at the anchor's own offset when labels are not shifted.
    """
    first = 0 if shift_label else 1
    offsets = torch.arange(block_size, dtype=torch.float32) - first
    decay = torch.ones(block_size) if gamma is None else torch.exp(-offsets / gamma)
    return decay.masked_fill(offsets < 0, 0.0)


def build_blocks(
    input_ids: torch.LongTensor,
    loss_mask: torch.Tensor,
    anchors: torch.LongTensor,
    keep: torch.BoolTensor,
    config: DominoConfig,
    loss_decay_gamma: float | None,
) -> Blocks:
    """
    One block per anchor, with labels and weights. Blocks may run past the row's end; what lies there has weight 0.

    Args:
        input_ids (`torch.LongTensor` of shape `[N, S]`): tokens.
        loss_mask (`torch.Tensor` of shape `[N, S]`): non-zero where a token is supervised.
        anchors (`torch.LongTensor` of shape `[N, A]`), keep (`torch.BoolTensor` of shape `[N, A]`): see
            [`sample_anchors`].
        config (`DominoConfig`): of the draft.
        loss_decay_gamma (`float`, *optional*): scale of the position decay in offsets, `None` for no decay.
    """
    (rows, length), size, device = input_ids.shape, int(config.block_size or 0), input_ids.device
    offsets = torch.arange(size, device=device)
    positions = anchors[..., None] + offsets
    labels = positions + 1 if config.shift_label else positions

    def at(tensor, index):
        return tensor.gather(1, index.clamp(max=length - 1).flatten(1)).view_as(index)

    counts = (labels < length) & keep[..., None] & at(loss_mask, labels).bool()
    decay = position_decay(size, loss_decay_gamma, bool(config.shift_label)).to(device)
    block_ids = torch.full_like(positions, config.mask_token_id)
    block_ids[..., 0] = torch.where(keep, at(input_ids, anchors), config.mask_token_id)
    context_positions = torch.arange(length, device=device).expand(rows, -1)
    return Blocks(
        block_ids=block_ids.flatten(1),
        position_ids=torch.cat([context_positions, positions.flatten(1)], dim=1),
        target_ids=at(input_ids, labels),
        weights=counts * decay,
        prefix_ids=at(input_ids, positions),
        keep=keep,
    )


def block_attention_masks(
    anchors: torch.LongTensor, keep: torch.BoolTensor, length: int, config: DominoConfig
) -> dict[str, torch.BoolTensor]:
    """
    Who sees whom in a training pass, for each layer type of the draft.

    A query at offset k of the block anchored at a sees the context before a and its own block; a sliding layer with
    the `"causal"` rule sees only keys at distance 0..window-1 before it, with `"symmetric"` keys nearer than the
    window on either side.

    Returns:
        `{layer type: bool [N, 1, A * B, S + A * B]}`, `True` where a query may look. Unused slots see nothing.
    """
    size, device = config.block_size, anchors.device
    rows, slots = anchors.shape
    offsets = torch.arange(size, device=device)
    query = (anchors[..., None] + offsets).flatten(1)
    block = torch.arange(slots, device=device).repeat_interleave(size)
    context = torch.arange(length, device=device)[None]

    real = keep.repeat_interleave(size, dim=1)[..., None]
    sees_context = (context[None] < anchors.repeat_interleave(size, dim=1)[..., None]) & real
    sees_block = (block[:, None] == block[None]) & real
    full = torch.cat([sees_context, sees_block], dim=-1)
    masks = {}
    for layer_type in set(config.layer_types):
        mask = full
        if layer_type == "sliding_attention" and config.sliding_window_rule != "none":
            key = torch.cat([context.expand(rows, -1), query], dim=-1)
            mask = full & window_mask(str(config.sliding_window_rule), config.sliding_window, query, key)
        masks[layer_type] = mask[:, None]
    return masks
