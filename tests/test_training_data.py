# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations as training rows: what is supervised under the templates in use, and what becomes of bad data.

The templates are our own wording of the layouts of SmolLM2, Llama 3, Gemma and Qwen3, on a tokenizer of single bytes.
"""

import json
import logging

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from domino_spec.training.data import ChatRow, DataReport, encode_conversation, load_rows, read_conversations

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Only the last answer keeps its reasoning, and it always has a place for it.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}"
    "{% set head = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "<think>\n{{ head if '</think>' in m.content else '' }}\n</think>\n\n{% endif %}{{ text }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The generation prompt opens the reasoning, which finished turns lose.
OPEN_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    "<|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <bos> <start_of_turn> "
    "<end_of_turn>"
).split()
TALK = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine, you?"},
    {"role": "user", "content": "So am I. Bye"},
    {"role": "assistant", "content": "Bye, döner!"},
]


def tokenizer_with(template: str, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Every byte is a token, and so is each tag of the templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=eos)
    tokenizer.add_special_tokens({"additional_special_tokens": [tag for tag in SPECIAL if tag != eos]})
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    tokenizer.chat_template = template
    return tokenizer


def supervised(tokenizer, row: ChatRow) -> list[str]:
    """The text of each run of supervised tokens."""
    runs, open_run = [], False
    for token, mask in zip(row.input_ids, row.loss_mask, strict=True):
        if mask:
            runs = runs if open_run else [*runs, []]
            runs[-1].append(token)
        open_run = bool(mask)
    return [tokenizer.decode(run) for run in runs]


TEMPLATES = {
    "smollm2": (CHATML, "<|im_end|>"),
    "llama 3": (LLAMA3, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "marked": (MARKED, "<|im_end|>"),
}


class TestSupervision:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_each_answer_with_its_end_of_turn_and_nothing_else(self, name):
        template, end = TEMPLATES[name]
        tokenizer = tokenizer_with(template, end)
        (row,) = encode_conversation(tokenizer, TALK)
        assert supervised(tokenizer, row) == [f"Fine, you?{end}", f"Bye, döner!{end}"]
        whole = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
        # The line break behind the last turn may be left out: nothing follows it.
        assert row.input_ids == whole[: len(row.input_ids)]

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_an_unfinished_answer_ends_with_its_own_last_token(self, name):
        template, end = TEMPLATES[name]
        tokenizer = tokenizer_with(template, end)
        (row,) = encode_conversation(tokenizer, TALK, finished=False)
        assert supervised(tokenizer, row) == [f"Fine, you?{end}", "Bye, döner!"]
        assert row.loss_mask[-1] == 1

    def test_a_template_that_drops_old_reasoning_gives_a_row_for_each_answer(self):
        tokenizer = tokenizer_with(QWEN3)
        talk = [
            TALK[0],
            {"role": "assistant", "content": "<think>\nPolite.\n</think>\n\nFine, you?"},
            TALK[2],
            {"role": "assistant", "content": "<think>\nThe end.\n</think>\n\nBye!"},
        ]
        first, second = encode_conversation(tokenizer, talk)
        assert supervised(tokenizer, first) == ["<think>\nPolite.\n</think>\n\nFine, you?<|im_end|>"]
        assert supervised(tokenizer, second) == ["<think>\nThe end.\n</think>\n\nBye!<|im_end|>"]
        # What the second answer is given is what the target is given for it: the first one without its reasoning.
        prompt = tokenizer.apply_chat_template(talk[:3], add_generation_prompt=True, tokenize=True, return_dict=True)
        assert second.input_ids[: len(prompt["input_ids"])] == prompt["input_ids"]
        assert "Polite" not in tokenizer.decode(second.input_ids)

    def test_reasoning_can_be_masked(self):
        tokenizer = tokenizer_with(QWEN3)
        talk = [TALK[0], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFine."}]
        (row,) = encode_conversation(tokenizer, talk, mask_reasoning=True)
        assert supervised(tokenizer, row) == ["Fine.<|im_end|>"]

    def test_the_template_is_asked_as_at_generation_time(self):
        tokenizer = tokenizer_with(QWEN3)
        (row,) = encode_conversation(tokenizer, TALK[:2], template_kwargs={"enable_thinking": False})
        assert supervised(tokenizer, row) == ["Fine, you?<|im_end|>"]
        assert "<think>\n\n</think>\n\nFine" in tokenizer.decode(row.input_ids)

    def test_a_prompt_that_opens_the_reasoning_is_followed_by_what_the_target_wrote(self):
        tokenizer = tokenizer_with(OPEN_THOUGHT)
        talk = [TALK[0], {"role": "assistant", "content": "Hm.\n</think>\nFine."}]
        (row,) = encode_conversation(tokenizer, talk)
        assert supervised(tokenizer, row) == ["Hm.\n</think>\nFine.<|im_end|>"]
        (row,) = encode_conversation(tokenizer, talk, mask_reasoning=True)
        assert supervised(tokenizer, row) == ["Fine.<|im_end|>"]

    def test_the_real_template_of_the_default_target(self):
        from domino_spec.checkpoints import load_default_target

        _, tokenizer = load_default_target()
        (row,) = encode_conversation(tokenizer, TALK)
        assert supervised(tokenizer, row) == ["Fine, you?<|im_end|>", "Bye, döner!<|im_end|>"]

    def test_a_tokenizer_without_a_template_is_named(self):
        tokenizer = tokenizer_with(CHATML)
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="no chat template"):
            encode_conversation(tokenizer, TALK)


GOOD = json.dumps({"messages": TALK[:2]})
BAD = {
    "not JSON": "{broken",
    "no list of `messages`": '{"text": "x"}',
    "a turn without a known `role`": '{"messages": [{"role": "bot", "content": "x"}]}',
    "a turn whose `content` is not text": '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
    "an empty turn": '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]}',
    "no turn of the assistant": '{"messages": [{"role": "user", "content": "x"}]}',
    "the chat template refuses it": json.dumps({"messages": [{"role": "system", "content": "x"}, *TALK[:2]]}),
    "no two supervised tokens in a row": json.dumps({"messages": [{"role": "user", "content": "x" * 99}, *TALK[1:2]]}),
}


class TestBadData:
    @pytest.fixture
    def tokenizer(self):
        return tokenizer_with(GEMMA, "<end_of_turn>")

    @pytest.mark.parametrize("reason", BAD)
    def test_a_bad_conversation_is_named_by_line_counted_and_left_out(self, reason, tokenizer, tmp_path, caplog):
        path = tmp_path / "chat.jsonl"
        path.write_text(f"{GOOD}\n{BAD[reason]}\n\n{GOOD}\n")
        with caplog.at_level(logging.WARNING, logger="domino_spec"):
            rows, report = load_rows(str(path), tokenizer, max_length=80, vocab_size=len(tokenizer))
        assert len(rows) == 2 and rows[0] == rows[1]
        assert report.problems == {reason: [f"{path}:2"]}
        assert (report.num_read, report.num_left_out, report.num_rows, report.num_cut) == (3, 1, 2, 0)
        assert f"{path}:2: {reason}" in caplog.text
        assert reason in str(report) and f"{path}:2" in str(report)

    def test_broken_utf8_costs_its_own_line_only(self, tokenizer, tmp_path):
        path = tmp_path / "chat.jsonl"
        path.write_bytes(GOOD.encode() + b"\n" + GOOD.encode().replace(b"Fine", b"F\xffne") + b"\n" + GOOD.encode())
        rows, report = load_rows(str(path), tokenizer, max_length=80, vocab_size=len(tokenizer))
        assert len(rows) == 2 and report.problems == {"not UTF-8": [f"{path}:2"]}

    def test_a_token_outside_the_vocabulary_is_left_out(self, tokenizer, tmp_path):
        path = tmp_path / "chat.jsonl"
        path.write_text(GOOD + "\n")
        with pytest.raises(ValueError, match=r"(?s)Nothing of .*outside the target's vocabulary: 1"):
            load_rows(str(path), tokenizer, max_length=80, vocab_size=60)

    def test_long_rows_are_cut_and_counted(self, tokenizer, tmp_path):
        path = tmp_path / "chat.jsonl"
        path.write_text(json.dumps({"messages": TALK}) + "\n")
        rows, report = load_rows(str(path), tokenizer, max_length=50, vocab_size=len(tokenizer))
        assert len(rows[0].input_ids) == len(rows[0].loss_mask) == 50 and report.num_cut == 1

    def test_many_of_a_kind_are_named_a_few_times(self, tokenizer, tmp_path, caplog):
        path = tmp_path / "chat.jsonl"
        path.write_text("{}\n" * 40 + GOOD)
        with caplog.at_level(logging.WARNING, logger="domino_spec"):
            _, report = load_rows(str(path), tokenizer, max_length=80, vocab_size=len(tokenizer))
        assert report.num_left_out == 40 and caplog.text.count("left out") == 5

    def test_a_missing_file_is_named(self, tokenizer, tmp_path):
        for name in ("gone.jsonl", "gone.parquet"):
            with pytest.raises(FileNotFoundError, match=name):
                load_rows(str(tmp_path / name), tokenizer, max_length=80, vocab_size=300)

    def test_a_parquet_file_gives_the_rows_of_the_same_jsonl(self, tokenizer, tmp_path):
        datasets = pytest.importorskip("datasets")
        rows = [{"messages": TALK[:2], "finished": True}, {"messages": TALK, "finished": False}]
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "chat.parquet"))
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"tokenizer": tokenizer, "max_length": 80, "vocab_size": len(tokenizer)}
        parquet, _ = load_rows(str(tmp_path / "chat.parquet"), **settings)
        assert parquet == load_rows(str(tmp_path / "chat.jsonl"), **settings)[0]
        report = DataReport()
        places = [place for place, _ in read_conversations(str(tmp_path / "chat.parquet"), report)]
        assert places == [f"{tmp_path / 'chat.parquet'}:0", f"{tmp_path / 'chat.parquet'}:1"]
