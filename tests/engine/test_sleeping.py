"""Sleep: nothing of owned weights, pools and seats is on the device, and requests get their tokens after waking up."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import nnx

from jaxinfer.checkpoint.incoming import leaves_of_tree
from jaxinfer.engine.core import EngineCore
from tests.builders import drain, make_engine, make_request, model_config, random_model, random_prompts, run_requests
from tests.faults.ways import WAYS
from tests.speculative.builders import disturbed, random_head, speculating_engine


def copy_of(model: nnx.Module) -> nnx.Module:
    graph, state = nnx.split(model)
    # As a checkpoint's arrays they have a place of their own.
    return nnx.merge(graph, jax.tree.map(lambda x: jax.device_put(x + 0, x.sharding), state))


def owning_engine(model: Any) -> EngineCore:
    template = make_engine(model)
    return EngineCore(copy_of(model), template.config, dtype=template.kv.k[0].dtype, lent=False)


def on_device(core: EngineCore) -> int:
    """Bytes of owned weights and of the state that are on the device."""
    leaves = [
        leaf
        for weights in core.runner.weights.values()
        for leaf, is_lent in zip(weights.leaves, weights.lent, strict=True)
        if not is_lent
    ]
    leaves += jax.tree.leaves(core.runner.state)
    return sum(leaf.nbytes for leaf in leaves if not leaf.is_deleted() and leaf.sharding.memory_kind != "pinned_host")


def requests() -> list:
    return [
        make_request(str(i), prompt, max_tokens=12, temperature=i % 2, seed=i)
        for i, prompt in enumerate(random_prompts((21, 9, 40), seed=7))
    ]


@pytest.mark.parametrize("tags", [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]], ids=str)
def test_asleep_nothing_is_on_the_device_and_requests_go_on_afterwards(tags):
    model = random_model(model_config())
    wanted = run_requests(make_engine(model), requests())
    core, items = owning_engine(model), requests()
    for item in items:
        core.add_request(item)
    for _ in range(4):
        core.step()
    assert on_device(core) > 0
    core.sleeping.sleep(1)
    assert on_device(core) == 0
    launches = core.get_metrics().num_launches_total
    core.step()
    core.add_request(late := make_request("late", items[0].prompt_token_ids, max_tokens=3))
    for each in tags:
        assert core.get_metrics().num_launches_total == launches and not late.num_output_tokens
        reason = core.why_idle()
        assert reason is not None and "call wake_up" in reason
        core.sleeping.wake_up(each)
        core.step()
    assert core.why_idle() is None
    drain(core)
    assert [item.output_token_ids for item in items] == wanted
    assert late.num_output_tokens == 3


@pytest.mark.parametrize("way", ["branched", "beam", "ngram", "block", "bidirectional"])
def test_requests_of_every_way_survive(way):
    def run(sleeps: bool) -> list[list[int]]:
        core = WAYS[way].make()
        found: list[Any] = []
        for item in WAYS[way].items(False)[0]:
            if callable(item):
                found.append(item(core))
            elif hasattr(item, "token_ids"):
                core.add_request(item)
                found.append(item)
            else:
                core.add_group(item)
                found += item.members
        for step in range(200):
            if sleeps and step == 2:
                core.sleeping.sleep(1)
                core.sleeping.wake_up(None)
            if not core.has_unfinished_requests():
                break
            core.step()
        core.check_integrity()
        return [
            each.output_token_ids
            if hasattr(each, "output_token_ids")
            else [one.tokens for one in each.search.hypotheses]
            for each in found
        ]

    assert run(True) == run(False)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_drafter_sleeps_too_and_drafts_as_before(method):
    model = random_model(model_config())
    drafter = disturbed(model, 0.05) if method == "draft_model" else random_head(model.config)
    core = speculating_engine(model, drafter)
    wanted = run_requests(core, requests())
    before = core.get_metrics().spec_decode_num_accepted_tokens
    core.sleeping.sleep(1)
    core.sleeping.wake_up(None)
    assert run_requests(core, requests()) == wanted
    assert core.get_metrics().spec_decode_num_accepted_tokens - before >= before * 0.95


def test_dropped_weights_are_asked_for_by_name():
    model = random_model(model_config())
    core = owning_engine(model)
    core.sleeping.sleep(2)
    core.add_request(request := requests()[0])
    core.sleeping.wake_up(None)
    reason = core.why_idle()
    assert reason is not None and "embed.embedding" in reason and "call update_weights" in reason
    core.step()
    core.weights.update(leaves_of_tree(model), "again", "target", is_lent=True)
    drain(core)
    assert request.num_output_tokens == 12


def test_lent_weights_stay_where_they_are():
    model = random_model(model_config())
    core = make_engine(model)
    before = core.weights.of("target").leaves[:]
    core.sleeping.sleep(2)
    assert not any(leaf.is_deleted() for leaf in before)
    core.sleeping.wake_up(None)
    assert all(now is then for now, then in zip(core.weights.of("target").leaves, before, strict=True))


def test_an_update_while_the_engine_sleeps_is_there_after_waking_up():
    model, other = random_model(model_config()), random_model(model_config(), seed=8)
    core = owning_engine(model)
    core.sleeping.sleep(1)
    core.weights.update(leaves_of_tree(other), "B", "target", is_lent=True)
    core.sleeping.wake_up(None)
    assert run_requests(core, requests()) == run_requests(make_engine(other), requests())


def test_what_is_not_there_is_refused_by_name():
    core = make_engine(random_model(model_config()))
    with pytest.raises(ValueError, match="level must be 1 or 2, got 3"):
        core.sleeping.sleep(3)
    with pytest.raises(ValueError, match="tags must be among weights, kv_cache, got heads"):
        core.sleeping.wake_up(["heads"])
    core.sleeping.sleep(1)
    with pytest.raises(RuntimeError, match="call wake_up"):
        core.sleeping.sleep(1)
