"""Fuzz the codec with any number of corrupted messages:  python -m tests.ipc.long_fuzz --inputs 1000000 [--seed 0]

Each is either accepted, and then encodes to the same bytes, or raises WireError; anything else ends the run.
"""

import argparse
import random
import time
import warnings

from hypothesis import HealthCheck, Phase, given, seed, settings

from keepsight.errors import WireError
from keepsight.ipc.codec import Frame, decode_from_engine, decode_to_engine, encode_from_engine, encode_to_engine
from tests.ipc.drawn_messages import outputs, spoil, to_engine
from tests.ipc.test_codec import assert_round_trips_or_is_refused

NUM_MESSAGES = 2000


def draw_messages(seed_: int) -> list[list[Frame]]:
    messages: list[list[Frame]] = []

    @seed(seed_)
    @settings(
        max_examples=NUM_MESSAGES, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(to_engine.map(encode_to_engine) | outputs.map(encode_from_engine))
    def collect(frames: list[Frame]) -> None:
        messages.append(frames)

    collect()
    return messages


def is_accepted(frames: list[bytes]) -> bool:
    for decode in (decode_to_engine, decode_from_engine):
        try:
            decode(frames)
        except WireError:
            continue
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rng, messages = random.Random(args.seed), draw_messages(args.seed)
    began, num_accepted, num_changed = time.monotonic(), 0, 0
    for _ in range(args.inputs):
        original = rng.choice(messages)
        frames = spoil(original, rng)
        try:
            assert_round_trips_or_is_refused(frames)
        except BaseException:
            print("frames:", frames)
            raise
        is_changed = frames != [bytes(frame) for frame in original]
        num_changed += is_changed
        num_accepted += is_changed and is_accepted(frames)
    seconds = time.monotonic() - began
    print(f"{args.inputs} inputs made of {len(messages)} messages, seed {args.seed}, in {seconds:.0f} s:")
    print(f"{num_changed} changed, {num_accepted} of these other messages, {num_changed - num_accepted} refused")


if __name__ == "__main__":
    main()
