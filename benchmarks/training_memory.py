# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How much memory does a training step take, and what does it grow with?

    python benchmarks/training_memory.py [--output results.json]

Computes the peak of a step at the paper's scale (B 16, 256 anchors, V 151,936, H 4,096, one row of 3,072 tokens, bf16
activations, fp32 weights and AdamW), part by part, and measures a scaled-down copy in processes of their own: how far a
step raises the peak of resident memory, for growing chunks and growing blocks. What grows with the blocks there is the
backbone's part (activations and the dense mask); what grows with the chunk is the logits'.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import torch

from domino_spec import DominoConfig, DominoDraftModel
from domino_spec.evaluation.benchmark import provenance
from domino_spec.evaluation.report import format_table
from domino_spec.generation.context import TargetParts
from domino_spec.training.blocks import build_blocks, sample_anchors
from domino_spec.training.objective import domino_loss, teacher_forced_hidden

GIB = 2**30
# Vocabulary-wide float32 tensors that a chunk holds at its peak: base and final logits, what the correction adds, and
# the probabilities of the two, in whose place their gradients are made.
LOGITS_PER_POSITION = 5
PAPER = {
    "block_size": 16,
    "num_anchors": 256,
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "gru_hidden_dim": 1024,
    "emb_dim": 256,
    "length": 3072,
    "chunk": 1024,
}
SMALL = {
    **PAPER,
    "block_size": 8,
    "vocab_size": 30_000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "target_layer_ids": [0, 1],
    "gru_hidden_dim": 32,
    "emb_dim": 32,
    "length": 512,
}


def peak_rss() -> int:
    """The most resident memory that this process has had, in bytes."""
    # What `getrusage` says includes the process that this one was forked from, as large as that was.
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text()).group(1))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def config_of(scale: dict) -> DominoConfig:
    fields = {name: value for name, value in scale.items() if name not in ("num_anchors", "length", "chunk")}
    return DominoConfig(**fields, num_target_layers=40, mask_token_id=0, projector_type="domino", shift_label=True)


def predicted(scale: dict) -> dict[str, float]:
    """GiB of each part of a step at its peak, for one row."""
    config = config_of(scale)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DominoDraftModel(config).parameters())
    hidden, positions = config.hidden_size, scale["num_anchors"] * config.block_size
    context, layers = scale["length"], config.num_hidden_layers
    heads = config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim
    # Of each block position and layer: two norms and their inputs, queries, attention, gate, up and their product.
    per_layer = positions * (4 * hidden + 3 * heads + 3 * config.intermediate_size + 2 * kv) + context * 2 * kv
    chunk = min(scale["chunk"] or positions, positions)
    return {
        "weights, gradients and AdamW": 16 * parameters / GIB,
        "features of the row": 2 * context * hidden * (len(config.target_layer_ids) + 1) / GIB,
        "activations of the backbone": 2 * layers * per_layer / GIB,
        "prefix states and hidden states": 4 * positions * (2 * hidden + 6 * config.gru_hidden_dim) / GIB,
        "logits of a chunk": 4 * LOGITS_PER_POSITION * chunk * config.vocab_size / GIB,
        "output head of the target, borrowed": 2 * config.vocab_size * hidden / GIB,
    }


def peak_of_a_step(num_anchors: int, chunk: int | None) -> float:
    """GiB of resident memory at the peak of a step of the small copy, over what was resident before it."""
    scale = {**SMALL, "num_anchors": num_anchors, "chunk": chunk}
    config = config_of(scale)
    draft = DominoDraftModel(config)
    parts = TargetParts.__new__(TargetParts)
    parts.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False)
    parts.output_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False).requires_grad_(False)
    parts.config, parts.dtype = config, torch.float32
    ids = torch.randint(1, config.vocab_size, (1, scale["length"]))
    mask = torch.ones_like(ids)
    features = torch.randn(1, scale["length"], 2 * config.hidden_size)
    anchors, keep = sample_anchors(mask, num_anchors, [0])
    blocks = build_blocks(ids, mask, anchors, keep, config, 7.0)
    before = peak_rss()
    hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features)
    domino_loss(draft, parts, blocks, hidden, 0.5, chunk_size=chunk).loss.backward()
    return (peak_rss() - before) / GIB


def measure(num_anchors: int, chunk: int | None) -> float:
    command = [sys.executable, __file__, "--step", str(num_anchors), str(chunk or 0)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--step", nargs=2, type=int, metavar=("ANCHORS", "CHUNK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.step is not None:
        print(peak_of_a_step(args.step[0], args.step[1] or None))
        return

    parts = predicted(PAPER)
    whole = 4 * LOGITS_PER_POSITION * PAPER["num_anchors"] * PAPER["block_size"] * PAPER["vocab_size"] / GIB
    rows = [[name, f"{size:.2f}"] for name, size in parts.items()]
    print(format_table(["at the paper's scale", "GiB"], rows, ["sum", f"{sum(parts.values()):.2f}"]))
    print(f"without chunks the logits alone would take {whole:.1f} GiB\n")

    measured = []
    for num_anchors, chunk in ((32, 128), (64, 128), (128, 128), (32, 256), (64, 256), (128, 256), (128, None)):
        size = measure(num_anchors, chunk)
        logits = predicted({**SMALL, "num_anchors": num_anchors, "chunk": chunk})["logits of a chunk"]
        measured.append({"anchors": num_anchors, "chunk": chunk, "peak_gib": size, "predicted_logits_gib": logits})
    header = ["anchors", "chunk", "measured peak, GiB", "logits of a chunk, GiB"]
    print(
        format_table(
            header,
            [
                [str(m["anchors"]), str(m["chunk"]), f"{m['peak_gib']:.3f}", f"{m['predicted_logits_gib']:.3f}"]
                for m in measured
            ],
        )
    )
    if args.output is not None:
        document = {
            **provenance("python benchmarks/training_memory.py"),
            "paper_scale_gib": parts,
            "logits_without_chunks_gib": whole,
            "scaled_down": measured,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
