"""Requests in tokens before anything runs, as routers ask for them."""

from __future__ import annotations

import json

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
QUESTION = [{"role": "user", "content": "How old is the lighthouse?"}]


def test_a_conversation_is_rendered_as_it_is_computed(server):
    body = {"messages": QUESTION, "max_tokens": 7, "temperature": 0.5, "seed": 3, "stop": ["a"], "cache_salt": "s"}
    found = server.json("POST", f"{CHAT}/render", body | {"stream": True, "stream_options": {"include_usage": True}})
    assert found["token_ids"] == server.json("POST", CHAT, body | {"return_token_ids": True})["prompt_token_ids"]
    assert found["request_id"].startswith("chatcmpl-") and found["model"] == "tiny" and found["priority"] == 0
    assert found["stream"] is True and found["stream_options"] == {"include_usage": True}
    expected = {
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 3,
        "stop": ["a"],
        "top_p": 0.9,
        "n": 1,
    }  # one is the checkpoint's
    assert {name: found["sampling_params"][name] for name in expected} == expected and found["cache_salt"] == "s"


def test_every_form_of_a_content_is_rendered_as_its_text(server, talking):
    text = "How old is the lighthouse?"
    parts = ([{"type": "text", "text": text}], [text])
    rows = [[{"role": "user", "content": content}] for content in (text, *parts)]
    rendered = [server.json("POST", f"{CHAT}/render", {"messages": row})["token_ids"] for row in rows]
    blocks = [{"messages": row, "max_tokens": 5} for row in rows[:2]]
    rendered += [server.json("POST", f"{MESSAGES}/render", body)["token_ids"] for body in blocks]
    inputs = (text, rows[0], [{"role": "user", "content": [{"type": "input_text", "text": text}]}])
    rendered += [server.json("POST", f"{RESPONSES}/render", {"input": each})["token_ids"] for each in inputs]
    assert all(tokens == rendered[0] for tokens in rendered)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    nothing: list[dict[str, object]] = [{"content": content} for content in (None, "", [])]
    for answer in (*nothing, {}):
        messages = [*rows[0], {"role": "assistant", "tool_calls": [call], **answer}, *rows[0]]
        rendered.append(talking.json("POST", f"{CHAT}/render", {"messages": messages})["token_ids"])
    assert all(tokens == rendered[-1] for tokens in rendered[-4:])


def test_an_answer_may_be_as_long_as_there_is_room(server):
    found = server.json("POST", f"{CHAT}/render", {"messages": QUESTION})
    assert found["sampling_params"]["max_tokens"] == 1024 - len(found["token_ids"])
    assert found["sampling_params"]["structured_outputs"] is None


def test_prompts_are_rendered_each(server):
    prompts = ["The lamp", "Once upon a time"]
    structured = {"structured_outputs": {"choice": ["a", "b"]}}
    found = server.json("POST", f"{COMPLETIONS}/render", {"prompt": prompts, **structured})
    expected = [server.json("POST", "/tokenize", {"prompt": prompt})["tokens"] for prompt in prompts]
    assert [each["token_ids"] for each in found] == expected and len({each["request_id"] for each in found}) == 2
    assert all(each["sampling_params"]["max_tokens"] == 16 for each in found)
    assert found[0]["sampling_params"]["structured_outputs"] == {"choice": ["a", "b"]}


def test_a_message_is_rendered_as_its_chat(server):
    rest = {"max_tokens": 5, "temperature": 0}
    system = [{"role": "system", "content": "Be brief."}]
    of_chat = server.json("POST", f"{CHAT}/render", {"messages": system + QUESTION, **rest})
    found = server.json("POST", f"{MESSAGES}/render", {"messages": QUESTION, "system": "Be brief.", **rest})
    assert found["token_ids"] == of_chat["token_ids"] and found["sampling_params"] == of_chat["sampling_params"]


def test_a_response_is_rendered_as_its_chat_and_its_conversation(server):
    rest = {"temperature": 0, "cache_salt": "a"}
    whole = [{"role": "system", "content": "Be brief."}, *QUESTION]
    of_chat = server.json("POST", f"{CHAT}/render", {"messages": whole, "max_tokens": 5, **rest})
    body = {"input": QUESTION[0]["content"], "instructions": "Be brief.", "max_output_tokens": 5, **rest}
    found = server.json("POST", f"{RESPONSES}/render", body)
    assert {**found, "request_id": ""} == {**of_chat, "request_id": ""} and found["request_id"].startswith("resp-")
    first = server.json("POST", RESPONSES, body)
    answer = {"role": "assistant", "content": first["output"][0]["content"][0]["text"]}
    of_chat = server.json("POST", f"{CHAT}/render", {"messages": [*whole, answer, *QUESTION]})
    continued = body | {"previous_response_id": first["id"]}
    assert server.json("POST", f"{RESPONSES}/render", continued)["token_ids"] == of_chat["token_ids"]


def test_nothing_runs(server):
    before = server.gauges()["jaxinfer:prompt_tokens_total"]
    server.json("POST", f"{CHAT}/render", {"messages": QUESTION})
    assert server.gauges()["jaxinfer:prompt_tokens_total"] == before


@pytest.mark.parametrize(
    "path, body, says",
    [
        (CHAT, {"messages": []}, "at least 1"),
        (CHAT, {"messages": QUESTION, "use_beam_search": True}, "use_beam_search goes without render"),
        (COMPLETIONS, {"prompt": "a", "branches": ["b"]}, "branches goes without render"),
        (COMPLETIONS, {"prompt": "word " * 3000}, "maximum context length"),
        (MESSAGES, {"messages": QUESTION}, "max_tokens"),
        (RESPONSES, {"input": "a", "branches": ["b"]}, "branches is not served"),
    ],
)
def test_what_is_refused_is_refused_here_too(server, path, body, says):
    status, _, answer = server.request("POST", f"{path}/render", body)
    assert status == 400 and says in json.loads(answer)["error"]["message"]
