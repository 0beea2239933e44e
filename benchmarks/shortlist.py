# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How many ids should a draft propose from, and how many correct? Fewer are cheaper, and cost acceptance.

    python benchmarks/shortlist.py --text chat.jsonl more.jsonl --prompts gsm8k.jsonl humaneval.jsonl \
        [--sizes 2048 4096 8192 16384] [--pools 16 64 256] [--write] [--output results.json]

For each size the draft proposes from the ids that the target's answers in `--text` hold most often; for each pool, from
the whole vocabulary, of which its head corrects only the likeliest at each position. All of them and the whole
vocabulary answer each prompt in turn. A pool is also compared with it block by block: the share of proposals up to the
first other one. Reported are the share of the text's tokens that a list covers, the
acceptance length, and the time per round after the prefill and tokens per second of whole calls beside the whole
vocabulary, as medians over prompts. Answers are the target's whatever the list; that they are is checked.

`--write` stores the list of the size that wrote most tokens per second in the draft's folder.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from domino_spec.checkpoints import default_draft_path
from domino_spec.evaluation.benchmark import encode, load_pair, provenance, read_prompts
from domino_spec.evaluation.report import format_table
from domino_spec.generation import loop
from domino_spec.training.data import load_rows
from domino_spec.training.features import TokenDataset


def exactness(target, draft, inputs: dict, max_new_tokens: int) -> float:
    """Share of the proposals over the whole vocabulary that the pool has too, up to the first other in a block."""
    real, same, all_of_them = loop.rollout, 0, 0
    pool = draft.config.candidate_pool_size

    def both(*args):
        nonlocal same, all_of_them
        found = []
        for size in (None, pool):
            draft.config.candidate_pool_size = size
            found.append(real(*args))
        equal = found[0].proposal_ids == found[1].proposal_ids
        same, all_of_them = same + int(equal.long().cumprod(-1).sum()), all_of_them + equal.numel()
        return found[1]

    loop.rollout = both
    try:
        target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=max_new_tokens)
    finally:
        loop.rollout = real
    return same / all_of_them


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--text", nargs="+", required=True, help="files or Hub ids of chat rows that the target wrote")
    parser.add_argument("--prompts", nargs="+", required=True, type=Path)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--pools", nargs="+", type=int, default=[])
    parser.add_argument("--num-prompts", type=int, default=4, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    folder = Path(default_draft_path() if args.draft == "default" else args.draft)
    if args.write and not folder.is_dir():
        parser.error(f"--write needs the draft in a folder, and {args.draft} is none: download it first")
    target, tokenizer, draft = load_pair(args.target, args.draft, torch.float32)
    config = draft.config
    rows = [row for source in args.text for row in load_rows(source, tokenizer, 1 << 20, config.vocab_size)[0]]
    counts = TokenDataset(rows).token_counts(config.vocab_size)
    most_used = counts.argsort(descending=True).tolist()
    whole = f"{config.vocab_size:,}"
    # What each way proposes from, and what of it is corrected.
    ways: dict[str, tuple[list[int] | None, int | None]] = {
        f"{size:,}": (most_used[:size], None) for size in args.sizes if size < config.vocab_size
    }
    ways |= {f"pool of {size:,}": (None, size) for size in args.pools}
    ways[whole] = (None, None)

    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    prompts = [prompt for path in args.prompts for prompt in read_prompts(path, args.num_prompts)]
    for turn, prompt in enumerate(prompts):
        inputs, answers = encode(tokenizer, prompt.text), set()
        names = list(ways)
        # The first call of all warms up, and is made again.
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for way in [*order[:1], *order] if turn == 0 else order:
            config.set_shortlist(ways[way][0])
            config.candidate_pool_size = ways[way][1]
            started = time.perf_counter()
            output = target.generate(
                **inputs,
                assistant_model=draft,
                do_sample=False,
                max_new_tokens=args.max_new_tokens,
                return_dict_in_generate=True,
            )
            seconds = time.perf_counter() - started
            lengths = output.acceptance_lengths[0]
            call = {"rounds": len(lengths), "tokens": int(lengths.sum()), "seconds": seconds}
            call["round_seconds"] = (seconds - output.seconds["prefill"]) / max(1, len(lengths))
            if config.candidate_pool_size is not None:
                call["exact"] = exactness(target, draft, inputs, args.max_new_tokens)
            found[way] = [*found[way][:turn], call]
            answers.add(tuple(output.sequences[0].tolist()))
        if len(answers) > 1:
            raise SystemExit(f"{prompt.id} was answered in {len(answers)} ways.")
        print(f"{turn + 1}/{len(prompts)}", file=sys.stderr)

    def beside_whole(way: str, what: str) -> float:
        pairs = zip(found[way], found[whole], strict=True)
        return statistics.median(a[what] / b[what] for a, b in pairs if b[what])

    measured = {
        way: {
            "covered": float(counts[ways[way][0] or slice(None)].sum() / counts.sum()),
            "exact": statistics.fmean(c["exact"] for c in calls) if "exact" in calls[0] else None,
            "acceptance_length": sum(c["tokens"] for c in calls) / sum(c["rounds"] for c in calls),
            "round_ms": 1000 * statistics.median(c["round_seconds"] for c in calls),
            "round_ratio": beside_whole(way, "round_seconds"),
            "rate_ratio": 1 / beside_whole(way, "seconds"),
        }
        for way, calls in found.items()
    }
    header = ["ids", "of the text", "exact", "acceptance length", "ms / round", "beside whole", "tokens/s beside whole"]
    print(
        format_table(
            header,
            [
                [
                    way,
                    f"{100 * m['covered']:.1f} %",
                    "-" if m["exact"] is None else f"{100 * m['exact']:.2f} %",
                    f"{m['acceptance_length']:.3f}",
                    f"{m['round_ms']:.1f}",
                    f"{m['round_ratio']:.2f}",
                    f"{m['rate_ratio']:.2f}",
                ]
                for way, m in measured.items()
            ],
        )
    )
    if args.output is not None:
        document = {**provenance("python benchmarks/shortlist.py"), "ways": measured}
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.write:
        best = max((way for way in ways if ways[way][1] is None), key=lambda way: measured[way]["rate_ratio"])
        config.set_shortlist(ways[best][0])
        # The config alone: the weights stay as they are on disk, byte for byte.
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        written.pop("shortlist", None)
        if config.shortlist is not None:
            written["shortlist"] = config.shortlist
        (folder / "config.json").write_text(
            json.dumps(dict(sorted(written.items())), indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
