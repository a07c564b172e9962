"""The command line of `jaxinfer plan`; nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import os

from jaxinfer.cli.config_field_options import add_config_field_options
from jaxinfer.cli.speculative_options import add_speculative_options

EXIT_DOES_NOT_FIT = 3

PLAN_EXAMPLES = f"""\
examples:
  jaxinfer plan path/to/Qwen3-8B --device h200 --max-num-seqs 64 --max-model-len 4096
  jaxinfer plan path/to/Qwen3-8B --speculative draft_model --draft-model path/to/Qwen3-0.6B
  jaxinfer plan Qwen/Qwen3-8B --device h100 --max-num-seqs 16 --max-model-len 8192 --json

Only config.json is read; no weights and no GPU are needed. The engine's steps are compiled for the GPU if JAX's CUDA
plugin is installed (pip install "jaxinfer[cuda13]").

exit status: 0 if it fits, {EXIT_DOES_NOT_FIT} if it does not, 1 after an error, 2 for wrong usage.
"""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb `plan`."""
    parser.add_argument(
        "model", metavar="MODEL_OR_CONFIG_DIR",
        help="a directory with config.json, the file itself, or a hub id (only its config.json is downloaded)",
    )  # fmt: skip
    parser.add_argument("--device", default="h200", metavar="GPU", help="h200, h100 or b200 (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="running requests (default: the engine's, 256)")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="longest prompt plus output (default: what the model allows)"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens of a step (default: 2048)")
    parser.add_argument("--page-size", type=int, metavar="N", help="tokens of a KV page (default: 16)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and KV (default: %(default)s)")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="X", help="as for LLM (default: %(default)s)"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs that share every layer")
    add_speculative_options(parser)
    add_config_field_options(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    # Hides the compiler's warnings that it cannot tune without the GPU. The variable is read when JAX is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from jaxinfer.cli.plan_command import run_plan

    return 0 if run_plan(args) else EXIT_DOES_NOT_FIT
