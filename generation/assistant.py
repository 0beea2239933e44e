# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft plug into `generate`? One dispatch on the host's side, one mixin on the draft's.

`generate` picks its decoding method on the target's class and hands a foreign assistant neither hidden states nor the
target. So two methods of `GenerationMixin` are wrapped, once per process: an assistant that has an
`assisted_decoding` method of its own gets the call, with everything that `generate` prepared; every other call goes
on untouched. The wrappers know no class of ours, so copies of this module (as package and as remote code) share them.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import GENERATION_CONFIG_NAME

from .captured import CaptureOptions
from .compat import DominoGenerateOutput
from .context import vocabulary_size
from .loop import check_supported, domino_decoding
from .remote_code import write_code

_MARK = "_hands_over_to_assistant"


def register():
    """Make `target.generate(assistant_model=draft)` reach the draft's decoding. Calls after the first do nothing."""
    decoding, validation = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode

    @functools.wraps(decoding)
    def assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        own = _method_of(assistant_model, "assisted_decoding")
        if own is None or _asks_for_the_hosts_loop(kwargs.get("generation_config")):
            return decoding(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        return own(self, input_ids, *args, **kwargs)

    @functools.wraps(validation)
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        own = _method_of(generation_mode_kwargs.get("assistant_model"), "validate_assisted_decoding")
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


def _method_of(assistant_model: Any, name: str) -> Any:
    """The assistant's own method, also where the assistant is wrapped for data parallelism; else `None`."""
    while not hasattr(assistant_model, name) and isinstance(getattr(assistant_model, "module", None), torch.nn.Module):
        assistant_model = assistant_model.module
    return getattr(assistant_model, name, None)


def _asks_for_the_hosts_loop(generation_config: GenerationConfig | None) -> bool:
    """Whether `speculation_type` asks for transformers' own DFlash loop, around our backbone without its head."""
    return getattr(generation_config, "speculation_type", None) is not None


class DominoDecodingMixin:
    """What a draft offers at generation time; mixed into [`DominoDraftModel`]."""

    config: Any
    # Defaults for whoever generates with this draft: how many proposals, and which schedule.
    generation_config: GenerationConfig | None = None
    # Of `use_cuda_graphs`.
    capture_options: CaptureOptions | None = None
    # Of `use_tree`.
    tree_size, prompt_lookup = 0, False

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
        if assistant_tokenizer is not None:
            raise ValueError(
                "A Domino draft proposes tokens of the target's own vocabulary: leave assistant_tokenizer out of the "
                "call, or use an assistant model with a tokenizer of its own."
            )
        return domino_decoding(
            self,
            target,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            synced_gpus=synced_gpus,
            **model_kwargs,
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

        transformers gives such a callable no `streamer` and no `synced_gpus`: use `assistant_model=draft` for those.

        Args:
            use_head (`bool`): `False` proposes from the base logits alone.

        Raises:
            ValueError: before any compute, when an option or the pair of models is not supported.
        """
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
            input_ids (`torch.LongTensor` of shape `[N, S]`): the prompts.
            target (`PreTrainedModel`): the model to speed up.
            stop_token_ids (`list[int]`, *optional*): ids that end the answer; default: the target's own.
            temperature (`float`): 0 is greedy, more samples.
            kwargs: any argument of `generate`.
        """
        if stop_token_ids is not None:
            kwargs["eos_token_id"] = stop_token_ids
        if temperature > 0:
            kwargs.update(do_sample=True, temperature=temperature)
        else:
            kwargs.setdefault("do_sample", False)
        return target.generate(input_ids, assistant_model=self, **kwargs)

    def use_cuda_graphs(self, enabled: bool = True, input_table: bool = False):
        """
        Have rounds on a GPU replay their draft phase as one CUDA graph, with Triton kernels for the head where Triton
        is installed. The output stays the target's own, or distributed as its own where it is sampled.

        It serves calls with a limit to the answer, a draft without adapters, and target and draft on one GPU. Sampling
        by temperature, by top-k, top-p, min-p, typical and epsilon cut-offs, and renormalised, is part of the graph;
        calls with other logits processors (penalties, eta cut-offs), an adaptive draft length or trees go on as they
        are. A graph is captured at the second round of the first call of its kind (batch size, number of proposals,
        length up to a multiple of 512, way to choose tokens), and kept with its memory as long as target and draft are,
        of the last four ways to choose. Where tokens are sampled it holds their probabilities: 4 bytes for each row,
        proposal and id of the vocabulary.

        Args:
            enabled (`bool`): `False` goes back to how it was.
            input_table (`bool`): keep a table of what the head's GRU makes of each token, `3 * gru_hidden_dim` numbers
                for each id of the vocabulary, so that a step reads a line of it instead of a weight matrix. Its size is
                logged when it is made.
        """
        self.capture_options = CaptureOptions(input_table) if enabled else None

    def use_tree(self, num_proposals: int = 15, prompt_lookup: bool = True):
        """
        Have greedy decoding of one text offer several continuations at once, as a tree of `num_proposals` proposals:
        where the likeliest token is wrong, the next one may be right, and the same pass of the target goes on from it.
        The output stays the target's own. It pays where a pass takes little longer for more tokens.

        What followed the last tokens before, in the prompt or the answer, is a path of the tree where it is likelier
        than the draft's own: code that is edited, a question that is taken up, a list. It costs next to nothing, and
        how often it was right so far in the text says how far it is believed.

        It serves calls with one row, without sampling, logits processors, `assistant_confidence_threshold`, hidden
        states and attentions in the output, and sharing among processes, on targets with full attention in every layer
        (`"eager"` or `"sdpa"`) and a cache that grows; other calls go on as they are. Its rounds are not replayed as
        CUDA graphs. A target is asked once, by three passes over a few tokens, whether it obeys masks.

        `num_assistant_tokens` bounds how many proposals may follow one another (default: any number), and with
        `num_assistant_tokens_schedule="heuristic"` a round offers as much of its tree as pays. After SpecInfer (arXiv
        2305.09781) and EAGLE-2 (arXiv 2406.16858); prompt lookup as in transformers.

        Args:
            num_proposals (`int`): of a tree; 0 goes back to proposals that follow one another.
            prompt_lookup (`bool`): `False` leaves all proposals to the draft.

        Raises:
            ValueError: when `num_proposals` is no number of proposals, or `prompt_lookup` neither on nor off.
        """
        if type(num_proposals) is not int or num_proposals < 0:
            raise ValueError(
                f"`num_proposals` is {num_proposals!r}, but a tree has a whole number of proposals: 15, say, or 0 to "
                "have none."
            )
        if type(prompt_lookup) is not bool:
            raise ValueError(
                f"`prompt_lookup` is {prompt_lookup!r}, but a tree has what followed before in the text or not: pass "
                "True or False, and the size of the tree as `num_proposals`."
            )
        self.tree_size, self.prompt_lookup = num_proposals, prompt_lookup

    def validate_assisted_decoding(self, target: PreTrainedModel, generation_config: GenerationConfig):
        """What `generate` asks before it prepares anything: does this draft fit this target and these options?"""
        check_supported(generation_config)
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
        # transformers' own mark on models whose running state cannot be put back as it was before a rejected proposal.
        if getattr(target, "_is_stateful", False):
            raise ValueError(
                f"{type(target).__name__} has recurrent layers, whose state cannot forget a rejected proposal: "
                "generate without the draft."
            )
        wrapper = getattr(target.prepare_inputs_for_generation, "__self__", None)
        if getattr(getattr(wrapper, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                "The target has an adapter that prepends learnt tokens (prompt, prefix or P-tuning), whose passes a "
                "draft cannot share: use LoRA or another adapter of weights, or generate without the draft."
            )
        config, theirs = self.config, target.config.get_text_config(decoder=True)
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        pairs = [
            ("hidden size", "hidden_size", config.hidden_size, theirs.hidden_size),
            ("depth", "num_target_layers", config.num_target_layers, theirs.num_hidden_layers),
        ]
        if head is not None:
            pairs.append(("vocabulary", "vocab_size", config.vocab_size, vocabulary_size(head)))
        for what, name, ours, their in pairs:
            if ours is not None and ours != their:
                remedy = f", or fit it with `draft.resize_token_embeddings({their})`" if name == "vocab_size" else ""
                raise ValueError(
                    f"This draft was made for a target whose {what} is {ours} (`{name}` in its config), but "
                    f"{type(target).__name__} has {their}: use the draft of this target, or the target of this draft"
                    f"{remedy}."
                )
        width = getattr(embedding, "embedding_dim", config.hidden_size)
        if width != config.hidden_size:
            raise ValueError(
                f"The embedding of {type(target).__name__} is {width} wide and projected to the hidden size "
                f"{config.hidden_size} later, which a Domino draft does not know: generate without the draft."
            )
        if embedding is not None and config.mask_token_id >= vocabulary_size(embedding):
            raise ValueError(
                f"The draft's `mask_token_id` is {config.mask_token_id}, but the embedding of {type(target).__name__} "
                f"has {vocabulary_size(embedding)} rows: use the draft of this target."
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
        Write a folder that works alone: weights, config in both layouts, the code for `trust_remote_code=True`, and
        the draft's `generation_config` if it has one. Takes what
        [`~transformers.PreTrainedModel.save_pretrained`] takes.
        """
        # Keys are always the contract's, also when the draft was read from a file with other names.
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, **kwargs)
        self._write_beside(save_directory)

    def _write_beside(self, folder):
        """What a folder holds besides weights and config."""
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        else:
            # One that lies there from before is not this draft's.
            Path(folder, GENERATION_CONFIG_NAME).unlink(missing_ok=True)
        write_code(folder)

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        # With `push_to_hub=True`, saving uploads before it returns.
        self._write_beside(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)
