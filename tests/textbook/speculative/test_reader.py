"""What a reader computes and what it leaves out: logits of any text, however the text has changed since."""

import numpy as np
import pytest

from jaxinfer.textbook.speculative.cached_decoder import CachedDecoder
from jaxinfer.textbook.speculative.generate import speculative_generate
from jaxinfer.textbook.speculative.language_model import Reader
from tests import oracle
from tests.builders import FAMILIES, model_config, random_model, random_prompts
from tests.textbook.speculative.toys import table_model
from tests.tolerances import tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_reads_text_that_grows_shrinks_and_changes(family):
    model = random_model(model_config(family))
    reader = Reader(CachedDecoder(model), max_len=40, prompt_len=9)
    (text,) = random_prompts([27])
    changed = [*text[:11], text[11] ^ 1, *text[12:18]]
    for tokens, last in ((text[:9], 1), (text[:14], 6), (text[:15], 1), (text[:12], 2), (changed, 3), (text, 1)):
        found = reader.logits(tokens, last)
        for back in range(last):
            end = len(tokens) - back
            wanted = oracle.next_token_logits(model, tokens[:end], prompt_len=9)
            np.testing.assert_allclose(found[last - 1 - back], wanted, atol=tolerance(1e-4))


def test_a_sequence_may_fill_the_cache_to_its_last_place():
    model = random_model(model_config(max_position_embeddings=64))
    reader = Reader(CachedDecoder(model), max_len=64, prompt_len=61)
    (text,) = random_prompts([64])
    reader.logits(text[:61])
    found = reader.logits(text, last=3)  # eight wide, so that there is padding beyond the end
    np.testing.assert_allclose(found[-1], oracle.next_token_logits(model, text, prompt_len=61), atol=tolerance(1e-4))


def test_only_what_the_cache_lacks_is_read():
    model = table_model(4, seed=0)
    reader = Reader(model, max_len=16, prompt_len=3)
    for tokens, last in (([1, 2, 3], 1), ([1, 2, 3, 0, 0], 2), ([1, 2, 3, 1], 1), ([1, 2, 3, 1], 1)):
        reader.logits(tokens, last)
    assert model.read == [(0, 3), (3, 2), (3, 1), (3, 1)]


def test_without_a_cache_everything_is_read_anew():
    model = table_model(4, seed=0)
    reader = Reader(model, max_len=16, prompt_len=3, use_cache=False)
    for tokens in ([1, 2, 3], [1, 2, 3, 0]):
        reader.logits(tokens)
    assert model.read == [(0, 3), (0, 4)]


def rounds_of_a_drafter_that_is_the_target():
    drafter, target = table_model(4, seed=0, spread=3.0), table_model(4, seed=0, spread=3.0)
    _, rate = speculative_generate([1, 2, 3], drafter, target, gamma=2, max_gen_len=10, eos_tokens_id=[])
    return rate, drafter.read, target.read


def test_after_full_acceptance_the_drafter_reads_two_tokens():
    rate, by_drafter, by_target = rounds_of_a_drafter_that_is_the_target()
    assert rate == 1.0
    assert by_target == [(0, 3), (3, 3), (6, 3), (9, 3)]
    assert by_drafter == [(0, 4), (4, 1), (5, 2), (7, 1), (8, 2), (10, 1)]


def test_a_cache_that_lacks_the_last_draft_after_full_acceptance_is_found_out(monkeypatch):
    monkeypatch.setattr(Reader, "_num_held", lambda self, tokens: len(tokens) if self._held else 0)
    rate, by_drafter, _ = rounds_of_a_drafter_that_is_the_target()
    assert (5, 2) not in by_drafter and rate < 1.0

    model = random_model(model_config())
    reader = Reader(CachedDecoder(model), max_len=16, prompt_len=4)
    (text,) = random_prompts([8])
    reader.logits(text[:6])
    assert np.abs(reader.logits(text[:8])[0] - oracle.next_token_logits(model, text, prompt_len=4)).max() > 0.05
