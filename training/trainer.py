# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How is a draft made? transformers' Trainer, with the Domino objective."""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer

from ..checkpoints import TARGET_HUB_ID, TARGET_NAME
from ..configuration_domino import DominoConfig
from ..generation.context import TargetParts
from ..serving.hub import model_card
from .arguments import DominoTrainingArguments
from .blocks import Blocks, build_blocks, pack_rows, sample_anchors
from .features import FeatureDataset, TokenDataset, collate_features, target_features, target_fingerprint
from .objective import (
    BaseAnchoredCurriculum,
    ObjectiveOptions,
    ObjectiveOutput,
    domino_loss,
    label_states,
    teacher_forced_hidden,
)


def hidden_loss(
    draft_hidden: torch.Tensor,
    target_hidden: torch.Tensor,
    blocks: Blocks,
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda total: total,
) -> torch.Tensor:
    """
    Weighted mean of `1 - cos(draft hidden, target's last hidden state)` where both predict the same token.

    Args:
        draft_hidden (`torch.Tensor` of shape `[N, A, B, H]`): backbone output.
        target_hidden (`torch.Tensor` of shape `[N, A, B, H]`): see [`label_states`].
        blocks: of the batch.
        reduce: makes of the sum of the weights here what to divide by, see [`domino_loss`].
    """
    counted = blocks.weights > 0
    distance = 1 - F.cosine_similarity(draft_hidden[counted].float(), target_hidden[counted].float(), dim=-1)
    weight = blocks.weights[counted]
    return (distance * weight).sum() / (reduce(weight.sum()) + 1e-6)


def model_config(model) -> DominoConfig:
    """The draft's config, whatever is wrapped around the draft."""
    while not hasattr(model, "config"):
        model = model.module
    return model.config


def _check_features(dataset, target: PreTrainedModel, layer_ids: list[int]):
    expected = {"target": target_fingerprint(target), "layer_ids": layer_ids}
    for folder, settings in getattr(dataset, "settings", {}).items():
        for name, value in expected.items():
            if settings.get(name) != value:
                raise ValueError(
                    f"The features in {folder} were made with {name} {settings.get(name)}, but this run has {value}: "
                    "make them anew in another folder."
                )


def _keep_shortlist(draft, config: DominoConfig, token_ids: torch.LongTensor):
    """Write the ids that are scored into the draft, and let its head leave all others alone."""
    config.set_shortlist(token_ids.tolist())
    if config.has_head:
        # Their rows are not trained, so they would answer to a changed bottleneck with noise, where an engine that
        # knows no shortlist reads them.
        left_out = torch.ones(config.vocab_size, dtype=torch.bool)
        left_out[token_ids.cpu()] = False
        with torch.no_grad():
            draft.embed_proj[2].weight[left_out] = 0


def _mix(*parts: object) -> int:
    """A seed that hangs on all `parts`."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class DominoTrainer(Trainer):
    """
    Trains a draft beside a frozen target. All that is not the objective is [`~transformers.Trainer`]'s.

    What a step sees hangs on the seed, the step and the rows alone: a run that was killed and resumed, or shared by
    several processes, takes the same steps.

    Args:
        model (`DominoDraftModel` or `PeftModel`): the draft.
        target (`PreTrainedModel`): lends embedding and output head, and reads rows that come without features; never
            changed.
        args (`DominoTrainingArguments`): settings.
        train_dataset (`FeatureDataset` or `TokenDataset`, *optional*): rows, with or without features; `None` to
            evaluate only.
        eval_dataset (the same, or a `dict` of them, *optional*): rows held out, or several such sets by name.
        kwargs: what [`~transformers.Trainer`] takes.

    Raises:
        ValueError: when features were made with another target, or for other layers than the draft's.
    """

    def __init__(
        self,
        model,
        target: PreTrainedModel,
        args: DominoTrainingArguments,
        train_dataset: FeatureDataset | TokenDataset | None = None,
        **kwargs,
    ):
        kwargs.setdefault("data_collator", collate_features)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        held_out = kwargs.get("eval_dataset") or {}
        for dataset in (train_dataset, *(held_out.values() if isinstance(held_out, dict) else [held_out])):
            _check_features(dataset, target, model.config.target_layer_ids)
        self.target, self.parts = target, TargetParts(target)
        # Our loss is already a mean, so accumulated micro-batches are averaged by the Trainer.
        self.model_accepts_loss_kwargs = False
        self.options = ObjectiveOptions(args.distillation_weight, args.label_smoothing_factor, args.dpace_alpha)
        self.curriculum = BaseAnchoredCurriculum(args.lambda_base_start, args.lambda_base_decay_ratio)
        config = model_config(model)
        self.token_ids = None
        if config.shortlist is not None and args.shortlist_size != 0:
            self.token_ids = torch.tensor(config.shortlist_ids, device=args.device)
        if args.shortlist_size and train_dataset is not None:
            counts = train_dataset.token_counts(model.config.vocab_size)
            self.token_ids = counts.topk(min(args.shortlist_size, len(counts))).indices.sort().values
            self.token_ids = self.token_ids.to(args.device)
            if args.keep_shortlist:
                if hasattr(model, "peft_config"):
                    raise ValueError(
                        "`keep_shortlist` is true, but an adapter leaves the draft's config alone: leave it out."
                    )
                _keep_shortlist(model, config, self.token_ids)
        # Batches without a usable anchor: a zero contribution, counted.
        self.num_skipped = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)

    @property
    def lambda_base(self) -> float:
        """Base weight of the current optimiser step."""
        return self.curriculum.weight(self.state.global_step, self.state.max_steps)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        args, config, device = self.args, model_config(model), inputs["input_ids"].device
        # Evaluation sees the same blocks every time.
        step = self.state.global_step if model.training else "evaluation"
        rows = inputs["row"].tolist()
        if "context_hidden_states" not in inputs:
            inputs |= target_features(self.target, self.parts, inputs["input_ids"], config.target_layer_ids)
        batch = {name: value.to(device) for name, value in inputs.items() if name not in ("row", "length")}
        seeds, documents = [_mix(args.seed, step, row) for row in rows], None
        if args.pack_length is not None:
            batch, documents, packs = pack_rows(batch, inputs["length"].tolist(), args.pack_length)
            seeds = [[seeds[row] for row in pack] for pack in packs]
        ids, mask = batch["input_ids"], batch["loss_mask"]
        anchors, keep = (t.to(device) for t in sample_anchors(mask, args.num_anchors, seeds, documents))
        self.num_skipped += int(not keep.any())
        blocks = build_blocks(ids, mask, anchors, keep, config, args.loss_decay_gamma, documents)

        # Gradients are averaged over processes, so dividing by the mean weight weighs their batches as one.
        mean_weight = partial(self.accelerator.reduce, reduction="mean")
        draft = self.accelerator.unwrap_model(model)

        states = None
        if args.hidden_loss_weight or args.distillation_weight:
            states = label_states(batch["last_hidden_state"], anchors, config.block_size, config.shift_label)

        def objective(hidden: torch.Tensor) -> tuple[torch.Tensor, ObjectiveOutput]:
            output = domino_loss(
                draft,
                self.parts,
                blocks,
                hidden,
                self.lambda_base,
                self.token_ids,
                args.loss_chunk_size,
                mean_weight,
                states,
                self.options,
            )
            loss = output.loss
            if args.hidden_loss_weight:
                pull = hidden_loss(hidden, states, blocks, mean_weight)
                loss = loss + args.hidden_loss_weight * pull
                output.sums["hidden_loss"], output.counts["hidden_loss"] = pull.detach(), torch.tensor(1)
            return loss, output

        with self.accelerator.autocast():
            loss, output = teacher_forced_hidden(
                model,
                self.parts,
                blocks,
                anchors,
                batch["context_hidden_states"],
                config,
                documents,
                objective,
            )
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
        names = sorted(self._sums)
        pairs = torch.tensor([[self._sums[name], self._counts[name]] for name in names], device=self.args.device)
        self._sums.clear()
        self._counts.clear()
        if names:
            pairs = self.accelerator.reduce(pairs, "sum")
        return {name: total / max(count, 1) for name, (total, count) in zip(names, pairs.tolist(), strict=True)}

    def create_model_card(self, license: str | None = None, **kwargs):
        """Write a draft's own card beside its weights, see [`serving.hub`]; an adapter gets the Trainer's."""
        folder = Path(self.args.output_dir)
        if not (folder / "config.json").is_file():
            super().create_model_card(license=license, **kwargs)
        elif self.is_world_process_zero():
            path = self.target.name_or_path
            base = TARGET_HUB_ID if Path(path).name.startswith(f"{TARGET_NAME}-") else path
            model_card(folder, base, self.hub_model_id, license=license).save(folder / "README.md")

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
