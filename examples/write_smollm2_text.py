# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Have SmolLM2-135M-Instruct write training text of its own: the second part of the embedded draft's text.

    python examples/write_smollm2_text.py --output extra.jsonl --num_prompts 4000 [--questions chat.jsonl]

Prompts of five kinds in equal parts as far as they go, shuffled: problems made from the signatures and docstrings of
Python's standard library, one-sentence coding tasks, open questions, mathematics in LaTeX, and (with `--questions`, a
file of chat rows) its word problems with other numbers. Three of four are answered greedily, one at temperature 0.7.
A killed run goes on where it stopped. On few cores, one process of one thread each is faster than one with all:
`--part 0/2` and `--part 1/2` divide the prompts.
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
from domino_spec.training.regenerate import LocalTarget, Prompt, read_prompts, regenerate

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
        "the missing number in a list of consecutive integers",
        "the common elements of two lists",
        "the first repeated character in a string",
        "the greatest common divisor of two integers",
        "the index of a value in a sorted list",
        "the largest sum of a contiguous subarray",
        "the minimum of a rotated array",
        "the intersection of two intervals",
        "all factors of an integer",
        "all words that start with a vowel",
        "the union of two tuples",
        "the difference between the largest and the smallest number",
        "the length of the longest increasing subsequence",
    ],
    "count": [
        "the vowels in a string",
        "the words in a paragraph",
        "the set bits of an integer",
        "the prime numbers below n",
        "nodes in a binary tree",
        "the pairs with a given sum in a list",
        "the uppercase letters in a string",
        "the digits of a number",
        "the occurrences of an element in a tuple",
        "the ways to climb n stairs",
        "the inversions in an array",
        "the lists within a list",
    ],
    "check whether": [
        "two strings are anagrams",
        "a year is a leap year",
        "a matrix is symmetric",
        "the brackets in a string are balanced",
        "a graph has a cycle",
        "an integer is prime",
        "a number is a palindrome",
        "a list is sorted",
        "a triangle is equilateral",
        "an email address is valid",
        "a number is a perfect square",
        "a string contains only digits",
        "one list is a sublist of another",
        "a number is divisible by 3 and 5",
        "all elements of a list are equal",
        "a tuple contains a given value",
    ],
    "compute": [
        "the area of a trapezoid",
        "the nth fibonacci number",
        "the edit distance of two strings",
        "the compound interest of an investment",
        "the transpose of a matrix",
        "the sum of the digits of a number",
        "the factorial of a number",
        "the volume of a cylinder",
        "the average of each column of a table",
        "the dot product of two vectors",
        "the power of a number without the power operator",
        "the sum of all even numbers in a list",
        "the number of days between two dates",
        "the least common multiple of a list",
        "the surface area of a sphere",
        "the product of two polynomials",
        "the running total of a list",
        "the nth pentagonal number",
        "the perimeter of a rectangle",
        "the standard deviation of a list of numbers",
    ],
    "convert": [
        "a decimal number to binary",
        "a roman numeral to an integer",
        "seconds to hours, minutes and seconds",
        "a nested list to a flat list",
        "a string to title case",
        "a list of tuples to a dictionary",
        "a date to another format",
        "celsius to fahrenheit",
        "a list of characters to a string",
        "a tuple of strings to integers",
        "snake case to camel case",
    ],
    "remove": [
        "all duplicates from a list keeping the order",
        "every vowel from a string",
        "punctuation from a text",
        "the nth element of a list",
        "all whitespace from a string",
        "empty tuples from a list",
        "a key from a dictionary",
        "even numbers from a list",
        "the first and last occurrence of a character",
        "odd characters of a string",
    ],
    "sort": [
        "a list of tuples by their second element",
        "a dictionary by value",
        "words by their length",
        "a list of dictionaries by a key",
        "numbers by their last digit",
        "a mixed list of integers and strings",
        "a list of lists by their sums",
        "an array with the merge sort algorithm",
    ],
    "implement": [
        "binary search on a sorted list",
        "a queue using two stacks",
        "a simple LRU cache",
        "quick sort",
        "a trie",
        "a bank account class",
        "a linked list with insertion and deletion",
        "breadth-first search on a graph",
        "a priority queue",
        "matrix multiplication",
        "a tic-tac-toe game",
        "a caesar cipher",
        "a stack with a minimum operation",
        "run-length encoding",
        "the sieve of Eratosthenes",
        "a temperature converter class",
    ],
    "split": [
        "a string at each uppercase letter",
        "a list into chunks of size n",
        "a list into even and odd numbers",
        "a sentence into words without split",
    ],
    "merge": ["two sorted lists", "two dictionaries that share keys", "overlapping intervals", "three lists into one"],
    "reverse": ["the words of a sentence", "an integer", "a linked list", "a list up to a given position"],
    "replace": ["spaces in a string with a character", "the maximum of a list with zero", "all vowels with a star"],
}
FORMS = ["a function", "a python function", "a Python program", "a JavaScript function", "a Java method"]
TOPICS = (
    "climate change,a small bakery,learning the piano,black holes,a trip to Japan,remote work,healthy breakfasts,"
    "machine learning,the stock market,photosynthesis,ancient Rome,a lost dog,electric cars,time management,"
    "the ocean,vaccines,public speaking,a haunted house,job interviews,coffee,the human heart,renewable energy,"
    "sleep,chess,social media,a startup idea,bicycles,probability,democracy,volcanoes,a road trip,gardening,robots,"
    "artificial intelligence,the moon landing,recycling,a magic mirror,superconductors,the French Revolution,wine,"
    "insurance,a new smartphone,marathon training,whales,the theory of relativity,homework,a rainy day,inflation,"
    "poetry,cooking pasta"
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
# "@" stands for a digit, "@@" for a number up to 60; together, "@@@" is a number of two or three.
MATHEMATICS = [
    "Solve for $x$: $@x + @@ = @@x - @$.",
    "If $@x + @y = @@$ and $@x - y = @$, what is the value of $x + y$?",
    "Find the sum of the roots of $@x^2 - @@x + @ = 0$.",
    "Compute $\\binom{@@}{@}$.",
    "What is the greatest common divisor of $@@@$ and $@@@$?",
    "What is the remainder when $@^{@@}$ is divided by $@@$?",
    "Let $f(x) = @x^2 - @x + @$. Find $f(@) - f(-@)$.",
    "If $f(x) = \\frac{@x - @}{x + @}$, what is $f^{-1}(@)$?",
    "A rectangle has length $@@$ cm and width $@@$ cm. What is the length of its diagonal, in simplest radical form?",
    "In triangle $ABC$, $AB = @@$, $AC = @@$ and $\\angle A = 60^\\circ$. Find the area of the triangle.",
    "How many positive integers less than $@@@$ are divisible by $@$ or $@$?",
    "Two fair dice are rolled. What is the probability that the sum is at least $@$? Answer with a fraction.",
    "Evaluate $\\sum_{k=1}^{@@} (@k + @)$.",
    "Simplify $\\sqrt{@@@} + \\sqrt{@@}$.",
    "The sum of an infinite geometric series is $@@$ and its first term is $@$. What is the common ratio?",
    "Express $0.\\overline{@@}$ as a common fraction.",
    "Find the distance between the points $(@, -@)$ and $(-@, @@)$.",
    "What is the area of a circle whose circumference is $@@\\pi$?",
    "Convert $@@@_{10}$ to base $@$.",
    "A bag has @ red and @ blue marbles. Two are drawn without replacement. What is the probability that both are red?",
    "Evaluate $\\log_{@} (@^{@@})$.",
    "Find the largest integer $n$ such that $n^2 < @@@$.",
    "If $a : b = @ : @$ and $b : c = @ : @$, find $a : c$.",
    "How many ways are there to arrange @ people in a row if two of them must stand together?",
    "Compute $(@ + @i)(@ - @i)$, where $i^2 = -1$.",
    "What is the slope of the line through $(@, @@)$ and $(@@, @)$?",
    "Expand $(@x - @)(x^2 + @x - @)$.",
    "For what values of $x$ is $|@x - @@| < @$? Give your answer in interval notation.",
]
REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."


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


def mathematics(count: int, rng: random.Random) -> list[str]:
    """`count` short problems in LaTeX with random numbers: algebra, numbers, counting, geometry, functions."""

    def fill(match: re.Match) -> str:
        return str(rng.randint(2, 9 if match.group() == "@" else 60))

    return [re.sub("@@?", fill, rng.choice(MATHEMATICS)) for _ in range(count)]


def make_prompts(count: int, questions: str | None, seed: int) -> list[str]:
    """`count` prompts, the kinds in equal parts as far as they go."""
    rng = random.Random(seed)
    kinds = [
        library_problems(),
        [f"Write {form} to {verb} {task}." for verb, tasks in TASKS.items() for task in tasks for form in FORMS],
        [question.format(topic) for question in QUESTIONS for topic in TOPICS],
        [problem + REASON for problem in mathematics(count // 5, rng)],
    ]
    if questions is not None:
        asked = sorted(
            {row["messages"][0]["content"] for _, row in read_conversations(questions, DataReport()) if _counts(row)}
        )
        kinds.append([with_other_numbers(question, rng) + REASON for question in asked for _ in range(3)])
    for kind in kinds:
        rng.shuffle(kind)
    mixed = [prompt for group in itertools.zip_longest(*kinds) for prompt in group if prompt is not None]
    return list(dict.fromkeys(mixed))[:count]


def _counts(row: dict) -> bool:
    return len(re.findall(r"\d+", row["messages"][0]["content"])) >= 2


def words(text: str) -> tuple[str, ...]:
    """The words and numbers of `text`: what makes two prompts the same, but for the form of a task."""
    text = re.sub(r"(?i)write (a|an) ([a-z]+ )?(function|program|method) to", "", text)
    return tuple(word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in ("a", "an", "the", "given"))


def int_pair(text: str) -> tuple[int, int]:
    """`"I/N"` as numbers."""
    first, every = map(int, text.split("/"))
    return first, every


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--num_prompts", type=int, default=4000)
    parser.add_argument("--questions", help="chat rows whose word problems are asked again with other numbers")
    parser.add_argument("--without", nargs="+", default=[], help="files of prompts never to ask: those of benchmarks")
    parser.add_argument("--part", type=int_pair, default=(0, 1), metavar="I/N", help="every Nth prompt from the Ith on")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target, tokenizer = load_default_target(dtype=torch.bfloat16)
    held_out = {words(prompt.messages[0]["content"]) for path in args.without for prompt in read_prompts(path)}
    prompts = make_prompts(args.num_prompts, args.questions, args.seed)
    asked = [
        Prompt(f"{args.seed}/{i}", [{"role": "user", "content": text}], 0.7 if i % 4 == 3 else 0.0)
        for i, text in enumerate(prompts)
        if words(text) not in held_out
    ]
    first, every = args.part
    answerer = LocalTarget(target, tokenizer, batch_size=args.batch_size, seed=args.seed)
    regenerate(answerer, asked[first::every], args.output)


if __name__ == "__main__":
    main()
