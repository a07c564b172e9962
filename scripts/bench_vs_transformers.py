"""Compare this engine with Hugging Face's ways to generate, on the same weights and requests, in one run.

Two comparisons, in float32 on the CPU: 32 greedy requests of 16 to 128 tokens in and out on an 8-layer, 512-wide Qwen3
(against `generate` one by one, `generate` in a padded batch, and the continuous batching of `generate_batch`); and
decoding of one sequence on the shapes of Qwen3-0.6B. The tokens of all methods are compared.

Needs the parity environment (`make venv-parity`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "scripts" / "cpu_bench" / "torch_worker.py"
SEED = 0


class TorchWorker:
    """The process that runs Hugging Face's side; a call waits for its result.

    Raises:
        FileNotFoundError: there is no such Python.
        RuntimeError: the process has died; its messages are on stderr.
    """

    def __init__(self, python: Path, threads: int) -> None:
        if not python.exists():
            raise FileNotFoundError(
                f"{python} is missing: run `make venv-parity`, or name a Python with --parity-python"
            )
        self._process = subprocess.Popen(
            [python, WORKER, "--threads", str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip

    def __call__(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the torch process ended during {op} with code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    args = parse_arguments()
    # Before jax is imported: its thread pool takes one thread for each core that the process may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", args.threads)
    from cpu_bench.comparison_report import draw_chart, print_tables
    from cpu_bench.comparisons import compare_decode, compare_serving
    from jaxinfer.bench.environment import describe_environment

    worker = TorchWorker(args.parity_python, args.threads)
    result: dict[str, Any] = {"threads": args.threads, "rounds": args.rounds, "seed": SEED}
    try:
        if "serving" in args.only:
            with tempfile.TemporaryDirectory() as folder:
                result["serving"] = compare_serving(
                    Path(folder), worker, rounds=args.rounds, seed=SEED, tensor_parallel_size=args.threads
                )
        gc.collect()
        if "decode" in args.only:
            with tempfile.TemporaryDirectory() as folder:
                result["decode"] = compare_decode(Path(folder), worker, rounds=args.rounds, seed=SEED)
    finally:
        worker.close()
    result["environment"] = describe_environment()
    result["environment"]["device"] = f"{args.threads}-core CPU"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "vs_transformers.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    draw_chart(result, args.output / "vs_transformers.png")
    print_tables(result)
    return 0 if all(part["tokens_agree"] for part in (result.get("serving"), result.get("decode")) if part) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="the best of N counts; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="cores for either side; default: 2")
    parser.add_argument("--only", nargs="+", choices=("serving", "decode"), default=("serving", "decode"))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks", metavar="DIR", help="default: benchmarks/")
    parser.add_argument("--parity-python", type=Path, default=ROOT / ".venv-parity" / "bin" / "python", metavar="PATH")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
