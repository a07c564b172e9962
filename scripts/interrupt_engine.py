"""Send SIGINT to this process at random moments of `LLM.generate`, and check what the engine answers afterwards.

In each trial one caller streams and another one generates; the signal reaches whichever runs. The stream must end with
all of its text, the same prompts must be answered as before, and nothing may leak.

    scripts/interrupt_engine.py --trials 300 --speculative ngram
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter

from tqdm import tqdm

from jaxinfer import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Write three words about the sea.", "2 + 3 ="]
STREAMED = "Tell me about a dog."
MOST_TOKENS = 24


def texts_of(llm: LLM) -> list[str]:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=MOST_TOKENS)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def streamed(llm: LLM, interrupt: bool, seconds: float, rng: random.Random) -> tuple[str, bool]:
    """The text of a stream beside which others generate, and whether the signal came while they did."""
    stream = llm.stream(STREAMED, SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS))
    text, was_interrupted = next(stream).outputs[0].text, False
    if interrupt:
        timer = threading.Timer(rng.uniform(0.0, seconds), os.kill, (os.getpid(), signal.SIGINT))
        with contextlib.suppress(KeyboardInterrupt):
            was_interrupted = True
            timer.start()
            texts_of(llm)
            was_interrupted = False
        timer.cancel()
        with contextlib.suppress(KeyboardInterrupt):
            timer.join()  # a signal that comes late comes here
    return text + "".join(delta.outputs[0].text for delta in stream), was_interrupted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--speculative", metavar="METHOD", help="draft_model, ngram or eagle3 (default: none)")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    speculative = None if args.speculative is None else {"method": args.speculative}
    llm = LLM(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64, speculative_config=speculative)
    expected, (text, _) = texts_of(llm), streamed(llm, False, 0.0, rng)
    streamed(llm, False, 0.0, rng)
    seconds = 0.0
    for _ in range(3):  # programs are compiled in the first of these runs
        llm.reset_prefix_cache()
        start = time.perf_counter()
        assert texts_of(llm) == expected
        seconds = time.perf_counter() - start
    outcomes: Counter[str] = Counter()
    for _ in tqdm(range(args.trials), unit="trial", dynamic_ncols=True):
        llm.reset_prefix_cache()
        found, was_interrupted = streamed(llm, True, seconds, rng)
        outcomes["interrupted"] += was_interrupted
        llm.core.step()
        llm.core.check_integrity()
        held = llm.core.scheduler.kv.allocator.num_held
        left = llm.has_unfinished_requests() or held or llm.client.has_readers
        right = found == text and texts_of(llm) == expected and not left
        outcomes["fine" if right else "wrong"] += 1
        if not right:
            tqdm.write(f"streamed {found!r} instead of {text!r}, left {left}")
    metrics = llm.get_metrics()
    print(
        f"{outcomes['fine']} of {args.trials} fine, {outcomes['interrupted']} of them interrupted while others "
        f"generated ({1000 * seconds:.0f} ms); {metrics.num_recoveries_total} recoveries"
    )
    raise SystemExit(outcomes["wrong"] > 0)


if __name__ == "__main__":
    main()
