"""The kernel's plan loads a trunk once for all branches of one lane."""

import pytest

from branching.page_visits import PAGE_SIZE, page_visits


@pytest.mark.parametrize("branches", [1, 3, 16])
def test_a_lane_loads_the_trunk_once_and_rows_once_for_each_branch(branches):
    found = page_visits(branches, trunk_tokens=20 * PAGE_SIZE, own_tokens=2 * PAGE_SIZE - 3)
    assert found == {"in_one_sequence": 20 + 2 * branches, "batching": 22 * branches}
