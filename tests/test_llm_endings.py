"""Every way in which a generation ends, and the text, tokens and reasons that it ends with."""

import pytest

from tests.tiny_checkpoints import END, MAX_LEN, TOOL, complete, story_ids, story_llm, story_text, token_id


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with story_llm(tmp_path_factory) as llm:
        yield llm


def test_end_of_sequence_is_a_token_of_the_output_but_not_of_its_text(llm):
    completion = complete(llm, "Say a", skip_special_tokens=False)
    assert completion.token_ids == story_ids("a")
    assert completion.text == "The quick brown fox jumps over."


def test_a_stop_token_is_named_as_the_reason(llm):
    completion = complete(llm, "Say a", stop_token_ids=[token_id(" fox")])
    assert (completion.text, completion.finish_reason) == ("The quick brown", "stop")
    assert completion.stop_reason == token_id(" fox")
    assert completion.token_ids == story_ids("a")[:4]


@pytest.mark.parametrize(
    ("stop", "text", "stop_reason"),
    [
        ("fox", "The quick brown ", "fox"),
        ("own fox ju", "The quick br", "own fox ju"),
        (["jumps", "quick"], "The ", "quick"),
        (["quick brown", "brown"], "The ", "quick brown"),
        (["ick brown", "own"], "The qu", "ick brown"),
        (["rown f", "own"], "The quick br", "own"),
        ("The quick brown fox jumps over.", "", "The quick brown fox jumps over."),
        ("T", "", "T"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(llm, stop, text, stop_reason):
    completion = complete(llm, "Say a", stop=stop)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", stop_reason)
    including = complete(llm, "Say a", stop=stop, include_stop_str_in_output=True)
    assert including.text == text + stop_reason
    assert including.token_ids == completion.token_ids


def test_tokens_end_with_the_one_that_completes_the_stop_string(llm):
    assert complete(llm, "Say a", stop="own fox ju").token_ids == story_ids("a")[:5]


@pytest.mark.parametrize("stop", ["é", "ïv", "日", "日本", "🎉", "本 🎉!"])
def test_a_stop_string_of_characters_that_tokens_cut_is_found(llm, stop):
    text = story_text("b")
    completion = complete(llm, "Say b", stop=stop)
    assert (completion.text, completion.stop_reason) == (text[: text.index(stop)], stop)


def test_a_stop_string_that_does_not_occur_changes_nothing(llm):
    assert complete(llm, "Say b", stop=["nowhere", "!!"]) == complete(llm, "Say b")


def test_a_stop_string_in_the_prompt_does_not_count(llm):
    assert complete(llm, "fox Say a", stop="x Say").text == story_text("a")


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(llm):
    completion = complete(llm, "Say a", stop="fox", max_tokens=4)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("The quick brown ", "stop", "fox")


def test_a_stop_string_half_done_at_the_last_allowed_token_is_text(llm):
    completion = complete(llm, "Say a", stop="fox jumps", max_tokens=4)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "The quick brown fox",
        "length",
        None,
    )


def test_max_tokens_ends_with_length(llm):
    completion = complete(llm, "Say c", max_tokens=5)
    assert (len(completion.token_ids), completion.finish_reason, completion.stop_reason) == (5, "length", None)


def test_end_of_sequence_as_the_last_allowed_token_is_a_stop(llm):
    assert complete(llm, "Say a", max_tokens=8).finish_reason == "stop"
    assert complete(llm, "Say a", max_tokens=7).finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_max_model_len_bounds_prompt_and_output_together(llm, max_tokens):
    completion = complete(llm, "x" * 99 + "c", max_tokens=max_tokens)
    assert (len(completion.token_ids), completion.finish_reason) == (MAX_LEN - 100, "length")
    assert completion.text == story_text("c", MAX_LEN - 100)


def test_the_longest_prompt_leaves_room_for_one_token(llm):
    completion = complete(llm, "x" * (MAX_LEN - 2) + "a")
    assert (completion.text, completion.finish_reason) == ("The", "length")


def test_min_tokens_forbids_end_of_sequence_before(llm):
    """The model continues with its second choice, and the end may come after."""
    completion = complete(llm, "Say a", min_tokens=12, max_tokens=14)
    assert completion.text == story_text("a") + story_text("c", 7)
    assert completion.finish_reason == "length"
    assert complete(llm, "Say a", min_tokens=7).token_ids == story_ids("a")
    assert complete(llm, "Say a", min_tokens=8).token_ids != story_ids("a")


def test_min_tokens_forbids_stop_tokens_and_does_not_look_for_stop_strings(llm):
    tock = token_id("tock ")
    completion = complete(llm, "Say c", stop_token_ids=[tock], min_tokens=3, max_tokens=9)
    assert tock not in completion.token_ids[:3]
    completion = complete(llm, "Say c", stop="tock", min_tokens=3)
    assert (completion.text, completion.stop_reason) == ("tick tock tack tick ", "tock")


def test_ignore_eos_goes_on_after_the_end(llm):
    completion = complete(llm, "Say a", ignore_eos=True, max_tokens=10)
    assert completion.token_ids == [*story_ids("a"), *story_ids("c", 2)]
    assert completion.text == story_text("a") + "tick tock "
    assert completion.finish_reason == "length"


def test_special_tokens_are_shown_if_asked_for(llm):
    assert complete(llm, "Say f", max_tokens=3).text == "call now "
    assert complete(llm, "Say f", max_tokens=3, skip_special_tokens=False).text == f"call {TOOL}now "
    ignoring = complete(llm, "Say a", ignore_eos=True, max_tokens=8, skip_special_tokens=False)
    assert ignoring.text == f"The quick brown fox jumps over.{END}"


def test_text_is_not_made_if_not_asked_for(llm):
    completion = complete(llm, "Say a", detokenize=False)
    assert (completion.text, completion.token_ids) == ("", story_ids("a"))


@pytest.mark.parametrize("key", ["b", "d", "e"])
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_an_incomplete_character_at_the_end_is_a_replacement_character(llm, key, max_tokens):
    completion = complete(llm, f"Say {key}", max_tokens=max_tokens)
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
