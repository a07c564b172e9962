"""Answers say where their tokens come from, and how their blocks were denoised, if they are asked to."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest

from jaxinfer.checkpoint.directory import embedded_checkpoint
from jaxinfer.outputs import CompletionOutput, DenoisedBlock, RequestOutput
from jaxinfer.server.chat_answer import ChatAnswer, ChatForm
from jaxinfer.server.completion_answer import CompletionAnswer, CompletionForm
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.token_details import TokenDetails
from jaxinfer.server.token_texts import TokenTexts
from jaxinfer.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Who keeps the lighthouse?"}]
ASKS = {"temperature": 0, "max_tokens": 60, "return_token_sources": True, "return_token_ids": True}
FORM = {"grammar": 'start: "The lamp of the harbour is number " /[0-9]/ " of nine."'}
FIELDS = ("token_ids", "token_sources", "token_texts", "blocks")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(embedded_checkpoint())


def answer_of(kind: str, tokenizer: Tokenizer) -> Any:
    details = partial(TokenDetails, tokenizer, True, True)
    envelope, texts = Envelope("cmpl-1", "tiny", "f"), TokenTexts(tokenizer)
    if kind == "chat":
        return ChatAnswer(envelope, None, ChatForm(2, None, with_token_ids=True, details=details), texts)
    form = CompletionForm(2, None, echo=False, num_wanted=None, with_token_ids=True, details=details)
    return CompletionAnswer(envelope, None, form, texts, ["?"])


def outputs_of(tokenizer: Tokenizer) -> list[RequestOutput]:
    """Three landings of two choices, one of which has letters of several tokens."""
    one = tokenizer.encode("The lamp is lit.", add_special_tokens=False)
    other = tokenizer.encode("é 灯 é", add_special_tokens=False)
    found, ends = [], (len(one) + len(other)) // 4
    for first, last in ((0, 2), (2, ends), (ends, 100)):
        parts = [
            CompletionOutput(
                index, "", tokens[first:last], finish_reason="stop" if last == 100 else None,
                token_sources=[("drawn", "draft", "forced")[at % 3] for at in range(len(tokens))][first:last],
                blocks=[DenoisedBlock(first, [None, *tokens[:1]])] * 2,
            )
            for index, tokens in enumerate((one, other))
        ]  # fmt: skip
        found.append(RequestOutput("1", None, [5, 6], parts, finished=last == 100))
    return found


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, list[Any]]:
    own = [chunk for chunk in chunks if chunk["index"] == index]
    return {name: [one for chunk in own for one in chunk.get(name, ())] for name in FIELDS}


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_chunks_have_the_sources_and_texts_of_the_whole_answer(kind, tokenizer):
    answer, chunks = answer_of(kind, tokenizer), []
    for output in outputs_of(tokenizer):
        chunks += [chunk["choices"][0] for chunk in answer.add(0, output)]
    choices = answer.whole()["choices"]
    for choice, text in zip(choices, ("The lamp is lit.", "é 灯 é"), strict=True):
        assert joined(chunks, choice["index"]) == {name: choice[name] for name in FIELDS}
        assert "".join(choice["token_texts"]) == text
        count = len(choice["token_ids"])
        assert choice["token_sources"] == [("drawn", "draft", "forced")[at % 3] for at in range(count)]
    assert "" in choices[1]["token_texts"]  # of a token that completes no letter
    (the, *_), blocks = choices[0]["token_ids"], choices[0]["blocks"]
    assert len(blocks) == 6 and blocks[2] == {"first": 2, "token_ids": [None, the], "texts": [None, "The"]}


def test_plain_tokens_were_drawn_and_their_texts_are_the_answers(server):
    (choice,) = server.json("POST", CHAT, {"messages": QUESTION, **ASKS})["choices"]
    assert choice["token_sources"] == ["drawn"] * len(choice["token_ids"])
    assert "".join(choice["token_texts"]) == choice["message"]["content"]
    (other,) = server.json("POST", COMPLETIONS, {"prompt": "The lamp", **ASKS})["choices"]
    assert other["token_sources"] == ["drawn"] * len(other["token_ids"])
    assert "".join(other["token_texts"]) == other["text"]


def test_tokens_that_a_grammar_has_changed_or_forced_are_marked_in_streams_of_two_choices(server):
    body = {"messages": QUESTION, **ASKS, "n": 2, "structured_outputs": FORM}
    chunks = [json.loads(event)["choices"][0] for event in server.events(CHAT, body)[:-1]]
    for index in range(2):
        found = joined(chunks, index)
        texts = dict.fromkeys(("drawn", "redrawn", "forced"), "")
        for source, text in zip(found["token_sources"], found["token_texts"], strict=True):
            texts[source] += text
        assert texts["redrawn"].startswith("The") and texts["forced"].startswith(" lamp of the harbour is number ")
        assert re.fullmatch(r"The lamp of the harbour is number \d of nine\.", "".join(found["token_texts"]))


def test_answers_have_no_sources_unless_they_are_asked_for(server):
    body = {"messages": QUESTION, "max_tokens": 4}
    (choice,) = server.json("POST", CHAT, body)["choices"]
    assert not {"token_sources", "token_texts", "blocks"} & set(choice)
    chunks = [json.loads(event)["choices"][0] for event in server.events(CHAT, body)[:-1]]
    assert not any("token_sources" in chunk or "token_texts" in chunk for chunk in chunks)


@pytest.mark.parametrize("way", ["use_beam_search", "skeleton_of_thought"])
@pytest.mark.parametrize("field", ["return_token_sources", "return_blocks"])
def test_what_is_put_together_of_several_requests_says_nothing_of_tokens(server, way, field):
    status, _, body = server.request("POST", CHAT, {"messages": QUESTION, "max_tokens": 9, field: True, way: True})
    assert status == 400 and json.loads(body)["error"]["param"] == field


def test_an_autoregressive_model_has_no_blocks_to_return(server):
    (choice,) = server.json("POST", CHAT, {"messages": QUESTION, "max_tokens": 4, "return_blocks": True})["choices"]
    assert "blocks" not in choice and "token_sources" not in choice


def test_a_prompt_that_is_only_scored_has_no_tokens_to_tell_of(server):
    body = {"prompt": "The lamp", **ASKS, "max_tokens": 0, "echo": True}
    (choice,) = server.json("POST", COMPLETIONS, body)["choices"]
    assert [choice[name] for name in FIELDS[:3]] == [[], [], []] and choice["text"] == "The lamp"
