"""From tokens that land to what a user sees: how every kind of ending looks, whole and streamed."""

import pytest

from jaxinfer.frontend.output_processor import OutputProcessor
from jaxinfer.outputs import Logprob
from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.scheduling.scheduler import Landing
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


class Engine:
    """A fake engine that lands tokens on requests by the rules of `Request`, and is told of stops."""

    def __init__(self, tokenizer):
        self.processor = OutputProcessor(self, tokenizer)
        self.stopped = []

    def finish(self, request, status, **how):
        if not request.is_finished:
            self.stopped.append(request.request_id)
        request.finish(status, **how)

    def follow(self, *, stream, request_id="0", **params):
        inbox = self.processor.inbox()
        request = make_request(request_id, [X], eos_token_ids=EOS, **params)
        request.status = RequestStatus.RUNNING
        self.processor.follow(request, inbox, stream=stream)
        return request, inbox

    def take(self, request, tokens):
        """Append tokens until one ends the request, as the scheduler does."""
        first = request.num_tokens
        request.extend(tokens)
        return Landing(request, first, request.num_tokens)

    def run(self, tokens, *, stream, at_once=1, **params):
        """The outputs of one request on which these tokens land, `at_once` together, until it is finished; a request
        that is not finished by them is aborted."""
        request, inbox = self.follow(stream=stream, **params)
        outputs = []
        for start in range(0, len(tokens), at_once):
            if not request.is_finished:
                self.processor.process([self.take(request, tokens[start : start + at_once])])
                outputs += inbox.take()
        if not request.is_finished:
            request.finish(RequestStatus.FINISHED_ABORTED)
            self.processor.process([Landing(request, request.num_tokens, request.num_tokens)])
        return outputs + inbox.take()


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
    "stop string before a broken character of its token": (
        [token_id(b"y\xc3"), B],
        {"stop": "y"},
        ("", 1, "stop", "y"),
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


@pytest.mark.parametrize("at_once", [1, 2, 3, 8])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ENDINGS)
def test_a_request_ends_with(tokenizer, name, stream, at_once):
    """However many tokens land at once."""
    tokens, params, (text, count, finish_reason, stop_reason) = ENDINGS[name]
    outputs = Engine(tokenizer).run(tokens, stream=stream, at_once=at_once, **params)
    completions = [output.outputs[0] for output in outputs]
    assert "".join(completion.text for completion in completions) == text
    assert [token for completion in completions for token in completion.token_ids] == tokens[:count]
    assert (completions[-1].finish_reason, completions[-1].stop_reason) == (finish_reason, stop_reason)


# name: (tokens that bring the ending about, parameters) -> (text of these, finish reason, stop reason)
STOPS = {
    "end of sequence": ([EOS[0]], {}, ("", "stop", None)),
    "stop token": ([C], {"stop_token_ids": [C]}, ("", "stop", C)),
    "stop string": ([C], {"stop": "c"}, ("", "stop", "c")),
    "stop string over tokens": ([C, X, C], {"stop": "cxc"}, ("", "stop", "cxc")),
    "stop string to be included": ([C, X], {"stop": "cx", "include_stop_str_in_output": True}, ("cx", "stop", "cx")),
    "stop string before a stop token": ([C, X], {"stop": "c", "stop_token_ids": [X]}, ("", "stop", "c")),
    "stop token before a stop string": ([C, X], {"stop": "x", "stop_token_ids": [C]}, ("", "stop", C)),
    "stop string before the end of sequence": ([C, EOS[0]], {"stop": "c"}, ("", "stop", "c")),
    "end of sequence before a stop string": ([EOS[0], C], {"stop": "c"}, ("", "stop", None)),
    "two stop strings": ([C, X], {"stop": ["x", "c"]}, ("", "stop", "c")),
    "stop string inside a character": ([0xC3, 0xA9, X], {"stop": "é"}, ("", "stop", "é")),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", STOPS)
def test_the_earliest_ending_wins_at_every_place_in_a_landing_of_many_tokens(tokenizer, name, stream):
    """Tokens, text and reason are those of the ending; what landed after it is dropped."""
    ending, params, (text, finish_reason, stop_reason) = STOPS[name]
    # The ending of every case is complete with its first token, but for these.
    length = {"stop string over tokens": 3, "stop string to be included": 2, "stop string inside a character": 2}
    for before in range(6):
        tokens = [*[A, B] * 3][:before] + [*ending, A, EOS[1], B, B, B, B]
        outputs = Engine(tokenizer).run(tokens, stream=stream, at_once=8, max_tokens=20, **params)
        completions = [output.outputs[0] for output in outputs]
        assert "".join(completion.text for completion in completions) == "ababab"[:before] + text
        count = before + length.get(name, 1)
        assert [token for completion in completions for token in completion.token_ids] == tokens[:count]
        assert (completions[-1].finish_reason, completions[-1].stop_reason) == (finish_reason, stop_reason)


@pytest.mark.parametrize("before", range(5))
def test_a_stop_string_inside_a_landing_wins_over_the_length_that_the_landing_reaches(tokenizer, before):
    tokens = [A] * before + [C] + [A] * (5 - before)
    (output,) = Engine(tokenizer).run(tokens, stream=False, at_once=6, max_tokens=6, stop="c")
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("a" * before, tokens[: before + 1])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "c")


@pytest.mark.parametrize("name", ENDINGS)
def test_only_the_last_output_is_finished(tokenizer, name):
    tokens, params, _ = ENDINGS[name]
    *before, last = Engine(tokenizer).run(tokens, stream=True, **params)
    assert last.finished and last.outputs[0].finished
    for output in before:
        assert not output.finished and not output.outputs[0].finished
        assert output.outputs[0].stop_reason is None


@pytest.mark.parametrize("name", ENDINGS)
def test_a_request_that_is_not_streamed_gives_one_output(tokenizer, name):
    tokens, params, _ = ENDINGS[name]
    assert len(Engine(tokenizer).run(tokens, stream=False, **params)) == 1


def test_tokens_without_text_come_with_the_text_that_follows(tokenizer):
    outputs = Engine(tokenizer).run([A, *"日".encode(), token_id(TOOL), B], stream=True, max_tokens=6)
    deltas = [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]
    assert deltas == [("a", [A]), ("日", [*"日".encode()]), ("b", [token_id(TOOL), B])]


def test_tokens_are_streamed_one_by_one_where_no_text_is_made():
    outputs = Engine(None).run([A, B, EOS[0]], stream=True)
    assert [output.outputs[0].token_ids for output in outputs] == [[A], [B], [EOS[0]]]
    assert {output.outputs[0].text for output in outputs} == {""}


def test_the_engine_is_told_of_a_stop_string_it_cannot_see_itself(tokenizer):
    engine = Engine(tokenizer)
    engine.run([A, B, C], stream=False, stop="b")
    assert engine.stopped == ["0"]


@pytest.mark.parametrize("params", [{"stop": "b", "max_tokens": 2}, {"stop": "x", "max_tokens": 1}, {}])
def test_the_engine_is_not_told_of_an_end_that_it_knows(tokenizer, params):
    engine = Engine(tokenizer)
    engine.run([A, B, EOS[0]], stream=False, **params)
    assert engine.stopped == []


def test_requests_that_land_in_one_step_go_to_their_own_inboxes(tokenizer):
    engine = Engine(tokenizer)
    one, inbox_of_one = engine.follow(stream=True, request_id="1")
    two, inbox_of_two = engine.follow(stream=True, request_id="2")
    for first, second in zip(b"abc", b"xyz", strict=True):
        engine.processor.process([engine.take(two, [second]), engine.take(one, [first])])
    outputs_of_one = inbox_of_one.take()
    assert "".join(output.outputs[0].text for output in outputs_of_one) == "abc"
    assert "".join(output.outputs[0].text for output in inbox_of_two.take()) == "xyz"
    assert {output.request_id for output in outputs_of_one} == {"1"}


def test_an_output_says_whose_it_is(tokenizer):
    (output,) = Engine(tokenizer).run([A], stream=False, request_id="7", max_tokens=1)
    assert (output.request_id, output.prompt_token_ids, output.num_cached_tokens) == ("7", [X], 0)
    assert output.metrics.arrival_time > 0
    assert output.outputs[0].index == 0


def test_a_finished_request_is_told_of_once(tokenizer):
    engine = Engine(tokenizer)
    request, inbox = engine.follow(stream=False, max_tokens=1)
    landing = engine.take(request, [A])
    engine.processor.process([landing])
    assert len(inbox.take()) == 1
    engine.processor.process([landing])
    assert inbox.take() == [] and not engine.processor._followers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_whose_text_cannot_be_made_ends_alone_and_with_the_reason(tokenizer, stream, caplog):
    """No tokenizer reads a negative id."""
    engine = Engine(tokenizer)
    broken, inbox_of_broken = engine.follow(stream=stream, request_id="1", max_tokens=2)
    sound, inbox_of_sound = engine.follow(stream=stream, request_id="2", max_tokens=2)
    engine.processor.process([engine.take(broken, [A, -1]), engine.take(sound, [A, B])])
    (output,) = inbox_of_broken.take()
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].text) == (True, "error", "")
    assert output.error.startswith("TypeError: ")
    assert "no text could be made of request 1, attempt 2 of 2" in caplog.text
    (output,) = inbox_of_sound.take()
    assert (output.outputs[0].text, output.error) == ("ab", None)


def test_a_request_that_fails_in_the_middle_leaves_the_engine(tokenizer):
    engine = Engine(tokenizer)
    broken, inbox = engine.follow(stream=True, request_id="1")
    engine.processor.process([engine.take(broken, [A])])
    outputs = inbox.take()
    engine.processor.process([engine.take(broken, [-1])])
    outputs += inbox.take()
    assert engine.stopped == ["1"]
    assert [output.outputs[0].text for output in outputs] == ["a", ""]
    assert [output.finished for output in outputs] == [False, True]


def test_tokens_of_a_request_that_nobody_follows_are_passed_over(tokenizer):
    engine = Engine(tokenizer)
    engine.processor.process([engine.take(make_request("9", [X]), [A])])


def test_a_stream_says_once_what_it_has_of_the_prompt_and_adds_up_log_probabilities(tokenizer):
    engine = Engine(tokenizer)
    request, inbox = engine.follow(stream=True, logprobs=0, prompt_logprobs=0)
    outputs = []
    for token, logprob in ((A, -1.0), (B, -0.5), (C, -2.0)):
        first = request.num_tokens
        request.extend([token], [{token: Logprob(logprob, 1)}])
        engine.processor.process([Landing(request, first, request.num_tokens)])
        outputs += inbox.take()
    assert [output.prompt_logprobs for output in outputs] == [[None], None, None]
    assert [output.outputs[0].cumulative_logprob for output in outputs] == [-1.0, -1.5, -3.5]
    assert [len(output.outputs[0].logprobs) for output in outputs] == [1, 1, 1]
