"""The chaos test with more requests:  python -m tests.long_chaos [--requests 500] [--seed 0] [-- SERVE OPTIONS]

Fails if an answer is wrong or missing, if a process or a file is left behind, or if memory has grown by more than 5 %.
Otherwise prints the counts.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from random import Random

from tests.test_chaos import marked_server, run_while_killing, write_questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--answers-per-kill", type=int, default=8)
    parser.add_argument("options", nargs="*", help="of keepsight serve")
    args = parser.parse_args()
    began, rng = time.monotonic(), Random(args.seed)
    with tempfile.TemporaryDirectory() as folder, marked_server(Path(folder) / "log", *args.options) as server:
        questions = write_questions(args.requests, rng)
        outcome = asyncio.run(run_while_killing(server, questions, rng, args.concurrency, args.answers_per_kill))
        server.end_without_a_trace()
        num_tracebacks = server.log.read_text().count("Traceback")
    print(
        f"seed {args.seed}, {args.requests} requests three times, {time.monotonic() - began:.0f} s: all answers right"
    )
    print(f"killed: {dict(outcome.killed)}; asked again: {dict(outcome.retried)}; tracebacks: {num_tracebacks}")
    before, after = outcome.bytes_before / 1e6, outcome.bytes_after / 1e6
    print(f"memory before {before:.1f} MB, after {after:.1f} MB, {after / before - 1:+.1%}")
    assert after <= before * 1.05


if __name__ == "__main__":
    main()
