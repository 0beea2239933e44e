# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Do the rows of a batch advance together, or each at its own pace? What either means for the target's arguments."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from .cache import CachedRow, RaggedCache, can_have_holes
from .compat import CACHE_NAME, is_returned
from .record import Record
from .sequences import Proposal, Sequences
from .verification import Verification

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
