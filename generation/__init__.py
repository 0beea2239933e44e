# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a block become output? Importing this makes `target.generate(assistant_model=draft)` work."""

from .assistant import DominoDecodingMixin, register
from .compat import DominoGenerateOutput

register()

__all__ = ["DominoGenerateOutput", "DominoDecodingMixin"]
