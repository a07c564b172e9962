"""What holds for the repository as a whole: locks, layout, dependency floors, the tools of a fresh clone."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCKED_GROUPS = {
    "requirements.lock": ("build", "test", "train", "clients"),
    "requirements-cuda12.lock": ("build", "test"),
    "requirements-cuda13.lock": ("build", "test"),
    "requirements-docs.lock": ("docs",),
    "requirements-commands.lock": ("commands",),
    "requirements-router.lock": ("router",),
    "requirements-ray.lock": ("build", "test"),
}
LOCKED_EXTRAS = {"requirements.lock": ("server", "kv-events"), "requirements-ray.lock": ("server", "ray")}
LOCKS = tuple(LOCKED_GROUPS)
_OF_ENGINE = LOCKS[:3]
PYTHON_FOLDERS = ("jaxinfer", "kernels_pallas", "scripts", "tests", "examples")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".lock", ".yml", ".yaml", ".txt", ".jinja"}
PYTHON_FILES = sorted(path for folder in PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Bracketed letters keep the patterns from finding themselves in this file.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~])/(work|root|home|farm|tmp)/"),
    "the host of a package registry": re.compile(r"py[p]i\.org|python[h]osted|ana[c]onda\.org"),
    "an author that is a program": re.compile(
        r"^\W*(co-authored-by|assisted-by|generated-by): |^\W*generated with (?!`|scripts/)",
        re.IGNORECASE | re.MULTILINE,
    ),
}

# A module may import its own floor and those below it. What a user asks and gets back is for every floor.
FLOORS = {
    "kernels_pallas": 0,
    "jaxinfer.sampling_params": 0,
    "jaxinfer.constraints.structured_outputs": 0,  # what a user asks for, apart from what follows it
    "jaxinfer.constraints.schema_text": 0,
    "jaxinfer.limits": 0,
    "jaxinfer.outputs": 0,
    "jaxinfer.messages": 0,
    "jaxinfer.tokenizer": 0,
    "jaxinfer.moved": 0,
    "jaxinfer.field_checks": 0,
    "jaxinfer.compile_cache": 0,
    "jaxinfer.attention": 1,
    "jaxinfer.cache": 2,
    "jaxinfer.sampling": 2,
    "jaxinfer.models": 2,
    "jaxinfer.checkpoint": 3,
    "jaxinfer.config": 3,
    "jaxinfer.constraints": 3,
    "jaxinfer.programs": 4,
    "jaxinfer.branching": 5,
    "jaxinfer.speculative": 5,
    "jaxinfer.diffusion": 5,
    "jaxinfer.scheduling": 6,
    "jaxinfer.engine": 7,
    "jaxinfer.strategies": 8,
    "jaxinfer.memory": 9,
    "jaxinfer.frontend": 9,
    "jaxinfer.live_model": 9,
    "jaxinfer.hosts": 9,
    "jaxinfer.integrations": 11,
    "jaxinfer.integrations.ray_packages": 11,
    "jaxinfer.integrations.ray_serve": 13,
    "jaxinfer.integrations.ray_data": 13,
    "jaxinfer.planning": 10,
    "jaxinfer.skeleton": 10,
    "jaxinfer": 11,
    "jaxinfer.bench": 12,
    "jaxinfer.server": 12,
    "jaxinfer.batch": 13,
    "jaxinfer.cli": 13,
    "jaxinfer.__main__": 13,
    "jaxinfer.textbook": 13,
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def locked_versions(lock: str) -> dict[str, str]:
    pins = re.findall(r"^([a-z0-9._-]+)==(\S+)", (ROOT / lock).read_text(), flags=re.MULTILINE)
    return dict(pins)


def text_files() -> Iterator[Path]:
    yield from (ROOT / "Makefile", ROOT / ".ci" / "run")
    for folder in (ROOT, *(ROOT / name for name in (*PYTHON_FOLDERS, "checkpoints", "docs"))):
        paths = folder.glob("*") if folder == ROOT else folder.rglob("*")
        yield from (path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return FLOORS[module]


def imported_modules(path: Path) -> set[str]:
    """Modules of the packages that a file imports anywhere, within functions and for types alone too; `from package
    import name` counts as `package.name` if a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return {name for name in found if name.partition(".")[0] in ("jaxinfer", "kernels_pallas")}


@pytest.mark.parametrize("lock", _OF_ENGINE)
def test_a_lock_pins_the_version_of_jax_that_the_project_is_measured_on(lock):
    versions = locked_versions(lock)
    assert versions["jax"] == versions["jaxlib"] == "0.11.2"


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_address(lock):
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host", (ROOT / lock).read_text())


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_of_a_lock_is_pinned_and_hashed(lock):
    entries = (ROOT / lock).read_text().replace("\\\n", " ").splitlines()
    loose = [entry for entry in entries if not re.match(r"[a-z0-9._-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry)]
    assert entries and not loose


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_satisfies_what_the_project_declares(lock):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = list(project["project"]["dependencies"]) if lock in _OF_ENGINE else []
    for group in LOCKED_GROUPS[lock]:
        declared += project["dependency-groups"][group]
    for extra in LOCKED_EXTRAS.get(lock, ()):
        declared += project["project"]["optional-dependencies"][extra]
    versions = locked_versions(lock)
    unmet = [str(req) for req in map(Requirement, declared) if not req.specifier.contains(versions.get(req.name, "0"))]
    assert not unmet


def test_a_python_file_stays_within_four_hundred_lines():
    long = [relative(path) for path in PYTHON_FILES if len(path.read_text().splitlines()) > 400]
    assert PYTHON_FILES and not long


def test_the_first_page_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120


def test_an_example_is_short():
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    # A whole training run is longer than a call.
    long = [relative(path) for path, length in lengths.items() if length > (120 if path.name == "grpo.py" else 40)]
    assert (ROOT / "examples").is_dir() and not long


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    dead = [
        f"{relative(page)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert len(pages) > 10 and not dead


def test_a_python_file_says_its_subject_in_a_docstring():
    silent = [relative(path) for path in PYTHON_FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


# Methods of drafting are rows of data: their names are in the table, in their own files and in help texts' examples.
NAMES_A_METHOD = {
    "jaxinfer/strategies/draft_methods.py", "jaxinfer/strategies/draft_options.py", "jaxinfer/strategies/eagle3.py",
    "jaxinfer/strategies/ngram.py", "jaxinfer/strategies/draft_model.py", "jaxinfer/models/eagle3_config.py",
    "jaxinfer/cli/main.py", "jaxinfer/cli/serve.py",
}  # fmt: skip


def test_no_other_code_asks_for_a_method_of_drafting_by_name():
    asking = re.compile(r"""["'](eagle3|ngram|draft_model)["']|\bmethod [=!]= """)
    found = {
        relative(path)
        for path in PYTHON_FILES
        if path.relative_to(ROOT).parts[0] == "jaxinfer" and asking.search(path.read_text())
    }
    assert found <= NAMES_A_METHOD


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_text_file_mentions(what):
    found = [relative(path) for path in text_files() if FORBIDDEN[what].search(path.read_text())]
    assert not found


def test_no_message_of_the_history_names_another_author():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("there is no history here")
    log = subprocess.run(["git", "log", "--format=%B"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert log and not FORBIDDEN["an author that is a program"].search(log)


@pytest.mark.parametrize("line", ["Co-Authored-By: A Program <a@b.c>", "\U0001f916 Generated with [a program]"])
def test_what_names_another_author_is_found(line):
    assert FORBIDDEN["an author that is a program"].search(f"Mend a fault\n\n{line}\n")


def test_imports_point_down_the_floors_only():
    rising = [
        f"{relative(path)} imports {imported}"
        for path in PYTHON_FILES
        if path.relative_to(ROOT).parts[0] in ("jaxinfer", "kernels_pallas")
        for imported in imported_modules(path)
        if floor_of(imported) > floor_of(module_name(path))
    ]
    assert not rising


def test_every_folder_of_the_package_has_a_floor():
    folders = {f"jaxinfer.{path.parent.name}" for path in (ROOT / "jaxinfer").glob("*/__init__.py")}
    assert folders and folders <= FLOORS.keys()


def test_nothing_but_itself_imports_the_textbook():
    importing = [
        relative(path)
        for path in PYTHON_FILES
        if path.relative_to(ROOT).parts[0] in ("jaxinfer", "kernels_pallas")
        and not module_name(path).startswith("jaxinfer.textbook")
        and any(name.startswith("jaxinfer.textbook") for name in imported_modules(path))
    ]
    assert not importing


def test_an_engine_loads_no_textbook():
    code = "import jaxinfer.llm, sys; print(*[name for name in sys.modules if name.startswith('jaxinfer.textbook')])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_no_two_classes_share_a_name_outside_the_textbook():
    homes: dict[str, list[str]] = {}
    for path in PYTHON_FILES:
        if path.relative_to(ROOT).parts[0] in ("jaxinfer", "kernels_pallas") and "textbook" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(relative(path))
    assert homes and {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_modules_import_each_other_in_a_circle():
    packages = ("jaxinfer", "kernels_pallas")
    modules = [path for path in PYTHON_FILES if path.relative_to(ROOT).parts[0] in packages]
    circle = []
    try:
        TopologicalSorter({module_name(path): imported_modules(path) for path in modules}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert modules and not circle


def test_a_file_at_the_top_of_scripts_is_run_and_never_imported_by_another():
    top = sorted((ROOT / "scripts").glob("*.py"))
    sources = {relative(path): path.read_text() for path in PYTHON_FILES if ROOT / "scripts" in path.parents}
    imports = "|".join(path.stem for path in top)
    importing = re.compile(rf"^ *(from|import) (scripts\.)?({imports})\b", flags=re.MULTILINE)
    assert [path for path in top if 'if __name__ == "__main__":' not in path.read_text()] == []
    assert [name for name, source in sources.items() if importing.search(source)] == []


def test_importing_the_package_or_its_command_line_loads_no_heavy_module():
    code = "import jaxinfer, jaxinfer.cli.main, sys; print(*{'jax', 'flax', 'transformers', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_make_without_a_target_lists_the_targets_one_line_each():
    result = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("venv", "demo", "test", "test-aot", "test-gpu", "bench", "lint", "types", "lock", "clean"):
        assert re.search(rf"^make {target} +\S", result.stdout, flags=re.MULTILINE)


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/find_python.sh where only `tmp_path/bin` is on the PATH and `tmp_path` is the home."""
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bin").mkdir(exist_ok=True)
    env = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), **environment}
    script = str(ROOT / "scripts" / "find_python.sh")
    return subprocess.run([bash, script], env=env, capture_output=True, text=True, check=False)


def test_find_python_passes_over_a_shim_that_answers_127(tmp_path):
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    os.symlink(sys.executable, tmp_path / "bin" / "python3.13")
    assert find_python(tmp_path).stdout.strip().endswith("python3.13")


def test_find_python_looks_under_the_versions_folder_of_pyenv(tmp_path):
    binary = tmp_path / ".pyenv" / "versions" / "3.12.99" / "bin" / "python3"
    binary.parent.mkdir(parents=True)
    os.symlink(sys.executable, binary)
    assert find_python(tmp_path).stdout.strip() == str(binary)


def test_find_python_says_on_one_line_that_there_is_none(tmp_path):
    result = find_python(tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: no Python 3.12 or newer") and result.stderr.count("\n") == 1


def test_find_python_refuses_an_interpreter_given_by_hand_that_does_not_run(tmp_path):
    result = find_python(tmp_path, PYTHON="no-such-python")
    assert result.returncode == 1
    assert "no-such-python" in result.stderr
