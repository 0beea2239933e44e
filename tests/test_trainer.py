# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Data, cached features and the trainer, on a tiny target: what moves, what is supervised, what survives a kill."""

import copy

import pytest
import torch
from helpers import HIDDEN, MASK_TOKEN, VOCAB, make_draft, make_target, random_tokens
from peft import LoraConfig, get_peft_model

from domino_spec.generation.context import TargetParts
from domino_spec.modeling_domino import DominoDraftModel
from domino_spec.training.arguments import DominoTrainingArguments
from domino_spec.training.blocks import build_blocks, sample_anchors
from domino_spec.training.data import ChatRow
from domino_spec.training.features import (
    FeatureDataset,
    TokenDataset,
    cache_features,
    collate_features,
    feature_bytes,
    target_fingerprint,
)
from domino_spec.training.initialization import initialize_from_target
from domino_spec.training.objective import label_states
from domino_spec.training.trainer import DominoTrainer, hidden_loss

LAYER_IDS = [0, 2, 3]


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", dtype=torch.float32).requires_grad_(False)


def make_rows(target, count=12, prompt=6, answer=26) -> list[ChatRow]:
    """Conversations that the target wrote itself, greedily; the answer is supervised."""
    rows = []
    for seed in range(count):
        ids = random_tokens(1, prompt, seed=seed)
        written = target.generate(ids, max_new_tokens=answer, do_sample=False, suppress_tokens=[MASK_TOKEN])[0]
        rows.append(ChatRow(written.tolist(), [0] * prompt + [1] * answer))
    return rows


@pytest.fixture(scope="module")
def features(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    cache_features(target, make_rows(target), LAYER_IDS, folder)
    return folder


def make_trainer(target, folder, output_dir, draft=None, dataset=None, **overrides):
    settings = {
        "output_dir": str(output_dir),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "num_anchors": 6,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    torch.manual_seed(0)
    draft = make_draft(target, target_layer_ids=LAYER_IDS) if draft is None else draft
    return DominoTrainer(
        model=draft.train(),
        target=target,
        args=DominoTrainingArguments(**{**settings, **overrides}),
        train_dataset=FeatureDataset(folder) if dataset is None else dataset,
        eval_dataset=FeatureDataset(folder) if dataset is None else dataset,
    )


class TestTrainer:
    def test_every_parameter_of_the_draft_moves_and_the_target_does_not(self, target, features, tmp_path):
        frozen = {name: parameter.clone() for name, parameter in target.named_parameters()}
        draft = make_draft(target, target_layer_ids=LAYER_IDS)
        start = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
        make_trainer(target, features, tmp_path, draft, lambda_base_start=0.5).train()
        for name, parameter in draft.named_parameters():
            assert not torch.equal(parameter, start[name]), name
        for name, parameter in target.named_parameters():
            assert torch.equal(parameter, frozen[name]), name

    def test_overfitting_a_few_rows_makes_real_generation_accept_nearly_whole_blocks(self, target, tmp_path):
        rows = make_rows(target, count=4)
        cache_features(target, rows, LAYER_IDS, tmp_path / "features")
        trainer = make_trainer(
            target, tmp_path / "features", tmp_path, max_steps=250, num_anchors=20, lambda_base_decay_ratio=0.5
        )
        trainer.train()
        lengths = []
        for row in rows:
            output = target.generate(
                torch.tensor([row.input_ids[:6]]),
                assistant_model=trainer.model.eval(),
                max_new_tokens=26,
                do_sample=False,
                suppress_tokens=[MASK_TOKEN],
                return_dict_in_generate=True,
            )
            assert output.sequences[0].tolist() == row.input_ids
            lengths += output.acceptance_lengths[0, :-1].tolist()
        assert sum(lengths) / len(lengths) > 0.8 * trainer.model.config.block_size

    def test_reports_base_beside_final_and_the_curriculum(self, target, features, tmp_path):
        trainer = make_trainer(target, features, tmp_path, lambda_base_decay_ratio=1.0)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["lambda_base"] for entry in logged] == pytest.approx([1 - 2 / 6, 1 - 4 / 6, 0])
        for name in ("accuracy", "base_accuracy", "accept_len", "base_accept_len", "base_loss", "final_loss"):
            assert all(name in entry for entry in logged), name
        measured = trainer.evaluate()
        assert measured["eval_accept_len"] >= 1

    def test_evaluation_is_repeatable_and_leaves_the_training_metrics_alone(self, target, features, tmp_path):
        trainer = make_trainer(target, features, tmp_path)
        trainer._sums["accuracy"], trainer._counts["accuracy"] = 3.0, 4.0
        first, second = trainer.evaluate(), trainer.evaluate()
        for name in ("eval_final_loss", "eval_accept_len", "eval_base_accuracy"):
            assert first[name] == second[name]
        assert trainer._take_metrics() == {"accuracy": 0.75}

    def test_several_held_out_sets_are_reported_by_name_also_without_training_rows(self, target, features, tmp_path):
        draft = make_draft(target, target_layer_ids=LAYER_IDS)
        settings = {"output_dir": str(tmp_path), "num_anchors": 6, "report_to": "none", "use_cpu": True}
        whole = make_trainer(target, features, tmp_path, draft).evaluate()
        trainer = DominoTrainer(
            model=draft,
            target=target,
            args=DominoTrainingArguments(**settings, shortlist_size=8),
            eval_dataset={"chat": FeatureDataset(features), "code": FeatureDataset(features)},
        )
        trainer._sums["accuracy"], trainer._counts["accuracy"] = 3.0, 4.0
        measured = trainer.evaluate()
        for name in ("final_loss", "accept_len", "base_accept_len"):
            assert measured[f"eval_chat_{name}"] == measured[f"eval_code_{name}"] == whole[f"eval_{name}"], name
        assert trainer._take_metrics() == {"accuracy": 0.75}

    def test_a_killed_run_resumes_to_the_same_weights(self, target, features, tmp_path):
        whole = make_trainer(target, features, tmp_path / "whole", max_steps=6)
        whole.train()
        half = make_trainer(target, features, tmp_path / "half", max_steps=6, save_strategy="steps", save_steps=3)
        half.train()
        resumed = make_trainer(target, features, tmp_path / "half", max_steps=6)
        resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-3"))
        for (name, expected), (_, found) in zip(
            whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
        ):
            assert torch.equal(expected, found), name

    def test_features_taken_as_it_goes_give_the_losses_of_cached_ones(self, target, features, tmp_path):
        histories = []
        for dataset in (FeatureDataset(features), TokenDataset(make_rows(target))):
            trainer = make_trainer(target, None, tmp_path, None, dataset, hidden_loss_weight=0.5, logging_steps=1)
            trainer.train()
            histories.append([entry for entry in trainer.state.log_history if "final_loss" in entry])
        names = ("loss", "base_loss", "final_loss", "hidden_loss", "accept_len")
        for cached, online in zip(*histories, strict=True):
            # Both are rounded to bf16; the target's passes differ in their padding only.
            assert [online[name] for name in names] == pytest.approx([cached[name] for name in names], rel=1e-3)

    def test_packed_rows_give_the_steps_of_padded_ones(self, target, features, tmp_path):
        histories = []
        for pack_length in (None, 70):
            settings = {"pack_length": pack_length, "hidden_loss_weight": 0.5, "distillation_weight": 0.3}
            trainer = make_trainer(target, features, tmp_path, logging_steps=1, **settings)
            trainer.train()
            histories.append([entry for entry in trainer.state.log_history if "final_loss" in entry])
        for padded, packed in zip(*histories, strict=True):
            for name in ("loss", "final_loss", "hidden_loss", "accept_len"):
                assert packed[name] == pytest.approx(padded[name], rel=1e-4), name

    def test_options_reach_the_objective(self, target, features, tmp_path):
        names = ("loss", "final_loss")
        firsts = {}
        for name, options in {
            "none": {},
            "distilled": {"distillation_weight": 0.5},
            "smoothed": {"label_smoothing_factor": 0.1},
            "D-PACE": {"dpace_alpha": 0.5},
        }.items():
            trainer = make_trainer(target, features, tmp_path, loss_decay_gamma=None, logging_steps=1, **options)
            trainer.train()
            entry = next(entry for entry in trainer.state.log_history if "final_loss" in entry)
            firsts[name] = [entry[name] for name in names]
        plain = firsts.pop("none")
        for name, first in firsts.items():
            assert first[0] != pytest.approx(plain[0], rel=1e-6), name
            # What is reported stays the cross-entropy with the label; D-PACE weighs that too.
            assert (first[1] == pytest.approx(plain[1], rel=1e-6)) == (name != "D-PACE"), name

    def test_dpace_takes_the_place_of_the_position_decay(self, tmp_path):
        with pytest.raises(ValueError, match=r"`dpace_alpha` \(0.5\) .* `loss_decay_gamma: null`, not 7.0"):
            DominoTrainingArguments(output_dir=str(tmp_path), use_cpu=True, dpace_alpha=0.5)

    def test_recomputed_layers_change_nothing(self, target, features, tmp_path):
        drafts = []
        for checkpointing in (False, True):
            trainer = make_trainer(target, features, tmp_path, gradient_checkpointing=checkpointing)
            trainer.train()
            assert any(layer.gradient_checkpointing for layer in trainer.model.layers) == checkpointing
            drafts.append(trainer.model.state_dict())
        for name, tensor in drafts[0].items():
            torch.testing.assert_close(drafts[1][name], tensor, rtol=1e-5, atol=1e-6)

    def test_accumulated_micro_batches_are_averaged(self, target, features, tmp_path):
        trainer = make_trainer(
            target,
            features,
            tmp_path,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            max_steps=1,
            logging_steps=1,
        )
        losses = []
        compute = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: losses.append(compute(*args, **kwargs)) or losses[-1]
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        assert len(losses) == 3
        assert logged["loss"] == pytest.approx(sum(loss.item() for loss in losses) / 3, rel=1e-5)

    def test_a_batch_without_anchors_contributes_zero_and_is_counted(self, target, features, tmp_path):
        trainer = make_trainer(target, features, tmp_path)
        batch = collate_features([FeatureDataset(features)[0]])
        batch["loss_mask"].zero_()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        assert loss.item() == 0 and trainer.num_skipped == 1
        assert all(parameter.grad.abs().sum() == 0 for parameter in trainer.model.parameters())

    def test_shortlist_holds_the_ids_supervised_most_often(self, target, features, tmp_path):
        trainer = make_trainer(target, features, tmp_path, shortlist_size=20)
        counts = FeatureDataset(features).token_counts(VOCAB)
        assert trainer.token_ids.tolist() == sorted(trainer.token_ids.tolist())
        left_out = set(range(VOCAB)) - set(trainer.token_ids.tolist())
        assert max(counts[i] for i in left_out) <= min(counts[i] for i in trainer.token_ids)
        assert trainer.model.config.shortlist is None

    def test_the_draft_keeps_its_shortlist_where_asked(self, target, features, tmp_path):
        trainer = make_trainer(target, features, tmp_path, shortlist_size=20, keep_shortlist=True)
        trainer.train()
        trainer.save_model()
        again = DominoDraftModel.from_pretrained(tmp_path)
        assert again.config.shortlist_ids == trainer.token_ids.tolist()
        left_out = sorted(set(range(VOCAB)) - set(again.config.shortlist_ids))
        rows = again.embed_proj[2].weight
        assert rows[left_out].abs().max() == 0 and rows[again.config.shortlist_ids].abs().min(-1).values.max() > 0
        # What it may propose is what it is trained on from then on, unless told otherwise.
        assert make_trainer(target, features, tmp_path, again).token_ids.tolist() == trainer.token_ids.tolist()
        whole = make_trainer(target, features, tmp_path / "whole", again, shortlist_size=0)
        whole.train()
        assert whole.token_ids is None and again.config.shortlist_ids == trainer.token_ids.tolist()
        assert again.embed_proj[2].weight[left_out].abs().max() > 0
        adapted = get_peft_model(again, LoraConfig(r=2, target_modules=["fc"]))
        with pytest.raises(ValueError, match="`keep_shortlist` is true, but an adapter"):
            make_trainer(target, features, tmp_path, adapted, shortlist_size=20, keep_shortlist=True)

    @pytest.mark.parametrize("size", [None, 0])
    def test_a_shortlist_of_no_size_cannot_be_kept(self, size, tmp_path):
        with pytest.raises(ValueError, match=f"`keep_shortlist` is true, but `shortlist_size` is {size}"):
            DominoTrainingArguments(output_dir=str(tmp_path), use_cpu=True, keep_shortlist=True, shortlist_size=size)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("num_anchors", 0), ("lambda_base_start", 1.5), ("loss_decay_gamma", 0.0), ("dpace_alpha", 2.0)],
    )
    def test_settings_out_of_range_are_named(self, name, value, tmp_path):
        with pytest.raises(ValueError, match=f"`{name}` is {value}"):
            DominoTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


def test_hidden_loss_compares_each_offset_with_the_target_state_that_predicts_its_label(target):
    config = make_draft(target).config
    ids, last = random_tokens(1, 20), torch.randn(1, 20, HIDDEN, generator=torch.Generator().manual_seed(0))
    anchors, keep = torch.tensor([[3, 11]]), torch.tensor([[True, True]])
    for shift in (True, False):
        config.shift_label = shift
        blocks = build_blocks(ids, torch.ones(1, 20), anchors, keep, config, None)
        perfect = torch.zeros(1, 2, config.block_size, HIDDEN)
        for slot, anchor in enumerate((3, 11)):
            for k in range(config.block_size):
                perfect[0, slot, k] = last[0, anchor + k - (0 if shift else 1)]
        states = label_states(last, anchors, config.block_size, shift)
        assert torch.equal(states, perfect)
        assert hidden_loss(perfect, states, blocks).item() == pytest.approx(0, abs=1e-6)
        assert hidden_loss(-perfect, states, blocks).item() == pytest.approx(2, abs=1e-5)


class TestFeatures:
    def test_cached_features_are_the_layers_raw_outputs_in_row_order(self, target, features):
        rows, dataset = make_rows(target), FeatureDataset(features)
        assert len(dataset) == len(rows)
        for index in (0, 7):
            item, ids = dataset[index], torch.tensor([rows[index].input_ids])
            assert item["input_ids"].tolist() == rows[index].input_ids
            assert item["loss_mask"].tolist() == rows[index].loss_mask
            parts = TargetParts(target)
            with parts.capture(LAYER_IDS) as capture:
                output = target.get_decoder()(ids)
                expected = capture.take(ids.device)[0]
            torch.testing.assert_close(item["context_hidden_states"].float(), expected, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(
                item["last_hidden_state"].float(), output.last_hidden_state[0], rtol=1e-2, atol=1e-2
            )

    def test_a_killed_run_makes_only_what_is_missing(self, target, tmp_path, monkeypatch):
        monkeypatch.setattr("domino_spec.training.features.ROWS_PER_SHARD", 3)
        rows = make_rows(target, count=6)
        cache_features(target, rows, LAYER_IDS, tmp_path)
        shards = sorted(tmp_path.glob("shard-*.safetensors"))
        first, second = (path.read_bytes() for path in shards)
        shards[1].unlink()
        shards[0].write_bytes(b"kept")
        cache_features(target, rows, LAYER_IDS, tmp_path)
        assert shards[0].read_bytes() == b"kept"
        assert shards[1].read_bytes() == second and first != second

    def test_features_of_other_layers_are_refused(self, target, features):
        with pytest.raises(ValueError, match=r"made with .*layer_ids \[0, 2, 3\], not \[1, 2\]"):
            cache_features(target, make_rows(target), [1, 2], features)

    def test_features_of_other_rows_or_another_target_are_refused(self, target, features, tmp_path):
        with pytest.raises(ValueError, match=r"rows 12-.*, not 3-"):
            cache_features(target, make_rows(target, count=3), LAYER_IDS, features)
        other = make_target("qwen3", dtype=torch.float32, seed=5).requires_grad_(False)
        with pytest.raises(ValueError, match=r"target qwen3-.*, not qwen3-"):
            cache_features(other, make_rows(target), LAYER_IDS, features)
        with pytest.raises(ValueError, match=r"features in .* made with target qwen3-.* but this run has qwen3-"):
            make_trainer(other, features, tmp_path)
        draft = make_draft(target, target_layer_ids=[0, 1, 2])
        with pytest.raises(ValueError, match=r"layer_ids \[0, 2, 3\], but this run has \[0, 1, 2\]"):
            make_trainer(target, features, tmp_path, draft)

    def test_a_target_is_the_same_in_any_dtype(self, target):
        assert target_fingerprint(target) == target_fingerprint(copy.deepcopy(target).to(torch.bfloat16))

    def test_rows_without_an_anchor_are_left_out_and_counted(self, target, tmp_path):
        rows = [ChatRow([1, 2, 3, 4], [0, 1, 0, 1]), ChatRow([1, 2, 3, 4], [0, 1, 1, 0])]
        cache_features(target, rows, LAYER_IDS, tmp_path)
        dataset = FeatureDataset(tmp_path)
        assert (len(dataset), dataset.num_skipped) == (1, 1)

    def test_an_empty_folder_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="No feature shards"):
            FeatureDataset(tmp_path)

    def test_announced_size_is_the_size_of_the_tensors(self):
        rows = [ChatRow([1] * 10, [1] * 10), ChatRow([1] * 5, [1] * 5)]
        assert feature_bytes(rows, hidden_size=8, num_layers=3) == 15 * 8 * 4 * 2

    def test_padding_is_never_an_anchor(self, features):
        dataset = FeatureDataset(features)
        short = {name: value if name == "row" else value[:20] for name, value in dataset[1].items()}
        batch = collate_features([dataset[0], short])
        anchors, keep = sample_anchors(batch["loss_mask"], 64, [0, 1])
        assert anchors[1][keep[1]].max() < 19


class TestInitialization:
    def test_layers_norms_and_zero_correction_come_from_the_target(self, target):
        draft = make_draft(target, intermediate_size=48, target_layer_ids=LAYER_IDS)
        initialize_from_target(draft, target, [1, 3], output_damping=0.25)
        theirs, ours = target.model.layers[3], draft.layers[1]
        assert torch.equal(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight * 0.25)
        assert torch.equal(draft.norm.weight, target.model.norm.weight)
        assert draft.correction(torch.ones(1, HIDDEN), torch.ones(1, 12)).abs().max() == 0

    def test_layers_of_another_shape_are_refused_with_both_shapes(self, target):
        with pytest.raises(
            ValueError, match=r"mlp\.\w+_proj\.weight` has shape \(.*48.*\), the draft's has \(.*40.*\)"
        ):
            initialize_from_target(make_draft(target), target, [1, 3])

    def test_as_many_source_layers_as_draft_layers(self, target):
        with pytest.raises(ValueError, match="names 1 layers for a draft of 2"):
            initialize_from_target(make_draft(target), target, [1])
