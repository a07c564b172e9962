"""Programs that are compiled while requests run: no token changes, nothing is compiled twice, and threads end."""

import logging
import subprocess
import sys
import threading
import time

import pytest

from jaxinfer import LLM
from jaxinfer.programs import mapped_memory
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.warm_up import WarmUp
from tests.builders import drain, make_engine, make_request, model_config, one_by_one, random_model, random_prompts


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


def num_threads() -> int:
    return sum(thread.name.startswith("warm-up") for thread in threading.enumerate())


def until(reached, core, seconds: float = 300.0) -> None:
    """Step until something is so."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        if core.has_unfinished_requests():
            core.step()
        else:
            time.sleep(0.01)


def test_requests_get_their_tokens_meanwhile_and_nothing_is_compiled_twice(model):
    core = make_engine(model)
    core.warm_up_in_background()
    assert not core.compiles.is_warm
    prompts = random_prompts((3, 40, 9, 30), seed=2)

    def made():
        return [make_request(str(number), prompt, max_tokens=12) for number, prompt in enumerate(prompts)]

    requests = made()
    for request in requests:
        core.add_request(request)
    drain(core)
    until(lambda: num_threads() == 0, core)
    core.add_request(make_request("last", prompts[0]))
    drain(core)
    assert core.compiles.is_warm
    assert core.metrics.num_compiles_total == sum(len(program.shapes) for program in core.runner.programs)
    assert core.metrics.num_compiles_after_warm_up_total == 0
    assert [request.output_token_ids for request in requests] == one_by_one(make_engine(model, max_num_seqs=1), made())


def test_a_program_that_two_threads_need_is_compiled_once(model, monkeypatch):
    core, begun = make_engine(model), []
    program, shape = core.programs.decode_loop, core.buckets.all_loops()[0]
    jitted = Runner._jitted

    def slow(self, *of_program):
        begun.append(of_program[:2])
        time.sleep(0.2)
        return jitted(self, *of_program)

    monkeypatch.setattr(Runner, "_jitted", slow)
    threads = [threading.Thread(target=core.runner.compile, args=(program, shape)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun == [(program, shape)]


def test_what_goes_wrong_is_said_and_steps_go_on(model, monkeypatch, tmp_path, caplog):
    limit = tmp_path / "max_map_count"
    limit.write_text("1")  # not a number near that of now: engines that are collected meanwhile would make room
    monkeypatch.setattr(mapped_memory, "_LIMIT", limit)
    core = make_engine(model)
    core.warm_up_in_background()
    until(lambda: num_threads() == 0, core)
    with caplog.at_level(logging.ERROR):
        core.add_request(make_request("0", [1, 2, 3], max_tokens=3))
        drain(core)
    assert [record.getMessage() for record in caplog.records if "warm-up has ended early" in record.getMessage()]
    assert not core.compiles.is_warm


def test_threads_end_with_the_engine_and_when_all_is_compiled_at_once_instead(model, monkeypatch):
    begun = threading.Event()
    monkeypatch.setattr(Runner, "compile", lambda self, program, shape: (begun.set(), time.sleep(0.05)))
    core = make_engine(model)
    core.warm_up_in_background()
    assert begun.wait(10)
    del core
    until(lambda: num_threads() == 0, make_engine(model), seconds=10)
    core = make_engine(model)
    core.warm_up_in_background()
    core.warm_up(progress=False)
    assert num_threads() == 0 and core.compiles.is_warm


def test_a_stopped_warm_up_compiles_what_it_has_begun_and_no_more(model, monkeypatch):
    compiled = []
    monkeypatch.setattr(Runner, "compile", lambda self, *one: (time.sleep(0.05), compiled.append(one)))
    warm_up = WarmUp(make_engine(model).runner, num_threads=2)
    warm_up.stop()
    assert warm_up.is_over and len(compiled) <= 2 and num_threads() == 0


def test_a_process_ends_though_programs_are_left(tmp_path):
    code = "from jaxinfer import LLM; LLM(max_model_len=128, max_num_seqs=2, warm_up='background'); print('begun')"
    begin = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout) == (0, "begun\n"), run.stderr
    assert time.monotonic() - begin < 120


def test_anything_else_is_refused():
    with pytest.raises(ValueError, match='warm_up must be "background" or False, got True'):
        LLM(warm_up=True)
