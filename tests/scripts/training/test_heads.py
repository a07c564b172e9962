"""EAGLE-3 heads before and after training: draft words, lessons, what a head begins as, and chains of its drafts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import LLM
from jaxinfer.attention.dense import CausalAttend
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3_config import Eagle3Config
from jaxinfer.models.registry import build_model
from training.head_acceptance import DRAFTED, Chains, make_right
from training.head_answers import prompted_documents, read_prompts
from training.head_initialization import LinearGuess, fit_guess, initial_head
from training.head_lessons import draft_words, make_head_teacher, output_table
from training.packing import Document, pack_rows
from training.unrolled import HeadRows

TARGET = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=8, num_heads=4, num_kv_heads=2,
    head_dim=16, max_position_embeddings=64, qk_norm=True,
)  # fmt: skip
CONFIG = Eagle3Config(replace(TARGET, architecture="LlamaForCausalLM", qk_norm=False, num_layers=1), 20, 32, (2, 4, 5))
WORDS = np.arange(1, 61, 3, dtype=np.int32)


def document(ids: list[int], prompt: int) -> Document:
    return Document(ids, [i >= prompt for i in range(len(ids))])


def test_draft_words_are_the_most_frequent_written_tokens():
    documents = [document([9, 9, 9, 5, 5, 3], 3), document([7, 3, 5, 8], 1)]
    words, share = draft_words(documents, 16, [2])
    assert words.tolist() == [3, 5] and words.dtype == np.int32 and share == pytest.approx(5 / 6)


def test_the_least_size_that_covers_enough_is_taken():
    documents = [document([0, *range(1, 9), *[1] * 2000], 1)]
    words, share = draft_words(documents, 16, [12, 1, 4])
    assert words.tolist() == [1] and share > 0.995
    words, share = draft_words([document([0, *range(1, 9)], 1)], 16, [4, 12])
    # Beyond what was written come the first other tokens.
    assert words.tolist() == [0, *range(1, 9), 9, 10, 11] and share == 1.0


def test_lessons_hold_what_the_target_computes():
    model = build_model(TARGET, rngs=nnx.Rngs(0))
    documents = [document([(7 * i + 3) % 64 for i in range(12)], 4), document([(5 * i) % 64 for i in range(9)], 3)]
    rows = make_head_teacher(model, (2, 4, 5), WORDS, np.random.default_rng(0))(pack_rows([documents], 24, 0.0), 6)
    assert rows.starts.shape == (1, 6)
    for number, start in ((0, 0), (1, 12)):
        ids = jnp.asarray(documents[number].ids)
        inside = slice(start, start + len(ids))
        found = model.with_kv([None] * 8, ids, jnp.arange(len(ids)), CausalAttend(), capture=(2, 4, 5))
        np.testing.assert_allclose(rows.features[0, inside], found.features, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(rows.hidden[0, inside], found.hidden, rtol=2e-3, atol=2e-3)
        likeliest = np.argmax(model.logits(found.hidden), axis=-1)
        np.testing.assert_array_equal(rows.known[0, inside], np.isin(likeliest, WORDS))


def guess_of(hidden: int, features: int) -> LinearGuess:
    rng = np.random.default_rng(5)
    return LinearGuess(rng.normal(size=(hidden, features)), rng.normal(size=(hidden, hidden)), np.eye(hidden))


def test_the_linear_guess_finds_what_is_linear():
    target = build_model(TARGET, rngs=nnx.Rngs(1))
    rng, table = np.random.default_rng(0), np.asarray(target.embed.embedding[...])
    normed = table / np.sqrt(np.mean(table**2, axis=1, keepdims=True))
    # Features that know their token but for noise, and hidden states that are made of features and embeddings.
    of_tokens = rng.normal(size=(64, 96)).astype(np.float32)
    projection, words = rng.normal(size=(96, 32)) / 10, rng.normal(size=(32, 32)) / 6
    lessons = []
    for _ in range(12):
        packed = pack_rows([[document(rng.integers(0, 64, 200).tolist(), 1)] for _ in range(4)], 200, 0.0)
        features = of_tokens[packed.ids] + rng.normal(size=(4, 200, 96)).astype(np.float32)
        hidden = np.zeros((4, 200, 32), np.float32)
        hidden[:, 1:] = features[:, :-1] @ projection + normed[packed.ids[:, 1:]] @ words
        starts = np.zeros((4, 1), np.int32)
        lessons.append(HeadRows(**packed.arrays(), starts=starts, features=features, hidden=hidden, known=starts))
    found = fit_guess(target, lessons)
    scale = np.asarray(target.final_norm.scale[...])[:, None]
    np.testing.assert_allclose(found.projection * scale, projection.T, atol=0.02)
    np.testing.assert_allclose(found.words * scale, words.T, atol=0.02)
    # 32 numbers cannot say all of 64 tokens, but which is the nearest.
    projected = of_tokens @ found.projection.T
    projected /= np.sqrt(np.mean(projected**2, axis=1, keepdims=True))
    nearest = np.argmax(projected @ found.tokens.T @ normed.T, axis=1)
    assert np.mean(nearest == np.arange(64)) > 0.75


def test_a_head_begins_with_the_targets_words_and_the_guess():
    target = build_model(TARGET, rngs=nnx.Rngs(1))
    guess = guess_of(32, 96)
    head = initial_head(CONFIG, target, WORDS, guess, 0)
    np.testing.assert_array_equal(head.target_ids[...], WORDS)
    np.testing.assert_array_equal(head.lm_head.kernel[...], output_table(target)[WORDS])
    assert head.fc is not None
    np.testing.assert_allclose(head.fc.kernel[...], guess.projection, rtol=1e-6)


@pytest.mark.parametrize("num_heads", [2, 4], ids=["a query a group", "two queries a group"])
def test_attention_begins_by_adding_the_embedding_and_what_followed_the_same_token(num_heads):
    wide = replace(TARGET, hidden_size=128, num_heads=num_heads, num_kv_heads=2, head_dim=64)
    target = build_model(wide, rngs=nnx.Rngs(1))
    layer = replace(CONFIG.layer, hidden_size=128, num_heads=num_heads, num_kv_heads=2, head_dim=64)
    config = replace(CONFIG, layer=layer, target_hidden_size=128)
    table = target.embed.embedding[...]
    ids = np.array([5, 17, 30, 44, 9, 12, 50, 30])
    # Features that know their own token and nothing else: at the end, 30 has come before 44.
    embedded, features = table[ids[1:]], table[ids[:-1]]
    normed = embedded / jnp.sqrt(jnp.mean(embedded**2, axis=1, keepdims=True))

    def written(words: np.ndarray) -> np.ndarray:
        guess = replace(guess_of(128, 384), words=words)
        head = initial_head(config, target, WORDS, guess, 0)
        out = head(embedded, features, jnp.arange(len(ids) - 1), CausalAttend())
        return np.asarray(out.hidden - features)[-1]

    copied = written(np.zeros((128, 128)))
    assert int(np.argmax(np.asarray(table)[ids] @ copied)) == 3
    # Groups of one query share the work, and each of them sees half of an embedding.
    own = written(np.eye(128)) - copied
    expected = np.asarray(normed[-1])
    assert own @ expected > (0.9 if num_heads == 4 else 0.6) * np.linalg.norm(own) * np.linalg.norm(expected)


def text(*right: int, depth: int = 4) -> np.ndarray:
    """Whether each draft of each chain is right where chains from token i are right for right[i] tokens."""
    return np.array([[d < count and i + d < len(right) for d in range(depth)] for i, count in enumerate(right)])


def test_a_round_takes_right_drafts_and_the_targets_token():
    # Rounds at 0 (two right, one of the target), 3 (none right), 4 (right to the end).
    chains = Chains.along([text(2, 4, 4, 0, 2, 1)], 4)
    assert chains.tokens == 6 and chains.rounds == 3 and chains.accepted_length == 2.0
    assert chains.reached == (3, 2, 1, 0) and chains.right == (2, 2, 0, 0)
    assert chains.shares == pytest.approx((2 / 3, 1.0, 0.0, 0.0))


def test_a_chain_is_no_longer_than_its_depth():
    chains = Chains.along([text(*[9] * 10)], 4)
    assert chains.rounds == 2 and chains.right == (2, 2, 2, 2) and chains.accepted_length == 5.0


def test_texts_are_measured_apart():
    chains = Chains.along([text(0, 0), text(1, 0), np.zeros((0, 4), bool)], 4)
    assert chains.tokens == 4 and chains.rounds == 3


def test_what_is_measured_of_a_row_is_every_token_that_is_drafted():
    target = build_model(TARGET, rngs=nnx.Rngs(1))
    head = initial_head(CONFIG, target, WORDS, guess_of(32, 96), 0)
    teach = make_head_teacher(target, CONFIG.capture, WORDS, np.random.default_rng(0))
    documents = [document([(7 * i + k) % 64 for i in range(9 + k)], 5) for k in (0, 3)]
    right = make_right(target.embed.embedding[...])(head, [teach(pack_rows([[d] for d in documents], 16, 0.0), 8)])
    assert [each.shape for each in right] == [(4, DRAFTED), (7, DRAFTED)]
    # No chain goes beyond its text.
    assert not any(each[i, d] for each in right for i in range(len(each)) for d in range(len(each) - i, DRAFTED))


def test_prompts_are_lists_of_messages(tmp_path):
    (tmp_path / "good").write_text('[{"role": "user", "content": "Hello"}]\n[{"role": "user", "content": "Bye"}]\n')
    assert [each[0]["content"] for each in read_prompts(tmp_path / "good")] == ["Hello", "Bye"]
    (tmp_path / "bad").write_text('[{"role": "user", "content": "Hello"}]\n"Bye"\n')
    with pytest.raises(ValueError, match="line 2 of .*bad is no list of messages"):
        read_prompts(tmp_path / "bad")


class Parrot:
    """Stands for an engine: answers with as many tokens as the last message has words."""

    def __init__(self) -> None:
        self.temperatures: list[float] = []

    def chat(self, conversations, params, use_tqdm):
        each = params if isinstance(params, list) else [params] * len(conversations)
        self.temperatures += [one.temperature for one in each]
        said = [list(range(len(messages[-1]["content"].split()))) for messages in conversations]
        return [SimpleNamespace(prompt_token_ids=[60, 61], outputs=[SimpleNamespace(token_ids=ids)]) for ids in said]


def test_a_target_answers_prompts_of_which_the_last_are_held_out():
    prompts = [[{"role": "user", "content": "word " * count}] for count in (3, 4, 2, 1, 9, 5)]
    llm = Parrot()
    documents, held_out = prompted_documents(cast(LLM, llm), prompts, 4, 10)
    assert [len(each.ids) for each in documents] == [5, 6] and llm.temperatures == [0.0, 0.8] + [0.0] * 4
    assert documents[0] == Document([60, 61, 0, 1, 2], [False, False, True, True, True])
    # An answer of one token has no draft, and one of nine is too long; no first token is drafted.
    assert held_out.kinds == ("prompt", "prompt")
    assert [each.written for each in held_out.documents] == [[False] * 3 + [True], [False] * 3 + [True] * 4]
    with pytest.raises(ValueError, match="6 prompts are not more than the 6 that are held out"):
        prompted_documents(cast(LLM, llm), prompts, 6, 10)


def test_the_target_may_have_an_output_head_of_its_own():
    tied = build_model(replace(TARGET, tie_word_embeddings=True))
    np.testing.assert_array_equal(output_table(tied), tied.embed.embedding[...])
    own = build_model(TARGET)
    assert own.lm_head is not None
    np.testing.assert_array_equal(output_table(own), own.lm_head.kernel[...])
    assert isinstance(output_table(own), jax.Array)
