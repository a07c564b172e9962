"""docs/sources.md: every name of ours in it is there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/sources.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(jaxinfer\.[A-Za-z0-9_.]+)`", TEXT)))
FILES = sorted(set(re.findall(r"`((?:scripts|tests|examples|docs)/[\w./]+\.\w+)(?: [^`]*)?`", TEXT)))


def found(name: str) -> object:
    """The module, class or function of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[count:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"{name} cannot be imported")


def test_the_page_names_the_parts_of_all_sources():
    assert len(NAMES) > 60 and len(FILES) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_page_can_be_imported(name):
    assert found(name) is not None


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_page_exists(file):
    assert (ROOT / file).is_file()


def test_a_name_that_is_not_there_is_noticed():
    with pytest.raises(AttributeError):
        found("jaxinfer.textbook.alignment.NoSuchManager")
