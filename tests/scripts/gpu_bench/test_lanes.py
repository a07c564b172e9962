"""Attention steps of the GPU benchmark: lanes are what they are called, all implementations get the same task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpu_bench import attention
from gpu_bench.attention import build_step, check_kernel, contiguous, dense_layer, measure_attention, relative_error
from gpu_bench.lanes import Pages, branch_row, lay_out, plain_row, tree_row, visible_pairs
from gpu_bench.plan import LONG_PAGES, PAGE_SIZE, SHORT_PAGES, NotRun, parts
from kernels_pallas.branch_attention.blocks import AttentionSizes
from kernels_pallas.branch_attention.reference import paged_attention, plan_paged_attention

HEADS, KV_HEADS, DIM = 4, 2, 8
CASES = {part.name: part.cases for part in parts(smoke=True)}
REAL = {part.name: part.cases for part in parts(smoke=False)}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def pools(num_pages):
    return [jnp.asarray(normal(seed, num_pages, PAGE_SIZE, KV_HEADS, DIM)) for seed in (0, 1)]


def queries(step):
    return jnp.asarray(normal(2, step.num_tokens, HEADS, DIM))


@jax.jit
def paged(q, k, v, metadata):
    return paged_attention(q, k, v, plan_paged_attention(metadata, AttentionSizes.of(q, k)), scale=DIM**-0.5)


def attend(step, k, v, q):
    return np.asarray(paged(q, k, v, step.metadata))


@pytest.mark.parametrize(
    "case", [case for name in ("branches", "attention") for case in CASES[name] if case["implementation"] == "cudnn"],
    ids=lambda case: case["shape"],
)  # fmt: skip
def test_contiguous_k_and_v_with_their_mask_are_the_same_task_as_the_pages(case):
    step, num_pages = build_step(case)
    k, v = pools(num_pages)
    q = queries(step)
    causal = case["kind"] == "prefill"
    dense_q, (dense_k, dense_v), mask = contiguous(step, ([k], [v]), q, causal=causal)
    assert (mask is None) == (case["kind"] not in ("branches", "tree"))
    found = dense_layer(dense_q, dense_k[0], dense_v[0], mask, causal=causal, implementation="xla")
    np.testing.assert_allclose(found.reshape(q.shape), attend(step, k, v, q), atol=2e-6)


def test_a_branch_of_a_lane_sees_what_a_lane_of_its_own_would_see():
    branches, trunk, own = 3, 32, 32
    step, num_pages = build_step(branch_case("branches", branches, trunk, own))
    k, v = pools(num_pages)
    q = queries(step)
    together = attend(step, k, v, q)
    row = step.rows[0]
    for branch in range(branches):
        pages = np.concatenate([row.pages[: trunk // PAGE_SIZE], row.pages[row.owners == branch]])
        assert len(pages) == (trunk + own) // PAGE_SIZE
        alone = lay_out([plain_row(pages, trunk + own - 1)], pages_per_row=8, num_pages=num_pages, page_size=PAGE_SIZE)
        np.testing.assert_allclose(attend(alone, k, v, q[branch : branch + 1])[0], together[branch], atol=2e-6)


def branch_case(kind, rows, context, own):
    return {"kind": kind, "rows": rows, "context": context, "own": own, "pool_contexts": (context,)}


def test_branches_and_lanes_see_as_much_and_read_less_where_they_share():
    rows, context, own = 4, 64, 32
    read = {}
    for kind in ("branches", "lanes", "shared"):
        step, _ = build_step(branch_case(kind, rows, context, own))
        assert step.pairs == rows * (context + own)
        read[kind] = step.kv_tokens
    assert read == {"branches": 192, "lanes": 384, "shared": 192}


def test_lanes_with_a_common_trunk_run_the_program_of_lanes_of_their_own():
    shapes = [
        jax.tree.map(lambda x: x.shape, build_step(branch_case(kind, 4, 64, 32))[0].metadata)
        for kind in ("lanes", "shared")
    ]
    assert shapes[0] == shapes[1]


def test_a_node_of_a_tree_sees_the_context_and_its_ancestors():
    row = tree_row(np.arange(4), context=20, nodes=12, seed=3)
    seen = visible_pairs(row, PAGE_SIZE)
    assert seen[:, :20].all() and np.diagonal(seen[:, 20:]).all()
    for node in range(12):
        ancestors = np.flatnonzero(seen[node, 20:])
        assert ancestors[-1] == node  # none of a later node
        parent = ancestors[-2] if len(ancestors) > 1 else None
        if parent is not None:
            assert list(ancestors[:-1]) == list(np.flatnonzero(seen[parent, 20:]))
    assert len({seen[node, 20:].sum() for node in range(12)}) > 2  # it is neither a chain nor a star


def test_the_pairs_of_a_causal_prefill_are_a_triangle():
    step, _ = build_step({"kind": "prefill", "rows": 1, "context": 40, "pool_contexts": (40,)})
    assert (step.pairs, step.kv_tokens) == (40 * 41 // 2, 40)


def test_every_case_of_the_real_tables_fits_its_bucket_and_its_pool():
    for case in (*REAL["branches"], *REAL["attention"]):
        if case["implementation"] != "kernel" or case["rows"] * case["context"] > 70_000 or case["kind"] == "prefill":
            continue
        step, num_pages = build_step(case)
        table = np.asarray(step.metadata.page_table)
        assert table.shape[1] in (SHORT_PAGES, LONG_PAGES)
        assert max(len(row.pages) for row in step.rows) <= table.shape[1]
        assert max(int(row.pages.max()) for row in step.rows) < num_pages


def test_cases_that_share_a_pool_share_a_program():
    case = {c["case"]: c for c in REAL["branches"]}
    shapes = [
        build_step(case[f"4 branches over {trunk}, one lane: kernel"])
        for trunk in ("8,192", "32,768")
    ]  # fmt: skip
    assert shapes[0][1] == shapes[1][1]
    assert jax.tree.map(jnp.shape, shapes[0][0].metadata) == jax.tree.map(jnp.shape, shapes[1][0].metadata)


def test_pages_are_handed_out_once_and_not_beyond_the_pool():
    pages = Pages(8, PAGE_SIZE, seed=0)
    taken = np.concatenate([pages.take(3 * PAGE_SIZE), pages.take(4 * PAGE_SIZE + 1)])
    assert sorted(taken) == list(range(8))
    with pytest.raises(ValueError, match="1 pages are wanted, 0 are free"):
        pages.take(1)


def test_branches_of_part_pages_are_refused():
    with pytest.raises(ValueError, match="multiples of the page size"):
        branch_row(np.arange(9), PAGE_SIZE, 2, trunk=40, own=16)


def test_the_kernel_and_cudnn_are_not_run_on_a_cpu_and_say_why():
    for implementation, reason in (("kernel", "the kernel is for"), ("cudnn", "needs an NVIDIA GPU")):
        case = next(case for case in CASES["attention"] if case["implementation"] == implementation)
        with pytest.raises(NotRun, match=reason):
            measure_attention(case, smoke=True)
    with pytest.raises(NotRun, match="the kernel is for"):
        check_kernel(REAL["check"][0], smoke=False)


def test_the_error_is_that_of_the_worst_head_and_nan_is_an_error(monkeypatch):
    expected = np.ones((3, 2, 4))
    found = expected.copy()
    found[1, 1] += 0.1
    assert relative_error(found, expected, np.array([True, True, True])) == pytest.approx(0.1)
    assert relative_error(found, expected, np.array([True, False, True])) == 0
    found[0, 0, 0] = np.nan
    assert not relative_error(found, expected, np.array([True, True, True])) <= 1


def plain(step, sizes, *, reference, interpret):
    return plan_paged_attention(step, sizes)


def test_a_kernel_that_is_wrong_fails_its_check(monkeypatch):
    def almost(q, k_pages, v_pages, plan, *, scale):
        return 1.02 * paged_attention(q, k_pages, v_pages, plan, scale=scale)

    monkeypatch.setattr(attention, "plan_branch_attention", plain)
    monkeypatch.setattr(attention, "branch_attention", almost)
    with pytest.raises(RuntimeError, match="the relative error is 0.02"):
        check_kernel(CASES["check"][0], smoke=True)


@pytest.mark.parametrize("kind", ["decode", "prefill", "branches", "tree", "mixed"])
def test_what_is_checked_on_a_gpu_holds_for_plain_xla_at_the_same_precision(kind, monkeypatch):
    monkeypatch.setattr(attention, "plan_branch_attention", plain)
    found = check_kernel({"kind": kind, "size": "short", "heads": (4, 2, 64)}, smoke=True)
    assert 0 < found["relative_error"] < 1e-2
