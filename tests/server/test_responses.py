"""Responses by OpenAI's own client: answers, conversations that the server remembers, and the background."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import threading
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.processes import SMALL, Server, serving
from tests.server.test_openai_client import ANSWER, Person
from tests.server.test_tools import SCHEMA

RESPONSES = "/v1/responses"
QUESTION = "How old is the lighthouse?"
GREEDY = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 30}
SEEDED = GREEDY | {"temperature": 0.9, "extra_body": {"seed": 5}}
LONG = {"input": QUESTION, "temperature": 1.0, "ignore_eos": True, "max_output_tokens": 900, "background": True}
WEATHER: Any = {"type": "function", "name": "weather", "description": "the weather", "parameters": SCHEMA}


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


@pytest.fixture
def talker(talking):
    return openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, messages: list[Any], given: dict[str, Any]) -> str:
    given = {"max_tokens" if name == "max_output_tokens" else name: value for name, value in given.items()}
    return client.chat.completions.create(messages=messages, **given).choices[0].message.content or ""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def polled(server: Server, response_id: str) -> dict[str, Any]:
    return server.json("GET", f"{RESPONSES}/{response_id}")


@pytest.mark.parametrize("given", [GREEDY, SEEDED])
def test_an_answer_is_that_of_chat_whole_and_streamed(client, given):
    whole = client.responses.create(input=QUESTION, **given)
    assert whole.output_text == chat(client, [user(QUESTION)], given)
    assert whole.status == "completed" and whole.id.startswith("resp_") and whole._request_id
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(input=QUESTION, **given) as stream:
        events = list(stream)
        found = stream.get_final_response()
    assert found.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert found.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(found.id).output == client.responses.retrieve(found.id).output != []


def test_events_have_names_and_numbers(server):
    status, headers, body = server.request("POST", RESPONSES, {"input": QUESTION, **GREEDY, "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in body.decode().split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"


def test_an_answer_that_is_cut_is_incomplete(client):
    found = client.responses.create(input=QUESTION, **GREEDY | {"max_output_tokens": 3})
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete"


def test_log_probabilities_are_those_of_chat(client):
    given = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = client.responses.create(input=QUESTION, **GREEDY, **given).output[0].content[0].logprobs
    answer = client.chat.completions.create(
        messages=[user(QUESTION)], model="tiny", temperature=0, max_tokens=30, logprobs=True, top_logprobs=2
    )
    expected = answer.choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in found] == [(entry.token, entry.bytes) for entry in expected]
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-3)
    assert all(len(entry.top_logprobs) == 2 for entry in found)


def test_an_answer_is_parsed_as_a_model(client):
    given = GREEDY | {"max_output_tokens": 60}
    parsed = client.responses.parse(input=QUESTION, text_format=Person, **given).output_parsed
    assert isinstance(parsed, Person)
    with client.responses.stream(input=QUESTION, text_format=Person, **given) as stream:
        assert stream.get_final_response().output_parsed == parsed
    found = client.responses.create(input=QUESTION, text={"format": {"type": "json_object"}}, **given)
    assert found.status == "incomplete" or isinstance(json.loads(found.output_text), dict)


def test_a_conversation_is_remembered(client, server):
    """As chat answers the whole conversation; instructions are those of one response alone."""
    first = client.responses.create(input="My name is Zadur.", instructions="Be kind.", **GREEDY)
    second = client.responses.create(input="Who am I?", previous_response_id=first.id, **SEEDED)
    third = client.responses.create(
        input=[user("And who are you?")], previous_response_id=second.id, instructions="Be brief.", **SEEDED
    )
    assert first.output_text == chat(
        client, [{"role": "system", "content": "Be kind."}, user("My name is Zadur.")], GREEDY
    )
    messages = [user("My name is Zadur."), {"role": "assistant", "content": first.output_text}, user("Who am I?")]
    assert second.output_text == chat(client, messages, SEEDED)
    messages += [{"role": "assistant", "content": second.output_text}, user("And who are you?")]
    messages.insert(0, {"role": "system", "content": "Be brief."})
    assert third.output_text == chat(client, messages, SEEDED)
    assert third.usage.input_tokens == server.json("POST", "/tokenize", {"messages": messages})["count"]
    assert third.previous_response_id == second.id and third.instructions == "Be brief."
    given = [user("My name is Zadur."), *first.output, user("Who am I?")]
    assert client.responses.create(input=given, **SEEDED).output_text == second.output_text
    # It is remembered although its beginning is not.
    client.responses.delete(first.id)
    again = client.responses.create(
        input="And who are you?", previous_response_id=second.id, instructions="Be brief.", **SEEDED
    )
    assert again.output_text == third.output_text


def test_a_response_is_kept_unless_it_is_not_to_be(client, server):
    kept = client.responses.create(input=QUESTION, metadata={"a": "b"}, **GREEDY)
    assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict() and kept.metadata == {"a": "b"}
    (item,) = client.responses.input_items.list(kept.id)
    assert item.content[0].text == QUESTION and item.id
    other = client.responses.create(input=QUESTION, store=False, **GREEDY)
    for gone in (other.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError, match="not found") as found:
            client.responses.create(input=QUESTION, previous_response_id=gone, **GREEDY)
        assert found.value.param == "previous_response_id"
        assert server.request("DELETE", f"{RESPONSES}/{gone}")[0] == 404
        assert server.request("POST", f"{RESPONSES}/{gone}/cancel")[0] == 404
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(kept.id)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_input_items_come_in_pages(client, server):
    given = [user(str(number)) for number in range(5)]
    kept = client.responses.create(input=given, **GREEDY | {"max_output_tokens": 1})
    texts = [item.content[0].text for item in client.responses.input_items.list(kept.id, limit=2, order="asc")]
    assert texts == ["0", "1", "2", "3", "4"]
    page = client.responses.input_items.list(kept.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["4", "3"] and page.has_more
    for query in ("limit=0", "limit=x", "order=up", "after=none"):
        assert server.request("GET", f"{RESPONSES}/{kept.id}/input_items?{query}")[0] == 400


def test_a_function_is_called_and_its_output_answered(talker):
    given = {
        "tools": [WEATHER],
        "max_output_tokens": 120,
        "temperature": 0.7,
        "model": "tiny",
        "extra_body": {"seed": 3},
    }
    asked = {"input": "How is the weather?", "tool_choice": "required", "parallel_tool_calls": False, **given}
    whole = talker.responses.create(**asked)
    (call,) = whole.output
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert call.type == "function_call" and call.name == "weather" and whole.status == "completed"
    with talker.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert streamed.arguments == "".join(deltas) == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    found = talker.responses.create(input=[output], previous_response_id=whole.id, **given)
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": call.arguments}}]
    messages = [
        user("How is the weather?"), {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]  # fmt: skip
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    tools = {"tools": [{"type": "function", "function": function}]}
    assert found.output_text == chat(talker, messages, given | tools)
    named = talker.responses.create(**asked | {"tool_choice": {"type": "function", "name": "weather"}})
    assert named.output[0].name == "weather"


def test_reasoning_is_an_item_and_counted(talker, talking):
    # Tags that no answer has: the grammar holds for reasoning too.
    regex = {
        "structured_outputs": {
            "regex": "[a-z ]{5,20}</think>[A-Z][a-z ]{5,20}", "reasoning_tags": ["<none>", "</none>"],
        }
    }  # fmt: skip
    given = {"model": "tiny", "temperature": 0.8, "max_output_tokens": 60, "reasoning": {"effort": "low"}}
    found = talker.responses.create(input=QUESTION, extra_body=regex | {"seed": 1}, **given)
    reasoning, message = found.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text and reasoning.summary == []
    assert message.content[0].text[0].isupper()
    (tokens, _) = (found.usage.output_tokens_details.reasoning_tokens, found.usage.output_tokens)
    answer = talker.chat.completions.create(
        messages=[user(QUESTION)], model="tiny", temperature=0.8, max_tokens=60,
        extra_body=regex | {"seed": 1, "chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True},
    )  # fmt: skip
    assert answer.choices[0].message.content == message.content[0].text
    assert answer.usage.completion_tokens_details.reasoning_tokens == tokens
    ids = answer.choices[0].token_ids
    text = talking.json("POST", "/detokenize", {"tokens": ids[:tokens]})["prompt"]
    assert text.endswith("</think>") and text.startswith(reasoning.content[0].text)
    second = talking.json(
        "POST", RESPONSES, {"input": [user(QUESTION), *[item.to_dict() for item in found.output], user("So?")]}
    )
    messages = [
        user(QUESTION),
        {"role": "assistant", "content": message.content[0].text, "reasoning_content": reasoning.content[0].text},
        user("So?"),
    ]
    count = talking.json("POST", "/tokenize", {"messages": messages})["count"]
    assert second["usage"]["input_tokens"] == count
    plain = talker.responses.create(input=QUESTION, **given | {"reasoning": {"effort": "none"}})
    assert plain.output[0].type == "message" and plain.usage.output_tokens_details.reasoning_tokens == 0


def test_a_response_in_the_background_is_polled(client, server):
    first = client.responses.create(input=QUESTION, background=True, **GREEDY)
    assert first.status == "queued" and first.output == [] and first.background
    server.until(lambda: polled(server, first.id)["status"] == "completed")
    assert client.responses.retrieve(first.id).output_text == ANSWER
    assert client.responses.cancel(first.id).status == "completed"
    second = client.responses.create(input="Why?", previous_response_id=first.id, **GREEDY)
    messages = [user(QUESTION), {"role": "assistant", "content": ANSWER}, user("Why?")]
    assert second.output_text == chat(client, messages, GREEDY)


def test_a_response_in_the_background_is_cancelled(server, client):
    begun = server.json("POST", RESPONSES, LONG)
    server.until(lambda: polled(server, begun["id"])["status"] == "in_progress")
    now = polled(server, begun["id"])
    assert now["output"][0]["status"] == "in_progress" and now["output"][0]["content"][0]["text"]
    with pytest.raises(openai.BadRequestError, match="in_progress") as found:
        client.responses.create(input=QUESTION, previous_response_id=begun["id"], **GREEDY)
    assert found.value.param == "previous_response_id"
    assert client.responses.input_items.list(begun["id"]).data[0].content[0].text == QUESTION
    ended = client.responses.cancel(begun["id"])
    assert ended.status == "cancelled" and ended.output[0].status == "incomplete"
    server.until(server.is_idle, seconds=5)
    assert client.responses.retrieve(begun["id"]).status == client.responses.cancel(begun["id"]).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.responses.create(input=QUESTION, previous_response_id=begun["id"], **GREEDY)


def test_a_response_that_is_deleted_ends(server, client):
    begun = server.json("POST", RESPONSES, LONG)
    assert server.json("DELETE", f"{RESPONSES}/{begun['id']}") == {
        "id": begun["id"], "object": "response", "deleted": True
    }  # fmt: skip
    server.until(server.is_idle, seconds=5)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun["id"])


def test_a_response_that_is_aborted_has_failed(server):
    """Its stream says so, and so does the response that is kept."""
    names = {"X-Request-Id": "to-fail"}
    begun = server.json("POST", RESPONSES, LONG, names)["id"]
    server.until(lambda: polled(server, begun)["status"] == "in_progress")
    found: list[bytes] = []
    stream = LONG | {"background": False, "stream": True}
    streaming = threading.Thread(target=lambda: found.append(server.request("POST", RESPONSES, stream, names)[2]))
    streaming.start()
    server.until(lambda: server.gauges()["jaxinfer:num_requests_running"] == 2)
    server.request("POST", "/abort_requests", {"request_ids": ["to-fail"]})
    streaming.join()
    last = json.loads(found[0].decode().split("\n\n")[-2].partition("data: ")[2])
    assert last["type"] == "response.failed"
    server.until(lambda: polled(server, begun)["status"] == "failed")
    for failed in (polled(server, begun), last["response"]):
        assert failed["error"] == {"code": "server_error", "message": "the request was aborted"}
        assert polled(server, failed["id"]) == failed


def test_a_stream_is_seen_while_it_runs_but_not_cancelled(client, server):
    given = GREEDY | {"max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    with client.responses.create(input=QUESTION, stream=True, **given) as stream:
        first = next(iter(stream)).response
        assert client.responses.retrieve(first.id).status == "in_progress"
        for call in (client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.BadRequestError):
                call(first.id)
    server.until(server.is_idle, seconds=5)
    with pytest.raises(openai.NotFoundError):  # its client has left
        client.responses.retrieve(first.id)


@pytest.mark.parametrize(
    "given, param, says",
    [
        ({"temperature": 1e40}, "temperature", "temperature must be"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"input": "word " * 3000}, "input", "maximum context length"),
        ({"tools": [WEATHER]}, "tools", "no tool calls"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format", "not"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json", "structured_outputs"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16"),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0.role", "developer"),
    ],
)
def test_bad_requests_name_the_field(client, given, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as found:
        client.responses.create(**{"input": QUESTION, **GREEDY, **given})
    assert found.value.param == param


def test_a_response_belongs_to_its_key_and_others_make_room():
    """A server with two keys keeps two responses of each."""
    options = ("--max-stored-responses", "2", "--log-requests", "--api-key", "other")
    with serving(*SMALL, *options, key="secret") as server:
        body = {"input": "sturgeon", "max_output_tokens": 2, "temperature": 0}
        others = {"authorization": "Bearer other"}
        mine = server.json("POST", RESPONSES, body)["id"]
        running = server.json("POST", RESPONSES, LONG)["id"]
        for name in (mine, running):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                assert server.request(method, f"{RESPONSES}/{name}{path}", headers=others)[0] == 404
            assert server.request("POST", RESPONSES, body | {"previous_response_id": name}, others)[0] == 404
        assert server.json("POST", f"{RESPONSES}/{running}/cancel")["status"] == "cancelled"
        for _ in range(3):
            server.json("POST", RESPONSES, body, others)
        assert polled(server, mine)["status"] == "incomplete"
        server.json("POST", RESPONSES, body)
        assert server.request("GET", f"{RESPONSES}/{mine}")[0] == 200
        status, _, found = server.request("GET", f"{RESPONSES}/{running}")
        assert status == 404 and b"dropped for later ones" in found
        assert not any("sturgeon" in line for line in server.lines)


def test_responses_in_the_background_wait_in_the_same_queue():
    with serving(*SMALL, "--max-num-seqs", "1", "--max-waiting-requests", "1", "--max-stored-responses", "1") as server:
        running, waiting = (server.json("POST", RESPONSES, LONG)["id"] for _ in range(2))
        status, headers, body = server.request("POST", RESPONSES, LONG)
        assert status == 503 and headers["retry-after"] and json.loads(body)["error"]["code"] == "queue_full"
        assert polled(server, waiting)["status"] == "queued"
        assert server.json("POST", f"{RESPONSES}/{waiting}/cancel")["status"] == "cancelled"
        server.request("POST", f"{RESPONSES}/{running}/cancel")
        server.until(server.is_idle, 60)  # its first launch may still compile


def test_a_signal_lets_responses_in_the_background_end():
    with serving(*SMALL) as server:
        begun = server.json("POST", RESPONSES, LONG | {"max_output_tokens": 400})["id"]
        server.until(lambda: polled(server, begun)["status"] == "in_progress")
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.request("GET", "/health")[0] == 503)
        assert server.request("POST", RESPONSES, LONG)[0] == 503
        seen = []
        with contextlib.suppress(OSError, http.client.HTTPException):  # until it is not there any more
            while True:
                seen.append(polled(server, begun))
        assert server.process.wait(timeout=30) == 0
        assert seen[-1]["usage"]["output_tokens"] > 250


def test_a_second_signal_ends_responses_in_the_background():
    with serving(*SMALL) as server:
        begun = server.json("POST", RESPONSES, LONG)["id"]
        server.until(lambda: polled(server, begun)["status"] == "in_progress")
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.request("GET", "/health")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0


def test_a_server_that_keeps_nothing_says_so():
    with serving(*SMALL, "--max-stored-responses", "0") as server:
        found = server.json("POST", RESPONSES, {"input": QUESTION, "max_output_tokens": 2})
        assert found["store"] is False and server.request("GET", f"{RESPONSES}/{found['id']}")[0] == 404
        status, _, body = server.request("POST", RESPONSES, LONG)
        assert status == 400 and json.loads(body)["error"]["param"] == "background"
