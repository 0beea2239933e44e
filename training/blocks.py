# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Which blocks does a training pass hold? Anchors, labels, weights and the attention mask (design: one pass, many
blocks of one row, each seeing the context before its own anchor and itself).

Shape symbols: N rows, S tokens of a row, A anchors of a row, B positions of a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from ..configuration_domino import DominoConfig


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
    loss_mask: torch.Tensor,
    num_anchors: int,
    seeds: Sequence[Any],
    documents: torch.LongTensor | None = None,
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    Anchor positions, uniform without replacement among those where this token and the next are supervised.

    A document's anchors hang on its own seed alone: not on other documents, padding or what was drawn before.

    Args:
        loss_mask (`torch.Tensor` of shape `[N, S]`): non-zero where a token is supervised.
        num_anchors (`int`): upper bound for a document.
        seeds (`Sequence[int]` of length N): of the rows, which hold one document each; with `documents`, for each row
            a sequence with the seed of each of its documents.
        documents (`torch.LongTensor` of shape `[N, S]`, *optional*): see [`pack_rows`].

    Returns:
        `(anchors [N, A] sorted, keep [N, A])` on the CPU, A the most that any row has, at least 1; unused slots hold 0
        and `False`.
    """
    supervised = loss_mask.bool().cpu()
    usable = supervised[:, :-1] & supervised[:, 1:]
    if documents is None:
        places = [[row.nonzero()[:, 0]] for row in usable]
        seeds = [[seed] for seed in seeds]
    else:
        inside = documents.cpu()
        usable &= inside[:, :-1] == inside[:, 1:]
        places = [
            [(row & (ids[:-1] == number)).nonzero()[:, 0] for number in range(len(own))]
            for row, ids, own in zip(usable, inside, seeds, strict=True)
        ]
    rows = []
    for of_documents, own in zip(places, seeds, strict=True):
        chosen = []
        for positions, seed in zip(of_documents, own, strict=True):
            order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))
            chosen.append(positions[order[:num_anchors]].sort().values)
        rows.append(torch.cat(chosen))
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
    documents: torch.LongTensor | None = None,
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
        documents (`torch.LongTensor` of shape `[N, S]`, *optional*): see [`pack_rows`]; labels end with their document.
    """
    (rows, length), size, device = input_ids.shape, int(config.block_size or 0), input_ids.device
    offsets = torch.arange(size, device=device)
    positions = anchors[..., None] + offsets
    labels = positions + 1 if config.shift_label else positions

    def at(tensor, index):
        return tensor.gather(1, index.clamp(max=length - 1).flatten(1)).view_as(index)

    counts = (labels < length) & keep[..., None] & at(loss_mask, labels).bool()
    starts = torch.zeros_like(anchors)
    context_positions = torch.arange(length, device=device).expand(rows, -1)
    if documents is not None:
        counts &= at(documents, labels) == at(documents, anchors)[..., None]
        first = document_starts(documents)
        starts, context_positions = at(first, anchors), context_positions - first
    decay = position_decay(size, loss_decay_gamma, bool(config.shift_label)).to(device)
    block_ids = torch.full_like(positions, config.mask_token_id)
    block_ids[..., 0] = torch.where(keep, at(input_ids, anchors), config.mask_token_id)
    return Blocks(
        block_ids=block_ids.flatten(1),
        position_ids=torch.cat([context_positions, (positions - starts[..., None]).flatten(1)], dim=1),
        target_ids=at(input_ids, labels),
        weights=counts * decay,
        prefix_ids=at(input_ids, positions),
        keep=keep,
    )


def pack_rows(
    tensors: dict[str, torch.Tensor], lengths: Sequence[int], pack_length: int
) -> tuple[dict[str, torch.Tensor], torch.LongTensor, list[list[int]]]:
    """
    Put rows one after another into fewer, longer ones, so that less of a batch is padding.

    Args:
        tensors (`dict` of `[N, S, ...]`): of the same rows, padded on the right.
        lengths (`Sequence[int]`): tokens of each row; one longer than `pack_length` stays alone.
        pack_length (`int`): tokens that a packed row holds at most.

    Returns:
        The packed tensors `[N', S', ...]`, `documents` `[N', S']` with the number that a token's row has within its
        packed row (-1 on padding), and the original rows in each packed one.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    # Longest first into the first pack with room: few packs, and little left over.
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        fitting = next((i for i, left in enumerate(room) if lengths[row] <= left), None)
        if fitting is None:
            packs.append([row])
            room.append(pack_length - lengths[row])
        else:
            packs[fitting].append(row)
            room[fitting] -= lengths[row]
    pad = torch.nn.utils.rnn.pad_sequence
    packed = {
        name: pad([torch.cat([tensor[row, : lengths[row]] for row in pack]) for pack in packs], batch_first=True)
        for name, tensor in tensors.items()
    }
    device = next(iter(tensors.values())).device
    numbers = [
        torch.cat([torch.full((lengths[row],), i, device=device) for i, row in enumerate(pack)]) for pack in packs
    ]
    return packed, pad(numbers, batch_first=True, padding_value=-1), packs


def document_starts(documents: torch.LongTensor) -> torch.LongTensor:
    """Where the document of each token begins, `[N, S]`."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(new, places, 0).cummax(dim=-1).values


def block_attention_masks(
    anchors: torch.LongTensor,
    keep: torch.BoolTensor,
    length: int,
    config: DominoConfig,
    documents: torch.LongTensor | None = None,
) -> dict[str, Any]:
    """
    Who sees whom in a training pass, for each layer type of the draft.

    A query at offset k of the block anchored at a sees the context of its own document before a, and its own block; a
    sliding layer with the `"causal"` rule sees only keys at distance 0..window-1 before it, with `"symmetric"` keys
    nearer than the window on either side. Unused slots see nothing.

    Returns:
        `{layer type: bool [N, 1, A * B, S + A * B]}`, `True` where a query may look; for a draft with
        flex_attention, sparse `BlockMask`s of the same rule, which never exist as a whole.
    """
    size = int(config.block_size or 0)
    rows, slots = anchors.shape
    queries, keys = slots * size, length + slots * size
    masks: dict[str, Any] = {}
    for layer_type in set(config.layer_types):
        rule = str(config.sliding_window_rule) if layer_type == "sliding_attention" else "none"
        sees = _visibility(anchors, keep, length, size, rule, config.sliding_window, documents)
        if config._attn_implementation == "flex_attention":
            masks[layer_type] = create_block_mask(sees, rows, None, queries, keys, device=str(anchors.device))
        else:
            row = torch.arange(rows, device=anchors.device)[:, None, None]
            query = torch.arange(queries, device=anchors.device)[:, None]
            masks[layer_type] = sees(row, None, query, torch.arange(keys, device=anchors.device))[:, None]
    return masks


def _visibility(
    anchors: torch.LongTensor,
    keep: torch.BoolTensor,
    length: int,
    size: int,
    rule: str,
    window: int | None,
    documents: torch.LongTensor | None,
) -> Callable[..., torch.Tensor]:
    """The rule of [`block_attention_masks`] as flex_attention wants it: a function of row, head, query and key."""

    def sees(row, head, query, key):
        slot, block = query // size, (key - length).clamp(min=0) // size
        anchor, in_context = anchors[row, slot], key < length
        place = key.clamp(max=length - 1)
        context = in_context & (place < anchor)
        if documents is not None:
            context = context & (documents[row, place] == documents[row, anchor])
        visible = keep[row, slot] & (context | (~in_context & (block == slot)))
        if rule == "none":
            return visible
        position = torch.where(in_context, place, anchors[row, block] + (key - length) % size)
        distance = anchor + query % size - position
        return visible & ((distance >= 0) & (distance < window) if rule == "causal" else distance.abs() < window)

    return sees
