"""Tool calls in texts, found without the server, and as the server finds them."""

import pytest

from jaxinfer.server.parse.formats import FORMATS
from jaxinfer.server.parse.machine import Parser
from jaxinfer.server.parse.pieces import CallArguments, CallBegin, Text
from soaking.calls import split_calls

NAMES = ("describe", "now")


def written(name="describe", arguments='{"age": 3}', space="\n"):
    return f'<tool_call>{space}{{"name": "{name}", "arguments": {arguments}}}{space}</tool_call>'


def split(text, *, most=1, drops_space=False):
    found = split_calls(text, NAMES, most=most, drops_space=drops_space)
    if found is None:
        return None
    return found[0], [(call["name"], call["arguments"], call["is_cut"]) for call in found[1]]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("no call <tool_", "no call <tool_", []),
        (written(), "", [("describe", '{"age": 3}', False)]),
        ("I look.\n" + written(space=""), "I look.\n", [("describe", '{"age": 3}', False)]),
        (written("now", "{}") + "\n and more", "and more", [("now", "{}", False)]),
        (written(arguments='{"name": "a } \\" {", "in": [{}]}'), "",
         [("describe", '{"name": "a } \\" {", "in": [{}]}', False)]),
        (written(arguments='{"name": "a\nb"}'), "", [("describe", '{"name": "a\\nb"}', False)]),
        (written(arguments='{age: "x"}'), "", [("describe", '{age: "x"}', False)]),
        (written() + "\n" + written("now", "{}"), "", [("describe", '{"age": 3}', False)]),
        (written() + "\n" + written("now", "{}") + " so", "so", [("describe", '{"age": 3}', False)]),
        (written(arguments='{"name": "C:\\dir\\users \\u00e9 \\d"}'), "",
         [("describe", '{"name": "C:\\\\dir\\\\users \\u00e9 \\\\d"}', False)]),
        (written("other"), written("other"), []),
        (written("other") + written(space=""), written("other"), [("describe", '{"age": 3}', False)]),
        ('<tool_call>\n{"name": "desc', '<tool_call>\n{"name": "desc', []),
        ('<tool_call>\n{"name": "now", "arguments": {"a": "}', "", [("now", '{"a": "}', True)]),
        ('<tool_call>\n{"name": "now", "arguments": {"a": "\\', "", [("now", '{"a": "', True)]),
        ('<tool_call>\n{"name": "now", "arguments": {}\n', "", [("now", "{}", True)]),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n', "", [("now", "{}", False)]),
    ],
)  # fmt: skip
def test_calls_are_found_as_the_server_finds_them(text, content, calls):
    assert split(text) == (content, calls)
    parser = Parser(FORMATS["hermes"], dict.fromkeys(NAMES, {}), think=None, most_calls=1)
    pieces = [*parser.feed(text), *parser.finish()]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Text)) == content
    assert [piece.name for piece in pieces if isinstance(piece, CallBegin)] == [name for name, _, _ in calls]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert arguments == "".join(arguments for _, arguments, _ in calls)


def test_there_may_be_several_calls():
    text = "a " + written() + "\n" + written("now", "{}") + " b"
    assert split(text, most=None) == ("a b", [("describe", '{"age": 3}', False), ("now", "{}", False)])


def test_space_before_a_call_is_no_text_where_it_is_dropped():
    assert split(" \n" + written()) == (" \n", [("describe", '{"age": 3}', False)])
    assert split(" \n" + written(), drops_space=True) == ("", [("describe", '{"age": 3}', False)])
    assert split(" \n", drops_space=True) == (" \n", [])


def test_the_places_of_calls_are_known():
    text = "I look. " + written(space="")
    _, (call,) = split_calls(text, NAMES, most=1, drops_space=False) or ("", [])
    assert text[call["begin"] :].startswith("<tool_call>") and text[call["arguments_begin"] :].startswith('{"age": 3}')


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>',
        '<tool_call>{"id": 1, "name": "now", "arguments": {"a',
        '<tool_call>{"name": "now", "arguments": {}} more',
        '<tool_call>{"name": "now", "arguments": {}}\n</tool_c',
    ],
)
def test_calls_that_are_written_otherwise_are_not_judged(text):
    assert split(text) is None
