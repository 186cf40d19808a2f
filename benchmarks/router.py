"""What a router adds to a request: the time of a streamed answer about a known picture, with it and without.

    PYTHONPATH=. python benchmarks/router.py [--runs 200] [--pixels 224]

A real `keepsight serve` with the demo is asked over connections that are kept, in turn directly and through a real
`keepsight route`, one request after the other. Medians of the time to the first event and to the end are printed, and
the router's processor time for each request and for each event of long answers.
"""

import argparse
import http.client
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from keepsight.bench.draw import photograph
from keepsight.observe.process_memory import with_descendants
from tests.drawn import to_data_url
from tests.real_server import START_SECONDS, routing, serving

KINDS = ("direct", "routed")


def to_body(picture: str, num_tokens: int) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is this?"}]
    options = {"stream": True, "max_tokens": num_tokens, "min_tokens": num_tokens, "temperature": 0}
    return json.dumps({"messages": [{"role": "user", "content": parts}], **options}).encode()


def ask(connection: http.client.HTTPConnection, body: bytes) -> tuple[float, float]:
    """Return the milliseconds until the first event, and until the end."""
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read1()
    first = time.perf_counter()
    response.read()
    return (first - began) * 1e3, (time.perf_counter() - began) * 1e3


def processor_ms(pid: int) -> float:
    """Return the processor time of a process since its start, counted by the kernel for each thread."""
    folders = (Path(f"/proc/{each}/task") for each in with_descendants(pid))
    return (
        sum(int((task / "schedstat").read_text().split()[0]) for folder in folders for task in folder.iterdir()) / 1e6
    )


def measure(ports: dict[str, int], router: int, body: bytes, runs: int) -> None:
    connections = {kind: http.client.HTTPConnection("127.0.0.1", ports[kind], timeout=START_SECONDS) for kind in KINDS}
    for kind in KINDS * 5:
        ask(connections[kind], body)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    before = processor_ms(router)
    for _ in range(runs):
        for kind in KINDS:
            times[kind].append(ask(connections[kind], body))
    own = (processor_ms(router) - before) / runs
    firsts, ends = (
        {kind: statistics.median(each[index] for each in times[kind]) for kind in KINDS} for index in (0, 1)
    )
    for name, medians in (("first event", firsts), ("end", ends)):
        added = medians["routed"] - medians["direct"]
        print(f"  {name}: {medians['direct']:.2f} ms directly, {medians['routed']:.2f} routed: {added:+.2f} ms")
    print(f"  processor time of the router: {own:.2f} ms for each request")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--pixels", type=int, default=224, help="the picture's width")
    arguments = parser.parse_args()
    picture = to_data_url(photograph(7, arguments.pixels, arguments.pixels * 3 // 4), "image/jpeg")
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        _, server = running.enter_context(serving(folder / "server", "--no-log-requests"))
        process, port = running.enter_context(routing(folder / "router", f"http://127.0.0.1:{server}"))
        for num_tokens in (1, 100):
            body = to_body(picture, num_tokens)
            print(f"{num_tokens} tokens, {len(body)} bytes of request:")
            measure({"direct": server, "routed": port}, process.pid, body, arguments.runs)


if __name__ == "__main__":
    main()
