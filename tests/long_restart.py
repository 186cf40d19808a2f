"""Many pictures answered, the server killed, started again: none is decoded or encoded, and the answers are equal.

python -m tests.long_restart [--pictures 200]
"""

import argparse
import tempfile
from pathlib import Path

from tests.cli.test_serve_restarts import restart
from tests.drawn import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        restart(Path(folder), f"{folder}/cache:1G", [draw(seed) for seed in range(arguments.pictures)])
    print(f"{arguments.pictures} pictures: answers equal, none decoded, none encoded after kill -9")


if __name__ == "__main__":
    main()
