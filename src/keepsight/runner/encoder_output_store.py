"""Holds the embeddings of media by encoder key. What is kept and for how long is decided elsewhere.

Each entry has its own memory, shared at most with tiers: dropping it frees exactly its bytes, whatever it was batched
with when it was computed.
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
        """Take over embeddings, which must not be changed any more.

        They are copied only between devices, and that copy may still be running when this returns.
        """
        self._entries[key] = embeddings.to(self.device, non_blocking=True)

    def get(self, key: str) -> Tensor:
        assert key in self._entries, f"no embeddings are held under {key}"
        return self._entries[key]

    def get_or_put(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return the held embeddings, or compute and store them: the interface of vLLM's RFC 21113.

        The engine knows what is held, and uses `put` and `get`.
        """
        held = self._entries.get(key)
        return self.put(key, compute()) if held is None else held

    def drop(self, key: str) -> None:
        self._entries.pop(key, None)
