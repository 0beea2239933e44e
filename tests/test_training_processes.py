# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Training as processes: one that is killed and goes on, and two that share the work, take the steps of one."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from domino_spec import DominoDraftModel

SCRIPT = Path(__file__).parent / "train_tiny.py"
SHARDED = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["DominoLayer"],
        "state_dict_type": "FULL_STATE_DICT",
    },
}


def train(output: Path, processes: int = 1, **settings) -> int:
    """Run the script to its end, or its death, and return its exit status."""
    output.mkdir(exist_ok=True)
    launch = [sys.executable]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(port)]
    paths = [str(SCRIPT.parent), *(path for path in sys.path if path)]
    done = subprocess.run(
        [*launch, str(SCRIPT), str(output), json.dumps(settings)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def history(output: Path, *names: str) -> list[tuple[float, ...]]:
    return [tuple(entry[name] for name in names) for entry in json.loads((output / "history.json").read_text())]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "draft" / "model.safetensors")


def test_a_killed_run_of_200_steps_ends_with_the_same_bits(tmp_path):
    settings = {"max_steps": 200, "save_strategy": "steps", "save_steps": 20, "save_total_limit": 1}
    assert train(tmp_path / "whole", **settings) == 0
    step = random.randint(21, 199)
    assert train(tmp_path / "killed", **settings, kill_at=step) == -signal.SIGKILL
    assert train(tmp_path / "killed", **settings, resume=True) == 0
    whole, killed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), f"{name} differs after a kill at step {step}"
    losses = history(tmp_path / "whole", "step", "loss", "accept_len")
    assert history(tmp_path / "killed", "step", "loss", "accept_len") == losses


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("settings", [{}, SHARDED], ids=["DDP", "FSDP2"])
def test_two_processes_train_as_one_with_twice_the_batch(settings, tmp_path):
    train(tmp_path / "one", per_device_train_batch_size=4)
    train(tmp_path / "two", processes=2, per_device_train_batch_size=2, **settings)
    names = ("step", "loss", "base_loss", "final_loss", "accuracy", "accept_len", "base_accept_len", "lambda_base")
    one, two = (history(tmp_path / run, *names) for run in ("one", "two"))
    assert len(one) == 8
    for left, right in zip(one, two, strict=True):
        assert left == pytest.approx(right, rel=1e-5, abs=1e-5)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)
    # What two processes have saved is a draft like any other.
    draft = DominoDraftModel.from_pretrained(tmp_path / "two" / "draft")
    assert torch.equal(draft.embed_proj[2].weight, two["embed_proj.2.weight"])
