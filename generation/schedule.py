# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How many proposals is a round worth? As many as were asked for, or as many as pay for their own verification."""

import threading
import time
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel

from .compat import asked_for
from .verification import Verification

# A round in this many drafts even where drafting has not paid, to notice when it would.
_EXPLORE_EVERY = 32
# Passes of a width before its time is believed, and the weight of a new measurement from then on.
_ENOUGH, _FRESH = 3, 0.1
_BINS = 10


class TargetCosts:
    """
    Seconds of a target pass on this machine, by the number of tokens in it: `fixed + per_token * tokens`.

    Measured while generating and shared by all calls and threads that use the target.
    """

    _known: ClassVar["WeakKeyDictionary[PreTrainedModel, TargetCosts]"] = WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self):
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    @classmethod
    def of(cls, target: PreTrainedModel) -> "TargetCosts":
        with cls._lock:
            return cls._known.setdefault(target, cls())

    def add(self, tokens: int, seconds: float):
        """A pass over `tokens` took `seconds`."""
        with self._lock:
            count = self._counts.get(tokens, 0)
            old = self._seconds.get(tokens, seconds)
            # The first passes of a width may include a warm-up: the quickest of them counts.
            new = min(old, seconds) if count < _ENOUGH else old + _FRESH * (seconds - old)
            self._seconds[tokens], self._counts[tokens] = new, count + 1

    def per_token(self) -> float | None:
        """Seconds that one more token in a pass costs; `None` before two widths are known."""
        with self._lock:
            points = [(n, self._seconds[n]) for n, count in self._counts.items() if count >= _ENOUGH]
        if len(points) < 2:
            return None
        mean_n, mean_t = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((n - mean_n) ** 2 for n, _ in points)
        return max(0.0, sum((n - mean_n) * (t - mean_t) for n, t in points) / spread)


def _bin(confidence: float) -> int:
    return min(int(confidence * _BINS), _BINS - 1)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _FRESH * (new - old)


class Schedule:
    """
    Decides, for one call of `generate`, when a rollout ends.

    With `num_assistant_tokens_schedule="constant"` (the default) a round offers `num_proposals`. With `"heuristic"` it
    stops where the chance that the next proposal still counts, times the time a token takes, is less than what the
    proposal costs in the target's pass; and rounds are left undrafted while drafting as a whole does not pay. Chances
    are the draft's own confidences, corrected by how often they came true in this call. In both cases
    `assistant_confidence_threshold` ends a rollout after a proposal that the draft believes in less.

    Only proposals already made and measured time decide, so sampling stays lossless; but as time is never the same
    twice, a seed does not repeat a sampled answer with `"heuristic"`.

    Args:
        generation_config (`GenerationConfig`): read for the two options above.
        num_proposals (`int`): the most that a round may offer.
        target (`PreTrainedModel`): whose passes are measured.
        lockstep (`bool`): whether a proposal counts only where all rows take theirs.
    """

    def __init__(
        self, generation_config: GenerationConfig, num_proposals: int, target: PreTrainedModel, lockstep: bool
    ):
        self.num_proposals, self.lockstep = num_proposals, lockstep
        self.threshold = asked_for(generation_config, "assistant_confidence_threshold")
        self.adapts = asked_for(generation_config, "num_assistant_tokens_schedule") in (
            "heuristic",
            "heuristic_transient",
        )
        self.costs = TargetCosts.of(target)
        self._hits, self._trials = [0.0] * _BINS, [0.0] * _BINS
        self._round = 0
        # Of the last drafted rounds: seconds that drafting took, and tokens that it gained in each row.
        self._cost: float | None = None
        self._gain: float | None = None
        self._started, self._tokens = time.perf_counter(), 0
        # Of the current round.
        self.confidences: list[list[float]] = []
        self._reach: list[float] = []
        self._per_token: float | None = None

    @property
    def watches(self) -> bool:
        """Whether `goes_on` must be asked after each proposal."""
        return self.adapts or self.threshold is not None

    def budget(self, num_rows: int) -> int:
        """How many proposals this round may offer; 0 leaves the draft out of it."""
        self._round += 1
        self.confidences, self._reach = [], [1.0] * num_rows
        self._per_token = self.costs.per_token() if self.adapts else None
        if not self.adapts:
            return self.num_proposals
        if self._per_token is None:
            # Two widths must be known: whole blocks and bare passes take turns.
            return self.num_proposals if self._round % 2 else 0
        if self._cost is None or self._gain is None or self._round < 8 or self._round % _EXPLORE_EVERY == 0:
            return self.num_proposals
        return self.num_proposals if self._gain * num_rows * self._seconds_per_token() > self._cost else 0

    def goes_on(self, logits: torch.Tensor, token_ids: torch.LongTensor) -> bool:
        """
        Whether to make another proposal after `token_ids` `[n]`, chosen by processed `logits` `[n, V]`.
        """
        confidence = (
            logits.gather(-1, token_ids[:, None].to(logits.device))[:, 0].float() - logits.float().logsumexp(-1)
        ).exp()
        confidences = confidence.nan_to_num(0.0).tolist()
        self.confidences.append(confidences)
        if self.threshold is not None and max(confidences) < self.threshold:
            return False
        if self._per_token is None:
            return True
        self._reach = [reach * self._chance(c) for reach, c in zip(self._reach, confidences, strict=True)]
        # The next proposal is about as likely to be taken as this one was.
        chances = [reach * self._chance(c) for reach, c in zip(self._reach, confidences, strict=True)]
        rows = len(chances)
        if self.lockstep:
            expected = rows * float(torch.tensor(chances).prod())
        else:
            expected = sum(chances)
        return expected * self._seconds_per_token() > self._per_token * rows

    def learn(self, verified: Verification, num_proposals: int, draft_seconds: float, verify_seconds: float):
        """
        What came of a round.

        Args:
            verified (`Verification`): of the round.
            num_proposals (`int`): offered to each row.
            draft_seconds, verify_seconds (`float`): time of the two parts.
        """
        rows, tokens = len(verified.num_new), sum(verified.num_new)
        self._tokens += tokens
        if not self.adapts:
            return
        self.costs.add(rows * (num_proposals + 1), verify_seconds)
        if num_proposals == 0:
            return
        cost = draft_seconds + (self._per_token or 0.0) * rows * num_proposals
        self._cost = _blend(self._cost, cost)
        self._gain = _blend(self._gain, tokens / rows - 1)
        for row, (count, rejected) in enumerate(zip(verified.num_new, verified.rejected, strict=True)):
            # What stood, and what fell; what follows was never judged.
            for k, stood in enumerate([True] * (count - 1) + [False] * rejected):
                if k < len(self.confidences):
                    bin_ = _bin(self.confidences[k][row])
                    self._hits[bin_] += stood
                    self._trials[bin_] += 1

    def _chance(self, confidence: float) -> float:
        """How often a proposal of this confidence is taken: the confidence itself, until there is more to go by."""
        bin_ = _bin(confidence)
        return (self._hits[bin_] + 4 * confidence) / (self._trials[bin_] + 4)

    def _seconds_per_token(self) -> float:
        return (time.perf_counter() - self._started) / max(self._tokens, 1)
