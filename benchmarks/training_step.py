# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How much faster is our training step than the objective written down plainly, and how much smaller?

    python benchmarks/training_step.py [--shortlist 8192] [--output results.json]
    python benchmarks/training_step.py --shape qwen3-8b --rows 1 --anchors 256 --length 3072 --device cuda \
        --dtype bfloat16

The plain step is what a first implementation looks like: a dense mask of every block against all context and all
blocks, base and final logits of all positions over the whole vocabulary, two calls of `F.cross_entropy`, one backward.
Ours is what `DominoTrainer` calls, with its defaults; on a GPU the draft runs on flex_attention, as recipes for GPUs
have it. Both get the same draft, batch and anchors, with random weights and tokens, since time hangs on shapes alone.

First the losses and the gradients of every parameter must agree, in float32; else the script fails. Then forward and
backward are timed by turns, without an optimiser. Peak memory is what a step needs on top of weights and batch: on a
GPU what torch has allocated, on a CPU resident memory, each way in a process of its own.

In every row the first quarter stands for a prompt and is not supervised. With `--shortlist N` our step is timed once
more with N ids scored; the text is made of these ids, so that no label is left out and the step is at its dearest.
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peers import now
from torch.nn import functional as F
from training_memory import GIB, PAPER, SMALL, config_of, peak_rss
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from domino_spec import DominoConfig, DominoDraftModel
from domino_spec.checkpoints import default_draft_path
from domino_spec.evaluation.benchmark import positive_int, provenance
from domino_spec.evaluation.report import format_table
from domino_spec.generation.context import TargetParts
from domino_spec.training.arguments import DominoTrainingArguments
from domino_spec.training.blocks import build_blocks, sample_anchors
from domino_spec.training.objective import domino_loss, teacher_forced_hidden

SHAPES: dict[str, Callable[[], DominoConfig]] = {
    "default": lambda: DominoConfig.from_pretrained(default_draft_path()),
    "qwen3-8b": lambda: config_of(PAPER),
    "small": lambda: config_of(SMALL),
}
PLAIN, OURS, SHORTLIST = "plain", "ours", "ours, shortlist"
LAMBDA_BASE, GAMMA = 0.5, 7.0
# Relative, in float32: what another order of the same additions may come to.
TOLERANCE = 1e-4

Losses = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Case:
    """
    What every way starts from.

    Attributes:
        draft, target: with random weights; of the target only embedding and output head are used.
        input_ids (`torch.LongTensor` of shape `[N, S]`), loss_mask (`[N, S]`): the rows.
        features (`torch.Tensor` of shape `[N, S, T * H]`): in bf16, as they lie in a cache.
        anchors (`torch.LongTensor` of shape `[N, A]`), keep (`torch.BoolTensor` of shape `[N, A]`): see
            [`sample_anchors`].
    """

    draft: DominoDraftModel
    target: PreTrainedModel
    input_ids: torch.LongTensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    anchors: torch.LongTensor
    keep: torch.BoolTensor


def make_case(
    config: DominoConfig, rows: int, length: int, num_anchors: int, num_ids: int, dtype: torch.dtype, device: str
) -> Case:
    """A batch of `rows` made of the first `num_ids` tokens, and a draft with its target, which has `dtype`."""
    torch.manual_seed(0)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    shape = {name: getattr(config, name) for name in names}
    target_config = AutoConfig.for_model("qwen3", **shape, num_hidden_layers=1)
    loss_mask = torch.ones(rows, length)
    loss_mask[:, : length // 4] = 0
    anchors, keep = sample_anchors(loss_mask, num_anchors, range(rows))
    return Case(
        draft=DominoDraftModel(config).to(device),
        target=AutoModelForCausalLM.from_config(target_config, dtype=dtype).requires_grad_(False).to(device),
        input_ids=torch.randint(num_ids, (rows, length), device=device),
        loss_mask=loss_mask.to(device),
        features=torch.randn(
            rows, length, len(config.target_layer_ids) * config.hidden_size, dtype=torch.bfloat16, device=device
        ),
        anchors=anchors.to(device),
        keep=keep.to(device),
    )


def plain_losses(draft: DominoDraftModel, case: Case) -> Losses:
    """
    The objective as its description reads, for shifted labels and full attention: loss, base loss and final loss.

    A query at offset k of the block anchored at a sees the context before a and its own block. It predicts token
    a + 1 + k, with weight exp(-k / gamma) where that token is in the row and supervised. The head reads the true tokens
    a .. a + k.
    """
    config, size, ids, device = draft.config, draft.config.block_size, case.input_ids, case.input_ids.device
    (rows, length), slots = ids.shape, case.anchors.shape[1]
    offsets = torch.arange(size, device=device)
    positions = case.anchors[:, :, None] + offsets

    row = torch.arange(rows, device=device)[:, None, None]
    label_positions = (positions + 1).clamp(max=length - 1)
    labels = ids[row, label_positions]
    counts = (positions + 1 < length) & case.loss_mask.bool()[row, label_positions] & case.keep[:, :, None]
    weights = counts * torch.exp(-offsets / GAMMA)
    tokens = ids[row, positions.clamp(max=length - 1)]
    block_ids = torch.full_like(tokens, config.mask_token_id)
    block_ids[:, :, 0] = tokens[:, :, 0]

    block = torch.arange(slots * size, device=device) // size
    context = torch.arange(length, device=device) < case.anchors[:, block, None]
    own = block[:, None] == block
    mask = torch.cat([context, own.expand(rows, -1, -1)], dim=-1)[:, None]
    embedding, output_head = case.target.get_input_embeddings(), case.target.get_output_embeddings()
    hidden = draft(
        noise_embeds=embedding(block_ids.flatten(1)),
        context_hidden_states=case.features,
        position_ids=torch.cat([torch.arange(length, device=device).expand(rows, -1), positions.flatten(1)], dim=1),
        attention_mask={"full_attention": mask},
    ).last_hidden_state.view(rows, slots, size, -1)

    # The draft's weights are float32, whatever the target's are.
    states = draft.prefix_gru(embedding(tokens.flatten(0, 1)).to(draft.dtype))[0].view(rows, slots, size, -1)
    base_logits = output_head(hidden.to(case.target.dtype))
    prefix = config.pure_draft_prefix_len
    correction = draft.embed_proj(torch.cat([hidden, states], dim=-1)[:, :, prefix:])
    final_logits = torch.cat([base_logits[:, :, :prefix], base_logits[:, :, prefix:] + correction], dim=2)

    def weighted(logits):
        cross_entropy = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
        return (cross_entropy * weights.flatten()).sum() / (weights.sum() + 1e-6)

    base_loss, final_loss = weighted(base_logits), weighted(final_logits)
    return (1 - LAMBDA_BASE) * final_loss + LAMBDA_BASE * base_loss, base_loss, final_loss


def our_losses(draft: DominoDraftModel, case: Case, token_ids: torch.LongTensor | None = None) -> Losses:
    """The same three, from what `DominoTrainer` calls once it has drawn the anchors."""
    parts = TargetParts(case.target)
    blocks = build_blocks(case.input_ids, case.loss_mask, case.anchors, case.keep, draft.config, GAMMA)
    chunk_size = DominoTrainingArguments.loss_chunk_size

    def objective(hidden):
        return domino_loss(draft, parts, blocks, hidden, LAMBDA_BASE, token_ids, chunk_size)

    output = teacher_forced_hidden(draft, parts, blocks, case.anchors, case.features, objective=objective)
    return output.loss, output.base_loss, output.final_loss


class Way:
    """
    One way to make a step.

    Args:
        draft (`DominoDraftModel`): whose gradients it makes.
        losses: of the draft; the first is minimised.
        dtype (`torch.dtype`): of the units; below float32 it is left to autocast, as in the trainer.
    """

    def __init__(self, draft: DominoDraftModel, losses: Callable[[DominoDraftModel], Losses], dtype: torch.dtype):
        self.draft, self.losses, self.dtype = draft, losses, dtype

    def step(self) -> Losses:
        """Forward and backward; gradients are those of this step alone."""
        self.draft.zero_grad()
        with torch.autocast(self.draft.device.type, self.dtype, enabled=self.dtype != torch.float32):
            losses = self.losses(self.draft)
        losses[0].backward()
        return tuple(loss.detach() for loss in losses)


def make_ways(case: Case, dtype: torch.dtype, shortlist: int | None) -> dict[str, Way]:
    ours, device = copy.deepcopy(case.draft), case.input_ids.device
    if device.type == "cuda":
        ours.set_attn_implementation("flex_attention")
    ways = {
        PLAIN: Way(case.draft, lambda draft: plain_losses(draft, case), dtype),
        OURS: Way(ours, lambda draft: our_losses(draft, case), dtype),
    }
    if shortlist is not None:
        token_ids = torch.arange(shortlist, device=device)
        ways[SHORTLIST] = Way(ours, lambda draft: our_losses(draft, case, token_ids), dtype)
    return ways


def check(plain: Way, ours: Way) -> dict[str, float]:
    """
    Relative differences between two ways, by name of the loss or parameter.

    Raises:
        SystemExit: where one is beyond `TOLERANCE`.
    """
    pairs = dict(zip(("loss", "base_loss", "final_loss"), zip(plain.step(), ours.step(), strict=True), strict=True))
    gradients = zip(plain.draft.named_parameters(), ours.draft.parameters(), strict=True)
    pairs |= {name: (one.grad, other.grad) for (name, one), other in gradients}
    found = {name: float((one - other).norm() / one.norm()) for name, (one, other) in pairs.items()}
    worst = max(found, key=lambda name: found[name])
    # A comparison with NaN is false, and must not pass.
    if not all(value <= TOLERANCE for value in found.values()):
        raise SystemExit(f"the steps disagree: {worst} by {found[worst]:.1e}, where {TOLERANCE:.0e} is allowed")
    print(f"losses and gradients agree to {found[worst]:.1e} ({worst})")
    return found


def peak(way: Way) -> float:
    """GiB that a step needs on top of what there is. On a CPU only the first answer of a process means anything."""
    way.draft.zero_grad()
    if way.draft.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way.step()
        return (torch.cuda.max_memory_allocated() - before) / GIB
    before = peak_rss()
    way.step()
    return (peak_rss() - before) / GIB


def peak_elsewhere(name: str) -> float:
    """[`peak`] of a way in a process of its own, with the options of this one."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", name]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def time_steps(ways: dict[str, Way], repeats: int) -> dict[str, list[float]]:
    """Seconds of every step, by way, in rotating order; a repeat more warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(repeats + 1):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            start = now()
            ways[name].step()
            if repeat:
                seconds[name].append(now() - start)
    return seconds


def summarise(seconds: dict[str, list[float]], peaks: dict[str, float]) -> dict[str, dict[str, float]]:
    """Medians and middle half in ms, how often the plain step's time holds a way's, and its peak, by way."""
    return {
        name: {
            "ms": 1000 * statistics.median(own),
            "ms_first_quarter": 1000 * sorted(own)[len(own) // 4],
            "ms_third_quarter": 1000 * sorted(own)[3 * len(own) // 4],
            # Of each turn on its own, so that a machine whose speed drifts slows all alike.
            "plain_over_this": statistics.median(a / b for a, b in zip(seconds[PLAIN], own, strict=True)),
            "peak_gib": peaks[name],
        }
        for name, own in seconds.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="default", help="of the draft: the embedded one's, ...")
    parser.add_argument("--vocabulary", type=positive_int, help="ids, if not as many as the shape has")
    parser.add_argument("--rows", type=positive_int, default=4)
    parser.add_argument("--anchors", type=positive_int, default=64, help="of a row")
    parser.add_argument("--length", type=positive_int, default=512, help="tokens of a row")
    parser.add_argument("--shortlist", type=positive_int, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=positive_int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args()

    config = SHAPES[args.shape]()
    config.set_shortlist(None)
    config.vocab_size = args.vocabulary or config.vocab_size
    num_ids = args.shortlist or config.vocab_size
    if not config.mask_token_id < num_ids <= config.vocab_size:
        parser.error(f"{num_ids} ids do not fit a vocabulary of {config.vocab_size} with mask {config.mask_token_id}")

    def ways_in(dtype: torch.dtype) -> dict[str, Way]:
        case = make_case(config, args.rows, args.length, args.anchors, num_ids, dtype, args.device)
        return make_ways(case, dtype, args.shortlist)

    dtype = getattr(torch, args.dtype)
    if args.peak_of is not None:
        print(peak(ways_in(dtype)[args.peak_of]))
        return
    names = [PLAIN, OURS, *([SHORTLIST] if args.shortlist else [])]
    peaks = {} if args.device.startswith("cuda") else {name: peak_elsewhere(name) for name in names}
    checked = ways_in(torch.float32)
    agreement = check(checked[PLAIN], checked[OURS])
    del checked
    ways = ways_in(dtype)
    seconds = time_steps(ways, args.repeats)
    found = summarise(seconds, peaks or {name: peak(way) for name, way in ways.items()})
    rows = [
        [
            name,
            f"{way['ms']:.1f}",
            f"{way['ms_first_quarter']:.1f}..{way['ms_third_quarter']:.1f}",
            f"{way['plain_over_this']:.2f}x",
            f"{way['peak_gib']:.2f}",
        ]
        for name, way in found.items()
    ]
    print(format_table(["", "ms a step", "middle half", "plain / this", "peak, GiB"], rows))
    if args.output is not None:
        document = {
            **provenance("python benchmarks/training_step.py"),
            "agreement": agreement,
            "ways": found,
            "seconds": seconds,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
