"""Random clients against a server, for minutes or hours: streams, disconnects, slow readers, wrong and huge requests,
floods, aborts and signals. Every finished answer is compared with that of an engine without HTTP, computed before.

It ends with status 1 unless no response has status 500, every outcome was allowed, nothing of a request is left in the
engine, no page has leaked, nothing was compiled after warm-up, memory has not grown, no file is open and no thread runs
that was not before, and SIGTERM has ended the server with its streams whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from jaxinfer.bench.environment import describe_client
from jaxinfer.cli.serve import json_object
from soaking.comparison import NEAR_TIE
from soaking.course import Course, run_course
from soaking.report import tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint (default: embedded, with tools)")
    parser.add_argument(
        "--speculative-config", type=json_object, default={"method": "draft_model", "model": "tiny-draft"},
        metavar="JSON", help="drafts; {} for none (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1200.0, metavar="S", help="of load (default: %(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="end the load after so many (default: no limit)")
    parser.add_argument("--clients", type=int, default=12, metavar="N", help="at a time (default: %(default)s)")
    parser.add_argument("--distinct", type=int, default=200, metavar="N", help="requests (default: %(default)s)")
    parser.add_argument(
        "--warm-up-seconds", type=float, default=60.0, metavar="S",
        help="after so many of load memory should not grow (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--option", action="append", default=[], metavar="WORD", help="further word for `serve`")
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "soak.json", metavar="FILE")
    args = parser.parse_args()
    console = Console(stderr=True)
    with tqdm(total=args.requests, desc="Requests", unit="request", dynamic_ncols=True, mininterval=1.0) as bar:
        course = Course(
            model=args.model, speculative_config=args.speculative_config, seconds=args.seconds,
            num_requests=args.requests, num_clients=args.clients, num_distinct=args.distinct,
            warm_up_seconds=args.warm_up_seconds, seed=args.seed, options=args.option,
        )  # fmt: skip
        findings, tally = run_course(course, bar.set_postfix_str, lambda count: bar.update(count - bar.n))
    names = ("speculative_config", "seconds", "clients", "distinct", "seed")
    result: dict[str, Any] = {
        "settings": {name: getattr(args, name) for name in names},
        "environment": describe_client(), "near_tie": NEAR_TIE, **findings.as_json(), "requests": tally.as_json(),
    }  # fmt: skip
    args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for table in tables(findings, tally):
        Console(width=120).print(table)
    for problem in findings.problems:
        console.print(problem, style="red", markup=False)
    print(f"written to {args.json}")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
