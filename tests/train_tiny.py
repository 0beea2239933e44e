# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""A tiny training run as a process of its own, for tests that kill it or run several at once.

    PYTHONPATH=tests python tests/train_tiny.py OUTPUT '{"max_steps": 8}'

Trains on the same rows whatever the settings, and leaves `draft/` and `history.json` (the logged losses) in OUTPUT.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from helpers import make_draft, make_target, random_tokens
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from domino_spec.training.arguments import DominoTrainingArguments
from domino_spec.training.data import ChatRow
from domino_spec.training.features import TokenDataset
from domino_spec.training.recipe import leave
from domino_spec.training.trainer import DominoTrainer

LAYER_IDS = [0, 2, 3]


class Kill(TrainerCallback):
    """Ends the process as a machine that goes down would, after an optimiser step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def shard_on_cpu():
    """accelerate turns FSDP on for accelerators only; its own FSDP2 code runs on a CPU just as well."""
    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def rows() -> list[ChatRow]:
    """Random text of different lengths; the second half of each row is supervised."""
    lengths = [12, 30, 17, 25, 40, 9, 22, 33, 14, 28, 19, 36, 21, 26, 11, 31]
    return [
        ChatRow(random_tokens(1, length, seed=i)[0].tolist(), [int(k >= length // 2 - 2) for k in range(length)])
        for i, length in enumerate(lengths)
    ]


def main():
    output, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    kill_at, resume = settings.pop("kill_at", None), settings.pop("resume", False)
    if settings.get("fsdp"):
        shard_on_cpu()
    torch.manual_seed(0)
    target = make_target("qwen3", dtype=torch.float32).requires_grad_(False)
    defaults = {
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "num_anchors": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = DominoTrainer(
        model=make_draft(target, target_layer_ids=LAYER_IDS, attn_implementation="sdpa").train(),
        target=target,
        args=DominoTrainingArguments(output_dir=str(output / "run"), **{**defaults, **settings}),
        train_dataset=TokenDataset(rows()),
        callbacks=[] if kill_at is None else [Kill(kill_at)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output / "run") if resume else None)
    trainer.save_model(str(output / "draft"))
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "final_loss" in entry]
        (output / "history.json").write_text(json.dumps(history))
    leave(trainer)


if __name__ == "__main__":
    main()
