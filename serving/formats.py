# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How do other projects lay out a draft, and how does one get from their folders to ours and back?

    domino-spec export runs/draft served --format sglang --target Qwen/Qwen3-8B
    domino-spec import z-lab/Qwen3-8B-DFlash-b16 drafts/dflash

All of them keep the same tensors, so a layout is a way to write `config.json`, and whether code lies beside it. What is
written is what was read: tensors byte for byte, and every field that the reader knows. Where a reader would compute
something else than the draft was trained for, the export is refused; likewise a folder that holds more than we compute
is not imported. Code that lies in a folder is never executed. A card and the records of a training stay behind.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from ..configuration_domino import HEAD_FIELDS, NESTED_FIELDS, DominoConfig
from ..modeling_domino import _FOREIGN_KEYS, DominoDraftModel
from . import sglang
from .folders import (
    DTYPES,
    expected_shapes,
    find_folder,
    read_config,
    read_headers,
    read_target_config,
    tensor_headers,
)
from .sglang import ARCHITECTURE

_DOMINO = "DominoDraftModel"


@dataclass(frozen=True)
class Layout:
    """
    How one reader wants the folder.

    Args:
        reader: who reads it.
        with_head: the class of a draft with a head (`architectures`), `None` if the reader knows no head.
        classes: what `auto_map` says of a class; without an entry there is no `auto_map`.
        nested: fields of `dflash_config`.
        flat: which of `NESTED_FIELDS` stand at the top level as well.
        code: whether our code lies beside the weights, and `config.json` is our own.
    """

    reader: str
    with_head: str | None = ARCHITECTURE
    classes: Mapping[str, str] = field(default_factory=dict)
    nested: tuple[str, ...] = NESTED_FIELDS
    flat: tuple[str, ...] = NESTED_FIELDS
    code: bool = False

    def rewrite(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The content of our `config.json`, in this layout."""
        architecture = (self.with_head if raw.get("projector_type") else None) or ARCHITECTURE
        written = {name: value for name, value in raw.items() if name not in NESTED_FIELDS or name in self.flat}
        written["architectures"] = [architecture]
        written["dflash_config"] = {k: v for k, v in raw["dflash_config"].items() if k in self.nested}
        written.pop("auto_map", None)
        if architecture in self.classes:
            written["auto_map"] = {"AutoModel": self.classes[architecture]}
        return written


LAYOUTS = {
    "hub": Layout("this package, or transformers with `trust_remote_code=True`", code=True),
    # sgl-project/sglang, python/sglang/srt/speculative/dflash_utils.py and models/dflash.py. It needs no code of ours,
    # and with --trust-remote-code, given for the sake of a target, would run it just to read the config.
    "sglang": Layout("SGLang"),
    # sgl-project/SpecForge, configs/qwen3-8b-domino.json, specforge/modeling/draft/dflash.py and domino.py; its
    # training compares `architectures` and `auto_map` with these names.
    "specforge": Layout(
        "SpecForge",
        with_head=_DOMINO,
        classes={_DOMINO: f"domino.{_DOMINO}", ARCHITECTURE: f"dflash.{ARCHITECTURE}"},
        nested=tuple(name for name in NESTED_FIELDS if name != "sliding_window_rule"),
        flat=("emb_dim",),
    ),
    # z-lab/dflash, dflash/model.py; vllm-project/vllm, vllm/model_executor/models/qwen3_dflash.py. z-lab's own folders
    # name a file `dflash.py` in `auto_map`; neither reader needs it, and there is none here.
    "dflash": Layout(
        "DFlash readers, vLLM among them", with_head=None, nested=("mask_token_id", "target_layer_ids"), flat=()
    ),
}


# ---- Writing -------------------------------------------------------------------------------------------------------


def export_draft(
    source: DominoDraftModel | str | Path,
    folder: str | Path,
    format: str,
    target: str | Path | None = None,
    dtype: torch.dtype | None = None,
    drop_head: bool = False,
) -> list[str]:
    """
    Write a draft in one of the `LAYOUTS`. Everything is checked before anything is written.

    Args:
        source: a draft; or a folder, a Hub id or `"default"`, in any of the layouts.
        folder: where to; it must not exist, or be empty.
        format: name of the layout.
        target: folder or Hub id of the target, to make sure that the two belong together; only its config is read.
        dtype: convert the weights to it; default: leave them as they are.
        drop_head: leave the head out, for a reader that knows none.

    Returns:
        What was changed and what should be known, in sentences; nothing if the reader gets just this draft.

    Raises:
        ValueError: if the format is not known, the folder is not free, the draft cannot be read, or the reader would
            not compute what it was trained for; the message says why and what to do.
    """
    if format not in LAYOUTS:
        raise ValueError(f"the format {format!r} is not known; known are {list(LAYOUTS)}")
    layout, folder = LAYOUTS[format], Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not an empty folder: name a new one, so that nothing old stays in it")
    # A draft may also be of the class that came as remote code with it.
    draft = load_draft(source, dtype) if isinstance(source, str | Path) else source
    if set(draft.state_dict()) != set(expected_shapes(draft.config)):
        raise ValueError("the draft carries an adapter: merge it first, with PEFT's `merge_and_unload()`")
    notes = []
    had = _dtypes(source)
    if dtype is not None and had != {dtype}:
        notes.append(f"The weights were converted from {', '.join(sorted(map(str, had)))} to {dtype}.")
    if drop_head and draft.config.has_head:
        notes.append("The head was left out: the backbone alone proposes, and less will be accepted.")
    draft = _converted(draft, dtype, drop_head)
    target_config = None if target is None else read_target_config(target)
    findings = [*_objections(format, draft, target_config)]
    if reasons := [str(finding) for finding in findings if finding.severity == "error"]:
        raise ValueError(f"cannot write this draft for {layout.reader}. {' '.join(reasons)}")

    # Written beside its place and moved there whole: half a folder looks right to a reader.
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        if layout.code:
            draft.save_pretrained(made)
        else:
            PreTrainedModel.save_pretrained(draft, made)  # our own adds the code
            text = json.dumps(layout.rewrite(read_config(made)), indent=2, sort_keys=True)
            (made / "config.json").write_text(f"{text}\n", encoding="utf-8")
            if draft.generation_config is not None:
                notes.append("The draft's generation defaults were left out: this reader has none.")
        made.chmod(0o755)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return notes + [str(finding) for finding in findings]


def _dtypes(source: DominoDraftModel | str | Path) -> set[torch.dtype | str]:
    if isinstance(source, str | Path):
        return {DTYPES.get(header.dtype, header.dtype) for header in read_headers(find_folder(source)).values()}
    return {tensor.dtype for tensor in source.state_dict().values()}


def _converted(draft: DominoDraftModel, dtype: torch.dtype | None, drop_head: bool) -> DominoDraftModel:
    """The draft with another dtype or without its head; the one given stays as it is. Made for saving only."""
    fields = draft.config.to_dict()
    for name in set(HEAD_FIELDS) - {"shift_label"} if drop_head else ():
        fields.pop(name, None)
        fields["dflash_config"].pop(name, None)
    with torch.device("meta"):
        copy = DominoDraftModel(DominoConfig.from_dict(fields))
    state = draft.state_dict()
    copy.load_state_dict({name: state[name].to(dtype or state[name].dtype) for name in copy.state_dict()}, assign=True)
    copy.generation_config = draft.generation_config
    return copy


def _objections(format: str, draft: DominoDraftModel, target: Any) -> Iterator[sglang.Finding]:
    """What stands against a format: SGLang's own rules, or those that the other readers share."""
    config, layout = draft.config, LAYOUTS[format]
    if format == "sglang":
        yield from sglang.judge(layout.rewrite(config.to_dict()), tensor_headers(draft.state_dict()), target)
        return
    if target is not None:
        yield from (finding for finding in sglang.judge_target(config, target) if finding.severity == "error")
    if format == "hub":
        return
    if config.has_head and layout.with_head is None:
        yield sglang.Finding(
            "projector_type",
            config.projector_type,
            f"{layout.reader}, know no head",
            "Ask for the backbone alone (`drop_head=True`, `--drop-head`), or choose another format",
        )
    if config.shift_label and (not config.has_head or layout.with_head is None):
        # vllm-project/vllm, vllm/v1/worker/gpu/spec_decode/dflash/speculator.py (refuses drafts that say so);
        # `_sample_draft_tokens` in sgl-project/SpecForge, specforge/modeling/draft/dflash.py; z-lab/dflash.
        yield sglang.Finding(
            "shift_label",
            True,
            "without a head, offset k is read as the token at anchor + k, so that every proposal would be one off",
            "Run it with transformers, or train with `shift_label: false`",
        )
    if config.sliding_window_rule != "causal" and "sliding_attention" in config.layer_types:
        # `_resolve_layer_attention` in vLLM's qwen3_dflash.py; `_attention_mask` in z-lab/dflash, dflash/model.py.
        yield sglang.Finding(
            "sliding_window_rule",
            config.sliding_window_rule,
            "it is read as 'causal' whatever the config says",
            "Run it with transformers, or train with 'causal'",
        )
    if _taps_the_last_layer(config):
        yield sglang.Finding("target_layer_ids", config.target_layer_ids, _LAST_LAYER, "Train with a lower layer")


# `extract_context_feature` in z-lab/dflash, dflash/model.py, takes it after the norm; vLLM, and the capture that
# SpecForge patches into SGLang, before.
_LAST_LAYER = (
    "readers take the last layer's output before or after the target's final norm, and the config does not say"
)


def _taps_the_last_layer(config: DominoConfig) -> bool:
    return config.num_target_layers is not None and config.num_target_layers - 1 in (config.target_layer_ids or ())


# ---- Reading -------------------------------------------------------------------------------------------------------


def import_draft(source: str | Path, folder: str | Path, dtype: torch.dtype | None = None) -> list[str]:
    """
    Write our own folder from one in any of the `LAYOUTS`: [`export_draft`] to `"hub"`.

    Args:
        source: folder or Hub id; weights in one file or several, under the names that trainers give them.
        folder: where to; it must not exist, or be empty.
        dtype: convert the weights to it; default: leave them as they are.

    Returns:
        What was changed, in sentences.

    Raises:
        ValueError: if the folder is not free, or the source is no draft that we compute as it was trained.
    """
    return export_draft(source, folder, "hub", dtype=dtype)


def load_draft(source: str | Path, dtype: torch.dtype | None = None) -> DominoDraftModel:
    """
    The draft in a folder of any layout, on the CPU. More careful than `DominoDraftModel.from_pretrained`: what we would
    leave out or convert without a word is an error.

    Args:
        source: folder, Hub id or `"default"`.
        dtype: of the weights; default: the one that they have.

    Raises:
        ValueError: if there is no draft, it has tensors or fields that we do not compute, its weights are of several
            dtypes, or do not fit the config.
    """
    folder = find_folder(source)
    config = _read_draft_config(folder)
    found = _dtypes(folder)
    kinds = ", ".join(sorted(map(str, found)))
    if not all(isinstance(kind, torch.dtype) for kind in found):
        raise ValueError(f"the weights of {source} are {kinds}: take those from before they were quantised")
    if dtype is None and len(found) > 1:
        raise ValueError(f"the weights of {source} are {kinds}: say which dtype to convert them to")
    # Early Domino drafts of SpecForge keep their head in a container (specforge/modeling/draft/dflash.py,
    # `normalize_draft_head_checkpoint_keys`).
    names = {**_FOREIGN_KEYS, r"^logit_head\.": ""}
    draft, info = DominoDraftModel.from_pretrained(
        folder, config=config, dtype=dtype or found.pop(), key_mapping=names, output_loading_info=True
    )
    if unknown := sorted(name for name in info["unexpected_keys"] if not name.startswith("rotary_emb.")):
        raise ValueError(
            f"{source} holds tensors that are no part of a draft of its config: {unknown}. It is another kind of "
            "draft, or its config lacks `projector_type`; remove them if they are of no use"
        )
    return draft


def _read_draft_config(folder: Path) -> DominoConfig:
    """Our reading of a foreign `config.json`, with other projects' words for the same things put into ours."""
    raw = read_config(folder)
    nested = dict(raw.pop("dflash_config", None) or {})
    nested |= raw.pop("domino_config", None) or {}  # sgl-project/SpecForge, scripts/gates/normalize_dflash_export.py
    architectures = raw.get("architectures") or [ARCHITECTURE]
    if not set(architectures) <= {ARCHITECTURE, _DOMINO}:
        raise ValueError(
            f"{folder} holds {architectures}: a draft's `architectures` is {ARCHITECTURE!r} or {_DOMINO!r}"
        )
    # SpecForge's name for no head, and the authors' first name for theirs (jianuo-huang/Domino).
    projector = nested.get("projector_type", raw.get("projector_type"))
    if projector in ("dflash", "causal_v5"):
        nested["projector_type"] = raw["projector_type"] = None if projector == "dflash" else "domino"
    # vllm-project/speculators and DeepSpec; sgl-project/sglang, pull request 40203, reads both as our `shift_label`.
    for name in ("sample_from_anchor", "query_zero_predicts_next"):
        for section in (raw, nested):
            if (value := section.pop(name, None)) is not None and nested.setdefault("shift_label", value) != value:
                raise ValueError(f"{folder}: `{name}` is {value}, but `shift_label` is {nested['shift_label']}")
    depth = nested.pop("num_target_layers", None)
    if depth is not None and raw.setdefault("num_target_layers", depth) != depth:
        raise ValueError(f"{folder}: `num_target_layers` is {raw['num_target_layers']} and in `dflash_config` {depth}")
    if unknown := sorted(set(nested) - {*NESTED_FIELDS, "block_size"}):
        raise ValueError(
            f"{folder}: `dflash_config` has {unknown}, which we do not know. Remove what only describes the training; "
            "with anything else this draft would compute something else here than it was trained for"
        )
    try:
        config = DominoConfig.from_dict({**raw, "dflash_config": nested})
        config.require_complete()
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split())}") from error
    if _taps_the_last_layer(config) and "context_features" not in raw:
        raise ValueError(
            f"{folder}: `target_layer_ids` is {config.target_layer_ids}: {_LAST_LAYER}. We take it before: if the "
            "draft was trained so, add `context_features` 'layer_output' to the config"
        )
    return config


# ---- Commands ------------------------------------------------------------------------------------------------------


_TORCH_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec import`."""
    parser.add_argument("source", metavar="DRAFT", help="folder or Hub id of a draft, or `default`")
    parser.add_argument("folder", metavar="FOLDER", help="where to write it: new, or empty")
    parser.add_argument("--dtype", choices=_TORCH_NAMES, help="convert the weights (default: leave them as they are)")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec export`."""
    add_import_arguments(parser)
    parser.add_argument("--format", choices=LAYOUTS, required=True, help="whose layout")
    parser.add_argument("--target", help="folder or Hub id of the target, to compare the two")
    parser.add_argument("--drop-head", action="store_true", help="write the backbone alone, as DFlash readers want it")


def run_import(args: argparse.Namespace) -> int:
    """
    Imports a draft and says what was changed.

    Raises:
        ValueError: as [`import_draft`].
    """
    return _report(import_draft(args.source, args.folder, _TORCH_NAMES.get(args.dtype)), args.folder)


def run_export(args: argparse.Namespace) -> int:
    """
    Exports a draft and says what was changed.

    Raises:
        ValueError: as [`export_draft`].
    """
    dtype = _TORCH_NAMES.get(args.dtype)
    notes = export_draft(args.source, args.folder, args.format, args.target, dtype, args.drop_head)
    return _report(notes, args.folder)


def _report(notes: list[str], folder: str) -> int:
    sys.stdout.write("".join(f"{line}\n" for line in [*notes, f"The draft is in {folder}"]))
    return 0
