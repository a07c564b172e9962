"""Updates, pauses and sleep that are interrupted, come at a bad moment, or are asked for what cannot be."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer import AsyncLLM, SamplingParams
from jaxinfer.checkpoint.incoming import check_same_model, leaves_of_tree, regrouped
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.launcher import Launcher
from jaxinfer.frontend.client import EngineClient
from jaxinfer.frontend.weights_methods import WeightsMethods
from jaxinfer.models.layer_config import LayerConfig
from jaxinfer.scheduling.request import RequestStatus
from tests.builders import drain, make_engine, make_request, model_config, random_model, random_prompts, run_requests
from tests.diffusion.builders import MASK
from tests.engine.test_sleeping import owning_engine
from tests.faults.ways import WAYS
from tests.speculative.builders import disturbed, speculating_engine


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture(scope="module")
def other():
    return random_model(model_config(), seed=8)


def request(name: str = "x", tokens: int = 8, seed: int = 7):
    return make_request(name, random_prompts((9,), seed=seed)[0], max_tokens=tokens)


def test_a_program_that_is_compiled_while_weights_sleep_is_that_of_weights_on_the_device(model):
    wanted = run_requests(make_engine(model), [request()])
    core = owning_engine(model)
    core.sleeping.sleep(1)
    with pytest.raises(RuntimeError, match="call wake_up"):
        core.warm_up(progress=False)
    for program in core.programs.all:
        for shape in program.shapes[:1]:
            core.runner.compile(program, shape)
    core.sleeping.wake_up(None)
    assert run_requests(core, [request()]) == wanted


def test_background_warm_up_records_nothing_while_the_engine_sleeps(model, monkeypatch):
    core = owning_engine(model)
    recorded: list[bool] = []
    monkeypatch.setattr(core._warm_up, "go_on", lambda: recorded.append(core.why_idle() is None))
    core.add_request(request())
    core.sleeping.sleep(1)
    core.step()
    assert recorded == []
    core.sleeping.wake_up(None)
    core.step()
    assert recorded == [True]


class Methods(WeightsMethods):
    def __init__(self, core: EngineCore) -> None:
        self.client = EngineClient.__new__(EngineClient)
        self.client.core = core


def test_a_pause_that_would_wait_for_ever_says_so(model):
    core = owning_engine(model)
    core.add_request(request())
    core.step()
    core.sleeping.sleep(1)
    with pytest.raises(RuntimeError, match="cannot wait for requests that have begun: the engine sleeps"):
        Methods(core).pause_generation("wait")
    assert core.pausing.is_paused


def test_work_in_a_step_that_breaks_off_is_recovered_from_before_the_step_goes_on():
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    small = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "kv_cache_tokens": 256}

    async def run(*, breaks: bool) -> list[int]:
        async with AsyncLLM(**small) as engine:
            await engine.warm_up(use_tqdm=False)
            stream = await engine.add("Once upon a time", params, output_kind="final")
            core = engine._client.core
            while not any(each.num_output_tokens for each in core.transactions.requests.values()):
                await asyncio.sleep(0.001)
            if breaks:
                with pytest.raises(MemoryError):
                    await engine.call(lambda: core.transactions.between_steps(lambda: _broken_landing(core)))
            async for output in stream:
                found = output
            return found.outputs[0].token_ids

    assert asyncio.run(run(breaks=True)) == asyncio.run(run(breaks=False))


def _broken_landing(core: EngineCore) -> None:
    """Land everything, and raise after the first launch has landed, but before it counts as landed."""
    update = core.scheduler.update_from_output

    def failing(*arguments: Any) -> Any:
        update(*arguments)
        raise MemoryError("in the middle")

    core.scheduler.update_from_output = failing  # pyright: ignore[reportAttributeAccessIssue]
    core.land_all()
    raise MemoryError("nothing was in flight")


def test_an_interruption_at_the_end_of_an_update_leaves_weights_that_count_as_not_whole(model, other, monkeypatch):
    core = make_engine(model)
    core.add_request(item := request(tokens=20))
    while not item.num_output_tokens:
        core.step()
    kept = item.num_output_tokens
    with monkeypatch.context() as patch:
        patch.setattr(core.weights, "_changed", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            core.weights.update(leaves_of_tree(other), "B", "target", is_lent=True)
    reason = core.why_idle()
    assert reason is not None and "call update_weights again" in reason
    core.step()
    core.weights.update(leaves_of_tree(other), "B", "target", is_lent=True)
    drain(core)
    assert item.versions.runs(0, 20) == [(0, kept), ("B", 20 - kept)]


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_drafters_update_leaves_the_version_of_tokens_alone(model):
    core = speculating_engine(model, disturbed(model, 0.1))
    core.weights.update(leaves_of_tree(model), "step 5", "target", is_lent=True)
    core.add_request(item := request(tokens=20))
    core.step()
    core.weights.update(leaves_of_tree(disturbed(model, 0.2)), "drafts", "drafter", is_lent=True)
    drain(core)
    assert core.weights.version == "step 5" and core.weights.num_updates == 2
    assert item.versions.runs(0, 20) == [("step 5", 20)]


def test_an_obstacle_is_logged_once_and_stepping_by_hand_raises_it(model, caplog):
    graph, state = nnx.split(model)
    lent = jax.tree.map(lambda x: x + 0, state)
    core = make_engine(nnx.merge(graph, lent))
    core.add_request(request())
    jax.tree.map(lambda x: x.delete(), lent)
    for _ in range(3):
        core.step()
    assert (
        len([each for each in caplog.records if "nothing is launched: arrays of the weights are gone" in each.message])
        == 1
    )
    with pytest.raises(RuntimeError, match="arrays of the weights are gone"):
        Methods(core).client.step()
    with pytest.raises(RuntimeError, match="the weights are not on the device: arrays of the weights are gone"):
        core.weights.digest("target")


def test_a_digest_of_sleeping_weights_is_refused_by_name(model):
    core = owning_engine(model)
    core.sleeping.sleep(1)
    with pytest.raises(RuntimeError, match="the weights are not on the device: call wake_up"):
        core.weights.digest("target")


def test_an_update_asleep_leaves_owned_weights_owned(model, other):
    core = owning_engine(model)
    for level in (1, 2):
        core.sleeping.sleep(level)
        core.weights.update(leaves_of_tree(other), None, "target", is_lent=True)
        core.sleeping.wake_up(None)
        assert not any(core.weights.of("target").lent)
    core.sleeping.sleep(1)
    assert not any(leaf.is_deleted() for leaf in leaves_of_tree(other).values())


def test_compiles_of_later_updates_are_counted_and_those_of_the_first_are_not(model, other):
    core = owning_engine(model)
    core.compiles.is_warm = True
    jax.clear_caches()
    core.weights.update(leaves_of_tree(other), None, "target", is_lent=True)
    assert core.get_metrics().num_compiles_after_warm_up_total == 0
    core.weights.update(leaves_of_tree(model), None, "target", is_lent=True)
    assert core.get_metrics().num_compiles_after_warm_up_total == 0
    wide = jax.tree.map(lambda x: x.astype(np.float64).astype(np.float16), leaves_of_tree(other))
    core.weights.update(wide, None, "target", is_lent=True)  # a cast from another type
    assert core.get_metrics().num_compiles_after_warm_up_total > 0


def test_requests_that_end_while_the_engine_falls_asleep_are_told(model, monkeypatch):
    core = owning_engine(model)
    core.add_request(item := request())
    core.step()
    monkeypatch.setattr(type(item), "start_over", lambda self: self.finish(RequestStatus.FINISHED_ERROR, error="over"))
    core.sleeping.sleep(1)
    monkeypatch.undo()
    core.sleeping.wake_up(None)
    landings = core.step()
    assert [each.request for each in landings] == [item] and not core.has_unfinished_requests()


def test_leaves_of_one_device_are_regrouped_for_more_devices_than_heads():
    config = model_config(vocab_size=104)
    devices = 2 * config.num_kv_heads
    leaves = leaves_of_tree(random_model(config))
    wanted = {each.path: each.shape for each in parameters(for_tensor_parallel(config, devices))}
    found = regrouped(leaves, config, devices)
    assert {path: leaf.shape for path, leaf in found.items()} == wanted
    assert {path: leaf.shape for path, leaf in leaves.items()} != wanted
    assert regrouped(found, config, devices).keys() == found.keys()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({"rope": {"theta": 5.0}}, "rope"),
        ({"layers": "windows"}, "layers"),
        ({"max_position_embeddings": 7, "eos_token_ids": (3,), "dtype": "float16"}, None),
        ({"rope": {"max_position_embeddings": 7}}, None),
    ],
)
def test_a_directory_of_another_model_is_refused_by_the_field(change, field):
    own = model_config()
    fields = dict(change)
    if isinstance(fields.get("rope"), dict):
        fields["rope"] = dataclasses.replace(own.rope, **fields["rope"])
    if fields.get("layers") == "windows":
        layer = LayerConfig(own.num_heads, own.num_kv_heads, own.head_dim, own.rope)
        fields["layers"] = (dataclasses.replace(layer, window=8),) * own.num_layers
    other = dataclasses.replace(own, **fields)
    if field is None:
        check_same_model(other, own, "there")
        return
    with pytest.raises(ValueError, match=f"there is another model than the engine's: its {field} is "):
        check_same_model(other, own, "there")


@pytest.mark.parametrize("fault", ["sleep", "recovery"])
def test_a_bidirectional_model_continues_from_what_landed_with_earlier_weights(fault, monkeypatch):
    def run(*, faulty: bool) -> list[int]:
        core = WAYS["bidirectional"].make()
        changed = random_model(core.model_config, seed=9)
        block = core.strategy.vicinity.block_size
        item = make_request("x", random_prompts((9,), seed=5, vocab_size=MASK)[0], max_tokens=4 * block)
        core.add_request(item)
        while not item.num_output_tokens:
            core.step()
        core.weights.update(leaves_of_tree(changed), "B", "target", is_lent=True)
        if faulty and fault == "sleep":
            core.sleeping.sleep(1)
            core.sleeping.wake_up(None)
        elif faulty:
            with monkeypatch.context() as patch:
                patch.setattr(Launcher, "launch", _interrupted)
                with pytest.raises(KeyboardInterrupt):
                    core.step()
        drain(core)
        return item.output_token_ids

    assert run(faulty=True) == run(faulty=False)
