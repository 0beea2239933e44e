# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""A shortlist narrows what a draft proposes, and nothing else."""

import pytest
import torch
from batching import GoodBatchDraft
from helpers import ARCHITECTURES, VOCAB, draft_config, make_draft, make_target, random_tokens
from passes import close
from peft import LoraConfig, get_peft_model
from peft.utils import ModulesToSaveWrapper
from torch import nn

from domino_spec.configuration_domino import DominoConfig
from domino_spec.generation.context import TargetParts, linear_rows
from domino_spec.generation.scorer import Scorer
from domino_spec.modeling_domino import DominoDraftModel

EVEN = list(range(0, VOCAB, 2))


def listed(draft, token_ids=EVEN):
    draft.config.set_shortlist(token_ids)
    return draft


class TestConfig:
    @pytest.mark.parametrize("vocab_size", [VOCAB, 97, 8, 151936])
    def test_ids_come_back_in_order(self, vocab_size):
        config = DominoConfig(vocab_size=vocab_size, target_layer_ids=[0], mask_token_id=3)
        assert config.shortlist_ids is None and "shortlist" not in config.to_dict()
        ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[: max(1, vocab_size // 3)].tolist()
        config.set_shortlist([*ids, ids[0]])
        assert config.shortlist_ids == sorted(ids)
        again = DominoConfig.from_dict(config.to_dict())
        assert again.shortlist_ids == sorted(ids)
        again.set_shortlist(None)
        assert again.shortlist_ids is None

    @pytest.mark.parametrize(("ids", "found"), [([], "no id"), ([1, VOCAB], f"1 to {VOCAB}"), ([-1], "-1 to -1")])
    def test_ids_outside_the_vocabulary_are_refused(self, ids, found):
        with pytest.raises(ValueError, match=found):
            draft_config().set_shortlist(ids)

    @pytest.mark.parametrize(
        ("shortlist", "found"), [("no base64!", "not base64"), ("AAECAw==", "32 bits"), ("", "0 bits")]
    )
    def test_what_is_no_shortlist_of_this_vocabulary_is_refused_on_reading(self, shortlist, found):
        with pytest.raises(Exception, match=found):
            draft_config(shortlist=shortlist)

    def test_bits_past_the_vocabulary_are_refused(self):
        config = DominoConfig(vocab_size=16, mask_token_id=3)
        config.set_shortlist([15])
        with pytest.raises(Exception, match="16 bits, 1 of them set, for a `vocab_size` of 15"):
            DominoConfig(vocab_size=15, mask_token_id=3, shortlist=config.shortlist)

    def test_a_saved_draft_keeps_it(self, tmp_path, target):
        listed(make_draft(target)).save_pretrained(tmp_path)
        assert DominoDraftModel.from_pretrained(tmp_path).config.shortlist_ids == EVEN

    def test_a_resized_vocabulary_keeps_what_is_left_of_it(self, target):
        draft = listed(make_draft(target, mask_token_id=3), [5, 70, 95])
        draft.resize_token_embeddings(VOCAB + 30)
        assert draft.config.shortlist_ids == [5, 70, 95]
        draft.resize_token_embeddings(80)
        assert draft.config.shortlist_ids == [5, 70]
        draft.resize_token_embeddings(5)  # with a warning
        assert draft.config.shortlist_ids is None


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_scores_are_those_of_the_whole_vocabulary(arch):
    target = make_target(arch)
    parts, draft, ids = TargetParts(target), listed(make_draft(target)), torch.tensor(EVEN)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, draft.config.hidden_size, generator=generator, dtype=draft.dtype)
    state = torch.randn(2, draft.config.gru_hidden_dim, generator=generator, dtype=draft.dtype)
    scorer = Scorer(draft, parts, use_head=True)
    with torch.no_grad():
        base, pool = scorer.base(hidden)
        correction = scorer.head.correction(scorer.head.begin(hidden)[:, 0], state, None)
        close(base, parts.logits(hidden)[..., ids], atol=1e-12)
        close(correction, draft.correction(hidden[:, 0], state)[:, ids], atol=1e-12)
    assert pool is None
    assert scorer.ids(torch.tensor([[0, 3]])).tolist() == [[0, 6]]
    whole = scorer.spread(base[:, 0], None)
    assert torch.equal(whole[:, ids], base[:, 0])
    assert (whole[:, 1::2] == -torch.inf).all()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"assistant_confidence_threshold": 0.2}], ids=str)
def test_the_answer_is_plain_and_what_is_not_listed_is_not_proposed(target, num_rows, options):
    ids = random_tokens(3, 7, seed=3)[:num_rows]
    plain = target.generate(ids, max_new_tokens=30, **options)
    draft = GoodBatchDraft.following(make_draft(target), target, plain.tolist(), [set()] * num_rows)
    lengths = {}
    for name, shortlist in (("whole", None), ("even", EVEN)):
        listed(draft, shortlist)
        output = target.generate(ids, max_new_tokens=30, assistant_model=draft, return_dict_in_generate=True, **options)
        assert output.sequences.tolist() == plain.tolist()
        lengths[name] = output.acceptance_lengths
    if "assistant_confidence_threshold" not in options:
        assert lengths["whole"][:, :4].min() == draft.config.block_size
    # A round ends where the text has an odd id: each holds at most one, the target's own, at its end.
    for row, run in zip(plain[:, 8:].tolist(), lengths["even"].tolist(), strict=True):
        for length in filter(None, run):
            taken, row = row[: length - 1], row[length:]
            assert all(token % 2 == 0 for token in taken)
    assert lengths["even"].max() > 1


def test_a_list_of_every_id_changes_nothing(target):
    draft, ids = make_draft(target), random_tokens(2, 9, seed=5)
    whole, full = (
        target.generate(ids, max_new_tokens=24, assistant_model=listed(draft, names), return_dict_in_generate=True)
        for names in (None, range(VOCAB))
    )
    assert whole.acceptance_lengths.tolist() == full.acceptance_lengths.tolist()
    assert whole.sequences.tolist() == full.sequences.tolist()


@pytest.mark.parametrize("use_head", [True, False], ids=["head", "base"])
def test_proposals_are_the_best_of_the_list(target, use_head, monkeypatch):
    from domino_spec.generation import loop

    seen = []

    def spy(*args):
        proposal = real(*args)
        seen.append(proposal.proposal_ids)
        return proposal

    real = loop.rollout
    monkeypatch.setattr(loop, "rollout", spy)
    draft, ids = make_draft(target), random_tokens(2, 9, seed=5)
    options = {"custom_generate": draft.decode, "use_head": use_head, "max_new_tokens": 12}
    listed(draft)
    target.generate(ids, **options)
    narrow = torch.cat([p.flatten() for p in seen]).tolist()
    assert set(narrow) <= set(EVEN) and len(set(narrow)) > 3
    first = seen[0]
    seen.clear()
    # The same, from the whole vocabulary with the rest shut out by its logits.
    listed(draft, None)
    shut = torch.zeros(VOCAB, dtype=torch.float64)
    shut[1::2] = -1e9
    base = TargetParts.logits
    monkeypatch.setattr(TargetParts, "logits", lambda *args: base(*args) + shut)
    target.generate(ids, **options)
    assert torch.equal(seen[0], first)


ADAPTERS = {
    "of its layers": {"target_modules": ["embed_proj.0", "embed_proj.2"]},
    "of the bottleneck": {"target_modules": ["embed_proj.0"]},
    "in its place": {"target_modules": ["fc"], "modules_to_save": ["embed_proj"]},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_the_head_is_heard(target, name):
    draft, ids = make_draft(target), random_tokens(1, 9)
    config = LoraConfig(r=2, init_lora_weights=False, **ADAPTERS[name])
    adapted = get_peft_model(draft, config)
    listed(draft)
    scorer = Scorer(draft, TargetParts(target), use_head=True)
    hidden, state = (
        torch.ones(1, draft.config.hidden_size).double(),
        torch.ones(1, draft.config.gru_hidden_dim).double(),
    )
    with torch.no_grad():
        for module in adapted.modules():
            if isinstance(module, ModulesToSaveWrapper):
                module.modules_to_save["default"][2].weight.mul_(2)
        found = scorer.head.correction(scorer.head.begin(hidden), state, None)
        close(found, draft.correction(hidden, state)[:, ::2], atol=1e-12)
        with adapted.disable_adapter():
            assert not torch.allclose(found, draft.correction(hidden, state)[:, ::2])
    plain = target.generate(ids, max_new_tokens=16)
    assert target.generate(ids, max_new_tokens=16, assistant_model=adapted).tolist() == plain.tolist()


class Packed(nn.Linear):
    """What is more than a matrix."""


class Shared(torch.Tensor):
    """What a weight shared among devices is to torch."""


def packed(linear):
    linear.__class__ = Packed


def shared(linear):
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Shared))


def emptied(linear):
    linear.weight = nn.Parameter(torch.empty(0))


def offloaded(linear):
    linear.to("meta")


@pytest.mark.parametrize("spoil", [packed, shared, emptied, offloaded])
def test_rows_are_taken_only_of_a_matrix_at_hand(spoil):
    linear = nn.Linear(4, 6)
    assert linear_rows(linear, torch.tensor([1, 5])).weight.tolist() == linear.weight[[1, 5]].tolist()
    spoil(linear)
    assert linear_rows(linear, torch.tensor([1, 5])) is None


def test_a_target_whose_rows_cannot_be_taken_out_is_used_whole(target, monkeypatch):
    draft, ids = listed(make_draft(target)), random_tokens(1, 9)
    plain = target.generate(ids, max_new_tokens=16)
    packed(target.get_output_embeddings())
    warnings = []
    monkeypatch.setattr("domino_spec.generation.scorer.logger.warning_once", warnings.append)
    assert target.generate(ids, max_new_tokens=16, assistant_model=draft).tolist() == plain.tolist()
    assert len(warnings) == 1 and "shortlist" in warnings[0]
    assert Scorer(draft, TargetParts(target), use_head=True).token_ids is None
