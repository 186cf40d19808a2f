"""The cost of communication between two processes: a small message, a picture's pixels, a step's tokens.

    PYTHONPATH=. python benchmarks/wire.py [--rounds 300]

Another process answers each message; round trips are measured in wall-clock time, medians are printed.  The contestants
take turns, so that a busy machine disturbs none more than the others.  The rows named "bare" are the lower bound: a
copy within one process, and a round trip through ZeroMQ without codec, threads or handshake.  Pixels go one way, and
are answered by a small message.
"""

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from benchmarks.in_turn import time_in_turn
from keepsight.ipc.channel import EngineListener, FrontendChannel
from keepsight.ipc.codec import decode_from_engine, decode_to_engine, encode_from_engine, encode_to_engine
from keepsight.ipc.handshake import Welcome
from keepsight.requests import (
    AbortRequest,
    EngineRequest,
    FromEngine,
    MediaArrived,
    MediaHeld,
    Received,
    ResetCaches,
    ToEngine,
    TokenOutput,
)
from keepsight.sampling_params import SamplingParams

SIDE, TOKENS_A_STEP, STEPS = 896, 64, 2000
SMALL = AbortRequest("1234")
PICTURE = MediaArrived("ab" * 32, np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8))
PROMPT = EngineRequest("1234", tuple(range(1000, 1300)), (), SamplingParams())
STEP: list[FromEngine] = [TokenOutput(f"{index:04}", 0, 100 * index) for index in range(TOKENS_A_STEP)]
ANSWER: list[FromEngine] = [MediaHeld(("ab" * 32,))]
Contestants = dict[str, Callable[[int], object]]


# The other process --------------------------------------------------------------------------------------------


def echo(endpoint: str) -> None:
    def answer(frontend_id: str, message: Received) -> None:
        if isinstance(message, ResetCaches):
            for _ in range(STEPS):
                listener.send(frontend_id, STEP)
        listener.send(frontend_id, ANSWER)

    listener = EngineListener(endpoint, Welcome(1), answer, lambda _: None)
    sys.stdin.read()
    listener.close()


def echo_bare(endpoint: str) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind(endpoint)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while not any(fd == sys.stdin.fileno() for fd, _ in poller.poll()):
        socket.recv_multipart(copy=False)
        socket.send(b"x")
    context.destroy(linger=0)


# This process -------------------------------------------------------------------------------------------------


def start(mode: str, endpoint: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, __file__, "--echo", mode, endpoint], stdin=subprocess.PIPE)


def codec_contestants() -> Contestants:
    prompt, step, picture = encode_to_engine(PROMPT), encode_from_engine(STEP), encode_to_engine(PICTURE)
    return {
        "codec: write a request of 300 tokens": lambda _: encode_to_engine(PROMPT),
        "codec: read it": lambda _: decode_to_engine(prompt),
        "codec: write a step of 64 tokens": lambda _: encode_from_engine(STEP),
        "codec: read it ": lambda _: decode_from_engine(step),
        "codec: write a picture": lambda _: encode_to_engine(PICTURE),
        "codec: read it  ": lambda _: decode_to_engine(picture),
    }


def channel_contestants(channel: FrontendChannel, received: "queue.Queue[Sequence[FromEngine]]") -> Contestants:
    def round_trip(message: ToEngine) -> None:
        assert channel.send(message)
        received.get()

    return {
        "channel: a small message there and back": lambda _: round_trip(SMALL),
        "channel: a request of 300 tokens": lambda _: round_trip(PROMPT),
        "channel: a picture of 2.4 MB": lambda _: round_trip(PICTURE),
    }


def bare_contestants(socket: "zmq.Socket[bytes]") -> Contestants:
    pixels = PICTURE.pixels
    assert isinstance(pixels, np.ndarray)
    view = pixels.data.cast("B")

    def round_trip(frame: bytes | memoryview, copy: bool) -> None:
        socket.send_multipart([frame], copy=copy)
        socket.recv()

    return {
        "bare: a copy of 2.4 MB in memory": lambda _: pixels.copy(),
        "bare zmq: a small message": lambda _: round_trip(b"x", True),
        "bare zmq: 2.4 MB, not copied": lambda _: round_trip(view, False),
        "bare zmq: 2.4 MB, copied by the sender": lambda _: round_trip(view, True),
    }


def tokens_per_second(channel: FrontendChannel, received: "queue.Queue[Sequence[FromEngine]]") -> float:
    began = time.perf_counter()
    channel.send(ResetCaches("reset"))
    num_tokens = 0
    while (outputs := received.get()) != ANSWER:
        num_tokens += len(outputs)
    return num_tokens / (time.perf_counter() - began)


def measure(rounds: int, folder: str) -> None:
    endpoint, bare_endpoint = f"ipc://{folder}/echo", f"ipc://{folder}/bare"
    children = [start("channel", endpoint), start("bare", bare_endpoint)]
    received = queue.Queue[Sequence[FromEngine]]()
    channel = FrontendChannel(endpoint, "benchmark", received.put, print)
    context = zmq.Context()
    try:
        channel.connect(20)
        socket = context.socket(zmq.PAIR)
        socket.connect(bare_endpoint)
        contestants = codec_contestants() | channel_contestants(channel, received) | bare_contestants(socket)
        for name, seconds in time_in_turn(contestants, range(rounds + 10), 10).items():
            print(f"{name.strip():44} {statistics.median(seconds) * 1e6:9.1f} us")
        speeds = [tokens_per_second(channel, received) for _ in range(5)]
        print(f"{'steps of 64 tokens, one after another':44} {statistics.median(speeds):9,.0f} tokens/s")
    finally:
        channel.close()
        context.destroy(linger=0)
        for child in children:
            child.communicate()


def main() -> None:
    if sys.argv[1:2] == ["--echo"]:
        {"channel": echo, "bare": echo_bare}[sys.argv[2]](sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        measure(args.rounds, folder)


if __name__ == "__main__":
    main()
