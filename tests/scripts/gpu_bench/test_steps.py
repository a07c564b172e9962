"""Hand-made batches and formula weights of the GPU benchmark: the engine's steps on them compute the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpu_bench.model import formula_model
from gpu_bench.plan import model_values
from gpu_bench.steps import NUM_SEATS, STEP, decode_batch, lane_pages, launch_decode, pages_for, prefill_batch
from gpu_bench.weights import factor, fraction, prompt_ids, salt, scrambled
from jaxinfer.attention.backend import select_backend
from jaxinfer.attention.dense import CausalAttend
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.checkpoint.weight_map import placements
from jaxinfer.models.config import ModelConfig
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.decode_loop import DecodeLoop
from jaxinfer.programs.program import KV, TARGET
from jaxinfer.programs.runner import Runner, initial_state

VALUES = model_values("Qwen3-0.6B", smoke=True)
VOCAB = VALUES["vocab_size"]
PAGES = 8


@pytest.fixture(scope="module")
def model():
    return formula_model(VALUES, dtype=jnp.float32)


@pytest.fixture(scope="module")
def runner(model):
    cache = KVPool.allocate(model.config, num_pages=40, page_size=16, dtype=jnp.dtype(jnp.float32))
    return Runner({TARGET: model}, initial_state(cache, NUM_SEATS, model.config.vocab_size), select_backend("xla"))


def shape_of(tokens):
    return BatchShape(decode_rows=0, prefill_rows=1, prefill_tokens=tokens, pages_per_row=PAGES)


def plain_logits(model, ids):
    """float32 [vocab], after the last of `ids`."""

    @jax.jit
    def run(ids):
        return model.logits(model(ids, jnp.arange(len(ids)), CausalAttend())[-1])

    return np.asarray(run(jnp.asarray(ids)))


@pytest.mark.parametrize("tokens", [64, 33])
def test_a_prefill_batch_computes_the_prompt(model, runner, tokens):
    ids = prompt_ids(tokens, VOCAB)
    shape = shape_of(64)
    output = runner.launch(STEP, shape, prefill_batch(shape, ids, runner.state[KV]).buffer)
    logits = jax.jit(model.logits)(output.hidden[tokens - 1])
    np.testing.assert_allclose(logits, plain_logits(model, ids), atol=1e-4)
    assert output.token_ids[0] == logits.argmax()


def test_a_decode_row_sees_its_context_and_itself(model, runner):
    ids = prompt_ids(32, VOCAB)  # ends at a page's border: the decoded token opens a new page
    runner.launch(STEP, shape_of(32), prefill_batch(shape_of(32), ids, runner.state[KV]).buffer)
    token = launch_decode(runner, decode_batch(1, 32, PAGES, runner.state[KV]), 32)
    assert token[0] == plain_logits(model, [*ids, 1]).argmax()


def test_a_loop_of_decode_rows_gives_the_tokens_of_one_launch_a_step(runner):
    packed = decode_batch(3, 20, PAGES, runner.state[KV], num_steps=4)
    looped = np.asarray(launch_decode(runner, packed, 20, loop=DecodeLoop(4)))
    assert looped.shape == (4, 3) and (looped >= 0).all()
    tokens = [launch_decode(runner, packed, 20)]
    tokens += [runner.launch(STEP, packed.shape, packed.buffer).token_ids for _ in range(3)]
    assert np.array_equal(tokens, looped)


def test_rows_have_pages_of_their_own_and_no_more_than_there_are(runner):
    table = lane_pages(runner.state[KV], 4, 33)
    assert table.shape == (4, 3) and len(np.unique(table)) == 12
    with pytest.raises(ValueError, match="do not fit a pool of 40"):
        lane_pages(runner.state[KV], 14, 33)


def test_the_bucket_of_pages_leaves_room_for_a_loop():
    assert [pages_for(tokens) for tokens in (1024, 4000, 4090, 8192)] == [256, 256, 2560, 2560]


def weights_of(name, shape):
    """float32: the formula in NumPy's int64."""
    width = factor(name, shape)
    if width is None:
        return np.ones(shape, np.float32)
    bits = scrambled(np.arange(np.prod(shape), dtype=np.int64), salt(name))
    return (fraction(bits.astype(np.float32)) * np.float32(width)).reshape(shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B"])
def test_weights_have_the_same_bits_in_int64_as_on_the_device(name, dtype):
    values = model_values(name, smoke=True)
    model = formula_model(values, dtype=dtype)
    for placement in placements(ModelConfig.from_hf(values)):
        parameter = model
        for key in placement.target.path.split("."):
            parameter = parameter[int(key)] if key.isdigit() else getattr(parameter, key)
        found = placement.to_source(np.asarray(parameter[...]))
        expected = np.asarray(weights_of(placement.source, placement.source_shape)).astype(found.dtype)
        assert np.array_equal(found, expected), placement.source


def test_weights_of_different_tensors_and_neighbours_do_not_resemble_each_other():
    shape = (64, 512)
    drawn = [weights_of(f"model.layers.{layer}.mlp.up_proj.weight", shape) for layer in range(3)]
    drawn += [np.roll(drawn[0], 1, axis=axis) for axis in (0, 1)]
    assert np.abs(np.corrcoef([x.reshape(-1) for x in drawn]) - np.eye(5)).max() < 0.02
    for x in drawn[:3]:
        assert abs(x.mean()) < 0.001 and x.std() == pytest.approx(512**-0.5, rel=0.01)


def test_large_indices_wrap_alike():
    index = np.array([0, 1, 2**31 - 1, 2**31, 622_329_855, 2**32 - 1])
    wide = scrambled(index, salt("lm_head.weight"))
    narrow = scrambled(jnp.asarray(index.astype(np.uint32)), jnp.uint32(salt("lm_head.weight")), wrap=lambda x: x)
    assert narrow.dtype == jnp.uint32 and np.array_equal(wide, np.asarray(narrow, np.int64))
    assert ((wide >= 0) & (wide < 2**24)).all() and len(np.unique(wide)) == len(index)


def test_the_prompt_is_the_same_for_whoever_asks():
    assert np.array_equal(prompt_ids(100, VOCAB), prompt_ids(100, VOCAB))
    assert jax.numpy.asarray(prompt_ids(5, VOCAB)).dtype == jnp.int32
