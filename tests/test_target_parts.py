# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What a draft borrows from its target, over architectures that scale and tie in ways of their own."""

import threading
from contextlib import contextmanager

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    HIDDEN,
    make_target,
    random_tokens,
    randomise,
)
from passes import close
from transformers import AutoConfig, AutoModelForCausalLM

from domino_spec.generation.context import TargetParts

# Targets that scale embeddings or logits in ways of their own, beside the common architectures.
SCALING = {
    "hyperclovax (multiplies logits)": (
        "hyperclovax",
        {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    ),
    "cohere (scales logits)": ("cohere", {"logit_scale": 0.25}),
    "afmoe (scales embeddings)": (
        "afmoe",
        {"mup_enabled": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def any_target(name):
    if name in ARCHITECTURES:
        return make_target(name)
    model_type, fields = SCALING[name]
    shape = {k: getattr(make_target("qwen3").config, k) for k in ("vocab_size", "hidden_size", "intermediate_size")}
    shape |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(model_type, **{**shape, **ids, **fields})
    # Some experts compute in no more than float32.
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(target, seed=0)
    return target.eval()


@contextmanager
def raw_layers(target):
    """`(inputs, outputs)` of every decoder layer of the next pass, from hooks set independently of the package."""
    inputs, outputs, handles = {}, {}, []
    modules = dict(target.named_modules())
    path = next(name for name in ("model.layers", "transformer.h") if name in modules)
    for i, layer in enumerate(modules[path]):

        def keep(module, args, kwargs, output, i=i):
            inputs[i] = args[0] if args else kwargs["hidden_states"]
            outputs[i] = output[0] if isinstance(output, tuple) else output

        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
    yield inputs, outputs
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *SCALING])
def test_borrowed_parts_equal_the_target_s_own(arch):
    target = any_target(arch)
    parts, ids = TargetParts(target), random_tokens(2, 9)
    with torch.no_grad(), raw_layers(target) as (inputs, _):
        output = target(ids, output_hidden_states=True)
        embeds = parts.embed(ids)
        if arch.startswith("gpt2"):
            # Learned positions are added to the token embeddings; a draft has rotary positions of its own.
            inputs[0] = inputs[0] - target.transformer.wpe.weight[: ids.shape[1]]
        close(embeds, inputs[0])
        close(parts.logits(output.hidden_states[-1]), output.logits)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_context_features_are_the_raw_outputs_of_the_named_layers(arch):
    target = make_target(arch)
    parts, ids, layer_ids = TargetParts(target), random_tokens(2, 9), [3, 0, 2]
    with torch.no_grad(), raw_layers(target) as (_, outputs), parts.capture(layer_ids) as capture:
        states = target(ids, output_hidden_states=True).hidden_states
        features = capture.take(target.device)[:, 2:7]
    # Layer i is entry i + 1 of `hidden_states`, except that the last entry is taken after the final norm.
    assert torch.equal(features[..., HIDDEN : 2 * HIDDEN], states[1][:, 2:7])
    assert torch.equal(features[..., 2 * HIDDEN :], states[3][:, 2:7])
    assert torch.equal(features, torch.cat([outputs[i][:, 2:7] for i in layer_ids], dim=-1))
    assert not torch.allclose(features[..., :HIDDEN], states[4][:, 2:7])


def test_passes_are_captured_one_after_another(target, parts):
    # A prompt may be read in chunks; positions count over all that was read since the last `take`.
    chunks = [random_tokens(1, length, length) for length in (4, 5, 2)]
    with torch.no_grad(), parts.capture([0, 3]) as capture:
        alone = []
        for chunk in chunks:
            target(chunk)
            alone.append(capture.take(target.device))
        for chunk in chunks:
            target(chunk)
        assert torch.equal(capture.take(target.device)[:, 2:10], torch.cat(alone, dim=1)[:, 2:10])


def test_a_layer_named_twice_is_captured_twice(target, parts):
    # The config takes such a list, so `fc` has been made for it.
    with torch.no_grad(), parts.capture([1, 1]) as capture:
        states = target(random_tokens(1, 5), output_hidden_states=True).hidden_states[2]
        assert torch.equal(capture.take(target.device), torch.cat([states, states], dim=-1))


def test_a_closed_capture_leaves_no_hook(target, parts):
    def hooks():
        # transformers may keep some of its own.
        return [list(layer._forward_hooks) for layer in target.model.layers]

    before = hooks()
    with parts.capture([0, 3]):
        assert hooks() != before
    assert hooks() == before
    with pytest.raises(RuntimeError, match="stop"), parts.capture([0]):
        raise RuntimeError("stop")
    assert hooks() == before


def test_two_threads_capture_only_their_own_pass(target, parts):
    ids = [random_tokens(1, 5, seed) for seed in (1, 2)]
    barrier, got = threading.Barrier(2), {}

    def run(i):
        with torch.no_grad(), parts.capture([1]) as capture:
            barrier.wait()
            target(ids[i])
            barrier.wait()
            got[i] = capture.take(target.device)

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for i in (0, 1):
            assert torch.equal(got[i], target(ids[i], output_hidden_states=True).hidden_states[2])


def test_a_tied_head_is_the_embedding():
    target = make_target("llama-tied")
    parts = TargetParts(target)
    assert parts.output_head.weight is parts.embedding.weight
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    close(parts.logits(hidden), hidden @ target.get_input_embeddings().weight.T, atol=1e-12)


def test_a_bare_backbone_is_refused(target):
    with pytest.raises(ValueError, match="output head"):
        TargetParts(target.model)
