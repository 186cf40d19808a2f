"""A loaded engine without a model, for tests of the engine loop: real scheduler, fake runner."""

from typing import Any

from keepsight.engine.engine_loop import Runner
from keepsight.engine.inbox import Inbox
from keepsight.engine.loaded_engine import LoadedEngine
from keepsight.engine_config import EngineConfig
from keepsight.scheduling.scheduler import Scheduler
from tests.scheduling.drive import END_IDS


def make_engine(config: EngineConfig, runner: Runner, inbox: Inbox, **differing: Any) -> LoadedEngine:
    fields: dict[str, Any] = {
        "accepts_unrequested_pixels": True,
        "bytes_per_block": 1024,
        "computes_on_cores": False,
        **differing,
    }
    return LoadedEngine(scheduler=Scheduler(config, END_IDS), runner=runner, inbox=inbox, **fields)
