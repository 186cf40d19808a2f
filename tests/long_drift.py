"""The drift test with more requests:  python -m tests.long_drift [--requests 30000] [--mode MODE] [--seed 0]

Runs frontends and an engine, in every pixel mode or in one, while messages are late, lost or reordered and engines are
killed. Fails at the first wrong answer; otherwise prints the counts.
"""

import argparse
import time

from tests.test_drift import MODES, open_simulated_server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for mode in args.mode or MODES:
        for loses_hints in (False, True):
            began = time.monotonic()
            with open_simulated_server(args.seed, mode, loses_hints=loses_hints) as server:
                server.run_requests(args.requests)
                server.assert_nothing_left()
                counts = ", ".join(f"{count} {name}" for name, count in sorted(server.counts.items()))
            print(f"{mode}, seed {args.seed}, {time.monotonic() - began:.0f} s: {counts}", flush=True)


if __name__ == "__main__":
    main()
