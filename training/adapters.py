# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How is a finished draft adapted to a domain? LoRA on its head, its backbone or both, in PEFT's own terms."""

from typing import Any

from peft import LoraConfig

from ..configuration_domino import DominoConfig

# LoRA reaches linear layers by their module and the GRU by its parameters; it has no layer of its own for a GRU.
_MODULES = {
    "head": ["embed_proj.0", "embed_proj.2"],
    "backbone": ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
_PARAMETERS = {"head": ["prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"], "backbone": []}
PARTS = ("head", "backbone", "all")


def lora_config(
    config: DominoConfig, part: str = "head", r: int = 16, lora_alpha: int = 32, **kwargs: Any
) -> LoraConfig:
    """
    A `LoraConfig` for a draft:

        draft = get_peft_model(draft, lora_config(draft.config))

    The result is an adapter like any other: saved with `save_pretrained`, loaded with `PeftModel.from_pretrained` or
    `load_adapter`, switched with `set_adapter`, merged with `merge_and_unload`; the wrapped draft is passed to
    `generate` as it is.

    Args:
        config (`DominoConfig`): of the draft.
        part (`str`): `"head"` (projections and GRU), `"backbone"` or `"all"`.
        r (`int`), lora_alpha (`int`), kwargs: as for `LoraConfig`.

    Raises:
        ValueError: when `part` is unknown, or the draft has no head to adapt.
    """
    if part not in PARTS:
        raise ValueError(f"`part` is {part!r}: choose one of {', '.join(PARTS)}.")
    if part == "head" and not config.has_head:
        raise ValueError("This draft has no head (a DFlash checkpoint): adapt its 'backbone', or train a head for it.")
    parts = [name for name in _MODULES if part in (name, "all") and (name != "head" or config.has_head)]
    return LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        target_modules=[module for name in parts for module in _MODULES[name]],
        target_parameters=[parameter for name in parts for parameter in _PARAMETERS[name]],
        **kwargs,
    )
