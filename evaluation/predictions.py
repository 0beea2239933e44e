# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a draft make of answers that the target wrote, as it is configured or with one thing changed?

Losses, not hits, since they tell more; with the error over answers, since blocks of one answer resemble one another.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_domino import DominoConfig
from ..generation.context import TargetParts
from ..modeling_domino import DominoDraftModel, DominoRotaryEmbedding
from ..training.blocks import build_blocks, sample_anchors
from ..training.features import target_features
from ..training.objective import domino_loss, teacher_forced_hidden
from .benchmark import encode

# What a clear difference is: in nats a proposal, and in standard errors where the best of many settings is picked and
# where one question is asked.
MARGIN = 0.05
OF_MANY, OF_ONE = 3.0, 2.0

_ANCHORS = 48


class Gain(NamedTuple):
    """A mean difference over answers, and its standard error."""

    mean: float
    error: float

    def is_clear(self, errors: float = OF_ONE) -> bool:
        """Whether it is worth a word, and is no noise by so many standard errors; false for NaN."""
        return self.mean >= MARGIN and self.mean >= errors * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.error:.2f}"


def gain(worse: Tensor, better: Tensor) -> Gain:
    """By how much `better` is lower, of numbers of the same answers `[R]`."""
    difference = (worse - better).double()
    return Gain(difference.mean().item(), difference.std().item() / len(difference) ** 0.5)


class Answer(NamedTuple):
    """Tokens of a prompt and its answer `[S]`, and how many of them are the prompt's."""

    ids: Tensor
    prompt_length: int


@torch.no_grad()
def write_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    template: Mapping[str, Any],
) -> list[Answer]:
    """The target's own greedy answers, written in one batch. `template` are variables for the chat template."""
    encoded = [encode(tokenizer, prompt, target.device, **template)["input_ids"][0] for prompt in prompts]
    width = max(map(len, encoded))
    ends = target.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, device=target.device).long().flatten()
    written = target.generate(
        input_ids=torch.stack([F.pad(ids, (width - len(ids), 0)) for ids in encoded]),
        attention_mask=torch.stack([F.pad(torch.ones_like(ids), (width - len(ids), 0)) for ids in encoded]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=int(ends[0]) if len(ends) else 0,
    )[:, width:]
    answers = []
    for prompt, row in zip(encoded, written, strict=True):
        stops = torch.isin(row, ends).nonzero()
        answers.append(Answer(torch.cat([prompt, row[: stops[0] + 1] if len(stops) else row]), len(prompt)))
    return answers


@dataclass(frozen=True)
class Setting:
    """What can be wrong in a draft's config without a word; the names are the config's own."""

    target_layer_ids: tuple[int, ...]
    rope_theta: float
    mask_token_id: int
    shift_label: bool

    @classmethod
    def of(cls, config: DominoConfig) -> "Setting":
        """What a config says."""
        layer_ids, rope = tuple(config.require_complete()), config.rope_parameters
        return cls(layer_ids, float(rope["rope_theta"]), int(config.mask_token_id or 0), bool(config.shift_label))

    def difference(self, other: "Setting") -> tuple[str, str, str]:
        """The field in which two settings differ, and its value here and there, as JSON."""
        name = next(name for name, value in vars(self).items() if value != getattr(other, name))
        return name, json.dumps(getattr(self, name)), json.dumps(getattr(other, name))


class Measured(NamedTuple):
    """Of each answer `[R]`: mean loss in nats a proposal and mean acceptance length, without the head and with it."""

    base_loss: Tensor
    loss: Tensor
    base_acceptance: Tensor
    acceptance: Tensor


class Predictions:
    """
    Answers with the target's hidden states, which are read once, for a draft to predict as often as one likes.

    Args:
        target, draft: the pair.
        answers: of the target, each longer than a block.
        on_pass: called after each measurement, for a progress bar.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DominoDraftModel,
        answers: Sequence[Answer],
        on_pass: Callable[[], Any] = lambda: None,
    ):
        self.draft, self.answers, self.on_pass = draft, answers, on_pass
        self.parts = TargetParts(target)
        near = {i + step for i in draft.config.require_complete() for step in (-1, 0, 1)}
        self.layers = sorted(near & set(range(len(self.parts.layers))))
        self.occurring = torch.cat([answer.ids for answer in answers]).unique()
        listed = draft.config.shortlist_ids
        self.proposable = None if listed is None else torch.tensor(listed, device=self.occurring.device)
        self.features = []
        for answer in answers:
            found = target_features(target, self.parts, answer.ids[None], self.layers)["context_hidden_states"]
            self.features.append(found[0].unflatten(-1, (len(self.layers), -1)))

    @torch.no_grad()
    def measure(
        self,
        setting: Setting,
        draft: DominoDraftModel | None = None,
        foreign: Literal["context", "prefix"] | None = None,
        every_id: bool = False,
    ) -> Measured:
        """
        Predicts the answers, teacher-forced, in one small pass each.

        Args:
            setting: what the draft's config and rotation are set to, and remain at.
            draft: the same draft in another dtype, instead of the pair's.
            foreign: take the context features of another answer, or the head's tokens of another block.
            every_id: score all ids that the draft may propose, as generation does. Those that occur in the answers are
                enough to compare losses, and far quicker.
        """
        draft = draft or self.draft
        config, device = draft.config, self.occurring.device
        block_size = int(config.block_size or 0)
        config.mask_token_id, config.shift_label = setting.mask_token_id, setting.shift_label
        if config.rope_parameters["rope_theta"] != setting.rope_theta:
            config.rope_parameters = {**config.rope_parameters, "rope_theta": setting.rope_theta}
            draft.rotary_emb = DominoRotaryEmbedding(config).to(device)
        picked = [self.layers.index(i) for i in setting.target_layer_ids]
        results = []
        for number, (ids, prompt_length) in enumerate(self.answers):
            places = torch.arange(len(ids), device=device)
            supervised = (places >= prompt_length)[None]
            # Of blocks that run past the end, what is not there would count as wrong.
            whole = supervised & (places < len(ids) - block_size)
            anchors, keep = (t.to(device) for t in sample_anchors(whole, _ANCHORS, [number]))
            blocks = build_blocks(ids[None], supervised, anchors, keep, config, loss_decay_gamma=None)
            if foreign == "prefix":
                blocks.prefix_ids = blocks.prefix_ids.roll(1, dims=1)
            features = self.features[(number + (foreign == "context")) % len(self.features)]
            context = features[places % len(features)][:, picked].flatten(-2)
            hidden = teacher_forced_hidden(draft, self.parts, blocks, anchors, context[None])
            output = domino_loss(
                draft, self.parts, blocks, hidden, 0.0, self.proposable if every_id else self.occurring
            )
            lengths = [output.sums[name] / output.counts[name] for name in ("base_accept_len", "accept_len")]
            results.append(torch.stack([output.base_loss, output.final_loss, *lengths]).cpu())
        self.on_pass()
        return Measured(*torch.stack(results, dim=1))

    def worth_of_context(self, setting: Setting, measured: Measured) -> Gain:
        """How much more an answer's own features tell the draft than those of another answer."""
        return gain(self.measure(setting, foreign="context").base_loss, measured.base_loss)

    def worth_of_prefix(self, setting: Setting, measured: Measured) -> Gain:
        """How much more the tokens of the block tell the head than those of another block."""
        return gain(self.measure(setting, foreign="prefix").loss, measured.loss)
