"""Trees, branches and diffusion blocks in one step: every token answers as in a plain sequence of what it sees."""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.backend import AttentionBackend, select_backend
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.rope import RopeConfig
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.commit_tail import CommitTail, tail_moves
from kernels_pallas.rotate_and_write import reference
from tests.attention.lanes import Query
from tests.builders import FAMILIES, model_config, random_model
from tests.programs.lane_steps import GrowingLane, LaneSteps

LANE_TOKENS, POOL_TOKENS = 384, 1536
DECODE_ROWS, WIDTH, PREFILL_TOKENS = 4, 12, 32
DYNAMIC = "Qwen3 with frequencies that follow the length"
# Pages of each model's pool, tokens of each row and words of tail bits: one compiled step for all tests of a model.
SIZES = {
    "LlamaForCausalLM": (4, WIDTH, 1),
    "Qwen2ForCausalLM": (1, 72, 3),
    "Qwen3ForCausalLM": (16, WIDTH, 1),
    DYNAMIC: (8, 40, 2),
}
MODELS = [*FAMILIES, pytest.param(DYNAMIC, marks=pytest.mark.slow)]


@cache
def compiled_steps(name: str) -> LaneSteps:
    rope = {"rope": RopeConfig("dynamic", factor=4.0, max_position_embeddings=20)} if name == DYNAMIC else {}
    config = model_config("Qwen3ForCausalLM" if name == DYNAMIC else name, **rope)
    page_size, width, tail_words = SIZES[name]
    shape = BatchShape(
        DECODE_ROWS, 2, PREFILL_TOKENS, LANE_TOKENS // page_size, decode_width=width, tail_words=tail_words
    )
    return LaneSteps(random_model(config), shape, page_size=page_size, num_pages=POOL_TOKENS // page_size)


COMMIT = CommitTail()


def steps_of(name: str, seed: int = 0) -> LaneSteps:
    """Steps of a model in an empty pool."""
    steps = compiled_steps(name)
    steps.start(seed)
    return steps


def accept(steps: LaneSteps, trees: dict[GrowingLane, list[list[Query]]]) -> None:
    """Commit paths of several lanes in one dispatch; what was not accepted becomes NaN."""
    moves = np.full((2, DECODE_ROWS, steps.shape.decode_width), -1, np.int32)
    for row, (lane, paths) in enumerate(trees.items()):
        for i, ends in enumerate(lane.commit(paths)):
            moves[:, row, i] = ends
    steps.runner.launch(COMMIT, moves.shape[1:], moves)
    steps.poison()


def accept_one_path_each(steps: LaneSteps, paths: dict[GrowingLane, list[Query]]) -> None:
    """Commit a path for each lane without branches: the device finds slots from page tables and offsets in the tail."""
    table = np.full((DECODE_ROWS, steps.shape.pages_per_row), steps.garbage)
    tail_start = np.zeros(DECODE_ROWS, np.int32)
    offsets = np.full((DECODE_ROWS, steps.shape.decode_width), -1)
    for row, (lane, path) in enumerate(paths.items()):
        assert lane.tail_start is not None
        table[row, : len(lane.pages)], tail_start[row] = lane.pages, lane.tail_start
        offsets[row, : len(path)] = [query.index - lane.tail_start for query in path]
    moves = jax.jit(tail_moves, static_argnames="page_size")(table, tail_start, offsets, page_size=steps.page_size)
    for row, (lane, path) in enumerate(paths.items()):
        assert lane.commit([path]) == list(zip(*np.asarray(moves[:, row, : len(path)]).tolist(), strict=True))
    steps.runner.launch(COMMIT, moves.shape[1:], moves)
    steps.poison()


def check_trees(steps: LaneSteps, prompt_lens: list[int], nodes: list[int], *, chain: bool = False) -> None:
    """Two rounds: trees in all lanes but the last, a path of each accepted, plain decodes; a prompt arrives beside."""
    *drafting, plain = [steps.lane(length) for length in prompt_lens]
    arriving = steps.lane(5)
    for count in (7, 11):
        rows, paths = [], {}
        for lane, size in zip(drafting, nodes, strict=True):
            new = steps.grow(lane, int(steps.rng.integers(2)))  # a bonus token in the context, or none
            tree = steps.draft(lane, size, chain=chain)
            rows.append((lane, [*new, *tree]))
            paths[lane] = steps.path(tree)
        steps.check([*rows, (plain, steps.grow(plain, 1))], [(arriving, steps.grow(arriving, count))])
        paths[drafting[0]] = paths[drafting[0]] if count == 7 else []  # one row accepts nothing
        accept_one_path_each(steps, paths)
        decodes = [(lane, steps.grow(lane, 1)) for lane in (*drafting, plain)]
        steps.check(decodes, [(arriving, steps.grow(arriving, 3))])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_nodes_of_draft_trees_and_what_follows_an_accepted_path_answer_as_each_path_alone(name, seed):
    steps = steps_of(name, seed)
    border = 2 * max(steps.page_size, 4)
    nodes = steps.rng.integers(1, WIDTH, 3).tolist()
    check_trees(steps, [border - 1, border, border + 1, 3], nodes)


def test_chains_behind_long_contexts_that_end_around_the_border_of_a_chunk_of_attention():
    check_trees(steps_of("Qwen3ForCausalLM"), [127, 128, 129, 130], [WIDTH - 1, 5, 1], chain=True)


def test_trees_of_more_nodes_than_a_word_has_bits():
    check_trees(steps_of("Qwen2ForCausalLM"), [9, 16, 2, 6], [71, 33, 64])


def some_branches(steps: LaneSteps, lane: GrowingLane) -> list[Query]:
    """One new token for most of the lane's branches: they do not keep step with each other."""
    branches = [branch for branch in lane.branches if steps.rng.random() < 0.8] or list(lane.branches)
    return [query for branch in branches for query in steps.grow(lane, 1, branch)]


def branched_lanes(steps: LaneSteps) -> list[GrowingLane]:
    """Trunks that end before, at and after the border of a page, with 1, 3 and 8 branches."""
    border = 2 * max(steps.page_size, 4)
    lanes = []
    for trunk_len, branches in ((border - 1, 1), (border, 3), (border + 1, 8)):
        lanes.append(steps.lane(trunk_len))
        lanes[-1].fork(branches, first_takes_boundary=bool(steps.rng.integers(2)))
    return lanes


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_branches_of_one_sequence_answer_as_each_branch_alone(name, seed):
    steps = steps_of(name, seed)
    lanes, plain, arriving = branched_lanes(steps), steps.lane(9), steps.lane(2)
    for step in range(7):
        rows = [(lane, some_branches(steps, lane)) for lane in lanes]
        steps.check([*rows, (plain, steps.grow(plain, 1))], [(arriving, steps.grow(arriving, 4))])
        if step in (2, 4):  # one branch ends in every lane that has others
            for lane in lanes[1:]:
                branch = int(steps.rng.choice(list(lane.branches)))
                pages = list(lane.pages)
                lane.finish(branch)
                assert lane.pages == [page for page in pages if page not in steps.free]
            steps.poison()


def test_a_branch_that_prefills_its_suffix_while_others_decode():
    steps = steps_of("Qwen3ForCausalLM")
    lane = steps.lane(21)
    lane.fork(3, first_takes_boundary=True)
    for _ in range(3):
        steps.check([(lane, steps.grow(lane, 1, 0) + steps.grow(lane, 1, 1))], [])
    steps.check([(lane, steps.grow(lane, 1, 0))], [(lane, steps.grow(lane, 25, 2))])
    steps.check([(lane, [query for branch in range(3) for query in steps.grow(lane, 1, branch)])], [])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_trees_behind_several_branches_at_once_answer_as_each_path_of_each_branch_alone(name, seed):
    steps = steps_of(name, seed)
    lanes, plain, arriving = branched_lanes(steps), steps.lane(9), steps.lane(2)
    for _ in range(2):  # the last lane has branches without a token yet
        steps.check([(lane, some_branches(steps, lane)) for lane in lanes[:2]])
    for _ in range(2):
        rows, accepted = [], {}
        for lane, nodes in zip(lanes, (4, 9, 12), strict=True):
            tree = steps.draft(lane, nodes)
            rows.append((lane, tree))
            by_branch = [[node for node in tree if node.branch == branch] for branch in lane.branches]
            accepted[lane] = [steps.path(nodes) for nodes in by_branch]
        steps.check([*rows, (plain, steps.grow(plain, 1))], [(arriving, steps.grow(arriving, 6))])
        accept(steps, accepted)
        steps.check([(lane, [q for b in lane.branches for q in steps.grow(lane, 1, b)]) for lane in lanes])


def masked_logits(steps: LaneSteps, lane: GrowingLane, sees: dict[int, frozenset[int]]) -> np.ndarray:
    """float32 [tokens, vocab] of a lane without branches, all of it anew: token i attends to `sees[i]` alone."""
    count, padded = len(lane.tokens), 64 * -(-len(lane.tokens) // 64)
    visible = np.eye(padded, dtype=bool)
    for index, seen in sees.items():
        visible[index, sorted(seen)] = True
    token_ids = np.zeros(padded, np.int32)
    token_ids[:count] = [lane.tokens[index] for index in range(count)]
    return np.asarray(_masked_forward(steps)(token_ids, visible))[:count]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskedAttend:
    """Every token attends to those that its row of `visible`, bool [T, T], says."""

    visible: jax.Array

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        q, k, v = reference.rotate(heads)
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1, where=self.visible), v), kv


@cache
def _masked_forward(steps: LaneSteps):
    def forward(token_ids: jax.Array, visible: jax.Array) -> jax.Array:
        model = steps.model
        return model.logits(model(token_ids, jnp.arange(len(token_ids)), MaskedAttend(visible)))

    return jax.jit(forward)


def both_ways(queries: list[Query]) -> list[Query]:
    """Tokens of one block, each of which sees the context and the whole block."""
    last = queries[-1]
    return [replace(query, limit=last.index, sees=last.sees) for query in queries]


@pytest.mark.parametrize("name", MODELS)
def test_a_diffusion_block_sees_its_context_and_itself_in_both_directions(name):
    steps = steps_of(name)
    border = 2 * max(steps.page_size, 4)
    lanes, plain = [steps.lane(border + delta) for delta in (-3, 0, 1)], steps.lane(6)
    sees = [{index: frozenset(range(index + 1)) for index in lane.tokens} for lane in lanes]
    for block_size in (8, 5):
        blocks = [both_ways(steps.grow(lane, block_size)) for lane in lanes]
        for _ in range(3):  # the block is denoised in place: other tokens in the same slots
            for lane, block, seen in zip(lanes, blocks, sees, strict=True):
                lane.tokens |= dict(zip([query.index for query in block], steps.some_tokens(block_size), strict=True))
                seen |= {query.index: query.sees for query in block}
            rows = list(zip(lanes, blocks, strict=True))
            answers = steps.run([*rows[:2], (plain, steps.grow(plain, 1))], rows[2:])
            for lane, block, seen, answer in zip(lanes, blocks, sees, (*answers[:2], answers[3]), strict=True):
                expected = masked_logits(steps, lane, seen)[[query.index for query in block]]
                np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-4)


def test_a_whole_sequence_that_sees_both_ways_is_rewritten_in_place():
    steps = steps_of("LlamaForCausalLM")
    lane = steps.lane(1)
    window = both_ways([*lane.ends(), *steps.grow(lane, 30)])
    for _ in range(2):
        lane.tokens = dict(enumerate(steps.some_tokens(31)))
        (answer,) = steps.run([], [(lane, window)])
        expected = masked_logits(steps, lane, {query.index: query.sees for query in window})
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-4)


def alter_entry(name: str, entry: int | tuple[int, int], change) -> dict:
    def alter(packed):
        packed[name][entry] = change(packed[name][entry])

    return {"alter": alter}


BUGS = {
    "a node that does not see its parent": alter_entry("tail_bits", 1, lambda bits: bits & ~np.uint32(1)),
    "a node that sees its child": alter_entry("tail_bits", 0, lambda bits: bits | np.uint32(2)),
    "a position one too far": alter_entry("positions", 1, lambda position: position + 1),
    "a limit one too low": alter_entry("limit", 0, lambda limit: limit - 1),
    "another branch": alter_entry("branch", WIDTH, lambda branch: branch + 1),
    "a trunk one token too long": alter_entry("trunk_len", 1, lambda length: length + 1),
    "a page of another branch": alter_entry("page_branch", (1, -(-9 // 4)), lambda branch: branch + 1),
}


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_the_check_finds(bug):
    steps = steps_of("LlamaForCausalLM")
    chain, branched = steps.lane(7), steps.lane(9)
    branched.fork(2, first_takes_boundary=False)
    steps.check([(branched, steps.grow(branched, 1, 0) + steps.grow(branched, 1, 1))])
    rows = [(chain, steps.draft(chain, 3, chain=True)), (branched, steps.grow(branched, 1, 0))]
    if bug is None:
        steps.check(rows)
        return
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        steps.check(rows, **BUGS[bug])


def test_all_steps_are_one_program_and_all_commits_another():
    steps = steps_of("Qwen2ForCausalLM")
    check_trees(steps, [3, 4, 5, 6], [2, 3, 4])
    assert sorted(program.split()[0] for program in steps.programs) == ["commit", "step"]


@pytest.mark.slow
def test_the_kernel_answers_as_plain_xla_does_for_trees_and_branches_and_after_a_commit():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from kernels_pallas.branch_attention.api import branch_attention, plan_branch_attention

    def refuse(*_, **__):
        raise AssertionError("the reference was asked instead of the kernel")

    plan = partial(plan_branch_attention, reference=refuse, interpret=plgpu.InterpretGPUParams())
    kernel = AttentionBackend("pallas", plan, branch_attention, reference.rotate_and_write)
    backends = [select_backend("xla"), kernel]
    config = model_config("LlamaForCausalLM", num_heads=2, head_dim=64, num_layers=1)
    model = random_model(config, dtype=jnp.bfloat16)
    shape = BatchShape(2, 1, 16, pages_per_row=4, decode_width=4, tail_words=1)

    def answers(backend: AttentionBackend) -> list[np.ndarray]:
        steps = LaneSteps(model, shape, page_size=16, num_pages=16, backend=backend, dtype=jnp.bfloat16)
        drafting, branched, arriving = steps.lane(15), steps.lane(13), steps.lane(2)
        branched.fork(2, first_takes_boundary=True)
        tree = steps.draft(drafting, 4)
        found = []
        for decode in ((drafting, tree), (drafting, [])):
            if not decode[1]:
                accept_one_path_each(steps, {drafting: tree[:1]})
                decode = (drafting, steps.grow(drafting, 1))
            branches = [query for branch in range(2) for query in steps.grow(branched, 1, branch)]
            found += steps.run([decode, (branched, branches)], [(arriving, steps.grow(arriving, 7))])
        return found

    for plain, kernel in zip(*map(answers, backends), strict=True):
        error = np.linalg.norm(kernel - plain, axis=-1) / np.linalg.norm(plain, axis=-1)
        assert error.max() < 2e-2
