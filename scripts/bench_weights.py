"""Updates of weights, and sleep: the time of an update beside that of copying as many bytes, and memory on the device.

On an 8-layer, 512-wide Qwen3. Copies and updates alternate; ratios are of pairs. Bytes are those of all live arrays.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from cpu_bench.comparisons import SERVING_MODEL
from cpu_bench.random_models import qwen3_config, write_random_checkpoint
from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.environment import describe_environment
from jaxinfer.checkpoint import load_checkpoint

CONFIG = qwen3_config(**SERVING_MODEL)
LIMITS: dict[str, Any] = {"max_model_len": 512, "kv_cache_tokens": 8192, "max_num_seqs": 16}
PARAMS = SamplingParams(max_tokens=32, temperature=0.0)


def live_bytes() -> int:
    """Bytes of all arrays that live on the device."""
    gc.collect()
    return sum(
        x.nbytes for x in jax.live_arrays() if not x.is_deleted() and x.sharding.memory_kind != "pinned_host"
    )  # fmt: skip


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - begin


def updates(folder: str, turns: int) -> dict[str, Any]:
    """Time updates of weights that the engine owns against copies of the same arrays."""
    llm = LLM(folder, **LIMITS)
    states = [nnx.state(load_checkpoint(folder)[1]) for _ in range(2)]

    def update(state: nnx.State) -> Any:
        llm.update_weights(state)
        return llm.core.weights.of("target").leaves

    for state in states:
        update(state)
    ratios, copies, peaks = [], [], []
    for turn in range(turns):
        state, other = states[turn % 2], states[1 - turn % 2]
        copied = seconds(lambda state=state: jax.tree.map(jnp.copy, state))
        before = live_bytes()
        updated = seconds(lambda other=other: update(other))
        peaks.append(live_bytes() - before)
        ratios.append(updated / copied)
        copies.append(copied)
    return {
        "bytes": sum(x.nbytes for x in jax.tree.leaves(states[0])), "copy_seconds": statistics.median(copies),
        "update_of_copy": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
        "more_bytes_after": max(peaks), "compiles": llm.get_metrics().num_compiles_total,
    }  # fmt: skip


def by_reference(folder: str, turns: int) -> dict[str, Any]:
    """Time updates of weights that the engine was lent, and count what they add."""
    config, module = load_checkpoint(folder)
    states = [nnx.state(module), jax.tree.map(jnp.copy, nnx.state(module))]
    llm = LLM(model=(config, states[0]), **LIMITS)
    before, times = live_bytes(), []
    for turn in range(turns):
        times.append(seconds(lambda turn=turn: llm.update_weights(states[1 - turn % 2])))
    return {"seconds": statistics.median(times), "more_bytes": live_bytes() - before}


def sleep(folder: str, level: int) -> dict[str, Any]:
    """Count bytes before, asleep, half awake and after, and compare tokens."""
    gc.collect()
    nothing = live_bytes()
    llm = LLM(folder, **LIMITS)
    prompt = [{"prompt_token_ids": list(range(5, 40))}]
    before = llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    found = {"level": level, "before": live_bytes() - nothing}
    llm.sleep(level)
    found["asleep"] = live_bytes() - nothing
    llm.wake_up(["weights"])
    found["weights"] = live_bytes() - nothing
    llm.wake_up(["kv_cache"])
    found["after"] = live_bytes() - nothing
    assert llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == before
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(folder, CONFIG)
        report = {
            "environment": describe_environment(), "owned": updates(folder, options.turns),
            "lent": by_reference(folder, options.turns), "sleep": [sleep(folder, level) for level in (1, 2)],
        }  # fmt: skip
    owned, lent = report["owned"], report["lent"]
    console = Console(width=120)
    console.print(
        f"update of {owned['bytes'] / 2**20:.0f} MiB that the engine owns: {owned['update_of_copy']:.2f}x of a copy "
        f"({owned['least']:.2f} to {owned['most']:.2f}), {owned['more_bytes_after']} bytes more after it"
    )
    console.print(f"update by reference: {1e3 * lent['seconds']:.1f} ms, {lent['more_bytes']} bytes more")
    table = Table(title="MiB on the device")
    for column in ("sleep", "before", "asleep", "weights awake", "after"):
        table.add_column(column, justify="right")
    for each in report["sleep"]:
        sizes = (f"{each[name] / 2**20:.2f}" for name in ("before", "asleep", "weights", "after"))
        table.add_row(f"level {each['level']}", *sizes)
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
