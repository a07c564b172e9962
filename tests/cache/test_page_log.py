"""Every change of a page's state is logged, with sizes, and nothing where no log was asked for."""

import logging
import re

import pytest

from jaxinfer.cache import page_log
from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.page_log import make_page_allocator
from tests.builders import make_engine, make_request, model_config, random_model, run_requests


@pytest.fixture
def log(monkeypatch, caplog):
    """The messages of the log, switched on by the environment; the logger is as before afterwards."""
    level, handlers = page_log.logger.level, list(page_log.logger.handlers)
    monkeypatch.setenv("JAXINFER_LOG", "something,memory")
    yield caplog
    page_log.logger.setLevel(level)
    page_log.logger.handlers[:] = handlers


def test_every_operation_is_a_line_with_sizes(log):
    allocator = make_page_allocator(12, 100)
    pages = allocator.allocate(10)
    allocator.share(pages[:2])
    allocator.free(pages[:2])
    allocator.cache(pages[2:5])
    allocator.free_cached(iter([pages[2]]))
    allocator.copied([(0, 8), (1, 9)])
    allocator.free([])
    assert log.messages == [
        "pool: 12 pages of 100 bytes",
        "allocate: 10 pages, 1000 bytes (0, 1, 2, 3, 4, 5, 6, 7, ...); 2 free, 10 held, 0 cached",
        "share: 2 pages, 200 bytes (0, 1); 2 free, 10 held, 0 cached",
        "free: 2 pages, 200 bytes (0, 1); 2 free, 10 held, 0 cached",
        "commit to the prefix cache: 3 pages, 300 bytes (2, 3, 4); 2 free, 7 held, 3 cached",
        "evict from the prefix cache: 1 pages, 100 bytes (2); 3 free, 7 held, 2 cached",
        "copy: 2 slots for a fork, from 0 to 8",
    ]


def test_an_engine_logs_the_bytes_of_its_pages(log):
    core = make_engine(random_model(model_config()))
    run_requests(core, [make_request("a", [1, 2, 3, 4, 5, 6], max_tokens=4)])
    kv = core.kv
    page_bytes = (kv.k[0].nbytes + kv.v[0].nbytes) * len(kv.k) // kv.num_slots * core.config.page_size
    assert log.messages[0] == f"pool: 64 pages of {page_bytes} bytes"
    allocated = sum(int(n) for n in re.findall(r"^allocate: (\d+) pages", "\n".join(log.messages), re.MULTILINE))
    assert allocated == 3, "pages of four tokens for nine that are computed"


def test_without_the_variable_there_is_no_log(monkeypatch, caplog):
    monkeypatch.setenv("JAXINFER_LOG", "")
    assert type(make_page_allocator(4, 100)) is PageAllocator
    assert caplog.messages == []


def test_the_logger_switches_it_on_by_its_name(caplog):
    with caplog.at_level(logging.DEBUG, "jaxinfer.memory"):
        make_page_allocator(4, 100).allocate(1)
    assert caplog.messages[-1] == "allocate: 1 pages, 100 bytes (0); 3 free, 1 held, 0 cached"
