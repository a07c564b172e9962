"""Write the parts of docs/ that describe code: families, fields and their defaults, and help texts.

A page holds the place of each part, between `<!-- generated: WHAT -->` and `<!-- end -->`. WHAT is `families`,
`fields OBJECT` (of a dataclass, or the arguments of a class; `but OTHER` leaves out what OTHER has) or `help VERBS`.
With `--check` nothing is written, and a stale page is an error.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.cli.main import build_parser
from jaxinfer.models.families import FAMILIES, family_of
from jaxinfer.models.wrappers import text_fields

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: ([^>]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^(\w+(?:, \w+)*): ")
WIDTH = 120


def families() -> str:
    """The table of model families."""
    lines = ["| models | architecture, `model_type` | layers | published | tried with |", "|---|---|---|---|---|"]
    tried = recorded()
    for family in FAMILIES.values():
        name, summary = family.summary.rstrip(".").split(": ", 1)
        kinds = (family.architecture, *sorted(family.other_architectures), family.model_type)
        kinds = ", ".join(f"`{each}`" for each in (*kinds, *sorted(family.other_model_types)))
        found = tried.get(family.architecture, "NumPy")
        lines.append(f"| {name} | {kinds} | {summary} | {family.published} | {found} |")
    return "\n".join(lines) + "\n"


def recorded() -> dict[str, str]:
    """Architecture -> what its recorded checkpoints were computed by."""
    found: dict[str, str] = {}
    for folder, name in (("hf", "transformers"), ("hf_remote", "its own torch code")):
        for file in sorted((ROOT / "tests" / "fixtures" / folder).glob("*/config.json")):
            fields = text_fields(json.loads(file.read_text(encoding="utf-8")))
            found.setdefault(family_of(fields).architecture, name)
    return found


def fields(path: str, without: str | None = None) -> str:
    """A list of the fields of a dataclass, or of the arguments of a class, with defaults and what its source says."""
    kind, meanings = found(path), {}
    defaults = defaults_of(kind)
    left_out = defaults_of(found(without)) if without else {}
    for names, text in (*documented(kind), *commented(kind)):
        for name in names:
            meanings.setdefault(name, text)
    groups: list[tuple[list[str], str]] = []
    for name in defaults:
        if name in left_out:
            continue
        if name not in meanings:
            raise ValueError(f"{path}.{name} has neither an entry in the docstring nor a comment beside it")
        if groups and groups[-1][1] == meanings[name]:
            groups[-1][0].append(name)
        else:
            groups.append(([name], meanings[name]))
    lines = []
    for names, text in groups:
        shown = ", ".join(f"`{name}`" + (f" = `{defaults[name]}`" if defaults[name] else "") for name in names)
        lines.append(textwrap.fill(f"- {shown}: {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def found(path: str) -> Any:
    """The object of a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def defaults_of(kind: Any) -> dict[str, str]:
    """Source text of the default of each field or argument; empty where one has to be given or is made anew."""
    if dataclasses.is_dataclass(kind):
        given = [field for field in dataclasses.fields(kind) if field.init]
        return {field.name: "" if field.default is dataclasses.MISSING else repr(field.default) for field in given}
    arguments = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return {each.name: "" if each.default is each.empty else repr(each.default) for each in arguments}


def documented(kind: Any) -> Iterator[tuple[list[str], str]]:
    """Names and text of each entry under `Args:` or `Attributes:` of a docstring."""
    for section in SECTION.findall(inspect.cleandoc(kind.__doc__ or "") + "\n"):
        for entry in re.split(r"^(?=\S)", textwrap.dedent(section), flags=re.MULTILINE):
            match = ENTRY.match(entry)
            if match:
                yield match[1].split(", "), " ".join(entry[match.end() :].split())


def commented(kind: Any) -> Iterator[tuple[list[str], str]]:
    """Names and comment of each field that has one on its line; without one, the name in words."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines, (tree,) = source.splitlines(), ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno is not None:
            comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().partition("#")[2].strip()
            if comment:
                yield [node.target.id], comment


def help_of(verbs: str) -> str:
    """What `jaxinfer VERBS --help` prints, as a block."""
    printed = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        build_parser().parse_args([*verbs.split(), "--help"])
    return f"```text\n{printed.getvalue().rstrip()}\n```\n"


def part(what: str) -> str:
    """The text of a part.

    Raises:
        ValueError: no part is called so, or a field has no description.
    """
    word, _, rest = what.partition(" ")
    if word == "families":
        return families()
    if word == "fields":
        path, _, other = rest.partition(" but ")
        return fields(path, other or None)
    if word == "help":
        return help_of(rest)
    raise ValueError(f"there is no part {what!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    check, stale = parser.parse_args().check, 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = PART.sub(lambda match: f"{match[1]}\n{part(match[2])}\n{match[4]}", old)
        if new == old:
            continue
        stale += 1
        print(f"{page.relative_to(ROOT).as_posix()}: {'stale: run `make docs-tables`' if check else 'written'}")
        if not check:
            page.write_text(new, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
