# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is this draft, and what does a round with it cost? From the two configs alone.

    domino-spec info default
    domino-spec info Huang2020/Qwen3-8B-Domino-b16 --target Qwen/Qwen3-8B

A round reads the target's weights once, the backbone and the output head once, and the Domino head once for every
proposal that it corrects. Where reading weights is what a pass costs (a GPU, a small batch), the bytes of a round over
the bytes of a plain step are the acceptance length from which the draft gains.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..checkpoints import default_draft_path, default_target_path
from ..configuration_domino import DominoConfig
from ..modeling_domino import DominoDraftModel
from .benchmark import InputError, naming
from .report import format_table


@dataclass(frozen=True)
class Cost:
    """
    What a draft weighs, in parameters and, in the dtype of the weights, in bytes.

    Attributes:
        backbone, head (`int`): parameters of the draft's two parts; `head` is 0 without one.
        draft_bytes (`int`): of both.
        cache_bytes_per_token (`int`): keys and values that the draft keeps for a token of context.
        corrected (`int`): proposals of a round that the head corrects.
        step_bytes (`int`, *optional*): weights of the target that a plain step reads: all but the embedding, of which
            it reads one row, unless the output head is the same table.
        round_bytes (`int`, *optional*): weights that a round reads.
    """

    backbone: int
    head: int
    draft_bytes: int
    cache_bytes_per_token: int
    corrected: int
    step_bytes: int | None = None
    round_bytes: int | None = None

    @property
    def break_even(self) -> float | None:
        """Acceptance length from which a round is worth more than it costs, where reading weights is the cost."""
        return None if self.step_bytes is None or self.round_bytes is None else self.round_bytes / self.step_bytes


def cost_of(config: DominoConfig, target_config: PretrainedConfig | None = None) -> Cost:
    """
    The cost of a draft, and of a round with a target if its config is given.

    Raises:
        ValueError: when the two do not belong together, or the draft's config is not complete.
    """
    with torch.device("meta"):
        draft = DominoDraftModel(config)
        target = None if target_config is None else AutoModelForCausalLM.from_config(target_config)
    sizes = {name: parameter.numel() for name, parameter in draft.named_parameters()}
    head = sum(size for name, size in sizes.items() if name.startswith(("prefix_gru.", "embed_proj.")))
    backbone, width = sum(sizes.values()) - head, _width(config.dtype)
    proposals = int(config.block_size or 0) - 1
    cost = Cost(
        backbone=backbone,
        head=head,
        draft_bytes=(backbone + head) * width,
        cache_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width,
        corrected=max(0, proposals - int(config.pure_draft_prefix_len or 0)) if head else 0,
    )
    if target is None or target_config is None:
        return cost
    draft.check_target(target)
    target.tie_weights()
    embedding, output_head = target.get_input_embeddings(), target.get_output_embeddings()
    read = sum(parameter.numel() for parameter in target.parameters())
    if output_head.weight is not embedding.weight:
        read -= embedding.weight.numel()
    target_width = _width(target_config.dtype)
    step = read * target_width
    # Of the two projections onto the vocabulary, only the rows of a shortlist are read.
    listed = 1.0 if config.shortlist_ids is None else len(config.shortlist_ids) / config.vocab_size
    unread = int((1 - listed) * sizes.get("embed_proj.2.weight", 0))
    drafting = int(listed * output_head.weight.numel()) * target_width
    drafting += (backbone + (head - unread) * cost.corrected) * width
    return replace(cost, step_bytes=step, round_bytes=step + drafting)


def _width(dtype: torch.dtype | str | None) -> int:
    """Bytes of a number; float32 where a config states no dtype."""
    return (getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32).itemsize


# ---- Command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec info`."""
    parser.add_argument("draft", help="`default` (the embedded one), a folder or a Hub id")
    parser.add_argument("--target", help="the same, to price a round (default: of the embedded draft, its own)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """
    Prints config, sizes and the cost of a round.

    Returns:
        0.

    Raises:
        InputError: if a config cannot be read, or the two models do not belong together.
    """
    name = args.target or ("default" if args.draft == "default" else None)
    with naming("draft", args.draft):
        path = default_draft_path() if args.draft == "default" else args.draft
        config = DominoConfig.from_pretrained(path)
        cost = cost_of(config)
    if name is not None:
        try:
            with naming("target", name):
                path = default_target_path() if name == "default" else name
                cost = cost_of(config, AutoConfig.from_pretrained(path, trust_remote_code=False))
        except InputError:
            # Not asked for, so the draft is shown without it.
            if args.target is not None:
                raise
    facts = _facts(config)
    if args.json:
        print(json.dumps({"config": facts, "cost": {**asdict(cost), "break_even": cost.break_even}}, indent=1))
        return 0
    rows = [[field, str(value)] for field, value in facts.items()]
    rows += [
        ["parameters", f"{(cost.backbone + cost.head) / 1e6:.1f} M"],
        ["  backbone", f"{cost.backbone / 1e6:.1f} M"],
        ["  head", f"{cost.head / 1e6:.1f} M" if cost.head else "none (a DFlash draft)"],
        ["memory", f"{cost.draft_bytes / 2**20:.1f} MiB"],
        ["  and per 1,000 tokens of context", f"{1000 * cost.cache_bytes_per_token / 2**20:.1f} MiB"],
    ]
    if cost.step_bytes is not None and cost.round_bytes is not None:
        rows += [
            ["a plain step reads", f"{cost.step_bytes / 2**20:.0f} MiB of weights"],
            ["a round reads", f"{cost.round_bytes / 2**20:.0f} MiB"],
            ["gains from an acceptance length of", f"{cost.break_even:.2f}"],
        ]
    print(format_table([str(args.draft), ""], rows))
    return 0


def _facts(config: DominoConfig) -> dict[str, Any]:
    """What makes one draft differ from another."""
    names = ["block_size", "num_hidden_layers", "hidden_size", "vocab_size", "num_target_layers", "target_layer_ids"]
    names += ["mask_token_id", "shift_label", "layer_types"]
    if config.has_head:
        names += ["pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"]
    facts = {name: getattr(config, name) for name in names}
    return {**facts, "layer_types": sorted(set(config.layer_types)), "dtype": str(config.dtype).removeprefix("torch.")}
