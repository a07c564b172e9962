"""Pages are free, held or cached, and misuse is an error that changes nothing it should not."""

import pytest

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


def test_a_shared_page_is_free_when_its_last_holder_frees_it():
    allocator = PageAllocator(4)
    shared, own = allocator.allocate(2)
    allocator.share([shared])
    allocator.share([shared])
    for holders in (3, 2, 1):
        assert (allocator.num_holders(shared), allocator.num_free) == (holders, 2)
        allocator.free([shared])
    assert (allocator.num_holders(shared), allocator.num_holders(own), allocator.num_free) == (0, 1, 3)


def test_pages_are_counted_as_held_once_however_many_hold_them():
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    allocator.share(pages)
    assert (allocator.num_free, allocator.num_held, allocator.num_cached) == (1, 3, 0)
    allocator.check_integrity()


def test_a_page_is_not_handed_out_while_one_of_its_holders_is_left():
    allocator = PageAllocator(2)
    pages = allocator.allocate(2)
    allocator.share(pages[:1])
    allocator.free(pages)
    assert allocator.allocate(1) == pages[1:]
    with pytest.raises(OutOfPagesError):
        allocator.allocate(1)


def test_a_page_that_is_handed_out_again_has_one_holder():
    allocator = PageAllocator(1)
    pages = allocator.allocate(1)
    allocator.share(pages)
    allocator.free([*pages, *pages])
    assert allocator.allocate(1) == pages and allocator.num_holders(pages[0]) == 1


def test_a_page_that_stands_twice_in_one_call_gets_two_holders():
    allocator = PageAllocator(1)
    page = allocator.allocate(1)[0]
    allocator.share([page, page])
    assert allocator.num_holders(page) == 3


def test_freeing_a_shared_page_more_often_than_it_is_held_is_refused():
    allocator = PageAllocator(4)
    pages = allocator.allocate(1)
    allocator.share(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is freed twice"):
        allocator.free(pages * 3)
    assert allocator.num_free == 4
    allocator.check_integrity()


def test_only_held_pages_are_shared():
    allocator = PageAllocator(4)
    cached, free = allocator.allocate(2)
    allocator.cache([cached])
    allocator.free([free])
    for page, state in ((cached, "cached"), (free, "free")):
        with pytest.raises(ValueError, match=f"page {page} must be held to be shared, it is {state}"):
            allocator.share([page])
    with pytest.raises(ValueError, match="page 4 is not in a pool of 4"):
        allocator.share([4])
    allocator.check_integrity()


@pytest.mark.parametrize("bad", [-1, 3, 7])
def test_pages_are_shared_all_or_none(bad):
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    with pytest.raises(ValueError):
        allocator.share([*pages, bad])
    assert [allocator.num_holders(page) for page in pages] == [1, 1]


def test_a_page_of_several_holders_is_not_cached_and_nothing_beside_it():
    allocator = PageAllocator(4)
    first, shared = allocator.allocate(2)
    allocator.share([shared])
    with pytest.raises(ValueError, match=f"page {shared} must have 1 holder to be cached, it has 2"):
        allocator.cache([first, shared])
    assert (allocator.num_cached, allocator.num_holders(first), allocator.num_holders(shared)) == (0, 1, 2)
    allocator.free([shared])
    allocator.cache([first, shared])
    assert allocator.num_cached == 2
    allocator.check_integrity()


def test_free_and_cached_pages_have_no_holder():
    allocator = PageAllocator(2)
    page = allocator.allocate(1)[0]
    allocator.cache([page])
    assert [allocator.num_holders(page) for page in range(2)] == [0, 0]


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_of_no_pool_has_no_number_of_holders(page):
    with pytest.raises(ValueError, match=f"page {page} is not in a pool of 4"):
        PageAllocator(4).num_holders(page)
