"""Opens an engine in the caller's process: loads it, and gives it a client that makes its own pixels."""

from contextlib import ExitStack
from functools import partial

from keepsight.config import Config
from keepsight.count_cores import count_cores
from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.engine.load_engine import load_engine
from keepsight.engine.pixel_source import open_pixel_source
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixels.pixel_cache import open_pixel_cache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.ipc.pixel_mode import PixelMode, choose_size_and_mode
from keepsight.ipc.run_directory import RunDirectory, clean_dead
from keepsight.observe.catalogue import FETCHED
from keepsight.observe.counters import Counters
from keepsight.runner.openmp_team import set_team_size


def open_engine(config: Config, preparer: RequestPreparer) -> InProcessEngine:
    """Return an engine, to be started and closed. Limit the prompts of `preparer` to what the engine has room for."""
    # Before the model is loaded, which may need that memory.
    clean_dead()
    engine = load_engine(config, preparer.max_model_len, preparer.processor, preparer.tokenizer.eos_token_ids)
    preparer.max_model_len = engine.max_model_len
    with ExitStack() as undoing:  # if this fails, threads and files would stay, more with each try
        undoing.callback(engine.close)
        # Only pixels in files need a directory that processes share.
        is_in_files = config.mm_processor_cache_type in ("shm", "shared") and config.mm_processor_cache_gb != 0
        run_directory = RunDirectory.create() if is_in_files and engine.takes_media else None
        if run_directory is not None:
            undoing.callback(run_directory.close)
        mode: PixelMode = "none"
        if engine.takes_media:
            config, mode = choose_size_and_mode(config, 1, run_directory)
        folder = None if run_directory is None else run_directory.path
        cache = open_pixel_cache(mode, config, folder)
        undoing.callback(cache.close)
        counters = Counters()
        preparer.intake.watch_downloads(lambda modality: counters.add(FETCHED[modality]))
        num_workers = config.media_workers or count_cores()
        media_pool = MediaPool(
            num_workers,
            cache,
            verify_hits=config.verify_hits,
            counters=counters,
            # OpenMP would count thread teams of these threads with the model's, and slow each of its matrix products.
            on_thread_start=partial(set_team_size, 1),
        )
        source = open_pixel_source(mode, config, folder)
        opened = InProcessEngine(engine, media_pool, source, run_directory, counters)
        preparer.prefer_held(opened.is_held)
        undoing.pop_all()
    return opened
