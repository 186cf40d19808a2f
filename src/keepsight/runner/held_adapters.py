"""The adapters that requests may name, for lookup by the runner; each is held from when it is loaded.

Lookups and loads may be on different threads. Invariant: the weights a request names were read under that digest.
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
        """Load an adapter. Return it as requests must name it.

        Raises CheckpointError, and InvalidArgumentError if too many are held already.
        """
        began, folder = time.monotonic(), AdapterFolder.read(path)
        adapter = folder.as_adapter(name)
        with self._loading:
            if adapter not in self._weights:
                self._check_room()
                weights = self._load(folder)
                assert adapter.changes_encoder or weights.tower is None, "its embeddings would be everybody's"
                self._weights[adapter] = weights
                logger.info("adapter %s from %s loaded in %.1f s", name, path, time.monotonic() - began)
        return adapter

    def _load(self, folder: AdapterFolder) -> AdapterWeights:
        try:
            weights = self._model.load_adapter(folder, self._max_rank)
        except torch.OutOfMemoryError as error:
            raise CheckpointError(folder.path, f"does not fit into the device's memory: {error}") from error
        if self._model.place.device.type == "cuda":  # before another thread's stream reads them
            torch.cuda.current_stream().synchronize()
        return weights

    def _check_room(self) -> None:
        if len(self._weights) >= self._max_adapters:
            raise InvalidArgumentError(
                "max_loras", f"allows {self._max_adapters} adapters, and as many are loaded already"
            )


def find_weights(held: HeldAdapters | None, adapter: Adapter | None) -> AdapterWeights | None:
    """Return the adapter's weights, if there is an adapter; `held` is None if requests may not name any."""
    if adapter is None:
        return None
    assert held is not None, "a request names an adapter, and none was ever loaded"
    return held[adapter]
