"""Inject any number of random faults of disk, server, clock and other processes:

    python -m tests.tiers.long_faults --faults 10000 [--seed 0]

After each fault, several loads run: each must be answered once, with the stored bytes or with nothing;
anything else ends the run.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path

from tests.tiers.faults import Faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), arguments.seed)
        try:
            faults.run(arguments.faults)
        finally:
            faults.close()
    print(f"{faults.injected.total()} faults, seed {arguments.seed}, in {time.monotonic() - began:.0f} s:")
    print(", ".join(f"{name.replace('_', ' ')} {number}" for name, number in faults.injected.most_common()))
    print(
        f"{faults.answers.total()} loads: {faults.answers['right']} right, {faults.answers['absent']} absent, 0 wrong"
    )
    print(f"the longest that a caller was held: {faults.longest_call * 1000:.2f} ms")


if __name__ == "__main__":
    main()
