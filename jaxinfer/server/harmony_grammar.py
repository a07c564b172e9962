"""Grammars of gpt-oss's answers, in Lark's notation: markers are special tokens, which no text matches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.server.parse.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START
from jaxinfer.server.tool_grammar import Schemas, json_rule

_NEXT = f'{END} {START} "assistant"'


def grammar_of_messages(schemas: Schemas, *, must_call: bool, answer: Mapping[str, Any] | None = None) -> str:
    """The grammar of an answer that may reason, and then calls one function, or answers unless `must_call`.

    A call ends the answer: its marker is an end of sequences.

    Args:
        schemas: of the functions that may be called, by their names; none: there is no call.
        answer: schema of the answer, which is JSON then; None: any text.

    Raises:
        ValueError: a schema cannot be kept to.
    """
    lines = [f'thought: {CHANNEL} "analysis" {MESSAGE} TEXT {_NEXT}', "TEXT: /(?s:.*)/"]
    ways = []
    if schemas:
        ways.append("before? call")
        calls = " | ".join(f"call_{number}" for number in range(len(schemas)))
        lines += [f"call: {calls}", f'before: {CHANNEL} "commentary" {MESSAGE} TEXT {_NEXT}']
    for number, (name, schema) in enumerate(schemas.items()):
        receiver = json.dumps(f"commentary to={FUNCTIONS}{name} ")
        lines.append(f'call_{number}: {CHANNEL} {receiver} {CONSTRAIN} "json" {MESSAGE} arguments_{number}')
        lines.append(json_rule(f"arguments_{number}", schema))
    if not must_call:
        ways.append("final")
        lines.append(f'final: {CHANNEL} "final" {MESSAGE} {"TEXT" if answer is None else "answer"}')
        if answer is not None:
            lines.append(json_rule("answer", answer))
    return "\n".join([f"start: thought? ({' | '.join(ways)})", *lines]) + "\n"
