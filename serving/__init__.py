# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Who else can run a draft? The Hub's folder and card, the layouts of other projects, the rules of serving engines."""
