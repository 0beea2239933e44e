# Made from the folder `generation/` of the package domino_spec. Edit there, not here.


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What differs between the supported versions of transformers (5.17 to 5.24), in one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

# Up to 5.23 models take and return their cache as `past_key_values`, from 5.24 on as `cache`.
CACHE_NAME = "cache" if "cache" in {f.name for f in fields(GenerateDecoderOnlyOutput)} else "past_key_values"


def layer_names(cache: Cache) -> list[str]:
    """Class names of the layers of `cache` that cannot be cropped."""
    return sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})


@contextmanager
def recording_past(cache: Cache) -> Iterator[None]:
    """
    Let `cache` be cropped, also where it slides, and leave it as plain decoding would: a user may go on with it, and
    layers that still record would keep, or trip over, what plain decoding drops.
    """
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer in cache.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False


@dataclass
class DominoGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns with `return_dict_in_generate=True`: transformers' own output, and

    Attributes:
        acceptance_lengths (`torch.LongTensor` of shape `[rounds]`): tokens committed by each round (accepted
            proposals and the bonus token; fewer where a stop cut the round). The first token of all comes from the
            prefill and is not counted, so that the sum is the number of new tokens less one.
    """

    acceptance_lengths: torch.LongTensor | None = None


def default_num_assistant_tokens() -> int | None:
    """The `num_assistant_tokens` that `generate` fills in when neither call nor config names one."""
    return GenerationConfig._get_default_generation_params().get("num_assistant_tokens")


def make_output(cache: Cache, **values: Any) -> DominoGenerateOutput:
    """The output with `cache` under the name that this transformers uses."""
    return DominoGenerateOutput(**values, **{CACHE_NAME: cache})


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The target's side: what a draft borrows from it (embedding, output head) and reads in it (context features)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class ContextCapture:
    """
    Raw outputs of chosen target layers, as the target reads.

    Filled by forward hooks, so no other layer's states are kept. Hooks sit on the shared target; a capture listens
    only to the thread that opened it, so several threads may generate with one target.
    """

    def __init__(self, layer_ids: list[int]):
        self.layer_ids = layer_ids
        self._outputs: dict[int, list[torch.Tensor]] = {layer_id: [] for layer_id in layer_ids}
        self._thread = threading.get_ident()

    def hook(self, layer_id: int):
        def keep(module, args, output):
            if threading.get_ident() == self._thread:
                # Some decoder layers return a tuple, hidden states first.
                self._outputs[layer_id].append(output[0] if isinstance(output, tuple) else output)

        return keep

    def clear(self):
        """Forget what was read: a processor of the user's may run the target too, and its passes are not ours."""
        for passes in self._outputs.values():
            passes.clear()

    def take(self, device: torch.device) -> torch.Tensor:
        """
        Context features of what the target has read since the last `clear` or `take` (several passes when the prompt
        is read in chunks): `[N, L, T * H]`, layers concatenated on the last dimension, on `device`. They are then
        forgotten, so that nothing large stays alive.
        """
        states = [torch.cat(self._outputs[i], dim=1).to(device) for i in self.layer_ids]
        self.clear()
        return torch.cat(states, dim=-1)


class TargetParts:
    """
    The frozen parts of a target that a draft needs. Holds references only; nothing of the target is changed.

    Args:
        target (`PreTrainedModel`): any decoder-only causal LM of transformers.

    Raises:
        ValueError: when the target has no input embedding, no output head or no list of decoder layers.
    """

    def __init__(self, target: PreTrainedModel):
        self.config = target.config.get_text_config(decoder=True)
        self.embedding = target.get_input_embeddings()
        self.output_head = target.get_output_embeddings()
        if self.embedding is None or self.output_head is None:
            missing = "input embedding" if self.embedding is None else "output head"
            raise ValueError(
                f"{type(target).__name__} has no {missing}, which a Domino draft borrows: pass a causal LM "
                "(AutoModelForCausalLM), not a bare backbone."
            )
        self.layers = decoder_layers(target)

    def embed(self, token_ids: torch.LongTensor) -> torch.Tensor:
        """Target embeddings `[..., H]` of `token_ids` `[...]`, as the target's first layer receives them."""
        embeds = self.embedding(token_ids)
        # Most targets that scale do so inside their embedding module and have done it by now; these do in `forward`.
        if (scale := getattr(self.config, "embedding_multiplier", None)) is not None:
            embeds = embeds * scale
        if getattr(self.config, "mup_enabled", False):
            embeds = embeds * self.config.hidden_size**0.5
        return embeds

    def logits(self, hidden: torch.Tensor, token_ids: torch.LongTensor | None = None) -> torch.Tensor:
        """
        Base logits: the target's output head, with the target's own scaling and capping.

        Args:
            hidden (`torch.Tensor` of shape `[..., H]`): draft hidden states; cast to the head's dtype and device.
            token_ids (`torch.LongTensor` of shape `[K]`, *optional*): score only these ids.

        Returns:
            `[..., V]`, or `[..., K]`.
        """
        weight = self.output_head.weight
        hidden = hidden.to(device=weight.device, dtype=weight.dtype)
        if token_ids is None:
            logits = self.output_head(hidden)
        else:
            bias = getattr(self.output_head, "bias", None)
            logits = F.linear(hidden, weight[token_ids], None if bias is None else bias[token_ids])
        if (scale := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scale := getattr(self.config, "logits_scaling", None)) is not None:
            # One name, two meanings.
            logits = logits * scale if self.config.model_type == "hyperclovax" else logits / scale
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @contextmanager
    def capture(self, layer_ids: list[int]) -> Iterator[ContextCapture]:
        """Listen to `layer_ids` (zero-based decoder layers) for as long as the context is open."""
        capture = ContextCapture(layer_ids)
        handles = [self.layers[i].register_forward_hook(capture.hook(i)) for i in set(layer_ids)]
        try:
            yield capture
        finally:
            for handle in handles:
                handle.remove()


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """
    The target's list of decoder layers, wherever its architecture keeps it.

    Raises:
        ValueError: when no module list of the target has `num_hidden_layers` entries.
    """
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    decoder = target.get_decoder() or target
    for root in (decoder, target):
        lists = [m for m in root.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        if lists:
            return lists[0]
    raise ValueError(
        f"{type(target).__name__} has no list of {depth} decoder layers (`num_hidden_layers`): a Domino draft cannot "
        "read its context features from this architecture."
    )


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft propose? One backbone pass for the block, then the head's rollout, token by token."""

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicCache



@dataclass
class Proposal:
    """
    Tokens offered after the anchor.

    Attributes:
        proposal_ids (`torch.LongTensor` of shape `[1, K]`): on the target's device.
        finite (`torch.BoolTensor` of shape `[]`): whether the logits they come from are finite numbers.
    """

    proposal_ids: torch.LongTensor
    finite: torch.Tensor


class DraftState:
    """
    What one call of `generate` keeps about a draft: its key/value cache and how many positions that covers.

    A draft holds no per-call state itself, so that threads may share it.

    Args:
        position (`int`): absolute position of the first context token that the draft will be shown.
    """

    def __init__(self, position: int):
        # Without a config every layer is of the growing kind: sliding layers mask, so that a block can be cropped off.
        self.cache = DynamicCache()
        self.position = position


def draft_hidden(
    draft, target: TargetParts, state: DraftState, context_hidden_states: torch.Tensor, anchor: torch.LongTensor
) -> torch.Tensor:
    """
    One backbone pass: append the new context to the draft's cache and return draft hidden `[1, B, H]`.

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        state (`DraftState`): extended by the context, in place.
        context_hidden_states (`torch.Tensor` of shape `[1, L, T * H]`): features of the positions verified since the
            last pass. The anchor's own features do not exist yet.
        anchor (`torch.LongTensor` of shape `[1, 1]`): the last committed token.
    """
    size, context_length = draft.config.block_size, context_hidden_states.shape[1]
    block_ids = anchor.new_full((1, size), draft.config.mask_token_id)
    block_ids[:, :1] = anchor
    positions = torch.arange(state.position, state.position + context_length + size, device=draft.device)[None]
    hidden = draft(
        noise_embeds=target.embed(block_ids).to(draft.device),
        context_hidden_states=context_hidden_states,
        position_ids=positions,
        cache=state.cache,
    ).last_hidden_state
    # The block's own keys and values are of use to this pass only.
    state.cache.crop(-size)
    state.position += context_length
    return hidden


def greedy_rollout(
    draft,
    target: TargetParts,
    hidden: torch.Tensor,
    anchor: torch.LongTensor,
    num_proposals: int,
    prefix_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    use_head: bool,
) -> Proposal:
    """
    Choose proposals one after another: base logits, plus the head's correction given the tokens before.

    Args:
        draft (`DominoDraftModel`), target (`TargetParts`): the two models.
        hidden (`torch.Tensor` of shape `[1, B, H]`): from [`draft_hidden`].
        anchor (`torch.LongTensor` of shape `[1, 1]`): the last committed token.
        num_proposals (`int`): K, at most B with shifted labels, else B - 1.
        prefix_ids (`torch.LongTensor` of shape `[1, S]`): all committed tokens, the anchor last.
        logits_processor: applied to the final logits, so that proposals obey what the target's choice will obey.
        use_head (`bool`): `False` takes the base logits alone (DFlash).
    """
    config = draft.config
    first = 0 if config.shift_label else 1
    hidden = hidden[:, first : first + num_proposals]
    base_logits = target.logits(hidden)
    use_head = use_head and config.has_head
    finite = torch.isfinite(base_logits.amax())

    if not use_head and not logits_processor:
        return Proposal(base_logits.argmax(-1).to(anchor.device), finite)

    token, prefix_state, proposal_ids = anchor[:, 0], None, prefix_ids
    for k in range(num_proposals):
        final_logits = base_logits[:, k]
        if use_head:
            # The state reads every token, those of the pure draft prefix too.
            prefix_state = draft.step(target.embed(token).to(draft.device), prefix_state)
            if k >= config.pure_draft_prefix_len:
                final_logits = final_logits + draft.correction(hidden[:, k], prefix_state).to(final_logits)
                finite = finite & torch.isfinite(final_logits.amax())
        if logits_processor:
            final_logits = logits_processor(proposal_ids, final_logits.float().to(anchor.device))
        token = final_logits.argmax(-1).to(anchor.device)
        proposal_ids = torch.cat([proposal_ids, token[:, None]], dim=-1)
    return Proposal(proposal_ids[:, prefix_ids.shape[1] :], finite)


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What is kept of a proposal? The rule that makes the output exactly the target's own."""

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList


@dataclass
class Verification:
    """
    The tokens that a round commits.

    Attributes:
        input_ids (`torch.LongTensor` of shape `[1, S + n]`): all tokens, the n new ones included.
        num_new (`int`): n, accepted proposals and the bonus token, or fewer where a stop cut them.
        stopped (`bool`): whether generation ends here.
        scores (`list[torch.Tensor]`): processed float32 scores `[1, V]` of each new token, where asked for.
    """

    input_ids: torch.LongTensor
    num_new: int
    stopped: bool
    scores: list[torch.Tensor] = field(default_factory=list)


def verify_greedy(
    input_ids: torch.LongTensor,
    proposal_ids: torch.LongTensor,
    logits: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    scores: tuple[torch.Tensor, ...] | None,
) -> Verification:
    """
    Accept proposals while they are the target's own choice, then take that choice.

    Processors and stopping criteria see exactly the calls that token-by-token decoding would make, in its order: the
    same prefixes, one call for each committed token and none beyond a stop. So also those that count or remember
    give the plain result.

    Args:
        input_ids (`torch.LongTensor` of shape `[1, S]`): committed tokens, the anchor last.
        proposal_ids (`torch.LongTensor` of shape `[1, K]`): what the draft offers; K may be 0.
        logits (`torch.FloatTensor` of shape `[1, K + 1, V]`): of the target, after the anchor and each proposal.
        logits_processor, stopping_criteria: as prepared by `generate`.
        scores (`tuple` of `torch.Tensor`, *optional*): scores of all earlier new tokens, `None` unless asked for.
    """
    length, num_proposals = input_ids.shape[1], proposal_ids.shape[1]
    tokens = torch.cat([input_ids, proposal_ids, proposal_ids.new_zeros(1, 1)], dim=-1)
    # Without processors all choices are known at once, for one synchronisation a round.
    choices = None if logits_processor else logits.argmax(-1)
    wanted = num_proposals
    if choices is not None:
        matches = (choices[:, :-1] == proposal_ids).long().cumprod(-1).sum(-1)
        wanted = int(matches)
        tokens[:, length : length + wanted + 1] = choices[:, : wanted + 1]

    new_scores: list[torch.Tensor] = []
    for k in range(num_proposals + 1):
        prefix = tokens[:, : length + k]
        if choices is None:
            token_scores = logits_processor(prefix, logits[:, k])
            choice = token_scores.argmax(-1)
            accepted = k < num_proposals and bool(choice == proposal_ids[:, k])
            tokens[:, length + k] = choice
        else:
            token_scores = logits[:, k]
            accepted = k < wanted
        if scores is not None:
            new_scores.append(token_scores)
        seen = None if scores is None else (*scores, *new_scores)
        stopped = bool(stopping_criteria(tokens[:, : length + k + 1], seen).all())
        if stopped or not accepted:
            break
    return Verification(tokens[:, : length + k + 1], k + 1, stopped, new_scores)


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


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Which code travels with the weights? Three flat files, since transformers' remote-code loader knows no folders.

`from .generation import ...` in `modeling_domino.py` finds this folder in the package, and in a saved draft the one
file `generation.py`, made from the folder's modules in the order in which they import one another.
"""

import ast
import shutil
from pathlib import Path

CODE_FILES = ("configuration_domino.py", "modeling_domino.py")
_FLAT_NAME = "generation.py"


def write_code(folder: str | Path):
    """
    Write `configuration_domino.py`, `modeling_domino.py` (byte for byte) and `generation.py` into `folder`.

    Works alike from the package, where `generation.py` is made, and from a saved draft, where it is copied.
    """
    folder, here = Path(folder), Path(__file__).resolve()
    if here.name == _FLAT_NAME:
        source = here.parent
        flat = here.read_text(encoding="utf-8")
    else:
        source = here.parent.parent
        flat = amalgamate(here.parent)
    for name in CODE_FILES:
        if (source / name).resolve() != (folder / name).resolve():
            shutil.copyfile(source / name, folder / name)
    (folder / _FLAT_NAME).write_text(flat, encoding="utf-8")


def amalgamate(package: Path) -> str:
    """
    One module from the modules of `package`, each after those it imports, without their imports of one another.

    Raises:
        ValueError: when two modules define the same top-level name, which one file cannot hold.
    """
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(package.glob("*.py"))}
    order: list[str] = []

    def visit(name: str):
        if name in order:
            return
        for node in ast.parse(sources[name]).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                visit(node.module or "__init__")
        order.append(name)

    visit("__init__")
    parts = ["# Made from the folder `generation/` of the package domino_spec. Edit there, not here.\n"]
    owners: dict[str, str] = {}
    for name in order:
        tree = ast.parse(sources[name])
        lines = sources[name].splitlines(keepends=True)
        for node in tree.body:
            defined = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            if isinstance(node, ast.Assign):
                defined = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for symbol in defined:
                # Loggers and export lists stand in every module; the last one serves.
                if symbol not in ("logger", "__all__") and owners.setdefault(symbol, name) != name:
                    raise ValueError(f"`{symbol}` is defined in both generation/{owners[symbol]}.py and {name}.py.")
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for line in range(node.lineno - 1, node.end_lineno or node.lineno):
                    lines[line] = ""
        parts.append("".join(lines).strip("\n") + "\n")
    return "\n\n".join(parts)


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft plug into `generate`? One dispatch on the host's side, one mixin on the draft's.

`generate` picks its decoding method on the target's class and hands a foreign assistant neither hidden states nor the
target. So two methods of `GenerationMixin` are wrapped, once per process: an assistant that has an
`assisted_decoding` method of its own gets the call, with everything that `generate` prepared; every other call goes
on untouched. The wrappers know no class of ours, so copies of this module (as package and as remote code) share them.
"""

import functools
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


_MARK = "_hands_over_to_assistant"


def register():
    """Make `target.generate(assistant_model=draft)` reach the draft's decoding. Calls after the first do nothing."""
    decoding, validation = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode

    @functools.wraps(decoding)
    def assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        own = getattr(assistant_model, "assisted_decoding", None)
        if own is None or _asks_for_the_hosts_loop(kwargs.get("generation_config")):
            return decoding(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        return own(self, input_ids, *args, **kwargs)

    @functools.wraps(validation)
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        own = getattr(generation_mode_kwargs.get("assistant_model"), "validate_assisted_decoding", None)
        if own is None or _asks_for_the_hosts_loop(generation_config):
            return validation(self, generation_mode, generation_config, generation_mode_kwargs)
        return own(self, generation_config)

    for name, method in (
        ("_assisted_decoding", assisted_decoding),
        ("_validate_generation_mode", validate_generation_mode),
    ):
        if not hasattr(getattr(GenerationMixin, name), _MARK):
            setattr(method, _MARK, True)
            setattr(GenerationMixin, name, method)


def _asks_for_the_hosts_loop(generation_config: GenerationConfig | None) -> bool:
    """Whether `speculation_type` asks for transformers' own DFlash loop, around our backbone without its head."""
    return getattr(generation_config, "speculation_type", None) is not None


class DominoDecodingMixin:
    """What a draft offers at generation time; mixed into [`DominoDraftModel`]."""

    config: Any

    def assisted_decoding(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs,
    ) -> DominoGenerateOutput | torch.LongTensor:
        """
        What `target.generate(..., assistant_model=draft)` runs; see [`domino_decoding`]. Not called by hand.

        Raises:
            ValueError: before any compute, when an option or the pair of models is not supported.
        """
        if synced_gpus:
            raise ValueError(
                "Generation with a Domino draft does not support synced_gpus=True (ZeRO-3 or FSDP sharded targets): "
                "pass synced_gpus=False, or drop the draft."
            )
        return domino_decoding(
            self, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer, **model_kwargs
        )

    def decode(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        use_head: bool = True,
        **model_kwargs,
    ) -> DominoGenerateOutput | torch.LongTensor:
        """
        The same loop as a `custom_generate` callable, for those who dislike the registration:

            target.generate(**inputs, custom_generate=draft.decode)
            target.generate(**inputs, custom_generate=draft.decode, use_head=False)  # the DFlash ablation

        transformers gives such a callable no `streamer`: use `assistant_model=draft` to stream.

        Args:
            use_head (`bool`): `False` proposes from the base logits alone.

        Raises:
            ValueError: before any compute, when an option or the pair of models is not supported.
        """
        model_kwargs.pop("synced_gpus", None)
        return domino_decoding(
            self,
            target,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            use_head=use_head,
            **model_kwargs,
        )

    def spec_generate(
        self,
        input_ids: torch.LongTensor,
        target: PreTrainedModel,
        stop_token_ids: list[int] | None = None,
        temperature: float = 0.0,
        **kwargs,
    ) -> DominoGenerateOutput | torch.LongTensor:
        """
        `target.generate` under the name and arguments of the authors' script.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, S]`): the prompt.
            target (`PreTrainedModel`): the model to speed up.
            stop_token_ids (`list[int]`, *optional*): ids that end the answer; default: the target's own.
            temperature (`float`): 0 is greedy, the one mode that is supported.
            kwargs: any argument of `generate`.
        """
        if stop_token_ids is not None:
            kwargs["eos_token_id"] = stop_token_ids
        if temperature > 0:
            kwargs.update(do_sample=True, temperature=temperature)
        else:
            kwargs.setdefault("do_sample", False)
        return target.generate(input_ids, assistant_model=self, **kwargs)

    def validate_assisted_decoding(self, target: PreTrainedModel, generation_config: GenerationConfig):
        """What `generate` asks before it prepares anything: does this draft fit this target and these options?"""
        check_supported(generation_config, batch_size=1)
        self.check_target(target)

    def check_target(self, target: PreTrainedModel):
        """
        Raise unless this draft belongs to `target`, as far as shapes can tell.

        Raises:
            ValueError: naming the quantity and its value on both sides.
        """
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"{type(target).__name__} is an encoder-decoder; a Domino draft assists decoder-only causal LMs only."
            )
        config, theirs = self.config, target.config.get_text_config(decoder=True)
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        pairs = [
            ("hidden size", "hidden_size", config.hidden_size, theirs.hidden_size),
            ("depth", "num_target_layers", config.num_target_layers, theirs.num_hidden_layers),
        ]
        if head is not None:
            pairs.append(("vocabulary", "vocab_size", config.vocab_size, head.weight.shape[0]))
        for what, name, ours, their in pairs:
            if ours is not None and ours != their:
                raise ValueError(
                    f"This draft was made for a target whose {what} is {ours} (`{name}` in its config), but "
                    f"{type(target).__name__} has {their}: use the draft of this target, or the target of this draft."
                )
        if embedding is not None and config.mask_token_id >= embedding.weight.shape[0]:
            raise ValueError(
                f"The draft's `mask_token_id` is {config.mask_token_id}, but the embedding of {type(target).__name__} "
                f"has {embedding.weight.shape[0]} rows: use the draft of this target."
            )
        if max(config.target_layer_ids) >= theirs.num_hidden_layers:
            raise ValueError(
                f"The draft reads the target layers {config.target_layer_ids} (`target_layer_ids`), but "
                f"{type(target).__name__} has {theirs.num_hidden_layers}: use the draft of this target."
            )

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Nothing to do: `save_pretrained` writes this class's code and `auto_map` itself, however it was loaded."""

    def save_pretrained(self, save_directory, *args, **kwargs):
        """
        Write a folder that works alone: weights, config in both layouts, and the code for `trust_remote_code=True`.
        Takes what [`~transformers.PreTrainedModel.save_pretrained`] takes.
        """
        # Keys are always the contract's, also when the draft was read from a file with other names.
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, **kwargs)
        write_code(save_directory)


# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a block become output? Importing this makes `target.generate(assistant_model=draft)` work."""


register()

__all__ = ["DominoGenerateOutput", "DominoDecodingMixin"]
