"""What n-gram storages know: levels, ties, updates, and nothing that was never counted."""

import numpy as np
import pytest

from jaxinfer.textbook.speculative.chain_drafters import NGramDrafter
from jaxinfer.textbook.speculative.generate import NGramStorage, OneLevelNGramStorage
from jaxinfer.textbook.speculative.random_streams import RandomStream

KINDS = (OneLevelNGramStorage, NGramStorage)


def filled(kind, n, text, vocab_size=10):
    storage = kind(n, vocab_size)
    storage.initialize(text)
    return storage


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_stored(kind):
    storage = filled(kind, 2, [1, 2, 3, 1, 2])
    assert [storage.next_token([x]) for x in (1, 2, 3, 4)] == [2, 3, 1, None]


def test_one_level_knows_contexts_of_its_length_alone():
    storage = filled(OneLevelNGramStorage, 3, [1, 2, 3, 4])
    assert storage.next_token([9, 1, 2]) == 3
    assert storage.next_token([2]) is None and storage.next_token([9, 2]) is None and storage.next_token([]) is None


def test_of_several_levels_the_longest_known_context_decides():
    storage = filled(NGramStorage, 3, [1, 2, 3, 0, 2, 4, 0, 2, 4])
    assert storage.next_token([1, 2]) == 3
    assert storage.next_token([9, 2]) == 4  # twice after 2, against once
    assert storage.next_token([2]) == 4
    assert storage.next_token([9]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_must_come_more_often_to_replace_the_best(kind):
    storage = filled(kind, 2, [1, 2, 1, 3])
    assert storage.next_token([1]) == 2
    storage.update([5, 1], [3])
    assert storage.next_token([1]) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_too_short_for_any_gram_stores_nothing_and_asks_for_nothing(kind):
    storage = filled(kind, 4, [7])
    assert storage.next_token([7]) is None and storage.next_token([]) is None
    assert not storage.has_gram([]) and not storage.has_gram([7])


@pytest.mark.parametrize("kind", KINDS)
def test_a_gram_is_its_context_and_the_token_after_it(kind):
    storage = filled(kind, 3, [1, 2, 3])
    assert storage.has_gram([1, 2, 3])
    assert not storage.has_gram([2, 3, 3]) and not storage.has_gram([1, 2, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_initializing_adds_and_resetting_forgets(kind):
    storage = filled(kind, 2, [1, 2])
    storage.initialize([3, 4])
    assert storage.next_token([1]) == 2 and storage.next_token([3]) == 4
    storage.reset()
    assert storage.next_token([1]) is None and not storage.has_gram([3, 4])


def drafter(storage, *, filler_top_k=1, stop_if_unknown=True, eos=()):
    return NGramDrafter(storage, 4, filler_top_k, stop_if_unknown, RandomStream([0]), eos)


def test_drafts_are_looked_up_one_after_the_other_and_certain():
    proposal = drafter(filled(NGramStorage, 3, [1, 2, 3, 4, 5, 6, 7])).propose([0, 1, 2], room=9)
    assert proposal.tokens == [3, 4, 5, 6]
    np.testing.assert_array_equal(proposal.q, np.eye(10)[[3, 4, 5, 6]])


def test_an_unknown_context_ends_the_drafts_or_is_filled():
    storage = filled(NGramStorage, 3, [1, 2, 3])
    assert drafter(storage).propose([1, 2], room=9).tokens == [3]
    tokens = drafter(storage, stop_if_unknown=False).propose([1, 2], room=9).tokens
    assert len(tokens) == 4 and tokens[0] == 3
    nothing = drafter(storage).propose([8], room=9)
    assert nothing.tokens == [] and nothing.q.shape == (0, 10)


def test_nothing_is_drafted_beyond_the_room_or_an_end_token():
    storage = filled(NGramStorage, 2, [1, 2, 3, 4])
    assert drafter(storage).propose([1], room=2).tokens == [2, 3]
    assert drafter(storage).propose([1], room=0).tokens == []
    assert drafter(storage, eos={3}).propose([1], room=9).tokens == [2, 3]


def test_landed_tokens_are_learned_and_with_filler_the_most_likely_ones_too():
    logits = np.zeros((2, 10))
    logits[0, [3, 5, 6]] = 3.0, 2.0, 1.0
    logits[1, [8, 7]] = 2.0, 1.0
    plain, with_filler = NGramStorage(2, 10), NGramStorage(2, 10)
    drafter(plain).learn([0, 1], [4, 8], logits)
    drafter(with_filler, filler_top_k=2).learn([0, 1], [4, 8], logits)
    assert [plain.has_gram([1, x]) for x in (4, 3, 5, 6)] == [True, False, False, False]
    assert [with_filler.has_gram([1, x]) for x in (4, 3, 5, 6)] == [True, True, True, False]
    assert [with_filler.has_gram([4, x]) for x in (8, 7, 0)] == [True, True, False]
    assert with_filler.next_token([1]) == 4  # what landed comes first, and is replaced by more frequent tokens only


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 0, 2.5, True])
def test_grams_of_less_than_two_tokens_are_refused(kind, n):
    with pytest.raises(ValueError, match=f"n must be an integer of at least 2, got {n}"):
        kind(n, 10)


def test_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"next_tokens must be in \[0, 10\), got 10"):
        NGramStorage(2, 10).update([1], [10])
