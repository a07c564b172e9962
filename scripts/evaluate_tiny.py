"""Score the embedded checkpoint on held-out combinations, greedy, through the engine."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from training.evaluation import evaluate, perplexity

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "checkpoints" / "tiny"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a converted or Hugging Face directory")
    parser.add_argument("--cases", type=int, default=200, help="held-out cases of each kind")
    parser.add_argument("--output", type=Path, help="write scores and sample answers there, as JSON")
    options = parser.parse_args()
    scores, shown = evaluate(options.model, options.cases)
    everything, answers = perplexity(options.model, min(options.cases, 50))
    print(f"held-out perplexity {everything:.3f} over all tokens, {answers:.3f} over the answers")
    if options.output is not None:
        record = {
            "scores": [asdict(each) for each in scores],
            "perplexity": {"all": everything, "answers": answers},
            "samples": shown,
        }
        options.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    missed = [each for each in scores if not each.passed]
    for each in missed:
        print(f"MISSED: {each.kind}, {each.check}: {each.share:.1%} of {each.threshold:.0%}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
