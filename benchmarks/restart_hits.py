"""Time to a picture's first token after kill -9 and a restart, compared to when its embeddings are on the device.

    PYTHONPATH=. python benchmarks/restart_hits.py [--model FOLDER] [--pictures 200]

`keepsight serve` with a disk cache and no prefix cache answers about all pictures, is killed with SIGKILL and started
again; then each picture is asked about twice in a row: it comes from the disk first, then from the device.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workload import to_messages
from keepsight.bench.draw import photograph
from keepsight.tiers.disk_tier import DiskTier
from tests.cli.test_serve_restarts import wait_for_hits, wait_until_written
from tests.official_client import connect
from tests.real_server import serving

DISK_BYTES, NUM_WARM_UP = 2**32, 3


class Client:
    def __init__(self, port: int, pictures: list[bytes]) -> None:
        self._client = connect(port)
        self._model = self._client.models.list().data[0].id
        self._pictures = pictures

    def first_token(self, number: int) -> float:
        """Return the time to the first token in milliseconds."""
        messages: Any = to_messages([number, "What is in the picture?"], self._pictures)
        began = time.perf_counter()
        self._client.chat.completions.create(model=self._model, messages=messages, max_tokens=1, temperature=0)
        return (time.perf_counter() - began) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder (default: the demo checkpoint)")
    parser.add_argument("--pictures", type=int, default=200)
    arguments = parser.parse_args()
    pictures = [photograph(seed) for seed in range(arguments.pictures + NUM_WARM_UP)]
    with tempfile.TemporaryDirectory() as folder:
        directory, model = Path(folder) / "cache", [arguments.model] if arguments.model else []
        tier = f"--encoder-disk-cache={directory}:{DISK_BYTES}"
        options = (*model, "--device=auto", "--no-enable-prefix-caching", tier)
        with serving(Path(folder) / "first", *options) as (process, port):
            client = Client(port, pictures)
            encoded = [client.first_token(number) for number in range(len(pictures))]
            wait_until_written(DiskTier(directory, DISK_BYTES), len(pictures))
            process.kill()
        with serving(Path(folder) / "second", *options) as (_, port):
            client = Client(port, pictures)
            pairs = [(client.first_token(number), client.first_token(number)) for number in range(len(pictures))]
            num_hits = wait_for_hits(port, "disk", len(pictures))["num_hits"]
    report(encoded, pairs[NUM_WARM_UP:], num_hits)


def report(encoded: list[float], pairs: list[tuple[float, float]], num_hits: int) -> None:
    for name, taken in (("encoded", encoded), ("disk", [a for a, _ in pairs]), ("device", [b for _, b in pairs])):
        print(f"{name:<10}{statistics.median(taken):8.2f} ms, median of {len(taken)}")
    print(f"disk / device: {statistics.median(a / b for a, b in pairs):.3f}, median of the pairs; {num_hits} disk hits")


if __name__ == "__main__":
    main()
