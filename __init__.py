# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Domino speculative decoding: ``target.generate(**inputs, assistant_model=draft)``.

The two public classes are imported on first use, because they pull in torch and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration_domino import DominoConfig
    from .modeling_domino import DominoDraftModel

__version__ = "0.1.0"
__all__ = ["DominoConfig", "DominoDraftModel", "__version__"]

_MODULE_OF = {"DominoConfig": "configuration_domino", "DominoDraftModel": "modeling_domino"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
