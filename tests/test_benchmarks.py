# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Scripts of `benchmarks/` at tiny size: they run, time what they say, and stop where a comparison would be unfair."""

import functools
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batching import GoodBatchDraft
from helpers import BLOCK, HIDDEN, make_draft, make_target, random_tokens
from test_training_data import CHATML, tokenizer_with
from transformers import DynamicCache, StaticCache

from domino_spec.generation.compat import CACHE_NAME
from domino_spec.generation.context import TargetParts

# The scripts import one another by name.
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import peers
import round_cost
import training_step
from training_memory import GIB, SMALL, config_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with its tokenizer, a draft with a shortlist, and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = tokenizer_with(CHATML)
    tokenizer.save_pretrained(folder / "target")
    target = make_target(
        "qwen3", torch.float32, attn_implementation="sdpa", vocab_size=len(tokenizer), num_hidden_layers=2
    )
    target.save_pretrained(folder / "target")
    draft = make_draft(target)
    draft.config.set_shortlist(list(range(100)))
    draft.save_pretrained(folder / "draft")
    prompts = [{"turns": [text]} for text in ("Why?", "Tell me about it.")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


def run(script, monkeypatch, folder, tmp_path, *options) -> dict:
    """Run `script` on the pair of `folder`, and return what it stores."""
    output = tmp_path / "results.json"
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["script", *pair, *options])
    script.main()
    return json.loads(output.read_text())


class TestTrainingStep:
    CONFIG = config_of(
        {**SMALL, "vocab_size": 40, "hidden_size": 16, "gru_hidden_dim": 8, "emb_dim": 6, "pure_draft_prefix_len": 2}
    )

    def case(self):
        return training_step.make_case(self.CONFIG, 2, 24, 5, 30, torch.float32, "cpu")

    def test_ours_equals_the_plain_one(self, capsys):
        ways = training_step.make_ways(self.case(), torch.float32, None)
        found = training_step.check(ways[training_step.PLAIN], ways[training_step.OURS])
        names = dict(ways[training_step.OURS].draft.named_parameters())
        assert set(found) == {"loss", "base_loss", "final_loss", *names} and max(found.values()) < 1e-5
        assert "agree" in capsys.readouterr().out

    @pytest.mark.parametrize("changed", ["a weight of the draft", "the last label", "an anchor", "a number is none"])
    def test_a_difference_ends_the_script(self, changed):
        case = self.case()
        ways = training_step.make_ways(case, torch.float32, None)
        ours = ways[training_step.OURS]
        other = {
            "a weight of the draft": {},
            "a number is none": {},
            "the last label": {"loss_mask": case.loss_mask.index_fill(1, torch.tensor([23]), 0)},
            "an anchor": {"anchors": case.anchors - torch.eye(5, dtype=torch.long)[:1]},
        }[changed]
        ours.losses = lambda draft: training_step.our_losses(draft, replace(case, **other))
        with torch.no_grad():
            if changed == "a weight of the draft":
                ours.draft.embed_proj[2].weight[3] *= 1.5
            if changed == "a number is none":
                ours.draft.embed_proj[2].weight[3, 0] = torch.nan
        with pytest.raises(SystemExit, match="disagree"):
            training_step.check(ways[training_step.PLAIN], ours)

    def test_a_shortlist_is_what_the_third_way_scores(self):
        ways = training_step.make_ways(self.case(), torch.float32, 30)
        ways[training_step.SHORTLIST].step()
        gradient = ways[training_step.SHORTLIST].draft.embed_proj[2].weight.grad
        assert gradient[:30].abs().sum() > 0 and not gradient[30:].any()

    def test_it_runs_end_to_end(self, monkeypatch, tmp_path, capsys):
        sizes = {"rows": 1, "anchors": 40, "length": 80, "vocabulary": 9000, "repeats": 2}
        options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        output = tmp_path / "results.json"
        monkeypatch.setattr(sys, "argv", ["script", "--shape", "small", *options, "--output", str(output)])
        training_step.main()
        document = json.loads(output.read_text())
        assert list(document["ways"]) == [training_step.PLAIN, training_step.OURS]
        logits = 4 * sizes["anchors"] * SMALL["block_size"] * sizes["vocabulary"] / GIB
        for name, way in document["ways"].items():
            assert len(document["seconds"][name]) == 2 and way["ms_first_quarter"] <= way["ms"]
            # Base and final logits, at the least, and their gradients, but no more than a few of each.
            assert 2 * logits < way["peak_gib"] < 30 * logits
        assert document["ways"][training_step.PLAIN]["plain_over_this"] == 1
        assert "plain / this" in capsys.readouterr().out


class TestRoundCost:
    LIMITS = ("--max-new-tokens", "16", "--repeats", "1")

    def test_every_size_has_its_row(self, monkeypatch, folder, tmp_path, capsys):
        sizes = {"context-lengths": (20, 40), "batch-sizes": (1, 3), "block-sizes": (4, 8)}
        options = [text for name, values in sizes.items() for text in (f"--{name}", *map(str, values))]
        document = run(round_cost, monkeypatch, folder, tmp_path, *options, "--long-run", "40", *self.LIMITS)
        tables = dict(zip(("context", "batch", "block"), sizes.values(), strict=True)) | {"quarter": (1, 2, 3, 4)}
        printed = capsys.readouterr().out
        for name, keys in tables.items():
            rows = document[name]["rows"]
            assert list(rows) == list(map(str, keys)) and name in printed
            assert all(row["round"] > row["target in it"] > 0 for row in rows.values())
        assert document["block_size"] == BLOCK
        # Without any of them: the built-in prompts.
        document = run(round_cost, monkeypatch, folder, tmp_path, *self.LIMITS)
        row = document["prompts"]["rows"]["all"]
        assert row["sum"] == sum(row[name] for name in round_cost.PASSES)
        assert row["round / sum"] == row["round"] / row["sum"]

    @pytest.mark.parametrize("block_size", [4, BLOCK])
    @pytest.mark.parametrize("rows", [1, 3])
    def test_passes_alone_have_the_shapes_of_those_in_a_round(self, monkeypatch, rows, block_size):
        target = make_target("qwen3", dtype=torch.float32, attn_implementation="sdpa")
        draft = make_draft(target, attn_implementation="sdpa", block_size=block_size)
        draft.config.set_shortlist(list(range(11)))
        inputs = {"input_ids": random_tokens(rows, 9)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        shapes: dict[str, set] = {"target": set(), "backbone": set(), "output head": set()}
        logits = TargetParts.logits

        def note_logits(parts, *arguments):
            result = logits(parts, *arguments)
            shapes["output head"].add(tuple(result.shape))
            return result

        def note(name, key):
            return lambda module, args, kwargs: shapes[name].add(tuple((args[0] if args else kwargs[key]).shape))

        monkeypatch.setattr(TargetParts, "logits", note_logits)
        target.register_forward_pre_hook(note("target", "input_ids"), with_kwargs=True)
        draft.register_forward_pre_hook(note("backbone", "noise_embeds"), with_kwargs=True)
        lengths, *_ = round_cost.decode(target, draft, inputs, 12)
        assert lengths.shape[0] == rows
        in_rounds = {name: set(seen) for name, seen in shapes.items()}
        for seen in shapes.values():
            seen.clear()
        seconds = round_cost.time_passes(target, draft, rows, 9, 2, repeats=3)
        assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys(round_cost.PASSES, 3)
        # The prompt is read first on either side.
        assert shapes["target"] == {(rows, 9), (rows, block_size)}
        assert shapes["backbone"] == {(rows, block_size, HIDDEN)}
        assert shapes["output head"] == {(rows, block_size - 1, 11)}
        assert all(shapes[name] <= in_rounds[name] for name in shapes)

    def test_rounds_count_while_all_rows_take_part(self):
        target = make_target("qwen3", attn_implementation="sdpa")
        prompt = random_tokens(2, 9)
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        texts = target.generate(**inputs, max_new_tokens=40).tolist()
        # The first row takes whole blocks, the other next to nothing.
        draft = GoodBatchDraft.following(make_draft(target), target, texts, [set(), set(range(60))])
        lengths, seconds, passes = round_cost.decode(target, draft, inputs, 40)
        together = int((lengths[0] > 0).sum())
        assert together < lengths.shape[1] // 2 and len(seconds) == together - 1
        assert len(passes) == len(seconds) and all(0 < a < b for a, b in zip(passes, seconds, strict=True))


class TestPeers:
    OPTIONS = ("--max-new-tokens", "10", "--repeats", "1")

    @pytest.mark.parametrize("implementation", [None, "static"])
    def test_the_targets_cache_is_the_same_for_all_ways(self, implementation, capsys):
        target = make_target("qwen3", dtype=torch.float32, attn_implementation="sdpa")
        inputs = {"input_ids": random_tokens(1, 9), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
        named = peers.warm_up(peers.ways(target, make_draft(target), 10, cache_implementation=implementation), [inputs])
        left_out = [line.partition(" is left out: ")[0] for line in capsys.readouterr().out.splitlines()]
        assert sorted([*named, *left_out]) == sorted(peers.ways(target, make_draft(target), 10))
        assert peers.PLAIN in named and (peers.PAPER in left_out) == (implementation == "static")
        caches = []
        target.register_forward_pre_hook(
            lambda module, args, kwargs: caches.append(type(kwargs[CACHE_NAME])), with_kwargs=True
        )
        for call in named.values():
            call(**inputs)
        assert set(caches) == {StaticCache if implementation == "static" else DynamicCache}

    def test_our_loop_is_held_against_what_its_acceptance_length_allows(self, monkeypatch, folder, tmp_path, capsys):
        options = ("--prompts", str(folder / "prompts.jsonl"), *self.OPTIONS, "--ways", peers.DOMINO, peers.LOOKUP)
        document = run(peers, monkeypatch, folder, tmp_path, *options)
        assert capsys.readouterr().out.count("prompts") == 1, "a row of the table by task"
        plain, ours = (
            statistics.median(document["ways"][name]["rates"]["prompts"]) for name in (peers.PLAIN, peers.DOMINO)
        )
        limit, domino = document["limit"], document["ways"][peers.DOMINO]
        assert limit["sum"] == pytest.approx(sum(limit[name] for name in round_cost.PASSES))
        allowed = domino["tokens"] / domino["passes"] / plain / (limit["sum"] / 1000)
        assert limit["allowed"] == pytest.approx(allowed)
        assert limit["reached"] == pytest.approx(ours / plain / allowed)

    def test_a_static_cache_is_measured_end_to_end(self, monkeypatch, folder, tmp_path, capsys):
        options = ("--prompts", str(folder / "prompts.jsonl"), "--cache-implementation", "static", *self.OPTIONS)
        document = run(peers, monkeypatch, folder, tmp_path, *options)
        printed = capsys.readouterr().out
        for name in (peers.DFLASH, peers.DOMINO):
            # In earlier versions of transformers such a cache cannot be cropped.
            assert name in document["ways"] or f"{name} is left out: ValueError" in printed
        assert peers.PAPER not in document["ways"] and f"{peers.PAPER} is left out" in printed

    @pytest.fixture
    def eager_backend(self, monkeypatch):
        """Graphs are traced, and then run as they are."""
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        yield
        torch._dynamo.reset()

    def compiled_run(self, monkeypatch, folder, tmp_path, *ways):
        options = ("--prompts", str(folder / "prompts.jsonl"), "--num-prompts", "1", "--compile", "--ways", *ways)
        return run(peers, monkeypatch, folder, tmp_path, *options, *self.OPTIONS)

    def test_a_compiled_target_serves_plain_and_draft_by_turns(self, monkeypatch, folder, tmp_path, eager_backend):
        calls = []
        compiled = peers.with_compiled_target

        def counted(target, call):
            own, answer = target.forward, compiled(target, call)

            def run_and_count(**inputs):
                result = answer(**inputs)
                assert target.forward == own
                calls.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
                return result

            return run_and_count

        monkeypatch.setattr(peers, "with_compiled_target", counted)
        torch._dynamo.utils.counters.clear()
        document = self.compiled_run(monkeypatch, folder, tmp_path, peers.DOMINO)
        assert list(document["ways"]) == [peers.PLAIN, peers.DOMINO]
        # Each way's first call compiles, and no later one.
        first, second, *later = calls
        assert 0 < first < second and later and set(later) == {second}

    def test_a_graph_that_is_missing_while_the_clock_runs_ends_the_script(
        self, monkeypatch, folder, tmp_path, eager_backend
    ):
        monkeypatch.setattr(peers, "warm_up", lambda named, prompts: named)
        with pytest.raises(RuntimeError, match="recompile"):
            self.compiled_run(monkeypatch, folder, tmp_path, peers.PLAIN)

    def test_plain_generation_is_never_left_out(self):
        def fail(**inputs):
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            peers.warm_up({peers.PLAIN: fail}, [{}])
