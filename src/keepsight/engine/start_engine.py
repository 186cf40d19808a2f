"""An engine in the caller's process: loaded, and asked by a client that makes its own pixels."""

from keepsight.config import Config
from keepsight.count_cores import count_cores
from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.engine.load_engine import load_engine
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixel_cache import open_pixel_cache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.ipc.pixel_mode import cache_bytes


def start_engine(config: Config, preparer: RequestPreparer) -> InProcessEngine:
    """What prompts may be prepared is limited to what the engine has room for."""
    engine = load_engine(config, preparer.max_model_len, preparer.image_config, preparer.tokenizer.eos_token_ids)
    preparer.max_model_len = engine.max_model_len
    media_pool = MediaPool(
        config.media_workers or count_cores(),
        open_pixel_cache("processor_only" if cache_bytes(config) else "none", config),
        verify_hits=config.verify_hits,
    )
    return InProcessEngine(engine.scheduler, engine.runner, engine.inbox, media_pool)
