"""The grammar of skeletons: what it accepts is read back as it was written, and what it must not accept it refuses."""

import functools
import random
import re
import sys

import numpy as np
import pytest

from jaxinfer.constraints.guidance import GuidanceAutomaton
from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.skeleton.grammar import SkeletonGrammar
from jaxinfer.skeleton.plan import parse_skeleton
from tests.constraints.guided import EOS, EOS_TOO, SIZE, TOKENIZER, guidance
from training.plans import draw_skeleton, draw_task

MARKERS = {tag: TOKENIZER.token_to_id(tag) for tag in ("[PLAN]", "[DIRECT]", "[END]")}
LINE = re.compile(r"(\d+)\.<([1-9]\d{0,3})><([^<>]+)>\[(-|\d+(?:,\d+)*)\]([^\n[]+)")


@functools.cache
def automaton(markers: bool = True, **options) -> GuidanceAutomaton:
    text = SkeletonGrammar(**options).lark(MARKERS if markers else {})
    return guidance().compile(StructuredOutputsParams(grammar=text))


def on(state, held) -> list[int]:
    bits = np.unpackbits(held.bits(state).view(np.uint8), bitorder="little")[:SIZE]
    return np.flatnonzero(bits).tolist()


def state_after(held, text):
    """The state after the tokens of a text; None if one is not allowed."""
    state = held.start
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        state = state if state is None else held.advance(state, token)
    return state


def accepts(text, **options):
    held = automaton(**options)
    state = state_after(held, text)
    return state is not None and held.is_final(state)


def random_text(held, rng, patience):
    """What a random walk writes, which is led to an end when its patience is over."""
    closing = [MARKERS["[END]"], *[TOKENIZER.token_to_id(text) for text in ("\u010a", "]", ">", "[")]]
    state, written = held.start, []
    while not held.is_final(state):
        choices = on(state, held)
        hurries = len(written) >= patience
        ends = [token for token in closing if token in choices]
        token = ends[0] if ends and (hurries or rng.random() < 0.2) else rng.choice(choices)
        state = held.advance(state, token)
        assert state is not None
        written.append(token)
    return TOKENIZER.decode(written, skip_special_tokens=False)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_accepted_is_read_back_as_it_was_written(seed, direct):
    held = automaton(direct_allowed=direct, max_points=5, max_title=12, tools=("Search", "\u8ba1\u7b97"))
    text = random_text(held, random.Random(seed), 3 * seed)
    skeleton = parse_skeleton(text, 10**4)
    assert text.endswith("[END]") and skeleton.is_direct == text.startswith("[DIRECT]\n")
    if skeleton.is_direct:
        assert direct and skeleton.answer == text[len("[DIRECT]\n") : -len("[END]")].strip() != ""
        return
    lines = [LINE.fullmatch(line) for line in text.removeprefix("[PLAN]\n").removesuffix("\n[END]").split("\n")]
    assert 1 <= len(lines) == len(skeleton.points) <= 5
    for number, (line, point) in enumerate(zip(lines, skeleton.points, strict=True), start=1):
        assert line is not None
        written_ids = [] if line[4] == "-" else [int(other) for other in line[4].split(",")]
        assert point.id == int(line[1]) == number
        assert point.stated_length == int(line[2])
        assert (point.tool or "None") == line[3] in ("None", "Search", "\u8ba1\u7b97")
        assert point.dependencies == tuple(dict.fromkeys(written_ids)) and all(other < number for other in written_ids)
        assert point.title == line[5].strip() and len(line[5]) <= 12


@pytest.mark.parametrize("seed", range(60))
def test_every_prefix_of_the_plans_of_the_embedded_model_is_accepted(seed):
    rng, held = random.Random(seed), automaton()
    plan = draw_skeleton(rng, draw_task(rng, held_out=bool(seed % 2))).plan()
    for answer in (plan, "[DIRECT]\nThe doctor is Runa Frost, who visits her patients by bicycle.\n[END]"):
        state = held.start
        for token in TOKENIZER.encode(answer, add_special_tokens=False).ids:
            assert token in on(state, held)
            state = held.advance(state, token)
        assert held.ends(state) and on(state, held) == sorted((EOS, EOS_TOO))


def test_tags_are_written_as_tokens_and_nothing_else_is_at_the_start():
    held = automaton()
    assert on(held.start, held) == sorted((MARKERS["[PLAN]"], MARKERS["[DIRECT]"]))
    state = held.advance(held.start, MARKERS["[DIRECT]"])
    for text in ("\n", "Yes"):
        (token,) = TOKENIZER.encode(text, add_special_tokens=False).ids[:1]
        state = held.advance(state, token)
    assert MARKERS["[PLAN]"] not in on(state, held) and MARKERS["[END]"] in on(state, held)


def test_without_tokens_for_them_tags_are_plain_text():
    held = automaton(markers=False)
    text = "[DIRECT]\nNo [EN and [[END here[END]"
    state = held.start
    for letter in text:
        ids = [token for token in on(state, held) if TOKENIZER.decode([token]) == letter]
        assert ids, f"{letter!r} is not allowed"
        state = held.advance(state, ids[0])
    assert held.is_final(state)


PLAN = "[PLAN]\n1.<40><None>[-]One\n2.<9><None>[1]Two\n[END]"


@pytest.mark.parametrize(
    "text",
    [
        PLAN,
        "[PLAN]\n1.<1234><None>[-]日本 é 🎉 (a, b): c]\n[END]",
        "[DIRECT]\nYes.\n[END]",
        "[DIRECT]\n[1] x[EN and [[END\n\nmore[END]",
        "[PLAN]\n" + "".join(f"{number}.<40><None>[-]T\n" for number in range(1, 21)) + "[END]",
        "[PLAN]\n1.<40><None>[-]" + "日" * 80 + "\n[END]",
    ],
)
def test_a_skeleton_is_accepted(text):
    assert accepts(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[PLAN]\n[END]",
        "[PLAN]1.<40><None>[-]One\n[END]",
        "[PLAN]\n2.<40><None>[-]One\n[END]",
        "[PLAN]\n1.<40><None>[-]One[END]",
        PLAN.replace("2.", "3."),
        PLAN.replace("2.", "1."),
        PLAN.replace("40", "040"),
        PLAN.replace("40", "0"),
        PLAN.replace("40", "40000"),
        PLAN.replace("40", ""),
        PLAN.replace("40", "4x"),
        PLAN.replace("None", "Search"),
        PLAN.replace("None", "none"),
        PLAN.replace("[-]", "[1]"),
        PLAN.replace("[1]", "[2]"),
        PLAN.replace("[1]", "[1,]"),
        PLAN.replace("[1]", "[]"),
        PLAN.replace("[1]", "[1,1]"),
        PLAN.replace("One", ""),
        PLAN.replace("One", " One"),
        PLAN.replace("One", "\u3000"),
        PLAN.replace("One", "O\u2028ne"),
        PLAN.replace("One", "O\rne"),
        PLAN.replace("One", "One [END]"),
        PLAN.replace("One", "1" * 81),
        PLAN + "\n",
        "[DIRECT]\n[END]",
        "[DIRECT]\n \n[END]",
        "[DIRECT]Yes.[END]",
        "[DIRECT]\nYes.[END]No.[END]",
        "[PLAN]\n" + "".join(f"{number}.<40><None>[-]T\n" for number in range(1, 22)) + "[END]",
    ],
)
def test_what_breaks_the_grammar_is_not_accepted(text):
    assert not accepts(text)


def test_the_options_say_what_is_accepted():
    direct, search = "[DIRECT]\nYes.[END]", PLAN.replace("<None>[1]", "<Search>[1]")
    assert accepts(direct, direct_allowed=True) and not accepts(direct, direct_allowed=False)
    assert accepts(search, tools=("Sum", "Search")) and not accepts(search, tools=("Sum",))
    assert accepts(PLAN, max_points=2) and not accepts(PLAN, max_points=1)
    assert accepts(PLAN, max_title=3) and not accepts(PLAN, max_title=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_points": 0}, "max_points must be at least 1"),
        ({"max_title": 0}, "max_title must be at least 1"),
        *(({"tools": (tool,)}, "tools must be names") for tool in ("", "a>b", "3d", " a", "a\n", "[x]")),
    ],
)
def test_options_that_no_line_could_have_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SkeletonGrammar(**options)


def test_every_space_that_reading_strips_is_excluded_from_the_first_character():
    spaces = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
    assert spaces
    for space in spaces:
        assert not accepts(PLAN.replace("One", f"{space}One")), repr(space)
        assert not accepts(f"[DIRECT]\n{space}Yes.[END]"), repr(space)
