"""Answers of `/v1/chat/completions`, whole or in chunks, from outputs of the engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.outputs import Logprob, RequestOutput
from jaxinfer.server.envelope import ChunkedAnswer, Envelope
from jaxinfer.server.parse.pieces import AnswerParser, CallArguments, CallBegin, CallEnd, Text, Thought, pieces_of
from jaxinfer.server.protocol.common import StreamOptions
from jaxinfer.server.token_details import TokenDetails
from jaxinfer.server.token_texts import TokenTexts, prompt_logprobs


@dataclass
class ChatForm:
    """What a request wants to see in its answer.

    Attributes:
        top_logprobs: None: no log probabilities.
        parser: makes the parser of one choice; None: the text is content as it is.
        with_reasoning: whether reasoning is part of the answer.
        is_named: whether an answer is a call of the one function that the request has named.
        details: makes the writer of what is said of one choice's tokens; None: nothing is.
    """

    n: int
    top_logprobs: int | None
    with_token_ids: bool
    parser: Callable[[], AnswerParser] | None = None
    with_reasoning: bool = True
    is_named: bool = False
    details: Callable[[], TokenDetails] | None = None


@dataclass
class _ChatChoice:
    """A choice as far as it is there."""

    parser: AnswerParser | None
    details: TokenDetails | None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    of_tokens: dict[str, list[Any]] = field(default_factory=dict)  # what is said of its tokens
    is_cut: bool = False  # whether the answer has ended within its last call
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer(ChunkedAnswer):
    """Answer to one conversation, with `n` choices."""

    def __init__(self, envelope: Envelope, options: StreamOptions | None, form: ChatForm, texts: TokenTexts) -> None:
        super().__init__(envelope, options, kind="chat.completion", kind_of_chunk="chat.completion.chunk")
        self._form, self._texts = form, texts
        self._choices = [
            _ChatChoice(form.parser and form.parser(), form.details and form.details()) for _ in range(form.n)
        ]
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._has_begun = False

    def add(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Add an output, and return the chunks that it brings: the roles of all choices first, once."""
        self._envelope.count(number, output)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        is_first = not self._has_begun
        found: list[dict[str, Any]] = []
        if is_first:
            self._has_begun = True
            self._prompt_token_ids = list(output.prompt_token_ids)
            found = [_choice(index, {"role": "assistant", "content": ""}, None, None) for index in range(self._form.n)]
        for part in output.outputs:
            choice = self._choices[part.index]
            entries = None
            if self._form.top_logprobs is not None:
                entries = [self._texts.of_chat(entry, self._form.top_logprobs) for entry in part.logprobs or ()]
                choice.logprobs += entries
            choice.token_ids += part.token_ids
            of_tokens = choice.details.fields(output.prompt_token_ids, part) if choice.details is not None else {}
            for name, new in of_tokens.items():
                choice.of_tokens.setdefault(name, []).extend(new)
            deltas = self._deltas(part.index, choice, part.text, is_last=part.finish_reason is not None)
            if part.finish_reason is not None and choice.parser is not None:
                end = choice.parser.reasoning_end
                self._envelope.count_reasoning(self._texts.num_tokens(self._prompt_token_ids, choice.token_ids, end))
            choice.stop_reason = part.stop_reason
            choice.finish_reason = self._finish_reason(choice, part.finish_reason, part.stop_reason)
            shows_tokens = self._form.with_token_ids or choice.details is not None
            if not (deltas or part.finish_reason or entries or (shows_tokens and part.token_ids)):
                continue  # text that is held back
            chunks = [_choice(part.index, delta, None, None) for delta in deltas or [{}]]
            # What is known of tokens comes with the first chunk, and the end with the last one.
            chunks[0] |= {"logprobs": None if not entries else {"content": entries, "refusal": None}}
            if self._form.with_token_ids:
                chunks[0]["token_ids"] = list(part.token_ids)
            chunks[0] |= of_tokens
            if part.finish_reason:
                chunks[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": part.stop_reason}
            found += chunks
        wrapped = self._chunks(found)
        if is_first and self._form.with_token_ids:
            wrapped[0]["prompt_token_ids"] = self._prompt_token_ids
        return wrapped

    def _finish_reason(self, choice: _ChatChoice, reason: str | None, stop_reason: int | str | None) -> str | None:
        if reason == "stop" and choice.is_cut:
            return "stop" if isinstance(stop_reason, str) else "length"
        return "tool_calls" if reason == "stop" and choice.calls and not self._form.is_named else reason

    def _deltas(self, index: int, choice: _ChatChoice, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """What further text of a choice adds to its message."""
        found = []
        for piece in pieces_of(choice.parser, text, is_last=is_last):
            match piece:
                case Text(content):
                    choice.texts.append(content)
                    found.append({"content": content})
                case Thought(thought):
                    if self._form.with_reasoning:
                        choice.thoughts.append(thought)
                        # Clients read one name or the other.
                        found.append({"reasoning": thought, "reasoning_content": thought})
                case CallBegin(number, name):
                    call_id = f"call_{uuid.uuid4().hex[:24]}"
                    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                    choice.calls.append(call)
                    found.append({"tool_calls": [{"index": number, **call, "function": dict(call["function"])}]})
                case CallArguments(number, arguments):
                    choice.calls[number]["function"]["arguments"] += arguments
                    found.append({"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
                case CallEnd(is_cut=is_cut):
                    choice.is_cut = is_cut
        return found

    def whole(self) -> dict[str, Any]:
        """The answer, once all outputs were added."""
        choices = []
        for index, choice in enumerate(self._choices):
            found = {
                "index": index, "message": _message(choice), "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "logprobs": None if self._form.top_logprobs is None else {"content": choice.logprobs, "refusal": None},
            }  # fmt: skip
            if self._form.with_token_ids:
                found["token_ids"] = choice.token_ids
            found |= choice.of_tokens
            choices.append(found)
        answer = self._whole(choices)
        if self._form.with_token_ids:
            answer["prompt_token_ids"] = self._prompt_token_ids
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs)
        return answer


def _message(choice: _ChatChoice) -> dict[str, Any]:
    text = "".join(choice.texts)
    found: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.thoughts:
        thought = "".join(choice.thoughts)
        found |= {"reasoning": thought, "reasoning_content": thought}
    if choice.calls:
        found |= {"content": text or None, "tool_calls": choice.calls}
    return found


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
