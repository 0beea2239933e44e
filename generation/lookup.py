# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What followed the last time? Where a text repeats itself, its own tokens are proposals that cost next to nothing.

Prompt lookup as in transformers (`prompt_lookup_num_tokens`), as a second opinion beside the draft's: with the chance
of each token to be right, so that both can be compared.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

# How often the token after an n-gram is the one that followed it before, for n = 0, 1, ... and this long or longer. As
# found in answers of the embedded draft's target; each text then counts for itself, these for as many lookups.
_USUAL, _LOOKUPS = (0.0, 0.25, 0.5, 0.65, 0.7, 0.8, 0.9), 20
_LONGEST = len(_USUAL) - 1


@dataclass
class Continuation:
    """
    Tokens that followed before, where the text was as it is now.

    Attributes:
        token_ids (`torch.LongTensor` of shape `[K]`): on the text's device.
        chances (`torch.FloatTensor` of shape `[K]`): of each to be right, if those before it are.
    """

    token_ids: torch.LongTensor
    chances: torch.FloatTensor


class PromptLookup:
    """
    Proposes what followed the last tokens of a text before, and learns from that text how far to be believed.

    All of it happens where the text is, without waiting for the device.

    Args:
        device (`torch.device`): of the text.
    """

    def __init__(self, device: torch.device):
        # Counts, so that no default dtype may round them.
        self._tries = torch.full((_LONGEST + 1,), _LOOKUPS, dtype=torch.float32, device=device)
        self._hits = self._tries * torch.tensor(_USUAL, dtype=torch.float32, device=device)
        # The last lookup: the length of the text, what was proposed, and after how many tokens in common each of it.
        self._length, self._proposed, self._shared = 0, torch.empty(0, dtype=torch.long, device=device), None

    def continuation(self, text: torch.LongTensor, num_tokens: int) -> Continuation:
        """
        What followed the longest n-gram of up to six tokens that `text` ends with, where it last was.

        Args:
            text (`torch.LongTensor` of shape `[L]`): all of it so far; two tokens at least. Grows from call to call.
            num_tokens (`int`): how many to propose. Where the text has fewer since, it is taken to go on in circles.
        """
        self._learn(text)
        length = len(text)
        # The six tokens that end at each place. Those missing before the start match none: they are earlier here.
        endings = F.pad(text, (_LONGEST - 1, 0), value=-1).unfold(0, _LONGEST, 1)
        in_common = (endings[:-1] == endings[-1]).flip(-1).cumprod(-1).sum(-1)
        place = (in_common * length + torch.arange(length - 1, device=text.device)).argmax()
        ahead = torch.arange(num_tokens, device=text.device)
        self._length = length
        self._proposed = text[place + 1 + ahead % (length - 1 - place)]
        self._shared = (in_common.amax() + ahead).clamp(max=_LONGEST)
        return Continuation(self._proposed, (self._hits / self._tries)[self._shared])

    def _learn(self, text: torch.LongTensor):
        """Hold what was proposed last against what came, up to the first token that was wrong."""
        came = text[self._length : self._length + len(self._proposed)]
        if self._shared is None or len(came) == 0:
            return
        shared, right = self._shared[: len(came)], (self._proposed[: len(came)] == came).cumprod(0)
        judged = F.pad(right[:-1], (1, 0), value=1)
        self._tries.index_add_(0, shared, judged.to(self._tries))
        self._hits.index_add_(0, shared, right.to(self._hits))
