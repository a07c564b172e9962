"""Generate a batch of completions and print what it took; with --trace, what the scheduler decided in every launch."""

import argparse
import contextlib
import os
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--num-prompts", type=int, default=3)
parser.add_argument("--max-tokens", type=int, default=10)
parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what JAX finds")
parser.add_argument("--trace", action="store_true", help="print every launch and landing")
args = parser.parse_args()
if args.device:
    os.environ["JAX_PLATFORMS"] = args.device  # read when JAX is imported, below

from jaxinfer import LLM, SamplingParams
from jaxinfer.cli.show_schedule import tracing

QUESTIONS = ("Are you a robot?", "How old is the lighthouse?", "Who works in the library?", "What can you do?")

llm = LLM()
prompts = [f"<|user|>{QUESTIONS[i % len(QUESTIONS)]}<|end|><|assistant|>" for i in range(args.num_prompts)]
params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
begin = time.perf_counter()
with tracing(llm.core) if args.trace else contextlib.nullcontext():
    outputs = llm.generate(prompts, params, use_tqdm=False)
seconds = time.perf_counter() - begin
tokens = sum(len(output.outputs[0].token_ids) for output in outputs)

print("Batch generation complete:")
print(f"  Requests: {len(outputs)}")
print(f"  Total time: {seconds:.2f}s")
print(f"  Total tokens: {tokens}")
print(f"  Throughput: {tokens / seconds:.2f} tokens/s")
print(f"  Iterations: {llm.get_metrics().num_steps_total}")
for output in outputs:
    print(f"  {output.request_id}: {output.prompt} -> {output.outputs[0].text}")
