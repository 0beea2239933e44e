# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How many ids should a draft propose from? Fewer make the output head cheaper, and cost acceptance.

    python benchmarks/shortlist.py --text chat.jsonl more.jsonl --prompts gsm8k.jsonl humaneval.jsonl \
        [--sizes 2048 4096 8192 16384] [--write] [--output results.json]

For each size the draft proposes from the ids that the target's answers in `--text` hold most often. All sizes and the
whole vocabulary answer each prompt in turn. Reported are the share of the text's tokens that a list covers, the
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
from domino_spec.training.data import load_rows
from domino_spec.training.features import TokenDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--text", nargs="+", required=True, help="files or Hub ids of chat rows that the target wrote")
    parser.add_argument("--prompts", nargs="+", required=True, type=Path)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
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
    lists: dict[int, list[int] | None] = {size: most_used[:size] for size in args.sizes if size < config.vocab_size}
    lists[config.vocab_size] = None

    found: dict[int, list[dict[str, float]]] = {size: [] for size in lists}
    prompts = [prompt for path in args.prompts for prompt in read_prompts(path, args.num_prompts)]
    for turn, prompt in enumerate(prompts):
        inputs, answers = encode(tokenizer, prompt.text), set()
        sizes = list(lists)
        # The first call of all warms up, and is made again.
        order = sizes[turn % len(sizes) :] + sizes[: turn % len(sizes)]
        for size in [*order[:1], *order] if turn == 0 else order:
            config.set_shortlist(lists[size])
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
            found[size] = [*found[size][:turn], call]
            answers.add(tuple(output.sequences[0].tolist()))
        if len(answers) > 1:
            raise SystemExit(f"{prompt.id} was answered in {len(answers)} ways.")
        print(f"{turn + 1}/{len(prompts)}", file=sys.stderr)

    def beside_whole(size: int, what: str) -> float:
        pairs = zip(found[size], found[config.vocab_size], strict=True)
        return statistics.median(a[what] / b[what] for a, b in pairs if b[what])

    measured = {
        size: {
            "covered": float(counts[lists[size] or slice(None)].sum() / counts.sum()),
            "acceptance_length": sum(c["tokens"] for c in calls) / sum(c["rounds"] for c in calls),
            "round_ms": 1000 * statistics.median(c["round_seconds"] for c in calls),
            "round_ratio": beside_whole(size, "round_seconds"),
            "rate_ratio": 1 / beside_whole(size, "seconds"),
        }
        for size, calls in found.items()
    }
    header = ["ids", "of the text", "acceptance length", "ms / round", "beside whole", "tokens/s beside whole"]
    print(
        format_table(
            header,
            [
                [
                    f"{size:,}",
                    f"{100 * m['covered']:.1f} %",
                    f"{m['acceptance_length']:.3f}",
                    f"{m['round_ms']:.1f}",
                    f"{m['round_ratio']:.2f}",
                    f"{m['rate_ratio']:.2f}",
                ]
                for size, m in measured.items()
            ],
        )
    )
    if args.output is not None:
        document = {**provenance("python benchmarks/shortlist.py"), "sizes": measured}
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.write:
        best = max(measured, key=lambda size: measured[size]["rate_ratio"])
        config.set_shortlist(lists[best])
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
