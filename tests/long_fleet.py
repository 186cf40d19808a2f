"""A router before two servers, all of which have faults:  python -m tests.long_fleet [--seconds 300] [--seed 0]

The servers share a Redis. Every few answers something happens to one of them: one of its processes is killed or stands
still for a while, or the server is killed or asked to end, and starts again; or Redis stands still. Fails if an answer
is missing or is not that of the undisturbed servers. Otherwise prints the counts.
"""

import argparse
import asyncio
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.real_server import END_SECONDS, proportional_bytes, routing
from tests.test_chaos import Callers, Server, marked_server, write_questions
from tests.tiers.redis_servers import real_server as real_redis

NUM_QUESTIONS, CONCURRENCY = 400, 12
ANSWERS_PER_FAULT = 45
# Longer than the router waits for a server's answer to whether it is ready.
MAX_STANDSTILL = 14.0
# With two frontends, and with one.
OPTIONS: tuple[list[str], ...] = (["--api-server-count", "2"], [])


@dataclass
class Fleet:
    """Servers that can be started again, each on a port of its own."""

    folder: Path
    redis: str
    ports: list[int] = field(default_factory=lambda: [find_port() for _ in OPTIONS])
    running: dict[int, tuple[Server, ExitStack]] = field(default_factory=dict)

    def start(self, number: int) -> None:
        stack = ExitStack()
        log = self.folder / f"server-{number}-{time.monotonic()}.log"
        given = ("--port", str(self.ports[number]), "--encoder-remote-cache", self.redis, *OPTIONS[number])
        self.running[number] = stack.enter_context(marked_server(log, *given)), stack

    async def start_again(self, number: int, how: int) -> None:
        server, stack = self.running[number]
        os.kill(server.supervisor, how)
        await asyncio.to_thread(self._wait_for_end, server)
        stack.close()
        await asyncio.to_thread(self.start, number)

    def _wait_for_end(self, server: Server) -> None:
        until = time.monotonic() + END_SECONDS
        while any(process.kind != "ended" for process in server.processes()):
            assert time.monotonic() < until, "does not end"
            time.sleep(0.05)

    def end(self) -> None:
        for server, stack in self.running.values():
            server.end_without_a_trace()
            stack.close()


@dataclass
class Faults:
    fleet: Fleet
    redis: int
    callers: Callers
    rng: Random
    counts: Counter[str] = field(default_factory=Counter)

    async def happen_until_cancelled(self) -> None:
        faults: dict[str, Callable[[int], Awaitable[None]]] = {
            "process killed": self._kill_a_process,
            "process stood still": self._halt_a_process,
            "server killed": lambda number: self.fleet.start_again(number, signal.SIGKILL),
            "server ended": lambda number: self.fleet.start_again(number, signal.SIGTERM),
            "redis stood still": lambda _: self._halt(self.redis),
        }
        while True:
            num_answers = self.callers.num_answers + self.rng.randint(5, ANSWERS_PER_FAULT)
            while self.callers.num_answers < num_answers:
                await asyncio.sleep(0.05)
            name = self.rng.choice(list(faults))
            self.counts[name] += 1
            await faults[name](self.rng.randrange(len(OPTIONS)))

    async def _kill_a_process(self, number: int) -> None:
        if (pid := self._choose(number)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _halt_a_process(self, number: int) -> None:
        if (pid := self._choose(number)) is not None:
            await self._halt(pid)

    def _choose(self, number: int) -> int | None:
        """Return an engine or a frontend. Those that are starting are left alone: failed starts may end a server."""
        server, _ = self.fleet.running[number]
        pids = [process.pid for process in server.processes() if process.pid in server.ready_pids()]
        return self.rng.choice(pids) if pids else None

    async def _halt(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self.rng.uniform(0.5, MAX_STANDSTILL))
            finally:
                os.kill(pid, signal.SIGCONT)


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


async def run(fleet: Fleet, redis: int, port: int, seconds: float, rng: Random) -> None:
    callers, questions = Callers(port, CONCURRENCY), write_questions(NUM_QUESTIONS, rng)
    expected = await callers.ask_all(questions)
    assert not callers.retried
    faults, began, num_rounds = Faults(fleet, redis, callers, rng), time.monotonic(), 0
    happening = asyncio.create_task(faults.happen_until_cancelled())
    while time.monotonic() - began < seconds:
        assert await callers.ask_all(questions) == expected
        assert not happening.done(), happening.exception()
        num_rounds += 1
    happening.cancel()
    await asyncio.gather(happening, return_exceptions=True)
    print(f"{num_rounds * NUM_QUESTIONS} answers in {time.monotonic() - began:.0f} s, all right")
    print(f"faults: {dict(faults.counts)}; asked again: {dict(callers.retried)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, real_redis() as (address, redis):
        fleet = Fleet(Path(folder), address)
        addresses = [f"http://127.0.0.1:{port}" for port in fleet.ports]
        with routing(Path(folder) / "router.log", *addresses) as (router, port):
            try:
                for number in range(len(OPTIONS)):
                    fleet.start(number)
                before = proportional_bytes(router.pid)
                asyncio.run(run(fleet, redis.pid, port, args.seconds, Random(args.seed)))
                grown = proportional_bytes(router.pid) - before
            finally:
                fleet.end()
        num_tracebacks = sum(log.read_text().count("Traceback") for log in Path(folder).glob("*.log"))
    print(f"the router's memory grew by {grown / 1e6:.1f} MB; tracebacks: {num_tracebacks}")


if __name__ == "__main__":
    main()
