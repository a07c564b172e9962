"""How the embedded model reads tools and writes calls: as turns of text, which the chat template writes alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from jaxinfer.server.parse.formats import FORMATS, format_of
from jaxinfer.server.parse.machine import Parser
from jaxinfer.server.parse.pieces import CallArguments, CallBegin, CallEnd, Text
from training.inventory import DATA

Message = Mapping[str, Any]
"""A message of a request: its role, its content, and `tool_calls` where it has some."""
HERMES = FORMATS["hermes"]
TOOL_CHAT_TEMPLATE = (DATA / "tool_chat_template.jinja").read_text(encoding="utf-8")


def knows_tools(chat_template: Any) -> bool:
    """Whether a model with this chat template was trained on tools."""
    return isinstance(chat_template, str) and format_of(chat_template) is not None


def turns_of(tools: Sequence[Mapping[str, Any]], messages: Iterable[Message]) -> list[dict[str, str]]:
    """Turns of system, user and assistant that are a conversation with tools. `tools` come as in a request."""
    listing = "\n".join(["Tools:", *map(_listed, tools)])
    turns = [{"role": "system", "content": listing}] if tools else []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        members = list(group)
        if is_result:
            results = (f"<tool_response>\n{each['content']}\n</tool_response>" for each in members)
            turns.append({"role": "user", "content": "\n".join(results)})
            continue
        for message in members:
            parts = [message["content"]] if message["content"] else []
            content = "\n".join([*parts, *map(_written, message.get("tool_calls", ()))])
            if message["role"] == "system" and tools:
                turns[0]["content"] = f"{content}\n{listing}"
            else:
                turns.append({"role": message["role"], "content": content})
    return turns


def _listed(tool: Mapping[str, Any]) -> str:
    function = tool["function"]
    schema = function["parameters"]
    required = schema.get("required", ())
    parameters = [
        f"{key}{'' if key in required else '?'}{_typed(inner)}" for key, inner in schema["properties"].items()
    ]
    described = [
        f"- {key}: {inner['description']}" for key, inner in schema["properties"].items() if "description" in inner
    ]
    return "\n".join([f"{function['name']}({','.join(parameters)}) {function['description']}", *described])


def _typed(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f":{'|'.join(schema['enum'])}"
    if schema["type"] == "array":
        return f":{schema['items']['type']}[]"
    return "" if schema["type"] == "string" else f":{schema['type']}"


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    record = {"name": function["name"], "arguments": function["arguments"]}
    return f"{HERMES.open}\n{json.dumps(record, ensure_ascii=False)}\n{HERMES.close}"


def calls_in(tools: Sequence[Mapping[str, Any]], answer: str) -> tuple[str, list[tuple[str, Any]]]:
    """The text of an answer beside its calls, and the names and arguments of these, as the server's parser finds them.

    Arguments that are not JSON, or were cut, are None.
    """
    parser = Parser(HERMES, {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}, think=None)
    text, names, written = "", [], []
    for piece in (*parser.feed(answer), *parser.finish()):
        match piece:
            case Text():
                text += piece.text
            case CallBegin():
                names.append(piece.name)
                written.append("")
            case CallArguments():
                written[piece.index] += piece.text
            case CallEnd(is_cut=True):
                written[piece.index] = ""
    return text, list(zip(names, map(_read, written), strict=True))


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return None
