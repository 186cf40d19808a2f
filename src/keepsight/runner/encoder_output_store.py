"""The embeddings of media, by their encoder keys: memory only.  What is kept and for how long is decided elsewhere.

Every entry has its own memory, shared at most with tiers: dropping it frees exactly its bytes, whatever it was computed
together with.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class EncoderOutputStore:
    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._entries: dict[str, Tensor] = {}  # each [tokens, hidden]

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: str, embeddings: Tensor) -> Tensor:
        held = torch.empty_like(embeddings, device=self.device, memory_format=torch.contiguous_format)
        self._entries[key] = held.copy_(embeddings)
        return held

    def adopt(self, key: str, embeddings: Tensor) -> None:
        """Nobody may change them any more; copied only from another device, which may go on when this returns."""
        self._entries[key] = embeddings.to(self.device, non_blocking=True)

    def get(self, key: str) -> Tensor:
        assert key in self._entries, f"no embeddings are held under {key}"
        return self._entries[key]

    def get_or_put(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """As vLLM's RFC 21113 calls it; the engine, which knows what is held, puts and gets."""
        held = self._entries.get(key)
        return self.put(key, compute()) if held is None else held

    def drop(self, key: str) -> None:
        self._entries.pop(key, None)
