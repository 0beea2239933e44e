# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The head's kernels compute what torch computes.

On a GPU they are compiled. Elsewhere Triton's interpreter runs them; it must be on before anything imports Triton, so
one test here runs the others in a process of its own. To see them one by one:

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels.py
"""

import copy
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from helpers import BLOCK, MASK_TOKEN, make_draft, make_target, random_tokens
from test_generate_sampling import chi_square_p
from torch import nn

from domino_spec.generation import kernels
from domino_spec.generation.context import TargetParts
from domino_spec.generation.kernels import HeadKernels, gru_step, is_available
from domino_spec.generation.sampling import draw_with

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
HERE = is_available(DEVICE)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# Width of the hidden state, of which the kernels see only what the head's first projection makes.
HIDDEN = 6


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    """Numbers of float32 that `dtype` has too, so that a reference starts from the same."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(dtype).to(DEVICE)


@needs_triton
@pytest.mark.skipif(INTERPRETED or HERE, reason="the kernels run in this process")
def test_the_interpreter_agrees_with_torch():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
def test_they_are_available_where_they_run():
    assert is_available(torch.device("cpu")) == INTERPRETED
    if DEVICE.type == "cuda":
        assert is_available(DEVICE) == (torch.cuda.get_device_capability(DEVICE) >= (7, 0))


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on from the start")
def test_an_interpreter_that_comes_late_is_of_no_use(monkeypatch):
    import triton  # noqa: F401  # Without the variable.

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not runpy.run_path(kernels.__file__)["is_available"](torch.device("cpu"))


def test_without_triton_the_module_imports_and_says_no(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    alone = runpy.run_path(kernels.__file__)
    assert alone["triton"] is None
    assert not alone["is_available"](torch.device("cpu")) and not alone["is_available"](torch.device("cuda"))


BF16 = "*bf16"
_SCORED = {"base_logits": BF16, "bottleneck": BF16, "weight": BF16}
_CHOSEN = {"block_peaks": "*fp32", "block_places": "*i32"}
_TILES = {"WIDTH": 256, "OPERAND": "bfloat16", "ROWS": 16, "PLACES": 64, "CHUNK": 64}
_BARE = {"bottleneck": None, "weight": None, "ROWS": 1, "PLACES": 256}
# What the launchers pass for Qwen3-8B's draft: types of the pointers, and what is compiled in. The rest are integers.
LAUNCHED = {
    "_gru_kernel": (
        {"inputs": BF16, "rows": "*i64", "state": "*fp32", "weight": BF16, "out": "*fp32"},
        {"WIDTH": 1024, "ROWS": 1, "UNITS": 8, "CHUNK": 1024},
    ),
    "_bottleneck_kernel": (
        {"hidden_part": BF16, "state": "*fp32", "weight": BF16, "bottleneck": BF16},
        {"STATE_WIDTH": 1024, "ROWS": 1, "UNITS": 2, "CHUNK": 1024},
    ),
    "_score_kernel": (_SCORED | _CHOSEN, _TILES | {"noise": None, "out": None, "temperature": None}),
    "_score_kernel, for warpers": (
        _SCORED | {"out": "*fp32", "temperature": "fp32"},
        _TILES | {"noise": None, "block_peaks": None, "block_places": None},
    ),
    "_score_kernel, draw": (_SCORED | _CHOSEN | {"noise": "*fp32", "out": "*fp32", "temperature": "fp32"}, _TILES),
    "_score_kernel, draw from what warpers leave": (
        {"base_logits": "*fp32", "noise": "*fp32"} | _CHOSEN,
        _TILES | _BARE | {"out": None, "temperature": None},
    ),
    "_choice_kernel": (
        {"block_peaks": "*fp32", "block_places": "*i32", "ids": "*i64", "peaks": "*fp32"},
        {"token_ids": None, "places": None, "BLOCKS": 4096},
    ),
}


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="interpreted functions are not compiled")
@pytest.mark.parametrize("name", LAUNCHED)
def test_they_compile_for_a_gpu_that_is_not_here(name):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, (pointers, fixed) = getattr(kernels, name.split(",")[0]), LAUNCHED[name]
    constants = {k: getattr(triton.language, v) if isinstance(v, str) else v for k, v in fixed.items()}
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
    places = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 1000


@torch.no_grad()
def torch_states(gru, embeds):
    """Prefix states `[K, n, G]` in float32 after each of the tokens `[K, n, H]`."""
    return copy.deepcopy(gru).float().cpu()(embeds.float().cpu())[0]


class TestGruStep:
    __test__ = HERE

    # 6 rows take two programs; 260 units of 3 rows take two chunks.
    @pytest.mark.parametrize(
        ("num_rows", "width", "from_table"),
        [
            (1, 5, False),
            (1, 64, True),
            (3, 5, True),
            (3, 96, False),
            (3, 96, True),
            (6, 5, False),
            (6, 5, True),
            (3, 260, True),
        ],
    )
    def test_equals_torch(self, num_rows, width, from_table):
        torch.manual_seed(0)
        gru = nn.GRU(HIDDEN, width, bias=False).to(DEVICE)
        tokens = torch.randint(50, (2, num_rows), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        embeds = random(50, HIDDEN)
        table = (embeds @ gru.weight_ih_l0.T).detach()
        state, out = None, random(2, num_rows, width, seed=2)
        for k, expected in enumerate(torch_states(gru, embeds[tokens])):
            inputs, rows = (table, tokens[k]) if from_table else (table[tokens[k]], None)
            state = gru_step(inputs, state, gru.weight_hh_l0, out[k % 2], rows)
            assert state.data_ptr() == out[k % 2].data_ptr()
            torch.testing.assert_close(state.cpu(), expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_is_summed_in_float32(self, dtype):
        torch.manual_seed(0)
        gru = nn.GRU(HIDDEN, 96, bias=False).to(DEVICE, dtype)
        inputs, state = random(3, 288, dtype=dtype), random(3, 96, seed=1, dtype=dtype)
        exact = gru_step(inputs.float(), state.float(), gru.weight_hh_l0.float(), random(3, 96))
        # Only the result may be rounded, and a float32 one not even that.
        torch.testing.assert_close(gru_step(inputs, state, gru.weight_hh_l0, random(3, 96)), exact, atol=1e-5, rtol=0)
        out = gru_step(inputs, state, gru.weight_hh_l0, random(3, 96, dtype=dtype))
        torch.testing.assert_close(out.float(), exact, atol=0, rtol=torch.finfo(dtype).eps)

    def test_takes_and_fills_views(self):
        weight = random(30, 10, scale=0.3)
        table, state, tokens = random(20, 30), random(3, 10, seed=1), torch.tensor([19, 0, 7], device=DEVICE)
        expected = gru_step(table, state, weight, torch.empty_like(state), tokens)
        # What lies between the rows must not be read, though it would be multiplied by zero.
        wide_table, wide_weight = (torch.full(size, torch.nan, device=DEVICE) for size in ((20, 33), (30, 13)))
        wide = random(2, 3, 4, 10, seed=2)
        wide_table[:, :30], wide_weight[:, :10], wide[0, :, 1] = table, weight, state
        untouched = wide.clone()
        columns = tokens[:, None].repeat(1, 2)
        gru_step(wide_table[:, :30], wide[0, :, 1], wide_weight[:, :10], wide[1, :, 2], columns[:, 1])
        torch.testing.assert_close(wide[1, :, 2], expected)
        wide[1, :, 2] = untouched[1, :, 2]
        assert torch.equal(wide, untouched)

    def test_large_inputs_saturate_and_nan_stays_in_its_row(self):
        weight, state = random(15, 5), random(3, 5, seed=1)
        inputs = random(3, 15, seed=2)
        inputs[0] = 1e4
        state[1, 2] = torch.nan
        out = gru_step(inputs, state, weight, torch.empty_like(state))
        assert torch.equal(out[0], state[0]), "an update gate of 1 keeps the state"
        assert out[1].isnan().all()
        torch.testing.assert_close(out[2:], gru_step(inputs[2:], state[2:], weight, torch.empty_like(state[2:])))


class Head:
    """A random head, its kernels, and the final logits by torch in float32 on the CPU."""

    def __init__(self, num_rows, width, bottleneck, vocabulary, dtype=torch.float32, token_ids=None):
        torch.manual_seed(0)
        self.embed_proj = nn.Sequential(
            nn.Linear(HIDDEN + width, bottleneck, bias=False), nn.SiLU(), nn.Linear(bottleneck, vocabulary, bias=False)
        ).to(DEVICE, dtype)
        inner, outer = self.embed_proj[0].weight, self.embed_proj[2].weight
        with torch.no_grad():
            inner.mul_(3)
            outer.mul_(3)
        self.hidden, self.state = random(num_rows, HIDDEN, seed=1, dtype=dtype), random(num_rows, width, seed=2)
        self.hidden_part = self.hidden.float() @ inner[:, :HIDDEN].float().T
        self.base_logits = random(num_rows, vocabulary, seed=3, dtype=dtype)
        self.kernels = HeadKernels(random(3 * width, width), inner[:, HIDDEN:], outer, num_rows, token_ids)
        self.ids = torch.full((num_rows,), -7, device=DEVICE)
        self.peaks = torch.empty(num_rows, device=DEVICE)

    @torch.no_grad()
    def final_logits(self):
        fused = torch.cat([self.hidden.float(), self.state], dim=-1).cpu()
        return self.base_logits.cpu().float() + copy.deepcopy(self.embed_proj).float().cpu()(fused)

    def choose(self, corrected=True, **outputs):
        """Ids and peaks of the kernels."""
        outputs = {"ids": self.ids, "peaks": self.peaks, **outputs}
        correct_by = (self.hidden_part, self.state) if corrected else None
        self.kernels.score_argmax(self.base_logits, correct_by=correct_by, **outputs)
        return outputs["ids"].cpu(), outputs["peaks"].cpu()

    def noise(self, seed=4):
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(self.base_logits.shape).exponential_(generator=generator).to(DEVICE)

    def draw(self, noise, corrected=True, temperature=1.0, **outputs):
        """Ids, peaks and logits of the kernels."""
        outputs = {"ids": self.ids, "peaks": self.peaks, "out": torch.empty_like(noise), **outputs}
        correct_by = (self.hidden_part, self.state) if corrected else None
        self.kernels.score_sample(self.base_logits, noise, correct_by=correct_by, temperature=temperature, **outputs)
        return outputs["ids"].cpu(), outputs["peaks"].cpu(), outputs["out"].cpu()


class TestScoreArgmax:
    __test__ = HERE

    # 40 rows take two programs, a bottleneck of 64 takes two chunks.
    @pytest.mark.parametrize(
        ("num_rows", "width", "bottleneck", "vocabulary"),
        [(1, 5, 3, 1), (3, 5, 3, 7), (1, 64, 64, 1000), (3, 96, 64, 1000), (3, 5, 3, 5000), (40, 5, 3, 70)],
    )
    def test_equals_torch(self, num_rows, width, bottleneck, vocabulary):
        head = Head(num_rows, width, bottleneck, vocabulary)
        for corrected in (True, False):
            ids, peaks = head.choose(corrected)
            logits = head.final_logits() if corrected else head.base_logits.cpu()
            assert ids.tolist() == logits.argmax(-1).tolist()
            torch.testing.assert_close(peaks, logits.amax(-1), atol=1e-5, rtol=0)
        if vocabulary > 1:
            assert (head.final_logits().argmax(-1) != head.base_logits.cpu().argmax(-1)).any(), "shows nothing"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_rounds_the_bottleneck_alone(self, dtype):
        head = Head(3, 64, 64, 500, dtype)
        ids, peaks = head.choose()
        logits = head.final_logits()
        # An error of `eps / 2` in each of 64 products, most of them below 1 and of either sign.
        torch.testing.assert_close(peaks, logits.amax(-1), atol=4 * torch.finfo(dtype).eps, rtol=0)
        chosen = logits.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(peaks, chosen, atol=4 * torch.finfo(dtype).eps, rtol=0)

    def test_dtypes_mix(self):
        head = Head(2, 5, 3, 100, torch.bfloat16)
        head.base_logits = head.base_logits.half()
        head.state = head.state.bfloat16().float()
        expected = head.final_logits().amax(-1)
        head.hidden_part, head.state = head.hidden_part.half(), head.state.bfloat16()
        _, peaks = head.choose()
        torch.testing.assert_close(peaks, expected, atol=0.03, rtol=0)

    def test_a_shortlist_gives_ids_and_places(self):
        token_ids = 1000 + 3 * torch.arange(70, device=DEVICE)
        head, places = Head(3, 5, 3, 70, token_ids=token_ids), torch.full((3,), -7, device=DEVICE)
        ids, _ = head.choose(places=places)
        expected = head.final_logits().argmax(-1)
        assert places.tolist() == expected.tolist()
        assert ids.tolist() == token_ids.cpu()[expected].tolist()

    def test_reads_and_fills_views(self):
        head = Head(3, 5, 3, 70)
        expected_ids, expected_peaks = (result.clone() for result in head.choose())
        wide = torch.full((3, 4, 71), torch.nan, device=DEVICE)
        wide[:, 2, :70] = head.base_logits
        head.base_logits = wide[:, 2, :70]
        for name in ("weight_state", "weight_out"):
            weight = getattr(head.kernels, name)
            wide_weight = torch.full((len(weight), weight.shape[1] + 2), torch.nan, device=DEVICE)
            wide_weight[:, : weight.shape[1]] = weight
            setattr(head.kernels, name, wide_weight[:, : weight.shape[1]])
        wide_part, wide_state = random(3, 2, 3), random(3, 2, 5)
        wide_part[:, 1], wide_state[:, 1] = head.hidden_part, head.state
        head.hidden_part, head.state = wide_part[:, 1], wide_state[:, 1]
        ids, places = (torch.full((3, 4), -7, device=DEVICE) for _ in range(2))
        peaks = torch.full((3, 4), -7.0, device=DEVICE)
        head.choose(ids=ids[:, 1], places=places[:, 2], peaks=peaks[:, 3])
        assert ids[:, 1].tolist() == places[:, 2].tolist() == expected_ids.tolist()
        torch.testing.assert_close(peaks[:, 3].cpu(), expected_peaks)
        assert all((tensor == -7).sum() == 9 for tensor in (ids, places, peaks))

    @pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "base"])
    def test_of_equal_logits_the_first_wins(self, corrected):
        head = Head(4, 5, 3, 300)
        with torch.no_grad():
            head.embed_proj[2].weight.zero_()
        logits = head.base_logits.clamp_(max=5)
        # All are equal; within one block; in two; the last ones.
        logits[0] = 0.0
        logits[1, [70, 75]] = 9.0
        logits[2, [299, 66, 260]] = 9.0
        logits[3, [298, 299]] = 9.0
        assert head.choose(corrected)[0].tolist() == [0, 70, 66, 298]

    @pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "base"])
    def test_what_is_not_finite_comes_through(self, corrected):
        head = Head(5, 5, 3, 300)
        logits = head.base_logits
        logits[0, [280, 101]] = torch.nan
        logits[1, 202] = torch.inf
        logits[2, [3, 290]] = torch.tensor([torch.inf, torch.nan], device=DEVICE)
        logits[3] = -torch.inf
        logits[4] = torch.nan
        ids, peaks = head.choose(corrected)
        assert ids.tolist() == [101, 202, 290, 0, 0] == logits.cpu().argmax(-1).tolist()
        assert peaks.isnan().tolist() == [True, False, True, False, True]
        assert peaks[[1, 3]].tolist() == [torch.inf, -torch.inf]

    @pytest.mark.parametrize("vocabulary", [7, 70])
    def test_a_broken_bottleneck_breaks_its_row_alone(self, vocabulary):
        head = Head(3, 5, 3, vocabulary)
        expected_ids, expected_peaks = (result.clone() for result in head.choose())
        head.state[1, 2] = torch.nan
        ids, peaks = head.choose()
        assert ids[1] == 0 and peaks[1].isnan()
        head.state[1, 2], head.hidden_part[1, 0] = 0.0, torch.inf
        ids, peaks = head.choose()
        # An infinite correction, but for the weights of zero beyond the vocabulary: those would be NaN.
        assert 0 <= ids[1] < vocabulary and peaks[1] == torch.inf
        assert ids[[0, 2]].tolist() == expected_ids[[0, 2]].tolist()
        assert torch.equal(peaks[[0, 2]], expected_peaks[[0, 2]])

    def test_fewer_rows_than_there_is_room_for(self):
        head = Head(4, 5, 3, 200)
        expected_ids, expected_peaks = (result.clone() for result in head.choose())
        for name in ("base_logits", "hidden_part", "state", "ids", "peaks"):
            setattr(head, name, getattr(head, name)[2:])
        ids, peaks = head.choose()
        assert ids.tolist() == expected_ids[2:].tolist()
        torch.testing.assert_close(peaks, expected_peaks[2:])


class TestScoreSample:
    __test__ = HERE

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    @pytest.mark.parametrize(
        ("num_rows", "width", "bottleneck", "vocabulary"),
        [(1, 5, 3, 1), (3, 5, 3, 7), (3, 96, 64, 1000), (3, 5, 3, 5000), (40, 5, 3, 70)],
    )
    def test_equals_the_draw_of_torch(self, num_rows, width, bottleneck, vocabulary, temperature):
        head = Head(num_rows, width, bottleneck, vocabulary)
        noise = head.noise()
        for corrected in (True, False):
            ids, peaks, out = head.draw(noise, corrected, temperature)
            logits = (head.final_logits() if corrected else head.base_logits.cpu()) / temperature
            expected_peaks, expected = draw_with(noise.cpu(), logits)
            assert ids.tolist() == expected.tolist()
            torch.testing.assert_close(peaks, expected_peaks, atol=1e-5, rtol=0)
            torch.testing.assert_close(out, logits, atol=1e-5, rtol=0)
            # For warpers: the same, and nothing chosen.
            alone = torch.empty_like(noise)
            correct_by = (head.hidden_part, head.state) if corrected else None
            head.kernels.score(head.base_logits, alone, correct_by, temperature)
            assert torch.equal(alone.cpu(), out)
        if vocabulary > 1:
            assert ids.tolist() != logits.argmax(-1).tolist(), "the noise has no say"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_rounds_the_bottleneck_alone(self, dtype):
        head = Head(3, 64, 64, 500, dtype)
        noise = head.noise()
        ids, _, out = head.draw(noise)
        torch.testing.assert_close(out, head.final_logits(), atol=4 * torch.finfo(dtype).eps, rtol=0)
        assert ids.tolist() == draw_with(noise.cpu(), out)[1].tolist()

    def test_tokens_come_as_often_as_they_are_probable(self):
        num_rows, temperature = 2_000, 0.8
        head = Head(num_rows, 5, 3, 7)
        for name in ("base_logits", "hidden_part", "state"):
            setattr(head, name, getattr(head, name)[:1].repeat(num_rows, 1))
        ids, _, out = head.draw(head.noise(), temperature=temperature)
        p = out[0].double().softmax(-1)
        assert p.min() < 0.05 and p.max() > 0.2, "an easy one"
        assert chi_square_p(ids.bincount(minlength=7), p * num_rows) > 0.01

    def test_noise_of_zero_raises_no_token_without_a_probability(self):
        head = Head(2, 5, 3, 300)
        noise = head.noise()
        head.base_logits[:, ::2] = -torch.inf
        noise[:, 100] = 0.0
        noise[1, 101] = 0.0
        ids, peaks, _ = head.draw(noise, corrected=False)
        assert (ids % 2 == 1).all() and ids[1] == 101 and peaks.isfinite().all()
        assert draw_with(noise, head.base_logits)[1].tolist() == ids.tolist()

    @pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "base"])
    def test_without_probabilities_the_noise_has_no_say(self, corrected):
        head = Head(5, 5, 3, 300)
        logits = head.base_logits
        logits[0, [280, 101]] = torch.nan
        logits[1, [202, 299]] = torch.inf
        logits[2, [3, 290]] = torch.tensor([torch.inf, torch.nan], device=DEVICE)
        logits[3] = -torch.inf
        logits[4] = torch.nan
        for seed in range(3):
            ids, peaks, _ = head.draw(head.noise(seed), corrected)
            assert ids.tolist() == [101, 202, 290, 0, 0] == head.choose(corrected)[0].tolist()
            assert not peaks.isfinite().any()

    def test_a_shortlist_gives_ids_and_places(self):
        token_ids = 1000 + 3 * torch.arange(70, device=DEVICE)
        head, places = Head(3, 5, 3, 70, token_ids=token_ids), torch.full((3,), -7, device=DEVICE)
        noise = head.noise()
        ids, _, out = head.draw(noise, places=places)
        expected = draw_with(noise.cpu(), out)[1]
        assert places.tolist() == expected.tolist()
        assert ids.tolist() == token_ids.cpu()[expected].tolist()

    def test_reads_and_fills_views(self):
        head = Head(3, 5, 3, 70)
        noise = head.noise()
        expected_ids, expected_peaks, expected_out = (result.clone() for result in head.draw(noise))
        wide_noise = torch.full((3, 2, 72), torch.nan, device=DEVICE)
        wide_noise[:, 1, :70] = noise
        wide_out = torch.full((3, 4, 75), -7.0, device=DEVICE)
        ids, peaks = torch.full((3, 4), -7, device=DEVICE), torch.full((3, 4), -7.0, device=DEVICE)
        head.draw(wide_noise[:, 1, :70], ids=ids[:, 1], peaks=peaks[:, 3], out=wide_out[:, 2, :70])
        assert ids[:, 1].tolist() == expected_ids.tolist()
        torch.testing.assert_close(peaks[:, 3].cpu(), expected_peaks)
        torch.testing.assert_close(wide_out[:, 2, :70].cpu(), expected_out)
        assert all((tensor == -7).sum() == 9 for tensor in (ids, peaks))
        assert (wide_out == -7).sum() == wide_out.numel() - 3 * 70


@torch.no_grad()
def slow_rollout(draft, parts, hidden, base_logits, anchor, token_ids):
    """Greedy proposals `[n, K]` and their final logits, by the head's own methods."""
    token, state, made, peaks = anchor, None, [], []
    for k in range(hidden.shape[1]):
        state, logits = draft.step(parts.embed(token), state), base_logits[:, k]
        if k >= draft.config.pure_draft_prefix_len:
            logits = logits + draft.correction(hidden[:, k], state, token_ids)
        peak, place = logits.max(-1)
        token = place if token_ids is None else token_ids[place]
        made.append(token)
        peaks.append(peak)
    return torch.stack(made, -1), torch.stack(peaks, -1)


class TestRollout:
    __test__ = HERE

    @pytest.mark.parametrize("prefix", [0, 2], ids=lambda prefix: f"prefix {prefix}")
    @pytest.mark.parametrize("listed", [None, range(1, MASK_TOKEN, 2)], ids=["whole", "shortlist"])
    @torch.no_grad()
    def test_equals_the_heads_own_methods(self, prefix, listed):
        num_rows, target = 3, make_target("qwen3", dtype=torch.float32).to(DEVICE)
        parts, draft = TargetParts(target), make_draft(target, pure_draft_prefix_len=prefix).to(DEVICE)
        token_ids = None if listed is None else torch.tensor(listed, device=DEVICE)
        hidden = random(num_rows, BLOCK, draft.config.hidden_size)
        anchor = random_tokens(num_rows, 1)[:, 0].to(DEVICE)
        base_logits = parts.logits(hidden, token_ids)
        expected, peaks = slow_rollout(draft, parts, hidden, base_logits, anchor, token_ids)
        assert not torch.equal(base_logits.amax(-1), peaks), "the head has no say"

        inner, outer, width = draft.embed_proj[0].weight, draft.embed_proj[2].weight, hidden.shape[-1]
        table = parts.embed(torch.arange(draft.config.vocab_size, device=DEVICE)) @ draft.prefix_gru.weight_ih_l0.T
        hidden_part = hidden @ inner[:, :width].T
        head = HeadKernels(
            draft.prefix_gru.weight_hh_l0,
            inner[:, width:],
            outer if token_ids is None else outer[token_ids],
            num_rows,
            token_ids,
        )
        proposal_ids = torch.full((num_rows, BLOCK), -7, device=DEVICE)
        found = torch.empty(num_rows, BLOCK, device=DEVICE)
        token, state = anchor, None
        for k in range(BLOCK):
            state = head.step(table, state, token)
            correct_by = (hidden_part[:, k], state) if k >= prefix else None
            head.score_argmax(base_logits[:, k], proposal_ids[:, k], found[:, k], correct_by=correct_by)
            token = proposal_ids[:, k]
        assert proposal_ids.tolist() == expected.tolist()
        torch.testing.assert_close(found, peaks, atol=1e-5, rtol=0)
