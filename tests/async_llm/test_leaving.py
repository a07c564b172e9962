"""A caller that leaves aborts its requests; an engine that shuts down ends all of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from jaxinfer import AsyncLLM, BeamSearchParams
from jaxinfer.async_llm import EngineDeadError
from tests.async_llm.builders import GREEDY, LIMITS, LONG, QUESTION, TEXTS, collect, is_idle, joined, run, until


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


def test_two_readers_of_one_stream_both_come_to_its_end(engine):
    async def both() -> list[int]:
        stream = await engine.add("the sea", GREEDY)
        parts = await asyncio.gather(collect(stream), collect(stream))
        await is_idle(engine)
        return [len(output.outputs[0].token_ids) for outputs in parts for output in outputs]

    assert sum(run(both())) == GREEDY.max_tokens


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


def test_an_exit_in_a_function_comes_to_its_caller_and_ends_no_thread(engine):
    async def call() -> None:
        await engine.call(lambda: sys.exit(3))

    with pytest.raises(SystemExit):
        asyncio.run(call())
    run(is_idle(engine))
