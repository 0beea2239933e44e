# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What if the likeliest token is wrong? A tree of proposals in one pass: the target takes the path that it would write.

Verifying several continuations of a text at once is tree attention (SpecInfer, arXiv 2305.09781); that the draft's own
confidence decides which nodes a tree has is from EAGLE-2 (arXiv 2406.16858). Here the head makes it cheap: the hidden
states of a block serve all paths through it, and only the prefix state is a path's own.
"""

import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from .cache import can_have_holes
from .context import vocabulary_size
from .lookup import Continuation
from .pace import masks_by_visibility, takes_any_position
from .schedule import Schedule
from .scorer import Scorer
from .sequences import Proposal

logger = logging.get_logger(__name__)

# Candidates at each position: which nodes a tree has needs no more, and the target has the last word.
_POOL = 256
# Log probabilities of a step. Each is below zero, so that a node always comes after the one that it continues, and none
# so low that the sum of a block's would lose the difference.
_LEAST, _MOST = -20.0, -1e-4
_MASKABLE = ("eager", "sdpa")


class Tree(Proposal):
    """
    Proposals of which each continues the anchor or another one. The anchor is node 0, the proposals are nodes 1 to K,
    in an order in which each comes after the node that it continues.

    Attributes:
        proposal_ids (`torch.LongTensor` of shape `[1, K]`): as of any proposal.
        parents (`torch.LongTensor` of shape `[K]`): the node that each proposal continues.
        paths (`torch.BoolTensor` of shape `[K + 1, K + 1]`): which nodes lead from the anchor to a node, both included.
        depth (`int`): no path holds more proposals; K at most.
    """

    def __init__(
        self,
        proposal_ids: torch.LongTensor,
        parents: torch.LongTensor,
        depth: int,
        finite: torch.Tensor | None = None,
    ):
        super().__init__(proposal_ids, finite=finite)
        num_nodes = proposal_ids.shape[1] + 1
        self.parents, self.depth = parents, depth
        self.paths = torch.eye(num_nodes, dtype=torch.bool, device=parents.device)
        # The node that lies so many steps before each, twice as many each time; the anchor before itself.
        before, steps = torch.cat([parents.new_zeros(1), parents]), 1
        while steps <= depth:
            self.paths = self.paths | self.paths[before]
            before, steps = before[before], 2 * steps


def grow(
    scorer: Scorer,
    hidden: torch.Tensor,
    anchor: torch.LongTensor,
    depth: int,
    size: int,
    schedule: Schedule,
    continuation: Continuation | None = None,
) -> Tree:
    """
    The likeliest proposals of all paths through a block, by the draft's own probabilities.

    Level by level: of all continuations of the nodes kept so far the likeliest are kept, half as many as the tree may
    have, since a tree of one level is rarely the likeliest; of all levels together, and of the text's own continuation
    where there is one, the `size` likeliest.

    Args:
        scorer (`Scorer`): of the two models.
        hidden (`torch.Tensor` of shape `[1, B, H]`): from [`draft_hidden`].
        anchor (`torch.LongTensor` of shape `[1, 1]`): the last committed token.
        depth (`int`): the longest path of the draft's; a block gives B with shifted labels, else B - 1.
        size (`int`): the most proposals.
        schedule (`Schedule`): may leave some of them out.
        continuation (`Continuation`, *optional*): what followed before in the text.
    """
    config, head = scorer.draft.config, scorer.head
    first = 0 if config.shift_label else 1
    # A node comes after all that lead to it.
    hidden = hidden[:, first : first + min(depth, size)]
    depth = hidden.shape[1]
    breadth = size if depth == 1 else math.ceil(size / 2)
    base_logits, pool = scorer.base(hidden, _POOL)
    begun = hidden if head is None else head.begin(hidden)
    device = base_logits.device
    peaks = [base_logits.amax()]

    token_ids, prefix_state = anchor[:, 0], None
    nodes, reached = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(1, device=device)
    levels, num_nodes = [], 1
    for k in range(depth):
        logits, places = base_logits[:, k], None if pool is None else pool[:, k]
        if head is not None:
            prefix_state = head.step(scorer.target.embed(token_ids).to(hidden.device), prefix_state)
            if k >= config.pure_draft_prefix_len:
                rows = len(prefix_state)
                scored = None if places is None else places.to(hidden.device).expand(rows, -1)
                logits = logits + head.correction(begun[:, k].expand(rows, -1), prefix_state, scored).to(logits)
                peaks.append(logits.amax())
        chances = logits.float().log_softmax(-1).nan_to_num(_LEAST).clamp(_LEAST, _MOST)
        best = chances.topk(min(breadth, chances.shape[-1]), dim=-1)
        likeliest = (reached[:, None] + best.values).flatten().topk(min(breadth, len(nodes) * best.values.shape[1]))
        came_from = likeliest.indices // best.values.shape[1]
        chosen = best.indices.expand(len(nodes), -1).flatten()[likeliest.indices]
        token_ids = scorer.ids(chosen if places is None else places[0, chosen]).to(anchor.device)
        if prefix_state is not None:
            prefix_state = prefix_state[came_from.to(prefix_state.device)]
        levels.append(_Nodes(token_ids.to(device), nodes[came_from], likeliest.values))
        reached, nodes = likeliest.values, torch.arange(num_nodes, num_nodes + len(token_ids), device=device)
        num_nodes += len(token_ids)

    size = min(size, num_nodes - 1)
    if continuation is not None:
        levels.append(_as_nodes(continuation, levels))
        depth = max(depth, len(continuation.token_ids))
    token_ids, parents, scores = (torch.cat(of_levels) for of_levels in zip(*levels, strict=True))
    kept = scores.topk(size)
    index = kept.indices[: schedule.size_of(kept.values.exp())]
    numbers = parents.new_zeros(len(parents) + 1)
    numbers[index + 1] = torch.arange(1, len(index) + 1, device=device)
    return Tree(
        token_ids[index][None].to(anchor.device),
        numbers[parents[index]].to(anchor.device),
        min(depth, len(index)),
        torch.isfinite(torch.stack(peaks)).all(),
    )


class _Nodes(NamedTuple):
    """Candidates for a tree: token, number of the node that each continues, and log probability of its whole path."""

    token_ids: torch.LongTensor
    parents: torch.LongTensor
    scores: torch.Tensor


def _as_nodes(continuation: Continuation, levels: list[_Nodes]) -> _Nodes:
    """
    A `continuation` of the text as a path behind `levels` of a draft's candidates.

    What both propose is the draft's node, with the better of the two scores (written into `levels`); the path then
    leaves from there, and its own node can never be chosen.
    """
    device = levels[0].parents.device
    token_ids = continuation.token_ids.to(device)
    scores = continuation.chances.to(device).log().clamp(_LEAST, _MOST).cumsum(0)
    # Of each token: its number among the draft's nodes, else 0. Behind the first level no node continues the anchor.
    shared, last, before = torch.zeros_like(token_ids), 0, 1
    for k, level in enumerate(levels):
        if k < len(shared):
            same = (level.parents == last) & (level.token_ids == token_ids[k])
            levels[k] = level._replace(scores=torch.where(same, level.scores.maximum(scores[k]), level.scores))
            last = torch.where(same, torch.arange(before, before + len(same), device=device), 0).amax()
            shared[k] = last
        before += len(level.token_ids)
    numbers = torch.where(shared > 0, shared, torch.arange(before, before + len(shared), device=device))
    return _Nodes(token_ids, F.pad(numbers[:-1], (1, 0)), scores.masked_fill(shared > 0, -math.inf))


def path_taken(tree: Tree, choices: torch.LongTensor) -> tuple[torch.LongTensor, Proposal]:
    """
    What is left of a tree once the target has read it: the path along its own choices.

    Args:
        tree (`Tree`): K proposals.
        choices (`torch.LongTensor` of shape `[K + 1]`): the target's, after each node.

    Returns:
        The nodes `[depth + 1]` of the path, the anchor first, and as a proposal the tokens along it. Where it ends
        early, the nodes behind its end are any, and the tokens are none of the vocabulary's, which no choice can match.
        The path is found where the tensors are, without waiting for the device.
    """
    stands = choices[tree.parents] == tree.proposal_ids[0]
    stands = torch.cat([stands.new_ones(1), stands])
    taken = (stands | ~tree.paths).all(-1)
    path = taken.to(torch.uint8).argsort(descending=True, stable=True)[: tree.depth + 1]
    token_ids = torch.where(taken[path[1:]], tree.proposal_ids[0, path[1:] - 1], -1)
    return path, Proposal(token_ids[None], finite=tree.finite, seconds=tree.seconds)


def with_tree(inputs: dict[str, Any], tree: Tree, past_length: int, dtype: torch.dtype) -> dict[str, Any]:
    """
    A target's arguments for the anchor alone made into those for it and a tree: a mask
    `[1, 1, K + 1, past_length + K + 1]` that is added to the attention's scores, and each node's position by its depth.
    """
    anchor, position_ids = inputs["input_ids"], inputs.get("position_ids")
    paths = tree.paths.to(anchor.device)
    visible = paths.new_ones(len(paths), past_length)
    if (mask := inputs.get("attention_mask")) is not None:
        visible &= mask[:, :past_length].bool()
    hidden = ~torch.cat([visible, paths], dim=-1)
    added = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)
    # Where it is left to the target, it counts what its cache holds.
    position = past_length if position_ids is None else position_ids
    return {
        **inputs,
        "input_ids": torch.cat([anchor, tree.proposal_ids.to(anchor.device)], dim=-1),
        "attention_mask": added[None, None],
        "position_ids": (paths.sum(-1) - 1)[None] + position,
    }


def keep_path(cache: Cache, path: torch.LongTensor, num_nodes: int):
    """Of the last `num_nodes` entries of a target's cache keep those of `path`, in its order."""
    first = cache.get_seq_length() - num_nodes
    entries = first + path
    for layer in cache.layers:
        if layer.is_initialized:
            index = entries.to(layer.keys.device)
            for states in (layer.keys, layer.values):
                states[:, :, first : first + len(path)] = states[:, :, index]
    cache.crop(-(num_nodes - len(path)))


def takes_trees(target: PreTrainedModel, cache: Cache, model_kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether `target`, with this cache and these arguments, can read a tree; warns once where it cannot."""
    if (
        takes_any_position(target, model_kwargs)
        and can_have_holes(cache)
        and masks_by_visibility(target)
        and _obeys_masks(target, device)
    ):
        return True
    logger.warning_once(
        f"{type(target).__name__} cannot read a tree of proposals here (`use_tree`), so the draft offers one after "
        "another: a tree needs full attention in every layer ('eager' or 'sdpa'), a cache that grows, and one position "
        "for each token."
    )
    return False


# By target: for each of its attentions, whether it looks where a mask says.
_obedience: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()


def _obeys_masks(target: PreTrainedModel, device: torch.device) -> bool:
    """
    Whether masks and positions decide what a token of `target` sees, as asked of the target itself, once: a model may
    take a mask and make its own all the same (ALiBi, code from elsewhere), and would write another text then.
    """
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    known = _obedience.setdefault(target, {})
    if attention not in _MASKABLE or attention in known:
        return known.get(attention, False)
    # Three tokens, and eight that may follow them and must not see one another; the last of these is looked at.
    parents = torch.tensor([0, 1] + [2] * 8, device=device)
    tokens = torch.arange(1, 12, device=device)[None] * (vocabulary_size(target.get_input_embeddings()) // 12)
    tree = Tree(tokens[:, 1:], parents, 3)
    depths = (tree.paths.sum(-1) - 1)[None]

    def last_logits(input_ids, **arguments):
        logits = target(input_ids=input_ids, use_cache=False, return_dict=True, **arguments).logits
        return logits[0, -1].to(torch.float32, copy=True)

    def plainly(places):
        # With a mask, or positions that do not rise would pass for another text's.
        input_ids = tokens[:, places]
        return last_logits(input_ids, attention_mask=torch.ones_like(input_ids), position_ids=depths[:, places])

    try:
        masked = last_logits(**with_tree({"input_ids": tokens[:, :1]}, tree, 0, target.dtype))
        alone, among_others = plainly([0, 1, 2, 10]), plainly(list(range(11)))
    except torch.OutOfMemoryError:
        raise
    # Targets fail at what they do not know as variously as they are made.
    except Exception as error:
        logger.warning_once(f"{type(target).__name__} fails at a mask of four dimensions: {error}")
        return False
    known[attention] = bool((masked - alone).abs().max() <= 0.25 * (among_others - alone).abs().max())
    return known[attention]
