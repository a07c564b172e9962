"""The Python of README and docs: it is valid, its calls fit what they call, and what needs nothing runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jaxinfer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- needs: ([^>]*?) -->\n+)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What a block needs that this machine may lack.
NEEDS = {"weights", "gpu", "network", "config", "server", "ray", "processes"}
# Examples that would run for long.
BRIEFLY = {"grpo.py": ("--updates", "2", "--plot", "/dev/null")}


class Block(NamedTuple):
    """One block of a page."""

    page: str
    number: int
    needs: frozenset[str]
    code: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for number, (needs, code) in enumerate(BLOCK.findall(page.read_text())):
            given = frozenset(word.strip() for word in needs.split(",") if word.strip())
            yield Block(page.relative_to(ROOT).as_posix(), number, given, code)


BLOCKS = list(blocks())


def objects_of(tree: ast.AST) -> dict[str, Any]:
    """What the names that a block imports are; without imports, the package's own."""
    found: dict[str, Any] = {name: getattr(jaxinfer, name) for name in jaxinfer.__all__}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jaxinfer"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def called(node: ast.Call, objects: dict[str, Any]) -> Any:
    """What a call calls, if that is known: an imported object, or a method of something called llm."""
    if isinstance(node.func, ast.Name):
        return objects.get(node.func.id)
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        for name, kind in (("llm", "LLM"), ("async_llm", "AsyncLLM")):
            if node.func.value.id == name:
                return getattr(objects[kind], node.func.attr, None) or getattr(objects["AsyncLLM"], node.func.attr)
    return None


def misfits(code: str) -> list[str]:
    """Calls of a block that do not fit the signature of what they call."""
    tree, found = ast.parse(code), []
    objects = objects_of(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(isinstance(each, ast.Starred) for each in node.args):
            continue
        target = called(node, objects)
        if target is None or any(keyword.arg is None for keyword in node.keywords):
            continue
        own = [None] if isinstance(node.func, ast.Attribute) else []
        try:
            inspect.signature(target).bind(*own, *node.args, **{str(key.arg): key.value for key in node.keywords})
        except TypeError as error:
            found.append(f"{ast.unparse(node)}: {error}")
    return found


def test_there_are_blocks_and_they_say_what_they_need():
    assert len(BLOCKS) > 10 and len({block.page for block in BLOCKS}) > 5
    assert [str(block) for block in BLOCKS if not block.needs <= NEEDS] == []


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_calls_fit_what_they_call(block):
    if "ray" in block.needs and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray has an environment of its own")
    assert misfits(block.code) == []


@pytest.mark.parametrize(
    "code", ["LLM(modell=3)", "llm.generate()", "from jaxinfer import SamplingParams\nSamplingParams(top=3)"]
)
def test_a_call_that_does_not_fit_is_found(code):
    assert len(misfits(code)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.needs], ids=str)
def test_what_needs_nothing_runs(block):
    run = subprocess.run([sys.executable, "-c", block.code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_runs(file):
    command = [sys.executable, f"examples/{file}", *BRIEFLY.get(file, ())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr
