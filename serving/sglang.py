# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Will SGLang serve the draft in a folder, and which command starts the server?

    domino-spec check-serving runs/draft --target Qwen/Qwen3-8B

Answers from `config.json` and the headers of the weight files alone, so it needs no GPU, no SGLang and no memory. The
rules are those that SGLang applies when it starts, or, worse, does not apply and then drafts nonsense: the target's
answers stay right, and nothing but the acceptance tells. Read in sgl-project/sglang, main of September 2026; the file
that a rule comes from stands beside it. Drafts with a head need SGLang 0.5.20 or newer (pull request 36899).
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from ..checkpoints import default_target_path
from ..configuration_domino import DominoConfig
from .folders import TensorHeader, expected_shapes, find_folder, read_config, read_headers, read_target_config

ENGINES = ("sglang",)
ARCHITECTURE = "DFlashDraftModel"
# python/sglang/srt/arg_groups/speculative_hook.py: for others the draft falls back to flashinfer with a warning. Left
# out: `trtllm_mha`, which falls back as well unless all layers are sliding, and `ascend`, which is no CUDA backend.
ATTENTION_BACKENDS = ("flashinfer", "fa3", "fa4", "triton")
# python/sglang/srt/speculative/domino_utils.py: ids whose correction is computed, the best of the block's base logits.
CANDIDATE_POOL = 2048

_HEAD = ("prefix_gru.", "embed_proj.")


@dataclasses.dataclass(frozen=True)
class Finding:
    """
    One thing that the engine refuses, or reads otherwise than it was meant.

    Args:
        field: name of a config field, a tensor or a file.
        value: what stands there.
        rule: what the engine makes of it.
        remedy: what to do.
        severity: `"error"`: the server does not start, or the draft is not the one that was trained. `"warning"`: it
            is served, with a difference that should be known.
    """

    field: str
    value: Any
    rule: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"`{self.field}` is {self.value!r}: {self.rule}. {self.remedy}."


# ---- Rules ---------------------------------------------------------------------------------------------------------


def check_serving(folder: str | Path, target: str | Path | None = None, engine: str = "sglang") -> list[Finding]:
    """
    What an engine will object to in a draft's folder, before anything is started.

    Args:
        folder: of the draft; a Hub id or `"default"` will do.
        target: folder or Hub id of the target, to compare the two; only its config is read.
        engine: one of `ENGINES`.

    Returns:
        Errors first, then warnings; none at all if the draft will be served as it was trained.

    Raises:
        ValueError: if the engine is not known, or there is no config of a draft or target to judge.
    """
    _require_known(engine)
    path = find_folder(folder)
    config, target_config = read_config(path), None if target is None else read_target_config(target)
    try:
        tensors = read_headers(path)
    except ValueError as error:
        return [Finding("weights", "not readable", str(error), "Nothing else was checked")]
    return judge(config, tensors, target_config)


def judge(
    raw: Mapping[str, Any], tensors: Mapping[str, TensorHeader], target: PretrainedConfig | None = None
) -> list[Finding]:
    """
    The same for a config and tensors at hand, written to a folder or not.

    Args:
        raw: content of `config.json`.
        tensors: what the weight files hold.
        target: text config of the target.
    """
    try:
        config = DominoConfig.from_dict(dict(raw))
        config.require_complete()
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        return [Finding("config.json", "not usable", reason, "Nothing else was checked")]
    findings = [*_judge_config(raw, config), *_judge_weights(config, tensors)]
    if target is not None:
        findings += judge_target(config, target)
    return sorted(findings, key=lambda finding: finding.severity)


def _judge_config(raw: Mapping[str, Any], config: DominoConfig) -> Iterator[Finding]:
    # `parse_dflash_draft_config` in python/sglang/srt/speculative/dflash_utils.py, unless another file is named.
    # Contradictions and wrong types were refused above, as we read a config more strictly than SGLang does.
    written = {**raw, **(raw.get("dflash_config") or {})}
    ids, depth = config.target_layer_ids or [], written.get("num_target_layers")
    for name, value, wanted in (
        ("architectures", raw.get("architectures"), [ARCHITECTURE]),  # python/sglang/srt/models/dflash.py, `EntryClass`
        ("model_type", raw.get("model_type"), "qwen3"),  # AutoConfig must find the Qwen3 fields in it
        ("hidden_act", config.hidden_act, "silu"),  # python/sglang/srt/models/dflash.py, `DFlashMLP`
    ):
        if value != wanted:
            remedy = "Write it anew with `domino-spec export --format sglang`, which refuses what cannot be mended"
            yield Finding(name, value, f"SGLang knows {wanted!r} only", remedy)
    if written.get("block_size") is None:
        remedy = "Write into the config what the draft was trained with"
        yield Finding("block_size", None, "SGLang takes 16 without a word", remedy, "warning")
    if depth is None and max(ids) >= config.num_hidden_layers:
        # `DFlashDraftModel.__init__` in python/sglang/srt/models/dflash.py
        yield Finding(
            "num_target_layers",
            None,
            f"SGLang takes the draft's own {config.num_hidden_layers} layers for the target's, and `target_layer_ids` "
            f"{ids} for out of range",
            "Write the target's number of layers into the config",
        )
    if depth is not None and max(ids) == depth - 1:
        # `set_dflash_layers_to_capture` in python/sglang/srt/models/qwen3.py, and the loop that it steers in qwen2.py.
        yield Finding(
            "target_layer_ids",
            ids,
            "SGLang takes the output of a layer where the next one begins, which most targets (Qwen's are among them) "
            "never do after the last",
            "Train with a lower layer, or make sure that SGLang's file of your target treats the last one",
            "warning",
        )
    if config.sliding_window_rule != "causal" and "sliding_attention" in config.layer_types:
        # `_get_dflash_layer_attention_params` in python/sglang/srt/models/dflash.py
        yield Finding(
            "sliding_window_rule",
            config.sliding_window_rule,
            "SGLang's sliding layers see no key after the query and none before the window ('causal')",
            "Serve it with transformers, or train with the rule 'causal'",
        )
    if not config.has_head:
        if config.shift_label:  # sgl-project/sglang issue 40144
            yield Finding(
                "shift_label",
                True,
                "SGLang reads offset k of a draft without a head as the token at anchor + k, so that every proposal "
                "would be one off and next to nothing accepted",
                "Serve it with transformers, or train with `shift_label: false`",
            )
        return
    if not isinstance(written.get("shift_label"), bool):
        remedy = "Write true if offset k was trained on the token at anchor + 1 + k, else false"
        yield Finding("shift_label", None, "SGLang wants it in writing for a draft with a head", remedy)
    if config.pure_draft_prefix_len != 1:
        yield Finding(
            "pure_draft_prefix_len",
            config.pure_draft_prefix_len,
            "SGLang leaves just the first proposal uncorrected, and serves no other number",
            "Train with 1; another number in the config alone would correct other proposals than were trained",
        )


def _judge_weights(config: DominoConfig, tensors: Mapping[str, TensorHeader]) -> Iterator[Finding]:
    # `load_weights` in python/sglang/srt/models/dflash.py: a prefix `model.` is taken off, names that it does not know
    # are passed over, and only the head's tensors are missed when they are not there.
    expected = expected_shapes(config)
    found = {name.removeprefix("model."): header for name, header in tensors.items()}
    if missing := sorted(set(expected) - set(found)):
        yield Finding(
            "weights",
            sorted(set(found) - set(expected)),
            f"SGLang looks for {missing} under just these names; without them it refuses a head, and would run a "
            "backbone on uninitialised memory",
            "If they have other names here, `domino-spec import` rewrites them",
        )
    elif unknown := sorted(set(found) - set(expected)):
        without_head = [name for name in unknown if name.startswith(_HEAD)]
        yield Finding(
            "weights",
            unknown,
            "SGLang refuses a head's tensors under a config that announces none"
            if without_head
            else "SGLang passes over tensors that it does not know",
            "Set `projector_type` to 'domino' and give the head's fields, or remove the tensors"
            if without_head
            else "Make sure that the draft does without them",
            "error" if without_head else "warning",
        )
    for name in sorted(set(expected) & set(found)):
        if found[name].shape != expected[name]:
            yield Finding(
                name,
                found[name].shape,
                f"the config gives it the shape {expected[name]}",
                "Correct the config, or find the weights that belong to it",
            )
    # `validate_domino_runtime` in python/sglang/srt/speculative/domino_utils.py
    dtypes = Counter(header.dtype for header in found.values())
    if set(dtypes) != {"BF16"}:
        yield Finding(
            "dtype",
            dict(dtypes),
            "SGLang serves a head in bfloat16 only" if config.has_head else "SGLang rounds the weights to bfloat16",
            "Convert it knowingly: `domino-spec export --format sglang --dtype bfloat16`",
            "error" if config.has_head else "warning",
        )


def judge_target(config: DominoConfig, target: PretrainedConfig) -> Iterator[Finding]:
    """Whether a draft fits a target, by their configs: sizes first, then signs that it was made for another one."""
    other = "It belongs to another target"
    if config.hidden_size != target.hidden_size:
        yield Finding("hidden_size", config.hidden_size, f"the target's is {target.hidden_size}", other)
    # `validate_domino_runtime` in python/sglang/srt/speculative/domino_utils.py
    if config.has_head and config.vocab_size != target.vocab_size:
        yield Finding(
            "vocab_size",
            config.vocab_size,
            f"the head scores every id of the target, which has {target.vocab_size}",
            f"{other}, or fit it with `draft.resize_token_embeddings({target.vocab_size})` and save it",
        )
    # `_resolve_mask_token_id` in python/sglang/srt/speculative/dflash_worker_v2.py
    if (config.mask_token_id or 0) >= target.vocab_size:
        yield Finding(
            "mask_token_id", config.mask_token_id, f"the target's embedding has {target.vocab_size} rows", other
        )
    if config.num_target_layers not in (None, target.num_hidden_layers):
        yield Finding(
            "num_target_layers",
            config.num_target_layers,
            f"the target has {target.num_hidden_layers} layers, so others would be read than were trained on",
            other,
        )
    # `_derive_context_length` in python/sglang/srt/configs/model_config.py
    limit = getattr(target, "max_position_embeddings", None)
    if limit and config.max_position_embeddings < limit:
        yield Finding(
            "max_position_embeddings",
            config.max_position_embeddings,
            f"SGLang does not start a draft that is shorter than the target's context of {limit}",
            f"Limit the context: `--context-length {config.max_position_embeddings}`",
            "warning",
        )


# ---- Launching -----------------------------------------------------------------------------------------------------


def launch_command(
    draft: str | Path,
    target: str = "TARGET",
    block_size: int | None = None,
    candidate_pool: int | None = None,
    attention_backend: str = "flashinfer",
    context_length: int | None = None,
    engine: str = "sglang",
    config: DominoConfig | None = None,
) -> list[str]:
    """
    The command that serves a target with its draft, word by word.

    Args:
        draft: folder or Hub id.
        target: the same of the target, as SGLang shall find it.
        block_size: positions that are verified in a round, the anchor among them; default: the draft's own. Fewer save
            verification where many requests run at once.
        candidate_pool: how many of the best base logits a head corrects; 0 is all, slower and exact.
        attention_backend: one of `ATTENTION_BACKENDS`, for target and draft.
        context_length: longest prompt and answer; default: the target's.
        engine: one of `ENGINES`.
        config: of the draft; default: as its folder has it.

    Raises:
        ValueError: if an option does not fit the draft or the engine.
    """
    _require_known(engine)
    config = config or DominoConfig.from_dict(read_config(find_folder(draft)))
    own_size = int(config.block_size or 0)
    size = own_size if block_size is None else block_size
    if not 2 <= size <= own_size:
        raise ValueError(f"block_size is {size}, but this draft can be used with 2 to {own_size}")
    if attention_backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend is {attention_backend!r}, but a draft runs with {ATTENTION_BACKENDS}")
    command = ["python", "-m", "sglang.launch_server", "--model-path", target, "--dtype", "bfloat16"]
    command += ["--speculative-algorithm", "DFLASH"]
    command += ["--speculative-draft-model-path", str(find_folder(draft) if str(draft) == "default" else draft)]
    # python/sglang/srt/arg_groups/fields/spec.py calls it another name of --speculative-num-draft-tokens. It is the one
    # to use: versions to come may count the bonus token among the draft tokens, not so in the block.
    command += ["--speculative-dflash-block-size", str(size)]
    if config.has_head:
        pool = CANDIDATE_POOL if candidate_pool is None else candidate_pool
        if pool < 0:
            raise ValueError(f"candidate_pool is {pool}, but it is a number of ids, or 0 for all")
        command += ["--speculative-domino-candidate-pool-size", str(pool)]
    elif candidate_pool is not None:
        raise ValueError(f"candidate_pool is {candidate_pool}, but this draft has no head to correct anything")
    command += ["--attention-backend", attention_backend]
    if context_length is not None:
        command += ["--context-length", str(context_length)]
    return command


def _require_known(engine: str) -> None:
    if engine not in ENGINES:
        raise ValueError(f"the engine {engine!r} is not known; known are {list(ENGINES)}")


# ---- Command -------------------------------------------------------------------------------------------------------


def add_check_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec check-serving`."""
    parser.add_argument("folder", metavar="DRAFT", help="folder or Hub id of a draft, or `default`")
    parser.add_argument("--engine", default="sglang", help=f"one of {', '.join(ENGINES)} (default: %(default)s)")
    parser.add_argument("--target", help="folder or Hub id, to compare the two and for the command")
    parser.add_argument("--block-size", type=int, metavar="N", help="positions verified in a round (default: all)")
    parser.add_argument("--candidate-pool", type=int, metavar="N", help=f"ids corrected (default: {CANDIDATE_POOL})")
    parser.add_argument("--attention-backend", default="flashinfer", choices=ATTENTION_BACKENDS)
    parser.add_argument("--json", action="store_true", help="print findings and command as JSON")


def run_check_serving(args: argparse.Namespace) -> int:
    """
    Prints what the engine will object to, and the command that starts it where nothing stands against it.

    Returns:
        0 if the draft will be served, else 1.

    Raises:
        ValueError: if something asked for cannot be had.
    """
    findings = check_serving(args.folder, args.target, args.engine)
    served = not any(finding.severity == "error" for finding in findings)
    command = None
    if served:
        limits = [finding.value for finding in findings if finding.field == "max_position_embeddings"]
        command = launch_command(
            args.folder,
            str(default_target_path()) if args.target == "default" else args.target or "TARGET",
            args.block_size,
            args.candidate_pool,
            args.attention_backend,
            min(limits, default=None),
            args.engine,
        )
    if args.json:
        document = {"served": served, "findings": [dataclasses.asdict(finding) for finding in findings]}
        text = json.dumps({**document, "command": command}, indent=1)
    else:
        lines = [f"{finding.severity}: {finding}" for finding in findings]
        verdict = "will serve" if served else "will not serve"
        lines.append(f"{args.engine} {verdict} {args.folder}" + ("" if command is None else ":"))
        text = "\n".join([*lines, *([] if command is None else [shlex.join(command)])])
    sys.stdout.write(f"{text}\n")
    return int(not served)
