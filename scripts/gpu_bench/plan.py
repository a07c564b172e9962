"""What `bench_gpu.py` measures: its parts in order, the time each may take, and the cases of each. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# "case" is its name; cases of one "effort" take about as long; the rest is what the part's program needs to run it.
Case = dict[str, Any]

PAGE_SIZE = 16
LOOP_STEPS = 16
# Pages of a lane come in buckets, as in an engine: up to 4,096 tokens, and up to 40,960.
SHORT_PAGES, LONG_PAGES = 256, 2560
# Numbers that the issue asks for.
LARGEST_ERROR = 1e-2
DECODE_SHARE, DECODE_AIM = 0.7, 0.9
BRANCHES_SPEEDUP = 4.0
PREFILL_ATTENTION_SHARE = 0.6

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _QWEN3
    | {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
       "intermediate_size": 12288, "tie_word_embeddings": False},
    "Qwen3-0.6B": _QWEN3
    | {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
       "intermediate_size": 3072, "tie_word_embeddings": True},
}  # fmt: skip
_SMOKE_SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 64, "intermediate_size": 128, "vocab_size": 256,
                "max_position_embeddings": 512}  # fmt: skip


def model_values(name: str, *, smoke: bool) -> dict[str, Any]:
    """The `config.json` of a model, or of a tiny one of its kind."""
    return MODELS[name] | (_SMOKE_SIZES if smoke else {})


def attention_heads(*, smoke: bool) -> tuple[int, int, int]:
    """Query heads, KV heads and head dimension of the attention tables: those of Qwen3-8B."""
    values = model_values("Qwen3-8B", smoke=smoke)
    return values["num_attention_heads"], values["num_key_value_heads"], values["head_dim"]


class NotRun(Exception):
    """A case that this device or library cannot run; says why."""


def logits_file(work: Path, model: str) -> Path:
    """Where the logits after the common prompt are left for the other implementation."""
    return work / f"logits_{model}.npy"


@dataclass(frozen=True)
class Part:
    """A process of its own: it fails, hangs or runs out of memory alone.

    Attributes:
        program: the module that runs the cases, in order.
        least_s: what is kept for it while earlier parts run; with less it is not started.
        most_s: when it is stopped.
    """

    name: str
    title: str
    program: str
    least_s: float
    most_s: float
    cases: tuple[Case, ...]


def parts(*, smoke: bool) -> tuple[Part, ...]:
    """All parts, the most important first; `smoke`: the same parts over tiny shapes."""
    jax, torch = "gpu_bench.part", "gpu_bench.torch_part"
    decode = {name: tuple(_decode_cases(name, "auto", smoke)) for name in MODELS}
    chosen = (
        Part("card", "The card", jax, 15, 45, tuple(_card_cases(smoke))),
        Part("check", "The kernel against float32", jax, 25, 60, tuple(_check_cases(smoke))),
        Part("decode-8b", "Decode, shapes of Qwen3-8B", jax, 60, 130, decode["Qwen3-8B"]),
        Part("decode-0.6b", "Decode, shapes of Qwen3-0.6B", jax, 40, 90, decode["Qwen3-0.6B"]),
        Part("prefill", "Prefill", jax, 50, 100, tuple(_prefill_cases(smoke))),
        Part("branches", "Branches in one sequence", jax, 50, 120, tuple(_branch_cases(smoke))),
        Part("attention", "Attention of one layer", jax, 40, 80, tuple(_attention_cases(smoke))),
        Part("transformers", "Hugging Face transformers", torch, 70, 170, tuple(_transformers_cases(smoke))),
        Part("decode-xla", "Decode with plain XLA attention", jax, 30, 60, tuple(_xla_cases(smoke))),
    )  # fmt: skip
    # Nothing is left out of a smoke run for want of time: it may run on a slow machine.
    return tuple(replace(part, least_s=5, most_s=240) for part in chosen) if smoke else chosen


def _card_cases(smoke: bool) -> list[Case]:
    size = 2**22 if smoke else 2**32
    return [
        {"case": "read bandwidth", "kind": "read", "size": size},
        {"case": "copy bandwidth", "kind": "copy", "size": size},
        {"case": "bf16 matmul", "kind": "matmul", "size": 128 if smoke else 8192},
    ]


def _check_cases(smoke: bool) -> list[Case]:
    if smoke:
        return [{"case": "decode", "kind": "decode", "size": "short", "heads": (2, 1, 64)}]
    kinds = ("decode", "prefill", "branches", "tree", "mixed")
    cases = [{"case": kind, "kind": kind, "size": "long", "heads": (32, 8, 128)} for kind in kinds]
    return cases + [{"case": "mixed, heads of 64", "kind": "mixed", "size": "long", "heads": (14, 2, 64)}]


def _decode_case(model: str, backend: str, batch: int, context: int, launch: str, smoke: bool) -> Case:
    if smoke:
        batch, context = min(batch, 4), context // 32
    words = "a loop of 16 steps" if launch == "loop" else "one launch a step"
    return {
        "case": f"{model}, batch {batch}, context {context:,}, {words}", "model": model, "backend": backend,
        "batch": batch, "context": context, "launch": launch, "effort": launch,
    }  # fmt: skip


def _decode_cases(model: str, backend: str, smoke: bool) -> list[Case]:
    order = [(1, 1024, "loop"), (1, 1024, "step"), (32, 1024, "loop"), (8, 1024, "loop"), (128, 1024, "loop"),
             (1, 8192, "loop"), (32, 1024, "step"), (8, 1024, "step"), (128, 1024, "step")]  # fmt: skip
    return [_decode_case(model, backend, *values, smoke) for values in (order[:2] if smoke else order)]


def _xla_cases(smoke: bool) -> list[Case]:
    order = [("Qwen3-8B", 1), ("Qwen3-8B", 32), ("Qwen3-0.6B", 1), ("Qwen3-0.6B", 32)]
    return [_decode_case(model, "xla", batch, 1024, "loop", smoke) for model, batch in (order[:1] if smoke else order)]


def _prefill_cases(smoke: bool) -> list[Case]:
    return [
        {
            "case": f"{model}, {tokens:,} tokens", "model": model, "backend": "auto", "tokens": tokens,
            # A prompt whose last logits the other implementation is held against, in the same program.
            "prompt": transformers_prompt(smoke) if compare else None,
        }
        for tokens, compare, model in (
            ((64, True, "Qwen3-8B"), (64, True, "Qwen3-0.6B"))
            if smoke
            else ((2048, True, "Qwen3-8B"), (8192, False, "Qwen3-8B"), (2048, True, "Qwen3-0.6B"),
                  (8192, False, "Qwen3-0.6B"))
        )
    ]  # fmt: skip


def transformers_prompt(smoke: bool) -> int:
    """Tokens of the prompt after which Hugging Face's implementation decodes."""
    return 32 if smoke else 1024


def _transformers_cases(smoke: bool) -> list[Case]:
    order = [("Qwen3-8B", 1), ("Qwen3-0.6B", 1), ("Qwen3-0.6B", 32), ("Qwen3-8B", 32)]
    return [
        {"case": f"{model}, batch {batch}, {'static cache, compiled' if compiled else 'static cache, eager'}",
         "model": model, "batch": batch, "context": transformers_prompt(smoke), "compiled": compiled,
         "effort": "compiled" if compiled else "eager"}
        for model, batch in (order[:1] if smoke else order)
        for compiled in ((True, False) if batch == 1 else (True,))
    ]  # fmt: skip


def _attention(shape: str, implementation: str, **values: Any) -> Case:
    """A case of the attention tables; cases with the same `pool_contexts` share their pool's size and so a program."""
    names = {"case": f"{shape}: {implementation}", "shape": shape, "implementation": implementation}
    names["effort"] = implementation
    return names | {"pool_contexts": (values["context"],)} | values


def _branch_cases(smoke: bool) -> list[Case]:
    """BIM against as many lanes. What the issue wants a number for comes first."""
    own = PAGE_SIZE if smoke else 4 * PAGE_SIZE
    trunks = (64,) if smoke else (8192, 32768, 2048)
    counts = (2,) if smoke else (8, 4, 16, 1)
    long = (8192, 32768)

    def case(count: int, trunk: int, layout: str, implementation: str) -> Case:
        shape = f"{count} branches over {trunk:,}" if count > 1 else f"1 branch over {trunk:,}"
        words = {"branches": "one lane", "lanes": "lanes of their own", "shared": "lanes with a common trunk"}
        return _attention(
            f"{shape}, {words[layout]}", implementation, kind=layout, rows=count, context=trunk, own=own,
            group=f"{count} over {trunk}", pool_contexts=long if trunk in long else (trunk,),
        )  # fmt: skip

    layouts = ("branches", "lanes", "shared")
    pairs = [(count, trunk) for trunk in trunks for count in counts]
    kernel = [case(n, trunk, layout, "kernel") for n, trunk in pairs for layout in layouts[: 3 if n > 1 else 1]]
    cudnn = [case(n, trunk, layout, "cudnn") for n, trunk in pairs[:4] for layout in layouts[: 2 if n > 1 else 1]]
    return kernel + cudnn + [case(*pair, "branches", "xla") for pair in pairs[:2]]


def _attention_cases(smoke: bool) -> list[Case]:
    decodes = [(2, 64)] if smoke else [(rows, context) for context in (1024, 8192) for rows in (1, 32, 128)]
    shapes: list[tuple[str, dict[str, Any]]] = [
        (f"decode of {rows} rows over {context:,}", {"kind": "decode", "rows": rows, "context": context})
        for rows, context in decodes
    ]
    shapes += [
        (f"causal prefill of {tokens:,}", {"kind": "prefill", "rows": 1, "context": tokens})
        for tokens in ((64,) if smoke else (2048, 8192))
    ]
    trees = ((1, 48, 8),) if smoke else ((1, 2048, 60), (16, 2048, 60))
    shapes += [
        (f"{rows} tree{'s' if rows > 1 else ''} of {nodes} nodes over {context:,}",
         {"kind": "tree", "rows": rows, "context": context, "nodes": nodes})
        for rows, context, nodes in trees
    ]  # fmt: skip
    return [
        _attention(shape, implementation, **values)
        for implementation in ("kernel", "cudnn", "xla")
        for shape, values in shapes
    ]
