# Copyright 2026 The domino_spec authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of proposals: which nodes they have, what the target sees of them, which path is kept, and who has none."""

import random
import traceback
from collections import Counter

import pytest
import torch
from batching import padded_batch
from contract import CACHE, recorded_widths
from helpers import ARCHITECTURES, MASK_TOKEN, VOCAB, make_draft, make_target, random_tokens
from passes import close
from test_generate_lossless import GoodDraft, check_case, draw_case
from test_schedule import experience
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from domino_spec.generation import loop as loop_module
from domino_spec.generation import tree as tree_module
from domino_spec.generation.compat import CACHE_NAME
from domino_spec.generation.context import TargetParts
from domino_spec.generation.schedule import Experience, Schedule
from domino_spec.generation.scorer import Scorer
from domino_spec.generation.tree import Tree, grow, keep_path, path_taken, with_tree

PROMPT, NEW_TOKENS = 9, 40
# Those with full attention in every layer.
READERS = ("qwen3", "llama-tied", "phi3-fused", "granite-multipliers", "gpt2-learned-positions")


def constant_schedule(num_proposals=5):
    return Schedule(GenerationConfig(), num_proposals, Experience(), True, 100)


def random_tree(rng, size, vocabulary):
    """A tree in which no two continuations of a node are of one token."""
    parents, token_ids, taken = [], [], set()
    while len(parents) < size:
        parent, token = rng.randint(0, len(parents)), rng.randrange(vocabulary)
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            token_ids.append(token)
    return Tree(torch.tensor([token_ids]), torch.tensor(parents), size), [None, *parents], [None, *token_ids]


def way_to(node, parents):
    """The nodes that lead to `node`, the anchor first."""
    way = [node]
    while way[0] != 0:
        way.insert(0, parents[way[0]])
    return way


# Which nodes


def slow_tree(draft, parts, hidden, anchor, depth, size, shortlist):
    """Tokens of the likeliest paths, each as a tuple, from the model's own methods, one path at a time."""
    first = 0 if draft.config.shift_label else 1
    found, level = {}, {(): 0.0}
    for k in range(depth):
        grown = {}
        for path, score in level.items():
            logits = parts.logits(hidden[0, first + k])
            if draft.config.has_head and k >= draft.config.pure_draft_prefix_len:
                read = torch.tensor([[int(anchor), *path]])
                state = draft.prefix_states(parts.embed(read))[0, -1]
                logits = logits + draft.correction(hidden[0, first + k], state)
            chances = logits.float()[torch.tensor(shortlist)].log_softmax(-1)
            grown |= {(*path, token): score + float(chances[i]) for i, token in enumerate(shortlist)}
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[: -(-size // 2)])
        found |= level
    return [path for path, _ in sorted(found.items(), key=lambda item: -item[1])[:size]]


@pytest.mark.parametrize("size", [1, 2, 7, 15, 1000])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"shift_label": False}, {"pure_draft_prefix_len": 0}, {"pure_draft_prefix_len": 2}, {"head": False}],
    ids=str,
)
def test_a_tree_has_the_likeliest_paths(target, parts, size, overrides):
    draft, shortlist = make_draft(target, **overrides), [3, 90, 17, 40, 61]
    draft.config.set_shortlist(shortlist)
    shortlist = list(draft.config.shortlist_ids)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        hidden = torch.randn(1, draft.config.block_size, draft.config.hidden_size, generator=generator).double()
        anchor = torch.randint(VOCAB, (1, 1), generator=generator)
        with torch.no_grad():
            tree = grow(Scorer(draft, parts, True), hidden, anchor, 3, size, constant_schedule())
            wanted = slow_tree(draft, parts, hidden, anchor, 3, size, shortlist)
        tokens = [None, *tree.proposal_ids[0].tolist()]
        parents = [None, *tree.parents.tolist()]
        paths = [tuple(tokens[i] for i in way_to(node, parents)[1:]) for node in range(1, len(tokens))]
        assert set(paths) == set(wanted)
        assert len(paths) == min(size, 5 + 25 + 125)
        assert all(parent < node for node, parent in enumerate(parents) if node)
        assert tree.depth == min(3, size) and bool(tree.finite)


def test_a_node_never_comes_before_the_one_that_it_continues(target, parts):
    draft = make_draft(target)
    for scale in (0.0, 1.0, 1e6, float("inf"), float("nan")):
        hidden = torch.randn(1, draft.config.block_size, draft.config.hidden_size).double() * scale
        with torch.no_grad():
            tree = grow(Scorer(draft, parts, True), hidden, torch.ones(1, 1).long(), 6, 60, constant_schedule())
        parents = tree.parents.tolist()
        assert len(parents) == 60 and all(parent <= i for i, parent in enumerate(parents))
        siblings = Counter(zip(parents, tree.proposal_ids[0].tolist(), strict=True))
        assert set(siblings.values()) == {1}
        assert bool(tree.finite) == (scale in (0.0, 1.0, 1e6))


# Which path


@pytest.mark.parametrize("seed", range(30))
def test_the_path_is_the_one_along_the_targets_choices(seed):
    rng = random.Random(seed)
    tree, parents, tokens = random_tree(rng, rng.randint(1, 20), 3)
    ways = [way_to(node, parents) for node in range(len(parents))]
    assert tree.paths.tolist() == [[i in way for i in range(len(parents))] for way in ways]
    for _ in range(20):
        choices = [rng.randrange(3) for _ in parents]
        wanted = [0]
        while True:
            here = wanted[-1]
            goes_on = [i for i in range(1, len(parents)) if parents[i] == here and tokens[i] == choices[here]]
            if not goes_on:
                break
            wanted += goes_on
        path, proposal = path_taken(tree, torch.tensor(choices))
        assert path[: len(wanted)].tolist() == wanted
        along = [tokens[i] for i in wanted[1:]]
        assert proposal.proposal_ids[0].tolist() == along + [-1] * (tree.depth - len(along))
        assert path.shape == (tree.depth + 1,)


# Eager attention gives a float64 model NaN at a row that sees nothing, as pads do.
@pytest.mark.parametrize(
    ("attention", "padded"), [("eager", False), ("sdpa", False), ("sdpa", True)], ids=["eager", "sdpa", "sdpa-padded"]
)
@pytest.mark.parametrize("arch", READERS)
@torch.no_grad()
def test_each_node_sees_its_own_path_and_the_cache_keeps_the_one_taken(arch, padded, attention):
    target, rng = make_target(arch, attn_implementation=attention), random.Random(3)
    inputs = {"input_ids": random_tokens(1, PROMPT, seed=4)}
    inputs["attention_mask"] = (torch.arange(PROMPT) >= (3 if padded else 0)).long()[None]
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    tree, parents, tokens = random_tree(rng, 11, VOCAB)
    tokens[0] = 5

    cache = target(**inputs, position_ids=positions, use_cache=True)[CACHE_NAME]
    arguments = with_tree(
        {
            "input_ids": torch.tensor([tokens[:1]]),
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(1, 1).long()], -1),
            "position_ids": positions[:, -1:] + 1,
        },
        tree,
        PROMPT,
        target.dtype,
    )
    logits = target(**arguments, **{CACHE_NAME: cache}).logits[0]
    for node in range(len(tokens)):
        way = way_to(node, parents)
        added = torch.tensor([[tokens[i] for i in way]])
        alone = target(
            torch.cat([inputs["input_ids"], added], -1),
            attention_mask=torch.cat([inputs["attention_mask"], torch.ones_like(added)], -1),
            position_ids=torch.cat([positions, positions[:, -1:] + 1 + torch.arange(len(way))], -1),
        )
        close(logits[node], alone.logits[0, -1])
    longest = max((way_to(node, parents) for node in range(len(tokens))), key=len)
    keep_path(cache, torch.tensor(longest), len(tokens))
    added = torch.tensor([[tokens[i] for i in longest]])
    alone = target(
        torch.cat([inputs["input_ids"], added], -1),
        attention_mask=torch.cat([inputs["attention_mask"], torch.ones_like(added)], -1),
        position_ids=torch.cat([positions, positions[:, -1:] + 1 + torch.arange(len(longest))], -1),
        use_cache=True,
    )
    for ours, theirs in zip(cache.layers, alone[CACHE_NAME].layers, strict=True):
        shown = slice(3 if padded else 0, None)
        close(ours.keys[:, :, shown], theirs.keys[:, :, shown])
        close(ours.values[:, :, shown], theirs.values[:, :, shown])


# Whole answers


# Of the options of a random case those under which a call has a tree: no logits processor.
WITH_TREES = {"nothing", "eos", "several-eos", "stop-strings", "stop-at-token", "stop-after-calls"}


def cases_with_trees(seed: int, count: int):
    """The numbers of cases of `seed` that may have a tree: room for proposals, and none but those options."""
    for index in range(1000):
        case = draw_case(seed, index)
        if next(iter(case.limit.values())) > 2 and set(case.options) <= WITH_TREES:
            yield index
            count -= 1
        if count == 0:
            return


@pytest.mark.parametrize("arch", READERS)
@pytest.mark.parametrize("turn", range(4))
def test_random_cases_with_trees_equal_plain_generate(arch, turn, monkeypatch):
    trees = []

    def noted(*args):
        trees.append(grow(*args))
        return trees[-1]

    monkeypatch.setattr(loop_module, "grow", noted)
    seed, failures, had_one = ARCHITECTURES.index(arch) + len(ARCHITECTURES) * (200 + turn), [], 0
    for index in cases_with_trees(seed, 12):
        before = len(trees)
        try:
            check_case(seed, index, tree=random.Random(10 * seed + index).choice([1, 2, 7, 15, 60]))
        except Exception:
            failures.append(f"{seed}, {index}:\n{traceback.format_exc(limit=-3)}")
        had_one += len(trees) > before
    assert not failures, "\n".join(failures)
    assert had_one >= 6, f"only {had_one} of 12 cases had a tree"


class SecondThoughts(GoodDraft):
    """Believes in a wrong token at the positions `spoiled`, and in the right one a little less."""

    def _state(self, position):
        if position not in self.spoiled or position >= len(self.text):
            return super()._state(position)
        return 0.55 * super()._state(position) + 0.45 * self.states[self.text[position]]


@pytest.mark.parametrize("arch", READERS)
@pytest.mark.parametrize("shift_label", [True, False], ids=["shifted", "unshifted"])
def test_where_the_likeliest_token_is_wrong_the_next_one_is_taken(arch, shift_label):
    target = make_target(arch, attn_implementation="sdpa")
    prompt = random_tokens(1, PROMPT, seed=3)
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_scores": True}
    plain = target.generate(prompt, **options)
    draft = make_draft(target, shift_label=shift_label)
    draft = SecondThoughts.following(draft, target, plain.sequences[0], range(PROMPT, PROMPT + NEW_TOKENS, 3))
    chain = target.generate(prompt, assistant_model=draft, **options)
    draft.use_tree(40)
    with recorded_widths(target) as widths:
        output = target.generate(prompt, assistant_model=draft, **options)
    assert torch.equal(output.sequences, plain.sequences)
    # Where rounds of a chain end, a tree goes on.
    ends = torch.tensor([0, *output.acceptance_lengths[0].tolist()]).cumsum(0) + PROMPT
    passed = [place for place in draft.spoiled if PROMPT < place < len(plain.sequences[0]) and place not in ends]
    assert len(passed) > 5, (passed, ends)
    assert output.acceptance_lengths.shape[1] < chain.acceptance_lengths.shape[1]
    assert 41 in widths
    torch.testing.assert_close(torch.cat(output.scores), torch.cat(plain.scores), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(output[CACHE].layers, plain[CACHE].layers, strict=True):
        close(ours.keys, theirs.keys)
        close(ours.values, theirs.values)


def test_a_call_bounds_how_many_proposals_follow_one_another(target):
    prompt = random_tokens(1, PROMPT, seed=3)
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS)
    draft = GoodDraft.following(make_draft(target), target, plain[0], ())
    draft.use_tree(15)
    for asked, most in ((1, 2), (3, 4), (50, 7)):
        output = target.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            assistant_model=draft,
            num_assistant_tokens=asked,
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, plain)
        assert output.acceptance_lengths.max() == most


def test_a_cache_goes_on_from_call_to_call(target):
    prompt = random_tokens(1, PROMPT, seed=3)
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS)
    draft = SecondThoughts.following(make_draft(target), target, plain[0], range(PROMPT, 60, 2))
    draft.use_tree(15)
    first = target.generate(prompt, max_new_tokens=15, assistant_model=draft, return_dict_in_generate=True)
    second = target.generate(
        first.sequences, max_new_tokens=NEW_TOKENS - 15, assistant_model=draft, **{CACHE: first[CACHE]}
    )
    assert torch.equal(second, plain)


# Who has none


def reports(caplog):
    return [record.message for record in caplog.records if "use_tree" in record.message]


@pytest.fixture
def warned(caplog):
    tree_module.logger.warning_once.cache_clear()
    with caplog.at_level("WARNING", logger=tree_module.logger.name):
        yield caplog


def widths_of(target, draft, inputs, **options):
    with recorded_widths(target) as widths:
        output = target.generate(**inputs, max_new_tokens=20, assistant_model=draft, **options)
    return output, max(widths[1:])


@pytest.mark.parametrize("arch", sorted(set(ARCHITECTURES) - set(READERS)))
def test_targets_that_forget_go_on_one_after_another_and_say_so_once(arch, warned):
    target = make_target(arch)
    draft, inputs = make_draft(target), {"input_ids": random_tokens(1, PROMPT)}
    plain, width = widths_of(target, draft, inputs)
    draft.use_tree(15)
    for _ in range(2):
        output, width_then = widths_of(target, draft, inputs)
        assert torch.equal(output, plain) and width_then == width
    assert len(reports(warned)) == 1


@pytest.mark.parametrize("alibi", [True, False])
def test_a_target_is_asked_whether_it_looks_where_a_mask_says(alibi, warned):
    config = AutoConfig.for_model(
        "falcon",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        alibi=alibi,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    draft, inputs = make_draft(target), {"input_ids": random_tokens(1, PROMPT)}
    plain = target.generate(**inputs, max_new_tokens=20)
    draft.use_tree(15)
    output, width = widths_of(target, draft, inputs)
    assert torch.equal(output, plain)
    assert (width == 16) == (not alibi)
    assert bool(reports(warned)) == alibi


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_a_target_that_goes_its_own_way_gets_no_tree(ignored, warned, monkeypatch):
    target = make_target()
    draft, inputs = make_draft(target), {"input_ids": random_tokens(1, PROMPT)}
    plain = target.generate(**inputs, max_new_tokens=20)
    forward = target.model.forward

    def deaf(*args, **kwargs):
        return forward(*args, **{**kwargs, ignored: None})

    monkeypatch.setattr(target.model, "forward", deaf)
    draft.use_tree(15)
    # The first call asks.
    for _ in range(2):
        output, width = widths_of(target, draft, inputs)
        assert torch.equal(output, plain)
    assert width == 6
    assert len(reports(warned)) == 1


def test_a_target_that_failed_once_is_asked_again(warned):
    target = make_target()
    draft, inputs = make_draft(target), {"input_ids": random_tokens(1, PROMPT)}
    plain, width = widths_of(target, draft, inputs)
    draft.use_tree(15)

    def fail(module, args, kwargs):
        if kwargs.get("use_cache") is False:
            raise RuntimeError("raised on purpose")

    handle = target.register_forward_pre_hook(fail, with_kwargs=True)
    output, width_then = widths_of(target, draft, inputs)
    assert torch.equal(output, plain) and width_then == width
    assert any("raised on purpose" in record.message for record in warned.records)
    handle.remove()
    output, width_then = widths_of(target, draft, inputs)
    assert torch.equal(output, plain) and width_then == 16


@torch.no_grad()
def test_a_call_without_ids_has_a_tree():
    target = make_target()
    draft, embeds = make_draft(target), target.get_input_embeddings()(random_tokens(1, PROMPT))
    plain = target.generate(inputs_embeds=embeds, max_new_tokens=20)
    draft.use_tree(15)
    with recorded_widths(target) as widths:
        assert torch.equal(target.generate(inputs_embeds=embeds, max_new_tokens=20, assistant_model=draft), plain)
    assert max(widths) == 16


def test_positions_may_be_left_to_the_target(target, monkeypatch):
    draft, prompt = make_draft(target), random_tokens(1, PROMPT, seed=3)
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS)
    prepare = target.prepare_inputs_for_generation

    def without(*args, **kwargs):
        return {**prepare(*args, **kwargs), "position_ids": None}

    monkeypatch.setattr(target, "prepare_inputs_for_generation", without)
    draft = SecondThoughts.following(draft, target, plain[0], range(PROMPT, 60, 2))
    draft.use_tree(15)
    assert torch.equal(target.generate(prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft), plain)


def test_a_tree_is_no_text_that_a_limit_counts():
    """Phi-3 lets its cache go where the ids that a pass is prepared from outgrow the original positions."""
    positions = 32
    target = make_target(
        "phi3-fused",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        original_max_position_embeddings=positions,
    )
    draft, prompt = make_draft(target), random_tokens(1, PROMPT)
    plain = target.generate(prompt, max_length=positions)
    draft.use_tree(60)
    assert torch.equal(target.generate(prompt, max_length=positions, assistant_model=draft), plain)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.3},
        {"assistant_confidence_threshold": 0.3},
        {"return_dict_in_generate": True, "output_hidden_states": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_calls_that_have_no_tree_go_on_as_they_were(target, options):
    draft, inputs = make_draft(target), {"input_ids": random_tokens(1, PROMPT)}
    answers = []
    for size in (0, 15):
        draft.use_tree(size)
        torch.manual_seed(0)
        output, width = widths_of(target, draft, inputs, **options)
        answers.append(output if isinstance(output, torch.Tensor) else output.sequences)
        assert width <= 6
    assert torch.equal(*answers)


def test_batches_have_no_tree(target):
    draft, inputs = make_draft(target), padded_batch([9, 4], seed=0)
    draft.use_tree(15)
    output, width = widths_of(target, draft, inputs, pad_token_id=MASK_TOKEN)
    assert torch.equal(output, target.generate(**inputs, max_new_tokens=20, pad_token_id=MASK_TOKEN))
    assert width == 6


def test_a_tree_is_not_drafted_deeper_than_it_can_be(target, parts):
    draft, steps = make_draft(target), []
    scorer = Scorer(draft, parts, True)
    step = scorer.head.step
    scorer.head.step = lambda *args: steps.append(args) or step(*args)
    hidden = torch.randn(1, draft.config.block_size, draft.config.hidden_size).double()
    with torch.no_grad():
        grow(scorer, hidden, torch.ones(1, 1).long(), 6, 2, constant_schedule())
    assert len(steps) == 2


@pytest.mark.parametrize("size", [-1, 1.5, True, "15", None])
def test_a_tree_of_no_number_of_proposals_is_refused(target, size):
    with pytest.raises(ValueError, match=r"num_proposals.*15, say, or 0"):
        make_draft(target).use_tree(size)


# With the schedule


def adaptive(known, depth=4, size=6):
    schedule = Schedule(GenerationConfig(num_assistant_tokens_schedule="heuristic"), depth, known, True, size)
    for _ in range(2):
        schedule.budget(1)
    return schedule


def test_a_tree_is_cut_where_its_proposals_cost_more_than_they_bring():
    chances = torch.tensor([0.8, 0.6, 0.3, 0.1, 0.05, 0.04])
    flat = experience(w1=0.010, w7=0.010)
    assert adaptive(flat).size_of(chances) == 6
    steep = experience(**{f"w{n}": 0.010 * n for n in range(1, 8)})
    assert adaptive(steep).size_of(chances) == 0
    # Each further proposal costs 0.4 tokens' time.
    even = experience(**{f"w{n}": 0.010 + 0.004 * (n - 1) for n in range(1, 8)})
    assert adaptive(even).size_of(chances) == 2
    # Past a dear width lies a cheap one.
    valley = experience(w1=0.010, w2=0.018, w3=0.022, w4=0.026, w5=0.013, w6=0.030, w7=0.034)
    assert adaptive(valley).size_of(chances) == 4


def test_widths_that_are_not_known_are_tried():
    known = experience(w1=0.010, w7=0.018)
    chances = torch.tensor([0.9, 0.1, 0.05, 0.01, 0.01, 0.01])
    assert adaptive(known).size_of(chances) == 5
    for _ in range(3):
        known.add_pass(6, 0.018)
    assert adaptive(known).size_of(chances) == 4
    # Also where the block is longer than the tree, and where a tree is wider than all that is known.
    assert adaptive(known, depth=16).size_of(chances) == 4
    wider = torch.cat([chances, torch.full((4,), 0.01)])
    assert adaptive(experience(w1=0.010, w7=0.0101), size=10).size_of(wider) == 10


def test_confidences_are_held_against_what_came_of_them():
    known, chances = experience(w1=0.010, w2=0.0115, w3=0.013), torch.tensor([0.5, 0.5])
    assert known.trust() == 1.0
    assert adaptive(known, size=2).size_of(chances) == 2
    for _ in range(100):
        known.add_tree(expected=1.0, num_accepted=0)
    assert known.trust() < 0.1
    assert adaptive(known, size=2).size_of(chances) == 0
    # A round that explores offers the whole tree, so that trust can come back.
    schedule = adaptive(known, size=2)
    for _ in range(31):
        schedule.budget(1)
    assert schedule.size_of(chances) == 2
    for _ in range(1000):
        known.add_tree(expected=1.0, num_accepted=1)
    assert known.trust() > 0.8


def test_with_a_schedule_the_answer_is_the_targets_own(target):
    prompt = random_tokens(1, PROMPT, seed=3)
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS)
    draft = SecondThoughts.following(make_draft(target), target, plain[0], range(PROMPT, 60, 2))
    draft.use_tree(15)
    for _ in range(4):
        output = target.generate(
            prompt, max_new_tokens=NEW_TOKENS, assistant_model=draft, num_assistant_tokens_schedule="heuristic"
        )
        assert torch.equal(output, plain)


def test_a_scorer_takes_the_drafts_own_pool_before_another(target):
    draft = make_draft(target, candidate_pool_size=4)
    hidden = torch.randn(1, 3, draft.config.hidden_size).double()
    assert Scorer(draft, TargetParts(target), True).base(hidden, 50)[0].shape == (1, 3, 4)
