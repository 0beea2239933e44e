# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Train a draft for SmolLM2-135M-Instruct on text that this target wrote: the recipe of the embedded default.

    python examples/train_smollm2.py --rows chat.jsonl --features_dir runs/features --output_dir runs/draft \
        --do_train --do_eval --max_steps 6000 --learning_rate 1e-3 --bf16 --use_cpu
    python examples/train_smollm2.py --rows held_out.jsonl --eval_every 1 --features_dir runs/features \
        --output_dir runs/eval --start_from runs/draft --do_eval --bf16 --use_cpu

`--rows` are files of `{"messages": [...], "finished": bool}` rows written by the target itself. Features are cached
once (the size is printed first); a killed run goes on with `--resume_from_checkpoint`. Every `--eval_every`-th row is
held out, and `--do_eval` measures the draft on those, file by file. Expect about 0.7 s per step of 4 rows with 64
anchors on 2 cores with bf16 matrix units.

The embedded draft was trained in two stages, each with `--per_device_train_batch_size 4 --num_anchors 64
--lr_scheduler_type cosine --adam_beta2 0.95 --loss_decay_gamma 4 --shortlist_size 8192 --hidden_loss_weight 1` and
1. `--learning_rate 1e-3 --max_steps 6500`: base and head from the target's own layers;
2. `--start_from STAGE1 --learning_rate 4e-4 --max_steps 1300 --lambda_base_decay_ratio 1 --head_scale 0.7`: the base
   learns on, which the head alone, by then at home in the training text, no longer makes it do. A head that knows its
   text by heart is too sure of itself elsewhere, so its correction is shrunk by what the held-out rows prefer.
"""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import HfArgumentParser, set_seed
from transformers.trainer_utils import get_last_checkpoint

from domino_spec import DominoConfig, DominoDraftModel
from domino_spec.checkpoints import load_default_target
from domino_spec.training.arguments import DominoTrainingArguments
from domino_spec.training.data import load_rows
from domino_spec.training.features import FeatureDataset, cache_features, feature_bytes
from domino_spec.training.initialization import initialize_from_target
from domino_spec.training.trainer import DominoTrainer

logger = logging.getLogger(__name__)


@dataclass
class RecipeArguments:
    rows: list[str] = field(metadata={"help": "jsonl files written by the target."})
    features_dir: str = field(metadata={"help": "Where features are cached, one folder per file."})
    max_length: int = field(default=512, metadata={"help": "Tokens kept of a row."})
    eval_every: int = field(default=40, metadata={"help": "Hold out each n-th row."})
    target_layer_ids: list[int] = field(default_factory=lambda: [3, 9, 16, 22, 28])
    source_layers: list[int] = field(default_factory=lambda: [28, 29])
    output_damping: float = field(default=0.5)
    block_size: int = field(default=5)
    gru_hidden_dim: int = field(default=256)
    emb_dim: int = field(default=64)
    start_from: str | None = field(
        default=None, metadata={"help": "Folder of a draft to start from, instead of the target's own layers."}
    )
    new_head: bool = field(
        default=False, metadata={"help": "With --start_from: keep the backbone frozen and train a new head."}
    )
    head_scale: float = field(default=1.0, metadata={"help": "After training, multiply the head's correction by this."})

    def __post_init__(self):
        if self.new_head and self.start_from is None:
            raise ValueError("`new_head` needs the backbone of a trained draft: name its folder with `start_from`.")


def new_draft(target, recipe: RecipeArguments) -> DominoDraftModel:
    """A draft of the target's own layer shape, started from its layers."""
    config = target.config
    draft = DominoDraftModel(
        DominoConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=len(recipe.source_layers),
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
            num_target_layers=config.num_hidden_layers,
            # By these a pipeline tells that target and draft share a tokenizer.
            **{name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            target_layer_ids=recipe.target_layer_ids,
            block_size=recipe.block_size,
            # <reponame>: a reserved token that chat text never holds.
            mask_token_id=4,
            projector_type="domino",
            shift_label=True,
            pure_draft_prefix_len=1,
            gru_hidden_dim=recipe.gru_hidden_dim,
            emb_dim=recipe.emb_dim,
        )
    )
    initialize_from_target(draft, target, recipe.source_layers, recipe.output_damping)
    return draft


def renew_head(draft: DominoDraftModel):
    """Freeze the backbone and put the head back to where training begins: no correction."""
    draft.requires_grad_(False)
    for module in (draft.prefix_gru, draft.embed_proj):
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        module.requires_grad_(True)
    torch.nn.init.zeros_(draft.embed_proj[2].weight)


def main():
    logging.basicConfig(level=logging.INFO)
    recipe, args = HfArgumentParser((RecipeArguments, DominoTrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    target, tokenizer = load_default_target(dtype=torch.bfloat16)
    target.requires_grad_(False)

    train_folders, eval_datasets = [], {}
    for path in recipe.rows:
        rows, report = load_rows(path, tokenizer, recipe.max_length, target.config.vocab_size)
        logger.info(report)
        splits = {"eval": rows[:: recipe.eval_every]}
        if args.do_train:
            splits["train"] = [row for i, row in enumerate(rows) if i % recipe.eval_every]
        name = Path(path).stem
        for split, chosen in splits.items():
            folder = f"{recipe.features_dir}/{name}/{split}"
            size = feature_bytes(chosen, target.config.hidden_size, len(recipe.target_layer_ids))
            logger.info(f"{path}: {len(chosen)} {split} rows, features take {size / 1e9:.2f} GB")
            cache_features(target, chosen, recipe.target_layer_ids, folder)
            if split == "train":
                train_folders.append(folder)
            else:
                eval_datasets[name] = FeatureDataset(folder)

    if recipe.start_from is None:
        draft = new_draft(target, recipe)
    else:
        draft = DominoDraftModel.from_pretrained(recipe.start_from, dtype=torch.float32)
    if recipe.new_head:
        renew_head(draft)
    trainer = DominoTrainer(
        model=draft,
        target=target,
        args=args,
        train_dataset=FeatureDataset(*train_folders) if args.do_train else None,
        eval_dataset=eval_datasets,
    )
    if args.do_train:
        start, cpu = time.time(), time.process_time()
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint and get_last_checkpoint(args.output_dir))
        minutes = (time.time() - start) / 60, (time.process_time() - cpu) / 60
        logger.info(f"trained for {minutes[0]:.1f} min, {minutes[1]:.1f} CPU min")
        with torch.no_grad():
            draft.embed_proj[2].weight.mul_(recipe.head_scale)
        trainer.save_model()
    if args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
