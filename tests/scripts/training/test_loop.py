"""Training of the embedded checkpoint: whole documents in batches, the right loss, a step that learns."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.models.config import ModelConfig
from training.initialization import model_config, random_parameters
from training.loop import TrainingConfig, make_optimizer, make_step, module_of, row_losses, schedule
from training.packing import Document, Packer, pack_rows

SMALL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip


def document(length: int, start: int = 0) -> Document:
    return Document([1 + (start + i) % 60 for i in range(length)], [i % 2 == 1 for i in range(length)])


def test_packing_keeps_every_document_whole_and_in_order():
    rows = pack_rows([[document(3), document(4, 9)], [document(5, 20)]], 8, 0.25)
    assert rows.ids.tolist() == [[1, 2, 3, 10, 11, 12, 13, 0], [21, 22, 23, 24, 25, 0, 0, 0]]
    assert rows.documents.tolist() == [[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert rows.tokens == 12


def test_prompts_weigh_less_and_first_tokens_and_padding_nothing():
    rows = pack_rows([[document(3), document(2)]], 6, 0.25)
    assert rows.weights.tolist() == [[0.0, 1.0, 0.25, 0.0, 1.0, 0.0]]


def test_the_packer_uses_every_document_at_most_once_and_nearly_fills_its_rows():
    source = [
        Document([number] * (10 + 7 * (number % 13)), [True] * (10 + 7 * (number % 13))) for number in range(3000)
    ]
    packer = Packer(iter(source), partial(pack_rows, prompt_weight=1.0))
    seen: list[int] = []
    filled = []
    for _ in range(10):
        for rows in packer.step(((4, 64), (4, 128))):
            filled.append(rows.tokens / rows.ids.size)
            for ids, documents in zip(rows.ids, rows.documents, strict=True):
                seen += [int(ids[documents == number][0]) for number in range(1, documents.max() + 1)]
    assert len(seen) == len(set(seen))
    assert np.mean(filled) > 0.95


def test_the_packer_reads_on_when_no_document_in_sight_is_short_enough():
    packer = Packer(
        itertools.chain([document(100)] * 700, itertools.cycle([document(20)])), partial(pack_rows, prompt_weight=1.0)
    )
    short, _ = packer.step(((2, 32), (2, 128)))
    assert (short.documents.max(axis=1) >= 1).all()


def test_documents_longer_than_the_longest_row_are_counted():
    packer = Packer(itertools.cycle([document(200), document(20)]), partial(pack_rows, prompt_weight=1.0))
    packer.step(((2, 64),))
    assert packer.left_out > 0


def test_packed_documents_do_not_see_each_other():
    graph, params = random_parameters(SMALL, 0)
    params = dict(nudged(params))
    together = pack_rows([[document(6), document(7, 30)]], 16, 0.5)
    apart = pack_rows([[document(6)], [document(7, 30)]], 16, 0.5)
    one = row_losses(graph, params, arrays(together))
    two = row_losses(graph, params, arrays(apart))
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_the_loss_is_the_weighted_cross_entropy_of_the_next_token():
    graph, params = random_parameters(SMALL, 0)
    params = dict(nudged(params))
    rows = pack_rows([[document(7, 3)]], 8, 0.25)
    model = module_of(graph, params)
    hidden = model(jnp.asarray(rows.ids), jnp.asarray(rows.positions), CausalAttend())
    logs = jax.nn.log_softmax(model.logits(hidden)[0])
    weights = rows.weights[0]
    expected = -sum(weights[i + 1] * logs[i, rows.ids[0, i + 1]] for i in range(6))
    total, weight = row_losses(graph, params, arrays(rows))
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(weight, weights.sum(), rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_few_steps_on_one_batch_lower_its_loss(optimizer):
    graph, params = random_parameters(SMALL, 0)
    chosen = make_optimizer(TrainingConfig(steps=40, warmup=2, optimizer=optimizer))
    step, state = make_step(partial(row_losses, graph), chosen), chosen.init(params)
    rows = [pack_rows([[document(20)], [document(20, 5)]], 32, 1.0).arrays()]
    losses = []
    for _ in range(12):
        params, state, loss = step(params, state, rows)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_parameters_make_the_round_trip_through_the_module():
    graph, params = random_parameters(SMALL, 1)
    again = {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(module_of(graph, params)))
    }
    assert again.keys() == params.keys()
    assert all(np.array_equal(again[name], params[name]) for name in params)


def test_the_model_is_of_the_announced_size():
    shapes = jax.eval_shape(lambda: random_parameters(model_config(1), 0)[1])
    assert 5_000_000 <= sum(leaf.size for leaf in shapes.values()) <= 10_000_000


def test_the_rate_rises_stays_and_falls_to_zero():
    rate = schedule(TrainingConfig(steps=100, warmup=10, decay=0.5), 1.0)
    assert [round(float(rate(step)), 3) for step in (0, 5, 10, 40, 50, 75, 100)] == [0, 0.5, 1, 1, 1, 0.5, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 5}, "steps=5 must be more than warmup=30"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is unknown, allowed are 'muon', 'adamw'"),
        ({"decay": 0.0}, "decay=0.0 must be above 0 and at most 1"),
    ],
)
def test_a_bad_setting_is_refused_by_name_and_value(change, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**change)


def arrays(rows) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in rows.arrays().items()}


def nudged(params):
    """Parameters without the zeros of the start, so that attention and MLP take part."""
    for number, (name, leaf) in enumerate(params.items()):
        yield name, leaf + 0.1 * jax.random.normal(jax.random.key(number), leaf.shape)
