# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a block become output? Rounds of propose, verify, commit; each writes only what is final.

The loop is ours and not the host's: the host's takes the draft's word on fewer things than a user may ask, and its
handling of blocks has differed between versions. It is entered with everything that `generate` has prepared.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .backbone import Context, DraftState, draft_hidden
from .captured import CapturedDraft, Captures
from .compat import (
    CACHE_NAME,
    DominoGenerateOutput,
    asked_for,
    is_returned,
    layers_that_keep,
    make_output,
    recording_past,
    with_defaults_of,
)
from .context import ContextCapture, TargetParts
from .lookup import Continuation, PromptLookup
from .pace import Lockstep, OwnPace
from .processors import are_row_wise, draft_processors, read_logits_alone
from .record import Record
from .rollout import rollout
from .schedule import Experience, Schedule
from .scorer import Scorer
from .sequences import Proposal, Sequences
from .tree import Tree, grow, keep_path, path_taken, takes_trees, with_tree
from .verification import Verification, verify

logger = logging.get_logger(__name__)


def check_supported(generation_config: GenerationConfig):
    """
    Refuse, before any compute, what this loop cannot honour.

    Raises:
        ValueError: naming the option, its value and what to do instead.
    """
    config = generation_config
    refusals = [
        ((config.num_beams or 1) > 1, f"num_beams={config.num_beams}", "pass num_beams=1"),
        (
            (config.num_return_sequences or 1) > 1 and not config.do_sample,
            f"num_return_sequences={config.num_return_sequences} without sampling",
            "greedy decoding has one answer: pass do_sample=True, or ask for one",
        ),
        (
            config.use_cache is False,
            "use_cache=False",
            "leave use_cache on: rejected tokens are cropped from the cache",
        ),
        (
            bool(config.penalty_alpha) and (config.top_k or 0) > 1 and not config.do_sample,
            f"penalty_alpha={config.penalty_alpha} (contrastive search)",
            "leave penalty_alpha unset",
        ),
        (config.dola_layers is not None, f"dola_layers={config.dola_layers!r}", "leave dola_layers unset"),
        (
            config.constraints is not None or config.force_words_ids is not None,
            "constraints or force_words_ids",
            "pass prefix_allowed_tokens_fn instead",
        ),
    ]
    schedules = ("constant", "heuristic", "heuristic_transient")
    if (schedule := config.num_assistant_tokens_schedule) not in (None, *schedules):
        refusals.append((True, f"num_assistant_tokens_schedule={schedule!r}", f"choose one of {', '.join(schedules)}"))
    # Other sources of proposals.
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if value := getattr(config, name):
            remedy = "one source of proposals is enough: leave it unset"
            if name == "prompt_lookup_num_tokens":
                remedy += " (after `draft.use_tree()` the draft looks into the text as well)"
            refusals.append((True, f"{name}={value}", remedy))
    for refused, what, remedy in refusals:
        if refused:
            raise ValueError(f"Generation with a Domino draft does not support {what}: {remedy}, or drop the draft.")


def proposals_per_round(config: Any, generation_config: GenerationConfig, tree_size: int = 0) -> int:
    """
    How many tokens in succession a round offers: `block_size - 1`, as the public engines do, unless the call says
    otherwise.

    `num_assistant_tokens` bounds it. A draft with shifted labels has one proposal more to give, which a call gets by
    asking for `block_size` of them; a tree of `tree_size` proposals has whatever comes of it without being asked.
    `generate` fills the option in where a user left it out, so its default counts as left out.
    """
    asked = asked_for(generation_config, "num_assistant_tokens")
    if asked is None:
        return tree_size or config.block_size - 1
    return max(0, min(asked, tree_size or config.block_size - (not config.shift_label)))


def _check_cache(cache: Cache | None, target: PreTrainedModel) -> Cache:
    if cache is None:
        raise ValueError(
            f"{type(target).__name__} keeps no cache that can be cropped back after a rejected proposal, which a "
            "Domino draft needs: generate without the draft."
        )
    if not hasattr(cache, "layers"):
        raise ValueError(
            f"A {type(cache).__name__} cannot be used with a Domino draft: pass a DynamicCache, or leave the cache out."
        )
    if layers := layers_that_keep(cache):
        raise ValueError(
            f"The cache of {type(target).__name__} has layers that cannot forget rejected proposals: "
            f"{', '.join(layers)}. Leave `cache_implementation` unset, where you have set it, or generate without "
            "the draft."
        )
    return cache


def _past_length(cache: Cache | None, target: PreTrainedModel) -> int:
    """Tokens that the target's cache holds before the prefill; raises where rejected tokens could not be forgotten."""
    takes = inspect.signature(target.forward).parameters
    if "input_ids" in takes and CACHE_NAME not in takes:
        # What it is given is swallowed by its `**kwargs`.
        cache = None
    if cache is not None and hasattr(cache, "layers") and any(cache.is_linear):
        # Convolutions know only after their first pass that they can be put back, and are asked then.
        return 0
    return int(_check_cache(cache, target).get_seq_length())


def _check_rope(
    target: PreTrainedModel, input_ids: torch.LongTensor, mask: torch.Tensor | None, max_length: int | None
):
    """
    Refuse rotary embeddings that change with the length of the text, where this call would take them over the limit:
    token by token, each key is rotated as was right when it was written, and a block would rotate them otherwise.
    """
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("dynamic", "longrope"):
        return
    limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    shortest = input_ids.shape[1] if mask is None or mask.dim() != 2 else int(mask.sum(-1).min())
    # Long RoPE has one rotation on either side; the dynamic one has another at each length.
    beyond = kind == "longrope" and shortest > limit
    if not beyond and (max_length is None or max_length > limit):
        raise ValueError(
            f"{type(target).__name__} has {kind} RoPE, which changes at {limit} tokens, and this call may cross that "
            f"(prompts from {shortest} tokens, at most {max_length} in all): set max_length to {limit} or less"
            f"{', or give longer prompts' if kind == 'longrope' else ''}, or generate without the draft."
        )


class _Decoding:
    """
    One call of `generate`: what is decided so far, and the steps of a round.

    Args:
        draft, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer, use_head,
            synced_gpus, model_kwargs: as for [`domino_decoding`].
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
        synced_gpus: bool,
        model_kwargs: dict[str, Any],
    ):
        self.started = time.perf_counter()
        self.synced_gpus = synced_gpus
        self.draft, self.target, self.parts, self.capture = draft, target, parts, capture
        self.generation_config, self.scorer = generation_config, Scorer(draft, parts, use_head)
        self.logits_processor, self.stopping_criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.draft_processors = draft_processors(logits_processor)
        self.do_sample = bool(generation_config.do_sample)
        # As in plain decoding: without an end of sequence, rows that a criterion has stopped go on until all are.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.pad_token_id = generation_config._pad_token_tensor if self.pads else None
        if self.pad_token_id is not None:
            self.pad_token_id = self.pad_token_id.to(input_ids.device)

        self.model_kwargs = model_kwargs
        self.num_rows, self.prompt_length = input_ids.shape
        self.sequences = Sequences(input_ids)
        # Whether the rows that still run end here, and what the others were when they ended.
        self.stopped = [False] * self.num_rows
        self.finished: dict[int, torch.LongTensor] = {}
        self.record = Record(generation_config, self.num_rows)
        self.acceptance_lengths: list[list[int]] = [[] for _ in range(self.num_rows)]
        self.num_streamed = 0
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}

    # Prefill

    def prefill(self):
        """Read the prompt and commit the target's first token: the first anchors."""
        past_length = _past_length(self.model_kwargs.get(CACHE_NAME), self.target)
        mask = self.model_kwargs.get("attention_mask")
        _check_rope(self.target, self.sequences.prefix(), mask, self.stopping_criteria.max_length)
        input_ids = self.sequences.prefix()
        outputs = self.target._prefill(input_ids, self.generation_config, self.model_kwargs, is_first_iteration=True)
        self.cache = _check_cache(outputs.get(CACHE_NAME), self.target)
        features = self.capture.take(self.draft.device)
        logits = self._logits(outputs, 1)
        self.pace = self._pace(past_length + features.shape[1])
        # What the draft has not read yet.
        self.context = [self._first_context(features, past_length)]
        self.tree_size = self._tree_size()
        looks_up = self.tree_size > 0 and self.draft.prompt_lookup
        self.lookup = PromptLookup(self.sequences.device) if looks_up else None
        self.schedule = Schedule(
            self.generation_config,
            proposals_per_round(self.draft.config, self.generation_config, self.tree_size),
            Experience.of(self.target, self.draft),
            self.pace.lockstep,
            self.tree_size,
        )
        self.captured = self._captured_draft(self.num_rows)
        if self.captured is not None:
            self.draft_state.cache = self.captured.cache
        self.compiled_target = self._compiled_target()

        verified = self._verify(Proposal(input_ids.new_empty(self.num_rows, 0)), logits, lockstep=True)
        self.record.add_prefill(outputs, logits, verified.scores)
        self.pace.start(outputs)
        self._commit(verified)
        self.seconds["prefill"] = time.perf_counter() - self.started

    def _pace(self, length: int) -> Lockstep | OwnPace:
        """How rows will advance, with `length` entries in the target's cache."""
        if (
            self.num_rows > 1
            # Attentions are given key by key, so no key may be missing.
            and not self.generation_config.output_attentions
            # What ended rows lack in a returned cache is read in one more pass, which other processes would not join.
            and not (self.synced_gpus and is_returned(self.cache, self.generation_config))
            and are_row_wise(self.logits_processor, self.stopping_criteria, self.pads)
            and OwnPace.suits(self.target, self.cache, self.model_kwargs)
        ):
            max_length = self.stopping_criteria.max_length
            return OwnPace(
                self.target,
                self.cache,
                self.model_kwargs,
                self.generation_config,
                max_length,
                self.sequences,
                length,
            )
        return Lockstep(self.target, self.cache, self.model_kwargs)

    def _first_context(self, features: torch.Tensor, past_length: int) -> Context:
        """The prompt's features and which of them are of real tokens; makes the draft's state."""
        mask, (num_rows, length) = self.model_kwargs.get("attention_mask"), features.shape[:2]
        if mask is None or bool(mask.all()):
            self.draft_state = DraftState([past_length] * num_rows)
            real = torch.ones(num_rows, length, dtype=torch.bool, device=features.device)
            return Context(features, [length] * num_rows, real)
        real = mask.bool().to(features.device)
        self.draft_state = DraftState(real[:, :-length].sum(-1).tolist())
        real = real[:, -length:]
        if num_rows == 1:
            # What is padding is left out.
            features, real = features[:, real[0]], real[:, real[0]]
        return Context(features, real.sum(-1).tolist(), real)

    def _tree_size(self) -> int:
        """The most proposals of a round's tree; 0 where the draft was not told to have one, or this call has none."""
        size = self.draft.tree_size
        if (
            size == 0
            or self.num_rows > 1
            # Which path is taken must be known of all nodes at once.
            or self.do_sample
            or self.logits_processor
            # It ends a row of proposals.
            or asked_for(self.generation_config, "assistant_confidence_threshold") is not None
            # These are given for each token and key in turn, and other processes would not join the question below.
            or self.record.hidden_states is not None
            or self.record.attentions is not None
            or self.synced_gpus
            or not takes_trees(self.target, self.cache, self.model_kwargs, self.sequences.device)
        ):
            return 0
        return size

    def _compiled_target(self) -> Callable | None:
        """
        The target compiled, where `generate` would compile plain decoding (a cache of fixed size, on a GPU).

        What a call records is taken from its outputs as they are, and those of a compiled pass are written over by the
        next.
        """
        if self.record.hidden_states is not None or self.record.attentions is not None:
            return None
        arguments = {**self.model_kwargs, CACHE_NAME: self.cache}
        if not self.target._valid_auto_compile_criteria(arguments, self.generation_config):
            return None
        return self.target.get_compiled_call(self.generation_config.compile_config)

    def _captured_draft(self, num_rows: int) -> CapturedDraft | None:
        """A captured draft phase for so many rows, if the draft was told to have one and this call allows it."""
        limit = self.stopping_criteria.max_length
        if (
            self.draft.capture_options is None
            or (self.draft_processors and not (self.do_sample and read_logits_alone(self.draft_processors)))
            or self.tree_size > 0
            or self.schedule.watches
            or self.schedule.num_proposals == 0
            or limit is None
            or not Captures.suits(self.draft, self.scorer)
        ):
            return None
        # Behind the text stand a round's context and block, and one slot for what no row has.
        slots = limit + 2 * self.draft.config.block_size + 2
        warpers = self.draft_processors if self.do_sample else None
        return Captures.of(self.target, self.draft).take(
            self.draft, self.scorer, self.parts, num_rows, self.schedule.num_proposals, slots, warpers
        )

    def release(self):
        """Leave what was captured to the next call."""
        if self.captured is not None:
            Captures.of(self.target, self.draft).give_back(self.captured)

    # Rounds

    def propose(self) -> Proposal:
        """
        What the draft offers after the anchors: never more than can still be committed, so that no position past the
        limit is touched.
        """
        budget = self.schedule.budget(len(self.sequences))
        if self.stopping_criteria.max_length is not None:
            budget = min(budget, self.stopping_criteria.max_length - min(self.sequences.lengths) - 1)
        if budget <= 0:
            return Proposal(self.sequences.last().new_empty(len(self.sequences), 0))
        started = time.perf_counter()
        self.sequences.reserve(budget + 1)
        context, self.context = self.context, []
        anchor = self.sequences.last()
        if self.captured is not None and self.captured.takes(context, budget):
            proposal = self.captured.propose(self.draft_state, context[0], anchor)
        else:
            hidden = draft_hidden(self.draft, self.parts, self.draft_state, Context.joined(context), anchor)
            if self.tree_size > 0:
                proposal = grow(
                    self.scorer, hidden, anchor, budget, self.tree_size, self.schedule, self._continuation(budget)
                )
            else:
                proposal = rollout(
                    self.scorer, hidden, self.sequences, budget, self.draft_processors, self.do_sample, self.schedule
                )
        if self.pad_token_id is not None and any(self.stopped):
            # What ended rows will commit, so that the target reads what plain decoding has it read.
            ended = torch.tensor(self.stopped, device=proposal.proposal_ids.device)
            proposal.proposal_ids = torch.where(ended[:, None], self.pad_token_id, proposal.proposal_ids)
        if not isinstance(proposal, Tree):
            self.sequences.put_block(proposal.proposal_ids)
        proposal.seconds = time.perf_counter() - started
        return proposal

    def _continuation(self, budget: int) -> Continuation | None:
        """What followed in the text before; one token alone, after a prompt without ids, has nothing before it."""
        text = self.sequences.row(0)
        return None if self.lookup is None or len(text) < 2 else self.lookup.continuation(text, budget)

    def verify(self, proposal: Proposal):
        """One target pass over anchors and proposals; commit what stands before the new anchors."""
        started = time.perf_counter()
        width = proposal.proposal_ids.shape[1] + 1
        outputs = self._target_pass(proposal)
        features = self.capture.take(self.draft.device)
        if isinstance(proposal, Tree):
            path, proposal = path_taken(proposal, outputs.logits[0, -width:].argmax(-1).to(self.sequences.device))
            features = features[:, path.to(features.device)]
            keep_path(self.cache, path, width)
            outputs.logits = outputs.logits[:, path.to(outputs.logits.device) - width]
        logits = self._logits(outputs, proposal.proposal_ids.shape[1] + 1)
        verified = self._verify(proposal, logits, self.pace.lockstep)
        if not verified.finite:
            logger.warning_once(
                "The draft's logits are not finite, so its proposals are noise (the output is still the target's). "
                f"Its dtype is {self.draft.dtype}; try another, or check its weights."
            )
        seconds = time.perf_counter() - started
        self.schedule.learn(verified, width - 1, proposal.seconds, seconds)
        self.seconds["draft"] += proposal.seconds
        self.seconds["verify"] += seconds

        committed = self.pace.commit(outputs, logits, verified, self.sequences, self.record)
        self.context.append(Context(features[:, : committed.shape[1]], verified.num_new, committed.to(features.device)))
        for row, count in zip(self.sequences.rows, verified.num_new, strict=True):
            self.acceptance_lengths[row].append(count)
        self._commit(verified)

    def idle(self):
        """A target pass of no effect: other processes still need this one's part of the weights."""
        self._target_pass(Proposal(self.sequences.last().new_empty(len(self.sequences), 0)))
        self.cache.crop(-1)

    def _target_pass(self, proposal: Proposal):
        if isinstance(proposal, Tree):
            anchor = self.pace.inputs(self.sequences, Proposal(proposal.proposal_ids[:, :0]))
            inputs = with_tree(anchor, proposal, self.cache.get_seq_length(), self.target.dtype)
        else:
            inputs = self.pace.inputs(self.sequences, proposal)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = proposal.proposal_ids.shape[1] + 1
        self.capture.clear()
        # Of fixed shape: passes of other widths, as where the limit is near, are too few to compile for.
        whole = proposal.proposal_ids.shape[1] == self.schedule.num_proposals
        call = self.compiled_target if whole and self.compiled_target is not None else self.target
        return call(**inputs, return_dict=True)

    def _logits(self, outputs, width: int) -> torch.Tensor:
        return outputs.logits[:, -width:].to(device=self.sequences.device, dtype=torch.float32, copy=True)

    def _verify(self, proposal: Proposal, logits: torch.Tensor, lockstep: bool) -> Verification:
        self.sequences.reserve(logits.shape[1])
        return verify(
            self.sequences,
            proposal,
            logits,
            self.logits_processor,
            self.stopping_criteria,
            self.stopped,
            self.do_sample,
            lockstep,
            self.pad_token_id,
            keep_scores=self.record.scores is not None,
            past_scores=None if self.record.scores is None else tuple(self.record.scores),
        )

    def _commit(self, verified: Verification):
        """Take the new tokens, hand them to the streamer, and let go of rows that have ended."""
        for entry, count in enumerate(verified.num_new):
            self.sequences.lengths[entry] += count
        self.stopped = verified.stopped
        self._drop_stopped()
        if self.streamer is not None:
            self._stream()

    def _drop_stopped(self):
        ended = [entry for entry, stopped in enumerate(self.stopped) if stopped]
        kept = [entry for entry, stopped in enumerate(self.stopped) if not stopped]
        ended_rows = {self.sequences.rows[entry]: self.sequences.row(entry) for entry in ended}
        if self.pace.drop(ended, kept, self.sequences):
            self.finished |= ended_rows
            self.sequences.keep(kept)
            self.stopped = [False] * len(kept)
            self._keep_drafting(kept)
            self.context = [context.keep(kept) for context in self.context]

    def _keep_drafting(self, kept: list[int]):
        """Let go of all other rows of the draft's."""
        if self.captured is None:
            self.draft_state.keep(kept)
            return
        before, self.captured = self.captured, self._captured_draft(len(kept))
        assert self.captured is not None
        self.captured.cache.copy_rows(before.cache, kept)
        self.draft_state = DraftState([self.draft_state.origins[entry] for entry in kept], self.captured.cache)
        Captures.of(self.target, self.draft).give_back(before)

    @property
    def done(self) -> bool:
        return all(self.stopped)

    # Output

    def _stream(self):
        """Hand over what is decided for all rows, in order: one row as it comes, a batch token by token."""
        if self.num_rows == 1:
            new = self.sequences.prefix()[:, self.prompt_length + self.num_streamed :]
            self.num_streamed += new.shape[1]
            # Flat, as plain decoding puts it: servers count what is put, and a row of a matrix counts as one.
            self.streamer.put(new[0].cpu())
            return
        decided = self._padded()[:, self.prompt_length :].cpu()
        ready = decided.shape[1] if self.done else min(self.sequences.lengths) - self.prompt_length
        for column in range(self.num_streamed, ready):
            self.streamer.put(decided[:, column])
        self.num_streamed = ready

    def _padded(self) -> torch.LongTensor:
        """All rows of the batch, `[N, S + new]`, ended ones padded on the right."""
        rows = dict(self.finished)
        rows.update((row, self.sequences.row(entry)) for entry, row in enumerate(self.sequences.rows))
        padding = 0 if self.pad_token_id is None else int(self.pad_token_id)
        ordered = [rows[row] for row in range(self.num_rows)]
        return torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True, padding_value=padding)

    def result(self) -> DominoGenerateOutput | torch.LongTensor:
        """What `generate` returns."""
        sequences = self._padded()
        self.pace.finish(sequences)
        if not self.generation_config.return_dict_in_generate:
            return sequences
        lengths = [torch.tensor(row, dtype=torch.long) for row in self.acceptance_lengths]
        seconds = dict(self.seconds)
        seconds["host"] = time.perf_counter() - self.started - sum(seconds.values())
        return make_output(
            cache=self.cache,
            sequences=sequences,
            acceptance_lengths=torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True),
            seconds=seconds,
            **self.record.as_output(),
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
    synced_gpus: bool = False,
    **model_kwargs,
) -> DominoGenerateOutput | torch.LongTensor:
    """
    Greedy decoding or sampling of a batch: what the target alone would give, token for token or in distribution.

    Args:
        draft (`DominoDraftModel`): proposes.
        target (`PreTrainedModel`): decides.
        input_ids (`torch.LongTensor` of shape `[N, S]`): the prompts, padded on the left.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: as prepared by `generate`.
            `generation_config.num_assistant_tokens` bounds the proposals of a round (default: what the draft's own
            `generation_config` says, else `block_size - 1`).
        use_head (`bool`): `False` proposes from the base logits alone (DFlash), for comparison.
        synced_gpus (`bool`): go on with passes of no effect until all processes have ended, as sharded targets need.

    Returns:
        Token ids `[N, S + new]`, or [`DominoGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        ValueError: before any compute, when an option, the cache or the pair of models is not supported.
    """
    generation_config = with_defaults_of(draft, generation_config)
    check_supported(generation_config)
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
            synced_gpus,
            model_kwargs,
        )
        decoding.prefill()
        # Only now: recording through the prefill would keep what sliding layers drop.
        with recording_past(decoding.cache), target._optimize_model_for_decode():
            while target._has_unfinished_sequences(decoding.done, synced_gpus, device=input_ids.device):
                if decoding.done:
                    decoding.idle()
                else:
                    decoding.verify(decoding.propose())
    decoding.release()
    if streamer is not None:
        streamer.end()
    return decoding.result()
