# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""How does a draft appear on the Hub? A folder that works alone, and a card that says only what is known.

    domino-spec card runs/draft --base-model Qwen/Qwen3-8B --bench results.json --license apache-2.0
    domino-spec card runs/draft --base-model Qwen/Qwen3-8B --push-to me/Qwen3-8B-Domino

What the card knows comes from the folder (`config.json`, and `training.json` and `eval_results.json`, which
`domino-spec train` leaves there) and from results of `domino-spec bench`. What is not known is left out or named as not
known, never guessed. A pushed card names the revision of the weights and code it was written for in its snippets.
"""

import argparse
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import StrictDataclassError

from ..configuration_domino import DominoConfig
from ..evaluation.cost import cost_of
from ..evaluation.report import acceptance_by_position, format_number
from ..training.arguments import RECORD
from .sglang import check_serving, launch_command

_UPLOADED = [
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("configuration_domino.py", "modeling_domino.py", "generation.py", "custom_generate/generate.py"),
    *(RECORD, "eval_results.json"),
]
TAGS = ("speculative-decoding", "domino")

CITATION = """\
```bibtex
@article{huang2026domino,
  title  = {Domino: Decoupling Causal Modeling from Autoregressive Drafting in Speculative Decoding},
  author = {Huang, Jianuo and Zhang, Yaojie and Zhang, Qituan and Lin, Hao and Xu, Hanlin and Zhang, Linfeng},
  journal = {arXiv preprint arXiv:2605.29707},
  year   = {2026}
}
```"""


def model_card(
    folder: str | Path,
    base_model: str,
    repo_id: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    bench: Mapping[str, Any] | None = None,
) -> ModelCard:
    """
    The card of the draft in `folder`.

    Args:
        folder: with `config.json`, and perhaps what training left there.
        base_model (`str`): Hub id of the target; of one in a folder only the folder's name is told.
        repo_id (`str`, *optional*): where the draft is, or will be, on the Hub; default: the folder's name stands in.
        revision (`str`, *optional*): commit that the snippets load.
        license (`str`, *optional*): as the Hub names it.
        bench (`dict`, *optional*): results of `domino-spec bench --output`.

    Raises:
        FileNotFoundError: when there is no config.
        ValueError: when the config is not complete, or `bench` holds no results.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is no folder of a draft: it has no config.json.")
    try:
        config = DominoConfig.from_pretrained(folder)
    except (StrictDataclassError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'} is no config of a draft: {' '.join(str(error).split())}") from error
    name = (repo_id or folder.resolve().name).split("/")[-1]
    on_hub = not Path(base_model).is_dir()
    name_of_base = base_model if on_hub else Path(base_model).name
    data = ModelCardData(
        base_model=base_model if on_hub else None,
        library_name="transformers",
        license=license,
        pipeline_tag="text-generation",
        tags=[*TAGS],
    )
    parts = [
        f"# {name}",
        f"A [Domino](https://arxiv.org/abs/2605.29707) draft for {_linked(base_model) if on_hub else name_of_base}: "
        "it proposes a block of tokens that the target then verifies in one pass, so that `generate` gives the answer "
        "that the target alone would have given, in fewer passes.",
        "## How it works",
        _anatomy(config),
        "## When to use it, and when not",
        f"With {name_of_base} and text like that it was trained on, on a GPU, for small batches: it saves passes of "
        "the target, not arithmetic. Another target, even a fine-tuned one, accepts less; on a CPU, or for large "
        "batches, a pass over a block costs more than a pass over one token, and little or nothing is gained. "
        "The output is the target's own: token for token in float32; in half precision it may differ where the "
        "target's two best scores are a rounding step apart; sampled, it has the target's distribution.",
        "## Quick start",
        _usage(folder, config, name_of_base, repo_id or str(folder), revision),
        "## What it measures",
        _measured(bench),
        "## How it was trained",
        _training(folder),
        "## Citation",
        CITATION,
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def _linked(repo_id: str) -> str:
    return f"[{repo_id}](https://huggingface.co/{repo_id})"


def _anatomy(config: DominoConfig) -> str:
    cost = cost_of(config)
    layers = ", ".join(map(str, config.target_layer_ids or ()))
    text = (
        f"{config.num_hidden_layers} transformer layers look at a whole block of {config.block_size} positions at once "
        f"and attend to the target's hidden states (raw outputs of decoder layers {layers}). "
    )
    if config.has_head:
        but = {0: "", 1: " but the first"}.get(
            config.pure_draft_prefix_len or 0, f" but the first {config.pure_draft_prefix_len}"
        )
        text += (
            f"A GRU of width {config.gru_hidden_dim} reads the tokens proposed so far, and a projection through "
            f"{config.emb_dim} dimensions corrects the logits of every proposal{but}. "
        )
    else:
        text += "It has no head: proposals are those of the backbone alone (a DFlash draft). "
    size = "" if config.dtype is None else f", {cost.draft_bytes / 2**20:.0f} MiB in {str(config.dtype)[6:]}"
    millions = f"{(cost.backbone + cost.head) / 1e6:.1f} million parameters"
    return f"{text}Embedding and output head are the target's. {millions}{size}."


def _usage(folder: Path, config: DominoConfig, base_model: str, place: str, revision: str | None) -> str:
    pinned = f', revision="{revision}"' if revision else ""
    parts = [
        f"""```python
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base_model}")
target = AutoModelForCausalLM.from_pretrained("{base_model}", dtype=torch.bfloat16, device_map="auto")
draft = AutoModel.from_pretrained("{place}", trust_remote_code=True, dtype=torch.bfloat16{pinned})
draft = draft.to(target.device)
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Why is the sky blue?"}}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
).to(target.device)
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```""",
        "Adapt it with PEFT, which leaves these weights alone:",
        f"""```python
from peft import get_peft_model
from domino_spec.training.adapters import lora_config

adapted = get_peft_model(draft, lora_config(draft.config, "{"head" if config.has_head else "backbone"}"))
```""",
    ]
    obstacles = [finding for finding in check_serving(folder) if finding.severity == "error"]
    if obstacles:
        reasons = "; ".join(f"`{finding.field}` is {finding.value}: {finding.rule}" for finding in obstacles)
        parts.append(f"SGLang does not serve it ({reasons}).")
    else:
        command = launch_command(folder, base_model)
        command[command.index("--speculative-draft-model-path") + 1] = place
        parts += ["Serve it with SGLang:", f"```bash\n{shlex.join(command)}\n```"]
    return "\n\n".join(parts)


def _measured(bench: Mapping[str, Any] | None) -> str:
    if bench is None:
        return (
            "Not measured. `domino-spec bench --target TARGET --draft DRAFT --prompts FILES` gives acceptance lengths "
            "and speeds on your own prompts."
        )
    try:
        rows = [*bench["tasks"].items(), ("all", bench["overall"])]
        settings, machine, versions = bench["settings"], bench["machine"], bench["versions"]
        lines = [
            "| task | prompts | acceptance length | head off | tok/s plain | tok/s Domino | ratio |",
            "|---|---|---|---|---|---|---|",
        ]
        for task, found in rows:
            plain, domino, base = (found["runs"][run] for run in ("plain", "domino", "base_only"))
            cells = [
                task,
                str(found["prompts"]),
                format_number(domino["acceptance_length"]["mean"]),
                format_number(base["acceptance_length"]["mean"]),
                format_number(plain["tokens_per_second"], 1),
                format_number(domino["tokens_per_second"], 1),
                format_number(domino["ratio"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        taken = {
            name: acceptance_by_position(bench["overall"]["runs"][run]["acceptance_length"]["histogram"])
            for name, run in (("head", "domino"), ("head off", "base_only"))
        }
        deepest = max(map(len, taken.values()))
        if deepest:
            lines += ["", f"| proposal | {' | '.join(map(str, range(1, deepest + 1)))} |", "|---" * (deepest + 1) + "|"]
        for name, shares in taken.items() if deepest else ():
            cells = [f"{share:.2f}" for share in shares] + ["-"] * (deepest - len(shares))
            lines.append(f"| {' | '.join([name, *cells])} |")
        same = f"{bench['overall']['runs']['domino']['identical']} of {bench['overall']['prompts']}"
        where = machine["gpu"] or f"{machine['cores']} cores of {machine['cpu']}"
        # Files of before it could be asked for have no such entry.
        tree = f"trees of {settings['tree']} proposals, " if settings.get("tree") else ""
        conditions = (
            f"{tree}{settings['dtype']}, at most {settings['max_new_tokens']} new tokens; {same} answers identical to "
            f"plain generation. {where}, torch {versions['torch']}, transformers {versions['transformers']}; "
            f"`{bench['command']}`."
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`bench` is not a results file of `domino-spec bench --output`: it lacks {error}.") from error
    return "\n".join(lines) + (
        "\n\nAcceptance length: tokens per pass of the target, the token of the prefill not counted. Head off: the "
        "same with the backbone's guesses alone. Second table: how often each proposal of a block is taken where those "
        f"before it were; a round that the answer's end cut short counts as refused there. Greedy, {conditions}"
    )


def _training(folder: Path) -> str:
    path = folder / RECORD
    if not path.is_file():
        return "Not recorded."
    try:
        return _told(json.loads(path.read_text(encoding="utf-8")), folder)
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is no record of `domino-spec train` ({error!r}): remove it.") from error


def _told(record: Mapping[str, Any], folder: Path) -> str:
    data = ", ".join(f"{d['rows']:,} rows of `{d['source']}`" for d in record["data"])
    tokens = sum(d["supervised_tokens"] for d in record["data"])
    lines = [
        f"{record['steps']:,} steps from `{record['start_from']}` on {data}: {tokens:,} supervised tokens, "
        f"{record['epochs']:.1f} epochs. `{record['command']}`, with torch {record['versions']['torch']} and "
        f"transformers {record['versions']['transformers']}.",
    ]
    results = folder / "eval_results.json"
    if results.is_file():
        found = json.loads(results.read_text(encoding="utf-8"))
        end = "_base_accept_len"
        sources = sorted(name.removesuffix(end) for name in found if name.endswith(end))
        rows = [
            f"| {source.removeprefix('eval_')} | {found[f'{source}_accept_len']:.2f} | {found[source + end]:.2f} |"
            for source in sources
        ]
        if rows:
            lines.append(
                "On rows held out, teacher-forced:\n\n| source | acceptance length | head off |\n|---|---|---|\n"
                + "\n".join(rows)
            )
    return "\n\n".join(lines)


def publish(
    folder: str | Path,
    repo_id: str,
    base_model: str,
    private: bool | None = None,
    token: str | None = None,
    **card: Any,
) -> tuple[str, str]:
    """
    Upload a folder, then a card whose snippets load just that upload.

    Args:
        folder: as [`model_card`] reads it, with weights and code.
        repo_id (`str`): made if it is not there.
        private (`bool`, *optional*), token (`str`, *optional*): as `huggingface_hub` has them.
        card: more of [`model_card`].

    Returns:
        The repository's whole id, and the revision of the weights that the card names.

    Raises:
        ValueError: when the folder lacks weights or code, before anything is uploaded.
    """
    folder = Path(folder)
    wanted = ("config.json", "modeling_domino.py", "configuration_domino.py", "generation.py")
    missing = [name for name in wanted if not (folder / name).is_file()]
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: write it with `draft.save_pretrained` or `domino-spec export`."
        )
    # Made first, so that what is wrong with it is known before anything is uploaded.
    model_card(folder, base_model, repo_id, **card)
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    # Training leaves much more in its folder: states of the optimiser, features of the text, whatever else lies there.
    commit = api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=_UPLOADED)
    content = str(model_card(folder, base_model, repo_id, commit.oid, **card))
    api.upload_file(repo_id=repo_id, path_or_fileobj=content.encode(), path_in_repo="README.md")
    return repo_id, commit.oid


# ---- Command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec card`."""
    parser.add_argument("folder", type=Path, help="of the draft; its README.md is written")
    parser.add_argument("--base-model", required=True, help="Hub id of the target")
    parser.add_argument("--license", help="as the Hub names it, such as apache-2.0")
    parser.add_argument("--bench", type=Path, metavar="RESULTS.json", help="numbers of `domino-spec bench --output`")
    parser.add_argument("--push-to", metavar="REPO", help="upload folder and card to this Hub id")
    parser.add_argument("--private", action="store_true", default=None, help="make the repository private")


def run(args: argparse.Namespace) -> int:
    """
    Writes the card, and uploads it with the folder if asked to.

    Returns:
        0.

    Raises:
        ValueError: if the folder or the results cannot be used.
        OSError: if a file cannot be read or written, or the Hub not be reached.
    """
    bench = None
    if args.bench is not None:
        try:
            bench = json.loads(args.bench.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--bench {args.bench} is not JSON: {error}") from error
        if bench is None:
            raise ValueError(f"--bench {args.bench} holds null, not results of `domino-spec bench --output`")
    known = {"license": args.license, "bench": bench}
    repo_id, revision = args.push_to, None
    if repo_id is not None:
        repo_id, revision = publish(args.folder, repo_id, args.base_model, private=args.private, **known)
        print(f"https://huggingface.co/{repo_id} at {revision}")
    path = args.folder / "README.md"
    path.write_text(str(model_card(args.folder, args.base_model, repo_id, revision, **known)), encoding="utf-8")
    print(f"wrote {path}")
    return 0
