"""The frontend process: serves HTTP, passes requests to engines, and has worker processes make pixels.

It accepts connections once its first engine is ready. After that engines may come and go: requests wait for them.
"""

import gc
import logging
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from keepsight.checkpoint_folder import check_is_unchanged, digest_samples
from keepsight.config import Config
from keepsight.count_cores import count_cores, share_of
from keepsight.frontend.api.app import create_app
from keepsight.frontend.api.kept_responses import KeptResponses
from keepsight.frontend.api.request_log import RequestIdFilter
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.engine_link import EngineLink
from keepsight.frontend.http.fair_accept import FairAcceptServer
from keepsight.frontend.http.http_server import make_server
from keepsight.frontend.identity.common_geometries import CommonGeometries
from keepsight.frontend.identity.hash_media import hash_values
from keepsight.frontend.intake.media_handles import MediaHandles, MediaQuota
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixels.media_workers import MediaWorkers
from keepsight.frontend.pixels.pixel_cache import PixelCache, open_pixel_cache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.ipc.control import (
    Drain,
    EngineHeard,
    EngineLost,
    EngineReady,
    EngineSilent,
    GiveUp,
    ProcessEnd,
    Ready,
    StartFrontend,
    ToProcess,
    run_process,
)
from keepsight.ipc.handshake import Welcome
from keepsight.observe.account_ring import AccountRing
from keepsight.observe.catalogue import FETCHED, RESPONSES, RESTARTED
from keepsight.observe.counters import Counters
from keepsight.observe.request_observer import RequestObserver
from keepsight.observe.server_view import ServerView
from keepsight.program_identity import check_program_is

if TYPE_CHECKING:
    from keepsight.observe.export_spans import SpanExport

logger = logging.getLogger(__name__)
T = TypeVar("T")


class FrontendProcess:
    def __init__(self, start: StartFrontend) -> None:
        self._start, config = start, Config.from_options(**start.options)
        check_is_unchanged(config.directory, start.files, *config.adapter_folders.values())
        self._run_directory, name = Path(start.run_directory), f"frontend-{start.rank}"
        num_workers = share_of(config.media_workers or count_cores(), start.rank, start.num_frontends)
        self._counters = counters = Counters.open(self._run_directory, name)
        note_crash = partial(counters.add, RESTARTED["media_worker"])
        self._workers = workers = MediaWorkers(num_workers, note_crash, partial(check_program_is, start.program))
        common = CommonGeometries.open(self._run_directory)
        self._preparer = RequestPreparer.from_config(config, common, workers.look)
        self._digests = _digest_what_is_served(config, start)
        check_is_unchanged(config.directory, start.files, *config.adapter_folders.values())
        self._preparer.request_prefix = f"{start.frontend_id}-"
        self._preparer.intake.watch_downloads(lambda modality: counters.add(FETCHED[modality]))
        if self._preparer.processor is not None:
            # In parallel with the engine's start.
            self._workers.start()
        self._cache = self._open_cache(config)
        pool = MediaPool(num_workers, self._cache, self._workers.make, config.verify_hits, counters)
        self._view = ServerView.of_server(self._run_directory, pool.common_sizes)
        ring = AccountRing.open(self._run_directory, name)
        self._spans = _open_span_export(start.api.otlp_traces_endpoint)
        export = self._spans.export if self._spans is not None else None
        self._client = EngineClient(pool, RequestObserver(counters, ring, export))
        self._preparer.prefer_held(self._client.is_held)
        self._links = [
            EngineLink(self._client, start.frontend_id, partial(self._take_welcome, rank), rank)
            for rank in range(start.num_engines)
        ]
        # `max_model_len` of every engine so far, by rank.
        self._max_model_lens: dict[int, int] = {}
        self._listener = socket.socket(fileno=start.listener_fd)
        # Set by the first engine, or by draining, when none is needed any more.
        self._may_serve = threading.Event()
        self._server: FairAcceptServer | None = None
        self._is_draining = False

    def serve(self, control: ProcessEnd) -> None:
        """Serve until drained."""
        self._may_serve.wait()
        api = self._start.api
        app = create_app(
            self._preparer,
            self._client,
            self._start.model_name,
            api,
            handles=self._open_handles(),
            pixel_cache=self._cache,
            view=self._view,
            counters=self._counters,
            kept=self._open_kept(),
            digests=self._digests,
        )
        self._server = make_server(app, api, partial(self._counters.add, RESPONSES[4]))
        if self._is_draining:  # drained before the server existed; never set to False, as `_drain` may run meanwhile
            self._server.should_exit = True
        if self._preparer.processor is not None:
            # So that the first picture does not wait for them, nor the first answers share the cores with their start.
            self._workers.wait_until_started()
        # All that was loaded stays: the garbage collector need not scan it.
        gc.freeze()
        self._server.on_accepting = partial(control.send, Ready())
        self._server.run(sockets=[self._listener])

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._workers.close()
        self._client.close()
        self._preparer.close()
        if self._spans is not None:
            self._spans.close()

    def act_on(self, message: ToProcess) -> None:
        match message:
            case EngineReady(endpoint, rank):
                self._links[rank].engine_is_ready(endpoint)
            case EngineLost(rank):
                self._links[rank].engine_is_lost()
            case EngineSilent(rank):
                self._client.note_silence(rank, is_silent=True)
            case EngineHeard(rank):
                self._client.note_silence(rank, is_silent=False)
            case GiveUp(reason):
                self._client.give_up(reason)
            case Drain():
                self._drain()
            case _:
                raise AssertionError(message)

    def _open_cache(self, config: Config) -> PixelCache:
        mode = self._start.pixel_mode if self._preparer.processor is not None else "none"
        return open_pixel_cache(mode, config, self._run_directory)

    def _open_handles(self) -> MediaHandles | None:
        api = self._start.api
        if self._preparer.processor is None or not api.media_quota_bytes:
            return None
        quota = MediaQuota(api.media_quota_bytes, api.media_quota_count)
        return _try_open("nothing can be uploaded to this process", partial(MediaHandles, self._run_directory, quota))

    def _open_kept(self) -> KeptResponses | None:
        max_bytes = self._start.api.response_quota_bytes
        if not max_bytes:
            return None
        return _try_open("this process keeps no responses", partial(KeptResponses, self._run_directory, max_bytes))

    def _take_welcome(self, rank: int, welcome: Welcome) -> None:
        self._max_model_lens[rank] = welcome.max_model_len
        # The smallest, as any of the engines may get a request.
        self._preparer.max_model_len = min(tuple(self._max_model_lens.values()))
        self._may_serve.set()

    def _drain(self) -> None:
        self._is_draining = True
        if self._server is not None:
            self._server.should_exit = True
        self._may_serve.set()


def _digest_what_is_served(config: Config, start: StartFrontend) -> dict[str, str]:
    """Return what a router compares, as it takes one server for as good as another."""
    adapters = {name: digest_samples(folder) for name, folder in config.adapter_folders.items()}
    return {
        "model": digest_samples(config.directory),
        "names": hash_values("blake3", names=(start.model_name, *start.api.more_model_names))[:16],
        "adapters": hash_values("blake3", adapters=adapters)[:16],
    }


def _try_open(otherwise: str, open_database: Callable[[], T]) -> T | None:
    """Return None if the database cannot be opened, as when there is no room for its file: all else is served."""
    try:
        return open_database()
    except sqlite3.DatabaseError as error:
        logger.warning("%s: %s", otherwise, error)
        return None


def _open_span_export(endpoint: str | None) -> "SpanExport | None":
    if endpoint is None:
        return None
    # An optional extra, which need not be installed.
    from keepsight.observe.export_spans import SpanExport

    return SpanExport.to_endpoint(endpoint)


def main(control: ProcessEnd) -> int:
    start = control.receive()
    assert isinstance(start, StartFrontend)
    check_program_is(start.program)
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIdFilter())
    process = FrontendProcess(start)
    control.listen(process.act_on)
    try:
        process.serve(control)
    finally:
        process.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
