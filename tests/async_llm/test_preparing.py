"""What requests need before they run: made beside the event loop, once, and checked before anything is queued."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from jaxinfer import AsyncLLM, SamplingParams
from jaxinfer.branching.beam_search import BeamSearchParams
from tests.async_llm.builders import QUESTION, collect, is_idle, run


@pytest.mark.parametrize("kind", ["plain", "branches", "beams"])
def test_a_grammar_is_compiled_beside_the_event_loop(kind, engine: AsyncLLM, monkeypatch):
    inputs, callers = engine._client.inputs, []
    workers: Any = inputs._workers
    compile_in_workers = workers.run

    def noted(work: Any) -> Any:
        callers.append(threading.current_thread())
        return compile_in_workers(work)

    monkeypatch.setattr(workers, "run", noted)
    grammar = {"regex": f"{kind}[ab]"}
    params = SamplingParams(max_tokens=12, structured_outputs=grammar)

    async def text() -> str:
        if kind == "beams":
            (found,) = await engine.beam_search(["a"], BeamSearchParams(2, 12, structured_outputs=grammar))
            return found.sequences[0].text
        given = engine.generate("a", params) if kind == "plain" else engine.generate_branches("a", ["b"], params)
        return "".join(output.outputs[0].text for output in await collect(given))

    assert run(text()) in (f"{kind}a", f"{kind}b")
    assert len(callers) == 1 and callers[0] is not threading.main_thread()


def test_a_grammar_that_is_refused_is_an_error_of_the_search(engine: AsyncLLM):
    with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
        run(engine.beam_search(["a"], BeamSearchParams(2, 4, structured_outputs={"regex": "("})))


BAD = [
    ({"min_tokens": 500, "max_tokens": 600}, "min_tokens"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"allowed_token_ids": [1], "bad_words": ["x"], "logit_bias": {10**6: 1.0}}, "logit_bias"),
]


@pytest.mark.parametrize("given, says", BAD, ids=[says for _, says in BAD])
def test_a_skeleton_that_cannot_be_served_is_refused_before_it_is_queued(given, says, engine: AsyncLLM):
    async def add() -> None:
        with pytest.raises(ValueError, match=says):
            await engine.add_skeleton(QUESTION, SamplingParams(**given))
        assert not engine._thread._jobs
        await is_idle(engine)

    run(add())


def test_a_skeleton_runs_as_a_task_whose_end_is_its_own(engine: AsyncLLM):
    params = SamplingParams(temperature=0.0, max_tokens=24)

    async def both() -> tuple[str, str]:
        (await engine.add_skeleton(QUESTION, params)).cancel()
        task = await engine.add_skeleton(QUESTION, params)
        found = (await task).text, (await engine.skeleton_of_thought(QUESTION, params)).text
        await is_idle(engine)
        return found

    first, second = run(both())
    assert first == second != ""


def test_the_bad_words_of_a_request_are_tokenised_once_for_all_its_prompts_and_samples(engine: AsyncLLM, monkeypatch):
    tokenizer: Any = engine._client.inputs.tokenizer
    encode, texts = tokenizer.encode, []

    def noted(text: str, **options: Any) -> list[int]:
        texts.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", noted)
    params = SamplingParams(max_tokens=2, n=3, bad_words=["sturgeon", "kettle"])

    async def several() -> None:
        for number in range(4):
            await collect(await engine.add({"prompt_token_ids": [5, 6 + number]}, params))

    run(several())
    assert sorted(texts) == [" kettle", " sturgeon", "kettle", "sturgeon"]
