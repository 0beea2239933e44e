# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How is a draft made? transformers' Trainer, with the Domino objective."""

from collections import defaultdict

import torch
from torch.nn import functional as F
from transformers import Trainer

from ..generation.context import TargetParts
from .arguments import DominoTrainingArguments
from .blocks import Blocks, build_blocks, sample_anchors
from .features import FeatureDataset, collate_features
from .objective import BaseAnchoredCurriculum, ObjectiveOutput, domino_loss, teacher_forced_hidden


def hidden_loss(
    draft_hidden: torch.Tensor, last_hidden_state: torch.Tensor, blocks: Blocks, anchors: torch.LongTensor, shift: bool
) -> torch.Tensor:
    """
    Weighted mean of `1 - cos(draft hidden, target's last hidden state)` where both predict the same token.

    Args:
        draft_hidden (`torch.Tensor` of shape `[N, A, B, H]`): backbone output.
        last_hidden_state (`torch.Tensor` of shape `[N, S, H]`): the target's, after its final norm.
        blocks, anchors: of the batch.
        shift (`bool`): whether labels are shifted: offset k then stands beside the target at anchor + k.
    """
    counted = blocks.weights > 0
    offsets = torch.arange(counted.shape[-1], device=anchors.device) - (0 if shift else 1)
    positions = (anchors[..., None] + offsets).clamp(0, last_hidden_state.shape[1] - 1)
    rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None, None].expand_as(positions)
    wanted = last_hidden_state[rows[counted], positions[counted]]
    distance = 1 - F.cosine_similarity(draft_hidden[counted].float(), wanted.float(), dim=-1)
    weight = blocks.weights[counted]
    return (distance * weight).sum() / (weight.sum() + 1e-6)


class DominoTrainer(Trainer):
    """
    Trains a draft on cached features of a frozen target.

    Args:
        model (`DominoDraftModel`): the draft.
        target (`TargetParts`): embedding and output head of the target; never changed.
        args (`DominoTrainingArguments`): settings.
        train_dataset (`FeatureDataset`, *optional*): rows with features; `None` to evaluate only.
        eval_dataset (`FeatureDataset` or `dict`, *optional*): rows held out, or several such sets by name.
        kwargs: what [`~transformers.Trainer`] takes.
    """

    def __init__(
        self,
        model,
        target: TargetParts,
        args: DominoTrainingArguments,
        train_dataset: FeatureDataset | None = None,
        **kwargs,
    ):
        kwargs.setdefault("data_collator", collate_features)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self.target = target
        # Our loss is already a mean, so accumulated micro-batches are averaged by the Trainer.
        self.model_accepts_loss_kwargs = False
        self.curriculum = BaseAnchoredCurriculum(args.lambda_base_start, args.lambda_base_decay_ratio)
        self.token_ids = None
        if args.shortlist_size is not None and train_dataset is not None:
            counts = train_dataset.token_counts(model.config.vocab_size)
            self.token_ids = counts.topk(min(args.shortlist_size, len(counts))).indices.sort().values
            self.token_ids = self.token_ids.to(args.device)
        # Batches without a usable anchor: a zero contribution, counted.
        self.num_skipped = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)

    @property
    def lambda_base(self) -> float:
        """Base weight of the current optimiser step."""
        return self.curriculum.weight(self.state.global_step, self.state.max_steps)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        draft = self.accelerator.unwrap_model(model)
        # Evaluation must see the same blocks every time; training draws from the global generator, which checkpoints
        # restore.
        generator = None if model.training else torch.Generator().manual_seed(self.args.seed)
        anchors, keep = sample_anchors(inputs["loss_mask"].cpu(), self.args.num_anchors, generator)
        anchors, keep = anchors.to(inputs["input_ids"].device), keep.to(inputs["input_ids"].device)
        if anchors.shape[1] == 0:
            self.num_skipped += 1
            loss = sum(parameter.sum() for parameter in model.parameters()) * 0.0
            return (loss, {}) if return_outputs else loss

        blocks = build_blocks(
            inputs["input_ids"], inputs["loss_mask"], anchors, keep, draft.config, self.args.loss_decay_gamma
        )
        hidden = teacher_forced_hidden(
            model, self.target, blocks, anchors, inputs["context_hidden_states"], draft.config
        )
        output = domino_loss(draft, self.target, blocks, hidden, self.lambda_base, self.token_ids)
        loss = output.loss
        if self.args.hidden_loss_weight:
            pull = hidden_loss(hidden, inputs["last_hidden_state"], blocks, anchors, draft.config.shift_label)
            loss = loss + self.args.hidden_loss_weight * pull
            output.sums["hidden_loss"], output.counts["hidden_loss"] = pull.detach(), torch.tensor(1)
        self._keep_metrics(output)
        return (loss, {"objective": output}) if return_outputs else loss

    def _keep_metrics(self, output: ObjectiveOutput):
        for name in output.sums:
            self._sums[name] += output.sums[name].item()
            self._counts[name] += output.counts[name].item()
        for name, value in (("base_loss", output.base_loss), ("final_loss", output.final_loss)):
            self._sums[name] += value.item()
            self._counts[name] += 1

    def _take_metrics(self) -> dict[str, float]:
        metrics = {name: self._sums[name] / max(self._counts[name], 1) for name in self._sums}
        self._sums.clear()
        self._counts.clear()
        return metrics

    def log(self, logs, *args, **kwargs):
        # Sums are divided here, last, over all that was seen since the previous report.
        if "loss" in logs:
            logs = {**logs, **self._take_metrics(), "lambda_base": self.lambda_base}
        super().log(logs, *args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        training_sums, training_counts = dict(self._sums), dict(self._counts)
        self._take_metrics()
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        measured = {f"{metric_key_prefix}_{name}": value for name, value in self._take_metrics().items()}
        if measured:  # nothing of its own to report where several sets were evaluated, each by this method
            self.log(measured)
            metrics.update(measured)
        self._sums.update(training_sums)
        self._counts.update(training_counts)
        return metrics
