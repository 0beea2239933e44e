# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""What does each part of the objective bring? The same small training, one thing changed, over seeds.

    python benchmarks/objective.py examples/recipes/smollm2-135m.yaml --train_data chat.jsonl \
        --features_dir runs/features --work runs/objective --results benchmarks/results/objective.json

Every run is `domino-spec train` with the recipe given, `--max_steps 300` and another seed and variant; what is not said
here goes on to the recipe. Reported are the acceptance lengths on the rows held out, with the head and without. Runs
that `--work` holds already are not made again.
"""

import argparse
import json
import statistics
from pathlib import Path

import yaml

from domino_spec.evaluation.benchmark import provenance
from domino_spec.evaluation.report import format_table
from domino_spec.training import recipe

VARIANTS = {
    "base weight falls from 1 to 0": {},
    "base weight always 0": {"lambda_base_start": 0.0, "lambda_base_decay_ratio": None},
    "base weight always 0.5": {"lambda_base_start": 0.5, "lambda_base_decay_ratio": None},
    "half distilled": {"distillation_weight": 0.5},
    "all distilled": {"distillation_weight": 1.0},
    "label smoothing 0.1": {"label_smoothing_factor": 0.1},
    "D-PACE 0.5": {"dpace_alpha": 0.5, "loss_decay_gamma": None},
    "without the hidden loss": {"hidden_loss_weight": 0.0},
}
FIXED = {"lambda_base_start": 1.0, "lambda_base_decay_ratio": 0.5}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args, rest = parser.parse_known_args()
    measured = []
    for seed in args.seeds:
        for name in args.variants:
            folder = args.work / f"{name.replace(' ', '-')}-{seed}"
            results = folder / "eval_results.json"
            if not results.exists():
                fixed = {"max_steps": args.steps, "seed": seed, "output_dir": str(folder), "save_strategy": "no"}
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / "recipe.yaml"
                path.write_text(
                    yaml.safe_dump({**yaml.safe_load(args.recipe.read_text()), **FIXED, **fixed, **VARIANTS[name]})
                )
                recipe.main([str(path), *rest])
            found = json.loads(results.read_text())
            lengths = {key: value for key, value in found.items() if key.endswith("_accept_len")}
            base = [value for key, value in lengths.items() if key.endswith("_base_accept_len")]
            head = [value for key, value in lengths.items() if not key.endswith("_base_accept_len")]
            measured.append(
                {"variant": name, "seed": seed, "head": statistics.fmean(head), "base": statistics.fmean(base)}
            )
    rows = []
    for name in args.variants:
        runs = [run for run in measured if run["variant"] == name]
        heads = [run["head"] for run in runs]
        rows.append(
            [
                name,
                f"{statistics.fmean(heads):.3f}",
                f"{min(heads):.3f}..{max(heads):.3f}",
                f"{statistics.fmean(run['base'] for run in runs):.3f}",
            ]
        )
    print(format_table(["variant", "acceptance length", "over seeds", "head off"], rows))
    if args.results is not None:
        document = {
            **provenance("python benchmarks/objective.py"),
            "runs": measured,
        }
        args.results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
