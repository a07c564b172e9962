"""`LLM.stream`: deltas add up to what `generate` gives, and a reader that leaves early leaves no request running."""

from collections import defaultdict
from itertools import accumulate, zip_longest

import pytest

from jaxinfer import SamplingParams
from jaxinfer.scheduling.pace import Pace
from tests.tiny_checkpoints import (
    ASSISTANT,
    STORIES,
    TOOL,
    USER,
    assert_idle,
    open_llm,
    story_ids,
    story_llm,
    story_text,
    token_id,
    write_checkpoint,
)

pytestmark = pytest.mark.measured

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with story_llm(tmp_path_factory) as llm:
        yield llm


@pytest.fixture(scope="module")
def random_llm(tmp_path_factory):
    """An engine whose output is broken text: characters are cut everywhere."""
    yield open_llm(write_checkpoint(tmp_path_factory.mktemp("random"), random=True))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    yield
    assert_idle(llm)


@pytest.fixture
def token_by_token(monkeypatch):
    """Rounds that take so long that a stream bounds its launches to one."""
    monkeypatch.setattr(Pace, "within", lambda self, kind, seconds: 1)


def greedy(**params):
    return SamplingParams(**{"temperature": 0.0, **params})


def joined(deltas):
    """Request id -> (text, token ids, finish reason, stop reason) of all its deltas."""
    by_request = defaultdict(list)
    for delta in deltas:
        by_request[delta.request_id].append(delta.outputs[0])
    return {
        request_id: (
            "".join(part.text for part in parts),
            [token for part in parts for token in part.token_ids],
            parts[-1].finish_reason,
            parts[-1].stop_reason,
        )
        for request_id, parts in by_request.items()
    }


def whole(output):
    completion = output.outputs[0]
    return completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason


PARAMETERS = {
    "length": greedy(max_tokens=11),
    "one token": greedy(max_tokens=1),
    "max_model_len": greedy(max_tokens=None),
    "stop token": greedy(stop_token_ids=[token_id(" fox"), token_id("tack "), token_id(b"\x8e"), token_id(b"y\xc3")]),
    "stop string": greedy(stop=["wn fox", "本 ", "k ta", "now"]),
    "stop string, included": greedy(stop=["wn fox", "本 ", "k ta", "now"], include_stop_str_in_output=True),
    "stop string at the end": greedy(stop=["over.", "!", "tick tock tick"], max_tokens=11),
    "stop string that never comes": greedy(stop=["quick fox", "🎉?", "tick tack"], max_tokens=11),
    "stop string of broken characters": greedy(stop=["\ufffd", "t \ufffd"], max_tokens=11),
    "min_tokens": greedy(min_tokens=9, stop="t", max_tokens=11),
    "ignore_eos": greedy(ignore_eos=True, max_tokens=11),
    "special tokens": greedy(skip_special_tokens=False, ignore_eos=True, max_tokens=11),
    "no text": greedy(detokenize=False, max_tokens=11),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_deltas_add_up_to_what_generate_gives(llm, name):
    params = PARAMETERS[name]
    for key in STORIES:
        (output,) = llm.generate(f"Say {key}", params, use_tqdm=False)
        (streamed,) = joined(llm.stream(f"Say {key}", params)).values()
        assert streamed == whole(output)


@pytest.mark.parametrize("stop", [None, "o", ["\ufffd", "T"], ["!", "5", " "]])
def test_deltas_of_broken_text_add_up_to_what_generate_gives(random_llm, stop):
    prompts = [[7], list(b"Say"), [*b"caf", 0xC3], [0xE6, 0x97], list(range(60, 90))]
    params = greedy(max_tokens=40, stop=stop, ignore_eos=True)
    outputs = random_llm.generate(prompts, params, use_tqdm=False)
    streamed = joined(random_llm.stream(prompts, params))
    assert [streamed[request_id] for request_id in sorted(streamed, key=int)] == [whole(output) for output in outputs]
    if stop is None:
        for output in outputs:
            assert output.outputs[0].text == random_llm.get_tokenizer().decode(output.outputs[0].token_ids)


def test_text_comes_token_by_token_where_rounds_take_long(llm, token_by_token):
    deltas = [(delta.outputs[0].text, delta.outputs[0].token_ids) for delta in llm.stream("Say a", GREEDY)]
    tokens = story_ids("a")
    assert deltas == [
        ("The", tokens[0:1]),
        (" quick", tokens[1:2]),
        (" brown", tokens[2:3]),
        (" fox", tokens[3:4]),
        (" jumps", tokens[4:5]),
        (" over", tokens[5:6]),
        (".", tokens[6:7]),
        ("", tokens[7:8]),
    ]


def test_a_delta_never_ends_inside_a_character(llm, token_by_token):
    texts = [delta.outputs[0].text for delta in llm.stream("Say b", GREEDY)]
    assert texts == ["caf", "é na", "ïve ", "日本", " ", "🎉!", ""]


def test_no_delta_shows_what_a_stop_string_takes_away(llm):
    for stop in ["own fox ju", "s over", "jumps over.", "The quick brown fox jumps over."]:
        final = story_text("a")[: story_text("a").index(stop)]
        for shown in accumulate(delta.outputs[0].text for delta in llm.stream("Say a", greedy(stop=stop))):
            assert final.startswith(shown)


def test_what_turns_out_not_to_be_a_stop_string_is_shown_at_once(llm, token_by_token):
    texts = [delta.outputs[0].text for delta in llm.stream("Say a", greedy(stop="brown bear"))]
    assert texts == ["The", " quick", " ", "brown fox", " jumps", " over", ".", ""]


def test_only_the_last_delta_of_a_request_is_finished(llm):
    finished = defaultdict(list)
    for delta in llm.stream(["Say a", "Say b", "Say c"], GREEDY):
        finished[delta.request_id].append(delta.finished)
        assert delta.finished == (delta.outputs[0].finish_reason is not None)
    assert len(finished) == 3
    for flags in finished.values():
        assert flags == [False] * (len(flags) - 1) + [True]


def test_several_prompts_are_streamed_side_by_side(llm):
    deltas = list(llm.stream(["Say a", list(b"Say c"), {"prompt": "Say d"}], [GREEDY, greedy(max_tokens=5), GREEDY]))
    ids = sorted({delta.request_id for delta in deltas}, key=int)
    texts = joined(deltas)
    assert [texts[request_id][0] for request_id in ids] == [story_text("a"), story_text("c", 5), story_text("d")]
    order = [delta.request_id for delta in deltas]
    assert order.index(ids[1]) < max(i for i, request_id in enumerate(order) if request_id == ids[0])


def test_a_delta_says_whose_it_is(llm):
    for delta in llm.stream("Say a", GREEDY):
        assert (delta.prompt, delta.prompt_token_ids) == ("Say a", list(b"Say a"))
        assert delta.outputs[0].index == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_conversation_is_streamed_through_the_chat_template(llm, wrapped):
    messages = [{"role": "user", "content": "hello"}]
    (streamed,) = joined(llm.stream([messages] if wrapped else messages, GREEDY)).values()
    assert streamed == whole(llm.generate(f"{USER}hello{ASSISTANT}", GREEDY, use_tqdm=False)[0])
    assert streamed[0] == "I am here for you"


def test_sampled_text_is_streamed_with_the_defaults_of_the_checkpoint(llm):
    (streamed,) = joined(llm.stream("Say c")).values()
    assert streamed[0] == story_text("c", 16)


# Streams beside each other


def test_two_streams_may_be_read_in_turn(llm):
    one, two = llm.stream("Say a", GREEDY), llm.stream("Say b", GREEDY)
    texts = ["", ""]
    for deltas in zip_longest(one, two):
        for index, delta in enumerate(deltas):
            if delta is not None:
                texts[index] += delta.outputs[0].text
    assert texts == [story_text("a"), story_text("b")]


def test_a_stream_read_alone_does_not_lose_what_the_other_got_meanwhile(llm):
    one, two = llm.stream("Say a", GREEDY), llm.stream("Say c", greedy(max_tokens=12))
    first = next(one)
    assert "".join(delta.outputs[0].text for delta in two) == story_text("c", 12)
    assert first.outputs[0].text + "".join(delta.outputs[0].text for delta in one) == story_text("a")


def test_generate_runs_beside_a_stream_that_is_half_read(llm):
    stream = llm.stream("Say a", GREEDY)
    text = next(stream).outputs[0].text
    outputs = llm.generate(["Say b", "Say d", "Say c"], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [story_text("b"), story_text("d"), story_text("c", 16)]
    text += "".join(delta.outputs[0].text for delta in stream)
    assert text == story_text("a")


# Leaving early


def test_a_stream_that_nobody_reads_queues_nothing(llm):
    llm.stream(["Say a"] * 5, GREEDY)
    assert_idle(llm)


def test_leaving_the_loop_aborts_what_runs_and_what_waits(llm):
    for delta in llm.stream(["Say c"] * 5, greedy(max_tokens=100)):
        assert not delta.finished
        assert llm.get_metrics().num_requests_running == 2
        assert llm.get_metrics().num_requests_waiting == 3
        break
    assert_idle(llm)
    assert llm.generate("Say a", GREEDY, use_tqdm=False)[0].outputs[0].text == story_text("a")


def test_closing_a_stream_aborts_it(llm):
    stream = llm.stream("Say c", greedy(max_tokens=100))
    next(stream)
    stream.close()
    assert_idle(llm)
    assert list(stream) == []


def test_an_exception_in_the_loop_aborts_the_stream(llm):
    with pytest.raises(RuntimeError, match="of the reader"):
        for _ in llm.stream("Say c", greedy(max_tokens=100)):
            raise RuntimeError("of the reader")
    assert_idle(llm)


def test_leaving_one_stream_does_not_touch_the_other(llm):
    one, two = llm.stream("Say c", greedy(max_tokens=100)), llm.stream("Say a", GREEDY)
    next(one)
    text = next(two).outputs[0].text
    one.close()
    assert text + "".join(delta.outputs[0].text for delta in two) == story_text("a")


def test_aborting_a_request_inside_its_stream_ends_it_with_that_reason(llm):
    deltas = []
    for delta in llm.stream("Say c", greedy(max_tokens=100)):
        deltas.append(delta)
        if len(deltas) == 3:
            assert llm.abort(delta.request_id)
            assert not llm.abort(delta.request_id)
    assert [delta.finished for delta in deltas] == [False, False, False, True]
    text, token_ids, finish_reason, stop_reason = joined(deltas)[deltas[0].request_id]
    assert (finish_reason, stop_reason) == ("abort", None)
    assert text == story_text("c", len(token_ids))
    assert len(token_ids) >= 3


def test_aborting_one_of_several_leaves_the_others(llm):
    deltas = []
    stream = llm.stream(["Say c", "Say a", "Say b"], greedy(max_tokens=20))
    for delta in stream:
        deltas.append(delta)
        if len(deltas) == 1:
            llm.abort(delta.request_id)
    by_request = joined(deltas)
    reasons = [by_request[request_id][2] for request_id in sorted(by_request, key=int)]
    assert reasons == ["abort", "stop", "stop"]
    assert [by_request[request_id][0] for request_id in sorted(by_request, key=int)][1:] == [
        story_text("a"),
        story_text("b"),
    ]


def test_a_request_that_waits_can_be_aborted(llm):
    deltas = []
    for delta in llm.stream(["Say c", "Say c", "Say a"], greedy(max_tokens=6)):
        deltas.append(delta)
        if len(deltas) == 1:
            assert llm.abort(str(int(delta.request_id) + 2))
    by_request = joined(deltas)
    assert [by_request[request_id][2] for request_id in sorted(by_request, key=int)] == ["length", "length", "abort"]
    assert by_request[max(by_request, key=int)][:2] == ("", [])


def test_aborting_what_is_finished_or_unknown_says_so(llm):
    (output,) = llm.generate("Say a", GREEDY, use_tqdm=False)
    assert not llm.abort(output.request_id)
    assert not llm.abort("unknown")


def test_special_tokens_come_with_the_text_that_follows(llm, token_by_token):
    deltas = [delta.outputs[0] for delta in llm.stream("Say f", greedy(max_tokens=3))]
    assert [(part.text, part.token_ids) for part in deltas if part.token_ids] == [
        ("call ", [token_id("call ")]),
        ("now ", [token_id(TOOL), token_id("now ")]),
    ]
