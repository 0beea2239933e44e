# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""The paper's decoding loop, written down plainly: one sequence, greedy, nothing optimised. A line to measure against.

What a first implementation looks like: hidden states of all layers are kept and the wanted ones picked out, the head
corrects the whole vocabulary in every step of the rollout, and every acceptance is waited for where it is needed.
Source: arXiv 2605.29707, inference.
"""

from collections.abc import Iterator

import torch
from transformers import DynamicCache, PreTrainedModel

from domino_spec import DominoDraftModel
from domino_spec.generation.compat import CACHE_NAME


@torch.inference_mode()
def paper_generate(
    target: PreTrainedModel,
    draft: DominoDraftModel,
    input_ids: torch.LongTensor,
    max_new_tokens: int,
    accept: Iterator[int] | None = None,
) -> tuple[torch.LongTensor, list[int]]:
    """
    Args:
        input_ids (`torch.LongTensor` of shape `[1, S]`): the prompt.
        accept (`Iterator[int]`, *optional*): how many proposals each round accepts, whatever the target says: for
            models with random weights.

    Returns:
        Prompt and answer `[1, S + new]`, which no end token stops, and the tokens that each round committed.
    """
    config, embedding, output_head = draft.config, target.get_input_embeddings(), target.get_output_embeddings()
    size, first, device = config.block_size, 0 if config.shift_label else 1, input_ids.device
    # Like the authors' script, all that a block can give: one more with shifted labels than engines take.
    num_proposals = size - first
    target_cache, draft_cache, length = DynamicCache(config=target.config), DynamicCache(), input_ids.shape[1]

    def read(token_ids):
        output = target(token_ids, **{CACHE_NAME: target_cache}, use_cache=True, output_hidden_states=True)
        # The embeddings are entry 0.
        features = torch.cat([output.hidden_states[i + 1] for i in config.target_layer_ids], dim=-1)
        return output.logits.argmax(-1), features

    choices, context = read(input_ids)
    sequence = torch.cat([input_ids, choices[:, -1:]], dim=1)
    acceptance_lengths = []
    while sequence.shape[1] < length + max_new_tokens:
        start = sequence.shape[1] - 1
        block = torch.full((1, size), config.mask_token_id, device=device)
        block[:, 0] = sequence[:, -1]
        seen = draft_cache.get_seq_length()
        hidden = draft(
            noise_embeds=embedding(block),
            context_hidden_states=context,
            position_ids=torch.arange(seen, start + size, device=device)[None],
            cache=draft_cache,
        ).last_hidden_state
        draft_cache.crop(-size)

        base_logits = output_head(hidden)
        proposals, state, token = [], None, block[:, 0]
        for k in range(num_proposals):
            logits = base_logits[:, first + k]
            if config.has_head:
                state = draft.prefix_gru(embedding(token)[:, None], state)[1]
                if k >= config.pure_draft_prefix_len:
                    logits = logits + draft.embed_proj(torch.cat([hidden[:, first + k], state[0]], dim=-1))
            token = logits.argmax(-1)
            proposals.append(token)
        proposal_ids = torch.stack(proposals, dim=1)

        choices, features = read(torch.cat([block[:, :1], proposal_ids], dim=1))
        accepted = int((choices[:, :-1] == proposal_ids).long().cumprod(-1).sum())
        if accept is not None:
            accepted = min(next(accept), num_proposals)
        sequence = torch.cat([sequence, proposal_ids[:, :accepted], choices[:, accepted : accepted + 1]], dim=1)
        if accepted < num_proposals:
            target_cache.crop(-(num_proposals - accepted))
        context = features[:, : accepted + 1]
        acceptance_lengths.append(accepted + 1)
    return sequence[:, : length + max_new_tokens], acceptance_lengths
