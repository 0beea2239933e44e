# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported versions of transformers (5.17 to 5.24), in one place."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, QuantizedLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

# Up to 5.23 models take and return their cache as `past_key_values`, from 5.24 on as `cache`.
CACHE_NAME = "cache" if "cache" in {f.name for f in fields(GenerateDecoderOnlyOutput)} else "past_key_values"


def layers_that_keep(cache: Cache) -> list[str]:
    """Class names of the layers of `cache` that cannot be cropped."""
    # In the earlier versions quantised layers pass for croppable, but keep their packed part.
    return sorted(
        {type(layer).__name__ for layer in cache.layers if not layer.is_croppable or isinstance(layer, QuantizedLayer)}
    )


@contextmanager
def recording_past(cache: Cache) -> Iterator[None]:
    """
    Let `cache` be cropped, also where it slides, and leave it as plain decoding would: a user may go on with it, and
    layers that still record would keep, or trip over, what plain decoding drops.
    """
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer in cache.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False


@dataclass
class DominoGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns with `return_dict_in_generate=True`: transformers' own output, and

    Attributes:
        acceptance_lengths (`torch.LongTensor` of shape `[N, rounds]`): tokens that each round committed in each row
            (accepted proposals and the bonus token; fewer where a stop cut the round; 0 once the row had ended). The
            first token of all comes from the prefill and is not counted, so that a row's sum is the number of its
            new tokens less one.
        seconds (`dict[str, float]`): wall-clock time of the call by part: `"prefill"`, `"draft"` (backbone and
            rollout), `"verify"` (target pass and verification) and `"host"` (all else). On an accelerator, work still
            queued counts where it is waited for.
    """

    acceptance_lengths: torch.LongTensor | None = None
    seconds: dict[str, float] | None = None


def is_returned(cache: Cache, generation_config: GenerationConfig) -> bool:
    """Whether the caller will see `cache` after the call: it is part of the output, or was passed in."""
    return bool(generation_config.return_dict_in_generate) or getattr(cache, "_is_user_defined", False)


def asked_for(generation_config: GenerationConfig, name: str) -> Any:
    """The option `name`, or `None` where it stands at the default that `generate` fills in for whom names nothing."""
    value = getattr(generation_config, name)
    return None if value == GenerationConfig._get_default_generation_params().get(name) else value


def with_defaults_of(draft: Any, generation_config: GenerationConfig) -> GenerationConfig:
    """
    The call's options, with those of the draft's own `generation_config` about drafting that the call leaves out. Not
    the schedule: its default cannot be told from a call that asks for it, and a call must be able to.
    """
    own = draft.generation_config
    names = ("num_assistant_tokens", "assistant_confidence_threshold")
    chosen = {
        name: value
        for name in names
        if own is not None
        and asked_for(generation_config, name) is None
        and (value := asked_for(own, name)) is not None
    }
    if not chosen:
        return generation_config
    # The caller's object stays as it is.
    generation_config = copy.copy(generation_config)
    for name, value in chosen.items():
        setattr(generation_config, name, value)
    return generation_config


def make_output(cache: Cache, **values: Any) -> DominoGenerateOutput:
    """The output with `cache` under the name that this transformers uses."""
    return DominoGenerateOutput(**values, **{CACHE_NAME: cache})
