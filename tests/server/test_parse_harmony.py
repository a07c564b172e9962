"""gpt-oss's answers by channels: reasoning, text before calls, calls, the answer; the same in any pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.server.parse.harmony import HarmonyParser
from jaxinfer.server.parse.pieces import CallArguments, CallBegin, CallEnd, Piece, Text, Thought, joined

TOOLS: dict[str, dict[str, Any]] = {"get_weather": {"properties": {"city": {"type": "string"}}}, "now": {}}
ANALYSIS = "<|channel|>analysis<|message|>Look it up.<|end|>"
NEXT = "<|start|>assistant"
CITY = '{"city": "Bergen"}'
WEATHER = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}<|call|>"


def parsed(*parts: str, **options: Any) -> list[Piece]:
    parser = HarmonyParser(TOOLS, **options)
    found = [piece for part in parts for piece in parser.feed(part)]
    return joined(found + parser.finish())


CASES: dict[str, tuple[str, list[Piece]]] = {
    "reasoning, then the answer": (
        f"{ANALYSIS}{NEXT}<|channel|>final<|message|>It rains.<|return|>",
        [Thought("Look it up."), Text("It rains.")],
    ),
    "an answer whose end is no text": (
        f"{ANALYSIS}{NEXT}<|channel|>final<|message|>It rains.", [Thought("Look it up."), Text("It rains.")]
    ),
    "a call": (
        f"{ANALYSIS}{NEXT}{WEATHER}",
        [Thought("Look it up."), CallBegin(0, "get_weather"), CallArguments(0, CITY), CallEnd(0)],
    ),
    "the receiver before the channel": (
        f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{CITY}",
        [CallBegin(0, "get_weather"), CallArguments(0, CITY), CallEnd(0)],
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.now<|message|><|call|>",
        [CallBegin(0, "now"), CallArguments(0, "{}"), CallEnd(0)],
    ),
    "text before a call": (
        f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{WEATHER}",
        [Text("I look."), CallBegin(0, "get_weather"), CallArguments(0, CITY), CallEnd(0)],
    ),
    "text before the answer": (
        f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}<|channel|>final<|message|>Rain.",
        [Text("I look.\nRain.")],
    ),
    "two calls": (
        f"{WEATHER}{NEXT}<|channel|>commentary to=functions.now<|message|>{{}}<|call|>",
        [CallBegin(0, "get_weather"), CallArguments(0, CITY), CallEnd(0),
         CallBegin(1, "now"), CallArguments(1, "{}"), CallEnd(1)],
    ),
    "a call that is cut": (
        WEATHER[:-14], [CallBegin(0, "get_weather"), CallArguments(0, CITY[:-6]), CallEnd(0, is_cut=True)]
    ),
    "reasoning that is cut": ("<|channel|>analysis<|message|>Look it", [Thought("Look it")]),
    "a header that is cut": (f"{ANALYSIS}{NEXT}<|channel|>fin", [Thought("Look it up.")]),
    "a marker that is cut": ("<|channel|>final<|message|>Rain.<|retu", [Text("Rain.")]),
    "a message without an end": (f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>final<|message|>Yes.",
                                 [Thought("Hm."), Text("Yes.")]),
    "an unknown function": ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", [Text("{}")]),
    "no markers": ("It rains. 1 < 2", [Text("It rains. 1 < 2")]),
    "nothing": ("", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_messages_are_what_their_channels_say(name):
    text, wanted = CASES[name]
    assert parsed(text) == parsed(*text) == wanted


def test_surplus_calls_are_left_out():
    text = f"{WEATHER}{NEXT}<|channel|>commentary to=functions.now<|message|>{{}}<|call|>"
    assert parsed(text, most_calls=1) == [CallBegin(0, "get_weather"), CallArguments(0, CITY), CallEnd(0)]


def test_reasoning_ends_with_its_message():
    parser = HarmonyParser(TOOLS)
    parser.feed(f"{ANALYSIS}{NEXT}<|channel|>final<|message|>It rains.")
    assert parser.reasoning_end == len(ANALYSIS)


PARTS = st.sampled_from([
    ANALYSIS, NEXT, WEATHER, "<|channel|>", "final", "commentary", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    "<|start|>", " to=functions.now", "<|", "{", "}", "text", "\n", " ",
])  # fmt: skip


@given(parts=st.lists(PARTS, max_size=9), cuts=st.lists(st.integers(0, 200), max_size=5))
@settings(max_examples=400)
def test_pieces_depend_on_the_text_alone(parts, cuts):
    text = "".join(parts)
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    whole = parsed(text)
    assert parsed(*pieces) == parsed(*text) == whole
    begun = [piece.index for piece in whole if isinstance(piece, CallBegin)]
    assert begun == list(range(len(begun))) == [piece.index for piece in whole if isinstance(piece, CallEnd)]
