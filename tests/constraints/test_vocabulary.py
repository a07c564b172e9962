"""What tokens add to a text, compared with what tokenizers decode; the trie of their bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from jaxinfer.constraints.byte_trie import ByteTrie
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.tokenizer import Tokenizer
from tests.tiny_checkpoints import vocab_size, write_tokenizer

EMBEDDED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"
PIECES = ["<unk>", "▁the", "▁", "ca", "fé", "日", "!", *(f"<0x{byte:02X}>" for byte in range(256))]


def saved(directory, decoder, vocabulary=PIECES):
    """A tokenizer with a given decoder and two added tokens, one of them special."""
    fast = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocabulary)}, merges=[]))
    fast.decoder = decoder
    fast.add_tokens([AddedToken("[PLAN]", special=False)])
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return Tokenizer(directory)


def with_byte_fallback(directory):
    return saved(
        directory,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )


def with_metaspace(directory):
    return saved(directory, decoders.Metaspace(), vocabulary=PIECES[:7])


def small_byte_level(directory):
    write_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module", params=[with_byte_fallback, with_metaspace, small_byte_level, None])
def tokenizer(request, tmp_path_factory):
    return Tokenizer(EMBEDDED) if request.param is None else request.param(tmp_path_factory.mktemp("tokenizer"))


@given(st.data())
@settings(max_examples=60)
def test_the_bytes_of_tokens_are_what_the_tokenizer_decodes(tokenizer, data):
    number = tokenizer.fast.get_vocab_size()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, number)
    tokens = data.draw(st.lists(st.integers(0, number - 1), max_size=12))
    context = [next(token for token, piece in enumerate(vocabulary.pieces) if piece == b"!")]
    written = b"".join(vocabulary.pieces[token] or b"" for token in tokens)
    decoded = tokenizer.decode(context + tokens)
    if "\ufffd" not in written.decode(errors="replace"):  # else decoders differ in how many of them there are
        assert "!" + written.decode() == decoded
    else:
        assert "\ufffd" in decoded


def test_special_tokens_and_those_behind_the_last_add_nothing(tmp_path):
    write_tokenizer(tmp_path)
    vocabulary = Vocabulary.from_tokenizer(Tokenizer(tmp_path), 1000)
    assert vocabulary.size == len(vocabulary.pieces) == 1000
    special = set(vocabulary.markers.values())
    assert special == {token for token, piece in enumerate(vocabulary.pieces[: vocab_size()]) if piece is None}
    assert vocabulary.pieces[vocab_size() :] == (None,) * (1000 - vocab_size())


def test_added_tokens_are_markers_and_visible_ones_are_text_too(tmp_path):
    vocabulary = Vocabulary.from_tokenizer(with_byte_fallback(tmp_path), 300)
    assert set(vocabulary.markers) == {"[PLAN]", "<s>"}
    assert vocabulary.pieces[vocabulary.markers["[PLAN]"]] == b"[PLAN]"
    assert vocabulary.pieces[vocabulary.markers["<s>"]] is None


def test_bytes_that_are_tokens_of_their_own_are_known(tmp_path):
    assert Vocabulary.from_tokenizer(with_byte_fallback(tmp_path), 300).single_bytes.all()
    assert np.flatnonzero(Vocabulary([b"ab", b"c", None, b"", b"\xff"]).single_bytes).tolist() == [ord("c"), 0xFF]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
    ],
)
def test_a_decoder_that_looks_at_more_than_one_token_is_refused_by_name(tmp_path, decoder):
    with pytest.raises(ValueError, match="what a token adds to a text is not known for decoders"):
        Vocabulary.from_tokenizer(saved(tmp_path, decoder), 300)


def test_more_tokens_than_logits_and_markers_that_are_no_tokens_are_refused():
    with pytest.raises(ValueError, match="size must be at least the number of tokens"):
        Vocabulary([b"a", b"b"], size=1)
    with pytest.raises(ValueError, match="markers must be tokens below 2"):
        Vocabulary([b"a", b"b"], markers={"x": 2})


@given(st.lists(st.binary(max_size=5) | st.none(), max_size=40), st.frozensets(st.integers(0, 255), max_size=20))
def test_a_walk_of_the_trie_finds_the_tokens_all_of_whose_bytes_are_possible(pieces, chosen):
    """The automaton counts bytes, takes no more than three, and only chosen ones."""
    few = [piece and bytes(byte % 8 for byte in piece) for piece in pieces]
    allowed = np.zeros(256, bool)
    allowed[[byte % 8 for byte in chosen]] = True

    def step(states, values):
        return np.where(allowed[values] & (states < 3), states + 1, -1)

    expected = [bool(piece) and len(piece) <= 3 and all(allowed[byte] for byte in piece) for piece in few]
    assert ByteTrie(few).walk(0, step).tolist() == expected
