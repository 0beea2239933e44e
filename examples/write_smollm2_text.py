# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Have SmolLM2-135M-Instruct write training text of its own: the second part of the embedded draft's text.

    python examples/write_smollm2_text.py --output extra.jsonl --num_prompts 1280 [--questions chat.jsonl]

Prompts of four kinds in equal parts, shuffled: problems made from the signatures and docstrings of Python's standard
library, one-sentence coding tasks, open questions, and (with `--questions`, a file of chat rows) its word problems
with other numbers. Three of four are answered greedily, one at temperature 0.7. About 350 tokens/s on 2 cores.
A killed run goes on where it stopped.
"""

import argparse
import importlib
import inspect
import itertools
import random
import re

import torch

from domino_spec.checkpoints import load_default_target
from domino_spec.training.data import DataReport, read_conversations
from domino_spec.training.regenerate import LocalTarget, Prompt, regenerate

MODULES = (
    "ast base64 bisect bz2 calendar cmath colorsys contextlib copy csv datetime decimal difflib email.utils fnmatch "
    "fractions functools glob gzip heapq html inspect ipaddress itertools json keyword linecache locale logging math "
    "mimetypes operator os.path pprint random re secrets shlex shutil statistics string struct tempfile textwrap types "
    "unicodedata urllib.parse uuid zipfile zlib"
).split()
TASKS = {
    "find": [
        "the second largest number in a list",
        "the longest word in a sentence",
        "the most common character in a string",
        "the median of three numbers",
        "the shortest path in a grid",
        "the key with the largest value in a dictionary",
        "the kth smallest element in a heap",
    ],
    "count": [
        "the vowels in a string",
        "the words in a paragraph",
        "the set bits of an integer",
        "the prime numbers below n",
        "nodes in a binary tree",
    ],
    "check whether": [
        "two strings are anagrams",
        "a year is a leap year",
        "a matrix is symmetric",
        "the brackets in a string are balanced",
        "a graph has a cycle",
        "an integer is prime",
    ],
    "compute": [
        "the area of a trapezoid",
        "the nth fibonacci number",
        "the edit distance of two strings",
        "the compound interest of an investment",
        "the transpose of a matrix",
    ],
    "convert": [
        "a decimal number to binary",
        "a roman numeral to an integer",
        "seconds to hours, minutes and seconds",
        "a nested list to a flat list",
    ],
    "remove": ["all duplicates from a list keeping the order", "every vowel from a string", "punctuation from a text"],
    "sort": ["a list of tuples by their second element", "a dictionary by value", "words by their length"],
    "implement": [
        "binary search on a sorted list",
        "a queue using two stacks",
        "a simple LRU cache",
        "quick sort",
        "a trie",
        "a bank account class",
    ],
}
FORMS = ["a function", "a python function", "a Python program", "a JavaScript function", "a Java method"]
TOPICS = (
    "climate change,a small bakery,learning the piano,black holes,a trip to Japan,remote work,healthy breakfasts,"
    "machine learning,the stock market,photosynthesis,ancient Rome,a lost dog,electric cars,time management,the ocean,"
    "vaccines,public speaking,a haunted house,job interviews,coffee,the human heart,renewable energy,sleep,chess,"
    "social media,a startup idea,bicycles,probability,democracy,volcanoes"
).split(",")
QUESTIONS = [
    "Write a short story about {}.",
    "Explain {} to a ten-year-old.",
    "Write a persuasive email about {}.",
    "What are the pros and cons of {}?",
    "Give me five interesting facts about {}.",
    "Write a blog post introduction about {}.",
    "Outline a lesson plan on {}.",
    "Write a dialogue between two friends about {}.",
    "Imagine you are a journalist. Write a headline and an opening paragraph about {}.",
]


def library_problems() -> list[str]:
    """Signature and docstring of each public function of `MODULES`, as a problem to solve."""
    problems = []
    for name in MODULES:
        for function, value in sorted(vars(importlib.import_module(name)).items()):
            doc = inspect.getdoc(value) if callable(value) and not function.startswith("_") else None
            if not doc or len(doc) < 30:
                continue
            try:
                signature = str(inspect.signature(value))
            except (TypeError, ValueError):
                signature = "(x)"
            if len(signature) > 80:
                signature = "(values)"
            text = doc.split("\n\n")[0][:600].replace("\n", "\n    ")
            problems.append(
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                f'```python\n\ndef {function}{signature}:\n    """{text}\n    """\n\n```'
            )
    return problems


def with_other_numbers(question: str, rng: random.Random) -> str:
    """The same word problem with its whole numbers changed; years stay."""

    def change(match: re.Match) -> str:
        number = int(match.group())
        if number > 1900:
            return match.group()
        return str(max(1, number + rng.randint(-max(1, number // 2), max(2, number))))

    return re.sub(r"(?<![\d.,])\d+(?![\d.,]*\d)", change, question)


def make_prompts(count: int, questions: str | None, seed: int) -> list[str]:
    """`count` prompts, the kinds in equal parts as far as they go."""
    rng = random.Random(seed)
    kinds = [
        library_problems(),
        [f"Write {form} to {verb} {task}." for verb, tasks in TASKS.items() for task in tasks for form in FORMS],
        [question.format(topic) for question in QUESTIONS for topic in TOPICS],
    ]
    if questions is not None:
        asked = sorted(
            {row["messages"][0]["content"] for _, row in read_conversations(questions, DataReport()) if _counts(row)}
        )
        suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
        kinds.append([with_other_numbers(question, rng) + suffix for question in asked for _ in range(2)])
    for kind in kinds:
        rng.shuffle(kind)
    mixed = [prompt for group in itertools.zip_longest(*kinds) for prompt in group if prompt is not None]
    return list(dict.fromkeys(mixed))[:count]


def _counts(row: dict) -> bool:
    return len(re.findall(r"\d+", row["messages"][0]["content"])) >= 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--num_prompts", type=int, default=1280)
    parser.add_argument("--questions", help="chat rows whose word problems are asked again with other numbers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target, tokenizer = load_default_target(dtype=torch.bfloat16)
    prompts = make_prompts(args.num_prompts, args.questions, args.seed)
    asked = [
        Prompt(f"{args.seed}/{i}", [{"role": "user", "content": text}], 0.7 if i % 4 == 3 else 0.0)
        for i, text in enumerate(prompts)
    ]
    regenerate(LocalTarget(target, tokenizer, seed=args.seed), asked, args.output)


if __name__ == "__main__":
    main()
