"""Bodies of `/v1/responses` as conversations: items become messages, and flat fields those of chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError, of_validation
from jaxinfer.server.packages import ValidationError
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.responses import (
    LOGPROBS,
    ChosenFunction,
    FunctionOfResponses,
    InputItem,
    InputPart,
    ReasoningOptions,
    ResponsesRequest,
    TextOptions,
)

# Fields that would change the answer, and what to do instead.
_REFUSED = {
    "conversation": "send the items, or previous_response_id",
    "prompt": "there are no templates of prompts: send instructions and input",
    "moderation": "there is no moderation",
    "context_management": "conversations are not compacted",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "logprobs": f"use include=[{LOGPROBS!r}] and top_logprobs",
    "prompt_logprobs": "the prompt has no place in a response",
    "branches": "a response is one answer",
    "use_beam_search": "a response is one answer",
    "skeleton_of_thought": "a response is one answer",
}
_INSTRUCTING = ("system", "developer")  # roles
# Fields under other names in chat, for errors that name one.
_NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format", "structured_outputs": "text.format",
}  # fmt: skip
_UNSET_OF_TOOLS = {"description": None, "parameters": None, "strict": None}
_TEXTS = ("input_text", "output_text", "text")


def chat_request(body: ResponsesRequest, items: Sequence[InputItem]) -> ChatRequest:
    """The conversation that a body asks for.

    Args:
        items: of the whole conversation, the body's own last.

    Raises:
        ApiError: it asks for what is not served.
    """
    _refuse(body)
    messages = _Messages()
    for number, item in enumerate(items):
        messages.add(item, f"input.{number}")
    if body.instructions is not None:
        messages.instruct(body.instructions)
    if not items:
        raise ApiError(400, "input must have at least one item", "input")
    given: dict[str, Any] = {**body.extra, "messages": messages.found, "max_tokens": body.max_output_tokens}
    for name in ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "include_reasoning", "user"):
        given[name] = getattr(body, name)
    given["response_format"] = _response_format(body)
    given["tools"] = [_tool(tool) for tool in body.tools] if body.tools else None
    given["tool_choice"] = _tool_choice(body)
    given["logprobs"], given["top_logprobs"] = _logprobs(body)
    given["reasoning_effort"] = None if body.reasoning is None else body.reasoning.effort
    given["chat_template_kwargs"] = body.chat_template_kwargs
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise in_names_of_responses(of_validation(error), body) from error


def own_items(body: ResponsesRequest) -> list[InputItem]:
    """The items of a body's own input; a text is a message of the user."""
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    return list(body.input or ())


def echo_of(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Fields of a body as its response has them, with their defaults."""
    text, choice = body.text or TextOptions(), body.tool_choice
    reasoning = body.reasoning or ReasoningOptions()
    return {
        "background": bool(body.background), "previous_response_id": body.previous_response_id,
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "max_tool_calls": None,
        "temperature": params.temperature, "top_p": params.top_p, "top_logprobs": body.top_logprobs or 0,
        "tools": [_UNSET_OF_TOOLS | tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}} | text.model_dump(exclude_none=True, by_alias=True),
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary}, "truncation": "disabled",
        "metadata": body.metadata or {}, "service_tier": "default", "user": body.user,
    }  # fmt: skip


def listed_items(items: Sequence[InputItem], name: str) -> list[dict[str, Any]]:
    """Items as a list of them shows them: each with a type, an id and a status, contents in parts.

    Args:
        name: by which their ids differ from all others.
    """
    found = []
    for number, item in enumerate(items):
        given = {"type": "message", "id": f"item_{name}_{number}"} | item.model_dump(exclude_none=True)
        if isinstance(item.content, str) and given["type"] == "message":
            part = {"type": "input_text", "text": item.content}
            if item.role == "assistant":
                part |= {"type": "output_text", "annotations": []}
            given["content"] = [part]
        found.append({"status": "completed"} | given)
    return found


def in_names_of_responses(error: ApiError, body: ResponsesRequest) -> ApiError:
    """An error of a conversation, whose parameter has the name that the body has for it."""
    if error.param is None or error.param in body.extra:
        return error
    return replace(error, param=_NAMES.get(error.param, error.param))


def _refuse(body: ResponsesRequest) -> None:
    for name, instead in _REFUSED.items():
        if body.extra.get(name) not in (None, False, "", [], {}):
            raise ApiError(400, f"{name} is not served: {instead}", name)
    if body.extra.get("n") not in (None, 1):
        raise ApiError(400, "n is not served: a response is one answer", "n")
    if body.truncation not in (None, "disabled"):
        raise ApiError(400, "truncation must be disabled: items are not dropped from a conversation", "truncation")
    if body.background and body.stream:
        raise ApiError(400, "background goes without stream: poll GET /v1/responses/{id}", "background")
    if body.background and body.store is False:
        raise ApiError(400, "background goes without store=false: the answer would be lost", "background")


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    asked = None if body.text is None else body.text.format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    if asked.schema_ is None:
        raise ApiError(400, "text.format of the type json_schema needs schema", "text.format")
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}


def _tool(given: FunctionOfResponses) -> dict[str, Any]:
    if given.type != "function":
        raise ApiError(400, f"tools of the type {given.type[:64]} are not served: only functions are", "tools")
    if given.name is None:
        raise ApiError(400, "a function of tools needs a name", "tools")
    function = {name: getattr(given, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if not isinstance(choice, ChosenFunction):
        return None if choice == "auto" and not body.tools else choice
    if choice.type != "function" or choice.name is None:
        raise ApiError(
            400, f"tool_choice of the type {choice.type[:64]} is not served: name a function, or say none, auto or "
            "required", "tool_choice",
        )  # fmt: skip
    return {"type": "function", "function": {"name": choice.name}}


def _logprobs(body: ResponsesRequest) -> tuple[bool | None, int | None]:
    is_asked = LOGPROBS in (body.include or ())
    if body.top_logprobs and not is_asked:
        raise ApiError(400, f"top_logprobs needs include=[{LOGPROBS!r}]", "top_logprobs")
    if is_asked and body.tools and body.tool_choice != "none":
        raise ApiError(400, f"{LOGPROBS} goes without tools that may be called", "include")
    return (True, body.top_logprobs) if is_asked else (None, None)


@dataclass
class _Messages:
    """Messages as they grow by items; those of one turn of the assistant are one message."""

    found: list[dict[str, Any]] = field(default_factory=list)
    _thought: str = ""  # reasoning of the turn that follows
    _call_ids: set[str] = field(default_factory=set)

    def add(self, item: InputItem, place: str) -> None:
        """Add an item.

        Args:
            place: what errors call it.
        """
        match item.type or "message":
            case "message":
                self._add_message(item, place)
            case "reasoning":
                content = item.content or ""
                is_text = isinstance(content, str)
                self._thought = content if is_text else "".join(part.text or "" for part in content)
            case "function_call":
                self._add_call(item, place)
            case "function_call_output":
                self._add_output(item, place)
            case "item_reference":
                raise ApiError(
                    400, "references of items are not served: send the items, or previous_response_id", place
                )
            case other:
                raise ApiError(400, f"items of the type {other[:64]} are not served", place)

    def instruct(self, instructions: str) -> None:
        """Begin with instructions, and the messages of the system that come first: many templates allow one."""
        count = next((n for n, each in enumerate(self.found) if each["role"] not in _INSTRUCTING), len(self.found))
        content: str | list[dict[str, Any]] = instructions
        for message in self.found[:count]:
            content = _joined(f"{content}\n" if isinstance(content, str) else content, message["content"])
        self.found[:count] = [{"role": "system", "content": content}]

    def _add_message(self, item: InputItem, place: str) -> None:
        if item.role is None or item.content is None:
            raise ApiError(400, "a message needs a role and a content", place)
        content = _content(item.content, f"{place}.content")
        if item.role != "assistant":
            self._thought = ""
            self.found.append({"role": item.role, "content": content})
            return
        turn = self._turn(is_text=True)
        turn["content"] = content if turn["content"] is None else _joined(turn["content"], content)

    def _turn(self, *, is_text: bool) -> dict[str, Any]:
        """The assistant's turn that an item belongs to: a new one, unless the latest message may have it too."""
        last = self.found[-1] if self.found else None
        is_same = last is not None and last["role"] == "assistant" and not self._thought
        if last is None or not is_same or (is_text and last["content"] is not None and "tool_calls" not in last):
            last = {"role": "assistant", "content": None}
            if self._thought:
                last["reasoning_content"] = self._thought
            self.found.append(last)
        self._thought = ""
        return last

    def _add_call(self, item: InputItem, place: str) -> None:
        if item.call_id is None or item.name is None or item.arguments is None:
            raise ApiError(400, "a function_call needs call_id, name and arguments", place)
        self._call_ids.add(item.call_id)
        function = {"name": item.name, "arguments": item.arguments}
        self._turn(is_text=False).setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )

    def _add_output(self, item: InputItem, place: str) -> None:
        if item.call_id is None or item.output is None:
            raise ApiError(400, "a function_call_output needs call_id and output", place)
        if item.call_id not in self._call_ids:
            raise ApiError(
                400, f"there is no call {item.call_id[:64]}, whose output this is: send the function_call too, or "
                "previous_response_id", place,
            )  # fmt: skip
        self._thought = ""
        content = _content(item.output, f"{place}.output")
        self.found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})


def _content(given: str | list[InputPart], place: str) -> str | list[dict[str, Any]]:
    """A content as messages have it; one text alone is a string."""
    if isinstance(given, str):
        return given
    texts = []
    for part in given:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal"):
            raise ApiError(400, f"parts of the type {part.type[:64]} are not served: only texts are", place)
        if text is None:
            raise ApiError(400, f"a part of the type {part.type} needs its text", place)
        texts.append(text)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _joined(before: Any, after: Any) -> Any:
    """Contents of one turn as one."""
    if isinstance(before, str) and isinstance(after, str):
        return before + after
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (before, after)]
    return parts[0] + parts[1]
