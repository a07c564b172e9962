"""The output head in its two orders of operands gives the same logits and tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.next_tokens import TABLE_FIRST_ROWS, logits_and_greedy, next_tokens
from jaxinfer.sampling.sampler import sample
from tests.builders import model_config, random_model
from tests.sampling.reference import Filters, sampling_batch
from tests.tolerances import tolerance

FAMILIES = {"tied": "Qwen2ForCausalLM", "head of its own": "LlamaForCausalLM"}


@pytest.mark.parametrize("rows", [1, 7, TABLE_FIRST_ROWS, TABLE_FIRST_ROWS + 1])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_logits_and_greedy_tokens_are_those_of_the_plain_product(family, rows):
    model = random_model(model_config(family))
    hidden = jax.random.normal(jax.random.key(rows), (rows, model.config.hidden_size))
    logits, greedy = jax.jit(lambda hidden: logits_and_greedy(model, hidden))(hidden)
    expected = hidden @ (model.lm_head.kernel if model.lm_head else model.embed.embedding)[...].T
    assert logits.shape == (rows, model.config.vocab_size) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=tolerance(1e-5), atol=tolerance(1e-5))
    assert np.array_equal(greedy, np.argmax(logits, axis=-1)) and greedy.dtype == jnp.int32


@pytest.mark.parametrize("kinds", [["greedy"], ["random"], ["greedy", "random", "random"]], ids=" ".join)
def test_next_tokens_are_those_that_sample_takes_from_the_logits(kinds):
    model = random_model(model_config())
    filters = {"greedy": Filters(temperature=0.0), "random": Filters(temperature=1.5)}
    hidden = jax.random.normal(jax.random.key(3), (6, model.config.hidden_size))
    sampling = sampling_batch([filters[kind] for kind in kinds] * (6 // len(kinds)))
    tokens = jax.jit(lambda hidden: next_tokens(model, hidden, sampling))(hidden)
    logits, _ = jax.jit(lambda hidden: logits_and_greedy(model, hidden))(hidden)
    assert np.array_equal(tokens, sample(logits, sampling))
