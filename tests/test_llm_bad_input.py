"""Bad input gets an error that says what is wrong and what is allowed, and the engine serves the next request."""

import json

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import CheckpointError, convert_checkpoint
from jaxinfer.models.config import UnsupportedConfigError
from tests.tiny_checkpoints import (
    MAX_LEN,
    assert_idle,
    open_llm,
    story_llm,
    story_text,
    vocab_size,
    write_checkpoint,
)

GREEDY = SamplingParams(temperature=0.0)
LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 4, "kv_cache_tokens": 512}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with story_llm(tmp_path_factory) as llm:
        yield llm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A sound checkpoint, only to be read."""
    return write_checkpoint(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def damaged(tmp_path):
    """A checkpoint of the test's own, to be damaged."""
    return write_checkpoint(tmp_path / "checkpoint")


def refused(llm, call, message):
    """The call raises ValueError with this message, runs nothing, leaves nothing, and the next request is served."""
    steps = llm.get_metrics().num_steps_total
    with pytest.raises(ValueError, match=message):
        call()
    assert llm.get_metrics().num_steps_total == steps
    assert_idle(llm)
    assert llm.generate("Say a", GREEDY, use_tqdm=False)[0].outputs[0].text == story_text("a")


# Prompts

BAD_PROMPTS = {
    "empty text": ("", "prompt 1 is empty"),
    "empty ids": ([], "prompt 1 is empty"),
    "empty ids in a dict": ({"prompt_token_ids": []}, "prompt 1 is empty"),
    "too long": ([5] * MAX_LEN, f"prompt 1 has {MAX_LEN} tokens, .* max_model_len={MAX_LEN}"),
    "too long as text": ("x" * 500, f"prompt 1 has 500 tokens, .* max_model_len={MAX_LEN}"),
    "id too large": (
        [1, vocab_size()],
        f"prompt 1 has token id {vocab_size()}, outside the vocabulary of {vocab_size()}",
    ),
    "negative id": ([1, -1], f"prompt 1 has token id -1, outside the vocabulary of {vocab_size()}"),
    "text among ids": ([1, "a"], r"prompt 1 must hold integer token ids, got \[1, 'a'\]"),
    "fractions": ([1.0, 2.0], r"prompt 1 must hold integer token ids, got \[1.0, 2.0\]"),
    "none": (None, "prompt 1 must be text, .* got None"),
    "a number": (5, "prompt 1 must be text, .* got 5"),
    "bytes": (b"abc", "prompt 1 must be text, .* got b'abc'"),
    "a dict without prompt": ({"text": "abc"}, "prompt 1 must have the key prompt or prompt_token_ids"),
    "a message": ({"role": "user", "content": "abc"}, "prompt 1 must have the key prompt or prompt_token_ids"),
    "a lone surrogate": ("\ud800", "prompt 1: the text is not valid Unicode"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_one_bad_prompt_among_good_ones_is_named_and_none_of_them_runs(llm, name):
    prompt, message = BAD_PROMPTS[name]
    refused(llm, lambda: llm.generate(["Say a", prompt, "Say b"], GREEDY, use_tqdm=False), message)


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_stream_refuses_a_bad_prompt_when_it_is_made(llm, name):
    prompt, message = BAD_PROMPTS[name]
    refused(llm, lambda: llm.stream(["Say a", prompt], GREEDY), message)


@pytest.mark.parametrize("prompts", [None, 5, b"abc", 1.5])
def test_what_holds_no_prompts_is_refused(llm, prompts):
    refused(llm, lambda: llm.generate(prompts, GREEDY, use_tqdm=False), "prompts must be text, .* got")


# Conversations


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "conversation 0 must be a list of"),
        ([[]], "conversation 0 must be a list of"),
        ([[{"role": "user", "content": "x"}], ["hello"]], "conversation 1 must be a list of"),
        ({"role": "user", "content": "x"}, "must be a (list of|conversation or a list of)"),
        ([{"role": "system", "content": "x"}], "the chat template refused the messages: no role system"),
        ([{"role": "user", "content": "x" * 500}], f"prompt 0 has 502 tokens, .* max_model_len={MAX_LEN}"),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_refused(llm, messages, message):
    refused(llm, lambda: llm.chat(messages, GREEDY, use_tqdm=False), message)


@pytest.mark.parametrize("messages", [None, 5])
def test_what_holds_no_conversations_is_refused(llm, messages):
    refused(llm, lambda: llm.chat(messages, GREEDY, use_tqdm=False), "messages must be")


def test_a_keyword_of_chat_that_nothing_reads_is_refused(llm):
    conversation = [{"role": "user", "content": "x"}]
    refused(llm, lambda: llm.chat(conversation, GREEDY, use_tdqm=False), "use_tdqm is no argument of `chat`")
    (found,) = llm.chat(conversation, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    (same,) = llm.chat(conversation, GREEDY, use_tqdm=False, add_generation_prompt=True, tools=None)
    assert found.outputs[0].token_ids == same.outputs[0].token_ids


def test_a_priority_of_zero_is_none(llm):
    (found,) = llm.generate("Say a", GREEDY, use_tqdm=False, priority=[0])
    assert found.outputs[0].text == story_text("a")
    refused(llm, lambda: llm.generate("Say a", GREEDY, use_tqdm=False, priority=1), "needs an engine with scheduling_")
    refused(
        llm, lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, priority=1), "needs an engine"
    )


def test_chat_without_a_chat_template_names_the_way_out(tmp_path):
    llm = open_llm(write_checkpoint(tmp_path, chat_template=None))
    for call in (llm.chat, llm.stream):
        with pytest.raises(ValueError, match="has no chat template: use generate with a text prompt"):
            call([{"role": "user", "content": "x"}])
    assert_idle(llm)


# Sampling parameters

BAD_PARAMS = {
    "too few": ([GREEDY], "1 sampling_params for 2 prompts"),
    "too many": ([GREEDY] * 3, "3 sampling_params for 2 prompts"),
    "a stop token that does not exist": (
        [GREEDY, SamplingParams(stop_token_ids=[3, vocab_size()])],
        f"sampling_params of prompt 1: stop_token_ids has {vocab_size()}, outside the vocabulary of {vocab_size()}",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_PARAMS)
def test_parameters_that_cannot_be_served_are_refused(llm, name, stream):
    params, message = BAD_PARAMS[name]
    refused(llm, lambda: (llm.stream if stream else llm.generate)(["Say a", "Say b"], params), message)


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, "greedy", 5, [GREEDY, {"temperature": 0}], [GREEDY, None], [GREEDY, "greedy"]]
)
def test_parameters_of_another_type_are_refused(llm, params):
    refused(llm, lambda: llm.generate(["Say a", "Say b"], params, use_tqdm=False), "must be SamplingParams.* got")


# Without a tokenizer


@pytest.fixture(scope="module", params=["no files", "not wanted"])
def mute(request, checkpoint, tmp_path_factory):
    """An engine without tokenizer: there are no files of one, or it is not wanted."""
    if request.param == "not wanted":
        yield open_llm(checkpoint, skip_tokenizer_init=True)
    else:
        yield open_llm(write_checkpoint(tmp_path_factory.mktemp("bare"), tokenizer=False))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("Say a"), "prompt 0 is text, but this engine has no tokenizer"),
        (lambda llm: llm.generate([[1], {"prompt": "Say a"}]), "prompt 1 is text, but this engine has no tokenizer"),
        (lambda llm: llm.stream("Say a"), "prompt 0 is text, but this engine has no tokenizer"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}]), "conversation 0 is text, but .* no tokenizer"),
        (
            lambda llm: llm.generate([1], SamplingParams(stop="x")),
            "sampling_params of prompt 0: stop='x' needs a tokenizer",
        ),
        (
            lambda llm: llm.generate([1], SamplingParams(bad_words=["x"])),
            r"sampling_params of prompt 0: bad_words=\['x'\] needs a tokenizer",
        ),
        (lambda llm: llm.get_tokenizer(), "this engine has no tokenizer"),
    ],
)
def test_what_needs_a_tokenizer_is_refused_without_one(mute, call, message):
    with pytest.raises(ValueError, match=message):
        call(mute)
    assert_idle(mute)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float31"}, "dtype='float31' is not supported; allowed: auto, float32"),
        ({"dtype": np.int32}, "is not supported; allowed: auto, float32"),
        ({"max_model_len": MAX_LEN + 1}, rf"max_model_len={MAX_LEN + 1} exceeds .* \({MAX_LEN}\)"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 1, got 0"),
        ({"max_model_len": "64"}, "max_model_len must be an integer of at least 1, got '64'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 7},
            r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)",
        ),
        ({"page_size": 3}, "page_size must be a power of two up to 256, got 3"),
        ({"page_size": 0}, "page_size must be an integer of at least 1, got 0"),
        ({"page_size": "4"}, "page_size must be an integer of at least 1, got '4'"),
        ({"page_size": 0, "kv_cache_tokens": None}, "page_size must be an integer of at least 1, got 0"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens must be an integer of at least 1, got 0"),
        ({"kv_cache_tokens": "512"}, "kv_cache_tokens must be an integer of at least 1, got '512'"),
        (
            {"kv_cache_tokens": 60, "max_model_len": 64},
            r"kv_cache_tokens \(60\) .* too few for one request of max_model_len \(64\): raise kv_cache_tokens or set "
            "max_model_len to at most 60",
        ),
        ({"kv_cache_tokens": 3}, r"kv_cache_tokens \(3\) .* too few for one request"),
        ({"kv_cache_tokens": 10**15}, f"kv_cache_tokens={10**15} .* at most [0-9]+ tokens fit"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], got 1.5"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"scheduling_policy": "random"}, "scheduling_policy must be one of fcfs, priority, got 'random'"),
        ({"attention_backend": "magic"}, "attention_backend must be one of .*, got 'magic'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be an integer of at least 1, got '2'"),
        (
            {"tensor_parallel_size": 4096},
            f"tensor_parallel_size=4096, but there are {len(jax.devices())} devices",
        ),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(checkpoint, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, **{**LIMITS, **settings})


def test_an_unknown_setting_is_refused_by_name(checkpoint):
    with pytest.raises(TypeError, match="max_sequences"):
        LLM(checkpoint, max_sequences=5)


# Checkpoints


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no checkpoint directory at {tmp_path / 'missing'}"):
        LLM(tmp_path / "missing")


def test_a_file_instead_of_a_directory_is_named(checkpoint):
    with pytest.raises(CheckpointError, match=r"config\.json is a file; name the directory"):
        LLM(checkpoint / "config.json")


def test_a_directory_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path} is not a checkpoint: it has no config.json"):
        LLM(tmp_path)


def test_an_unknown_architecture_is_named_with_the_known_ones(damaged):
    config = json.loads((damaged / "config.json").read_text())
    config["architectures"], config["model_type"] = ["MambaForCausalLM"], "mamba"
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedConfigError, match="unknown architecture MambaForCausalLM; supported: .*Qwen3"):
        LLM(damaged)


def test_weights_that_are_not_there_are_an_error(damaged):
    (damaged / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=str(damaged)):
        LLM(damaged)


def test_a_truncated_file_of_weights_is_named(damaged):
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        LLM(damaged)


def test_a_conversion_that_did_not_finish_is_not_taken_for_a_checkpoint(checkpoint, tmp_path):
    converted = convert_checkpoint(checkpoint, tmp_path / "converted", progress=False)
    (converted / "jaxinfer.json").unlink()
    with pytest.raises(CheckpointError, match=f"{converted} is incomplete: .* did not finish"):
        LLM(converted)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_settings_is_named(damaged, name):
    (damaged / name).write_text('{"half": ')
    with pytest.raises(ValueError, match=str(damaged)):
        LLM(damaged, **LIMITS)


@pytest.mark.parametrize("settings", [{}, {"page_size": 3}, {"tokenizer": "missing"}])
def test_what_is_small_is_checked_before_the_weights_are_read(damaged, settings):
    """Reading them can take minutes: here it would fail."""
    (damaged / "tokenizer.json").write_text('{"half": ')
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises((ValueError, FileNotFoundError), match="tokenizer|page_size"):
        LLM(damaged, **{**LIMITS, **settings})


def test_damaged_tokenizer_files_do_not_matter_where_no_tokenizer_is_wanted(damaged):
    (damaged / "tokenizer.json").write_text('{"half": ')
    assert open_llm(damaged, skip_tokenizer_init=True).tokenizer is None


@pytest.mark.parametrize(
    ("prefix", "suffixes", "message"),
    [
        ("text", [], "suffixes is empty: there must be at least 1 branch"),
        ("text", "abc", "suffixes must be a list, of texts or of lists of token ids, got 'abc'"),
        ("text", ["a", [1]], r"suffix 1 must be text, as the prefix is, got \[1\]"),
        ([1, 2], [[3], "a"], "suffix 1 must be a list of token ids, as the prefix is, got 'a'"),
        ([], [[3], []], "prompt 1 is empty"),
    ],
)
def test_branches_that_do_not_go_together_are_refused(llm, prefix, suffixes, message):
    refused(llm, lambda: llm.generate_branches(prefix, suffixes, GREEDY), message)


def test_a_branch_of_several_samples_and_an_unknown_mode_are_refused(llm):
    refused(llm, lambda: llm.generate_branches("a", ["b"], SamplingParams(n=2)), "n=2, a branch is one sequence")
    refused(llm, lambda: llm.generate_branches("a", ["b"], SamplingParams(prompt_logprobs=1)), "branch 0: prompt_logp")
    for lengths in ([1], [1, None], [1, 2, 3]):
        refused(
            llm, lambda lengths=lengths: llm.generate_branches("a", ["b", "c"], GREEDY, predicted_lengths=lengths),
            "predicted_lengths must be 2 integers",
        )  # fmt: skip
    refused(
        llm, lambda: llm.generate_branches("a", ["b"], GREEDY, "both"), "branch_mode must be one of in_one_sequence"
    )


def test_a_missing_tokenizer_directory_is_named(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no tokenizer directory at {tmp_path / 'missing'}"):
        LLM(checkpoint, tokenizer=tmp_path / "missing", **LIMITS)


def test_without_a_model_and_without_the_embedded_one_the_way_out_is_named(monkeypatch, tmp_path):
    elsewhere = tmp_path / "jaxinfer" / "checkpoint" / "directory.py"
    monkeypatch.setattr("jaxinfer.checkpoint.directory.__file__", str(elsewhere))
    with pytest.raises(FileNotFoundError, match="the embedded checkpoint is at none of .*; name a model"):
        LLM()
