"""Print samples of the corpus that the embedded checkpoint is trained on, one JSON object a line."""

from __future__ import annotations

import argparse
import json
import random

from training.corpus import KINDS, stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(KINDS), help="only samples of this kind")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="samples that training never sees")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    samples = stream(options.seed, options.held_out)
    for _ in range(options.count):
        sample = KINDS[options.kind](rng, options.held_out) if options.kind else next(samples)
        record = {"kind": sample.kind, "messages": sample.messages} if sample.messages else {"text": sample.text}
        print(json.dumps(record, ensure_ascii=False))


if __name__ == "__main__":
    main()
