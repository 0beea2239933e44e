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
from .context import ContextCapture, TargetParts
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


class _Decoding:
    """
    One call of `generate`: what is decided so far, and the steps of a round.

    Args:
        draft, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer, use_head,
            model_kwargs: as for [`domino_decoding`].
        parts (`TargetParts`): of the target.
        capture (`ContextCapture`): open on the target layers that the draft reads.
    """

    def __init__(
        self,
        draft,
        target: PreTrainedModel,
        parts: TargetParts,
        capture: ContextCapture,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        use_head: bool,
        model_kwargs: dict[str, Any],
    ):
        self.draft, self.target, self.parts, self.capture = draft, target, parts, capture
        self.generation_config, self.use_head = generation_config, use_head
        self.logits_processor, self.stopping_criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.draft_processors = LogitsProcessorList(p for p in logits_processor if type(p) in _PURE_PROCESSORS)
        self.num_proposals = proposals_per_round(draft.config, generation_config)

        self.input_ids, self.model_kwargs = input_ids, model_kwargs
        self.record = _Record(generation_config)
        self.acceptance_lengths: list[int] = []
        self.stopped = False

    def prefill(self):
        """Read the prompt and commit the target's first token: the first anchor."""
        cache = self.model_kwargs.get(CACHE_NAME)
        # Recurrent layers know only after their first pass whether they can be cropped; all are asked again below.
        recurrent = cache is not None and any(cache.is_linear)
        past_length = 0 if recurrent else _check_cache(cache, self.target).get_seq_length()
        outputs = self.target._prefill(
            self.input_ids, self.generation_config, self.model_kwargs, is_first_iteration=True
        )
        features, position = _first_context(
            self.target, self.capture.take(self.draft.device), self.model_kwargs, past_length
        )
        self.draft_state = DraftState(position)
        self.cache = _check_cache(outputs.get(CACHE_NAME), self.target)
        self._commit(outputs, features, self.input_ids.new_empty(1, 0), is_prefill=True)

    def propose(self) -> torch.LongTensor:
        """
        What the draft offers after the anchor, `[1, K]`: never more than can still be committed, so that no position
        past the limit is touched.
        """
        budget = self.num_proposals
        if self.stopping_criteria.max_length is not None:
            budget = min(budget, self.stopping_criteria.max_length - self.input_ids.shape[1] - 1)
        if budget <= 0:
            return self.input_ids.new_empty(1, 0)
        anchor = self.input_ids[:, -1:]
        hidden = draft_hidden(self.draft, self.parts, self.draft_state, self.features, anchor)
        proposal = greedy_rollout(
            self.draft, self.parts, hidden, anchor, budget, self.input_ids, self.draft_processors, self.use_head
        )
        if not proposal.finite:
            logger.warning_once(
                "The draft's logits are not finite, so its proposals are noise (the output is still the target's). "
                f"Its dtype is {self.draft.dtype}; try another, or check its weights."
            )
        return proposal.proposal_ids

    def verify(self, proposal_ids: torch.LongTensor):
        """One target pass over anchor and proposals; commit what stands before the new anchor."""
        width = proposal_ids.shape[1] + 1
        model_kwargs = dict(self.model_kwargs)
        if width > 1:
            model_kwargs = self.target._update_model_kwargs_for_generation(
                self.outputs, model_kwargs, num_new_tokens=width - 1
            )
        inputs = self.target.prepare_inputs_for_generation(
            torch.cat([self.input_ids, proposal_ids], dim=-1),
            next_sequence_length=width,
            is_first_iteration=False,
            **model_kwargs,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        self.capture.clear()
        outputs = self.target(**inputs, return_dict=True)
        self._commit(outputs, self.capture.take(self.draft.device), proposal_ids, is_prefill=False)

    def _commit(self, outputs, features: torch.Tensor, proposal_ids: torch.LongTensor, is_prefill: bool):
        """Keep of a target pass what the rule of verification lets stand, in ids, cache, context and record."""
        width = proposal_ids.shape[1] + 1
        logits = outputs.logits[:, -width:].to(device=self.input_ids.device, dtype=torch.float32, copy=True)
        verified = verify_greedy(
            self.input_ids, proposal_ids, logits, self.logits_processor, self.stopping_criteria, self.record.scores
        )
        num_new = verified.num_new
        if not is_prefill:
            self.cache.crop(-(width - num_new))
            features = features[:, :num_new]
            self.acceptance_lengths.append(num_new)
        self.record.add(outputs, self.cache, logits, verified.scores, num_new, is_prefill)
        self.model_kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, num_new_tokens=num_new
        )
        self.outputs, self.features = outputs, features
        self.input_ids, self.stopped = verified.input_ids, verified.stopped
        if self.streamer is not None:
            self.streamer.put(self.input_ids[:, -num_new:].cpu())

    def result(self) -> DominoGenerateOutput | torch.LongTensor:
        """What `generate` returns."""
        if not self.generation_config.return_dict_in_generate:
            return self.input_ids
        return make_output(
            cache=self.cache,
            sequences=self.input_ids,
            scores=self.record.scores,
            logits=self.record.logits,
            attentions=self.record.attentions,
            hidden_states=self.record.hidden_states,
            acceptance_lengths=torch.tensor(self.acceptance_lengths, dtype=torch.long),
        )


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
    with parts.capture(draft.config.target_layer_ids) as capture:
        decoding = _Decoding(
            draft,
            target,
            parts,
            capture,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            use_head,
            model_kwargs,
        )
        decoding.prefill()
        # Only now: recording through the prefill would keep what sliding layers drop.
        with recording_past(decoding.cache), target._optimize_model_for_decode():
            while not decoding.stopped:
                decoding.verify(decoding.propose())
    if streamer is not None:
        streamer.end()
    return decoding.result()
