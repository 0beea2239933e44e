# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Is a draft worth it? Acceptance lengths, speed beside plain generation, and whether the output stayed the same."""
