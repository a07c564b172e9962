"""Models whose torch code comes with their checkpoints compute what it computed on the same random checkpoints."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import load_checkpoint, read_config
from tests.diffusion.oracle import BlockAttend
from tests.hf_fixtures import REMOTE_NAMES, checkpoint_path, expected
from tests.plain_greedy import PlainGreedy

AUTOREGRESSIVE = [name for name in REMOTE_NAMES if read_config(checkpoint_path(name))[1].block_size is None]
DIFFUSION = [name for name in REMOTE_NAMES if name not in AUTOREGRESSIVE]


def test_the_fixtures_have_what_makes_these_models_different():
    configs = {name: read_config(checkpoint_path(name))[1] for name in REMOTE_NAMES}
    assert {config.architecture for config in configs.values()} == {
        "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "LLaDA2MoeModelLM"
    }  # fmt: skip
    first, second = configs["bailing_v1"], configs["bailing_v2"]
    assert first.normalizes_head and first.experts is not None and first.experts.score == "softmax"
    assert second.rotary_dim < second.head_dim and second.experts is not None
    assert second.experts.num_groups > second.experts.kept_groups and second.experts.dense_layers == (0,)
    assert second.experts.has_bias and second.experts.shared_size and second.experts.scaling == 2.5


@pytest.mark.parametrize("name", AUTOREGRESSIVE)
def test_autoregressive_models_give_the_recorded_logits_and_tokens(name):
    recorded = expected(name)
    _, model = load_checkpoint(checkpoint_path(name))
    plain = PlainGreedy(model, recorded.prompts, len(recorded.greedy[0]))
    logits, lengths = plain.logits(), [len(prompt) for prompt in recorded.prompts]
    np.testing.assert_allclose(logits[-1, : lengths[-1]], recorded.longest_logits, rtol=0, atol=1e-4)
    last = logits[range(len(lengths)), np.array(lengths) - 1]
    np.testing.assert_allclose(last, recorded.last_logits, rtol=0, atol=1e-4)
    greedy, margin = plain.run()
    assert greedy == recorded.greedy
    assert margin == pytest.approx(recorded.smallest_margin, abs=2e-4) and margin > 1e-3


@pytest.mark.parametrize("name", DIFFUSION)
def test_diffusion_models_give_the_recorded_logits_where_blocks_see_each_other(name):
    recorded = expected(name)
    config, model = load_checkpoint(checkpoint_path(name))
    assert config.block_size == 8
    for prompt, last in zip(recorded.prompts, recorded.last_logits, strict=True):
        ids = jnp.asarray(prompt, jnp.int32)
        logits = model.logits(model(ids, jnp.arange(len(prompt)), BlockAttend(config.block_size)))
        np.testing.assert_allclose(logits[-1], last, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, recorded.longest_logits, rtol=0, atol=1e-4)
