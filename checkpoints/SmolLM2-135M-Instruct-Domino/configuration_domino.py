# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is a Domino draft? Its configuration, readable by every engine that knows the DFlash layout."""

import base64
import binascii
from collections.abc import Iterable
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Fields that public checkpoints keep in the nested `dflash_config`. Some engines read them there, some at the top
# level: we keep them as plain attributes, write both places, and refuse a file whose two places disagree.
NESTED_FIELDS = (
    "mask_token_id",
    "target_layer_ids",
    "projector_type",
    "pure_draft_prefix_len",
    "shift_label",
    "gru_hidden_dim",
    "emb_dim",
    "sliding_window_rule",
)
# Read in either place, written at the top level only.
_READ_NESTED = (*NESTED_FIELDS, "block_size")
HEAD_FIELDS = ("projector_type", "pure_draft_prefix_len", "shift_label", "gru_hidden_dim", "emb_dim")

_DEFAULTS = {"block_size": 16, "shift_label": False, "pure_draft_prefix_len": 0, "sliding_window_rule": "causal"}

AUTO_MAP = {"AutoConfig": "configuration_domino.DominoConfig", "AutoModel": "modeling_domino.DominoDraftModel"}


@strict
class DominoConfig(Qwen3Config):
    r"""
    Configuration of a [`DominoDraftModel`]: the Qwen3 fields describe the backbone's layers, the fields below the way
    a block is drafted. Official Domino checkpoints (nested `dflash_config`), DFlash checkpoints (no head) and folders
    written by this package are all read.

    Args:
        block_size (`int`, defaults to 16):
            Positions that one backbone pass covers, the anchor included (B in the paper).
        num_target_layers (`int`, *optional*):
            Number of decoder layers of the target.
        target_layer_ids (`list[int]`, *optional*):
            Zero-based target decoder layers whose raw outputs are the context features, in order of concatenation.
        mask_token_id (`int`, *optional*):
            Id that fills the block after the anchor; it must have a row in the target's embedding.
        projector_type (`"domino"` or `None`, *optional*):
            `"domino"` for a draft with the head, `None` for a pure DFlash draft.
        shift_label (`bool`, defaults to `False`):
            `True`: block offset k predicts the token at anchor + 1 + k. `False`: at anchor + k, offset 0 is unused.
        pure_draft_prefix_len (`int`, defaults to 0):
            How many first proposals of a block take the base logits uncorrected.
        gru_hidden_dim (`int`, *optional*):
            Width of the prefix state (G).
        emb_dim (`int`, *optional*):
            Width of the head's bottleneck (E).
        sliding_window_rule (`"causal"`, `"symmetric"` or `"none"`, defaults to `"causal"`):
            What a `sliding_attention` layer sees. `"causal"`: keys at most `sliding_window - 1` before the query,
            none after it (SpecForge's training, SGLang's serving). `"symmetric"`: keys nearer than `sliding_window`
            on either side (NeMo). `"none"`: the window is ignored (SpecForge's decode script).
        shortlist (`str`, *optional*):
            The only ids that the draft may propose, which makes its output head cheaper; the target may still choose
            any. A bit for each id of the vocabulary, lowest first, in base64: see `shortlist_ids` and `set_shortlist`.
            Other engines propose from the whole vocabulary.
        candidate_pool_size (`int`, *optional*):
            At each position the head corrects only so many ids, the likeliest by the base logits, which makes it
            cheaper where the vocabulary is large; another id is then not proposed there. Default: all are corrected.
        context_features (`"layer_output"`, defaults to `"layer_output"`):
            Stated for other engines: features are the raw outputs of the decoder layers, also for the last layer,
            whose entry in transformers' `hidden_states` is taken after the final norm instead.

    Raises:
        ValueError: when the top level and `dflash_config` disagree; the message names both values.
        huggingface_hub.errors.StrictDataclassError: when a field has the wrong type, or fields do not fit together.

    Source: arXiv 2605.29707; field names as published with the checkpoints of the paper's authors and of DFlash.
    """

    num_target_layers: int | None = None
    # `None` below means "not set here": the value may stand in `dflash_config`, else `_DEFAULTS` fills it in.
    block_size: int | None = None
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    projector_type: Literal["domino"] | None = None
    shift_label: bool | None = None
    pure_draft_prefix_len: int | None = None
    gru_hidden_dim: int | None = None
    emb_dim: int | None = None
    sliding_window_rule: Literal["causal", "symmetric", "none"] | None = None
    shortlist: str | None = None
    candidate_pool_size: int | None = None
    context_features: Literal["layer_output"] = "layer_output"

    def __post_init__(self, **kwargs):
        self._merge_nested(kwargs.pop("dflash_config", None) or {})
        # Qwen3Config forgets the window unless this switch is on; a file may list sliding layers without it.
        if self.layer_types is not None and "sliding_attention" in self.layer_types:
            self.use_sliding_window = True
        super().__post_init__(**kwargs)

    def _merge_nested(self, nested: dict[str, Any]):
        """Take over the fields of `dflash_config`; raise where the top level says otherwise."""
        if not isinstance(nested, dict):
            raise ValueError(f"`dflash_config` is {nested!r}, but must be a dict of {list(_READ_NESTED)}.")
        for name in _READ_NESTED:
            flat, inner = getattr(self, name), nested.get(name)
            if flat is not None and inner is not None and flat != inner:
                raise ValueError(
                    f"Contradiction in the config: `{name}` is {flat!r} at the top level but {inner!r} in "
                    "`dflash_config`. Engines read either place; make the two equal."
                )
            value = inner if flat is None else flat
            setattr(self, name, _DEFAULTS.get(name) if value is None else value)
        if unknown := sorted(set(nested) - set(_READ_NESTED)):
            logger.warning(
                f"Ignoring unknown fields of `dflash_config`: {unknown}. Known are {list(_READ_NESTED)}; "
                "check the spelling, a misspelt field silently takes its default."
            )

    @property
    def has_head(self) -> bool:
        """Whether the draft has the Domino head."""
        return self.projector_type == "domino"

    @property
    def shortlist_ids(self) -> list[int] | None:
        """
        The ids that the draft may propose, in order; `None` for the whole vocabulary.

        Raises:
            ValueError: when `shortlist` is not base64 of a bit for each id, or names no id of the vocabulary.
        """
        if self.shortlist is None:
            return None
        try:
            packed = base64.b64decode(self.shortlist, validate=True)
        except binascii.Error as error:
            raise ValueError(f"`shortlist` is not base64 ({error}): remove it, or call `set_shortlist`.") from error
        ids = [8 * place + bit for place, byte in enumerate(packed) if byte for bit in range(8) if byte >> bit & 1]
        if len(packed) != -(-self.vocab_size // 8) or not ids or ids[-1] >= self.vocab_size:
            raise ValueError(
                f"`shortlist` holds {8 * len(packed)} bits, {len(ids)} of them set, for a `vocab_size` of "
                f"{self.vocab_size}: it was made for another vocabulary. Remove it, or call `set_shortlist`."
            )
        return ids

    def set_shortlist(self, token_ids: Iterable[int] | None):
        """
        Let the draft propose only `token_ids`; `None` for the whole vocabulary.

        Raises:
            ValueError: when there is none, or one outside the vocabulary.
        """
        if token_ids is None:
            self.shortlist = None
            return
        ids = sorted({int(token_id) for token_id in token_ids})
        if not ids or ids[0] < 0 or ids[-1] >= self.vocab_size:
            found = f"ids from {ids[0]} to {ids[-1]}" if ids else "no id"
            raise ValueError(f"A shortlist needs ids within 0..{self.vocab_size - 1}, but {found} came.")
        packed = bytearray(-(-self.vocab_size // 8))
        for token_id in ids:
            packed[token_id // 8] |= 1 << token_id % 8
        self.shortlist = base64.b64encode(packed).decode()

    def validate_draft(self):
        """Cross-field rules of a draft; runs with the other validators when the config is made."""
        size = self.block_size or 0
        if size < 2:
            raise ValueError(f"`block_size` is {self.block_size}, but a block holds the anchor and at least one mask.")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, which has no row in an embedding of `vocab_size` "
                f"{self.vocab_size}. Choose an id below it that text never uses; never resize the target."
            )
        if self.target_layer_ids is not None:
            if not self.target_layer_ids:
                raise ValueError("`target_layer_ids` is empty: name at least one target layer to take features from.")
            depth = self.num_target_layers
            bad = [i for i in self.target_layer_ids if i < 0 or (depth is not None and i >= depth)]
            if bad:
                raise ValueError(
                    f"`target_layer_ids` names layers {bad}, but the target has `num_target_layers` = {depth}: "
                    "ids are zero-based decoder layers."
                )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(self.layer_types)} entries for `num_hidden_layers` = {self.num_hidden_layers}."
            )
        if unknown := sorted(set(self.layer_types) - {"full_attention", "sliding_attention"}):
            raise ValueError(
                f"`layer_types` holds {unknown}: a draft's layers are 'full_attention' or 'sliding_attention'."
            )
        self.shortlist_ids  # noqa: B018 - raises where it cannot be read
        if self.candidate_pool_size is not None and self.candidate_pool_size < 1:
            raise ValueError(
                f"`candidate_pool_size` is {self.candidate_pool_size}: give how many ids the head may choose among, or "
                "leave it out for all."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                f"`layer_types` holds sliding_attention but `sliding_window` is {self.sliding_window}: give its width."
            )
        # The draft's layers share one rotation over the whole head: another would run, and rotate wrongly.
        rope = self.rope_parameters or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(
                f"`rope_parameters` names a rotation for each layer type ({sorted(rope)}): give the one that the draft "
                "was trained with."
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"`partial_rotary_factor` is {rope['partial_rotary_factor']}, but a draft rotates whole heads: leave "
                "it out, whatever the target's is."
            )
        if self.has_head:
            widths = {name: getattr(self, name) for name in ("gru_hidden_dim", "emb_dim")}
            if bad_widths := {name: width for name, width in widths.items() if not width or width < 0}:
                raise ValueError(
                    f"`projector_type` is 'domino' but the head's widths are {bad_widths}: give positive numbers."
                )
            if not 0 <= (self.pure_draft_prefix_len or 0) <= size:
                raise ValueError(
                    f"`pure_draft_prefix_len` is {self.pure_draft_prefix_len}, outside 0..`block_size` = "
                    f"{self.block_size}: a block has no more proposals than that."
                )

    def require_complete(self) -> list[int]:
        """
        Raise unless everything is known that a draft cannot guess: `target_layer_ids`, `mask_token_id`.

        Returns:
            `target_layer_ids`.

        Raises:
            ValueError: naming the fields that are missing.
        """
        missing = [name for name in ("target_layer_ids", "mask_token_id") if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"The draft's config lacks {missing}. A guess would run and quietly cost acceptance: give them, "
                "at the top level or in `dflash_config`."
            )
        return list(self.target_layer_ids or ())

    def to_dict(self) -> dict[str, Any]:
        """The config in both layouts at once (flat and `dflash_config`), with the names that engines resolve."""
        output = super().to_dict()
        output["model_type"] = "qwen3"
        # SGLang resolves the draft by this name; transformers goes by `auto_map`.
        output["architectures"] = ["DFlashDraftModel"]
        # A config loaded from the Hub carries the repository's name in here; a saved folder must name its own files.
        output["auto_map"] = dict(AUTO_MAP)
        if "sliding_attention" not in self.layer_types:
            output.pop("sliding_window_rule")
        for name in ("shortlist", "candidate_pool_size"):
            if output[name] is None:
                output.pop(name)
        if not self.has_head:
            output = {k: v for k, v in output.items() if k not in HEAD_FIELDS or k == "shift_label"}
        output["dflash_config"] = {k: output[k] for k in NESTED_FIELDS if output.get(k) is not None}
        # Engines on transformers 4 read the rotary settings under their old names.
        rope = dict(output.get("rope_parameters") or {})
        output["rope_theta"] = rope.pop("rope_theta", None)
        if rope.get("rope_type", "default") != "default":
            output["rope_scaling"] = rope
        return output


__all__ = ["DominoConfig"]
