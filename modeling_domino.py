# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a Domino draft compute? The backbone (a whole block in one pass) and the head (a causal correction).

Shape symbols used throughout:
    N  rows of the batch              B  positions of a block (`block_size`)
    L  context positions of one pass  P  context positions already in the cache
    H  hidden size, the target's own  T  number of `target_layer_ids`
    G  width of the prefix state      E  width of the head's bottleneck      V  vocabulary, the target's own

The draft owns neither an embedding nor an output head: both are the target's (`generation/context.py` borrows them).
Source: arXiv 2605.29707; the backbone is that of DFlash with Qwen3-style layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file, logging

from .configuration_domino import DominoConfig
from .generation import DominoDecodingMixin

logger = logging.get_logger(__name__)

_IF_THERE = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}

# Names under which other trainers store the same tensors.
_FOREIGN_KEYS = {
    r"^model\.": "",
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
}


def _generation_config_of(name_or_path: str, hub: dict[str, Any]) -> GenerationConfig | None:
    """Defaults that lie beside a draft, if there are any; `hub` are keywords of `from_pretrained`."""
    names = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
    where = {name: hub[name] for name in names if hub.get(name) is not None}
    if cached_file(name_or_path, GENERATION_CONFIG_NAME, **where, **_IF_THERE) is None:
        return None
    try:
        return GenerationConfig.from_pretrained(name_or_path, **where)
    except (OSError, TypeError, AttributeError) as error:
        raise ValueError(f"{GENERATION_CONFIG_NAME} of {name_or_path} cannot be read: mend or remove it.") from error


class DominoRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary embedding whose frequencies stay float32 when the draft is cast: in bf16 they drift with position."""

    def _apply(self, fn, recurse=True):
        frequencies = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in frequencies.items():
            cast = getattr(self, name)
            if cast.dtype != buffer.dtype and not buffer.is_meta:
                setattr(self, name, buffer.to(cast.device))
        return self


class DominoAttention(nn.Module):
    """Attention with queries from the block, keys and values from context features and block alike."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        # The block is bidirectional unless a mask says otherwise.
        self.is_causal = False

        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, hidden_states, context, position_embeddings, attention_mask, cache: Cache | None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        keys_and_values = torch.cat([context, hidden_states], dim=1)
        kv_shape = (*keys_and_values.shape[:-1], -1, self.head_dim)

        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(keys_and_values).view(kv_shape)).transpose(1, 2)
        value = self.v_proj(keys_and_values).view(kv_shape).transpose(1, 2)

        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        key = key * cos + rotate_half(key) * sin
        # Queries are the last positions of the pass, so they take the tail of the tables.
        cos, sin = cos[:, :, -query.shape[2] :], sin[:, :, -query.shape[2] :]
        query = query * cos + rotate_half(query) * sin

        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if attention_mask is not None:
                # A cache made from the config forgets what lies before a sliding layer's window.
                attention_mask = attention_mask[..., -key.shape[-2] :]

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


class DominoLayer(GradientCheckpointingLayer):
    """One Qwen3-style decoder layer (pre-norm attention, pre-norm SwiGLU) with the context injected as keys/values."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DominoAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, context, position_embeddings, attention_mask, cache: Cache | None, **kwargs):
        attended = self.self_attn(
            self.input_layernorm(hidden_states), context, position_embeddings, attention_mask, cache, **kwargs
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def window_mask(
    rule: str, window: int | None, query_positions: torch.LongTensor, key_positions: torch.LongTensor
) -> torch.Tensor | None:
    """
    Which keys lie inside the window of which queries.

    Args:
        rule (`str`): `"none"` (also full attention), `"causal"` or `"symmetric"`, see `DominoConfig`.
        window (`int`, *optional*): width of the sliding window in tokens; unused with `"none"`.
        query_positions (`torch.LongTensor` of shape `[..., Q]`), key_positions (`[..., K]`): absolute positions.

    Returns:
        Bool tensor `[..., Q, K]`, `True` where a query may look, or `None` when it may look everywhere.
    """
    if rule == "none":
        return None
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    if rule == "causal":
        return (distance >= 0) & (distance < window)
    return distance.abs() < window


class DominoDraftModel(DominoDecodingMixin, PreTrainedModel):
    """
    The draft: a few parallel layers fed with the target's hidden states, and the Domino head.

    `forward` is the backbone, `prefix_states` / `step` / `correction` are the head. Decoding lives in `generation/`
    and reaches this class through its mixin; a draft holds no per-call state, so threads may share it.

    Source: arXiv 2605.29707, sections on the parallel backbone and the Domino head.
    """

    config_class = DominoConfig
    config: DominoConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _no_split_modules = ["DominoLayer"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        # What `push_to_hub` writes into the card.
        self.model_tags = ["speculative-decoding", "domino"]
        target_layer_ids = config.require_complete()
        hidden = config.hidden_size
        self.fc = nn.Linear(len(target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DominoLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = DominoRotaryEmbedding(config)
        if config.has_head:
            self.prefix_gru = nn.GRU(hidden, config.gru_hidden_dim, bias=False, batch_first=True)
            self.embed_proj = nn.Sequential(
                nn.Linear(hidden + config.gru_hidden_dim, config.emb_dim, bias=False),
                nn.SiLU(),
                nn.Linear(config.emb_dim, config.vocab_size, bias=False),
            )
        self.post_init()

    def get_input_embeddings(self) -> None:
        """The draft has none of its own; it borrows the target's."""

    def _init_weights(self, module):
        if isinstance(module, nn.GRU):
            # torch's own range for a GRU, through transformers' functions: they leave loaded tensors alone.
            bound = module.hidden_size**-0.5
            for weight in module.parameters():
                init.uniform_(weight, -bound, bound)
        else:
            super()._init_weights(module)

    # Backbone

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        cache: Cache | None = None,
        objective: Callable[[torch.Tensor], Any] | None = None,
        **kwargs,
    ) -> Any:
        r"""
        One drafting pass: hidden states for a whole block.

        Args:
            noise_embeds (`torch.Tensor` of shape `[N, B, H]`):
                Target embeddings of anchor and mask tokens. In training, all blocks of a row one after another.
            context_hidden_states (`torch.Tensor` of shape `[N, L, T * H]`):
                Context features of the verified positions that `cache` does not hold yet; any float dtype.
            position_ids (`torch.LongTensor` of shape `[N, L + B]`, *optional*):
                Positions of the new context, then of the block. Default: consecutive from the cache's length on.
            attention_mask (`torch.Tensor` or `dict`, *optional*):
                `[N, P + L + B]` with 0 on padding to the left of all text, or for each layer type a bool mask
                `[N, 1, B, P + L + B]`, `True` where a query may look (as training makes it). Default: the whole
                context and block, but for sliding layers `config.sliding_window_rule`.
            cache (`Cache`, *optional*):
                Keys and values of the context. It is extended by the context *and* the block: crop the block off
                after the pass (`cache.crop(-B)`), as transformers' own DFlash loop does.
            objective (`Callable`, *optional*):
                Called with draft hidden before the pass returns, and its result is returned instead. For training:
                what wraps a model (DDP, FSDP) has its parameters at hand during `forward` only, the head's too.

        Returns:
            `BaseModelOutput` with `last_hidden_state` (draft hidden) of shape `[N, B, H]`.

        Raises:
            ValueError: when a tensor's last dimension does not fit the config.
        """
        if cache is None:
            # The cache's name in transformers up to 5.23, whose own DFlash loop calls us.
            cache = kwargs.pop("past_key_values", None)
        self._check_width("noise_embeds", noise_embeds, self.config.hidden_size)
        self._check_width("context_hidden_states", context_hidden_states, self.fc.in_features)

        if cache is not None and self.config.sliding_window_rule == "none" and any(cache.is_sliding):
            raise ValueError(
                "`cache` forgets what lies before the sliding window, but this draft ignores its window "
                "(`sliding_window_rule` 'none'): make the cache without a config, `DynamicCache()`."
            )

        context = self.hidden_norm(self.fc(context_hidden_states.to(self.dtype)))
        hidden_states = noise_embeds.to(self.dtype)
        past = cache.get_seq_length() if cache is not None else 0
        kv_length = past + context.shape[1] + hidden_states.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, kv_length, device=hidden_states.device)[None]
        if not isinstance(attention_mask, dict):
            keys = torch.arange(kv_length, device=hidden_states.device)[None]
            visible = None if attention_mask is None else attention_mask.bool()
            attention_mask = self.layer_masks(keys[:, -hidden_states.shape[1] :], keys, visible)
        masks = {name: self._backend_mask(mask, hidden_states.dtype) for name, mask in attention_mask.items()}
        position_embeddings = self.rotary_emb(hidden_states, position_ids)

        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(hidden_states, context, position_embeddings, masks[layer_type], cache, **kwargs)
        hidden_states = self.norm(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states) if objective is None else objective(hidden_states)

    def _check_width(self, name: str, tensor: torch.Tensor, width: int):
        if tensor.shape[-1] != width:
            raise ValueError(
                f"`{name}` has {tensor.shape[-1]} features in its last dimension, but this draft takes {width} "
                f"(hidden_size {self.config.hidden_size}, target_layer_ids {self.config.target_layer_ids}): "
                "it belongs to another target."
            )

    def layer_masks(
        self,
        query_positions: torch.LongTensor,
        key_positions: torch.LongTensor,
        visible: torch.BoolTensor | None = None,
    ) -> dict[str, torch.Tensor | None]:
        """
        The masks of one drafting pass, as `forward` takes them.

        Args:
            query_positions (`torch.LongTensor` of shape `[N or 1, B]`): positions of the block.
            key_positions (`torch.LongTensor` of shape `[N or 1, P + L + B]`): positions of all keys, the block last.
            visible (`torch.BoolTensor` of shape `[N, P + L + B]`, *optional*): `False` hides a key from its row.

        Returns:
            For each layer type a bool mask `[N or 1, 1, B, P + L + B]`, or `None` where everything may be seen.
        """
        masks = {}
        for layer_type in set(self.config.layer_types):
            rule = str(self.config.sliding_window_rule) if layer_type == "sliding_attention" else "none"
            mask = window_mask(rule, self.config.sliding_window, query_positions, key_positions)
            mask = None if mask is None else mask[:, None]
            if visible is not None:
                seen = visible[:, None, None, :]
                mask = seen.expand(-1, 1, query_positions.shape[-1], -1) if mask is None else mask & seen
            masks[layer_type] = mask
        return masks

    def _backend_mask(self, mask, dtype):
        # sdpa reads a bool mask, eager adds a float one.
        if mask is None or mask.dtype != torch.bool or self.config._attn_implementation != "eager":
            return mask
        # The softmax runs in float32, where float64's lowest number is -inf and a row that sees nothing becomes NaN.
        lowest = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, lowest)

    # Head, in its two forms: teacher-forced (`prefix_states`) and unrolled (`step`)

    def prefix_states(self, token_embeds: torch.Tensor) -> torch.Tensor:
        """
        Prefix state after each token of a block, read from the true tokens at once (teacher-forced).

        Args:
            token_embeds (`torch.Tensor` of shape `[M, K, H]`): target embeddings of K tokens from the anchor on.

        Returns:
            `[M, K, G]`: entry i has read tokens 0..i, from a zero state.
        """
        return self.prefix_gru(token_embeds.to(self.dtype))[0]

    def step(self, token_embeds: torch.Tensor, prefix_state: torch.Tensor | None) -> torch.Tensor:
        """
        The same recurrence one token at a time (unrolled).

        Args:
            token_embeds (`torch.Tensor` of shape `[M, H]`): target embeddings of the next token.
            prefix_state (`torch.Tensor` of shape `[M, G]`, *optional*): `None` before the anchor is read.

        Returns:
            The new prefix state, `[M, G]`.
        """
        state = None if prefix_state is None else prefix_state[None]
        return self.prefix_gru(token_embeds.to(self.dtype)[:, None], state)[1][0]

    def correction(
        self, draft_hidden: torch.Tensor, prefix_state: torch.Tensor, token_ids: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """
        What the head adds to the base logits: `W2 silu(W1 [hidden ; state])`.

        Args:
            draft_hidden (`torch.Tensor` of shape `[..., H]`): backbone output at the predicting positions.
            prefix_state (`torch.Tensor` of shape `[..., G]`): state after the tokens before the predicted ones.
            token_ids (`torch.LongTensor` of shape `[K]`, *optional*): score only these ids.

        Returns:
            Correction logits `[..., V]`, or `[..., K]`.
        """
        fused = torch.cat([draft_hidden, prefix_state], dim=-1)
        if token_ids is None:
            return self.embed_proj(fused)
        if type(self.embed_proj) is not nn.Sequential or type(self.embed_proj[2]) is not nn.Linear:
            # An adapter's share is not in the weight.
            return self.embed_proj(fused)[..., token_ids]
        return nn.functional.linear(self.bottleneck(draft_hidden, prefix_state), self.embed_proj[2].weight[token_ids])

    def bottleneck(self, draft_hidden: torch.Tensor, prefix_state: torch.Tensor) -> torch.Tensor:
        """The correction before its last projection, onto the vocabulary: `silu(W1 [hidden ; state])`, `[..., E]`."""
        return self.embed_proj[1](self.embed_proj[0](torch.cat([draft_hidden, prefix_state], dim=-1)))

    def resize_token_embeddings(self, new_num_tokens: int, *args, **kwargs) -> nn.Module | None:
        """
        Fit the head to a target whose vocabulary was resized or padded, as its own `resize_token_embeddings` does.

        Ids that are new get no correction: the base logits alone propose them. A draft without a head has nothing to
        resize but its config.

        Args:
            new_num_tokens (`int`): rows of the target's output head.
            args, kwargs: of the method in transformers; without effect here, as the draft owns no embedding.

        Returns:
            The head's last projection, or `None` without a head.

        Raises:
            ValueError: when the mask token would fall outside the vocabulary.
        """
        if new_num_tokens <= int(self.config.mask_token_id or 0):
            raise ValueError(
                f"A vocabulary of {new_num_tokens} has no room for the draft's mask token (`mask_token_id` "
                f"{self.config.mask_token_id} in its config), which its backbone was trained with: keep more ids."
            )
        kept_ids = [token_id for token_id in self.config.shortlist_ids or () if token_id < new_num_tokens]
        if self.config.shortlist is not None and not kept_ids:
            logger.warning("No id of the draft's shortlist is left: it proposes from the whole vocabulary now.")
        self.config.vocab_size = new_num_tokens
        self.config.set_shortlist(kept_ids or None)
        if not self.config.has_head:
            return None
        old = self.embed_proj[2]
        new = nn.Linear(old.in_features, new_num_tokens, bias=False, device=old.weight.device, dtype=old.weight.dtype)
        kept = min(new_num_tokens, old.out_features)
        with torch.no_grad():
            new.weight.zero_()
            new.weight[:kept] = old.weight[:kept]
        new.weight.requires_grad_(old.weight.requires_grad)
        self.embed_proj[2] = new
        return new

    # Loading and saving

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        Load a draft from a folder or Hub id: official Domino or DFlash layout, or one saved by this package. Takes
        what [`~transformers.PreTrainedModel.from_pretrained`] takes.

        Raises:
            ValueError: when the file lacks weights that the config announces (a head without its tensors, say), or a
                tensor has another shape than the config gives it; the message names both shapes.
        """
        hub = dict(kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        take_any_shape = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs.setdefault("key_mapping", _FOREIGN_KEYS)
        # transformers would name the shapes in its log only, so it reports them to us and we raise.
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        if info["mismatched_keys"] and not take_any_shape:
            shapes = [
                f"`{key}` is {list(found)} in the file and {list(wanted)} by the config"
                for key, found, wanted in sorted(info["mismatched_keys"])
            ]
            raise ValueError(f"{pretrained_model_name_or_path} does not fit its config: {'; '.join(shapes)}.")
        if model.name_or_path:
            # Of an adapter's folder this is the draft's that it was made for.
            model.generation_config = _generation_config_of(model.name_or_path, hub)
        if missing := sorted(info["missing_keys"]):
            head = [key for key in missing if key.startswith(("prefix_gru.", "embed_proj."))]
            advice = (
                "the config announces a Domino head (`projector_type` 'domino') that the file does not hold; "
                "remove `projector_type` to load the draft without a head"
                if head == missing
                else "the file is not a whole draft of this config"
            )
            raise ValueError(f"{pretrained_model_name_or_path} lacks the weights {missing}: {advice}.")
        return (model, info) if wants_info else model


__all__ = ["DominoDraftModel"]
