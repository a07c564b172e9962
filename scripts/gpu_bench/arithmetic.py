"""Floors of `bench_gpu.py`: the bytes and operations that a step cannot do without, and what share a time is of them.

A decode step reads every weight that takes part once, and of the KV pool what its rows see. Of the embedding table it
reads a few rows, unless the table is the output head as well. A prefill multiplies every token with every matrix of the
layers, and the last token of each row with the output head; attention counts the pairs that the causal rule lets see
each other, two products of two operations for each head and dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]


def layer_matrices(values: Mapping[str, Any]) -> int:
    """Elements of the matrices of one layer of a Qwen3 with this `config.json`."""
    hidden, dim = values["hidden_size"], values["head_dim"]
    queries, pairs = values["num_attention_heads"] * dim, values["num_key_value_heads"] * dim
    return hidden * (2 * queries + 2 * pairs) + 3 * hidden * values["intermediate_size"]


def head_matrix(values: Mapping[str, Any]) -> int:
    """Elements of the output head."""
    return values["hidden_size"] * values["vocab_size"]


def weight_bytes_read(values: Mapping[str, Any], itemsize: int = 2) -> int:
    """Bytes of weights that a decode step reads: all of them but an embedding table that is not the head too."""
    hidden, dim = values["hidden_size"], values["head_dim"]
    norms = 2 * hidden + 2 * dim
    layers = values["num_hidden_layers"] * (layer_matrices(values) + norms)
    return itemsize * (layers + hidden + head_matrix(values))


def kv_bytes_per_token(values: Mapping[str, Any], itemsize: int = 2) -> int:
    """Bytes of K and V of one token in all layers."""
    return 2 * itemsize * values["num_hidden_layers"] * values["num_key_value_heads"] * values["head_dim"]


def decode_bytes(values: Mapping[str, Any], *, batch: int, context: int, steps: int = 1, itemsize: int = 2) -> float:
    """Bytes that one of `steps` decode steps reads on average; the first of them sees `context` cached tokens."""
    visible = context + 1 + (steps - 1) / 2
    return weight_bytes_read(values, itemsize) + batch * visible * kv_bytes_per_token(values, itemsize)


def causal_pairs(tokens: int) -> int:
    """Pairs of a query and a token that it sees, itself included."""
    return tokens * (tokens + 1) // 2


def attention_flops(pairs: int, num_heads: int, head_dim: int) -> int:
    """Operations of both products of attention in one layer over so many visible pairs."""
    return 4 * pairs * num_heads * head_dim


def prefill_flops(values: Mapping[str, Any], tokens: int, rows: int = 1) -> int:
    """Operations of a prefill of one prompt, with logits of `rows` rows (the padded number that the step computes)."""
    layers = values["num_hidden_layers"]
    attention = attention_flops(causal_pairs(tokens), values["num_attention_heads"], values["head_dim"])
    return layers * (2 * tokens * layer_matrices(values) + attention) + 2 * rows * head_matrix(values)


def card_rates(rows: list[Row]) -> tuple[float | None, float | None]:
    """Measured read bandwidth in bytes/s and matmul rate in FLOP/s; None where that was not measured."""
    by_name = {row["case"]: row for row in rows if row["part"] == "card"}
    bandwidth = by_name.get("read bandwidth", {}).get("bytes_per_second")
    return bandwidth, by_name.get("bf16 matmul", {}).get("flops_per_second")


def with_floor(row: Row, rows: list[Row]) -> Row:
    """The row with `floor_ms` and `share` where it has a time, its bytes or operations, and the card was measured.

    The floor is the longer of both times; it needs the rates of all that the row counts.
    """
    bandwidth, rate = card_rates(rows)
    floors = []
    for amount, per_second in ((row.get("bytes"), bandwidth), (row.get("flops"), rate)):
        if amount is not None:
            floors.append(None if per_second is None else 1e3 * amount / per_second)
    if "ms" not in row or not floors or None in floors:
        return row
    floor = max(value for value in floors if value is not None)
    return row | {"floor_ms": floor, "share": floor / row["ms"]}


def branch_speedups(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Group ("8 over 8192") -> by how much one lane with branches is faster than "lanes" and "shared" lanes."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["part"] == "branches" and row.get("implementation") == "kernel" and "ms" in row:
            times.setdefault(row["group"], {})[row["kind"]] = row["ms"]
    return {
        group: {kind: found[kind] / found["branches"] for kind in ("lanes", "shared") if kind in found}
        for group, found in times.items()
        if "branches" in found and len(found) > 1
    }
