"""New weights while requests run: every token is sampled with the weights that it is tagged with."""

from __future__ import annotations

import functools
import gc
import random
import re
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer.checkpoint.export import export_hf
from jaxinfer.checkpoint.incoming import NamedTensors, leaves_of_tree
from jaxinfer.checkpoint.safetensors_reader import open_checkpoint
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.rope import RopeConfig
from jaxinfer.programs.digest import digest_of
from jaxinfer.programs.weights import ModelWeights
from tests.branching.builders import make_group
from tests.builders import drain, make_engine, make_request, model_config, random_model, random_prompts, run_requests
from tests.diffusion.builders import MASK
from tests.engine.weights_oracle import Oracle, Watch
from tests.faults.ways import WAYS as WAYS_OF_FAULTS
from tests.speculative.builders import SMALL_TREES, disturbed, made_in, random_head, speculating_engine


@functools.cache
def model_of(version: Any) -> DecoderLM:
    rope = RopeConfig(max_position_embeddings=256, original_max_position_embeddings=256)
    return random_model(model_config(num_layers=2, rope=rope), seed=3 if version == 0 else ord(version))


@functools.cache
def leaves(version: Any) -> dict[str, Any]:
    return leaves_of_tree(model_of(version))


@functools.cache
def oracle() -> Oracle:
    return Oracle({version: model_of(version) for version in (0, "A", "B")})


def engine(way: str, **limits: Any) -> EngineCore:
    return made_in(way, model_of(0), **{"max_num_batched_tokens": 20, "kv_cache_tokens": 400, **limits})


WAYS = ("plain", "ngram", "draft_model", "eagle3")


def requests(prefix: str = "", tokens: int = 16) -> list:
    prompts = random_prompts((21, 9, 40, 14), seed=7)
    return [
        make_request(f"{prefix}{i}", prompt, max_tokens=tokens, temperature=i % 2, seed=i)
        for i, prompt in enumerate(prompts)
    ]


def run_with_updates(core: EngineCore, items: list, versions: dict[int, Any]) -> Watch:
    """Run requests to their end, with an update before each of some steps."""
    watch = Watch(core)
    for item in items:
        (core.add_request if hasattr(item, "token_ids") else core.add_group)(item)
    for step in range(1000):
        if step in versions:
            watch.update(leaves(versions[step]), versions[step])
        if not core.has_unfinished_requests():
            break
        core.step()
        core.check_integrity()
    assert not core.has_unfinished_requests()
    return watch


@pytest.mark.parametrize("way", WAYS)
def test_requests_in_flight_go_on_with_new_weights(way):
    core = engine(way)
    watch = run_with_updates(core, requests(), {2: "A", 4: "B", 6: "A"})
    assert watch.check(oracle()) == 64
    assert len({version for one in watch.known.values() for _, _, version in one.tokens}) > 1


@pytest.mark.parametrize("mode", ["in_one_sequence", "batching"])
@pytest.mark.parametrize("way", ["plain", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_members_that_start_later_begin_with_a_prefix_of_the_new_weights(way, mode):
    prefix, *suffixes = random_prompts((19, 3, 6, 1, 4), seed=5)
    group = make_group("g", prefix, suffixes, branch_mode=mode, max_parallel=2, max_tokens=9)
    watch = run_with_updates(engine(way), [group], {1: "A", 3: "B", 9: "A"})
    assert watch.check(oracle()) == 36


def test_preempted_requests_are_computed_anew_with_the_weights_of_then():
    core = engine("plain", kv_cache_tokens=160)
    watch = run_with_updates(core, requests(tokens=40), {6: "A", 12: "B", 20: "A"})
    assert core.get_metrics().num_preemptions_total > 0
    watch.check(oracle())


def test_a_prefix_of_other_weights_is_never_found_also_when_a_version_comes_again():
    core = engine("plain")
    prompt = random_prompts((40,), seed=8)[0]
    wanted = {version: run_requests(engine_with(version), [make_request("x", prompt)])[0] for version in (0, "A", "B")}
    for number, (version, name) in enumerate([(0, 0), ("A", "one"), (0, "two"), ("B", "one"), ("A", "one")]):
        if number:
            core.weights.update(leaves(version), name, "target", is_lent=True)
        assert run_requests(core, [make_request("x", prompt)]) == [wanted[version]]
        hits = core.get_metrics().prefix_cache_hits
        assert run_requests(core, [make_request("y", prompt)]) == [wanted[version]]
        assert core.get_metrics().prefix_cache_hits > hits


@functools.cache
def engine_with(version: Any) -> EngineCore:
    return make_engine(model_of(version), max_num_batched_tokens=20, kv_cache_tokens=400)


@pytest.mark.parametrize("way", ["plain", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_two_hundred_updates_leave_nothing_behind_and_compile_nothing(way):
    core, rng = engine(way), random.Random(4)
    core.warm_up(progress=False)
    watch = Watch(core)
    for number in range(200):
        if len(core._requests) < 4:
            length = rng.randrange(4, 50)
            prompt = random_prompts((length,), seed=number % 5)[0]
            core.add_request(make_request(str(number), prompt, max_tokens=rng.randrange(1, 30)))
        core.step()
        watch.update(leaves((0, "A", "B")[number % 3]), (0, "A", "B")[number % 3])
    drain(core)
    assert core.weights.num_updates == 200
    assert core.get_metrics().num_compiles_after_warm_up_total == 0
    assert core.scheduler.kv.allocator.num_held == 0
    assert watch.check(oracle()) > 200


def test_weights_that_the_engine_owns_are_written_over_and_those_that_it_was_lent_are_let_go():
    graph, state = nnx.split(model_of(0))
    lent = nnx.merge(graph, jax.tree.map(lambda x: x + 0, state))
    core = make_engine(lent)
    old = [weakref.ref(leaf) for leaf in core.runner.weights["target"].leaves]
    core.weights.update(leaves("A"), None, "target", is_lent=True)
    held = dict(zip(core.weights.of("target").paths, core.weights.of("target").leaves, strict=True))
    assert all(held[path].unsafe_buffer_pointer() == leaf.unsafe_buffer_pointer() for path, leaf in leaves("A").items())
    del lent, state
    gc.collect()
    assert not any(reference() is not None for reference in old)
    own = jax.tree.map(lambda x: x + 0, nnx.split(model_of("A"))[1])
    core = EngineCore(nnx.merge(graph, own), core.config, dtype=np.float32, lent=False)
    before = core.runner.weights["target"].leaves[:]
    core.weights.update(leaves("B"), None, "target", is_lent=True)
    assert all(leaf.is_deleted() for leaf in before)
    assert not any(leaf.is_deleted() for leaf in leaves("B").values())
    assert core.weights.version == 1


def tensors_of(version: Any, folder: Any) -> dict[str, np.ndarray]:
    """The model's tensors by their Hugging Face names."""
    export_hf(model_of(version), model_of(version).config, folder)
    return {name: tensor.read() for name, tensor in open_checkpoint(folder).items()}


def test_tensors_by_name_come_in_any_order(tmp_path):
    core = engine("plain")
    tensors = list(tensors_of("A", tmp_path).items())
    random.Random(1).shuffle(tensors)
    core.weights.update(named().assembled(tensors), "A", "target", is_lent=False)
    assert core.weights.digest("target") == engine_with("A").weights.digest("target")
    assert not any(core.weights.of("target").lent)


def named() -> NamedTensors:
    return NamedTensors(model_of(0).config, np.float32)


@pytest.mark.parametrize("change", ["missing", "twice", "unknown", "shape", "integers"])
def test_an_iterator_that_fails_half_way_stops_launches_until_an_update_is_complete(change, tmp_path):
    tensors = list(tensors_of("A", tmp_path).items())
    name, tensor = tensors[-1]
    wrong, words = {
        "missing": ([], "incomplete: "),
        "twice": ([tensors[0]], f"{tensors[0][0]} comes twice"),
        "unknown": ([("model.layers.7.what", tensor)], "tensor model.layers.7.what is not one of Qwen3ForCausalLM"),
        "shape": ([(name, tensor[None])], f"tensor {name} has shape [1, "),
        "integers": ([(name, tensor.astype(np.int32))], f"tensor {name} has type int32"),
    }[change]
    core = engine("plain")
    request = make_request("x", random_prompts((9,), seed=2)[0], max_tokens=6)
    core.add_request(request)
    while not request.num_output_tokens:
        core.step()
    with pytest.raises(ValueError, match=re.escape(words)):
        core.weights.update(named().assembled([*tensors[:-1], *wrong]), "A", "target", is_lent=False)
    kept = request.num_output_tokens
    reason = core.why_idle()
    assert reason is not None and "an update has failed after new leaves" in reason
    launches = core.get_metrics().num_launches_total
    core.step()
    assert core.get_metrics().num_launches_total == launches and core.weights.version == 0
    core.weights.update(leaves("B"), "B", "target", is_lent=True)
    assert core.why_idle() is None
    drain(core)
    assert request.versions.runs(0, 6) == [(0, kept), ("B", 6 - kept)]


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "donated", "integers"])
def test_a_tree_is_checked_before_its_first_leaf_is_replaced(change):
    core, wrong = engine("plain"), dict(leaves("A"))
    before, path = core.weights.digest("target"), "layers.1.mlp.down.kernel"
    if change == "missing":
        del wrong[path]
    elif change == "unknown":
        wrong["layers.2.mlp"] = wrong[path]
    elif change == "shape":
        wrong[path] = wrong[path][:-1]
    elif change == "donated":
        wrong[path] = wrong[path] + 0
        wrong[path].delete()
    else:
        wrong[path] = wrong[path].astype(np.int32)
    with pytest.raises(ValueError, match="layers"):
        core.weights.update(wrong, "A", "target", is_lent=True)
    assert core.weights.digest("target") == before and core.why_idle() is None and core.weights.version == 0


def test_a_model_of_numpy_arrays_is_placed_on_the_device_and_runs():
    graph, state = nnx.split(model_of(0))
    engine = make_engine(nnx.merge(graph, jax.tree.map(np.array, state)))
    assert all(isinstance(leaf, jax.Array) for leaf in engine.runner.weights["target"].leaves)
    assert run_requests(engine, requests()) == run_requests(make_engine(model_of(0)), requests())


def test_arrays_that_a_trainer_has_donated_stop_launches_until_the_next_update():
    graph, state = nnx.split(model_of(0))
    trained = jax.tree.map(lambda x: x + 0, state)
    core = make_engine(nnx.merge(graph, trained))
    request = make_request("x", random_prompts((9,), seed=2)[0], max_tokens=6)
    core.add_request(request)
    core.step()
    step = jax.jit(lambda weights: jax.tree.map(lambda x: x * 1.5, weights), donate_argnums=0)
    trained = step(trained)
    reason = core.why_idle()
    assert reason is not None and "embed.embedding" in reason and "call update_weights" in reason
    core.step()
    core.weights.update(leaves_of_tree(nnx.merge(graph, trained)), None, "target", is_lent=True)
    drain(core)
    assert request.num_output_tokens == 6


def test_a_digest_sees_a_bit_a_place_and_a_path():
    def digest_of_changed(change) -> str:
        graph, state = nnx.split(model_of(0))
        flat = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
        change(flat)
        changed = {path: leaf.replace(flat[path]) for path, leaf in nnx.to_flat_state(state)}
        return digest_of(ModelWeights(nnx.merge(graph, nnx.from_flat_state(changed))))

    one, other = (("layers", number, "input_norm", "scale") for number in (0, 1))

    def bit(flat):
        flat[one] = flat[one].at[3].set(np.nextafter(np.float32(flat[one][3]), np.float32(9)))

    def place(flat):
        flat[one] = flat[one][np.r_[1, 0, 2 : len(flat[one])]]

    def path(flat):
        flat[one], flat[other] = flat[other], flat[one]

    found = [digest_of_changed(change) for change in (lambda flat: None, bit, place, path)]
    assert len(set(found)) == 4 and found[0] == digest_of(ModelWeights(model_of(0)))
    assert all(len(digest) == 64 for digest in found)


@pytest.mark.parametrize("way", ["draft_model", "eagle3"])
def test_a_drafter_with_new_weights_drafts_as_one_that_began_with_them(way):
    core, model = engine(way), model_of(0)
    better = disturbed(model, 0.01) if way == "draft_model" else random_head(model.config, seed=8, capture=(0,))
    running = requests("r")
    for request in running:
        core.add_request(request)
    for _ in range(3):
        core.step()
    core.weights.update(leaves_of_tree(better), None, "drafter", is_lent=True)
    drain(core)
    plain = run_requests(engine("plain"), requests("p"))
    assert [request.output_token_ids for request in running] == plain
    fresh = speculating_engine(
        model,
        better,
        speculative=SMALL_TREES if way == "eagle3" else None,
        max_num_batched_tokens=20,
        kv_cache_tokens=400,
    )
    before = core.get_metrics()
    run_requests(core, requests("c"))
    run_requests(fresh, requests("d"))
    after, wanted = core.get_metrics(), fresh.get_metrics()
    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    drafted = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
    share = wanted.spec_decode_num_accepted_tokens / wanted.spec_decode_num_draft_tokens
    assert accepted / drafted >= 0.95 * share


def test_models_that_are_not_there_are_named():
    core = engine("plain")
    with pytest.raises(ValueError, match="no drafter"):
        core.weights.update({}, None, "drafter", is_lent=True)
    with pytest.raises(ValueError, match='"target" or "drafter", got \'head\''):
        core.weights.digest("head")


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_launches_nothing_but_what_it_waits_for(mode):
    core = engine("plain", max_num_seqs=2)
    items = requests(tokens=60)
    for item in items:
        core.add_request(item)
    while not items[1].num_output_tokens:
        core.step()
    core.pausing.begin(mode)
    while core.pausing.is_waiting and mode == "wait":
        core.step()
    ended = {"keep": [], "wait": items[:2], "abort": items}[mode]
    core.step()
    launches = core.get_metrics().num_launches_total
    core.add_request(late := make_request("late", items[0].prompt_token_ids, max_tokens=3))
    core.step()
    assert core.get_metrics().num_launches_total == launches
    assert core.why_idle() == "generation was paused: call resume_generation"
    assert [item for item in items if item.is_finished] == ended
    core.pausing.resume(recompute_kv=False)
    drain(core)
    assert late.num_output_tokens == 3
    if mode != "abort":
        assert [item.output_token_ids for item in items] == run_requests(engine("plain"), requests(tokens=60))


@pytest.mark.parametrize("way", ["plain", "eagle3"])
def test_requests_that_are_computed_anew_have_the_logits_of_a_prompt_of_their_tokens(way):
    core = engine(way)
    watch, items = Watch(core), requests()
    for item in items:
        core.add_request(item)
    for _ in range(4):
        core.step()
    core.pausing.begin("keep")
    watch.update(leaves("A"), "A")
    core.pausing.resume(recompute_kv=True)
    drain(core)
    assert watch.check(oracle()) == 64
    assert all(chain == () for one in watch.known.values() for _, chain, version in one.tokens if version == "A")


@pytest.mark.parametrize("way", ["block", "bidirectional"])
def test_diffusion_begins_what_has_not_landed_again_from_masks(way):
    """After an update a request continues as one whose prompt is what has landed, with the new weights."""
    made = WAYS_OF_FAULTS[way].make()
    config = made.model_config
    other = random_model(config, seed=9)
    core = made
    prompt = random_prompts((9,), seed=5, vocab_size=MASK)[0]
    block = config.block_size or made.strategy.vicinity.block_size
    request = make_request("x", prompt, max_tokens=4 * block)
    core.add_request(request)
    while not request.num_output_tokens:
        core.step()
    core.step()  # a block has begun
    core.weights.update(leaves_of_tree(other), "B", "target", is_lent=True)
    kept = request.num_output_tokens
    drain(core)
    assert [version for version, _ in request.versions.runs(0, request.num_output_tokens)] == [0, "B"]
    fresh = WAYS_OF_FAULTS[way].make()
    fresh.weights.update(leaves_of_tree(other), "B", "target", is_lent=True)
    again = make_request("y", [*prompt, *request.output_token_ids[:kept]], max_tokens=4 * block - kept)
    assert run_requests(fresh, [again])[0] == request.output_token_ids[kept:]
