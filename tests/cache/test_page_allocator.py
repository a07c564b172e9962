"""Pages are free or held, never both, and misuse is an error that changes nothing it should not."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from jaxinfer.cache.page_allocator import OutOfPagesError, PageAllocator


def test_all_pages_are_free_at_first_and_each_can_be_had_once():
    allocator = PageAllocator(5)
    assert (allocator.num_free, allocator.num_held) == (5, 0)
    assert sorted(allocator.allocate(5)) == [0, 1, 2, 3, 4]
    assert (allocator.num_free, allocator.num_held) == (0, 5)


def test_the_page_freed_last_is_handed_out_first():
    allocator = PageAllocator(5)
    pages = allocator.allocate(5)
    allocator.free([pages[2]])
    allocator.free([pages[4]])
    assert allocator.allocate(1) == [pages[4]]


def test_asking_for_more_pages_than_are_free_takes_none():
    allocator = PageAllocator(4)
    allocator.allocate(3)
    with pytest.raises(OutOfPagesError, match="2 pages asked for, 1 of 4 free"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    allocator.check_integrity()


def test_allocating_no_pages_is_fine_even_from_an_empty_pool():
    allocator = PageAllocator(1)
    allocator.allocate(1)
    assert allocator.allocate(0) == []


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        PageAllocator(4).allocate(-1)


def test_freeing_a_page_twice_is_refused():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is freed twice"):
        allocator.free([pages[0]])
    assert allocator.num_free == 4
    allocator.check_integrity()


def test_a_page_that_stands_twice_in_one_call_is_refused():
    allocator = PageAllocator(4)
    page = allocator.allocate(1)[0]
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free([page, page])
    allocator.check_integrity()


@pytest.mark.parametrize("page", [-1, 4, 1000])
def test_freeing_a_page_of_no_pool_is_refused(page):
    allocator = PageAllocator(4)
    allocator.allocate(4)
    with pytest.raises(ValueError, match=f"page {page} is not in a pool of 4"):
        allocator.free([page])
    assert allocator.num_held == 4


@pytest.mark.parametrize("count", [0, -3])
def test_a_pool_without_pages_is_refused(count):
    with pytest.raises(ValueError, match=f"num_pages must be at least 1, got {count}"):
        PageAllocator(count)


class AgainstASet(RuleBasedStateMachine):
    """Random use of an allocator, beside a plain set of held pages."""

    held_pages = Bundle("held_pages")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12)
        self.held: set[int] = set()

    @rule(target=held_pages, count=st.integers(0, 14))
    def allocate(self, count):
        if count > 12 - len(self.held):
            with pytest.raises(OutOfPagesError):
                self.allocator.allocate(count)
            return multiple()
        pages = self.allocator.allocate(count)
        assert len(pages) == count and not self.held & set(pages)
        self.held |= set(pages)
        return multiple(*pages)

    @rule(page=consumes(held_pages))
    def free(self, page):
        self.allocator.free([page])
        self.held.remove(page)

    @rule(page=st.integers(-2, 14))
    def free_what_is_not_held(self, page):
        if page not in self.held:
            with pytest.raises(ValueError):
                self.allocator.free([page])

    @invariant()
    def the_counts_are_those_of_the_set(self):
        assert self.allocator.num_held == len(self.held)
        assert self.allocator.num_free == 12 - len(self.held)
        self.allocator.check_integrity()


class TestAgainstASet(AgainstASet.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)
