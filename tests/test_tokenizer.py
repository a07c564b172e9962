"""A checkpoint's tokenizer: loading it, text to ids and back, chat templates, text of tokens that arrive one by one."""

import copy
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxinfer.tokenizer import Tokenizer, TokenStream
from tests.event_loop import turns_beside
from tests.tiny_checkpoints import ASSISTANT, END, TOOL, USER, fast_tokenizer, token_id, vocab_size, write_tokenizer

# Bytes of characters of one to four bytes, whole and cut, bytes that no character has, and U+FFFD itself.
BYTES = b"a \xc3\xa9\xe6\x97\xa5\xf0\x9f\x8e\x89\xff\xef\xbf\xbd"
WORDS = [token_id(word) for word in (b"caf\xc3", b"\xa9 na", b"\xc3\xafve \xe6", b"\xa5\xe6\x9c\xac", b"\x89!", TOOL)]
any_tokens = st.lists(st.sampled_from([*BYTES, *WORDS, vocab_size()]), max_size=14)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture
def bare(tmp_path):
    """A tokenizer without a chat template."""
    write_tokenizer(tmp_path, chat_template=None)
    return Tokenizer(tmp_path)


def streamed(stream, token_ids):
    pieces = [stream.append(token) for token in token_ids]
    return "".join([*pieces, stream.finish()])


def test_a_directory_has_a_tokenizer_if_it_has_a_file_of_one(tmp_path):
    assert not Tokenizer.exists(tmp_path)
    assert not Tokenizer.exists(tmp_path / "missing")
    write_tokenizer(tmp_path)
    assert Tokenizer.exists(tmp_path)


def test_a_missing_directory_is_not_looked_for_elsewhere(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer directory at .*missing"):
        Tokenizer(tmp_path / "missing")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_file_is_an_error_that_names_the_directory(tmp_path, content):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=f"cannot load a tokenizer from {tmp_path}"):
        Tokenizer(tmp_path)


def test_damaged_tokenizer_settings_are_an_error_that_names_the_directory(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=f"cannot load a tokenizer from {tmp_path}"):
        Tokenizer(tmp_path)


def test_files_of_the_older_kind_are_read_too(tmp_path):
    fast_tokenizer().model.save(str(tmp_path))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END, "additional_special_tokens": [USER]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["merges.txt"]
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("the x") == [token_id("the"), ord(" "), ord("x")]
    assert tokenizer.decode(tokenizer.encode(f"naïve 日本{END}")) == "naïve 日本"


@pytest.mark.parametrize("text", ["the thin x", "naïve 日本 🎉", "a\x00b\n\t", "", " leading and trailing ", "�"])
def test_text_comes_back_from_its_ids(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_applied(tokenizer):
    assert tokenizer.encode("the") == [token_id("the")]


def test_special_tokens_in_a_prompt_are_read_as_such(tokenizer):
    ids = [token_id(USER), token_id("x"), token_id(END)]
    assert tokenizer.encode(f"{USER}x{END}") == ids
    assert tokenizer.decode(ids) == "x"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{USER}x{END}"


def test_what_the_tokenizer_puts_around_a_prompt_can_be_left_out(tmp_path):
    fast = fast_tokenizer()
    framed = tokenizers.Tokenizer.from_str(fast.to_str())
    framed.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{USER} $A", special_tokens=[(USER, token_id(USER))]
    )
    write_tokenizer(tmp_path)
    framed.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("x") == [token_id(USER), token_id("x")]
    assert tokenizer.encode("x", add_special_tokens=False) == [token_id("x")]


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")


def test_ids_that_the_tokenizer_does_not_know_have_no_text(tokenizer):
    """Models often have a vocabulary padded beyond the tokenizer's."""
    unknown = vocab_size() + 5
    assert tokenizer.decode([ord("a"), unknown, ord("b")]) == "ab"
    stream = tokenizer.stream([unknown], skip_special_tokens=True)
    assert streamed(stream, [ord("a"), unknown, ord("b"), unknown]) == "ab"


def test_the_chat_template_ends_where_the_answer_begins(tokenizer):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    ids = tokenizer.apply_chat_template(messages)
    rendered = f"{USER}one{ASSISTANT}two{USER}three{ASSISTANT}"
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)


def test_arguments_reach_the_chat_template(tokenizer):
    messages = [{"role": "user", "content": "one"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{USER}one"


def test_special_tokens_of_the_template_are_not_added_twice(tmp_path):
    """As Llama 3 has it: the template writes the first token, which `encode` would add once more."""
    write_tokenizer(tmp_path, chat_template=f"{USER}{{{{ messages[0]['content'] }}}}")
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    template = [{"SpecialToken": {"id": USER, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {USER: {"id": USER, "ids": [token_id(USER)], "tokens": [USER]}}
    saved["post_processor"] = {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": known}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("x") == [token_id(USER), token_id("x")]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == [token_id(USER), token_id("x")]


def test_what_the_template_refuses_is_a_value_error_with_its_reason(tokenizer):
    with pytest.raises(ValueError, match="the chat template refused the messages: no role system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}])


def test_without_a_chat_template_the_way_out_is_named(bare):
    with pytest.raises(ValueError, match="has no chat template: use generate with a text prompt"):
        bare.apply_chat_template([{"role": "user", "content": "x"}])


def test_an_incomplete_character_is_held_back(tokenizer):
    stream = tokenizer.stream([], skip_special_tokens=True)
    assert [stream.append(byte) for byte in "é日🎉".encode()] == ["", "é", "", "", "日", "", "", "", "🎉"]
    assert stream.finish() == ""


def test_what_stays_incomplete_comes_out_as_replacement_characters(tokenizer):
    stream = tokenizer.stream([], skip_special_tokens=True)
    assert [stream.append(byte) for byte in b"a\xe6\x97"] == ["a", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@given(prompt=any_tokens, token_ids=any_tokens, skip=st.booleans())
def test_the_streamed_text_is_the_decoded_text(tokenizer, prompt, token_ids, skip):
    """Whatever the prompt is, one that ends in the middle of a character included."""
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert streamed(tokenizer.stream(prompt, skip_special_tokens=skip), token_ids) == whole
    assert tokenizer.decode_after(prompt, token_ids, skip_special_tokens=skip) == whole


@given(token_ids=any_tokens)
def test_every_complete_character_is_out_at_once(tokenizer, token_ids):
    """Also one that shares its token with the beginning of the next."""
    stream, shown = tokenizer.stream([], skip_special_tokens=True), ""
    for number, token in enumerate(token_ids, start=1):
        shown += stream.append(token)
        assert shown == tokenizer.decode(token_ids[:number]).rstrip("\ufffd")


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_streamed_only_if_asked_for(tokenizer, skip):
    stream = tokenizer.stream([], skip_special_tokens=skip)
    text = streamed(stream, [ord("a"), token_id(TOOL), ord("b"), token_id(END)])
    assert text == ("ab" if skip else f"a{TOOL}b{END}")


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer of the older kind: a space before words, dropped at the start of a text; bytes as a last resort."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "a"]
    fast = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast


def test_a_word_after_the_prompt_keeps_its_space(sentencepiece):
    hello, world = sentencepiece.token_to_id("▁Hello"), sentencepiece.token_to_id("▁world")
    assert sentencepiece.decode([world]) == "world"
    assert streamed(TokenStream(sentencepiece, [hello], True), [world, world]) == " world world"


def test_a_byte_that_spoils_the_bytes_before_it_does_not_end_the_stream(sentencepiece):
    """Such a tokenizer reads a run of bytes as a whole, and one bad byte makes every character of the run bad."""
    run = [sentencepiece.token_to_id(f"<0x{byte:02X}>") for byte in "日".encode()]
    bad, a = sentencepiece.token_to_id("<0xFF>"), sentencepiece.token_to_id("a")
    hello = sentencepiece.token_to_id("▁Hello")
    assert sentencepiece.decode([*run, bad, a]) == "\ufffd\ufffd\ufffd\ufffda"
    assert streamed(TokenStream(sentencepiece, [hello], True), [*run, bad, a]) == "日\ufffda"
    assert streamed(TokenStream(sentencepiece, [hello], True), [*run, bad]) == "日\ufffd"


@given(tokens=any_tokens)
def test_the_bytes_of_tokens_are_those_of_their_text(tokenizer, tokens):
    found = b"".join(tokenizer.token_bytes(token) for token in tokens)
    known = [token for token in tokens if token < vocab_size()]
    assert found.decode(errors="replace") == tokenizer.decode(known, skip_special_tokens=False)


def test_the_bytes_of_an_older_vocabulary(tokenizer, sentencepiece):
    other = copy.copy(tokenizer)
    other.fast = sentencepiece
    vars(other).pop("_letters", None)
    given = {"▁Hello": b" Hello", "a": b"a", "<0xE6>": b"\xe6", "<unk>": b"<unk>"}
    assert {piece: other.token_bytes(sentencepiece.token_to_id(piece)) for piece in given} == given


def test_the_event_loop_runs_while_a_long_text_is_tokenised(tokenizer):
    text = "the café keeps a bicycle " * 10_000
    ids, turns = turns_beside(lambda: tokenizer.encode(text))
    assert ids == tokenizer.fast.encode(text).ids and turns > 10


def test_the_text_of_many_tokens_is_that_of_few(tokenizer):
    ids = tokenizer.encode("the café keeps a bicycle [END]" * 1000)
    assert tokenizer.decode(ids) == tokenizer.fast.decode(ids)
