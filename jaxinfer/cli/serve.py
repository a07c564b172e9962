"""`jaxinfer serve`: its options, which need no optional package to be described."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from jaxinfer.cli.config_field_options import add_config_field_options, config_options
from jaxinfer.cli.hosts_options import add_hosts_options, takes_part
from jaxinfer.cli.ray_options import add_ray_options, check_ray_options, serve_with_ray
from jaxinfer.limits import BRANCH_MODES, SCHEDULING_POLICIES

SERVE_EXAMPLES = """\
examples:
  jaxinfer serve
  jaxinfer serve path/to/checkpoint --port 8080 --speculative-config '{"method": "ngram"}'
  jaxinfer serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key "$KEY" --served-model-name qwen

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What color is the sky?"}]}'
"""
# Arguments of `LLM` by the type of their options.
_NUMBERS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "kv_cache_tokens", "tensor_parallel_size",
    "prefix_cache_tokens", "seed",
)  # fmt: skip
_TEXTS = (
    "tokenizer", "dtype", "branch_mode", "scheduling_policy", "attention_backend", "prefix_cache_policy",
    "logprobs_mode",
)  # fmt: skip
_OBJECTS = ("speculative_config", "diffusion_config")
_HELP = {
    "max_model_len": "longest prompt plus output, in tokens (default: the model's)",
    "max_num_seqs": "most sequences that run at once (default: 256)",
    "max_num_batched_tokens": "most tokens of a step (default: 2048)",
    "page_size": "tokens of a page of keys and values (default: 16)",
    "kv_cache_tokens": "tokens that the pages hold (default: what fits)",
    "tensor_parallel_size": "devices that share the model (default: 1)",
    "prefix_cache_tokens": "most tokens that stay cached (default: all that fit)",
    "seed": "of requests without one (default: 0)",
    "tokenizer": "directory of the tokenizer (default: the model's)",
    "dtype": "of weights and KV: auto, float32, bfloat16 or float16 (default: auto)",
    "branch_mode": " or ".join(BRANCH_MODES) + " (default: in_one_sequence)",
    "scheduling_policy": " or ".join(SCHEDULING_POLICIES) + " (default: fcfs)",
    "attention_backend": "auto, xla or pallas (default: auto)",
    "prefix_cache_policy": "which cached pages go first: lru, lfu, fifo or priority (default: lru)",
    "logprobs_mode": "raw_logprobs or processed_logprobs, that tokens are drawn from (default: raw_logprobs)",
    "speculative_config": "fields of SpeculativeConfig (docs/guides/speculative.md)",
    "diffusion_config": "fields of DiffusionConfig (docs/guides/diffusion.md)",
    "gpu_memory_utilization": "share of a GPU's memory for weights, KV and workspace (default: 0.9)",
}
_PARSERS = "hermes, qwen3_coder, llama3_json, smollm2 or harmony"
KEY_VARIABLE = "JAXINFER_API_KEY"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a server and of its engine."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory or hub id (default: embedded)")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    group.add_argument(
        "--api-key", action="append", metavar="KEY",
        help=f"a key that requests must have; repeatable (default: ${KEY_VARIABLE}, if set)",
    )  # fmt: skip
    group.add_argument("--allow-unauthenticated", action="store_true", help="no key, although others can reach it")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names of the model in requests")
    group.add_argument(
        "--max-waiting-requests", type=int, metavar="N", help="refuse more while so many wait (default: 1024)"
    )
    group.add_argument("--max-waiting-tokens", type=int, metavar="N", help="the same, in tokens of their prompts")
    group.add_argument("--max-body-bytes", type=int, metavar="N", help="most bytes of a request (default: 8 MiB)")
    group.add_argument(
        "--max-stored-responses",
        type=int,
        metavar="N",
        help="most responses kept in memory for each key; 0: none (default: 1024)",
    )
    group.add_argument("--max-stored-bytes", type=int, metavar="N", help="the same, in bytes of them (default: 64 MiB)")
    group.add_argument(
        "--shutdown-timeout", type=float, metavar="S", help="seconds for running requests at the end (default: 30)"
    )
    group.add_argument("--request-timeout", type=float, metavar="S", help="end a request after so many seconds")
    group.add_argument("--no-page", action="store_true", help="no page for people at /")
    group.add_argument("--cors-origins", nargs="+", metavar="ORIGIN", help="from which pages in browsers may ask")
    group.add_argument("--tool-call-parser", metavar="NAME", help=f"{_PARSERS} (default: by the chat template)")
    group.add_argument("--reasoning-parser", metavar="NAME", help="think (default: by the chat template)")
    group.add_argument("--log-requests", action="store_true", help="a line for each request, without its text")
    group.add_argument(
        "--weights-endpoints", action="store_true", help="serve /pause, /resume and /update_weights (from a directory)"
    )
    group.add_argument("--debug-endpoints", action="store_true", help="serve /debug/engine: what the engine holds")
    group.add_argument(
        "--warm-up", choices=["full", "background", "off"],
        help="compile all programs first, or beside requests, or when they are needed (default: background)",
    )  # fmt: skip
    group.add_argument(
        "--kv-events-endpoint", metavar="URL",
        help="publish what the prefix cache holds over ZeroMQ, for routers: tcp://127.0.0.1:5557",
    )  # fmt: skip
    group.add_argument("--kv-events-replay-endpoint", metavar="URL", help="where they ask for what they have missed")
    group.add_argument("--kv-events-topic", metavar="TOPIC", help="of these events (default: none)")
    add_ray_options(parser).add_argument(
        "--ray-routing", choices=["power_of_two", "session", "prefix"], default="power_of_two",
        help="the emptier of two replicas, a hash of x-session-id, or what begins alike (default: %(default)s)",
    )  # fmt: skip
    add_engine_arguments(parser)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of an engine, by its argument names."""
    engine = parser.add_argument_group("engine (default: as LLM(...))")
    for name in _NUMBERS:
        engine.add_argument(_option(name), type=int, metavar="N", help=_HELP[name])
    for name in _TEXTS:
        engine.add_argument(_option(name), metavar="NAME", help=_HELP[name])
    for name in _OBJECTS:
        engine.add_argument(_option(name), type=json_object, metavar="JSON", help=_HELP[name])
    engine.add_argument("--gpu-memory-utilization", type=float, metavar="X", help=_HELP["gpu_memory_utilization"])
    engine.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt whole")
    add_config_field_options(engine)
    add_hosts_options(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Run `jaxinfer serve`; returns the process's exit code."""
    import asyncio

    from jaxinfer.server.log import log_to_stderr
    from jaxinfer.server.run import ServerProcess
    from jaxinfer.server.settings import ServerSettings

    log_to_stderr()
    keys = args.api_key or ([os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else [])
    names = (
        "max_waiting_requests",
        "max_waiting_tokens",
        "max_body_bytes",
        "max_stored_responses",
        "max_stored_bytes",
        "shutdown_timeout",
        "request_timeout",
        "tool_call_parser",
        "reasoning_parser",
        "warm_up",
        "kv_events_endpoint",
        "kv_events_replay_endpoint",
        "kv_events_topic",
    )
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    settings = ServerSettings(
        host=args.host, port=args.port, api_keys=keys, allow_unauthenticated=args.allow_unauthenticated,
        served_model_names=args.served_model_name or (), cors_origins=args.cors_origins or (),
        page=not args.no_page, log_requests=args.log_requests, debug_endpoints=args.debug_endpoints,
        weights_endpoints=args.weights_endpoints, **given,
    )  # fmt: skip
    options = engine_options(args, settings.warm_up)
    check_ray_options(args)
    if args.ray:
        return serve_with_ray(args, settings, options)
    if takes_part(args, options):
        return 0

    async def serve() -> int:
        process = ServerProcess(settings, options, args.model or "tiny")
        return await process.run()

    return asyncio.run(serve())


def engine_options(args: argparse.Namespace, warm_up: str) -> dict[str, Any]:
    """Return the given options as keyword arguments of `LLM`."""
    names = (*_NUMBERS, *_TEXTS, *_OBJECTS, "gpu_memory_utilization")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.no_prefix_caching:
        options["enable_prefix_caching"] = False
    if warm_up == "background":
        options["warm_up"] = "background"
    return {"model": args.model, **options, **config_options(args)}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def json_object(text: str) -> dict[str, Any]:
    """Parse the value of an option that is a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return found
