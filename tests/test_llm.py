"""`LLM.generate` and `LLM.chat`: prompts in every form, defaults of the checkpoint, every way to end."""

import pytest

from jaxinfer import SamplingParams
from tests.tiny_checkpoints import (
    ASSISTANT,
    END,
    MAX_LEN,
    STOP,
    TOOL,
    USER,
    open_llm,
    shared_compile_cache,
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


def complete(llm, prompt, **params):
    """The completion of one prompt, greedy unless a temperature is given."""
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0.0, **params}), use_tqdm=False)
    return output.outputs[0]


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


@pytest.fixture
def with_generation_config(tmp_path, tmp_path_factory):
    """Opens an engine on a checkpoint with the given generation_config.json."""

    def open_with(**values):
        return open_llm(write_checkpoint(tmp_path / "checkpoint", generation_config=values))

    with shared_compile_cache(tmp_path_factory):
        yield open_with


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


# Ways to end


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
    """The model goes on with its second choice, and the end may come after."""
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


def test_the_engine_s_seed_makes_a_whole_run_repeatable(tmp_path, tmp_path_factory):
    directory = write_checkpoint(tmp_path / "checkpoint")
    params = SamplingParams(temperature=FLAT, max_tokens=6)
    with shared_compile_cache(tmp_path_factory):
        runs = [open_llm(directory, seed=seed).generate(["a", "b"], params, False) for seed in (1, 1, 2)]
    first, again, other = ([output.outputs[0].token_ids for output in run] for run in runs)
    assert first == again
    assert first != other


# Progress


def test_the_progress_bar_counts_prompts_and_shows_input_and_output_tokens_per_second(llm, capfd):
    llm.generate(["Say a", "Say b", "Say c"], GREEDY)
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


def test_a_checkpoint_without_tokenizer_files_serves_token_ids(tmp_path, tmp_path_factory):
    with shared_compile_cache(tmp_path_factory):
        llm = open_llm(write_checkpoint(tmp_path / "checkpoint", tokenizer=False))
        completion = complete(llm, list(b"Say a"))
    assert llm.tokenizer is None
    assert (completion.text, completion.token_ids) == ("", story_ids("a"))
    assert completion.finish_reason == "stop"


def test_the_tokenizer_may_lie_elsewhere(tmp_path, tmp_path_factory):
    weights = write_checkpoint(tmp_path / "weights", tokenizer=False)
    with shared_compile_cache(tmp_path_factory):
        llm = open_llm(weights, tokenizer=write_checkpoint(tmp_path / "other"))
        assert complete(llm, "Say a").text == story_text("a")
