# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Train the embedded draft anew on one GPU, against the clock: text, training, evaluation, a checkpoint to carry off.

    python benchmarks/train_default_gpu.py --output out --prompts questions.jsonl --eval-prompts gsm8k.jsonl mbpp.jsonl

The target makes up prompts and answers them (and those of `--prompts`) until `--text-seconds` have passed, a draft is
trained on the answers for `--train-seconds`, and measured on rows held out and on `--eval-prompts`. OUTPUT then holds
`report.json`, the learning curve, and the bf16 checkpoint cut into parts that fit a transfer (`--part-mb`); join them:

    python benchmarks/train_default_gpu.py --join out
"""

import argparse
import json
import random
import shutil
import time
from pathlib import Path

import torch
from transformers import TrainerCallback, set_seed

from domino_spec import DominoDraftModel
from domino_spec.evaluation.benchmark import encode, provenance
from domino_spec.evaluation.benchmark import read_prompts as bench_prompts
from domino_spec.training.arguments import DominoTrainingArguments
from domino_spec.training.data import load_rows
from domino_spec.training.features import TokenDataset
from domino_spec.training.recipe import DraftArguments, TargetArguments, load_target, make_draft
from domino_spec.training.regenerate import LocalTarget, Prompt, read_prompts, regenerate, self_instruct
from domino_spec.training.trainer import DominoTrainer

TEMPERATURES = (0.0, 0.0, 0.7)


class Deadline(TrainerCallback):
    """Ends training in time."""

    def __init__(self, seconds: float):
        self.stop = time.monotonic() + seconds

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or time.monotonic() > self.stop


def write_text(target, tokenizer, args, path: Path) -> dict[str, float]:
    """Answers of the target, to prompts of files and of its own, until the time is up."""
    start = time.monotonic()
    prompts = [prompt for source in args.prompts for prompt in read_prompts(source, TEMPERATURES)]
    random.Random(args.seed).shuffle(prompts)
    answerer = LocalTarget(target, tokenizer, args.text_batch, args.max_new_tokens, seed=args.seed)
    made = 0
    while time.monotonic() - start < args.text_seconds:
        if not prompts:
            # As many as a batch, so that the clock is looked at often.
            texts = self_instruct(target, tokenizer, args.text_batch, batch_size=args.text_batch, seed=args.seed + made)
            prompts = [
                Prompt(f"self/{made + i}", [{"role": "user", "content": text}], TEMPERATURES[i % len(TEMPERATURES)])
                for i, text in enumerate(texts)
            ]
            made += len(texts) or 1
        chosen, prompts = prompts[: args.text_batch], prompts[args.text_batch :]
        regenerate(answerer, chosen, path)
    return {"seconds": time.monotonic() - start}


def train(target, tokenizer, draft, rows, held_out, args) -> tuple[DominoTrainer, dict[str, float]]:
    """As many steps as the time allows, with a schedule laid out for so many."""

    def trainer(steps: int, *callbacks) -> DominoTrainer:
        return DominoTrainer(
            model=draft,
            target=target,
            args=DominoTrainingArguments(
                output_dir=str(args.output / "run"),
                max_steps=steps,
                per_device_train_batch_size=args.train_batch,
                per_device_eval_batch_size=args.train_batch,
                num_anchors=args.num_anchors,
                learning_rate=args.learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=min(100, steps // 10),
                adam_beta2=0.95,
                loss_decay_gamma=4.0,
                lambda_base_decay_ratio=args.lambda_base_decay_ratio,
                hidden_loss_weight=args.hidden_loss_weight,
                distillation_weight=args.distillation_weight,
                bf16=True,
                use_cpu=args.device == "cpu",
                logging_steps=max(1, steps // 100),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=args.seed,
            ),
            train_dataset=TokenDataset(rows),
            eval_dataset=TokenDataset(held_out),
            callbacks=list(callbacks),
        )

    start = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    # The first steps set up; the next ones tell how many fit.
    trainer(args.timing_steps).train()
    began = time.monotonic()
    trainer(args.timing_steps).train()
    pace = (time.monotonic() - began) / args.timing_steps
    draft.load_state_dict(start)
    steps = max(1, int(0.95 * args.train_seconds / pace))
    made = trainer(steps, Deadline(args.train_seconds))
    began = time.monotonic()
    made.train()
    return made, {"seconds": time.monotonic() - began, "steps": made.state.global_step, "seconds_per_step": pace}


@torch.no_grad()
def acceptance(target, tokenizer, draft, paths, count: int, max_new_tokens: int) -> dict[str, dict[str, float]]:
    """Acceptance length with the head and without, by task, over real decoding."""
    results = {}
    for path in paths:
        lengths: dict[bool, list[int]] = {True: [], False: []}
        for prompt in bench_prompts(path, count):
            inputs = encode(tokenizer, prompt.text, target.device)
            for use_head, found in lengths.items():
                output = target.generate(
                    **inputs,
                    custom_generate=draft.decode,
                    use_head=use_head,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    return_dict_in_generate=True,
                )
                found += output.acceptance_lengths[0].tolist()
        results[Path(path).stem] = {
            name: sum(found) / max(1, len(found))
            for name, found in zip(("head", "base"), lengths.values(), strict=True)
        }
    return results


def split(path: Path, part_mb: float):
    """Cut a file into numbered parts, and remove it."""
    content, size = path.read_bytes(), int(part_mb * 2**20)
    for number, start in enumerate(range(0, len(content), size)):
        path.with_suffix(f".part{number:02d}").write_bytes(content[start : start + size])
    path.unlink()


def join(folder: Path):
    """Put the parts of the checkpoint in `folder` together again."""
    parts = sorted((folder / "draft").glob("model.part*"))
    (folder / "draft" / "model.safetensors").write_bytes(b"".join(part.read_bytes() for part in parts))
    for part in parts:
        part.unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--join", type=Path, metavar="OUTPUT", help="join the parts of a checkpoint, no more")
    parser.add_argument("--target", default="default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--eval-prompts", nargs="*", default=[])
    parser.add_argument("--eval-count", type=int, default=16)
    parser.add_argument("--text-seconds", type=float, default=240)
    parser.add_argument("--text-batch", type=int, default=768)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--train-seconds", type=float, default=300)
    parser.add_argument("--train-batch", type=int, default=32)
    parser.add_argument("--timing-steps", type=int, default=10)
    parser.add_argument("--num-anchors", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--lambda-base-decay-ratio", type=float, default=0.7)
    parser.add_argument("--hidden-loss-weight", type=float, default=1.0)
    parser.add_argument("--distillation-weight", type=float, default=0.5)
    parser.add_argument("--start-from", default="target")
    parser.add_argument("--source-layers", type=int, nargs="+", default=[28, 29])
    parser.add_argument("--target-layer-ids", type=int, nargs="+", default=[3, 9, 16, 22, 28])
    parser.add_argument("--block-size", type=int, default=5)
    parser.add_argument("--mask-token", default="<reponame>")
    parser.add_argument("--gru-hidden-dim", type=int, default=256)
    parser.add_argument("--emb-dim", type=int, default=64)
    parser.add_argument("--part-mb", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.join is not None:
        join(args.join)
        return
    if args.output is None:
        parser.error("--output is needed")
    args.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    set_seed(args.seed)
    target, tokenizer = load_target(TargetArguments(args.target))
    target = target.to(args.device)
    report = provenance("python benchmarks/train_default_gpu.py")

    text = args.output / "text.jsonl"
    report["text"] = write_text(target, tokenizer, args, text)
    rows, found = load_rows(str(text), tokenizer, args.max_length, target.config.vocab_size)
    report["text"] |= {"rows": len(rows), "supervised_tokens": sum(sum(row.loss_mask) for row in rows)}
    print(found, flush=True)

    shape = ("start_from", "source_layers", "target_layer_ids", "block_size", "mask_token", "gru_hidden_dim", "emb_dim")
    draft = make_draft(DraftArguments(**{name: getattr(args, name) for name in shape}), target, tokenizer)
    held_out, rows = rows[::50], [row for i, row in enumerate(rows) if i % 50]
    trainer, report["training"] = train(target, tokenizer, draft, rows, held_out, args)
    report["curve"] = [entry for entry in trainer.state.log_history if "final_loss" in entry]
    report["held_out"] = trainer.evaluate()

    draft = draft.to(torch.bfloat16).eval()
    draft.save_pretrained(args.output / "draft")
    fresh = DominoDraftModel.from_pretrained(args.output / "draft").to(args.device)
    report["tasks"] = acceptance(target, tokenizer, fresh, args.eval_prompts, args.eval_count, args.max_new_tokens)
    split(args.output / "draft" / "model.safetensors", args.part_mb)
    report["seconds"] = time.monotonic() - began
    (args.output / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    shutil.rmtree(args.output / "run", ignore_errors=True)
    text.unlink()
    print(json.dumps({name: report[name] for name in ("text", "training", "tasks", "seconds")}, indent=1))


if __name__ == "__main__":
    main()
