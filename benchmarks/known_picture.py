"""What a picture costs the frontend: never seen, known by its content, and known by its uuid alone.

    PYTHONPATH=. python benchmarks/known_picture.py [--runs 60]

A real `keepsight serve` is asked by HTTP, one request after the other, about a 4000 x 3000 JPEG in a data URL.  Counted
is processor time, as the kernel counts it for each thread: what the machine's other work takes does not count, though
it makes caches cold.  The kinds of request take turns; medians are given.  Then the steps that nothing can save, each
alone, in this process.
"""

import argparse
import base64
import gc
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks.preprocess import encode, photograph
from keepsight.frontend.chat_request import parse_chat_request
from keepsight.frontend.read_data_url import read_data_url
from keepsight.frontend.read_header import read_header
from keepsight.observe.process_memory import with_descendants

START_SECONDS = 120
PROGRAMS = {"engine_process": "engine", "frontend_process": "frontend", "media_worker": "workers"}
UUID = "a photograph"


# Asking -------------------------------------------------------------------------------------------------------


def to_url(jpeg: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()


def to_body(number: int, *pictures: dict[str, Any]) -> bytes:
    """Other words each time, before the picture: nothing of the prompt is in the prefix cache."""
    content = [{"type": "text", "text": f"Request {number}. What is this?"}, *pictures]
    request = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    return json.dumps(request).encode()


def by_url(jpeg: bytes, **names: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": to_url(jpeg)}, **names}


def ask(port: int, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    assert response.status == 200, answer


# The server ---------------------------------------------------------------------------------------------------


@contextmanager
def serving() -> Iterator[tuple[int, int]]:
    """Its process and its port."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "keepsight", "serve", "--port", "0"]
        with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
            try:
                yield process.pid, wait_for_port(log)
            finally:
                process.terminate()


def wait_for_port(log: Path) -> int:
    for _ in range(START_SECONDS * 10):
        _, found, rest = log.read_text().partition(" is served on http://127.0.0.1:")
        if found:
            return int(rest.partition("/")[0])
        time.sleep(0.1)
    raise SystemExit(log.read_text())


def processor_ms(server: int) -> dict[str, float]:
    """Of each kind of process, since it began."""
    total = dict.fromkeys(PROGRAMS.values(), 0.0)
    for pid in {*with_descendants(server)} - {server}:
        with suppress(OSError):
            program = Path(f"/proc/{pid}/cmdline").read_text()
            kind = next(kind for name, kind in PROGRAMS.items() if f".{name}\0" in program)
            for task in Path(f"/proc/{pid}/task").iterdir():
                total[kind] += int((task / "schedstat").read_text().split()[0]) / 1e6
    return total


def settle(server: int) -> dict[str, float]:
    """When what follows an answer has been done too."""
    before = processor_ms(server)
    while True:
        time.sleep(0.05)
        after = processor_ms(server)
        if sum(after.values()) - sum(before.values()) < 0.5:
            return after
        before = after


# Measuring ----------------------------------------------------------------------------------------------------


def measure_requests(runs: int, jpeg: bytes) -> None:
    asked: dict[str, Callable[[int], bytes]] = {
        "text alone": to_body,
        # What follows the end of a JPEG is content, but no picture.
        "never seen": lambda number: to_body(number, by_url(jpeg + b"%16d" % number)),
        "known": lambda number: to_body(number, by_url(jpeg)),
        "known, with its uuid": lambda number: to_body(number, by_url(jpeg, uuid=UUID)),
        "its uuid alone": lambda number: to_body(number, {"type": "image_url", "image_url": None, "uuid": UUID}),
    }
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
    with serving() as (server, port):
        ask(port, to_body(-1, by_url(jpeg, uuid=UUID), by_url(jpeg)))
        for number in range(runs + 2):
            for name, write in asked.items():
                body, before = write(number), settle(server)
                ask(port, body)
                after = settle(server)
                if number >= 2:
                    costs[name].append({kind: after[kind] - before[kind] for kind in after})
    print(f"| processor ms a request, medians of {runs} | {' | '.join(PROGRAMS.values())} |")
    print("|---|---|---|---|")
    for name, its in costs.items():
        medians = [statistics.median(cost[kind] for cost in its) for kind in PROGRAMS.values()]
        print(f"| {name} | {' | '.join(f'{median:.1f}' for median in medians)} |")


def measure_steps(runs: int, jpeg: bytes) -> None:
    body, url = bytearray(to_body(0, by_url(jpeg))), to_url(jpeg)
    steps: dict[str, Callable[[], object]] = {
        f"copy the body ({len(body) / 1e6:.1f} MB)": lambda: bytes(body),
        "read the JSON": lambda: parse_chat_request(body),
        "undo base64": lambda: read_data_url(url, "url"),
        f"blake3 ({len(jpeg) / 1e6:.1f} MB)": lambda: blake3(jpeg).digest(),
        "read the header": lambda: read_header(jpeg, "picture"),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append((time.process_time() - began) * 1e3)
    print("\n| step alone, in a process that has done it before | ms |\n|---|---|")
    for name, its in times.items():
        print(f"| {name} | {statistics.median(its):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    runs = parser.parse_args().runs
    jpeg = encode(photograph(4000, 3000), "JPEG", quality=90)
    measure_requests(runs, jpeg)
    gc.freeze()
    measure_steps(runs, jpeg)


if __name__ == "__main__":
    main()
