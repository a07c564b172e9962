"""Hugging Face's side of `bench_gpu.py`, without JAX: `generate` with a static cache, compiled or eager.

The weights are those of `weights.py`, computed on the card. The decode steps after a prompt are timed, from one
step well after the first to the last, so that compiling, CUDA graphs' recording and the prefill stay out.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpu_bench.arithmetic import decode_bytes
from gpu_bench.budget import NO_GPU
from gpu_bench.part import emit, run_cases
from gpu_bench.plan import Case, NotRun, logits_file, model_values, parts
from gpu_bench.weights import factor, fraction, prompt_ids, salt, scrambled

SKIPPED_STEPS, TIMED_STEPS, ROUNDS = 8, 64, 3
_ROWS = 4096  # of a matrix that are computed at a time: the integers take eight bytes each


def main() -> int:
    args = parse_arguments()
    deadline = time.monotonic() + args.seconds
    part = next(part for part in parts(smoke=args.smoke) if part.name == args.part)
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers
    except ModuleNotFoundError as missing:
        for case in part.cases:
            emit(results, case | {"not_run": f"{missing.name} is not installed for this Python"})
        return 0
    if not args.smoke and not torch.cuda.is_available():
        print("no GPU: torch finds none", file=sys.stderr)
        return NO_GPU
    transformers.utils.logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peer = Peer(device, smoke=args.smoke, work=args.work)
    run_cases(part.cases, peer.measure, results, deadline=deadline)
    return 0


class Peer:
    """One model at a time, and `generate` on it."""

    def __init__(self, device: Any, *, smoke: bool, work: Path) -> None:
        self.device, self.smoke, self.work = device, smoke, work
        self.skipped = 1 if smoke else SKIPPED_STEPS
        self.name = ""
        self.model: Any = None

    def measure(self, case: Case) -> dict[str, Any]:
        """One row: milliseconds of a decode step, and how the first logits compare with this engine's."""
        import torch  # pyright: ignore[reportMissingImports]
        import transformers

        if case["compiled"] and self.device.type != "cuda":
            raise NotRun("generate compiles its steps on a GPU only")
        compared = {}
        if self.name != case["model"]:
            self.model, self.name = None, ""
            gc.collect()
            self.model, self.name = self._load(model_values(case["model"], smoke=self.smoke)), case["model"]
            compared = self._compare_logits(case)
        torch.compiler.reset()  # a compiled step of another batch would make the next one a program of many shapes
        ids = self._prompt(case).repeat(case["batch"], 1)
        steps = 4 if self.smoke else TIMED_STEPS
        begin = time.perf_counter()
        self._generate(ids, steps, compiled=case["compiled"])
        first = time.perf_counter() - begin
        times = [self._generate(ids, steps, compiled=case["compiled"]) for _ in range(1 if self.smoke else ROUNDS)]
        median = sorted(times)[len(times) // 2]
        return compared | {
            "ms": 1e3 * median / steps,
            "best_ms": 1e3 * min(times) / steps,
            "rounds": len(times),
            "first_call_s": first,
            "bytes": decode_bytes(
                model_values(case["model"], smoke=self.smoke),
                batch=case["batch"],
                context=case["context"] + 1 + self.skipped,
                steps=steps,
            ),
            "tokens_per_second": case["batch"] * steps / median,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "attention": self.model.config._attn_implementation,
        }

    def _load(self, values: dict[str, Any]) -> Any:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**{key: value for key, value in values.items() if key != "architectures"})
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter)
        return model

    def _prompt(self, case: Case) -> Any:
        """int64 [1, context], the tokens that this engine was given."""
        import torch  # pyright: ignore[reportMissingImports]

        vocab = model_values(case["model"], smoke=self.smoke)["vocab_size"]
        return torch.from_numpy(prompt_ids(case["context"], vocab).astype(np.int64))[None].to(self.device)

    def _compare_logits(self, case: Case) -> dict[str, Any]:
        """The relative difference of the logits after the prompt from those that this engine has left, if it has."""
        import torch  # pyright: ignore[reportMissingImports]

        file = logits_file(self.work, case["model"])
        if not file.exists():
            return {"logits_difference": None}
        with torch.inference_mode():
            logits = self.model(self._prompt(case), logits_to_keep=1).logits[0, -1].float().cpu().numpy()
        theirs = np.load(file)
        return {"logits_difference": float(np.linalg.norm(logits - theirs) / np.linalg.norm(logits))}

    def _generate(self, ids: Any, steps: int, *, compiled: bool) -> float:
        """Seconds of `steps` decode steps after the skipped ones."""
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import GenerationConfig, LogitsProcessorList

        clock = _Clock(self.skipped, torch)
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=1 + self.skipped + steps, eos_token_id=None, pad_token_id=0,
            cache_implementation="static", disable_compile=not compiled,
        )  # fmt: skip
        with torch.no_grad():
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings,
                logits_processor=LogitsProcessorList([clock]),
            )  # fmt: skip
        seconds = clock.read()
        made = output.shape[1] - ids.shape[1]
        if made != 1 + self.skipped + steps or not math.isfinite(seconds):
            raise RuntimeError(f"generate made {made} tokens, not {1 + self.skipped + steps}")
        return seconds


class _Clock:
    """Is called with the logits of every step, the prompt's first; starts when `skipped` decode steps are done."""

    def __init__(self, skipped: int, torch: Any) -> None:
        self._torch, self._left, self._begin = torch, skipped, math.nan

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._left == 0:
            self._begin = self._now()
        self._left -= 1
        return scores

    def read(self) -> float:
        return self._now() - self._begin

    def _now(self) -> float:
        if self._torch.cuda.is_available():
            self._torch.cuda.synchronize()
        return time.perf_counter()


def _fill(name: str, parameter: Any) -> None:
    """Write a tensor's formula into the parameter, some rows at a time."""
    import torch  # pyright: ignore[reportMissingImports]

    width = factor(name, tuple(parameter.shape))
    if width is None:
        parameter.fill_(1.0)
        return
    rows, columns = parameter.shape
    width = torch.tensor(width, dtype=torch.float32, device=parameter.device)
    for start in range(0, rows, _ROWS):
        end = min(rows, start + _ROWS)
        index = torch.arange(start * columns, end * columns, dtype=torch.int64, device=parameter.device)
        values = fraction(scrambled(index, salt(name)).to(torch.float32)) * width
        parameter[start:end] = values.reshape(end - start, columns).to(parameter.dtype)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["transformers"])
    parser.add_argument("--seconds", type=float, required=True, metavar="N", help="until the process is stopped")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="where this engine has left its logits")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
