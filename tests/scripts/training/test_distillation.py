"""Distillation: a student begins as its teacher's first layers and learns to say what the teacher says."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import build_model
from training.distillation import TaughtRows, agreements, divergences, first_layers, make_teacher, repeated
from training.loop import TrainingConfig, make_optimizer, make_step, module_of
from training.packing import Document, pack_rows

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
TEACHER = build_model(CONFIG, rngs=nnx.Rngs(0))
WORDS = TEACHER.embed.embedding[...]


TEACH = make_teacher(TEACHER)


@pytest.fixture(scope="module")
def lesson() -> TaughtRows:
    documents = [
        Document([1 + (7 * i + start) % 60 for i in range(12)], [i > 4 for i in range(12)]) for start in (0, 9)
    ]
    return TEACH(pack_rows([documents, documents[:1]], 24, 0.25))


def test_a_student_of_all_layers_says_what_its_teacher_says(lesson):
    _, graph, params = first_layers(CONFIG, TEACHER, CONFIG.num_layers)
    arrays = lesson.arrays()
    divergence, weight = divergences(graph, WORDS, params, arrays)
    right, same_weight = agreements(graph, WORDS, params, arrays)
    assert abs(divergence) < 1e-3 * weight
    assert right == weight == same_weight > 0


def test_a_student_of_fewer_layers_is_the_teacher_without_the_others():
    config, graph, params = first_layers(CONFIG, TEACHER, 2)
    student = module_of(graph, params)
    ids, positions = jnp.arange(9), jnp.arange(9)
    short = build_model(replace(CONFIG, num_layers=2), rngs=nnx.Rngs(0))
    for name in ("embed", "final_norm"):
        setattr(short, name, getattr(TEACHER, name))
    short.layers = nnx.List(list(TEACHER.layers)[:2])
    assert config.num_layers == 2
    np.testing.assert_allclose(
        student(ids, positions, CausalAttend()),  # pyright: ignore[reportCallIssue]
        short(ids, positions, CausalAttend()),
        rtol=1e-5,
    )


def test_the_divergence_is_the_teachers_over_the_tokens_that_count():
    _, graph, params = first_layers(CONFIG, TEACHER, 1)
    document = Document(list(range(3, 10)), [i > 3 for i in range(7)])
    rows = TEACH(pack_rows([[document]], 8, 0.25))
    ids = jnp.array(document.ids)
    hidden = [m(ids, jnp.arange(7), CausalAttend()) for m in (TEACHER, module_of(graph, params))]  # pyright: ignore
    p, q = (jax.nn.log_softmax(each @ WORDS.T) for each in hidden)
    expected = sum(
        (1.0 if document.written[i + 1] else 0.25) * jnp.sum(jnp.exp(p[i]) * (p[i] - q[i])) for i in range(6)
    )
    found, weight = divergences(graph, WORDS, params, rows.arrays())
    np.testing.assert_allclose(found, expected, rtol=2e-2)  # the teacher's states are kept in float16
    assert weight == 3 * 0.25 + 3


def test_a_student_comes_nearer_to_its_teacher(lesson):
    _, graph, params = first_layers(CONFIG, TEACHER, 1)
    losses = partial(divergences, graph, WORDS)
    chosen = make_optimizer(TrainingConfig(steps=40, warmup=2))
    step, state = make_step(losses, chosen), chosen.init(params)
    found = []
    for _ in range(12):
        params, state, loss = step(params, state, [lesson.arrays()])
        found.append(float(loss))
    assert found[-1] < 0.5 * found[0]


def test_every_lesson_is_given_once_in_each_round(lesson):
    lessons = [[lesson] for _ in range(5)]
    order = repeated(lessons, 0)
    for _ in range(2):
        assert sorted(id(next(order)) for _ in lessons) == sorted(map(id, lessons))
