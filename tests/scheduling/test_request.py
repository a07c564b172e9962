"""How a request's own tokens bring about its end."""

import numpy as np
import pytest

from jaxinfer.scheduling.landing import walk_of
from jaxinfer.scheduling.request import RequestStatus
from tests.builders import make_request
from tests.constraints.toys import RandomAutomaton


def feed(request, *tokens):
    """Append tokens; the status that the last of them brings about."""
    status = None
    for token in tokens:
        assert status is None, "a token after the end"
        status = request.extend([token])
    return status


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize(
    ("params", "added", "status"),
    [
        ({}, [7, 8, 2], RequestStatus.FINISHED_STOPPED),
        ({"max_tokens": 2}, [7, 8], RequestStatus.FINISHED_LENGTH),
        ({"min_tokens": 3}, [7, 8, 2, 9, 7], None),
        ({"ignore_eos": True}, [7, 8, 2, 9, 7], None),
        ({"presence_penalty": 1.0}, [7, 8, 2], RequestStatus.FINISHED_STOPPED),
    ],
)
def test_however_many_tokens_come_at_once_none_is_added_after_the_end(at_once, params, added, status):
    request, found = make_request("a", [4], eos_token_ids=[2], **{"max_tokens": 50, **params}), None
    for start in range(0, 5, at_once):
        if found is None:
            found = request.extend([7, 8, 2, 9, 7][start : start + at_once])
    assert (request.output_token_ids, found) == (added, status)


def test_a_request_starts_with_its_prompt_known_and_nothing_computed():
    request = make_request("a", [4, 5, 6])
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.num_computed_tokens == 0 and request.status is RequestStatus.WAITING


def test_output_tokens_follow_the_prompt_and_leave_it_unchanged():
    request = make_request("a", [4, 5, 6])
    feed(request, 7, 8)
    assert request.token_ids == [4, 5, 6, 7, 8]
    assert (request.output_token_ids, request.prompt_token_ids) == ([7, 8], [4, 5, 6])


def test_max_tokens_end_a_request_for_its_length():
    assert feed(make_request("a", [4], max_tokens=2), 7) is None
    assert feed(make_request("a", [4], max_tokens=2), 7, 8) is RequestStatus.FINISHED_LENGTH


def test_an_end_of_sequence_token_stops_a_request_without_a_reason():
    request = make_request("a", [4], eos_token_ids=[2, 3])
    assert feed(request, 7, 3) is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason is None


def test_a_stop_token_stops_a_request_and_is_the_reason():
    request = make_request("a", [4], eos_token_ids=[2], stop_token_ids=[9])
    assert feed(request, 9) is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == 9


def test_a_token_that_is_both_counts_as_end_of_sequence():
    request = make_request("a", [4], eos_token_ids=[2], stop_token_ids=[2])
    assert feed(request, 2) is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason is None


def test_an_ending_token_in_the_last_place_is_a_stop_and_not_a_length():
    assert feed(make_request("a", [4], max_tokens=2, eos_token_ids=[2]), 7, 2) is RequestStatus.FINISHED_STOPPED


def test_ignore_eos_goes_on_after_an_end_of_sequence_token():
    request = make_request("a", [4], max_tokens=3, eos_token_ids=[2], ignore_eos=True)
    assert feed(request, 2, 2, 2) is RequestStatus.FINISHED_LENGTH


def test_ignore_eos_does_not_ignore_stop_tokens():
    request = make_request("a", [4], eos_token_ids=[2], stop_token_ids=[2], ignore_eos=True)
    assert feed(request, 2) is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == 2


def test_ending_tokens_of_the_prompt_do_not_count():
    assert feed(make_request("a", [2, 2], eos_token_ids=[2]), 7) is None


VOCAB = 40


def banned(request) -> set[int]:
    """Tokens that its guard does not allow next."""
    mask = request.next_mask(VOCAB)
    if mask is None:
        return set()
    return set(np.flatnonzero(~np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)).tolist())


def test_the_first_token_after_min_tokens_may_end_it():
    request = make_request("a", [4], eos_token_ids=[2], min_tokens=2)
    assert request.is_bound_for_good and not request.draws_alone
    assert feed(request, 7, 8, 2) is RequestStatus.FINISHED_STOPPED


def test_a_bad_word_of_one_token_is_banned_always_and_a_longer_one_before_its_last_token():
    request = make_request("a", [4, 5], bad_token_ids=[(8,), (5, 6), (5, 7, 9)])
    assert np.flatnonzero(~request.base_set(VOCAB)).tolist() == [8] and request.is_bound_for_good
    seen = []
    for token in (5, 7, 5):
        seen.append(banned(request))
        request.extend([token], walk=walk_of(request, [token]))
    assert [*seen, banned(request)] == [set(), {6}, {9}, {6}]
    assert not request.draws_alone


def test_after_a_refusal_each_draw_waits_for_the_latest_token_until_many_were_allowed():
    request = make_request("a", [4, 5], bad_token_ids=[(5, 6)])
    assert request.refusals.most_rounds(1.0) == 9 and not request.has_masks
    request.note_refusals(20, is_refused=False)
    assert request.refusals.most_rounds(1.0) > 500
    request.note_refusals(3, is_refused=True)
    assert request.draws_alone and request.has_masks and request.refusals.most_rounds(1.0) == 4
    request.note_refusals(10, is_refused=False)
    assert request.has_masks, "a few tokens that were allowed are no reason to change"
    request.note_refusals(1, is_refused=False)
    assert not request.draws_alone and not request.has_masks
    for _ in range(9):
        request.note_refusals(0, is_refused=True)
    assert request.refusals.most_rounds(1.0) == 1
    request.note_refusals(16, is_refused=False)
    assert request.has_masks, "after many refusals it takes more"


def test_the_first_launches_under_a_grammar_have_few_rounds():
    request = make_request("a", [4, 5], constraint=RandomAutomaton(VOCAB, [9], share=0.5))
    found = []
    for _ in range(4):
        found.append(request.refusals.most_rounds(1.0))
        request.note_refusals(found[-1], is_refused=False)
    assert found == [1, 1, 2, 4] and not request.has_masks


def test_rounds_end_where_forced_tokens_are_expected():
    request = make_request("a", [4, 5], bad_token_ids=[(5, 6)])
    found = []
    for _ in range(4):
        request.note_refusals(1, is_refused=False, is_forced=True)
        found.append(request.refusals.most_rounds(1.0))
    assert found == [3, 1, 1, 1] and not request.has_masks, "nothing was refused"
    for _ in range(6):
        request.note_refusals(4, is_refused=False)
        request.note_refusals(1, is_refused=False, is_forced=True)
    assert 2 <= request.refusals.most_rounds(1.0) <= 4, "every fifth token is followed by forced ones"


def test_what_is_allowed_once_and_for_all_needs_no_output():
    request = make_request("a", [4, 5], allowed_token_ids=[5, 6, 8], bad_token_ids=[(8,)])
    assert np.flatnonzero(request.base_set(VOCAB)).tolist() == [5, 6]
    assert request.is_bound_for_good and not request.draws_alone


def test_the_tokens_of_the_prompt_are_made_bits_once():
    request = make_request("a", [4, 35, 4], repetition_penalty=1.5)
    bits = request.prompt_bits(VOCAB)
    assert bits.tolist() == [1 << 4, 1 << 3] and request.prompt_bits(VOCAB) is bits


def test_a_plain_request_is_bound_to_nothing():
    request = make_request("a", [4], temperature=1.0, top_k=3, logprobs=2, stop_token_ids=[3], stream=True)
    assert not (request.is_bound_for_good or request.guard or request.draws_alone)


def test_truncating_the_output_leaves_the_prompt_and_the_first_tokens():
    request = make_request("a", [4, 5])
    request.extend([7, 8, 9], [{7: None}, {8: None}, {9: None}])
    request.finish(RequestStatus.FINISHED_STOPPED, num_output_tokens=1)
    assert request.token_ids == [4, 5, 7] and request.logprobs == [{7: None}]


@pytest.mark.parametrize("status", RequestStatus)
def test_finished_statuses_are_the_finish_reasons_of_the_api(status):
    assert status.is_finished == (status.value in ("stop", "length", "abort", "error"))
