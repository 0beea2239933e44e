# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a block become output? Rounds of propose, verify, commit; each writes only what is final.

The loop is ours and not the host's: the host's takes the draft's word on fewer things than a user may ask, and its
handling of blocks has differed between versions. It is entered with everything that `generate` has prepared.
"""

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import logits_process
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .compat import (
    CACHE_NAME,
    DominoGenerateOutput,
    default_num_assistant_tokens,
    layer_names,
    make_output,
    recording_past,
)
from .context import TargetParts
from .rollout import DraftState, draft_hidden, greedy_rollout
from .verification import verify_greedy

logger = logging.get_logger(__name__)

# Processors that depend on nothing but the tokens and logits they are given. These also shape the proposals, which
# only raises acceptance; any other might count its calls, and must see those of plain decoding only.
_PURE_PROCESSORS = {
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
}


class _Record:
    """What `return_dict_in_generate` asks for, one entry per new token, as plain `generate` gives it."""

    def __init__(self, config: GenerationConfig):
        wanted = config.return_dict_in_generate
        self.scores: tuple | None = () if wanted and config.output_scores else None
        self.logits: tuple | None = () if wanted and config.output_logits else None
        self.hidden_states: tuple | None = () if wanted and config.output_hidden_states else None
        self.attentions: tuple | None = () if wanted and config.output_attentions else None

    def add(
        self,
        outputs: Any,
        cache: Cache,
        logits: torch.Tensor,
        scores: list[torch.Tensor],
        num_new: int,
        is_prefill: bool,
    ):
        """
        Append one target pass.

        Args:
            outputs: of the target; states and attentions over the prompt, or over anchor and proposals.
            cache: of the target; knows which layers slide.
            logits (`torch.Tensor` of shape `[1, K + 1, V]`): unprocessed.
            scores (`list` of `[1, V]`): processed, for each new token.
            num_new (`int`): how many tokens of the pass were committed.
            is_prefill (`bool`): the prefill's states stay whole, those of a round are split by token.
        """
        if self.scores is not None:
            self.scores += tuple(scores)
        if self.logits is not None:
            self.logits += tuple(logits[:, k] for k in range(num_new))
        if self.hidden_states is not None:
            states = outputs.hidden_states
            self.hidden_states += (
                (states,) if is_prefill else tuple(tuple(s[:, k : k + 1] for s in states) for k in range(num_new))
            )
        if self.attentions is not None:
            maps = outputs.attentions
            windows = [layer.sliding_window if layer.is_sliding else None for layer in cache.layers]
            self.attentions += (
                (maps,)
                if is_prefill
                else tuple(
                    tuple(_row(a, k, window) for a, window in zip(maps, windows, strict=True)) for k in range(num_new)
                )
            )


def _row(attention: torch.Tensor, k: int, window: int | None) -> torch.Tensor:
    """What token k of a round saw: `[1, heads, 1, keys]`, without the proposals after it and the keys out of reach."""
    stop = attention.shape[-1] - (attention.shape[-2] - 1 - k)
    return attention[:, :, k : k + 1, 0 if window is None else max(0, stop - window) : stop]


def check_supported(generation_config: GenerationConfig, batch_size: int):
    """
    Refuse, before any compute, what this loop cannot honour.

    Raises:
        ValueError: naming the option, its value and what to do instead.
    """
    config = generation_config
    refusals = (
        (config.do_sample, "do_sample=True", "pass do_sample=False"),
        ((config.num_beams or 1) > 1, f"num_beams={config.num_beams}", "pass num_beams=1"),
        (
            (config.num_return_sequences or 1) > 1,
            f"num_return_sequences={config.num_return_sequences}",
            "greedy decoding has one answer, ask for one",
        ),
        (batch_size > 1, f"a batch of {batch_size} sequences", "generate them one after another"),
        (
            config.use_cache is False,
            "use_cache=False",
            "leave use_cache on: rejected tokens are cropped from the cache",
        ),
        (
            config.cache_implementation is not None and config.cache_implementation != "dynamic",
            f"cache_implementation={config.cache_implementation!r}",
            "leave it unset: rejected tokens are cropped from a dynamic cache",
        ),
    )
    for refused, what, remedy in refusals:
        if refused:
            raise ValueError(f"Generation with a Domino draft does not support {what}: {remedy}, or drop the draft.")


def proposals_per_round(config: Any, generation_config: GenerationConfig) -> int:
    """
    How many tokens a round offers: `block_size - 1`, as the public engines do, unless the call says otherwise.

    `num_assistant_tokens` bounds it. A draft with shifted labels has one proposal more to give, which a call gets by
    asking for `block_size` of them. `generate` fills the option in where a user left it out, so its default counts as
    left out.
    """
    asked = generation_config.num_assistant_tokens
    if asked is None or asked == default_num_assistant_tokens():
        return config.block_size - 1
    return max(0, min(asked, config.block_size - (0 if config.shift_label else 1)))


def _check_cache(cache: Cache | None, target: PreTrainedModel) -> Cache:
    if cache is None:
        raise ValueError(
            f"{type(target).__name__} keeps no cache that can be cropped back after a rejected proposal, which a "
            "Domino draft needs: generate without the draft."
        )
    if not cache.is_croppable:
        raise ValueError(
            f"The cache of {type(target).__name__} has layers that cannot forget rejected proposals: "
            f"{layer_names(cache)}. Generate without the draft."
        )
    return cache


def _first_context(target: PreTrainedModel, features: torch.Tensor, model_kwargs: dict[str, Any], past_length: int):
    """Drop padding from the prompt's features; returns them and the position of the first, counting real tokens."""
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        return features, past_length
    real = mask[0].bool()
    length = features.shape[1]
    return features[:, real[-length:].to(features.device)], int(real[:-length].sum())


@torch.no_grad()
def domino_decoding(
    draft,
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    use_head: bool = True,
    **model_kwargs,
) -> DominoGenerateOutput | torch.LongTensor:
    """
    Greedy decoding of one sequence, token for token what the target alone would give.

    Args:
        draft (`DominoDraftModel`): proposes.
        target (`PreTrainedModel`): decides.
        input_ids (`torch.LongTensor` of shape `[1, S]`): the prompt.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as prepared by `generate`.
            `generation_config.num_assistant_tokens` bounds the proposals of a round (default `block_size - 1`).
        use_head (`bool`): `False` proposes from the base logits alone (DFlash), for comparison.

    Returns:
        Token ids `[1, S + new]`, or [`DominoGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        ValueError: before any compute, when an option, the cache or the pair of models is not supported.
    """
    check_supported(generation_config, input_ids.shape[0])
    parts = TargetParts(target)
    draft.check_target(target)
    cache = model_kwargs.get(CACHE_NAME)
    # Recurrent layers know only after their first pass whether they can be cropped; all are asked again below.
    past_length = 0 if cache is not None and any(cache.is_linear) else _check_cache(cache, target).get_seq_length()

    draft_processors = LogitsProcessorList(p for p in logits_processor if type(p) in _PURE_PROCESSORS)
    num_proposals = proposals_per_round(draft.config, generation_config)
    record = _Record(generation_config)
    acceptance_lengths: list[int] = []

    with parts.capture(draft.config.target_layer_ids) as capture:
        outputs = target._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
        features, position = _first_context(target, capture.take(draft.device), model_kwargs, past_length)
        cache = _check_cache(outputs.get(CACHE_NAME), target)
        state = DraftState(position)

        no_proposal = input_ids.new_empty(1, 0)
        logits = outputs.logits[:, -1:].to(device=input_ids.device, dtype=torch.float32, copy=True)
        verified = verify_greedy(input_ids, no_proposal, logits, logits_processor, stopping_criteria, record.scores)
        record.add(outputs, cache, logits, verified.scores, 1, is_prefill=True)
        input_ids = verified.input_ids
        model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=1)
        if streamer is not None:
            streamer.put(input_ids[:, -1:].cpu())

        # Only now: recording through the prefill would keep what sliding layers drop.
        with recording_past(cache), target._optimize_model_for_decode():
            while not verified.stopped:
                # Propose: never more than can still be committed, so that no position past the limit is touched.
                anchor = input_ids[:, -1:]
                budget = num_proposals
                if stopping_criteria.max_length is not None:
                    budget = min(budget, stopping_criteria.max_length - input_ids.shape[1] - 1)
                proposal_ids = no_proposal
                if budget > 0:
                    hidden = draft_hidden(draft, parts, state, features, anchor)
                    proposal = greedy_rollout(
                        draft, parts, hidden, anchor, budget, input_ids, draft_processors, use_head
                    )
                    proposal_ids = proposal.proposal_ids
                    if not proposal.finite:
                        logger.warning_once(
                            "The draft's logits are not finite, so its proposals are noise (the output is still the "
                            f"target's). Its dtype is {draft.dtype}; try another, or check its weights."
                        )

                # Verify: one target pass over anchor and proposals.
                candidate_ids = torch.cat([input_ids, proposal_ids], dim=-1)
                width = proposal_ids.shape[1] + 1
                candidate_kwargs = dict(model_kwargs)
                if width > 1:
                    candidate_kwargs = target._update_model_kwargs_for_generation(
                        outputs, candidate_kwargs, num_new_tokens=width - 1
                    )
                inputs = target.prepare_inputs_for_generation(
                    candidate_ids, next_sequence_length=width, is_first_iteration=False, **candidate_kwargs
                )
                if "logits_to_keep" in inputs:
                    inputs["logits_to_keep"] = width
                capture.clear()
                outputs = target(**inputs, return_dict=True)
                features = capture.take(draft.device)
                logits = outputs.logits[:, -width:].to(device=input_ids.device, dtype=torch.float32, copy=True)
                verified = verify_greedy(
                    input_ids, proposal_ids, logits, logits_processor, stopping_criteria, record.scores
                )

                # Commit: of the pass stays what stands before the new anchor, in the cache and as context.
                kept = verified.num_new
                outputs[CACHE_NAME].crop(-(width - kept))
                features = features[:, :kept]
                record.add(outputs, cache, logits, verified.scores, kept, is_prefill=False)
                input_ids = verified.input_ids
                model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=kept)
                acceptance_lengths.append(kept)
                if streamer is not None:
                    streamer.put(input_ids[:, -kept:].cpu())

    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return input_ids
    return make_output(
        cache=outputs[CACHE_NAME],
        sequences=input_ids,
        scores=record.scores,
        logits=record.logits,
        attentions=record.attentions,
        hidden_states=record.hidden_states,
        acceptance_lengths=torch.tensor(acceptance_lengths, dtype=torch.long),
    )
