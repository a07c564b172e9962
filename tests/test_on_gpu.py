"""What `make test-gpu` runs, tried on a CPU: its settings, and the list of what is for CPUs only."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import on_gpu

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_HYPOTHESIS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hypothesis", "schemathesis"):  # the second needs the first
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def folders() -> list[str]:
    """The folders that `make test-gpu` names."""
    dry_run = ["make", "-n", "--no-print-directory", "test-gpu", "PYTHON=python3", "ARGS="]
    made = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout.startswith("JAX_PLATFORMS=cuda python3 -m pytest --gpu tests/gpu ")
    return re.findall(r"\S*tests/\S+", made.stdout)


def run_pytest(*arguments: str, code: str | None = None) -> str:
    """What pytest prints in a process of its own, which must succeed."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "XLA_"))}
    start = ["-m", "pytest"] if code is None else ["-c", code]
    run = subprocess.run(
        [sys.executable, *start, "-p", "no:cacheprovider", *arguments],
        cwd=ROOT, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def files() -> dict[str, str]:
    """The test files that run on a GPU, and their sources."""
    paths = [path for folder in folders() for path in sorted((ROOT / folder).rglob("test_*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_the_gpu_runs_folders_that_there_are_and_the_kernels_first():
    assert folders()[0] == "tests/gpu"
    assert {"tests/engine", "tests/attention", "tests/sampling", "tests/models", "tests/cache"} < set(folders())
    assert all((ROOT / folder).is_dir() for folder in folders())


@pytest.mark.parametrize("node", on_gpu.CPU_ONLY)
def test_what_is_for_cpus_only_would_run_on_a_gpu_otherwise_and_has_a_reason(node):
    file, _, test = node.partition("::")
    functions = [x.name for x in ast.walk(ast.parse(files()[file])) if isinstance(x, ast.FunctionDef)]
    assert not test or test in functions
    assert on_gpu.why_not(f"{node}[some case]") == on_gpu.why_not(node) == f"for CPUs only: {on_gpu.CPU_ONLY[node]}"


def test_a_test_that_is_not_on_the_list_is_for_gpus():
    assert on_gpu.why_not("tests/gpu/test_add_and_norm.py") is None
    assert on_gpu.why_not("tests/models/test_residual.py::test_features_first_gives_the_same_hidden_states[x]") is None


def test_the_files_that_need_hypothesis_are_those_that_import_it():
    importing = {file for file, text in files().items() if re.search(r"^(from|import) hypothesis", text, re.MULTILINE)}
    assert importing == on_gpu.NEEDS_HYPOTHESIS


def test_the_list_is_skipped_with_its_reasons_and_nothing_else(tmp_path):
    file = "tests/models/test_residual.py"
    chosen = ["-k", "on_a_cpu or Qwen3 and 7", file, "tests/programs/test_compiled_steps.py"]
    report = run_pytest("--gpu", f"--basetemp={tmp_path / 'run'}", *chosen)
    assert "for CPUs only: it says how activations lie on a CPU" in report
    assert "for CPUs only: it counts instructions in the text of programs compiled for a CPU" in report
    assert re.search("1 passed, 2 skipped", report)


def test_without_hypothesis_the_files_that_need_it_are_skipped_and_say_so():
    report = run_pytest(
        "-p", "no:hypothesispytest", "-p", "no:schemathesis",
        "--gpu", "--collect-only", "-q", *folders(), code=WITHOUT_HYPOTHESIS,
    )  # fmt: skip
    skipped = sum(map(int, re.findall(r"SKIPPED \[(\d+)\].*: it needs Hypothesis, which is not installed", report)))
    assert skipped == len(on_gpu.NEEDS_HYPOTHESIS)
    assert "tests/gpu/test_branch_attention.py::TestFastForm" in report


def test_an_interpreted_kernel_is_right_under_the_settings_too(tmp_path):
    case = "tests/kernels/test_add_and_norm.py::TestInterpreted::test_the_sum_and_its_norm_are_those_of_float32[whole]"
    assert "1 passed" in run_pytest("--gpu", f"--basetemp={tmp_path / 'run'}", case)


@pytest.mark.parametrize("text", ["--xla_cpu_enable_fast_math=false", "--xla_gpu_autotune_level=4", ""])
def test_the_settings_are_added_to_what_the_environment_says(text):
    code = "import os; from tests import on_gpu; on_gpu.set_up(); import jax; " \
        "print(os.environ['XLA_FLAGS'], os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], " \
        "jax.config.jax_default_matmul_precision, jax.numpy.zeros(1).device.platform, sep='|')"  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": text}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    flags = text if "autotune" in text else f"{text} {on_gpu.XLA_FLAG}".strip()
    assert run.stdout.strip() == f"{flags}|false|highest|cpu", run.stderr
