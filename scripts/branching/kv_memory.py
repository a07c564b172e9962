"""The KV of branches over one trunk, counted by the allocator, and of the same sequences as separate requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.limits import BRANCH_MODES

BRANCHES = (1, 2, 4, 8, 16)
TRUNK, SUFFIX, OUTPUT = 512, 8, 32  # tokens


def open_engine(model: str | None) -> LLM:
    """An engine that keeps nothing for later: what is held is held by what runs."""
    return LLM(
        model, max_num_seqs=max(BRANCHES), max_num_batched_tokens=512, enable_prefix_caching=False,
        max_model_len=TRUNK + SUFFIX + OUTPUT, kv_cache_tokens=max(BRANCHES) * (TRUNK + SUFFIX + OUTPUT + 32),
    )  # fmt: skip


def peak_pages(llm: LLM, outputs: Iterable[RequestOutput]) -> int:
    """The most pages held at a time, looked at whenever something comes of a stream."""
    allocator = llm.core.scheduler.kv.allocator
    return max(allocator.num_held for _ in outputs)


def measure_memory(llm: LLM) -> list[dict[str, Any]]:
    """A row for each number of branches: bytes at the peak, by mode and without sharing."""
    page_size, vocab = llm.core.config.page_size, llm.model_config.vocab_size
    page_bytes = page_size * llm.memory_budget.kv_bytes_per_token
    prefix = [number % (vocab // 2) for number in range(TRUNK)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    for count in BRANCHES:
        suffixes = [[vocab // 2 + branch] * SUFFIX for branch in range(count)]
        pages = {
            mode: peak_pages(llm, llm.stream_branches(prefix, suffixes, params, mode, max_parallel_branches=count))
            for mode in BRANCH_MODES
        }
        separate = [{"prompt_token_ids": [*prefix, *suffix]} for suffix in suffixes]
        pages["separate"] = peak_pages(llm, llm.stream(separate, params))
        row = {"branches": count, "page_size": page_size, "page_bytes": page_bytes, "pages": pages}
        rows.append({**row, "bytes": {name: number * page_bytes for name, number in pages.items()}})
    return rows


def memory_table(rows: list[dict[str, Any]]) -> Table:
    """The rows in megabytes."""
    table = Table(
        title=f"KV of branches over a trunk of {TRUNK} tokens, each with {SUFFIX} + {OUTPUT} of its own, at the peak",
        title_justify="left",
    )
    for heading in ("branches", *BRANCH_MODES, "separate requests", "less"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [f"{row['bytes'][name] / 1e6:.2f} MB ({row['pages'][name]} pages)" for name in row["pages"]]
        less = row["pages"]["separate"] / max(row["pages"][mode] for mode in BRANCH_MODES)
        table.add_row(f"{row['branches']}", *cells, f"{less:.2f}x")
    return table
