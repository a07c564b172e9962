"""A job of several requests does not step the engine itself: it advances beside other requests, and leaks nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxinfer import LLM, BeamSearchParams, RequestOutput, SamplingParams
from jaxinfer.frontend.beam_search import BeamSearchJob
from jaxinfer.frontend.client import RunningJob
from jaxinfer.frontend.jobs import Answer, Item
from jaxinfer.frontend.progress import CompileNotice
from jaxinfer.outputs import BeamSearchOutput
from jaxinfer.skeleton.answer import SkeletonOfThought

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
QUESTION = "How do I make a small garden?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=8, max_num_batched_tokens=256, kv_cache_tokens=4096)


def beam_job(llm: LLM, prompts: Sequence[str], width: int = 3) -> BeamSearchJob:
    client = llm.client
    params = BeamSearchParams(beam_width=width, max_tokens=8)
    return BeamSearchJob(client.core, client.inputs, client.tokenizer, prompts, params)


def tokens_of(outputs: Sequence[BeamSearchOutput]) -> list[list[list[int]]]:
    return [[sequence.token_ids for sequence in output.sequences] for output in outputs]


def test_jobs_beside_each_other_answer_as_alone(llm):
    method = SkeletonOfThought(llm.client)
    alone = method.answer(QUESTION, GREEDY)
    beams = llm.beam_search(["the sea", "a list"], BeamSearchParams(beam_width=3, max_tokens=8))
    [text] = llm.generate("rain", GREEDY, use_tqdm=False)
    running = {
        "skeleton": RunningJob(llm.client, method.job(QUESTION, GREEDY)),
        "another": RunningJob(llm.client, method.job(QUESTION, GREEDY, on_event=lambda event: None)),
        "beams": RunningJob(llm.client, beam_job(llm, ["the sea", "a list"])),
    }
    request_id = llm.add_request("rain", GREEDY)
    found, outputs = {}, []
    while len(found) < len(running) or not outputs:
        for name, job in running.items():
            answer = None if name in found else job.advance()
            if answer is not None:
                found[name] = answer.value
        outputs += llm.step()
    assert found["skeleton"].text == found["another"].text == alone.text
    assert tokens_of(found["beams"]) == tokens_of(beams)
    assert outputs[0].request_id == request_id and outputs[0].outputs[0].token_ids == text.outputs[0].token_ids
    assert not llm.has_unfinished_requests() and not llm.client.has_readers


@pytest.mark.parametrize("kind", ["skeleton", "beams"])
@pytest.mark.parametrize("steps", [0, 1, 3, 6])  # a step may land several launches, and there are over a dozen
def test_a_job_that_is_closed_leaves_nothing_behind(kind, steps, llm):
    job = beam_job(llm, ["the sea", "a list"]) if kind == "beams" else SkeletonOfThought(llm.client).job(QUESTION)
    running = RunningJob(llm.client, job)
    for _ in range(steps):
        assert running.advance() is None
        llm.client.step()
    running.close()
    while llm.has_unfinished_requests():
        llm.step()
    assert not llm.client.has_readers
    llm.core.check_integrity()
    assert llm.reset_prefix_cache()


def test_more_searches_than_there_are_places_for_take_turns(llm):
    prompts = ["the sea", "a list", "rain", "bread", "birds"]
    job = beam_job(llm, prompts)  # two at once of eight places
    running, most = RunningJob(llm.client, job), 0
    while (answer := running.advance()) is None:
        most = max(most, len(llm.core.searches))
        llm.client.step()
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    alone = [llm.beam_search(prompt, params)[0] for prompt in prompts]
    assert most == 2 and tokens_of(answer.value) == tokens_of(alone)


class Failing:
    """Asks for a request, and fails when something has come of it."""

    name, stream = "a job that fails", True

    def __init__(self, llm: LLM) -> None:
        self._llm, self.was_aborted = llm, False

    def begin(self) -> Sequence[Item]:
        return self._llm.client.inputs.requests(["the sea", "rain"], GREEDY, stream=True)

    def take(self, outputs: Sequence[RequestOutput]) -> Sequence[Item] | Answer[None]:
        if outputs:
            raise RuntimeError("as told")
        return ()

    def abort(self) -> None:
        self.was_aborted = True


def test_a_job_that_fails_takes_its_requests_along(llm):
    job = Failing(llm)
    with pytest.raises(RuntimeError, match="as told"):
        llm.client.answer(job, CompileNotice())
    assert job.was_aborted
    while llm.has_unfinished_requests():
        llm.step()
    assert not llm.client.has_readers and not llm.core.compile_listeners
