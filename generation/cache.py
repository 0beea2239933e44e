# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How do rows that advance at their own pace share one cache? In the target's, what a row must not see stays, masked,
until the holes cost more than a copy; in the draft's, each row has its entries at the slots of its own positions."""

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
        # Of `visible`, kept on the host, so that no round waits for it.
        self._counts: list[int] = visible.sum(-1).tolist()

    def append(self, positions: torch.LongTensor, visible: torch.BoolTensor, counts: list[int]):
        """Say what a pass has added: `[n, L]` each, and how many of them each row may see."""
        self.positions = torch.cat([self.positions, positions], dim=1)
        self.visible = torch.cat([self.visible, visible], dim=1)
        self._counts = [before + new for before, new in zip(self._counts, counts, strict=True)]

    def tidy(self):
        """Pack the cache when much of it is holes: visible entries move to the right end, in order."""
        length, longest = self.visible.shape[1], max(self._counts)
        if length - longest <= max(_FEW, length * _MAX_HOLES):
            return
        # Stable, so that entries keep their order; False sorts before True.
        index = self.visible.to(torch.uint8).argsort(dim=-1, stable=True)[:, length - longest :]
        self.positions, self.visible = self.positions.gather(1, index), self.visible.gather(1, index)
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys = _gather(layer.keys, index)
                layer.values = _gather(layer.values, index)

    def keep(self, entries: list[int]):
        """Forget all other rows."""
        rows = torch.tensor(entries, device=self.visible.device)
        self.positions, self.visible = self.positions[rows], self.visible[rows]
        self._counts = [self._counts[entry] for entry in entries]
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


class DraftCache(Cache):
    """
    A draft's keys and values `[n, heads, slots, head_dim]`: each row's context from slot 0 on without holes, the block
    under way behind it.

    Written in place into room made beforehand, so that a round costs what it adds: nothing is copied but when the room
    is used up, and a block needs no cutting off, as the next context overwrites it.

    Args:
        num_rows (`int`): n.
        room (`int`): slots to make at once; more are made as they are needed.

    Attributes:
        lengths (`list[int]`): context of each row.
    """

    def __init__(self, num_rows: int, room: int = 0):
        super().__init__(layers=[])
        self.lengths, self._room = [0] * num_rows, room
        self._buffers: list[list[torch.Tensor]] = []
        self._slots: torch.LongTensor | slice = slice(0, 0)
        self._end = 0

    def place(self, slots: "torch.LongTensor | slice", end: int):
        """
        Say where the next pass goes, and that it reads the slots before `end`.

        Args:
            slots (`slice` or `torch.LongTensor` of shape `[n, L + B]`): the same slots for all rows, or each row's own.
                Slot `end` takes what a row has not got.
        """
        self._slots, self._end = slots, end

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Write `[n, heads, L + B, head_dim]` into a layer; returns its keys and values `[n, heads, end, head_dim]`."""
        if layer_idx == len(self._buffers):
            empty = keys.new_empty(*keys.shape[:2], 0, keys.shape[3])
            self._buffers.append([empty, empty])
        buffers = self._buffers[layer_idx]
        if buffers[0].shape[2] <= self._end:
            # By more than asked, so that a long answer is not copied at every round.
            room = max(self._room, self._end + max(self._end // 2, 64))
            buffers[:] = [_with_room(buffer, room) for buffer in buffers]
        for buffer, new in zip(buffers, (keys, values), strict=True):
            if isinstance(self._slots, slice):
                buffer[:, :, self._slots] = new
            else:
                index = self._slots[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
                buffer.scatter_(2, index, new)
        return tuple(buffer[:, :, : self._end] for buffer in buffers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Context of the longest row."""
        return max(self.lengths)

    def copy_rows(self, other: "DraftCache", entries: list[int]):
        """Take over rows of another cache; this one has as many rows as `entries`, and room for them."""
        self.lengths = [other.lengths[entry] for entry in entries]
        length = max(self.lengths)
        for layer_idx, theirs in enumerate(other._buffers):
            if layer_idx == len(self._buffers):
                self._buffers.append(
                    [_with_room(buffer[entries, :, :0], max(self._room, length + 1)) for buffer in theirs]
                )
            for ours, buffer in zip(self._buffers[layer_idx], theirs, strict=True):
                ours[:, :, :length] = buffer[entries, :, :length]

    def clear(self):
        """Forget everything but the room."""
        self.lengths = [0] * len(self.lengths)
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.zero_()

    def keep(self, entries: list[int]):
        """Forget all other rows."""
        self.lengths = [self.lengths[entry] for entry in entries]
        self._buffers = [[buffer[entries] for buffer in buffers] for buffers in self._buffers]


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


def _with_room(buffer: torch.Tensor, room: int) -> torch.Tensor:
    # Zeros: what no pass has written is masked, and a mask cannot hide what is not a number.
    larger = buffer.new_zeros(*buffer.shape[:2], room, buffer.shape[3])
    larger[:, :, : buffer.shape[2]] = buffer
    return larger
