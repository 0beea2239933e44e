# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What can be set about a training run, beyond transformers' own arguments."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

# Lies beside trained weights and says how they came about; the model card reads it.
RECORD = "training.json"


@dataclass
class DominoTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with the settings of the Domino objective. Defaults are the paper's.

    Raises:
        ValueError: when a value is outside its range; the message names it.
    """

    num_anchors: int = field(default=512, metadata={"help": "Blocks per row and step, at most."})
    loss_decay_gamma: float | None = field(
        default=7.0, metadata={"help": "Scale of the position decay in offsets (7 / 5 / 4 for B 16 / 10 / 8)."}
    )
    lambda_base_start: float = field(default=1.0, metadata={"help": "Base weight at the first step."})
    lambda_base_decay_ratio: float | None = field(
        default=0.5, metadata={"help": "Share of the run over which the base weight falls to 0; null keeps it."}
    )
    hidden_loss_weight: float = field(
        default=0.0,
        metadata={"help": "Weight of 1 - cosine between draft hidden and the target's last hidden state; 0 is off."},
    )
    distillation_weight: float = field(
        default=0.0,
        metadata={"help": "Share of the loss taken with the target's distribution instead of its token; 0 is off."},
    )
    dpace_alpha: float | None = field(
        default=None,
        metadata={
            "help": "Weigh offsets by the draft's own confidence (D-PACE, 0.5 in its paper) instead of the position "
            "decay; null is off."
        },
    )
    shortlist_size: int | None = field(
        default=None,
        metadata={
            "help": "Score only so many ids, those supervised most often; 0 scores the whole vocabulary, null the "
            "draft's own shortlist, if it has one."
        },
    )
    keep_shortlist: bool = field(
        default=False,
        metadata={
            "help": "Write the ids of `shortlist_size` into the draft, which then proposes no others; else its own "
            "list stays."
        },
    )
    pack_length: int | None = field(
        default=None,
        metadata={
            "help": "Pack rows of a batch into rows of at most so many tokens; null pads each. With a draft on "
            "flex_attention, on a GPU, packed rows cost what their blocks see."
        },
    )
    loss_chunk_size: int | None = field(
        default=1024,
        metadata={"help": "Positions whose vocabulary-wide logits exist at once; null for all, which is no faster."},
    )
    # Columns are tensors of our own, not arguments of the draft's forward.
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay false."})

    def __post_init__(self):
        super().__post_init__()
        if self.ddp_find_unused_parameters is None:
            # The loss always hangs on every parameter; looking for others costs a walk through the graph each step.
            self.ddp_find_unused_parameters = False
        for name, low, high in (
            ("num_anchors", 1, None),
            ("lambda_base_start", 0, 1),
            ("lambda_base_decay_ratio", 0, 1),
            ("hidden_loss_weight", 0, None),
            ("distillation_weight", 0, 1),
            ("label_smoothing_factor", 0, 1),
            ("dpace_alpha", 0, 1),
        ):
            value = getattr(self, name)
            if value is not None and (value < low or (high is not None and value > high)):
                raise ValueError(f"`{name}` is {value}, outside {low}..{'' if high is None else high}.")
        for name, low in (("loss_chunk_size", 1), ("shortlist_size", 0), ("pack_length", 1)):
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"`{name}` is {value}: give {low} or more, or null.")
        if self.keep_shortlist and not self.shortlist_size:
            raise ValueError(
                f"`keep_shortlist` is true, but `shortlist_size` is {self.shortlist_size}, so that there is none to "
                "keep: give its size."
            )
        if self.loss_decay_gamma is not None and self.loss_decay_gamma <= 0:
            raise ValueError(f"`loss_decay_gamma` is {self.loss_decay_gamma}: give a positive scale, or null for none.")
        if self.dpace_alpha is not None and self.loss_decay_gamma is not None:
            raise ValueError(
                f"`dpace_alpha` ({self.dpace_alpha}) takes the place of the position decay: give it with "
                f"`loss_decay_gamma: null`, not {self.loss_decay_gamma}."
            )
