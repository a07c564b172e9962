"""Decode and prefill through the engine's own jitted steps, on batches made by hand, over a pool of random contents."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_bench.arithmetic import decode_bytes, prefill_flops
from gpu_bench.model import formula_model
from gpu_bench.plan import LONG_PAGES, LOOP_STEPS, PAGE_SIZE, SHORT_PAGES, Case, logits_file, model_values
from gpu_bench.timing import time_launches
from gpu_bench.weights import prompt_ids
from jaxinfer.attention.backend import select_backend
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, idle_batch
from jaxinfer.programs.decode_loop import DecodeLoop
from jaxinfer.programs.program import KV, SEATS, TARGET
from jaxinfer.programs.runner import Runner, initial_state
from jaxinfer.programs.seats import Seats
from jaxinfer.programs.step import Step

# A decode step may write as many slots after the context; a multiple of the page size.
_ROOM = 2 * LOOP_STEPS

NUM_SEATS = 256
STEP, LOOP = Step(), DecodeLoop(LOOP_STEPS)


class Steps:
    """A model and its runner, for the cases of one part; a case of another model or backend replaces them."""

    def __init__(self, cases: tuple[Case, ...], *, smoke: bool, work: Path) -> None:
        self.cases, self.smoke, self.work = cases, smoke, work
        self.key: tuple[str, str] | None = None
        self.runner: Runner | None = None
        self.values: dict[str, Any] = {}
        self.backend = ""

    def measure(self, case: Case) -> dict[str, Any]:
        """One row."""
        runner = self._runner(case["model"], case["backend"])
        figures = self._prefill(runner, case) if "tokens" in case else self._decode(runner, case)
        return figures | {"attention": self.backend}

    def _decode(self, runner: Runner, case: Case) -> dict[str, Any]:
        batch, context, loop = case["batch"], case["context"], case["launch"] == "loop"
        steps = LOOP_STEPS if loop else 1
        packed = decode_batch(batch, context, pages_for(context), runner.state[KV], num_steps=steps)
        timing = time_launches(lambda: launch_decode(runner, packed, context, loop=LOOP if loop else None))
        row = timing.row(per_launch=steps)
        return row | {
            "bytes": decode_bytes(self.values, batch=batch, context=context, steps=steps),
            "tokens_per_second": 1e3 * batch / row["ms"],
        }

    def _prefill(self, runner: Runner, case: Case) -> dict[str, Any]:
        tokens = case["tokens"]
        pages = pages_for(tokens)
        shape = BatchShape(decode_rows=0, prefill_rows=1, prefill_tokens=tokens, pages_per_row=pages)
        vocab = self.values["vocab_size"]
        packed = prefill_batch(shape, prompt_ids(tokens, vocab), runner.state[KV])
        timing = time_launches(lambda: runner.launch(STEP, shape, packed.buffer).token_ids)
        row = timing.row() | {"flops": prefill_flops(self.values, tokens, rows=shape.num_logits)}
        if case["prompt"]:
            packed = prefill_batch(shape, prompt_ids(case["prompt"], vocab), runner.state[KV])
            output = runner.launch(STEP, shape, packed.buffer)
            last = output.hidden[case["prompt"] - 1 : case["prompt"]]
            np.save(logits_file(self.work, case["model"]), np.asarray(runner.weights[TARGET].module.logits(last)[0]))
        return row | {"tokens_per_second": 1e3 * tokens / row["ms"]}

    def _runner(self, model: str, backend: str) -> Runner:
        if self.runner is None or self.key != (model, backend):
            self.runner = None  # its memory goes first
            self.values = model_values(model, smoke=self.smoke)
            module = formula_model(self.values)
            chosen = select_backend(backend)
            cases = [case for case in self.cases if case["model"] == model]
            pages = max(case.get("batch", 1) * pages_of_row(case) for case in cases)
            cache = random_cache(module.config, num_pages=pages)
            self.runner = Runner({TARGET: module}, initial_state(cache, NUM_SEATS, module.config.vocab_size), chosen)
            self.key, self.backend = (model, backend), chosen.name
        return self.runner


def pages_of_row(case: Case) -> int:
    """Pages that one row of a case uses."""
    return -(-(case["tokens"] if "tokens" in case else case["context"] + _ROOM) // PAGE_SIZE)


def pages_for(tokens: int) -> int:
    """The bucket of pages of a lane of `tokens` tokens and some to come."""
    return next(pages for pages in (SHORT_PAGES, LONG_PAGES) if tokens + _ROOM <= pages * PAGE_SIZE)


def lane_pages(cache: KVPool, rows: int, tokens: int) -> np.ndarray:
    """int [rows, N]: pages of their own for rows of so many tokens, in an order that is random but always the same."""
    used = -(-tokens // cache.page_size)
    if rows * used > cache.num_pages:
        raise ValueError(f"{rows} rows of {used} pages do not fit a pool of {cache.num_pages}")
    return np.random.default_rng(5).permutation(cache.num_pages)[: rows * used].reshape(rows, used)


def random_cache(config: Any, *, num_pages: int) -> KVPool:
    """A pool full of random numbers in bfloat16: zeros would be multiplied faster."""
    zeros = KVPool.allocate(config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=jnp.dtype(jnp.bfloat16))
    fill = jax.jit(lambda pages, key: jax.random.normal(key, pages.shape, pages.dtype), donate_argnums=0)
    keys = iter(jax.random.split(jax.random.key(3), 2 * len(zeros.k)))
    return KVPool(k=tuple(fill(p, next(keys)) for p in zeros.k), v=tuple(fill(p, next(keys)) for p in zeros.v))


@partial(jax.jit, static_argnums=0)
def seats_behind(context: int) -> Seats:
    """Seats with so many cached tokens and one that is not; made on the device, so that a launch waits for no host."""
    seats = jnp.arange(NUM_SEATS, dtype=jnp.int32)
    return Seats(token=1 + seats, before=seats, length=jnp.full_like(seats, context + 1))


def launch_decode(runner: Runner, packed: PackedBatch, context: int, *, loop: DecodeLoop | None = None) -> jax.Array:
    """Tokens of one launch of `decode_batch`, from seats that have `context` cached tokens and one that is not."""
    runner.state[SEATS] = seats_behind(context)
    if loop is None:
        return runner.launch(STEP, packed.shape, packed.buffer).token_ids
    return runner.launch(loop, packed.shape, packed.buffer).tokens


def decode_batch(batch: int, context: int, pages_per_row: int, cache: KVPool, *, num_steps: int = 1) -> PackedBatch:
    """Greedy decode rows of the first seats, with `context` cached tokens each, in random pages of their own."""
    num_slots = cache.num_pages * cache.page_size
    packed = idle_batch(BatchShape(batch, 0, 0, pages_per_row), num_slots=num_slots, num_seats=NUM_SEATS)
    table = lane_pages(cache, batch, context + num_steps)
    used = table.shape[1]
    packed["page_table"][:, :used] = table
    packed["capacity"][:] = used * cache.page_size
    packed["max_len"][:] = np.iinfo(np.int32).max
    packed["logits_index"][:] = packed["seat"][:] = packed["row_seat"][:] = np.arange(batch)
    packed["num_steps"][...] = num_steps
    return packed


def prefill_batch(shape: BatchShape, ids: np.ndarray, cache: KVPool) -> PackedBatch:
    """A prompt from its first token, as the first prefill row; every other row and token is padding."""
    page_size, num_slots = cache.page_size, cache.num_pages * cache.page_size
    packed = idle_batch(shape, num_slots=num_slots, num_seats=NUM_SEATS)
    row, first, count = shape.decode_rows, shape.decode_rows * shape.decode_width, len(ids)
    table = lane_pages(cache, 1, count)[0]
    tokens, at = slice(first, first + count), np.arange(count)
    packed["page_table"][row, : len(table)] = table
    packed["token_ids"][tokens] = ids
    packed["positions"][tokens] = packed["limit"][tokens] = at
    packed["lengths"][tokens] = packed["sample_position"][row] = count
    packed["slot_mapping"][tokens] = table[at // page_size] * page_size + at % page_size
    packed["row"][tokens] = row
    for name in ("kv_len", "trunk_len", "tail_start"):
        packed[name][row] = count
    packed["query_start_loc"][row + 1 :] = first + count
    packed["logits_index"][row] = first + count - 1
    packed["seat"][row] = 0
    return packed
