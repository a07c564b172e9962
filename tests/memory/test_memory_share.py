"""Which share of a GPU the engine takes, and when it may still tell JAX so; no GPU is needed, and none is started."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxinfer.memory import share as memory_share
from jaxinfer.memory.share import (
    LARGEST_SHARE,
    engine_limit,
    engine_share,
    reserve_of,
    set_jax_share,
    share_in_environment,
)

VARIABLE, OLDER = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
CARD = 150_000_000_000
ROOT = Path(__file__).resolve().parent.parent.parent
PLUGIN = f"""
import os

def initialize():
    print("JAX's share:", os.environ.get("{VARIABLE}"))
"""


@pytest.fixture(autouse=True)
def before_the_start(monkeypatch):
    """JAX has not started, a plugin is there, nothing has been chosen and nothing been said."""
    for name in (VARIABLE, OLDER):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
    monkeypatch.setattr(memory_share, "_set_here", None)
    monkeypatch.setattr(memory_share, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(memory_share.importlib.util, "find_spec", lambda name: object())
    memory_share._warn_too_late.cache_clear()
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


@pytest.fixture
def start(monkeypatch):
    """Starts JAX on a card: what it then says its limit is."""

    def start() -> int:
        monkeypatch.setattr(memory_share, "backends_are_initialized", lambda: True)
        return int(CARD * (share_in_environment() or 0.75))

    return start


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="jaxinfer")
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_environment_s_share_is_that_of_either_name(monkeypatch):
    assert share_in_environment() is None
    monkeypatch.setenv(OLDER, ".5")
    assert share_in_environment() == 0.5
    monkeypatch.setenv(OLDER, "")
    monkeypatch.setenv(VARIABLE, "0.95")
    assert share_in_environment() == 0.95


@pytest.mark.parametrize("name", [VARIABLE, OLDER])
@pytest.mark.parametrize("text", ["all", "0", "-0.5", "1.5", "nan"])
def test_a_share_in_the_environment_that_is_none_is_refused_by_name(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"{name} must be a number in \(0, 1\], got '{text}'"):
        share_in_environment()


def test_both_names_at_once_are_refused_as_jax_does(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0.5")
    monkeypatch.setenv(OLDER, "0.5")
    with pytest.raises(ValueError, match=f"{VARIABLE} and {OLDER} are both set"):
        share_in_environment()


@pytest.mark.parametrize(
    ("asked", "of_jax", "taken"),
    [(0.9, None, 0.9), (0.9, 0.75, 0.75), (0.5, 0.75, 0.5), (1, None, LARGEST_SHARE), (1, 1.0, 1)],
)
def test_the_engine_takes_what_is_asked_for_where_jax_has_as_much(asked, of_jax, taken):
    assert engine_share(asked, of_jax) == taken


@pytest.mark.parametrize(("asked", "given"), [(0.9, "0.9"), (0.45, "0.45"), (1, "0.97")])
def test_before_the_start_jax_is_given_the_engine_s_share(asked, given):
    set_jax_share(asked)
    assert os.environ[VARIABLE] == given


@pytest.mark.parametrize("name", [VARIABLE, OLDER])
def test_what_the_user_has_set_stays(monkeypatch, name):
    monkeypatch.setenv(name, "0.5")
    set_jax_share(0.9)
    assert {VARIABLE: os.environ[VARIABLE], OLDER: os.environ[OLDER]} == {VARIABLE: "", OLDER: ""} | {name: "0.5"}


def test_after_the_start_nothing_is_set(start):
    start()
    set_jax_share(0.9)
    assert os.environ[VARIABLE] == ""


@pytest.mark.parametrize(("platforms", "given"), [("cpu", ""), ("cuda,cpu", "0.9"), ("gpu", "0.9"), ("", "0.9")])
def test_where_jax_may_not_start_on_a_gpu_nothing_is_set(platforms, given):
    jax.config.update("jax_platforms", platforms)
    set_jax_share(0.9)
    assert os.environ[VARIABLE] == given


def test_without_a_plugin_nothing_is_set(monkeypatch):
    monkeypatch.setattr(memory_share.importlib.util, "find_spec", lambda name: None)
    set_jax_share(0.9)
    assert os.environ[VARIABLE] == ""


def test_a_plugin_of_jax_finds_the_share_when_an_llm_starts_jax(tmp_path):
    (tmp_path / "jax_plugins").mkdir()
    (tmp_path / "jax_plugins" / "listener.py").write_text(PLUGIN)
    environment = {name: text for name, text in os.environ.items() if name not in (VARIABLE, OLDER, "JAX_PLATFORMS")}
    path = os.pathsep.join([str(tmp_path), str(ROOT), environment.get("PYTHONPATH", "")])
    started = subprocess.run(
        [sys.executable, "-c", "from jaxinfer import LLM; LLM('./missing', gpu_memory_utilization=0.8)"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert started.stdout == "JAX's share: 0.8\n"
    assert "FileNotFoundError" in started.stderr


def test_an_engine_that_failed_before_the_start_does_not_bind_the_next_one():
    set_jax_share(0.3)
    set_jax_share(0.9)
    assert os.environ[VARIABLE] == "0.9"


@pytest.mark.parametrize("asked", [0, 1.5])
def test_a_share_out_of_range_is_refused_before_anything_is_set(asked):
    with pytest.raises(ValueError, match=rf"gpu_memory_utilization must be in \(0, 1\], got {asked}"):
        set_jax_share(asked)
    assert os.environ[VARIABLE] == ""


@pytest.mark.parametrize("asked", [0.9, 0.45, 0.7, 1])
def test_the_limit_is_all_of_what_jax_was_given_for_it(start, warnings, asked):
    set_jax_share(asked)
    bytes_limit = start()
    assert engine_limit(bytes_limit, asked) == bytes_limit == int(CARD * min(asked, LARGEST_SHARE))
    assert not warnings()


def test_the_limit_is_a_share_of_the_card_where_jax_has_more(monkeypatch, start):
    monkeypatch.setenv(VARIABLE, "0.95")
    assert engine_limit(start(), 0.5) == pytest.approx(CARD // 2, abs=1)


def test_the_limit_is_the_user_s_share_where_that_is_less_and_nothing_is_said_about_it(monkeypatch, start, warnings):
    monkeypatch.setenv(VARIABLE, "0.6")
    set_jax_share(0.9)
    bytes_limit = start()
    assert engine_limit(bytes_limit, 0.9) == bytes_limit == 90_000_000_000
    assert not warnings()


def test_too_late_is_said_once_with_the_variable_and_its_value_and_what_there_is_is_used(start, warnings):
    bytes_limit = start()
    set_jax_share(0.9)
    assert [engine_limit(bytes_limit, 0.9) for _ in range(2)] == [int(CARD * 0.75)] * 2
    [said] = warnings()
    assert "JAX runs already, with 0.75 of each GPU's memory" in said and f"set {VARIABLE}=0.9 before" in said


def test_a_start_without_the_engine_is_not_too_late_for_what_it_can_have(start, warnings):
    assert engine_limit(start(), 0.5) == pytest.approx(CARD // 2, abs=1)
    assert not warnings()


def test_a_second_engine_that_asks_for_more_than_the_first_gets_as_much_and_is_told(start, warnings):
    set_jax_share(0.3)
    bytes_limit = start()
    set_jax_share(0.9)
    assert os.environ[VARIABLE] == "0.3"
    assert engine_limit(bytes_limit, 0.9) == bytes_limit
    assert len(warnings()) == 1


def test_a_small_part_of_the_limit_is_kept_free():
    assert reserve_of(CARD) == CARD * 3 // 100
