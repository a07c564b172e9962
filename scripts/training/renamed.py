"""Conversations whose tools and parameters have names that no habit tells: they have to be copied from the list."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from training.slots import invented_word
from training.tools import ToolTalk

RENAMED = 0.7
"""Share of the tools, and of the parameters, that get such a name."""


def renamed(make: Callable[[random.Random, bool], ToolTalk]) -> Callable[[random.Random, bool], ToolTalk]:
    """The conversations of `make`, in which most tools and parameters have other names."""

    def talk(rng: random.Random, held_out: bool) -> ToolTalk:
        made = make(rng, held_out)
        names = _others(rng, held_out, [tool["function"]["name"] for tool in made.tools], is_free=True)
        keys = {
            tool["function"]["name"]: _others(rng, held_out, list(tool["function"]["parameters"]["properties"]))
            for tool in made.tools
        }
        tools = tuple(_tool(tool, names, keys[tool["function"]["name"]]) for tool in made.tools)
        return replace(made, tools=tools, messages=tuple(_message(each, names, keys) for each in made.messages))

    return talk


def _others(rng: random.Random, held_out: bool, given: list[str], *, is_free: bool = False) -> dict[str, str]:
    """Names by those that they stand for, all different. Where `is_free`, some say nothing of what they are for."""
    found: dict[str, str] = {}
    for name in given:
        other = name
        while other in found.values() or (other == name and rng.random() < RENAMED):
            word = invented_word(rng, held_out)
            forms = [f"{word}_{name}", f"{name}_{word}", *[f"{word}_{invented_word(rng, held_out)}"] * is_free]
            other = rng.choice(forms)
        found[name] = other
    return found


def _tool(tool: dict[str, Any], names: dict[str, str], keys: dict[str, str]) -> dict[str, Any]:
    function = tool["function"]
    schema = dict(function["parameters"])
    schema["properties"] = {keys[key]: each for key, each in schema["properties"].items()}
    if "required" in schema:
        schema["required"] = [keys[key] for key in schema["required"]]
    return {**tool, "function": {**function, "name": names[function["name"]], "parameters": schema}}


def _message(message: dict[str, Any], names: dict[str, str], keys: dict[str, dict[str, str]]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        arguments = {keys[name][key]: value for key, value in arguments.items()}
        calls.append({**call, "function": {"name": names[name], "arguments": arguments}})
    return {**message, "tool_calls": calls}
