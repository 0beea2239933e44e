# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How do rows that advance at their own pace share one cache? What a row must not see stays in it, masked, until the
holes cost more than a copy."""

import torch
from transformers.cache_utils import Cache, DynamicLayer

# Entries that hold nothing are dropped once they are more than this share of the cache and more than a few.
_MAX_HOLES = 0.25
_FEW = 16


def can_have_holes(cache: Cache) -> bool:
    """Whether entries of `cache` may be masked and moved: it grows, keeps everything and orders nothing by index."""
    # An offloaded cache fetches its layers on a stream of its own, at times that only it knows.
    return not getattr(cache, "offloading", False) and all(type(layer) is DynamicLayer for layer in cache.layers)


class RaggedCache:
    """
    A cache `[n, heads, P, head_dim]` with, for each entry, where its token stands and whether its row may see it.

    Args:
        cache (`Cache`): see [`can_have_holes`]; extended by the models, cut and packed here.
        positions (`torch.LongTensor` of shape `[n, P]`): of the entries it holds.
        visible (`torch.BoolTensor` of shape `[n, P]`): `False` on padding and on rejected tokens.
    """

    def __init__(self, cache: Cache, positions: torch.LongTensor, visible: torch.BoolTensor):
        self.cache, self.positions, self.visible = cache, positions, visible

    def append(self, positions: torch.LongTensor, visible: torch.BoolTensor):
        """Say what a pass has added: `[n, L]` each."""
        self.positions = torch.cat([self.positions, positions], dim=1)
        self.visible = torch.cat([self.visible, visible], dim=1)

    def tidy(self):
        """Pack the cache when much of it is holes: visible entries move to the right end, in order."""
        length = self.visible.shape[1]
        longest = int(self.visible.sum(-1).max())
        if length - longest <= max(_FEW, length * _MAX_HOLES):
            return
        # Stable, so that entries keep their order; False sorts before True.
        index = self.visible.to(torch.uint8).argsort(dim=-1, stable=True)[:, length - longest :]
        self.positions, self.visible = self.positions.gather(1, index), self.visible.gather(1, index)
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys = _gather(layer.keys, index)
                layer.values = _gather(layer.values, index)

    def keep(self, rows: torch.LongTensor):
        """Forget all other rows."""
        self.positions, self.visible = self.positions[rows], self.visible[rows]
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.batch_select_indices(rows.to(layer.keys.device))

    def take_row(self, row: int) -> "CachedRow":
        """What one row may see, to be put back by [`restore`]."""
        seen = self.visible[row]
        layers = [
            (layer.keys[row][:, seen.to(layer.keys.device)], layer.values[row][:, seen.to(layer.keys.device)])
            if layer.is_initialized
            else None
            for layer in self.cache.layers
        ]
        return CachedRow(self.positions[row, seen], layers)

    def restore(self, rows: list["CachedRow"], length: int):
        """Fill the cache with `rows`, each entry at the index of its position: `[len(rows), heads, length, head_dim]`
        with zeros elsewhere, as a cache without holes has them."""
        for i, layer in enumerate(self.cache.layers):
            if not layer.is_initialized:
                continue
            for name, which in (("keys", 0), ("values", 1)):
                old = getattr(layer, name)
                whole = old.new_zeros(len(rows), old.shape[1], length, old.shape[3])
                for slot, row in enumerate(rows):
                    whole[slot].index_copy_(1, row.positions.to(old.device), row.layers[i][which])
                setattr(layer, name, whole)


class CachedRow:
    """
    Keys and values of one row.

    Args:
        positions (`torch.LongTensor` of shape `[m]`): of its entries.
        layers: for each layer keys and values `[heads, m, head_dim]`, or `None` for a layer that holds none.
    """

    def __init__(self, positions: torch.LongTensor, layers: list):
        self.positions, self.layers = positions, layers


def _gather(states: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    index = index.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
