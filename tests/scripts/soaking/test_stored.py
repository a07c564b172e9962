"""Clients of responses that the server remembers, or that run without a client."""

import asyncio

import pytest

from soaking.answers import RESPONSES
from soaking.choices import BrokenAnswerError
from soaking.client import FULL
from soaking.comparison import EQUAL, TIE
from soaking.stored import cancel_background, continue_stored, poll_background
from tests.scripts.soaking.scripted import Responses, ScriptedClient, expected_of_all


def client(server, seed=0):
    return ScriptedClient(server.serve, expected_of_all(), seed)


def test_a_continuation_is_compared_with_what_follows_the_first_answer():
    server = Responses()
    found = client(server)
    asyncio.run(continue_stored(found))
    assert found.outcomes == {EQUAL: 2} and found.setting.tally.compared == {(RESPONSES, "whole"): 2}
    assert [body.get("previous_response_id") for body in server.bodies] == [None, "resp_0"]


def test_a_continuation_that_has_lost_its_history_is_a_failure():
    server = Responses()
    server.knows_history = False
    found = client(server)
    asyncio.run(continue_stored(found))
    assert found.outcomes == {EQUAL: 1, "FAILED": 1}
    (failure,) = found.setting.tally.failures
    assert failure["part"] == "then" and "the text is" in failure["reason"]


def test_a_near_tie_is_not_continued():
    server = Responses()

    def serve(method, path, body):
        return server.serve(method, path, body | {"input": [{"content": "something else"}]})

    found = ScriptedClient(serve, expected_of_all(margin=0.0))
    asyncio.run(continue_stored(found))
    assert found.outcomes == {TIE: 1} and len(server.bodies) == 1


def test_some_responses_are_deleted_and_not_found_afterwards():
    deleted = 0
    for seed in range(12):
        server = Responses()
        found = client(server, seed=seed)
        asyncio.run(continue_stored(found))
        assert found.outcomes == {EQUAL: 2}
        deleted += found.setting.tally.statuses[404]
        assert len(server.stored) == 2 - found.setting.tally.statuses[404]
    assert 0 < deleted < 12


def test_a_response_in_the_background_is_polled_until_it_has_ended():
    server = Responses()
    server.num_polls = 2
    found = client(server)
    asyncio.run(poll_background(found))
    assert found.outcomes == {EQUAL: 1} and server.num_polls == -1
    assert server.bodies[0]["background"] and "store" not in server.bodies[0]


def test_what_was_seen_of_a_response_has_to_stay():
    server = Responses()
    server.num_polls, server.seen = 2, "something else"
    with pytest.raises(BrokenAnswerError, match="of a response has become 'something else'"):
        asyncio.run(poll_background(client(server)))


def test_a_cancelled_response_stays_so():
    server = Responses()
    found = client(server)
    asyncio.run(cancel_background(found))
    assert found.outcomes == {"cancelled": 1}
    server.changes = True
    found = client(server)
    asyncio.run(cancel_background(found))
    assert found.outcomes == {"FAILED": 1}
    assert "has changed after its end" in found.setting.tally.failures[0]["reason"]


def test_what_cannot_be_found_again_is_broken():
    server = Responses()

    def serve(method, path, body):
        return (404, {}) if method == "GET" else server.serve(method, path, body)

    with pytest.raises(BrokenAnswerError, match="GET /v1/responses/resp_0: status 404 instead of 200"):
        asyncio.run(poll_background(ScriptedClient(serve, expected_of_all())))


@pytest.mark.parametrize("manner", [continue_stored, poll_background, cancel_background])
def test_a_full_queue_is_allowed(manner):
    server = Responses()
    server.is_full = True
    found = client(server)
    asyncio.run(manner(found))
    assert found.outcomes == {FULL: 1}
