"""Stop strings and held-back characters against a slow oracle that looks at the whole text after every token."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.frontend.detokenizer import IncrementalDetokenizer
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer
from tests.tiny_checkpoints import byte_level_tokenizer, write_tokenizer

LETTERS = "abé日"
# Words that overlap each other and cut characters, so that stop strings begin and end anywhere in them.
WORDS = (b"ab", b"ba", b"aab", b"abab", b"b\xc3", b"\xa9a", b"a\xe6\x97", b"\xa5b", b"\xa5ab\xc3", b"\xff", b"a\xff")
TOKENS = (*b"ab", *"é日".encode(), *range(256, 256 + len(WORDS)))
TOKENIZER = byte_level_tokenizer(WORDS)
token_lists = st.lists(st.sampled_from(TOKENS), max_size=12)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=3)


@st.composite
def tokens_and_stops(draw):
    """Tokens, and stop strings most of which occur in their text, or begin to."""
    token_ids, stops = draw(token_lists), draw(stop_lists)
    text = TOKENIZER.decode(token_ids)
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(text)))
        piece = text[begin : begin + draw(st.integers(1, 5))].replace("\ufffd", "") + draw(
            st.sampled_from(["", "", "a"])
        )
        stops += [piece] if piece else []
    return token_ids, stops


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, fast=TOKENIZER)
    return Tokenizer(directory)


def complete(tokenizer, token_ids):
    """The text of all complete characters."""
    return tokenizer.decode(token_ids).rstrip("\ufffd")


def earliest_stop(text, stops, start):
    """(begin, end, stop) of the stop string that ends first in text[start:], the longest of those that end there."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text[start:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), end, longest
    return None


def oracle(tokenizer, token_ids, stops, *, include=False, min_tokens=0):
    """(text, stop string or None, number of tokens taken)."""
    start = len(complete(tokenizer, token_ids[:min_tokens]))
    texts = [complete(tokenizer, token_ids[:count]) for count in range(len(token_ids) + 1)]
    for count, text in enumerate([*texts[1:], tokenizer.decode(token_ids)], start=1):
        found = earliest_stop(text, stops, start) if count > min_tokens else None
        if found:
            begin, end, stop = found
            return text[: end if include else begin], stop, min(count, len(token_ids))
    return tokenizer.decode(token_ids), None, len(token_ids)


def run(tokenizer, token_ids, stops, **params):
    """(deltas after each token and after the end, stop string or None, number of tokens taken)."""
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(stop=stops, max_tokens=None, **params))
    deltas = []
    for count, token in enumerate(token_ids, start=1):
        stop = detokenizer.append(token)
        if stop is None and count == len(token_ids):
            stop = detokenizer.finish()
        start = sum(map(len, deltas))
        is_last = stop is not None or count == len(token_ids)
        deltas.append(detokenizer.text[start:] if is_last else detokenizer.shown(start))
        if stop is not None:
            return deltas, stop, count
    return deltas, None, len(token_ids)


@given(case=tokens_and_stops(), include=st.booleans(), min_tokens=st.integers(0, 4))
def test_text_and_tokens_end_where_the_oracle_ends_them(tokenizer, case, include, min_tokens):
    token_ids, stops = case
    deltas, stop, count = run(tokenizer, token_ids, stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    expected = oracle(tokenizer, token_ids, stops, include=include, min_tokens=min_tokens)
    assert ("".join(deltas), stop, count) == expected


@given(case=tokens_and_stops(), min_tokens=st.integers(0, 4))
def test_a_delta_holds_back_what_may_begin_a_stop_string_and_nothing_else(tokenizer, case, min_tokens):
    token_ids, stops = case
    deltas, stop, count = run(tokenizer, token_ids, stops, min_tokens=min_tokens)
    start = len(complete(tokenizer, token_ids[:min_tokens]))
    for number, shown in enumerate(accumulate(deltas[:-1]), start=1):
        text = complete(tokenizer, token_ids[:number])
        countable = text[start:] if number > min_tokens else ""
        held = max(k for stop in stops for k in range(len(stop)) if countable.endswith(stop[:k]))
        assert shown == text[: len(text) - held]


@given(case=tokens_and_stops(), include=st.booleans())
def test_what_a_delta_showed_is_part_of_the_final_text(tokenizer, case, include):
    token_ids, stops = case
    deltas, _, _ = run(tokenizer, token_ids, stops, include_stop_str_in_output=include)
    final, _, _ = oracle(tokenizer, token_ids, stops, include=include)
    for shown in accumulate(deltas):
        assert final.startswith(shown)


@given(text=st.text(LETTERS, min_size=1, max_size=10), stops=stop_lists, data=st.data())
def test_the_text_does_not_depend_on_how_it_is_cut_into_tokens(tokenizer, text, stops, data):
    """Bytes one by one, and any greedier reading of the same bytes."""
    single, left, words = list(text.encode()), text.encode(), {word: 256 + i for i, word in enumerate(WORDS)}
    chunked = []
    while left:
        starts = [left[:1], *(word for word in words if left.startswith(word))]
        piece = data.draw(st.sampled_from(starts))
        chunked.append(words.get(piece, piece[0]))
        left = left[len(piece) :]
    one, other = run(tokenizer, single, stops), run(tokenizer, chunked, stops)
    assert "".join(one[0]) == "".join(other[0])
    assert one[1] == other[1]


def text_and_stop(tokenizer, token_ids, stops, **params):
    deltas, stop, _ = run(tokenizer, token_ids, stops, **params)
    return "".join(deltas), stop


def test_a_stop_string_inside_one_token_cuts_the_token(tokenizer):
    assert text_and_stop(tokenizer, [256 + WORDS.index(b"aab")], ["ab"]) == ("a", "ab")


def test_a_stop_string_may_span_many_tokens(tokenizer):
    assert text_and_stop(tokenizer, [*"ab日é".encode()], ["b日é"]) == ("a", "b日é")


def test_of_overlapping_stop_strings_the_first_completed_one_wins(tokenizer):
    assert text_and_stop(tokenizer, [*b"abba"], ["abba", "bb"]) == ("a", "bb")
    assert text_and_stop(tokenizer, [256 + WORDS.index(b"abab")], ["bab", "ba"]) == ("a", "ba")


def test_of_stop_strings_that_end_together_the_longest_wins(tokenizer):
    for stops in (["b", "ab"], ["ab", "b"]):
        assert text_and_stop(tokenizer, [*b"ab"], stops) == ("", "ab")


def test_a_false_start_of_a_stop_string_is_shown_as_soon_as_it_is_one(tokenizer):
    deltas, stop, _ = run(tokenizer, [*b"aabb"], ["aaa"])
    assert deltas == ["", "", "aab", "b"]
    assert stop is None


def test_a_stop_string_that_began_before_min_tokens_does_not_count(tokenizer):
    assert text_and_stop(tokenizer, [*b"abab"], ["ab"], min_tokens=1) == ("ab", "ab")
    assert text_and_stop(tokenizer, [*b"ab"], ["ab"], min_tokens=1) == ("ab", None)


def test_incomplete_characters_at_the_end_may_complete_a_stop_string(tokenizer):
    assert text_and_stop(tokenizer, [*b"ab\xe6\x97"], ["b\ufffd"]) == ("a", "b\ufffd")


def test_without_stop_strings_nothing_but_incomplete_characters_is_held_back(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams())
    deltas = []
    for byte in "aé".encode():
        detokenizer.append(byte)
        deltas.append(detokenizer.shown(sum(map(len, deltas))))
    assert deltas == ["a", "", "é"]


def test_the_end_may_be_told_twice(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(stop="b"))
    for byte in b"a\xe6":
        detokenizer.append(byte)
    assert (detokenizer.finish(), detokenizer.finish()) == (None, None)
    assert detokenizer.text == "a\ufffd"


def test_what_follows_a_stop_string_inside_its_token_is_dropped(tokenizer):
    """The beginning of a character included, which the end would otherwise turn into U+FFFD."""
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(stop="a"))
    assert detokenizer.append(256 + WORDS.index(b"a\xe6\x97")) == "a"
    assert detokenizer.finish() is None
    assert detokenizer.text == ""
