# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Is sampling lossless over a million draws? The chi-square tests of the suite, with as many draws as one has time for.

    PYTHONPATH=tests python tests/sampling_draws.py --batch 4 --draws 1000000

Draws are tokens: answers of three, in calls of `--batch` rows. Fails where the smallest p-value is below 0.01 after
Bonferroni's correction.
"""

import argparse
import itertools
import sys

import torch
from test_generate_sampling import COMBINATIONS, NEW_TOKENS, compare_with_exact, make_pair


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    pair, worst = make_pair(), 1.0
    calls = -(-args.draws // (args.batch * NEW_TOKENS))
    for name in COMBINATIONS:
        p_value, acceptance_length = compare_with_exact(pair, name, itertools.repeat(args.batch, calls))
        worst = min(worst, p_value)
        print(f"{name}: p {p_value:.4f}, acceptance length {acceptance_length:.2f}", flush=True)
    level, draws = 0.01 / len(COMBINATIONS), calls * args.batch * NEW_TOKENS
    print(f"{draws} draws each in batches of {args.batch}: smallest p {worst:.5f}, level {level:.5f}")
    sys.exit(worst < level)


if __name__ == "__main__":
    main()
