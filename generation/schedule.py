# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How many proposals is a round worth? As many as were asked for, or as many as pay for their own verification."""

import bisect
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel

from .compat import asked_for
from .verification import Verification

# A round in this many drafts even where drafting has not paid, to notice when it would; the first of a call does.
_EXPLORE_EVERY = 32
# Passes of a width before its time is believed, and how many of the last ones it is taken from.
_ENOUGH, _RECENT = 3, 9
# Drafted rounds before it is believed that they do not pay, and how many of the last ones are looked at.
_SEEN_ENOUGH, _JUDGED = 16, 32
# Proposals of a bin of confidences that are remembered; older ones count for half, and less.
_BINS, _REMEMBERED = 10, 400


class Experience:
    """
    What is known of a draft with a target on this machine: what passes cost, and how often proposals are taken.

    Measured while generating with a schedule, and shared by all calls and threads that use the pair.
    """

    _known: ClassVar["WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary]"] = WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self):
        self._seconds: dict[int, deque[float]] = {}
        # Medians of these, where there are enough.
        self._typical: dict[int, float] = {}
        self._hits, self._trials = [0.0] * _BINS, [0.0] * _BINS
        # Of trees: proposals taken, and how many the draft expected.
        self._accepted, self._expected = 0.0, 0.0
        # Of the last drafted rounds: seconds of drafting, by rows of the batch; proposals and tokens gained, of a row.
        self._drafting: dict[int, deque[float]] = {}
        self._drafted: deque[tuple[int, float]] = deque(maxlen=_JUDGED)

    @classmethod
    def of(cls, target: PreTrainedModel, draft: PreTrainedModel) -> "Experience":
        with cls._lock:
            return cls._known.setdefault(target, WeakKeyDictionary()).setdefault(draft, cls())

    def add_pass(self, tokens: int, seconds: float):
        """A target pass over `tokens` took `seconds`."""
        with self._lock:
            recent = self._seconds.setdefault(tokens, deque(maxlen=_RECENT))
            recent.append(seconds)
            if len(recent) >= _ENOUGH:
                self._typical[tokens] = statistics.median(recent)

    def pass_seconds(self, widths: Sequence[int], hopeful: bool = False) -> list[float] | None:
        """
        Seconds of target passes over so many tokens; `None` before two widths are known.

        A width that is not known lies on a line through its neighbours, since time may go up and down with the width:
        a matrix product can take longer for 3 rows than for 5. `hopeful`: it costs no more than the cheaper neighbour,
        so that all widths are tried that may be worth it.
        """
        with self._lock:
            known = sorted(self._typical.items())
        return None if len(known) < 2 else [_between(known, width, hopeful) for width in widths]

    def add_proposals(self, confidences: list[float], num_accepted: int, rejected: bool):
        """Of proposals of these confidences the first `num_accepted` were taken, and the next fell if `rejected`."""
        with self._lock:
            # What follows the first that fell was never judged.
            for k, confidence in enumerate(confidences[: num_accepted + rejected]):
                bin_ = _bin(confidence)
                self._hits[bin_] += k < num_accepted
                self._trials[bin_] += 1
                if self._trials[bin_] > _REMEMBERED:
                    self._hits[bin_] /= 2
                    self._trials[bin_] /= 2

    def chance(self, confidence: float) -> float:
        """How often a proposal of this confidence is taken: the confidence itself, until there is more to go by."""
        bin_ = _bin(confidence)
        return (self._hits[bin_] + 4 * confidence) / (self._trials[bin_] + 4)

    def usual_chance(self) -> float:
        """How often a proposal is taken whose confidence is not known yet."""
        return (sum(self._hits) + 1) / (sum(self._trials) + 2)

    def add_tree(self, expected: float, num_accepted: int):
        """Of a tree `num_accepted` proposals were taken, where the draft's confidences add up to `expected`."""
        with self._lock:
            self._accepted, self._expected = self._accepted + num_accepted, self._expected + expected
            if self._expected > _REMEMBERED:
                self._accepted, self._expected = self._accepted / 2, self._expected / 2

    def trust(self) -> float:
        """What the draft's confidences in the proposals of trees are to be multiplied by."""
        return (self._accepted + 4) / (self._expected + 4)

    def add_drafted(self, num_rows: int, seconds: float, num_proposals: int, gain: float):
        """Drafting took `seconds` of a round, and its `num_proposals` gained `gain` tokens in each row."""
        with self._lock:
            self._drafting.setdefault(num_rows, deque(maxlen=_RECENT)).append(seconds)
            self._drafted.append((num_proposals, gain))

    def pays(self, num_rows: int, seconds_per_token: float, passes: Sequence[float]) -> bool:
        """
        Whether drafted rounds gained more time than they took, the last times; assumed at first. `passes`: seconds of
        the pass with no proposal, one, and so on.
        """
        with self._lock:
            if len(self._drafted) < _SEEN_ENOUGH:
                return True
            nearest = min(self._drafting, key=lambda rows: abs(rows - num_rows))
            # Not their mean: the first round of a process may take seconds.
            drafting = statistics.median(self._drafting[nearest])
            wider = statistics.fmean(passes[min(count, len(passes) - 1)] - passes[0] for count, _ in self._drafted)
            gain = statistics.fmean(gain for _, gain in self._drafted)
            return gain * num_rows * seconds_per_token > drafting + wider


def _between(known: list[tuple[int, float]], width: int, hopeful: bool) -> float:
    """Seconds at `width`, on the line through the nearest two of `known` widths, sorted, or as the lower of the two."""
    after = min(max(bisect.bisect_left(known, (width, 0.0)), 1), len(known) - 1)
    (low, low_seconds), (high, high_seconds) = known[after - 1], known[after]
    if hopeful and low < width != high:
        return high_seconds if width > high else min(low_seconds, high_seconds)
    seconds = low_seconds + (width - low) * (high_seconds - low_seconds) / (high - low)
    # Beyond what is known, wider is never quicker, nor narrower slower.
    return max(seconds, high_seconds) if width > high else min(seconds, low_seconds) if width < low else seconds


def _bin(confidence: float) -> int:
    return min(int(confidence * _BINS), _BINS - 1)


class Schedule:
    """
    Decides, for one call of `generate`, when a rollout ends.

    With `num_assistant_tokens_schedule="constant"` (the default) a round offers `num_proposals`. With `"heuristic"` it
    stops before a proposal if neither it nor those that may follow bring more, by their chances to count and the time
    that a token takes, than they cost in the target's pass; and rounds are left undrafted while drafting as a whole
    does not pay. Chances are the draft's own confidences, corrected by how often they came true. In both cases
    `assistant_confidence_threshold` ends a rollout after a proposal that the draft believes in less.

    A proposal is never judged by which token was drawn for it, only by the distribution that it is drawn from and by
    measured time: else sampling would not be lossless. As time is never the same twice, a seed does not repeat a
    sampled answer with `"heuristic"`.

    Args:
        generation_config (`GenerationConfig`): read for the two options above.
        num_proposals (`int`): the most that may follow one another in a round.
        experience (`Experience`): with the pair of models.
        lockstep (`bool`): whether a proposal counts only where all rows take theirs.
        tree_size (`int`): the most proposals of a round where they form a tree; 0 where they follow one another.
    """

    def __init__(
        self,
        generation_config: GenerationConfig,
        num_proposals: int,
        experience: Experience,
        lockstep: bool,
        tree_size: int = 0,
    ):
        self.num_proposals, self.experience, self.lockstep = num_proposals, experience, lockstep
        self._in_tree, self._widest = tree_size > 0, tree_size or num_proposals
        self.threshold = asked_for(generation_config, "assistant_confidence_threshold")
        self.adapts = asked_for(generation_config, "num_assistant_tokens_schedule") in (
            "heuristic",
            "heuristic_transient",
        )
        self._round = 0
        # Whether the last round was drafted and gained more time than it took.
        self._won = False
        self._started, self._tokens = time.perf_counter(), 0
        # Of the current round: seconds that a token is worth, and of the pass with no proposal, one, and so on, once
        # they are known.
        self._worth = 0.0
        self._costs: list[float] | None = None
        self._confidences: list[list[float]] = []
        self._reach: list[float] = []
        self._expected = 0.0

    @property
    def watches(self) -> bool:
        """Whether `is_worth` and `goes_on` must be asked."""
        return self.adapts or self.threshold is not None

    @property
    def _explores(self) -> bool:
        return self._round % _EXPLORE_EVERY == 1

    def budget(self, num_rows: int) -> int:
        """How many proposals may follow one another in this round; 0 leaves the draft out of it."""
        self._round += 1
        self._confidences, self._reach, self._expected = [], [1.0] * num_rows, 0.0
        if not self.adapts:
            return self.num_proposals
        widths = [num_rows * (n + 1) for n in range(self._widest + 1)]
        self._costs = self.experience.pass_seconds(widths, hopeful=self._in_tree)
        if self._costs is None:
            # Two widths must be known: wider and bare passes take turns. For many rows a little wider is enough.
            return max(1, self.num_proposals // num_rows) if self._round % 2 else 0
        # A token that is gained spares the time of one at the present rate, but never more than plain decoding takes.
        self._worth = self._costs[0] / num_rows
        if self._tokens:
            self._worth = min(self._worth, (time.perf_counter() - self._started) / self._tokens)
        # Where a round wins against what is known, the text may have turned: the next one drafts as well.
        if self._explores or self._won or self.experience.pays(num_rows, self._worth, self._costs):
            return self.num_proposals
        return 0

    def is_worth(self, logits: torch.Tensor) -> bool:
        """Whether to offer a proposal chosen by processed `logits` `[n, V]`."""
        if not self.adapts:
            return True
        highest = logits.float().amax(-1)
        confidences = (highest - logits.float().logsumexp(-1)).exp().nan_to_num(0.0).tolist()
        self._confidences.append(confidences)
        if self._costs is None:
            return True
        self._reach = [reach * self.experience.chance(c) for reach, c in zip(self._reach, confidences, strict=True)]
        rows, first = len(confidences), len(self._confidences)
        usual = self.experience.usual_chance()
        expected = rows * math.prod(self._reach) if self.lockstep else sum(self._reach)
        gain = 0.0
        for cost in self._costs[first:]:
            gain += expected
            if gain * self._worth > cost - self._costs[first - 1]:
                return True
            expected *= usual**rows if self.lockstep else usual
        return False

    def size_of(self, chances: torch.Tensor) -> int:
        """How many proposals of a tree to offer, of which the draft gives these `chances` `[K]`, from high to low."""
        if not self.adapts:
            return len(chances)
        trust, size, gain, best = self.experience.trust(), 0, 0.0, 0.0
        confidences = chances.tolist()
        if self._costs is None or self._explores:
            size = len(confidences)
        else:
            for number, confidence in enumerate(confidences, start=1):
                gain += confidence * trust
                saved = gain * self._worth - (self._costs[number] - self._costs[0])
                if saved > best:
                    size, best = number, saved
        self._expected = sum(confidences[:size])
        return size

    def goes_on(self, logits: torch.Tensor, token_ids: torch.LongTensor) -> bool:
        """Whether to make another proposal after `token_ids` `[n]`, chosen by processed `logits` `[n, V]`."""
        if self.threshold is None:
            return True
        logits = logits.float()
        chosen = logits.gather(-1, token_ids[:, None].to(logits.device))[:, 0]
        return bool(((chosen - logits.logsumexp(-1)).exp() >= self.threshold).any())

    def learn(self, verified: Verification, num_proposals: int, draft_seconds: float, verify_seconds: float):
        """
        What came of a round.

        Args:
            verified (`Verification`): of the round.
            num_proposals (`int`): offered to each row.
            draft_seconds, verify_seconds (`float`): time of the two parts; no time for the draft where it was left out.
        """
        rows, tokens = len(verified.num_new), sum(verified.num_new)
        self._tokens += tokens
        if not self.adapts:
            return
        self.experience.add_pass(rows * (num_proposals + 1), verify_seconds)
        self._won = False
        if draft_seconds == 0:
            return
        for row, (count, rejected) in enumerate(zip(verified.num_new, verified.rejected, strict=True)):
            confidences = [of_rows[row] for of_rows in self._confidences[:num_proposals]]
            self.experience.add_proposals(confidences, count - 1, rejected)
        if self._expected:
            self.experience.add_tree(self._expected, tokens - 1)
        self.experience.add_drafted(rows, draft_seconds, num_proposals, tokens / rows - 1)
        if self._costs is not None:
            took = draft_seconds + self._costs[num_proposals] - self._costs[0]
            self._won = (tokens - rows) * self._worth > took
