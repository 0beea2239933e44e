# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Which processors and criteria may be called out of plain decoding's order? What we know reads nothing but its
arguments; all else is called exactly as plain decoding would."""

import copy
from collections.abc import Iterable

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

# They read nothing but the tokens and logits of one row at a time: any row, any number of calls, same result.
_ROW_WISE = {
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",
    )
    if hasattr(logits_process, name)
}
# They read nothing but the logits, and none waits for a GPU: one call serves any rows at any places in their texts.
_OF_LOGITS = {
    logits_process.EpsilonLogitsWarper,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
}
# These know a row by its place in the batch, so they need the whole batch at one length, but count no calls.
_BATCH_WISE = {
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
}
_ROW_WISE_CRITERIA = {
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
}


def draft_processors(logits_processor: LogitsProcessorList) -> LogitsProcessorList:
    """
    The processors that also shape proposals, which only raises acceptance. Any other, a function of the user's for
    `prefix_allowed_tokens_fn` too, might count its calls or know only what can follow the target's own tokens, and
    must see the calls of plain decoding only.
    """
    return LogitsProcessorList(p for p in logits_processor if type(p) in _ROW_WISE | _BATCH_WISE)


def are_row_wise(logits_processor: LogitsProcessorList, criteria: StoppingCriteriaList, pads: bool) -> bool:
    """
    Whether rows of different lengths may be processed and stopped one by one. Where ended rows cannot be padded
    (`pads` false), they may differ in length only on the way to a common limit.
    """
    allowed = _ROW_WISE_CRITERIA if pads else {stopping_criteria.MaxLengthCriteria}
    return all(type(p) in _ROW_WISE for p in logits_processor) and all(type(c) in allowed for c in criteria)


def read_logits_alone(logits_processor: LogitsProcessorList) -> bool:
    """Whether all of them read logits and nothing else, so that [`warp`] may call them."""
    return all(type(processor) in _OF_LOGITS for processor in logits_processor)


def warp(logits_processor: Iterable[LogitsProcessor], logits: torch.Tensor) -> torch.Tensor:
    """Processed scores of logits `[m, V]`, of any rows at any places in their texts."""
    no_text = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    for processor in logits_processor:
        logits = processor(no_text, logits)
    return logits


def process(
    logits_processor: LogitsProcessorList, rows: list[int], input_ids: torch.LongTensor, scores: torch.Tensor
) -> torch.Tensor:
    """
    Processed scores `[g, V]` of some `rows` of the batch; of all of them, where a processor is not row-wise.

    Args:
        rows (`list[int]`): which rows of the batch these are.
        input_ids (`torch.LongTensor` of shape `[g, S]`), scores (`torch.FloatTensor` of shape `[g, V]`): theirs.
    """
    if not all(type(processor) in _ROW_WISE for processor in logits_processor):
        return logits_processor(input_ids, scores)
    # Called directly: a list of transformers looks up each one's arguments at every call.
    for processor in logits_processor:
        # Later versions of transformers let this one skip each row's padding: one number for each row of the batch.
        skipped = getattr(processor, "prompt_ignore_length", None)
        if isinstance(skipped, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = skipped[torch.tensor(rows, device=skipped.device)]
        scores = processor(input_ids, scores)
    return scores
