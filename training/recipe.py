# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""From a recipe to a trained draft.

    domino-spec train recipe.yaml
    domino-spec train recipe.yaml --learning_rate 3e-4 --output_dir runs/second
    accelerate launch -m domino_spec.training.recipe recipe.yaml

A recipe is a YAML file of the arguments below and of transformers' own `TrainingArguments`; the command line has the
last word. A run that was killed goes on with `--resume_from_checkpoint true`.
"""

import difflib
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from peft import get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoints import default_draft_path, load_default_target
from ..evaluation.benchmark import provenance
from ..modeling_domino import DominoDraftModel
from .adapters import PARTS, lora_config
from .arguments import RECORD, DominoTrainingArguments
from .data import load_rows
from .features import FeatureDataset, TokenDataset, cache_features, feature_bytes
from .initialization import draft_config_for, initialize_from_target, renew_head, with_head
from .trainer import DominoTrainer

logger = logging.getLogger(__name__)


@dataclass
class TargetArguments:
    """The frozen model that the draft is for."""

    target: str = field(
        default="default", metadata={"help": "Hub id or folder; `default` is the embedded draft's SmolLM2."}
    )
    target_dtype: str = field(default="bfloat16", metadata={"help": "Of the target's weights and passes."})
    target_attention: str | None = field(default=None, metadata={"help": "`attn_implementation` of the target."})


@dataclass
class DataArguments:
    """Conversations whose answers the target wrote, and the features it has for them."""

    train_data: list[str] = field(
        default_factory=list, metadata={"help": "jsonl or parquet files, or Hub ids, with a column `messages`."}
    )
    eval_data: list[str] = field(default_factory=list, metadata={"help": "The same, to measure on."})
    eval_every: int | None = field(default=None, metadata={"help": "Hold out each n-th row of the training data."})
    max_length: int = field(default=3072, metadata={"help": "Tokens kept of a row."})
    mask_reasoning: bool = field(
        default=False, metadata={"help": "Do not learn what stands between <think> and </think>."}
    )
    chat_template_kwargs: str | None = field(
        default=None,
        metadata={"help": 'JSON for the chat template, as at generation time: {"enable_thinking": false}.'},
    )
    features_dir: str | None = field(
        default=None,
        metadata={"help": "Cache the target's features here, once; without it the target reads each batch anew."},
    )


@dataclass
class DraftArguments:
    """Where the draft starts, and its shape."""

    start_from: str = field(
        default="target",
        metadata={"help": "`target` (its own layers), `default`, or a Hub id or folder of a Domino or DFlash draft."},
    )
    source_layers: list[int] = field(
        default_factory=list, metadata={"help": "Target layers to start from, one for each draft layer; default: last."}
    )
    output_damping: float = field(default=0.5, metadata={"help": "Factor on the output projections of these layers."})
    num_layers: int = field(default=5, metadata={"help": "Layers of a new draft."})
    num_target_layer_ids: int = field(default=5, metadata={"help": "Target layers to read, spread evenly."})
    target_layer_ids: list[int] = field(default_factory=list, metadata={"help": "Or just these."})
    block_size: int = field(default=16, metadata={"help": "Positions of a block."})
    shift_label: bool = field(
        default=True, metadata={"help": "Position k of a block predicts the token after the k-th; vLLM wants `false`."}
    )
    draft_attention: str | None = field(
        default=None, metadata={"help": "`attn_implementation` of the draft in training; flex_attention on GPUs."}
    )
    mask_token: str | None = field(
        default=None, metadata={"help": "Token, or id, that fills a block; one that text never holds."}
    )
    gru_hidden_dim: int = field(default=1024, metadata={"help": "Width of the head's prefix state."})
    emb_dim: int = field(default=256, metadata={"help": "Width of the head's bottleneck."})
    pure_draft_prefix_len: int = field(default=1, metadata={"help": "First proposals that the head does not correct."})
    freeze_backbone: bool = field(default=False, metadata={"help": "Train the head alone."})
    new_head: bool = field(default=False, metadata={"help": "Begin the head anew; a DFlash draft always does."})
    head_scale: float = field(default=1.0, metadata={"help": "After training, multiply the head's correction by this."})


@dataclass
class AdapterArguments:
    """LoRA on the draft, instead of training its own weights."""

    peft: str | None = field(default=None, metadata={"help": f"What to adapt: {', '.join(PARTS)}."})
    lora_r: int = field(default=16, metadata={"help": "Rank."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale, divided by the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "On what the adapters read."})


_CLASSES = (TargetArguments, DataArguments, DraftArguments, AdapterArguments, DominoTrainingArguments)


def _raise(message: str) -> NoReturn:
    # argparse would print a usage of two hundred lines.
    raise ValueError(f"{message} (see `domino-spec train --help`)")


def parse_recipe(argv: Sequence[str]) -> tuple[Any, ...]:
    """
    Arguments from an optional YAML file, which comes first, and from the command line, which has the last word.

    Raises:
        ValueError: when the file is no mapping, or a name in it is unknown; the message names it and what is meant.
    """
    parser = HfArgumentParser(_CLASSES, prog="domino-spec train", description=__doc__)
    parser.error = _raise
    # To measure only, say `--do_train false`.
    parser.set_defaults(do_train=True)
    argv = list(argv)
    if argv and not argv[0].startswith("-"):
        path = argv.pop(0)
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(recipe, dict):
            raise ValueError(f"{path} is not a recipe: it must hold `name: value` lines.")
        known = {action.dest for action in parser._actions}
        for name in recipe:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                raise ValueError(
                    f"{path} names {name!r}, which is unknown{f': do you mean {near[0]!r}?' if near else '.'}"
                )
        # Mappings reach the parser as the JSON that the command line would give.
        parser.set_defaults(**{k: json.dumps(v) if isinstance(v, dict) else v for k, v in recipe.items()})
        for action in parser._actions:
            action.required = action.required and action.dest not in recipe
    parsed = parser.parse_args_into_dataclasses(argv)
    data, draft, adapter = parsed[1:4]
    if not data.train_data and parsed[4].do_train:
        raise ValueError("`train_data` is empty: name at least one file or dataset to train on.")
    if adapter.peft is not None and draft.start_from == "target":
        raise ValueError(f"`peft` is {adapter.peft!r}, but a new draft has nothing to adapt yet: give `start_from`.")
    if adapter.peft is not None and draft.head_scale != 1.0:
        raise ValueError(
            f"`head_scale` is {draft.head_scale}, but an adapter leaves the draft's weights alone: scale the draft "
            "before."
        )
    sources = Counter(Path(source).stem for source in (*data.train_data, *data.eval_data))
    if doubled := [name for name, count in sources.items() if count > 1]:
        raise ValueError(
            f"`train_data` and `eval_data` name {', '.join(map(repr, doubled))} twice: results and features go by "
            "these names, so rename a file."
        )
    if draft.new_head and draft.start_from == "target":
        raise ValueError("`new_head` is set, but a draft started from the target has a new head anyway: leave it out.")
    return parsed


def checkpoint_to_resume(args: DominoTrainingArguments) -> str | None:
    """
    The checkpoint that `resume_from_checkpoint` means: a folder, or with `true` the last one in `output_dir`.

    Raises:
        ValueError: when there is none; beginning anew would overwrite what the caller wants to go on with.
    """
    asked = str(args.resume_from_checkpoint or "false")
    if asked.lower() not in ("true", "false"):
        return asked
    if asked.lower() == "false":
        return None
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if last is None:
        raise ValueError(
            f"`resume_from_checkpoint` is true, but {args.output_dir} (`output_dir`) holds no checkpoint: leave it out "
            "to begin, or name the folder."
        )
    return last


def load_target(arguments: TargetArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target and its tokenizer."""
    dtype = getattr(torch, arguments.target_dtype)
    if arguments.target == "default":
        target, tokenizer = load_default_target(dtype)
    else:
        options = {} if arguments.target_attention is None else {"attn_implementation": arguments.target_attention}
        target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype, **options).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    return target.requires_grad_(False), tokenizer


def make_draft(
    arguments: DraftArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> DominoDraftModel:
    """The draft that training starts from, in float32."""
    head = {name: getattr(arguments, name) for name in ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")}
    if arguments.start_from == "target":
        layers = arguments.source_layers
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        layers = layers or list(range(depth - arguments.num_layers, depth))
        config = draft_config_for(
            target,
            tokenizer,
            num_layers=len(layers),
            block_size=arguments.block_size,
            mask_token=arguments.mask_token,
            target_layer_ids=arguments.target_layer_ids or arguments.num_target_layer_ids,
            shift_label=arguments.shift_label,
            **head,
        )
        draft = DominoDraftModel(config)
        initialize_from_target(draft, target, layers, arguments.output_damping)
    else:
        path = default_draft_path() if arguments.start_from == "default" else arguments.start_from
        draft = DominoDraftModel.from_pretrained(path, dtype=torch.float32)
        draft.check_target(target)
        if not draft.config.has_head:
            draft = with_head(draft, **head)
        elif arguments.new_head:
            renew_head(draft)
    if arguments.draft_attention is not None:
        draft.set_attn_implementation(arguments.draft_attention)
    if arguments.freeze_backbone:
        draft.requires_grad_(False)
        for module in (draft.prefix_gru, draft.embed_proj):
            module.requires_grad_(True)
    return draft


def make_datasets(arguments: DataArguments, target, tokenizer, layer_ids: list[int], train: bool):
    """The training rows (or `None`), the rows held out by name of their source, and what the training rows come to."""
    kwargs = json.loads(arguments.chat_template_kwargs) if arguments.chat_template_kwargs else None
    config = target.config.get_text_config(decoder=True)

    def dataset(parts: dict[str, list]) -> FeatureDataset | TokenDataset:
        if arguments.features_dir is None:
            return TokenDataset([row for rows in parts.values() for row in rows])
        folders = [f"{arguments.features_dir}/{name}" for name in parts]
        size = sum(feature_bytes(rows, config.hidden_size, len(layer_ids)) for rows in parts.values())
        logger.info(f"features in {', '.join(folders)} take {size / 1e9:.2f} GB")
        for folder, rows in zip(folders, parts.values(), strict=True):
            cache_features(target, rows, layer_ids, folder)
        return FeatureDataset(*folders)

    trained: dict[str, list] = {}
    held_out: dict[str, Any] = {}
    record: list[dict[str, Any]] = []
    for split, sources in (("train", arguments.train_data), ("eval", arguments.eval_data)):
        for source in sources:
            rows, report = load_rows(
                source, tokenizer, arguments.max_length, config.vocab_size, arguments.mask_reasoning, kwargs
            )
            logger.info(f"{source}: {report}")
            name = Path(source).stem
            if split == "eval":
                held_out[name] = dataset({f"{name}/eval": rows})
                continue
            if arguments.eval_every:
                held_out[name] = dataset({f"{name}/eval": rows[:: arguments.eval_every]})
                rows = [row for i, row in enumerate(rows) if i % arguments.eval_every]
            trained[f"{name}/train"] = rows
            supervised = sum(sum(row.loss_mask) for row in rows)
            record.append({"source": Path(source).name, "rows": len(rows), "supervised_tokens": supervised})
    return dataset(trained) if train else None, held_out, record


def leave(trainer: DominoTrainer) -> None:
    """
    End the communication with the other processes, if there are any, and close the trackers.

    gloo's threads still run when a script just returns, which may abort it. They may also still wait for Python's lock,
    and whoever drops the last reference to their group waits for them: Python lets go of the lock to do so, but
    DistributedDataParallel does not, so its wrapper has to go first.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    trainer.accelerator.end_training()


def main(argv: Sequence[str] | None = None) -> int:
    """Train and measure as the recipe says; see the module's docstring."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    argv = sys.argv[1:] if argv is None else argv
    target_args, data_args, draft_args, adapter_args, args = parse_recipe(argv)
    set_seed(args.seed)
    target, tokenizer = load_target(target_args)
    target = target.to(args.device)
    draft = make_draft(draft_args, target, tokenizer)
    layer_ids = draft.config.require_complete()
    train_dataset, held_out, data = make_datasets(data_args, target, tokenizer, layer_ids, train=args.do_train)
    if adapter_args.peft is not None:
        settings = {name: getattr(adapter_args, name) for name in ("lora_alpha", "lora_dropout")}
        draft = get_peft_model(draft, lora_config(draft.config, adapter_args.peft, adapter_args.lora_r, **settings))
    trainer = DominoTrainer(
        model=draft, target=target, args=args, train_dataset=train_dataset, eval_dataset=held_out or None
    )
    if args.do_train:
        trainer.train(resume_from_checkpoint=checkpoint_to_resume(args))
        if draft_args.head_scale != 1.0:
            with torch.no_grad():
                draft.embed_proj[2].weight.mul_(draft_args.head_scale)
        # What is pushed with the model is there before it.
        trainer.save_state()
        if args.should_save:
            record = {
                **provenance("domino-spec train", argv),
                "target": target_args.target,
                "start_from": draft_args.start_from,
                "adapter": adapter_args.peft,
                "data": data,
                "steps": trainer.state.global_step,
                "epochs": trainer.state.epoch,
            }
            path = Path(args.output_dir) / RECORD
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        trainer.save_model()
    if held_out:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    leave(trainer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
