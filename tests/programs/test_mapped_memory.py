"""Warm-up raises an error when the process nears Linux's limit of memory maps, before XLA crashes for want of them."""

import gc
import mmap
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxinfer import LLM
from jaxinfer.programs import mapped_memory, warm_up
from tests.builders import make_engine, model_config, random_model

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its maps")


@on_linux
def test_a_new_map_is_counted():
    before = mapped_memory.num_maps()
    # Read only, which nothing beside it is: Linux makes one of equal neighbours.
    new = [mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ) for _ in range(3)]
    assert mapped_memory.num_maps() > before > 0
    for each in new:
        each.close()


def test_room_shrinks_with_the_limit(monkeypatch, tmp_path):
    limit = tmp_path / "max_map_count"
    monkeypatch.setattr(mapped_memory, "_LIMIT", limit)
    monkeypatch.setattr(mapped_memory, "num_maps", lambda: 5_000)
    limit.write_text("65530\n")
    assert mapped_memory.room_for_programs() == 60_530 // mapped_memory.MOST_MAPS_OF_A_PROGRAM
    limit.write_text("6000\n")
    with pytest.raises(RuntimeError, match=r"5000 memory maps, and Linux allows 6000.*vm.max_map_count=24000"):
        mapped_memory.room_for_programs()


def test_where_there_is_no_limit_there_is_room(monkeypatch, tmp_path):
    monkeypatch.setattr(mapped_memory, "_LIMIT", tmp_path / "no such file")
    assert mapped_memory.room_for_programs() > 10_000


def test_a_warm_up_that_comes_near_the_limit_says_what_to_do(monkeypatch, tmp_path):
    limit = tmp_path / "max_map_count"
    limit.write_text("1")  # not a number near that of now: engines that are collected meanwhile would make room
    monkeypatch.setattr(mapped_memory, "_LIMIT", limit)
    with pytest.raises(RuntimeError, match="smaller max_num_seqs, max_num_batched_tokens and max_model_len"):
        make_engine(random_model(model_config())).warm_up(progress=False)


@on_linux
def test_the_maps_of_a_program_are_no_more_than_was_said():
    core = make_engine(random_model(model_config()))
    gc.collect()
    before = mapped_memory.num_maps()
    count = core.warm_up(progress=False)
    assert 0 < mapped_memory.num_maps() - before < count * mapped_memory.MOST_MAPS_OF_A_PROGRAM


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_no_more_programs_compile_at_once_than_there_is_room_for(monkeypatch, room):
    compiling: set[int] = set()
    most, lock = [0], threading.Lock()

    class Toy:
        programs = (SimpleNamespace(shapes=range(12)),)

        def compile(self, program: Any, shape: int) -> None:
            with lock:
                compiling.add(shape)
                most.append(len(compiling))
            time.sleep(0.01)
            with lock:
                compiling.remove(shape)

    monkeypatch.setattr(warm_up, "room_for_programs", lambda: room)
    toy: Any = Toy()
    found = warm_up.WarmUp(toy, num_threads=4)
    assert sorted(shape for _, shape in found.compiled()) == list(range(12))
    assert max(most) <= min(room, 4) and (max(most) > 1) == (room > 1)


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_default_engines_have_room_for_all_their_programs(drafter):
    gc.collect()
    jax.clear_caches()  # what other tests have compiled takes maps too
    LLM(speculative_config={"method": drafter}).warm_up(use_tqdm=False)
