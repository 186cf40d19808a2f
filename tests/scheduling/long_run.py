"""Sets the number of examples of property tests: small by default; `KEEPSIGHT_LONG_TESTS=N` multiplies it by N."""

import os

from hypothesis import settings

LONG_FACTOR = int(os.environ.get("KEEPSIGHT_LONG_TESTS", "1"))


def thorough(max_examples: int, num_steps: int = 50) -> settings:
    return settings(max_examples=max_examples * LONG_FACTOR, stateful_step_count=num_steps)
