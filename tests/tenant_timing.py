"""Check that latency does not reveal one tenant's pictures to another:  python -m tests.tenant_timing [--rounds 25]

Two API keys with isolated caches. In each round the owner asks about a picture twice and then the stranger does; the
stranger also asks about an unseen picture. Fails if the stranger's latency for the owner's picture differs from that
for an unseen one by more than noise, or if not even the owner's cache hit is measurably faster.
"""

import argparse
import random
import statistics
import sys
import time

import httpx

from tests.drawn import to_data_url
from tests.frontend.sample_pictures import encode, random_picture
from tests.real_server import real_server

OWNER, STRANGER = "owner", "stranger"
# Expensive to decode, but small to send.
SIZE, DETAILS = (4000, 3000), (40, 30)
# Limits for ratios of medians.
LARGEST_DIFFERENCE, LARGEST_PART_OF_A_HIT = 0.3, 0.6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    options = ("--api-key", OWNER, STRANGER, "--cache-isolation", "api-key")
    with real_server(*options) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        _measure_round(client, 0)
        measured = [_measure_round(client, number) for number in range(1, rounds + 1)]
    medians = {name: statistics.median(each[name] for each in measured) for name in measured[0]}
    for name, seconds in medians.items():
        print(f"{name}: {seconds * 1000:.1f} ms (median of {rounds})")
    part = medians["owner, again"] / medians["owner, first"]
    difference = medians["stranger, owner's picture"] / medians["stranger, unseen picture"] - 1
    print(f"a hit takes {part:.0%} of a miss; the stranger's two differ by {difference:+.1%}")
    return int(part > LARGEST_PART_OF_A_HIT or abs(difference) > LARGEST_DIFFERENCE)


def _measure_round(client: httpx.Client, number: int) -> dict[str, float]:
    shown, unseen = (_draw(2 * number + each) for each in (0, 1))
    measured = {
        "owner, first": _ask(client, OWNER, shown),
        "owner, again": _ask(client, OWNER, shown),
    }
    requests = [("stranger, owner's picture", shown), ("stranger, unseen picture", unseen)]
    random.Random(number).shuffle(requests)
    strangers = {name: _ask(client, STRANGER, picture) for name, picture in requests}
    return measured | {name: strangers[name] for name in sorted(strangers)}


def _draw(seed: int) -> str:
    return to_data_url(encode(random_picture("RGB", DETAILS, seed).resize(SIZE), "JPEG"), "image/jpeg")


def _ask(client: httpx.Client, key: str, picture: str) -> float:
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    began = time.monotonic()
    answer = client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    seconds = time.monotonic() - began
    answer.raise_for_status()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
