"""Which sequences wait for a prefix that another one computes, and when they go on."""

from collections.abc import Sequence

import pytest

from keepsight.scheduling.kv_cache_manager import KvCacheManager, PrefixHit
from keepsight.scheduling.request_state import ParkedFor
from tests.scheduling.drive import Drive, make_config, make_request


def long_drive() -> Drive:
    """A prompt of 80 takes five steps."""
    return Drive(make_config(num_blocks=200, max_num_batched_tokens=16))


def waiting(drive: Drive) -> set[str]:
    return {state.request.request_id for state in drive.scheduler.lineup.parked_for(ParkedFor.PREFIX)}


def test_followers_wait_to_the_end_of_what_they_share_and_are_not_woken_by_each_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    find_prefix = KvCacheManager.find_prefix

    def look(manager: KvCacheManager, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        looks.append(num_tokens)
        return find_prefix(manager, hashes, num_tokens)

    monkeypatch.setattr(KvCacheManager, "find_prefix", look)
    drive = long_drive()
    for index in range(6):
        drive.add(make_request(f"r{index}", 80, "cat", index + 1))
    drive.step()
    assert waiting(drive) == {f"r{index}" for index in range(1, 6)}
    num_looks = len(looks)
    for _ in range(3):
        drive.step()
    assert waiting(drive) == {f"r{index}" for index in range(1, 6)}
    assert len(looks) == num_looks
    drive.expect_all_answered()


def test_a_follower_goes_on_where_its_prompt_parts_from_the_one_that_is_computed() -> None:
    drive = long_drive()
    drive.add(make_request("long", 80, 3))
    drive.add(make_request("short", 32, "cat", 3))
    drive.step()
    assert waiting(drive) == {"short"}
    while waiting(drive):
        drive.step()
    assert all(state.num_computed < 80 for state in drive.scheduler.lineup.running), "before the long one is done"
    drive.expect_all_answered()
    assert drive.cached["short", 0] == 32


def test_followers_go_on_when_the_one_that_computes_leaves() -> None:
    drive = long_drive()
    drive.add(make_request("first", 80, 3))
    drive.add(make_request("second", 80, "cat", 3))
    drive.step()
    drive.step()
    assert waiting(drive) == {"second"}
    drive.abort("first")
    drive.step()
    assert waiting(drive) == set()
    drive.expect_all_answered()
