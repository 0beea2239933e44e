# Made from the folder `generation/` of the package domino_spec. Edit there, not here.


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


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The target's side: what a draft borrows from it (embedding, output head) and reads in it (context features)."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


class _Tap:
    """
    A forward hook that hands on what one target layer puts out; one for each layer, whoever listens, so that what
    `torch.compile` has made of the target serves the next call too.

    Once compiled in, it stays: what would be compiled without it, for calls without a draft, would then be taken for
    calls with one, as Dynamo looks for the hooks that it has seen but not for others.
    """

    _taps: ClassVar["WeakKeyDictionary[nn.Module, _Tap]"] = WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self):
        self.listeners: list[tuple[int, list[torch.Tensor]]] = []
        self.is_open = False
        self.compiled: torch.Tensor | None = None
        self.stays = False
        self._handle: RemovableHandle | None = None

    @classmethod
    def on(cls, layer: nn.Module) -> "_Tap":
        with cls._lock:
            return cls._taps.setdefault(layer, cls())

    def open(self, layer: nn.Module, heard: list[torch.Tensor]):
        """Put what `layer` gives into `heard` whenever this thread runs it."""
        with self._lock:
            self.listeners = [*self.listeners, (threading.get_ident(), heard)]
            self.is_open = True
            if self._handle is None:
                self._handle = layer.register_forward_hook(self)

    def close(self, heard: list[torch.Tensor]):
        with self._lock:
            self.listeners = [listener for listener in self.listeners if listener[1] is not heard]
            self.is_open = bool(self.listeners)
            if self.is_open:
                return
            self.compiled = None
            if self._handle is not None and not self.stays:
                self._handle.remove()
                self._handle = None

    def __call__(self, module, args, output):
        # Some decoder layers return a tuple, hidden states first.
        states = output[0] if isinstance(output, tuple) else output
        if torch.compiler.is_compiling():
            # An output of the graph: what is compiled can neither ask for its thread nor fill a list of any length.
            if self.is_open:
                self.compiled = states if self.compiled is None else torch.cat([self.compiled, states], dim=1)
            return
        thread = threading.get_ident()
        for listener, heard in self.listeners:
            if listener == thread:
                heard.append(states)


class ContextCapture:
    """
    Raw outputs of chosen target layers, as the target reads.

    Filled by forward hooks, so no other layer's states are kept. Hooks sit on the shared target; a capture listens
    only to the thread that opened it, so several threads may generate with one target, unless that is compiled.
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: list[int]):
        self.layer_ids = layer_ids
        self._outputs: dict[int, list[torch.Tensor]] = {layer_id: [] for layer_id in layer_ids}
        self._layers = {layer_id: layers[layer_id] for layer_id in layer_ids}
        self._taps = {layer_id: _Tap.on(layer) for layer_id, layer in self._layers.items()}

    def open(self):
        """Begin to listen."""
        for layer_id, tap in self._taps.items():
            tap.open(self._layers[layer_id], self._outputs[layer_id])

    def close(self):
        """Listen no longer."""
        for layer_id, tap in self._taps.items():
            tap.close(self._outputs[layer_id])

    def clear(self):
        """Forget what was read: a processor of the user's may run the target too, and its passes are not ours."""
        for layer_id, tap in self._taps.items():
            self._outputs[layer_id].clear()
            tap.compiled = None

    def _collect_compiled(self):
        """Take over what a compiled target has left."""
        for layer_id, tap in self._taps.items():
            if tap.compiled is None:
                continue
            tap.stays = True
            if len({thread for thread, _ in tap.listeners}) > 1:
                raise ValueError(
                    "Two threads generate with one compiled target, which cannot tell whose states it gives to a "
                    "draft: give each thread a target of its own, or let one wait for the other."
                )
            self._outputs[layer_id].append(tap.compiled)

    def take(self, device: torch.device) -> torch.Tensor:
        """
        Context features of what the target has read since the last `clear` or `take` (several passes when the prompt
        is read in chunks): `[N, L, T * H]`, layers concatenated on the last dimension, on `device`. They are then
        forgotten, so that nothing large stays alive.

        Raises:
            ValueError: when a layer does not return one state for each position, or was not heard at all, or when
                several threads use one compiled target.
        """
        self._collect_compiled()
        if not all(self._outputs.values()):
            raise ValueError(
                "The target's layers ran without the draft hearing them. That is so where the target was compiled, and "
                "run, before it first met a draft: what was compiled then has no place to listen. Call "
                "`torch.compiler.reset()` once, and generate with the draft before you generate without."
            )
        lengths = {i: [tuple(states.shape) for states in self._outputs[i]] for i in self.layer_ids}
        reference = [shape[:2] for shape in lengths[self.layer_ids[0]]]
        for i, shapes in lengths.items():
            if any(len(shape) != 3 for shape in shapes) or [shape[:2] for shape in shapes] != reference:
                raise ValueError(
                    f"Target layer {i} returned states of shape {shapes}, where layer {self.layer_ids[0]} read "
                    f"{reference}: this architecture's layers do not give one state for each position, so a draft "
                    "cannot read them. Choose other `target_layer_ids`, or generate without the draft."
                )
        states = [torch.cat(self._outputs[i], dim=1).to(device) for i in self.layer_ids]
        self.clear()
        return torch.cat(states, dim=-1)


class TargetParts:
    """
    The frozen parts of a target that a draft needs. Holds references only; nothing of the target is changed.

    Args:
        target (`PreTrainedModel`): any decoder-only causal LM of transformers.

    Raises:
        ValueError: when the target has no input embedding, no output head or no list of decoder layers.
    """

    def __init__(self, target: PreTrainedModel):
        self.config = target.config.get_text_config(decoder=True)
        self.embedding = target.get_input_embeddings()
        self.output_head = target.get_output_embeddings()
        if self.embedding is None or self.output_head is None:
            missing = "input embedding" if self.embedding is None else "output head"
            raise ValueError(
                f"{type(target).__name__} has no {missing}, which a Domino draft borrows: pass a causal LM "
                "(AutoModelForCausalLM), not a bare backbone."
            )
        self.layers = decoder_layers(target)
        self.dtype = target.dtype

    def embed(self, token_ids: torch.LongTensor) -> torch.Tensor:
        """Target embeddings `[..., H]` of `token_ids` `[...]`, as the target's first layer receives them."""
        embeds = self.embedding(token_ids)
        # Most targets that scale do so inside their embedding module and have done it by now; these do in `forward`.
        if (scale := getattr(self.config, "embedding_multiplier", None)) is not None:
            embeds = embeds * scale
        if getattr(self.config, "mup_enabled", False):
            embeds = embeds * self.config.hidden_size**0.5
        return embeds

    def logits(self, hidden: torch.Tensor, token_ids: torch.LongTensor | None = None) -> torch.Tensor:
        """
        Base logits: the target's output head, with the target's own scaling and capping.

        Args:
            hidden (`torch.Tensor` of shape `[..., H]`): draft hidden states; cast to the head's dtype and device.
            token_ids (`torch.LongTensor` of shape `[K]`, *optional*): score only these ids.

        Returns:
            `[..., V]`, or `[..., K]`.
        """
        weight = self.output_head.weight
        # A weight that is offloaded has no device until it is used, a packed one not the dtype that it computes in.
        hidden = hidden.to(
            device=hidden.device if weight.is_meta else weight.device,
            dtype=self.dtype if _is_packed(weight) else weight.dtype,
        )
        if token_ids is None:
            logits = self.output_head(hidden)
        else:
            bias = getattr(self.output_head, "bias", None)
            logits = F.linear(hidden, weight[token_ids], None if bias is None else bias[token_ids])
        if (scale := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scale := getattr(self.config, "logits_scaling", None)) is not None:
            # One name, two meanings.
            logits = logits * scale if self.config.model_type == "hyperclovax" else logits / scale
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def narrowed(self, token_ids: torch.LongTensor) -> "TargetParts | None":
        """
        The same parts with an output head for `token_ids` `[K]` alone: `logits` gives `[..., K]` at the cost of K
        rows, of which it holds a copy. `None` where the head's rows cannot be taken out, see [`linear_rows`].
        """
        rows = linear_rows(self.output_head, token_ids)
        if rows is None:
            return None
        narrow = copy.copy(self)
        narrow.output_head = rows
        return narrow

    @contextmanager
    def capture(self, layer_ids: list[int]) -> Iterator[ContextCapture]:
        """Listen to `layer_ids` (zero-based decoder layers) for as long as the context is open."""
        capture = ContextCapture(self.layers, layer_ids)
        capture.open()
        try:
            yield capture
        finally:
            capture.close()


def _is_packed(weight: torch.Tensor) -> bool:
    """Whether `weight` holds quantised numbers."""
    return not (weight.is_floating_point() and weight.itemsize > 1)


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether a projection is just a matrix at hand: no adapter, not quantised, offloaded or shared among devices."""
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or _is_packed(linear.weight):
        return False
    # Of a weight that is elsewhere, the place is empty.
    return not linear.weight.is_meta and linear.weight.shape == (linear.out_features, linear.in_features)


def linear_rows(linear: nn.Module, rows: torch.LongTensor) -> nn.Linear | None:
    """
    A projection to the outputs `rows` `[K]` of `linear` alone, with copies of their weights; `None` where it is more
    than a matrix, see [`is_plain_linear`].
    """
    if not is_plain_linear(linear):
        return None
    narrow = nn.Linear(linear.in_features, len(rows), bias=linear.bias is not None, device="meta")
    with torch.no_grad():
        rows = rows.to(linear.weight.device)
        narrow.weight = nn.Parameter(linear.weight[rows], requires_grad=False)
        if linear.bias is not None:
            narrow.bias = nn.Parameter(linear.bias[rows], requires_grad=False)
    return narrow


def vocabulary_size(module: nn.Module) -> int:
    """Rows of an input embedding or output head; of a packed (quantised) one, what it was made for."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if weight.dim() == 2 and weight.is_floating_point():
        return weight.shape[0]
    return int(getattr(module, "out_features", getattr(module, "num_embeddings", weight.shape[0])))


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """
    The target's list of decoder layers, wherever its architecture keeps it.

    Raises:
        ValueError: when no module list of the target has `num_hidden_layers` entries.
    """
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    decoder = target.get_decoder() or target
    for root in (decoder, target):
        lists = [m for m in root.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        if lists:
            return lists[0]
    raise ValueError(
        f"{type(target).__name__} has no list of {depth} decoder layers (`num_hidden_layers`): a Domino draft cannot "
        "read its context features from this architecture."
    )


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a draft make of a block? One backbone pass over what it has not read yet, the anchor and masks."""

from dataclasses import dataclass

import torch



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


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How is a rollout made fast on a GPU? Triton kernels for the head: a step is four launches and no more.

    read     r, z = sigmoid(i_r + W_r h), sigmoid(i_z + W_z h);  n = tanh(i_n + r * W_n h);  h' = (1 - z) n + z h
    score    b = silu(hidden_part + W_state h');  final logits = base logits + W_out b
    choose   the first place of the maximum, and its id

To draw from the final logits is to choose as well, with noise on them: x + g, where g = -log e and e is drawn from the
exponential distribution for each, is largest with probability softmax(x) (Gumbel's maximum).

`[i_r, i_z, i_n]` is `W_ih` times the embedding of the token that is read, for all tokens a table; `hidden_part` is the
share of draft hidden in `W1 [hidden ; state]`. Both can be made before the rollout and are made elsewhere.

Nothing here waits for the GPU or allocates, so that a whole rollout can be captured in a CUDA graph. Sums are float32
and logits are never rounded to the dtype of the weights, so in half precision a near tie may fall otherwise than it
does in torch. Triton is optional: where [`is_available`] says no, nothing else in this module may be called.

Shape symbols: n rows, G width of the prefix state, E of the bottleneck, V what may be proposed.
"""

from contextlib import nullcontext
from typing import TypeAlias

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

# Of weights and activations, in any mixture.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# What a correction is made of: `hidden_part` and the prefix state, see below.
CorrectBy: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# How much of the vocabulary a program scores: with the weights of the correction, which take the time, or without.
_PLACES_CORRECTED, _PLACES_BARE = 64, 256


if triton is not None:

    @triton.jit
    def _gru_kernel(
        inputs,
        rows,
        state,
        weight,
        out,
        num_rows,
        inputs_stride,
        rows_stride,
        state_stride,
        weight_stride,
        out_stride,
        WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        UNITS: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        # A program makes UNITS numbers of ROWS states, all three gates of them.
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
        is_row, is_unit = row < num_rows, unit < WIDTH
        inside = is_row[:, None] & is_unit[None, :]
        source = row
        if rows is not None:
            source = tl.load(rows + row * rows_stride, is_row, 0)
        # A table may have more than 2^31 entries.
        read = inputs + source.to(tl.int64)[:, None] * inputs_stride + unit[None, :]
        reset = tl.load(read, inside, 0.0).to(tl.float32)
        update = tl.load(read + WIDTH, inside, 0.0).to(tl.float32)
        new = tl.load(read + 2 * WIDTH, inside, 0.0).to(tl.float32)
        old = tl.zeros([ROWS, UNITS], tl.float32)
        if state is not None:
            old = tl.load(state + row[:, None] * state_stride + unit[None, :], inside, 0.0).to(tl.float32)
            # Summed over threads once, at the end: products pile up where they are made. The tiles have three
            # dimensions from the start, so that a weight is loaded once and serves all rows from its register.
            reset_sum = tl.zeros([ROWS, UNITS, CHUNK], tl.float32)
            update_sum = tl.zeros([ROWS, UNITS, CHUNK], tl.float32)
            new_sum = tl.zeros([ROWS, UNITS, CHUNK], tl.float32)
            gate = WIDTH * weight_stride
            # Unrolled, so that the loads of all chunks are under way together: this kernel waits for memory.
            for start in tl.static_range(0, WIDTH, CHUNK):
                column = start + tl.arange(0, CHUNK)[None, None, :]
                is_column = column < WIDTH
                states = state + row[:, None, None] * state_stride + column
                states = tl.load(states, is_row[:, None, None] & is_column, 0.0).to(tl.float32)
                weights = weight + unit[None, :, None] * weight_stride + column
                is_weight = is_unit[None, :, None] & is_column
                reset_sum += tl.load(weights, is_weight, 0.0).to(tl.float32) * states
                update_sum += tl.load(weights + gate, is_weight, 0.0).to(tl.float32) * states
                new_sum += tl.load(weights + 2 * gate, is_weight, 0.0).to(tl.float32) * states
            reset += tl.sum(reset_sum, 2)
            update += tl.sum(update_sum, 2)
            new += tl.sigmoid(reset) * tl.sum(new_sum, 2)
        # tanh, of which Triton's language has none.
        new = 2 * tl.sigmoid(2 * new) - 1
        update = tl.sigmoid(update)
        result = (1 - update) * new + update * old
        tl.store(out + row[:, None] * out_stride + unit[None, :], result.to(out.dtype.element_ty), inside)

    @triton.jit
    def _bottleneck_kernel(
        hidden_part,
        state,
        weight,
        bottleneck,
        num_rows,
        width,
        hidden_stride,
        state_stride,
        weight_stride,
        STATE_WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        UNITS: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
        is_row, is_unit = row < num_rows, unit < width
        inside = is_row[:, None] & is_unit[None, :]
        total = tl.zeros([ROWS, UNITS, CHUNK], tl.float32)
        for start in tl.static_range(0, STATE_WIDTH, CHUNK):
            column = start + tl.arange(0, CHUNK)[None, None, :]
            is_column = column < STATE_WIDTH
            states = state + row[:, None, None] * state_stride + column
            states = tl.load(states, is_row[:, None, None] & is_column, 0.0).to(tl.float32)
            weights = weight + unit[None, :, None] * weight_stride + column
            total += tl.load(weights, is_unit[None, :, None] & is_column, 0.0).to(tl.float32) * states
        fused = tl.load(hidden_part + row[:, None] * hidden_stride + unit[None, :], inside, 0.0).to(tl.float32)
        fused += tl.sum(total, 2)
        result = fused * tl.sigmoid(fused)
        tl.store(bottleneck + row[:, None] * width + unit[None, :], result.to(bottleneck.dtype.element_ty), inside)

    @triton.jit
    def _first_maximum(scores):
        # Of each column of `scores`: the maximum and its first place, where NaN is above all numbers, as in torch. The
        # comparisons of a reduction drop NaN or keep it as the order has it, so it must not get there.
        is_nan = scores != scores
        has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
        ranks = tl.where(has_nan[None, :], tl.where(is_nan, 1.0, 0.0), scores)
        maximum, place = tl.max(ranks, 0, return_indices=True)
        return tl.where(has_nan, float("nan"), maximum), place

    @triton.jit
    def _score_kernel(
        base_logits,
        bottleneck,
        weight,
        noise,
        out,
        block_peaks,
        block_places,
        num_rows,
        vocabulary,
        num_blocks,
        temperature,
        base_stride,
        weight_stride,
        noise_stride,
        out_stride,
        WIDTH: tl.constexpr,
        OPERAND: tl.constexpr,
        ROWS: tl.constexpr,
        PLACES: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        block = tl.program_id(0)
        place = block * PLACES + tl.arange(0, PLACES)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_place, is_row = place < vocabulary, row < num_rows
        inside = is_place[:, None] & is_row[None, :]
        logits = tl.zeros([PLACES, ROWS], tl.float32)
        if weight is not None:
            # The vocabulary is the longer side of the product, so it takes the operand that tensor cores want long.
            # Stages: chunks of the weights that are on their way while one is multiplied.
            for start in tl.range(0, WIDTH, CHUNK, num_stages=4):
                column = start + tl.arange(0, CHUNK)
                is_column = column < WIDTH
                weights = weight + place.to(tl.int64)[:, None] * weight_stride + column[None, :]
                weights = tl.load(weights, is_place[:, None] & is_column[None, :], 0.0)
                inputs = bottleneck + row[None, :] * WIDTH + column[:, None]
                inputs = tl.load(inputs, is_row[None, :] & is_column[:, None], 0.0)
                # "ieee": float32 stays float32, where tensor cores would cut it to 19 bits.
                logits = tl.dot(weights.to(OPERAND), inputs.to(OPERAND), logits, input_precision="ieee")
        # After the product, whose operands are the long wait: loaded first, these few would hold them up.
        far_row = row.to(tl.int64)[None, :]
        base = base_logits + far_row * base_stride + place[:, None]
        logits += tl.load(base, inside, 0.0).to(tl.float32)
        if temperature is not None:
            logits = logits / temperature
        if out is not None:
            tl.store(out + far_row * out_stride + place[:, None], logits, inside)
        if noise is not None:
            # Zero would be more than -inf can bear, and raise a token that has no probability.
            drawn = tl.load(noise + far_row * noise_stride + place[:, None], inside, 1.0)
            logits -= tl.log(tl.maximum(drawn, 1e-37))
        if block_peaks is not None:
            # Only now, for a bottleneck that is not finite makes NaN of the zeros beyond the vocabulary.
            logits = tl.where(inside, logits, float("-inf"))
            peak, first = _first_maximum(logits)
            at = row * num_blocks + block
            tl.store(block_peaks + at, peak, is_row)
            tl.store(block_places + at, block * PLACES + first, is_row)

    @triton.jit
    def _choice_kernel(
        block_peaks,
        block_places,
        token_ids,
        ids,
        places,
        peaks,
        num_blocks,
        ids_stride,
        places_stride,
        peaks_stride,
        BLOCKS: tl.constexpr,
    ):
        row = tl.program_id(0)
        block = tl.arange(0, BLOCKS)[:, None]
        scores = tl.load(block_peaks + row * num_blocks + block, block < num_blocks, float("-inf"))
        # Blocks are in the order of their places, so the first of equal ones has the lowest.
        peak, winner = _first_maximum(scores)
        place = tl.load(block_places + row * num_blocks + winner).to(tl.int64)
        one = tl.arange(0, 1)
        tl.store(peaks + row * peaks_stride + one, peak)
        if places is not None:
            tl.store(places + row * places_stride + one, place)
        if token_ids is not None:
            place = tl.load(token_ids + place)
        tl.store(ids + row * ids_stride + one, place)


def is_available(device: torch.device) -> bool:
    """
    Whether the kernels run on `device`: a GPU of compute capability 7.0 or newer, or any device where Triton's
    interpreter (environment variable `TRITON_INTERPRET=1`) was on before Triton was imported.
    """
    if triton is None:
        return False
    # Switched on late, the interpreter has our functions but not those of Triton itself, and nothing runs.
    interpreted = [not isinstance(function, triton.JITFunction) for function in (_gru_kernel, tl.max)]
    if any(interpreted):
        return all(interpreted)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def gru_step(
    inputs: torch.Tensor,
    state: torch.Tensor | None,
    weight_hh: torch.Tensor,
    out: torch.Tensor,
    rows: torch.LongTensor | None = None,
) -> torch.Tensor:
    """
    One step of a GRU without bias; gates in torch's order: reset, update, new.

    Each tensor is of any of `KERNEL_DTYPES` and contiguous in its last dimension.

    Args:
        inputs (`torch.Tensor` of shape `[n, 3 * G]`): `W_ih` times the embeddings that are read. With `rows` a table
            of them, `[any, 3 * G]`.
        state (`torch.Tensor` of shape `[n, G]`, *optional*): prefix state; zero when not given.
        weight_hh (`torch.Tensor` of shape `[3 * G, G]`): `weight_hh_l0` of a `torch.nn.GRU`.
        out (`torch.Tensor` of shape `[n, G]`): receives the new prefix state; must share no memory with `state`.
        rows (`torch.LongTensor` of shape `[n]`, *optional*): lines of the table to read, such as token ids; any
            stride. Not checked against the table's length, for that would wait for the GPU.

    Returns:
        `out`.
    """
    num_rows, width = out.shape
    assert weight_hh.shape == (3 * width, width) and inputs.shape[-1] == 3 * width
    assert len(inputs if rows is None else rows) == num_rows
    assert state is None or (state.shape == out.shape and state.data_ptr() != out.data_ptr())
    assert all(tensor is None or tensor.stride(-1) == 1 for tensor in (inputs, state, weight_hh, out))
    rows_each = _rows_each(num_rows)
    # 8 units: at G = 1024 a program for nearly every multiprocessor of an H200.
    grid = (triton.cdiv(width, 8), triton.cdiv(num_rows, rows_each))
    with _current(out.device):
        _gru_kernel[grid](
            inputs,
            rows,
            state,
            weight_hh,
            out,
            num_rows,
            inputs.stride(0),
            0 if rows is None else rows.stride(0),
            0 if state is None else state.stride(0),
            weight_hh.stride(0),
            out.stride(0),
            WIDTH=width,
            ROWS=rows_each,
            UNITS=8,
            # Three sums of ROWS x UNITS x CHUNK live in the registers of 256 threads: at most 96 in each.
            CHUNK=min(triton.next_power_of_2(width), 1024 // rows_each),
            num_warps=8,
        )
    return out


class HeadKernels:
    """
    The head's kernels for rollouts one after another, with all the memory that they need.

    Each tensor that a method takes is of any of `KERNEL_DTYPES`, where nothing else is said, and contiguous in its last
    dimension. A kernel is compiled when it is first launched with shapes, dtypes or alignments that it has not seen:
    run a rollout once before it is captured in a CUDA graph. Rollouts share the memory, so threads must not share it.

    Args:
        weight_hh (`torch.Tensor` of shape `[3 * G, G]`): `prefix_gru.weight_hh_l0`.
        weight_state (`torch.Tensor` of shape `[E, G]`): the columns of `embed_proj[0].weight` that read the state.
        weight_out (`torch.Tensor` of shape `[V, E]`): `embed_proj[2].weight`, or its rows for a shortlist.
        num_rows (`int`): the most rows of a rollout.
        token_ids (`torch.LongTensor` of shape `[V]`, *optional*): the ids of a shortlist.
    """

    def __init__(
        self,
        weight_hh: torch.Tensor,
        weight_state: torch.Tensor,
        weight_out: torch.Tensor,
        num_rows: int,
        token_ids: torch.LongTensor | None = None,
    ):
        vocabulary, width = weight_out.shape
        weights = (weight_hh, weight_state, weight_out)
        assert weight_state.shape == (width, weight_hh.shape[1])
        assert all(weight.dtype in KERNEL_DTYPES and weight.stride(-1) == 1 for weight in weights)
        assert token_ids is None or (token_ids.shape == (vocabulary,) and token_ids.is_contiguous())
        self.weight_hh, self.weight_state, self.weight_out = weights
        self.token_ids = token_ids
        # Float32: rounding would add up from step to step, and costs as much time as it spares at this size.
        self._states = weight_hh.new_empty(2, num_rows, weight_hh.shape[1], dtype=torch.float32)
        # In the dtype that tensor cores are fed with.
        self._bottleneck = weight_out.new_empty(num_rows, width)
        num_blocks = triton.cdiv(vocabulary, _PLACES_CORRECTED)
        self._block_peaks = weight_out.new_empty(num_rows * num_blocks, dtype=torch.float32)
        self._block_places = weight_out.new_empty(num_rows * num_blocks, dtype=torch.int32)

    def step(
        self, inputs: torch.Tensor, state: torch.Tensor | None, rows: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """
        Read one token in each row, see [`gru_step`].

        Returns:
            The new prefix state, float32 `[n, G]`, in one of two buffers: the next step but one overwrites it.
        """
        first, second = self._states[:, : len(inputs if rows is None else rows)]
        out = second if state is not None and state.data_ptr() == first.data_ptr() else first
        return gru_step(inputs, state, self.weight_hh, out, rows)

    def score_argmax(
        self,
        base_logits: torch.Tensor,
        ids: torch.LongTensor,
        peaks: torch.Tensor,
        places: torch.LongTensor | None = None,
        correct_by: CorrectBy | None = None,
    ):
        """
        The likeliest proposal of each row; among equal ones the first, and NaN before all numbers, as in torch.

        Args:
            base_logits (`torch.Tensor` of shape `[n, V]`): of the position.
            ids (`torch.LongTensor` of shape `[n]`): receives the proposals; any stride, such as `proposal_ids[:, k]`.
            peaks (`torch.FloatTensor` of shape `[n]`): receives their final logits, NaN and infinities as they are.
            places (`torch.LongTensor` of shape `[n]`, *optional*): receives where the proposals stand among the V;
                with no shortlist the same as `ids`.
            correct_by (*optional*): what `embed_proj[0]` makes of draft hidden alone, `torch.Tensor` of shape `[n, E]`,
                and the prefix state after the tokens before the proposal, of shape `[n, G]`. Not given in the pure
                draft prefix, where base logits are final.
        """
        self._score(base_logits, correct_by, ids=ids, peaks=peaks, places=places)

    def score(
        self,
        base_logits: torch.Tensor,
        out: torch.Tensor,
        correct_by: CorrectBy | None = None,
        temperature: float = 1.0,
    ):
        """
        Final logits divided by `temperature`, for warpers to go on with.

        Args:
            base_logits, correct_by: as for `score_argmax`.
            out (`torch.FloatTensor` of shape `[n, V]`): receives them.
            temperature (`float`): above zero. A captured graph keeps it.
        """
        self._score(base_logits, correct_by, out=out, temperature=temperature)

    def score_sample(
        self,
        base_logits: torch.Tensor,
        noise: torch.Tensor,
        ids: torch.LongTensor,
        peaks: torch.Tensor,
        places: torch.LongTensor | None = None,
        correct_by: CorrectBy | None = None,
        temperature: float = 1.0,
        out: torch.Tensor | None = None,
    ):
        """
        A proposal of each row, drawn with probability softmax(final logits / temperature), as [`draw_with`] does. In a
        row that has no such probabilities (some logits are NaN or `inf`, or all are `-inf`) it is the one that
        `score_argmax` takes, whatever the noise.

        Args:
            base_logits, ids, places, correct_by: as for `score_argmax`.
            noise (`torch.FloatTensor` of shape `[n, V]`): drawn anew from the exponential distribution of mean 1, such
                as by `noise.exponential_()`.
            peaks (`torch.FloatTensor` of shape `[n]`): receives what the proposals were chosen for, which is finite
                where there were probabilities.
            temperature (`float`): above zero. A captured graph keeps it.
            out (`torch.FloatTensor` of shape `[n, V]`, *optional*): receives the final logits divided by `temperature`.
        """
        self._score(base_logits, correct_by, ids, peaks, places, noise, out, temperature)

    def _score(
        self,
        base_logits: torch.Tensor,
        correct_by: CorrectBy | None,
        ids: torch.LongTensor | None = None,
        peaks: torch.Tensor | None = None,
        places: torch.LongTensor | None = None,
        noise: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        temperature: float = 1.0,
    ):
        """Score, and choose where `ids` are asked for."""
        num_rows, vocabulary = base_logits.shape
        assert vocabulary == len(self.weight_out) and num_rows <= len(self._bottleneck)
        for tensor in (noise, out):
            assert tensor is None or (tensor.shape == base_logits.shape and tensor.dtype == torch.float32)
        assert all(tensor is None or tensor.stride(-1) == 1 for tensor in (base_logits, noise, out))
        assert temperature > 0
        is_bare = correct_by is None
        places_each = _PLACES_BARE if is_bare else _PLACES_CORRECTED
        num_blocks = triton.cdiv(vocabulary, places_each)
        # A tensor core takes 16 columns at least; more than 32 would crowd the registers.
        rows_each = min(32, max(1 if is_bare else 16, triton.next_power_of_2(num_rows)))
        width = self.weight_out.shape[1]
        with _current(base_logits.device):
            if correct_by is not None:
                self._fill_bottleneck(*correct_by)
            _score_kernel[(num_blocks, triton.cdiv(num_rows, rows_each))](
                base_logits,
                None if is_bare else self._bottleneck,
                None if is_bare else self.weight_out,
                noise,
                out,
                None if ids is None else self._block_peaks,
                None if ids is None else self._block_places,
                num_rows,
                vocabulary,
                num_blocks,
                None if temperature == 1 else float(temperature),
                base_logits.stride(0),
                self.weight_out.stride(0),
                0 if noise is None else noise.stride(0),
                0 if out is None else out.stride(0),
                WIDTH=width,
                OPERAND=_operand(self.weight_out.dtype),
                ROWS=rows_each,
                PLACES=places_each,
                # In float32, which tensor cores do not multiply, a thread holds whole rows of a chunk in its registers.
                CHUNK=min(max(16, triton.next_power_of_2(width)), 32 if self.weight_out.dtype == torch.float32 else 64),
                num_warps=4,
            )
            if ids is not None:
                assert peaks is not None and ids.shape == peaks.shape == (num_rows,)
                assert ids.dtype == torch.int64 and peaks.dtype == torch.float32
                _choice_kernel[(num_rows,)](
                    self._block_peaks,
                    self._block_places,
                    self.token_ids,
                    ids,
                    places,
                    peaks,
                    num_blocks,
                    ids.stride(0),
                    0 if places is None else places.stride(0),
                    peaks.stride(0),
                    BLOCKS=triton.next_power_of_2(num_blocks),
                    num_warps=8,
                )

    def _fill_bottleneck(self, hidden_part: torch.Tensor, state: torch.Tensor):
        num_rows, width = hidden_part.shape
        state_width = self.weight_state.shape[1]
        assert width == self._bottleneck.shape[1] and state.shape == (num_rows, state_width)
        assert hidden_part.stride(-1) == state.stride(-1) == 1
        rows_each = _rows_each(num_rows)
        # 2 units: there are few, and each is a long sum.
        _bottleneck_kernel[(triton.cdiv(width, 2), triton.cdiv(num_rows, rows_each))](
            hidden_part,
            state,
            self.weight_state,
            self._bottleneck,
            num_rows,
            width,
            hidden_part.stride(0),
            state.stride(0),
            self.weight_state.stride(0),
            STATE_WIDTH=state_width,
            ROWS=rows_each,
            UNITS=2,
            CHUNK=min(triton.next_power_of_2(state_width), 1024),
            num_warps=4,
        )


def _rows_each(num_rows: int) -> int:
    """Rows that share one read of the weights: a power of two, as large as registers allow."""
    return min(4, triton.next_power_of_2(num_rows))


def _operand(dtype: torch.dtype):
    """What tensor cores are fed with, for weights of `dtype`."""
    if not isinstance(_score_kernel, triton.JITFunction):
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _current(device: torch.device):
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Which processors and criteria may be called out of plain decoding's order? What we know reads nothing but its
arguments; all else is called exactly as plain decoding would."""

import copy
from collections.abc import Iterable

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

# They read nothing but the tokens and logits of one row at a time: any row, any number of calls, same result.
_ROW_WISE = {
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",
    )
    if hasattr(logits_process, name)
}
# They read nothing but the logits, and none waits for a GPU: one call serves any rows at any places in their texts.
_OF_LOGITS = {
    logits_process.EpsilonLogitsWarper,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
}
# These know a row by its place in the batch, so they need the whole batch at one length, but count no calls.
_BATCH_WISE = {
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
}
_ROW_WISE_CRITERIA = {
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
}


def draft_processors(logits_processor: LogitsProcessorList) -> LogitsProcessorList:
    """
    The processors that also shape proposals, which only raises acceptance. Any other, a function of the user's for
    `prefix_allowed_tokens_fn` too, might count its calls or know only what can follow the target's own tokens, and
    must see the calls of plain decoding only.
    """
    return LogitsProcessorList(p for p in logits_processor if type(p) in _ROW_WISE | _BATCH_WISE)


def are_row_wise(logits_processor: LogitsProcessorList, criteria: StoppingCriteriaList, pads: bool) -> bool:
    """
    Whether rows of different lengths may be processed and stopped one by one. Where ended rows cannot be padded
    (`pads` false), they may differ in length only on the way to a common limit.
    """
    allowed = _ROW_WISE_CRITERIA if pads else {stopping_criteria.MaxLengthCriteria}
    return all(type(p) in _ROW_WISE for p in logits_processor) and all(type(c) in allowed for c in criteria)


def read_logits_alone(logits_processor: LogitsProcessorList) -> bool:
    """Whether all of them read logits and nothing else, so that [`warp`] may call them."""
    return all(type(processor) in _OF_LOGITS for processor in logits_processor)


def warp(logits_processor: Iterable[LogitsProcessor], logits: torch.Tensor) -> torch.Tensor:
    """Processed scores of logits `[m, V]`, of any rows at any places in their texts."""
    no_text = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    for processor in logits_processor:
        logits = processor(no_text, logits)
    return logits


def process(
    logits_processor: LogitsProcessorList, rows: list[int], input_ids: torch.LongTensor, scores: torch.Tensor
) -> torch.Tensor:
    """
    Processed scores `[g, V]` of some `rows` of the batch; of all of them, where a processor is not row-wise.

    Args:
        rows (`list[int]`): which rows of the batch these are.
        input_ids (`torch.LongTensor` of shape `[g, S]`), scores (`torch.FloatTensor` of shape `[g, V]`): theirs.
    """
    if not all(type(processor) in _ROW_WISE for processor in logits_processor):
        return logits_processor(input_ids, scores)
    # Called directly: a list of transformers looks up each one's arguments at every call.
    for processor in logits_processor:
        # Later versions of transformers let this one skip each row's padding: one number for each row of the batch.
        skipped = getattr(processor, "prompt_ignore_length", None)
        if isinstance(skipped, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = skipped[torch.tensor(rows, device=skipped.device)]
        scores = processor(input_ids, scores)
    return scores


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How is a token drawn? From one distribution, or from the target's by way of the draft's."""

import torch
from torch.nn import functional as F


def draw(probabilities: torch.Tensor) -> torch.LongTensor:
    """
    One token `[g]` from each of `probabilities` `[g, V]`, which need not add up to 1; any token where they are NaN.

    It is the token that `torch.multinomial` draws. That judges the probabilities as well, for which it waits for the
    device, or lets the device end the process.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def draw_with(noise: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.LongTensor]:
    """
    The draw that `noise` makes, for kernels to be held against: token x with probability softmax(scores)[x].

    Args:
        noise (`torch.FloatTensor` of shape `[g, V]`): from the exponential distribution of mean 1.
        scores (`torch.FloatTensor` of shape `[g, V]`).

    Returns:
        The largest of `scores - log(noise)` `[g]`, and where it stands `[g]`.
    """
    # Zero would be more than -inf can bear, and raise a token that has no probability.
    return (scores - noise.clamp(min=1e-37).log()).max(-1)


def accept_or_draw(
    scores: torch.Tensor, proposal_ids: torch.LongTensor, draft_probabilities: torch.Tensor
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    One step of rejection sampling.

    Args:
        scores (`torch.FloatTensor` of shape `[g, V]`): processed scores of the target.
        proposal_ids (`torch.LongTensor` of shape `[g]`): drawn from `draft_probabilities`.
        draft_probabilities (`torch.FloatTensor` of shape `[g, V]`): q.

    Returns:
        The tokens `[g]`, and which of them are the proposals `[g]`.
    """
    p = scores.softmax(-1)
    q = draft_probabilities.to(p)
    if missing := q.shape[-1] - p.shape[-1]:
        # A processor of the user's has cut the target's vocabulary short.
        p = F.pad(p, (0, missing))
    index = proposal_ids[:, None]
    p_proposal, q_proposal = p.gather(-1, index)[:, 0], q.gather(-1, index)[:, 0]
    accepted = torch.rand_like(p_proposal) * q_proposal < p_proposal
    residual = (p - q).clamp(min=0)
    # Where p and q are equal but for rounding, nothing is left over, and p itself is the limit.
    residual = torch.where(residual.sum(-1, keepdim=True) > 1e-9, residual, p)
    return torch.where(accepted, proposal_ids, draw(residual)), accepted


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What may a draft propose, and how likely is each? Base logits, and the head's correction of them token by token."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import logging


logger = logging.get_logger(__name__)


class UnrolledHead:
    """
    The head of a draft, one token at a time, whatever it is made of: adapters have their say.

    Args:
        draft (`DominoDraftModel`): whose head it is.
        token_ids (`torch.LongTensor` of shape `[V]`, *optional*): the only ids to score.
    """

    def __init__(self, draft, token_ids: torch.LongTensor | None):
        self.draft, self.token_ids = draft, token_ids

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a block's draft hidden `[n, K, H]` alone says: `[n, K, ...]`, whose entry k goes to `correction`."""
        return hidden

    def step(self, token_embeds: torch.Tensor, prefix_state: torch.Tensor | None) -> torch.Tensor:
        """The prefix state `[n, G]` after one more token, of target embeddings `[n, H]`."""
        return self.draft.step(token_embeds, prefix_state)

    def correction(
        self, begun: torch.Tensor, prefix_state: torch.Tensor, places: torch.LongTensor | None
    ) -> torch.Tensor:
        """
        Correction logits `[n, V]`.

        Args:
            begun (`torch.Tensor` of shape `[n, ...]`): of the position, an entry of `begin`.
            prefix_state (`torch.Tensor` of shape `[n, G]`): after the tokens before it.
            places (`torch.LongTensor` of shape `[n, V]`, *optional*): the only ones to score of what may be proposed.
        """
        token_ids = None if self.token_ids is None else self.token_ids.to(begun.device)
        logits = self.draft.correction(begun, prefix_state, token_ids)
        return logits if places is None else logits.gather(-1, places)


class PlainHead:
    """
    [`UnrolledHead`] for a head of plain matrices, with less to do in each step: the share of the bottleneck that does
    not depend on the tokens is computed for the whole block at once, and the GRU is called as a cell.
    """

    def __init__(self, draft, token_ids: torch.LongTensor | None):
        first, last = draft.embed_proj[0], draft.embed_proj[2]
        width = draft.config.hidden_size
        self.weight_ih, self.weight_hh = draft.prefix_gru.weight_ih_l0, draft.prefix_gru.weight_hh_l0
        self.weight_hidden, self.weight_state = (
            part.contiguous() for part in first.weight.split([width, first.in_features - width], dim=1)
        )
        self.weight_out = last.weight if token_ids is None else last.weight[token_ids.to(last.weight.device)]

    @staticmethod
    def suits(draft) -> bool:
        """Whether the head of `draft` is nothing but its own weights, at hand."""
        gru, projection = draft.prefix_gru, draft.embed_proj
        # A class of the user's may compute another head with them.
        names = ("prefix_states", "step", "correction", "bottleneck")
        makers = {next(cls for cls in type(draft).__mro__ if name in vars(cls)) for name in names}
        return (
            len(makers) == 1
            and type(gru) is nn.GRU
            and type(projection) is nn.Sequential
            and all(is_plain_linear(projection[i]) for i in (0, 2))
            and not any(module._forward_hooks or module._forward_pre_hooks for module in (gru, *projection.modules()))
            and all(type(weight) is nn.Parameter and not weight.is_meta for weight in gru.parameters())
        )

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight_hidden)

    def step(self, token_embeds: torch.Tensor, prefix_state: torch.Tensor | None) -> torch.Tensor:
        token_embeds = token_embeds.to(self.weight_ih)
        if prefix_state is None:
            prefix_state = token_embeds.new_zeros(len(token_embeds), self.weight_hh.shape[1])
        return torch.gru_cell(token_embeds, prefix_state, self.weight_ih, self.weight_hh)

    def correction(
        self, begun: torch.Tensor, prefix_state: torch.Tensor, places: torch.LongTensor | None
    ) -> torch.Tensor:
        bottleneck = F.silu(begun + F.linear(prefix_state, self.weight_state))
        if places is None:
            return F.linear(bottleneck, self.weight_out)
        return torch.einsum("nve,ne->nv", self.weight_out[places], bottleneck)


class Scorer:
    """
    Scores what a draft may propose: all ids, or those of its shortlist; at each position all of these, or a pool of the
    likeliest by the base logits.

    Made once for a call of `generate`, with copies of the rows that a shortlist leaves of the two projections onto the
    vocabulary (the target's output head, the last of the draft's own head).

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        use_head (`bool`): `False` scores by the base logits alone (DFlash).
    """

    def __init__(self, draft, target: TargetParts, use_head: bool):
        self.draft, self.target = draft, target
        self.token_ids: torch.LongTensor | None = None
        self.head: UnrolledHead | PlainHead | None = None
        if (shortlist := draft.config.shortlist_ids) is not None:
            token_ids = torch.tensor(shortlist)
            if (narrow := target.narrowed(token_ids)) is None:
                logger.warning_once(
                    "The draft's shortlist is of no effect: the target's output head is not a matrix at hand (it is "
                    "quantised, offloaded, shared among devices, or has an adapter), so that its rows cannot be taken "
                    "out."
                )
            else:
                self.target, self.token_ids = narrow, token_ids.to(target.output_head.weight.device)
        if use_head and draft.config.has_head:
            self.head = (PlainHead if PlainHead.suits(draft) else UnrolledHead)(draft, self.token_ids)

    def base(self, hidden: torch.Tensor, pool: int | None = None) -> tuple[torch.Tensor, torch.LongTensor | None]:
        """
        Base logits `[n, K, V]` of draft hidden `[n, K, H]`, and where they stand among all that may be proposed
        (`[n, K, V]`) when they are a pool of candidates: of the draft's own `candidate_pool_size`, or of `pool`.
        """
        logits, pool = self.target.logits(hidden), self.draft.config.candidate_pool_size or pool
        # Without a head there is nothing to correct, so nothing to spare.
        if self.head is None or pool is None or pool >= logits.shape[-1]:
            return logits, None
        return logits.topk(pool, dim=-1)

    def ids(self, chosen: torch.LongTensor, places: torch.LongTensor | None = None) -> torch.LongTensor:
        """The ids of what was chosen among all that may be proposed, or `[n]` among candidates at `places` `[n, V]`."""
        if places is not None:
            chosen = places.gather(1, chosen[:, None])[:, 0]
        return chosen if self.token_ids is None else self.token_ids[chosen]

    def spread(self, logits: torch.Tensor, places: torch.LongTensor | None) -> torch.Tensor:
        """Logits `[n, V]` over the whole vocabulary, where what may not be proposed has none; `places` as for `ids`."""
        if self.token_ids is None and places is None:
            return logits
        whole = logits.new_full((len(logits), self.draft.config.vocab_size), -torch.inf)
        if places is None:
            whole[:, self.token_ids] = logits
            return whole
        return whole.scatter_(1, places if self.token_ids is None else self.token_ids[places], logits)


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is decided so far? The token ids of a batch whose rows may differ in length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from transformers import LogitsProcessorList


# Rows of a batch, to index a tensor's first dimension with.
Rows: TypeAlias = torch.LongTensor | slice


@dataclass
class Proposal:
    """
    Tokens offered after the anchors.

    Attributes:
        proposal_ids (`torch.LongTensor` of shape `[n, K]`): on the target's device.
        probabilities (`torch.FloatTensor` of shape `[n, K, V]`, *optional*): when sampling, the distribution that
            each was drawn from.
        finite (`torch.BoolTensor` of shape `[]`, *optional*): whether the logits they come from are finite numbers.
        seconds (`float`): wall-clock time of making them.
    """

    proposal_ids: torch.LongTensor
    probabilities: torch.Tensor | None = None
    finite: torch.Tensor | None = None
    seconds: float = 0.0


class Sequences:
    """
    Committed tokens of each row; behind them, the proposals under verification.

    Args:
        input_ids (`torch.LongTensor` of shape `[n, S]`): the prompts.

    Attributes:
        lengths (`list[int]`): committed tokens of each row, left padding of the prompt included.
        rows (`list[int]`): which rows of the batch these are; ended ones may have been let go.
    """

    def __init__(self, input_ids: torch.LongTensor):
        self._tokens = input_ids.long()
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]
        self.rows = list(range(input_ids.shape[0]))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    def reserve(self, extra: int):
        """Make room for `extra` tokens behind each row."""
        missing = max(self.lengths) + extra - self._tokens.shape[1]
        if missing > 0:
            # Grown by more than asked, so that a long answer is not copied at every round.
            space = self._tokens.new_zeros(len(self), max(missing, self._tokens.shape[1] // 2, 64))
            self._tokens = torch.cat([self._tokens, space], dim=1)

    def groups(self, rows: list[int], offset: int) -> Iterator[tuple[list[int], Rows, torch.LongTensor]]:
        """
        `rows` by length: the rows, an index for them and their tokens `[g, length + offset]`, proposals up to
        `offset` included.
        """
        by_length: dict[int, list[int]] = {}
        for row in rows:
            by_length.setdefault(self.lengths[row], []).append(row)
        for length, members in by_length.items():
            index = slice(None) if len(members) == len(self) else torch.tensor(members, device=self.device)
            yield members, index, self._tokens[index, : length + offset].contiguous()

    def process(
        self, logits_processor: LogitsProcessorList, members: list[int], prefix: torch.LongTensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Processed scores of a group, which is the whole batch unless all processors are row-wise."""
        if not logits_processor:
            return logits
        return process(logits_processor, [self.rows[row] for row in members], prefix, logits)

    def put(self, token_ids: torch.LongTensor, offset: int):
        """Write `token_ids` `[n]` at `offset` behind the committed tokens of each row, without committing them."""
        if len(set(self.lengths)) == 1:
            self._tokens[:, self.lengths[0] + offset] = token_ids
        else:
            columns = torch.tensor(self.lengths, device=self.device) + offset
            self._tokens[torch.arange(len(self), device=self.device), columns] = token_ids

    def put_block(self, token_ids: torch.LongTensor):
        """Write `token_ids` `[n, k]` behind the committed tokens of each row, without committing them."""
        if len(set(self.lengths)) == 1:
            self._tokens[:, self.lengths[0] : self.lengths[0] + token_ids.shape[1]] = token_ids
        else:
            first = torch.tensor(self.lengths, device=self.device)[:, None]
            self._tokens.scatter_(1, first + torch.arange(token_ids.shape[1], device=self.device), token_ids)

    def put_rows(self, rows: Rows, length: int, token_ids: torch.LongTensor):
        """Write `token_ids` `[g]` as token number `length` of `rows`."""
        self._tokens[rows, length] = token_ids

    def last(self) -> torch.LongTensor:
        """The anchors `[n, 1]`."""
        if len(set(self.lengths)) == 1:
            return self._tokens[:, self.lengths[0] - 1 : self.lengths[0]]
        columns = torch.tensor(self.lengths, device=self.device) - 1
        return self._tokens.gather(1, columns[:, None])

    def prefix(self, extra: int = 0) -> torch.LongTensor:
        """Committed tokens of all rows and `extra` behind them, `[n, length + extra]`, where rows are of one length."""
        return self._tokens[:, : self.lengths[0] + extra]

    def row(self, row: int) -> torch.LongTensor:
        """Committed tokens of one row, `[length]`."""
        return self._tokens[row, : self.lengths[row]]

    def keep(self, rows: list[int]):
        """Forget all other rows."""
        self._tokens = self._tokens[torch.tensor(rows, device=self.device)]
        self.lengths = [self.lengths[row] for row in rows]
        self.rows = [self.rows[row] for row in rows]


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does drafting cost a GPU no more than its kernels? All of a round's draft phase in one CUDA graph."""

import threading
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn import functional as F
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.utils import logging


logger = logging.get_logger(__name__)

# The room for text is a multiple of this, so that calls of about one length share a graph.
_ROOM = 512
# Ways to choose a token (greedily, or by these warpers) that graphs are kept for; each keeps memory of its own.
_MOST_WAYS = 4


@dataclass
class CaptureOptions:
    """
    What a draft was told by `use_cuda_graphs`.

    Attributes:
        input_table (`bool`): whether to keep the GRU's projection of every embedding.
    """

    input_table: bool = False


def can_capture(device: torch.device) -> bool:
    """Whether work on `device` can be captured."""
    return device.type == "cuda"


class CapturedDraft:
    """
    The draft phase of rounds with fixed shapes: context in, proposals out, and no word with the host between.

    Args:
        draft (`DominoDraftModel`), scorer (`Scorer`): the draft, and what scores its proposals, with a plain head and
            no pool. Neither is kept, so that the draft may be let go while this is in store for it.
        parts (`TargetParts`): of the target.
        num_rows (`int`), num_proposals (`int`): n, and K of each round.
        room (`int`): context and block of a row must fit in so many slots.
        warpers (`LogitsProcessorList`, *optional*): draw each proposal from what they leave, which read logits alone;
            the likeliest is taken when not given.
        input_table (`torch.Tensor` of shape `[V, 3 * G]`, *optional*): `W_ih` times each embedding.
    """

    def __init__(
        self,
        draft,
        scorer: Scorer,
        parts: TargetParts,
        num_rows: int,
        num_proposals: int,
        room: int,
        warpers: LogitsProcessorList | None = None,
        input_table: torch.Tensor | None = None,
    ):
        assert isinstance(scorer.head, PlainHead)
        device, head = draft.device, scorer.head
        self._draft, self.parts, self.head = ref(draft), parts, head
        self.scored, self.token_ids = scorer.target, scorer.token_ids
        self.num_proposals, self.room, self.input_table = num_proposals, room, input_table
        # The weights that it reads, and what it may serve; see `Captures`.
        self.made_of: tuple = ()
        self.way: tuple | None = None
        self.kind: tuple = ()
        self.cache = DraftCache(num_rows, room + 1)
        # A round commits the proposals and a bonus token at most.
        width = num_proposals + 1
        self.features = torch.zeros(num_rows, width, draft.fc.in_features, dtype=draft.dtype, device=device)
        # Of each row: where its text begins, its context in the cache, the new context.
        self.numbers = torch.zeros(3, num_rows, dtype=torch.long, device=device)
        self._numbers_here = torch.zeros(3, num_rows, dtype=torch.long, pin_memory=device.type == "cuda")
        self.anchor = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.proposal_ids = torch.zeros(num_rows, num_proposals, dtype=torch.long, device=device)
        self.peaks = torch.zeros(num_proposals, num_rows, dtype=torch.float32, device=device)
        self.finite = torch.zeros((), dtype=torch.bool, device=device)
        self.warpers = None if warpers is None else list(warpers)
        self.temperature, self.probabilities = 1.0, None
        if self.warpers is not None:
            # `generate` has temperature before the others; scoring can do its part.
            if self.warpers and type(self.warpers[0]) is TemperatureLogitsWarper:
                self.temperature = self.warpers.pop(0).temperature
            size = len(head.weight_out)
            numbers = {"dtype": torch.float32, "device": device}
            self.logits, self.noise = torch.empty(2, num_rows, size, **numbers)
            self.places = torch.zeros_like(self.proposal_ids)
            # Of what may be proposed; and of all ids, which are the same without a shortlist.
            self.listed = torch.empty(num_rows, num_proposals, size, **numbers)
            self.probabilities = self.listed
            if self.token_ids is not None:
                self.probabilities = torch.zeros(num_rows, num_proposals, draft.config.vocab_size, **numbers)
        self.kernels: HeadKernels | None = None
        weights = (head.weight_hh, head.weight_state, head.weight_out)
        if is_available(device) and all(weight.dtype in KERNEL_DTYPES for weight in weights):
            self.kernels = HeadKernels(*weights, num_rows, scorer.token_ids)
        self._graph: torch.cuda.CUDAGraph | None = None

    def takes(self, context: list[Context], num_proposals: int) -> bool:
        """Whether a round is of these shapes: the context of one round before it, and all proposals."""
        return (
            num_proposals == self.num_proposals
            and len(context) == 1
            and context[0].features.shape[1] <= self.features.shape[1]
            # The prompt's may be padded on the left.
            and min(self.cache.lengths) > 0
            and max(self.cache.lengths) + self.features.shape[1] + self.block_size <= self.room
        )

    @property
    def block_size(self) -> int:
        return self._model().config.block_size

    def _model(self):
        draft = self._draft()
        assert draft is not None
        return draft

    def propose(self, state: DraftState, context: Context, anchor: torch.LongTensor) -> Proposal:
        """
        What `draft_hidden` and `rollout` give, for rows whose context begins at the left of `context`.

        The proposals are overwritten by the next call.
        """
        self.features[:, : context.features.shape[1]] = context.features
        self._numbers_here[:] = torch.tensor([state.origins, self.cache.lengths, context.counts])
        self.numbers.copy_(self._numbers_here, non_blocking=True)
        self.anchor.copy_(anchor)
        self.cache.lengths = [before + new for before, new in zip(self.cache.lengths, context.counts, strict=True)]
        if not self.features.is_cuda:
            # Nothing to capture, but the same work: tests come here.
            self._run()
        elif self._graph is None:
            self._capture()
        else:
            self._graph.replay()
        return Proposal(self.proposal_ids, self.probabilities, self.finite)

    def _capture(self):
        # The first run is this round's own, and warms up what must not happen in a capture (compilation, workspaces).
        stream = torch.cuda.Stream(self.features.device)
        stream.wait_stream(torch.cuda.current_stream(self.features.device))
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream(self.features.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile. What they do is none of this graph's.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._run()
        self._graph = graph

    def _run(self):
        """One draft phase from the tensors that are filled in; leaves the proposals in theirs."""
        draft, head = self._model(), self.head
        config = draft.config
        origins, lengths, counts = self.numbers
        visible = torch.arange(self.features.shape[1], device=self.features.device) < counts[:, None]
        hidden = ragged_hidden(
            draft, self.parts, self.cache, self.features, visible, self.anchor, origins, lengths, self.room
        )
        first = 0 if config.shift_label else 1
        hidden = hidden[:, first : first + self.num_proposals]
        base_logits = self.scored.logits(hidden)
        begun, token, state = head.begin(hidden), self.anchor[:, 0], None
        for k in range(self.num_proposals):
            state = self._step(token, state)
            correct_by = (begun[:, k], state) if k >= config.pure_draft_prefix_len else None
            if self.warpers is None:
                self._take_likeliest(k, base_logits[:, k], correct_by)
            else:
                self._draw(k, base_logits[:, k], correct_by)
            token = self.proposal_ids[:, k]
        if self.warpers is not None:
            # Where logits are no numbers nothing was drawn: what was taken has all the probability.
            broken = self.listed[..., :1].isnan()
            self.listed.masked_fill_(broken, 0).scatter_add_(2, self.places[..., None], broken.to(self.listed))
            if self.token_ids is not None:
                self.probabilities.index_copy_(2, self.token_ids, self.listed)
        self.finite.copy_(torch.isfinite(self.peaks).all())

    def _take_likeliest(self, k: int, base_logits: torch.Tensor, correct_by: CorrectBy | None):
        """Proposal k by its base logits `[n, V]`; `correct_by` as for [`HeadKernels.score_argmax`]."""
        if self.kernels is not None:
            self.kernels.score_argmax(base_logits, self.proposal_ids[:, k], self.peaks[k], correct_by=correct_by)
        else:
            self._put(k, *self._final_logits(base_logits, correct_by).max(-1))

    def _draw(self, k: int, base_logits: torch.Tensor, correct_by: CorrectBy | None):
        """[`_take_likeliest`] for a draw; keeps the distribution that it is from."""
        assert self.warpers is not None
        self.noise.exponential_()
        outputs = (self.proposal_ids[:, k], self.peaks[k], self.places[:, k])
        if self.kernels is None:
            logits = warp(self.warpers, self._final_logits(base_logits, correct_by).float() / self.temperature)
            self._put(k, *draw_with(self.noise, logits))
        elif self.warpers:
            self.kernels.score(base_logits, self.logits, correct_by, self.temperature)
            logits = warp(self.warpers, self.logits)
            self.kernels.score_sample(logits, self.noise, *outputs)
        else:
            logits = self.logits
            self.kernels.score_sample(base_logits, self.noise, *outputs, correct_by, self.temperature, out=logits)
        self.listed[:, k] = logits.softmax(-1)

    def _final_logits(self, base_logits: torch.Tensor, correct_by: CorrectBy | None) -> torch.Tensor:
        if correct_by is None:
            return base_logits
        return base_logits + self.head.correction(*correct_by, None).to(base_logits)

    def _put(self, k: int, peaks: torch.Tensor, places: torch.LongTensor):
        self.peaks[k] = peaks
        self.proposal_ids[:, k] = places if self.token_ids is None else self.token_ids[places]
        if self.warpers is not None:
            self.places[:, k] = places

    def _step(self, token: torch.LongTensor, state: torch.Tensor | None) -> torch.Tensor:
        """The prefix state after one more token."""
        if self.kernels is None:
            return self.head.step(self.parts.embed(token), state)
        if self.input_table is not None:
            return self.kernels.step(self.input_table, state, rows=token)
        embeds = self.parts.embed(token).to(self.head.weight_ih)
        return self.kernels.step(F.linear(embeds, self.head.weight_ih), state)


class Captures:
    """
    The captured draft phases of a draft with a target, each lent to one call at a time, and kept for the next.

    Capturing takes longer than many rounds, so that a graph must outlive the call that made it.
    """

    _known: ClassVar["WeakKeyDictionary[object, WeakKeyDictionary]"] = WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self):
        # By way to choose a token, the one used last at the end; then by shapes.
        self._idle: dict[tuple | None, dict[tuple, list[CapturedDraft]]] = {}
        self._weights: tuple = ()
        self._table: torch.Tensor | None = None

    @classmethod
    def of(cls, target, draft) -> "Captures":
        with cls._lock:
            return cls._known.setdefault(target, WeakKeyDictionary()).setdefault(draft, cls())

    @staticmethod
    def suits(draft, scorer: Scorer) -> bool:
        """Whether a draft's phase is the same work each time: one GPU, plain weights, and a rotation that is fixed."""
        return (
            isinstance(scorer.head, PlainHead)
            and is_plain_linear(scorer.target.output_head)
            and {weight.device for weight in (*draft.parameters(), scorer.target.output_head.weight)} == {draft.device}
            and can_capture(draft.device)
            and draft.config.candidate_pool_size is None
            and draft.config._attn_implementation in ("eager", "sdpa")
            and (draft.config.rope_parameters or {}).get("rope_type", "default") not in ("dynamic", "longrope")
            # An adapter may be switched between calls, and a graph would not notice.
            and not any(hasattr(module, "adapter_layer_names") for module in draft.modules())
        )

    def take(
        self,
        draft,
        scorer: Scorer,
        parts: TargetParts,
        num_rows: int,
        num_proposals: int,
        slots: int,
        warpers: LogitsProcessorList | None,
    ) -> CapturedDraft:
        """One for rows of at most `slots` slots, made if none is idle; the others are as for [`CapturedDraft`]."""
        room = -(-slots // _ROOM) * _ROOM
        weights = (*draft.parameters(), parts.embedding.weight, parts.output_head.weight)
        # A graph reads the memory that it was captured with, and shapes are baked in.
        made_of = (draft.config.shortlist, *(_identity(weight) for weight in weights))
        options, head = draft.capture_options, scorer.head
        assert isinstance(head, PlainHead)
        # What warpers are told is baked in as well.
        way = None if warpers is None else tuple((type(one), *sorted(vars(one).items())) for one in warpers)
        kind = (num_rows, num_proposals, room, options.input_table)
        with self._lock:
            if made_of != self._weights:
                self._idle, self._table, self._weights = {}, None, made_of
            if options.input_table and self._table is None:
                self._table = _input_table(head, parts)
            of_way = self._idle[way] = self._idle.pop(way, {})
            if len(self._idle) > _MOST_WAYS:
                del self._idle[next(iter(self._idle))]
            if idle := of_way.get(kind):
                return idle.pop()
        table = self._table if options.input_table else None
        captured = CapturedDraft(draft, scorer, parts, num_rows, num_proposals, room, warpers, table)
        captured.made_of, captured.way, captured.kind = made_of, way, kind
        return captured

    def give_back(self, captured: CapturedDraft):
        """For the next call, unless the weights have changed meanwhile, or its way was not used for long."""
        captured.cache.clear()
        with self._lock:
            if captured.made_of == self._weights and captured.way in self._idle:
                self._idle[captured.way].setdefault(captured.kind, []).append(captured)


def _input_table(head: PlainHead, parts: TargetParts) -> torch.Tensor:
    """`W_ih` times each row of the target's embedding, `[V, 3 * G]`."""
    vocabulary, width = len(parts.embedding.weight), len(head.weight_ih)
    size = vocabulary * width * head.weight_ih.element_size()
    logger.warning(f"The table of the GRU's inputs takes {size / 2**20:.0f} MiB on {head.weight_ih.device}.")
    table = head.weight_ih.new_empty(vocabulary, width)
    # In parts, so that no second copy of the embedding is needed.
    for ids in torch.arange(vocabulary, device=table.device).split(8192):
        table[ids] = F.linear(parts.embed(ids).to(table), head.weight_ih)
    return table


def _identity(weight: torch.Tensor) -> tuple:
    """Another where a weight was replaced or written to; what is made of weights is then made anew."""
    return weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported versions of transformers (5.17 to 5.24), in one place."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, QuantizedLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

# Up to 5.23 models take and return their cache as `past_key_values`, from 5.24 on as `cache`.
CACHE_NAME = "cache" if "cache" in {f.name for f in fields(GenerateDecoderOnlyOutput)} else "past_key_values"


def layers_that_keep(cache: Cache) -> list[str]:
    """Class names of the layers of `cache` that cannot be cropped."""
    # In the earlier versions quantised layers pass for croppable, but keep their packed part.
    return sorted(
        {type(layer).__name__ for layer in cache.layers if not layer.is_croppable or isinstance(layer, QuantizedLayer)}
    )


@contextmanager
def recording_past(cache: Cache) -> Iterator[None]:
    """
    Let `cache` be cropped, also where it slides, and leave it as plain decoding would: a user may go on with it, and
    layers that still record would keep, or trip over, what plain decoding drops.
    """
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer in cache.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False


@dataclass
class DominoGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns with `return_dict_in_generate=True`: transformers' own output, and

    Attributes:
        acceptance_lengths (`torch.LongTensor` of shape `[N, rounds]`): tokens that each round committed in each row
            (accepted proposals and the bonus token; fewer where a stop cut the round; 0 once the row had ended). The
            first token of all comes from the prefill and is not counted, so that a row's sum is the number of its
            new tokens less one.
        seconds (`dict[str, float]`): wall-clock time of the call by part: `"prefill"`, `"draft"` (backbone and
            rollout), `"verify"` (target pass and verification) and `"host"` (all else). On an accelerator, work still
            queued counts where it is waited for.
    """

    acceptance_lengths: torch.LongTensor | None = None
    seconds: dict[str, float] | None = None


def is_returned(cache: Cache, generation_config: GenerationConfig) -> bool:
    """Whether the caller will see `cache` after the call: it is part of the output, or was passed in."""
    return bool(generation_config.return_dict_in_generate) or getattr(cache, "_is_user_defined", False)


def asked_for(generation_config: GenerationConfig, name: str) -> Any:
    """The option `name`, or `None` where it stands at the default that `generate` fills in for whom names nothing."""
    value = getattr(generation_config, name)
    return None if value == GenerationConfig._get_default_generation_params().get(name) else value


def with_defaults_of(draft: Any, generation_config: GenerationConfig) -> GenerationConfig:
    """
    The call's options, with those of the draft's own `generation_config` about drafting that the call leaves out. Not
    the schedule: its default cannot be told from a call that asks for it, and a call must be able to.
    """
    own = draft.generation_config
    names = ("num_assistant_tokens", "assistant_confidence_threshold")
    chosen = {
        name: value
        for name in names
        if own is not None
        and asked_for(generation_config, name) is None
        and (value := asked_for(own, name)) is not None
    }
    if not chosen:
        return generation_config
    # The caller's object stays as it is.
    generation_config = copy.copy(generation_config)
    for name, value in chosen.items():
        setattr(generation_config, name, value)
    return generation_config


def make_output(cache: Cache, **values: Any) -> DominoGenerateOutput:
    """The output with `cache` under the name that this transformers uses."""
    return DominoGenerateOutput(**values, **{CACHE_NAME: cache})


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What followed the last time? Where a text repeats itself, its own tokens are proposals that cost next to nothing.

Prompt lookup as in transformers (`prompt_lookup_num_tokens`), as a second opinion beside the draft's: with the chance
of each token to be right, so that both can be compared.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

# How often the token after an n-gram is the one that followed it before, for n = 0, 1, ... and this long or longer. As
# found in answers of the embedded draft's target; each text then counts for itself, these for as many lookups.
_USUAL, _LOOKUPS = (0.0, 0.25, 0.5, 0.65, 0.7, 0.8, 0.9), 20
_LONGEST = len(_USUAL) - 1


@dataclass
class Continuation:
    """
    Tokens that followed before, where the text was as it is now.

    Attributes:
        token_ids (`torch.LongTensor` of shape `[K]`): on the text's device.
        chances (`torch.FloatTensor` of shape `[K]`): of each to be right, if those before it are.
    """

    token_ids: torch.LongTensor
    chances: torch.FloatTensor


class PromptLookup:
    """
    Proposes what followed the last tokens of a text before, and learns from that text how far to be believed.

    All of it happens where the text is, without waiting for the device.

    Args:
        device (`torch.device`): of the text.
    """

    def __init__(self, device: torch.device):
        # Counts, so that no default dtype may round them.
        self._tries = torch.full((_LONGEST + 1,), _LOOKUPS, dtype=torch.float32, device=device)
        self._hits = self._tries * torch.tensor(_USUAL, dtype=torch.float32, device=device)
        # The last lookup: the length of the text, what was proposed, and after how many tokens in common each of it.
        self._length, self._proposed, self._shared = 0, torch.empty(0, dtype=torch.long, device=device), None

    def continuation(self, text: torch.LongTensor, num_tokens: int) -> Continuation:
        """
        What followed the longest n-gram of up to six tokens that `text` ends with, where it last was.

        Args:
            text (`torch.LongTensor` of shape `[L]`): all of it so far; two tokens at least. Grows from call to call.
            num_tokens (`int`): how many to propose. Where the text has fewer since, it is taken to go on in circles.
        """
        self._learn(text)
        length = len(text)
        # The six tokens that end at each place. Those missing before the start match none: they are earlier here.
        endings = F.pad(text, (_LONGEST - 1, 0), value=-1).unfold(0, _LONGEST, 1)
        in_common = (endings[:-1] == endings[-1]).flip(-1).cumprod(-1).sum(-1)
        place = (in_common * length + torch.arange(length - 1, device=text.device)).argmax()
        ahead = torch.arange(num_tokens, device=text.device)
        self._length = length
        self._proposed = text[place + 1 + ahead % (length - 1 - place)]
        self._shared = (in_common.amax() + ahead).clamp(max=_LONGEST)
        return Continuation(self._proposed, (self._hits / self._tries)[self._shared])

    def _learn(self, text: torch.LongTensor):
        """Hold what was proposed last against what came, up to the first token that was wrong."""
        came = text[self._length : self._length + len(self._proposed)]
        if self._shared is None or len(came) == 0:
            return
        shared, right = self._shared[: len(came)], (self._proposed[: len(came)] == came).cumprod(0)
        judged = F.pad(right[:-1], (1, 0), value=1)
        self._tries.index_add_(0, shared, judged.to(self._tries))
        self._hits.index_add_(0, shared, right.to(self._hits))


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does `return_dict_in_generate` ask for? Kept here token by token, as plain `generate` gives it."""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer


class Record:
    """
    Scores, logits, hidden states and attentions, one entry per new token; `None` where not asked for.

    Args:
        config (`GenerationConfig`): says what is asked for.
        num_rows (`int`): rows of the batch (N). Where a row has no token any more, entries hold zeros.
    """

    def __init__(self, config: GenerationConfig, num_rows: int):
        self.num_rows = num_rows
        wanted = config.return_dict_in_generate
        self.scores: list | None = [] if wanted and config.output_scores else None
        self.logits: list | None = [] if wanted and config.output_logits else None
        self.hidden_states: list | None = [] if wanted and config.output_hidden_states else None
        self.attentions: list | None = [] if wanted and config.output_attentions else None

    def add_prefill(self, outputs: Any, logits: torch.Tensor, scores: list[torch.Tensor]):
        """The pass over the prompt: its states stay whole. `logits` is `[N, 1, V]`."""
        if self.scores is not None:
            self.scores.append(scores[0])
        if self.logits is not None:
            self.logits.append(logits[:, 0])
        if self.hidden_states is not None:
            self.hidden_states.append(outputs.hidden_states)
        if self.attentions is not None:
            self.attentions.append(outputs.attentions)

    def add_round(self, outputs: Any, cache: Cache, logits: torch.Tensor, scores: list[torch.Tensor], num_new: int):
        """
        A round that all rows leave with equally many tokens.

        Args:
            outputs: of the target, over anchors and proposals.
            cache: of the target; knows which layers slide.
            logits (`torch.Tensor` of shape `[N, K + 1, V]`): unprocessed.
            scores (`list` of `[N, V]`): processed, for each offset.
            num_new (`int`): how many tokens each row committed.
        """
        if self.scores is not None:
            self.scores += scores[:num_new]
        if self.logits is not None:
            self.logits += [logits[:, k] for k in range(num_new)]
        if self.hidden_states is not None:
            self.hidden_states += [tuple(s[:, k : k + 1] for s in outputs.hidden_states) for k in range(num_new)]
        if self.attentions is not None:
            # Attention backends that keep no maps give an empty tuple.
            pairs = list(zip(outputs.attentions, cache.layers, strict=False))
            self.attentions += [tuple(_row(attention, k, layer) for attention, layer in pairs) for k in range(num_new)]

    def add_ragged_round(
        self,
        outputs: Any,
        logits: torch.Tensor,
        scores: list[torch.Tensor],
        rows: list[int],
        first: list[int],
        num_new: list[int],
    ):
        """
        A round in which each row advances at its own pace; attentions cannot be had from it.

        Args:
            outputs, logits, scores: as above, for the n rows that still run.
            rows (`list[int]`): which rows of the batch these are.
            first (`list[int]`): the number of each row's first new token in this round.
            num_new (`list[int]`): how many tokens each committed.
        """
        for entry, (row, start, count) in enumerate(zip(rows, first, num_new, strict=True)):
            for k in range(count):
                if self.scores is not None:
                    self._put(self.scores, start + k, row, scores[k][entry])
                if self.logits is not None:
                    self._put(self.logits, start + k, row, logits[entry, k])
                if self.hidden_states is not None:
                    if len(self.hidden_states) == start + k:
                        self.hidden_states.append(
                            tuple(s.new_zeros(self.num_rows, 1, s.shape[-1]) for s in outputs.hidden_states)
                        )
                    for whole, states in zip(self.hidden_states[start + k], outputs.hidden_states, strict=True):
                        whole[row] = states[entry, k : k + 1]

    def _put(self, entries: list[torch.Tensor], number: int, row: int, value: torch.Tensor):
        if len(entries) == number:
            entries.append(value.new_zeros(self.num_rows, *value.shape))
        entries[number][row] = value

    def as_output(self) -> dict[str, tuple | None]:
        """The four fields of `generate`'s output."""
        fields = ("scores", "logits", "hidden_states", "attentions")
        return {name: None if (kept := getattr(self, name)) is None else tuple(kept) for name in fields}


def _row(attention: torch.Tensor, k: int, layer: CacheLayerMixin) -> torch.Tensor:
    """What token k of a round saw: `[N, heads, 1, keys]`, without the proposals after it and the keys out of reach."""
    row = attention[:, :, k : k + 1]
    if isinstance(layer, StaticLayer):
        # As many keys as there is room for, also in plain decoding; those not yet written have no weight.
        return row
    stop = attention.shape[-1] - (attention.shape[-2] - 1 - k)
    return row[..., max(0, stop - layer.sliding_window) if layer.is_sliding else 0 : stop]


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is kept of a proposal? The rule that makes the output exactly the target's own."""

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria



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


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Do the rows of a batch advance together, or each at its own pace? What either means for the target's arguments."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging


logger = logging.get_logger(__name__)

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class Lockstep:
    """
    All rows advance by the shortest acceptance among them: the target's arguments are those of plain decoding.

    Args:
        target (`PreTrainedModel`): the model that decides.
        cache (`Cache`): its cache, after the prefill.
        model_kwargs (`dict`): its arguments, as `generate` keeps them.
    """

    lockstep = True

    def __init__(self, target: PreTrainedModel, cache: Cache, model_kwargs: dict[str, Any]):
        self.target, self.cache, self.model_kwargs = target, cache, model_kwargs

    def start(self, outputs: Any):
        """The prefill has committed one token in each row."""
        self._advance(outputs, 1)

    def inputs(self, sequences: Sequences, proposal: Proposal) -> dict[str, Any]:
        """Arguments of a target pass over anchors and proposals, which stand behind the committed tokens already."""
        num_new, model_kwargs = proposal.proposal_ids.shape[1], self.model_kwargs
        if num_new > 0:
            model_kwargs = self._extend(num_new)
        return self.target.prepare_inputs_for_generation(
            sequences.prefix(num_new),
            next_sequence_length=num_new + 1,
            is_first_iteration=False,
            **model_kwargs,
        )

    def commit(
        self, outputs: Any, logits: torch.Tensor, verified: Verification, sequences: Sequences, record: Record
    ) -> torch.BoolTensor:
        """
        Keep of a pass what was committed, in cache, arguments and record.

        Returns:
            Which of its first positions hold committed tokens, `[n, longest]`.
        """
        num_new = verified.num_new[0]
        self.cache.crop(-(logits.shape[1] - num_new))
        record.add_round(outputs, self.cache, logits, verified.scores, num_new)
        self._advance(outputs, num_new)
        return torch.ones(len(sequences), num_new, dtype=torch.bool, device=sequences.device)

    def drop(self, entries: list[int], kept: list[int], sequences: Sequences) -> bool:
        """Rows that have ended stay, on padding, as in plain decoding; returns whether any was let go."""
        return False

    def finish(self, sequences: torch.LongTensor):
        """The cache is as plain decoding leaves it."""

    def _advance(self, outputs: Any, num_new: int):
        self._outputs = outputs
        self.model_kwargs = self._extend(num_new)

    def _extend(self, num_new: int) -> dict[str, Any]:
        """The target's arguments after `num_new` more tokens."""
        old = self.model_kwargs
        extended = self.target._update_model_kwargs_for_generation(self._outputs, dict(old), num_new_tokens=num_new)
        for name in _TOKEN_TYPES:
            # Each token takes the type of the one before it; the host repeats the last columns instead.
            if isinstance(types := old.get(name), torch.Tensor):
                extended[name] = torch.cat([types, types[:, -1:].expand(-1, num_new)], dim=-1)
        return extended


class OwnPace:
    """
    Each row advances by its own acceptance and leaves when it has ended: rejected tokens stay in the cache, masked.

    Args:
        target, cache, model_kwargs: as for [`Lockstep`].
        generation_config (`GenerationConfig`): says whether the cache is given back.
        max_length (`int`, *optional*): the limit of all rows, prompt included.
        sequences (`Sequences`): the prompts.
        length (`int`): entries of the cache after the prefill.
    """

    lockstep = False

    def __init__(
        self,
        target: PreTrainedModel,
        cache: Cache,
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
        max_length: int | None,
        sequences: Sequences,
        length: int,
    ):
        self.target, self.cache, self.model_kwargs, self.max_length = target, cache, model_kwargs, max_length
        self.prompt_length, self.slot_offset = sequences.lengths[0], length - sequences.lengths[0]
        mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        slots = torch.arange(length, device=sequences.device).expand(len(sequences), -1)
        visible = torch.ones_like(slots, dtype=torch.bool) if mask is None else mask.bool().to(slots.device)
        self.ragged = RaggedCache(cache, slots, visible)
        self.next_position = visible.sum(-1)
        if position_ids is not None:
            self.next_position = position_ids[:, -1].to(slots.device).expand(len(sequences)) + 1
        # What was in the cache of rows that have left, where the caller will want it, and the arguments of all rows.
        self._left: dict[int, CachedRow] | None = {} if is_returned(cache, generation_config) else None
        self._whole = (model_kwargs, visible, self.next_position)

    @staticmethod
    def suits(target: PreTrainedModel, cache: Cache, model_kwargs: dict[str, Any]) -> bool:
        """Whether `target` takes a position for each token, and `cache` may have holes; warns once of the latter."""
        if not takes_any_position(target, model_kwargs) or _has_state_for_rows(target):
            return False
        if not (can_have_holes(cache) and masks_by_visibility(target)):
            logger.warning_once(
                f"The cache of {type(target).__name__} cannot hold rows of different lengths, so all rows of a batch "
                "advance by the shortest acceptance among them."
            )
            return False
        return True

    def start(self, outputs: Any):
        """The prefill has committed one token in each row; it is in no cache yet."""

    def inputs(self, sequences: Sequences, proposal: Proposal) -> dict[str, Any]:
        """Arguments of a target pass over anchors and proposals."""
        block = torch.cat([sequences.last(), proposal.proposal_ids], dim=-1)
        position_ids = self.next_position[:, None] + torch.arange(block.shape[1], device=block.device)
        if self.max_length is not None:
            # A row near the limit is offered more than it can take; no position past the limit may be touched.
            room = [self.max_length - 1 - length for length in sequences.lengths]
            last = self.next_position + torch.tensor(room, device=block.device)
            position_ids = torch.minimum(position_ids, last[:, None])
        model_kwargs = {
            **self.model_kwargs,
            CACHE_NAME: self.cache,
            "attention_mask": torch.cat([self.ragged.visible, torch.ones_like(block, dtype=torch.bool)], -1).long(),
            "position_ids": position_ids,
        }
        return self.target.prepare_inputs_for_generation(
            block, next_sequence_length=block.shape[1], is_first_iteration=False, **model_kwargs
        )

    def commit(
        self, outputs: Any, logits: torch.Tensor, verified: Verification, sequences: Sequences, record: Record
    ) -> torch.BoolTensor:
        """As for [`Lockstep`]; what a row did not commit is hidden from it."""
        longest, device = max(verified.num_new), sequences.device
        offsets, num_new = torch.arange(longest, device=device), torch.tensor(verified.num_new, device=device)
        committed = offsets < num_new[:, None]
        lengths = torch.tensor(sequences.lengths, device=device)
        self.cache.crop(-(logits.shape[1] - longest))
        self.ragged.append((self.slot_offset + lengths - 1)[:, None] + offsets, committed, verified.num_new)
        self.ragged.tidy()
        self.next_position = self.next_position + num_new
        first = [length - self.prompt_length for length in sequences.lengths]
        record.add_ragged_round(outputs, logits, verified.scores, sequences.rows, first, verified.num_new)
        return committed

    def drop(self, entries: list[int], kept: list[int], sequences: Sequences) -> bool:
        """
        Let go of rows that have ended.

        Args:
            entries (`list[int]`): the rows to let go, and `kept` the others, both by their place in `sequences`.
        """
        if self._left is not None:
            self._left.update((sequences.rows[entry], self.ragged.take_row(entry)) for entry in entries)
        if not entries or not kept:
            return False
        index = torch.tensor(kept, device=sequences.device)
        self.ragged.keep(kept)
        self.next_position = self.next_position[index]
        self.model_kwargs = {
            name: value[index.to(value.device)]
            if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(sequences)
            else value
            for name, value in self.model_kwargs.items()
        }
        return True

    @torch.no_grad()
    def finish(self, sequences: torch.LongTensor):
        """
        Give the cache back as plain decoding leaves it: all rows, each entry in its place.

        Args:
            sequences (`torch.LongTensor` of shape `[N, S + new]`): what is returned, ended rows padded.
        """
        if self._left is None:
            return
        rows = [self._left[row] for row in sorted(self._left)]
        length = self.slot_offset + sequences.shape[1] - 1
        self.ragged.restore(rows, length)
        # Plain decoding reads the padding of rows that have ended, and their last token; here no pass has.
        missing = length - min(int(row.positions.max()) + 1 for row in rows)
        if missing == 0:
            return
        self.cache.crop(-missing)
        model_kwargs, visible, next_position = self._whole
        tokens = sequences[:, -1 - missing : -1]
        new = length - visible.shape[1]
        model_kwargs = {
            **model_kwargs,
            CACHE_NAME: self.cache,
            "attention_mask": torch.cat([visible, visible.new_ones(len(visible), new)], dim=-1).long(),
            "position_ids": next_position[:, None] + torch.arange(new - missing, new, device=tokens.device),
        }
        inputs = self.target.prepare_inputs_for_generation(
            tokens, next_sequence_length=missing, is_first_iteration=False, **model_kwargs
        )
        self.target(**inputs, return_dict=True)


def takes_any_position(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether `target` is told the position of each token, and nothing else goes along the sequence."""
    position_ids = model_kwargs.get("position_ids")
    return (
        "position_ids" in inspect.signature(target.forward).parameters
        and (position_ids is None or position_ids.dim() == 2)
        and all(model_kwargs.get(name) is None for name in _TOKEN_TYPES)
    )


def _has_state_for_rows(target: PreTrainedModel) -> bool:
    """Whether PEFT has been told which adapter each row takes: its hooks know rows by their place in the batch."""
    hooks = (hook for module in target.modules() for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", {}) for hook in hooks)


def masks_by_visibility(target: PreTrainedModel) -> bool:
    """Whether all layers see everything that the attention mask shows: a window is counted in entries of the cache,
    holes included, also where the cache itself forgets nothing."""
    config = target.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds:
        return all(kind in ("full_attention", "global") for kind in kinds)
    return not getattr(config, "sliding_window", None) or getattr(config, "use_sliding_window", True) is False


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How many proposals is a round worth? As many as were asked for, or as many as pay for their own verification."""

import bisect
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel


# A round in this many drafts even where drafting has not paid, to notice when it would; the first of a call does.
_EXPLORE_EVERY = 32
# Passes of a width before its time is believed, and how many of the last ones it is taken from.
_ENOUGH, _RECENT = 3, 9
# Drafted rounds before it is believed that they do not pay, and how many of the last ones are looked at.
_SEEN_ENOUGH, _JUDGED = 16, 32
# Proposals of a bin of confidences that are remembered; older ones count for half, and less.
_BINS, _REMEMBERED = 10, 400


class Experience:
    """
    What is known of a draft with a target on this machine: what passes cost, and how often proposals are taken.

    Measured while generating with a schedule, and shared by all calls and threads that use the pair.
    """

    _known: ClassVar["WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary]"] = WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self):
        self._seconds: dict[int, deque[float]] = {}
        # Medians of these, where there are enough.
        self._typical: dict[int, float] = {}
        self._hits, self._trials = [0.0] * _BINS, [0.0] * _BINS
        # Of trees: proposals taken, and how many the draft expected.
        self._accepted, self._expected = 0.0, 0.0
        # Of the last drafted rounds: seconds of drafting, by rows of the batch; proposals and tokens gained, of a row.
        self._drafting: dict[int, deque[float]] = {}
        self._drafted: deque[tuple[int, float]] = deque(maxlen=_JUDGED)

    @classmethod
    def of(cls, target: PreTrainedModel, draft: PreTrainedModel) -> "Experience":
        with cls._lock:
            return cls._known.setdefault(target, WeakKeyDictionary()).setdefault(draft, cls())

    def add_pass(self, tokens: int, seconds: float):
        """A target pass over `tokens` took `seconds`."""
        with self._lock:
            recent = self._seconds.setdefault(tokens, deque(maxlen=_RECENT))
            recent.append(seconds)
            if len(recent) >= _ENOUGH:
                self._typical[tokens] = statistics.median(recent)

    def pass_seconds(self, widths: Sequence[int], hopeful: bool = False) -> list[float] | None:
        """
        Seconds of target passes over so many tokens; `None` before two widths are known.

        A width that is not known lies on a line through its neighbours, since time may go up and down with the width:
        a matrix product can take longer for 3 rows than for 5. `hopeful`: it costs no more than the cheaper neighbour,
        so that all widths are tried that may be worth it.
        """
        with self._lock:
            known = sorted(self._typical.items())
        return None if len(known) < 2 else [_between(known, width, hopeful) for width in widths]

    def add_proposals(self, confidences: list[float], num_accepted: int, rejected: bool):
        """Of proposals of these confidences the first `num_accepted` were taken, and the next fell if `rejected`."""
        with self._lock:
            # What follows the first that fell was never judged.
            for k, confidence in enumerate(confidences[: num_accepted + rejected]):
                bin_ = _bin(confidence)
                self._hits[bin_] += k < num_accepted
                self._trials[bin_] += 1
                if self._trials[bin_] > _REMEMBERED:
                    self._hits[bin_] /= 2
                    self._trials[bin_] /= 2

    def chance(self, confidence: float) -> float:
        """How often a proposal of this confidence is taken: the confidence itself, until there is more to go by."""
        bin_ = _bin(confidence)
        return (self._hits[bin_] + 4 * confidence) / (self._trials[bin_] + 4)

    def usual_chance(self) -> float:
        """How often a proposal is taken whose confidence is not known yet."""
        return (sum(self._hits) + 1) / (sum(self._trials) + 2)

    def add_tree(self, expected: float, num_accepted: int):
        """Of a tree `num_accepted` proposals were taken, where the draft's confidences add up to `expected`."""
        with self._lock:
            self._accepted, self._expected = self._accepted + num_accepted, self._expected + expected
            if self._expected > _REMEMBERED:
                self._accepted, self._expected = self._accepted / 2, self._expected / 2

    def trust(self) -> float:
        """What the draft's confidences in the proposals of trees are to be multiplied by."""
        return (self._accepted + 4) / (self._expected + 4)

    def add_drafted(self, num_rows: int, seconds: float, num_proposals: int, gain: float):
        """Drafting took `seconds` of a round, and its `num_proposals` gained `gain` tokens in each row."""
        with self._lock:
            self._drafting.setdefault(num_rows, deque(maxlen=_RECENT)).append(seconds)
            self._drafted.append((num_proposals, gain))

    def pays(self, num_rows: int, seconds_per_token: float, passes: Sequence[float]) -> bool:
        """
        Whether drafted rounds gained more time than they took, the last times; assumed at first. `passes`: seconds of
        the pass with no proposal, one, and so on.
        """
        with self._lock:
            if len(self._drafted) < _SEEN_ENOUGH:
                return True
            nearest = min(self._drafting, key=lambda rows: abs(rows - num_rows))
            # Not their mean: the first round of a process may take seconds.
            drafting = statistics.median(self._drafting[nearest])
            wider = statistics.fmean(passes[min(count, len(passes) - 1)] - passes[0] for count, _ in self._drafted)
            gain = statistics.fmean(gain for _, gain in self._drafted)
            return gain * num_rows * seconds_per_token > drafting + wider


def _between(known: list[tuple[int, float]], width: int, hopeful: bool) -> float:
    """Seconds at `width`, on the line through the nearest two of `known` widths, sorted, or as the lower of the two."""
    after = min(max(bisect.bisect_left(known, (width, 0.0)), 1), len(known) - 1)
    (low, low_seconds), (high, high_seconds) = known[after - 1], known[after]
    if hopeful and low < width != high:
        return high_seconds if width > high else min(low_seconds, high_seconds)
    seconds = low_seconds + (width - low) * (high_seconds - low_seconds) / (high - low)
    # Beyond what is known, wider is never quicker, nor narrower slower.
    return max(seconds, high_seconds) if width > high else min(seconds, low_seconds) if width < low else seconds


def _bin(confidence: float) -> int:
    return min(int(confidence * _BINS), _BINS - 1)


class Schedule:
    """
    Decides, for one call of `generate`, when a rollout ends.

    With `num_assistant_tokens_schedule="constant"` (the default) a round offers `num_proposals`. With `"heuristic"` it
    stops before a proposal if neither it nor those that may follow bring more, by their chances to count and the time
    that a token takes, than they cost in the target's pass; and rounds are left undrafted while drafting as a whole
    does not pay. Chances are the draft's own confidences, corrected by how often they came true. In both cases
    `assistant_confidence_threshold` ends a rollout after a proposal that the draft believes in less.

    A proposal is never judged by which token was drawn for it, only by the distribution that it is drawn from and by
    measured time: else sampling would not be lossless. As time is never the same twice, a seed does not repeat a
    sampled answer with `"heuristic"`.

    Args:
        generation_config (`GenerationConfig`): read for the two options above.
        num_proposals (`int`): the most that may follow one another in a round.
        experience (`Experience`): with the pair of models.
        lockstep (`bool`): whether a proposal counts only where all rows take theirs.
        tree_size (`int`): the most proposals of a round where they form a tree; 0 where they follow one another.
    """

    def __init__(
        self,
        generation_config: GenerationConfig,
        num_proposals: int,
        experience: Experience,
        lockstep: bool,
        tree_size: int = 0,
    ):
        self.num_proposals, self.experience, self.lockstep = num_proposals, experience, lockstep
        self._in_tree, self._widest = tree_size > 0, tree_size or num_proposals
        self.threshold = asked_for(generation_config, "assistant_confidence_threshold")
        self.adapts = asked_for(generation_config, "num_assistant_tokens_schedule") in (
            "heuristic",
            "heuristic_transient",
        )
        self._round = 0
        # Whether the last round was drafted and gained more time than it took.
        self._won = False
        self._started, self._tokens = time.perf_counter(), 0
        # Of the current round: seconds that a token is worth, and of the pass with no proposal, one, and so on, once
        # they are known.
        self._worth = 0.0
        self._costs: list[float] | None = None
        self._confidences: list[list[float]] = []
        self._reach: list[float] = []
        self._expected = 0.0

    @property
    def watches(self) -> bool:
        """Whether `is_worth` and `goes_on` must be asked."""
        return self.adapts or self.threshold is not None

    @property
    def _explores(self) -> bool:
        return self._round % _EXPLORE_EVERY == 1

    def budget(self, num_rows: int) -> int:
        """How many proposals may follow one another in this round; 0 leaves the draft out of it."""
        self._round += 1
        self._confidences, self._reach, self._expected = [], [1.0] * num_rows, 0.0
        if not self.adapts:
            return self.num_proposals
        widths = [num_rows * (n + 1) for n in range(self._widest + 1)]
        self._costs = self.experience.pass_seconds(widths, hopeful=self._in_tree)
        if self._costs is None:
            # Two widths must be known: wider and bare passes take turns. For many rows a little wider is enough.
            return max(1, self.num_proposals // num_rows) if self._round % 2 else 0
        # A token that is gained spares the time of one at the present rate, but never more than plain decoding takes.
        self._worth = self._costs[0] / num_rows
        if self._tokens:
            self._worth = min(self._worth, (time.perf_counter() - self._started) / self._tokens)
        # Where a round wins against what is known, the text may have turned: the next one drafts as well.
        if self._explores or self._won or self.experience.pays(num_rows, self._worth, self._costs):
            return self.num_proposals
        return 0

    def is_worth(self, logits: torch.Tensor) -> bool:
        """Whether to offer a proposal chosen by processed `logits` `[n, V]`."""
        if not self.adapts:
            return True
        highest = logits.float().amax(-1)
        confidences = (highest - logits.float().logsumexp(-1)).exp().nan_to_num(0.0).tolist()
        self._confidences.append(confidences)
        if self._costs is None:
            return True
        self._reach = [reach * self.experience.chance(c) for reach, c in zip(self._reach, confidences, strict=True)]
        rows, first = len(confidences), len(self._confidences)
        usual = self.experience.usual_chance()
        expected = rows * math.prod(self._reach) if self.lockstep else sum(self._reach)
        gain = 0.0
        for cost in self._costs[first:]:
            gain += expected
            if gain * self._worth > cost - self._costs[first - 1]:
                return True
            expected *= usual**rows if self.lockstep else usual
        return False

    def size_of(self, chances: torch.Tensor) -> int:
        """How many proposals of a tree to offer, of which the draft gives these `chances` `[K]`, from high to low."""
        if not self.adapts:
            return len(chances)
        trust, size, gain, best = self.experience.trust(), 0, 0.0, 0.0
        confidences = chances.tolist()
        if self._costs is None or self._explores:
            size = len(confidences)
        else:
            for number, confidence in enumerate(confidences, start=1):
                gain += confidence * trust
                saved = gain * self._worth - (self._costs[number] - self._costs[0])
                if saved > best:
                    size, best = number, saved
        self._expected = sum(confidences[:size])
        return size

    def goes_on(self, logits: torch.Tensor, token_ids: torch.LongTensor) -> bool:
        """Whether to make another proposal after `token_ids` `[n]`, chosen by processed `logits` `[n, V]`."""
        if self.threshold is None:
            return True
        logits = logits.float()
        chosen = logits.gather(-1, token_ids[:, None].to(logits.device))[:, 0]
        return bool(((chosen - logits.logsumexp(-1)).exp() >= self.threshold).any())

    def learn(self, verified: Verification, num_proposals: int, draft_seconds: float, verify_seconds: float):
        """
        What came of a round.

        Args:
            verified (`Verification`): of the round.
            num_proposals (`int`): offered to each row.
            draft_seconds, verify_seconds (`float`): time of the two parts; no time for the draft where it was left out.
        """
        rows, tokens = len(verified.num_new), sum(verified.num_new)
        self._tokens += tokens
        if not self.adapts:
            return
        self.experience.add_pass(rows * (num_proposals + 1), verify_seconds)
        self._won = False
        if draft_seconds == 0:
            return
        for row, (count, rejected) in enumerate(zip(verified.num_new, verified.rejected, strict=True)):
            confidences = [of_rows[row] for of_rows in self._confidences[:num_proposals]]
            self.experience.add_proposals(confidences, count - 1, rejected)
        if self._expected:
            self.experience.add_tree(self._expected, tokens - 1)
        self.experience.add_drafted(rows, draft_seconds, num_proposals, tokens / rows - 1)
        if self._costs is not None:
            took = draft_seconds + self._costs[num_proposals] - self._costs[0]
            self._won = (tokens - rows) * self._worth > took


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft propose? Token by token, each corrected by those before it."""

import torch
from transformers import LogitsProcessorList



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


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What if the likeliest token is wrong? A tree of proposals in one pass: the target takes the path that it would write.

Verifying several continuations of a text at once is tree attention (SpecInfer, arXiv 2305.09781); that the draft's own
confidence decides which nodes a tree has is from EAGLE-2 (arXiv 2406.16858). Here the head makes it cheap: the hidden
states of a block serve all paths through it, and only the prefix state is a path's own.
"""

import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Candidates at each position: which nodes a tree has needs no more, and the target has the last word.
_POOL = 256
# Log probabilities of a step. Each is below zero, so that a node always comes after the one that it continues, and none
# so low that the sum of a block's would lose the difference.
_LEAST, _MOST = -20.0, -1e-4
_MASKABLE = ("eager", "sdpa")


class Tree(Proposal):
    """
    Proposals of which each continues the anchor or another one. The anchor is node 0, the proposals are nodes 1 to K,
    in an order in which each comes after the node that it continues.

    Attributes:
        proposal_ids (`torch.LongTensor` of shape `[1, K]`): as of any proposal.
        parents (`torch.LongTensor` of shape `[K]`): the node that each proposal continues.
        paths (`torch.BoolTensor` of shape `[K + 1, K + 1]`): which nodes lead from the anchor to a node, both included.
        depth (`int`): no path holds more proposals; K at most.
    """

    def __init__(
        self,
        proposal_ids: torch.LongTensor,
        parents: torch.LongTensor,
        depth: int,
        finite: torch.Tensor | None = None,
    ):
        super().__init__(proposal_ids, finite=finite)
        num_nodes = proposal_ids.shape[1] + 1
        self.parents, self.depth = parents, depth
        self.paths = torch.eye(num_nodes, dtype=torch.bool, device=parents.device)
        # The node that lies so many steps before each, twice as many each time; the anchor before itself.
        before, steps = torch.cat([parents.new_zeros(1), parents]), 1
        while steps <= depth:
            self.paths = self.paths | self.paths[before]
            before, steps = before[before], 2 * steps


def grow(
    scorer: Scorer,
    hidden: torch.Tensor,
    anchor: torch.LongTensor,
    depth: int,
    size: int,
    schedule: Schedule,
    continuation: Continuation | None = None,
) -> Tree:
    """
    The likeliest proposals of all paths through a block, by the draft's own probabilities.

    Level by level: of all continuations of the nodes kept so far the likeliest are kept, half as many as the tree may
    have, since a tree of one level is rarely the likeliest; of all levels together, and of the text's own continuation
    where there is one, the `size` likeliest.

    Args:
        scorer (`Scorer`): of the two models.
        hidden (`torch.Tensor` of shape `[1, B, H]`): from [`draft_hidden`].
        anchor (`torch.LongTensor` of shape `[1, 1]`): the last committed token.
        depth (`int`): the longest path of the draft's; a block gives B with shifted labels, else B - 1.
        size (`int`): the most proposals.
        schedule (`Schedule`): may leave some of them out.
        continuation (`Continuation`, *optional*): what followed before in the text.
    """
    config, head = scorer.draft.config, scorer.head
    first = 0 if config.shift_label else 1
    # A node comes after all that lead to it.
    hidden = hidden[:, first : first + min(depth, size)]
    depth = hidden.shape[1]
    breadth = size if depth == 1 else math.ceil(size / 2)
    base_logits, pool = scorer.base(hidden, _POOL)
    begun = hidden if head is None else head.begin(hidden)
    device = base_logits.device
    peaks = [base_logits.amax()]

    token_ids, prefix_state = anchor[:, 0], None
    nodes, reached = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(1, device=device)
    levels, num_nodes = [], 1
    for k in range(depth):
        logits, places = base_logits[:, k], None if pool is None else pool[:, k]
        if head is not None:
            prefix_state = head.step(scorer.target.embed(token_ids).to(hidden.device), prefix_state)
            if k >= config.pure_draft_prefix_len:
                rows = len(prefix_state)
                scored = None if places is None else places.to(hidden.device).expand(rows, -1)
                logits = logits + head.correction(begun[:, k].expand(rows, -1), prefix_state, scored).to(logits)
                peaks.append(logits.amax())
        chances = logits.float().log_softmax(-1).nan_to_num(_LEAST).clamp(_LEAST, _MOST)
        best = chances.topk(min(breadth, chances.shape[-1]), dim=-1)
        likeliest = (reached[:, None] + best.values).flatten().topk(min(breadth, len(nodes) * best.values.shape[1]))
        came_from = likeliest.indices // best.values.shape[1]
        chosen = best.indices.expand(len(nodes), -1).flatten()[likeliest.indices]
        token_ids = scorer.ids(chosen if places is None else places[0, chosen]).to(anchor.device)
        if prefix_state is not None:
            prefix_state = prefix_state[came_from.to(prefix_state.device)]
        levels.append(_Nodes(token_ids.to(device), nodes[came_from], likeliest.values))
        reached, nodes = likeliest.values, torch.arange(num_nodes, num_nodes + len(token_ids), device=device)
        num_nodes += len(token_ids)

    size = min(size, num_nodes - 1)
    if continuation is not None:
        levels.append(_as_nodes(continuation, levels))
        depth = max(depth, len(continuation.token_ids))
    token_ids, parents, scores = (torch.cat(of_levels) for of_levels in zip(*levels, strict=True))
    kept = scores.topk(size)
    index = kept.indices[: schedule.size_of(kept.values.exp())]
    numbers = parents.new_zeros(len(parents) + 1)
    numbers[index + 1] = torch.arange(1, len(index) + 1, device=device)
    return Tree(
        token_ids[index][None].to(anchor.device),
        numbers[parents[index]].to(anchor.device),
        min(depth, len(index)),
        torch.isfinite(torch.stack(peaks)).all(),
    )


class _Nodes(NamedTuple):
    """Candidates for a tree: token, number of the node that each continues, and log probability of its whole path."""

    token_ids: torch.LongTensor
    parents: torch.LongTensor
    scores: torch.Tensor


def _as_nodes(continuation: Continuation, levels: list[_Nodes]) -> _Nodes:
    """
    A `continuation` of the text as a path behind `levels` of a draft's candidates.

    What both propose is the draft's node, with the better of the two scores (written into `levels`); the path then
    leaves from there, and its own node can never be chosen.
    """
    device = levels[0].parents.device
    token_ids = continuation.token_ids.to(device)
    scores = continuation.chances.to(device).log().clamp(_LEAST, _MOST).cumsum(0)
    # Of each token: its number among the draft's nodes, else 0. Behind the first level no node continues the anchor.
    shared, last, before = torch.zeros_like(token_ids), 0, 1
    for k, level in enumerate(levels):
        if k < len(shared):
            same = (level.parents == last) & (level.token_ids == token_ids[k])
            levels[k] = level._replace(scores=torch.where(same, level.scores.maximum(scores[k]), level.scores))
            last = torch.where(same, torch.arange(before, before + len(same), device=device), 0).amax()
            shared[k] = last
        before += len(level.token_ids)
    numbers = torch.where(shared > 0, shared, torch.arange(before, before + len(shared), device=device))
    return _Nodes(token_ids, F.pad(numbers[:-1], (1, 0)), scores.masked_fill(shared > 0, -math.inf))


def path_taken(tree: Tree, choices: torch.LongTensor) -> tuple[torch.LongTensor, Proposal]:
    """
    What is left of a tree once the target has read it: the path along its own choices.

    Args:
        tree (`Tree`): K proposals.
        choices (`torch.LongTensor` of shape `[K + 1]`): the target's, after each node.

    Returns:
        The nodes `[depth + 1]` of the path, the anchor first, and as a proposal the tokens along it. Where it ends
        early, the nodes behind its end are any, and the tokens are none of the vocabulary's, which no choice can match.
        The path is found where the tensors are, without waiting for the device.
    """
    stands = choices[tree.parents] == tree.proposal_ids[0]
    stands = torch.cat([stands.new_ones(1), stands])
    taken = (stands | ~tree.paths).all(-1)
    path = taken.to(torch.uint8).argsort(descending=True, stable=True)[: tree.depth + 1]
    token_ids = torch.where(taken[path[1:]], tree.proposal_ids[0, path[1:] - 1], -1)
    return path, Proposal(token_ids[None], finite=tree.finite, seconds=tree.seconds)


def with_tree(inputs: dict[str, Any], tree: Tree, past_length: int, dtype: torch.dtype) -> dict[str, Any]:
    """
    A target's arguments for the anchor alone made into those for it and a tree: a mask
    `[1, 1, K + 1, past_length + K + 1]` that is added to the attention's scores, and each node's position by its depth.
    """
    anchor, position_ids = inputs["input_ids"], inputs.get("position_ids")
    paths = tree.paths.to(anchor.device)
    visible = paths.new_ones(len(paths), past_length)
    if (mask := inputs.get("attention_mask")) is not None:
        visible &= mask[:, :past_length].bool()
    hidden = ~torch.cat([visible, paths], dim=-1)
    added = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)
    # Where it is left to the target, it counts what its cache holds.
    position = past_length if position_ids is None else position_ids
    return {
        **inputs,
        "input_ids": torch.cat([anchor, tree.proposal_ids.to(anchor.device)], dim=-1),
        "attention_mask": added[None, None],
        "position_ids": (paths.sum(-1) - 1)[None] + position,
    }


def keep_path(cache: Cache, path: torch.LongTensor, num_nodes: int):
    """Of the last `num_nodes` entries of a target's cache keep those of `path`, in its order."""
    first = cache.get_seq_length() - num_nodes
    entries = first + path
    for layer in cache.layers:
        if layer.is_initialized:
            index = entries.to(layer.keys.device)
            for states in (layer.keys, layer.values):
                states[:, :, first : first + len(path)] = states[:, :, index]
    cache.crop(-(num_nodes - len(path)))


def takes_trees(target: PreTrainedModel, cache: Cache, model_kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether `target`, with this cache and these arguments, can read a tree; warns once where it cannot."""
    if (
        takes_any_position(target, model_kwargs)
        and can_have_holes(cache)
        and masks_by_visibility(target)
        and _obeys_masks(target, device)
    ):
        return True
    logger.warning_once(
        f"{type(target).__name__} cannot read a tree of proposals here (`use_tree`), so the draft offers one after "
        "another: a tree needs full attention in every layer ('eager' or 'sdpa'), a cache that grows, and one position "
        "for each token."
    )
    return False


# By target: for each of its attentions, whether it looks where a mask says.
_obedience: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()


def _obeys_masks(target: PreTrainedModel, device: torch.device) -> bool:
    """
    Whether masks and positions decide what a token of `target` sees, as asked of the target itself, once: a model may
    take a mask and make its own all the same (ALiBi, code from elsewhere), and would write another text then.
    """
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    known = _obedience.setdefault(target, {})
    if attention not in _MASKABLE or attention in known:
        return known.get(attention, False)
    # Three tokens, and eight that may follow them and must not see one another; the last of these is looked at.
    parents = torch.tensor([0, 1] + [2] * 8, device=device)
    tokens = torch.arange(1, 12, device=device)[None] * (vocabulary_size(target.get_input_embeddings()) // 12)
    tree = Tree(tokens[:, 1:], parents, 3)
    depths = (tree.paths.sum(-1) - 1)[None]

    def last_logits(input_ids, **arguments):
        logits = target(input_ids=input_ids, use_cache=False, return_dict=True, **arguments).logits
        return logits[0, -1].to(torch.float32, copy=True)

    def plainly(places):
        # With a mask, or positions that do not rise would pass for another text's.
        input_ids = tokens[:, places]
        return last_logits(input_ids, attention_mask=torch.ones_like(input_ids), position_ids=depths[:, places])

    try:
        masked = last_logits(**with_tree({"input_ids": tokens[:, :1]}, tree, 0, target.dtype))
        alone, among_others = plainly([0, 1, 2, 10]), plainly(list(range(11)))
    except torch.OutOfMemoryError:
        raise
    # Targets fail at what they do not know as variously as they are made.
    except Exception as error:
        logger.warning_once(f"{type(target).__name__} fails at a mask of four dimensions: {error}")
        return False
    known[attention] = bool((masked - alone).abs().max() <= 0.25 * (among_others - alone).abs().max())
    return known[attention]


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a block become output? Rounds of propose, verify, commit; each writes only what is final.

The loop is ours and not the host's: the host's takes the draft's word on fewer things than a user may ask, and its
handling of blocks has differed between versions. It is entered with everything that `generate` has prepared.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging


logger = logging.get_logger(__name__)


def check_supported(generation_config: GenerationConfig):
    """
    Refuse, before any compute, what this loop cannot honour.

    Raises:
        ValueError: naming the option, its value and what to do instead.
    """
    config = generation_config
    refusals = [
        ((config.num_beams or 1) > 1, f"num_beams={config.num_beams}", "pass num_beams=1"),
        (
            (config.num_return_sequences or 1) > 1 and not config.do_sample,
            f"num_return_sequences={config.num_return_sequences} without sampling",
            "greedy decoding has one answer: pass do_sample=True, or ask for one",
        ),
        (
            config.use_cache is False,
            "use_cache=False",
            "leave use_cache on: rejected tokens are cropped from the cache",
        ),
        (
            bool(config.penalty_alpha) and (config.top_k or 0) > 1 and not config.do_sample,
            f"penalty_alpha={config.penalty_alpha} (contrastive search)",
            "leave penalty_alpha unset",
        ),
        (config.dola_layers is not None, f"dola_layers={config.dola_layers!r}", "leave dola_layers unset"),
        (
            config.constraints is not None or config.force_words_ids is not None,
            "constraints or force_words_ids",
            "pass prefix_allowed_tokens_fn instead",
        ),
    ]
    schedules = ("constant", "heuristic", "heuristic_transient")
    if (schedule := config.num_assistant_tokens_schedule) not in (None, *schedules):
        refusals.append((True, f"num_assistant_tokens_schedule={schedule!r}", f"choose one of {', '.join(schedules)}"))
    # Other sources of proposals.
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if value := getattr(config, name):
            remedy = "one source of proposals is enough: leave it unset"
            if name == "prompt_lookup_num_tokens":
                remedy += " (after `draft.use_tree()` the draft looks into the text as well)"
            refusals.append((True, f"{name}={value}", remedy))
    for refused, what, remedy in refusals:
        if refused:
            raise ValueError(f"Generation with a Domino draft does not support {what}: {remedy}, or drop the draft.")


def proposals_per_round(config: Any, generation_config: GenerationConfig, tree_size: int = 0) -> int:
    """
    How many tokens in succession a round offers: `block_size - 1`, as the public engines do, unless the call says
    otherwise.

    `num_assistant_tokens` bounds it. A draft with shifted labels has one proposal more to give, which a call gets by
    asking for `block_size` of them; a tree of `tree_size` proposals has whatever comes of it without being asked.
    `generate` fills the option in where a user left it out, so its default counts as left out.
    """
    asked = asked_for(generation_config, "num_assistant_tokens")
    if asked is None:
        return tree_size or config.block_size - 1
    return max(0, min(asked, tree_size or config.block_size - (not config.shift_label)))


def _check_cache(cache: Cache | None, target: PreTrainedModel) -> Cache:
    if cache is None:
        raise ValueError(
            f"{type(target).__name__} keeps no cache that can be cropped back after a rejected proposal, which a "
            "Domino draft needs: generate without the draft."
        )
    if not hasattr(cache, "layers"):
        raise ValueError(
            f"A {type(cache).__name__} cannot be used with a Domino draft: pass a DynamicCache, or leave the cache out."
        )
    if layers := layers_that_keep(cache):
        raise ValueError(
            f"The cache of {type(target).__name__} has layers that cannot forget rejected proposals: "
            f"{', '.join(layers)}. Leave `cache_implementation` unset, where you have set it, or generate without "
            "the draft."
        )
    return cache


def _past_length(cache: Cache | None, target: PreTrainedModel) -> int:
    """Tokens that the target's cache holds before the prefill; raises where rejected tokens could not be forgotten."""
    takes = inspect.signature(target.forward).parameters
    if "input_ids" in takes and CACHE_NAME not in takes:
        # What it is given is swallowed by its `**kwargs`.
        cache = None
    if cache is not None and hasattr(cache, "layers") and any(cache.is_linear):
        # Convolutions know only after their first pass that they can be put back, and are asked then.
        return 0
    return int(_check_cache(cache, target).get_seq_length())


def _check_rope(
    target: PreTrainedModel, input_ids: torch.LongTensor, mask: torch.Tensor | None, max_length: int | None
):
    """
    Refuse rotary embeddings that change with the length of the text, where this call would take them over the limit:
    token by token, each key is rotated as was right when it was written, and a block would rotate them otherwise.
    """
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("dynamic", "longrope"):
        return
    limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    shortest = input_ids.shape[1] if mask is None or mask.dim() != 2 else int(mask.sum(-1).min())
    # Long RoPE has one rotation on either side; the dynamic one has another at each length.
    beyond = kind == "longrope" and shortest > limit
    if not beyond and (max_length is None or max_length > limit):
        raise ValueError(
            f"{type(target).__name__} has {kind} RoPE, which changes at {limit} tokens, and this call may cross that "
            f"(prompts from {shortest} tokens, at most {max_length} in all): set max_length to {limit} or less"
            f"{', or give longer prompts' if kind == 'longrope' else ''}, or generate without the draft."
        )


class _Decoding:
    """
    One call of `generate`: what is decided so far, and the steps of a round.

    Args:
        draft, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer, use_head,
            synced_gpus, model_kwargs: as for [`domino_decoding`].
        parts (`TargetParts`): of the target.
        capture (`ContextCapture`): open on the target layers that the draft reads.
    """

    def __init__(
        self,
        draft,
        target: PreTrainedModel,
        parts: TargetParts,
        capture: ContextCapture,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        use_head: bool,
        synced_gpus: bool,
        model_kwargs: dict[str, Any],
    ):
        self.started = time.perf_counter()
        self.synced_gpus = synced_gpus
        self.draft, self.target, self.parts, self.capture = draft, target, parts, capture
        self.generation_config, self.scorer = generation_config, Scorer(draft, parts, use_head)
        self.logits_processor, self.stopping_criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.draft_processors = draft_processors(logits_processor)
        self.do_sample = bool(generation_config.do_sample)
        # As in plain decoding: without an end of sequence, rows that a criterion has stopped go on until all are.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.pad_token_id = generation_config._pad_token_tensor if self.pads else None
        if self.pad_token_id is not None:
            self.pad_token_id = self.pad_token_id.to(input_ids.device)

        self.model_kwargs = model_kwargs
        self.num_rows, self.prompt_length = input_ids.shape
        self.sequences = Sequences(input_ids)
        # Whether the rows that still run end here, and what the others were when they ended.
        self.stopped = [False] * self.num_rows
        self.finished: dict[int, torch.LongTensor] = {}
        self.record = Record(generation_config, self.num_rows)
        self.acceptance_lengths: list[list[int]] = [[] for _ in range(self.num_rows)]
        self.num_streamed = 0
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}

    # Prefill

    def prefill(self):
        """Read the prompt and commit the target's first token: the first anchors."""
        past_length = _past_length(self.model_kwargs.get(CACHE_NAME), self.target)
        mask = self.model_kwargs.get("attention_mask")
        _check_rope(self.target, self.sequences.prefix(), mask, self.stopping_criteria.max_length)
        input_ids = self.sequences.prefix()
        outputs = self.target._prefill(input_ids, self.generation_config, self.model_kwargs, is_first_iteration=True)
        self.cache = _check_cache(outputs.get(CACHE_NAME), self.target)
        features = self.capture.take(self.draft.device)
        logits = self._logits(outputs, 1)
        self.pace = self._pace(past_length + features.shape[1])
        # What the draft has not read yet.
        self.context = [self._first_context(features, past_length)]
        self.tree_size = self._tree_size()
        looks_up = self.tree_size > 0 and self.draft.prompt_lookup
        self.lookup = PromptLookup(self.sequences.device) if looks_up else None
        self.schedule = Schedule(
            self.generation_config,
            proposals_per_round(self.draft.config, self.generation_config, self.tree_size),
            Experience.of(self.target, self.draft),
            self.pace.lockstep,
            self.tree_size,
        )
        self.captured = self._captured_draft(self.num_rows)
        if self.captured is not None:
            self.draft_state.cache = self.captured.cache
        self.compiled_target = self._compiled_target()

        verified = self._verify(Proposal(input_ids.new_empty(self.num_rows, 0)), logits, lockstep=True)
        self.record.add_prefill(outputs, logits, verified.scores)
        self.pace.start(outputs)
        self._commit(verified)
        self.seconds["prefill"] = time.perf_counter() - self.started

    def _pace(self, length: int) -> Lockstep | OwnPace:
        """How rows will advance, with `length` entries in the target's cache."""
        if (
            self.num_rows > 1
            # Attentions are given key by key, so no key may be missing.
            and not self.generation_config.output_attentions
            # What ended rows lack in a returned cache is read in one more pass, which other processes would not join.
            and not (self.synced_gpus and is_returned(self.cache, self.generation_config))
            and are_row_wise(self.logits_processor, self.stopping_criteria, self.pads)
            and OwnPace.suits(self.target, self.cache, self.model_kwargs)
        ):
            max_length = self.stopping_criteria.max_length
            return OwnPace(
                self.target,
                self.cache,
                self.model_kwargs,
                self.generation_config,
                max_length,
                self.sequences,
                length,
            )
        return Lockstep(self.target, self.cache, self.model_kwargs)

    def _first_context(self, features: torch.Tensor, past_length: int) -> Context:
        """The prompt's features and which of them are of real tokens; makes the draft's state."""
        mask, (num_rows, length) = self.model_kwargs.get("attention_mask"), features.shape[:2]
        if mask is None or bool(mask.all()):
            self.draft_state = DraftState([past_length] * num_rows)
            real = torch.ones(num_rows, length, dtype=torch.bool, device=features.device)
            return Context(features, [length] * num_rows, real)
        real = mask.bool().to(features.device)
        self.draft_state = DraftState(real[:, :-length].sum(-1).tolist())
        real = real[:, -length:]
        if num_rows == 1:
            # What is padding is left out.
            features, real = features[:, real[0]], real[:, real[0]]
        return Context(features, real.sum(-1).tolist(), real)

    def _tree_size(self) -> int:
        """The most proposals of a round's tree; 0 where the draft was not told to have one, or this call has none."""
        size = self.draft.tree_size
        if (
            size == 0
            or self.num_rows > 1
            # Which path is taken must be known of all nodes at once.
            or self.do_sample
            or self.logits_processor
            # It ends a row of proposals.
            or asked_for(self.generation_config, "assistant_confidence_threshold") is not None
            # These are given for each token and key in turn, and other processes would not join the question below.
            or self.record.hidden_states is not None
            or self.record.attentions is not None
            or self.synced_gpus
            or not takes_trees(self.target, self.cache, self.model_kwargs, self.sequences.device)
        ):
            return 0
        return size

    def _compiled_target(self) -> Callable | None:
        """
        The target compiled, where `generate` would compile plain decoding (a cache of fixed size, on a GPU).

        What a call records is taken from its outputs as they are, and those of a compiled pass are written over by the
        next.
        """
        if self.record.hidden_states is not None or self.record.attentions is not None:
            return None
        arguments = {**self.model_kwargs, CACHE_NAME: self.cache}
        if not self.target._valid_auto_compile_criteria(arguments, self.generation_config):
            return None
        return self.target.get_compiled_call(self.generation_config.compile_config)

    def _captured_draft(self, num_rows: int) -> CapturedDraft | None:
        """A captured draft phase for so many rows, if the draft was told to have one and this call allows it."""
        limit = self.stopping_criteria.max_length
        if (
            self.draft.capture_options is None
            or (self.draft_processors and not (self.do_sample and read_logits_alone(self.draft_processors)))
            or self.tree_size > 0
            or self.schedule.watches
            or self.schedule.num_proposals == 0
            or limit is None
            or not Captures.suits(self.draft, self.scorer)
        ):
            return None
        # Behind the text stand a round's context and block, and one slot for what no row has.
        slots = limit + 2 * self.draft.config.block_size + 2
        warpers = self.draft_processors if self.do_sample else None
        return Captures.of(self.target, self.draft).take(
            self.draft, self.scorer, self.parts, num_rows, self.schedule.num_proposals, slots, warpers
        )

    def release(self):
        """Leave what was captured to the next call."""
        if self.captured is not None:
            Captures.of(self.target, self.draft).give_back(self.captured)

    # Rounds

    def propose(self) -> Proposal:
        """
        What the draft offers after the anchors: never more than can still be committed, so that no position past the
        limit is touched.
        """
        budget = self.schedule.budget(len(self.sequences))
        if self.stopping_criteria.max_length is not None:
            budget = min(budget, self.stopping_criteria.max_length - min(self.sequences.lengths) - 1)
        if budget <= 0:
            return Proposal(self.sequences.last().new_empty(len(self.sequences), 0))
        started = time.perf_counter()
        self.sequences.reserve(budget + 1)
        context, self.context = self.context, []
        anchor = self.sequences.last()
        if self.captured is not None and self.captured.takes(context, budget):
            proposal = self.captured.propose(self.draft_state, context[0], anchor)
        else:
            hidden = draft_hidden(self.draft, self.parts, self.draft_state, Context.joined(context), anchor)
            if self.tree_size > 0:
                proposal = grow(
                    self.scorer, hidden, anchor, budget, self.tree_size, self.schedule, self._continuation(budget)
                )
            else:
                proposal = rollout(
                    self.scorer, hidden, self.sequences, budget, self.draft_processors, self.do_sample, self.schedule
                )
        if self.pad_token_id is not None and any(self.stopped):
            # What ended rows will commit, so that the target reads what plain decoding has it read.
            ended = torch.tensor(self.stopped, device=proposal.proposal_ids.device)
            proposal.proposal_ids = torch.where(ended[:, None], self.pad_token_id, proposal.proposal_ids)
        if not isinstance(proposal, Tree):
            self.sequences.put_block(proposal.proposal_ids)
        proposal.seconds = time.perf_counter() - started
        return proposal

    def _continuation(self, budget: int) -> Continuation | None:
        """What followed in the text before; one token alone, after a prompt without ids, has nothing before it."""
        text = self.sequences.row(0)
        return None if self.lookup is None or len(text) < 2 else self.lookup.continuation(text, budget)

    def verify(self, proposal: Proposal):
        """One target pass over anchors and proposals; commit what stands before the new anchors."""
        started = time.perf_counter()
        width = proposal.proposal_ids.shape[1] + 1
        outputs = self._target_pass(proposal)
        features = self.capture.take(self.draft.device)
        if isinstance(proposal, Tree):
            path, proposal = path_taken(proposal, outputs.logits[0, -width:].argmax(-1).to(self.sequences.device))
            features = features[:, path.to(features.device)]
            keep_path(self.cache, path, width)
            outputs.logits = outputs.logits[:, path.to(outputs.logits.device) - width]
        logits = self._logits(outputs, proposal.proposal_ids.shape[1] + 1)
        verified = self._verify(proposal, logits, self.pace.lockstep)
        if not verified.finite:
            logger.warning_once(
                "The draft's logits are not finite, so its proposals are noise (the output is still the target's). "
                f"Its dtype is {self.draft.dtype}; try another, or check its weights."
            )
        seconds = time.perf_counter() - started
        self.schedule.learn(verified, width - 1, proposal.seconds, seconds)
        self.seconds["draft"] += proposal.seconds
        self.seconds["verify"] += seconds

        committed = self.pace.commit(outputs, logits, verified, self.sequences, self.record)
        self.context.append(Context(features[:, : committed.shape[1]], verified.num_new, committed.to(features.device)))
        for row, count in zip(self.sequences.rows, verified.num_new, strict=True):
            self.acceptance_lengths[row].append(count)
        self._commit(verified)

    def idle(self):
        """A target pass of no effect: other processes still need this one's part of the weights."""
        self._target_pass(Proposal(self.sequences.last().new_empty(len(self.sequences), 0)))
        self.cache.crop(-1)

    def _target_pass(self, proposal: Proposal):
        if isinstance(proposal, Tree):
            anchor = self.pace.inputs(self.sequences, Proposal(proposal.proposal_ids[:, :0]))
            inputs = with_tree(anchor, proposal, self.cache.get_seq_length(), self.target.dtype)
        else:
            inputs = self.pace.inputs(self.sequences, proposal)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = proposal.proposal_ids.shape[1] + 1
        self.capture.clear()
        # Of fixed shape: passes of other widths, as where the limit is near, are too few to compile for.
        whole = proposal.proposal_ids.shape[1] == self.schedule.num_proposals
        call = self.compiled_target if whole and self.compiled_target is not None else self.target
        return call(**inputs, return_dict=True)

    def _logits(self, outputs, width: int) -> torch.Tensor:
        return outputs.logits[:, -width:].to(device=self.sequences.device, dtype=torch.float32, copy=True)

    def _verify(self, proposal: Proposal, logits: torch.Tensor, lockstep: bool) -> Verification:
        self.sequences.reserve(logits.shape[1])
        return verify(
            self.sequences,
            proposal,
            logits,
            self.logits_processor,
            self.stopping_criteria,
            self.stopped,
            self.do_sample,
            lockstep,
            self.pad_token_id,
            keep_scores=self.record.scores is not None,
            past_scores=None if self.record.scores is None else tuple(self.record.scores),
        )

    def _commit(self, verified: Verification):
        """Take the new tokens, hand them to the streamer, and let go of rows that have ended."""
        for entry, count in enumerate(verified.num_new):
            self.sequences.lengths[entry] += count
        self.stopped = verified.stopped
        self._drop_stopped()
        if self.streamer is not None:
            self._stream()

    def _drop_stopped(self):
        ended = [entry for entry, stopped in enumerate(self.stopped) if stopped]
        kept = [entry for entry, stopped in enumerate(self.stopped) if not stopped]
        ended_rows = {self.sequences.rows[entry]: self.sequences.row(entry) for entry in ended}
        if self.pace.drop(ended, kept, self.sequences):
            self.finished |= ended_rows
            self.sequences.keep(kept)
            self.stopped = [False] * len(kept)
            self._keep_drafting(kept)
            self.context = [context.keep(kept) for context in self.context]

    def _keep_drafting(self, kept: list[int]):
        """Let go of all other rows of the draft's."""
        if self.captured is None:
            self.draft_state.keep(kept)
            return
        before, self.captured = self.captured, self._captured_draft(len(kept))
        assert self.captured is not None
        self.captured.cache.copy_rows(before.cache, kept)
        self.draft_state = DraftState([self.draft_state.origins[entry] for entry in kept], self.captured.cache)
        Captures.of(self.target, self.draft).give_back(before)

    @property
    def done(self) -> bool:
        return all(self.stopped)

    # Output

    def _stream(self):
        """Hand over what is decided for all rows, in order: one row as it comes, a batch token by token."""
        if self.num_rows == 1:
            new = self.sequences.prefix()[:, self.prompt_length + self.num_streamed :]
            self.num_streamed += new.shape[1]
            # Flat, as plain decoding puts it: servers count what is put, and a row of a matrix counts as one.
            self.streamer.put(new[0].cpu())
            return
        decided = self._padded()[:, self.prompt_length :].cpu()
        ready = decided.shape[1] if self.done else min(self.sequences.lengths) - self.prompt_length
        for column in range(self.num_streamed, ready):
            self.streamer.put(decided[:, column])
        self.num_streamed = ready

    def _padded(self) -> torch.LongTensor:
        """All rows of the batch, `[N, S + new]`, ended ones padded on the right."""
        rows = dict(self.finished)
        rows.update((row, self.sequences.row(entry)) for entry, row in enumerate(self.sequences.rows))
        padding = 0 if self.pad_token_id is None else int(self.pad_token_id)
        ordered = [rows[row] for row in range(self.num_rows)]
        return torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True, padding_value=padding)

    def result(self) -> DominoGenerateOutput | torch.LongTensor:
        """What `generate` returns."""
        sequences = self._padded()
        self.pace.finish(sequences)
        if not self.generation_config.return_dict_in_generate:
            return sequences
        lengths = [torch.tensor(row, dtype=torch.long) for row in self.acceptance_lengths]
        seconds = dict(self.seconds)
        seconds["host"] = time.perf_counter() - self.started - sum(seconds.values())
        return make_output(
            cache=self.cache,
            sequences=sequences,
            acceptance_lengths=torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True),
            seconds=seconds,
            **self.record.as_output(),
        )


@torch.no_grad()
def domino_decoding(
    draft,
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    use_head: bool = True,
    synced_gpus: bool = False,
    **model_kwargs,
) -> DominoGenerateOutput | torch.LongTensor:
    """
    Greedy decoding or sampling of a batch: what the target alone would give, token for token or in distribution.

    Args:
        draft (`DominoDraftModel`): proposes.
        target (`PreTrainedModel`): decides.
        input_ids (`torch.LongTensor` of shape `[N, S]`): the prompts, padded on the left.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as prepared by `generate`.
            `generation_config.num_assistant_tokens` bounds the proposals of a round (default: what the draft's own
            `generation_config` says, else `block_size - 1`).
        use_head (`bool`): `False` proposes from the base logits alone (DFlash), for comparison.
        synced_gpus (`bool`): go on with passes of no effect until all processes have ended, as sharded targets need.

    Returns:
        Token ids `[N, S + new]`, or [`DominoGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        ValueError: before any compute, when an option, the cache or the pair of models is not supported.
    """
    generation_config = with_defaults_of(draft, generation_config)
    check_supported(generation_config)
    parts = TargetParts(target)
    draft.check_target(target)
    with parts.capture(draft.config.target_layer_ids) as capture:
        decoding = _Decoding(
            draft,
            target,
            parts,
            capture,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            use_head,
            synced_gpus,
            model_kwargs,
        )
        decoding.prefill()
        # Only now: recording through the prefill would keep what sliding layers drop.
        with recording_past(decoding.cache), target._optimize_model_for_decode():
            while target._has_unfinished_sequences(decoding.done, synced_gpus, device=input_ids.device):
                if decoding.done:
                    decoding.idle()
                else:
                    decoding.verify(decoding.propose())
    decoding.release()
    if streamer is not None:
        streamer.end()
    return decoding.result()


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Which code travels with the weights? Three flat files, since transformers' remote-code loader knows no folders.

`from .generation import ...` in `modeling_domino.py` finds this folder in the package, and in a saved draft the one
file `generation.py`, made from the folder's modules in the order in which they import one another. A fourth file is for
those who come by `custom_generate`; transformers wants it in a folder of its own.
"""

import ast
import shutil
from pathlib import Path

CODE_FILES = ("configuration_domino.py", "modeling_domino.py")
_FLAT_NAME = "generation.py"
CUSTOM_GENERATE_FILE = "custom_generate/generate.py"
# A text, since transformers copies only the modules that a draft imports: a draft loaded from a saved folder has no
# other place to take it from when it is saved again.
_CUSTOM_GENERATE = '''\
"""The draft as a decoding method: `target.generate(**inputs, custom_generate=ID, trust_remote_code=True, draft=ID)`."""

from functools import lru_cache
from os import PathLike

from transformers import AutoModel


@lru_cache(maxsize=1)
def _load(draft, revision, dtype, device):
    return AutoModel.from_pretrained(draft, revision=revision, dtype=dtype, trust_remote_code=True).to(device).eval()


def generate(model, draft=None, draft_revision=None, assistant_model=None, **kwargs):
    """
    What `model.generate(..., assistant_model=draft)` gives.

    Args:
        model (`PreTrainedModel`): the target.
        draft (`str` or `PreTrainedModel`): the id or folder of this repository, which is loaded once, or the draft.
        draft_revision (`str`, *optional*): of the repository.
        kwargs: any argument of `generate`.

    Raises:
        ValueError: when no draft is given.
    """
    draft = draft if draft is not None else assistant_model
    if draft is None:
        raise ValueError("`draft` is not given: name this repository once more, `draft=ID`, or pass the loaded draft.")
    if isinstance(draft, (str, PathLike)):
        draft = _load(str(draft), draft_revision, model.dtype, model.device)
    return model.generate(assistant_model=draft, **kwargs)
'''


def write_code(folder: str | Path):
    """
    Write `configuration_domino.py`, `modeling_domino.py` (byte for byte), `generation.py` and
    `custom_generate/generate.py` into `folder`.

    Works alike from the package, where `generation.py` is made, and from a saved draft, where it is copied.
    """
    folder, here = Path(folder), Path(__file__).resolve()
    if here.name == _FLAT_NAME:
        source = here.parent
        flat = here.read_text(encoding="utf-8")
    else:
        source = here.parent.parent
        flat = amalgamate(here.parent)
    for name in CODE_FILES:
        if (source / name).resolve() != (folder / name).resolve():
            shutil.copyfile(source / name, folder / name)
    (folder / _FLAT_NAME).write_text(flat, encoding="utf-8")
    (folder / CUSTOM_GENERATE_FILE).parent.mkdir(exist_ok=True)
    (folder / CUSTOM_GENERATE_FILE).write_text(_CUSTOM_GENERATE, encoding="utf-8")


def amalgamate(package: Path) -> str:
    """
    One module from the modules of `package`, each after those it imports, without their imports of one another.

    Raises:
        ValueError: when two modules define the same top-level name, which one file cannot hold.
    """
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(package.glob("*.py"))}
    order: list[str] = []

    def visit(name: str):
        if name in order:
            return
        for node in ast.parse(sources[name]).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                visit(node.module or "__init__")
        order.append(name)

    visit("__init__")
    parts = ["# Made from the folder `generation/` of the package domino_spec. Edit there, not here.\n"]
    owners: dict[str, str] = {}
    for name in order:
        tree = ast.parse(sources[name])
        lines = sources[name].splitlines(keepends=True)
        for node in tree.body:
            defined = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            if isinstance(node, ast.Assign):
                defined = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for symbol in defined:
                # Loggers and export lists stand in every module; the last one serves.
                if symbol not in ("logger", "__all__") and owners.setdefault(symbol, name) != name:
                    raise ValueError(f"`{symbol}` is defined in both generation/{owners[symbol]}.py and {name}.py.")
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for line in range(node.lineno - 1, node.end_lineno or node.lineno):
                    lines[line] = ""
        parts.append("".join(lines).strip("\n") + "\n")
    return "\n\n".join(parts)


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft plug into `generate`? One dispatch on the host's side, one mixin on the draft's.

`generate` picks its decoding method on the target's class and hands a foreign assistant neither hidden states nor the
target. So two methods of `GenerationMixin` are wrapped, once per process: an assistant that has an
`assisted_decoding` method of its own gets the call, with everything that `generate` prepared; every other call goes
on untouched. The wrappers know no class of ours, so copies of this module (as package and as remote code) share them.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import GENERATION_CONFIG_NAME


_MARK = "_hands_over_to_assistant"


def register():
    """Make `target.generate(assistant_model=draft)` reach the draft's decoding. Calls after the first do nothing."""
    decoding, validation = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode

    @functools.wraps(decoding)
    def assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        own = _method_of(assistant_model, "assisted_decoding")
        if own is None or _asks_for_the_hosts_loop(kwargs.get("generation_config")):
            return decoding(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        return own(self, input_ids, *args, **kwargs)

    @functools.wraps(validation)
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        own = _method_of(generation_mode_kwargs.get("assistant_model"), "validate_assisted_decoding")
        if own is None or _asks_for_the_hosts_loop(generation_config):
            return validation(self, generation_mode, generation_config, generation_mode_kwargs)
        return own(self, generation_config)

    for name, method in (
        ("_assisted_decoding", assisted_decoding),
        ("_validate_generation_mode", validate_generation_mode),
    ):
        if not hasattr(getattr(GenerationMixin, name), _MARK):
            setattr(method, _MARK, True)
            setattr(GenerationMixin, name, method)


def _method_of(assistant_model: Any, name: str) -> Any:
    """The assistant's own method, also where the assistant is wrapped for data parallelism; else `None`."""
    while not hasattr(assistant_model, name) and isinstance(getattr(assistant_model, "module", None), torch.nn.Module):
        assistant_model = assistant_model.module
    return getattr(assistant_model, name, None)


def _asks_for_the_hosts_loop(generation_config: GenerationConfig | None) -> bool:
    """Whether `speculation_type` asks for transformers' own DFlash loop, around our backbone without its head."""
    return getattr(generation_config, "speculation_type", None) is not None


class DominoDecodingMixin:
    """What a draft offers at generation time; mixed into [`DominoDraftModel`]."""

    config: Any
    # Defaults for whoever generates with this draft: how many proposals, and which schedule.
    generation_config: GenerationConfig | None = None
    # Of `use_cuda_graphs`.
    capture_options: CaptureOptions | None = None
    # Of `use_tree`.
    tree_size, prompt_lookup = 0, False

    def assisted_decoding(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs,
    ) -> DominoGenerateOutput | torch.LongTensor:
        """
        What `target.generate(..., assistant_model=draft)` runs; see [`domino_decoding`]. Not called by hand.

        Raises:
            ValueError: before any compute, when an option or the pair of models is not supported.
        """
        if assistant_tokenizer is not None:
            raise ValueError(
                "A Domino draft proposes tokens of the target's own vocabulary: leave assistant_tokenizer out of the "
                "call, or use an assistant model with a tokenizer of its own."
            )
        return domino_decoding(
            self,
            target,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            synced_gpus=synced_gpus,
            **model_kwargs,
        )

    def decode(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        use_head: bool = True,
        **model_kwargs,
    ) -> DominoGenerateOutput | torch.LongTensor:
        """
        The same loop as a `custom_generate` callable, for those who dislike the registration:

            target.generate(**inputs, custom_generate=draft.decode)
            target.generate(**inputs, custom_generate=draft.decode, use_head=False)  # the DFlash ablation

        transformers gives such a callable no `streamer` and no `synced_gpus`: use `assistant_model=draft` for those.

        Args:
            use_head (`bool`): `False` proposes from the base logits alone.

        Raises:
            ValueError: before any compute, when an option or the pair of models is not supported.
        """
        return domino_decoding(
            self,
            target,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            use_head=use_head,
            **model_kwargs,
        )

    def spec_generate(
        self,
        input_ids: torch.LongTensor,
        target: PreTrainedModel,
        stop_token_ids: list[int] | None = None,
        temperature: float = 0.0,
        **kwargs,
    ) -> DominoGenerateOutput | torch.LongTensor:
        """
        `target.generate` under the name and arguments of the authors' script.

        Args:
            input_ids (`torch.LongTensor` of shape `[N, S]`): the prompts.
            target (`PreTrainedModel`): the model to speed up.
            stop_token_ids (`list[int]`, *optional*): ids that end the answer; default: the target's own.
            temperature (`float`): 0 is greedy, more samples.
            kwargs: any argument of `generate`.
        """
        if stop_token_ids is not None:
            kwargs["eos_token_id"] = stop_token_ids
        if temperature > 0:
            kwargs.update(do_sample=True, temperature=temperature)
        else:
            kwargs.setdefault("do_sample", False)
        return target.generate(input_ids, assistant_model=self, **kwargs)

    def use_cuda_graphs(self, enabled: bool = True, input_table: bool = False):
        """
        Have rounds on a GPU replay their draft phase as one CUDA graph, with Triton kernels for the head where Triton
        is installed. The output stays the target's own, or distributed as its own where it is sampled.

        It serves calls with a limit to the answer, a draft without adapters, and target and draft on one GPU. Sampling
        by temperature, by top-k, top-p, min-p, typical and epsilon cut-offs, and renormalised, is part of the graph;
        calls with other logits processors (penalties, eta cut-offs), an adaptive draft length or trees go on as they
        are. A graph is captured at the second round of the first call of its kind (batch size, number of proposals,
        length up to a multiple of 512, way to choose tokens), and kept with its memory as long as target and draft are,
        of the last four ways to choose. Where tokens are sampled it holds their probabilities: 4 bytes for each row,
        proposal and id of the vocabulary.

        Args:
            enabled (`bool`): `False` goes back to how it was.
            input_table (`bool`): keep a table of what the head's GRU makes of each token, `3 * gru_hidden_dim` numbers
                for each id of the vocabulary, so that a step reads a line of it instead of a weight matrix. Its size is
                logged when it is made.
        """
        self.capture_options = CaptureOptions(input_table) if enabled else None

    def use_tree(self, num_proposals: int = 15, prompt_lookup: bool = True):
        """
        Have greedy decoding of one text offer several continuations at once, as a tree of `num_proposals` proposals:
        where the likeliest token is wrong, the next one may be right, and the same pass of the target goes on from it.
        The output stays the target's own. It pays where a pass takes little longer for more tokens.

        What followed the last tokens before, in the prompt or the answer, is a path of the tree where it is likelier
        than the draft's own: code that is edited, a question that is taken up, a list. It costs next to nothing, and
        how often it was right so far in the text says how far it is believed.

        It serves calls with one row, without sampling, logits processors, `assistant_confidence_threshold`, hidden
        states and attentions in the output, and sharing among processes, on targets with full attention in every layer
        (`"eager"` or `"sdpa"`) and a cache that grows; other calls go on as they are. Its rounds are not replayed as
        CUDA graphs. A target is asked once, by three passes over a few tokens, whether it obeys masks.

        `num_assistant_tokens` bounds how many proposals may follow one another (default: any number), and with
        `num_assistant_tokens_schedule="heuristic"` a round offers as much of its tree as pays. After SpecInfer (arXiv
        2305.09781) and EAGLE-2 (arXiv 2406.16858); prompt lookup as in transformers.

        Args:
            num_proposals (`int`): of a tree; 0 goes back to proposals that follow one another.
            prompt_lookup (`bool`): `False` leaves all proposals to the draft.

        Raises:
            ValueError: when `num_proposals` is no number of proposals, or `prompt_lookup` neither on nor off.
        """
        if type(num_proposals) is not int or num_proposals < 0:
            raise ValueError(
                f"`num_proposals` is {num_proposals!r}, but a tree has a whole number of proposals: 15, say, or 0 to "
                "have none."
            )
        if type(prompt_lookup) is not bool:
            raise ValueError(
                f"`prompt_lookup` is {prompt_lookup!r}, but a tree has what followed before in the text or not: pass "
                "True or False, and the size of the tree as `num_proposals`."
            )
        self.tree_size, self.prompt_lookup = num_proposals, prompt_lookup

    def validate_assisted_decoding(self, target: PreTrainedModel, generation_config: GenerationConfig):
        """What `generate` asks before it prepares anything: does this draft fit this target and these options?"""
        check_supported(generation_config)
        self.check_target(target)

    def check_target(self, target: PreTrainedModel):
        """
        Raise unless this draft belongs to `target`, as far as shapes can tell.

        Raises:
            ValueError: naming the quantity and its value on both sides.
        """
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"{type(target).__name__} is an encoder-decoder; a Domino draft assists decoder-only causal LMs only."
            )
        # transformers' own mark on models whose running state cannot be put back as it was before a rejected proposal.
        if getattr(target, "_is_stateful", False):
            raise ValueError(
                f"{type(target).__name__} has recurrent layers, whose state cannot forget a rejected proposal: "
                "generate without the draft."
            )
        wrapper = getattr(target.prepare_inputs_for_generation, "__self__", None)
        if getattr(getattr(wrapper, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                "The target has an adapter that prepends learnt tokens (prompt, prefix or P-tuning), whose passes a "
                "draft cannot share: use LoRA or another adapter of weights, or generate without the draft."
            )
        config, theirs = self.config, target.config.get_text_config(decoder=True)
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        pairs = [
            ("hidden size", "hidden_size", config.hidden_size, theirs.hidden_size),
            ("depth", "num_target_layers", config.num_target_layers, theirs.num_hidden_layers),
        ]
        if head is not None:
            pairs.append(("vocabulary", "vocab_size", config.vocab_size, vocabulary_size(head)))
        for what, name, ours, their in pairs:
            if ours is not None and ours != their:
                remedy = f", or fit it with `draft.resize_token_embeddings({their})`" if name == "vocab_size" else ""
                raise ValueError(
                    f"This draft was made for a target whose {what} is {ours} (`{name}` in its config), but "
                    f"{type(target).__name__} has {their}: use the draft of this target, or the target of this draft"
                    f"{remedy}."
                )
        width = getattr(embedding, "embedding_dim", config.hidden_size)
        if width != config.hidden_size:
            raise ValueError(
                f"The embedding of {type(target).__name__} is {width} wide and projected to the hidden size "
                f"{config.hidden_size} later, which a Domino draft does not know: generate without the draft."
            )
        if embedding is not None and config.mask_token_id >= vocabulary_size(embedding):
            raise ValueError(
                f"The draft's `mask_token_id` is {config.mask_token_id}, but the embedding of {type(target).__name__} "
                f"has {vocabulary_size(embedding)} rows: use the draft of this target."
            )
        if max(config.target_layer_ids) >= theirs.num_hidden_layers:
            raise ValueError(
                f"The draft reads the target layers {config.target_layer_ids} (`target_layer_ids`), but "
                f"{type(target).__name__} has {theirs.num_hidden_layers}: use the draft of this target."
            )

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Nothing to do: `save_pretrained` writes this class's code and `auto_map` itself, however it was loaded."""

    def save_pretrained(self, save_directory, *args, **kwargs):
        """
        Write a folder that works alone: weights, config in both layouts, the code for `trust_remote_code=True`, and
        the draft's `generation_config` if it has one. Takes what
        [`~transformers.PreTrainedModel.save_pretrained`] takes.
        """
        # Keys are always the contract's, also when the draft was read from a file with other names.
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, **kwargs)
        self._write_beside(save_directory)

    def _write_beside(self, folder):
        """What a folder holds besides weights and config."""
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        else:
            # One that lies there from before is not this draft's.
            Path(folder, GENERATION_CONFIG_NAME).unlink(missing_ok=True)
        write_code(folder)

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        # With `push_to_hub=True`, saving uploads before it returns.
        self._write_beside(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a block become output? Importing this makes `target.generate(assistant_model=draft)` work."""


register()

__all__ = ["DominoGenerateOutput", "DominoDecodingMixin"]
