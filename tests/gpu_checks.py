# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What only an accelerator can show of `generate` with a draft: devices, caches that move, kernels, half precision.

    PYTHONPATH=tests python tests/gpu_checks.py [--device cuda] [--output checks.json]

Each check runs a batch of padded rows of different acceptance, plain and with a draft, and compares tokens: exactly
in float64, up to numeric ties in half precision; sampled tokens are counted against their exact distribution. Takes
about a minute, prints a table, fails if any check fails. With `--device cpu` it tests itself.
"""

import argparse
import copy
import json
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from batching import GoodBatchDraft, padded_batch
from contract import cached_target, first_difference_is_tie
from helpers import MASK_TOKEN, kept_captures, make_draft
from sampling_draws import draw_transitions, exact_transitions, make_forgetful_pair, transitions_p
from test_generate_sampling import COMBINATIONS
from transformers import AutoModelForCausalLM

from domino_spec.evaluation.benchmark import provenance
from domino_spec.evaluation.report import format_table
from domino_spec.generation.captured import Captures

LENGTHS, NEW_TOKENS = [9, 4, 13, 30], 40
SPOILED = [{12, 20}, set(), {15, 30}, {40, 41, 50}]


def compare(target, draft_device, lengths=LENGTHS, draft_dtype=None, ties=False, tree=0, **options) -> float:
    """Run `target` plain and with a draft on `draft_device`, with a tree of proposals or not; returns the acceptance
    length."""
    device = target.get_input_embeddings().weight.device
    inputs = {name: tensor.to(device) for name, tensor in padded_batch(lengths, seed=3).items()}
    calls = {**inputs, **options, "max_new_tokens": NEW_TOKENS, "pad_token_id": MASK_TOKEN}
    plain = target.generate(**calls)
    width = max(lengths)
    texts = [plain[row, width - length :].tolist() for row, length in enumerate(lengths)]
    # Which hidden state stands for which token is worked out on the CPU.
    draft = make_draft(target, attn_implementation="sdpa", dtype=draft_dtype)
    local = copy.deepcopy(target).cpu() if device.type != "cpu" else target
    draft = GoodBatchDraft.following(draft.cpu(), local, texts, SPOILED[: len(lengths)]).to(draft_device)
    draft.use_tree(tree)
    output = target.generate(**calls, assistant_model=draft, return_dict_in_generate=True)
    for row, length in enumerate(lengths):
        ours, theirs = output.sequences[row : row + 1], plain[row : row + 1]
        if not torch.equal(ours, theirs):
            ours, theirs = ours[:, width - length :], theirs[:, width - length :]
            assert ties and first_difference_is_tie(target, theirs, ours), f"row {row} differs"
    lengths = output.acceptance_lengths
    return float(lengths.sum() / (lengths > 0).sum())


def compare_captured(target, num_rows: int, input_table: bool) -> float:
    """The draft phase as a CUDA graph beside the same in single steps: same text, same acceptance, call after call."""
    device = target.get_input_embeddings().weight.device
    draft = make_draft(target, attn_implementation="sdpa").to(device)
    lengths = []
    for graphs in (False, True, True):
        draft.use_cuda_graphs(graphs, input_table=input_table)
        for seed in (3, 4):
            inputs = {name: tensor.to(device) for name, tensor in padded_batch(LENGTHS[:num_rows], seed=seed).items()}
            output = target.generate(
                **inputs,
                assistant_model=draft,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=MASK_TOKEN,
                return_dict_in_generate=True,
            )
            lengths.append((output.sequences.tolist(), output.acceptance_lengths.tolist()))
    assert lengths[:2] == lengths[2:4] == lengths[4:], "a graph gave other rounds"
    kept = kept_captures(Captures.of(target, draft))
    assert device.type == "cpu" or any(one._graph is not None for one in kept), "no graph"
    return float(torch.tensor(lengths[0][1]).float().mean())


def compare_sampled(device: str, name: str, graphs: bool) -> float:
    """Sampled tokens against their exact distribution; the same seeds draw the same, also once a graph is there."""
    target, draft = (model.to(device) for model in make_forgetful_pair())
    draft.use_cuda_graphs(graphs)
    drawn = [draw_transitions((target, draft), COMBINATIONS[name], 8, seed) for seed in (*range(8), 6, 7)]
    counts = [counts for counts, _, _ in drawn]
    assert torch.equal(counts[6], counts[8]) and torch.equal(counts[7], counts[9]), "a seed drew something else"
    p_value = transitions_p(sum(counts[:8]), exact_transitions(target, COMBINATIONS[name]))
    assert p_value > 0.001, f"p is {p_value:.2g}"
    kept = kept_captures(Captures.of(target, draft))
    assert device == "cpu" or any(one._graph is not None for one in kept) == graphs, "no graph, or one unasked"
    return sum(committed for _, committed, _ in drawn) / sum(rounds for _, _, rounds in drawn)


def target_on(device, dtype=torch.float64, attention="sdpa", arch="qwen3"):
    return copy.deepcopy(cached_target(arch, attention, dtype)).to(device)


def spread_target(device, folder: Path):
    """Half of the layers on `device`, the other half on the CPU."""
    cached_target("qwen3", "sdpa", torch.float32).save_pretrained(folder)
    places = {f"model.layers.{i}": device if i < 2 else "cpu" for i in range(4)}
    places |= {"model.embed_tokens": device, "model.rotary_emb": device, "model.norm": "cpu", "lm_head": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, dtype=torch.float32)


def checks(device: str, folder: Path) -> dict:
    """Name of each check, and what runs it; `None` where something is not installed."""
    flash = find_spec("flash_attn") is not None and device != "cpu"
    return {
        "one row": lambda: compare(target_on(device), device, [9]),
        "padded batch": lambda: compare(target_on(device), device),
        "padded batch, sliding windows": lambda: compare(target_on(device, arch="mistral-sliding"), device),
        "draft on the CPU": lambda: compare(target_on(device), "cpu"),
        "target on the CPU": lambda: compare(target_on("cpu"), device),
        "target on two devices": lambda: compare(spread_target(device, folder), device, ties=True),
        "static cache": lambda: compare(target_on(device), device, cache_implementation="static"),
        "offloaded cache": None
        if device == "cpu"
        else lambda: compare(target_on(device), device, cache_implementation="offloaded"),
        "adaptive draft length": lambda: compare(target_on(device), device, num_assistant_tokens_schedule="heuristic"),
        "tree": lambda: compare(target_on(device), device, [9], tree=15),
        "tree, draft on the CPU": lambda: compare(target_on(device), "cpu", [9], tree=15),
        "tree, target on two devices": lambda: compare(spread_target(device, folder), device, [9], tree=15, ties=True),
        "tree, bfloat16": lambda: compare(target_on(device, torch.bfloat16), device, [9], tree=15, ties=True),
        "draft phase in a graph": lambda: compare_captured(target_on(device), 1, False),
        "draft phase in a graph, batch, float32": lambda: compare_captured(target_on(device, torch.float32), 4, False),
        "draft phase in a graph, table, float32": lambda: compare_captured(target_on(device, torch.float32), 1, True),
        "sampling": lambda: compare_sampled(device, "top-p", False),
        "sampling in a graph": lambda: compare_sampled(device, "plain", True),
        "sampling in a graph, temperature and top-k": lambda: compare_sampled(device, "temperature and top-k", True),
        "sampling in a graph, top-p": lambda: compare_sampled(device, "top-p", True),
        "float32": lambda: compare(target_on(device, torch.float32), device, ties=True),
        "bfloat16": lambda: compare(target_on(device, torch.bfloat16), device, ties=True),
        "float16 target, bfloat16 draft": lambda: compare(
            target_on(device, torch.float16), device, draft_dtype=torch.bfloat16, ties=True
        ),
        "flash attention, bfloat16": (
            lambda: compare(target_on(device, torch.bfloat16, "flash_attention_2"), device, ties=True)
        )
        if flash
        else None,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows, failed = [], False
    scratch = TemporaryDirectory()
    for name, run in checks(args.device, Path(scratch.name)).items():
        start = time.perf_counter()
        if run is None:
            outcome, length = "not here", ""
        else:
            try:
                outcome, length = "passed", f"{run():.2f}"
            except Exception:
                traceback.print_exc()
                outcome, length, failed = "FAILED", "", True
        rows.append([name, outcome, length, f"{time.perf_counter() - start:.1f}"])
    print(format_table(["check", "outcome", "acceptance length", "seconds"], rows))
    if args.output is not None:
        document = {**provenance("python tests/gpu_checks.py"), "checks": rows}
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
