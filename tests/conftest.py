"""Settings of the whole test run: the platform, what is left out, and how Hypothesis looks for examples."""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

# Before anything imports jax. An interpreted kernel's threads wait for each other inside XLA's pool, which has one
# thread for each core: on two cores those that wait can leave none to those that they wait for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("NPROC", "8")

import pytest

from tests import on_gpu, tiers
from tests.compile_seconds import CompileSeconds

if on_gpu.has_hypothesis():
    from hypothesis import HealthCheck, settings

    # Compiling in the first example would look like a slow one; no deadlines, and the same examples in every run.
    settings.register_profile(
        "default",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("default")

MOST_MAPS_BEFORE_A_MODULE, MOST_MAPS_IN_A_MODULE = 15_000, 30_000
_idle_engines: dict[Any, Any] = {}  # of `idle_engine`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the long variants too (see tests/tiers.py)")
    parser.addoption("--fast", action="store_true", help="run the fast tier only (see tests/tiers.py)")
    parser.addoption("--gpu", action="store_true", help="with the settings for a GPU, without what is for CPUs only")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu"):
        on_gpu.set_up()
    config.pluginmanager.register(CompileSeconds(), "compile seconds")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is not marked `optimized` compiles what it needs, its fixtures included, in three quarters of the
    time. What is compiled for a GPU, here or there, is always compiled as for users."""
    import jax

    is_for_gpu = item.config.getoption("--gpu") or item.nodeid.startswith("tests/aot/")
    is_optimized = is_for_gpu or item.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    return (yield)


class LeftOut(pytest.Module):
    """A test file that is skipped without being imported."""

    def collect(self) -> NoReturn:
        pytest.skip(str(on_gpu.why_not(self.nodeid)), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    node = module_path.relative_to(parent.config.rootpath).as_posix()
    if parent.config.getoption("--gpu") and on_gpu.why_not(node):
        return LeftOut.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow_too = config.getoption("--slow") or "slow" in config.option.markexpr
    if config.args == config.getini("testpaths") and (stale := tiers.stale(item.nodeid for item in items)):
        raise pytest.UsageError(f"tests/tiers.py names tests that are not there: {', '.join(stale)}")
    if config.getoption("--fast"):
        left_out = [item for item in items if not tiers.is_fast(item.nodeid)]
        items[:] = [item for item in items if tiers.is_fast(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if not slow_too and ("slow" in item.keywords or tiers.is_slow(item.nodeid)):
            item.add_marker(pytest.mark.skip(reason="a long variant: run it with --slow"))
        if config.getoption("--gpu") and (reason := on_gpu.why_not(item.nodeid)):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines of one run load what another one has compiled, from the run's own folder or the one in TEST_CACHE.

    The processes of a run share it without a lock: JAX warns of an entry that is only half written, and compiles.
    """
    import jax

    own = tmp_path_factory.getbasetemp()
    of_the_run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = os.environ.get("TEST_CACHE") or of_the_run / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="module", autouse=True)
def mapped_memory() -> None:
    """Compiled programs are dropped between modules before Linux refuses to map more memory into the process.

    A program keeps hundreds of maps, a process may have 65,530, and XLA crashes where it gets none.
    """
    if _num_maps() > MOST_MAPS_BEFORE_A_MODULE:
        import jax

        _idle_engines.clear()
        gc.collect()
        jax.clear_caches()


@pytest.fixture(autouse=True)
def mapped_memory_of_a_module() -> Iterator[None]:
    """Drop compiled programs after a test, where engines of its module have very many; they are reloaded from disk."""
    yield
    if _num_maps() > MOST_MAPS_IN_A_MODULE:
        import jax

        from jaxinfer.programs.runner import Runner

        for runner in [found for found in gc.get_objects() if isinstance(found, Runner)]:
            runner._executables.clear()
        jax.clear_caches()


def _num_maps() -> int:
    from jaxinfer.programs.mapped_memory import num_maps

    return num_maps()


@pytest.fixture(autouse=True)
def launches_by_no_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of launches does not depend on times, except in tests marked measured: launches with a stream have one
    round, and prompts run in the same step as the decoding rows."""
    if request.node.get_closest_marker("measured") is None:
        from jaxinfer.scheduling.pace import Pace

        monkeypatch.setattr(Pace, "within", lambda self, kind, seconds: 1)
        monkeypatch.setattr(Pace, "beside_chunks", lambda self, *launch, **known: 0)


@pytest.fixture(scope="session")
def idle_engine():
    """(family, **limits) -> an engine of a tiny random model, with nothing to do, compiled once for many tests.

    Tests that use it leave it as they found it: every request finished, no page held. What is cached is forgotten.
    """
    import jax

    from tests.builders import make_engine, model_config, random_model

    def get(family: str = "Qwen3ForCausalLM", **limits):
        key = (family, jax.config.read("jax_disable_most_optimizations"), *sorted(limits.items()))
        if key not in _idle_engines:
            _idle_engines[key] = make_engine(random_model(model_config(family)), **limits)
        core = _idle_engines[key]
        assert not core.has_unfinished_requests() and core.scheduler.kv.allocator.num_held == 0
        assert core.reset_prefix_cache()
        return core

    return get


@pytest.fixture
def launches_of_rounds(monkeypatch):
    """(RowKind, bool) of every launch of rounds: what its rows did, and whether it read lanes of several branches."""
    from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
    from jaxinfer.scheduling.scheduler_output import SchedulerOutput

    launches = []
    build = InputBatch.build

    def recorded(self: InputBatch, output: SchedulerOutput) -> BuiltBatch:
        built = build(self, output)
        if output.num_rounds:
            launches.append((output.kinds[0], built.packed.shape.lane_pages > 0))
        return built

    monkeypatch.setattr(InputBatch, "build", recorded)
    return launches
