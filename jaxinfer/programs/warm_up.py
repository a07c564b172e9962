"""Compiling every program that an engine can need, before requests wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm

from jaxinfer.programs.batch_layout import BatchShape, PackedBatch
from jaxinfer.programs.buckets import Buckets, entry_buckets
from jaxinfer.programs.mapped_memory import room_for_programs
from jaxinfer.programs.runner import StepRunner, padded_tokens
from jaxinfer.sampling.adjustments import Adjustments


def idle_batch(shape: BatchShape, *, num_slots: int, num_seats: int) -> PackedBatch:
    """A step of padding alone: it writes nothing, sees nothing and is sampled for nobody."""
    packed = PackedBatch(shape)
    packed["slot_mapping"][:] = num_slots + np.arange(shape.num_tokens)
    for name in ("limit", "branch", "page_branch", "ending_token_ids"):
        packed[name][...] = -1
    packed["query_start_loc"][:] = np.minimum(np.arange(shape.num_rows + 1), shape.decode_rows) * shape.decode_width
    packed["top_p"][:] = 1.0
    packed["seat"][:] = num_seats
    packed["num_steps"][...] = 1
    return packed


def warm_up(runner: StepRunner, buckets: Buckets, *, vocab_size: int, progress: bool = True) -> int:
    """Compile all programs by running each on padding; how many there are.

    Raises:
        RuntimeError: they are more than Linux has memory maps for, see `room_for_programs`.
    """
    programs = list(_programs(runner, buckets, vocab_size))
    room = 0
    with tqdm(programs, desc="Warm-up", unit="program", disable=not progress, dynamic_ncols=True) as bar:
        for name, run in bar:
            # Counting takes as long as loading a small program.
            room = room - 1 if room > 1 else room_for_programs()
            bar.set_postfix_str(name)
            run()
    return len(programs)


def _programs(runner: StepRunner, buckets: Buckets, vocab_size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    num_slots = runner.cache.num_pages * runner.cache.page_size
    seats = buckets.max_num_seqs
    sampled, prompts = set(), set()
    for shape in buckets.all_shapes():
        batch = idle_batch(shape, num_slots=num_slots, num_seats=seats)
        yield f"step for {shape.describe()}", lambda batch=batch: runner.step(batch).token_ids.block_until_ready()
        if shape.num_logits not in sampled:
            sampled.add(shape.num_logits)
            for entries in entry_buckets(seats, vocab_size):
                adjustments = Adjustments.empty(shape.num_logits, entries)
                name = f"sampling of {shape.num_logits} rows with {entries} adjustments"
                yield name, lambda batch=batch, a=adjustments: runner.step(batch, a).token_ids.block_until_ready()
        padded = padded_tokens(shape.num_tokens)
        if padded not in prompts:
            prompts.add(padded)
            yield f"log probabilities of {padded} prompt tokens", lambda batch=batch: _prompt_logprobs(runner, batch)
    for shape in buckets.all_loops() if runner.max_decode_steps > 1 else ():
        batch = idle_batch(shape, num_slots=num_slots, num_seats=seats)
        name = f"decode loop for {shape.describe()}"
        yield name, lambda batch=batch: runner.decode_loop(batch).token_ids.block_until_ready()


def _prompt_logprobs(runner: StepRunner, batch: PackedBatch) -> None:
    output = runner.step(batch).output
    assert output is not None
    targets = np.zeros(batch.shape.num_tokens, np.int32)
    runner.prompt_logprobs(output, targets).logprob.block_until_ready()
