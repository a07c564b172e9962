"""`JaxinferRollout` with tunix itself: weights, rollouts, log probabilities, and GRPO beside its own engine."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.integrations.tunix import JaxinferRollout
from tests.tunix.tiny_models import EOS, Letters, tiny_model

base: Any = importlib.import_module("tunix.rl.rollout.base_rollout")
vanilla: Any = importlib.import_module("tunix.rl.rollout.vanilla_rollout")
common: Any = importlib.import_module("tunix.rl.common")
cluster: Any = importlib.import_module("tunix.rl.rl_cluster")
grpo: Any = importlib.import_module("tunix.rl.grpo.grpo_learner")
adapter: Any = importlib.import_module("tunix.generate.tokenizer_adapter")

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_tokens": 1024, "page_size": 8}
PROMPTS = ["the sea", "a lighthouse", "the sea", "ship"]
MODELS = [("llama3", False), ("llama3", True), ("qwen2", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]


def config(**fields: Any) -> Any:
    fields = {"max_tokens_to_generate": 12, "max_prompt_length": 16, "temperature": 0.0, "kv_cache_size": 64} | fields
    return base.RolloutConfig(**fields)


def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def tokenizer(**options: Any) -> Any:
    return adapter.TokenizerAdapter(Letters(**options))


@functools.cache
def rollout_of(family: str, ties: bool) -> JaxinferRollout:
    return JaxinferRollout(tiny_model(family, ties=ties), tokenizer(), mesh(), config(), **OPTIONS)


def logps(model: nnx.Module, prompts: Any, completions: Any, temperature: float, pad: int) -> np.ndarray:
    graph, state = nnx.split(model)
    return np.asarray(
        common.compute_per_token_logps(
            graph, state, prompt_tokens=prompts, completion_tokens=completions, pad_id=pad, eos_id=EOS,
            temperature=temperature,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("family", "ties"), MODELS)
def test_greedy_rollouts_are_those_of_tunix(family, ties):
    model = tiny_model(family, ties=ties)
    theirs = vanilla.VanillaRollout(model, tokenizer(), base.CacheConfig(64, 2, 2, 8))
    greedy = config(top_p=None)  # with top_p, tunix divides by the temperature
    wanted, found = (each.generate(PROMPTS, greedy) for each in (theirs, rollout_of(family, ties)))
    tokens = [each.tolist() for each in found.tokens]
    assert [each[:-1] if each[-1] == EOS else each for each in tokens] == [each.tolist() for each in wanted.tokens]
    assert found.text == wanted.text
    np.testing.assert_array_equal(found.left_padded_prompt_tokens, wanted.left_padded_prompt_tokens)


@pytest.mark.parametrize("pads_with_end", [False, True])
def test_log_probabilities_are_those_of_the_trainer(pads_with_end):
    model, own = tiny_model("qwen3"), tokenizer(pads_with_end=pads_with_end)
    settings = config(temperature=0.7, return_logprobs=True, seed=jax.random.PRNGKey(3), max_tokens_to_generate=40,
                      max_prompt_length=16)  # fmt: skip
    rollout = JaxinferRollout(model, own, mesh(), settings, **OPTIONS)
    output = rollout.generate(PROMPTS * 2, settings)
    lengths = [len(tokens) for tokens in output.tokens]
    assert min(lengths) < 40, "nothing has ended: choose another seed"
    completions = np.full((len(lengths), 40), own.pad_id(), np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    found = np.asarray(rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions))
    assert found.shape == completions.shape
    pad = -1  # the trainer's own mask takes tokens of padding for padding, wherever they are
    prompts = np.where(output.left_padded_prompt_tokens == own.pad_id(), pad, output.left_padded_prompt_tokens)
    wanted = logps(model, prompts, completions, 0.7, pad)
    for place, length in enumerate(lengths):
        np.testing.assert_allclose(found[place, :length], wanted[place, :length], atol=1e-4)
        np.testing.assert_allclose(output.logprobs[place], wanted[place, :length], atol=1e-4)
        assert not found[place, length:].any()


def test_samples_depend_on_seed_call_and_place_alone():
    first, second = (
        JaxinferRollout(tiny_model("qwen3"), tokenizer(), mesh(), config(), **OPTIONS) for _ in range(2)
    )  # fmt: skip
    settings = config(temperature=1.0, seed=jax.random.PRNGKey(5))
    found = [first.generate(PROMPTS, settings).tokens for _ in range(2)]
    again = [second.generate(PROMPTS, settings).tokens for _ in range(2)]
    assert jax.tree.map(np.ndarray.tolist, found) == jax.tree.map(np.ndarray.tolist, again)
    assert found[0][0].tolist() != found[0][2].tolist(), "equal prompts have equal samples"
    assert found[0][0].tolist() != found[1][0].tolist(), "two calls have equal samples"


def test_an_update_brings_other_weights_and_compiles_nothing_under_the_mesh():
    rollout = JaxinferRollout(tiny_model("qwen3"), tokenizer(), mesh(), config(), **OPTIONS)
    rollout.update_params(nnx.state(tiny_model("qwen3"), nnx.Param), (nnx.Param,))
    before = rollout.generate(PROMPTS, config()).tokens
    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiles.append(event) if event.endswith("backend_compile_duration") else None
    )
    other = tiny_model("qwen3", seed=1)
    compiles.clear()
    with mesh(), jax.transfer_guard_device_to_host("disallow_explicit"):
        rollout.update_params(nnx.state(other, nnx.Param), (nnx.Param,))
    with mesh():
        after = rollout.generate(PROMPTS, config())
    assert compiles == []
    fresh = JaxinferRollout(other, tokenizer(), mesh(), config(), **OPTIONS).generate(PROMPTS, config())
    assert [each.tolist() for each in after.tokens] == [each.tolist() for each in fresh.tokens]
    assert [each.tolist() for each in after.tokens] != [each.tolist() for each in before]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_mapping_config": object()}, "rollout_mapping_config=.* is not supported"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 is not supported"),
        ({"expert_parallel_size": 2}, "expert_parallel_size=2 is not supported"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 on a mesh of 1 devices"),
    ],
)
def test_fields_that_are_not_honoured_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        JaxinferRollout(tiny_model("qwen3"), tokenizer(), mesh(), config(**fields), **OPTIONS)


def test_fields_of_other_engines_are_ignored_with_one_line(caplog):
    caplog.set_level(logging.INFO, logger="jaxinfer.integrations.tunix")
    settings = config(rollout_vllm_server_mode=True, rollout_sglang_jax_page_size=64)
    JaxinferRollout(tiny_model("qwen3"), tokenizer(), mesh(), settings, **OPTIONS).generate(["a"], settings)
    [line] = [record.message for record in caplog.records if "ignored" in record.message]
    assert line.endswith("kv_cache_size, rollout_vllm_server_mode, rollout_sglang_jax_page_size")


def test_one_prompt_is_a_prompt_too():
    one, many = (rollout_of("qwen3", True).generate(prompts, config()) for prompts in ("the sea", ["the sea"]))
    assert one.text == many.text and one.left_padded_prompt_tokens.shape == (1, 16)


def test_a_long_prompt_and_unknown_arguments_are_refused():
    with pytest.raises(ValueError, match="prompt 1 has 21 tokens, more than max_prompt_length=16"):
        rollout_of("qwen3", False).generate(["a", "x" * 20], config())
    with pytest.raises(ValueError, match="max_prompt_length . max_tokens_to_generate = 80 is more than the engine"):
        rollout_of("qwen3", False).generate(["a"], config(max_tokens_to_generate=64))
    with pytest.raises(TypeError, match="no arguments images"):
        rollout_of("qwen3", False).generate(["a"], config(), images=None)


def test_other_models_and_lora_are_refused():
    with pytest.raises(ValueError, match="rollout_actor must be one of tunix's models Llama3, Qwen2, Qwen3"):
        JaxinferRollout(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tokenizer(), mesh(), config())
    qwix: Any = importlib.import_module("qwix")
    model = tiny_model("qwen3")
    provider = qwix.LoraProvider(module_path=".*q_proj", rank=2, alpha=2.0)
    tokens = np.ones((1, 4), np.int32)
    lora = qwix.apply_lora_to_model(
        model, provider, input_tokens=tokens, positions=np.arange(4)[None], cache=None,
        attention_mask=np.tril(np.ones((1, 4, 4), bool)),
    )  # fmt: skip
    with pytest.raises(ValueError, match="LoRA parameters"):
        JaxinferRollout(lora, tokenizer(), mesh(), config(), **OPTIONS)


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of spaces."""
    return [text.count(" ") / max(1, len(text)) for text in completions]


@pytest.mark.parametrize(
    "engine", ["vanilla", functools.partial(JaxinferRollout, **OPTIONS)], ids=["tunix", "jaxinfer"]
)
def test_grpo_trains_with_either_engine(engine, tmp_path):
    actor, reference = tiny_model("qwen3"), tiny_model("qwen3")
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(actor, nnx.Param)))
    training = cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(1e-3), eval_every_n_steps=100, max_steps=3, mini_batch_size=2,
        train_micro_batch_size=2, rollout_micro_batch_size=2, compute_logps_micro_batch_size=2,
    )  # fmt: skip
    made = cluster.RLCluster(
        actor=actor, reference=reference, tokenizer=Letters(),
        cluster_config=cluster.ClusterConfig(
            role_to_mesh={role: mesh() for role in (cluster.Role.ACTOR, cluster.Role.REFERENCE, cluster.Role.ROLLOUT)},
            rollout_engine=engine, training_config=training, rollout_config=config(temperature=1.0),
        ),
    )  # fmt: skip
    learner = grpo.GRPOLearner(
        rl_cluster=made, reward_fns=reward, algo_config=grpo.GRPOConfig(num_generations=4, num_iterations=1)
    )
    batches = [{"prompts": np.array(["the sea", "ship"])} for _ in range(3)]
    with mesh():
        learner.train(batches)
    actor = made.actor_trainer.model  # the trainer has one of its own
    trained = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(actor, nnx.Param)))
    assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(trained), strict=True))
    if engine != "vanilla":
        rollout = made.rollout
        assert rollout.llm.weights_version >= 3
        fresh = JaxinferRollout(actor, tokenizer(), mesh(), config(), **OPTIONS)
        assert rollout.llm.weights_digest() == fresh.llm.weights_digest()
