"""Ask about many pictures, kill the server, restart it: nothing is decoded or encoded again, and answers are equal.

First from a disk tier; then from a Redis server, which is killed while the second server answers from it.

python -m tests.long_restart [--pictures 200]
"""

import argparse
import tempfile
from pathlib import Path

from tests.cli.test_serve_restarts import restart_from_disk, share_by_redis
from tests.drawn import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=200)
    arguments = parser.parse_args()
    pictures = [draw(seed) for seed in range(arguments.pictures)]
    with tempfile.TemporaryDirectory() as folder:
        restart_from_disk(Path(folder), pictures)
    print(f"{len(pictures)} pictures: answers equal, none decoded, none encoded after kill -9")
    with tempfile.TemporaryDirectory() as folder:
        share_by_redis(Path(folder), pictures)
    print(f"{len(pictures)} pictures: the same from Redis; all answered alike while Redis was killed")


if __name__ == "__main__":
    main()
