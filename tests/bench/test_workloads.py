import json
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from keepsight.bench.workloads import WORKLOADS, Conversation, WorkloadOptions, draw_workload

OPTIONS = WorkloadOptions(seed=7, num_requests=6, picture_size=(32, 32), pool_size=4, words_per_picture=30)


def draw(name: str, options: WorkloadOptions = OPTIONS) -> tuple[list[Conversation], list[Conversation]]:
    workload = draw_workload(name, options)
    return list(workload.before), list(islice(workload.timed, options.num_requests))


def parts(conversations: list[Conversation]) -> list[dict[str, Any]]:
    return [json.loads(part) for each in conversations for turn in each.turns for part in turn]


def pictures(conversations: list[Conversation]) -> list[str]:
    return [part["image_url"]["url"] for part in parts(conversations) if part["type"] == "image_url"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_draws_the_same_and_another_seed_something_else(name: str) -> None:
    assert draw(name) == draw(name) != draw(name, replace(OPTIONS, seed=8))


def test_workloads_share_no_pictures() -> None:
    several = [*((name, OPTIONS) for name in WORKLOADS), ("zipf", replace(OPTIONS, reuse_percent=50))]
    drawn = [{url for side in draw(name, options) for url in pictures(side)} for name, options in several]
    assert len(set().union(*drawn)) == sum(map(len, drawn))


def test_cold_pictures_are_all_new() -> None:
    before, timed = draw("cold")
    shown = pictures(before) + pictures(timed)
    assert len(set(shown)) == len(shown) == OPTIONS.num_warm_up + OPTIONS.num_requests


@pytest.mark.parametrize("name", ["same-picture-same-prompt", "same-picture-new-prompt", "new-prompt-same-picture"])
def test_a_known_picture_is_sent_first_even_without_warm_up(name: str) -> None:
    before, timed = draw(name, replace(OPTIONS, num_warm_up=0))
    assert set(pictures(before)) == set(pictures(timed))
    assert len({each.turns for each in timed}) == (1 if name == "same-picture-same-prompt" else OPTIONS.num_requests)


def test_texts_are_as_long_as_a_picture_and_its_question() -> None:
    _, timed = draw("text-only")
    assert not pictures(timed)
    assert {len(part["text"].split()) for part in parts(timed)} == {20, 30}


@pytest.mark.parametrize(("percent", "from_pool"), [(0, 0.0), (100, 1.0)])
def test_zipf_takes_the_given_share_of_its_pictures_from_the_pool(percent: int, from_pool: float) -> None:
    before, timed = draw("zipf", replace(OPTIONS, num_requests=30, reuse_percent=percent))
    pool, shown = set(pictures(before)), pictures(timed)
    assert len(pool) == OPTIONS.pool_size
    assert sum(url in pool for url in shown) == from_pool * len(shown)


def test_zipf_shows_some_pictures_more_often_than_others() -> None:
    _, timed = draw("zipf", replace(OPTIONS, num_requests=100, reuse_percent=100))
    shown = pictures(timed)
    counts = sorted(shown.count(url) for url in set(shown))
    assert counts[-1] > 2 * counts[0]


def test_a_conversation_sends_its_picture_only_once() -> None:
    _, timed = draw("multi-turn", replace(OPTIONS, num_requests=8, num_turns=4))
    assert [len(each.turns) for each in timed] == [4, 4]
    assert [len(pictures([Conversation((turn,))])) for turn in timed[0].turns] == [1, 0, 0, 0]


def test_timed_requests_are_counted_where_their_number_is_finite() -> None:
    counts = {name: draw_workload(name, replace(OPTIONS, num_turns=4)).num_timed for name in WORKLOADS}
    exceptions = {"multi-turn": 8, "text-beside-pictures": None}
    assert counts == dict.fromkeys(WORKLOADS, OPTIONS.num_requests) | exceptions


def test_many_known_pictures_are_sent_in_another_order() -> None:
    before, timed = draw("many-pictures")
    assert set(pictures(timed)) <= set(pictures(before))
    assert {len(pictures([each])) for each in timed} == {OPTIONS.pictures_per_request}
    assert len({tuple(pictures([each])) for each in timed}) > 1


def test_a_restart_lies_between_sending_pictures_twice() -> None:
    assert draw_workload("restart", OPTIONS).restarts_before_timed
    before, timed = draw("restart")
    assert pictures(before) == pictures(timed)
