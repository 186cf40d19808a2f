"""From a configuration to an engine that runs: the model loaded, the memory measured, everything put together."""

import torch

from keepsight.config import Config
from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.engine.inbox import Inbox
from keepsight.engine.measure_machine import count_cores, measure_machine
from keepsight.engine.resolve_config import ModelSize, resolve_config
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixel_cache import open_pixel_cache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.ipc.pixel_mode import cache_bytes
from keepsight.models.model import Model
from keepsight.runner.load_runner import load_model_for, load_runner
from keepsight.scheduling.scheduler import Scheduler


def start_engine(config: Config, preparer: RequestPreparer) -> InProcessEngine:
    """What prompts may be prepared is limited to what the engine has room for."""
    model = load_model_for(config)
    size = measure_model(model, preparer.max_model_len)
    engine_config = resolve_config(config, size, measure_machine(model.place.device))
    preparer.max_model_len = engine_config.scheduler.max_model_len
    inbox, end_ids = Inbox(), preparer.tokenizer.eos_token_ids
    runner = load_runner(
        model,
        preparer.image_config,
        engine_config,
        end_ids,
        inbox.wake,
        encoder_share=config.encoder_share,
        embeddings_device="cpu" if config.mm_cache_device == "cpu" else None,
    )
    media_pool = MediaPool(
        config.media_workers or count_cores(),
        open_pixel_cache("processor_only" if cache_bytes(config) else "none", config),
        verify_hits=config.verify_hits,
    )
    return InProcessEngine(Scheduler(engine_config, end_ids), runner, inbox, media_pool)


def measure_model(model: Model, max_model_len: int) -> ModelSize:
    shape = model.shape
    # The model alone knows how wide its embeddings are.
    embedding = model.embed_tokens(torch.zeros(1, dtype=torch.long, device=model.place.device))
    return ModelSize(
        max_model_len=max_model_len,
        tokens_per_item=shape.tokens_per_image,
        bytes_per_position=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.place.dtype.itemsize,
        bytes_per_embedding=embedding.nbytes,
    )
