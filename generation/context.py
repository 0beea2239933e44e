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
