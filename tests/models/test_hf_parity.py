"""Every family computes what Hugging Face's implementation computed on the same random checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import load_checkpoint, read_config
from jaxinfer.models.families import FAMILIES
from tests.hf_fixtures import NAMES, Expected, checkpoint_path, expected
from tests.plain_greedy import PlainGreedy

pytestmark = pytest.mark.optimized


@dataclass(frozen=True)
class Case:
    recorded: Expected
    logits: np.ndarray
    greedy: list[list[int]]
    margin: float


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    recorded = expected(request.param)
    _, model = load_checkpoint(checkpoint_path(request.param))
    plain = PlainGreedy(model, recorded.prompts, len(recorded.greedy[0]))
    return Case(recorded, plain.logits(), *plain.run())


def test_heads_in_another_order_would_be_noticed():
    recorded = expected("llama3_tied")
    _, model = load_checkpoint(checkpoint_path("llama3_tied"))
    kernel = model.layers[0].attention.qkv.kernel
    group = model.config.group_size
    swapped = kernel[...].at[:, :group].set(jnp.flip(kernel[:, :group], axis=1))
    kernel.set_value(swapped)
    logits = PlainGreedy(model, recorded.prompts, 1).logits()
    assert np.abs(logits[-1, :100] - recorded.longest_logits).max() > 0.1


def test_the_fixtures_cover_every_family_and_rope_type():
    configs = [read_config(checkpoint_path(name))[1] for name in NAMES]
    in_transformers = {name for name, family in FAMILIES.items() if not family.has_remote_code}
    assert {config.architecture for config in configs} == in_transformers
    assert {layer.rope.rope_type for config in configs for layer in config.all_layers if layer.rope} == {
        "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional",
    }  # fmt: skip
    assert {config.tie_word_embeddings for config in configs} == {True, False}
    assert all(config.group_size > 1 for config in configs)
    assert any(config.head_dim * config.num_heads != config.hidden_size for config in configs)


def test_logits_at_every_position_of_the_longest_prompt_match(case):
    assert len(case.recorded.prompts[-1]) == 100
    np.testing.assert_allclose(case.logits[-1, :100], case.recorded.longest_logits, rtol=0, atol=1e-4)


def test_logits_after_prompts_of_any_length_match(case):
    lengths = [len(prompt) for prompt in case.recorded.prompts]
    assert lengths == [1, 2, 7, 16, 17, 33, 63, 100]
    last = case.logits[range(len(lengths)), np.array(lengths) - 1]
    np.testing.assert_allclose(last, case.recorded.last_logits, rtol=0, atol=1e-4)


def test_greedy_tokens_match(case):
    assert case.greedy == case.recorded.greedy


def test_the_recorded_tokens_win_by_a_real_margin(case):
    assert case.recorded.smallest_margin > 1e-3
    assert case.margin == pytest.approx(case.recorded.smallest_margin, abs=2e-4)
