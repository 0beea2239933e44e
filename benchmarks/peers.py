# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Where does our loop stand? Every way to decode the same prompts with the same weights, by turns in one process.

    python benchmarks/peers.py --prompts gsm8k.jsonl humaneval.jsonl mbpp.jsonl mt-bench.jsonl --num-prompts 4 \
        --output benchmarks/results/peers-cpu.json
    python benchmarks/peers.py --prompts gsm8k.jsonl --cache-implementation static --compile

Compared are plain `generate`; transformers' prompt lookup; the paper's loop written down plainly (`paper_loop.py`);
our loop with the head off (DFlash), with it (Domino), with the schedule that leaves out what does not pay, with a tree
of `--tree` proposals in each round, all of them the draft's, and with what stood in the text before among them; and, on
a copy of the draft that is told that its labels are not shifted, transformers' own DFlash loop and ours: that copy
proposes nonsense, so only the time of a round counts there.

Answers run to the limit, end tokens notwithstanding, so that every way writes the same text; that it does is checked. A
pass is one call of the target. A second table has the ratios to plain `generate` by file of prompts. Where nothing is
compiled, on the CPU, the passes that a round cannot do without are timed alone between the calls, and our loop is held
against what its acceptance length allows: that, times the time of a plain token, over the sum of these passes. The last
table splits a round of our loop by clocks on the modules, which cost a little themselves: it comes from calls of its
own.

`--cache-implementation static` gives the target a cache of fixed size, and `--compile` compiles its forward, for all
ways alike, so that ratios are to plain `generate` in the same mode; a way that cannot be run so is named and left out.
What `generate` would compile by itself on a GPU, where a static cache is asked for, is compiled by `--compile` alone.
Every shape is compiled before the clock starts: a call that would need another graph then ends the script.
"""

import argparse
import contextlib
import copy
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from paper_loop import paper_generate
from round_cost import PASSES, time_passes

from domino_spec.evaluation.benchmark import encode, load_pair, provenance, read_prompts
from domino_spec.evaluation.report import format_number, format_table

PLAIN, LOOKUP, PAPER = "plain", "prompt lookup", "paper's loop"
DFLASH, DOMINO, SCHEDULE = "head off", "domino", "domino, schedule"
TREE, LOOKUP_TREE = "domino, tree", "domino, tree and lookup"
STOCK_UNSHIFTED, UNSHIFTED = "unshifted: transformers", "unshifted: ours"
NONSENSE = (STOCK_UNSHIFTED, UNSHIFTED)

Answer = tuple[torch.LongTensor, dict[str, float]]


class Clocks:
    """Seconds of each call of some modules while the clocks run, but for calls within a call of another of them."""

    def __init__(self, **modules: torch.nn.Module):
        self.modules = modules
        self.calls: dict[str, list[float]] = {name: [] for name in modules}

    @contextlib.contextmanager
    def running(self) -> Iterator[dict[str, list[float]]]:
        self.calls = {name: [] for name in self.modules}
        stack: list[float] = []

        def start(*_):
            stack.append(now())

        def stop(name):
            def note(*_):
                started = stack.pop()
                if not stack:
                    self.calls[name].append(now() - started)

            return note

        handles = []
        for name, module in self.modules.items():
            handles += [module.register_forward_pre_hook(start), module.register_forward_hook(stop(name))]
        try:
            yield self.calls
        finally:
            for handle in handles:
                handle.remove()


def now() -> float:
    """Seconds, with the GPU's work done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def ways(
    target, draft, max_new_tokens: int, tree_size: int = 7, cache_implementation: str | None = None
) -> dict[str, Callable[..., Answer]]:
    """Every way by name: from inputs to ids `[N, S + new]` and the seconds that our loop counted by part."""
    unshifted = copy.deepcopy(draft)
    unshifted.config.shift_label = False
    # Else `generate` compiles plain decoding alone.
    cache = {} if cache_implementation is None else {"cache_implementation": cache_implementation}
    shared = {"max_new_tokens": max_new_tokens, "do_sample": False, "disable_compile": True, **cache}

    def generate(tree: int = 0, looks_up: bool = False, **options):
        def run(**inputs) -> Answer:
            draft.use_tree(tree, prompt_lookup=looks_up)
            output = target.generate(**inputs, return_dict_in_generate=True, **shared, **options)
            return output.sequences, getattr(output, "seconds", None) or {}

        return run

    def paper(input_ids, attention_mask) -> Answer:
        if cache:
            raise ValueError("it makes its own cache, which grows")
        return paper_generate(target, draft, input_ids, max_new_tokens)[0], {}

    def lookup(**inputs) -> Answer:
        if cache:
            # Compiled, that would end the process.
            raise ValueError("transformers has it write beyond the end of the cache")
        return generate(prompt_lookup_num_tokens=10)(**inputs)

    def in_tree(looks_up: bool):
        def run(**inputs) -> Answer:
            if cache:
                raise ValueError("its cache must grow")
            return generate(tree=tree_size, looks_up=looks_up, assistant_model=draft)(**inputs)

        return run

    head_off = {"custom_generate": draft.decode, "use_head": False}
    return {
        PLAIN: generate(),
        LOOKUP: lookup,
        PAPER: paper,
        DFLASH: generate(**head_off),
        DOMINO: generate(assistant_model=draft),
        SCHEDULE: generate(assistant_model=draft, num_assistant_tokens_schedule="heuristic"),
        TREE: in_tree(False),
        LOOKUP_TREE: in_tree(True),
        STOCK_UNSHIFTED: generate(assistant_model=unshifted, speculation_type="dflash"),
        UNSHIFTED: generate(custom_generate=unshifted.decode, use_head=False),
    }


def with_compiled_target(target, run: Callable[..., Answer]) -> Callable[..., Answer]:
    """
    `run` with `target.forward` compiled, for all lengths of text at once.

    No two ways may share what is compiled: what listens to the target's layers is compiled in with them, and ways that
    listen would run what was compiled for those that do not.
    """
    forward = torch.compile(target.forward, dynamic=True, isolate_recompiles=True, recompile_limit=64)

    def compiled(**inputs) -> Answer:
        own, target.forward = target.forward, forward
        try:
            return run(**inputs)
        finally:
            target.forward = own

    return compiled


def warm_up(named: dict[str, Callable[..., Answer]], prompts: list[dict]) -> dict[str, Callable[..., Answer]]:
    """
    Run every way on every prompt, and return those that can be run so; the others are named.

    Raises:
        Exception: what plain generation raises, beside which there is nothing to measure.
    """
    able = {}
    for name, run in named.items():
        try:
            for inputs in prompts:
                run(**inputs)
        # Ways fail in this mode as variously as they are made.
        except Exception as error:
            if name == PLAIN:
                raise
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            able[name] = run
    return able


def measure(
    target,
    named: dict[str, Callable[..., Answer]],
    prompts: dict[str, list[dict]],
    repeats: int,
    between=lambda _: None,
) -> dict[str, dict]:
    """
    By way: tokens per second of every call, by task, and tokens and passes of the target after the prefill's.

    Args:
        prompts: by task.
        between: called with the inputs of each prompt, once it has been answered.

    Raises:
        SystemExit: where a way writes another text than plain generation.
    """
    clocks = Clocks(target=target)
    found: dict[str, dict] = {
        name: {"rates": {task: [] for task in prompts}, "tokens": 0, "passes": 0} for name in named
    }
    names = list(named)
    for number, (task, inputs) in enumerate((task, inputs) for task, of_task in prompts.items() for inputs in of_task):
        texts, (rows, length) = {}, inputs["input_ids"].shape
        for repeat in range(repeats):
            turn = (number + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                start = now()
                texts[name] = named[name](**inputs)[0]
                found[name]["rates"][task].append((texts[name].numel() - rows * length) / (now() - start))
        for name, run in named.items():
            if not torch.equal(texts[name], texts[PLAIN]):
                raise SystemExit(f"{name} wrote another text than plain generation for a prompt of {task}")
            with clocks.running() as calls:
                run(**inputs)
            found[name]["tokens"] += texts[name].shape[1] - length - 1
            found[name]["passes"] += len(calls["target"]) - 1
        between(inputs)
    return found


def split(target, draft, run: Callable[..., Answer], prompts: list[dict]) -> dict[str, float]:
    """Milliseconds of a round of our loop by part; the parts are its whole time but for the prefill."""
    clocks = Clocks(target=target, backbone=draft)
    totals: dict[str, float] = defaultdict(float)
    rounds = 0
    for inputs in prompts:
        with clocks.running() as calls:
            parts = run(**inputs)[1]
        verify, backbone = sum(calls["target"][1:]), sum(calls["backbone"])
        rounds += len(calls["target"]) - 1
        for name, seconds in (
            ("target", verify),
            ("backbone", backbone),
            # Base logits and the head's steps: of a draft with a shortlist, the output head is no module of the target.
            ("scoring, rollout", parts["draft"] - backbone),
            ("verification", parts["verify"] - verify),
            ("host", parts["host"]),
        ):
            totals[name] += seconds
    return {name: 1000 * seconds / rounds for name, seconds in totals.items()}


def rates(numbers: dict) -> list[float]:
    """Tokens per second of all calls of a way, sorted."""
    return sorted(rate for of_task in numbers["rates"].values() for rate in of_task)


def table(found: dict[str, dict]) -> str:
    """
    A row for each way: medians, ratios to plain generation and to the paper's loop, tokens per pass. "In all" are all
    tokens over all seconds: answers are of one length, and a median over tasks as unlike as these hangs on the middle
    one.
    """
    medians = {name: statistics.median(rates(numbers)) for name, numbers in found.items()}
    in_all = {name: statistics.harmonic_mean(rates(numbers)) for name, numbers in found.items()}
    rows = []
    for name, numbers in found.items():
        of_calls, length = rates(numbers), numbers["tokens"] / numbers["passes"]
        rows.append(
            [
                name,
                format_number(medians[name], 1),
                f"{of_calls[len(of_calls) // 4]:.1f}..{of_calls[3 * len(of_calls) // 4]:.1f}",
                format_number(medians[name] / medians[PLAIN]),
                format_number(medians[name] / medians[PAPER]) if PAPER in medians else "-",
                format_number(in_all[name] / in_all[PLAIN]),
                format_number(in_all[name] / in_all[PAPER]) if PAPER in medians else "-",
                "-" if name in NONSENSE else format_number(length),
                format_number(1000 * length / medians[name], 1),
            ]
        )
    heads = ["", "tok/s", "middle half", "to plain", "to paper's", "in all, to plain", "to paper's"]
    return format_table([*heads, "tokens/pass", "ms/pass"], rows)


def table_by_task(found: dict[str, dict]) -> str:
    """A row for each task, a column for each way: its median tokens per second over plain generation's."""
    ways_shown = [name for name in found if name not in (PLAIN, *NONSENSE)]
    rows = []
    for task, plain in found[PLAIN]["rates"].items():
        medians = [statistics.median(found[name]["rates"][task]) for name in ways_shown]
        rows.append([task, *(format_number(median / statistics.median(plain)) for median in medians)])
    return format_table(["", *ways_shown], rows)


def held_against_limit(found: dict[str, dict], alone: dict[str, list[float]]) -> dict[str, float]:
    """What the acceptance length allows with passes of so many seconds, times plain, and our loop's share of it."""
    medians = {name: 1000 * statistics.median(seconds) for name, seconds in alone.items()}
    plain, ours = (statistics.median(rates(found[name])) for name in (PLAIN, DOMINO))
    allowed = found[DOMINO]["tokens"] / found[DOMINO]["passes"] * 1000 / plain / sum(medians.values())
    return {**medians, "sum": sum(medians.values()), "allowed": allowed, "reached": ours / plain / allowed}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE.jsonl")
    parser.add_argument("--num-prompts", type=int, default=4, help="of each file")
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tree", type=int, default=7, help="proposals of a round in the ways that have trees")
    parser.add_argument("--ways", nargs="+", help="only these (default: all)")
    parser.add_argument("--cache-implementation", choices=("static",), help="of the target, as `generate` takes it")
    parser.add_argument("--compile", action="store_true", help="the target's forward")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    target, tokenizer, draft = load_pair(args.target, args.draft, getattr(torch, args.dtype), args.device)
    target.generation_config.eos_token_id = None
    named = ways(target, draft, args.max_new_tokens, args.tree, args.cache_implementation)
    named = {name: run for name, run in named.items() if args.ways is None or name in {PLAIN, *args.ways}}
    prompts = {
        Path(path).stem: [
            encode(tokenizer, prompt.text, args.device) for prompt in read_prompts(path, args.num_prompts)
        ]
        for path in args.prompts
    }
    every_prompt = [inputs for of_task in prompts.values() for inputs in of_task]
    if args.compile:
        named = {name: with_compiled_target(target, run) for name, run in named.items()}
    as_it_is = not (args.compile or args.cache_implementation)
    if as_it_is:
        for run in named.values():
            run(**every_prompt[0])
    else:
        named = warm_up(named, every_prompt)
    alone: dict[str, list[float]] = {name: [] for name in PASSES}

    def time_alone(inputs):
        if as_it_is and args.device == "cpu" and DOMINO in named:
            middle = inputs["input_ids"].shape[1] + args.max_new_tokens // 2
            for name, seconds in time_passes(target, draft, 1, middle, new_context=2, repeats=8).items():
                alone[name] += seconds

    with torch.compiler.set_stance("fail_on_recompile") if args.compile else contextlib.nullcontext():
        found = measure(target, named, prompts, args.repeats, time_alone)
    print(table(found))
    print("\nto plain\n" + table_by_task(found))
    limit = held_against_limit(found, alone) if alone["target"] else None
    if limit is not None:
        print("\n" + format_table(list(limit), [[format_number(value, 2) for value in limit.values()]]))
    ours = [name for name in (DFLASH, DOMINO, TREE, LOOKUP_TREE) if name in named]
    parts = {name: split(target, draft, named[name], every_prompt) for name in ours}
    if parts:
        names = list(next(iter(parts.values())))
        rows = [[way, *(format_number(of_way[name], 2) for name in names)] for way, of_way in parts.items()]
        print("\nms of a round\n" + format_table(["", *names], rows))
    if args.output is not None:
        document = {
            **provenance("python benchmarks/peers.py"),
            "ways": found,
            "limit": limit,
            "round_milliseconds": parts,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
