# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Set-up that the contract tests share: targets, drafts of chosen acceptance, and what was called."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    make_draft,
    make_target,
    random_tokens,
)
from test_generate_lossless import GoodDraft
from transformers import (
    LogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

BLOCK = 6
PROPOSALS = BLOCK - 1
PROMPT = 9
NEW_TOKENS = 24
# transformers renamed the argument and the output's field in 5.24.
CACHE = next(f.name for f in dataclasses.fields(GenerateDecoderOnlyOutput) if f.name in ("cache", "past_key_values"))
DOORS = ("assistant_model", "custom_generate", "spec_generate")

DETAILS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}

each_arch = pytest.mark.parametrize("arch", ARCHITECTURES)
each_door = pytest.mark.parametrize("door", DOORS)


@functools.cache
def cached_target(arch="qwen3", attn_implementation="eager", dtype=torch.float64, seed=7):
    return make_target(arch, dtype=dtype, seed=seed, attn_implementation=attn_implementation)


def call(door, target, draft):
    """`generate` with `draft`, through one of its three doors."""
    if door == "assistant_model":
        return partial(target.generate, assistant_model=draft)
    if door == "custom_generate":
        return partial(target.generate, custom_generate=draft.decode)
    return partial(draft.spec_generate, target=target)


def good_draft(target, text, spoiled=(), **config):
    dtype = config.pop("dtype", None)
    return GoodDraft.following(make_draft(target, dtype=dtype, **config), target, text[0], spoiled)


def spoil(prompt_length=PROMPT, new_tokens=NEW_TOKENS):
    """Positions whose rejection cuts blocks at every offset, and leaves some whole."""
    return {prompt_length + i for i in (3, 4, 9, 16) if i < new_tokens}


def prompt_and_plain(target, seed=3, length=PROMPT, new_tokens=NEW_TOKENS, **kwargs):
    prompt = random_tokens(1, length, seed=seed)
    return prompt, target.generate(prompt, max_new_tokens=new_tokens, **kwargs)


@contextmanager
def recorded_widths(model):
    """Collects the number of input positions of every pass of `model`."""
    widths: list[int] = []

    def note(module, args, kwargs):
        tensor = next(kwargs[k] for k in ("input_ids", "inputs_embeds", "noise_embeds") if kwargs.get(k) is not None)
        widths.append(tensor.shape[1])

    def note_any(module, args, kwargs):
        if args:
            widths.append(args[0].shape[1])
        else:
            note(module, args, kwargs)

    handle = model.register_forward_pre_hook(note_any, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()


class RecordingStreamer(BaseStreamer):
    """Notes what it is given and, for each piece, how many target passes had run by then."""

    def __init__(self, passes=()):
        self.pieces, self.passes_before, self.passes, self.events = [], [], passes, []

    def put(self, value):
        self.pieces.append(value.clone())
        self.passes_before.append(len(self.passes))
        self.events.append("put")

    def end(self):
        self.events.append("end")


class Failing(LogitsProcessor, StoppingCriteria):
    """Raises at its n-th call, as processor, criterion or streamer."""

    def __init__(self, at, error=RuntimeError):
        self.at, self.error, self.calls = at, error, 0

    def _count(self):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("raised on purpose")

    def __call__(self, input_ids, scores):
        self._count()
        # As a processor it returns scores, as a criterion nobody is done.
        return scores if self.is_processor else torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def put(self, value):
        self._count()

    def end(self):
        pass

    is_processor = True


def traces(*models):
    """What a call could leave on a model: hooks, and attributes set on its modules."""
    found = {}
    for i, model in enumerate(models):
        for name, module in model.named_modules():
            hooks = [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks")]
            found[i, name] = (hooks, sorted(vars(module)), module.training)
    return found


def run_script(script, *arguments):
    """Run Python code in a new process that can import what this one can; its last line is JSON."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def layers_of(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def first_difference_is_tie(target, plain, other, steps: int = 32) -> bool:
    """
    Whether two greedy texts part at a numeric tie, as rounding allows, or by a fault.

    The target is asked for its logits where the texts part. Both tokens must lie within `steps` rounding steps of
    the best logit: then a pass over several tokens may prefer the other one. A text that just ends early is a fault.

    Args:
        plain, other: ids `[1, S]`, not equal, written by `target` without logits processors.
    """
    shared = min(plain.shape[1], other.shape[1])
    different = (plain[0, :shared] != other[0, :shared]).nonzero()
    if not len(different):
        if plain.shape[1] == other.shape[1]:
            raise ValueError("the texts are equal: there is no first difference")
        return False
    at = int(different[0])
    with torch.no_grad():
        logits = target(plain[:, :at]).logits[0, -1]
    step = torch.finfo(logits.dtype).eps * logits.abs().max()
    gap = logits.max() - logits[[int(plain[0, at]), int(other[0, at])]].min()
    return bool(gap <= steps * step)
