# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is a draft worth on a GPU, at paper scale? Random weights of the public shapes, acceptance by a given pattern.

    PYTHONPATH=benchmarks python benchmarks/gpu.py --output gpu.json          # Qwen3-8B and its draft, bf16, one GPU
    PYTHONPATH=benchmarks python benchmarks/gpu.py --shape tiny --device cpu  # tries the script, says nothing

First the head's kernels are held against plain torch. Then one prompt, and eight, are answered: plain, plain compiled
with a static cache, by the paper's loop (`paper_loop.py`, one sequence), by ours, by ours with the draft phase in a
CUDA graph, and by ours with a tree of `--tree` proposals (one sequence); then sampled as Qwen3's authors advise, plain,
by ours, and by ours with graphs. Random weights accept nothing, so that each round is told how many tokens to commit: a
pattern with the mean of `--acceptance-length`, trees included, so that their way shows what they cost and not what they
gain. 4.70 is the length that the paper's first figure gives for Qwen3-8B with a block of 16, at 3.84 times the speed of
plain decoding; its best task has 5.49 times.

Every way runs by turns, `--repeats` times. A round is also split, by clocks on the modules: the head's share is what is
left of drafting without the backbone and the output head.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from paper_loop import paper_generate
from peers import Clocks, now
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from domino_spec import DominoConfig, DominoDraftModel
from domino_spec.evaluation.benchmark import provenance
from domino_spec.evaluation.report import format_number, format_table
from domino_spec.generation import loop
from domino_spec.generation.context import TargetParts
from domino_spec.generation.kernels import HeadKernels, is_available
from domino_spec.generation.sampling import draw_with
from domino_spec.generation.scorer import PlainHead
from domino_spec.generation.verification import Verification

SHAPES = {
    "qwen3-8b": {
        "target": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
        "draft": {
            "num_hidden_layers": 5,
            "block_size": 16,
            "gru_hidden_dim": 1024,
            "emb_dim": 256,
            "target_layer_ids": [1, 9, 17, 25, 33],
        },
    },
    "tiny": {
        "target": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 96,
            "max_position_embeddings": 512,
        },
        "draft": {
            "num_hidden_layers": 1,
            "block_size": 6,
            "gru_hidden_dim": 24,
            "emb_dim": 8,
            "target_layer_ids": [0, 2],
        },
    },
}
PLAIN, COMPILED, PAPER = "plain", "plain, compiled", "paper's loop"
OURS, GRAPHS, TREE = "ours", "ours, graphs", "ours, tree"
PLAIN_SAMPLED, OURS_SAMPLED, GRAPHS_SAMPLED = "plain, sampled", "ours, sampled", "ours, sampled, graphs"
# Each way is held against plain decoding that chooses as it does.
SAMPLED = (PLAIN_SAMPLED, OURS_SAMPLED, GRAPHS_SAMPLED)
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def make_pair(shape: str, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, DominoDraftModel]:
    """A target and a draft with random weights."""
    fields = SHAPES[shape]
    common = {**fields["target"], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = DominoConfig(
        **{**common, **fields["draft"]},
        num_target_layers=common["num_hidden_layers"],
        mask_token_id=common["vocab_size"] - 1,
        projector_type="domino",
        shift_label=True,
        pure_draft_prefix_len=1,
    )
    torch.manual_seed(0)
    # Made where they will be: eight billion random numbers take minutes on a CPU.
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(Qwen3Config(**common), dtype=dtype).eval()
        draft = DominoDraftModel(config).to(dtype).eval()
    return target, draft


def pattern(mean: float, most: int) -> Iterator[int]:
    """Tokens of each round, `most` at most and 1 at least, spread about `mean` in a fixed order without an end."""
    generator, debt = torch.Generator().manual_seed(0), 0.0
    while True:
        # What rounding and the bounds took from one round, the next gets.
        wanted = mean + debt + float(torch.randn((), generator=generator))
        tokens = min(most, max(1, round(wanted)))
        debt += mean - tokens
        yield tokens


@contextlib.contextmanager
def forced_acceptance(mean: float) -> Iterator[None]:
    """Let our loop commit what the pattern says, after doing all that verification does."""
    real, tokens = loop.verify, None

    def verify(sequences, proposal, logits, processors, criteria, *args, **kwargs):
        nonlocal tokens
        found = real(sequences, proposal, logits, processors, criteria, *args, **kwargs)
        width = logits.shape[1]
        if width == 1:
            return found
        tokens = tokens or pattern(mean, width)
        room = criteria.max_length - max(sequences.lengths)
        count = min(next(tokens), width, room)
        # A tree's path has no tokens behind its end.
        offered = proposal.proposal_ids.clamp(min=0)
        sequences.put_block(torch.cat([offered, logits[:, -1:].argmax(-1)], dim=1))
        return Verification(
            [count] * len(sequences), [count == room] * len(sequences), [count < width] * len(sequences), found.finite
        )

    loop.verify = verify
    try:
        yield
    finally:
        loop.verify = real


@torch.no_grad()
def check_kernels(target: PreTrainedModel, draft: DominoDraftModel, num_rows: int) -> dict[str, float]:
    """
    Largest difference between kernels and torch over a rollout, and the share of tokens that differ, the likeliest and
    drawn with the same noise.

    Raises:
        SystemExit: where a kernel computes something else.
    """
    head, parts, config = PlainHead(draft, None), TargetParts(target), draft.config
    kernels = HeadKernels(head.weight_hh, head.weight_state, head.weight_out, num_rows)
    hidden = torch.randn(num_rows, config.block_size, config.hidden_size, device=draft.device, dtype=draft.dtype)
    base_logits, begun = parts.logits(hidden), head.begin(hidden)
    token = torch.randint(config.vocab_size, (num_rows,), device=draft.device)
    ids, peaks = torch.zeros_like(token), torch.zeros(num_rows, device=draft.device)
    scores = torch.empty(num_rows, config.vocab_size, device=draft.device)
    temperature = SAMPLING["temperature"]
    state, plain_state, apart, other = None, None, 0.0, 0
    for k in range(config.block_size - 1):
        embeds = parts.embed(token).to(draft.dtype)
        state = kernels.step(torch.nn.functional.linear(embeds, head.weight_ih), state)
        plain_state = head.step(embeds, plain_state)
        correct_by = (begun[:, k], state)
        logits = (base_logits[:, k] + head.correction(begun[:, k], plain_state, None)).float()
        noise = torch.empty_like(scores).exponential_()
        kernels.score_sample(
            base_logits[:, k], noise, ids, peaks, correct_by=correct_by, temperature=temperature, out=scores
        )
        apart = max(apart, float((scores * temperature - logits).abs().max()))
        other += int((ids != draw_with(noise, logits / temperature)[1]).sum())
        kernels.score_argmax(base_logits[:, k], ids, peaks, correct_by=correct_by)
        apart = max(apart, float((state - plain_state).abs().max()), float((peaks - logits.amax(-1)).abs().max()))
        other += int((ids != logits.argmax(-1)).sum())
        token = ids.clone()
    tolerance = 1e-3 if draft.dtype == torch.float32 else 0.1
    if apart > tolerance:
        raise SystemExit(f"The kernels are {apart:.3g} from torch, more than {tolerance}.")
    return {"largest_difference": apart, "other_tokens": other / (2 * num_rows * (config.block_size - 1))}


def ways(target, draft, args) -> dict[str, object]:
    """Every way by name: a function of prompts `[n, S]` that returns how many tokens each row got."""
    greedy = {"do_sample": False}

    def generate(ids, options):
        return target.generate(ids, max_new_tokens=args.max_new_tokens, **options).shape[1] - ids.shape[1]

    def paper(ids):
        accept = (tokens - 1 for tokens in pattern(args.acceptance_length, draft.config.block_size))
        return paper_generate(target, draft, ids, args.max_new_tokens, accept)[0].shape[1] - ids.shape[1]

    def ours(ids, options=greedy, graphs=False, tree=0):
        draft.use_cuda_graphs(graphs)
        draft.use_tree(tree)
        with forced_acceptance(args.acceptance_length):
            return generate(ids, {"assistant_model": draft, **options})

    return {
        PLAIN: lambda ids: generate(ids, greedy),
        # transformers compiles the target itself for a cache of fixed size.
        COMPILED: lambda ids: generate(ids, {"cache_implementation": "static", **greedy}),
        PAPER: paper,
        OURS: ours,
        GRAPHS: lambda ids: ours(ids, graphs=True),
        TREE: lambda ids: ours(ids, tree=args.tree),
        PLAIN_SAMPLED: lambda ids: generate(ids, SAMPLING),
        OURS_SAMPLED: lambda ids: ours(ids, SAMPLING),
        GRAPHS_SAMPLED: lambda ids: ours(ids, SAMPLING, graphs=True),
    }


def split(target, draft, ids, args) -> dict[str, float]:
    """Milliseconds of a round of ours by part, without graphs, from a call of its own."""
    draft.use_cuda_graphs(False)
    draft.use_tree(0)
    clocks = Clocks(target=target, backbone=draft, head=target.get_output_embeddings())
    with clocks.running() as calls, forced_acceptance(args.acceptance_length):
        seconds = target.generate(
            ids,
            assistant_model=draft,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        ).seconds
    rounds = len(calls["target"]) - 1
    parts = {"target": sum(calls["target"][1:]), "backbone": sum(calls["backbone"]), "output head": sum(calls["head"])}
    parts["head"] = seconds["draft"] - parts["backbone"] - parts["output head"]
    parts["verification"], parts["host"] = seconds["verify"] - parts["target"], seconds["host"]
    return {name: 1000 * value / rounds for name, value in parts.items()}


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--acceptance-length", type=float, default=4.7)
    parser.add_argument("--tree", type=int, default=31)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)

    target, draft = make_pair(args.shape, args.device, getattr(torch, args.dtype))
    document: dict = {**provenance("python benchmarks/gpu.py"), "batches": {}}
    if is_available(draft.device):
        document["kernels"] = {str(n): check_kernels(target, draft, n) for n in args.batch_sizes}
        print("kernels beside torch: " + json.dumps(document["kernels"]), flush=True)
    rows = []
    for num_rows in args.batch_sizes:
        ids = torch.randint(draft.config.vocab_size - 1, (num_rows, args.prompt_length), device=args.device)
        named = ways(target, draft, args)
        if num_rows > 1:
            for name in (PAPER, TREE):
                named.pop(name)
        rates: dict[str, list[float]] = {name: [] for name in named}
        # The first turn warms up: kernels are compiled, graphs captured.
        for turn, (name, run) in itertools.product(range(args.repeats + 1), named.items()):
            start = now()
            tokens = run(ids)
            if turn:
                rates[name].append(num_rows * tokens / (now() - start))
        parts = split(target, draft, ids, args)
        medians = {name: statistics.median(of_way) for name, of_way in rates.items()}
        document["batches"][str(num_rows)] = {"tokens_per_second": rates, "round_milliseconds": parts}
        for name, rate in medians.items():
            spread = f"{min(rates[name]):.1f}..{max(rates[name]):.1f}"
            to_plain = format_number(rate / medians[PLAIN_SAMPLED if name in SAMPLED else PLAIN])
            paper = "-" if PAPER not in medians or name in SAMPLED else format_number(rate / medians[PAPER])
            rows.append([str(num_rows), name, format_number(rate, 1), spread, to_plain, paper])
        whole = sum(parts.values())
        unavoidable = parts["target"] + parts["backbone"] + parts["output head"]
        print(
            f"batch {num_rows}, ms of a round: "
            + ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
            + f"; over its three passes {whole / unavoidable:.2f}, the head {100 * parts['head'] / whole:.1f} %",
            flush=True,
        )
    print(format_table(["batch", "", "tok/s", "spread", "to plain", "to paper's"], rows))
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s")
