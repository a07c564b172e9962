"""Prompts in every form that users write them, and what is refused before anything runs."""

import numpy as np
import pytest

from jaxinfer.frontend.prompts import TokenizedPrompt, as_prompt_list, check_prompt, is_conversation, tokenize_prompt
from jaxinfer.tokenizer import Tokenizer
from tests.tiny_checkpoints import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer(directory)


@pytest.mark.parametrize("prompt", ["text", "", [1, 2], {"prompt_token_ids": [1, 2]}, {"prompt": "text"}])
def test_one_prompt_is_a_list_of_one(prompt):
    assert as_prompt_list(prompt) == [prompt]


@pytest.mark.parametrize(
    "prompts", [[], ["one", "two"], [[1], [2, 3]], [[]], ["one", [1], {"prompt_token_ids": [2]}, {"prompt": "two"}]]
)
def test_a_list_of_prompts_stays_as_it_is(prompts):
    assert as_prompt_list(prompts) == prompts


def test_prompts_may_come_from_a_tuple_a_generator_or_an_array():
    assert as_prompt_list(("one", "two")) == ["one", "two"]
    assert as_prompt_list(text for text in ["one", "two"]) == ["one", "two"]
    assert as_prompt_list(np.array([5, 6])) == [[5, 6]]
    assert [list(row) for row in as_prompt_list(np.array([[5, 6], [7, 8]]))] == [[5, 6], [7, 8]]


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"bytes", bytearray(b"bytes"), np.int64(5), object()])
def test_what_is_no_prompt_and_no_list_is_refused_with_its_value(prompts):
    with pytest.raises(ValueError, match="prompts must be text, a list of token ids") as refused:
        as_prompt_list(prompts)
    assert repr(prompts) in str(refused.value)


def test_text_is_encoded_and_remembered(tokenizer):
    assert tokenize_prompt("the x", 0, tokenizer) == TokenizedPrompt(tokenizer.encode("the x"), "the x")
    assert tokenize_prompt({"prompt": "the x"}, 0, tokenizer) == tokenize_prompt("the x", 0, tokenizer)


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), np.array([3, 4]), {"prompt_token_ids": [3, 4]}, {"prompt": [3, 4]}])
def test_token_ids_need_no_tokenizer_and_become_python_integers(prompt):
    tokenized = tokenize_prompt(prompt, 0, None)
    assert tokenized == TokenizedPrompt([3, 4], None)
    assert {type(token) for token in tokenized.token_ids} == {int}


def test_token_ids_win_over_the_text_that_stands_beside_them(tokenizer):
    prompt = {"prompt": "the x", "prompt_token_ids": [3, 4]}
    assert tokenize_prompt(prompt, 0, tokenizer) == TokenizedPrompt([3, 4], "the x")


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}])
def test_text_without_a_tokenizer_is_refused_and_the_way_out_named(prompt):
    with pytest.raises(ValueError, match=r"prompt 7 is text, but this engine has no tokenizer.*prompt_token_ids"):
        tokenize_prompt(prompt, 7, None)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt 7 must be text, a list of token ids.* got None"),
        (5, "prompt 7 must be text, a list of token ids.* got 5"),
        (b"bytes", "prompt 7 must be text, a list of token ids.* got b'bytes'"),
        ([1, "2"], r"prompt 7 must hold integer token ids, got \[1, '2'\]"),
        ([1, 2.0], r"prompt 7 must hold integer token ids, got \[1, 2.0\]"),
        ([1, None], r"prompt 7 must hold integer token ids, got \[1, None\]"),
        ([True, False], r"prompt 7 must hold integer token ids, got \[True, False\]"),
        ([[1], [2]], r"prompt 7 must hold integer token ids, got \[\[1\], \[2\]\]"),
        ({"text": "hello"}, r"prompt 7 must have the key prompt or prompt_token_ids, got \['text'\]"),
        ({"prompt": "hello", "priority": 1}, r"prompt 7 has unknown keys \['priority'\]; known are prompt, "),
        ({"prompt_token_ids": "12"}, "prompt 7 must be text, a list of token ids.* got '12'"),
        ({"prompt_token_ids": [1], "cache_salt": ""}, "cache_salt of prompt 7 must be a non-empty string, got ''"),
        ({"prompt_token_ids": [1], "cache_salt": 3}, "cache_salt of prompt 7 must be a non-empty string, got 3"),
        ({"prompt_token_ids": None}, "prompt 7 must be text, a list of token ids.* got None"),
        ({"prompt": None}, "prompt 7 must be text, a list of token ids.* got None"),
        ("\ud800", r"prompt 7: the text is not valid Unicode: .*'\\ud800'"),
    ],
)
def test_a_prompt_of_no_known_form_is_refused_with_its_index_and_value(tokenizer, prompt, message):
    with pytest.raises(ValueError, match=message):
        tokenize_prompt(prompt, 7, tokenizer)


def check(token_ids):
    check_prompt(TokenizedPrompt(token_ids), 7, vocab_size=100, max_model_len=10)


def test_a_prompt_that_leaves_room_for_one_token_is_accepted():
    check([0] * 9)
    check([99])


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "prompt 7 is empty"),
        ([0] * 10, "prompt 7 has 10 tokens, which leaves no room for one more within max_model_len=10"),
        ([5, 100], "prompt 7 has token id 100, outside the vocabulary of 100"),
        ([5, -1], "prompt 7 has token id -1, outside the vocabulary of 100"),
        ([2**70], f"prompt 7 has token id {2**70}, outside the vocabulary of 100"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_with_its_index_and_the_limit(token_ids, message):
    with pytest.raises(ValueError, match=message):
        check(token_ids)


def test_a_conversation_is_a_list_of_messages_with_roles():
    message = {"role": "user", "content": "hello"}
    assert is_conversation([message])
    assert is_conversation((message, message))
    for other in ([], message, "text", ["text"], [1], [message, "text"], [{"content": "hello"}], [[message]], None):
        assert not is_conversation(other)
