# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""A saved folder works alone: as remote code, offline, without the package, and saved again it is the same folder."""

import ast
import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import load_fixture, make_draft, make_target, random_tokens
from transformers import AutoModel, GenerationConfig

import domino_spec.generation as package
from domino_spec import DominoDraftModel
from domino_spec.generation.remote_code import CODE_FILES, CUSTOM_GENERATE_FILE, amalgamate, write_code

CODE = (*CODE_FILES, "generation.py", CUSTOM_GENERATE_FILE)
GENERATION = Path(package.__file__).parent

# Runs in a fresh process: the package cannot be imported there, and no cache of an earlier run can help.
ALONE = """
import json, sys
sys.modules["domino_spec"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM
draft = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
target = AutoModelForCausalLM.from_pretrained(sys.argv[2], attn_implementation="eager")
ids = torch.tensor(json.loads(sys.argv[3]))
out = target.generate(ids, assistant_model=draft, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
print(json.dumps([out.sequences.tolist(), out.acceptance_lengths[0].tolist()]))
"""


@pytest.fixture
def saved(tmp_path):
    draft = load_fixture("shift1-prefix1").draft()
    draft.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def run_alone(draft: Path | str, target: Path, prompt: torch.Tensor, home: Path, script: str = ALONE):
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script, str(draft), str(target), json.dumps(prompt.tolist())],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_saved_folder_holds_weights_config_and_code_and_nothing_else(saved):
    assert files_of(saved) == {"config.json", "model.safetensors", *CODE}
    for name in CODE_FILES:
        assert (saved / name).read_bytes() == (GENERATION.parent / name).read_bytes()


def test_saved_code_needs_only_torch_transformers_and_what_they_bring(saved):
    # Triton is imported where it is there, and not missed where it is not (`tests/test_kernels.py`).
    allowed = set(sys.stdlib_module_names) | {"torch", "transformers", "huggingface_hub", "safetensors", "triton"}
    for name in CODE:
        for node in ast.walk(ast.parse((saved / name).read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, name
            if isinstance(node, ast.ImportFrom):
                # Level 1 is a sibling file; a dotted one is what the remote-code loader cannot find.
                assert node.module.split(".")[0] in allowed if node.level == 0 else f"{node.module}.py" in CODE, name


def test_without_the_package_a_saved_folder_generates_as_the_package_does(saved, tmp_path):
    fixture = load_fixture("shift1-prefix1")
    prompt = fixture.expected["prompt_ids"]
    (tmp_path / "home").mkdir()
    sequences, lengths = run_alone(saved, fixture.target_path, prompt, tmp_path / "home")
    ours = fixture.target().generate(
        prompt, assistant_model=fixture.draft(), max_new_tokens=24, do_sample=False, return_dict_in_generate=True
    )
    assert sequences == ours.sequences.tolist()
    assert lengths == ours.acceptance_lengths[0].tolist()
    assert max(lengths) > 1, "a case without any accepted proposal shows nothing"


# By `custom_generate`, with the id twice: as the code to run and as the draft to load.
BY_CUSTOM_GENERATE = """
import json, sys
sys.modules["domino_spec"] = None
import torch
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(sys.argv[2], attn_implementation="eager")
ids = torch.tensor(json.loads(sys.argv[3]))
options = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
out = target.generate(ids, custom_generate=sys.argv[1], trust_remote_code=True, draft=sys.argv[1], **options)
print(json.dumps([out.sequences.tolist(), out.acceptance_lengths[0].tolist()]))
"""


def test_a_drafts_generation_defaults_travel_with_it(saved, tmp_path):
    draft = AutoModel.from_pretrained(saved, trust_remote_code=True)
    assert draft.generation_config is None
    draft.generation_config = GenerationConfig(num_assistant_tokens=2)
    draft.save_pretrained(tmp_path / "again")
    for loaded in (
        AutoModel.from_pretrained(tmp_path / "again", trust_remote_code=True),
        DominoDraftModel.from_pretrained(tmp_path / "again"),
    ):
        assert loaded.generation_config.num_assistant_tokens == 2


def test_generation_defaults_are_those_of_this_draft_alone(saved):
    draft = DominoDraftModel.from_pretrained(saved)
    draft.generation_config = GenerationConfig(num_assistant_tokens=2)
    draft.save_pretrained(saved)
    draft.generation_config = None
    draft.save_pretrained(saved)
    assert DominoDraftModel.from_pretrained(saved).generation_config is None
    # Weights that come from nowhere bring none.
    again = DominoDraftModel.from_pretrained(None, config=draft.config, state_dict=draft.state_dict())
    assert again.generation_config is None
    (saved / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"generation_config\.json .* cannot be read"):
        DominoDraftModel.from_pretrained(saved)


@pytest.mark.parametrize("script", [ALONE, BY_CUSTOM_GENERATE], ids=["assistant_model", "custom_generate"])
def test_an_id_in_the_hubs_cache_generates_without_network(saved, tmp_path, script):
    fixture, commit = load_fixture("shift1-prefix1"), "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "home" / "hub" / "models--me--my-draft"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(saved, repository / "snapshots" / commit)
    prompt = fixture.expected["prompt_ids"]
    sequences, lengths = run_alone("me/my-draft", fixture.target_path, prompt, tmp_path / "home", script)
    plain = fixture.target().generate(prompt, max_new_tokens=24, do_sample=False)
    assert sequences == plain.tolist()
    assert max(lengths) > 1


def test_custom_generate_wants_a_draft(saved):
    target = load_fixture("shift1-prefix1").target()
    with pytest.raises(ValueError, match="`draft` is not given"):
        target.generate(torch.tensor([[1, 2]]), custom_generate=str(saved), trust_remote_code=True)


def test_loading_remotely_and_saving_again_gives_the_same_folder(saved, tmp_path, monkeypatch):
    again, third = tmp_path / "again", tmp_path / "third"
    AutoModel.from_pretrained(saved, trust_remote_code=True).save_pretrained(again)
    AutoModel.from_pretrained(again, trust_remote_code=True).save_pretrained(third)
    names = sorted(files_of(saved))
    assert sorted(files_of(third)) == names
    for folder in (again, third):
        assert filecmp.cmpfiles(saved, folder, names, shallow=False) == (names, [], [])


def test_package_and_remote_code_coexist_in_one_process(saved):
    target, prompt = load_fixture("shift1-prefix1").target(), load_fixture("shift1-prefix1").expected["prompt_ids"]
    remote = AutoModel.from_pretrained(saved, trust_remote_code=True)
    own = load_fixture("shift1-prefix1").draft()
    assert type(remote) is not type(own)
    outputs = [
        target.generate(prompt, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, assistant_model=draft)
        for draft in (own, remote, own)
    ]
    for output in outputs[1:]:
        assert torch.equal(output.sequences, outputs[0].sequences)
        assert torch.equal(output.acceptance_lengths, outputs[0].acceptance_lengths)


def test_without_trust_no_code_of_the_folder_runs(saved):
    (saved / "modeling_domino.py").write_text("raise RuntimeError('ran')")
    (saved / "configuration_domino.py").write_text("raise RuntimeError('ran')")
    # transformers falls back to the class that `model_type` names, or refuses; either way the files are not executed.
    try:
        loaded = AutoModel.from_pretrained(saved, trust_remote_code=False)
        assert type(loaded).__module__.startswith("transformers.")
    except (ValueError, OSError, RuntimeError) as error:
        assert "ran" not in str(error).split()


def test_saving_into_the_folder_that_was_loaded_keeps_it_whole(saved):
    before = {name: (saved / name).read_bytes() for name in files_of(saved)}
    AutoModel.from_pretrained(saved, trust_remote_code=True).save_pretrained(saved)
    assert {name: (saved / name).read_bytes() for name in files_of(saved)} == before


def test_weights_of_a_saved_folder_may_be_half_precision(tmp_path):
    target = make_target("qwen3", dtype=torch.float32)
    make_draft(target).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    draft = AutoModel.from_pretrained(tmp_path / "half", trust_remote_code=True)
    assert draft.dtype == torch.bfloat16
    prompt = random_tokens(1, 9)
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(plain, target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft))


def test_amalgamation_defines_every_public_name_of_the_folder_once():
    flat = ast.parse(amalgamate(GENERATION))
    flat_names = [n.name for n in flat.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    assert len(flat_names) == len(set(flat_names))
    for path in GENERATION.glob("*.py"):
        names = {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert names <= set(flat_names), path.name
    assert not [n for n in ast.walk(flat) if isinstance(n, ast.ImportFrom) and n.level]


def test_two_modules_with_one_name_are_refused(tmp_path):
    (tmp_path / "__init__.py").write_text("from .a import f\nfrom .b import g\n")
    (tmp_path / "a.py").write_text("def f():\n    pass\n\ndef helper():\n    pass\n")
    (tmp_path / "b.py").write_text("def g():\n    pass\n\ndef helper():\n    pass\n")
    with pytest.raises(ValueError, match=r"`helper` is defined in both generation/a\.py and b\.py"):
        amalgamate(tmp_path)


def test_write_code_overwrites_what_an_older_version_left(tmp_path):
    (tmp_path / "generation.py").write_text("old")
    write_code(tmp_path)
    assert "old" not in (tmp_path / "generation.py").read_text().splitlines()
    assert (tmp_path / "generation.py").read_text() == amalgamate(GENERATION)
