"""Pinned prompts stay in both caches while others come and go, as long as the limits allow."""

from keepsight.requests import EngineRequest, PromptPin
from keepsight.scheduling.eviction_order import SECONDS_BETWEEN_LOOKS
from tests.scheduling.drive import TOKENS_PER_PICTURE, Drive, make_config, make_request

HALF_AN_HOUR = 1800.0


def pinned(request_id: str, num_tokens: int, *parts: int | str, seconds: float = HALF_AN_HOUR) -> EngineRequest:
    return make_request(request_id, *parts, pins=(PromptPin(num_tokens, seconds),))


def crowd(drive: Drive, num_requests: int = 20) -> None:
    """Send requests of other tenants one by one; each fills blocks and the encoder cache."""
    for index in range(num_requests):
        drive.run(make_request(f"other {len(drive.requests)}", 8, f"picture {index}", 8, cache_salt=f"salt {index}"))


def ask_again(drive: Drive, *parts: int | str) -> int:
    """Return how many tokens were cached."""
    request_id = f"again {len(drive.requests)}"
    drive.run(make_request(request_id, *parts))
    return drive.cached[request_id, 0]


def test_without_a_pin_a_crowd_evicts_everything() -> None:
    drive = Drive(make_config(num_blocks=16, num_pictures=4))
    drive.run(make_request("a", 8, "cat", 6))
    crowd(drive)
    assert ask_again(drive, 8, "cat", 6) == 0


def test_the_blocks_that_the_pinned_tokens_fill_stay_and_no_more() -> None:
    drive = Drive(make_config(num_blocks=16, num_pictures=4))
    drive.run(pinned("a", 11, 8, "cat", 6))
    crowd(drive)
    assert ask_again(drive, 8, "cat", 6) == 8
    drive.expect_right_answers()


def test_embeddings_of_media_that_begin_within_stay_too() -> None:
    drive = Drive(make_config(num_blocks=16, num_pictures=4))
    drive.run(pinned("a", 8 + TOKENS_PER_PICTURE, 8, "cat", "dog"))
    drive.scheduler.reset(prefix=True, encoder=False)
    crowd(drive)
    drive.needed.clear()
    drive.run(make_request("b", 3, "cat", 1, "dog"))
    assert [media_hash for _, media_hash in drive.needed] == ["dog"]


def test_a_pin_ends_with_its_time() -> None:
    drive = Drive(make_config(num_blocks=16, num_pictures=4))
    drive.scheduler.pins.note_time(1000)
    drive.run(pinned("a", 12, 8, "cat", 6))
    drive.scheduler.pins.note_time(1000 + HALF_AN_HOUR - 1)
    crowd(drive)
    assert ask_again(drive, 8, "cat", 6) == 12
    assert drive.runner.encoded.count("cat") == 1
    drive.scheduler.pins.note_time(1000 + HALF_AN_HOUR + SECONDS_BETWEEN_LOOKS)
    crowd(drive)
    assert ask_again(drive, 8, "cat", 6) == 0
    assert drive.runner.encoded.count("cat") == 2


def test_the_time_of_a_pin_begins_with_the_answer_and_not_anew_with_each_token() -> None:
    drive = Drive(make_config(num_blocks=16, num_pictures=4))
    drive.scheduler.pins.note_time(1000)
    drive.add(pinned("a", 12, 8, "cat", 6))
    while not drive.tokens:
        drive.step()
    drive.scheduler.pins.note_time(1000 + HALF_AN_HOUR - 1)
    drive.run()
    drive.scheduler.pins.note_time(1000 + HALF_AN_HOUR + SECONDS_BETWEEN_LOOKS)
    crowd(drive)
    assert ask_again(drive, 8, "cat", 6) == 0


def test_a_prompt_that_was_known_is_pinned_as_well() -> None:
    """Its first token is recalled, so nothing is computed first."""
    drive = Drive(make_config(num_blocks=16, num_pictures=4))
    drive.run(make_request("a", 8, "cat", 6))
    drive.run(pinned("b", 20, 8, "cat", 6))
    assert drive.scheduler.kv_cache.ends.num_found == 1
    crowd(drive)
    assert ask_again(drive, 8, "cat", 6) == 19


def test_pins_leave_half_of_the_cache_to_others_and_keep_what_they_can_from_the_front() -> None:
    drive = Drive(make_config(num_blocks=16))
    drive.run(pinned("a", 60, 40))
    drive.scheduler.check_invariants()
    crowd(drive)
    assert ask_again(drive, 40) == 8 * 4


def test_pinned_blocks_go_before_a_request_waits_for_them() -> None:
    drive = Drive(make_config(num_blocks=16))
    drive.run(pinned("a", 32, 32))
    drive.run(make_request("b", 58, cache_salt="x", max_tokens=5))
    drive.expect_right_answers()
    assert ask_again(drive, 32) == 0


def test_a_reset_ends_pins() -> None:
    drive = Drive(make_config(num_blocks=16, num_pictures=4))
    drive.run(pinned("a", 20, 8, "cat", 6))
    drive.scheduler.reset(prefix=True, encoder=True)
    assert ask_again(drive, 8, "cat", 6) == 0
    crowd(drive)
    assert ask_again(drive, 8, "cat", 6) == 0


def test_a_pin_on_less_than_a_block_pins_no_block() -> None:
    drive = Drive(make_config(num_blocks=16))
    drive.run(pinned("a", 3, 2, TOKENS_PER_PICTURE))
    crowd(drive)
    assert ask_again(drive, 2, TOKENS_PER_PICTURE) == 0
