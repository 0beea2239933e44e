# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Where does a new draft start? From the target's own layers."""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..generation.context import decoder_layers
from ..modeling_domino import DominoDraftModel


@torch.no_grad()
def initialize_from_target(
    draft: DominoDraftModel, target: PreTrainedModel, source_layers: list[int], output_damping: float = 0.5
):
    """
    Copy target layers into the draft, in place.

    Each draft layer takes projections, MLP and norms of one target layer, with its two output projections damped: the
    layer was trained on deep hidden states and here starts on raw embeddings. `fc` passes on the deepest tapped layer,
    `hidden_norm` and `norm` are the norms that this layer and the output head expect. The head starts with a zero
    correction, so that training begins from the base logits.

    Args:
        draft: with the target's hidden size, heads and intermediate size.
        target: with layers named as in Llama and Qwen (`self_attn.q_proj`, `mlp.gate_proj`, `input_layernorm`, ...).
        source_layers (`list[int]`): zero-based target layer for each draft layer.
        output_damping (`float`): factor on `o_proj` and `down_proj`.

    Raises:
        ValueError: when the counts differ, or a target layer lacks a module or has another shape.
    """
    if len(source_layers) != len(draft.layers):
        raise ValueError(f"`source_layers` names {len(source_layers)} layers for a draft of {len(draft.layers)}.")
    layers = decoder_layers(target)

    def copy(name: str, into: nn.Module, source: nn.Module):
        theirs = dict(source.named_parameters()).get(name)
        ours = into.get_parameter(name)
        if theirs is None or theirs.shape != ours.shape:
            shape = None if theirs is None else tuple(theirs.shape)
            raise ValueError(
                f"Cannot start from {type(source).__name__}: its `{name}` has shape {shape}, the draft's has "
                f"{tuple(ours.shape)}."
            )
        ours.copy_(theirs)

    own_norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    for layer, index in zip(draft.layers, source_layers, strict=True):
        theirs = dict(layers[index].named_parameters())
        for name, _ in layer.named_parameters():
            # Targets without per-head norms leave ours at one.
            if name not in own_norms or name in theirs:
                copy(name, layer, layers[index])
        layer.self_attn.o_proj.weight.mul_(output_damping)
        layer.mlp.down_proj.weight.mul_(output_damping)

    hidden = draft.config.hidden_size
    ids = draft.config.require_complete()
    draft.fc.weight.mul_(0.1)
    deepest = ids.index(max(ids))
    draft.fc.weight[:, deepest * hidden : (deepest + 1) * hidden] += torch.eye(hidden)
    draft.hidden_norm.weight.copy_(draft.layers[0].input_layernorm.weight)
    norm = getattr(target.get_decoder(), "norm", None)
    if norm is not None and norm.weight.shape == draft.norm.weight.shape:
        draft.norm.weight.copy_(norm.weight)
    if draft.config.has_head:
        nn.init.zeros_(draft.embed_proj[2].weight)
