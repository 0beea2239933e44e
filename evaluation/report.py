# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What do the timed calls of a benchmark say? Differences, sums over prompts, tables; no model is run here."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

# The target alone; with the draft; with the draft but its head off.
PLAIN, DOMINO, BASE_ONLY = "plain", "domino", "base_only"

QUANTITIES = """\
What the table shows, over the prompts of a task:
    tokens      new tokens of the plain runs, the end token included
    identical   prompts whose new tokens equal the plain run's, in every repeat
    ties        differences at a position where the plain run's scores of the two tokens in question are a rounding
                step apart (below 1e-3 in float32, two rounding steps of the score in half precision): there another
                order of the same additions can turn the choice. Any other difference is an error, and exit status 1.
    tau         acceptance length: committed tokens / rounds; the token of the prefill belongs to no round
    tau base    the same with the head off
    tok/s       new tokens / seconds of the whole `generate` call, prompt included; the median over calls
    ratio       median of domino / median of plain
"""


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file: its `id`, the `task` (stem of the file) and the `text` of the first user turn."""

    id: str
    task: str
    text: str


@dataclass(frozen=True)
class Call:
    """One timed `generate` call: new token ids (prompt excluded), wall-clock seconds, tokens committed per round."""

    tokens: tuple[int, ...]
    seconds: float
    acceptance_lengths: tuple[int, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


@dataclass(frozen=True)
class Difference:
    """
    Where the new tokens of `run` first leave the plain ones.

    `position` counts new tokens from 0. `margin` is the plain run's score of its own token less that of the other
    run's, `top2_margin` the distance of its two best scores; both are subtracted in float64 from the scores of the
    plain run, and None where one run simply ended earlier. `numeric_tie` says whether `margin` is below `threshold`.
    """

    prompt: str
    run: str
    position: int
    plain_token: int | None
    other_token: int | None
    margin: float | None = None
    top2_margin: float | None = None
    threshold: float | None = None
    numeric_tie: bool = False


@dataclass(frozen=True)
class PromptResult:
    """All calls made for one prompt (by name of the run, in order) and the differences found between them."""

    prompt: Prompt
    prompt_tokens: int
    calls: Mapping[str, Sequence[Call]]
    differences: Sequence[Difference] = field(default=())


# ---- Differences ---------------------------------------------------------------------------------------------------


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """First index at which two token sequences differ (one may end there), or None if they are equal."""
    for position, (a, b) in enumerate(itertools.zip_longest(left, right)):
        if a != b:
            return position
    return None


def tie_threshold(dtype: torch.dtype, score: float) -> float:
    """
    Margin below which two scores count as a numeric tie.

    In float32 and float64 it is 1e-3: differences of summation order reach a few 1e-5 there, distinct choices are
    mostly above 1e-2. In bfloat16 and float16 it is two rounding steps at the size of `score`, 2 * eps * 2^e with
    2^e <= |score| < 2^(e+1); for bfloat16 that is 0.25 for scores from 16 to 32.
    """
    if dtype in (torch.float32, torch.float64):
        return 1e-3
    return 2 * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(score), 1.0)))


def judge_difference(difference: Difference, scores: Tensor, dtype: torch.dtype) -> Difference:
    """
    Fills in the margins of a difference.

    Args:
        difference: with both tokens given.
        scores: [V], the plain run's processed scores at the difference's position, any float dtype.
        dtype: in which the target computed them; it sets the threshold.
    """
    if difference.plain_token is None or difference.other_token is None:
        return difference
    scores = scores.double()
    best, second = scores.topk(2).values.tolist()
    margin = (scores[difference.plain_token] - scores[difference.other_token]).item()
    threshold = tie_threshold(dtype, best)
    return replace(
        difference,
        margin=margin,
        top2_margin=best - second,
        threshold=threshold,
        numeric_tie=margin < threshold,
    )


# ---- Sums over prompts ---------------------------------------------------------------------------------------------


def acceptance_length(calls: Iterable[Call]) -> dict[str, Any]:
    """
    Committed tokens and rounds, summed over calls and divided last.

    Returns:
        `tokens`, `rounds`, `mean` (None without a round: the prefill alone gave the answer) and `histogram`, which
        maps tokens per round to the number of such rounds.
    """
    lengths = [length for call in calls for length in call.acceptance_lengths]
    return {
        "tokens": sum(lengths),
        "rounds": len(lengths),
        "mean": sum(lengths) / len(lengths) if lengths else None,
        "histogram": {length: lengths.count(length) for length in sorted(set(lengths))},
    }


def acceptance_by_position(histogram: Mapping[Any, int]) -> list[float]:
    """
    How often the first, second, ... proposal of a round was taken where those before it were.

    Args:
        histogram: rounds by the tokens they committed, as [`acceptance_length`] counts them; keys may be strings.

    Returns:
        One share for each position that any round reached. A round that the end of the answer cut short counts as if
        its next proposal had been refused.
    """
    rounds = {int(length): count for length, count in histogram.items()}
    reached = [
        sum(count for length, count in rounds.items() if length >= k) for k in range(1, max(rounds, default=0) + 1)
    ]
    return [taken / tried for tried, taken in itertools.pairwise(reached)]


def summarise(results: Sequence[PromptResult]) -> dict[str, Any]:
    """
    The `QUANTITIES` over `results`, which must not be empty.

    Every run that was made (the plain one first) appears under `runs` with its `new_tokens` (first call of each
    prompt), the median `tokens_per_second`, and, unless it is the plain one, its `ratio` to the plain median, the
    number of `identical` prompts, of `numeric_ties`, of `unexplained` differences, and its `acceptance_length`.
    """
    runs: dict[str, Any] = {}
    for name in results[0].calls:
        calls = [call for result in results for call in result.calls[name]]
        first_calls = [result.calls[name][0] for result in results]
        run: dict[str, Any] = {
            "new_tokens": sum(len(call.tokens) for call in first_calls),
            "tokens_per_second": statistics.median(call.tokens_per_second for call in calls),
        }
        if name != PLAIN:
            differences = [d for result in results for d in result.differences if d.run == name]
            run["ratio"] = run["tokens_per_second"] / runs[PLAIN]["tokens_per_second"]
            run["identical"] = len(results) - len(differences)
            run["numeric_ties"] = sum(difference.numeric_tie for difference in differences)
            run["unexplained"] = len(differences) - run["numeric_ties"]
            run["acceptance_length"] = acceptance_length(first_calls)
        runs[name] = run
    return {"prompts": len(results), "runs": runs}


def prompt_record(result: PromptResult) -> dict[str, Any]:
    """What the results file keeps of one prompt: counts, seconds of every call and differences, but no text."""
    runs = {}
    for name, calls in result.calls.items():
        runs[name] = {"new_tokens": len(calls[0].tokens), "seconds": [round(call.seconds, 4) for call in calls]}
        if name != PLAIN:
            runs[name]["rounds"] = len(calls[0].acceptance_lengths)
    return {
        "id": result.prompt.id,
        "task": result.prompt.task,
        "prompt_tokens": result.prompt_tokens,
        "runs": runs,
        "differences": [asdict(difference) for difference in result.differences],
    }


def by_task(results: Sequence[PromptResult]) -> dict[str, list[PromptResult]]:
    """Groups results by the task of their prompt, in order of first appearance."""
    tasks: dict[str, list[PromptResult]] = {}
    for result in results:
        tasks.setdefault(result.prompt.task, []).append(result)
    return tasks


# ---- Text ----------------------------------------------------------------------------------------------------------


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str] | None = None) -> str:
    """Aligns cells in columns, the first to the left and the others to the right; `total` goes below a rule."""
    lines = [list(header), *map(list, rows)] + ([list(total)] if total else [])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def join(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    text = [join(header), rule, *map(join, rows)]
    return "\n".join(text + ([rule, join(total)] if total else []))


def format_number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A number with fixed digits, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def format_summary(tasks: Mapping[str, Mapping[str, Any]], overall: Mapping[str, Any]) -> str:
    """The table of `domino-spec bench`: one row per task and one over all, from the output of [`summarise`]."""

    def row(name: str, summary: Mapping[str, Any]) -> list[str]:
        plain, domino, base_only = (summary["runs"][run] for run in (PLAIN, DOMINO, BASE_ONLY))
        return [
            name,
            str(summary["prompts"]),
            str(plain["new_tokens"]),
            f"{domino['identical']}/{summary['prompts']}",
            str(domino["numeric_ties"]),
            format_number(domino["acceptance_length"]["mean"]),
            format_number(base_only["acceptance_length"]["mean"]),
            format_number(plain["tokens_per_second"], 1),
            format_number(domino["tokens_per_second"], 1),
            format_number(domino["ratio"], 2, "x"),
        ]

    header = "task,prompts,tokens,identical,ties,tau,tau base,tok/s plain,tok/s domino,ratio".split(",")
    return format_table(header, [row(*item) for item in tasks.items()], row("overall", overall))


def describe_differences(results: Sequence[PromptResult]) -> list[str]:
    """One line for each difference: where, which tokens, how close the plain run's scores were, and what it means."""
    lines = []
    for difference in (difference for result in results for difference in result.differences):
        where = f"{difference.prompt}, {difference.run}: new token {difference.position}"
        if difference.margin is None:
            lines.append(f"{where}: one run ended before the other, NOT a numeric tie")
            continue
        verdict = "a numeric tie" if difference.numeric_tie else "NOT a numeric tie"
        lines.append(
            f"{where} is {difference.other_token} instead of {difference.plain_token}, margin "
            f"{difference.margin:.2e} (two best {difference.top2_margin:.2e}, tie below {difference.threshold:.2e}): "
            f"{verdict}"
        )
    return lines
