"""Training of block diffusion: lessons with copies, noise by block, what a copy sees, a step that learns."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import build_model
from kernels_pallas.rotate_and_write.reference import rotate
from tests.scripts.training.mixtures import EXPERTS, dense_config
from training.denoising import (
    NEVER,
    OWN_SHARE,
    OWN_SURENESS,
    Lesson,
    LessonRows,
    MaskWeights,
    Noise,
    _said,
    lesson_of,
    masked,
    masked_agreements,
    masked_losses,
    noisy_steps,
    own_losses,
    pack_lessons,
    with_noise,
)
from training.dense_experts import BALANCE, DENSE_EXPERTS, with_experts
from training.loop import TrainingConfig, make_optimizer, make_step, module_of
from training.packing import Document, Packer

BLOCK, MASK, FILLER = 4, 63, 62
DENSE = dense_config(hidden_size=32, head_dim=8, num_layers=3)
BASE = build_model(DENSE, rngs=nnx.Rngs(0))
MIXTURE = with_experts(
    DENSE, BASE, EXPERTS, 1, architecture="LLaDA2MoeModelLM", block_size=BLOCK, mask_token_id=MASK
)  # fmt: skip


def document(prompt: int, answer: int, start: int = 0) -> Document:
    """A text whose words count up, and the last ones of which are the answer."""
    return Document(
        [1 + (start + i) % 60 for i in range(prompt + answer)], [i >= prompt for i in range(prompt + answer)]
    )


def lesson(prompt: int, answer: int, start: int = 0, copies: int = 2) -> Lesson:
    return lesson_of(document(prompt, answer, start), BLOCK, FILLER, copies)


def randomized(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """With experts that say something."""
    keys = jax.random.split(jax.random.key(3), len(params))
    return {
        name: jax.random.normal(key, value.shape) * 0.3 if ".mlp.down." in name else value
        for key, (name, value) in zip(keys, params.items(), strict=True)
    }


def test_a_lesson_is_its_text_but_for_the_last_block_and_copies_of_its_answers_blocks():
    found = lesson(prompt=6, answer=5)
    clean, answer = [1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11, FILLER]
    assert found.ids == clean + answer + answer
    assert found.positions == [*range(8), *range(4, 12), *range(4, 12)]
    assert found.copies == [0] * 8 + [1] * 8 + [2] * 8
    assert found.written == [False] * 8 + ([False] * 2 + [True] * 6) * 2


def test_only_the_last_answer_of_a_conversation_is_learned():
    ids = list(range(1, 13))
    turns = Document(ids, [3 <= i < 5 or 9 <= i < 11 for i in range(12)])
    found = lesson_of(turns, BLOCK, FILLER, 1)
    assert found.ids == [*ids[:8], 9, 10, 11, FILLER]
    assert found.written == [False] * 9 + [True] * 3


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        # A fifth is hidden whole, three tenths from a place on, and of a share drawn evenly between 0 and 1 every count
        # is equally likely.
        (Noise(), [0.1, 0.175, 0.175, 0.175, 0.375]),
        (Noise(wholly=0.5, end=0.2), [0.06, 0.11, 0.11, 0.11, 0.61]),
    ],
)
def test_noise_hides_written_tokens_alone_with_a_share_for_every_block(noise, expected):
    rows = pack_lessons([[lesson(5, 27, copies=80)]], 2800)
    noisy = with_noise(rows, np.random.default_rng(0), MASK, BLOCK, noise)
    hidden = noisy.noisy == MASK
    np.testing.assert_array_equal(hidden, noisy.weights > 0)
    np.testing.assert_array_equal(noisy.noisy[~hidden], rows.ids[~hidden])
    assert not hidden[rows.weights == 0].any()
    whole = rows.weights[0].reshape(-1, BLOCK).all(axis=1)
    blocks = hidden[0].reshape(-1, BLOCK)[whole]
    shares = np.bincount(blocks.sum(axis=1), minlength=BLOCK + 1) / len(blocks)
    np.testing.assert_allclose(shares, expected, atol=0.06)
    first_half, second_half = ((blocks == half).all(axis=1).mean() for half in ([1, 1, 0, 0], [0, 0, 1, 1]))
    assert second_half > 0.05 > 2 * first_half


@pytest.mark.parametrize("weights", [MaskWeights(), MaskWeights(0.5, 0.3)])
def test_masks_behind_masks_have_less_weight(weights):
    rows = pack_lessons([[lesson(6, 6, copies=30)]], 400)
    noisy = with_noise(rows, np.random.default_rng(0), MASK, BLOCK, Noise(weights))
    hidden, found = (noisy.noisy == MASK)[0].tolist(), []
    for place, is_hidden in enumerate(hidden):
        before = 0
        while (place - before) % BLOCK and hidden[place - before - 1]:
            before += 1
        found.append(max(weights.following**before, weights.least) if is_hidden else 0.0)
    assert len(set(found)) == 1 + (BLOCK if weights == MaskWeights() else 3)
    np.testing.assert_allclose(noisy.weights[0], found, rtol=1e-6)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockCausal:
    """An `Attend` of one text, of which tokens see their block and those before."""

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        q, k, v = rotate(heads)
        block = jnp.arange(len(q)) // BLOCK
        return masked_attention(q, k, v, block[None, :] <= block[:, None]), kv


def test_a_copy_says_what_the_model_says_behind_the_clean_blocks():
    _, graph, params = MIXTURE
    params = randomized(params)
    model = module_of(graph, params)
    assert isinstance(model, DecoderLM)
    first, second = lesson(6, 9), lesson(3, 7, start=20)
    rows = with_noise(pack_lessons([[first, second]], 80), np.random.default_rng(4), MASK, BLOCK)
    expected, right, count = 0.0, 0, 0
    start = 0
    for each in (first, second):
        length = each.copies.count(0)
        clean = each.ids[:length]
        for block in range(start + length, start + len(each.ids), BLOCK):
            position = int(rows.positions[0, block])
            ids = jnp.array([*clean[:position], *rows.noisy[0, block : block + BLOCK]])
            logits = model.logits(model(ids, jnp.arange(len(ids)), BlockCausal()))[position:]
            for place in range(BLOCK):
                if weight := float(rows.weights[0, block + place]):
                    word = rows.ids[0, block + place]
                    expected -= weight * jax.nn.log_softmax(logits[place])[word]
                    right += weight * (jnp.argmax(logits[place]) == word)
                    count += weight
        start += len(each.ids)
    assert count > 10
    losses, weight = masked_losses(graph, BLOCK, params, rows.arrays())
    agreed, _ = masked_agreements(graph, BLOCK, params, rows.arrays())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert (weight, agreed) == (count, right)


def test_certainty_adds_the_entropy_of_what_is_said_where_it_is_right():
    _, graph, params = MIXTURE
    params = randomized(params)
    words = lesson(6, 30, copies=3)
    hidden = with_noise(pack_lessons([[words]], 160), np.random.default_rng(4), MASK, BLOCK)
    agreed, _ = masked_agreements(graph, BLOCK, params, hidden.arrays())
    assert 0 < float(agreed) < float(hidden.weights.sum())

    def loss_of(rows: LessonRows) -> float:
        return float(masked_losses(graph, BLOCK, params, rows.arrays())[0])

    plain, half, whole = (loss_of(replace(hidden, certainty=np.float32(share))) for share in (0.0, 0.5, 1.0))
    # Entropies are positive and at most that of evenly likely words.
    assert 0 < whole - plain < float(agreed) * np.log(DENSE.vocab_size)
    np.testing.assert_allclose(half - plain, (whole - plain) / 2, rtol=1e-3)


@pytest.mark.parametrize("doubt", [0.0, 1.5])
def test_doubt_counts_wrong_words_that_are_said_surely(doubt):
    _, graph, params = MIXTURE
    params = randomized(params)
    params["embed.embedding"] *= 8  # some is said surely
    rows = with_noise(pack_lessons([[lesson(6, 30, copies=3)]], 160), np.random.default_rng(4), MASK, BLOCK)
    arrays = {name: jnp.asarray(value) for name, value in rows.arrays().items()}
    logits, words, weights = _said(graph, BLOCK, params, arrays)
    likely = np.asarray(jax.nn.softmax(logits))
    is_wrong = likely.argmax(axis=-1) != np.asarray(words)
    more = np.where(is_wrong, np.maximum(2 * likely.max(axis=-1) - 1, 0), 0)
    assert 0 < (more > 0.1).sum() < is_wrong.sum()
    losses = -np.asarray(jax.nn.log_softmax(logits))[np.arange(len(words)), words]
    found, weight = masked_losses(graph, BLOCK, params, arrays, doubt)
    np.testing.assert_allclose(found, np.sum(losses * (1 + doubt * more) * np.asarray(weights)), rtol=1e-5)
    assert weight == rows.weights.sum()


@pytest.mark.parametrize("shown", ["all", "half", "none"])
def test_what_the_model_would_say_rightly_is_shown_before_the_loss(shown):
    _, graph, params = MIXTURE
    params = randomized(params)
    packed = pack_lessons([[lesson(6, 30, copies=3)]], 160)
    rows = with_noise(packed, np.random.default_rng(4), MASK, BLOCK)
    arrays = {name: jnp.asarray(value) for name, value in rows.arrays().items()}
    logits, _, _ = _said(graph, BLOCK, params, arrays)
    likely = np.asarray(jax.nn.softmax(logits)).reshape(*rows.ids.shape, -1)
    sure = np.take_along_axis(likely, rows.ids[..., None], axis=-1)[..., 0]
    assert (sure < likely.max(axis=-1))[rows.noisy == MASK].any()  # some would be wrong
    ordered = np.sort(sure[rows.noisy == MASK])
    half = ordered[len(ordered) // 2 :][:2].mean()  # between two words
    sureness = {"all": 0.0, "half": half, "none": NEVER}[shown]
    rows = replace(rows, sureness=np.full_like(rows.sureness, sureness))
    hidden = (rows.noisy == MASK) & (sure < sureness)
    after = replace(
        rows,
        noisy=np.where(hidden, MASK, rows.ids),
        weights=MaskWeights()(hidden, rows.positions % BLOCK == 0),
    )
    expected, count = masked_losses(graph, BLOCK, params, after.arrays())
    found, weight = own_losses(graph, BLOCK, MASK, MaskWeights(), 0.0, params, rows.arrays())
    np.testing.assert_allclose((found, weight), (expected, count), rtol=1e-5)
    assert (count == 0) == (shown == "all")
    assert (count == rows.weights.sum()) == (shown == "none")


def test_most_blocks_begin_with_a_round_of_the_models_own():
    packed = pack_lessons([[lesson(5, 27, copies=40)]], 1400)
    ((rows,),) = noisy_steps(iter([[packed]]), 0, MASK, BLOCK, noise=Noise(is_own=True))
    assert isinstance(rows, LessonRows)
    sureness = rows.sureness[0, : len(lesson(5, 27, copies=40).ids)].reshape(-1, BLOCK)
    assert (sureness == sureness[:, :1]).all()
    own = sureness[:, 0][sureness[:, 0] < NEVER]
    assert abs(len(own) / len(sureness) - OWN_SHARE) < 0.08
    assert OWN_SURENESS[0] <= own.min() < own.max() <= OWN_SURENESS[1]


def test_certainty_grows_with_the_steps():
    packed = pack_lessons([[lesson(5, 6)]], 40)
    steps = noisy_steps(iter([[packed]] * 3), 0, MASK, BLOCK, certainty=lambda step: step / 4)
    assert [float(rows.arrays()["certainty"]) for (rows,) in steps] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("more", [0, 8], ids=["as wide", "wider"])
def test_a_mixture_begins_as_its_dense_model(more):
    experts = replace(EXPERTS, shared_size=EXPERTS.shared_size + more)
    _, graph, params = with_experts(
        DENSE, BASE, experts, 1, architecture="LLaDA2MoeModelLM", block_size=BLOCK, mask_token_id=MASK
    )
    model = module_of(graph, params)
    assert isinstance(model, DecoderLM)
    ids = jnp.arange(9)
    found, expected = (each(ids, ids, BlockCausal()) for each in (model, BASE))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_all_experts_at_once_are_the_chosen_ones_in_value_and_gradient():
    _, graph, params = MIXTURE
    params = randomized(params)

    def total(params: dict[str, jax.Array], **how: object) -> jax.Array:
        model = module_of(graph, params)
        ids = jnp.arange(24)
        return jnp.sum(model(ids, ids, BlockCausal(), **how) ** 3)  # pyright: ignore[reportCallIssue]

    usual, usual_gradient = jax.value_and_grad(total)(params)
    dense, gradient = jax.value_and_grad(partial(total, residual=DENSE_EXPERTS))(params)
    np.testing.assert_allclose(dense, usual, rtol=1e-5)
    for name in ("layers.2.mlp.gate_up.kernel", "layers.1.mlp.down.kernel", "layers.0.attention.o.kernel"):
        np.testing.assert_allclose(gradient[name], usual_gradient[name], rtol=0.05, atol=0.02, err_msg=name)


def test_training_takes_weight_from_busy_experts():
    """The gradient alone that keeps experts equally busy, where the result has none: that of a loss of zero."""
    _, graph, params = MIXTURE
    ids = jnp.arange(24)

    def nothing(router: jax.Array) -> jax.Array:
        model = module_of(graph, params | {"layers.1.mlp.router.kernel": router})
        return 0.0 * jnp.sum(model(ids, ids, BlockCausal(), residual=DENSE_EXPERTS))  # pyright: ignore[reportCallIssue]

    gradient = jax.grad(nothing)(params["layers.1.mlp.router.kernel"])
    assert 0 < float(jnp.max(jnp.abs(gradient))) < 100 * BALANCE


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_learns(optimizer):
    _, graph, params = MIXTURE
    config = TrainingConfig(steps=60, warmup=5, other_rate=1e-2, optimizer=optimizer)
    packer = Packer(iter([lesson(4 + i % 5, 6, start=i % 3) for i in range(3000)]), pack_lessons)
    steps = noisy_steps(iter(lambda: packer.step(((4, 64),)), None), 0, MASK, BLOCK)
    chosen = make_optimizer(config)
    step, state = make_step(partial(masked_losses, graph, BLOCK), chosen), chosen.init(params)
    params, losses = jax.tree.map(jnp.copy, params), []
    for _ in range(30):
        params, state, loss = step(params, state, [rows.arrays() for rows in next(steps)])
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


def test_the_first_round_has_all_words_hidden():
    rows = masked(pack_lessons([[lesson(5, 6)]], 40), np.ones((1, 40)), np.random.default_rng(0), MASK)
    np.testing.assert_array_equal(rows.noisy == MASK, rows.weights > 0)
    assert int(rows.weights.sum()) == 2 * 7
