"""Answers of `/v1/chat/completions`, whole or in chunks, from outputs of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxinfer.outputs import Logprob, RequestOutput
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.token_texts import TokenTexts, prompt_logprobs


@dataclass
class ChatForm:
    """What a request wants to see in its answer."""

    n: int
    top_logprobs: int | None  # None: no log probabilities
    with_token_ids: bool


@dataclass
class _ChatChoice:
    """A choice as far as it is there."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer:
    """Answer to one conversation, with `n` choices."""

    def __init__(self, envelope: Envelope, form: ChatForm, texts: TokenTexts) -> None:
        self._envelope, self._form, self._texts = envelope, form, texts
        self._choices = [_ChatChoice() for _ in range(form.n)]
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._has_begun = False

    def add(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices that an output brings, as chunks have them: the roles of all first, once."""
        self._envelope.count(number, output)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        found: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            self._prompt_token_ids = list(output.prompt_token_ids)
            found = [_choice(index, {"role": "assistant", "content": ""}, None, None) for index in range(self._form.n)]
            if self._form.with_token_ids:
                found[0]["prompt_token_ids"] = self._prompt_token_ids
        for part in output.outputs:
            choice = self._choices[part.index]
            choice.texts.append(part.text)
            entries = None
            if self._form.top_logprobs is not None:
                entries = [self._texts.of_chat(entry, self._form.top_logprobs) for entry in part.logprobs or ()]
                choice.logprobs += entries
            choice.token_ids += part.token_ids
            choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
            if not (part.text or part.finish_reason or entries or (self._form.with_token_ids and part.token_ids)):
                continue  # a character that is incomplete
            delta = {"content": part.text} if part.text else {}
            new = _choice(part.index, delta, entries, part.finish_reason)
            if part.finish_reason:
                new["stop_reason"] = part.stop_reason
            if self._form.with_token_ids:
                new["token_ids"] = list(part.token_ids)
            found.append(new)
        return found

    def chunk(self, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        return self._envelope.wrap("chat.completion.chunk", choices, usage=usage)

    def whole(self) -> dict[str, Any]:
        """The answer, once all outputs were added."""
        choices = []
        for index, choice in enumerate(self._choices):
            found = {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": None if self._form.top_logprobs is None else {"content": choice.logprobs, "refusal": None},
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._form.with_token_ids:
                found["token_ids"] = choice.token_ids
            choices.append(found)
        answer = self._envelope.wrap("chat.completion", choices, usage=True)
        if self._form.with_token_ids:
            answer["prompt_token_ids"] = self._prompt_token_ids
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs)
        return answer


def _choice(
    index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": None if not logprobs else {"content": logprobs, "refusal": None},
        "finish_reason": finish_reason,
    }
