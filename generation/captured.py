# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does drafting cost a GPU no more than its kernels? All of a round's draft phase in one CUDA graph."""

import threading
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn import functional as F
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.utils import logging

from .backbone import Context, DraftState, ragged_hidden
from .cache import DraftCache
from .context import TargetParts, is_plain_linear
from .kernels import KERNEL_DTYPES, CorrectBy, HeadKernels, is_available
from .processors import warp
from .sampling import draw_with
from .scorer import PlainHead, Scorer
from .sequences import Proposal

logger = logging.get_logger(__name__)

# The room for text is a multiple of this, so that calls of about one length share a graph.
_ROOM = 512
# Ways to choose a token (greedily, or by these warpers) that graphs are kept for; each keeps memory of its own.
_MOST_WAYS = 4


@dataclass
class CaptureOptions:
    """
    What a draft was told by `use_cuda_graphs`.

    Attributes:
        input_table (`bool`): whether to keep the GRU's projection of every embedding.
    """

    input_table: bool = False


def can_capture(device: torch.device) -> bool:
    """Whether work on `device` can be captured."""
    return device.type == "cuda"


class CapturedDraft:
    """
    The draft phase of rounds with fixed shapes: context in, proposals out, and no word with the host between.

    Args:
        draft (`DominoDraftModel`), scorer (`Scorer`): the draft, and what scores its proposals, with a plain head and
            no pool. Neither is kept, so that the draft may be let go while this is in store for it.
        parts (`TargetParts`): of the target.
        num_rows (`int`), num_proposals (`int`): n, and K of each round.
        room (`int`): context and block of a row must fit in so many slots.
        warpers (`LogitsProcessorList`, *optional*): draw each proposal from what they leave, which read logits alone;
            the likeliest is taken when not given.
        input_table (`torch.Tensor` of shape `[V, 3 * G]`, *optional*): `W_ih` times each embedding.
    """

    def __init__(
        self,
        draft,
        scorer: Scorer,
        parts: TargetParts,
        num_rows: int,
        num_proposals: int,
        room: int,
        warpers: LogitsProcessorList | None = None,
        input_table: torch.Tensor | None = None,
    ):
        assert isinstance(scorer.head, PlainHead)
        device, head = draft.device, scorer.head
        self._draft, self.parts, self.head = ref(draft), parts, head
        self.scored, self.token_ids = scorer.target, scorer.token_ids
        self.num_proposals, self.room, self.input_table = num_proposals, room, input_table
        # The weights that it reads, and what it may serve; see `Captures`.
        self.made_of: tuple = ()
        self.way: tuple | None = None
        self.kind: tuple = ()
        self.cache = DraftCache(num_rows, room + 1)
        # A round commits the proposals and a bonus token at most.
        width = num_proposals + 1
        self.features = torch.zeros(num_rows, width, draft.fc.in_features, dtype=draft.dtype, device=device)
        # Of each row: where its text begins, its context in the cache, the new context.
        self.numbers = torch.zeros(3, num_rows, dtype=torch.long, device=device)
        self._numbers_here = torch.zeros(3, num_rows, dtype=torch.long, pin_memory=device.type == "cuda")
        self.anchor = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.proposal_ids = torch.zeros(num_rows, num_proposals, dtype=torch.long, device=device)
        self.peaks = torch.zeros(num_proposals, num_rows, dtype=torch.float32, device=device)
        self.finite = torch.zeros((), dtype=torch.bool, device=device)
        self.warpers = None if warpers is None else list(warpers)
        self.temperature, self.probabilities = 1.0, None
        if self.warpers is not None:
            # `generate` has temperature before the others; scoring can do its part.
            if self.warpers and type(self.warpers[0]) is TemperatureLogitsWarper:
                self.temperature = self.warpers.pop(0).temperature
            size = len(head.weight_out)
            numbers = {"dtype": torch.float32, "device": device}
            self.logits, self.noise = torch.empty(2, num_rows, size, **numbers)
            self.places = torch.zeros_like(self.proposal_ids)
            # Of what may be proposed; and of all ids, which are the same without a shortlist.
            self.listed = torch.empty(num_rows, num_proposals, size, **numbers)
            self.probabilities = self.listed
            if self.token_ids is not None:
                self.probabilities = torch.zeros(num_rows, num_proposals, draft.config.vocab_size, **numbers)
        self.kernels: HeadKernels | None = None
        weights = (head.weight_hh, head.weight_state, head.weight_out)
        if is_available(device) and all(weight.dtype in KERNEL_DTYPES for weight in weights):
            self.kernels = HeadKernels(*weights, num_rows, scorer.token_ids)
        self._graph: torch.cuda.CUDAGraph | None = None

    def takes(self, context: list[Context], num_proposals: int) -> bool:
        """Whether a round is of these shapes: the context of one round before it, and all proposals."""
        return (
            num_proposals == self.num_proposals
            and len(context) == 1
            and context[0].features.shape[1] <= self.features.shape[1]
            # The prompt's may be padded on the left.
            and min(self.cache.lengths) > 0
            and max(self.cache.lengths) + self.features.shape[1] + self.block_size <= self.room
        )

    @property
    def block_size(self) -> int:
        return self._model().config.block_size

    def _model(self):
        draft = self._draft()
        assert draft is not None
        return draft

    def propose(self, state: DraftState, context: Context, anchor: torch.LongTensor) -> Proposal:
        """
        What `draft_hidden` and `rollout` give, for rows whose context begins at the left of `context`.

        The proposals are overwritten by the next call.
        """
        self.features[:, : context.features.shape[1]] = context.features
        self._numbers_here[:] = torch.tensor([state.origins, self.cache.lengths, context.counts])
        self.numbers.copy_(self._numbers_here, non_blocking=True)
        self.anchor.copy_(anchor)
        self.cache.lengths = [before + new for before, new in zip(self.cache.lengths, context.counts, strict=True)]
        if not self.features.is_cuda:
            # Nothing to capture, but the same work: tests come here.
            self._run()
        elif self._graph is None:
            self._capture()
        else:
            self._graph.replay()
        return Proposal(self.proposal_ids, self.probabilities, self.finite)

    def _capture(self):
        # The first run is this round's own, and warms up what must not happen in a capture (compilation, workspaces).
        stream = torch.cuda.Stream(self.features.device)
        stream.wait_stream(torch.cuda.current_stream(self.features.device))
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream(self.features.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile. What they do is none of this graph's.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._run()
        self._graph = graph

    def _run(self):
        """One draft phase from the tensors that are filled in; leaves the proposals in theirs."""
        draft, head = self._model(), self.head
        config = draft.config
        origins, lengths, counts = self.numbers
        visible = torch.arange(self.features.shape[1], device=self.features.device) < counts[:, None]
        hidden = ragged_hidden(
            draft, self.parts, self.cache, self.features, visible, self.anchor, origins, lengths, self.room
        )
        first = 0 if config.shift_label else 1
        hidden = hidden[:, first : first + self.num_proposals]
        base_logits = self.scored.logits(hidden)
        begun, token, state = head.begin(hidden), self.anchor[:, 0], None
        for k in range(self.num_proposals):
            state = self._step(token, state)
            correct_by = (begun[:, k], state) if k >= config.pure_draft_prefix_len else None
            if self.warpers is None:
                self._take_likeliest(k, base_logits[:, k], correct_by)
            else:
                self._draw(k, base_logits[:, k], correct_by)
            token = self.proposal_ids[:, k]
        if self.warpers is not None:
            # Where logits are no numbers nothing was drawn: what was taken has all the probability.
            broken = self.listed[..., :1].isnan()
            self.listed.masked_fill_(broken, 0).scatter_add_(2, self.places[..., None], broken.to(self.listed))
            if self.token_ids is not None:
                self.probabilities.index_copy_(2, self.token_ids, self.listed)
        self.finite.copy_(torch.isfinite(self.peaks).all())

    def _take_likeliest(self, k: int, base_logits: torch.Tensor, correct_by: CorrectBy | None):
        """Proposal k by its base logits `[n, V]`; `correct_by` as for [`HeadKernels.score_argmax`]."""
        if self.kernels is not None:
            self.kernels.score_argmax(base_logits, self.proposal_ids[:, k], self.peaks[k], correct_by=correct_by)
        else:
            self._put(k, *self._final_logits(base_logits, correct_by).max(-1))

    def _draw(self, k: int, base_logits: torch.Tensor, correct_by: CorrectBy | None):
        """[`_take_likeliest`] for a draw; keeps the distribution that it is from."""
        assert self.warpers is not None
        self.noise.exponential_()
        outputs = (self.proposal_ids[:, k], self.peaks[k], self.places[:, k])
        if self.kernels is None:
            logits = warp(self.warpers, self._final_logits(base_logits, correct_by).float() / self.temperature)
            self._put(k, *draw_with(self.noise, logits))
        elif self.warpers:
            self.kernels.score(base_logits, self.logits, correct_by, self.temperature)
            logits = warp(self.warpers, self.logits)
            self.kernels.score_sample(logits, self.noise, *outputs)
        else:
            logits = self.logits
            self.kernels.score_sample(base_logits, self.noise, *outputs, correct_by, self.temperature, out=logits)
        self.listed[:, k] = logits.softmax(-1)

    def _final_logits(self, base_logits: torch.Tensor, correct_by: CorrectBy | None) -> torch.Tensor:
        if correct_by is None:
            return base_logits
        return base_logits + self.head.correction(*correct_by, None).to(base_logits)

    def _put(self, k: int, peaks: torch.Tensor, places: torch.LongTensor):
        self.peaks[k] = peaks
        self.proposal_ids[:, k] = places if self.token_ids is None else self.token_ids[places]
        if self.warpers is not None:
            self.places[:, k] = places

    def _step(self, token: torch.LongTensor, state: torch.Tensor | None) -> torch.Tensor:
        """The prefix state after one more token."""
        if self.kernels is None:
            return self.head.step(self.parts.embed(token), state)
        if self.input_table is not None:
            return self.kernels.step(self.input_table, state, rows=token)
        embeds = self.parts.embed(token).to(self.head.weight_ih)
        return self.kernels.step(F.linear(embeds, self.head.weight_ih), state)


class Captures:
    """
    The captured draft phases of a draft with a target, each lent to one call at a time, and kept for the next.

    Capturing takes longer than many rounds, so that a graph must outlive the call that made it.
    """

    _known: ClassVar["WeakKeyDictionary[object, WeakKeyDictionary]"] = WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self):
        # By way to choose a token, the one used last at the end; then by shapes.
        self._idle: dict[tuple | None, dict[tuple, list[CapturedDraft]]] = {}
        self._weights: tuple = ()
        self._table: torch.Tensor | None = None

    @classmethod
    def of(cls, target, draft) -> "Captures":
        with cls._lock:
            return cls._known.setdefault(target, WeakKeyDictionary()).setdefault(draft, cls())

    @staticmethod
    def suits(draft, scorer: Scorer) -> bool:
        """Whether a draft's phase is the same work each time: one GPU, plain weights, and a rotation that is fixed."""
        return (
            isinstance(scorer.head, PlainHead)
            and is_plain_linear(scorer.target.output_head)
            and {weight.device for weight in (*draft.parameters(), scorer.target.output_head.weight)} == {draft.device}
            and can_capture(draft.device)
            and draft.config.candidate_pool_size is None
            and draft.config._attn_implementation in ("eager", "sdpa")
            and (draft.config.rope_parameters or {}).get("rope_type", "default") not in ("dynamic", "longrope")
            # An adapter may be switched between calls, and a graph would not notice.
            and not any(hasattr(module, "adapter_layer_names") for module in draft.modules())
        )

    def take(
        self,
        draft,
        scorer: Scorer,
        parts: TargetParts,
        num_rows: int,
        num_proposals: int,
        slots: int,
        warpers: LogitsProcessorList | None,
    ) -> CapturedDraft:
        """One for rows of at most `slots` slots, made if none is idle; the others are as for [`CapturedDraft`]."""
        room = -(-slots // _ROOM) * _ROOM
        weights = (*draft.parameters(), parts.embedding.weight, parts.output_head.weight)
        # A graph reads the memory that it was captured with, and shapes are baked in.
        made_of = (draft.config.shortlist, *(_identity(weight) for weight in weights))
        options, head = draft.capture_options, scorer.head
        assert isinstance(head, PlainHead)
        # What warpers are told is baked in as well.
        way = None if warpers is None else tuple((type(one), *sorted(vars(one).items())) for one in warpers)
        kind = (num_rows, num_proposals, room, options.input_table)
        with self._lock:
            if made_of != self._weights:
                self._idle, self._table, self._weights = {}, None, made_of
            if options.input_table and self._table is None:
                self._table = _input_table(head, parts)
            of_way = self._idle[way] = self._idle.pop(way, {})
            if len(self._idle) > _MOST_WAYS:
                del self._idle[next(iter(self._idle))]
            if idle := of_way.get(kind):
                return idle.pop()
        table = self._table if options.input_table else None
        captured = CapturedDraft(draft, scorer, parts, num_rows, num_proposals, room, warpers, table)
        captured.made_of, captured.way, captured.kind = made_of, way, kind
        return captured

    def give_back(self, captured: CapturedDraft):
        """For the next call, unless the weights have changed meanwhile, or its way was not used for long."""
        captured.cache.clear()
        with self._lock:
            if captured.made_of == self._weights and captured.way in self._idle:
                self._idle[captured.way].setdefault(captured.kind, []).append(captured)


def _input_table(head: PlainHead, parts: TargetParts) -> torch.Tensor:
    """`W_ih` times each row of the target's embedding, `[V, 3 * G]`."""
    vocabulary, width = len(parts.embedding.weight), len(head.weight_ih)
    size = vocabulary * width * head.weight_ih.element_size()
    logger.warning(f"The table of the GRU's inputs takes {size / 2**20:.0f} MiB on {head.weight_ih.device}.")
    table = head.weight_ih.new_empty(vocabulary, width)
    # In parts, so that no second copy of the embedding is needed.
    for ids in torch.arange(vocabulary, device=table.device).split(8192):
        table[ids] = F.linear(parts.embed(ids).to(table), head.weight_ih)
    return table


def _identity(weight: torch.Tensor) -> tuple:
    """Another where a weight was replaced or written to; what is made of weights is then made anew."""
    return weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version
