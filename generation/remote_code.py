# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Which code travels with the weights? Three flat files, since transformers' remote-code loader knows no folders.

`from .generation import ...` in `modeling_domino.py` finds this folder in the package, and in a saved draft the one
file `generation.py`, made from the folder's modules in the order in which they import one another. A fourth file is for
those who come by `custom_generate`; transformers wants it in a folder of its own.
"""

import ast
import shutil
from pathlib import Path

CODE_FILES = ("configuration_domino.py", "modeling_domino.py")
_FLAT_NAME = "generation.py"
CUSTOM_GENERATE_FILE = "custom_generate/generate.py"
# A text, since transformers copies only the modules that a draft imports: a draft loaded from a saved folder has no
# other place to take it from when it is saved again.
_CUSTOM_GENERATE = '''\
"""The draft as a decoding method: `target.generate(**inputs, custom_generate=ID, trust_remote_code=True, draft=ID)`."""

from functools import lru_cache
from os import PathLike

from transformers import AutoModel


@lru_cache(maxsize=1)
def _load(draft, revision, dtype, device):
    return AutoModel.from_pretrained(draft, revision=revision, dtype=dtype, trust_remote_code=True).to(device).eval()


def generate(model, draft=None, draft_revision=None, assistant_model=None, **kwargs):
    """
    What `model.generate(..., assistant_model=draft)` gives.

    Args:
        model (`PreTrainedModel`): the target.
        draft (`str` or `PreTrainedModel`): the id or folder of this repository, which is loaded once, or the draft.
        draft_revision (`str`, *optional*): of the repository.
        kwargs: any argument of `generate`.

    Raises:
        ValueError: when no draft is given.
    """
    draft = draft if draft is not None else assistant_model
    if draft is None:
        raise ValueError("`draft` is not given: name this repository once more, `draft=ID`, or pass the loaded draft.")
    if isinstance(draft, (str, PathLike)):
        draft = _load(str(draft), draft_revision, model.dtype, model.device)
    return model.generate(assistant_model=draft, **kwargs)
'''


def write_code(folder: str | Path):
    """
    Write `configuration_domino.py`, `modeling_domino.py` (byte for byte), `generation.py` and
    `custom_generate/generate.py` into `folder`.

    Works alike from the package, where `generation.py` is made, and from a saved draft, where it is copied.
    """
    folder, here = Path(folder), Path(__file__).resolve()
    if here.name == _FLAT_NAME:
        source = here.parent
        flat = here.read_text(encoding="utf-8")
    else:
        source = here.parent.parent
        flat = amalgamate(here.parent)
    for name in CODE_FILES:
        if (source / name).resolve() != (folder / name).resolve():
            shutil.copyfile(source / name, folder / name)
    (folder / _FLAT_NAME).write_text(flat, encoding="utf-8")
    (folder / CUSTOM_GENERATE_FILE).parent.mkdir(exist_ok=True)
    (folder / CUSTOM_GENERATE_FILE).write_text(_CUSTOM_GENERATE, encoding="utf-8")


def amalgamate(package: Path) -> str:
    """
    One module from the modules of `package`, each after those it imports, without their imports of one another.

    Raises:
        ValueError: when two modules define the same top-level name, which one file cannot hold.
    """
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(package.glob("*.py"))}
    order: list[str] = []

    def visit(name: str):
        if name in order:
            return
        for node in ast.parse(sources[name]).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                visit(node.module or "__init__")
        order.append(name)

    visit("__init__")
    parts = ["# Made from the folder `generation/` of the package domino_spec. Edit there, not here.\n"]
    owners: dict[str, str] = {}
    for name in order:
        tree = ast.parse(sources[name])
        lines = sources[name].splitlines(keepends=True)
        for node in tree.body:
            defined = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            if isinstance(node, ast.Assign):
                defined = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for symbol in defined:
                # Loggers and export lists stand in every module; the last one serves.
                if symbol not in ("logger", "__all__") and owners.setdefault(symbol, name) != name:
                    raise ValueError(f"`{symbol}` is defined in both generation/{owners[symbol]}.py and {name}.py.")
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for line in range(node.lineno - 1, node.end_lineno or node.lineno):
                    lines[line] = ""
        parts.append("".join(lines).strip("\n") + "\n")
    return "\n\n".join(parts)
