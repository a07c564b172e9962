"""Generates from a checkpoint on several CPU devices, in one or several processes, and prints the tokens as JSON."""

import json
import re
import sys
from collections import Counter

import jax


def main() -> None:
    checkpoint, size, processes, process, port = sys.argv[1], *map(int, sys.argv[2:6])
    options = json.loads(sys.argv[6])
    jax.config.update("jax_platforms", "cpu")
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", num_processes=processes, process_id=process)
    from jaxinfer import LLM, SamplingParams
    from jaxinfer.attention.backend import select_backend
    from jaxinfer.programs.program import bounds_place
    from jaxinfer.programs.runner import Runner, initial_state

    llm = LLM(
        checkpoint, skip_tokenizer_init=True, tensor_parallel_size=size, max_num_seqs=4,
        **{"max_num_batched_tokens": 64, **options},
    )  # fmt: skip
    prompts = [[(7 * i + j) % 90 + 3 for j in range(length)] for i, length in enumerate((3, 30, 70))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    shape = llm.core.buckets.loop_for(decode_rows=4, pages_per_row=1)
    runner, vocab = llm.core.runner, llm.core.model_config.vocab_size
    # What a plain step needs is there, though the engines of diffusion models never run one.
    state = {**initial_state(llm.core.kv, 4, vocab, bounds_place(runner.mesh, vocab)), **runner.state}
    models = {name: weights.module for name, weights in runner.weights.items()}
    runner = Runner(models, state, select_backend(llm.core.config.attention_backend), mesh=runner.mesh)
    text = runner.compile(llm.core.programs.step, shape).as_text()
    # Each exchange between devices, by its kind and the shape of what it makes.
    exchanges = re.findall(r" = [a-z0-9]+\[([0-9,]*)\]\S* ((?:all|reduce-scatter|collective)[a-z-]*)\(", text)
    shards = llm.core.kv.k[0].sharding.num_devices
    tokens = [output.outputs[0].token_ids for output in outputs]
    metrics = llm.get_metrics()
    drafted = [metrics.spec_decode_num_draft_tokens, metrics.spec_decode_num_accepted_tokens]
    bound, listed, counts = [], [], None
    if "diffusion_config" not in options:
        plain = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        params = [
            SamplingParams(**plain, frequency_penalty=1.2, logit_bias={5: 2.0, 127: 3.0}, logprobs=5),
            SamplingParams(**plain, repetition_penalty=1.4, allowed_token_ids=list(range(1, 128, 2))),
            SamplingParams(temperature=0.9, seed=2, max_tokens=12, min_tokens=9, stop_token_ids=list(range(90))),
        ]
        found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        bound = [output.token_ids for output in found]
        entries = found[0].logprobs or []
        listed = [sorted((token, round(float(each.logprob), 2)) for token, each in entry.items()) for entry in entries]
        counts = llm.core.runner.state["bounds"].counts.addressable_shards[0].data.shape
    # Both ways to read a trunk; the branches end at different times.
    branches = {}
    if processes == 1 and "diffusion_config" not in options:
        each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (12, 5, 9)]
        for mode in ("in_one_sequence", "batching"):
            found = llm.generate_branches(prompts[1], [[3], [4, 5], [6]], each, mode, use_tqdm=False)
            branches[mode] = [output.token_ids for output in found.outputs]
    result = {
        "tokens": tokens,
        "devices": shards,
        "exchanges": Counter(map(" ".join, exchanges)),
        "drafted": drafted,
        "branches": branches,
        "bound": bound,
        "listed": listed,
        "counts": counts,
        "forwards": metrics.diffusion_forwards_total,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
