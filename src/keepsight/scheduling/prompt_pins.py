"""Pins beginnings of prompts that callers want kept: keys and values, and the embeddings of their media.

They are pinned once they are computed, when the answer begins. The caller supplies the time: nothing here has a clock.
"""

from keepsight.scheduling.encoder_cache_manager import EncoderCacheManager
from keepsight.scheduling.kv_cache_manager import KvCacheManager
from keepsight.scheduling.request_state import RequestState


class PromptPins:
    def __init__(self, kv_cache: KvCacheManager, encoder_cache: EncoderCacheManager) -> None:
        self._kv_cache, self._encoder_cache = kv_cache, encoder_cache
        self._now = 0.0

    def note_time(self, now: float) -> None:
        self._now = now
        self._kv_cache.end_pins(now)
        self._encoder_cache.end_pins(now)

    def begin(self, state: RequestState) -> None:
        for pin in state.request.pins:
            until = self._now + pin.seconds
            self._kv_cache.pin_prefix(state.hasher.hashes, pin.num_tokens, until)
            for item, key in zip(state.media, state.encoder_keys, strict=True):
                if item.span.start < pin.num_tokens:
                    self._encoder_cache.pin(key, until)
