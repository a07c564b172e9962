"""The prose of the code: words that make readers stumble do not come back."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("jaxinfer", "kernels_pallas", "scripts", "tests", "examples")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Brackets keep the patterns from finding themselves.
BANNED = {
    "a row or a request is it": re.compile(r"\b(who|whom|who[e]ver|no[b]ody|some[b]ody|any[b]ody|every[b]ody)\b", re.I),
    "after": re.compile(r"\bb[e]hind\b", re.I),
    "continues, or resumes": re.compile(r"\b(goes|go|going|went|gone)\ [o]n\b(?! to)", re.I),
    "is, is stored, starts": re.compile(r"\b(st[a]nds|st[o]od|l[i]es)\b(?! for)", re.I),
}
HEADLESS = re.compile(r"\s*(Of|The same|Those|The ones|That of)\b")
# What a user reads is about persons too.
OF_PERSONS = "a row or a request is it"


def comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def messages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def prose(path: Path) -> list[str]:
    """Comments and docstrings of a file; of the packages, messages too."""
    text = path.read_text()
    tree = ast.parse(text)
    found = [*comments(text), *docstrings(tree)]
    if path.is_relative_to(ROOT / "jaxinfer") or path.is_relative_to(ROOT / "kernels_pallas"):
        found += messages(tree)
    return found


def banned(texts: list[str], patterns: dict[str, re.Pattern[str]] = BANNED) -> list[str]:
    """Banned words with the lines that have them, and what to say instead."""
    return [
        f"{line.strip()} ({match[0]}: say {instead})"
        for text in texts
        for line in text.splitlines()
        for instead, pattern in patterns.items()
        for match in pattern.finditer(line)
    ]


def named(path: Path, texts: list[str]) -> list[str]:
    return [f"{path.relative_to(ROOT).as_posix()}: {text}" for text in texts]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_banned_word_and_no_docstring_without_a_noun(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        headless = [text for text in docstrings(ast.parse(path.read_text())) if HEADLESS.match(text)]
        found += named(path, banned(prose(path)) + headless)
    assert found == []


def test_no_banned_word_in_docs():
    patterns = {instead: pattern for instead, pattern in BANNED.items() if instead != OF_PERSONS}
    found = []
    for path in PAGES:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += named(path, banned([text], patterns))
    assert found == []


@pytest.mark.parametrize("word", ["nob" + "ody", "beh" + "ind", "goes " + "on", "sta" + "nds", "li" + "es"])
def test_a_banned_word_is_found(word):
    assert len(banned([f"# A row {word} a trunk."])) == 1
