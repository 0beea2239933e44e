# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics: against slow code, in chunks, with every option, and over a run."""

import gc
import math
import random
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import (
    BLOCK,
    MASK_TOKEN,
    VOCAB,
    load_fixture,
    make_draft,
    make_target,
    random_tokens,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional as F
from training_batches import (
    LENGTH,
    close,
    every_backend,
    every_labelling,
    features_of,
    gradients,
    small_pass,
)

from domino_spec.generation.context import TargetParts
from domino_spec.training.blocks import (
    Blocks,
    build_blocks,
)
from domino_spec.training.objective import (
    BaseAnchoredCurriculum,
    ObjectiveOptions,
    _CrossEntropies,
    acceptance_lengths,
    corrected_offsets,
    domino_loss,
    dpace_weights,
    teacher_forced_hidden,
)

# The objective


@every_labelling
@pytest.mark.parametrize("prefix", [0, 1, 3], ids=lambda prefix: f"prefix {prefix}")
@torch.no_grad()
def test_the_head_reads_exactly_the_tokens_before_the_label(target, parts, shift_label, prefix):
    draft, blocks, hidden = small_pass(target, parts, length=40, shift_label=shift_label, pure_draft_prefix_len=prefix)
    n, s = (blocks.weights > 0).sum(-1).eq(BLOCK if shift_label else BLOCK - 1).nonzero()[0].tolist()
    first = 0 if shift_label else 1
    for k in range(first, BLOCK):
        weights = torch.zeros_like(blocks.weights)
        weights[n, s, k] = 1.0

        def losses(prefix_ids, weights=weights):
            output = domino_loss(draft, parts, replace(blocks, weights=weights, prefix_ids=prefix_ids), hidden, 0.0)
            return output.final_loss.item(), output.base_loss.item()

        before = losses(blocks.prefix_ids)
        for token in range(BLOCK):
            changed = blocks.prefix_ids.clone()
            changed[n, s, token] = (changed[n, s, token] + 1) % MASK_TOKEN
            after = losses(changed)
            # Proposal j = k - first has read the anchor and j tokens more; the first `prefix` are not corrected.
            matters = k - first >= prefix and token <= k - first
            assert (after[0] != before[0]) == matters, (k, token)
            assert after[1] == before[1]


@every_labelling
@pytest.mark.parametrize("prefix", [0, 1, 3, BLOCK], ids=lambda prefix: f"prefix {prefix}")
def test_corrected_offsets_leave_out_the_pure_draft_prefix(target, shift_label, prefix):
    draft = make_draft(target, shift_label=shift_label, pure_draft_prefix_len=prefix)
    first = 0 if shift_label else 1
    expected = [k - first >= prefix for k in range(BLOCK)]
    assert corrected_offsets(draft, torch.device("cpu")).tolist() == expected


@every_labelling
def test_losses_equal_a_loop(target, parts, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label, pure_draft_prefix_len=1)
    first = 0 if shift_label else 1
    total, base, final = 0.0, 0.0, 0.0
    with torch.no_grad():
        for n, s, k in (blocks.weights > 0).nonzero().tolist():
            weight, label = float(blocks.weights[n, s, k]), int(blocks.target_ids[n, s, k])
            logits = parts.logits(hidden[n, s, k])
            total += weight
            base += weight * float(logits.logsumexp(-1) - logits[label])
            if k - first >= 1:
                state = None
                for token in blocks.prefix_ids[n, s, : k - first + 1]:
                    state = draft.step(parts.embed(token[None]), state)
                logits = logits + draft.correction(hidden[n, s, k], state[0])
            final += weight * float(logits.logsumexp(-1) - logits[label])
    for weight in (1.0, 0.3, 0.0):
        output = domino_loss(draft, parts, blocks, hidden, weight)
        expected = {"base_loss": base / (total + 1e-6), "final_loss": final / (total + 1e-6)}
        assert float(output.base_loss) == pytest.approx(expected["base_loss"], rel=1e-5)
        assert float(output.final_loss) == pytest.approx(expected["final_loss"], rel=1e-5)
        mixed = (1 - weight) * expected["final_loss"] + weight * expected["base_loss"]
        assert output.loss.item() == pytest.approx(mixed, rel=1e-5)
        assert output.loss.requires_grad
        assert not output.base_loss.requires_grad and not output.final_loss.requires_grad


def test_the_base_loss_alone_leaves_the_head_alone(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    base = gradients(draft, domino_loss(draft, parts, blocks, hidden, 1.0).loss)
    final = gradients(draft, domino_loss(draft, parts, blocks, hidden, 0.0).loss)
    for name in base:
        head = name.startswith(("prefix_gru", "embed_proj"))
        assert (base[name].abs().sum() == 0) == head, name
        assert final[name].abs().sum() > 0, name


def test_without_a_head_both_losses_are_the_base_s(target, parts):
    draft, blocks, hidden = small_pass(target, parts, head=False)
    outputs = [domino_loss(draft, parts, blocks, hidden, weight) for weight in (0.0, 1.0)]
    for output in outputs:
        assert output.final_loss == output.base_loss
        close(output.loss, output.base_loss, atol=1e-6)
        assert output.sums["accuracy"] == output.sums["base_accuracy"]
        assert output.sums["accept_len"] == output.sums["base_accept_len"]


def test_sums_and_counts_of_rows_add_up_to_those_of_the_batch(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    whole = domino_loss(draft, parts, blocks, hidden, 0.5)
    rows = []
    for n in range(len(hidden)):
        fields = {name: value[n : n + 1] for name, value in vars(blocks).items()}
        rows.append(domino_loss(draft, parts, Blocks(**fields), hidden[n : n + 1], 0.5))
    for name in whole.sums:
        assert sum(int(row.sums[name]) for row in rows) == whole.sums[name], name
        assert sum(int(row.counts[name]) for row in rows) == whole.counts[name], name
    assert whole.counts["accept_len"] == blocks.keep.sum()
    assert whole.counts["accuracy"] == (blocks.weights > 0).sum()


def test_acceptance_length_is_hand_counted():
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert acceptance_lengths(hits, shift_label=True).tolist() == [3, 1, 5, 1]
    # Offset 0 predicts nothing: what stands there does not count.
    assert acceptance_lengths(hits, shift_label=False).tolist() == [2, 4, 4, 1]


# Slots without a block, batches without a label


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_an_unused_slot_does_not_spoil_the_others(dtype, backend):
    # Its queries may look nowhere, which softmax turns into NaN where nobody takes care.
    target = make_target("qwen3", dtype=dtype)
    parts, draft = TargetParts(target), make_draft(target, attn_implementation=backend)
    ids, mask = random_tokens(1, LENGTH), torch.ones(1, LENGTH)
    features = features_of(target, parts, ids, draft)
    results = []
    for anchors in (torch.tensor([[5]]), torch.tensor([[5, 0, 0]])):
        keep = anchors > 0
        blocks = build_blocks(ids, mask, anchors, keep, draft.config, 4.0)
        hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features)
        output = domino_loss(draft, parts, blocks, hidden, 0.5)
        results.append((output.loss, gradients(draft, output.loss)))
    (alone, alone_gradients), (padded, padded_gradients) = results
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    close(padded, alone, atol=tolerance, rtol=tolerance)
    for name, gradient in padded_gradients.items():
        assert gradient.isfinite().all(), name
        assert (gradient - alone_gradients[name]).norm() <= 5 * tolerance * alone_gradients[name].norm(), name


@every_backend
@pytest.mark.parametrize("head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("why", ["no kept slot", "no supervised label"])
def test_a_batch_without_labels_is_a_finite_zero_with_gradients(target, parts, head, why, backend):
    draft = make_draft(target, head=head, attn_implementation=backend)
    ids, mask = random_tokens(2, LENGTH), torch.zeros(2, LENGTH)
    anchors = torch.tensor([[3, 8], [0, 2]]) if why == "no supervised label" else torch.zeros(2, 2).long()
    keep = torch.full((2, 2), why == "no supervised label")
    blocks = build_blocks(ids, mask, anchors, keep, draft.config, 4.0)
    hidden = teacher_forced_hidden(draft, parts, blocks, anchors, features_of(target, parts, ids, draft))
    output = domino_loss(draft, parts, blocks, hidden, 0.5)
    assert output.loss == output.base_loss == output.final_loss == 0
    assert output.counts["accuracy"] == output.sums["accuracy"] == 0
    output.loss.backward()
    for name, parameter in draft.named_parameters():
        # Other ranks wait for a gradient of every parameter.
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


# Chunks of logits


@every_labelling
@pytest.mark.parametrize("head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 10_000])
def test_chunks_change_neither_values_nor_gradients(target, parts, chunk_size, head, shift_label):
    draft, blocks, hidden = small_pass(target, parts, head=head, shift_label=shift_label)
    whole = domino_loss(draft, parts, blocks, hidden, 0.3)
    chunked = domino_loss(draft, parts, blocks, hidden, 0.3, chunk_size=chunk_size)
    for name in ("loss", "base_loss", "final_loss"):
        close(getattr(chunked, name), getattr(whole, name), atol=1e-5)
    assert chunked.sums == whole.sums and chunked.counts == whole.counts
    left, right = (gradients(draft, output.loss * 3) for output in (chunked, whole))
    for name in right:
        close(left[name], right[name], atol=1e-6)
    with torch.no_grad():
        silent = domino_loss(draft, parts, blocks, hidden, 0.3, chunk_size=chunk_size)
    close(silent.loss, whole.loss, atol=1e-5)
    assert not silent.loss.requires_grad


def test_chunks_honour_what_is_frozen_and_what_is_adapted(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    adapted = get_peft_model(
        draft, LoraConfig(r=3, target_modules=["embed_proj.0", "embed_proj.2"], init_lora_weights=False)
    )
    results = []
    for chunk_size in (None, 9):
        output = domino_loss(adapted, parts, blocks, hidden.detach(), 0.2, chunk_size=chunk_size)
        results.append(gradients(adapted, output.loss))
    trained = [name for name, gradient in results[0].items() if gradient is not None]
    assert len(trained) == 4 and all("lora" in name for name in trained)
    for name in trained:
        close(results[1][name], results[0][name], atol=1e-6)
    assert {name for name, gradient in results[1].items() if gradient is not None} == set(trained)


class Kept:
    """A tensor that autograd keeps for the backward pass; without its history, which would keep it for ever."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


def test_no_more_logits_than_a_chunk_are_kept_at_once(target, parts, monkeypatch):
    draft, blocks, hidden = small_pass(target, parts)
    kept, most, calls = weakref.WeakSet(), [], []
    weights = {p.untyped_storage().data_ptr() for model in (target, draft) for p in model.parameters()}

    def keep(tensor):
        held = Kept(tensor)
        if tensor.shape[-1:] == (VOCAB,) and tensor.untyped_storage().data_ptr() not in weights:
            kept.add(held)
        sizes = {held.tensor.untyped_storage().data_ptr(): held.tensor.numel() for held in kept}
        most.append(sum(sizes.values()) // VOCAB)
        return held

    def logits(hidden, token_ids=None):
        calls.append(len(hidden))
        return TargetParts.logits(parts, hidden, token_ids)

    monkeypatch.setattr(parts, "logits", logits)
    peaks = {}
    for chunk_size in (None, 24, 8):
        gc.collect()
        most.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
            domino_loss(draft, parts, blocks, hidden, 0.3, chunk_size=chunk_size).loss.backward(retain_graph=True)
        peaks[chunk_size] = max(most)
    assert max(calls[1:]) <= 24 and sum(calls[1:]) == 2 * calls[0], "each position's logits are made once"
    # Base logits of one chunk of whole blocks, and final ones where they differ, whatever the number of blocks is.
    assert 2 * calls[0] >= peaks[None] > 2 * 24 >= peaks[24] > 2 * 8 >= peaks[8]


def test_shares_of_a_batch_weigh_as_the_whole(target, parts):
    """Two processes that divide by their mean weight, and whose gradients are averaged, train as one."""
    draft, blocks, hidden = small_pass(target, parts)
    whole = domino_loss(draft, parts, blocks, hidden, 0.5)
    mean = blocks.weights.sum() / len(hidden)
    losses = []
    for n in range(len(hidden)):
        share = Blocks(**{name: value[n : n + 1] for name, value in vars(blocks).items()})
        losses.append(domino_loss(draft, parts, share, hidden[n : n + 1], 0.5, reduce=lambda _: mean).loss)
    close(torch.stack(losses).mean(), whole.loss, atol=1e-5)


# Distillation


@every_labelling
@pytest.mark.parametrize("chunk_size", [None, 9])
def test_distillation_takes_the_targets_distribution_in_place_of_its_token(target, parts, chunk_size, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label)
    states = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    counted = blocks.weights > 0
    plain = domino_loss(draft, parts, blocks, hidden, 0.3)
    for share in (0.25, 1.0):
        output = domino_loss(
            draft, parts, blocks, hidden, 0.3, None, chunk_size, target_hidden=states, options=ObjectiveOptions(share)
        )
        # By hand, with the base alone and the final logits that a one-hot weight shows.
        with torch.no_grad():
            soft = parts.logits(states[counted]).softmax(-1)
            base = -(soft * parts.logits(hidden[counted]).log_softmax(-1)).sum(-1)
            weights = blocks.weights[counted]
            expected_base = (base * weights).sum() / (weights.sum() + 1e-6)
        only_base = domino_loss(
            draft, parts, blocks, hidden, 1.0, None, chunk_size, target_hidden=states, options=ObjectiveOptions(share)
        )
        close(only_base.loss, (1 - share) * plain.base_loss + share * expected_base, atol=1e-5)
        close(output.base_loss, plain.base_loss, atol=1e-5)
        close(output.final_loss, plain.final_loss, atol=1e-5)
    # Its minimum is where the draft says what the target says.
    perfect = domino_loss(
        draft, parts, blocks, states.requires_grad_(), 1.0, target_hidden=states, options=ObjectiveOptions(1.0)
    )
    perfect.loss.backward()
    assert states.grad.abs().max() < 1e-6


def test_distillation_without_the_targets_states_is_refused(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    with pytest.raises(ValueError, match="`target_hidden` is not given"):
        domino_loss(draft, parts, blocks, hidden, 0.3, options=ObjectiveOptions(0.5))


# Shortlist of tokens


@every_labelling
def test_the_whole_vocabulary_as_shortlist_equals_no_shortlist(target, parts, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label)
    plain = domino_loss(draft, parts, blocks, hidden, 0.5)
    listed = domino_loss(draft, parts, blocks, hidden, 0.5, token_ids=torch.arange(VOCAB))
    close(listed.loss, plain.loss, atol=1e-6)
    for name in plain.sums:
        assert (listed.sums[name], listed.counts[name]) == (plain.sums[name], plain.counts[name])
    left, right = (gradients(draft, output.loss) for output in (listed, plain))
    for name in right:
        close(left[name], right[name], atol=1e-6)


@every_labelling
def test_labels_outside_the_shortlist_have_no_weight(target, parts, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label)
    token_ids = torch.arange(1, VOCAB, 2)
    inside = blocks.target_ids % 2 == 1
    listed = domino_loss(draft, parts, blocks, hidden, 0.5, token_ids=token_ids)
    counted = (blocks.weights > 0) & inside
    assert 0 < counted.sum() < (blocks.weights > 0).sum()
    assert listed.counts["accuracy"] == counted.sum()
    # The same as the plain objective on those labels, with all other logits out of the way.
    with torch.no_grad():
        weights, labels = blocks.weights[counted], blocks.target_ids[counted]
        logits = parts.logits(hidden[counted])[:, token_ids].float()
        ce = logits.logsumexp(-1) - logits[torch.arange(len(labels)), labels // 2]
        close(listed.base_loss, (ce * weights).sum() / (weights.sum() + 1e-6), atol=1e-5)


def test_a_shortlist_without_any_label_is_a_finite_zero(target, parts):
    draft, blocks, hidden = small_pass(target, parts)
    output = domino_loss(draft, parts, blocks, hidden, 0.5, token_ids=torch.tensor([MASK_TOKEN]))
    assert output.loss == 0
    output.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in draft.parameters())


# Tied heads


def test_a_tied_target_trains_against_its_embedding_not_fresh_weights():
    fixture = load_fixture("shift0-prefix0")
    stored = load_file(fixture.target_path / "model.safetensors")
    assert not any("lm_head" in name for name in stored)
    parts = TargetParts(fixture.target())
    assert parts.output_head.weight is parts.embedding.weight
    assert torch.equal(parts.output_head.weight, stored["model.embed_tokens.weight"])


def test_the_base_loss_follows_a_tied_embedding():
    tied = make_target("llama-tied")
    parts = TargetParts(tied)
    draft, blocks, hidden = small_pass(tied, parts)
    before = domino_loss(draft, parts, blocks, hidden, 1.0).loss
    with torch.no_grad():
        tied.get_input_embeddings().weight.mul_(0.5)
    after = domino_loss(draft, parts, blocks, hidden, 1.0).loss
    logits = hidden[blocks.weights > 0] @ tied.get_input_embeddings().weight.T
    weights, labels = blocks.weights[blocks.weights > 0], blocks.target_ids[blocks.weights > 0]
    ce = logits.logsumexp(-1) - logits.gather(1, labels[:, None])[:, 0]
    close(after, (ce * weights).sum() / (weights.sum() + 1e-6), atol=1e-5)
    assert not torch.allclose(after.float(), before.float(), atol=1e-3)


# Curriculum


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.8), (1, 0.8 * 49 / 50), (25, 0.4), (49, 0.8 / 50), (50, 0.0), (51, 0.0), (100, 0.0)],
    ids=lambda value: str(value),
)
def test_lambda_falls_linearly_to_zero_and_stays(step, expected):
    curriculum = BaseAnchoredCurriculum(start=0.8, decay_ratio=0.5)
    assert curriculum.weight(step, total_steps=100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("total", "ratio", "steps", "expected"),
    [
        (10, 1.0, [0, 5, 10], [1.0, 0.5, 0.0]),
        (10, 0.0, [0, 1, 5], [1.0, 0.0, 0.0]),
        (3, 0.1, [0, 1], [1.0, 0.0]),
        (7, 0.5, [0, 1, 2, 3], [1.0, 2 / 3, 1 / 3, 0.0]),
        (0, 0.5, [0, 1], [1.0, 0.0]),
    ],
    ids=["whole run", "no decay time", "less than a step", "rounded down", "no steps"],
)
def test_lambda_at_odd_lengths(total, ratio, steps, expected):
    curriculum = BaseAnchoredCurriculum(decay_ratio=ratio)
    assert [curriculum.weight(step, total) for step in steps] == pytest.approx(expected)


def test_without_a_decay_lambda_stays():
    curriculum = BaseAnchoredCurriculum(0.5, None)
    assert [curriculum.weight(step, 10) for step in range(11)] == [0.5] * 11


def test_lambda_never_rises_and_stays_within_its_start():
    rng = random.Random(0)
    for _ in range(50):
        total, start, ratio = rng.randint(1, 200), rng.random(), rng.random()
        values = [BaseAnchoredCurriculum(start, ratio).weight(step, total) for step in range(total + 1)]
        assert values[0] == start
        assert values == sorted(values, reverse=True)
        assert values[-1] == 0


# Gradients


@pytest.mark.parametrize("soft", [None, "soft"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("places", [None, [], [0, 1, 3, 4, 6], list(range(7))], ids=["no head", "none", "some", "all"])
def test_gradients_made_by_hand_are_those_of_autograd(places, smoothing, soft):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    base_logits, labels, options = random(7, 11), torch.arange(7), ObjectiveOptions(0.3 if soft else 0.0, smoothing)
    inputs, final_logits, where = [base_logits], base_logits, None
    if places is not None:
        where = torch.tensor(places, dtype=torch.long)
        inputs.append(random(len(places), 11))
        final_logits = base_logits.index_add(0, where, inputs[1])
    teacher = random(7, 11).detach().softmax(-1) if soft else None
    outers = random(2, 7).detach()

    def plain(logits):
        loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        return loss if teacher is None else 0.7 * loss + 0.3 * F.cross_entropy(logits, teacher, reduction="none")

    found = _CrossEntropies.apply(*inputs, *[None] * (2 - len(inputs)), where, labels, teacher, options)
    for k, logits in enumerate((base_logits, final_logits)):
        close(found[k], plain(logits), atol=1e-5)
        close(found[2 + k], F.cross_entropy(logits, labels, reduction="none"), atol=1e-5)
        assert found[4 + k].tolist() == (logits.argmax(-1) == labels).tolist()
    ours = torch.autograd.grad((torch.stack(found[:2]) * outers).sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad((torch.stack([plain(base_logits), plain(final_logits)]) * outers).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, atol=1e-6)
    with pytest.raises(RuntimeError, match="inplace"):
        found[0].sum().backward()


# Label smoothing, D-PACE


@every_labelling
@pytest.mark.parametrize("chunk_size", [None, 9])
def test_label_smoothing_spreads_a_share_of_the_label_evenly(target, parts, chunk_size, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label)
    plain = domino_loss(draft, parts, blocks, hidden, 1.0)
    smoothed = domino_loss(
        draft, parts, blocks, hidden, 1.0, None, chunk_size, options=ObjectiveOptions(label_smoothing=0.2)
    )
    counted = blocks.weights > 0
    labels, weights = blocks.target_ids[counted], blocks.weights[counted]
    ce = F.cross_entropy(parts.logits(hidden[counted]), labels, label_smoothing=0.2, reduction="none")
    close(smoothed.loss, (ce * weights).sum() / (weights.sum() + 1e-6), atol=1e-5)
    close(smoothed.base_loss, plain.base_loss, atol=1e-5)


def test_dpace_weights_are_hand_counted():
    counted = torch.tensor([[False, True, True, True], [False, True, False, True], [False, False, False, False]])
    confidence = torch.tensor([0.5, 0.2, 1.0, 0.4, 0.6])
    # Lifted by half: 0.75, 0.6, 1 and 0.7, 0.8. An offset without a label ends nothing and counts for nothing.
    first = [0.75 + 0.75 * 0.6 + 0.75 * 0.6, 0.75 * 0.6 + 0.75 * 0.6, 0.75 * 0.6]
    second = [0.7 + 0.7 * 0.8, 0.7 * 0.8]
    close(dpace_weights(confidence, counted, 0.5), torch.tensor(first + second), atol=1e-6)
    # Without any confidence of its own, a weight is the number of labels from there on.
    close(dpace_weights(confidence, counted, 1.0), torch.tensor([3.0, 2, 1, 2, 1]), atol=1e-6)


@every_labelling
@pytest.mark.parametrize("chunk_size", [None, 9])
def test_dpace_weighs_both_losses_by_the_confidence_of_the_final_logits(target, parts, chunk_size, shift_label):
    draft, blocks, hidden = small_pass(target, parts, shift_label=shift_label)
    blocks = replace(blocks, weights=(blocks.weights > 0).float())
    output = domino_loss(draft, parts, blocks, hidden, 0.3, None, chunk_size, options=ObjectiveOptions(dpace_alpha=0.4))

    def cross_entropy(lambda_base, at):
        weights = torch.zeros_like(blocks.weights)
        weights[at] = 1.0
        with torch.no_grad():
            return domino_loss(draft, parts, replace(blocks, weights=weights), hidden, lambda_base).loss.item()

    total, base, final, seen = 0.0, 0.0, 0.0, []
    for n, a in blocks.keep.nonzero().tolist():
        offsets = blocks.weights[n, a].nonzero()[:, 0].tolist()
        finals = [cross_entropy(0.0, (n, a, k)) for k in offsets]
        lifted = [0.6 * math.exp(-ce) + 0.4 for ce in finals]
        for j, k in enumerate(offsets):
            weight = sum(math.prod(lifted[: m + 1]) for m in range(j, len(offsets)))
            seen.append(weight)
            total += weight
            final += weight * finals[j]
            base += weight * cross_entropy(1.0, (n, a, k))
    assert output.final_loss.item() == pytest.approx(final / total, rel=1e-4)
    assert output.base_loss.item() == pytest.approx(base / total, rel=1e-4)
    assert output.loss.item() == pytest.approx((0.7 * final + 0.3 * base) / total, rel=1e-4)
    # Nothing is gained by a lower confidence: gradients are those of the same weights as constants.
    constants = torch.zeros_like(blocks.weights)
    constants[blocks.weights > 0] = torch.tensor(seen)
    fixed = domino_loss(draft, parts, replace(blocks, weights=constants), hidden, 0.3)
    left, right = (gradients(draft, loss) for loss in (output.loss, fixed.loss))
    for name in right:
        close(left[name], right[name], atol=1e-5)
