# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes `helpers` importable for every test module, keeps the suite offline and its tiny models fast."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from helpers import make_target

from domino_spec.generation.context import TargetParts

# Models this small spend their time handing work to threads: one is ten times as fast as two.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3")


@pytest.fixture(scope="module")
def parts(target):
    return TargetParts(target)
