# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Draw how a training run went: acceptance lengths with the head and without, and both losses.

    python examples/plot_training.py runs/draft --output runs/draft/training.svg

Needs matplotlib. Points are means over the training blocks since the one before (`logging_steps`), as
`domino-spec train` logs them; with `--eval_strategy steps` those of the rows held out are drawn too.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

CURVES = {
    "acceptance length, simulated": {"accept_len": "with the head", "base_accept_len": "head off"},
    "cross-entropy": {"final_loss": "final logits", "base_loss": "base logits"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the `output_dir` of a run")
    parser.add_argument("--output", type=Path, required=True, help="a picture: .svg, .png, .pdf")
    args = parser.parse_args()
    history = json.loads((args.folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    figure, panels = plt.subplots(1, len(CURVES), figsize=(9, 3.2), layout="constrained")
    for panel, (title, curves) in zip(panels, CURVES.items(), strict=True):
        for color, (name, label) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
            points = [(entry["step"], entry[name]) for entry in history if name in entry]
            panel.plot(*zip(*points, strict=True), color=color, label=label)
            held_out: dict[int, list[float]] = {}
            for entry in history:
                for key, value in entry.items():
                    # Names are eval_SOURCE_METRIC, and one metric's name ends with another's.
                    if (
                        key.startswith("eval_")
                        and key.endswith(f"_{name}")
                        and ("_base_" in key) == (name[:5] == "base_")
                    ):
                        held_out.setdefault(entry["step"], []).append(value)
            steps = sorted(held_out)
            means = [sum(held_out[step]) / len(held_out[step]) for step in steps]
            if steps:
                panel.plot(steps, means, "o", color=color, label=f"{label}, held out")
        panel.set(title=title, xlabel="step")
        panel.legend(frameon=False)
    plt.rcParams["svg.fonttype"] = "none"
    figure.savefig(args.output)


if __name__ == "__main__":
    main()
