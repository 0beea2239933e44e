# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""A target so small that drafts for it train to the end in minutes: for comparing objectives, not for use.

    python benchmarks/small_target.py --train_data chat.jsonl --output runs/small/target
    domino-spec regenerate --target runs/small/target --dtype float32 --prompts chat.jsonl --temperatures 0.7 \
        --batch-size 128 --max-new-tokens 200 --output runs/small/answers.jsonl
    python benchmarks/objective.py examples/recipes/small.yaml --steps 1500 --work runs/small/objective

A Llama of 0.3 million parameters over 1,024 tokens, both learnt from the chat rows given. What it writes is poor
English, but it is its own: a draft has just as much to learn about it as about a large target, in little time.
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from domino_spec.training.data import DataReport, read_conversations

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `vocab_size` tokens learnt from `texts`, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>", "mask_token": "<|mask|>"}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special.values(), "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_data", nargs="+", required=True, help="files or Hub ids of chat rows")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=1024)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a training row")
    parser.add_argument("--epochs", type=float, default=4)
    args = parser.parse_args()
    set_seed(0)
    conversations = [
        row["messages"] for source in args.train_data for _, row in read_conversations(source, DataReport())
    ]
    tokenizer = make_tokenizer([m["content"] for c in conversations for m in c], args.vocab_size)
    ids = [
        token
        for conversation in conversations
        for token in tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
    ]
    rows = [ids[start : start + args.length] for start in range(0, len(ids) - args.length + 1, args.length)]
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=args.hidden_size // 32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    settings = TrainingArguments(
        output_dir=str(args.output),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        use_cpu=True,
    )
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(target, settings, train_dataset=dataset, data_collator=default_data_collator).train()
    target.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
