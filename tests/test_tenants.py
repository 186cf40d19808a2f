"""Two tenants, one picture: counters show that no cache shares an entry between them."""

from typing import Any

import pytest

from keepsight import LLM, SamplingParams
from keepsight.observe.catalogue import PREPROCESSED
from keepsight.runner import model_runner
from keepsight.runner.encode_media import encode_media
from tests.counted import counted
from tests.drawn import draw
from tests.place import placed

# Long enough to fill a block of the prefix cache before the picture.
PROMPT = "<start_of_turn>user\nOne two three four five six seven eight nine ten.<start_of_image>What is this?"


def test_two_tenants_never_share_an_entry_of_any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []

    def encode(*args: Any) -> Any:
        encoded.append(args)
        return encode_media(*args)

    monkeypatch.setattr(model_runner, "encode_media", encode)
    picture = draw(5).picture

    with LLM(**placed()) as llm:

        def ask_as(salt: str | None) -> tuple[float, int, bool]:
            """Return the numbers of preprocessed and encoded pictures, and whether keys and values were found."""
            pool = llm.engine._media_pool
            [num_made], num_encoded = counted(pool, PREPROCESSED), len(encoded)
            prompt = {"prompt": PROMPT, "multi_modal_data": {"image": picture}, "cache_salt": salt}
            [output] = llm.generate(prompt, SamplingParams(max_tokens=1))
            return counted(pool, PREPROCESSED)[0] - num_made, len(encoded) - num_encoded, bool(output.num_cached_tokens)

        tenants = ("a", "b", None)
        assert [ask_as(salt) for salt in tenants] == [(1, 1, False)] * 3
        assert [ask_as(salt) for salt in tenants] == [(0, 0, True)] * 3
        # Each cache alone: entries that remain are found by their own tenant and by no other.
        llm.reset_prefix_cache()
        assert [ask_as(salt) for salt in ("a", "new")] == [(0, 0, False), (1, 1, False)]
        llm.reset_prefix_cache()
        llm.reset_encoder_cache()
        assert [ask_as(salt) for salt in ("b", "newer")] == [(0, 1, False), (1, 1, False)]
