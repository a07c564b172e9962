"""`LLM` beside a trainer: live models, updates from everything that holds weights, pauses and sleep."""

from __future__ import annotations

import asyncio
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.export import export_head, export_hf
from jaxinfer.checkpoint.safetensors_reader import open_checkpoint

SMALL = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_tokens": 512}
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
PROMPTS = ["Once upon a time", "The lighthouse", "Two plus two"]


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(embedded_checkpoint(), dtype="float32")[1]


@pytest.fixture(scope="module")
def trained(model):
    graph, state = nnx.split(model)
    rng = np.random.default_rng(0)
    return nnx.merge(
        graph, jax.tree.map(lambda x: x * (1 + 0.05 * rng.standard_normal(x.shape)).astype(x.dtype), state)
    )


@pytest.fixture(scope="module")
def llm():
    return LLM(**SMALL)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_a_module_is_used_where_it_lies_and_later_changes_of_it_change_nothing(model, llm):
    graph, state = nnx.split(model)
    own = nnx.merge(graph, jax.tree.map(lambda x: x + 0, state))
    live = LLM(model=own, tokenizer=embedded_checkpoint(), **SMALL)
    assert all(live.core.weights.of("target").lent)
    held = {leaf.unsafe_buffer_pointer() for leaf in live.core.weights.of("target").leaves}
    assert held == {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(own))}
    before = tokens(live)
    assert before == tokens(llm)
    nnx.update(own, jax.tree.map(lambda x: x * 2, nnx.state(own)))
    assert tokens(live) == before
    live.update_weights(own, version="doubled")
    assert live.weights_version == "doubled" and tokens(live) != before


def test_a_configuration_and_a_state_are_a_model_without_a_tokenizer(model):
    live = LLM(model=(model.config, nnx.state(model)), **SMALL)
    assert live.tokenizer is None
    [output] = live.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 10


def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match="model must be the name of a checkpoint, a module"):
        LLM(model=(1, 2), **SMALL)
    with pytest.raises(ValueError, match="missing: embed.embedding"):
        LLM(model=(model.config, {}), **SMALL)


@pytest.mark.parametrize("form", ["module", "state", "dict", "names", "directory"])
def test_weights_come_in_every_form(llm, model, trained, form, tmp_path):
    llm.update_weights(model)
    before = tokens(llm)
    export_hf(trained, trained.config, tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    weights = {
        "module": lambda: trained,
        "state": lambda: nnx.state(trained),
        "dict": lambda: nnx.to_pure_dict(nnx.state(trained)),
        "names": lambda: ((name, tensor.read()) for name, tensor in open_checkpoint(tmp_path).items()),
        "directory": lambda: tmp_path,
    }[form]()
    llm.update_weights(weights, version=form)
    [one, *_] = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert one.outputs[0].weights_versions == [(form, 10)]
    assert llm.weights_digest() == LLM(model=trained, **SMALL).weights_digest()
    assert tokens(llm) != before


def test_a_paused_engine_queues_and_says_so(llm):
    llm.pause_generation()
    assert llm.is_paused
    with pytest.raises(RuntimeError, match="call resume_generation"):
        llm.generate("x", PARAMS, use_tqdm=False)
    llm.add_request("Once", PARAMS)
    assert llm.step() == []
    llm.resume_generation()
    found = []
    while llm.has_unfinished_requests():
        found += llm.step()
    assert [len(output.outputs[0].token_ids) for output in found] == [10]


def test_a_sleeping_engine_wakes_up_with_its_weights():
    llm = LLM(**SMALL)
    before, digest = tokens(llm), llm.weights_digest()
    for level in (1, 2):
        llm.sleep(level)
        assert llm.is_sleeping
        with pytest.raises(RuntimeError, match="call wake_up"):
            llm.generate("x", PARAMS, use_tqdm=False)
        llm.wake_up(["weights"])
        assert llm.is_sleeping
        llm.wake_up(["kv_cache"])
        assert not llm.is_sleeping and llm.weights_digest() == digest and llm.weights_version == 0
        assert tokens(llm) == before


def test_asyncio_requests_wait_for_an_update_and_say_which_tokens_are_new(trained):
    async def run() -> list:
        async with AsyncLLM(**SMALL) as engine:
            streams = [await engine.add(prompt, PARAMS, output_kind="final") for prompt in PROMPTS]
            await engine.pause_generation("keep")
            assert engine.is_paused
            late = await engine.add("late", PARAMS, output_kind="final")
            await engine.update_weights(trained, "new")
            await engine.resume_generation(recompute_kv=True)
            outputs = []
            for stream in [*streams, late]:
                async for output in stream:
                    outputs.append(output)
            await engine.sleep()
            await engine.wake_up()
            assert await engine.weights_digest() and engine.weights_version == "new"
            return outputs

    outputs = asyncio.run(run())
    runs = [output.outputs[0].weights_versions for output in outputs]
    assert runs[-1] == [("new", 10)]
    assert all(sum(count for _, count in each) == 10 and each[-1][0] in (0, "new") for each in runs)


def test_pairs_in_a_list_are_named_tensors(llm, trained, tmp_path):
    export_hf(trained, trained.config, tmp_path)
    llm.update_weights([(name, tensor.read()) for name, tensor in open_checkpoint(tmp_path).items()], version="pairs")
    assert llm.weights_version == "pairs" and llm.weights_digest() == LLM(model=trained, **SMALL).weights_digest()


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_tensors_by_name_are_new_weights_of_a_drafter_as_its_directory_is(method, tmp_path):
    llm = LLM(speculative_config={"method": method}, **SMALL)
    graph, state = nnx.split(llm.core.weights.of("drafter").module)
    own = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    changed = nnx.merge(graph, jax.tree.map(lambda x: x * 1.5 if jnp.issubdtype(x.dtype, jnp.floating) else x, state))
    if method == "eagle3":
        export_head(changed, tmp_path)
    else:
        export_hf(changed, changed.config, tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded_checkpoint("tiny-draft") / name, tmp_path)
    first = llm.weights_digest("drafter")
    llm.update_weights(tmp_path, model="drafter")
    wanted = llm.weights_digest("drafter")
    llm.update_weights(own, model="drafter")
    assert llm.weights_digest("drafter") == first != wanted

    tensors = [(name, tensor.read()) for name, tensor in open_checkpoint(tmp_path).items()]
    np.random.default_rng(1).shuffle(tensors)
    with pytest.raises(ValueError, match="is not one of"):
        llm.update_weights(iter([("model.layers.9.nothing", np.zeros(3))]), model="drafter")
    llm.update_weights(iter(tensors), model="drafter")
    assert llm.weights_digest("drafter") == wanted
    if method == "eagle3":
        outside = [(name, tensor + 10**6 if name == "d2t" else tensor) for name, tensor in tensors]
        with pytest.raises(CheckpointError, match="outside of the target's vocabulary"):
            llm.update_weights(iter(outside), model="drafter")


def test_weights_that_could_not_be_read_at_the_wake_up_are_read_at_the_next(monkeypatch):
    llm = LLM(**SMALL)
    before = tokens(llm)
    llm.sleep(2)
    from jaxinfer.frontend import weights_source

    with monkeypatch.context() as patch:
        patch.setattr(weights_source, "leaves_of_directory", _unreadable)
        with pytest.raises(OSError, match="not now"):
            llm.wake_up()
    assert llm.is_sleeping
    llm.wake_up()
    assert tokens(llm) == before


def _unreadable(*_, **__):
    raise OSError("not now")


def test_a_directory_of_another_model_is_refused_before_its_first_leaf(llm, trained, tmp_path):
    import json

    export_hf(trained, trained.config, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match="its rms_norm_eps is 0.001, the engine's is 1e-06"):
        llm.update_weights(tmp_path)
    assert llm.why_idle is None
