"""Tool calls and reasoning in texts: the same in any pieces, by an oracle that reads whole texts, without loss."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.server.parse.formats import FORMATS, THINK, ThinkTags, format_of
from jaxinfer.server.parse.machine import Parser
from jaxinfer.server.parse.pieces import CallArguments, CallBegin, CallEnd, Piece, Text, Thought, joined

TOOLS: dict[str, dict[str, Any]] = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "say": {"properties": {"text": {"type": "string"}, "loud": {"type": "boolean"}, "list": {"type": "array"}}},
    "now": {"properties": {}},
}


def parsed(name: str, *parts: str, **options: Any) -> list[Piece]:
    parser = Parser(FORMATS[name], TOOLS, **options)
    found = [piece for part in parts for piece in parser.feed(part)]
    return joined(found + parser.finish())


def calls_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    names = {piece.index: piece.name for piece in pieces if isinstance(piece, CallBegin)}
    arguments = dict.fromkeys(names, "")
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    return [(names[index], arguments[index]) for index in sorted(names)]


def content_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def thought_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Thought))


arguments = st.fixed_dictionaries(
    {},
    optional={"a": st.integers(-9, 99), "text": st.text('ab"\\{}[]é日\n<>/', max_size=8), "list": st.lists(st.none())},
)
json_calls = st.builds(
    lambda name, given, reverse, ascii_only: json.dumps(
        {"arguments": given, "name": name} if reverse else {"name": name, "arguments": given}, ensure_ascii=ascii_only
    ),
    st.sampled_from([*TOOLS, "unknown"]), arguments, st.booleans(), st.booleans(),
)  # fmt: skip
words = st.sampled_from(
    ["Let me see. ", "<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", "\n", "<", "[", "]", ";", ","]
)
xml_calls = st.builds(
    lambda name, given: f"<function={name}>\n"
    + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    + "</function>",
    st.sampled_from([*TOOLS, "unknown"]), arguments,
)  # fmt: skip
wrapped = (json_calls | xml_calls).map(lambda call: f"<tool_call>\n{call}\n</tool_call>")
arrays = st.lists(json_calls, max_size=3).map(lambda calls: f"<tool_call>[{', '.join(calls)}]</tool_call>")
texts = st.lists(words | wrapped | json_calls | xml_calls | arrays, max_size=6).map("".join)


@st.composite
def cut_texts(draw: Any) -> list[str]:
    """A text in pieces; some of them with a character changed, so that calls are malformed."""
    text = draw(texts)
    if text and draw(st.booleans()):
        place = draw(st.integers(0, len(text) - 1))
        text = text[:place] + draw(st.sampled_from(['"', "{", "}", "<", "x", ""])) + text[place + 1 :]
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
@given(parts=cut_texts(), is_thinking=st.booleans())
@settings(max_examples=300)
def test_pieces_depend_on_the_text_alone(name, parts, is_thinking):
    whole = parsed(name, "".join(parts), is_thinking=is_thinking)
    assert parsed(name, *parts, is_thinking=is_thinking) == whole
    assert parsed(name, *"".join(parts), is_thinking=is_thinking) == whole


@given(
    before=st.sampled_from(["", "\n"]),
    thoughts=st.lists(words.filter(lambda word: word != "</think>"), max_size=4),
    is_open=st.booleans(),
    is_thinking=st.booleans(),
    place=st.integers(0, 40),
)
def test_reasoning_ends_where_its_last_tag_does(before, thoughts, is_open, is_thinking, place):
    reasoning = "".join(thoughts) + ("" if is_open else "</think>")
    reasoning = reasoning if is_thinking else f"{before}<think>{reasoning}"
    text = reasoning if is_open else f"{reasoning}\nSo.</think>"
    parser = Parser(FORMATS["hermes"], TOOLS, is_thinking=is_thinking)
    for part in (text[:place], text[place:]):
        parser.feed(part)
    parser.finish()
    assert parser.reasoning_end == len(reasoning)
    without = Parser(FORMATS["hermes"], TOOLS)
    without.feed("So. <think>no</think>")
    assert without.reasoning_end == 0


@pytest.mark.parametrize("name", FORMATS)
@given(parts=cut_texts(), is_thinking=st.booleans())
@settings(max_examples=300)
def test_nothing_is_lost(name, parts, is_thinking):
    """Without markers and space, the pieces have the characters of the text, in its order, but for names and keys."""
    text = "".join(parts)
    pieces = parsed(name, text, is_thinking=is_thinking)
    kept = content_of(pieces) + thought_of(pieces)
    if not calls_of(pieces):
        marks = re.compile(r"<think>|</think>|<tool_call>\s*\[\s*\]|</tool_call>|\s")
        assert sorted(marks.sub("", kept)) == sorted(marks.sub("", text)) or "<tool_call>" in text
    position = 0
    for piece in pieces:
        if isinstance(piece, Text | Thought):
            for word in piece.text.split():
                position = text.index(word[0], position) + 1
    indices = [piece.index for piece in pieces if isinstance(piece, CallBegin)]
    assert indices == list(range(len(indices)))
    assert [piece.index for piece in pieces if isinstance(piece, CallEnd)] == indices


def oracle(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text whose calls are all well formed, in Hermes' format."""
    content, calls, position, decoder = "", [], 0, json.JSONDecoder()
    for found in re.finditer(r"<tool_call>\s*", text):
        if found.start() < position:
            continue
        call, end = decoder.raw_decode(text, found.end())
        content += text[position : found.start()]
        begin = text.index("{", re.compile(r'"arguments":\s*').search(text, found.end()).end())
        _, last = decoder.raw_decode(text, begin)
        calls.append((call["name"], text[begin:last]))
        position = text.index("</tool_call>", end) + len("</tool_call>")
        position += len(text[position:]) - len(text[position:].lstrip())
    return content + text[position:], calls


known = json_calls.filter(lambda call: json.loads(call)["name"] in TOOLS)
well_formed = st.lists(
    st.sampled_from(["Let me see. ", "{no call}", "a < b", "\n"])
    | known.map(lambda call: f"<tool_call>\n{call}\n</tool_call>"),
    max_size=6,
).map("".join)


@given(text=well_formed)
@settings(max_examples=500)
def test_calls_are_those_of_an_oracle(text):
    pieces = parsed("hermes", text)
    content, calls = oracle(text)
    assert calls_of(pieces) == calls
    assert content_of(pieces) == content


@given(calls=st.lists(known, min_size=1, max_size=4), separator=st.sampled_from(["; ", ";\n"]))
def test_calls_of_llama_and_arrays_are_the_same(calls, separator):
    expected = [(json.loads(call)["name"], json.loads(call)["arguments"]) for call in calls]
    for text, name in (
        (separator.join(calls), "llama3_json"),
        ("<|python_tag|>" + separator.join(calls), "llama3_json"),
        (f"<tool_call>[{','.join(calls)}]</tool_call>", "smollm2"),
    ):
        pieces = parsed(name, text)
        assert [(name, json.loads(given)) for name, given in calls_of(pieces)] == expected and not content_of(pieces)


@given(given=arguments)
def test_tags_become_json_by_the_schema(given):
    text = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in given.items()
    )
    pieces = parsed("qwen3_coder", f"<tool_call>\n<function=say>\n{text}</function>\n</tool_call>")
    ((name, found),) = calls_of(pieces)
    expected = dict(given)
    if "</parameter>" in str(given) or "\n<" in str(given.get("text", "")):
        return
    assert name == "say" and json.loads(found) == expected


ANSWER_IN_JSON = '{"name": "Ada", "parameters": {}}'
UNKNOWN_TOOL = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
NOW = '{"name": "now", "arguments": {}}'
IN_TEXT = '{"name": "now", "arguments": "{}"}'
CASES = {
    "two calls in one piece": (
        "hermes",
        '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call><tool_call>{"name":"now","arguments":{}}</tool_call>',
        "", [("add", '{"a":1}'), ("now", "{}")],
    ),
    "a stray marker": (
        "hermes", '<tool_call> I mean <tool_call>{"name": "add", "arguments": {"a": {"}": 1}}}</tool_call>',
        "<tool_call> I mean ", [("add", '{"a": {"}": 1}}')],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    "arguments first": (
        "hermes", '<tool_call>{"arguments": {"a": 2}, "name": "add"}</tool_call>', "", [("add", '{"a": 2}')],
    ),
    "no tool": ("hermes", UNKNOWN_TOOL, UNKNOWN_TOOL, []),
    "a brace too many": (
        "hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>ok', "}ok", [("now", "{}")],
    ),
    "escapes stay": (
        "hermes", '<tool_call>{"name": "say", "arguments": {"text": "\\u00e9 é"}}</tool_call>',
        "", [("say", '{"text": "\\u00e9 é"}')],
    ),
    "a tag in a string": (
        "hermes", '<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>',
        "", [("say", '{"text": "</tool_call>"}')],
    ),
    "JSON that is an answer": ("llama3_json", ANSWER_IN_JSON, ANSWER_IN_JSON, []),
    "JSON after text": ("llama3_json", f"So: {ANSWER_IN_JSON}", f"So: {ANSWER_IN_JSON}", []),
    "parameters": ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    "tags without the outer one": (
        "qwen3_coder", "<function=say>\n<parameter=text>\nhi\n</parameter>\n</function>",
        "", [("say", '{"text": "hi"}')],
    ),
    "an unclosed tag": (
        "qwen3_coder",
        "<tool_call>\n<function=say>\n<parameter=text>\na\n<parameter=loud>\ntrue\n</function>\n</tool_call>",
        "", [("say", '{"text": "a", "loud": true}')],
    ),
    "an empty array": ("smollm2", "<tool_call>[]</tool_call>", "", []),
    "words in place of the closing tag": (
        "hermes", f"<tool_call>{NOW} and then some words </tool_call> ok", " and then some words ok", [("now", "{}")],
    ),
    "arguments as a text": (
        "hermes", f"<tool_call>{IN_TEXT}</tool_call>", f"<tool_call>{IN_TEXT}</tool_call>", [],
    ),
    "false calls in each other": (
        "hermes", '<tool_call>{"a":[' * 999 + "]}" * 999, '<tool_call>{"a":[' * 999 + "]}" * 999, [],
    ),
    "words after a bare function": (
        "qwen3_coder", "<function=now>\n</function>\nNow I wait.", "\nNow I wait.", [("now", "{}")],
    ),
    "a function without its end": (
        "qwen3_coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n<function=now>\n</function>",
        "", [("add", '{"a": 1}'), ("now", "{}")],
    ),
    "a wrapper without the function's end": (
        "qwen3_coder", "<tool_call><function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>bye now",
        "bye now", [("add", '{"a": 1}')],
    ),
    "two functions in one wrapper": (
        "qwen3_coder", "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
        "", [("now", "{}"), ("now", "{}")],
    ),
    "a value that is cut": ("qwen3_coder", "<function=add>\n<parameter=a>\n12", "", [("add", '{"a": 12')]),
    "no number of JSON": (
        "qwen3_coder", "<function=add>\n<parameter=a>\nNaN\n</parameter>\n</function>", "", [("add", '{"a": "NaN"}')],
    ),
    "a separator before words": ("llama3_json", f"{NOW}; then text", "; then text", [("now", "{}")]),
    "half a marker": ("llama3_json", " <|py", " <|py", []),
    "words in an array": (
        "smollm2", f"<tool_call>[{NOW}, nope]</tool_call>x] y]", ", nope]x] y]", [("now", "{}")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, text, content, calls", CASES.values(), ids=CASES)
def test_what_models_write(name, text, content, calls):
    pieces = parsed(name, text)
    assert (content_of(pieces), calls_of(pieces)) == (content, calls)


def test_a_call_that_is_cut_says_so():
    pieces = parsed("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1')
    assert calls_of(pieces) == [("add", '{"a": 1')] and pieces[-1] == CallEnd(0, is_cut=True)
    assert content_of(parsed("hermes", '<tool_call>{"na')) == '<tool_call>{"na'


@pytest.mark.parametrize("name, call", [("hermes", '{"name": "now"}'), ("smollm2", '[{"name": "now"}]')])
def test_a_closing_marker_that_is_cut_is_no_content(name, call):
    for end in range(len("</tool_call>") + 1):
        pieces = parsed(name, f"<tool_call>{call}\n" + "</tool_call>"[:end])
        assert calls_of(pieces) == [("now", "{}")] and content_of(pieces) == ""
    assert content_of(parsed(name, f"<tool_call>{call}</tool_call> 1 <")) == "1 <"
    assert content_of(parsed(name, f"<tool_call>{call} and 1 <")) == " and 1 <"


def test_reasoning_comes_first_and_is_no_content():
    pieces = parsed("hermes", "<think>\nWhich tool? <tool_call>\n</think>\n\nThe sum is 3. <think>")
    assert thought_of(pieces) == "\nWhich tool? <tool_call>\n" and content_of(pieces) == "The sum is 3. <think>"
    pieces = parsed("hermes", 'so</think><tool_call>{"name": "now"}</tool_call>', is_thinking=True)
    assert thought_of(pieces) == "so" and calls_of(pieces) == [("now", "{}")]
    ends = ThinkTags(call_ends_it=True)
    pieces = parsed("hermes", 'hm <tool_call>{"name": "now"}</tool_call>', is_thinking=True, think=ends)
    assert thought_of(pieces) == "hm " and calls_of(pieces) == [("now", "{}")]
    assert thought_of(parsed("hermes", "never closed", is_thinking=True)) == "never closed"
    assert content_of(parsed("hermes", "<think>x</think>y", think=None)) == "<think>x</think>y"


def test_calls_beyond_the_most_are_left_out():
    text = '<tool_call>{"name": "now"}</tool_call>'
    for more in (text, text[:-20], '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' + text):
        pieces = parsed("hermes", text + more, most_calls=1)
        assert calls_of(pieces) == [("now", "{}")] and content_of(pieces) == "" and pieces[-1] == CallEnd(0)
    assert content_of(parsed("hermes", f"{text}\n{text} done", most_calls=1)) == "done"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\d+\.", "\\d+\\."),
        (r"C:\dir\users", "C:\\dir\\users"),
        (r"a\n\"\u00e9\/", 'a\n"\u00e9/'),
        ("one\ntwo\\\nthree", "one\ntwo\\\nthree"),
        (r"\u12", "\\u12"),
        (r"\u12\u0041", "\\u12A"),
    ],
)
def test_backslashes_that_escape_nothing_are_those_of_the_text(written, read):
    text = f'<tool_call>{{"name": "say", "arguments": {{"text": "{written}"}}}}</tool_call>'
    for parts in ([text], list(text)):
        ((name, arguments),) = calls_of(parsed("hermes", *parts))
        assert name == "say" and json.loads(arguments) == {"text": read}


def test_without_tools_a_call_is_text():
    parser = Parser(FORMATS["hermes"], {}, think=THINK)
    text = '<tool_call>{"name": "now"}</tool_call>'
    assert content_of(parser.feed(text) + parser.finish()) == text


@pytest.mark.parametrize(
    "template, name",
    [
        ('{{ "<tool_call>" }} {"name": ..., "arguments": ...}', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p>", "qwen3_coder"),
        ("respond with {\"name\": f, \"parameters\": {}} <|python_tag|>", "llama3_json"),
        ("<tool_call>[\n{}]</tool_call>", "smollm2"),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_the_format_is_found_in_the_template(template, name):
    found = format_of(template)
    assert (found and found.name) == name
