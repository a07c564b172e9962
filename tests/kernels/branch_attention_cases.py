"""The case table of the branch attention kernel: a step to compute and how the kernel cuts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from kernels_pallas.branch_attention.tuning import Tuning
from tests.attention.lanes import Lane, block_lane, branched_lane, plain_lane, with_tail
from tests.attention.scenes import Heads, Scene, make_scene

BF16, FP16 = jnp.bfloat16, jnp.float16
PAIR = Heads(2, 1, 64, BF16)


@dataclass(frozen=True)
class Case:
    """A step, the kernel's static options for it, and whether interpreting it takes long."""

    scene: Callable[[], Scene]
    tuning: Tuning
    slow: bool


CASES: dict[str, Case] = {}


def case(slow: bool = False, **tuning) -> Callable[[Callable[[], Scene]], Callable[[], Scene]]:
    """Enter a scene into the table under its function's name."""

    def enter(build: Callable[[], Scene]) -> Callable[[], Scene]:
        CASES[build.__name__] = Case(build, Tuning(**tuning), slow)
        return build

    return enter


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def tree(lane: Lane, nodes: int) -> Lane:
    return with_tail(rng(), lane, nodes)


@case(tokens=1, stages=2, programs=3)
def decodes_at_the_borders_of_pages_tiles_and_the_ring_of_stages() -> Scene:
    return make_scene([plain_lane(32, n - 1, 1) for n in (1, 32, 64, 65, 128, 257)], heads=PAIR, decode_rows=7)


@case(tokens=3, programs=1)
def branches_of_a_lane_in_one_block() -> Scene:
    lanes = [
        branched_lane(rng(), 16, trunk, lengths) for trunk, lengths in ((70, (20, 3, 33)), (0, (1, 17)), (66, (2, 5)))
    ]
    return make_scene(lanes, heads=Heads(4, 1, 64, BF16), decode_width=3)


@case(tokens=12, programs=1)
def draft_trees_cut_into_two_blocks() -> Scene:
    lane = branched_lane(rng(), 16, 40, (20, 25))
    return make_scene([tree(lane, 20)], heads=Heads(4, 1, 64, BF16), decode_width=20, num_words=1)


@case(tokens=1, splits=3, programs=2)
def more_splits_than_some_lanes_have_tiles() -> Scene:
    return make_scene([plain_lane(64, n, 1) for n in (200, 0)], heads=Heads(2, 1, 64, BF16))


@case(consumers=2, tokens=8, stages=2, programs=2)
def prefills_of_two_warpgroups_beside_padding() -> Scene:
    prefills = [plain_lane(16, 200, 19), plain_lane(16, 0, 3)]
    return make_scene([], prefills, heads=Heads(6, 1, 64, FP16), prefill_rows=3, prefill_tokens=24)


@case(tokens=16, programs=2)
def every_kind_of_row_at_once() -> Scene:
    decodes = [plain_lane(16, 30, 1), branched_lane(rng(), 16, 20, (3, 18)), tree(plain_lane(16, 37, 1), 4)]
    prefills = [block_lane(16, 5, 8), branched_lane(rng(), 16, 7, (20, 4), new=9, only=0)]
    sizes = {"decode_width": 4, "num_words": 1, "prefill_rows": 2, "prefill_tokens": 20}
    return make_scene(decodes, prefills, heads=Heads(4, 1, 128, BF16), **sizes)


@case(tokens=8, splits=2)
def a_short_chunk_of_a_long_prompt_in_splits() -> Scene:
    return make_scene([], [plain_lane(16, 150, 9), plain_lane(16, 0, 4)], heads=PAIR, prefill_tokens=16)


@case(tokens=1, stages=2, programs=3)
def windows_of_decodes_at_borders() -> Scene:
    lengths = (1, 31, 64, 100, 101, 257)
    return make_scene([plain_lane(32, n - 1, 1) for n in lengths], heads=PAIR, decode_rows=7, window=70)


@case(tokens=16, programs=2)
def every_kind_of_row_in_a_window() -> Scene:
    decodes = [plain_lane(16, 130, 1), branched_lane(rng(), 16, 20, (3, 38)), tree(plain_lane(16, 37, 1), 4)]
    prefills = [branched_lane(rng(), 16, 7, (40, 4), new=19, only=0)]
    sizes = {"decode_width": 4, "num_words": 1, "prefill_rows": 2, "prefill_tokens": 24}
    return make_scene(decodes, prefills, heads=Heads(4, 1, 64, BF16), window=9, **sizes)


@case(tokens=8, splits=2)
def a_window_of_a_chunk_in_splits() -> Scene:
    return make_scene([], [plain_lane(16, 250, 9), plain_lane(16, 0, 4)], heads=PAIR, prefill_tokens=16, window=100)


SINKS = Heads(4, 2, 64, BF16, sinks=(0.5, -3.0, 4.0, 0.0))
CAPPED = Heads(4, 2, 64, BF16, cap=1.5, sinks=(2.0, 1.0, -1.0, 0.3))


@case(tokens=1, stages=2, programs=3)
def sinks_of_decodes_beside_padding() -> Scene:
    return make_scene([plain_lane(16, n - 1, 1) for n in (1, 100)], heads=SINKS, decode_rows=3)


@case(tokens=8, splits=2)
def sinks_and_a_cap_in_splits() -> Scene:
    return make_scene([], [plain_lane(16, 150, 9), plain_lane(16, 0, 4)], heads=CAPPED, prefill_tokens=16)


@case(slow=True, tokens=16, programs=2)
def sinks_and_a_cap_of_every_kind_of_row_in_a_window() -> Scene:
    decodes = [plain_lane(16, 130, 1), branched_lane(rng(), 16, 20, (3, 38)), tree(plain_lane(16, 37, 1), 4)]
    prefills = [branched_lane(rng(), 16, 7, (40, 4), new=19, only=0)]
    sizes = {"decode_width": 4, "num_words": 1, "prefill_rows": 2, "prefill_tokens": 24}
    return make_scene(decodes, prefills, heads=CAPPED, window=9, **sizes)


@case(slow=True, consumers=2, tokens=64, stages=2)
def a_window_of_two_warpgroups() -> Scene:
    return make_scene([], [plain_lane(16, 100, 150)], heads=Heads(2, 2, 64, BF16), window=40)


@case(slow=True, tokens=2, tile=128, stages=2)
def a_tile_of_two_squares() -> Scene:
    lanes = [branched_lane(rng(), 32, 140, (40, 7)), plain_lane(32, 255, 1)]
    return make_scene(lanes, heads=Heads(4, 2, 64, BF16), decode_width=2)


@case(slow=True, consumers=2, tokens=8, stages=2, splits=2)
def splits_of_two_warpgroups_with_a_tree() -> Scene:
    lanes = [tree(branched_lane(rng(), 64, 150, (9, 70)), 40), tree(plain_lane(64, 3, 1), 33)]
    return make_scene(lanes, heads=Heads(4, 1, 64, BF16), decode_width=40, num_words=2)


@case(slow=True, tokens=4)
def a_tree_of_the_greatest_size() -> Scene:
    return make_scene([tree(plain_lane(32, 40, 1), 512)], heads=Heads(16, 1, 64, BF16), decode_width=512, num_words=16)


@case(slow=True, tokens=9)
def a_group_of_seven_heads() -> Scene:
    return make_scene([plain_lane(16, 90, 1)], [plain_lane(16, 3, 25)], heads=Heads(14, 2, 64, BF16))


@case(slow=True, consumers=2, tokens=64, stages=2)
def one_head_per_kv_head() -> Scene:
    return make_scene([], [plain_lane(16, 10, 150)], heads=Heads(2, 2, 64, BF16))


@case(slow=True, tokens=4, stages=2, splits=2)
def heads_of_256_in_splits() -> Scene:
    lanes = [branched_lane(rng(), 16, 100, (30, 5, 64)), branched_lane(rng(), 16, 17, (2, 3))]
    return make_scene(lanes, heads=Heads(8, 2, 256, FP16), decode_width=3)


@case(slow=True, tokens=5, stages=2)
def heads_of_256_with_a_tree() -> Scene:
    lanes = [tree(plain_lane(16, 70, 1), 5), plain_lane(16, 3, 1)]
    return make_scene(lanes, heads=Heads(4, 2, 256, BF16), decode_width=5, num_words=1)


def _sections(page_size: int) -> Scene:
    """Trunk, branches and tail, each of them empty in turn."""
    lanes = []
    for trunk, branches, tail in ((40, 1, 1), (0, 1, 1), (40, 0, 1), (40, 1, 0), (0, 0, 1), (0, 1, 0), (40, 0, 0)):
        lane = branched_lane(rng(), page_size, trunk, (20, 5)) if branches else plain_lane(page_size, trunk, 1)
        lanes.append(tree(lane, 6) if tail else lane)
    return make_scene(lanes, heads=PAIR, decode_width=6, num_words=1)


for _page_size in (16, 32, 64):
    CASES[f"every_section_empty_in_turn_with_pages_of_{_page_size}"] = Case(
        lambda size=_page_size: _sections(size), Tuning(tokens=6), slow=True
    )


def _random(seed: int) -> tuple[Callable[[], Scene], Tuning]:
    """A step of lanes, heads and sizes drawn at random."""
    draw = np.random.default_rng([5, seed])
    page_size, words = int(draw.choice([16, 32, 64])), int(draw.integers(0, 4))
    group, kv_heads = int(draw.integers(1, 9)), int(draw.integers(1, 3))
    heads = Heads(group * kv_heads, kv_heads, int(draw.choice([64, 128])), BF16 if draw.random() < 0.5 else FP16)
    consumers = int(draw.integers(1, 3))
    tuning = Tuning(
        consumers=consumers,
        tokens=int(draw.integers(1, 9)),
        tile=int(draw.choice([64, 128])) if consumers == 1 else 64,
        stages=2,
        splits=int(draw.integers(1, 4)),
        programs=int(draw.integers(1, 6)),
    )

    window = None if seed < 6 else int(draw.integers(1, 150))

    def lane(draw: np.random.Generator) -> Lane:
        kind = draw.choice(["plain", "block", "branched", "tree"])
        context = int(draw.integers(0, 200))
        if kind == "plain":
            return plain_lane(page_size, context, int(draw.integers(1, 9)))
        if kind == "block":
            return block_lane(page_size, context, int(draw.integers(1, 9)))
        lengths = draw.integers(1, 60, int(draw.integers(1, 4))).tolist()
        branched = branched_lane(draw, page_size, context, lengths)
        return branched if kind == "branched" or not words else with_tail(draw, branched, int(draw.integers(1, 12)))

    def build() -> Scene:
        lanes = np.random.default_rng([6, seed])
        decodes, prefills = ([lane(lanes) for _ in range(2)] for _ in range(2))
        width = max(len(lane.queries) for lane in decodes)
        tokens = sum(len(lane.queries) for lane in prefills) + 3
        sizes = {"decode_rows": 3, "prefill_rows": 3, "prefill_tokens": tokens, "window": window}
        return make_scene(decodes, prefills, decode_width=width, num_words=words, heads=heads, seed=seed, **sizes)

    return build, tuning


for _seed in range(10):
    CASES[f"a_random_step_{_seed}"] = Case(*_random(_seed), slow=True)
