"""What plain HTTP shows: events, headers, bodies that are no requests, and keys."""

from __future__ import annotations

import json
import threading

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = {"messages": [{"role": "user", "content": "How old is the lighthouse?"}], "temperature": 0, "max_tokens": 30}


def test_events_of_a_conversation_come_in_order(server):
    events = server.events(CHAT, QUESTION | {"n": 2, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 10
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    first = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [choice["index"] for choice in first] == [0, 1]
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in first)
    for index in range(2):
        of_one = [chunk["choices"][0] for chunk in chunks[2:] if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in of_one] == [None] * (len(of_one) - 1) + ["stop"]
        assert not any("role" in choice["delta"] for choice in of_one)


def test_usage_is_in_every_chunk_if_it_is_asked_for(server):
    events = server.events(CHAT, QUESTION | {"stream_options": {"continuous_usage_stats": True}})
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts) and counts[-1] > 10


def test_whole_answers_are_the_streams_text(server):
    chunks = [json.loads(event)["choices"][0]["delta"] for event in server.events(CHAT, QUESTION)[:-1]]
    whole = server.json("POST", CHAT, QUESTION)["choices"][0]["message"]["content"]
    assert "".join(chunk.get("content", "") for chunk in chunks) == whole != ""


def test_nulls_are_defaults(server):
    names = ("stream", "stop", "n", "seed", "logprobs", "tools", "response_format", "user", "top_k", "logit_bias")
    whole = server.json("POST", CHAT, QUESTION | dict.fromkeys(names))
    assert whole["choices"] == server.json("POST", CHAT, QUESTION)["choices"]


def test_the_requests_id_is_taken_over(server):
    _, headers, body = server.request("POST", CHAT, QUESTION, {"X-Request-Id": "abc-1"})
    assert headers["x-request-id"] == "abc-1" and json.loads(body)["id"] == "chatcmpl-abc-1"
    _, headers, _ = server.request("GET", "/health", headers={"X-Request-Id": "a b\tc"})
    assert headers["x-request-id"] not in ("a b\tc", "")
    _, headers, body = server.request("POST", CHAT, QUESTION | {"request_id": "of-body"})
    assert headers["x-request-id"] == "of-body" and json.loads(body)["id"] == "chatcmpl-of-body"
    _, headers, _ = server.request("POST", CHAT, QUESTION | {"request_id": "of-body"}, {"X-Request-Id": "abc-1"})
    assert headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize(
    "body, says",
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"\xff"', "UTF-8"),
        (b'{"messages": NaN}', "NaN"),
        (b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}', "1e999 is beyond all numbers"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"n": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (json.dumps({"messages": [{"role": 1}] * 12_000}).encode(), "messages.0.role"),
    ],
)
def test_bodies_that_are_no_requests(server, body, says):
    status, headers, found = server.request("POST", CHAT, body)
    assert status == 400 and headers["content-type"] == "application/json" and len(found) < 16_000
    error = json.loads(found)["error"]
    assert says in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_other_content_types_are_refused(server):
    status, _, body = server.request("POST", CHAT, b"{}", {"content-type": "text/plain"})
    assert status == 400 and "application/json" in json.loads(body)["error"]["message"]


def test_paths_and_methods_that_are_not_there(server):
    wrong = (("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405), ("GET", "/v1/models/", 404))
    for method, path, status in wrong:
        found, headers, body = server.request(method, path, {} if method == "POST" else None)
        assert found == status and json.loads(body)["error"]["message"] and headers["x-request-id"]


@pytest.mark.parametrize(
    "method, path",
    [
        ("GET", "/v1/models"), ("GET", "//v1/models"), ("GET", "/V1/models"), ("GET", "/v1/models/"),
        ("HEAD", "/v1/models"),
        ("GET", "/v1/%6dodels"), ("POST", CHAT), ("GET", "/load"), ("GET", "/nothing"), ("GET", "/openapi.json"),
        ("GET", "/health/../v1/models"), ("GET", "/load"),
    ],
)  # fmt: skip
def test_every_path_needs_the_key(server, method, path):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}, {"x-api-key": "wrong"}):
        status, found, body = server.request(method, path, headers={"authorization": "", **headers})
        assert status == 401 and found["www-authenticate"] == "Bearer"
        assert method == "HEAD" or json.loads(body)["error"]["code"] == "invalid_api_key"


def test_some_paths_need_no_key(server):
    for path in ("/health", "/ping", "/version", "/metrics", "/metrics/"):
        assert server.request("GET", path, headers={"authorization": ""})[0] == 200
    assert server.request("GET", "/v1/models", headers={"authorization": "", "x-api-key": "secret"})[0] == 200


def test_metrics_have_both_names(server):
    server.request("POST", CHAT, QUESTION)
    for path in ("/metrics", "/metrics/"):
        status, headers, body = server.request("GET", path)
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    gauges = server.gauges()
    assert gauges["jaxinfer:generation_tokens_total"] > 10
    labels = '{model_name="tiny",engine="0"}'
    assert gauges[f"vllm:generation_tokens_total{labels}"] == gauges["jaxinfer:generation_tokens_total"]
    assert gauges[f"vllm:prefix_cache_queries_total{labels}"] == gauges["jaxinfer:prefix_cache_queries"]
    assert f"vllm:num_requests_waiting{labels}" in gauges


def test_the_document_has_every_path(server):
    document = server.json("GET", "/openapi.json")
    assert document["openapi"] == "3.1.0" and "post" in document["paths"][CHAT]
    schemas = document["components"]["schemas"]
    assert "temperature" in schemas["ChatRequest"]["properties"] and "error" in schemas["ErrorBody"]["properties"]


def test_texts_and_conversations_become_tokens_and_text_again(server):
    found = server.json("POST", "/tokenize", {"prompt": "The lamp is lit.", "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 1024
    assert server.json("POST", "/detokenize", {"tokens": found["tokens"]}) == {"prompt": "The lamp is lit."}
    messages = QUESTION["messages"]
    tokens = server.json("POST", "/tokenize", {"messages": messages})["tokens"]
    answer = server.json("POST", CHAT, QUESTION | {"return_token_ids": True})
    assert answer["prompt_token_ids"] == tokens and answer["choices"][0]["token_ids"]
    first, second, *_ = map(json.loads, server.events(CHAT, QUESTION | {"return_token_ids": True})[:-1])
    assert first["prompt_token_ids"] == tokens and "prompt_token_ids" not in second
    assert server.json("POST", "/detokenize", {"tokens": tokens})["prompt"].endswith("<|assistant|>")
    assert server.request("POST", "/tokenize", {})[0] == 400
    assert server.request("POST", "/detokenize", {"tokens": [99_999]})[0] == 400


def test_requests_are_aborted_by_their_ids(server):
    body = QUESTION | {"ignore_eos": True, "max_tokens": 900, "n": 4, "temperature": 1.0}
    found: list[int] = []
    asking = threading.Thread(
        target=lambda: found.append(server.request("POST", CHAT, body, {"X-Request-Id": "to-abort"})[0])
    )
    asking.start()
    server.until(lambda: server.gauges()["jaxinfer:num_requests_running"] == 4)
    assert server.json("POST", "/abort_requests", {"request_ids": ["to-abort", "unknown"]}) == {}
    asking.join()
    assert found == [503] and server.json("POST", "/reset_prefix_cache") == {"success": True}


def test_a_plan_is_answered_by_its_points(server):
    body = {"messages": [{"role": "user", "content": "Make a plan: repair a bicycle."}], "temperature": 0}
    merged = server.json("POST", CHAT, body | {"skeleton_of_thought": "merged"})["choices"]
    points = server.json("POST", CHAT, body | {"skeleton_of_thought": True})
    assert len(merged) == 1 and len(points["choices"]) > 3
    skeleton, *others = [choice["message"]["content"] for choice in points["choices"]]
    assert skeleton.startswith("[PLAN]") and all(text.strip() in merged[0]["message"]["content"] for text in others)
    assert [choice["point"] for choice in points["choices"]][:3] == [None, 1, 2]
    events = server.events(CHAT, body | {"skeleton_of_thought": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(event) for event in events[:-1]]
    usage = chunks.pop()["usage"]
    texts: dict[int | None, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] <= len(texts)  # choices appear in their order
        texts[choice["point"]] = texts.get(choice["point"], "") + choice["delta"].get("content", "")
    assert texts == {choice["point"]: choice["message"]["content"] for choice in points["choices"]}
    assert usage["completion_tokens"] == points["usage"]["completion_tokens"]
    assert server.request("POST", CHAT, body | {"skeleton_of_thought": True, "n": 2})[0] == 400


def test_points_that_are_cut_are_the_same_in_a_stream(server):
    for count in (1, 2, 9, 21):
        messages = [{"role": "user", "content": "Make a plan: sell a bread."}]
        body = {"messages": messages, "temperature": 0, "skeleton_of_thought": True, "max_tokens": count}
        texts: dict[int | None, str] = {}
        reasons = {}
        for event in server.events(CHAT, body)[:-1]:
            (choice,) = json.loads(event)["choices"]
            texts[choice["point"]] = texts.get(choice["point"], "") + choice["delta"].get("content", "")
            reasons[choice["point"]] = choice["finish_reason"] or reasons.get(choice["point"])
        whole = server.json("POST", CHAT, body)["choices"]
        assert texts == {choice["point"]: choice["message"]["content"] for choice in whole}
        assert reasons == {choice["point"]: choice["finish_reason"] for choice in whole}
        assert "length" in reasons.values()


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "no list of calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
    "arguments of many brackets": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]},
        "messages",
    ),
    "echo of branches": (COMPLETIONS, {"prompt": "a", "branches": ["b"], "echo": True}, "echo"),
    "scores of branches": (COMPLETIONS, {"prompt": "a", "branches": ["b"], "prompt_logprobs": 1}, "prompt_logprobs"),
    "a priority of branches": (COMPLETIONS, {"prompt": "a", "branches": ["b"], "priority": 1}, "priority"),
    "two numbers of scores": (
        COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 3}, "prompt_logprobs",
    ),
    "a search with a penalty": (
        COMPLETIONS, {"prompt": "a", "use_beam_search": True, "repetition_penalty": 2.0}, "repetition_penalty",
    ),
    "too many likely tokens": (CHAT, QUESTION | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a choice among more": (CHAT, QUESTION | {"best_of": 5}, "best_of"),
    "sound": (CHAT, QUESTION | {"modalities": ["text", "audio"]}, "modalities"),
    "a budget of nothing": (CHAT, QUESTION | {"thinking_token_budget": 0}, "thinking_token_budget"),
    "special tokens twice": (CHAT, QUESTION | {"add_special_tokens": True}, "add_special_tokens"),
    "a skeleton with a salt": (CHAT, QUESTION | {"skeleton_of_thought": True, "cache_salt": "a"}, "cache_salt"),
    "ids of a skeleton": (CHAT, QUESTION | {"skeleton_of_thought": True, "return_token_ids": True}, "return_token_ids"),
    "a grammar of a skeleton": (
        CHAT, QUESTION | {"skeleton_of_thought": True, "structured_outputs": {"regex": "a"}}, "structured_outputs",
    ),
    "a template of one's own": ("/tokenize", {"messages": QUESTION["messages"], "chat_template": "x"}, "chat_template"),
}  # fmt: skip


@pytest.mark.parametrize("path, body, param", REFUSED.values(), ids=REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(server, path, body, param):
    status, _, found = server.request("POST", path, body)
    assert status == 400 and json.loads(found)["error"]["param"] == param


@pytest.mark.parametrize(
    "more, param",
    [({"min_tokens": 400, "max_tokens": 500}, "min_tokens"), ({"stop_token_ids": [99_999]}, "stop_token_ids"),
     ({"logit_bias": {"99999": 1}}, "logit_bias")],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_what_a_skeleton_cannot_take_is_refused_before_its_answer_begins(server, stream, more, param):
    body = QUESTION | {"skeleton_of_thought": True, "stream": stream, **more}
    status, headers, found = server.request("POST", CHAT, body)
    assert status == 400 and headers["content-type"] == "application/json"
    assert json.loads(found)["error"]["param"] == param


def test_the_document_has_the_parameters_of_queries_and_answers_keep_to_them(server):
    paths = server.json("GET", "/openapi.json")["paths"]
    declared = {
        (path, each["name"]): each["schema"]
        for path, methods in paths.items()
        for each in methods.get("get", {}).get("parameters", ())
        if each["in"] == "query"
    }
    one, items = "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"
    assert set(declared) == {(one, "stream"), (items, "limit"), (items, "order"), (items, "after")}
    kept = server.json("POST", "/v1/responses", {"input": "x", "max_output_tokens": 1})["id"]
    limits = declared[items, "limit"]
    for path, name, right, wrong in (
        (
            items,
            "limit",
            [limits["minimum"], limits["maximum"]],
            [limits["minimum"] - 1, limits["maximum"] + 1, "", "x"],
        ),
        (items, "order", declared[items, "order"]["enum"], ["up", ""]),
        (items, "after", [f"item_{kept.removeprefix('resp_')}_0"], ["none", ""]),
        (one, "stream", ["false"], ["true", "x"]),
    ):
        for value in (*right, *wrong):
            status, _, found = server.request("GET", f"{path.format(response_id=kept)}?{name}={value}")
            assert status == (200 if value in right else 400), (name, value, found)
            assert status == 200 or json.loads(found)["error"]["param"] == name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_search_uses_prefixes_of_its_salt_alone(server, path):
    text = "The keeper of the salt counts every grain of it, one after the other, until the evening."
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body |= {"temperature": 0, "max_tokens": 2}
    searched = server.json("POST", path, body | {"use_beam_search": True, "n": 2, "cache_salt": f"beams {path[-4:]}"})
    assert len(searched["choices"]) == 2

    def num_cached(salt: str) -> int:
        return server.json("POST", path, body | {"cache_salt": salt})["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert num_cached("another") == 0 and num_cached(f"beams {path[-4:]}") >= 16


def test_every_sample_is_streamed_with_the_scores_of_its_prompt(server):
    body = {"prompt": "The lighthouse is " * 30, "n": 4, "echo": True, "logprobs": 0, "max_tokens": 3, "seed": 1}
    found: dict[int, list[float | None]] = {}
    for event in server.events(COMPLETIONS, body)[:-1]:
        (choice,) = json.loads(event)["choices"]
        found.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    whole = server.json("POST", COMPLETIONS, body)["choices"]
    for choice in whole:
        streamed = found[choice["index"]]
        assert streamed[0] is None and None not in streamed[1:]
        assert streamed == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)


def test_nothing_but_a_prompt_has_no_completion_tokens(server):
    body = {"prompt": "The lighthouse", "echo": True, "max_tokens": 0}
    assert server.json("POST", COMPLETIONS, body)["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "more",
    [{}, {"skeleton_of_thought": True}, {"use_beam_search": True, "n": 2}],
    ids=["plain", "skeleton", "search"],
)  # fmt: skip
def test_requests_of_every_kind_end_by_their_names_and_are_not_sent_again(server, more):
    question = [{"role": "user", "content": "Make a plan: make a film of a birthday party."}]
    body = {"messages": question, "max_tokens": 700, "temperature": 0, "ignore_eos": True, **more}
    answers = []

    def ask():
        answers.append(server.request("POST", CHAT, body, {"X-Request-Id": "long"}))

    thread = threading.Thread(target=ask)
    thread.start()
    server.until(lambda: server.gauges()["jaxinfer:server_requests_running"])
    server.json("POST", "/abort_requests", {"request_ids": ["long"]})
    thread.join()
    ((status, headers, found),) = answers
    assert status == 503 and json.loads(found)["error"]["code"] == "aborted" and headers["x-should-retry"] == "false"
