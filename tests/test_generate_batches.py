# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches: every row gives what it gives alone, goes at its own pace, and costs nothing once it has ended."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from batching import GoodBatchDraft, padded_batch
from helpers import ARCHITECTURES, MASK_TOKEN, VOCAB, make_draft, make_target, random_tokens
from peft import LoraConfig, get_peft_model
from random_cases import check_batch_case, draw_batch_case
from test_generate_lossless import OPTIONS, PrefixProcessor, cached_target, expected_acceptance
from transformers import CompileConfig, DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import StaticLayer

from domino_spec.generation import pace
from domino_spec.generation.compat import CACHE_NAME
from domino_spec.generation.context import TargetParts, _Tap

CASES = range(300)
CASES_PER_TEST = 10
PROPOSALS = 5
LENGTHS = [3, 40, 11, 25]


@pytest.mark.parametrize("first", CASES[::CASES_PER_TEST])
def test_ten_random_batches_equal_plain_generate(first):
    failures = []
    for seed in range(first, first + CASES_PER_TEST):
        try:
            with warnings.catch_warnings():
                # Some cases ask for a minimum beyond their limit.
                warnings.filterwarnings("ignore", message="Unfeasible length constraints")
                check_batch_case(seed)
        except Exception:
            failures.append(f"check_batch_case({seed}):\n{traceback.format_exc(limit=-3)}")
    assert not failures, f"{len(failures)} of {CASES_PER_TEST} cases:\n" + "\n".join(failures)


def test_random_batches_cover_every_option_and_size():
    cases = [draw_batch_case(seed) for seed in CASES]
    assert {name for case in cases for name in case.options} == set(OPTIONS)
    assert {case.arch for case in cases} == set(ARCHITECTURES)
    assert {len(case.prompt_lengths) for case in cases} == set(range(1, 9))


@contextlib.contextmanager
def recorded_shapes(model):
    """`input_ids` shapes of every pass of `model`, in order."""
    shapes = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        handle.remove()


def good_batch(target, spoiled, new_tokens=40, seed=2, **draft):
    """A left-padded batch of four, what the target alone makes of it, and a draft that knows all but `spoiled`."""
    inputs = padded_batch(LENGTHS, seed)
    plain = target.generate(**inputs, max_new_tokens=new_tokens, pad_token_id=MASK_TOKEN)
    texts = [plain[row, max(LENGTHS) - length :].tolist() for row, length in enumerate(LENGTHS)]
    return inputs, plain, GoodBatchDraft.following(make_draft(target, **draft), target, texts, spoiled)


SPOILED = [set(), {43, 44, 45, 60, 61}, set(range(100)), {26, 30, 31}]


@pytest.mark.parametrize("arch", ["qwen3", "llama-tied", "phi3-fused", "granite-multipliers"])
def test_each_row_advances_at_its_own_pace(arch):
    target = cached_target(arch, "sdpa")
    inputs, plain, draft = good_batch(target, SPOILED)
    output = target.generate(
        **inputs, max_new_tokens=40, pad_token_id=MASK_TOKEN, assistant_model=draft, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == plain.tolist()
    for row, (length, spoiled) in enumerate(zip(LENGTHS, SPOILED, strict=True)):
        lengths = [n for n in output.acceptance_lengths[row].tolist() if n]
        assert lengths == expected_acceptance(length, 40, PROPOSALS, spoiled), row


@pytest.mark.parametrize("sliding_window", [None, 6], ids=["full-draft", "sliding-draft"])
@pytest.mark.parametrize("rule", ["causal", "symmetric", "none"])
def test_each_row_gives_and_accepts_what_it_gives_alone(sliding_window, rule):
    # The draft's own proposals, not planted ones: so its caches, masks and positions must be those of the lone row.
    target = cached_target("qwen3", "sdpa")
    draft = make_draft(target, seed=5, sliding_window=sliding_window, sliding_window_rule=rule)
    inputs = padded_batch(LENGTHS, seed=8)
    made = {"max_new_tokens": 30, "assistant_model": draft, "return_dict_in_generate": True, "output_logits": True}
    output = target.generate(**inputs, **made, pad_token_id=MASK_TOKEN)
    for row, length in enumerate(LENGTHS):
        alone = target.generate(inputs["input_ids"][row : row + 1, -length:], **made)
        assert output.sequences[row, -length - 30 :].tolist() == alone.sequences[0].tolist()
        assert [n for n in output.acceptance_lengths[row].tolist() if n] == alone.acceptance_lengths[0].tolist()


def test_the_draft_sees_each_row_as_it_sees_it_alone():
    target = cached_target("qwen3", "sdpa")
    inputs, _, _ = good_batch(target, SPOILED)
    seen = []

    class Watched(GoodBatchDraft):
        def forward(self, *args, **kwargs):
            output = super(GoodBatchDraft, self).forward(*args, **kwargs)
            anchors = kwargs["noise_embeds"][:, 0], kwargs["position_ids"][:, -self.config.block_size]
            planted = super().forward(*args, **{**kwargs, "cache": None, "attention_mask": None})
            for row, hidden in enumerate(output.last_hidden_state):
                where = int(anchors[1].expand(len(hidden), -1)[row] if anchors[1].dim() > 1 else anchors[1][row])
                seen.append((anchors[0][row].sum().item(), where, hidden))
            return planted

    def run(**inputs):
        seen.clear()
        target.generate(**inputs, max_new_tokens=40, pad_token_id=MASK_TOKEN, assistant_model=watched)
        return list(seen)

    plain = target.generate(**inputs, max_new_tokens=40, pad_token_id=MASK_TOKEN)
    texts = [plain[row, max(LENGTHS) - length :].tolist() for row, length in enumerate(LENGTHS)]
    watched = Watched.following(make_draft(target, sliding_window=6), target, texts, SPOILED)
    together = run(**inputs)
    for row, length in enumerate(LENGTHS):
        for anchor, position, hidden in run(input_ids=inputs["input_ids"][row : row + 1, -length:]):
            matches = [h for a, p, h in together if p == position and abs(a - anchor) < 1e-12]
            assert any(torch.allclose(hidden, match, atol=1e-6) for match in matches), (row, position)


def test_rows_that_have_ended_are_in_no_pass_any_more():
    target = cached_target("qwen3", "sdpa")
    inputs, plain, draft = good_batch(target, [set()] * 4)
    new = plain[:, max(LENGTHS) :].tolist()
    # A token that some rows write early and others late or never.
    eos = max(range(MASK_TOKEN), key=lambda token: len({row.index(token) if token in row else 40 for row in new}))
    ends = {"eos_token_id": eos, "pad_token_id": MASK_TOKEN, "max_new_tokens": 40}
    with recorded_shapes(target) as shapes:
        output = target.generate(**inputs, **ends, assistant_model=draft)
    assert output.tolist() == target.generate(**inputs, **ends).tolist()
    rows = [shape[0] for shape in shapes]
    assert rows == sorted(rows, reverse=True) and rows[-1] < 4
    assert len(shapes) < 12


def test_holes_do_not_pile_up():
    target = cached_target("qwen3", "sdpa")
    inputs, plain, draft = good_batch(
        target, [set(), set(range(200)), set(range(200)), set(range(200))], new_tokens=120
    )
    lengths = []
    handle = target.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: lengths.append(cache.layers[0].keys.shape[2])
    )
    cache = DynamicCache(config=target.config)
    output = target.generate(
        **inputs, max_new_tokens=120, pad_token_id=MASK_TOKEN, assistant_model=draft, **{CACHE_NAME: cache}
    )
    handle.remove()
    assert output.tolist() == plain.tolist()
    # 120 rounds of six entries: 720 without packing. A quarter may be holes, beside the block itself.
    assert max(lengths) < (40 + 120) / 0.75 + 2 * 6


class Whole(LogitsProcessor):
    """Notes the shape and content of every call, and changes nothing."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        return scores


def test_a_processor_of_the_users_sees_the_whole_batch_as_in_plain_decoding():
    target = cached_target("qwen3", "sdpa")
    inputs, _, draft = good_batch(target, SPOILED)
    ours, theirs = Whole(), Whole()
    arguments = {"max_new_tokens": 20, "pad_token_id": MASK_TOKEN}
    for whole, extra in ((theirs, {}), (ours, {"assistant_model": draft})):
        target.generate(
            **inputs, **arguments, **extra, logits_processor=LogitsProcessorList([whole, PrefixProcessor()])
        )
    assert ours.calls == theirs.calls


def test_a_cache_without_room_for_holes_goes_by_the_shortest_acceptance_and_says_so_once(caplog):
    target = make_target("mistral-sliding", attn_implementation="sdpa")
    inputs = {"input_ids": random_tokens(3, 9, seed=4)}
    plain = target.generate(**inputs, max_new_tokens=30)
    spoiled = [set(), {14, 20}, {12}]
    draft = GoodBatchDraft.following(make_draft(target), target, plain.tolist(), spoiled)
    pace.logger.warning_once.cache_clear()
    with caplog.at_level("WARNING", logger=pace.logger.name):
        for _ in range(2):
            output = target.generate(**inputs, max_new_tokens=30, assistant_model=draft, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    shortest = expected_acceptance(9, 30, PROPOSALS, {14, 20, 12})
    assert output.acceptance_lengths.tolist() == [shortest] * 3
    assert sum("shortest acceptance" in record.message for record in caplog.records) == 1


class BatchStreamer:
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value)

    def end(self):
        self.ended += 1


def test_a_streamer_gets_what_plain_decoding_gives_it():
    target = cached_target("qwen3", "sdpa")
    inputs, plain, draft = good_batch(target, SPOILED)
    eos = int(plain[3, max(LENGTHS) + 12])
    ours, theirs = BatchStreamer(), BatchStreamer()
    arguments = {"max_new_tokens": 40, "pad_token_id": MASK_TOKEN, "eos_token_id": eos}
    target.generate(**inputs, **arguments, streamer=theirs)
    target.generate(**inputs, **arguments, streamer=ours, assistant_model=draft)
    assert [piece.tolist() for piece in ours.pieces] == [piece.tolist() for piece in theirs.pieces]
    assert ours.ended == theirs.ended == 1


def test_a_batch_goes_on_over_turns_with_its_cache():
    target = cached_target("qwen3", "sdpa")
    inputs, _, draft = good_batch(target, SPOILED, new_tokens=12)
    turns = {}
    for name, extra in (("plain", {}), ("ours", {"assistant_model": draft})):
        cache, ids, mask = DynamicCache(config=target.config), inputs["input_ids"], inputs["attention_mask"]
        for turn in range(3):
            ids = target.generate(
                ids, attention_mask=mask, max_new_tokens=12, pad_token_id=MASK_TOKEN, **{CACHE_NAME: cache}, **extra
            )
            ids = torch.cat([ids, random_tokens(4, 3, seed=turn)], dim=1)
            mask = torch.cat([mask, mask.new_ones(4, ids.shape[1] - mask.shape[1])], dim=1)
        turns[name] = ids.tolist(), cache.get_seq_length()
    assert turns["ours"] == turns["plain"]


def test_seconds_are_told_by_part():
    target = cached_target("qwen3", "sdpa")
    inputs, _, draft = good_batch(target, SPOILED)
    output = target.generate(
        **inputs, max_new_tokens=8, pad_token_id=MASK_TOKEN, assistant_model=draft, return_dict_in_generate=True
    )
    assert set(output.seconds) == {"prefill", "draft", "verify", "host"}
    assert all(value > 0 for value in output.seconds.values())


def _embeds(target, ids):
    return {"inputs_embeds": target.get_input_embeddings()(ids).detach(), "input_ids": None}


OPTIONS_OF_A_BATCH = {
    "prefill_chunk_size": lambda target, ids: {"prefill_chunk_size": 7},
    "inputs_embeds": _embeds,
    "position_ids": lambda target, ids: {"position_ids": torch.arange(40).expand(4, -1) + 3},
    "guidance_scale": lambda target, ids: {"guidance_scale": 1.5},
    "max_time": lambda target, ids: {"max_time": 3600.0, "eos_token_id": 3},
    "output_attentions": lambda target, ids: {"output_attentions": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("name", OPTIONS_OF_A_BATCH)
def test_options_of_a_batch_are_honoured(name):
    target = cached_target("qwen3", "eager" if name == "output_attentions" else "sdpa")
    inputs, plain, draft = good_batch(target, SPOILED)
    if name == "output_attentions":
        # Eager attention gives a float64 model NaN at a row that sees nothing, as pads do.
        inputs = {"input_ids": random_tokens(4, 40, seed=6)}
    options = {
        **inputs,
        "max_new_tokens": 20,
        "pad_token_id": MASK_TOKEN,
        **OPTIONS_OF_A_BATCH[name](target, inputs["input_ids"]),
    }
    plain, ours = (target.generate(**options, **extra) for extra in ({}, {"assistant_model": draft}))
    if name == "output_attentions":
        for step, other in zip(ours.attentions, plain.attentions, strict=True):
            for one, same in zip(step, other, strict=True):
                torch.testing.assert_close(one, same, rtol=1e-4, atol=1e-5)
        plain, ours = plain.sequences, ours.sequences
    assert ours.tolist() == plain.tolist()


SYNCED = """
import json, sys
import torch
import torch.distributed as dist
from batching import GoodBatchDraft
from helpers import make_draft, make_target, random_tokens

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
target = make_target()
passes = 0
def count(*_):
    # As a sharded target does: no process gets through a layer alone.
    global passes
    passes += 1
    dist.barrier()
target.register_forward_pre_hook(count)
ids = random_tokens(1 + rank, 8, seed=rank)
plain = target.generate(ids, max_new_tokens=12 + 20 * rank, synced_gpus=True)
draft = GoodBatchDraft.following(make_draft(target), target, plain.tolist(), [{9, 10}, {12, 30}])
passes = 0
ours = target.generate(ids, max_new_tokens=12 + 20 * rank, synced_gpus=True, assistant_model=draft)
print(json.dumps([ours.tolist() == plain.tolist(), passes]), flush=True)
dist.destroy_process_group()  # gloo's threads abort a process that ends while they run
"""


def test_processes_with_shares_of_a_target_wait_for_one_another(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SYNCED, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    results = [run.communicate(timeout=240) for run in runs]
    assert all(run.returncode == 0 for run in runs), results
    (same, passes), (other_same, other_passes) = (json.loads(out.strip().splitlines()[-1]) for out, _ in results)
    assert same and other_same
    assert passes == other_passes


def test_a_compiled_target_and_a_wrapped_one_are_served_too():
    target = make_target("qwen3", attn_implementation="sdpa")
    inputs, plain, draft = good_batch(target, SPOILED)
    wrapped = get_peft_model(
        make_target("qwen3", attn_implementation="sdpa"),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    adapted = wrapped.generate(**inputs, max_new_tokens=40, pad_token_id=MASK_TOKEN)
    assert adapted.tolist() != plain.tolist()
    ours = wrapped.generate(**inputs, max_new_tokens=40, pad_token_id=MASK_TOKEN, assistant_model=draft)
    assert ours.tolist() == adapted.tolist()


# In earlier versions of transformers it cannot.
STATIC_CAN_BE_CROPPED = StaticLayer.is_croppable


@pytest.fixture
def compiled():
    """A target, to be traced in one piece, and how many graphs there are of it."""
    torch.compiler.reset()
    target, graphs = make_target("qwen3", attn_implementation="sdpa"), []

    def run_as_it_is(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(recompile_limit=32):
        target.forward = torch.compile(target.forward, backend=run_as_it_is, dynamic=True, fullgraph=True)
        yield target, graphs
    torch.compiler.reset()


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=str)
def test_a_compiled_target_is_one_graph_and_serves_calls_with_a_draft_and_without(compiled, options):
    target, graphs = compiled
    plain, ids, counts = make_target("qwen3", attn_implementation="sdpa"), random_tokens(1, 9), []
    options = {"max_new_tokens": 20, "pad_token_id": MASK_TOKEN, **options}
    expected = plain.generate(ids, **options).tolist()
    draft = GoodBatchDraft.following(make_draft(plain), plain, expected, [{12, 17}])
    if "cache_implementation" in options and not STATIC_CAN_BE_CROPPED:
        with pytest.raises(ValueError, match="cannot forget"):
            target.generate(ids, **options, assistant_model=draft)
        return
    for _ in range(3):
        assert target.generate(ids, **options, assistant_model=draft).tolist() == expected
        assert target.generate(ids, **options).tolist() == expected
        counts.append(len(graphs))
        taps = [hook for layer in target.model.layers for hook in layer._forward_hooks.values()]
        taps = [hook for hook in taps if isinstance(hook, _Tap)]
        assert taps and all(tap.compiled is None for tap in taps), "nothing is kept where nobody listens"
    assert counts[2] == counts[1] <= 12, "nothing is compiled once all shapes have been seen"


def test_where_generate_compiles_plain_decoding_the_pass_over_a_whole_block_is_compiled():
    torch.compiler.reset()
    target, graphs, ids = make_target("qwen3", attn_implementation="sdpa"), [], random_tokens(1, 9)
    options = {"max_new_tokens": 20, "pad_token_id": MASK_TOKEN}
    expected = target.generate(ids, **options).tolist()
    draft = GoodBatchDraft.following(make_draft(target), target, expected, [{12, 17}])

    def run_as_it_is(graph, inputs):
        graphs.append(graph)
        return graph.forward

    # What a GPU has without being asked.
    compile_config = CompileConfig(backend=run_as_it_is, mode=None, fullgraph=True)
    compile_config._compile_all_devices = True
    compiled = {**options, "cache_implementation": "static", "compile_config": compile_config}
    if not STATIC_CAN_BE_CROPPED:
        with pytest.raises(ValueError, match="cannot forget"):
            target.generate(ids, **compiled, assistant_model=draft)
        return
    assert target.generate(ids, **compiled, assistant_model=draft).tolist() == expected
    assert len(graphs) == 1, "the whole pass, in one width"
    assert target.generate(ids, **compiled).tolist() == expected
    before = len(graphs)
    assert target.generate(ids, **compiled, assistant_model=draft).tolist() == expected
    recorded = target.generate(
        ids, **compiled, assistant_model=draft, output_hidden_states=True, return_dict_in_generate=True
    )
    assert recorded.sequences.tolist() == expected and len(graphs) == before


def test_a_compiled_target_that_reads_its_prompt_in_chunks_is_heard_whole(compiled):
    target, _ = compiled
    ids, options = random_tokens(1, 11), {"max_new_tokens": 9, "prefill_chunk_size": 4, "pad_token_id": MASK_TOKEN}
    plain = make_target("qwen3", attn_implementation="sdpa")
    draft = make_draft(plain)
    expected = plain.generate(ids, **options, assistant_model=draft, return_dict_in_generate=True)
    ours = target.generate(ids, **options, assistant_model=draft, return_dict_in_generate=True)
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert ours.acceptance_lengths.tolist() == expected.acceptance_lengths.tolist()


def test_two_threads_with_one_compiled_target_are_refused(compiled):
    target, _ = compiled
    parts, ids = TargetParts(target), random_tokens(1, 5)
    with torch.no_grad(), parts.capture([1]) as ours, contextlib.ExitStack() as stack:
        target(ids)
        listening = threading.Thread(target=lambda: stack.enter_context(parts.capture([1])))
        listening.start()
        listening.join()
        with pytest.raises(ValueError, match="one compiled target"):
            ours.take(target.device)


def test_a_target_compiled_without_a_draft_says_how_to_begin_again():
    target, ids = make_target("qwen3", attn_implementation="sdpa"), random_tokens(1, 9)
    draft, options = make_draft(target), {"max_new_tokens": 5, "pad_token_id": MASK_TOKEN}
    # What other tests had compiled would serve here, with the places to listen that it has.
    torch.compiler.reset()
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    plain = target.generate(ids, **options)
    with pytest.raises(ValueError, match=r"torch\.compiler\.reset"):
        target.generate(ids, **options, assistant_model=draft)
    torch.compiler.reset()
    assert target.generate(ids, **options, assistant_model=draft).tolist() == plain.tolist()


def test_eight_threads_with_one_draft_and_two_targets_give_what_they_give_alone():
    targets = [make_target(seed=seed, attn_implementation="sdpa") for seed in (7, 8)]
    draft = make_draft(targets[0], attn_implementation="sdpa")
    jobs = [
        (targets[number % 2], padded_batch([3 + number, 9, 14][: 1 + number % 3], seed=number)) for number in range(8)
    ]

    def decode(target, inputs):
        output = target.generate(
            **inputs, max_new_tokens=24, pad_token_id=MASK_TOKEN, assistant_model=draft, return_dict_in_generate=True
        )
        return output.sequences.tolist(), output.acceptance_lengths.tolist()

    alone = [decode(*job) for job in jobs]
    barrier = threading.Barrier(len(jobs))

    def work(job):
        barrier.wait()
        return [decode(*job) for _ in range(3)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(work, jobs))
    assert together == [[result] * 3 for result in alone]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to read its memory")
def test_a_thousand_calls_leave_nothing_behind():
    target = make_target(attn_implementation="sdpa")
    draft = make_draft(target, attn_implementation="sdpa")
    inputs = padded_batch([4, 9], seed=1)

    def resident_megabytes() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6

    def call(number):
        options = {"do_sample": True} if number % 2 else {"num_assistant_tokens_schedule": "heuristic"}
        target.generate(**inputs, max_new_tokens=5, pad_token_id=MASK_TOKEN, assistant_model=draft, **options)

    for number in range(200):
        call(number)
    before = resident_megabytes()
    for number in range(800):
        call(number)
    # Less than a kilobyte a call; what leaks keeps at least a cache alive.
    assert resident_megabytes() - before < 0.8
    assert not any(module._forward_hooks for module in target.modules())


def test_an_adapter_on_the_draft_is_used_and_the_output_stays_the_targets():
    target = make_target(attn_implementation="sdpa")
    inputs, plain, draft = good_batch(target, SPOILED)
    calls = {"max_new_tokens": 40, "pad_token_id": MASK_TOKEN, "return_dict_in_generate": True, **inputs}
    before = target.generate(**calls, assistant_model=draft)
    wrapped = get_peft_model(
        draft, LoraConfig(r=4, lora_alpha=4000, target_modules=["embed_proj.2"], init_lora_weights=False)
    )
    adapted = target.generate(**calls, assistant_model=wrapped)
    with wrapped.disable_adapter():
        disabled = target.generate(**calls, assistant_model=wrapped)
    for output in (before, adapted, disabled):
        assert output.sequences.tolist() == plain.tolist()
    assert disabled.acceptance_lengths.tolist() == before.acceptance_lengths.tolist()
    assert adapted.acceptance_lengths.tolist() != before.acceptance_lengths.tolist()


@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
@pytest.mark.parametrize("size", [VOCAB + 7, 128], ids=["more tokens", "padded"])
def test_a_target_with_a_resized_vocabulary_is_served_by_a_resized_draft(size, head, tmp_path):
    target = make_target(attn_implementation="sdpa")
    draft = make_draft(target, attn_implementation="sdpa", head=head)
    target.resize_token_embeddings(size, mean_resizing=False)
    inputs = padded_batch(LENGTHS, seed=3)
    with pytest.raises(ValueError, match=rf"resize_token_embeddings\({size}\)"):
        target.generate(**inputs, max_new_tokens=5, assistant_model=draft)
    old = draft.embed_proj[2].weight.clone() if head else None
    draft.resize_token_embeddings(size)
    if head:
        weight = draft.embed_proj[2].weight
        assert weight.shape[0] == size and torch.equal(weight[:VOCAB], old) and not weight[VOCAB:].any()
    plain = target.generate(**inputs, max_new_tokens=20, pad_token_id=MASK_TOKEN)
    draft.save_pretrained(tmp_path)
    for assistant in (draft, type(draft).from_pretrained(tmp_path)):
        ours = target.generate(**inputs, max_new_tokens=20, pad_token_id=MASK_TOKEN, assistant_model=assistant)
        assert ours.tolist() == plain.tolist()
    with pytest.raises(ValueError, match="mask_token_id"):
        draft.resize_token_embeddings(MASK_TOKEN)
