"""The grammar of skeletons: what it accepts is read back as it was written, and what it must not accept it refuses."""

import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.skeleton import grammar as skeleton_grammar
from jaxinfer.skeleton.grammar import SkeletonGrammar
from jaxinfer.skeleton.plan import parse_skeleton
from jaxinfer.tokenizer import Tokenizer
from training.plans import draw_skeleton, draw_task

TOKENIZER = Tokenizer(Path(__file__).resolve().parents[2] / "checkpoints" / "tiny")
EMBEDDED = Vocabulary.from_tokenizer(TOKENIZER, 2048)
(EMBEDDED_EOS,) = TOKENIZER.encode("<|end|>")
BYTES = [bytes([byte]) for byte in range(256)]
# No markers, and tokens that go over the seams of a line.
WORDS = [
    b"[P",
    b"LAN]\n",
    b"[PLAN]\n1.<",
    b"0><None>[-]",
    b"><",
    b"]A",
    b"e\n2.<",
    b"\n[END]",
    b"[E",
    b"D]",
    b"\xe6\x97",
]
SPELLED = Vocabulary([*BYTES, *WORDS, None])
SPELLED_EOS = SPELLED.size - 1
LINE = re.compile(r"(\d+)\.<([1-9]\d{0,3})><([^<>]+)>\[(-|\d+(?:,\d+)*)\]([^\n[]+)")

VOCABULARIES = {"embedded": (EMBEDDED, EMBEDDED_EOS), "spelled": (SPELLED, SPELLED_EOS)}
AUTOMATA = {
    (name, direct): SkeletonGrammar(direct, max_points=5, max_title=12, tools=("Search", "计算")).automaton(
        words, [eos]
    )
    for name, (words, eos) in VOCABULARIES.items()
    for direct in (True, False)
}
PLAIN = SkeletonGrammar().automaton(SPELLED, [SPELLED_EOS])
PLAIN_EMBEDDED = SkeletonGrammar().automaton(EMBEDDED, [EMBEDDED_EOS])


def state_after(automaton, text):
    """The state after a text that is written byte by byte; None if it is not accepted."""
    state = automaton.start
    for byte in text.encode():
        state = state if state is None else automaton.advance(state, byte)
    return state


def accepts(text, **options):
    automaton = SkeletonGrammar(**options).automaton(SPELLED, [SPELLED_EOS]) if options else PLAIN
    state = state_after(automaton, text)
    return state is not None and automaton.is_final(state)


def random_text(automaton, vocabulary, rng, patience):
    """What a random walk writes, which is led to an end when its patience is over."""
    whole = [vocabulary.markers.get("[END]"), vocabulary.pieces.index(b"\n[END]") if vocabulary is SPELLED else None]
    whole.append(vocabulary.pieces.index(b"["))
    closing = whole + [vocabulary.pieces.index(text) for text in (b"\n", b"]", b">")]
    state, written = automaton.start, []
    while not automaton.is_final(state):
        allowed = automaton.allowed(state)
        choices = np.flatnonzero(allowed.mask())
        assert choices.size and all(int(token) in allowed for token in choices[:20])
        hurries = len(written) >= patience
        ways = (
            closing if hurries or rng.random() < 0.1 else closing[len(whole) :]
        )  # what ends all, or a part of a line only
        ends = [token for token in ways if token is not None and token in allowed]
        token = ends[0] if ends and (hurries or rng.random() < 0.3) else int(rng.choice(choices))
        state = automaton.advance(state, token)
        assert state is not None
        written.append(token)
    names = {token: text for text, token in vocabulary.markers.items()}
    return b"".join(
        names[token].encode() if token in names else vocabulary.pieces[token] or b"" for token in written
    ).decode()


@pytest.mark.parametrize("name", VOCABULARIES)
@given(seed=st.integers(0, 2**32), direct=st.booleans(), patience=st.integers(0, 120))
@settings(max_examples=120)
def test_whatever_is_accepted_is_read_back_as_it_was_written(name, seed, direct, patience):
    text = random_text(AUTOMATA[name, direct], VOCABULARIES[name][0], random.Random(seed), patience)
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
        assert (point.tool or "None") == line[3] in ("None", "Search", "计算")
        assert point.dependencies == tuple(dict.fromkeys(written_ids)) and all(other < number for other in written_ids)
        assert point.title == line[5].strip() and len(line[5]) <= 12


@pytest.mark.parametrize("seed", range(60))
def test_every_prefix_of_the_plans_of_the_embedded_model_is_accepted(seed):
    rng = random.Random(seed)
    plan = draw_skeleton(rng, draw_task(rng, held_out=bool(seed % 2))).plan()
    for answer in (plan, "[DIRECT]\nThe doctor is Runa Frost, who visits her patients by bicycle.\n[END]"):
        automaton = PLAIN_EMBEDDED
        state = automaton.start
        for token in TOKENIZER.encode(answer, add_special_tokens=False):
            assert token in automaton.allowed(state)
            state = automaton.advance(state, token)
        assert automaton.is_final(state) and EMBEDDED_EOS in automaton.allowed(state)
        assert len(automaton.allowed(state)) == 1


def test_the_embedded_model_writes_tags_as_tokens_and_nothing_else_at_the_start():
    automaton = PLAIN_EMBEDDED
    tags = {EMBEDDED.markers["[PLAN]"], EMBEDDED.markers["[DIRECT]"]}
    assert set(np.flatnonzero(automaton.allowed(automaton.start).mask())) == tags


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


@pytest.mark.parametrize(
    ("before", "allowed", "forbidden"),
    [
        ("", [b"[P", b"[PLAN]\n1.<", b"[D"], [b"[X", b"[PLAN]1", b"[DIRECT]\n\n"]),
        ("[PLAN]\n", [b"1", b"1.", b"1.<4"], [b"1x", b"1.4", b"12", b"1.<0"]),
        ("[PLAN]\n1.", [b"<", b"<1", b"<40><None>[-]T"], [b"<x", b"<>", b"<40><None>[-]\n"]),
        ("[PLAN]\n1.<40", [b"><", b"0>", b"><No"], [b">x", b">[", b"000>", b"><no"]),
        ("[PLAN]\n1.<40><None>[-]T", [b"i\n", b"\n2", b"\n[END]"], [b"i[", b"\n3", b"\n\n", b"\xff", b"a\xc3("]),
        ("[DIRECT]\nYes", [b"[END]", b"[EN[", b"\n\n[END]"], [b"[END].", b"\x80"]),
    ],
)
def test_a_token_is_allowed_only_if_all_its_characters_are(before, allowed, forbidden):
    vocabulary = Vocabulary([*BYTES, *allowed, *forbidden, None])
    automaton = SkeletonGrammar().automaton(vocabulary, [vocabulary.size - 1])
    tokens = automaton.allowed(state_after(automaton, before))
    assert [256 + index in tokens for index in range(len(allowed))] == [True] * len(allowed)
    assert [256 + len(allowed) + index in tokens for index in range(len(forbidden))] == [False] * len(forbidden)


def test_states_are_not_changed_by_drafts_that_go_on_from_them():
    state = state_after(PLAIN, "[PLAN]\n1.<40><None>[-]T")
    before = PLAIN.allowed(state).mask()
    following = PLAIN.advance(state, ord("i"))
    for token in range(SPELLED.size):
        PLAIN.advance(state, token)
        PLAIN.advance(following, token)
    assert PLAIN.advance(state, ord("i")) == following
    assert (
        SkeletonGrammar().automaton(SPELLED, [SPELLED_EOS]).allowed(PLAIN.start).mask()
        == PLAIN.allowed(PLAIN.start).mask()
    ).all()
    PLAIN._allowed.clear()
    assert (PLAIN.allowed(state).mask() == before).all()


def test_every_space_that_reading_strips_is_excluded_from_the_first_character():
    spaces = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
    assert spaces and not any(space in skeleton_grammar._FIRST_OF_TITLE for space in spaces)
    assert not any(space in skeleton_grammar._FIRST_OF_TEXT for space in spaces)
