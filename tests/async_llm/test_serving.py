"""`AsyncLLM`: many callers, each of which awaits its own outputs."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time

import pytest

from jaxinfer import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxinfer.scheduling.request_group import RequestGroup
from tests.async_llm.builders import GREEDY, LONG, QUESTION, TEXTS, collect, is_idle, joined, run


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_callers_get_what_each_gets_alone(pause, engine, llm):
    """Streams at any pace, and wholes."""

    async def read(text: str, kind: str) -> tuple[str, list[int], str | None]:
        outputs = []
        async for output in engine.generate(text, GREEDY, request_id=f"my {text}", output_kind=kind):
            assert output.request_id == f"my {text}"
            outputs.append(output)
            await asyncio.sleep(pause)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert kind == "delta" or len(outputs) == 1
        return joined(outputs)

    async def all_of_them() -> list[tuple[str, list[int], str | None]]:
        found = await asyncio.gather(*[read(text, kind) for kind in ("delta", "final") for text in TEXTS])
        await is_idle(engine)
        return found

    expected = [output.outputs[0] for output in llm.generate(TEXTS, GREEDY, use_tqdm=False)]
    assert run(all_of_them()) == 2 * [(each.text, each.token_ids, each.finish_reason) for each in expected]


def test_jobs_and_branches_run_beside_streams(engine, llm):
    events = []

    async def all_of_them():
        skeleton, beams, text = await asyncio.gather(
            engine.skeleton_of_thought(QUESTION, GREEDY, on_event=events.append),
            engine.beam_search(["the sea"], BeamSearchParams(beam_width=3, max_tokens=6)),
            collect(engine.generate("rain", GREEDY)),
        )
        branches = await collect(engine.generate_branches("the ", ["sea", "moon"], GREEDY, output_kind="final"))
        chat = await collect(engine.chat([{"role": "user", "content": "Hello!"}], GREEDY))
        await is_idle(engine)
        return skeleton, beams, text, branches, chat

    skeleton, beams, text, [branches], chat = run(all_of_them())
    assert skeleton.text == llm.skeleton_of_thought(QUESTION, GREEDY).text
    assert "".join(event.text for event in events if event.point is None) == skeleton.written
    [expected] = llm.beam_search(["the sea"], BeamSearchParams(beam_width=3, max_tokens=6))
    assert [each.token_ids for each in beams[0].sequences] == [each.token_ids for each in expected.sequences]
    assert joined(text)[1] == llm.generate("rain", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    whole = llm.generate_branches("the ", ["sea", "moon"], GREEDY, use_tqdm=False)
    assert [each.token_ids for each in branches.outputs] == [each.token_ids for each in whole.outputs]
    [answer] = llm.chat([{"role": "user", "content": "Hello!"}], GREEDY, use_tqdm=False)
    assert joined(chat)[0] == answer.outputs[0].text


def test_what_cannot_be_served_is_refused_at_the_call(engine):
    async def refused() -> None:
        for prompt, options, words in (
            ([], {}, "empty"),
            ("the sea", {"output_kind": "half"}, "output_kind"),
            ({"prompt_token_ids": [10**6]}, {}, "outside the vocabulary"),
        ):
            with pytest.raises(ValueError, match=words):
                await engine.add(prompt, GREEDY, **options)
        with pytest.raises(ValueError, match="params must be BeamSearchParams"):
            await engine.beam_search("the sea", None)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="beam_width=9"):
            await engine.beam_search("the sea", BeamSearchParams(beam_width=9, max_tokens=6))
        await is_idle(engine)

    run(refused())


def test_several_loops_are_served_at_once(engine, llm):
    found: dict[str, tuple] = {}

    def serve(text: str) -> None:
        found[text] = joined(run(collect(engine.generate(text, GREEDY))))

    threads = [threading.Thread(target=serve, args=(text,)) for text in TEXTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = llm.generate(TEXTS, GREEDY, use_tqdm=False)
    assert found == {
        text: (each.outputs[0].text, each.outputs[0].token_ids, "length")
        for text, each in zip(TEXTS, expected, strict=True)
    }
    run(is_idle(engine))


def test_a_name_ends_all_that_bear_it_and_no_member_of_a_group(engine):
    async def ends() -> None:
        streams = [await engine.add("the sea", LONG, request_id="mine") for _ in range(2)]
        samples = await engine.add("rain", SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=0))
        for name in (f"{samples.request_id}-0", f"{samples._reader.engine_id}-0", samples._reader.engine_id):
            await engine.abort(name)  # ids of the engine's own
        await engine.abort("of no request")
        for stream in streams:
            await anext(stream)
        await engine.abort("mine")
        for stream in streams:
            assert joined(await collect(stream))[2] == "abort"
        reasons = {part.index: part.finish_reason for output in await collect(samples) for part in output.outputs}
        assert reasons == {0: "length", 1: "length"}
        await is_idle(engine)

    run(ends())


def test_many_jobs_at_once_answer_as_alone(engine, llm):
    """Searches that wait for places, beside others that come and go."""
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    texts = [*TEXTS, "birds", "colours"]

    async def small(text: str) -> list[list[int]]:
        tokens: list[list[int]] = []
        for _ in range(4):
            [output] = await engine.beam_search(text, params)
            tokens = [sequence.token_ids for sequence in output.sequences]
        return tokens

    async def all_of_them():
        many = asyncio.ensure_future(engine.beam_search(texts, params))
        found = await asyncio.gather(*[small(text) for text in TEXTS])
        outputs = await many
        await is_idle(engine)
        return found, [[sequence.token_ids for sequence in output.sequences] for output in outputs]

    before = engine.get_metrics().num_raised_steps_total
    small_ones, many = run(all_of_them())
    alone = [[s.token_ids for s in output.sequences] for output in llm.beam_search(texts, params)]
    assert many == alone and small_ones == alone[: len(TEXTS)]
    assert engine.get_metrics().num_raised_steps_total == before


def test_the_lowest_priority_runs_first(engine):
    """Two of them at a time: those that came last, but for the one that ran already."""

    async def in_order() -> list[str]:
        ends: list[str] = []

        async def read(stream) -> None:
            await collect(stream)
            ends.append(stream.request_id)

        await engine.call(lambda: engine._client.core.pause("test"))
        streams = [
            await engine.add(
                "the sea", SamplingParams(max_tokens=1), request_id=str(p), priority=p, output_kind="final"
            )
            for p in range(24, 0, -1)
        ]
        await engine.call(lambda: engine._client.core.resume("test"))
        await asyncio.gather(*[read(stream) for stream in streams])
        return ends

    ends = run(in_order())
    assert [sorted(map(int, ends[i : i + 8])) for i in (0, 8, 16)] == [
        list(range(1, 9)), list(range(9, 17)), list(range(17, 25))
    ]  # fmt: skip


@pytest.mark.parametrize("bad", ["", [], 0.0, [5], True, None])
def test_a_priority_is_an_integer(bad, engine):
    async def refused() -> None:
        with pytest.raises(ValueError, match="priority must be an integer"):
            await engine.add("the sea", GREEDY, priority=bad)

    run(refused())


def test_what_belongs_to_a_group_has_its_priority(engine):
    inputs = engine._client.inputs
    params = SamplingParams(n=2, max_tokens=3)
    [group] = inputs.requests([{"prompt_token_ids": list(range(300, 350))}], params, stream=False, priority=7)
    assert isinstance(group, RequestGroup) and group.trunk is not None
    assert [sequence.priority for sequence in (*group.members, group.trunk)] == [7, 7, 7]


def test_functions_run_between_steps_and_their_errors_come_back(engine):
    async def call() -> None:
        assert await engine.call(threading.current_thread) is engine._thread._thread
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 // 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await engine.call(lambda: next(iter([])))
        assert await engine.reset_prefix_cache()
        assert engine.get_metrics().num_raised_steps_total == 0

    run(call())
    assert inspect.signature(AsyncLLM) == inspect.signature(LLM)


def test_priorities_need_their_policy(llm):
    with pytest.raises(ValueError, match="scheduling_policy"):
        llm.generate("the sea", GREEDY, use_tqdm=False, priority=1)


def test_a_loop_is_woken_once_a_step(engine, monkeypatch):
    async def count() -> None:
        loop = asyncio.get_running_loop()
        wakes, wake = [], loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a, **k: (wakes.append(a), wake(*a, **k)))
        streams = [await engine.add(text, GREEDY) for text in TEXTS]
        before = engine.get_metrics().num_launches_total
        await asyncio.gather(*[collect(stream) for stream in streams])
        monkeypatch.undo()
        assert len(wakes) <= engine.get_metrics().num_launches_total - before + 1

    run(count())


def test_waiting_costs_no_time_of_a_processor(engine):
    run(is_idle(engine))
    begin = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - begin < 0.2
