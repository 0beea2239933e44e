# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How much does a draft gain, and is its output the target's own?

    domino-spec bench --prompts gsm8k.jsonl mt-bench.jsonl --num-prompts 16 --repeats 3 --output results.json

Every prompt is answered by the target alone ("plain"), with the draft ("domino") and with the draft's head off
("base_only"), greedily, in one process and in rotating order, so that a machine whose speed drifts slows all three
alike.
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints import default_draft_path, load_default_target
from ..modeling_domino import DominoDraftModel
from . import report
from .report import BASE_ONLY, DOMINO, PLAIN, Call, Difference, Prompt, PromptResult

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_WARMUP_TOKENS = 16
_SETTINGS = (
    "target",
    "draft",
    "no_thinking",
    "num_prompts",
    "max_new_tokens",
    "dtype",
    "device",
    "repeats",
    "tree",
    "threads",
)


class InputError(ValueError):
    """What the caller asked for cannot be had; the message is one line and says which value, why, and what helps."""


# ---- Reading what is asked for -------------------------------------------------------------------------------------


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """
    The first `limit` rows (default: all) of a jsonl file with rows `{"id": ..., "turns": [first user turn, ...]}`.

    Raises:
        InputError: if the file cannot be read, a row is not of that form, or there is none.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # `splitlines` also splits at characters within a string
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompt file {path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = None if isinstance(row["turns"], str) else row["turns"][0]
        except (ValueError, TypeError, LookupError) as error:
            raise InputError(f'{path}:{number} is not a row like {{"id": ..., "turns": ["..."]}}: {error!r}') from error
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{path}:{number} has an empty first turn, or one that is not text: {text!r}")
        prompts.append(Prompt(id=str(row.get("id", f"{path.stem}/{number - 1}")), task=path.stem, text=text))
        if len(prompts) == limit:
            break
    if not prompts:
        raise InputError(f"the prompt file {path} holds no prompt")
    return prompts


def load_pair(
    target: str, draft: str, dtype: torch.dtype, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DominoDraftModel]:
    """
    Loads a target, its tokenizer and a draft; `"default"` stands for the embedded pair, anything else is a folder or
    a Hub id. Both models get `dtype` and `device` and are in evaluation mode.

    Raises:
        InputError: if one of them cannot be loaded, or does not fit on the device.
    """
    with naming("target", target):
        if target == "default":
            model, tokenizer = load_default_target(dtype)
        else:
            # Left out, transformers asks whether to run a repository's code and takes the next line for the answer.
            model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, trust_remote_code=False).eval()
            tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
        model = model.to(device)
    with naming("draft", draft):
        path = default_draft_path() if draft == "default" else draft
        return model, tokenizer, DominoDraftModel.from_pretrained(path, dtype=dtype).eval().to(device)


@contextlib.contextmanager
def naming(role: str, name: str):
    """Turns what goes wrong while a model is loaded into an [`InputError`] that names it."""
    try:
        yield
    # RuntimeError: sizes that differ, no memory left; the last three: a config that is none.
    except (
        *(ImportError, OSError, ValueError, RuntimeError, StrictDataclassError, SafetensorError),
        *(TypeError, KeyError, AttributeError),
    ) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"cannot load the {role} {name!r}: {reason}") from error


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, device: str | torch.device = "cpu", **template: Any
) -> dict[str, Tensor]:
    """
    `input_ids` and `attention_mask`, both long [1, S], of one user turn in the tokenizer's chat template, if it has
    one. `template` are variables for the template, such as `enable_thinking`.
    """
    if tokenizer.chat_template is not None:
        return encode_conversation(tokenizer, [{"role": "user", "content": text}], device, **template)
    encoded = tokenizer(text, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    device: str | torch.device = "cpu",
    **template: Any,
) -> dict[str, Tensor]:
    """
    `input_ids` and `attention_mask`, both long [1, S], of a conversation up to where the assistant speaks next.

    Raises:
        InputError: if the tokenizer has no chat template, or one that refuses the conversation.
    """
    if tokenizer.chat_template is None:
        raise InputError("the target's tokenizer has no chat template, so there are no turns: give a single prompt")
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True, return_tensors="pt", **template
        )
    except TemplateError as error:
        raise InputError(f"the target's chat template does not take this conversation: {error}") from error
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def encode_batch(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> dict[str, Tensor]:
    """
    `input_ids` and `attention_mask`, both long [N, S], padded on the left, of one user turn each in the tokenizer's
    chat template. Leaves the tokenizer padding on the left.
    """
    tokenizer.padding_side = "left"
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return dict(
        tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
    )


# ---- Running -------------------------------------------------------------------------------------------------------


def generation_runs(
    target: PreTrainedModel,
    draft: DominoDraftModel,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
    names: Sequence[str] = (PLAIN, DOMINO, BASE_ONLY),
) -> dict[str, Callable[[], Any]]:
    """
    The greedy `generate` calls to compare, by name and ready to be made; each returns `generate`'s output object.

    Args:
        inputs: `input_ids` and `attention_mask`, long [1, S].
        names: which of the three runs.
    """
    greedy = functools.partial(
        target.generate, **inputs, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True
    )
    runs = {
        PLAIN: greedy,
        DOMINO: functools.partial(greedy, assistant_model=draft),
        BASE_ONLY: functools.partial(greedy, custom_generate=functools.partial(draft.decode, use_head=False)),
    }
    return {name: runs[name] for name in names}


def timed_call(run: Callable[[], Any], prompt_tokens: int) -> Call:
    """
    Makes one call of [`generation_runs`] and takes its time, GPU work included.

    Raises:
        RuntimeError: if the reported acceptance lengths do not add up to the new tokens after the prefill's one.
    """
    _synchronize()
    start = time.perf_counter()
    output = run()
    _synchronize()
    seconds = time.perf_counter() - start
    tokens = tuple(output.sequences[0, prompt_tokens:].tolist())
    lengths = getattr(output, "acceptance_lengths", None)
    if lengths is None:
        return Call(tokens, seconds)
    rounds = tuple(lengths[0].tolist())
    if sum(rounds) + 1 != len(tokens):
        raise RuntimeError(f"acceptance lengths {rounds} and the prefill's token do not make {len(tokens)} new tokens")
    return Call(tokens, seconds, rounds)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare_runs(
    target: PreTrainedModel,
    draft: DominoDraftModel,
    prompt: Prompt,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
    repeats: int,
    names: Sequence[str] = (PLAIN, DOMINO, BASE_ONLY),
    first: int = 0,
    on_call: Callable[[], Any] = lambda: None,
) -> PromptResult:
    """
    Answers one prompt `repeats` times with each run, in rotating order, and compares every call with the first plain
    one; a run that differs in several repeats is listed once. That the plain run repeats itself is checked as well.

    Args:
        inputs: `input_ids` and `attention_mask`, long [1, S], of the prompt.
        names: which runs to make, the plain one first.
        first: index of the run that begins; the next repeat begins with the next run.
        on_call: called after each call, for a progress bar.

    """
    prompt_tokens = inputs["input_ids"].shape[1]
    runs = generation_runs(target, draft, inputs, max_new_tokens, names)
    calls: dict[str, list[Call]] = {name: [] for name in names}
    for repeat in range(repeats):
        for step in range(len(names)):
            name = names[(first + repeat + step) % len(names)]
            calls[name].append(timed_call(runs[name], prompt_tokens))
            on_call()

    plain = calls[PLAIN][0].tokens
    differences = []
    for name in names:
        other = next((call.tokens for call in calls[name] if call.tokens != plain), plain)
        position = report.first_difference(plain, other)
        if position is None:
            continue
        difference = Difference(prompt.id, name, position, _at(plain, position), _at(other, position))
        if difference.plain_token is not None:
            scores = _plain_scores(target, inputs, position)
            difference = report.judge_difference(difference, scores, target.dtype)
        differences.append(difference)
    return PromptResult(prompt, prompt_tokens, calls, differences)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _plain_scores(target: PreTrainedModel, inputs: Mapping[str, Tensor], position: int) -> Tensor:
    """Processed scores [V] from which the plain run took its new token `position`."""
    output = target.generate(
        **inputs,
        max_new_tokens=position + 1,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return output.scores[position][0]


def warm_up(
    target: PreTrainedModel,
    draft: DominoDraftModel,
    inputs: Mapping[str, Tensor],
    names: Sequence[str] = (PLAIN, DOMINO, BASE_ONLY),
) -> None:
    """Makes one short call of each run, so that no timed call pays for first-time work."""
    for call in generation_runs(target, draft, inputs, _WARMUP_TOKENS, names).values():
        call()


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on: processor, cores, threads torch uses, GPU if there is one, memory in GiB."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {
        "cpu": _cpu_model(),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
    }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        machine["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return machine


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def provenance(program: str, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """
    What a results file says about where its numbers come from: the command, the machine and the versions.

    Args:
        program: as it is called: `python benchmarks/round_cost.py`, say.
        argv: its arguments; default: those of the process.
    """
    return {
        "command": f"{program} {shlex.join(_without_secrets(sys.argv[1:] if argv is None else argv))}".rstrip(),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def _without_secrets(argv: Sequence[str]) -> list[str]:
    """Arguments as typed, but for the values of tokens and keys: a record lies beside weights and is uploaded."""
    shown, hide = [], False
    for word in argv:
        name, given, _ = word.partition("=")
        option = name.lstrip("-").replace("-", "_")
        secret = name.startswith("--") and option.endswith(("_token", "_key")) and option != "mask_token"
        shown.append("***" if hide else f"{name}=***" if secret and given else word)
        hide = secret and not given
    return shown


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide about speed and numerics."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("domino-spec", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


# ---- Command -------------------------------------------------------------------------------------------------------


def positive_int(text: str) -> int:
    """An integer of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares which models a command runs, and how; see [`open_pair`]."""
    pair = "`default` (the embedded one), a folder or a Hub id"
    parser.add_argument("--target", default="default", help=f"{pair} (default: %(default)s)")
    parser.add_argument("--draft", default="default", help=f"{pair} (default: %(default)s)")
    parser.add_argument("--no-thinking", action="store_true", help="pass enable_thinking=False to the chat template")
    parser.add_argument("--dtype", choices=DTYPES, help="of both models (default: bfloat16 on a GPU, float32 on a CPU)")
    add_device_argument(parser)
    parser.add_argument("--threads", type=positive_int, help="CPU threads (default: torch's own choice)")


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Declares where a command computes: on the GPU if there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu, cuda, cuda:1, ... (default here: %(default)s)")


def check_device(device: str) -> None:
    """
    Raises:
        InputError: if `device` cannot be used.
    """
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"--device {device} cannot be used here: {reason}") from error


def open_pair(
    args: argparse.Namespace,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DominoDraftModel, dict[str, Any]]:
    """
    What the options of [`add_pair_arguments`] ask for: target, tokenizer, draft, and variables for the chat template.

    Raises:
        InputError: if the device cannot be used or a model cannot be loaded.
    """
    check_device(args.device)
    args.dtype = args.dtype or ("float32" if torch.device(args.device).type == "cpu" else "bfloat16")
    if args.threads:
        torch.set_num_threads(args.threads)
    template = {"enable_thinking": False} if args.no_thinking else {}
    return *load_pair(args.target, args.draft, DTYPES[args.dtype], args.device), template


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what a measuring command reads, and where its numbers go; see [`open_prompts`]."""
    parser.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="FILE.jsonl",
        help='prompt files, one task each: rows {"id": ..., "turns": ["first user turn", ...]}',
    )
    parser.add_argument("--num-prompts", type=positive_int, help="prompts taken from each file (default: all)")
    parser.add_argument("--output", type=Path, metavar="RESULTS.json", help="where to write all numbers")
    parser.add_argument("--json", action="store_true", help="print them, instead of the table")


def open_prompts(args: argparse.Namespace) -> list[Prompt]:
    """
    The prompts that the options of [`add_prompt_arguments`] ask for.

    Raises:
        InputError: if a file cannot be read, or `--output` not be written: before hours of measuring, not after.
    """
    prompts = [prompt for path in args.prompts for prompt in read_prompts(path, args.num_prompts)]
    if args.output is not None:
        try:
            # Unlike `touch`, this fails for a folder too.
            with args.output.open("a"):
                pass
        except OSError as error:
            raise InputError(f"--output {args.output} cannot be written: {error.strerror}") from error
    return prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec bench`."""
    add_pair_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="per answer (default: %(default)s)")
    parser.add_argument("--repeats", type=positive_int, default=1, help="calls of each run (default: %(default)s)")
    parser.add_argument(
        "--tree",
        type=positive_int,
        default=0,
        metavar="N",
        help="have each round offer a tree of N proposals, as `draft.use_tree(N)` does (default: proposals in a row)",
    )


def run(args: argparse.Namespace) -> int:
    """
    Runs the benchmark, prints its table and writes `args.output`.

    Args:
        args: the options of [`add_arguments`], and as `argv` the arguments as typed, for the record.

    Returns:
        0, or 1 if some output differs from the plain one where the target's choice was no numeric tie.

    Raises:
        InputError: if something asked for cannot be had, before anything is generated.
    """
    prompts = open_prompts(args)
    target, tokenizer, draft, template = open_pair(args)
    draft.use_tree(args.tree)
    device = target.device

    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    warm_up(target, draft, encode(tokenizer, prompts[0].text, device, **template))
    results = []
    with tqdm(total=len(prompts) * args.repeats * 3, unit="call", file=sys.stderr) as bar:
        for index, prompt in enumerate(prompts):
            bar.set_description(prompt.id)
            inputs = encode(tokenizer, prompt.text, device, **template)
            results.append(
                compare_runs(
                    target, draft, prompt, inputs, args.max_new_tokens, args.repeats, first=index, on_call=bar.update
                )
            )

    tasks = {task: report.summarise(members) for task, members in report.by_task(results).items()}
    overall = report.summarise(results)
    document: dict[str, Any] = {
        **provenance("domino-spec", args.argv),
        "started": started,
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "tasks": tasks,
        "overall": overall,
        "prompts": [report.prompt_record(result) for result in results],
    }
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        print(
            f"target {args.target}, draft {args.draft}, greedy, {args.dtype}, {args.max_new_tokens} new tokens at most"
        )
        machine = document["machine"]
        where = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads"
        print(f"{where}; torch {document['versions']['torch']}")
        print(f"\n{report.format_summary(tasks, overall)}\n")
        print("What the columns mean: domino-spec bench --help")
        for line in report.describe_differences(results):
            print(line)
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(run["unexplained"] for name, run in overall["runs"].items() if name != PLAIN))
