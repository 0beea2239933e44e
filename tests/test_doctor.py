# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""`domino-spec doctor`: a healthy pair is called healthy, and each planted fault by its name and no other.

The pair is a tiny random target, whose language is what it writes itself, and a draft that has learnt its answers to
eight prompts without reasoning by heart: nearly whole blocks are accepted, and every fault shows.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MASK_TOKEN, TARGET_LAYERS, VOCAB, make_draft, make_target, random_tokens
from safetensors.torch import load_file, save_file
from test_trainer import make_trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from domino_spec.checkpoints import load_default_target
from domino_spec.evaluation import doctor, predictions
from domino_spec.training.arguments import RECORD
from domino_spec.training.data import ChatRow
from domino_spec.training.features import TokenDataset, cache_features

NEW_TOKENS = 32
LAYER_IDS = [1, 2]
ROTARY_BASE = 10000.0
WORDS = [f"w{i}" for i in range(VOCAB)]
# Thinking is on by default, and begins with two words.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking | default(true) %} w3 w5{% endif %}"
QUIET = {"enable_thinking": False}


@dataclass
class Pair:
    """What a diagnosis is made of; a test changes it, or the folder of the draft."""

    target: Any
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    prompts: list[str]
    options: dict[str, Any] = field(default_factory=lambda: {"template": QUIET})

    def diagnose(self) -> doctor.Diagnosis:
        return doctor.diagnose(self.target, self.tokenizer, self.folder, self.prompts, NEW_TOKENS, **self.options)

    def configure(self, **fields):
        """Changes fields of the draft's config, wherever they stand."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        for name, value in fields.items():
            for place in (config, config["dflash_config"], config["rope_parameters"]):
                if name in place or place is config:
                    place[name] = value
        path.write_text(json.dumps(config))

    def rewrite(self, edit: Callable[[str, torch.Tensor], torch.Tensor | None]):
        """Changes the draft's weights by name; what becomes `None` is dropped."""
        path = self.folder / "model.safetensors"
        edited = {name: edit(name, tensor) for name, tensor in load_file(path).items()}
        save_file({k: v.contiguous() for k, v in edited.items() if v is not None}, path, {"format": "pt"})


def word_tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def speaker(seed: int, **overrides):
    """A target, and eight prompts that it can read, as it has written them."""
    target = make_target("qwen3", torch.float32, seed, "sdpa", rope_theta=ROTARY_BASE, **overrides)
    target.generation_config.suppress_tokens = [MASK_TOKEN]
    written = target.requires_grad_(False).generate(random_tokens(8, 3, seed), max_new_tokens=9, pad_token_id=0)
    return target, [" ".join(WORDS[i] for i in row) for row in written.tolist()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("doctor")
    target, prompts = speaker(seed=0)
    tokenizer = word_tokenizer()
    answers = doctor.write_answers(target, tokenizer, prompts, NEW_TOKENS, QUIET)
    rows = [ChatRow(ids.tolist(), [int(place >= start) for place in range(len(ids))]) for ids, start in answers]
    draft = make_draft(target, attn_implementation="sdpa", target_layer_ids=LAYER_IDS, num_hidden_layers=1)
    settings = {"max_steps": 200, "learning_rate": 5e-3, "num_anchors": 24, "per_device_train_batch_size": 8}
    settings |= {"lambda_base_start": 0.5, "lambda_base_decay_ratio": None, "logging_steps": 200}
    make_trainer(target, folder, folder, draft, TokenDataset(rows), **settings).train()
    draft.save_pretrained(folder / "draft")
    return Pair(target, tokenizer, folder / "draft", prompts)


@pytest.fixture
def pair(trained, tmp_path) -> Pair:
    """The trained pair, with a copy of the draft's folder."""
    shutil.copytree(trained.folder, tmp_path / "draft")
    return Pair(trained.target, trained.tokenizer, tmp_path / "draft", list(trained.prompts))


def test_a_healthy_pair_is_healthy(pair):
    diagnosis = pair.diagnose()
    assert diagnosis.faults == []
    assert [check.verdict for check in diagnosis.checks] == ["ok"] * len(doctor.FAULTS)
    assert diagnosis.acceptance_length > 5
    assert diagnosis.acceptance_length > diagnosis.base_acceptance_length


def test_a_healthy_draft_without_a_head_is_healthy(pair):
    pair.configure(projector_type=None)
    pair.rewrite(lambda name, tensor: None if name.startswith(("prefix_gru", "embed_proj")) else tensor)
    diagnosis = pair.diagnose()
    assert diagnosis.faults == []
    assert diagnosis.acceptance_length == diagnosis.base_acceptance_length > 4


# ---- Each planted fault is found, and no other ---------------------------------------------------------------------


def another_target(pair: Pair):
    pair.target, pair.prompts = speaker(seed=7)
    (pair.folder / RECORD).write_text('{"target": "the-right-one"}')


def a_deeper_target(pair: Pair):
    pair.target, pair.prompts = speaker(seed=0, num_hidden_layers=TARGET_LAYERS + 1)


def shuffled(name: str, dim: int = 0):
    def plant(pair: Pair):
        def edit(key, tensor):
            order = torch.randperm(tensor.shape[dim if key == name else 0], generator=torch.Generator().manual_seed(0))
            return tensor.index_select(dim, order) if key == name else tensor

        pair.rewrite(edit)

    return plant


def overflowing_activations(pair: Pair):
    # `hidden_norm` takes the factor out again, but not before it has left float16's range.
    pair.rewrite(lambda name, tensor: (tensor * (2e4 if name == "fc.weight" else 1)).half())
    pair.configure(dtype="float16")


def overflown_weights(pair: Pair):
    pair.rewrite(lambda name, tensor: (tensor * (1e6 if name == "fc.weight" else 1)).half())
    pair.configure(dtype="float16")


def lost_projector_type(pair: Pair):
    path = pair.folder / "config.json"
    config = json.loads(path.read_text())
    for place in (config, config["dflash_config"]):
        for name in ("projector_type", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"):
            place.pop(name, None)
    path.write_text(json.dumps(config))


def reordered_vocabulary(pair: Pair):
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    pair.tokenizer = word_tokenizer([WORDS[i] for i in order])


def larger_vocabulary(pair: Pair):
    pair.tokenizer = word_tokenizer([f"v{i}" for i in range(VOCAB)] + WORDS)


def draft_of_another_vocabulary(pair: Pair):
    pair.rewrite(lambda name, tensor: torch.cat([tensor, tensor[:8]]) if name == "embed_proj.2.weight" else tensor)
    pair.configure(vocab_size=VOCAB + 8)


def draft_with_another_tokenizer(pair: Pair):
    word_tokenizer(WORDS[::-1]).save_pretrained(pair.folder)


def older_code(pair: Pair):
    path = pair.folder / "generation.py"
    path.write_text(path.read_text().replace("use_head", "with_head"))


def features_of_another_target(pair: Pair):
    folder = pair.folder.parent / "features" / "chat" / "train"
    cache_features(speaker(seed=7)[0], [ChatRow([1, 2, 3], [0, 1, 1])], LAYER_IDS, folder)
    pair.options["features"] = [folder.parent.parent]


def features_of_other_layers(pair: Pair):
    cache_features(pair.target, [ChatRow([1, 2, 3], [0, 1, 1])], [0, 3], pair.folder.parent / "features")
    pair.options["features"] = [pair.folder.parent / "features"]


def noisy_backbone(pair: Pair):
    def edit(name, tensor):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * tensor.std()
        return tensor + 0.5 * noise if name.startswith("layers.") and tensor.dim() > 1 else tensor

    pair.rewrite(edit)
    pair.options["expected"] = 6.0


PLANTED: dict[str, tuple[str, Callable[[Pair], Any], str]] = {
    "a target of the same shape": (doctor.WRONG_TARGET, another_target, "the-right-one"),
    "a deeper target": (doctor.WRONG_TARGET, a_deeper_target, "use the target"),
    "layer ids one too high": (
        doctor.LAYER_IDS,
        lambda pair: pair.configure(target_layer_ids=[2, 3]),
        "`target_layer_ids` to [1, 2]",
    ),
    "layer ids one too low": (
        doctor.LAYER_IDS,
        lambda pair: pair.configure(target_layer_ids=[0, 1]),
        "`target_layer_ids` to [1, 2]",
    ),
    "another mask token": (
        doctor.MASK_TOKEN,
        lambda pair: pair.configure(mask_token_id=17),
        f"`mask_token_id` to {MASK_TOKEN}",
    ),
    "another rotary base": (
        doctor.ROTARY_BASE,
        lambda pair: pair.configure(rope_theta=5e6),
        f"`rope_theta` to {ROTARY_BASE}",
    ),
    "labels not shifted": (
        doctor.LABEL_SHIFT,
        lambda pair: pair.configure(shift_label=False),
        "`shift_label` to true",
    ),
    "rows of the head shuffled": (doctor.SHUFFLED_HEAD, shuffled("embed_proj.2.weight"), "use_head=False"),
    "columns of the head shuffled": (doctor.SHUFFLED_HEAD, shuffled("embed_proj.0.weight", 1), "use_head=False"),
    "the GRU shuffled": (doctor.SHUFFLED_HEAD, shuffled("prefix_gru.weight_ih_l0"), "use_head=False"),
    "a config of a narrower dtype": (
        doctor.DTYPE,
        lambda pair: pair.configure(dtype="float16"),
        "the file's dtype into the config",
    ),
    "activations beyond float16": (doctor.DTYPE, overflowing_activations, "in bfloat16 or float32"),
    "weights beyond float16": (doctor.DTYPE, overflown_weights, "from the weights that were trained"),
    "a head that the file lacks": (
        doctor.MISSING_HEAD,
        lambda pair: pair.rewrite(lambda name, tensor: None if name.startswith("embed_proj") else tensor),
        "remove `projector_type`",
    ),
    "a head that the config lacks": (doctor.MISSING_HEAD, lost_projector_type, '"gru_hidden_dim": 12, "emb_dim": 10'),
    "a reordered vocabulary": (doctor.OTHER_TOKENIZER, reordered_vocabulary, "came with the target"),
    "a larger vocabulary": (doctor.OTHER_TOKENIZER, larger_vocabulary, "came with the target"),
    "a draft of another vocabulary": (
        doctor.OTHER_TOKENIZER,
        draft_of_another_vocabulary,
        f"resize_token_embeddings({VOCAB})",
    ),
    "a draft with another tokenizer": (
        doctor.OTHER_TOKENIZER,
        draft_with_another_tokenizer,
        "the target that the draft was trained for",
    ),
    "thinking left on": (doctor.THINKING, lambda pair: pair.options.pop("template"), "pass enable_thinking=False"),
    "code of another version": (doctor.STALE_CACHE, older_code, "write_code("),
    "features of another target": (doctor.STALE_CACHE, features_of_another_target, "train again"),
    "features of other layers": (doctor.STALE_CACHE, features_of_other_layers, "train again"),
    "noise in the backbone": (doctor.UNEXPLAINED, noisy_backbone, "train it further"),
}


@pytest.mark.parametrize(("fault", "plant", "remedy"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_named_with_its_remedy_and_no_other_is(pair, fault, plant, remedy):
    plant(pair)
    diagnosis = pair.diagnose()
    assert diagnosis.faults == [fault]
    found = next(check for check in diagnosis.checks if check.verdict == "fault")
    assert remedy in found.remedy
    assert found.finding in " ".join(str(diagnosis).split()) and found.remedy in " ".join(str(diagnosis).split())


def test_every_fault_that_can_be_found_is_planted_above():
    assert {fault for fault, _, _ in PLANTED.values()} == set(doctor.FAULTS)


def test_several_faults_at_once_are_all_named(pair):
    pair.configure(target_layer_ids=[2, 3], rope_theta=5e6)
    shuffled("embed_proj.2.weight")(pair)
    older_code(pair)
    assert pair.diagnose().faults == [doctor.LAYER_IDS, doctor.ROTARY_BASE, doctor.SHUFFLED_HEAD, doctor.STALE_CACHE]


def test_a_finding_holds_its_numbers(pair):
    pair.configure(mask_token_id=17)
    check = next(check for check in pair.diagnose().checks if check.verdict == "fault")
    numbers = check.numbers
    assert numbers["value"] == MASK_TOKEN
    mean, error = numbers["change"]
    assert mean < -predictions.MARGIN and mean < -predictions.OF_MANY * error < 0
    assert numbers["mended_acceptance_length"] > numbers["acceptance_length"] + 1


# ---- What is clear, and what is noise ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "clear"),
    [
        ([0.5, 0.6, 0.4, 0.5], True),
        ([0.02, 0.02, 0.02, 0.021], False),
        ([2.0, -1.0, 0.5, -0.3], False),
        ([-0.5, -0.6, -0.4, -0.5], False),
        ([0.5, float("nan"), 0.4, 0.5], False),
    ],
    ids=["every answer gains", "too little", "only some answers gain", "every answer loses", "not a number"],
)
def test_a_gain_is_clear_when_it_is_large_and_no_chance(gains, clear):
    better = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert predictions.gain(better + torch.tensor(gains), better).is_clear(predictions.OF_MANY) is clear


def test_an_answer_ends_with_its_end_token(pair, monkeypatch):
    arguments = (pair.target, pair.tokenizer, pair.prompts, NEW_TOKENS, QUIET)
    whole, start = doctor.write_answers(*arguments)[0]
    stop = int(whole[start + 4])
    length = whole[start:].tolist().index(stop) + 1
    for ends in (stop, [MASK_TOKEN, stop]):
        monkeypatch.setattr(pair.target.generation_config, "eos_token_id", ends)
        assert doctor.write_answers(*arguments)[0].ids.tolist() == whole[: start + length].tolist()


def test_copies_of_a_snapshot_in_the_module_cache_are_compared_with_it(pair, tmp_path):
    snapshot = tmp_path / "models--me--draft" / "snapshots" / "abc123"
    shutil.copytree(pair.folder, snapshot)
    copies = tmp_path / "modules" / "transformers_modules" / "me" / "draft" / "abc123"
    shutil.copytree(pair.folder, copies)
    assert doctor.check_code(snapshot, tmp_path / "modules").verdict == "ok"
    (copies / "modeling_domino.py").write_text("# an old copy")
    check = doctor.check_code(snapshot, tmp_path / "modules")
    assert check.verdict == "fault" and str(copies / "modeling_domino.py") in check.finding


def test_code_of_others_is_left_alone(pair):
    (pair.folder / "modeling_domino.py").write_text("# somebody else's model of that name")
    assert doctor.check_code(pair.folder).verdict == "ok"


def test_nothing_in_the_folder_is_executed(pair):
    for path in pair.folder.glob("*.py"):
        path.write_text("raise RuntimeError('executed')  # domino_spec")
    assert pair.diagnose().faults == [doctor.STALE_CACHE]


# ---- The embedded pair, and the command ----------------------------------------------------------------------------


def test_the_embedded_pair_is_healthy_and_no_other_tokenizer_will_do():
    target, tokenizer = load_default_target()
    diagnosis = doctor.diagnose(target, tokenizer, "default", doctor.PROMPTS[:5], max_new_tokens=24)
    assert diagnosis.faults == []
    assert diagnosis.acceptance_length > 1.4
    other = word_tokenizer([word for prompt in doctor.PROMPTS for word in prompt.split()])
    assert doctor.diagnose(target, other, "default").faults == [doctor.OTHER_TOKENIZER]


@pytest.fixture
def command(pair, tmp_path):
    """Runs the command on the pair, saved, with further arguments."""
    pair.target.save_pretrained(tmp_path / "target")
    pair.tokenizer.save_pretrained(tmp_path / "target")
    rows = [json.dumps({"id": i, "turns": [prompt]}) for i, prompt in enumerate(pair.prompts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))

    def run(*arguments: str) -> int:
        parser = argparse.ArgumentParser()
        doctor.add_arguments(parser)
        fixed = [str(tmp_path / "target"), str(pair.folder), "--prompts", str(tmp_path / "prompts.jsonl")]
        return doctor.run(parser.parse_args([*fixed, "--max-new-tokens", str(NEW_TOKENS), "--no-thinking", *arguments]))

    return run


def test_the_command_says_that_a_pair_is_healthy(command, capsys):
    assert command() == 0
    out = capsys.readouterr().out
    assert "No fault was found." in out
    assert all(f"ok          {fault}" in out for fault in doctor.FAULTS)


def test_the_command_fails_on_a_fault_and_speaks_json(command, pair, capsys):
    pair.configure(target_layer_ids=[2, 3])
    assert command("--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["faults"] == [doctor.LAYER_IDS]
    assert [check["fault"] for check in document["checks"]] == list(doctor.FAULTS)
    assert document["acceptance_length"] < 4


def test_the_command_refuses_what_cannot_be_measured(command, pair, tmp_path):
    with pytest.raises(ValueError, match="Only 2 of 2 prompts got an answer longer than a block of 6"):
        command("--num-prompts", "2")
    with pytest.raises(ValueError, match=r"--features .* holds no features\.json"):
        command("--features", str(tmp_path))
    with pytest.raises(ValueError, match="--device toaster"):
        command("--device", "toaster")
    with pytest.raises(ValueError, match="cannot load the target"):
        command("--tokenizer", str(tmp_path / "nowhere"))
    pair.configure(target_layer_ids=[3, 4])
    with pytest.raises(ValueError, match=r"(?s)cannot be used.*names layers \[4\]"):
        command()
