"""Pages are free, held or cached, one at a time, and misuse is an error that changes nothing it should not."""

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


def test_the_lowest_free_pages_are_handed_out_in_order():
    allocator = PageAllocator(6)
    pages = allocator.allocate(6)
    assert pages == [0, 1, 2, 3, 4, 5]
    allocator.free([4, 2])
    allocator.cache([5, 0])
    allocator.free_cached([5, 0])
    assert allocator.allocate(1) == [0]
    assert allocator.allocate(3) == [2, 4, 5]


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


def test_a_page_goes_from_held_to_cached_to_free():
    allocator = PageAllocator(4)
    first, second = allocator.allocate(2)
    allocator.cache([first])
    assert (allocator.num_free, allocator.num_held, allocator.num_cached) == (2, 1, 1)
    allocator.free_cached([first])
    assert (allocator.num_free, allocator.num_held, allocator.num_cached) == (3, 1, 0)
    allocator.free([second])
    allocator.check_integrity()


def test_a_cached_page_is_not_for_its_former_holder_to_free():
    allocator = PageAllocator(4)
    pages = allocator.allocate(1)
    allocator.cache(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} must be held to be freed, it is cached"):
        allocator.free(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} must be held to be cached, it is cached"):
        allocator.cache(pages)
    assert allocator.num_cached == 1


def test_only_cached_pages_are_evicted():
    allocator = PageAllocator(4)
    held = allocator.allocate(1)[0]
    free = next(page for page in range(4) if page != held)
    for page, state in ((held, "held"), (free, "free")):
        with pytest.raises(ValueError, match=f"page {page} must be cached to be evicted, it is {state}"):
            allocator.free_cached([page])
    with pytest.raises(ValueError, match="page 4 is not in a pool of 4"):
        allocator.free_cached([4])
    allocator.check_integrity()


@pytest.mark.parametrize("bad", [3, 7, "again"])
def test_pages_are_cached_all_or_none(bad):
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    with pytest.raises(ValueError):
        allocator.cache([*pages, pages[0] if bad == "again" else bad])
    assert (allocator.num_held, allocator.num_cached) == (2, 0)
    allocator.cache(pages)
    allocator.check_integrity()


class AgainstASet(RuleBasedStateMachine):
    """Random use of an allocator, beside plain sets of held and cached pages."""

    held_pages = Bundle("held_pages")
    cached_pages = Bundle("cached_pages")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12)
        self.held: set[int] = set()
        self.cached: set[int] = set()

    @rule(target=held_pages, count=st.integers(0, 14))
    def allocate(self, count):
        if count > 12 - len(self.held | self.cached):
            with pytest.raises(OutOfPagesError):
                self.allocator.allocate(count)
            return multiple()
        pages = self.allocator.allocate(count)
        assert len(pages) == count and not (self.held | self.cached) & set(pages)
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

    @rule(target=cached_pages, page=consumes(held_pages))
    def cache(self, page):
        self.allocator.cache([page])
        self.held.remove(page)
        self.cached.add(page)
        return page

    @rule(page=consumes(cached_pages))
    def free_cached(self, page):
        self.allocator.free_cached([page])
        self.cached.remove(page)

    @rule(page=st.integers(-2, 14))
    def free_what_is_not_cached(self, page):
        if page not in self.cached:
            with pytest.raises(ValueError):
                self.allocator.free_cached([page])

    @invariant()
    def the_counts_are_those_of_the_sets(self):
        assert self.allocator.num_held == len(self.held)
        assert self.allocator.num_cached == len(self.cached)
        assert self.allocator.num_free == 12 - len(self.held) - len(self.cached)
        self.allocator.check_integrity()


class TestAgainstASet(AgainstASet.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)
