"""The adapters that requests may name, as the runner looks them up: all are held from their loading on.

Who asks may be on another thread than who loads.  Invariant: what a request names is what was read under that digest.
"""

import logging
import threading
import time
from pathlib import Path

import torch

from keepsight.adapter_folder import AdapterFolder
from keepsight.errors import CheckpointError, InvalidArgumentError
from keepsight.models.adapter_weights import AdapterWeights
from keepsight.models.model import Model
from keepsight.requests import Adapter

logger = logging.getLogger(__name__)


class HeldAdapters:
    def __init__(self, model: Model, max_adapters: int, max_rank: int) -> None:
        self._model, self._max_adapters, self._max_rank = model, max_adapters, max_rank
        self._weights: dict[Adapter, AdapterWeights] = {}
        self._loading = threading.Lock()

    def __getitem__(self, adapter: Adapter) -> AdapterWeights:
        return self._weights[adapter]

    def load(self, name: str, path: Path) -> Adapter:
        """As requests are to name it.  Raises CheckpointError, and InvalidArgumentError where there is no room."""
        began, folder = time.monotonic(), AdapterFolder.read(path)
        adapter = folder.as_adapter(name)
        with self._loading:
            if adapter not in self._weights:
                self._check_room()
                weights = self._load(folder)
                assert adapter.changes_encoder or weights.tower is None, "its embeddings would be everybody's"
                self._weights[adapter] = weights
                logger.info("adapter %s of %s loaded in %.1f s", name, path, time.monotonic() - began)
        return adapter

    def _load(self, folder: AdapterFolder) -> AdapterWeights:
        try:
            weights = self._model.load_adapter(folder, self._max_rank)
        except torch.OutOfMemoryError as error:
            raise CheckpointError(folder.path, f"does not fit the device: {error}") from error
        if self._model.place.device.type == "cuda":  # before another thread's stream reads them
            torch.cuda.current_stream().synchronize()
        return weights

    def _check_room(self) -> None:
        if len(self._weights) >= self._max_adapters:
            raise InvalidArgumentError(
                "max_loras", f"allows {self._max_adapters}, and so many adapters are held already"
            )


def find_weights(held: HeldAdapters | None, adapter: Adapter | None) -> AdapterWeights | None:
    """`held`: None where no request may name one."""
    if adapter is None:
        return None
    assert held is not None, "a request names an adapter, and none was ever loaded"
    return held[adapter]
