# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA on a draft: what it trains, what it leaves alone, and how adapters are kept, loaded, switched and merged."""

import pytest
import torch
from contract import NEW_TOKENS, prompt_and_plain
from helpers import make_draft, make_target
from peft import PeftModel, get_peft_model
from test_trainer import LAYER_IDS, make_rows, make_trainer

from domino_spec import DominoDraftModel
from domino_spec.training.adapters import PARTS, lora_config
from domino_spec.training.features import TokenDataset, cache_features

HEAD = ("prefix_gru", "embed_proj")


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", dtype=torch.float32, attn_implementation="sdpa").requires_grad_(False)


@pytest.fixture(scope="module")
def features(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    cache_features(target, make_rows(target, count=4), LAYER_IDS, folder)
    return folder


def wrap(target, part, seed=None):
    """A draft with an adapter; with a `seed`, one that has learnt something."""
    draft = make_draft(target, target_layer_ids=LAYER_IDS, attn_implementation="sdpa")
    torch.manual_seed(0)
    wrapped = get_peft_model(draft, lora_config(draft.config, part, r=4))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(wrapped.named_parameters()):
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return wrapped


def outputs(draft):
    """What the two halves of a draft compute: hidden states of a block, and corrections of its head."""
    generator = torch.Generator().manual_seed(0)
    block, context, tokens = (torch.randn(1, 6, width, generator=generator) for width in (32, 96, 32))
    with torch.no_grad():
        hidden = draft(noise_embeds=block, context_hidden_states=context).last_hidden_state
        states = draft.prefix_states(tokens)
        return hidden, draft.correction(torch.ones(1, 6, 32), states)


def same(left, right) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("part", PARTS)
def test_training_moves_every_adapter_and_nothing_else(part, target, features, tmp_path):
    wrapped = wrap(target, part)
    base = {name: p.detach().clone() for name, p in wrapped.named_parameters() if "lora" not in name}
    trainer = make_trainer(target, features, tmp_path, wrapped, max_steps=3)
    trainer.train()
    adapted = set()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            # It begins at zero.
            assert parameter.abs().sum() > 0, name
            adapted.add(any(module in name for module in HEAD))
        elif "lora" not in name:
            assert torch.equal(parameter, base[name]), name
    assert adapted == {"head": {True}, "backbone": {False}, "all": {True, False}}[part]


def test_every_adapter_learns_also_where_few_ids_are_scored(target, features, tmp_path):
    wrapped = wrap(target, "head")
    make_trainer(target, features, tmp_path, wrapped, max_steps=3, shortlist_size=30).train()
    for name, parameter in wrapped.named_parameters():
        assert "lora_B" not in name or parameter.abs().sum() > 0, name
    ids, ones = torch.tensor([3, 7, 50]), torch.ones(1, 6, 32)
    with torch.no_grad():
        states = wrapped.prefix_states(ones)
        close = wrapped.correction(ones, states)[..., ids] - wrapped.correction(ones, states, ids)
    assert close.abs().max() < 1e-6


def test_a_trained_adapter_is_saved_alone_and_loaded_the_peft_way(target, features, tmp_path):
    wrapped = wrap(target, "head")
    before = outputs(wrapped)
    trainer = make_trainer(target, features, tmp_path, wrapped, max_steps=3, learning_rate=1e-2)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    fresh = make_draft(target, target_layer_ids=LAYER_IDS, attn_implementation="sdpa")
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert same(outputs(loaded), outputs(wrapped)) and not same(outputs(loaded), before)
    with loaded.disable_adapter():
        assert same(outputs(loaded), before)


def test_a_killed_run_on_an_adapter_resumes_to_the_same_weights(target, features, tmp_path):
    runs = []
    for folder, settings in (("whole", {}), ("half", {"save_strategy": "steps", "save_steps": 2})):
        wrapped = wrap(target, "head")
        make_trainer(target, features, tmp_path / folder, wrapped, max_steps=4, **settings).train()
        runs.append(wrapped)
    resumed = wrap(target, "head", seed=9)
    trainer = make_trainer(target, features, tmp_path / "half", resumed, max_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    for (name, expected), (_, found) in zip(runs[0].named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(expected, found), name


def test_merging_gives_the_same_draft_in_one_piece(target, tmp_path):
    wrapped = wrap(target, "all", seed=1)
    expected = outputs(wrapped)
    merged = wrapped.merge_and_unload()
    assert isinstance(merged, DominoDraftModel) and same(outputs(merged), expected)
    merged.save_pretrained(tmp_path)
    assert same(outputs(DominoDraftModel.from_pretrained(tmp_path)), expected)


def test_adapters_are_switched_between_calls_and_used_together(target, tmp_path):
    alone = {}
    for seed, (name, part) in enumerate((("code", "all"), ("chat", "head")), 1):
        wrapped = wrap(target, part, seed)
        alone[name] = outputs(wrapped)
        wrapped.save_pretrained(tmp_path / name)
    assert not same(alone["code"], alone["chat"])
    draft = make_draft(target, target_layer_ids=LAYER_IDS, attn_implementation="sdpa")
    draft.save_pretrained(tmp_path / "draft")
    stored = (tmp_path / "draft" / "model.safetensors").read_bytes()
    switched = PeftModel.from_pretrained(draft, tmp_path / "code", adapter_name="code")
    switched.load_adapter(tmp_path / "chat", adapter_name="chat")
    prompt, plain = prompt_and_plain(target)
    for name in ("code", "chat", "code"):
        switched.set_adapter(name)
        assert same(outputs(switched), alone[name])
        ours = target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=switched)
        assert ours.tolist() == plain.tolist()
    switched.base_model.set_adapter(["code", "chat"])
    both = outputs(switched)
    assert not same(both, alone["code"]) and not same(both, alone["chat"])
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == stored


def test_a_few_minutes_on_one_domain_raise_acceptance_there(target, tmp_path):
    """An adapter on the head learns what the target writes after a few prompts; the draft's own weights stay."""
    rows = make_rows(target, count=3)
    prompts = [torch.tensor([row.input_ids[:6]]) for row in rows]

    def acceptance(draft) -> float:
        lengths = []
        for prompt in prompts:
            output = target.generate(
                prompt, assistant_model=draft, max_new_tokens=26, do_sample=False, return_dict_in_generate=True
            )
            lengths += output.acceptance_lengths[0].tolist()
        return sum(lengths) / len(lengths)

    wrapped = wrap(target, "all")
    before = acceptance(wrapped.eval())
    trainer = make_trainer(target, None, tmp_path, wrapped.train(), TokenDataset(rows), max_steps=120, num_anchors=20)
    trainer.train()
    assert acceptance(wrapped.eval()) > 1.15 * before


@pytest.mark.parametrize(("part", "named"), [("tail", "'tail'"), ("head", "no head")])
def test_what_cannot_be_adapted_is_named(part, named, target):
    draft = make_draft(target, head=False)
    with pytest.raises(ValueError, match=named):
        lora_config(draft.config, part)
