"""What the table of slow tests names as tested by default runs by default."""

from __future__ import annotations

import re

from tests import tiers


def test_variants_that_are_named_instead_are_not_slow_themselves():
    named = [
        f"tests/{place}::{test.partition('[')[0]}{variant}"
        for place, tests in tiers.SLOW.items()
        for test, instead in tests.items()
        if instead.startswith("[")
        for variant in re.findall(r"\[[^\]]*\]?", instead)
    ]
    assert named and [name for name in named if tiers.is_slow(name)] == []
