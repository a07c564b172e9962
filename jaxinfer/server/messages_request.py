"""Requests of Anthropic's API as conversations of this server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.server.bodies import validated
from jaxinfer.server.errors import ApiError
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.messages import (
    Block,
    ChoiceOfTool,
    MessagesPrompt,
    MessagesRequest,
    OtherTool,
    RedactedThinkingBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from jaxinfer.server.sampling import refuse_uncomputed

# Fields of other endpoints, and of Anthropic's servers, that would change the answer.
_REFUSED = (
    ("stop", "use stop_sequences"),
    ("max_completion_tokens", "use max_tokens"),
    ("response_format", "use output_config.format"),
    ("output_format", "use output_config.format"),
    ("parallel_tool_calls", "use tool_choice.disable_parallel_tool_use"),
    *((name, "a message has no log probabilities") for name in ("logprobs", "top_logprobs", "prompt_logprobs")),
    *((name, "a message is one answer") for name in ("use_beam_search", "branches", "skeleton_of_thought")),
    ("mcp_servers", "tools of other servers are not called"),
    ("container", "code is not run"),
)
# Claude Code's agents send a block that differs in every request, and is not for the model: prefixes after it could
# not be cached.
_NOT_FOR_MODELS = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request_of(body: MessagesPrompt) -> ChatRequest:
    """Return the conversation that a body asks for.

    Fields that are not declared are kept: some are parameters of this engine, and others are ignored.

    Raises:
        ApiError: it has what is not served, or what does not go together.
    """
    refuse_uncomputed(body, *_REFUSED)
    if body.extra.get("n") not in (None, 1):
        raise ApiError(400, "n is not served: a message is one answer", "n")
    given = {**body.extra, "model": body.model, **_conversation(body), **_thinking(body.thinking, body.extra)}
    if body.tools:
        given["tools"] = [_tool(tool, f"tools.{number}") for number, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        given |= _choice(body.tool_choice)
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        given |= {name: getattr(body, name) for name in names} | {"stop": body.stop_sequences}
    return validated(ChatRequest, given)


def _conversation(body: MessagesPrompt) -> dict[str, Any]:
    """The messages, and whether the last one is continued."""
    leading = next((number for number, turn in enumerate(body.messages) if turn.role != "system"), len(body.messages))
    system = [] if body.system is None else _texts(body.system, "system")
    for number, turn in enumerate(body.messages[:leading]):
        system += _texts(turn.content, f"messages.{number}.content")
    system = [text for text in system if text and not text.startswith(_NOT_FOR_MODELS)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "\n".join(system)}] if system else []
    for number, turn in enumerate(body.messages[leading:], leading):
        messages += _messages(turn, f"messages.{number}.content")
    if body.messages[-1].role != "assistant":
        return {"messages": messages}
    last = messages[-1]
    if last == {"role": "assistant", "content": ""}:  # as if it were not there
        return {"messages": messages[:-1]}
    if "tool_calls" in last:
        raise ApiError(400, "the last message calls tools: their results are missing", "messages")
    if not last["content"].strip():
        raise ApiError(400, "the last message is the assistant's, and has no text to continue", "messages")
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def _messages(turn: Turn, place: str) -> Iterator[dict[str, Any]]:
    """The messages that one of Anthropic's is: results of tools are messages of their own, which come first."""
    if turn.role == "system":
        yield {"role": "system", "content": "\n".join(_texts(turn.content, place))}
        return
    blocks = _blocks(turn.content)
    if turn.role == "assistant":
        yield _assistant(blocks, place)
        return
    texts = []
    for number, block in enumerate(blocks):
        match block:
            case ToolResultBlock():
                yield _result(block, f"{place}.{number}.content")
            case TextBlock():
                texts.append(block.text)
            case _:
                raise _refused(block, f"{place}.{number}")
    if len(texts) == 1 or not blocks:
        yield {"role": "user", "content": "".join(texts)}
    elif texts:
        yield {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def _assistant(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    """The message that an earlier answer was."""
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass  # nothing that a model could read
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _refused(block, f"{place}.{number}")
    found: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _result(block: ToolResultBlock, place: str) -> dict[str, Any]:
    text = "\n".join(_texts(block.content or "", place))
    if block.is_error:  # templates have no other place for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _blocks(content: str | Sequence[Block]) -> Sequence[Block]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _texts(content: str | Sequence[Block], place: str) -> list[str]:
    """The texts of content that has nothing else."""
    texts = []
    for number, block in enumerate(_blocks(content)):
        if not isinstance(block, TextBlock):
            raise _refused(block, f"{place}.{number}")
        texts.append(block.text)
    return texts


def _refused(block: Any, place: str) -> ApiError:
    return ApiError(400, f"{place}: a block of the type {block.type[:64]} is not served here", place)


def _thinking(asked: Thinking | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What a template is told of thinking, by the name that most have for it, and whether thinking is shown."""
    if asked is None:
        return {}
    thinks, given = asked.type != "disabled", extra.get("chat_template_kwargs")
    found: dict[str, Any] = {"include_reasoning": thinks and asked.display != "omitted"}
    if given is None or isinstance(given, Mapping):
        found["chat_template_kwargs"] = {"enable_thinking": thinks, **(given or {})}
    return found


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if isinstance(tool, OtherTool):
        raise ApiError(
            400, f"{place}: {tool.type[:64]} is not served: tools are those with an input_schema that clients run",
            f"{place}.type",
        )  # fmt: skip
    schema = {"type": "object", **tool.input_schema}
    if schema["type"] != "object":
        raise ApiError(400, f"{place}.input_schema.type must be 'object'", f"{place}.input_schema.type")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(asked: ChoiceOfTool) -> dict[str, Any]:
    found: dict[str, Any] = {"tool_choice": _CHOICES.get(asked.type)}
    if asked.type == "tool":
        if asked.name is None:
            raise ApiError(400, "tool_choice.name is needed with the type tool", "tool_choice.name")
        found["tool_choice"] = {"type": "function", "function": {"name": asked.name}}
    if asked.disable_parallel_tool_use is not None:
        found["parallel_tool_calls"] = not asked.disable_parallel_tool_use
    return found
