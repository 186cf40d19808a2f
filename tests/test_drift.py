"""Frontends and engine stay consistent, whatever is lost, late, stale or aborted, in every pixel mode."""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from keepsight.config import GIB, Config
from keepsight.engine.engine_loop import EngineLoop
from keepsight.engine.engine_meter import EngineMeter
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import open_pixel_source
from keepsight.errors import EngineLostError, ServerOverloadedError
from keepsight.frontend.caller import Outputs
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixels.pixel_cache import PixelCache, open_pixel_cache
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.ipc.pixel_mode import PixelMode
from keepsight.ipc.run_directory import RunDirectory
from keepsight.observe.counters import Counters
from keepsight.requests import (
    AbortRequest,
    CarriedPixels,
    EngineRequest,
    FromEngine,
    MediaArrived,
    MediaDropped,
    MediaHeld,
    MediaNeeded,
    StoredPixels,
    ToEngine,
    TokenOutput,
)
from keepsight.scheduling.scheduler import Scheduler
from keepsight.testing import FakeRunner, expected_answer, pixels_like
from tests.made_up_request import MadeUpRequest
from tests.memory_channel import MemoryChannel
from tests.scheduling.drive import END_IDS, make_config, make_request
from tests.scheduling.long_run import LONG_FACTOR

MODES: tuple[PixelMode, ...] = get_args(PixelMode)
PICTURES = [f"{index:x}".rjust(32, "f") for index in range(1, 13)]
# Zipf weights.
POPULARITY = [1 / (1 + index) for index in range(len(PICTURES))]
# Room for four of the twelve pictures: in memory, in the ring with headers, and as files of one page each.
CACHE_BYTES: dict[PixelMode, int] = {"none": 0, "processor_only": 4 * 48, "lru": 4 * 48, "shm": 576, "shared": 4 * 4096}
NUM_SEATS, MAX_RUNNING = 4, 12


@dataclass
class Pool:
    """Makes pixels at once and caches them as its mode does; sometimes returns a handle to pixels that do not exist."""

    chance: random.Random
    cache: PixelCache
    counts: Counter[str]

    def make(
        self,
        prepared: MadeUpRequest,
        media_hashes: Collection[str],
        deliver: Callable[[str, CarriedPixels], None],
        _fail: Callable[[Exception], None],
        *,
        inline: bool = False,
    ) -> None:
        for item in prepared.engine_request.media:
            self.cache.touch(item.media_hash)
        for media_hash in media_hashes:
            deliver(media_hash, self.inline(media_hash) if inline else self.carried(media_hash))

    def inline(self, media_hash: str) -> CarriedPixels:
        self.counts["resent inline"] += 1
        held = self.cache.read(media_hash)
        return pixels_like(media_hash) if held is None else held

    def carried(self, media_hash: str) -> CarriedPixels:
        if self.chance.random() < 0.05:
            self.counts["handles to nowhere"] += 1
            return StoredPixels((8, 8, 3))
        held = self.cache.get_and_update(media_hash)
        self.counts["made" if held is None else "found"] += 1
        return self.cache.put(media_hash, pixels_like(media_hash)) if held is None else held

    def note_spared(self, items: object) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def reset_cache(self) -> None:
        self.cache.clear()

    def free_cleared(self) -> None:
        self.cache.size()


@dataclass
class SentRequest:
    client: EngineClient
    request: EngineRequest
    tokens: dict[int, list[int]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    num_lost_engines: int = 0
    is_lost: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def note_outputs(self, outputs: Outputs) -> None:
        for output in outputs:
            assert not self.is_lost, "an output after the end"
            if isinstance(output, EngineLostError):
                assert self.tokens or self.num_lost_engines >= 2, "the request should have been resubmitted"
                self.is_lost = True
            else:
                assert isinstance(output, TokenOutput), output
                self.tokens.setdefault(output.choice, []).append(output.token_id)

    def stop(self, choice: int) -> None:
        self.client.note_read(self.request_id, choice, "stop")
        self.stopped.add(choice)

    def assert_right_answer(self, max_model_len: int) -> None:
        for choice in range(self.request.sampling_params.n):
            tokens = self.tokens.get(choice, [])
            alone = expected_answer(self.request, choice, END_IDS, max_model_len)
            is_part = self.is_lost or choice in self.stopped
            assert tokens == (alone[: len(tokens)] if is_part else alone), self.request_id


class SimulatedServer:
    """Frontends and an engine that take turns; the only randomness is `chance`."""

    def __init__(self, seed: int, mode: PixelMode, directory: RunDirectory, *, loses_hints: bool) -> None:
        self.chance, self.counts = random.Random(seed), Counter[str]()
        self.mode, self.directory, self.loses_hints = mode, directory, loses_hints
        slots = self.chance.choice([0, 3, 2 * NUM_SEATS])  # 0: a model without recurrent layers
        self.config = make_config(num_blocks=60, num_pictures=3, max_num_seqs=NUM_SEATS, num_state_slots=slots)
        self.options = Config(mm_processor_cache_gb=CACHE_BYTES[mode] / GIB)
        # A ring allows only one writer.
        caches = [open_pixel_cache(mode, self.options, directory.path) for _ in range(1 if mode == "shm" else 2)]
        self.pools = [Pool(self.chance, cache, self.counts) for cache in caches]
        self.clients = [EngineClient(cast(MediaPool, pool)) for pool in self.pools]
        self.lost: set[str] = set()
        self.running: list[SentRequest] = []
        # For each client: delayed hints, each with the number of turns to wait.
        self.late_hints: list[list[tuple[int, FromEngine]]] = [[] for _ in self.clients]
        self.start_engine()

    def start_engine(self) -> None:
        self.scheduler, self.inbox = Scheduler(self.config, END_IDS), Inbox()
        slots = self.config.kv_cache.num_state_slots
        self.runner = FakeRunner(60, 4, lambda: self.chance.random() < 0.7, num_state_slots=slots)
        self.channel = MemoryChannel(self.delay_of)
        self.source = open_pixel_source(self.mode, self.options, self.directory.path)
        meter = EngineMeter(Counters(), self.scheduler, 0, self.source)
        self.loop = EngineLoop(
            self.scheduler, self.runner, self.inbox, self.channel.send_to_frontends, self.source, None, meter
        )
        for client in self.clients:
            client.connect(self.channel.send_to_engine)

    def kill_engine(self) -> None:
        """Kill the engine; messages in transit are lost."""
        self.counts["engines killed"] += 1
        self.late_hints = [[] for _ in self.clients]
        for sent in self.running:
            sent.num_lost_engines += 1
        for client in self.clients:
            client.disconnect("killed")
        self.start_engine()
        self.leave_lost()

    def delay_of(self, message: ToEngine) -> int | None:
        """Return a message's delay in turns, or None to lose it.

        Requests arrive before their media, as on any real channel; media and aborts may be late.
        """
        if isinstance(message, EngineRequest):
            if self.chance.random() < 0.05:
                self.lost.add(message.request_id)
                return None
            return 0
        return self.chance.choice([0, 0, 1, 3]) if isinstance(message, MediaArrived | AbortRequest) else 0

    def ask(self, number: int) -> None:
        place = self.chance.randrange(len(self.clients))
        parts: list[Any] = [self.chance.randrange(1, 9)]
        parts += self.chance.choices(PICTURES, POPULARITY, k=self.chance.randrange(4))
        options = {"n": self.chance.choice([1, 1, 2]), "max_tokens": self.chance.randrange(1, 8)}
        sent = SentRequest(self.clients[place], make_request(f"{place}-{number}", *parts, 2, **options))
        sent.client.submit(cast(PreparedRequest, MadeUpRequest(sent.request)), sent.note_outputs)
        self.running.append(sent)
        self.counts["asked"] += 1
        self.leave_lost()

    def leave_lost(self) -> None:
        for sent in [each for each in self.running if each.request_id in self.lost]:
            self.leave(sent)

    def leave(self, sent: SentRequest) -> None:
        sent.client.leave(sent.request_id)
        self.running.remove(sent)
        self.counts["left"] += 1

    def turn(self) -> None:
        self.channel.deliver_to_engine(self.inbox.try_put)
        self.inbox.wake()
        self.loop.step()
        self.scheduler.check_invariants()
        self.channel.deliver_to_frontends(self.deliver_to_clients)
        self.deliver_late_hints()
        for sent in [each for each in self.running if each.request_id not in each.client._callers]:
            sent.assert_right_answer(self.config.scheduler.max_model_len)
            self.running.remove(sent)
            self.counts["engine lost" if sent.is_lost else "answered"] += 1

    def deliver_to_clients(self, outputs: Sequence[FromEngine]) -> None:
        for output in outputs:
            if isinstance(output, MediaNeeded) and not output.inline:
                self.counts["needed"] += len(output.media_hashes)
        for client, late in zip(self.clients, self.late_hints, strict=True):
            client.receive([output for output in outputs if not self.delay_or_drop_hint(output, late)])

    def delay_or_drop_hint(self, output: FromEngine, late: list[tuple[int, FromEngine]]) -> bool:
        if not (self.loses_hints and isinstance(output, MediaHeld | MediaDropped)):
            return False
        fate = self.chance.choice(["delivered"] * 7 + ["late", "late", "lost"])
        if fate == "late":
            late.append((self.chance.randrange(1, 6), output))
        self.counts[f"hints {fate}"] += 1
        return fate != "delivered"

    def deliver_late_hints(self) -> None:
        for client, late in zip(self.clients, self.late_hints, strict=True):
            client.receive([output for turns, output in late if turns == 0])
            late[:] = [(turns - 1, output) for turns, output in late if turns]

    def disturb(self) -> None:
        if self.running and self.chance.random() < 0.05:
            self.leave(self.chance.choice(self.running))
        if self.running and self.chance.random() < 0.02:
            sent = self.chance.choice(self.running)
            if sent.tokens:  # a reader ends a choice because of what it read
                sent.stop(self.chance.choice(list(sent.tokens)))
        if self.chance.random() < 0.01:
            kinds = {name: self.chance.random() < 0.5 for name in ("prefix", "encoder", "processor")}
            with pytest.MonkeyPatch.context() as monkeypatch, suppress(ServerOverloadedError):
                monkeypatch.setattr("keepsight.frontend.reset_query.RESET_SECONDS", 0.0)  # it takes effect in its turn
                self.chance.choice(self.clients).reset_caches(**kinds)
        if self.chance.random() < 0.01:
            self.kill_engine()

    def run_requests(self, num_requests: int) -> None:
        for number in range(num_requests):
            self.ask(number)
            self.disturb()
            for _ in range(self.chance.randrange(4)):
                self.turn()
            while len(self.running) > MAX_RUNNING:
                self.turn()
        self.settle()

    def settle(self) -> None:
        for _ in range(1000):
            if not (self.running or self.runner.is_busy or self.scheduler.lineup) and self.channel.is_empty:
                break
            self.turn()
        for _ in range(6):  # longer than the longest delay
            self.turn()

    def assert_nothing_left(self) -> None:
        assert not self.running, "a request was never finished"
        assert self.runner.num_held_pixels == 0
        assert self.runner.num_sequences == 0
        assert not self.scheduler.lineup
        assert self.scheduler.kv_cache.pool.num_free == self.config.kv_cache.num_blocks
        for pool in self.pools:
            pool.cache.check_invariants()
        for client in self.clients:
            assert not client._callers
            engine = client._engines[0]
            assert not engine.request_ids
            assert engine.num_tokens_in_flight == 0
            assert not engine.hints._promised
            engine.check_invariants()

    def assert_hints_match(self) -> None:
        held = {each for each in PICTURES if each in self.scheduler.holdings}
        for client in self.clients:
            assert set(client._engines[0].hints._held) == held

    def close(self) -> None:
        for pool in self.pools:
            pool.cache.close()
        self.source.close()


@contextmanager
def open_simulated_server(seed: int, mode: PixelMode, *, loses_hints: bool) -> Iterator[SimulatedServer]:
    with tempfile.TemporaryDirectory() as parent, RunDirectory.create(Path(parent)) as directory:
        server = SimulatedServer(seed, mode, directory, loses_hints=loses_hints)
        try:
            yield server
        finally:
            server.close()


@pytest.mark.parametrize("loses_hints", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_frontends_and_engine_never_drift_apart(mode: PixelMode, loses_hints: bool) -> None:
    with open_simulated_server(2, mode, loses_hints=loses_hints) as server:
        server.run_requests(200 * LONG_FACTOR)
        server.assert_nothing_left()
        if not loses_hints:
            server.assert_hints_match()
        counts = server.counts
        assert counts["answered"] > counts["asked"] * 0.6
        assert counts["answered"] + counts["left"] + counts["engine lost"] == counts["asked"]
        assert counts["resent inline"]
        assert counts["handles to nowhere"]
        assert counts["needed"]
        assert bool(counts["hints lost"]) == loses_hints
