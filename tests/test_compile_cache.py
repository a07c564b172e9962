"""Compiled programs are kept on disk: where, when not, and that the next process finds them; and no torch is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxinfer.compile_cache import enable_compile_cache
from tests.tiny_checkpoints import story_text, write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """JAX's own settings as a fresh process has them, and a home of the test's own; put back afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    fresh = (None, True, 1.0, 0)
    for name, value in zip(SETTINGS, fresh, strict=True):
        jax.config.update(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    yield lambda: {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_under_the_user_s_cache(settings, tmp_path):
    enable_compile_cache()
    assert settings()["jax_compilation_cache_dir"] == str(tmp_path / "home" / ".cache" / "jaxinfer" / "compiled")


def test_the_user_may_have_his_cache_elsewhere(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    enable_compile_cache()
    assert settings()["jax_compilation_cache_dir"] == str(tmp_path / "elsewhere" / "jaxinfer" / "compiled")


def test_every_program_is_kept_however_small_and_quick(settings):
    enable_compile_cache()
    assert settings()["jax_persistent_cache_min_compile_time_secs"] == 0
    assert settings()["jax_persistent_cache_min_entry_size_bytes"] == -1


def test_a_place_that_the_user_gave_to_jax_stays(settings, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    before = settings()
    enable_compile_cache()
    assert settings() == before


def test_a_cache_that_the_user_switched_off_stays_off(settings):
    jax.config.update("jax_enable_compilation_cache", False)
    before = settings()
    enable_compile_cache()
    assert settings() == before


GENERATE = """
import importlib.metadata, json, sys
from jaxinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], max_num_seqs=1, max_num_batched_tokens=16, page_size=4, kv_cache_tokens=128)
(output,) = llm.generate("Say a", SamplingParams(temperature=0.0))
print(json.dumps({
    "text": output.outputs[0].text,
    "compiled": llm.get_metrics().num_compiles_total,
    "installed": importlib.metadata.version("torch"),
    "loaded": sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "tensorflow")),
}))
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """(what each of two processes printed, the cache's files after each). They see an installed torch, a hollow one."""
    folder = tmp_path_factory.mktemp("processes")
    checkpoint = write_checkpoint(folder / "checkpoint")
    packages = folder / "packages"
    for name, text in {
        "torch/__init__.py": "__version__ = '2.13.0'\n",
        "torch-2.13.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n",
    }.items():
        (packages / name).parent.mkdir(parents=True)
        (packages / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]),
    }
    results = []
    for _ in range(2):
        command = [sys.executable, "-c", GENERATE, str(checkpoint)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        kept = {path.relative_to(folder / "cache").as_posix() for path in (folder / "cache").rglob("*-cache")}
        results.append((json.loads(done.stdout), kept))
    return results


def test_a_second_process_compiles_nothing_new(two_processes):
    (first, kept_by_first), (second, kept_by_both) = two_processes
    assert first["compiled"] == second["compiled"] > 0
    assert len(kept_by_first) >= first["compiled"]
    assert all(name.startswith("jaxinfer/compiled/") for name in kept_by_first)
    assert kept_by_both == kept_by_first


def test_what_was_loaded_from_the_cache_computes_the_same(two_processes):
    assert [result["text"] for result, _ in two_processes] == [story_text("a")] * 2


def test_generation_loads_no_torch_where_one_is_installed(two_processes):
    for result, _ in two_processes:
        assert result["installed"] == "2.13.0"
        assert result["loaded"] == []
