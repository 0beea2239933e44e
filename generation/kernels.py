# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How is a rollout made fast on a GPU? Triton kernels for the head: a step is four launches and no more.

    read     r, z = sigmoid(i_r + W_r h), sigmoid(i_z + W_z h);  n = tanh(i_n + r * W_n h);  h' = (1 - z) n + z h
    score    b = silu(hidden_part + W_state h');  final logits = base logits + W_out b
    choose   the first place of the maximum, and its id

To draw from the final logits is to choose as well, with noise on them: x + g, where g = -log e and e is drawn from the
exponential distribution for each, is largest with probability softmax(x) (Gumbel's maximum).

`[i_r, i_z, i_n]` is `W_ih` times the embedding of the token that is read, for all tokens a table; `hidden_part` is the
share of draft hidden in `W1 [hidden ; state]`. Both can be made before the rollout and are made elsewhere.

Nothing here waits for the GPU or allocates, so that a whole rollout can be captured in a CUDA graph. Sums are float32
and logits are never rounded to the dtype of the weights, so in half precision a near tie may fall otherwise than it
does in torch. Triton is optional: where [`is_available`] says no, nothing else in this module may be called.

Shape symbols: n rows, G width of the prefix state, E of the bottleneck, V what may be proposed.
"""

from contextlib import nullcontext
from typing import TypeAlias

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

# Of weights and activations, in any mixture.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# What a correction is made of: `hidden_part` and the prefix state, see below.
CorrectBy: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# How much of the vocabulary a program scores: with the weights of the correction, which take the time, or without.
_PLACES_CORRECTED, _PLACES_BARE = 64, 256


if triton is not None:

    @triton.jit
    def _gru_kernel(
        inputs,
        rows,
        state,
        weight,
        out,
        num_rows,
        inputs_stride,
        rows_stride,
        state_stride,
        weight_stride,
        out_stride,
        WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        UNITS: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        # A program makes UNITS numbers of ROWS states, all three gates of them.
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
        is_row, is_unit = row < num_rows, unit < WIDTH
        inside = is_row[:, None] & is_unit[None, :]
        source = row
        if rows is not None:
            source = tl.load(rows + row * rows_stride, is_row, 0)
        # A table may have more than 2^31 entries.
        read = inputs + source.to(tl.int64)[:, None] * inputs_stride + unit[None, :]
        reset = tl.load(read, inside, 0.0).to(tl.float32)
        update = tl.load(read + WIDTH, inside, 0.0).to(tl.float32)
        new = tl.load(read + 2 * WIDTH, inside, 0.0).to(tl.float32)
        old = tl.zeros([ROWS, UNITS], tl.float32)
        if state is not None:
            old = tl.load(state + row[:, None] * state_stride + unit[None, :], inside, 0.0).to(tl.float32)
            # Summed over threads once, at the end: products pile up where they are made. The tiles have three
            # dimensions from the start, so that a weight is loaded once and serves all rows from its register.
            reset_sum = tl.zeros([ROWS, UNITS, CHUNK], tl.float32)
            update_sum = tl.zeros([ROWS, UNITS, CHUNK], tl.float32)
            new_sum = tl.zeros([ROWS, UNITS, CHUNK], tl.float32)
            gate = WIDTH * weight_stride
            # Unrolled, so that the loads of all chunks are under way together: this kernel waits for memory.
            for start in tl.static_range(0, WIDTH, CHUNK):
                column = start + tl.arange(0, CHUNK)[None, None, :]
                is_column = column < WIDTH
                states = state + row[:, None, None] * state_stride + column
                states = tl.load(states, is_row[:, None, None] & is_column, 0.0).to(tl.float32)
                weights = weight + unit[None, :, None] * weight_stride + column
                is_weight = is_unit[None, :, None] & is_column
                reset_sum += tl.load(weights, is_weight, 0.0).to(tl.float32) * states
                update_sum += tl.load(weights + gate, is_weight, 0.0).to(tl.float32) * states
                new_sum += tl.load(weights + 2 * gate, is_weight, 0.0).to(tl.float32) * states
            reset += tl.sum(reset_sum, 2)
            update += tl.sum(update_sum, 2)
            new += tl.sigmoid(reset) * tl.sum(new_sum, 2)
        # tanh, of which Triton's language has none.
        new = 2 * tl.sigmoid(2 * new) - 1
        update = tl.sigmoid(update)
        result = (1 - update) * new + update * old
        tl.store(out + row[:, None] * out_stride + unit[None, :], result.to(out.dtype.element_ty), inside)

    @triton.jit
    def _bottleneck_kernel(
        hidden_part,
        state,
        weight,
        bottleneck,
        num_rows,
        width,
        hidden_stride,
        state_stride,
        weight_stride,
        STATE_WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        UNITS: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
        is_row, is_unit = row < num_rows, unit < width
        inside = is_row[:, None] & is_unit[None, :]
        total = tl.zeros([ROWS, UNITS, CHUNK], tl.float32)
        for start in tl.static_range(0, STATE_WIDTH, CHUNK):
            column = start + tl.arange(0, CHUNK)[None, None, :]
            is_column = column < STATE_WIDTH
            states = state + row[:, None, None] * state_stride + column
            states = tl.load(states, is_row[:, None, None] & is_column, 0.0).to(tl.float32)
            weights = weight + unit[None, :, None] * weight_stride + column
            total += tl.load(weights, is_unit[None, :, None] & is_column, 0.0).to(tl.float32) * states
        fused = tl.load(hidden_part + row[:, None] * hidden_stride + unit[None, :], inside, 0.0).to(tl.float32)
        fused += tl.sum(total, 2)
        result = fused * tl.sigmoid(fused)
        tl.store(bottleneck + row[:, None] * width + unit[None, :], result.to(bottleneck.dtype.element_ty), inside)

    @triton.jit
    def _first_maximum(scores):
        # Of each column of `scores`: the maximum and its first place, where NaN is above all numbers, as in torch. The
        # comparisons of a reduction drop NaN or keep it as the order has it, so it must not get there.
        is_nan = scores != scores
        has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
        ranks = tl.where(has_nan[None, :], tl.where(is_nan, 1.0, 0.0), scores)
        maximum, place = tl.max(ranks, 0, return_indices=True)
        return tl.where(has_nan, float("nan"), maximum), place

    @triton.jit
    def _score_kernel(
        base_logits,
        bottleneck,
        weight,
        noise,
        out,
        block_peaks,
        block_places,
        num_rows,
        vocabulary,
        num_blocks,
        temperature,
        base_stride,
        weight_stride,
        noise_stride,
        out_stride,
        WIDTH: tl.constexpr,
        OPERAND: tl.constexpr,
        ROWS: tl.constexpr,
        PLACES: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        block = tl.program_id(0)
        place = block * PLACES + tl.arange(0, PLACES)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_place, is_row = place < vocabulary, row < num_rows
        inside = is_place[:, None] & is_row[None, :]
        logits = tl.zeros([PLACES, ROWS], tl.float32)
        if weight is not None:
            # The vocabulary is the longer side of the product, so it takes the operand that tensor cores want long.
            # Stages: chunks of the weights that are on their way while one is multiplied.
            for start in tl.range(0, WIDTH, CHUNK, num_stages=4):
                column = start + tl.arange(0, CHUNK)
                is_column = column < WIDTH
                weights = weight + place.to(tl.int64)[:, None] * weight_stride + column[None, :]
                weights = tl.load(weights, is_place[:, None] & is_column[None, :], 0.0)
                inputs = bottleneck + row[None, :] * WIDTH + column[:, None]
                inputs = tl.load(inputs, is_row[None, :] & is_column[:, None], 0.0)
                # "ieee": float32 stays float32, where tensor cores would cut it to 19 bits.
                logits = tl.dot(weights.to(OPERAND), inputs.to(OPERAND), logits, input_precision="ieee")
        # After the product, whose operands are the long wait: loaded first, these few would hold them up.
        far_row = row.to(tl.int64)[None, :]
        base = base_logits + far_row * base_stride + place[:, None]
        logits += tl.load(base, inside, 0.0).to(tl.float32)
        if temperature is not None:
            logits = logits / temperature
        if out is not None:
            tl.store(out + far_row * out_stride + place[:, None], logits, inside)
        if noise is not None:
            # Zero would be more than -inf can bear, and raise a token that has no probability.
            drawn = tl.load(noise + far_row * noise_stride + place[:, None], inside, 1.0)
            logits -= tl.log(tl.maximum(drawn, 1e-37))
        if block_peaks is not None:
            # Only now, for a bottleneck that is not finite makes NaN of the zeros beyond the vocabulary.
            logits = tl.where(inside, logits, float("-inf"))
            peak, first = _first_maximum(logits)
            at = row * num_blocks + block
            tl.store(block_peaks + at, peak, is_row)
            tl.store(block_places + at, block * PLACES + first, is_row)

    @triton.jit
    def _choice_kernel(
        block_peaks,
        block_places,
        token_ids,
        ids,
        places,
        peaks,
        num_blocks,
        ids_stride,
        places_stride,
        peaks_stride,
        BLOCKS: tl.constexpr,
    ):
        row = tl.program_id(0)
        block = tl.arange(0, BLOCKS)[:, None]
        scores = tl.load(block_peaks + row * num_blocks + block, block < num_blocks, float("-inf"))
        # Blocks are in the order of their places, so the first of equal ones has the lowest.
        peak, winner = _first_maximum(scores)
        place = tl.load(block_places + row * num_blocks + winner).to(tl.int64)
        one = tl.arange(0, 1)
        tl.store(peaks + row * peaks_stride + one, peak)
        if places is not None:
            tl.store(places + row * places_stride + one, place)
        if token_ids is not None:
            place = tl.load(token_ids + place)
        tl.store(ids + row * ids_stride + one, place)


def is_available(device: torch.device) -> bool:
    """
    Whether the kernels run on `device`: a GPU of compute capability 7.0 or newer, or any device where Triton's
    interpreter (environment variable `TRITON_INTERPRET=1`) was on before Triton was imported.
    """
    if triton is None:
        return False
    # Switched on late, the interpreter has our functions but not those of Triton itself, and nothing runs.
    interpreted = [not isinstance(function, triton.JITFunction) for function in (_gru_kernel, tl.max)]
    if any(interpreted):
        return all(interpreted)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def gru_step(
    inputs: torch.Tensor,
    state: torch.Tensor | None,
    weight_hh: torch.Tensor,
    out: torch.Tensor,
    rows: torch.LongTensor | None = None,
) -> torch.Tensor:
    """
    One step of a GRU without bias; gates in torch's order: reset, update, new.

    Each tensor is of any of `KERNEL_DTYPES` and contiguous in its last dimension.

    Args:
        inputs (`torch.Tensor` of shape `[n, 3 * G]`): `W_ih` times the embeddings that are read. With `rows` a table
            of them, `[any, 3 * G]`.
        state (`torch.Tensor` of shape `[n, G]`, *optional*): prefix state; zero when not given.
        weight_hh (`torch.Tensor` of shape `[3 * G, G]`): `weight_hh_l0` of a `torch.nn.GRU`.
        out (`torch.Tensor` of shape `[n, G]`): receives the new prefix state; must share no memory with `state`.
        rows (`torch.LongTensor` of shape `[n]`, *optional*): lines of the table to read, such as token ids; any
            stride. Not checked against the table's length, for that would wait for the GPU.

    Returns:
        `out`.
    """
    num_rows, width = out.shape
    assert weight_hh.shape == (3 * width, width) and inputs.shape[-1] == 3 * width
    assert len(inputs if rows is None else rows) == num_rows
    assert state is None or (state.shape == out.shape and state.data_ptr() != out.data_ptr())
    assert all(tensor is None or tensor.stride(-1) == 1 for tensor in (inputs, state, weight_hh, out))
    rows_each = _rows_each(num_rows)
    # 8 units: at G = 1024 a program for nearly every multiprocessor of an H200.
    grid = (triton.cdiv(width, 8), triton.cdiv(num_rows, rows_each))
    with _current(out.device):
        _gru_kernel[grid](
            inputs,
            rows,
            state,
            weight_hh,
            out,
            num_rows,
            inputs.stride(0),
            0 if rows is None else rows.stride(0),
            0 if state is None else state.stride(0),
            weight_hh.stride(0),
            out.stride(0),
            WIDTH=width,
            ROWS=rows_each,
            UNITS=8,
            # Three sums of ROWS x UNITS x CHUNK live in the registers of 256 threads: at most 96 in each.
            CHUNK=min(triton.next_power_of_2(width), 1024 // rows_each),
            num_warps=8,
        )
    return out


class HeadKernels:
    """
    The head's kernels for rollouts one after another, with all the memory that they need.

    Each tensor that a method takes is of any of `KERNEL_DTYPES`, where nothing else is said, and contiguous in its last
    dimension. A kernel is compiled when it is first launched with shapes, dtypes or alignments that it has not seen:
    run a rollout once before it is captured in a CUDA graph. Rollouts share the memory, so threads must not share it.

    Args:
        weight_hh (`torch.Tensor` of shape `[3 * G, G]`): `prefix_gru.weight_hh_l0`.
        weight_state (`torch.Tensor` of shape `[E, G]`): the columns of `embed_proj[0].weight` that read the state.
        weight_out (`torch.Tensor` of shape `[V, E]`): `embed_proj[2].weight`, or its rows for a shortlist.
        num_rows (`int`): the most rows of a rollout.
        token_ids (`torch.LongTensor` of shape `[V]`, *optional*): the ids of a shortlist.
    """

    def __init__(
        self,
        weight_hh: torch.Tensor,
        weight_state: torch.Tensor,
        weight_out: torch.Tensor,
        num_rows: int,
        token_ids: torch.LongTensor | None = None,
    ):
        vocabulary, width = weight_out.shape
        weights = (weight_hh, weight_state, weight_out)
        assert weight_state.shape == (width, weight_hh.shape[1])
        assert all(weight.dtype in KERNEL_DTYPES and weight.stride(-1) == 1 for weight in weights)
        assert token_ids is None or (token_ids.shape == (vocabulary,) and token_ids.is_contiguous())
        self.weight_hh, self.weight_state, self.weight_out = weights
        self.token_ids = token_ids
        # Float32: rounding would add up from step to step, and costs as much time as it spares at this size.
        self._states = weight_hh.new_empty(2, num_rows, weight_hh.shape[1], dtype=torch.float32)
        # In the dtype that tensor cores are fed with.
        self._bottleneck = weight_out.new_empty(num_rows, width)
        num_blocks = triton.cdiv(vocabulary, _PLACES_CORRECTED)
        self._block_peaks = weight_out.new_empty(num_rows * num_blocks, dtype=torch.float32)
        self._block_places = weight_out.new_empty(num_rows * num_blocks, dtype=torch.int32)

    def step(
        self, inputs: torch.Tensor, state: torch.Tensor | None, rows: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """
        Read one token in each row, see [`gru_step`].

        Returns:
            The new prefix state, float32 `[n, G]`, in one of two buffers: the next step but one overwrites it.
        """
        first, second = self._states[:, : len(inputs if rows is None else rows)]
        out = second if state is not None and state.data_ptr() == first.data_ptr() else first
        return gru_step(inputs, state, self.weight_hh, out, rows)

    def score_argmax(
        self,
        base_logits: torch.Tensor,
        ids: torch.LongTensor,
        peaks: torch.Tensor,
        places: torch.LongTensor | None = None,
        correct_by: CorrectBy | None = None,
    ):
        """
        The likeliest proposal of each row; among equal ones the first, and NaN before all numbers, as in torch.

        Args:
            base_logits (`torch.Tensor` of shape `[n, V]`): of the position.
            ids (`torch.LongTensor` of shape `[n]`): receives the proposals; any stride, such as `proposal_ids[:, k]`.
            peaks (`torch.FloatTensor` of shape `[n]`): receives their final logits, NaN and infinities as they are.
            places (`torch.LongTensor` of shape `[n]`, *optional*): receives where the proposals stand among the V;
                with no shortlist the same as `ids`.
            correct_by (*optional*): what `embed_proj[0]` makes of draft hidden alone, `torch.Tensor` of shape `[n, E]`,
                and the prefix state after the tokens before the proposal, of shape `[n, G]`. Not given in the pure
                draft prefix, where base logits are final.
        """
        self._score(base_logits, correct_by, ids=ids, peaks=peaks, places=places)

    def score(
        self,
        base_logits: torch.Tensor,
        out: torch.Tensor,
        correct_by: CorrectBy | None = None,
        temperature: float = 1.0,
    ):
        """
        Final logits divided by `temperature`, for warpers to go on with.

        Args:
            base_logits, correct_by: as for `score_argmax`.
            out (`torch.FloatTensor` of shape `[n, V]`): receives them.
            temperature (`float`): above zero. A captured graph keeps it.
        """
        self._score(base_logits, correct_by, out=out, temperature=temperature)

    def score_sample(
        self,
        base_logits: torch.Tensor,
        noise: torch.Tensor,
        ids: torch.LongTensor,
        peaks: torch.Tensor,
        places: torch.LongTensor | None = None,
        correct_by: CorrectBy | None = None,
        temperature: float = 1.0,
        out: torch.Tensor | None = None,
    ):
        """
        A proposal of each row, drawn with probability softmax(final logits / temperature), as [`draw_with`] does. In a
        row that has no such probabilities (some logits are NaN or `inf`, or all are `-inf`) it is the one that
        `score_argmax` takes, whatever the noise.

        Args:
            base_logits, ids, places, correct_by: as for `score_argmax`.
            noise (`torch.FloatTensor` of shape `[n, V]`): drawn anew from the exponential distribution of mean 1, such
                as by `noise.exponential_()`.
            peaks (`torch.FloatTensor` of shape `[n]`): receives what the proposals were chosen for, which is finite
                where there were probabilities.
            temperature (`float`): above zero. A captured graph keeps it.
            out (`torch.FloatTensor` of shape `[n, V]`, *optional*): receives the final logits divided by `temperature`.
        """
        self._score(base_logits, correct_by, ids, peaks, places, noise, out, temperature)

    def _score(
        self,
        base_logits: torch.Tensor,
        correct_by: CorrectBy | None,
        ids: torch.LongTensor | None = None,
        peaks: torch.Tensor | None = None,
        places: torch.LongTensor | None = None,
        noise: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        temperature: float = 1.0,
    ):
        """Score, and choose where `ids` are asked for."""
        num_rows, vocabulary = base_logits.shape
        assert vocabulary == len(self.weight_out) and num_rows <= len(self._bottleneck)
        for tensor in (noise, out):
            assert tensor is None or (tensor.shape == base_logits.shape and tensor.dtype == torch.float32)
        assert all(tensor is None or tensor.stride(-1) == 1 for tensor in (base_logits, noise, out))
        assert temperature > 0
        is_bare = correct_by is None
        places_each = _PLACES_BARE if is_bare else _PLACES_CORRECTED
        num_blocks = triton.cdiv(vocabulary, places_each)
        # A tensor core takes 16 columns at least; more than 32 would crowd the registers.
        rows_each = min(32, max(1 if is_bare else 16, triton.next_power_of_2(num_rows)))
        width = self.weight_out.shape[1]
        with _current(base_logits.device):
            if correct_by is not None:
                self._fill_bottleneck(*correct_by)
            _score_kernel[(num_blocks, triton.cdiv(num_rows, rows_each))](
                base_logits,
                None if is_bare else self._bottleneck,
                None if is_bare else self.weight_out,
                noise,
                out,
                None if ids is None else self._block_peaks,
                None if ids is None else self._block_places,
                num_rows,
                vocabulary,
                num_blocks,
                None if temperature == 1 else float(temperature),
                base_logits.stride(0),
                self.weight_out.stride(0),
                0 if noise is None else noise.stride(0),
                0 if out is None else out.stride(0),
                WIDTH=width,
                OPERAND=_operand(self.weight_out.dtype),
                ROWS=rows_each,
                PLACES=places_each,
                # In float32, which tensor cores do not multiply, a thread holds whole rows of a chunk in its registers.
                CHUNK=min(max(16, triton.next_power_of_2(width)), 32 if self.weight_out.dtype == torch.float32 else 64),
                num_warps=4,
            )
            if ids is not None:
                assert peaks is not None and ids.shape == peaks.shape == (num_rows,)
                assert ids.dtype == torch.int64 and peaks.dtype == torch.float32
                _choice_kernel[(num_rows,)](
                    self._block_peaks,
                    self._block_places,
                    self.token_ids,
                    ids,
                    places,
                    peaks,
                    num_blocks,
                    ids.stride(0),
                    0 if places is None else places.stride(0),
                    peaks.stride(0),
                    BLOCKS=triton.next_power_of_2(num_blocks),
                    num_warps=8,
                )

    def _fill_bottleneck(self, hidden_part: torch.Tensor, state: torch.Tensor):
        num_rows, width = hidden_part.shape
        state_width = self.weight_state.shape[1]
        assert width == self._bottleneck.shape[1] and state.shape == (num_rows, state_width)
        assert hidden_part.stride(-1) == state.stride(-1) == 1
        rows_each = _rows_each(num_rows)
        # 2 units: there are few, and each is a long sum.
        _bottleneck_kernel[(triton.cdiv(width, 2), triton.cdiv(num_rows, rows_each))](
            hidden_part,
            state,
            self.weight_state,
            self._bottleneck,
            num_rows,
            width,
            hidden_part.stride(0),
            state.stride(0),
            self.weight_state.stride(0),
            STATE_WIDTH=state_width,
            ROWS=rows_each,
            UNITS=2,
            CHUNK=min(triton.next_power_of_2(state_width), 1024),
            num_warps=4,
        )


def _rows_each(num_rows: int) -> int:
    """Rows that share one read of the weights: a power of two, as large as registers allow."""
    return min(4, triton.next_power_of_2(num_rows))


def _operand(dtype: torch.dtype):
    """What tensor cores are fed with, for weights of `dtype`."""
    if not isinstance(_score_kernel, triton.JITFunction):
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _current(device: torch.device):
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
