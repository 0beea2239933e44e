# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Where does a draft start? From the target's own layers, or from another draft, with or without a head."""

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_domino import DominoConfig
from ..generation.context import decoder_layers
from ..modeling_domino import DominoDraftModel

_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def spread_layer_ids(depth: int, count: int) -> list[int]:
    """`count` of `depth` target layers, evenly spread from the second to the third last, as DFlash drafts read them."""
    first, last = min(1, depth - 1), max(depth - 3, 0)
    if count == 1 or last <= first:
        return sorted({first, last})[:count]
    return sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)})


def find_mask_token(tokenizer: PreTrainedTokenizerBase, mask_token: str | None) -> int:
    """
    The id that fills a block: that of `mask_token` (an id, or a token of the vocabulary), else the tokenizer's own.

    Raises:
        ValueError: when there is none; a guess would quietly cost acceptance. The message offers reserved tokens.
    """
    if mask_token is None and tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    vocabulary = tokenizer.get_vocab()
    if mask_token is not None and mask_token.isdecimal() and int(mask_token) in vocabulary.values():
        return int(mask_token)
    if mask_token in vocabulary:
        return vocabulary[mask_token]
    used = str(tokenizer.chat_template)
    spare = [str(t) for t in tokenizer.added_tokens_decoder.values() if str(t) not in used][:12]
    asked = (
        "No `mask_token` is given" if mask_token is None else f"`mask_token` {mask_token!r} is no token of the target"
    )
    raise ValueError(
        f"{asked}, and the tokenizer has none of its own: name a token that text never holds, such as one of {spare}."
    )


def draft_config_for(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_layers: int,
    block_size: int,
    mask_token: str | None,
    target_layer_ids: int | list[int],
    gru_hidden_dim: int,
    emb_dim: int,
    pure_draft_prefix_len: int = 1,
    shift_label: bool = True,
) -> DominoConfig:
    """
    The config of a new draft with layers of the target's own shape.

    Args:
        target, tokenizer: the pair.
        num_layers, block_size, gru_hidden_dim, emb_dim, pure_draft_prefix_len (`int`), shift_label (`bool`): see
            [`DominoConfig`].
        mask_token (`str`, *optional*): see [`find_mask_token`].
        target_layer_ids (`int` or `list[int]`): how many target layers to read, or which.

    Raises:
        ValueError: when there is no mask token, or the fields do not fit together.
    """
    config = target.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    if isinstance(target_layer_ids, int):
        target_layer_ids = spread_layer_ids(depth, target_layer_ids)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DominoConfig(
        **{name: getattr(config, name) for name in _SHAPE},
        # By these a pipeline tells that target and draft share a tokenizer.
        **{name: getattr(config, name, None) for name in _TOKENS},
        head_dim=head_dim,
        attention_bias=bool(getattr(config, "attention_bias", False)),
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        num_hidden_layers=num_layers,
        num_target_layers=depth,
        target_layer_ids=target_layer_ids,
        block_size=block_size,
        mask_token_id=find_mask_token(tokenizer, mask_token),
        projector_type="domino",
        shift_label=shift_label,
        pure_draft_prefix_len=pure_draft_prefix_len,
        gru_hidden_dim=gru_hidden_dim,
        emb_dim=emb_dim,
    )


def with_head(
    draft: DominoDraftModel, gru_hidden_dim: int, emb_dim: int, pure_draft_prefix_len: int
) -> DominoDraftModel:
    """A copy of a draft without head (a DFlash checkpoint), its labelling kept, with one that corrects nothing yet."""
    fields = draft.config.to_dict()
    for name in ("dflash_config", "auto_map", "architectures", "model_type"):
        fields.pop(name, None)
    head = {"gru_hidden_dim": gru_hidden_dim, "emb_dim": emb_dim, "pure_draft_prefix_len": pure_draft_prefix_len}
    grown = DominoDraftModel(DominoConfig(**{**fields, **head, "projector_type": "domino"})).to(draft.dtype)
    grown.load_state_dict(draft.state_dict(), strict=False)
    nn.init.zeros_(grown.embed_proj[2].weight)
    return grown


def renew_head(draft: DominoDraftModel):
    """Put the head of a draft back to where training begins, in place: no correction."""
    for module in (draft.prefix_gru, draft.embed_proj[0]):
        module.reset_parameters()
    nn.init.zeros_(draft.embed_proj[2].weight)


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
    if bad := [i for i in source_layers if not 0 <= i < len(layers)]:
        raise ValueError(f"`source_layers` names {bad}, but the target has layers 0..{len(layers) - 1}.")

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
