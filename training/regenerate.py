# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Where does training text come from? From the target itself: a draft must learn what the target will write."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed


@torch.inference_mode()
def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    path: str | Path,
    temperatures: Sequence[float] = (0.0,),
    top_k: int = 40,
    batch_size: int = 64,
    max_new_tokens: int = 256,
    seed: int = 0,
):
    """
    Have the target answer `prompts` and append one row for each to `path`, in order: `{"messages": [user, assistant],
    "finished": bool, "temperature": float}`, `finished` saying whether the answer came to its own end.

    Rows that `path` holds already are not made again, so a killed run goes on where it stopped; a line that the kill
    cut short is dropped first.

    Args:
        target, tokenizer: the pair, with a chat template.
        prompts: user turns.
        path: jsonl file to extend.
        temperatures: prompt i is answered at `temperatures[i % len(temperatures)]`; 0 is greedy.
        top_k (`int`): tokens that sampling chooses from.
        batch_size (`int`): answers written at once.
        max_new_tokens (`int`): longest answer, in tokens.
        seed (`int`): of the sampling, together with the batch's place.
    """
    path = Path(path)
    done = _whole_lines(path)
    eos = target.generation_config.eos_token_id
    ends = set(eos) if isinstance(eos, list) else {eos}
    with open(path, "a", encoding="utf-8") as file, tqdm(total=len(prompts), initial=done, unit="row") as bar:
        for start in range(done, len(prompts), batch_size):
            places = range(start, min(start + batch_size, len(prompts)))
            rows: dict[int, dict] = {}
            for temperature in sorted({temperatures[i % len(temperatures)] for i in places}):
                chosen = [i for i in places if temperatures[i % len(temperatures)] == temperature]
                inputs = tokenizer.apply_chat_template(
                    [[{"role": "user", "content": prompts[i]}] for i in chosen],
                    add_generation_prompt=True,
                    padding=True,
                    return_dict=True,
                    return_tensors="pt",
                    tokenizer_kwargs={"padding_side": "left"},
                )
                set_seed(seed + start)
                sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {}
                output = target.generate(
                    **inputs.to(target.device), max_new_tokens=max_new_tokens, **{"do_sample": False, **sampling}
                )
                for i, ids in zip(chosen, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                    length = next((k for k, token in enumerate(ids) if token in ends), len(ids))
                    answer = tokenizer.decode(ids[:length], skip_special_tokens=True)
                    rows[i] = {
                        "messages": [
                            {"role": "user", "content": prompts[i]},
                            {"role": "assistant", "content": answer},
                        ],
                        "finished": length < len(ids),
                        "temperature": temperature,
                    }
            file.writelines(json.dumps(rows[i]) + "\n" for i in places)
            file.flush()
            bar.update(len(places))


def _whole_lines(path: Path) -> int:
    """Number of complete lines of `path`; what follows the last line break is cut off."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return whole.count(b"\n")
