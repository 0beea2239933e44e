# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's pure parts, against cases counted by hand."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from domino_spec.evaluation import benchmark, report
from domino_spec.evaluation.benchmark import InputError
from domino_spec.evaluation.report import BASE_ONLY, DOMINO, PLAIN, Call, Difference, Prompt, PromptResult

VOCABULARY = 8


# ---- Differences ----


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [5], 0),
    ],
    ids=["equal", "both empty", "middle", "left ends", "right ends", "left empty"],
)
def test_first_difference(left, right, position):
    assert report.first_difference(left, right) == position


@pytest.mark.parametrize(
    ("dtype", "score", "threshold"),
    [
        (torch.float32, 20.0, 1e-3),
        (torch.float64, 20.0, 1e-3),
        (torch.bfloat16, 20.0, 0.25),
        (torch.bfloat16, -20.0, 0.25),
        (torch.bfloat16, 0.1, 2 / 128),
        (torch.float16, 20.0, 2 / 64),
    ],
    ids=str,
)
def test_a_tie_is_two_rounding_steps_in_half_precision_and_fixed_above(dtype, score, threshold):
    assert report.tie_threshold(dtype, score) == pytest.approx(threshold)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_rounding_steps_are_two_neighbours_of_the_score(dtype):
    score = torch.tensor(20.0, dtype=dtype)
    neighbour = torch.nextafter(score, torch.tensor(torch.inf, dtype=dtype))
    assert report.tie_threshold(dtype, score.item()) == 2 * (neighbour - score).item()


@pytest.mark.parametrize(
    ("other_token", "margin", "is_tie"),
    [(3, 2e-4, True), (5, 1.0, False)],
    ids=["the runner-up is close", "the token taken is not, though the runner-up is"],
)
def test_a_tie_is_judged_by_the_token_the_other_run_took(other_token, margin, is_tie):
    scores = torch.zeros(VOCABULARY, dtype=torch.float64)
    scores[2], scores[3], scores[5] = 4.0, 4.0 - 2e-4, 3.0
    judged = report.judge_difference(Difference("p", DOMINO, 7, 2, other_token), scores, torch.float32)
    assert judged.margin == pytest.approx(margin) and judged.top2_margin == pytest.approx(2e-4)
    assert judged.numeric_tie is is_tie and judged.position == 7


def test_a_run_that_ended_early_is_never_a_tie():
    difference = Difference("p", DOMINO, 3, plain_token=2, other_token=None)
    assert report.judge_difference(difference, torch.zeros(VOCABULARY), torch.float32) == difference
    assert not difference.numeric_tie


# ---- Sums ----


def result(identity, task, tokens, plain, domino, base=(), differences=()):
    """A result from (seconds of each call) for plain and from (seconds, acceptance lengths) for the others."""
    calls = {PLAIN: [Call(tuple(range(tokens)), seconds) for seconds in plain]}
    calls[DOMINO] = [Call(tuple(range(tokens)), seconds, lengths) for seconds, lengths in domino]
    if base:
        calls[BASE_ONLY] = [Call(tuple(range(tokens)), seconds, lengths) for seconds, lengths in base]
    return PromptResult(Prompt(identity, task, "text"), 5, calls, differences)


def test_acceptance_length_divides_the_sums_not_the_means():
    calls = [Call((0,) * 11, 1.0, (5, 5)), Call((0,) * 3, 1.0, (1, 1))]
    length = report.acceptance_length(calls)
    assert (length["tokens"], length["rounds"], length["mean"]) == (12, 4, 3.0)
    assert length["histogram"] == {1: 2, 5: 2}
    uneven = report.acceptance_length([Call((), 1.0, (8,)), Call((), 1.0, (1, 1, 1))])
    assert uneven["mean"] == 11 / 4


def test_acceptance_by_position_counts_the_rounds_that_got_so_far():
    # 10 rounds, of which 6 took the first proposal, 3 the second too, and 3 all three.
    assert report.acceptance_by_position({"1": 4, 2: 3, 4: 3}) == [0.6, 0.5, 1.0]
    assert report.acceptance_by_position({1: 5}) == []
    assert report.acceptance_by_position({}) == []


def test_an_answer_of_the_prefill_alone_has_no_acceptance_length():
    assert report.acceptance_length([Call((2,), 1.0, ())])["mean"] is None


def test_summary_counts_repeats_for_speed_and_prompts_for_everything_else():
    tie = Difference("b", DOMINO, 2, 1, 3, margin=1e-5, top2_margin=1e-5, threshold=1e-3, numeric_tie=True)
    lost = Difference("c", DOMINO, 2, 1, 3, margin=0.5, top2_margin=0.5, threshold=1e-3)
    results = [
        result("a", "t", 10, [1.0, 1.0], [(0.5, (4, 5)), (0.4, (4, 5))], [(1.0, (3, 3, 3)), (1.0, (3, 3, 3))]),
        result("b", "t", 10, [1.0, 2.0], [(0.5, (9,)), (0.5, (9,))], [(1.0, (9,)), (1.0, (9,))], [tie]),
        result("c", "t", 10, [1.0, 1.0], [(0.5, (9,)), (0.5, (9,))], [(1.0, (9,)), (1.0, (9,))], [lost]),
    ]
    summary = report.summarise(results)
    domino = summary["runs"][DOMINO]
    assert summary["prompts"] == 3 and summary["runs"][PLAIN]["new_tokens"] == 30
    assert summary["runs"][PLAIN]["tokens_per_second"] == 10.0 and domino["tokens_per_second"] == 20.0
    assert domino["ratio"] == 2.0
    assert (domino["identical"], domino["numeric_ties"], domino["unexplained"]) == (1, 1, 1)
    assert domino["acceptance_length"]["mean"] == 27 / 4
    assert summary["runs"][BASE_ONLY]["acceptance_length"]["mean"] == 27 / 5
    assert summary["runs"][BASE_ONLY]["identical"] == 3


def test_the_record_of_a_prompt_is_json_without_its_text():
    difference = Difference("a", DOMINO, 2, 1, 3, margin=0.5, top2_margin=0.5, threshold=1e-3)
    record = report.prompt_record(result("a", "t", 4, [1.0], [(0.5, (3,))], differences=[difference]))
    assert json.loads(json.dumps(record)) == record
    assert record["runs"][DOMINO] == {"new_tokens": 4, "seconds": [0.5], "rounds": 1}
    assert record["differences"][0]["margin"] == 0.5 and "text" not in json.dumps(record)


def test_tasks_keep_the_order_of_their_files():
    results = [result(str(i), task, 2, [1.0], [(1.0, (1,))]) for i, task in enumerate(["z", "a", "z"])]
    assert {task: len(members) for task, members in report.by_task(results).items()} == {"z": 2, "a": 1}
    assert list(report.by_task(results)) == ["z", "a"]


# ---- Text ----


def test_table_aligns_the_first_column_left_and_the_others_right():
    table = report.format_table(["task", "n"], [["a", "1"], ["longer", "200"]], ["all", "201"])
    assert table.splitlines() == [
        "task      n",
        "-----------",
        "a         1",
        "longer  200",
        "-----------",
        "all     201",
    ]


def test_the_bench_table_shows_both_acceptance_lengths_and_the_ratio():
    summary = report.summarise([result("a", "t", 10, [1.0], [(0.5, (4, 5))], [(1.0, (3, 3, 3))])])
    row = report.format_summary({"gsm8k": summary}, summary).splitlines()[2].split()
    assert row == ["gsm8k", "1", "10", "1/1", "0", "4.50", "3.00", "10.0", "20.0", "2.00x"]


def test_a_difference_is_described_with_its_margin_and_verdict():
    tie = Difference("a", DOMINO, 2, 1, 3, margin=1e-5, top2_margin=1e-5, threshold=1e-3, numeric_tie=True)
    ended = Difference("a", BASE_ONLY, 4, None, 3)
    lines = report.describe_differences([result("a", "t", 4, [1.0], [(1.0, (3,))], differences=[tie, ended])])
    assert "new token 2 is 3 instead of 1, margin 1.00e-05" in lines[0] and lines[0].endswith(": a numeric tie")
    assert "ended before the other" in lines[1] and "NOT" in lines[1]


# ---- Prompt files ----


def test_prompts_take_the_first_turn_and_the_stem_as_task(tmp_path):
    path = tmp_path / "mt-bench.jsonl"
    rows = [{"id": f"mt/{i}", "turns": [f"first {i}", "second"]} for i in range(3)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert benchmark.read_prompts(path, 2) == [Prompt(f"mt/{i}", "mt-bench", f"first {i}") for i in range(2)]
    assert len(benchmark.read_prompts(path)) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("", "holds no prompt"),
        ('{"id": 1, "turns": ["ok"]}\n{broken', "bad.jsonl:2 is not a row"),
        ('{"id": 1}', "bad.jsonl:1 is not a row"),
        ('["turns"]', "bad.jsonl:1 is not a row"),
        ('{"id": 1, "turns": []}', "bad.jsonl:1 is not a row"),
        ('{"id": 1, "turns": ["  "]}', "empty first turn"),
        ('{"id": 1, "turns": [7]}', "empty first turn"),
    ],
    ids=["no file", "empty", "broken json", "no turns", "a list", "zero turns", "blank turn", "turn is a number"],
)
def test_a_bad_prompt_file_is_named_with_the_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        benchmark.read_prompts(path)


# ---- Running, with stand-ins for the models ----


class ScriptedTarget:
    """Answers a prompt of two tokens with the plain run's tokens, or with those of the draft that is passed."""

    dtype = torch.float32

    def __init__(self, plain, log):
        self.plain, self.log = plain, log

    def generate(self, input_ids, max_new_tokens, assistant_model=None, custom_generate=None, **settings):
        assert settings["do_sample"] is False and settings["return_dict_in_generate"] is True
        if settings.get("output_scores"):
            scores = torch.zeros(max_new_tokens, 1, VOCABULARY)
            for position, token in enumerate(self.plain[:max_new_tokens]):
                scores[position, 0, token] = 1.0
            return SimpleNamespace(scores=tuple(scores))
        if custom_generate is not None:
            self.log.append(BASE_ONLY)
            return custom_generate(self, input_ids)
        if assistant_model is not None:
            self.log.append(DOMINO)
            return assistant_model.decode(self, input_ids)
        self.log.append(PLAIN)
        return SimpleNamespace(sequences=torch.cat([input_ids, torch.tensor([self.plain])], dim=1))


class ScriptedDraft:
    def __init__(self, tokens, lengths, base_lengths):
        self.tokens, self.lengths, self.base_lengths = tokens, lengths, base_lengths

    def decode(self, target, input_ids, use_head=True):
        return SimpleNamespace(
            sequences=torch.cat([input_ids, torch.tensor([self.tokens])], dim=1),
            acceptance_lengths=torch.tensor([self.lengths if use_head else self.base_lengths]),
        )


INPUTS = {"input_ids": torch.tensor([[1, 2]])}
PROMPT = Prompt("p", "t", "text")


def test_runs_rotate_and_every_call_is_timed():
    log = []
    draft = ScriptedDraft([3, 4, 5, 6], [3], [1, 2])
    made = benchmark.compare_runs(ScriptedTarget([3, 4, 5, 6], log), draft, PROMPT, INPUTS, 4, repeats=3, first=1)
    names = [PLAIN, DOMINO, BASE_ONLY]
    assert log == list(itertools.chain(names[1:], names[:1], names[2:], names[:2], names))
    assert made.differences == [] and made.prompt_tokens == 2
    assert made.calls[DOMINO][0].acceptance_lengths == (3,) and made.calls[BASE_ONLY][0].acceptance_lengths == (1, 2)
    assert all(len(calls) == 3 and all(call.seconds > 0 for call in calls) for calls in made.calls.values())


def test_a_lossy_draft_is_found_out():
    draft = ScriptedDraft([3, 4, 7, 6], [3], [3])
    made = benchmark.compare_runs(ScriptedTarget([3, 4, 5, 6], []), draft, PROMPT, INPUTS, 4, repeats=1)
    assert [(d.run, d.position, d.plain_token, d.other_token) for d in made.differences] == [
        (DOMINO, 2, 5, 7),
        (BASE_ONLY, 2, 5, 7),
    ]
    assert made.differences[0].margin == 1.0 and not made.differences[0].numeric_tie
    assert report.summarise([made])["runs"][DOMINO]["unexplained"] == 1


@pytest.mark.parametrize("tokens", [[3, 4], [3, 4, 5, 6]], ids=["draft ends early", "draft goes on"])
def test_answers_of_other_length_are_found_out(tokens):
    draft = ScriptedDraft(tokens, [len(tokens) - 1], [len(tokens) - 1])
    made = benchmark.compare_runs(ScriptedTarget([3, 4, 5], []), draft, PROMPT, INPUTS, 4, repeats=1)
    assert made.differences[0].position == min(len(tokens), 3) and made.differences[0].margin is None
    assert report.summarise([made])["runs"][DOMINO]["unexplained"] == 1


def test_acceptance_lengths_that_do_not_add_up_are_refused():
    draft = ScriptedDraft([3, 4, 5], [3], [3])
    with pytest.raises(RuntimeError, match="do not make 3 new tokens"):
        benchmark.compare_runs(ScriptedTarget([3, 4, 5], []), draft, PROMPT, INPUTS, 4, repeats=1)
