# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a draft's folder hold? Its config and the headers of its weights, wherever it lies; no weights are read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from ..checkpoints import default_draft_path, default_target_path
from ..configuration_domino import DominoConfig
from ..modeling_domino import DominoDraftModel

# In safetensors' spelling.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    """What a weight file says about a tensor without its data: the shape, and the dtype in safetensors' spelling."""

    shape: tuple[int, ...]
    dtype: str


def find_folder(source: str | Path) -> Path:
    """
    The folder of a draft: `source` itself, the embedded draft for `"default"`, or the snapshot of a Hub id (config and
    weights; what is missing is downloaded to the Hub's cache, where an engine looks as well). No code is fetched.

    Raises:
        ValueError: if there is no such folder and no such repository, or it cannot be reached.
    """
    if str(source) == "default":
        return default_draft_path()
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(source)!r} is no folder, and not to be had from the Hub: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """
    `config.json` as it stands.

    Raises:
        ValueError: if it is missing or not a JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no config.json that can be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} holds no JSON object but {type(config).__name__}")
    return config


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """
    Name, shape and dtype of every tensor in a folder, in one file or several, without reading the weights.

    As SGLang chooses the files (`_prepare_weights`, python/sglang/srt/model_loader/loader.py): those that the index
    lists, or without an index every `*.safetensors`.

    Raises:
        ValueError: if there is no file, or one is missing, cut off or no safetensors file.
    """
    try:
        if (folder / _INDEX).is_file():
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            files = sorted(set(index["weight_map"].values()))
        else:
            files = sorted(path.name for path in folder.glob("*.safetensors"))
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder / _INDEX} is no index of weight files: {error!r}") from error
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; weights in other files are not read")
    tensors = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    tensors[name] = TensorHeader(tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / file} is missing or cut off, download it again: {error}") from error
    return tensors


def tensor_headers(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorHeader]:
    """The headers that tensors will have in a file."""
    spelling = {dtype: name for name, dtype in DTYPES.items()}
    return {name: TensorHeader(tuple(t.shape), spelling.get(t.dtype, str(t.dtype))) for name, t in tensors.items()}


def expected_shapes(config: DominoConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a draft of this config has; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DominoDraftModel(config).state_dict().items()}


def read_target_config(target: str | Path) -> PretrainedConfig:
    """
    The text part of a target's config, from a folder, a Hub id or `"default"`; its remote code is not executed.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        target = default_target_path() if str(target) == "default" else target
        return AutoConfig.from_pretrained(target, trust_remote_code=False).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"cannot read the config of the target {str(target)!r}: {error}") from error
