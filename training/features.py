# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Where do context features come from? One target pass over the training text, kept on disk and read memory-mapped."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..generation.context import TargetParts
from .data import ChatRow

ROWS_PER_SHARD = 64


def feature_bytes(rows: Sequence[ChatRow], hidden_size: int, num_layers: int) -> int:
    """Bytes on disk for the features of `rows`: bf16, `num_layers` tapped layers and the last hidden state."""
    return sum(len(row.input_ids) for row in rows) * hidden_size * (num_layers + 1) * 2


def target_fingerprint(target: PreTrainedModel) -> str:
    """
    Tells targets apart: the architecture, its shape, and a few weights from all over it. In bf16, so that the dtype a
    target is loaded with makes no difference.
    """
    config = target.config.get_text_config(decoder=True)
    shape = [getattr(config, name) for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")]
    digest = hashlib.blake2b(repr(shape).encode(), digest_size=8)
    parameters = [p for _, p in sorted(target.named_parameters()) if p.is_floating_point() and not p.is_meta]
    for parameter in parameters[:: max(1, len(parameters) // 16)]:
        some = parameter.detach().flatten()[:64].to("cpu", torch.bfloat16)
        digest.update(some.view(torch.int16).numpy().tobytes())
    return f"{config.model_type}-{digest.hexdigest()}"


def _digest(rows: Sequence[ChatRow]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(repr((row.input_ids, row.loss_mask)).encode())
    return f"{len(rows)}-{digest.hexdigest()}"


@torch.no_grad()
def target_features(
    target: PreTrainedModel, parts: TargetParts, input_ids: torch.LongTensor, layer_ids: list[int]
) -> dict[str, torch.Tensor]:
    """
    One pass of the frozen target over rows padded on the right: causal attention keeps padding out of real positions.

    Args:
        target, parts: the target, and its parts.
        input_ids (`torch.LongTensor` of shape `[N, S]`): on any device.
        layer_ids (`list[int]`): zero-based decoder layers.

    Returns:
        `context_hidden_states` `[N, S, T * H]` and `last_hidden_state` `[N, S, H]`, both bf16, on the target's device.
    """
    with parts.capture(layer_ids) as capture:
        output = target.get_decoder()(input_ids=input_ids.to(target.device), use_cache=False)
        context = capture.take(target.device)
    return {
        "context_hidden_states": context.to(torch.bfloat16),
        "last_hidden_state": output.last_hidden_state.to(torch.bfloat16),
    }


def cache_features(
    target: PreTrainedModel, rows: Sequence[ChatRow], layer_ids: list[int], folder: str | Path, batch_size: int = 8
):
    """
    Write shards with, for each row, its tokens, loss mask, context features and last hidden states (bf16).

    A finished shard is never made again, so a killed run goes on where it stopped; a folder made with other layers or
    another target is refused.

    Args:
        target: the frozen target; the dtype it was loaded with is the dtype of the pass.
        rows: tokenised conversations; their order fixes the shards.
        layer_ids (`list[int]`): zero-based decoder layers.
        folder: where the shards go.
        batch_size (`int`): rows of one target pass.

    Raises:
        ValueError: when `folder` holds features made under other settings.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"target": target_fingerprint(target), "layer_ids": layer_ids, "rows": _digest(rows)}
    manifest = folder / "features.json"
    if manifest.exists() and (found := json.loads(manifest.read_text())) != settings:
        names = [name for name in settings if found.get(name) != settings[name]]
        differs = "; ".join(f"{name} {found.get(name)}, not {settings[name]}" for name in names)
        raise ValueError(f"{folder} holds features made with other settings ({differs}): use another folder.")
    manifest.write_text(json.dumps(settings))

    parts = TargetParts(target)
    starts = range(0, len(rows), ROWS_PER_SHARD)
    for start in tqdm(starts, desc="target features", unit="shard"):
        path = folder / f"shard-{start // ROWS_PER_SHARD:05d}.safetensors"
        if path.exists():
            continue
        shard = rows[start : start + ROWS_PER_SHARD]
        # Rows of like length share a pass; results go back in order.
        order = sorted(range(len(shard)), key=lambda i: len(shard[i].input_ids))
        made: dict[int, tuple[torch.Tensor, ...]] = {}
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            lengths = [len(shard[i].input_ids) for i in chosen]
            ids = torch.zeros(len(chosen), max(lengths), dtype=torch.long)
            for slot, i in enumerate(chosen):
                ids[slot, : lengths[slot]] = torch.tensor(shard[i].input_ids)
            made_here = target_features(target, parts, ids, layer_ids)
            for slot, i in enumerate(chosen):
                # Copies, so that a row does not keep its padded batch alive.
                made[i] = tuple(value[slot, : lengths[slot]].to("cpu", copy=True) for value in made_here.values())
        features = [made[i][0] for i in range(len(shard))]
        last = [made[i][1] for i in range(len(shard))]
        tensors = {
            "input_ids": torch.tensor([t for row in shard for t in row.input_ids], dtype=torch.int32),
            "loss_mask": torch.tensor([m for row in shard for m in row.loss_mask], dtype=torch.uint8),
            "lengths": torch.tensor([len(row.input_ids) for row in shard]),
            "context_hidden_states": torch.cat(features),
            "last_hidden_state": torch.cat(last),
        }
        unfinished = path.with_suffix(".part")
        save_file(tensors, unfinished)
        os.replace(unfinished, path)


class FeatureDataset(Dataset):
    """
    Rows of folders written by [`cache_features`], read memory-mapped.

    Items are dicts of `input_ids` `[S]` (int64), `loss_mask` `[S]` (uint8), `context_hidden_states` `[S, T * H]`,
    `last_hidden_state` `[S, H]` (bf16) and `row` `[]` (int64), the item's number. Rows without a usable anchor (two
    supervised tokens in a row) are left out and counted in `num_skipped`.

    Raises:
        ValueError: when the folders hold no shard.

    Attributes:
        settings (`dict[str, dict]`): of each folder, the target (see [`target_fingerprint`]), layers and rows that
            its features were made with.
    """

    def __init__(self, *folders: str | Path):
        self.settings: dict[str, dict] = {}
        shards = [path for folder in folders for path in sorted(Path(folder).glob("shard-*.safetensors"))]
        if not shards:
            raise ValueError(f"No feature shards in {[str(f) for f in folders]}: run `cache_features` first.")
        for folder in folders:
            manifest = Path(folder) / "features.json"
            self.settings[str(folder)] = json.loads(manifest.read_text()) if manifest.exists() else {}
        self._files = [safe_open(path, framework="pt") for path in shards]
        self._rows: list[tuple[int, int, int]] = []
        self.num_skipped = 0
        for number, file in enumerate(self._files):
            stop = torch.cumsum(file.get_tensor("lengths"), 0).tolist()
            mask = file.get_tensor("loss_mask")
            for start, end in zip([0, *stop], stop, strict=False):
                if has_anchor(mask[start:end]):
                    self._rows.append((number, start, end))
                else:
                    self.num_skipped += 1

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number, start, end = self._rows[index]
        names = ("input_ids", "loss_mask", "context_hidden_states", "last_hidden_state")
        item = {name: self._files[number].get_slice(name)[start:end] for name in names}
        return {**item, "input_ids": item["input_ids"].long(), "row": torch.tensor(index)}

    def token_counts(self, vocab_size: int) -> torch.LongTensor:
        """How often each id is supervised: `[vocab_size]`."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for file in self._files:
            ids = file.get_tensor("input_ids").long()
            counts += torch.bincount(ids[file.get_tensor("loss_mask").bool()], minlength=vocab_size)
        return counts


class TokenDataset(Dataset):
    """The same rows without features, which the trainer then takes from the target as it goes."""

    def __init__(self, rows: Sequence[ChatRow]):
        self._rows = [row for row in rows if has_anchor(torch.tensor(row.loss_mask))]
        self.num_skipped = len(rows) - len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        return {
            "input_ids": torch.tensor(row.input_ids),
            "loss_mask": torch.tensor(row.loss_mask, dtype=torch.uint8),
            "row": torch.tensor(index),
        }

    def token_counts(self, vocab_size: int) -> torch.LongTensor:
        """How often each id is supervised: `[vocab_size]`."""
        ids = [token for row in self._rows for token, mask in zip(row.input_ids, row.loss_mask, strict=True) if mask]
        return torch.bincount(torch.tensor(ids), minlength=vocab_size)


def has_anchor(loss_mask: torch.Tensor) -> bool:
    """Whether two tokens in a row are supervised."""
    mask = loss_mask.bool()
    return bool((mask[:-1] & mask[1:]).any())


def collate_features(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-pad rows to the longest: `[N, S, ...]`, with their `length` `[N]`. Padding has loss mask 0 and lies after
    every anchor."""
    numbers = {
        "row": torch.stack([item["row"] for item in items]),
        "length": torch.tensor([len(item["input_ids"]) for item in items]),
    }
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([item[name] for item in items], batch_first=True)
        for name in items[0]
        if name != "row"
    }
    return {**padded, **numbers}
