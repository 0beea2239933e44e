# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark for a GPU, at tiny size on a CPU: it runs, and rounds commit what it forces."""

import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_draft, random_tokens

from domino_spec.generation import captured

# The scripts import one another by name.
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu


@pytest.mark.parametrize("mean", [1.0, 2.5, 4.7, 7.0])
def test_a_pattern_has_the_mean_that_is_asked_for(mean):
    tokens = list(itertools.islice(gpu.pattern(mean, 16), 400))
    assert statistics.fmean(tokens) == pytest.approx(mean, abs=0.02)
    assert min(tokens) >= 1 and (mean == 1.0 or len(set(tokens)) > 2)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rounds_commit_what_is_forced(target, num_rows):
    draft, ids = make_draft(target), random_tokens(num_rows, 9)
    with gpu.forced_acceptance(3.0):
        output = target.generate(ids, assistant_model=draft, max_new_tokens=61, return_dict_in_generate=True)
    assert output.sequences.shape == (num_rows, 70)
    for row in output.acceptance_lengths.tolist():
        assert sum(row) == 60 and statistics.fmean(row) == pytest.approx(3.0, abs=0.2)
    # And nothing once it is over.
    after = target.generate(ids, assistant_model=draft, max_new_tokens=61)
    assert after.tolist() == target.generate(ids, max_new_tokens=61).tolist()


def test_it_runs_end_to_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(captured, "can_capture", lambda device: True)
    phases, real = [], captured.CapturedDraft.propose
    monkeypatch.setattr(
        captured.CapturedDraft, "propose", lambda self, *args: (phases.append(self), real(self, *args))[1]
    )
    output = tmp_path / "gpu.json"
    sizes = ["--batch-sizes", "1", "2", "--prompt-length", "8", "--max-new-tokens", "16", "--repeats", "1"]
    gpu.main(["--shape", "tiny", "--device", "cpu", "--dtype", "float32", *sizes, "--output", str(output)])
    found = json.loads(output.read_text())["batches"]
    ways = [gpu.PLAIN, gpu.COMPILED, gpu.PAPER, gpu.OURS, gpu.GRAPHS, gpu.TREE, *gpu.SAMPLED]
    assert list(found["1"]["tokens_per_second"]) == ways
    assert list(found["2"]["tokens_per_second"]) == [way for way in ways if way not in (gpu.PAPER, gpu.TREE)]
    assert all(rate > 0 for batch in found.values() for rates in batch["tokens_per_second"].values() for rate in rates)
    assert {phase.warpers is None for phase in phases} == {True, False}, "greedy or sampled rounds were not captured"
    printed = capsys.readouterr().out
    assert "to paper's" in printed and "over its three passes" in printed


def test_kernels_are_held_against_torch():
    pytest.importorskip("triton")
    code = """if True:
        import json, torch, gpu
        pair = gpu.make_pair("tiny", "cpu", torch.float32)
        print(json.dumps(gpu.check_kernels(*pair, num_rows=3)))
    """
    # Triton's interpreter must be on before Triton is imported.
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(gpu.__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["other_tokens"] == 0 and found["largest_difference"] < 1e-5
