"""`LLM.generate` and `LLM.chat`: prompts in every form, defaults of the checkpoint, every way to end."""

import pytest

from jaxinfer import SamplingParams
from tests.tiny_checkpoints import (
    ASSISTANT,
    END,
    STOP,
    USER,
    complete,
    open_llm,
    story_ids,
    story_llm,
    story_text,
    token_id,
    write_checkpoint,
)

GREEDY = SamplingParams(temperature=0.0)
FLAT = 100.0  # a temperature at which every token is about as likely as another


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with story_llm(tmp_path_factory) as llm:
        yield llm


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


# Prompts


@pytest.mark.parametrize(
    "prompt", ["Say a", ["Say a"], list(b"Say a"), [list(b"Say a")], {"prompt_token_ids": list(b"Say a")}]
)
def test_a_prompt_is_continued_in_whatever_form_it_comes(llm, prompt):
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == list(b"Say a")
    assert output.outputs[0].text == "The quick brown fox jumps over."
    assert output.outputs[0].token_ids == story_ids("a")


def test_the_prompt_s_text_is_kept_where_there_was_one(llm):
    outputs = llm.generate(["Say a", {"prompt_token_ids": [1]}, {"prompt": "Say b"}], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["Say a", None, "Say b"]


def test_an_output_holds_everything_that_is_known_of_a_request(llm):
    llm.reset_prefix_cache()
    (output,) = llm.generate("Say a", GREEDY, use_tqdm=False)
    assert output.finished
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is None
    (completion,) = output.outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "stop", None)
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
    times = output.metrics
    assert times.arrival_time < times.first_scheduled_time < times.first_token_time <= times.finished_time


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []
    assert llm.generate([], GREEDY) == []
    assert llm.generate([], []) == []
    assert llm.chat([]) == []
    assert list(llm.stream([])) == []


def test_outputs_stand_in_the_order_of_the_prompts(llm):
    """Also where later ones are finished first, and where they do not all fit at once."""
    prompts = ["Say c", list(b"Say a"), "Say d", {"prompt": "Say b"}, {"prompt_token_ids": list(b"d")}, "Say a", "a"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False)
    stories = [story_text("c", 9), *(story_text(key) for key in "adbdaa")]
    assert texts(outputs) == stories
    assert [output.prompt for output in outputs] == ["Say c", None, "Say d", "Say b", None, "Say a", "a"]


def test_every_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (1, 2, 3)]
    outputs = llm.generate(["Say a", "Say b", "Say c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    assert texts(outputs) == ["The", "café na", "tick tock tack "]


def test_a_prompt_longer_than_a_step_is_continued_all_the_same(llm):
    assert complete(llm, "x" * 100 + " Say a").text == story_text("a")


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_text(llm):
    prompt = [*b"Say ", 0xC3]
    assert complete(llm, prompt, max_tokens=2).text == "tick tock "


def test_special_tokens_in_a_text_prompt_are_tokens(llm):
    (output,) = llm.generate(f"{USER}hello{ASSISTANT}", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [token_id(USER), *b"hello", token_id(ASSISTANT)]
    assert output.outputs[0].text == "I am here for you"


def test_request_ids_are_never_reused(llm):
    ids = [output.request_id for _ in range(3) for output in llm.generate(["a", "d"], GREEDY, use_tqdm=False)]
    assert len(set(ids)) == 6


# Chat


def test_a_conversation_is_rendered_by_the_chat_template_and_answered(llm):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    rendered = f"{USER}one{ASSISTANT}two{USER}three{ASSISTANT}"
    (same,) = llm.generate(rendered, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == same.prompt_token_ids
    assert output.outputs == same.outputs
    assert output.outputs[0].text == "I am here for you"


def test_several_conversations_are_answered_in_their_order(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    outputs = llm.chat(conversations, [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 2, 3)], False)
    assert texts(outputs) == ["I am", "I am here", "I am here for"]
    prompts = [llm.get_tokenizer().decode(output.prompt_token_ids) for output in outputs]
    assert prompts == ["one", "two", "three"]


def test_arguments_reach_the_chat_template(llm):
    messages = [{"role": "user", "content": "Say a"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert output.prompt_token_ids == [token_id(USER), *b"Say a"]
    assert output.outputs[0].text == story_text("a")


# Defaults


# Cached prefixes


def cached(llm, prompt, **params) -> int:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2, **params), use_tqdm=False)
    return output.num_cached_tokens


def test_prefixes_are_cached_until_they_are_reset_and_for_each_salt_apart(llm):
    page = llm.core.config.page_size
    prompt = {"prompt_token_ids": list(b"Say a thing that is much longer than a page" * 2)}
    whole = (len(prompt["prompt_token_ids"]) - 1) // page * page
    llm.reset_prefix_cache()
    assert [cached(llm, prompt) for _ in range(2)] == [0, whole]
    assert [cached(llm, prompt | {"cache_salt": "mine"}) for _ in range(2)] == [0, whole]
    assert cached(llm, prompt, skip_reading_prefix_cache=True) == 0
    assert llm.reset_prefix_cache()
    assert cached(llm, prompt) == 0


def test_the_cache_is_drawn_with_its_text(llm):
    llm.reset_prefix_cache()
    assert llm.draw_prefix_cache() == "root (empty)"
    cached(llm, "Say a story of a hundred pages, please, and then another one.")
    assert "Say a story" in llm.draw_prefix_cache()


def test_without_a_tokenizer_the_cache_is_drawn_with_token_ids(tmp_path):
    llm = open_llm(write_checkpoint(tmp_path / "checkpoint"), skip_tokenizer_init=True)
    tokens = list(range(30, 30 + 2 * llm.core.config.page_size))
    llm.generate([tokens], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
    assert " ".join(map(str, tokens[:8])) in llm.draw_prefix_cache()


def test_no_more_tokens_are_cached_than_was_said(tmp_path):
    limits = {"prefix_cache_tokens": 16, "prefix_cache_policy": "fifo", "page_size": 4}
    llm = open_llm(write_checkpoint(tmp_path / "checkpoint"), **limits)
    for number in range(4):
        cached(llm, f"Say a story of {number} pages, please, and then another one.")
        assert llm.get_metrics().num_cached_tokens <= 16
    assert llm.get_metrics().num_cached_tokens == 16 and llm.core.config.prefix_cache_policy == "fifo"


def test_without_prefix_caching_nothing_is_found_nor_drawn(tmp_path):
    llm = open_llm(write_checkpoint(tmp_path / "checkpoint"), enable_prefix_caching=False)
    assert [cached(llm, "Say a story of a hundred pages, please.") for _ in range(2)] == [0, 0]
    assert llm.draw_prefix_cache() == "prefix caching is off"
    assert llm.reset_prefix_cache()


@pytest.fixture
def with_generation_config(tmp_path):
    """Opens an engine on a checkpoint with the given generation_config.json."""

    def open_with(**values):
        return open_llm(write_checkpoint(tmp_path / "checkpoint", generation_config=values))

    return open_with


def test_generation_config_gives_the_defaults_and_what_is_given_wins(with_generation_config):
    llm = with_generation_config(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, do_sample=True, max_length=4096)
    assert llm.default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1)
    given = llm.default_sampling_params(temperature=0.0, max_tokens=3)
    assert given == SamplingParams(temperature=0.0, top_p=0.95, top_k=20, min_p=0.1, max_tokens=3)


def test_without_a_generation_config_the_defaults_are_those_of_sampling_params(with_generation_config):
    assert with_generation_config().default_sampling_params() == SamplingParams()


def test_generation_without_parameters_uses_the_defaults_of_the_checkpoint(with_generation_config):
    """The checkpoint asks for one candidate: without that, at this temperature, the text would be anything."""
    llm = with_generation_config(temperature=FLAT, top_k=1, eos_token_id=token_id(END))
    outputs = llm.generate(["Say a", "Say c"], use_tqdm=False)
    assert texts(outputs) == [story_text("a"), story_text("c", 16)]
    assert llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)[0].outputs[0].text == story_text(ASSISTANT)
    explicit = llm.generate("Say c", SamplingParams(temperature=FLAT), use_tqdm=False)
    assert texts(explicit) != [story_text("c", 16)]


def test_every_end_of_sequence_token_of_the_generation_config_ends_a_text(llm):
    a, b = complete(llm, "Say a"), complete(llm, "Say b")
    assert (a.token_ids[-1], a.finish_reason, a.stop_reason) == (token_id(END), "stop", None)
    assert (b.token_ids[-1], b.finish_reason, b.stop_reason) == (token_id(STOP), "stop", None)


def test_one_end_of_sequence_token_need_not_stand_in_a_list(with_generation_config):
    llm = with_generation_config(eos_token_id=token_id(STOP))
    assert llm.eos_token_ids == {token_id(STOP)}
    assert complete(llm, "Say b").finish_reason == "stop"
    assert complete(llm, "Say a").finish_reason == "length"


def test_without_end_of_sequence_in_the_generation_config_that_of_the_model_counts(with_generation_config):
    llm = with_generation_config(temperature=0.0)
    assert llm.eos_token_ids == {token_id(END)}
    assert complete(llm, "Say a").finish_reason == "stop"


def test_default_parameters_sample_sixteen_tokens(llm):
    (output,) = llm.generate("Say c", SamplingParams(), use_tqdm=False)
    assert output.outputs[0].text == story_text("c", 16)
    assert output.outputs[0].finish_reason == "length"


# Sampling


def test_a_seed_makes_sampling_repeatable_beside_any_neighbours(llm):
    params = SamplingParams(temperature=FLAT, seed=5, max_tokens=6)
    alone = complete(llm, "Say a", temperature=FLAT, seed=5, max_tokens=6)
    together = llm.generate(["Say b", "Say a", "Say c"], [GREEDY, params, GREEDY], use_tqdm=False)
    assert together[1].outputs[0].token_ids == alone.token_ids
    assert complete(llm, "Say a", temperature=FLAT, seed=6, max_tokens=6).token_ids != alone.token_ids


def test_requests_without_a_seed_do_not_repeat_each_other(llm):
    params = SamplingParams(temperature=FLAT, max_tokens=6)
    outputs = llm.generate(["Say a"] * 3, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


def test_the_engine_s_seed_makes_a_whole_run_repeatable(tmp_path):
    directory = write_checkpoint(tmp_path / "checkpoint")
    params = SamplingParams(temperature=FLAT, max_tokens=6)
    runs = [open_llm(directory, seed=seed).generate(["a", "b"], params, False) for seed in (1, 1, 2)]
    first, again, other = ([output.outputs[0].token_ids for output in run] for run in runs)
    assert first == again
    assert first != other


# Progress


def test_the_progress_bar_counts_prompts_and_shows_input_and_output_tokens_per_second(llm, capfd):
    prompts = ["Say a", "Say b", "Say c"]
    llm.generate(prompts, GREEDY, use_tqdm=False)  # compiling takes so long that rates would be rounded to nothing
    llm.generate(prompts, GREEDY)
    last = capfd.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert "Processed prompts: 100%" in last
    assert "3/3" in last
    rates = dict(part.strip(" ]").split(": ") for part in last.split(", ")[-2:])
    assert rates["input"].endswith(" tok/s") and rates["output"].endswith(" tok/s")
    input_tokens, output_tokens = len("Say a" * 3), 8 + 9 + 16
    ratio = float(rates["output"].split()[0]) / float(rates["input"].split()[0])
    assert ratio == pytest.approx(output_tokens / input_tokens, rel=0.05)


def test_the_progress_bar_can_be_switched_off(llm, capfd):
    llm.generate("Say a", GREEDY, use_tqdm=False)
    llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""


# Checkpoints


def test_a_checkpoint_without_tokenizer_files_serves_token_ids(tmp_path):
    llm = open_llm(write_checkpoint(tmp_path / "checkpoint", tokenizer=False))
    completion = complete(llm, list(b"Say a"))
    assert llm.tokenizer is None
    assert (completion.text, completion.token_ids) == ("", story_ids("a"))
    assert completion.finish_reason == "stop"


def test_the_tokenizer_may_lie_elsewhere(tmp_path):
    weights = write_checkpoint(tmp_path / "weights", tokenizer=False)
    llm = open_llm(weights, tokenizer=write_checkpoint(tmp_path / "other"))
    assert complete(llm, "Say a").text == story_text("a")


# Driving the engine oneself


def drive(llm):
    """All outputs until nothing is left to do."""
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs + llm.step()


def test_requests_can_be_queued_and_the_engine_stepped_by_hand(llm):
    ids = [llm.add_request("Say a", GREEDY), llm.add_request(list(b"Say c"), SamplingParams(max_tokens=5))]
    ids.append(llm.add_request([{"role": "user", "content": "x"}], GREEDY))
    outputs = {output.request_id: output for output in drive(llm)}
    assert texts([outputs[request_id] for request_id in ids]) == [
        story_text("a"),
        story_text("c", 5),
        story_text(ASSISTANT),
    ]
    assert llm.step() == []


def test_a_request_queued_by_hand_may_be_streamed_beside_a_whole_one(llm):
    streamed, whole = llm.add_request("Say a", GREEDY, stream=True), llm.add_request("Say b", GREEDY)
    outputs = drive(llm)
    pieces = [output for output in outputs if output.request_id == streamed]
    assert len(pieces) == 8
    assert "".join(texts(pieces)) == story_text("a")
    assert texts([output for output in outputs if output.request_id == whole]) == [story_text("b")]


def test_a_request_queued_by_hand_can_be_aborted(llm):
    request_id = llm.add_request("Say c", SamplingParams(max_tokens=100))
    llm.step()
    assert llm.abort(request_id)
    (output,) = drive(llm)
    assert (output.request_id, output.outputs[0].finish_reason) == (request_id, "abort")


def test_a_bad_request_is_not_queued(llm):
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        llm.add_request([], GREEDY)
    assert not llm.has_unfinished_requests()
    assert llm.step() == []
