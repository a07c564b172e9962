"""Every way that random choices can fall, summed up: speculation leaves the distribution as it is, to the last digit.

And every mistake that is planted here changes it.
"""

import numpy as np
import pytest

from jaxinfer.textbook.speculative import chain_loop, classic_rule
from jaxinfer.textbook.speculative.chain_drafters import NGramDrafter, Proposal
from jaxinfer.textbook.speculative.generate import (
    MultinomialProcessor,
    NGramStorage,
    NucleusProcessor,
    OneLevelNGramStorage,
    TopKNucleusProcessor,
    TopKProcessor,
    autoregressive_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from tests.sampling.reference import Filters
from tests.textbook.speculative.toys import autoregressive_distribution, distance, outcomes, table_model

PROMPT = [1, 0, 2]
TARGET, DRAFTER = table_model(3, seed=1), table_model(3, seed=2)
PLAIN, PLAIN_FILTERS = MultinomialProcessor(0.8), Filters(temperature=0.8)
PROCESSORS = {
    "multinomial": (PLAIN, PLAIN_FILTERS),
    "top_k": (TopKProcessor(1.3, 2), Filters(1.3, top_k=2)),
    "nucleus": (NucleusProcessor(1.3, 0.75), Filters(1.3, top_p=0.75)),
    "both": (TopKNucleusProcessor(0.7, 2, 0.8), Filters(0.7, top_k=2, top_p=0.8)),
}
EXACT = 1e-12


def speculative(length=3, eos=(), processor=PLAIN, target=TARGET, drafter=DRAFTER, **arguments):
    return outcomes(
        lambda streams: speculative_generate(
            PROMPT, drafter, target, max_gen_len=length, eos_tokens_id=eos, logits_processor=processor, key=streams,
            **arguments,
        )[0]
    )  # fmt: skip


def with_ngrams(length=3, eos=(), processor=PLAIN, kind=NGramStorage, n=3, **arguments):
    return outcomes(
        lambda streams: ngram_assisted_speculative_generate(
            PROMPT + [1, 0], kind(n, 3), TARGET, max_gen_len=length, eos_tokens_id=eos, logits_processor=processor,
            key=streams, **arguments,
        )[0]
    )  # fmt: skip


def wanted(length=3, eos=(), filters=PLAIN_FILTERS, prompt=PROMPT, target=TARGET):
    return autoregressive_distribution(target, prompt, length, filters, eos)


def test_plain_generation_has_the_distribution_of_its_definition():
    found = outcomes(
        lambda streams: autoregressive_generate(PROMPT, TARGET, 3, PLAIN, eos_tokens_id=2, key=streams),
    )
    assert distance(found, wanted(eos=(2,))) < EXACT


@pytest.mark.parametrize("first_target", [True, False])
@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
def test_speculation_leaves_the_distribution_as_it_is(gamma, first_target):
    assert distance(speculative(length=4, gamma=gamma, first_target=first_target), wanted(length=4)) < EXACT


@pytest.mark.parametrize("name", PROCESSORS)
def test_it_does_so_behind_every_processor(name):
    processor, filters = PROCESSORS[name]
    found = speculative(processor=processor, gamma=2, first_target=False)
    assert distance(found, wanted(filters=filters)) < EXACT


@pytest.mark.parametrize("eos", [(0,), (2, 1)])
def test_it_does_so_with_end_tokens_among_the_drafts(eos):
    found = speculative(length=4, eos=eos, gamma=3, first_target=False)
    assert distance(found, wanted(length=4, eos=eos)) < EXACT


def test_it_does_so_with_a_larger_vocabulary_and_a_drafter_that_is_sure_and_wrong():
    target, drafter = table_model(5, seed=3), table_model(5, seed=4, spread=8.0)
    found = speculative(target=target, drafter=drafter, gamma=2, first_target=False)
    assert distance(found, wanted(target=target)) < EXACT


def test_it_does_so_where_drafter_and_target_are_one():
    assert distance(speculative(drafter=TARGET, gamma=2, first_target=False), wanted()) < EXACT


@pytest.mark.parametrize("beta", [0.0, 0.6])
def test_it_does_so_with_lengths_by_entropy(beta):
    found = speculative(length=4, use_egag=True, gamma_max=3, egag_ema_beta=beta)
    assert distance(found, wanted(length=4)) < EXACT


def test_it_does_so_with_a_cache_and_without():
    assert distance(speculative(use_cache=False, gamma=2), wanted()) < EXACT


@pytest.mark.parametrize("first_target", [True, False])
@pytest.mark.parametrize("stop_if_unknown", [True, False])
@pytest.mark.parametrize(("kind", "n"), [(NGramStorage, 3), (OneLevelNGramStorage, 2)])
def test_ngrams_leave_the_distribution_as_it_is(kind, n, stop_if_unknown, first_target):
    found = with_ngrams(4, kind=kind, n=n, stop_if_unknown=stop_if_unknown, first_target=first_target, gamma=2)
    assert distance(found, wanted(4, prompt=PROMPT + [1, 0])) < EXACT


@pytest.mark.parametrize("name", PROCESSORS)
def test_ngrams_do_so_behind_every_processor_and_with_an_end_token(name):
    processor, filters = PROCESSORS[name]
    found = with_ngrams(eos=(1,), processor=processor, gamma=2, first_target=False)
    assert distance(found, wanted(eos=(1,), filters=filters, prompt=PROMPT + [1, 0])) < EXACT


def test_skipping_the_adjustment_is_biased_as_it_says():
    assert distance(speculative(gamma=1, first_target=False, skip_sample_adjustment=True), wanted()) > 0.01
    found = with_ngrams(length=2, gamma=1, first_target=False, stop_if_unknown=True, skip_sample_adjustment=True)
    prompt = PROMPT + [1, 0]
    p = np.array([sum(v for k, v in wanted(2, prompt=prompt).items() if k[0] == x) for x in range(3)])
    first = np.array([sum(v for k, v in found.items() if k[0] == x) for x in range(3)])
    lookup = prompt[2]  # what followed (1, 0) before
    biased = (1 - p[lookup]) * p + p[lookup] * (np.arange(3) == lookup)
    np.testing.assert_allclose(first, biased, atol=EXACT)


right_verify, right_extend = chain_loop.verify, chain_loop.Continuation.extend


def judged_by(change):
    """Verification that is shown other distributions than those there are."""
    return lambda p, q, drafts, streams, **rest: right_verify(*change(p, q), drafts, streams, **rest)


def bonus_from_the_drafter(p, q):
    return (np.concatenate([p[:-1], q[-1:]]) if len(q) else p), q


def row_of_p_shifted_by_one(p, q):
    return np.concatenate([p[1:], p[-1:]]), q


def goes_on_after_a_rejection(p, q, drafts, streams, **rest):
    verdict = right_verify(p, q, drafts, streams, **rest)
    later = verdict.num_accepted + 1
    if later > len(drafts) or not streams.acceptance.accepts(0.5):
        return verdict
    return classic_rule.Verdict(later, streams.final.token(p[later]), verdict.ratios)


def accepts_the_inverse_ratio(p, q, token):
    return min(1.0, float(q[token] / p[token]))


def sees_an_end_token_in_the_last_place_only(self, tokens):
    ended = tokens[-1] in self._task.eos
    right_extend(self, [token for token in tokens[:-1] if token not in self._task.eos])
    landed = right_extend(self, tokens[-1:])
    self.finished = ended or self.room <= 0
    return landed


def takes_a_lookup_for_a_draw(self, tokens, room, right=NGramDrafter.propose):
    proposal = right(self, tokens, room)
    return Proposal(proposal.tokens, np.full_like(proposal.q, 1 / 3), proposal.beliefs)


PLANTED = {
    "unrenormalised residual": (classic_rule, "residual", lambda p, q: np.maximum(p - q, 0)),
    "residual of the whole p": (classic_rule, "residual", lambda p, q: p),
    "residual the wrong way round": (classic_rule, "residual", lambda p, q: np.abs(p - q) / np.abs(p - q).sum()),
    "inverse ratio": (classic_rule, "acceptance_probability", accepts_the_inverse_ratio),
    "bonus from the drafter": (chain_loop, "verify", judged_by(bonus_from_the_drafter)),
    "row of p shifted by one": (chain_loop, "verify", judged_by(row_of_p_shifted_by_one)),
    "continues after a rejection": (chain_loop, "verify", goes_on_after_a_rejection),
    "end token overlooked": (chain_loop.Continuation, "extend", sees_an_end_token_in_the_last_place_only),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_changes_the_distribution_of_speculation(monkeypatch, name):
    monkeypatch.setattr(*PLANTED[name])
    assert distance(speculative(eos=(0,), gamma=2, first_target=False), wanted(eos=(0,))) > 1e-3


@pytest.mark.parametrize("name", ["unrenormalised residual", "residual of the whole p", "row of p shifted by one"])
def test_a_planted_bug_changes_the_distribution_with_ngrams(monkeypatch, name):
    monkeypatch.setattr(*PLANTED[name])
    assert distance(with_ngrams(gamma=2), wanted(prompt=PROMPT + [1, 0])) > 1e-3


def test_a_lookup_that_is_taken_for_a_draw_changes_the_distribution_with_ngrams(monkeypatch):
    monkeypatch.setattr(NGramDrafter, "propose", takes_a_lookup_for_a_draw)
    assert distance(with_ngrams(gamma=2), wanted(prompt=PROMPT + [1, 0])) > 1e-3
