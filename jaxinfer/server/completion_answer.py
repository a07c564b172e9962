"""Answers of `/v1/completions`, whole or in chunks, from outputs of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.outputs import CompletionOutput, Logprob, RequestOutput
from jaxinfer.server.envelope import ChunkedAnswer, Envelope
from jaxinfer.server.protocol.common import StreamOptions
from jaxinfer.server.token_details import DETAILS, TokenDetails
from jaxinfer.server.token_texts import LogprobLists, TokenTexts, prompt_logprobs


@dataclass
class CompletionForm:
    """What a request wants to see in its answer."""

    n: int
    logprobs: int | None
    echo: bool
    num_wanted: int | None  # 0: nothing but the prompt
    with_token_ids: bool
    with_prompt_logprobs: bool = False
    details: Callable[[], TokenDetails] | None = None  # makes the writer of what is said of one choice's tokens


@dataclass
class _CompletionChoice:
    """A choice as far as it is there."""

    logprobs: LogprobLists
    details: TokenDetails | None
    has_begun: bool = False
    parts: list[dict[str, Any]] = field(default_factory=list)


class CompletionAnswer(ChunkedAnswer):
    """Answer to all prompts of one request.

    Args:
        prompts: the text of each.
    """

    def __init__(
        self,
        envelope: Envelope,
        options: StreamOptions | None,
        form: CompletionForm,
        texts: TokenTexts,
        prompts: Sequence[str],
    ) -> None:
        super().__init__(envelope, options, kind="text_completion", kind_of_chunk="text_completion")
        self._form, self._prompts = form, prompts
        # Of each prompt, from its first output: those of its other samples have none.
        self._prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = {}
        self._choices = [
            _CompletionChoice(LogprobLists(texts), form.details and form.details())
            for _ in range(form.n * len(prompts))
        ]

    def add(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Add an output of prompt `number`, and return the chunks that it brings."""
        self._envelope.count(number, output, is_prompt_alone=self._form.num_wanted == 0)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[number] = output.prompt_logprobs
        found = []
        for part in output.outputs:
            choice = self._choices[number * self._form.n + part.index]
            index = number * self._form.n + part.index
            new = self._new(choice, number, output, part) | {"index": index}
            if any(new.get(name) for name in ("text", "logprobs", "finish_reason", "token_ids", "token_sources")):
                found.append(new)
            choice.parts.append(new)
        return self._chunks(found)

    def _new(
        self, choice: _CompletionChoice, number: int, output: RequestOutput, part: CompletionOutput
    ) -> dict[str, Any]:
        form, text = self._form, part.text
        tokens, entries = list(part.token_ids), list(part.logprobs or ())
        if form.num_wanted == 0:
            text, tokens, entries = "", [], []
        shown = tokens
        if form.echo and not choice.has_begun:
            text = self._prompts[number] + text
            shown = [*output.prompt_token_ids, *tokens]
            if form.logprobs is not None:
                given = self._prompt_logprobs.get(number) or [None] * len(output.prompt_token_ids)
                entries = [*given, *entries]
        new: dict[str, Any] = {
            "text": text,
            "logprobs": None if form.logprobs is None else choice.logprobs.lists(shown, entries),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if form.num_wanted == 0 and part.finish_reason:
            new["finish_reason"] = "length"
        if form.with_token_ids:
            new["token_ids"] = tokens
            if not choice.has_begun:
                new["prompt_token_ids"] = list(output.prompt_token_ids)
        if choice.details is not None:
            new |= choice.details.fields(
                output.prompt_token_ids, part if form.num_wanted != 0 else CompletionOutput(part.index, "", [])
            )
        if form.with_prompt_logprobs and output.prompt_logprobs is not None:
            new["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        choice.has_begun = True
        return new

    def whole(self) -> dict[str, Any]:
        """The answer, once all outputs were added."""
        # A search under a grammar may find fewer texts than were asked for.
        choices = [_joined(index, choice.parts) for index, choice in enumerate(self._choices) if choice.parts]
        return self._whole(choices)


def _joined(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Parts of one choice as one."""
    if len(parts) == 1:
        return parts[0]
    found = {**parts[-1], "index": index, "text": "".join(part["text"] for part in parts)}
    if parts[-1]["logprobs"] is not None:
        names = parts[-1]["logprobs"]
        found["logprobs"] = {name: [one for part in parts for one in part["logprobs"][name]] for name in names}
    for name in ("token_ids", *DETAILS):
        if any(name in part for part in parts):
            found[name] = [one for part in parts for one in part.get(name, ())]
    if "token_ids" in found:
        found["prompt_token_ids"] = parts[0]["prompt_token_ids"]
    return found
