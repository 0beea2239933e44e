# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does LoRA bring on one task, and what does it cost elsewhere? The embedded draft, adapted to writing SQL.

    python benchmarks/adapt_lora.py --work runs/lora --elsewhere gsm8k.jsonl mbpp.jsonl \
        --replay chat.jsonl extra.jsonl --results benchmarks/results/adapt_lora-cpu.json

The target answers questions about tables, made up here, which is the text of the task; it is measured on two tables
that are not trained on. `domino-spec train --peft` then adapts the draft to it, with some of the text that it was
trained on (`--replay`, as many rows of each file), so that it does not forget the rest. A draft with a shortlist gets
the ids of the answers added to it, adapted or not. Acceptance lengths are those of greedy decoding with the adapter and
without it. Text that `--work` holds already is not made again; the training always is, since its time is a result.
"""

import argparse
import itertools
import json
import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel

from domino_spec.evaluation.benchmark import encode_batch, load_pair, provenance, read_prompts
from domino_spec.evaluation.report import Prompt, format_table
from domino_spec.training import recipe
from domino_spec.training.data import load_rows
from domino_spec.training.features import TokenDataset
from domino_spec.training.regenerate import LocalTarget, regenerate
from domino_spec.training.regenerate import Prompt as Question

RECIPE = Path(__file__).parents[1] / "examples" / "recipes" / "adapter.yaml"

TABLES = {
    "customers": ("name", "city", "age", "signup_date"),
    "orders": ("customer_id", "total", "status", "order_date"),
    "products": ("name", "price", "category", "stock"),
    "employees": ("name", "salary", "department", "hire_date"),
    "books": ("title", "author", "pages", "release_date"),
    "students": ("name", "grade", "score", "birth_date"),
    "flights": ("origin", "destination", "price", "departure_date"),
    "movies": ("title", "director", "rating", "release_date"),
    "patients": ("name", "doctor", "weight", "visit_date"),
    "players": ("name", "team", "points", "joined_date"),
    "houses": ("address", "city", "price", "built_date"),
    "songs": ("title", "artist", "duration", "release_date"),
}
MEASURED_TABLES = ("flights", "songs")
NUMBERS = {"age", "total", "price", "salary", "pages", "score", "rating", "weight", "points", "duration"}
LEADS = ("Write an SQL query that", "Show me the SQL that", "How do I write SQL that")
ASKS = (
    "finds all {table} with {number} greater than {value}",
    "returns the average {number} of {table} for each {text}",
    "lists the {text} and {number} of the top {value} {table} by {number}",
    "counts the {table} for each {text} and sorts them in descending order",
    "finds the {table} whose {text} starts with the letter A",
    "updates the {number} of all {table} to {value} where {text} is missing",
    "deletes all {table} with {number} below {value}",
    "finds all {table} with a {date} in the last {value} days",
    "returns the highest and the lowest {number} of all {table}",
    "lists each {text} that appears more than {value} times in {table}",
)


def questions(tables: Iterable[str], seed: int = 0) -> list[str]:
    """Every request for each of `tables`, each said in four ways, shuffled."""
    rng = random.Random(seed)
    made = []
    for table, ask in itertools.product(tables, ASKS):
        columns = TABLES[table]
        leads = [*LEADS, f"Given a table {table} with the columns {', '.join(columns)}, write an SQL query that"]
        for lead in leads:
            request = ask.format(
                table=table,
                text=rng.choice([column for column in columns[:3] if column not in NUMBERS]),
                number=next(column for column in columns if column in NUMBERS),
                date=columns[3],
                value=rng.choice((3, 5, 10, 20, 50, 100, 500)),
            )
            made.append(f"{lead} {request}.")
    rng.shuffle(made)
    return made


def drawn(files: list[Path], count: int, seed: int = 0) -> list[str]:
    """About `count` lines in all, as many of each of `files`."""
    rng = random.Random(seed)
    lines = [path.read_text(encoding="utf-8").splitlines() for path in files]
    return [line for of_file in lines for line in rng.sample(of_file, min(count // len(files), len(of_file)))]


@torch.no_grad()
def acceptance(target, tokenizer, draft, prompts: list[Prompt], args) -> float:
    """Acceptance length of `draft` over greedy answers to `prompts`, in batches."""
    committed = rounds = 0
    for first in range(0, len(prompts), args.batch_size):
        batch = prompts[first : first + args.batch_size]
        inputs = encode_batch(tokenizer, [prompt.text for prompt in batch])
        output = target.generate(
            **inputs,
            assistant_model=draft,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        committed += int(output.acceptance_lengths.sum())
        rounds += int((output.acceptance_lengths > 0).sum())
    return committed / rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--elsewhere", type=Path, nargs="+", required=True, help="prompt files of other tasks")
    parser.add_argument("--replay", type=Path, nargs="+", required=True, help="conversations of all kinds")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--num-prompts", type=int, default=16, help="measured of each task")
    parser.add_argument("--num-train", type=int, default=400, help="answers trained on")
    parser.add_argument("--num-replay", type=int, default=800, help="of these, trained on")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8, help="of the measurement")
    parser.add_argument("--peft", default="all")
    parser.add_argument("--steps", type=int, default=300)
    args, rest = parser.parse_known_args()

    args.work.mkdir(parents=True, exist_ok=True)
    target, tokenizer, draft = load_pair("default", "default", torch.float32)
    measured = questions(MEASURED_TABLES)[: args.num_prompts]
    tasks = {"sql": [Prompt(f"sql/{i}", "sql", text) for i, text in enumerate(measured)]}
    tasks |= {path.stem: read_prompts(path, args.num_prompts) for path in args.elsewhere}

    answers = args.work / "sql.jsonl"
    trained = questions(table for table in TABLES if table not in MEASURED_TABLES)[: args.num_train]
    asked = [Question(f"sql/{i}", [{"role": "user", "content": text}]) for i, text in enumerate(trained)]
    regenerate(LocalTarget(target, tokenizer, max_new_tokens=args.max_new_tokens), asked, answers)

    adapter, features, replay = (args.work / name for name in ("adapter", "features", "replay.jsonl"))
    for folder in (adapter, features):
        shutil.rmtree(folder, ignore_errors=True)
    replay.write_text("\n".join(drawn(args.replay, args.num_replay)), encoding="utf-8")
    arguments = ["--train_data", str(answers), str(replay), "--features_dir", str(features)]
    arguments += ["--output_dir", str(adapter), "--peft", args.peft, "--max_steps", str(args.steps)]
    start = time.perf_counter()
    recipe.main([str(RECIPE), *arguments, *rest])
    train_seconds = time.perf_counter() - start

    if (shortlist := draft.config.shortlist_ids) is not None:
        made = load_rows(str(answers), tokenizer, 1 << 20, draft.config.vocab_size)[0]
        counts = TokenDataset(made).token_counts(draft.config.vocab_size)
        draft.config.set_shortlist({*shortlist, *counts.nonzero()[:, 0].tolist()})
        print(f"{len(shortlist)} ids on the draft's list, {len(draft.config.shortlist_ids)} with those of the answers")
    adapted = PeftModel.from_pretrained(draft, adapter).eval()
    rows = []
    for name, prompts in tasks.items():
        after = acceptance(target, tokenizer, adapted, prompts, args)
        with adapted.disable_adapter():
            before = acceptance(target, tokenizer, adapted, prompts, args)
        rows.append({"task": name, "before": before, "after": after, "ratio": after / before})
        print(f"{name}: {before:.3f} -> {after:.3f}", flush=True)
    rest_ratio = sum(row["after"] for row in rows[1:]) / sum(row["before"] for row in rows[1:])
    print(
        format_table(
            ["task", "acceptance length", "adapted", "ratio"],
            [[row["task"], f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['ratio']:.3f}"] for row in rows],
        )
    )
    print(f"elsewhere {rest_ratio:.3f}; training {train_seconds:.0f} s")
    if args.results is not None:
        document = {
            **provenance("python benchmarks/adapt_lora.py"),
            "train_seconds": train_seconds,
            "elsewhere": rest_ratio,
            "tasks": rows,
        }
        args.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
