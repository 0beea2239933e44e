# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Do sampled answers of the embedded default look like the target's own? Two-sample tests of whole answers.

    python tests/sampling_statistics.py --rows 512 --max-new-tokens 24

Plain sampling and sampling with the draft each write `--rows` answers. Their mean log-probability under the target,
their length, their number of distinct tokens and the id of every fourth token are compared by the two-sample
Kolmogorov-Smirnov test. Fails where the smallest p-value is below 0.01 after Bonferroni's correction.
"""

import argparse
import math
import sys

import torch

from domino_spec.evaluation.benchmark import encode, load_pair

QUESTIONS = ("Write a short poem about the sea.", "What is a good way to learn to cook?")


def ks_p(left: torch.Tensor, right: torch.Tensor) -> float:
    """Asymptotic p-value of the two-sample Kolmogorov-Smirnov test; with ties it errs on the side of no difference."""
    values = torch.cat([left, right]).unique()
    distance = max(
        abs(float((left <= value).double().mean() - (right <= value).double().mean())) for value in values.tolist()
    )
    size = math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    x = (size + 0.12 + 0.11 / size) * distance
    if x < 0.2:
        # The series does not converge there; its limit is 1.
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (j - 1) * math.exp(-2 * j * j * x * x) for j in range(1, 101))))


@torch.no_grad()
def statistics_of(target, ids: torch.LongTensor, prompt_length: int) -> dict[str, torch.Tensor]:
    """One number per answer, for each statistic. What follows an end token is not counted."""
    end = target.generation_config.eos_token_id
    new = ids[:, prompt_length:]
    real = (new == end).cumsum(-1) - (new == end).long() == 0
    logits = target(ids[:, :-1]).logits[:, prompt_length - 1 :]
    log_probs = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
    statistics = {
        "log-probability": (log_probs * real).sum(-1) / real.sum(-1),
        "length": real.sum(-1).double(),
        "distinct tokens": torch.tensor(
            [float(len(set(row[keep].tolist()))) for row, keep in zip(new, real, strict=True)]
        ),
    }
    for place in range(0, new.shape[1], 4):
        statistics[f"token {place}"] = new[:, place].double()
    return statistics


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    target, tokenizer, draft = load_pair("default", "default", torch.float32)
    worst, tests = 1.0, 0
    for question in QUESTIONS:
        inputs = encode(tokenizer, question)
        length, made = inputs["input_ids"].shape[1], {}
        for seed, (name, extra) in enumerate((("plain", {}), ("draft", {"assistant_model": draft}))):
            torch.manual_seed(seed)
            parts: dict[str, list[torch.Tensor]] = {}
            for _ in range(args.rows // args.batch):
                ids = target.generate(
                    **inputs,
                    **extra,
                    do_sample=True,
                    temperature=args.temperature,
                    top_k=0,
                    num_return_sequences=args.batch,
                    max_new_tokens=args.max_new_tokens,
                )
                ids = torch.nn.functional.pad(
                    ids, (0, length + args.max_new_tokens - ids.shape[1]), value=target.generation_config.eos_token_id
                )
                for key, value in statistics_of(target, ids, length).items():
                    parts.setdefault(key, []).append(value)
            made[name] = {key: torch.cat(values) for key, values in parts.items()}
        for key, plain in made["plain"].items():
            p_value = ks_p(plain, made["draft"][key])
            worst, tests = min(worst, p_value), tests + 1
            means = float(plain.mean()), float(made["draft"][key].mean())
            print(f"{question[:24]!r} {key}: plain {means[0]:.3f}, draft {means[1]:.3f}, p {p_value:.3f}", flush=True)
    print(f"{tests} tests of {args.rows} answers each: smallest p {worst:.4f}, level {0.01 / tests:.5f}")
    sys.exit(worst < 0.01 / tests)


if __name__ == "__main__":
    main()
