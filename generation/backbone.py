# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a draft make of a block? One backbone pass over what it has not read yet, the anchor and masks."""

from dataclasses import dataclass

import torch

from .cache import DraftCache
from .context import TargetParts


@dataclass
class Context:
    """
    Features of verified positions that a draft has not read yet.

    Attributes:
        features (`torch.Tensor` of shape `[n, L, T * H]`): on the draft's device.
        counts (`list[int]`): how many of the L positions each row has.
        visible (`torch.BoolTensor` of shape `[n, L]`): which ones these are.
    """

    features: torch.Tensor
    counts: list[int]
    visible: torch.BoolTensor

    @classmethod
    def joined(cls, parts: "list[Context]") -> "Context":
        """Several of the same rows, one after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.features for part in parts], dim=1),
            [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)],
            torch.cat([part.visible for part in parts], dim=1),
        )

    def keep(self, entries: list[int]) -> "Context":
        """The same without all other rows."""
        return Context(self.features[entries], [self.counts[entry] for entry in entries], self.visible[entries])


class DraftState:
    """
    What one call of `generate` keeps about a draft: its key/value cache, and where the text stands that this begins at.

    A draft holds no per-call state itself, so that threads may share it.

    Args:
        origins (`list[int]`): absolute position of the first context token of each row that the draft will be shown.
        cache (`DraftCache`, *optional*): what the draft has been shown; nothing yet, when not given.
    """

    def __init__(self, origins: list[int], cache: DraftCache | None = None):
        self.origins, self.cache = origins, DraftCache(len(origins)) if cache is None else cache

    def keep(self, entries: list[int]):
        """Forget all other rows."""
        self.origins = [self.origins[entry] for entry in entries]
        self.cache.keep(entries)


def draft_hidden(
    draft, target: TargetParts, state: DraftState, context: Context, anchor: torch.LongTensor
) -> torch.Tensor:
    """
    One backbone pass: append the new context to the draft's cache and return draft hidden `[n, B, H]`.

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        state (`DraftState`): extended by the context, in place.
        context (`Context`): of the positions verified since the last pass. The anchor's own features do not exist yet.
        anchor (`torch.LongTensor` of shape `[n, 1]`): the last committed token of each row.
    """
    length, device, past = context.features.shape[1], context.features.device, state.cache.lengths
    state.cache.lengths = [before + new for before, new in zip(past, context.counts, strict=True)]
    end = max(state.cache.lengths) + draft.config.block_size
    origins = torch.tensor(state.origins, device=device)
    # Rows with as much text that all have all positions need neither an index nor a mask.
    if len(set(past)) == 1 and set(context.counts) == {length}:
        state.cache.place(slice(past[0], end), end)
        slots = torch.arange(past[0], end, device=device)
        return _run(draft, target, state.cache, context.features, anchor, origins, slots, end, None)
    lengths = torch.tensor(past, device=device)
    return ragged_hidden(draft, target, state.cache, context.features, context.visible, anchor, origins, lengths, end)


def ragged_hidden(
    draft,
    target: TargetParts,
    cache: DraftCache,
    features: torch.Tensor,
    visible: torch.BoolTensor,
    anchor: torch.LongTensor,
    origins: torch.LongTensor,
    lengths: torch.LongTensor,
    end: int,
) -> torch.Tensor:
    """
    [`draft_hidden`] for rows that differ, with all that differs in tensors: nothing waits for the device.

    Args:
        draft, target, anchor: as there.
        cache (`DraftCache`): written to; its own count of the context is the caller's.
        features (`torch.Tensor` of shape `[n, L, T * H]`), visible (`torch.BoolTensor` of shape `[n, L]`): the context.
        origins (`torch.LongTensor` of shape `[n]`): see [`DraftState`].
        lengths (`torch.LongTensor` of shape `[n]`): context that the cache holds of each row.
        end (`int`): slots that are read; no row's block may reach further.
    """
    ends = (lengths + visible.sum(-1))[:, None]
    # What a row has not got is written behind everything.
    written = torch.where(visible, lengths[:, None] + visible.cumsum(-1) - 1, end)
    size, device = draft.config.block_size, features.device
    slots = torch.cat([written, ends + torch.arange(size, device=device)], dim=-1)
    cache.place(slots, end)
    seen = torch.arange(end, device=device) < ends + size
    return _run(draft, target, cache, features, anchor, origins, slots, end, seen)


def _run(draft, target, cache, features, anchor, origins, slots, end, seen) -> torch.Tensor:
    """The pass, to `slots` `[L + B]` or `[n, L + B]` of `cache`, of which each row may read those `seen` `[n, end]`."""
    size, device = draft.config.block_size, features.device
    block_ids = torch.cat([anchor, anchor.new_full((len(anchor), size - 1), draft.config.mask_token_id)], dim=1)
    positions = origins[:, None] + slots
    keys = origins[:, None] + torch.arange(end, device=device)
    return draft(
        noise_embeds=target.embed(block_ids).to(device),
        context_hidden_states=features,
        position_ids=positions,
        attention_mask=draft.layer_masks(positions[:, -size:], keys, seen),
        cache=cache,
    ).last_hidden_state
