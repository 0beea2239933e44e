# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Train a draft for SmolLM2-135M-Instruct on text that this target wrote: the recipe of the embedded default.

    python examples/train_smollm2.py --rows chat.jsonl --features_dir runs/features --output_dir runs/draft \
        --max_steps 6000 --learning_rate 1e-3 --bf16 --use_cpu

`--rows` are files of `{"messages": [...], "finished": bool}` rows written by the target itself. Features are cached
once (the size is printed first); a killed run goes on with `--resume_from_checkpoint`. Every `--eval_every`-th row is
held out. Expect about 1 s per step of 8 rows on 2 cores with bf16 matrix units.
"""

import logging
import time
from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser, set_seed
from transformers.trainer_utils import get_last_checkpoint

from domino_spec import DominoConfig, DominoDraftModel
from domino_spec.checkpoints import load_default_target
from domino_spec.generation.context import TargetParts
from domino_spec.training.arguments import DominoTrainingArguments
from domino_spec.training.data import encode_chat, read_chat_rows
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
    new_head_on: str | None = field(
        default=None, metadata={"help": "Folder of a trained draft: keep its backbone frozen and train a new head."}
    )


def make_draft(target, recipe: RecipeArguments) -> DominoDraftModel:
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


def with_new_head(folder: str) -> DominoDraftModel:
    """The draft in `folder` with its backbone frozen and its head as before training."""
    draft = DominoDraftModel.from_pretrained(folder, dtype=torch.float32)
    draft.requires_grad_(False)
    for module in (draft.prefix_gru, draft.embed_proj):
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        module.requires_grad_(True)
    # The correction starts at zero, so that training begins from the base logits.
    torch.nn.init.zeros_(draft.embed_proj[2].weight)
    return draft


def main():
    logging.basicConfig(level=logging.INFO)
    recipe, args = HfArgumentParser((RecipeArguments, DominoTrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    target, tokenizer = load_default_target(dtype=torch.bfloat16)
    target.requires_grad_(False)

    train_folders, eval_folders = [], []
    for path in recipe.rows:
        rows = [
            encode_chat(tokenizer, row["messages"], recipe.max_length, row.get("finished", True))
            for row in read_chat_rows(path)
        ]
        name = f"{recipe.features_dir}/{path.split('/')[-1].removesuffix('.jsonl')}"
        for split, chosen, folders in (
            ("eval", rows[:: recipe.eval_every], eval_folders),
            ("train", [row for i, row in enumerate(rows) if i % recipe.eval_every], train_folders),
        ):
            size = feature_bytes(chosen, target.config.hidden_size, len(recipe.target_layer_ids))
            logger.info(f"{path}: {len(chosen)} {split} rows, features take {size / 1e9:.2f} GB")
            cache_features(target, chosen, recipe.target_layer_ids, f"{name}/{split}")
            folders.append(f"{name}/{split}")

    trainer = DominoTrainer(
        model=make_draft(target, recipe) if recipe.new_head_on is None else with_new_head(recipe.new_head_on),
        target=TargetParts(target),
        args=args,
        train_dataset=FeatureDataset(*train_folders),
        eval_dataset=FeatureDataset(*eval_folders),
    )
    start, cpu = time.time(), time.process_time()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint and get_last_checkpoint(args.output_dir))
    logger.info(f"trained for {(time.time() - start) / 60:.1f} min, {(time.process_time() - cpu) / 60:.1f} CPU min")
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
