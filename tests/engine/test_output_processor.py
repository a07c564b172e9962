"""From tokens that land to what a user sees: how every kind of ending looks, whole and streamed."""

from collections import deque

import pytest

from jaxinfer.engine.output_processor import OutputProcessor
from jaxinfer.engine.request import RequestStatus
from jaxinfer.tokenizer import Tokenizer
from tests.builders import make_request
from tests.tiny_checkpoints import END, STOP, TOOL, token_id, write_tokenizer

EOS = (token_id(END), token_id(STOP))
A, B, C, X = (ord(letter) for letter in "abcx")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer(directory)


class Landing:
    """Stands in for the engine: lands tokens on requests by the rules of `Request`, and is told of stops."""

    def __init__(self, tokenizer):
        self.processor = OutputProcessor(self, tokenizer)
        self.stopped = []

    def finish(self, request, status):
        assert not request.is_finished
        request.status = status
        self.stopped.append(request.request_id)

    def follow(self, *, stream, request_id="0", **params):
        inbox = deque()
        request = make_request(request_id, [X], eos_token_ids=EOS, **params)
        request.status = RequestStatus.RUNNING
        self.processor.follow(request, inbox, stream=stream)
        return request, inbox

    def land(self, request, token):
        status = request.append(token)
        if status is not None:
            request.status = status
        self.processor.process([(request, token)])

    def run(self, tokens, *, stream, **params):
        """The outputs of one request on which these tokens land until it is finished; then it is aborted."""
        request, inbox = self.follow(stream=stream, **params)
        for token in tokens:
            if not request.is_finished:
                self.land(request, token)
        if not request.is_finished:
            request.status = RequestStatus.FINISHED_ABORTED
            self.processor.close(request)
        return list(inbox)


# name: (tokens that would land, parameters) -> (text, number of tokens, finish reason, stop reason)
ENDINGS = {
    "end of sequence": ([A, B, EOS[0], C], {}, ("ab", 3, "stop", None)),
    "another end of sequence": ([A, B, EOS[1], C], {}, ("ab", 3, "stop", None)),
    "end of sequence at once": ([EOS[0]], {}, ("", 1, "stop", None)),
    "end of sequence as the last allowed token": ([A, EOS[0]], {"max_tokens": 2}, ("a", 2, "stop", None)),
    "end of sequence, special tokens shown": ([A, EOS[0]], {"skip_special_tokens": False}, ("a", 2, "stop", None)),
    "end of sequence, to be included": (
        [A, EOS[0]],
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
        (f"a{END}", 2, "stop", None),
    ),
    "end of sequence, named as a stop token too": ([A, EOS[0]], {"stop_token_ids": [EOS[0]]}, ("a", 2, "stop", None)),
    "end of sequence ignored": ([A, EOS[0], B], {"ignore_eos": True, "max_tokens": 3}, ("ab", 3, "length", None)),
    "end of sequence ignored but named as a stop token": (
        [A, EOS[0], B],
        {"ignore_eos": True, "stop_token_ids": [EOS[0]]},
        ("a", 2, "stop", EOS[0]),
    ),
    "stop token": ([A, B, C], {"stop_token_ids": [B]}, ("a", 2, "stop", B)),
    "stop token to be included": (
        [A, B, C],
        {"stop_token_ids": [B], "include_stop_str_in_output": True},
        ("ab", 2, "stop", B),
    ),
    "stop token after min_tokens": ([B, B, B], {"stop_token_ids": [B], "min_tokens": 2}, ("bb", 3, "stop", B)),
    "stop string": ([A, B, C], {"stop": "b"}, ("a", 2, "stop", "b")),
    "stop string over tokens": ([A, B, C, A], {"stop": ["x", "bc"]}, ("a", 3, "stop", "bc")),
    "stop string to be included": (
        [A, B, C, A],
        {"stop": "bc", "include_stop_str_in_output": True},
        ("abc", 3, "stop", "bc"),
    ),
    "stop string inside a token": ([A, token_id(" quick")], {"stop": "ui"}, ("a q", 2, "stop", "ui")),
    "stop string to be included, inside a token": (
        [A, token_id(" quick")],
        {"stop": "ui", "include_stop_str_in_output": True},
        ("a qui", 2, "stop", "ui"),
    ),
    "stop string as the whole text": ([A, B], {"stop": "a"}, ("", 1, "stop", "a")),
    "stop string completed by the last allowed token": (
        [A, B, C],
        {"stop": "abc", "max_tokens": 3},
        ("", 3, "stop", "abc"),
    ),
    "stop string begun by the last allowed tokens": (
        [A, B],
        {"stop": "abc", "max_tokens": 2},
        ("ab", 2, "length", None),
    ),
    "stop string begun before the end of sequence": ([A, B, EOS[0]], {"stop": "abc"}, ("ab", 3, "stop", None)),
    "stop string before min_tokens": ([A, B, A, B], {"stop": "b", "min_tokens": 3}, ("aba", 4, "stop", "b")),
    "stop string of a special token": (
        [A, token_id(TOOL), B],
        {"stop": TOOL, "skip_special_tokens": False},
        ("a", 2, "stop", TOOL),
    ),
    "stop string that is not shown": ([A, token_id(TOOL)], {"stop": TOOL, "max_tokens": 2}, ("a", 2, "length", None)),
    "stop string in the broken end": ([A, 0xE6], {"stop": "\ufffd", "max_tokens": 2}, ("a", 2, "stop", "\ufffd")),
    "max_tokens": ([A, B, C], {"max_tokens": 2}, ("ab", 2, "length", None)),
    "max_tokens inside a character": ([A, 0xE6, 0x97], {"max_tokens": 3}, ("a\ufffd", 3, "length", None)),
    "end of sequence inside a character": ([A, 0xE6, EOS[0]], {}, ("a\ufffd", 3, "stop", None)),
    "stop string and a broken character": ([A, 0xE6, B], {"stop": "b"}, ("a\ufffd", 3, "stop", "b")),
    "special tokens shown": (
        [A, token_id(TOOL), B],
        {"skip_special_tokens": False, "max_tokens": 3},
        (f"a{TOOL}b", 3, "length", None),
    ),
    "special tokens skipped": ([A, token_id(TOOL), B], {"max_tokens": 3}, ("ab", 3, "length", None)),
    "no text wanted": ([A, B, EOS[0]], {"detokenize": False}, ("", 3, "stop", None)),
    "abort": ([A, B], {}, ("ab", 2, "abort", None)),
    "abort before anything": ([], {}, ("", 0, "abort", None)),
    "abort inside a character": ([A, 0xE6], {}, ("a\ufffd", 2, "abort", None)),
    "abort inside a stop string": ([A, B], {"stop": "bc"}, ("ab", 2, "abort", None)),
    "abort inside a character, with stop strings": ([A, 0xE6], {"stop": "bc"}, ("a\ufffd", 2, "abort", None)),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ENDINGS)
def test_a_request_ends_with(tokenizer, name, stream):
    tokens, params, (text, count, finish_reason, stop_reason) = ENDINGS[name]
    outputs = Landing(tokenizer).run(tokens, stream=stream, **params)
    completions = [output.outputs[0] for output in outputs]
    assert "".join(completion.text for completion in completions) == text
    assert [token for completion in completions for token in completion.token_ids] == tokens[:count]
    assert (completions[-1].finish_reason, completions[-1].stop_reason) == (finish_reason, stop_reason)


@pytest.mark.parametrize("name", ENDINGS)
def test_only_the_last_output_is_finished(tokenizer, name):
    tokens, params, _ = ENDINGS[name]
    *before, last = Landing(tokenizer).run(tokens, stream=True, **params)
    assert last.finished and last.outputs[0].finished
    for output in before:
        assert not output.finished and not output.outputs[0].finished
        assert output.outputs[0].stop_reason is None


@pytest.mark.parametrize("name", ENDINGS)
def test_a_request_that_is_not_streamed_gives_one_output(tokenizer, name):
    tokens, params, _ = ENDINGS[name]
    assert len(Landing(tokenizer).run(tokens, stream=False, **params)) == 1


def test_tokens_without_text_come_with_the_text_that_follows(tokenizer):
    outputs = Landing(tokenizer).run([A, *"日".encode(), token_id(TOOL), B], stream=True, max_tokens=6)
    deltas = [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]
    assert deltas == [("a", [A]), ("日", [*"日".encode()]), ("b", [token_id(TOOL), B])]


def test_tokens_are_streamed_one_by_one_where_no_text_is_made():
    outputs = Landing(None).run([A, B, EOS[0]], stream=True)
    assert [output.outputs[0].token_ids for output in outputs] == [[A], [B], [EOS[0]]]
    assert {output.outputs[0].text for output in outputs} == {""}


def test_the_engine_is_told_of_a_stop_string_it_cannot_see_itself(tokenizer):
    engine = Landing(tokenizer)
    engine.run([A, B, C], stream=False, stop="b")
    assert engine.stopped == ["0"]


@pytest.mark.parametrize("params", [{"stop": "b", "max_tokens": 2}, {"stop": "x", "max_tokens": 1}, {}])
def test_the_engine_is_not_told_of_an_end_that_it_knows(tokenizer, params):
    engine = Landing(tokenizer)
    engine.run([A, B, EOS[0]], stream=False, **params)
    assert engine.stopped == []


def test_requests_that_land_in_one_step_go_to_their_own_inboxes(tokenizer):
    engine = Landing(tokenizer)
    one, inbox_of_one = engine.follow(stream=True, request_id="1")
    two, inbox_of_two = engine.follow(stream=True, request_id="2")
    for first, second in zip(b"abc", b"xyz", strict=True):
        one.append(first)
        two.append(second)
        engine.processor.process([(two, second), (one, first)])
    assert "".join(output.outputs[0].text for output in inbox_of_one) == "abc"
    assert "".join(output.outputs[0].text for output in inbox_of_two) == "xyz"
    assert {output.request_id for output in inbox_of_one} == {"1"}


def test_an_output_says_whose_it_is(tokenizer):
    (output,) = Landing(tokenizer).run([A], stream=False, request_id="7", max_tokens=1)
    assert (output.request_id, output.prompt_token_ids, output.num_cached_tokens) == ("7", [X], 0)
    assert output.metrics.arrival_time > 0
    assert output.outputs[0].index == 0


def test_a_finished_request_is_forgotten(tokenizer):
    engine = Landing(tokenizer)
    request, _ = engine.follow(stream=False, max_tokens=1)
    engine.land(request, A)
    with pytest.raises(KeyError):
        engine.processor.close(request)
