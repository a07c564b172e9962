"""The suite on a GPU: its settings there, and what of it is for CPUs only.

`pytest --gpu` asks for both; `JAX_PLATFORMS` says where it runs, so that they can be tried on a CPU. `make test-gpu`
names the folders that a GPU can say something about: the rest of the suite is the same wherever it runs.
"""

from __future__ import annotations

import os

# Memory is taken from the card as it is needed, not three quarters of it at the start. What runs in one process shares
# it one after the other; several test processes at once would not: no xdist here.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Which algorithm computes a product is decided without timing all of them for each of hundreds of programs.
XLA_FLAG = "--xla_gpu_autotune_level=0"
# Else a GPU rounds the factors of float32 products to 11 bits, and truth and engine to different ones.
MATMUL_PRECISION = "highest"

# Files, or tests in them.
CPU_ONLY = {
    "tests/attention/test_paged_attention.py::test_auto_selects_a_backend_that_is_in_the_table": (
        "on a GPU the kernel is selected, and tests/gpu says so"
    ),
    "tests/memory/test_memory_share.py::test_a_plugin_of_jax_finds_the_share_when_an_llm_starts_jax": (
        "a second process would take most of the card from this one"
    ),
    "tests/models/test_residual.py::test_on_a_cpu_steps_of_few_tokens_have_their_features_first": (
        "it says how activations lie on a CPU"
    ),
    "tests/programs/test_compiled_steps.py": "it counts instructions in the text of programs compiled for a CPU",
    "tests/programs/test_mapped_memory.py::test_the_maps_of_a_program_are_no_more_than_was_said": (
        "it counts the memory maps of programs compiled for a CPU"
    ),
    "tests/sampling/test_rows.py::test_no_row_makes_the_device_sort_the_vocabulary": (
        "for a GPU, XLA sorts where more than a few of the greatest are asked for"
    ),
    "tests/programs/test_trees_and_branches.py"
    "::test_the_kernel_answers_as_plain_xla_does_for_trees_and_branches_and_after_a_commit": (
        "it interprets a kernel that tests/gpu runs"
    ),
}

# For CPUs only where Hypothesis is not installed, as it need not be on a machine with a GPU.
NEEDS_HYPOTHESIS = {
    "tests/attention/test_visibility.py",
    "tests/cache/test_page_allocator_machine.py",
    "tests/cache/test_prefix_cache_machine.py",
    "tests/engine/test_beside.py",
    "tests/programs/test_buckets.py",
    "tests/programs/test_commit_tail.py",
}


def set_up() -> None:
    """Let JAX, which must not have started, run as the suite needs it on a GPU; what the environment says stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    flags = os.environ.get("XLA_FLAGS", "")
    if XLA_FLAG.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {XLA_FLAG}".strip()
    import jax

    jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION)


def why_not(node: str) -> str | None:
    """Why a file or a test is not for GPUs; None if it is. A test's parameters do not matter."""
    node = node.partition("[")[0]
    if node in NEEDS_HYPOTHESIS and not has_hypothesis():
        return "it needs Hypothesis, which is not installed"
    reason = CPU_ONLY.get(node)
    return reason and f"for CPUs only: {reason}"


def has_hypothesis() -> bool:
    try:
        import hypothesis  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True
