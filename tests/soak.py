"""Keep a server under load:  python -m tests.soak [--minutes 20] [--clients 64] [-- SERVE OPTIONS]

Each client asks one question after another, streamed or not, about pictures of very uneven popularity, and disconnects
during one in ten answers. Prints the answers and the memory of all server processes every minute. Fails if an answer
is an error or differs from the first answer to the same question, or if memory in the last quarter of the run is more
than 5 % above that in the second quarter.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import httpx

from tests.drawn import ask, by_url, draw
from tests.real_server import RealServer, real_server

NUM_PICTURES = 200
LEAVING = 0.1
PATIENCE = 120
WEIGHING_SECONDS = 5
MAX_GROWTH = 1.05
MAX_SHOWN_FAULTS = 10


@dataclass
class Soak:
    ends_at: float
    bodies: list[bytes]
    popularity: list[float]
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    # Keyed by the question's number.
    first_answers: dict[int, str] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.ends_at

    def note_answer(self, number: int, text: str) -> None:
        self.counts["answers"] += 1
        if (first := self.first_answers.setdefault(number, text)) != text:
            self.faults.append(f"question {number}: {text!r}, but {first!r} before")


def write_bodies(rng: Random) -> tuple[list[bytes], list[float]]:
    """Return request bodies and their popularity weights."""
    bodies, popularity = [], []
    for rank in range(NUM_PICTURES):
        drawn = draw(rank)
        for question in rng.sample(drawn.questions, 2):
            request = {"messages": ask(by_url(drawn.picture), question.text), "max_tokens": 40}
            # The demo model was trained on these questions; greedy answers are the same each time.
            bodies.append(json.dumps(request | {"temperature": 0}).encode())
            popularity.append(1 / (1 + rank))
    return bodies, popularity


async def be_a_client(client: httpx.AsyncClient, soak: Soak, rng: Random) -> None:
    while not soak.is_over:
        [number] = rng.choices(range(len(soak.bodies)), soak.popularity)
        try:
            if rng.random() < LEAVING:
                await leave_amid(client.base_url, soak, number, rng)
            elif rng.random() < 0.5:
                await ask_for_all(client, soak, number)
            else:
                await ask_for_stream(client, soak, number)
        except httpx.HTTPError as error:
            soak.faults.append(f"question {number}: {error!r}")


async def ask_for_all(client: httpx.AsyncClient, soak: Soak, number: int) -> None:
    response = await client.post("/v1/chat/completions", content=soak.bodies[number])
    response.raise_for_status()
    soak.note_answer(number, response.json()["choices"][0]["message"]["content"])


async def ask_for_stream(client: httpx.AsyncClient, soak: Soak, number: int) -> None:
    text = ""
    async with client.stream("POST", "/v1/chat/completions", content=_as_stream(soak.bodies[number])) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    soak.faults.append(f"question {number}: {chunk['error']}")
                    return
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    soak.note_answer(number, text)


async def leave_amid(base_url: httpx.URL, soak: Soak, number: int, rng: Random) -> None:
    """Disconnect before the first token or during the answer.

    Uses a connection of its own: httpx's pool may lose one that is abandoned.
    """
    body = _as_stream(soak.bodies[number]) if rng.random() < 0.5 else soak.bodies[number]
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE, verify=False) as client:
            async with asyncio.timeout(rng.expovariate(2)):
                await client.post("/v1/chat/completions", content=body)
    except TimeoutError:
        soak.counts["left"] += 1


def _as_stream(body: bytes) -> bytes:
    return b'{"stream": true, ' + body[1:]


async def weigh(server: RealServer, soak: Soak) -> None:
    began = time.monotonic()
    while not soak.is_over:
        await asyncio.sleep(WEIGHING_SECONDS)
        soak.weights.append(server.memory_bytes() / 1e6)
        if len(soak.weights) % (60 // WEIGHING_SECONDS) == 0:
            minute, counts = (time.monotonic() - began) / 60, dict(soak.counts)
            print(f"minute {minute:4.1f}: {soak.weights[-1]:7.1f} MB, {counts}, faults {len(soak.faults)}", flush=True)


async def run(server: RealServer, soak: Soak, num_clients: int, seed: int) -> None:
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients // 2)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=PATIENCE) as client:
        clients = (be_a_client(client, soak, Random(seed * 1000 + index)) for index in range(num_clients))
        await asyncio.gather(weigh(server, soak), *clients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="of keepsight serve")
    args = parser.parse_args()
    bodies, popularity = write_bodies(Random(args.seed))
    with real_server(*args.options) as server:
        soak = Soak(time.monotonic() + 60 * args.minutes, bodies, popularity)
        asyncio.run(run(server, soak, args.clients, args.seed))
        num_tracebacks = server.log.read_text().count("Traceback")
    for fault in soak.faults[:MAX_SHOWN_FAULTS]:
        print(fault)
    quarter = max(1, len(soak.weights) // 4)
    before, after = (statistics.median(each) for each in (soak.weights[quarter : 2 * quarter], soak.weights[-quarter:]))
    print(f"{dict(soak.counts)}, {len(soak.faults)} faults, {num_tracebacks} tracebacks in the server's log")
    print(f"memory, second quarter {before:.1f} MB, last {after:.1f} MB, {after / before - 1:+.1%}")
    assert not soak.faults
    assert not num_tracebacks
    assert after <= before * MAX_GROWTH


if __name__ == "__main__":
    main()
