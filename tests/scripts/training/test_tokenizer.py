"""The tokenizer of the embedded checkpoint: lossless, tags visible, template as documented."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from training.corpus import stream
from training.tokenizer import (
    END_OF_TURN,
    MASK,
    PAD,
    ROLES,
    SPECIAL_TOKENS,
    TAGS,
    VOCAB_SIZE,
    encode_document,
    load_tokenizer,
    plain_texts,
    render,
    save_tokenizer,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tokenizer of 6000 samples, saved; large enough for a full vocabulary."""
    folder = tmp_path_factory.mktemp("tokenizer")
    samples = itertools.islice(stream(0), 6000)
    save_tokenizer(train_tokenizer(text for sample in samples for text in plain_texts(sample)), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_vocabulary_has_the_announced_size(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    assert max(tokenizer.get_vocab().values()) == VOCAB_SIZE - 1


def test_end_of_turn_padding_and_mask_are_what_the_names_say(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == (END_OF_TURN, PAD, MASK)


@pytest.mark.parametrize("token", (*SPECIAL_TOKENS, *TAGS))
def test_roles_tags_and_the_rest_are_single_tokens(tokenizer, token):
    assert tokenizer(f"a{token}b")["input_ids"].count(tokenizer.convert_tokens_to_ids(token)) == 1
    assert len(tokenizer(token)["input_ids"]) == 1


def test_tags_stay_in_decoded_text_and_roles_do_not(tokenizer):
    ids = tokenizer("<|assistant|>[PLAN]\n1.<40><None>[-]Title\n[END]<|end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "[PLAN]\n1.<40><None>[-]Title\n[END]"


def test_digits_are_single_tokens(tokenizer):
    ids = tokenizer("the code is 4172, or <40>")["input_ids"]
    assert [token for token in map(tokenizer.decode, ids) if token.isdigit()] == ["4", "1", "7", "2", "4", "0"]


@pytest.mark.parametrize("name", ["Tavi", "Brelodan", "Dumowick", "Heron"])
def test_a_name_is_the_same_tokens_wherever_it_stands(tokenizer, name):
    alone = tokenizer(name)["input_ids"]
    for frame in ("I met {} there.", '{{"name": "{}"}}', "{} lives in {}.", "Text: {}"):
        ids = tokenizer(frame.format(name, name))["input_ids"]
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids)))


def test_the_chat_template_renders_as_documented(tokenizer):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    expected = "<|system|>S<|end|><|user|>U<|end|><|assistant|>A<|end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>S<|end|><|user|>U<|end|><|assistant|>"


def test_the_chat_template_refuses_an_unknown_role(tokenizer):
    with pytest.raises(Exception, match="role tool is unknown"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_training_sees_the_same_tokens_as_the_chat_template_gives(tokenizer, directory):
    trained = load_tokenizer(directory)
    for sample in itertools.islice(stream(9), 100):
        ids, written = encode_document(trained, sample)
        assert ids == tokenizer(render(sample))["input_ids"]
        assert len(ids) == len(written)
        if sample.messages:
            assert tokenizer.apply_chat_template(list(sample.messages), tokenize=False) == render(sample)


def test_only_answers_and_their_ends_are_marked_as_written(directory):
    tokenizer = load_tokenizer(directory)
    sample = next(sample for sample in stream(2) if len(sample.messages) == 4)
    ids, written = encode_document(tokenizer, sample)
    marked = tokenizer.decode([token for token, wanted in zip(ids, written, strict=True) if wanted])
    expected = "".join(m["content"] + END_OF_TURN for m in sample.messages if m["role"] == "assistant")
    assert marked == expected
    assert ids[0] in {tokenizer.convert_tokens_to_ids(role) for role in ROLES.values()}


def test_too_few_texts_for_the_vocabulary_are_an_error():
    with pytest.raises(ValueError, match="instead of 2048"):
        train_tokenizer(["a kite"])
