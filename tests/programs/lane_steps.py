"""Lanes that grow by real steps, as a decoding strategy would grow them, and what each of their tokens must answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.backend import AttentionBackend, select_backend
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, idle_batch
from jaxinfer.programs.program import KV, TARGET
from jaxinfer.programs.runner import Runner, initial_state
from jaxinfer.programs.step import Step
from tests.attention.lanes import Lane, Query, tail_words, with_tail
from tests.oracle import next_token_logits

STEP = Step()
TRUNK = -1
TOLERANCE = 1e-4  # of logits that are about 10

type Row = tuple[GrowingLane, Sequence[Query]]


class GrowingLane:
    """One lane as a host keeps it: its pages and their owners, the token at every lane index, branches and a tail."""

    def __init__(self, page_size: int, free: list[int]) -> None:
        self.page_size = page_size
        self.free = free  # the pool's free pages, the next one last
        self.pages: list[int] = []
        self.owners: list[int] = []
        self.tokens: dict[int, int] = {}  # of every lane index that has content
        self.trunk_len = 0
        self.branches: dict[int, list[int]] = {}  # their lane indices in order
        self.tail_start: int | None = None

    def slot(self, index: int) -> int:
        return self.pages[index // self.page_size] * self.page_size + index % self.page_size

    def sequence(self, query: Query) -> list[int]:
        """The tokens that a causal query sees, in order: its own branch or path and nothing else."""
        return [self.tokens[index] for index in sorted(query.sees)]

    def view(self, queries: Sequence[Query] = ()) -> Lane:
        """The lane as the builders of attention scenes know it."""
        kv_len = max(self.tokens, default=-1) + 1
        tail_start = kv_len if self.tail_start is None else self.tail_start
        return Lane(
            self.page_size, kv_len, self.trunk_len, tail_start, tuple(self.owners), frozenset(self.tokens),
            tuple(queries),
        )  # fmt: skip

    def extend(self, token_ids: Iterable[int], branch: int = TRUNK) -> list[Query]:
        """New tokens at the end of the trunk, or of a branch."""
        return [self._append(token, branch) for token in token_ids]

    def _append(self, token: int, branch: int) -> Query:
        assert self.tail_start is None and (branch != TRUNK or not self.branches)
        past = list(range(self.trunk_len)) if branch == TRUNK else self.branches[branch]
        index = past[-1] + 1 if past else self.trunk_len
        has_room = index % self.page_size != 0 and self.owners[index // self.page_size] == branch
        if not has_room:
            index = len(self.pages) * self.page_size
            self.pages.append(self.free.pop())
            self.owners.append(branch)
        self.tokens[index] = token
        if branch == TRUNK:
            self.trunk_len += 1
            return Query(index, index, branch, frozenset(range(self.trunk_len)))
        past.append(index)
        return Query(index, index, branch, frozenset((*range(self.trunk_len), *past)))

    def fork(self, branches: int, *, first_takes_boundary: bool) -> None:
        """Start branches; the rest of the trunk's last page is the first one's, or free."""
        self.branches = {branch: [] for branch in range(branches)}
        if first_takes_boundary and self.trunk_len % self.page_size:
            self.owners[-1] = 0

    def finish(self, branch: int) -> None:
        """Give back the branch's pages; later ones close up, in order."""
        for index in self.branches.pop(branch):
            del self.tokens[index]
        moved_to: dict[int, int] = {}
        for page, owner in enumerate(self.owners):
            if page * self.page_size < self.trunk_len:
                moved_to[page] = page
                self.owners[page] = TRUNK if owner == branch else owner
            elif owner == branch:
                self.free.append(self.pages[page])
            else:
                moved_to[page] = len(moved_to)

        def moved(index: int) -> int:
            return moved_to[index // self.page_size] * self.page_size + index % self.page_size

        self.pages, self.owners = ([values[page] for page in moved_to] for values in (self.pages, self.owners))
        self.tokens = {moved(index): token for index, token in self.tokens.items()}
        self.branches = {branch: [moved(index) for index in past] for branch, past in self.branches.items()}

    def ends(self) -> list[Query]:
        """Where trees may start: the last token of the lane or of each branch, the trunk's for a branch without any."""
        trunk = range(self.trunk_len)
        if not self.branches:
            return [Query(trunk[-1], trunk[-1], TRUNK, frozenset(trunk))]
        last = {branch: past[-1] if past else trunk[-1] for branch, past in self.branches.items()}
        return [Query(last[b], last[b], b, frozenset((*trunk, *past))) for b, past in self.branches.items()]

    def draft(self, rng: np.random.Generator, nodes: int, *, vocab_size: int, chain: bool = False) -> list[Query]:
        """A tail of random draft trees after the ends of the lane."""
        forest = with_tail(rng, self.view(self.ends()), nodes, chain=chain)
        self.tail_start = forest.tail_start
        self.pages += [self.free.pop() for _ in range(len(forest.owners) - len(self.pages))]
        self.owners = list(forest.owners)
        self.tokens |= {query.index: int(rng.integers(vocab_size)) for query in forest.queries}
        return list(forest.queries)

    def commit(self, paths: Sequence[Sequence[Query]]) -> list[tuple[int, int]]:
        """Drop the tail but for paths from a root, which continue their branches; source and destination slots.

        The tail's pages are the next ones to be handed out: what moves often lands where something else moves from.
        """
        assert self.tail_start is not None
        accepted = [(self.slot(q.index), self.tokens[q.index], q.branch) for path in paths for q in path]
        kept = -(-self.tail_start // self.page_size)
        self.free += reversed(self.pages[kept:])
        del self.pages[kept:], self.owners[kept:]
        self.tokens = {index: token for index, token in self.tokens.items() if index < self.tail_start}
        self.tail_start = None
        return [(source, self.slot(self._append(token, branch).index)) for source, token, branch in accepted]


class LaneSteps:
    """Steps over lanes, in a pool that is NaN wherever no lane has written; one shape, so one compiled program.

    Every token of a step gets logits.
    """

    def __init__(
        self,
        model: DecoderLM,
        shape: BatchShape,
        *,
        page_size: int,
        num_pages: int,
        backend: AttentionBackend | None = None,
        dtype: jnp.dtype = jnp.float32,
    ) -> None:
        self.model, self.page_size, self.num_pages = model, page_size, num_pages
        self.shape = replace(shape, num_logits=shape.num_tokens)
        self.programs: list[str] = []
        empty = KVPool.allocate(model.config, num_pages=num_pages, page_size=page_size, dtype=dtype)
        self.runner = Runner(
            {TARGET: model},
            initial_state(empty, 1, model.config.vocab_size),
            backend or select_backend("xla"),
            on_compile=self.programs.append,
        )
        self.start(seed=0)

    def start(self, seed: int) -> None:
        """Forget all lanes; pages are handed out in an order of their own."""
        self.rng = np.random.default_rng(seed)
        self.free = self.rng.permutation(self.num_pages).tolist()
        self.garbage = self.free.pop()  # page tables are padded with a page that is never written
        self.lanes: list[GrowingLane] = []
        self.poison()

    def poison(self) -> None:
        """NaN in every slot that holds nothing of a lane: freed pages, dropped tails, branches that have ended."""
        held = np.zeros(self.num_pages * self.page_size, bool)
        held[[lane.slot(index) for lane in self.lanes for index in lane.tokens]] = True
        mask = held.reshape(self.num_pages, self.page_size, 1, 1)
        state = self.runner.state
        state[KV] = jax.tree.map(lambda pages: jnp.where(mask, pages, jnp.nan), state[KV])

    def some_tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, self.model.config.vocab_size, count).tolist()

    def lane(self, prompt_len: int) -> GrowingLane:
        """A lane with a random prompt, prefilled in chunks."""
        lane = GrowingLane(self.page_size, self.free)
        self.lanes.append(lane)
        queries = lane.extend(self.some_tokens(prompt_len))
        for start in range(0, prompt_len, self.shape.prefill_tokens):
            self.run([], [(lane, queries[start : start + self.shape.prefill_tokens])])
        return lane

    def grow(self, lane: GrowingLane, count: int, branch: int = TRUNK) -> list[Query]:
        """Random new tokens of a lane."""
        return lane.extend(self.some_tokens(count), branch)

    def draft(self, lane: GrowingLane, nodes: int, *, chain: bool = False) -> list[Query]:
        """Random draft trees."""
        return lane.draft(self.rng, nodes, vocab_size=self.model.config.vocab_size, chain=chain)

    def run(
        self,
        decode: Sequence[Row],
        prefill: Sequence[Row] = (),
        *,
        alter: Callable[[PackedBatch], None] = lambda packed: None,
    ) -> list[np.ndarray]:
        """One step: float32 [queries, vocab] for each row, those of decode rows first.

        Args:
            alter: what to change of the batch before it is launched.
        """
        shape = self.shape
        packed = idle_batch(shape, num_slots=self.num_pages * self.page_size, num_seats=1)
        packed["logits_index"][:] = np.arange(shape.num_tokens)
        packed["page_table"][:] = self.garbage
        spans: list[slice] = []
        for row, (lane, queries) in enumerate(decode):
            assert row < shape.decode_rows and len(queries) <= shape.decode_width
            spans.append(self._fill(packed, row, row * shape.decode_width, lane, queries))
        first = shape.decode_rows * shape.decode_width
        for row, (lane, queries) in enumerate(prefill, shape.decode_rows):
            assert row < shape.num_rows and first + len(queries) <= shape.num_tokens
            packed["query_start_loc"][row:] = first
            spans.append(self._fill(packed, row, first, lane, queries))
            first += len(queries)
            packed["query_start_loc"][row + 1 :] = first
        alter(packed)
        hidden = self.runner.launch(STEP, shape, packed.buffer).hidden
        logits = np.asarray(self.model.logits(hidden[: shape.num_tokens]))
        return [logits[span] for span in spans]

    def _fill(self, packed: PackedBatch, row: int, first: int, lane: GrowingLane, queries: Sequence[Query]) -> slice:
        view, pages = lane.view(queries), len(lane.pages)
        packed["page_table"][row, :pages] = lane.pages
        packed["page_branch"][row, :pages] = lane.owners
        # The owners of pages that are wholly in the trunk are never read.
        in_trunk = view.trunk_len // self.page_size
        packed["page_branch"][row, :in_trunk] = self.rng.integers(-1, 4, in_trunk)
        for name in ("kv_len", "trunk_len", "tail_start"):
            packed[name][row] = getattr(view, name)
        for t, query in enumerate(queries, first):
            depth = sum(index <= query.index for index in query.sees) - 1
            packed["token_ids"][t], packed["slot_mapping"][t] = lane.tokens[query.index], lane.slot(query.index)
            packed["positions"][t], packed["lengths"][t], packed["row"][t] = depth, depth + 1, row
            packed["limit"][t], packed["branch"][t] = query.limit, query.branch
            packed["tail_bits"][t] = tail_words(query.tail, self.shape.tail_words)
        return slice(first, first + len(queries))

    def check(self, decode: Sequence[Row], prefill: Sequence[Row] = (), **options) -> None:
        """Run a step; each token must answer as it does at the end of a plain sequence of what it sees."""
        for (lane, queries), logits in zip((*decode, *prefill), self.run(decode, prefill, **options), strict=True):
            for query, answer in zip(queries, logits, strict=True):
                expected = next_token_logits(self.model, lane.sequence(query), prompt_len=1)
                np.testing.assert_allclose(answer, expected, rtol=TOLERANCE, atol=TOLERANCE)

    def path(self, nodes: Sequence[Query]) -> list[Query]:
        """From a root to a random one of the draft nodes; of no nodes, nothing."""
        if not nodes:
            return []
        end = nodes[int(self.rng.integers(len(nodes)))]
        return sorted((node for node in nodes if node.tail <= end.tail), key=lambda node: node.index)
