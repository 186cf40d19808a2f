"""Counters of processes: how they are summed, and which survive the process."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keepsight.observe.catalogue import (
    BOUNDS,
    ENCODED,
    ENCODER,
    GAUGES,
    METRICS,
    NUM_SLOTS,
    SET_ASIDE,
    SLOTS,
    STAGE,
    slot_of,
)
from keepsight.observe.counters import FOLDER, PAGE_BYTES, Counters
from keepsight.observe.process_memory import resident_bytes, with_descendants
from keepsight.observe.totals import Totals
from keepsight.observe.write_prometheus import write_prometheus

RUNNING = slot_of("num_requests_running")


def served(totals: Totals) -> dict[str, dict[tuple[str, ...], float]]:
    """Parse the served metrics with Prometheus' own parser, by name and label values."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(write_prometheus(totals)):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def in_another_process(folder: Path, process: str, *calls: str) -> None:
    program = "from keepsight.observe.counters import Counters\nfrom pathlib import Path\n"
    program += f"counters = Counters.open(Path({str(folder)!r}), {process!r})\n" + "\n".join(calls)
    program += "\nimport os; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program], check=False)


def test_every_series_has_its_own_slots() -> None:
    widths = [each.slots_per_series for each in METRICS for _ in each.series]
    assert sorted(SLOTS.values()) == list(SLOTS.values())
    assert sum(widths) == NUM_SLOTS
    with pytest.raises(ValueError):
        slot_of("media_encoded_total", "sound")


def test_what_waits_is_told_with_its_number() -> None:
    [waiting] = [each.meaning for each in METRICS if each.name == "keepsight_num_requests_waiting"]
    assert all(awaited in waiting for awaited in ("a seat", "their inputs", "requests that wait for an engine"))


def test_counts_of_frontends_and_engines_are_summed(tmp_path: Path) -> None:
    for process in ("frontend-0", "frontend-1", "engine-0"):
        counters = Counters.open(tmp_path, process)
        counters.add(ENCODED["image"], 2)
        counters.set(RUNNING, 3)
    totals = served(Totals.of_server(tmp_path))
    assert totals["keepsight_media_encoded_total"]["image",] == 6
    assert totals["keepsight_num_requests_running"][()] == 9


def test_a_tier_shared_by_all_engines_is_counted_once(tmp_path: Path) -> None:
    for rank, num_bytes in enumerate((100, 300)):
        counters = Counters.open(tmp_path, f"engine-{rank}")
        for tier in ("host", "disk"):
            counters.set_all(ENCODER[tier].sizes(num_bytes, 1000, num_bytes // 100))
        counters.set(SET_ASIDE["encoder", "disk"], 1)
    numbers = Totals.of_server(tmp_path).numbers
    assert numbers[SET_ASIDE["encoder", "disk"]] == 1
    assert [numbers[slot] for slot in ENCODER["host"].sizes(0, 0, 0)] == [400, 2000, 4]
    assert [numbers[slot] for slot in ENCODER["disk"].sizes(0, 0, 0)] == [300, 1000, 3]


def test_counters_survive_a_killed_process_and_its_gauges_do_not(tmp_path: Path) -> None:
    in_another_process(tmp_path, "engine-0", f"counters.add({ENCODED['image']}, 5)", f"counters.set({RUNNING}, 7)")
    totals = Totals.of_server(tmp_path)
    assert (totals.numbers[ENCODED["image"]], totals.numbers[RUNNING]) == (5, 0)
    successor = Counters.open(tmp_path, "engine-0")
    successor.follow(ENCODED["image"], 1)
    successor.set(RUNNING, 1)
    totals = Totals.of_server(tmp_path)
    assert (totals.numbers[ENCODED["image"]], totals.numbers[RUNNING]) == (6, 1)


def test_a_successor_s_gauges_start_at_zero(tmp_path: Path) -> None:
    Counters.open(tmp_path, "engine-0").set(ENCODER["device"].num_bytes, 100)
    Counters.open(tmp_path, "engine-0")
    assert all(Totals.of_server(tmp_path).numbers[slot] == 0 for slot in GAUGES)


def test_counting_works_where_no_page_can_be_created(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    counters = Counters.open(tmp_path, "engine-0")
    counters.add(ENCODED["image"])
    assert counters.numbers()[ENCODED["image"]] == 1


def test_a_page_being_created_is_not_read(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "engine-0").write_bytes(b"\0" * (PAGE_BYTES // 2))
    assert not any(Totals.of_server(tmp_path).numbers)


def test_prometheus_reads_every_metric(tmp_path: Path) -> None:
    counters = Counters.open(tmp_path, "frontend-0")
    for slot in range(NUM_SLOTS):
        counters.add(slot, 1)
    text = write_prometheus(Totals.of_server(tmp_path))
    families = {each.name: each for each in text_string_to_metric_families(text)}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.meaning)
    assert sum(map(len, (each.samples for each in families.values()))) > len(SLOTS)


def test_a_histogram_counts_each_time_in_every_bucket_that_it_fits() -> None:
    counters = Counters()
    for seconds in (0.0001, 0.002, 5000.0):
        counters.observe(STAGE["fetch"], seconds)
    found = served(Totals.of_pages([("frontend", counters.numbers())]))
    buckets = {key[1]: value for key, value in found["keepsight_stage_seconds_bucket"].items() if key[0] == "fetch"}
    assert [buckets[str(bound)] for bound in BOUNDS] == [*[1] * 4, *[2] * (len(BOUNDS) - 4)]
    assert buckets["+Inf"] == found["keepsight_stage_seconds_count"]["fetch",] == 3
    assert found["keepsight_stage_seconds_sum"]["fetch",] == pytest.approx(5000.0021)


def test_buckets_reach_from_a_hit_to_a_long_answer_in_small_factors() -> None:
    assert (BOUNDS[0], BOUNDS[-1]) == (0.0001, 1000.0)
    assert all(1 < above / below <= 2.5 + 1e-9 for below, above in pairwise(BOUNDS))


def test_kv_cache_usage_is_the_share_over_all_engines() -> None:
    pages = []
    for in_use in (10, 40):
        counters = Counters()
        counters.set(slot_of("kv_cache_blocks"), 100)
        counters.set(slot_of("kv_cache_blocks_in_use"), in_use)
        pages.append(("engine", counters.numbers()))
    assert served(Totals.of_pages(pages))["keepsight_kv_cache_usage_perc"][()] == 0.25


def test_memory_is_reported_per_kind_of_process(tmp_path: Path) -> None:
    Counters.open(tmp_path, "frontend-0")
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        child_bytes = resident_bytes(child.pid)
        memory = served(Totals.of_server(tmp_path))["keepsight_process_resident_memory_bytes"]
    finally:
        child.communicate()
    resident = int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    assert memory["frontend",] == pytest.approx(resident, rel=0.1)
    # Other tests may also have child processes of this process.
    assert 0 < child_bytes <= memory["media_worker",]


def test_a_process_that_ends_during_the_search_has_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(path: object) -> NoReturn:
        raise ProcessLookupError(path)

    for listing in ("listdir", "scandir"):
        monkeypatch.setattr(os, listing, end)
    assert list(with_descendants(os.getpid())) == [os.getpid()]
