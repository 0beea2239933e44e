# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""One backbone pass for tests: blocks, features, backends, and when two results are the same."""

import pytest
import torch
from helpers import BLOCK, MASK_TOKEN, random_tokens

BACKENDS = ("eager", "sdpa")
TOLERANCE = 1e-5
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def close(left, right, atol=TOLERANCE):
    torch.testing.assert_close(left, right, atol=atol, rtol=0, check_dtype=False)


def block_ids(rows=1, size=BLOCK, seed=5):
    ids = torch.full((rows, size), MASK_TOKEN)
    ids[:, 0] = random_tokens(rows, 1, seed)[:, 0]
    return ids


def random_features(draft, rows, length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, draft.fc.in_features, generator=generator, dtype=draft.dtype)
