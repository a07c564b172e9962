"""Hugging Face's side of `bench_vs_transformers.py`, in the parity environment: JSON commands in, JSON results out.

Every line of stdin is one command, {"op": NAME, ...}; every line of stdout is its result. Timing is done here, around
the generation alone. `max_new_tokens` is a list, a limit for each prompt; the end of sequence is ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAD = 0


class Worker:
    """A loaded model and the ways to generate with it."""

    def __init__(self, directory: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def describe(self) -> dict[str, Any]:
        return {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }

    def one_by_one(self, prompts: list[list[int]], max_new_tokens: list[int]) -> dict[str, Any]:
        """`generate` for one prompt after the other."""
        begin = time.perf_counter()
        tokens = []
        for prompt, count in zip(prompts, max_new_tokens, strict=True):
            output = self._generate(torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long), count)
            tokens.append(output[0, len(prompt) :].tolist())
        return {"seconds": time.perf_counter() - begin, "tokens": tokens}

    def padded_batch(self, prompts: list[list[int]], max_new_tokens: list[int]) -> dict[str, Any]:
        """`generate` for all prompts at once, padded on the left; what a prompt gets beyond its own limit is cut."""
        begin = time.perf_counter()
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self._generate(ids, mask, max(max_new_tokens))[:, width:].tolist()
        tokens = [row[:count] for row, count in zip(output, max_new_tokens, strict=True)]
        return {"seconds": time.perf_counter() - begin, "tokens": tokens}

    def continuous_batching(
        self, prompts: list[list[int]], max_new_tokens: list[int], **limits_of_engine: Any
    ) -> dict[str, Any]:
        """Run the manager that `generate_batch` uses, because `generate_batch` has one limit for all prompts. Its start
        is not timed.

        Args:
            limits_of_engine: page_size, num_blocks and max_batch_tokens.
        """
        settings = ContinuousBatchingConfig(allow_block_sharing=False, **limits_of_engine)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD, max_new_tokens=1)
        found: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings
        ) as manager:
            # A first request passes before the clock starts, so that the cache is there and every kernel has run.
            self._collect(manager, {manager.add_request(prompts[0], max_new_tokens=2): 2})
            begin = time.perf_counter()
            limits = {
                manager.add_request(prompt, max_new_tokens=count): count
                for prompt, count in zip(prompts, max_new_tokens, strict=True)
            }
            found = self._collect(manager, limits)
            seconds = time.perf_counter() - begin
        return {"seconds": seconds, "tokens": [found[request_id] for request_id in limits]}

    def margins(self, prompts: list[list[int]], tokens: list[list[int]]) -> dict[str, Any]:
        """By how much the largest logit leads, and the token that has it, at every position of these outputs."""
        result = []
        for prompt, output in zip(prompts, tokens, strict=True):
            with torch.inference_mode():
                logits = self.model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0].double()
            best = logits.topk(2)
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            result.append(
                {
                    "margin": (best.values[:, 0] - best.values[:, 1]).tolist(),
                    "best": best.indices[:, 0].tolist(),
                    "behind": (best.values[:, 0] - chosen).tolist(),
                }
            )
        return {"outputs": result}

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        settings = GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=PAD)
        with torch.inference_mode():
            return self.model.generate(ids, attention_mask=mask, generation_config=settings)

    def _collect(self, manager: Any, limits: dict[str, int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        while len(found) < len(limits):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching has stopped before all requests were finished")
                continue
            if result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result.error}")
            if result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    # Whatever a library prints must not stand between the results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    worker: Worker | None = None
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("op")
        if name == "load":
            worker = None  # the model before goes first
            worker = Worker(command["directory"])
            result = worker.describe()
        else:
            result = getattr(worker, name)(**command)
        print(json.dumps(result), file=results, flush=True)


if __name__ == "__main__":
    main()
