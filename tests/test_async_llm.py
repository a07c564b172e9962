"""`AsyncLLM`: many callers, each of which awaits its own; who leaves takes its request along."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from jaxinfer import LLM, AsyncLLM, BeamSearchParams, RequestOutput, SamplingParams
from jaxinfer.async_llm import EngineDeadError
from jaxinfer.scheduling.request_group import RequestGroup

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "kv_cache_tokens": 4096}
TEXTS = ["the sea", "a list of numbers", "rain", "how bread is made"]
QUESTION = "How do I make a small garden?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**LIMITS)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    """Shared by tests that leave it as it was."""
    found = AsyncLLM(**LIMITS, scheduling_policy="priority")
    yield found
    found._stop()


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 300))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about within 30 seconds")


async def is_idle(engine: AsyncLLM) -> None:
    """Wait until nothing runs, and see that nothing is kept of what did."""
    core, thread = engine._client.core, engine._thread
    await until(lambda: not core.has_unfinished_requests())
    assert not await engine.call(lambda: thread._readers or thread._jobs or thread._names or engine._client.has_readers)
    await engine.call(core.check_integrity)


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int], str | None]:
    parts = [output.outputs[0] for output in outputs]
    return "".join(p.text for p in parts), [t for p in parts for t in p.token_ids], parts[-1].finish_reason


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


async def collect(outputs: Any) -> list[RequestOutput]:
    return [output async for output in outputs]


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


async def leave_by_close(stream) -> None:
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_cancelling(stream) -> None:
    task = asyncio.create_task(collect(stream))
    await until(lambda: stream._task is task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_with_the_task(stream) -> None:
    async def reads_two() -> None:
        await anext(stream)
        await anext(stream)
        raise RuntimeError("its exception keeps the frame alive, and with it the stream")

    task = asyncio.create_task(reads_two())
    await asyncio.wait([task])
    assert task.exception() is not None and stream.finished


async def leave_by_letting_go(stream) -> None:
    await anext(stream)


@pytest.mark.parametrize("leave", [leave_by_close, leave_by_cancelling, leave_with_the_task, leave_by_letting_go])
def test_who_leaves_takes_the_request_along(leave, engine):
    async def leaves() -> None:
        stream = await engine.add("the sea", LONG)
        await leave(stream)
        if leave is leave_by_letting_go:
            del stream
            gc.collect()
        begin = engine.get_metrics().generation_tokens_total
        await is_idle(engine)
        assert engine.get_metrics().generation_tokens_total - begin < 100

    run(leaves())


def test_a_break_leaves_a_stream_that_is_kept(engine):
    async def goes_on() -> list[int]:
        stream = await engine.add("the sea", GREEDY)
        tokens = []
        async for output in stream:
            tokens += output.outputs[0].token_ids
            break
        tokens += joined(await collect(stream))[1]
        await is_idle(engine)
        return tokens

    assert len(run(goes_on())) == GREEDY.max_tokens


def test_a_task_for_each_output_ends_nothing(engine):
    async def one_by_one() -> int:
        streams = [await engine.add(text, GREEDY) for text in TEXTS]
        count = 0
        while not all(stream.finished for stream in streams):
            open_ones = [stream for stream in streams if not stream.finished]
            outputs = await asyncio.gather(*[asyncio.create_task(anext(stream)) for stream in open_ones])
            count += sum(len(output.outputs[0].token_ids) for output in outputs)
        await is_idle(engine)
        return count

    assert run(one_by_one()) == len(TEXTS) * (GREEDY.max_tokens or 0)


@pytest.mark.parametrize("kind", ["delta", "final", "job"])
def test_a_closed_loop_takes_its_requests_along(kind, engine):
    streams: list[Any] = []
    tokens = engine.get_metrics().generation_tokens_total

    async def begin() -> None:
        if kind == "job":
            streams.append(asyncio.ensure_future(engine.skeleton_of_thought(QUESTION, LONG)))
            await asyncio.sleep(0.3)
        else:
            streams.append(await engine.add("the sea", LONG, output_kind=kind))
            await (anext(streams[0]) if kind == "delta" else asyncio.sleep(0))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    run(is_idle(engine))
    assert engine.get_metrics().generation_tokens_total - tokens < 300


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
        await engine.abort("nobody's")
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


@pytest.mark.parametrize("kind", ["beams", "skeleton"])
def test_a_job_that_is_cancelled_harms_no_other_request(kind, engine):
    """Before it has begun, in its first steps, and when its coroutine is closed."""

    def begin() -> Coroutine[Any, Any, Any]:
        if kind == "beams":
            return engine.beam_search(TEXTS, BeamSearchParams(beam_width=2, max_tokens=100))
        return engine.skeleton_of_thought(QUESTION, LONG)

    async def cancels() -> None:
        core = engine._client.core
        before = core.metrics.num_raised_steps_total, core.metrics.num_recoveries_total
        stream = await engine.add("rain", LONG)
        for index in range(12):
            task = asyncio.create_task(begin())
            await asyncio.sleep(0.01 * (index % 4))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        closed = begin()
        closed.send(None)
        closed.close()
        assert joined(await collect(stream))[2] == "length"
        await is_idle(engine)
        assert not core.searches and not engine._thread._jobs
        assert (core.metrics.num_raised_steps_total, core.metrics.num_recoveries_total) == before

    run(cancels())


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


def test_two_readers_of_one_stream_both_come_to_its_end(engine):
    async def both() -> list[int]:
        stream = await engine.add("the sea", GREEDY)
        parts = await asyncio.gather(collect(stream), collect(stream))
        await is_idle(engine)
        return [len(output.outputs[0].token_ids) for outputs in parts for output in outputs]

    assert sum(run(both())) == GREEDY.max_tokens


def test_a_task_keeps_nothing_of_requests_that_have_ended(engine):
    def num_callbacks() -> int:
        return len(getattr(asyncio.current_task(), "_callbacks", None) or ())

    async def serves() -> tuple[int, int]:
        before = num_callbacks()
        for _ in range(3):
            await collect(engine.generate("the sea", GREEDY))
            stream = await engine.add("the sea", LONG)
            await anext(stream)
            await anext(stream)
            assert num_callbacks() == before + 1
            await stream.aclose()
        await is_idle(engine)
        return before, num_callbacks()

    before, after = run(serves())
    assert before == after


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


def test_an_exit_in_a_function_comes_to_its_caller_and_ends_no_thread(engine):
    async def call() -> None:
        await engine.call(lambda: sys.exit(3))

    with pytest.raises(SystemExit):
        asyncio.run(call())
    run(is_idle(engine))


def test_after_shutdown_requests_have_ended_and_no_more_are_taken():
    async def shut_down() -> None:
        async with AsyncLLM(**LIMITS) as engine:
            stream = await engine.add("the sea", LONG)
            await anext(stream)
            queued = [await engine.add("rain", LONG) for _ in range(4)]  # a step may run: they have not entered
            job = asyncio.ensure_future(engine.beam_search("rain", BeamSearchParams(beam_width=2, max_tokens=300)))
            await asyncio.sleep(0)
            await asyncio.gather(engine.shutdown(), engine.shutdown())
            assert not engine._thread._thread.is_alive()
        assert joined(await collect(stream))[2] == "abort"
        for each in queued:
            with contextlib.suppress(RuntimeError):  # or they have entered, and end as the first does
                assert joined(await collect(each))[2] == "abort"
        with pytest.raises(RuntimeError, match="shut down"):
            await job
        with pytest.raises(RuntimeError, match="shut down"):
            engine.get_metrics()
        for call in (engine.add("rain", GREEDY), engine.abort("0"), engine.call(lambda: 0), engine.warm_up()):
            with pytest.raises(RuntimeError, match="shut down"):
                await call

    run(shut_down())


def test_an_engine_that_is_let_go_ends_its_thread():
    engine = AsyncLLM(**LIMITS)
    thread, gone = engine._thread._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None and not thread.is_alive()


@pytest.mark.parametrize("what", ["recovery", "steps"])
def test_an_engine_that_cannot_go_on_says_so_to_all(what, monkeypatch):
    async def dies() -> None:
        engine = AsyncLLM(**LIMITS)
        core = engine._client.core

        def fails(*arguments: object) -> None:
            raise MemoryError("as told")

        streams = [await engine.add(text, LONG) for text in TEXTS]
        await anext(streams[0])
        job = asyncio.ensure_future(engine.beam_search("rain", BeamSearchParams(beam_width=2, max_tokens=300)))
        await asyncio.sleep(0.1)
        if what == "recovery":
            monkeypatch.setattr(core.transactions, "_remake", fails)
            monkeypatch.setattr(core.transactions, "_advance", fails)
        else:
            monkeypatch.setattr(core, "step", fails)
        late = [
            asyncio.ensure_future(each)
            for each in (collect(engine.generate("rain", GREEDY)), engine.call(lambda: 0), engine.reset_prefix_cache())
        ]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="as told"):
                await collect(stream)
        with pytest.raises(EngineDeadError, match="as told"):
            await job
        for each in await asyncio.gather(*late, return_exceptions=True):  # a step that ran took what came before it
            assert isinstance(each, EngineDeadError) or each in (0, True, False)
        for call in (engine.add("rain", GREEDY), engine.abort("0"), engine.call(lambda: 0)):
            with pytest.raises(EngineDeadError, match="as told"):
                await call
        assert core.metrics.num_raised_steps_total == (1 if what == "recovery" else 3)
        await engine.shutdown()

    run(dies())


def test_one_step_that_raises_is_logged_and_the_next_goes_on(llm, caplog, monkeypatch):
    async def goes_on() -> list[int]:
        async with AsyncLLM(**LIMITS) as engine:
            core, failures = engine._client.core, [MemoryError("as told")]
            step = core.step

            def fails_once():
                if failures:
                    raise failures.pop()
                return step()

            monkeypatch.setattr(core, "step", fails_once)
            outputs = await collect(engine.generate("the sea", GREEDY))
            assert core.metrics.num_raised_steps_total == 1
            return joined(outputs)[1]

    assert run(goes_on()) == llm.generate("the sea", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert "a step has raised" in caplog.text


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
