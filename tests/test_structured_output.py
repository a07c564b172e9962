"""Structured output of the embedded checkpoints: what comes is what the grammar says, in every way that users ask."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema
import pytest

from jaxinfer import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from jaxinfer.strategies.beams import BeamRun

QUESTION = [{"role": "user", "content": "Who keeps the lighthouse?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
COMPACT = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)


def asks(wanted, **params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 96, **params}, structured_outputs=wanted)


@pytest.fixture(scope="module")
def llm():
    return LLM(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=512)


def test_json_validates_greedy_and_sampled_beside_other_requests(llm):
    params = [asks(COMPACT, temperature=t, seed=i, max_tokens=150) for i, t in enumerate((0.0, 0.7, 1.0, 1.3))]
    alone = [llm.chat([QUESTION], one, use_tqdm=False)[0].outputs[0] for one in params]
    together = llm.chat([QUESTION] * 6, [*params, SamplingParams(max_tokens=20), asks({"regex": "[a-z ]+"})])
    for one, output in zip(alone, together, strict=False):
        assert output.outputs[0].token_ids == one.token_ids
        assert one.finish_reason == "stop", one.text
        jsonschema.validate(json.loads(one.text), PERSON)
    assert re.fullmatch("[a-z ]+", together[-1].outputs[0].text)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,8} [0-9]{2}"}, r"[A-Z][a-z]{2,8} [0-9]{2}"),
        ({"choice": ["by the sea", "on the hill"]}, "by the sea|on the hill"),
        ({"grammar": 'start: "yes" | "no, " /[a-z]{1,5}/'}, "yes|no, [a-z]{1,5}"),
        ({"json_object": True, "disable_any_whitespace": True}, r"\{.*"),
    ],
    ids=["regex", "choice", "grammar", "json_object"],
)  # fmt: skip
def test_every_kind_is_followed(wanted, pattern, llm):
    for seed in range(3):
        output = llm.chat([QUESTION], asks(wanted, temperature=1.0, seed=seed), use_tqdm=False)[0].outputs[0]
        assert re.fullmatch(pattern, output.text, re.DOTALL), output.text


def test_samples_branches_and_streams_follow_it(llm):
    output = llm.chat([QUESTION], asks({"choice": ["north", "south"]}, n=3, temperature=1.0, seed=2))[0]
    assert {one.text for one in output.outputs} <= {"north", "south"} and len(output.outputs) == 3
    prefix = llm.get_tokenizer().apply_chat_template(QUESTION)
    own = [asks({"choice": ["one", "two"]}), asks({"regex": "[0-9]{3}"})]
    branches = llm.generate_branches(prefix, [[5], [6]], own)
    first, second = (one.text for one in branches.outputs)
    assert first in ("one", "two") and re.fullmatch("[0-9]{3}", second)
    parts = [part.outputs[0].text for part in llm.stream([QUESTION], asks(COMPACT, max_tokens=150))]
    assert len(parts) > 1
    jsonschema.validate(json.loads("".join(parts)), PERSON)


def test_stop_strings_and_lengths_cut_forced_text_token_by_token(llm):
    sentence = "The lamp is lit at dusk, and the boats turn home."
    fixed = {"grammar": f'start: "{sentence}"'}
    whole = llm.chat([QUESTION], asks(fixed), use_tqdm=False)[0].outputs[0]
    assert (whole.text, whole.finish_reason) == (sentence, "stop")
    cut = llm.chat([QUESTION], asks(fixed, stop=["dusk"]), use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("The lamp is lit at ", "stop", "dusk")
    short = llm.chat([QUESTION], asks(fixed, max_tokens=4), use_tqdm=False)[0].outputs[0]
    assert (len(short.token_ids), short.finish_reason) == (4, "length") and sentence.startswith(short.text)
    counted = llm.chat([QUESTION], asks(fixed, logprobs=1), use_tqdm=False)[0].outputs[0]
    assert counted.token_ids == whole.token_ids and counted.logprobs is not None
    assert len(counted.logprobs) == len(whole.token_ids)
    assert all(next(iter(entry)) == token for entry, token in zip(counted.logprobs, whole.token_ids, strict=True))


def test_beams_follow_it_with_log_probabilities_among_all_tokens(llm):
    wanted = {"regex": "[a-d]{3}"}
    prompt = {"prompt_token_ids": llm.get_tokenizer().apply_chat_template(QUESTION)}
    [found] = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=8, structured_outputs=wanted))
    assert len(found.sequences) == 3
    for sequence in found.sequences:
        assert re.fullmatch("[a-d]{3}", sequence.text) and sequence.finish_reason == "stop"
        [scored] = llm.generate(
            [{"prompt_token_ids": [*found.prompt_token_ids, *sequence.token_ids]}],
            SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False,
        )  # fmt: skip
        assert scored.prompt_logprobs is not None
        own = scored.prompt_logprobs[len(found.prompt_token_ids) :]
        total = sum(next(iter(entry.values())).logprob for entry in own if entry)
        assert sequence.cumulative_logprob == pytest.approx(total, abs=1e-2)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": {"type": "object", "not": {}}}, 'sampling_params of prompt 0: structured_outputs.json: .*"not"'),
        ({"regex": "(?=a)b"}, "sampling_params of prompt 0: structured_outputs.regex"),
        ({"grammar": "start: nothing"}, "sampling_params of prompt 0: structured_outputs.grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_anything_runs(wanted, message, llm):
    steps = llm.get_metrics().num_steps_total
    with pytest.raises(ValueError, match=message):
        llm.chat([QUESTION], asks(wanted), use_tqdm=False)
    assert llm.get_metrics().num_steps_total == steps and not llm.has_unfinished_requests()


def test_an_engine_without_a_tokenizer_refuses_it():
    bare = LLM(skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2)
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer, and this engine has none"):
        bare.generate([{"prompt_token_ids": [1, 2]}], asks({"regex": "a"}), use_tqdm=False)


def test_async_requests_follow_it_and_refusals_reach_the_caller():
    async def run() -> tuple[str, str]:
        llm = AsyncLLM(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=512)
        try:
            text = "".join([part.outputs[0].text async for part in llm.chat(QUESTION, asks(COMPACT, max_tokens=150))])
            with pytest.raises(ValueError, match="prompt 0: structured_outputs.json"):
                await llm.add(QUESTION, asks({"json": {"not": {}}}))
            return text, llm.get_metrics().prometheus()
        finally:
            await llm.shutdown()

    text, metrics = asyncio.run(run())
    jsonschema.validate(json.loads(text), PERSON)
    assert "constraint_refusals_total" in metrics


def test_a_text_that_is_whole_ends_with_stop_although_its_end_cannot_be_drawn(llm):
    tokens = llm.get_tokenizer().encode("lamp", add_special_tokens=False)
    for more in ({"min_tokens": 9}, {"allowed_token_ids": tokens}):
        found = []
        for logprobs in (None, 0):
            params = asks({"choice": ["lamp"]}, max_tokens=12, logprobs=logprobs, **more)
            (output,) = llm.generate(["The"], params, use_tqdm=False)
            completion = output.outputs[0]
            assert (completion.text, completion.finish_reason, output.error) == ("lamp", "stop", None)
            found.append(completion)
        assert found[1].logprobs is not None and len(found[1].logprobs) == len(found[1].token_ids)


def test_ends_that_are_ignored_without_a_grammar_are_none_below_the_fewest_tokens(llm):
    eos = llm.eos_token_ids
    for seed in range(4):
        params = asks({"regex": "[a-z ]+"}, temperature=1.5, seed=seed, min_tokens=20, max_tokens=40, ignore_eos=True)
        completion = llm.generate(["The"], params, use_tqdm=False)[0].outputs[0]
        assert len([token for token in completion.token_ids if token not in eos]) >= 20
        assert completion.stop_reason is None


def test_a_search_under_a_grammar_that_is_interrupted_finds_the_same(llm, monkeypatch):
    search = BeamSearchParams(beam_width=3, max_tokens=8, structured_outputs={"regex": "[a-d]{3}"})
    (expected,) = llm.beam_search(["The"], search)
    usual, count = BeamRun.advance, 0

    def advance(self):
        nonlocal count
        count += 1
        if count in (4, 9):  # what the beams have drawn has landed, and no one has chosen among it
            raise RuntimeError("a planted failure")
        return usual(self)

    monkeypatch.setattr(BeamRun, "advance", advance)
    failures = llm.get_metrics().num_step_failures_total
    (found,) = llm.beam_search(["The"], search)
    assert llm.get_metrics().num_step_failures_total > failures
    assert [one.token_ids for one in found.sequences] == [one.token_ids for one in expected.sequences]
    assert all(re.fullmatch("[a-d]{3}", one.text) for one in found.sequences)
