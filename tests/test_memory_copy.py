"""Branches copy no KV: their programs update the pool in place, and the trunk's pages are held once.

A trunk has whole pages, and each branch computes the rest of less than a page itself: so there is no page to copy when
branches fork, either. As a script it prints the counts of one mode, `test_memory_copy.py --mode bim` or
`--mode batching`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from jaxinfer.limits import BRANCH_MODES
from jaxinfer.planning.hlo import ProgramText
from jaxinfer.planning.programs import pool_arrays
from jaxinfer.programs.program import KV
from tests.branching.builders import make_group
from tests.builders import make_engine, model_config, random_model, random_prompts

pytestmark = pytest.mark.optimized

PAGE_SIZE, TRUNK_PAGES, BRANCHES = 4, 10, 4
PREFIX = random_prompts([TRUNK_PAGES * PAGE_SIZE + 2])[0]  # its last two tokens fill no page
SUFFIXES = random_prompts([2, 5, 9, 13], seed=1)
OUTPUT = 24


@dataclass
class Counts:
    """Counts of one mode; the pages are those of every step."""

    programs: list[str]  # that ran and have the pool, in words
    copies: int  # of arrays of the pool, in all of them
    bytes_in_place: set[int]  # of each program
    pool_bytes: int
    held: list[int]  # pages, by the allocator
    trunk_and_own: list[int]  # the trunk's pages once, and of every branch those that are its own
    apart: list[int]  # what as many sequences held that share nothing


def count(mode: str) -> Counts:
    """Run branches, streamed and not; look at the allocator in every step, at the text of every program that ran."""
    core = make_engine(random_model(model_config()), page_size=PAGE_SIZE, enable_prefix_caching=False)
    ran, launch = {}, core.runner.launch

    def recorded(program, shape, *inputs):
        if KV in program.writes:
            ran[program, shape] = None
        return launch(program, shape, *inputs)

    core.runner.launch = recorded
    held, trunk_and_own, apart = [], [], []
    core.scheduler.pace.within = lambda *_: 1
    for stream in (False, True):  # many steps in a launch, and one
        group = make_group(
            f"{stream}", PREFIX, SUFFIXES, page_size=PAGE_SIZE, branch_mode=mode, max_tokens=OUTPUT, stream=stream
        )
        core.add_group(group)
        while core.has_unfinished_requests():
            core.step()
            core.check_integrity()
            tables = [member.pages for member in group.members if member.pages]
            if len(tables) == BRANCHES:
                assert all(table[:TRUNK_PAGES] == group.trunk.pages for table in tables)
                held.append(core.scheduler.kv.allocator.num_held)
                trunk_and_own.append(TRUNK_PAGES + sum(len(table) - TRUNK_PAGES for table in tables))
                apart.append(sum(map(len, tables)))
        core.step()
        assert core.scheduler.kv.allocator.num_held == 0
    (pool,) = pool_arrays(core.model_config, core.config, jnp.dtype(jnp.float32))
    texts = [ProgramText(core.runner.compile(program, shape).as_text()) for program, shape in ran]
    return Counts(
        programs=[program.describe(shape) for program, shape in ran],
        copies=sum(len(text.kv_copies(pool)) for text in texts),
        bytes_in_place={text.kv_alias_bytes(pool) for text in texts},
        pool_bytes=2 * core.model_config.num_layers * pool.nbytes,
        held=held,
        trunk_and_own=trunk_and_own,
        apart=apart,
    )


@pytest.fixture(scope="module", params=BRANCH_MODES)
def counts(request) -> Counts:
    return count(request.param)


def test_no_program_of_branches_copies_an_array_of_the_pool(counts):
    assert any("decode loop" in program for program in counts.programs)
    assert any("decode loop" not in program for program in counts.programs)
    assert counts.copies == 0


def test_every_program_of_branches_updates_the_whole_pool_where_it_lies(counts):
    assert counts.bytes_in_place == {counts.pool_bytes}


def test_branches_hold_the_trunk_once_and_pages_of_their_own(counts):
    assert len(counts.held) > OUTPUT // 2
    assert counts.held == counts.trunk_and_own
    assert max(counts.apart) - max(counts.held) == (BRANCHES - 1) * TRUNK_PAGES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("bim", *BRANCH_MODES), required=True, help="bim: in_one_sequence")
    given = parser.parse_args().mode
    mode = "in_one_sequence" if given == "bim" else given
    found = count(mode)
    print(f"{mode}: {BRANCHES} branches over {len(PREFIX)} tokens, pages of {PAGE_SIZE}")
    for program in found.programs:
        print(f"  ran: {program}")
    print(f"  copies of KV arrays in these programs: {found.copies}")
    print(f"  KV updated in place: {min(found.bytes_in_place)} of {found.pool_bytes} bytes, by each of them")
    print(f"  pages held at the peak: {max(found.held)}, the trunk's {TRUNK_PAGES} once ({max(found.apart)} apart)")
    test_no_program_of_branches_copies_an_array_of_the_pool(found)
    test_every_program_of_branches_updates_the_whole_pool_where_it_lies(found)
    test_branches_hold_the_trunk_once_and_pages_of_their_own(found)


if __name__ == "__main__":
    main()
