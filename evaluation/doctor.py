# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Why is the acceptance length low? Measures what is wrong with a target and a draft, and says how to mend it.

    domino-spec doctor default default
    domino-spec doctor Qwen/Qwen3-8B runs/draft --device cuda --no-thinking --expected 4.5
    domino-spec doctor Qwen/Qwen3-8B runs/draft --features runs/features --json

A wrong draft never shows in the text, only in the acceptance. First the files are compared: config, weights, code and
tokenizer. Then the target answers a few prompts, and the draft predicts these answers from the target's hidden states,
as it is configured and with one thing changed at a time: neighbouring target layers, other rotary bases and mask
tokens, the head off, the states or tokens of another text. What predicts clearly better names the fault.

Predictions are compared by their loss, in nats a proposal, among the tokens that occur in the answers; it tells more
than acceptance, which counts hits only. "Clearly" is by at least 0.05 nats, and by three standard errors where the best
of many settings is picked, two where one question is asked. Differences are taken answer by answer, and the error over
the answers, since blocks of one answer resemble one another. A fault that costs less is not found, and costs next to
nothing on text of this length.

A stale cache is code or features that were right once. transformers runs the code in a draft's folder, from a copy in
its module cache: code of an older package, or a copy that is no longer the repository's, decodes as it did then.
Features that another target or other layers left in a folder teach a draft that target.
"""

import argparse
import filecmp
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import HF_MODULES_CACHE

from ..checkpoints import load_default_target
from ..configuration_domino import NESTED_FIELDS, DominoConfig
from ..generation.context import vocabulary_size
from ..generation.remote_code import CODE_FILES, write_code
from ..modeling_domino import DominoDraftModel
from ..serving.folders import DTYPES as STORED_DTYPES
from ..serving.folders import TensorHeader, find_folder, read_headers
from ..training.arguments import RECORD
from ..training.features import target_fingerprint
from .benchmark import DTYPES, InputError, add_device_argument, check_device, encode, naming, positive_int, read_prompts
from .predictions import (
    OF_MANY,
    Gain,
    Measured,
    Predictions,
    Setting,
    gain,
    write_answers,
)

WRONG_TARGET = "wrong target"
LAYER_IDS = "off-by-one layer ids"
MASK_TOKEN = "wrong mask token"
ROTARY_BASE = "wrong rotary base"
LABEL_SHIFT = "wrong label shift"
SHUFFLED_HEAD = "shuffled head"
DTYPE = "wrong dtype"
MISSING_HEAD = "missing head"
OTHER_TOKENIZER = "other tokenizer"
THINKING = "thinking on"
STALE_CACHE = "stale cache"
UNEXPLAINED = "unexplained"
_SETTINGS = (LAYER_IDS, MASK_TOKEN, ROTARY_BASE, LABEL_SHIFT)
_OTHERS = (SHUFFLED_HEAD, DTYPE, MISSING_HEAD, OTHER_TOKENIZER, THINKING, STALE_CACHE, UNEXPLAINED)
FAULTS = (WRONG_TARGET, *_SETTINGS, *_OTHERS)

# How much less a text has to cost in its order than shuffled for the target to have read it, in nats a token. For the
# prompts below and SmolLM2-135M: 3.3 and 8.7; with a tokenizer that is not its own 10.4 and 10.5.
READING_MARGIN = 0.5
# Reasoning is not as easy as plain answers: one has to get a quarter more proposals accepted than the other.
THINKING_RATIO = 1.25
# Below, a draft pays nowhere.
LOW_ACCEPTANCE_LENGTH = 1.2

_FEWEST_ANSWERS = 4
_MOST_MASK_TOKENS = 32
_ROTARY_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_HEAD_KEYS = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")

PROMPTS = (
    "Write a Python function that returns the second largest number in a list.",
    "A baker fills 12 trays with 8 rolls each and sells 70 rolls before noon. How many rolls are left?",
    "Why does the moon seem to change its shape over a month?",
    "Tell a short story about a lighthouse keeper who makes friends with a seagull.",
    "Explain in a few sentences why people keep bees, and name one risk that bees face today.",
    "List the things that one should pack for a weekend in the mountains, and say why.",
    "Write an SQL query that counts the orders of each customer in the last year.",
    "What is the difference between a virus and a bacterium?",
)


@dataclass(frozen=True)
class Check:
    """
    What became of the search for one fault.

    Args:
        fault: one of `FAULTS`.
        verdict: `"ok"`, `"fault"` or `"not checked"`.
        finding: what was found.
        remedy: what to do about a fault.
        numbers: of the finding.
    """

    fault: str
    verdict: Literal["ok", "fault", "not checked"]
    finding: str
    remedy: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def _ok(fault: str, finding: str, **numbers: Any) -> Check:
    return Check(fault, "ok", finding, numbers=numbers)


def _fault(fault: str, finding: str, remedy: str, **numbers: Any) -> Check:
    return Check(fault, "fault", finding, remedy, numbers)


@dataclass(frozen=True)
class Diagnosis:
    """
    Checks in the order of `FAULTS`, and mean teacher-forced acceptance lengths of the pair as it is configured, with
    the head and without; `None` where it came to no measurement.
    """

    checks: list[Check]
    acceptance_length: float | None = None
    base_acceptance_length: float | None = None

    @property
    def faults(self) -> list[str]:
        """Names of the faults found; none for a healthy pair."""
        return [check.fault for check in self.checks if check.verdict == "fault"]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a change is a pair of numbers, its mean and its standard error."""
        return {"faults": self.faults, **asdict(self)}

    def __str__(self) -> str:
        def wrapped(name: str, text: str) -> str:
            return textwrap.fill(text, 120, initial_indent=name, subsequent_indent=" " * 34, break_on_hyphens=False)

        lines = [wrapped(f"{c.verdict:<12}{c.fault:<22}", c.finding) for c in self.checks]
        if self.acceptance_length is not None:
            head_off = f"{self.base_acceptance_length:.2f} with the head off"
            lines.append(f"\nacceptance length {self.acceptance_length:.2f}, {head_off} (teacher-forced)")
            lines.append("losses are in nats a proposal, ± standard errors over the answers")
        lines.append("\nWhat to do:" if self.faults else "\nNo fault was found.")
        lines += [wrapped(f"{'':<12}{c.fault:<22}", c.remedy) for c in self.checks if c.verdict == "fault"]
        return "\n".join(lines)


# ---- What the files say --------------------------------------------------------------------------------------------


def check_code(folder: Path, modules_cache: str | Path = HF_MODULES_CACHE) -> Check:
    """
    Compares the code beside the weights with this package's, and what transformers has copied of a Hub snapshot with
    the snapshot (copies of plain folders it renews itself). Code of others, as in official checkpoints, is left alone.
    """
    model = folder / CODE_FILES[-1]
    if not (model.is_file() and "domino_spec" in model.read_text(encoding="utf-8")):
        return _ok(STALE_CACHE, "no code of this package lies in the draft's folder")
    differing, copies = [], []
    with TemporaryDirectory() as made:
        write_code(made)
        names = [path.relative_to(made) for path in sorted(Path(made).rglob("*.py"))]
        names = [name for name in names if (folder / name).is_file()]
        for name in names:
            if not filecmp.cmp(made / name, folder / name, shallow=False):
                differing.append(str(name))
            if folder.parent.name == "snapshots":
                found = Path(modules_cache, "transformers_modules").glob(f"**/{folder.name}/{name}")
                copies += [str(copy) for copy in found if not filecmp.cmp(copy, folder / name, shallow=False)]
    if differing:
        command = f"from domino_spec.generation.remote_code import write_code; write_code({str(folder)!r})"
        return _fault(
            STALE_CACHE,
            f"{', '.join(differing)} in {folder} is not the code of this package",
            f'renew it, `python -c "{command}"`, or the package, if it is the older of the two',
        )
    if copies:
        finding = f"transformers runs copies that differ from the repository's files: {', '.join(copies)}"
        return _fault(STALE_CACHE, finding, "delete them; transformers copies the files anew")
    return _ok(STALE_CACHE, f"the code in the draft's folder ({len(names)} files) is this package's")


def check_features(folder: str | Path, target: PreTrainedModel, layer_ids: list[int]) -> Check:
    """
    Compares what cached features were made with (see `training/features.py`) with the pair at hand.

    Raises:
        InputError: if `folder` holds none.
    """
    manifests = sorted(Path(folder).rglob("features.json"))
    if not manifests:
        raise InputError(f"--features {folder} holds no features.json, which lies beside cached features")
    for path in manifests:
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, value in (("target", target_fingerprint(target)), ("layer_ids", layer_ids)):
            if found.get(name) != value:
                return _fault(
                    STALE_CACHE,
                    f"the features in {path.parent} were made with {name} {found.get(name)}, this pair has {value}",
                    "delete the folder and train again: a draft learns the target that its features came from",
                )
    return _ok(STALE_CACHE, f"the features in {folder} are this target's")


def check_head(config: DominoConfig, headers: Mapping[str, TensorHeader]) -> Check:
    """Whether config and weights agree about the head. If not, `config` is changed so that what is there is loaded."""
    found = {name.removeprefix("model."): header.shape for name, header in headers.items()}
    missing = [name for name in _HEAD_KEYS if name not in found]
    if config.has_head and missing:
        config.projector_type = None
        return _fault(
            MISSING_HEAD,
            f'the config announces a head (`projector_type` "domino"), but the weights lack {", ".join(missing)}',
            "find the whole file; or, to go without a head, remove `projector_type`, in `dflash_config` as well",
        )
    if not config.has_head and not missing:
        config.gru_hidden_dim, config.emb_dim = found[_HEAD_KEYS[1]][1], found[_HEAD_KEYS[2]][0]
        # The weights do not tell; this is what public checkpoints have.
        config.pure_draft_prefix_len = 1
        config.projector_type = "domino"
        fields = {name: getattr(config, name) for name in ("projector_type", "gru_hidden_dim", "emb_dim")}
        return _fault(
            MISSING_HEAD,
            "the weights hold a head that the config does not announce, so it is not used",
            f"add {json.dumps(fields)} to `dflash_config`, and `pure_draft_prefix_len` (1 in public checkpoints)",
        )
    return _ok(MISSING_HEAD, f"config and weights agree that there is {'a' if config.has_head else 'no'} head")


def check_stored_dtype(config: DominoConfig, headers: Mapping[str, TensorHeader]) -> Check:
    """Whether the config's dtype, in which a draft is loaded, can hold what the file holds."""
    stored, stated = sorted({header.dtype for header in headers.values()}), config.dtype
    finding = f"stored as {', '.join(stored)}, loaded as {_name(stated)} (`dtype` in the config)"
    for dtype in map(STORED_DTYPES.get, stored):
        if dtype is None or (stated is not None and torch.promote_types(dtype, stated) != stated):
            remedy = "write the file's dtype into the config, or save the draft anew from the weights that were trained"
            return _fault(DTYPE, f"{finding}, which cannot hold all of its values", remedy)
    return _ok(DTYPE, finding)


def check_fit(config: DominoConfig, target: PreTrainedModel, folder: Path) -> Iterator[Check]:
    """Faults that the sizes of the two models tell."""
    theirs = target.config.get_text_config(decoder=True)
    rows = vocabulary_size(target.get_output_embeddings())
    resize = f"`draft.resize_token_embeddings({rows})` fits a draft to a target that has merely got more ids since"
    for fault, name, ours, their, remedy in (
        (WRONG_TARGET, "hidden_size", config.hidden_size, theirs.hidden_size, ""),
        (WRONG_TARGET, "num_target_layers", config.num_target_layers, theirs.num_hidden_layers, ""),
        (OTHER_TOKENIZER, "vocab_size", config.vocab_size, rows, f"; {resize}"),
    ):
        if ours not in (None, their):
            finding = f"`{name}` is {ours} in the draft's config, but the target's is {their}"
            yield _fault(fault, finding, _right_target(folder) + remedy)


def _right_target(folder: Path) -> str:
    advice = "use the target that the draft was trained for, or the draft of this target"
    if (folder / RECORD).is_file():
        trained_for = json.loads((folder / RECORD).read_text(encoding="utf-8")).get("target")
        advice += f" ({RECORD} in the draft's folder says: {trained_for!r})"
    return advice


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


# ---- What the target says ------------------------------------------------------------------------------------------


@torch.no_grad()
def check_tokenizer(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], folder: Path
) -> Check:
    """
    Whether the target can read the prompts as they are tokenised, which it can when their order makes them likelier;
    and whether a tokenizer in the draft's folder agrees.
    """
    path, rows = folder / "tokenizer.json", vocabulary_size(target.get_input_embeddings())
    own = Tokenizer.from_file(str(path)) if path.is_file() else None
    remedy = "encode prompts with the tokenizer that came with the target"
    costs = []
    for prompt in prompts:
        bare = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if own is not None and own.encode(prompt, add_special_tokens=False).ids != bare:
            finding = f"{path} reads {prompt!r} otherwise than the tokenizer in use"
            return _fault(OTHER_TOKENIZER, finding, f"{remedy}; {_right_target(folder)}")
        ids = torch.tensor(tokenizer(prompt)["input_ids"])
        if (highest := int(ids.max())) >= rows:
            finding = f"the tokenizer makes id {highest} of {prompt!r}, but the target's embedding has {rows} rows"
            return _fault(OTHER_TOKENIZER, finding, remedy)
        # The first token stays: it may be the one that begins all text.
        order = 1 + torch.randperm(len(ids) - 1, generator=torch.Generator().manual_seed(0))
        both = torch.stack([ids, torch.cat([ids[:1], ids[order]])]).to(target.device)
        logits = target(input_ids=both).logits[:, :-1].float()
        costs.append([F.cross_entropy(*pair).item() for pair in zip(logits, both[:, 1:], strict=True)])
    # A prompt of one token has no order and costs NaN.
    ordered, shuffled = torch.tensor(costs).nanmean(0).tolist()
    finding = f"the target reads the prompts at {ordered:.2f} nats a token, shuffled at {shuffled:.2f}"
    if shuffled - ordered < READING_MARGIN:
        return _fault(OTHER_TOKENIZER, f"{finding}: it cannot read them", remedy, ordered=ordered, shuffled=shuffled)
    return _ok(OTHER_TOKENIZER, finding, ordered=ordered, shuffled=shuffled)


# ---- What the draft makes of it ------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A setting that would mend `fault`, and what the draft makes of the answers with it."""

    fault: str
    setting: Setting
    measured: Measured


def candidates(
    setting: Setting, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, Setting]]:
    """Other settings to try, with the fault that each would mend, the likeliest first."""
    config = target.config.get_text_config(decoder=True)
    for step in (-1, 1):
        layer_ids = tuple(i + step for i in setting.target_layer_ids)
        if min(layer_ids) >= 0 and max(layer_ids) < config.num_hidden_layers:
            yield LAYER_IDS, replace(setting, target_layer_ids=layer_ids)
    rope = getattr(config, "rope_parameters", None) or {}
    for base in dict.fromkeys([rope.get("rope_theta"), *_ROTARY_BASES]):
        if base not in (None, setting.rope_theta):
            yield ROTARY_BASE, replace(setting, rope_theta=float(base))
    # After tokens that play a part, the ends of the vocabulary: ids there often stand for nothing.
    rows = vocabulary_size(target.get_input_embeddings())
    masks = [getattr(tokenizer, f"{part}_token_id") for part in ("mask", "pad", "eos", "bos", "unk")]
    masks += [len(tokenizer), rows - 1, len(tokenizer) - 1, 0, *sorted(tokenizer.added_tokens_decoder)]
    masks = [i for i in dict.fromkeys(masks) if i is not None and i < rows and i != setting.mask_token_id]
    for mask in masks[:_MOST_MASK_TOKENS]:
        yield MASK_TOKEN, replace(setting, mask_token_id=mask)
    yield LABEL_SHIFT, replace(setting, shift_label=not setting.shift_label)


def mend(
    predictions: Predictions, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Setting, Measured, list[Check]]:
    """
    Changes one setting after the other for as long as that clearly helps, the one that helps most first: beside a fault
    in one, changing another may help a little too. What leaves a draft deaf to its context does not mend it.

    Returns:
        The best setting, what it measures, and what became of each fault of a setting.
    """
    setting = Setting.of(predictions.draft.config)
    checks: list[Check] = []
    current = predictions.measure(setting)
    while True:
        mended = {check.fault for check in checks}
        options = [pair for pair in candidates(setting, target, tokenizer) if pair[0] not in mended]
        trials = [Trial(fault, other, predictions.measure(other)) for fault, other in options]
        best = {fault: min((t for t in trials if t.fault == fault), key=_mean_loss) for fault, _ in options}
        if not best:
            break
        first = min(best.values(), key=_mean_loss)
        # Those that are as good as the best, the likeliest in front.
        equal = [
            trial
            for trial in trials
            if trial.fault == first.fault
            and gain(current.base_loss, trial.measured.base_loss).is_clear(OF_MANY)
            and not gain(trial.measured.base_loss, first.measured.base_loss).is_clear()
        ]
        if not equal or not predictions.worth_of_context(*equal[0][1:]).is_clear():
            break
        checks.append(_describe_mend(predictions, setting, current, equal))
        setting, current = equal[0][1:]
    for fault, trial in best.items():
        costs = gain(trial.measured.base_loss, current.base_loss)
        name, _, value = setting.difference(trial.setting)
        finding = f"nothing is clearly better; the next best, `{name}` {value}, changes the loss by {costs}"
        checks.append(_ok(fault, finding, change=costs))
    return setting, current, checks


def _mean_loss(trial: Trial) -> float:
    return trial.measured.base_loss.mean().item()


def _describe_mend(predictions: Predictions, setting: Setting, before: Measured, equal: list[Trial]) -> Check:
    fault, mended, after = equal[0]
    name, old, new = setting.difference(mended)
    change = gain(after.base_loss, before.base_loss)
    length, mended_length = (
        predictions.measure(each, every_id=True).acceptance.mean().item() for each in (setting, mended)
    )
    finding = (
        f"`{name}` {new} instead of {old} changes the loss by {change} to {after.base_loss.mean():.2f}, and the "
        f"acceptance length from {length:.2f} to {mended_length:.2f}"
    )
    if len(equal) > 1:
        finding += f"; as good: {', '.join(setting.difference(trial.setting)[2] for trial in equal[1:])}"
    other_place = "dflash_config" if name in NESTED_FIELDS else "rope_parameters"
    return _fault(
        fault,
        finding,
        f"set `{name}` to {new} in the draft's config.json, in `{other_place}` as well",
        value=getattr(mended, name),
        change=change,
        acceptance_length=length,
        mended_acceptance_length=mended_length,
    )


def check_thinking(loud: Measured, quiet: Measured) -> Check:
    """Whether a draft gets clearly more accepted without reasoning, from measurements of answers with and without."""
    change = gain(quiet.acceptance, loud.acceptance)
    length, mended_length = loud.acceptance.mean().item(), quiet.acceptance.mean().item()
    finding = (
        f"enable_thinking=False changes the acceptance length by {change} from {length:.2f} to {mended_length:.2f}"
    )
    numbers = {"change": change, "acceptance_length": length, "mended_acceptance_length": mended_length}
    if change.is_clear() and mended_length - 1 >= THINKING_RATIO * (length - 1):
        remedy = "pass enable_thinking=False to the chat template, or train a draft on reasoning"
        return _fault(THINKING, finding, remedy, **numbers)
    return _ok(THINKING, finding, **numbers)


def check_used_dtype(used: Measured, full: Measured, dtype: torch.dtype) -> Check:
    """Whether a draft loses by the dtype that it is used in, from measurements in it and in float32."""
    change, finite = gain(used.base_loss, full.base_loss), all(tensor.isfinite().all() for tensor in used)
    finding = f"{_name(dtype)} instead of float32 changes the loss by {change}"
    if finite and not change.is_clear():
        return _ok(DTYPE, finding, change=change)
    remedy = "use the draft in bfloat16 or float32; the target may have another dtype"
    return _fault(DTYPE, finding if finite else f"in {_name(dtype)} the draft computes infinities", remedy)


def check_correction(measured: Measured, prefix: Gain) -> Check:
    """Whether the head helps, and reads what it is there to read; `prefix`: see [`Predictions.worth_of_prefix`]."""
    change = gain(measured.loss, measured.base_loss)
    finding = f"the head changes the loss by {change}, and the tokens of another block in it by {prefix}"
    if prefix.is_clear() and not change.is_clear():
        return _ok(SHUFFLED_HEAD, finding, change=change, prefix=prefix)
    return _fault(
        SHUFFLED_HEAD,
        f"{finding}: its weights belong to something else, or were never trained",
        "find the head that was trained with this backbone, or train one; until then `custom_generate=draft.decode, "
        "use_head=False` goes without",
        change=change,
        prefix=prefix,
    )


def check_explained(acceptance_length: float, expected: float | None, found: set[str]) -> Check:
    """Whether a draft is still low with all faults mended: below half of the proposals that were to be expected."""
    lowest = LOW_ACCEPTANCE_LENGTH if expected is None else 1 + (expected - 1) / 2
    finding = f"acceptance length {acceptance_length:.2f}{', with what was found mended' if found else ''}"
    if acceptance_length >= lowest:
        return _ok(UNEXPLAINED, f"{finding}, is not low", acceptance_length=acceptance_length)
    return _fault(
        UNEXPLAINED,
        f"{finding}, is below {lowest:.2f}, and no other check says why",
        "measure on text of the kind that the draft was trained on, with exactly its target (no other fine-tuning or "
        "quantisation); if it is low there too, train it further",
        acceptance_length=acceptance_length,
        lowest=lowest,
    )


# ---- All together --------------------------------------------------------------------------------------------------


def diagnose(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: str | Path,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = 64,
    template: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    features: Sequence[str | Path] = (),
    expected: float | None = None,
    on_pass: Callable[[], Any] = lambda: None,
) -> Diagnosis:
    """
    Looks for every fault of `FAULTS`.

    Args:
        target, tokenizer: as they are used with the draft.
        draft: its folder, a Hub id, or `"default"`. No code in it is executed.
        prompts: first turns of users that the draft should be good at, at least four.
        max_new_tokens (`int`): of each answer.
        template (`dict`, *optional*): variables for the chat template, as they are used.
        dtype (`torch.dtype`, *optional*): that the draft is used in; default: its config's.
        features: folders of cached features that should be this target's.
        expected (`float`, *optional*): acceptance length to be expected of such prompts; default: see
            `LOW_ACCEPTANCE_LENGTH`.
        on_pass: called after each measurement, for a progress bar.

    Raises:
        ValueError: when the draft cannot be loaded, or too few answers are longer than a block.
    """
    folder = find_folder(draft)
    headers = read_headers(folder)
    try:
        config = DominoConfig.from_pretrained(folder)
    except StrictDataclassError as error:
        raise ValueError(f"The config of {folder} cannot be used: {error}") from error
    layer_ids = config.require_complete()
    checks = [
        check_code(folder),
        *(check_features(path, target, layer_ids) for path in features),
        check_head(config, headers),
        check_stored_dtype(config, headers),
        *check_fit(config, target, folder),
        check_tokenizer(target, tokenizer, prompts, folder),
    ]
    if {WRONG_TARGET, OTHER_TOKENIZER} & _faults(checks):
        return _conclude(checks)

    def load(as_dtype: torch.dtype) -> DominoDraftModel:
        loaded = DominoDraftModel.from_pretrained(folder, config=config, dtype=as_dtype)
        return loaded.eval().to(target.device)

    model = load(torch.float32)
    model.check_target(target)
    if broken := [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]:
        remedy = "save the draft anew, in bfloat16 or float32, from the weights that were trained"
        return _conclude([*checks, _fault(DTYPE, f"infinities or NaN are stored in {', '.join(broken)}", remedy)])

    template = dict(template or {})
    quiet = {**template, "enable_thinking": False}
    modes = [template]
    if not torch.equal(*(encode(tokenizer, prompts[0], **mode)["input_ids"] for mode in (template, quiet))):
        modes.append(quiet)
    written = zip(*(write_answers(target, tokenizer, prompts, max_new_tokens, mode) for mode in modes), strict=True)
    usable = [each for each in written if all(len(ids) - start > model.config.block_size for ids, start in each)]
    if len(usable) < _FEWEST_ANSWERS:
        raise ValueError(
            f"Only {len(usable)} of {len(prompts)} prompts got an answer longer than a block of "
            f"{model.config.block_size} tokens, and {_FEWEST_ANSWERS} are needed to tell a fault from noise: give "
            "other prompts, or allow more new tokens."
        )
    sets = [Predictions(target, model, answers, on_pass) for answers in zip(*usable, strict=True)]
    configured = [each.measure(Setting.of(model.config), every_id=True) for each in sets]
    if len(sets) > 1:
        checks.append(check_thinking(*configured))
    else:
        checks.append(_ok(THINKING, "the chat template knows no enable_thinking, or it is off"))
    # What else is wrong shows best where the draft is at its best.
    predictions = sets[-1 if THINKING in _faults(checks) else 0]

    setting, measured, of_settings = mend(predictions, target, tokenizer)
    checks += of_settings
    used = dtype or config.dtype or torch.float32
    if used != torch.float32:
        checks.append(check_used_dtype(predictions.measure(setting, load(used)), measured, used))
    worth = predictions.worth_of_context(setting, measured)
    finding = f"the target's states of another text, instead of this one, change the loss by {worth}"
    if not worth.is_clear():
        remedy = f"{_right_target(folder)}; a damaged backbone looks the same"
        return _conclude([*checks, _fault(WRONG_TARGET, finding, remedy, change=worth)], configured[0])
    checks.append(_ok(WRONG_TARGET, finding, change=worth))
    if model.config.has_head:
        checks.append(check_correction(measured, predictions.worth_of_prefix(setting, measured)))
    else:
        checks.append(_ok(SHUFFLED_HEAD, "there is no head"))
    best = predictions.measure(setting, every_id=True)
    length = (best.base_acceptance if SHUFFLED_HEAD in _faults(checks) else best.acceptance).mean().item()
    return _conclude([*checks, check_explained(length, expected, _faults(checks))], configured[0])


def _faults(checks: Sequence[Check]) -> set[str]:
    return {check.fault for check in checks if check.verdict == "fault"}


def _conclude(checks: Sequence[Check], configured: Measured | None = None) -> Diagnosis:
    """Every fault that was found; of the others the last check, or a word that none was made."""
    found = []
    for fault in FAULTS:
        own = [check for check in checks if check.fault == fault]
        own = [check for check in own if check.verdict == "fault"] or own[-1:]
        found += own or [Check(fault, "not checked", "cannot be told before the faults are mended that were found")]
    if configured is None:
        return Diagnosis(found)
    return Diagnosis(found, configured.acceptance.mean().item(), configured.base_acceptance.mean().item())


# ---- Command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `domino-spec doctor`."""
    pair = "`default` (the embedded one), a folder or a Hub id"
    parser.add_argument("target", metavar="TARGET", help=pair)
    parser.add_argument("draft", metavar="DRAFT", help=pair)
    parser.add_argument("--tokenizer", metavar="NAME", help="folder or Hub id (default: the target's)")
    parser.add_argument(
        "--prompts", nargs="+", metavar="FILE.jsonl", help="as for `domino-spec bench` (default: a few built-in ones)"
    )
    parser.add_argument("--num-prompts", type=positive_int, default=8, help="from each file (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, help="per answer (default: %(default)s)")
    parser.add_argument("--no-thinking", action="store_true", help="pass enable_thinking=False to the chat template")
    parser.add_argument("--expected", type=float, metavar="LENGTH", help="acceptance length to be expected")
    parser.add_argument("--features", nargs="+", default=[], metavar="FOLDER", help="cached features to check")
    parser.add_argument("--dtype", choices=DTYPES, help="of both models (default: what their configs say)")
    add_device_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(args: argparse.Namespace) -> int:
    """
    Prints what is wrong with a pair.

    Returns:
        0 for a healthy pair, 1 if a fault was found.

    Raises:
        ValueError: if something asked for cannot be had.
    """
    prompts: Sequence[str] = PROMPTS
    if args.prompts:
        prompts = [prompt.text for path in args.prompts for prompt in read_prompts(path, args.num_prompts)]
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    check_device(args.device)
    with naming("target", args.target):
        if args.target == "default":
            target, tokenizer = load_default_target(dtype or torch.float32)
        else:
            options = {"trust_remote_code": False}
            target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype or "auto", **options).eval()
            tokenizer = AutoTokenizer.from_pretrained(args.target, **options)
        if args.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
        target = target.to(args.device)
    with tqdm(desc="measuring", unit="pass", file=sys.stderr, disable=None) as bar:
        diagnosis = diagnose(
            target,
            tokenizer,
            args.draft,
            prompts,
            args.max_new_tokens,
            {"enable_thinking": False} if args.no_thinking else None,
            dtype,
            args.features,
            args.expected,
            bar.update,
        )
    text = json.dumps(diagnosis.to_dict(), indent=1) if args.json else str(diagnosis)
    sys.stdout.write(f"{text}\n")
    return int(bool(diagnosis.faults))
