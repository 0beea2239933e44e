# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What README and docs tell a reader to type is run as it stands, only smaller; links lead somewhere.

A block after `<!-- not run: REASON -->` is parsed only: its Python and shell, and the arguments of our own commands.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from domino_spec import cli
from domino_spec.training.recipe import parse_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# What a reader does once may take minutes; a test's share of it may not.
SMALLER = {
    "index.md": {"--max-new-tokens 48": "--max-new-tokens 6", "--max-new-tokens 32": "--max-new-tokens 6"},
    "train.md": {
        "--temperatures 0 0.7": "--temperatures 0 0.7 --max-new-tokens 24",
        "--max_steps 20": "--max_steps 2 --num_anchors 4 --save_strategy no",
        "--max-new-tokens 64": "--max-new-tokens 6",
    },
    "adapt.md": {
        "--output domain-chat.jsonl": "--output domain-chat.jsonl --max-new-tokens 24",
        "--max_steps 300": "--max_steps 2 --num_anchors 4",
    },
}


@dataclass
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    blocks, lines = [], page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        mark = re.fullmatch(r"<!-- not run: (.+) -->", lines[start - 1]) if start else None
        language, text = lines[start][3:].strip(), "\n".join(lines[start + 1 : number]) + "\n"
        blocks.append(Block(page.name, start + 1, language, text, mark and mark.group(1)))
        start = None
    assert start is None, f"{page.name}: a block is not closed"
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(text: str) -> list[list[str]]:
    """Our own commands in a shell block, without what is piped or redirected into and out of them."""
    text = re.sub(r"<<'(\w+)'\n.*?\n\1\n", "\n", text, flags=re.S).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        for part in line.split(" | "):
            words = shlex.split(part, comments=True)
            if words[:1] == ["domino-spec"]:
                found.append(words[1:])
            if words[:3] == ["accelerate", "launch", "-m"]:
                found.append(["train", *words[4:]])
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_well_formed(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if block.language == "python":
        ast.parse(block.text)
    elif block.language == "bash":
        subprocess.run(["bash", "-n", "-c", block.text], check=True)
        for arguments in commands_of(block.text):
            if arguments[0] == "train":
                # The machine that reads this need not have the recipe's GPUs.
                parse_recipe([*arguments[1:], "--use_cpu", "true"])
            else:
                cli.build_parser().parse_args(arguments)
    elif block.language in ("json", "yaml"):
        {"json": json.loads, "yaml": yaml.safe_load}[block.language](block.text)
    else:
        assert block.language in ("bibtex", "text"), f"{block}: say what language this is"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_can_be_followed_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    names: dict = {"__name__": page.stem}
    smaller = SMALLER.get(page.name, {})
    for words in smaller:
        assert words in page.read_text(encoding="utf-8"), f"{page.name} no longer says {words}"
    for block in blocks_of(page):
        text = block.text
        for words, fewer in smaller.items():
            text = text.replace(words, fewer)
        if block.not_run or block.language not in ("bash", "python"):
            continue
        if block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text], env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{block}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        else:
            torch.manual_seed(0)
            exec(compile(text, str(block), "exec"), names)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors_of(there), f"{page.name} links to {link}"


def test_the_site_builds_without_a_warning(tmp_path):
    (tmp_path / "domino_spec").symlink_to(ROOT)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "-q",
            "-f",
            str(ROOT / "mkdocs.yml"),
            "-d",
            str(tmp_path / "site"),
        ],
        env={**os.environ, "DOMINO_SPEC_SOURCE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    for name in ("DominoDraftModel", "domino_loss", "check_serving"):
        assert name in reference
