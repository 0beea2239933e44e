# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Other assistants and other copies of the package go on as if this one were not there."""

import json

import pytest
from contract import NEW_TOKENS, cached_target, good_draft, prompt_and_plain, recorded_widths, run_script, spoil
from helpers import (
    FIXTURE_FOLDER,
    load_fixture,
)
from transformers.generation import GenerateDecoderOnlyOutput


@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
def test_speculation_type_dflash_runs_the_backbone_through_the_hosts_own_loop(head):
    # That loop reads offset k as the token at anchor + k, and knows no head.
    target = cached_target()
    prompt, plain = prompt_and_plain(target)
    draft = good_draft(target, plain, spoil(), shift_label=False, head=head)
    with recorded_widths(target) as widths:
        output = target.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            assistant_model=draft,
            speculation_type="dflash",
            return_dict_in_generate=True,
        )
    assert type(output) is GenerateDecoderOnlyOutput, "it went through our loop"
    assert output.sequences.tolist() == plain.tolist()
    assert len(widths) < NEW_TOKENS, "nothing was accepted"


STOCK = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

def run(folder):
    torch.set_num_threads(1)
    load = lambda name: AutoModelForCausalLM.from_pretrained(f"{folder}/{name}/target", attn_implementation="eager")
    target, small = load("shift1-prefix1").eval(), load("shift0-prefix0").eval()
    prompt = torch.arange(40)[None] % 7 + 3
    options = {
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "prompt lookup, sampled": {"prompt_lookup_num_tokens": 4, "do_sample": True},
        "small assistant": {"assistant_model": small},
        "small assistant, sampled": {"assistant_model": small, "do_sample": True, "temperature": 0.8},
        "the target as its own assistant": {"assistant_model": target},
        "plain": {},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
    }
    results = {}
    for name, kwargs in options.items():
        widths = []
        hook = lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1])
        handle = target.register_forward_pre_hook(hook, with_kwargs=True)
        torch.manual_seed(5)
        ids = target.generate(prompt, max_new_tokens=24, pad_token_id=0, **kwargs)
        handle.remove()
        results[name] = [ids.tolist(), widths]
    for name, kwargs, rows in (("several rows", {}, 2), ("return sequences", {"num_return_sequences": 2}, 1)):
        try:
            target.generate(prompt.repeat(rows, 1), max_new_tokens=4, assistant_model=small, do_sample=True, **kwargs)
            results[name] = "works"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results
"""


def test_other_assistants_behave_as_in_a_process_that_never_imported_the_package():
    namespace: dict = {}
    exec(STOCK, namespace)
    ours = namespace["run"](FIXTURE_FOLDER)
    script = STOCK + (
        "\nresults = run(sys.argv[1])"
        "\nassert not [name for name in sys.modules if name.split('.')[0] == 'domino_spec']"
        "\nprint(json.dumps(results))"
    )
    theirs = run_script(script, FIXTURE_FOLDER)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name
    for name in ("prompt lookup", "small assistant", "the target as its own assistant"):
        assert ours[name][0] == ours["plain"][0], name


COPIES = """
import importlib, importlib.util, inspect, json, pathlib, sys
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
import domino_spec, domino_spec.modeling_domino

torch.set_num_threads(1)
root = pathlib.Path(domino_spec.__file__).parent
folder = f"{sys.argv[1]}/shift1-prefix1"
target = AutoModelForCausalLM.from_pretrained(f"{folder}/target").eval()
prompt = torch.tensor(json.loads(sys.argv[2]))

def copy_under(name):
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.modeling_domino")

class Depth(LogitsProcessor):
    def __call__(self, input_ids, scores):
        depths.add(len(inspect.stack(0)))
        return scores

def depth(**kwargs):
    depths.clear()
    target.generate(prompt, max_new_tokens=8, logits_processor=LogitsProcessorList([Depth()]), **kwargs)
    return sorted(depths)

def decode(draft):
    output = target.generate(prompt, max_new_tokens=48, assistant_model=draft, return_dict_in_generate=True)
    return [output.sequences.tolist(), output.acceptance_lengths[0].tolist()]

depths = set()
drafts = {"package": domino_spec.modeling_domino.DominoDraftModel.from_pretrained(f"{folder}/draft").eval()}
before = {"draft": depth(assistant_model=drafts["package"]), "stock": depth(prompt_lookup_num_tokens=3)}
results = {"first": decode(drafts["package"])}
for name in ("domino_copy", "domino_other_copy", "domino_third_copy"):
    drafts[name] = copy_under(name).DominoDraftModel.from_pretrained(f"{folder}/draft").eval()
importlib.reload(domino_spec.modeling_domino)
for name in [name for name in sys.modules if name.split(".")[0] == "domino_spec"]:
    del sys.modules[name]
again = importlib.import_module("domino_spec.modeling_domino")
drafts["imported again"] = again.DominoDraftModel.from_pretrained(f"{folder}/draft").eval()
assert len({type(draft) for draft in drafts.values()}) == 5
results |= {name: decode(draft) for name, draft in drafts.items()}
after = {"draft": depth(assistant_model=drafts["package"]), "stock": depth(prompt_lookup_num_tokens=3)}
print(json.dumps({"results": results, "before": before, "after": after}))
"""


def test_copies_of_the_package_coexist_and_do_not_pile_up():
    expected = load_fixture("shift1-prefix1").expected
    report = run_script(COPIES, FIXTURE_FOLDER, json.dumps(expected["prompt_ids"].tolist()))
    assert len(report["results"]) == 6
    for name, (ids, lengths) in report["results"].items():
        assert ids == expected["spec_output_ids"].tolist(), name
        # All but the last, which the length limit cuts.
        assert lengths[:-1] == expected["acceptance_lengths"].tolist()[: len(lengths) - 1], name
    # Each import finds the dispatch in place: the calls under `generate` are as many as before the copies.
    assert report["after"] == report["before"]
