# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny seeded targets and drafts for all tests, and the fixtures of the public reference implementation.

Weights are drawn here, parameter by parameter, and not by transformers: they are the same with every version, and
large enough that a random target writes varied text with clear gaps between its best logits.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from domino_spec.configuration_domino import DominoConfig
from domino_spec.generation.captured import CapturedDraft, Captures
from domino_spec.modeling_domino import DominoDraftModel

VOCAB = 96
MASK_TOKEN = VOCAB - 1
HIDDEN = 32
TARGET_LAYERS = 4
BLOCK = 6
MAX_POSITIONS = 1024

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": TARGET_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
    # No token ends a text unless a test says so.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GEMMA = {
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * (TARGET_LAYERS // 2),
    "query_pre_attn_scalar": 8,
    # With random weights a scaled, tied embedding only ever repeats the last token.
    "tie_word_embeddings": False,
}

# Architecture name -> (transformers model type, what differs from `_SHAPE`). Each is here for a trait of its own.
_TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-sliding": ("mistral", {"sliding_window": 12}),
    "gemma2-softcap": ("gemma2", {**_GEMMA, "final_logit_softcapping": 8.0}),
    "gemma3-scaled-embedding": ("gemma3_text", _GEMMA),
    "phi3-fused": ("phi3", {"sliding_window": None}),
    "granite-multipliers": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    ),
    "gpt2-learned-positions": (
        "gpt2",
        {"n_embd": HIDDEN, "n_layer": TARGET_LAYERS, "n_head": 4, "n_positions": MAX_POSITIONS, "n_inner": 48},
    ),
}
ARCHITECTURES = tuple(_TARGETS)


def randomise(model: torch.nn.Module, seed: int, std: float = 0.3):
    """Fill every parameter in place: matrices N(0, std), vectors (norms, biases) near their initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # By name, so that a tied matrix is drawn once and the order does not hang on the version.
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            if parameter.dim() > 1:
                parameter.copy_(noise * std)
            else:
                parameter.add_(noise * 0.1)


def make_target(
    arch: str = "qwen3",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    attn_implementation: str = "eager",
    **overrides,
) -> PreTrainedModel:
    """
    A tiny random causal LM in eval mode: 4 layers, hidden 32, vocabulary 96, no end token.

    Args:
        arch: one of `ARCHITECTURES`.
        overrides: fields of the target's config.
    """
    model_type, differs = _TARGETS[arch]
    fields = dict(differs, **{k: _SHAPE[k] for k in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")})
    if model_type != "gpt2":
        fields = {**_SHAPE, **differs}
    config = AutoConfig.for_model(model_type, **{**fields, **overrides})
    target = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    randomise(target, seed)
    return target.eval()


def make_draft(
    target: PreTrainedModel,
    dtype: torch.dtype | None = None,
    seed: int = 1,
    head: bool = True,
    sliding_window: int | None = None,
    attn_implementation: str = "eager",
    **overrides,
) -> DominoDraftModel:
    """
    A tiny random draft for `target`, in eval mode: 2 layers, block 6, shifted labels, first proposal uncorrected.

    A random draft gets next to nothing accepted. For control of the acceptance override `forward` and `correction`
    (or the rollout) in a test: everything else of such a draft is valid, whatever its weights.

    Args:
        dtype: the target's when not given.
        head: `False` for a pure DFlash draft.
        sliding_window: when given, layers alternate between sliding and full attention.
        overrides: fields of `DominoConfig`, e.g. `shift_label`, `pure_draft_prefix_len`, `block_size`,
            `sliding_window_rule`, `mask_token_id`.
    """
    config = draft_config(target.config, head=head, sliding_window=sliding_window, **overrides)
    config._attn_implementation = attn_implementation
    draft = DominoDraftModel(config).to(target.dtype if dtype is None else dtype)
    randomise(draft, seed)
    return draft.eval()


def draft_config(target_config=None, head: bool = True, sliding_window: int | None = None, **overrides) -> DominoConfig:
    """The config of [`make_draft`]; without a target's config it fits the default targets."""
    text = None if target_config is None else target_config.get_text_config(decoder=True)
    vocab = VOCAB if text is None else text.vocab_size
    layers = TARGET_LAYERS if text is None else text.num_hidden_layers
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN if text is None else text.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITIONS,
        "block_size": BLOCK,
        "num_target_layers": layers,
        "target_layer_ids": sorted({0, layers // 2, layers - 1}),
        "mask_token_id": vocab - 1,
        "shift_label": True,
        "pure_draft_prefix_len": 1,
    }
    if head:
        fields |= {"projector_type": "domino", "gru_hidden_dim": 12, "emb_dim": 10}
    if sliding_window is not None:
        depth = overrides.get("num_hidden_layers", fields["num_hidden_layers"])
        kinds = ("sliding_attention", "full_attention")
        fields |= {"sliding_window": sliding_window, "layer_types": [kinds[i % 2] for i in range(depth)]}
    return DominoConfig(**{**fields, **overrides})


def kept_captures(captures: Captures) -> list[CapturedDraft]:
    """Draft phases that `captures` holds for the next calls, whichever way they choose."""
    return [one for of_way in captures._idle.values() for of_kind in of_way.values() for one in of_kind]


def random_tokens(rows: int, length: int, seed: int = 0, vocab: int = VOCAB) -> torch.LongTensor:
    """`[rows, length]` ids of text: never the mask token, which is the last id."""
    return torch.randint(vocab - 1, (rows, length), generator=torch.Generator().manual_seed(seed))


# Golden fixtures

FIXTURES = ("shift1-prefix1", "shift0-prefix0", "sliding")
FIXTURE_FOLDER = Path(__file__).parent / "fixtures"


@dataclass
class Fixture:
    """One folder of `tests/fixtures/`; its README names every tensor of `expected`."""

    name: str
    path: Path

    @property
    def draft_path(self) -> Path:
        return self.path / "draft"

    @property
    def target_path(self) -> Path:
        return self.path / "target"

    @cached_property
    def expected(self) -> dict[str, torch.Tensor]:
        """The reference's numbers, by name. Shared between tests: do not write into them."""
        return load_file(self.path / "expected.safetensors")

    def draft(self, attn_implementation: str = "eager", **kwargs) -> DominoDraftModel:
        """A fresh draft in float32; `kwargs` go to `from_pretrained`."""
        draft = DominoDraftModel.from_pretrained(self.draft_path, attn_implementation=attn_implementation, **kwargs)
        return draft.eval()

    def target(self, attn_implementation: str = "eager", **kwargs) -> PreTrainedModel:
        """A fresh target in float32."""
        target = AutoModelForCausalLM.from_pretrained(
            self.target_path, attn_implementation=attn_implementation, **kwargs
        )
        return target.eval()


@lru_cache
def load_fixture(name: str) -> Fixture:
    """The golden fixture `name`, one of `FIXTURES`."""
    return Fixture(name, FIXTURE_FOLDER / name)
