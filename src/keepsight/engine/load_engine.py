"""Loads an engine: loads the model, measures the memory, and derives the engine's configuration."""

from concurrent.futures import wait
from contextlib import ExitStack

from keepsight.checkpoint_folder import check_is_folder
from keepsight.config import Config
from keepsight.end_ids import read_end_ids
from keepsight.engine.embedding_tiers import EmbeddingFormat, EmbeddingTiers
from keepsight.engine.inbox import Inbox
from keepsight.engine.loaded_engine import LoadedEngine
from keepsight.engine.machine_part import WHOLE_MACHINE, MachinePart
from keepsight.engine.measure_machine import measure_machine
from keepsight.engine.plan_tiers import TierPlan, describe_processor, plan_tiers
from keepsight.engine.prefix_tiers import PrefixTiers, StretchFormat
from keepsight.engine.resolve_config import ModelSize, resolve_config
from keepsight.engine_config import EngineConfig
from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.media import TOKENS_PER_STRIP
from keepsight.model_limits import ModelLimits
from keepsight.models.layers import name_of
from keepsight.models.model import Model
from keepsight.processor_config import NO_PROCESSOR, ProcessorConfig
from keepsight.runner.guide_tokens import GuideMaker
from keepsight.runner.load_runner import (
    choose_place,
    describe_decoder,
    describe_encoder,
    load_adapters,
    load_model_for,
    load_runner,
)
from keepsight.runner.lock_pages import make_page_lock
from keepsight.runner.openmp_team import keeping_team_size
from keepsight.scheduling.scheduler import Scheduler


@keeping_team_size()
def load_engine(
    config: Config,
    max_model_len: int,
    processor_config: ProcessorConfig | None,
    end_ids: frozenset[int],
    part: MachinePart = WHOLE_MACHINE,
    guides: GuideMaker | None = None,
) -> LoadedEngine:
    """Load an engine. `max_model_len` is the most that may be chosen; `guides` may already be prepared."""
    part.take_cores_and_device(config.device)
    tier_plan = plan_tiers(config)
    place = choose_place(config)
    # Not this engine's part of the memory: other engines may already have taken theirs.
    model = load_model_for(config, place, measure_machine(place.device).available_bytes)
    adapters = load_adapters(config, model)
    machine = part.of_memory(measure_machine(place.device))
    size = _measure_model(model, config, processor_config, max_model_len)
    engine_config = resolve_config(config, size, machine)
    inbox = Inbox()
    processor = describe_processor(processor_config or NO_PROCESSOR)
    with ExitStack() as undoing:  # if any step fails, the threads of earlier ones would stay, more with each try
        if tiers := _open_tiers(tier_plan, model, processor, config, engine_config, inbox):
            undoing.callback(tiers.close)
        if prefixes := _open_prefixes(tier_plan, model, processor, engine_config, inbox):
            undoing.callback(prefixes.close)
        runner = load_runner(
            config,
            model,
            processor_config,
            engine_config,
            end_ids,
            inbox.wake,
            guides or make_guides(config, end_ids),
            None if tiers is None else tiers.keeping,
            None if prefixes is None else prefixes.keep,
            adapters,
        )
        # After the runner, which refuses more blocks than there is memory for: lists of them would take it up.
        scheduler = Scheduler(engine_config, end_ids)
        if prefixes:
            prefixes.wait_opened()
        undoing.pop_all()
    return LoadedEngine(
        scheduler=scheduler,
        runner=runner,
        inbox=inbox,
        accepts_unrequested_pixels=not config.has_far_tiers,
        bytes_per_block=size.bytes_per_position * engine_config.kv_cache.block_size,
        computes_on_cores=model.place.device.type == "cpu",
        tiers=tiers,
        prefixes=prefixes,
        adapters=adapters,
    )


def _open_tiers(
    plan: TierPlan, model: Model, processor: str, config: Config, engine_config: EngineConfig, inbox: Inbox
) -> EmbeddingTiers | None:
    if not engine_config.scheduler.tokens_per_item:
        return None
    place, cache = model.place, engine_config.encoder_cache
    width = cache.bytes_per_embedding // place.dtype.itemsize
    format_ = EmbeddingFormat(name_of(place.dtype), width, cache.bytes_per_embedding)
    lock = make_page_lock(place.device)
    return plan.open(cache.host_bytes, format_, processor, describe_encoder(config, place), inbox.wake, lock)


def _open_prefixes(
    plan: TierPlan, model: Model, processor: str, config: EngineConfig, inbox: Inbox
) -> PrefixTiers | None:
    shape, place, blocks = model.shape, model.place, config.kv_cache
    numbers_of_block = blocks.block_size * shape.numbers_per_position
    format_ = StretchFormat(name_of(place.kv_dtype), (blocks.blocks_per_stretch, numbers_of_block))
    return plan.open_prefixes(format_, processor, describe_decoder(place), inbox.wake)


def load_engine_alone(config: Config, part: MachinePart = WHOLE_MACHINE) -> LoadedEngine:
    """Load an engine where no frontend in this process has read the checkpoint.

    A tokenizer is loaded only if the end ids are found nowhere else.
    """
    directory = config.directory
    check_is_folder(directory)
    limits = ModelLimits.from_checkpoint(directory, config.max_model_len)
    options = (config.image_backend, config.mm_processor_kwargs, config.model_impl)
    processor = ProcessorConfig.from_checkpoint(directory, *options)
    end_ids = read_end_ids(directory)
    if end_ids is None:
        end_ids = Tokenizer.from_checkpoint(directory).eos_token_ids
    guides = make_guides(config, end_ids)
    # Runs while the weights are loaded, so that no request has to wait for it later.
    preparing = guides.prepare()
    engine = load_engine(config, limits.max_model_len, processor, end_ids, part, guides)
    wait([preparing])
    return engine


def make_guides(config: Config, end_ids: frozenset[int]) -> GuideMaker:
    return GuideMaker(config.directory / "tokenizer.json", end_ids)


def _measure_model(
    model: Model, config: Config, processor_config: ProcessorConfig | None, max_model_len: int
) -> ModelSize:
    shape = model.shape
    if config.enable_prompt_embeds and shape.reads_tokens:
        why = "this model's layers also read the tokens themselves, so a prompt of embeddings has too little for them"
        raise InvalidArgumentError("enable_prompt_embeds", why)
    # An item with more tokens than there are positions is refused on arrival.
    largest = 0 if processor_config is None else min(processor_config.max_tokens_per_item, max_model_len)
    return ModelSize(
        max_model_len=max_model_len,
        tokens_per_item=shape.tokens_per_image or max(largest, TOKENS_PER_STRIP * config.enable_prompt_embeds),
        bytes_per_position=shape.numbers_per_position * model.place.kv_dtype.itemsize,
        bytes_per_embedding=shape.media_width * model.place.dtype.itemsize,
        bytes_per_state=shape.bytes_per_state,
        bytes_of_logits=shape.vocab_size * model.place.dtype.itemsize,
        sees_pictures_whole=shape.sees_pictures_whole,
    )
