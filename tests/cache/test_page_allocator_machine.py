"""Random use and misuse of pages beside a plain dict of holders; allocators that miscount are found out."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from jaxinfer.cache.page_allocator import OutOfPagesError, PageAllocator

NUM_PAGES = 6
SETTINGS = settings(max_examples=150, stateful_step_count=40)
FIND_ONE = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)

any_page = st.integers(-1, NUM_PAGES)
any_pages = st.lists(any_page, max_size=4)


class AgainstADict(RuleBasedStateMachine):
    """An allocator beside {page: number of holders} and the set of cached pages; every call names any pages at all."""

    make = PageAllocator

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.make(NUM_PAGES)
        self.holders: dict[int, int] = {}
        self.cached: set[int] = set()

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count):
        free = set(range(NUM_PAGES)) - set(self.holders) - self.cached
        if count > len(free):
            with pytest.raises(OutOfPagesError):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert pages == sorted(free)[:count]
        self.holders |= dict.fromkeys(pages, 1)

    @rule(pages=any_pages)
    def share(self, pages):
        if not self.holders.keys() >= set(pages):
            with pytest.raises(ValueError):
                self.allocator.share(pages)
            return
        self.allocator.share(pages)
        for page in pages:
            self.holders[page] += 1

    @rule(page=any_page)
    def free(self, page):
        if page not in self.holders:
            with pytest.raises(ValueError):
                self.allocator.free([page])
            return
        self.allocator.free([page])
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]

    @rule(pages=any_pages)
    def cache(self, pages):
        if len(set(pages)) < len(pages) or any(self.holders.get(page) != 1 for page in pages):
            with pytest.raises(ValueError):
                self.allocator.cache(pages)
            return
        self.allocator.cache(pages)
        for page in pages:
            del self.holders[page]
        self.cached |= set(pages)

    @rule(page=any_page)
    def free_cached(self, page):
        if page not in self.cached:
            with pytest.raises(ValueError):
                self.allocator.free_cached([page])
            return
        self.allocator.free_cached([page])
        self.cached.remove(page)

    @invariant()
    def everything_is_counted_as_in_the_dict(self):
        allocator = self.allocator
        assert [allocator.num_holders(page) for page in range(NUM_PAGES)] == [
            self.holders.get(page, 0) for page in range(NUM_PAGES)
        ]
        assert (allocator.num_held, allocator.num_cached) == (len(self.holders), len(self.cached))
        assert allocator.num_free + allocator.num_cached + allocator.num_held == NUM_PAGES
        allocator.check_integrity()


class TestAgainstADict(AgainstADict.TestCase):
    settings = SETTINGS


class SharesOnce(PageAllocator):
    def share(self, pages):
        super().share([page for page in pages if self.num_holders(page) < 2])


class SharesUpToTheBadPage(PageAllocator):
    def share(self, pages):
        for page in pages:
            super().share([page])


class FreesForEverybody(PageAllocator):
    def free(self, pages):
        for page in pages:
            super().free([page] * max(1, self.num_holders(page)))


class KeepsTheLastHolder(PageAllocator):
    def free(self, pages):
        super().free([page for page in pages if self.num_holders(page) != 1])


class CachesSharedPages(PageAllocator):
    def cache(self, pages):
        for page in pages:
            super().free([page] * (self.num_holders(page) - 1))
        super().cache(pages)


@pytest.mark.parametrize(
    "planted", [SharesOnce, SharesUpToTheBadPage, FreesForEverybody, KeepsTheLastHolder, CachesSharedPages]
)
def test_an_allocator_that_miscounts_is_found_out(planted):
    machine = type("Planted", (AgainstADict,), {"make": planted})
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=FIND_ONE)


@pytest.mark.parametrize(
    ("page", "count", "message"),
    [
        (5, 2, "a page that is not held has holders"),
        (1, 2, "a page that is not held has holders"),
        (0, 1, "a page of one holder is among those of several"),
        (0, 0, "a page of one holder is among those of several"),
    ],
)
def test_a_count_of_holders_that_cannot_be_fails_the_integrity_check(page, count, message):
    allocator = PageAllocator(NUM_PAGES)
    allocator.allocate(2)
    allocator.cache([1])
    allocator._shared[page] = count
    with pytest.raises(AssertionError, match=message):
        allocator.check_integrity()
