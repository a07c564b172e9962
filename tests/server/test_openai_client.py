"""OpenAI's own client against the server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import openai
import pydantic
import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "server.md"
QUESTION = [{"role": "user", "content": "How old is the lighthouse?"}]
ANSWER = "The lighthouse is two hundred years old and has ninety steps."
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 30}


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_the_model_is_listed(client):
    (model,) = client.models.list()
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_conversation_is_answered(client):
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == ANSWER and choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer._request_id
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (
        client.chat.completions.create(messages=QUESTION, **GREEDY | {"max_tokens": 3}).choices[0].finish_reason
        == "length"
    )


EXAMPLES = [
    code
    for code in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    if "openai" in code
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_guide_run(server, capsys, number):
    code = EXAMPLES[number].replace("http://127.0.0.1:8000", server.url).replace('api_key="none"', 'api_key="secret"')
    exec(compile(code, GUIDE.name, "exec"), {})
    assert "lighthouse" in capsys.readouterr().out


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_accumulates_to_the_whole_answer(client, n):
    given = GREEDY | {"temperature": 0.9, "seed": 5, "n": n, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(messages=QUESTION, **given)
    with client.chat.completions.stream(messages=QUESTION, **given, stream_options={"include_usage": True}) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        found = stream.get_final_completion()
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert [choice.message.content for choice in found.choices] == [c.message.content for c in whole.choices]
    assert [choice.finish_reason for choice in found.choices] == [c.finish_reason for c in whole.choices]
    for streamed, one in zip(found.choices, whole.choices, strict=True):
        tokens = [(entry.token, entry.bytes, round(entry.logprob, 3)) for entry in streamed.logprobs.content]
        assert tokens == [(entry.token, entry.bytes, round(entry.logprob, 3)) for entry in one.logprobs.content]
        assert b"".join(bytes(entry.bytes) for entry in one.logprobs.content).decode().startswith(one.message.content)
        assert all(len(entry.top_logprobs) == 2 for entry in one.logprobs.content)
    assert found.usage.completion_tokens == whole.usage.completion_tokens
    assert found.usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_of_several_prompts_come_in_their_order(client):
    given = GREEDY | {"max_tokens": 6}
    prompts = ["Once upon a time", "The lamp"]
    whole = client.completions.create(prompt=prompts, n=2, **given)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(prompt=prompt, **given).choices[0].text for prompt in prompts]
    assert [choice.text for choice in whole.choices] == [alone[0], alone[0], alone[1], alone[1]]
    texts = ["", "", "", ""]
    for chunk in client.completions.create(prompt=prompts, n=2, stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_a_prompt_is_scored(client):
    """As evaluation harnesses do it: nothing is generated."""
    (choice,) = client.completions.create(
        model="tiny", prompt="Once upon a time", echo=True, max_tokens=0, logprobs=1
    ).choices
    assert choice.text == "Once upon a time" and choice.finish_reason == "length"
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:place])) for place in range(len(logprobs.tokens))]


def test_echo_scores_prompt_and_continuation(client):
    given = GREEDY | {"max_tokens": 4}
    (plain,) = client.completions.create(prompt="Once upon a time", logprobs=1, **given).choices
    (echoed,) = client.completions.create(prompt="Once upon a time", echo=True, logprobs=1, **given).choices
    assert echoed.text == "Once upon a time" + plain.text
    assert echoed.logprobs.tokens[-4:] == plain.logprobs.tokens
    assert echoed.logprobs.token_logprobs[-4:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-3)


def test_token_ids_are_given_and_taken(client):
    given = GREEDY | {"max_tokens": 5, "extra_body": {"return_token_ids": True}}
    (text,) = client.completions.create(prompt="The lamp", **given).choices
    (ids,) = client.completions.create(prompt=text.prompt_token_ids, **given).choices
    assert ids.token_ids == text.token_ids and len(ids.token_ids) == 5


def test_what_vllm_takes_besides_is_taken(client):
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 8, "unknown": 1}
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY | {"max_tokens": 40, "extra_body": extra})
    assert answer.usage.completion_tokens == 40


def test_a_choice_is_kept_to(client):
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY, extra_body=extra)
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize(
    "given, param, says",
    [
        ({"temperature": 1e40}, "temperature", "temperature must be"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"n": 9}, "n", "n=9"),
        ({"stop": list("abcde")}, "stop", "5 strings"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json", "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "regex"),
        ({"extra_body": {"cache_salt": "a/b"}}, "cache_salt", "cache_salt"),
        ({"extra_body": {"priority": 3}}, None, "priority"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "developer"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "maximum context length"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None, "image_url"),
    ],
)
def test_bad_requests_name_the_field(client, given, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as found:
        client.chat.completions.create(**{"messages": QUESTION, **GREEDY, **given})
    assert found.value.param == param and found.value.type == "invalid_request_error"


def test_an_unknown_model_and_a_wrong_key_are_errors(client):
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist") as found:
        client.chat.completions.create(messages=QUESTION, **GREEDY | {"model": "other"})
    assert found.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=0, le=120)]


def test_an_answer_is_parsed_as_a_model(client):
    given = GREEDY | {"max_tokens": 60}
    parsed = client.chat.completions.parse(messages=QUESTION, response_format=Person, **given).choices[0].message.parsed
    assert isinstance(parsed, Person)
    with client.chat.completions.stream(messages=QUESTION, response_format=Person, **given) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    extra = {"structured_outputs": {"json": Person.model_json_schema(), "disable_additional_properties": True}}
    same = client.chat.completions.create(messages=QUESTION, extra_body=extra, **given).choices[0].message.content
    assert Person.model_validate_json(same) == parsed


def test_a_parsed_answer_that_is_cut_says_so(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(messages=QUESTION, response_format=Person, **GREEDY | {"max_tokens": 4})


def test_a_json_object_is_one(client):
    given = {"response_format": {"type": "json_object"}, **GREEDY, "temperature": 0.8, "seed": 2, "max_tokens": 80}
    choice = client.chat.completions.create(messages=QUESTION, **given).choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
        client.chat.completions.create(messages=QUESTION, response_format=schema, **GREEDY)


def test_branches_of_one_prompt_are_choices(client):
    given = GREEDY | {"max_tokens": 8}
    suffixes = [" The lamp", " The boat", " A plan"]
    whole = client.completions.create(prompt="In the harbour.", extra_body={"branches": suffixes}, **given)
    alone = [client.completions.create(prompt="In the harbour." + suffix, **given).choices[0] for suffix in suffixes]
    assert [choice.text for choice in whole.choices] == [choice.text for choice in alone]
    given_tokens = client.completions.create(prompt="In the harbour.", **given).usage.prompt_tokens
    suffix_tokens = [client.completions.create(prompt=suffix, **given).usage.prompt_tokens for suffix in suffixes]
    assert whole.usage.prompt_tokens == given_tokens + sum(suffix_tokens)
    texts = ["", "", ""]
    for chunk in client.completions.create(
        prompt="In the harbour.", extra_body={"branches": suffixes}, stream=True, **given
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    with pytest.raises(openai.BadRequestError, match="branches go without n"):
        client.completions.create(prompt="x", n=2, extra_body={"branches": suffixes}, **given)


def test_branches_of_an_answer_begin_as_they_are_told(client):
    extra = {"branches": ["The lighthouse", "It is"]}
    answer = client.chat.completions.create(messages=QUESTION, extra_body=extra, **GREEDY)
    assert answer.choices[0].message.content == ANSWER.removeprefix("The lighthouse") and len(answer.choices) == 2


def test_beams_are_choices_best_first(client):
    extra = {"use_beam_search": True}
    given = GREEDY | {"max_tokens": 8, "n": 3}
    found = client.completions.create(prompt="The lamp", extra_body=extra, **given)
    texts = [choice.text for choice in found.choices]
    assert len(set(texts)) == 3 and found.usage.completion_tokens <= 24
    again = client.completions.create(prompt=["The boat", "The lamp"], extra_body=extra, **given)
    assert [choice.text for choice in again.choices[3:]] == texts
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.completions.create(prompt="The lamp", extra_body=extra, stream=True, **given)
    with pytest.raises(openai.BadRequestError, match="goes without use_beam_search"):
        client.completions.create(prompt="The lamp", extra_body=extra, logprobs=1, **given)


def test_prompts_have_log_probabilities(client):
    extra = {"prompt_logprobs": 1}
    answer = client.chat.completions.create(messages=QUESTION, extra_body=extra, **GREEDY)
    first, *rest = answer.prompt_logprobs
    assert first is None and all(min(each["logprob"] for each in entry.values()) <= 0 for entry in rest)
    (choice,) = client.completions.create(prompt="The lamp", extra_body=extra, **GREEDY).choices
    (scored,) = client.completions.create(prompt="The lamp", echo=True, logprobs=1, **GREEDY).choices
    values = [entry and next(iter(entry.values()))["logprob"] for entry in choice.prompt_logprobs]
    assert values[1:] == pytest.approx(scored.logprobs.token_logprobs[1 : len(values)], abs=1e-3)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs goes without stream"):
        client.completions.create(prompt="The lamp", stream=True, extra_body=extra, **GREEDY)
