"""The trees that the engine drafts are those of EAGLE-3, as NumPy makes them from the whole sequence each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.sampling.noise import gumbel
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import RowKind
from jaxinfer.speculative.gamma import Choice, FixedGamma
from jaxinfer.speculative.tree import Tree
from tests.branching.builders import alone, make_group
from tests.builders import drain, make_request, random_prompts, run_requests
from tests.speculative import eagle3_numpy
from tests.speculative.builders import speculating_engine, speculation_of
from tests.speculative.decoder_numpy import Checkpoint, random_target
from tests.speculative.eagle3_files import load_target_and_head

VOCAB, DEPTH, TOP_K, NODES = 61, 3, 4, 18
CLOSE = 1e-4


class SomeRounds(FixedGamma):
    """Trees, and plain decoding for the launches that a test names."""

    plain: frozenset[int] = frozenset()
    number = 0

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        self.number += 1
        return Choice(np.full(len(seats), 0 if self.number in self.plain else self.num_drafts), self.num_nodes)


@pytest.fixture(scope="module")
def checkpoints() -> tuple[Checkpoint, Checkpoint]:
    rng = np.random.default_rng(7)
    target = random_target(rng, qk_norm=True, vocab_size=VOCAB)
    return target, eagle3_numpy.random_head(rng, target.config, draft_vocab_size=40)


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory) -> Callable[..., EngineCore]:
    folder: Path = tmp_path_factory.mktemp("eagle3")
    model, head = load_target_and_head(folder, checkpoints)
    made: dict[tuple, EngineCore] = {}

    def get(**limits: Any) -> EngineCore:
        key = tuple(sorted(limits.items()))
        if key not in made:
            fields = {"num_speculative_tokens": NODES, "tree_depth": DEPTH, "tree_top_k": TOP_K}
            limits = {
                "max_decode_steps": 2, "overlap": False, "max_num_batched_tokens": 128, "kv_cache_tokens": 160, **limits
            }  # fmt: skip
            made[key] = speculating_engine(model, head, SomeRounds(DEPTH + 1, NODES), speculative=fields, **limits)
        core = made[key]
        for request_id in list(core.scheduler.requests):  # of a test that has failed
            core.abort(request_id)
        drain(core)
        controller = speculation_of(core).controller = SomeRounds(DEPTH + 1, NODES)
        controller.number = 0
        assert core.reset_prefix_cache()
        return core

    return get


def noise_of(request: Request) -> eagle3_numpy.Noise | None:
    temperature = request.sampling_params.temperature
    if not temperature:
        return None
    key = jnp.asarray(np.asarray(request.request_key, np.uint32))
    return lambda position, ids: temperature * np.asarray(gumbel(key, jnp.asarray(position), jnp.asarray(ids)))


def paths_of(tree: Tree, row: int) -> dict[tuple[int, ...], float]:
    tokens, parents, scores = (np.asarray(x)[row] for x in (tree.tokens, tree.parent, tree.score))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {path: float(score) for path, score in zip(paths, scores, strict=True) if score > -np.inf}


def differs(got: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> str | None:
    """What is not alike; nodes whose scores nearly tie at the end of a tree may stand for each other."""
    last = min(wanted.values()) + CLOSE
    for name, some, others in (("drafted", got, wanted), ("missing", wanted, got)):
        odd = [path for path, score in some.items() if path not in others and score > last]
        if odd:
            return f"{name} {odd}"
    off = {path: (got[path], wanted[path]) for path in got.keys() & wanted.keys()}
    off = {path: pair for path, pair in off.items() if abs(pair[0] - pair[1]) > CLOSE}
    return f"scores {off}" if off else None


def check_trees(
    core: EngineCore,
    checkpoints: tuple[Checkpoint, Checkpoint],
    requests: list[Request],
    groups: Sequence[RequestGroup] = (),
) -> int:
    """Run requests and groups, and compare the tree of every round with NumPy's; how many."""
    target, head = checkpoints
    strategy, count = speculation_of(core), 0
    for request in requests:
        core.add_request(request)
    for group in groups:
        core.add_group(group)
    everybody = [*requests, *(member for group in groups for member in group.members)]
    while core.has_unfinished_requests():
        before = {request.request_id: list(request.token_ids) for request in everybody}
        strategy.latest = None
        core.step()
        landed = strategy.latest
        if landed is None or landed.output.tree is None:
            continue
        drafted = np.asarray(landed.output.num_drafts)[0] > 0
        for request, row in zip(landed.requests, landed.rows.tolist(), strict=True):
            tokens = before[request.request_id]
            # Trees are less deep where fewer tokens are wanted.
            if not drafted[row] or len(tokens) + DEPTH + 1 >= request.max_total_tokens:
                continue
            wanted = eagle3_numpy.draft_tree(
                head, target, tokens, depth=DEPTH, top_k=TOP_K, num_nodes=NODES, noise=noise_of(request)
            ).paths()
            difference = differs(paths_of(landed.output.tree, row), wanted)
            assert difference is None, difference
            count += 1
    return count


def requests_of(lengths: tuple[int, ...], temperature: float = 0.0, max_tokens: int = 16) -> list[Request]:
    prompts = random_prompts(lengths, vocab_size=VOCAB)
    return [
        make_request(str(i), p, max_tokens=max_tokens, temperature=temperature, seed=i) for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_are_those_of_numpy(temperature, checkpoints, engine):
    assert check_trees(engine(), checkpoints, requests_of((20, 33, 4), temperature)) > 20


def test_prompts_in_chunks_leave_no_gap(checkpoints, engine):
    core = engine(max_num_batched_tokens=80, kv_cache_tokens=512)
    assert check_trees(core, checkpoints, requests_of((100, 110, 90))) > 20


def test_behind_a_cached_prefix_the_head_goes_on(checkpoints, engine):
    core = engine()
    (prefix,) = random_prompts((42,), vocab_size=VOCAB)
    check_trees(core, checkpoints, [make_request("first", prefix, max_tokens=4)])
    again = [make_request(f"again {i}", [*prefix[: 41 - i], i, 3], max_tokens=12) for i in range(2)]
    assert check_trees(core, checkpoints, again) > 12
    assert all(request.num_cached_tokens >= 36 for request in again)


def test_after_a_plain_phase_the_head_goes_on(checkpoints, engine):
    core = engine()
    controller = speculation_of(core).controller
    assert isinstance(controller, SomeRounds)
    controller.plain = frozenset(range(3, 8))
    assert check_trees(core, checkpoints, requests_of((20, 11), max_tokens=30)) > 20


def test_a_preempted_request_gets_the_same_trees(checkpoints, engine):
    core = engine()
    before = core.get_metrics().num_preemptions_total
    assert check_trees(core, checkpoints, requests_of((40, 44, 43), max_tokens=24)) > 12
    assert core.get_metrics().num_preemptions_total > before


@pytest.mark.parametrize("mode", ["in_one_sequence", pytest.param("batching", marks=pytest.mark.slow)])
def test_branches_get_the_trees_of_each_alone(mode, checkpoints, engine, launches_of_rounds):
    """With a plain request beside them, and members that come late. And no tree changes a token."""
    core = engine(max_num_seqs=8, max_num_batched_tokens=160, kv_cache_tokens=512)
    (prefix, suffix, other) = random_prompts((21, 5, 18), vocab_size=VOCAB, seed=3)
    suffixes = [suffix, [7], [], [8, 9, 1], [3], suffix[:2]]
    options = {"max_tokens": 18, "temperature": 0.7, "seed": 5}
    group = make_group("group", prefix, suffixes, branch_mode=mode, max_parallel=4, **options)
    beside = make_request("beside", other, max_tokens=18)
    assert check_trees(core, checkpoints, [beside], [group]) > 30
    assert ((RowKind.VERIFICATION, True) in launches_of_rounds) == (mode == "in_one_sequence")
    speculation_of(core).controller = FixedGamma(0)
    same = [*alone("same", prefix, suffixes, **options), make_request("same beside", other, max_tokens=18)]
    assert [r.output_token_ids for r in (*group.members, beside)] == run_requests(core, same)


@pytest.mark.parametrize("bug", eagle3_numpy.BUGS)
def test_planted_bugs_make_other_trees(bug, checkpoints, engine):
    """Acceptance would hardly tell."""
    target, head = checkpoints
    with pytest.MonkeyPatch.context() as patch:
        right = eagle3_numpy.draft_tree
        patch.setattr(eagle3_numpy, "draft_tree", lambda *given, **options: right(*given, **options, bug=bug))
        with pytest.raises(AssertionError, match="drafted|missing|scores"):
            check_trees(engine(), (target, head), requests_of((20, 33)))
