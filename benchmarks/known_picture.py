"""The cost of a picture in the frontend: never seen, known by its content, and known by its uuid alone.

    PYTHONPATH=. python benchmarks/known_picture.py [--runs 60] [--before FOLDER]

A real `keepsight serve` is asked by HTTP, one request after the other, about a 4000 x 3000 JPEG in a data URL.  The
processor time is the kernel's count for each thread: other work of the machine is not counted, though it makes caches
cold.  The kinds of requests take turns; medians are printed.  Then the steps that no cache can avoid, and a line of the
log as an example of something done once per request: each alone in this process, after other memory was read, and
immediately again.

`--before`: a checkout of another version, whose server is measured in turn with this one; the ratios of the frontends'
times are then printed, too.
"""

import argparse
import gc
import http.client
import io
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from blake3 import blake3

from keepsight.bench.draw import photograph
from keepsight.frontend.api.chat_request import parse_chat_request
from keepsight.frontend.intake.read_data_url import read_data_url
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.ipc.server_log import LOG_FORMAT
from keepsight.observe.process_memory import with_descendants
from tests.drawn import to_data_url
from tests.real_server import START_SECONDS, RealServer, real_server

T = TypeVar("T")
PROGRAMS = {"engine_process": "engine", "frontend_process": "frontend", "media_worker": "workers"}
UUID = "a photograph"
# More than a CPU's caches can hold.
ELSEWHERE_BYTES = 64 * 2**20


# Asking -------------------------------------------------------------------------------------------------------


def to_body(number: int, *pictures: dict[str, Any]) -> bytes:
    """Return a request with new words before the picture, so that nothing of the prompt is in the prefix cache."""
    content = [{"type": "text", "text": f"Request {number}. What is this?"}, *pictures]
    request = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    return json.dumps(request).encode()


def by_url(jpeg: bytes, **names: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": to_data_url(jpeg, "image/jpeg")}, **names}


def ask(server: RealServer, body: bytes) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=START_SECONDS)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    assert response.status == 200, answer


# The server ---------------------------------------------------------------------------------------------------


def serving(checkout: Path | None = None) -> AbstractContextManager[RealServer]:
    path = {} if checkout is None else {"PYTHONPATH": str(checkout / "src")}
    return real_server("--device=auto", "--log-requests", environment=path)


def processor_ms(server: int) -> dict[str, float]:
    """Return the processor time of each kind of process since its start."""
    total = dict.fromkeys(PROGRAMS.values(), 0.0)
    for pid in {*with_descendants(server)} - {server}:
        with suppress(OSError):
            program = Path(f"/proc/{pid}/cmdline").read_text()
            kind = next(kind for name, kind in PROGRAMS.items() if f".{name}\0" in program)
            for task in Path(f"/proc/{pid}/task").iterdir():
                total[kind] += int((task / "schedstat").read_text().split()[0]) / 1e6
    return total


def wait_until_idle(server: int) -> dict[str, float]:
    """Wait until the work after an answer has been done, too.  Return the processor times then."""
    before = processor_ms(server)
    while True:
        time.sleep(0.05)
        after = processor_ms(server)
        if sum(after.values()) - sum(before.values()) < 0.5:
            return after
        before = after


# Measuring ----------------------------------------------------------------------------------------------------


def measure_requests(runs: int, jpeg: bytes, before: Path | None) -> None:
    write_body: dict[str, Callable[[int], bytes]] = {
        "text alone": to_body,
        # Bytes after the end of a JPEG change its content hash, but not the picture.
        "never seen": lambda number: to_body(number, by_url(jpeg + b"%16d" % number)),
        "known": lambda number: to_body(number, by_url(jpeg)),
        "known, with its uuid": lambda number: to_body(number, by_url(jpeg, uuid=UUID)),
        "its uuid alone": lambda number: to_body(number, {"type": "image_url", "image_url": None, "uuid": UUID}),
    }
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(checkout)) for checkout in dict.fromkeys((None, before))]
        for server in servers:
            ask(server, to_body(-1, by_url(jpeg, uuid=UUID), by_url(jpeg)))
        costs: list[dict[str, list[dict[str, float]]]] = [{name: [] for name in write_body} for _ in servers]
        for number in range(runs + 2):
            for name, write in write_body.items():
                for server, costs_by_name in in_turn(zip(servers, costs, strict=True), number):
                    costs_by_name[name].append(measure_one(server, write(number)))
    for costs_by_name in costs:
        print_costs({name: each[2:] for name, each in costs_by_name.items()})
    if before is not None:
        costs_now, costs_before = (
            {name: [cost["frontend"] for cost in each[2:]] for name, each in costs_by_name.items()}
            for costs_by_name in costs
        )
        for name in write_body:
            ratio = statistics.median(a / b for a, b in zip(costs_now[name], costs_before[name], strict=True))
            print(f"{name}: {ratio:.3f} of what it took the frontend before, median of the rounds")


def in_turn(servers: Iterable[T], number: int) -> list[T]:
    return list(servers)[:: -1 if number % 2 else 1]


def measure_one(server: RealServer, body: bytes) -> dict[str, float]:
    before = wait_until_idle(server.pid)
    ask(server, body)
    after = wait_until_idle(server.pid)
    return {kind: after[kind] - before[kind] for kind in after}


def print_costs(costs: dict[str, list[dict[str, float]]]) -> None:
    runs = len(costs["known"])
    print(f"\n| processor ms a request, medians of {runs} | {' | '.join(PROGRAMS.values())} |")
    print("|---|---|---|---|")
    for name, measured in costs.items():
        medians = [statistics.median(cost[kind] for cost in measured) for kind in PROGRAMS.values()]
        print(f"| {name} | {' | '.join(f'{median:.1f}' for median in medians)} |")


def measure_steps(runs: int, jpeg: bytes) -> None:
    body, url = bytearray(to_body(0, by_url(jpeg))), to_data_url(jpeg, "image/jpeg")
    elsewhere = bytearray(ELSEWHERE_BYTES)
    handler, logger = logging.StreamHandler(io.StringIO()), logging.getLogger("measured")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.addHandler(handler)
    steps: dict[str, Callable[[], object]] = {
        f"copy the body ({len(body) / 1e6:.1f} MB)": lambda: bytes(body),
        "read the JSON": lambda: parse_chat_request(body),
        "undo base64": lambda: read_data_url(url, "url"),
        f"blake3 ({len(jpeg) / 1e6:.1f} MB)": lambda: blake3(jpeg).digest(),
        "read the header": lambda: read_geometry(jpeg, "picture"),
        "write a line of the log": lambda: logger.warning("%s", "a line"),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            elsewhere.find(b"\1")
            times[name].append((measure_step(step), measure_step(step)))
    print("\n| step alone, in a process that has done it before | ms, caches cold | again at once |\n|---|---|---|")
    for name, pairs in times.items():
        cold, again = map(statistics.median, zip(*pairs, strict=True))
        print(f"| {name} | {cold:.3f} | {again:.3f} |")


def measure_step(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return (time.process_time() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    runs = arguments.runs
    jpeg = photograph(0, 4000, 3000)
    measure_requests(runs, jpeg, arguments.before)
    gc.freeze()
    measure_steps(runs, jpeg)


if __name__ == "__main__":
    main()
