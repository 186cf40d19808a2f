"""The account of a request: which cache answered, the work saved, and how it is reported."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepsight.media import Modality
from keepsight.observe.account import AccountBody, RequestAccount, ShownItem, Span
from keepsight.observe.account_ring import FOLDER, NUM_SLOTS, SLOT_BYTES, AccountRing, read_rings
from keepsight.observe.catalogue import BOUNDS, STAGE
from keepsight.observe.counters import Counters
from keepsight.observe.format_account import format_for_header, format_for_log, format_media_tokens
from keepsight.observe.request_observer import (
    ANSWER_TOKENS,
    ENDS,
    FIRST_TOKEN,
    NEXT_TOKEN,
    PROMPT_TOKENS,
    RequestObserver,
)
from keepsight.requests import MediaReport, RequestBegun
from tests.names import name_of

MADE = MediaReport(None, 1.04, 1.06, 1.03)
# The same, if it is not known when the pixels came.
UNTIMED = MediaReport(None, 1.04, 1.06)
# The slot of a histogram's sum, after its buckets.
SUM = len(BOUNDS) + 1


def make_account(*hashes: str, request_id: str = "r") -> RequestAccount:
    return RequestAccount(request_id, [ShownItem(each, 256) for each in hashes], 300, began=1.0)


def send(account: RequestAccount) -> None:
    """Send the pixels of all items."""
    for item in account.media:
        account.note_sent(item.media_hash)


def make_begun(*stories: MediaReport) -> RequestBegun:
    return RequestBegun("r", 1.01, 1.02, 1.1, stories)


def work_counts(body: AccountBody) -> tuple[int, ...]:
    return tuple(body.work.values())


def test_each_picture_names_the_cache_that_answered_and_the_stages_skipped() -> None:
    account = make_account("a", "b", "c", "d")
    account.note_made(1.01, 1.015, 1.02, ("d",))
    account.note_found_pixels("c")
    send(account)
    account.note_begun(make_begun(MediaReport("prefix"), MediaReport("disk", 1.02, 1.05), MADE, MADE))
    body = account.describe()
    assert [(each.answered_by, each.tier) for each in body.media] == [
        ("prefix", "device"),
        ("encoder", "disk"),
        ("processor", "host"),
        ("nobody", None),
    ]
    assert [each.skipped for each in body.media] == [
        ["decode", "resize", "transfer", "encode", "prefill"],
        ["decode", "resize", "transfer", "encode"],
        ["decode", "resize"],
        [],
    ]
    assert body.work == {"decoded": 1, "preprocessed": 1, "transferred": 2, "encoded": 2}


@pytest.mark.parametrize(
    ("modality", "skipped"),
    [("video", ["decode", "resize"]), ("audio", ["decode"]), ("image_embeds", []), ("prompt_embeds", [])],
)
def test_stages_that_an_item_of_its_kind_never_goes_through_are_not_skipped(
    modality: Modality, skipped: list[str]
) -> None:
    account = RequestAccount("r", [ShownItem("a", 4, modality), ShownItem("b", 4, modality)], 300, began=1.0)
    account.note_found_pixels("b")
    account.note_begun(make_begun(MediaReport("device"), MADE))
    assert [each.skipped for each in account.describe().media] == [[*skipped, "transfer", "encode"], skipped]


def test_a_sound_is_decoded_and_not_resized() -> None:
    account = RequestAccount("r", [ShownItem("a", 4, "audio")], 300, began=1.0)
    account.note_made(1.01, 1.02, 1.02, ("a",))
    assert [span.stage for span in account.spans] == ["decode"]


class CountedSpans(list[Span]):
    num_readings = 0

    def __iter__(self) -> Iterator[Span]:
        self.num_readings += 1
        return super().__iter__()


def test_spans_are_iterated_equally_often_for_any_number_of_pictures() -> None:
    num_readings = []
    for num_media in (1, 100):
        account = make_account(*map(str, range(num_media)))
        account.spans = spans = CountedSpans()
        account.note_begun(make_begun(*[MADE] * num_media))
        account.describe()
        account.answers()
        num_readings.append(spans.num_readings)
    assert num_readings[0] == num_readings[1]


def test_pixels_held_by_the_engine_count_as_processor_cache_hits() -> None:
    account = make_account("a")
    account.note_begun(make_begun(MediaReport(None, 1.04, 1.06, 1.03, was_cached=True)))
    assert account.answers() == [("processor", "host")]


def test_work_done_needlessly_is_not_reported_as_skipped() -> None:
    account = make_account("a")
    account.note_made(1.01, 1.015, 1.02, ("a",))
    account.note_begun(make_begun(MediaReport("device")))
    assert account.describe().media[0].skipped == ["transfer", "encode"]
    assert work_counts(account.describe()) == (1, 1, 0, 0)


def test_work_done_after_a_first_token_from_the_prefix_cache_is_reported() -> None:
    account = make_account("a", "b")
    account.note_begun(make_begun(MediaReport("prefix"), MediaReport("device")))
    made = MediaReport(None, 1.14, 1.16, 1.13, was_cached=True)
    assert account.note_begun(make_begun(made, MediaReport("device"))) == {0: made}
    body = account.describe()
    assert [(each.answered_by, each.skipped) for each in body.media] == [
        ("processor", ["decode", "resize"]),
        ("encoder", ["decode", "resize", "transfer", "encode"]),
    ]
    assert body.work == {"decoded": 0, "preprocessed": 0, "transferred": 1, "encoded": 1}
    assert [each.stage for each in body.stages] == ["wait", "prefill", "encode"]


def test_a_load_for_an_earlier_request_takes_no_time_of_one_that_came_after_or_during_it() -> None:
    account = make_account("a", "b")
    account.note_begun(make_begun(MediaReport("disk", 0.8, 0.9), MediaReport("disk", 0.95, 1.04)))
    assert account.answers() == [("encoder", "disk")] * 2
    loads = [(each.item, each.begin_ms, each.ms) for each in account.describe().stages if each.stage == "load"]
    assert loads == [(1, 0, 40)]


def test_an_encoded_picture_counts_as_transferred_without_a_transfer_time() -> None:
    account = make_account("a")
    send(account)
    account.note_begun(make_begun(UNTIMED))
    assert account.describe().work == {"decoded": 0, "preprocessed": 0, "transferred": 1, "encoded": 1}


def test_pixels_that_another_request_had_brought_count_as_found_and_not_as_transferred() -> None:
    account = make_account("a")
    account.note_begun(make_begun(MADE))
    body = account.describe()
    assert (work_counts(body), account.answers()) == ((0, 0, 0, 1), [("processor", "host")])
    assert body.media[0].skipped == ["decode", "resize"]


def test_no_cache_is_named_before_the_first_token() -> None:
    body = make_account("a").describe()
    assert (body.status, body.media[0].answered_by, body.media[0].skipped, body.stages) == ("running", None, [], [])


def test_stages_are_ordered_by_start_and_timed_from_the_request_s_arrival() -> None:
    account = make_account("a")
    account.note("identify", 1.0, 1.004)
    account.name("http", 0.99)
    account.note_begun(make_begun(MADE))
    body = account.describe()
    stages = [(each.stage, each.begin_ms, each.ms, each.item) for each in body.stages]
    assert stages == [
        ("identify", 10, 4, None),
        ("wait", 20, 10, None),
        ("prefill", 30, 80, None),
        ("encode", 50, 20, 0),
    ]
    assert body.id == "http"


def test_a_download_extends_the_stage_that_reads_its_bytes() -> None:
    account = make_account("a")
    account.note("fetch", 1.2, 1.21)
    account.note("identify", 1.21, 1.22)
    account.note_download(0.125)  # long before: meanwhile it waited for a thread
    assert [(span.stage, span.began, span.ended) for span in account.spans] == [
        ("fetch", 1.2 - 0.125, 1.21),
        ("identify", 1.21, 1.22),
    ]


def test_pictures_encoded_in_one_batch_show_its_whole_time_and_sum_to_it_once() -> None:
    account = make_account("a", "b")
    account.note_begun(make_begun(*[MediaReport(None, 1.04, 1.06, 1.03, num_together=2)] * 2))
    encoded = [each for each in account.describe().stages if each.stage == "encode"]
    assert [(each.item, each.begin_ms, each.ms, each.together) for each in encoded] == [(0, 40, 20, 2), (1, 40, 20, 2)]
    assert "encode;dur=20.000" in format_for_header([account])
    counters = Counters()
    RequestObserver(counters).note_end(account, "stop")
    assert counters.numbers()[STAGE["encode"] + SUM] == pytest.approx(0.02)


def test_the_account_of_a_request_resubmitted_to_another_engine_keeps_only_the_frontend_s_work() -> None:
    account = make_account("a", "a/1")
    account.note("identify", 1.0, 1.004)
    account.note_made(1.01, 1.02, 1.03, ["a", "a/1"])
    account.note_sent("a")
    account.note_begun(make_begun(MADE, MADE))
    account.note_tokens(0, 1.1)
    account.num_tokens = 1
    account.note_end("error")
    account.begin_again()
    for found in ("a", "a/1"):
        account.note_found_pixels(found)
    send(account)
    account.note_begun(make_begun(UNTIMED, MediaReport("device")))
    assert account.note_tokens(0, 1.3) is None
    assert account.had_tokens
    body = account.describe()
    stages = ["identify", "decode", "wait", "resize", "prefill", "encode"]
    assert [each.stage for each in body.stages] == stages
    assert (body.status, body.completion_tokens, work_counts(body)) == ("running", 0, (1, 2, 1, 1))
    assert account.answers() == [("nobody", None), ("encoder", "device")]
    assert account.had_to_make(["a"])
    assert not account.had_to_make(["b"])


def test_the_header_and_the_log_sum_stages_and_name_the_answering_caches() -> None:
    account = make_account("a", "b")
    send(account)
    account.note_begun(make_begun(UNTIMED, MediaReport("host", 1.02, 1.025)))
    header = 'wait;dur=10.000, load;dur=5.000, encode;dur=20.000, prefill;dur=80.000, media0;desc="nobody", '
    assert format_for_header([account]) == header + 'media1;desc="encoder.host"'
    pictures = "pictures: 1 made, 1 from encoder (host)"
    assert format_for_log([account]) == f"{pictures}; ms: wait 10.0, load 5.0, encode 20.0, prefill 80.0"
    assert format_for_log([make_account()]) == format_for_header([make_account()]) == ""


def test_the_log_calls_items_and_their_tokens_what_they_are() -> None:
    modalities: tuple[Modality, ...] = ("image", "video", "video", "audio", "image_embeds", "prompt_embeds")
    items = [ShownItem(each, 2**index, each) for index, each in enumerate(modalities)]
    account = RequestAccount("r", items, 300, began=1.0)
    assert format_media_tokens([account, account]) == "34 of pictures, 12 of films, 16 of sounds"
    assert format_media_tokens([make_account()]) == "0 of pictures"
    assert [each.modality for each in account.describe().media] == list(modalities)
    assert "made" not in format_for_log([account])
    send(account)
    account.note_begun(make_begun(*[UNTIMED] * 5, MediaReport("prefix")))
    items_of = "pictures: 1 made; moments of films: 2 made; sounds: 1 made; embeddings: 1 made, 1 from prefix; "
    assert format_for_log([account]).startswith(items_of)


def test_the_header_is_cut_to_the_first_pictures_so_that_clients_accept_it() -> None:
    account = make_account(*map(str, range(256)))
    account.note_begun(make_begun(*[MediaReport("remote", 1.02, 1.025)] * 256))
    header = format_for_header([account])
    assert len(header) < 4000
    assert header.startswith("wait;dur=")
    assert "prefill;dur=" in header
    assert 'media39;desc="encoder.remote"' in header
    assert format_for_log([account]).startswith("pictures: 256 from encoder (remote)")


def test_an_observer_counts_tokens_ends_and_stage_times() -> None:
    counters, exported = Counters(), list[RequestAccount]()
    observer, account = RequestObserver(counters, export=exported.append), make_account()
    account.note_begun(make_begun())
    observer.note_tokens(account, 1, 16, 1.2)
    observer.note_tokens(account, 2, 16, 1.25)
    observer.note_end(account, "stop")
    numbers = counters.numbers()
    assert [numbers[slot] for slot in (PROMPT_TOKENS, ANSWER_TOKENS, ENDS["stop"], ENDS["abort"])] == [300, 3, 1, 0]
    sums = [numbers[slot + SUM] for slot in (FIRST_TOKEN, NEXT_TOKEN, STAGE["prefill"], STAGE["generate"])]
    assert sums == pytest.approx([0.2, 0.05, 0.08, 0.05])
    assert exported == [account]
    assert account.describe().cached_tokens == 16


def test_the_first_tokens_of_other_choices_end_no_gap_and_generate_nothing() -> None:
    observer, account = RequestObserver(counters := Counters()), make_account()
    observer.note_tokens(account, 1, 0, 1.2, (0,))
    observer.note_tokens(account, 2, 0, 1.25, (1, 2))
    observer.note_end(account, "length")
    sums = [counters.numbers()[slot + SUM] for slot in (FIRST_TOKEN, NEXT_TOKEN, STAGE["generate"])]
    assert sums == pytest.approx([0.2, 0, 0])
    assert counters.numbers()[PROMPT_TOKENS] == 300


def test_gaps_of_several_choices_are_those_between_steps_that_go_on_with_one() -> None:
    observer, account = RequestObserver(counters := Counters()), make_account()
    observer.note_tokens(account, 1, 0, 1.2, (0,))
    observer.note_tokens(account, 2, 0, 1.25, (0, 1))
    observer.note_tokens(account, 1, 0, 1.35, (1,))
    observer.note_end(account, "length")
    assert [counters.numbers()[slot + SUM] for slot in (NEXT_TOKEN, STAGE["generate"])] == pytest.approx([0.15, 0.15])


def test_a_request_that_wants_no_answer_has_no_tokens_and_no_time_to_the_first() -> None:
    observer, account = RequestObserver(counters := Counters()), make_account()
    account.wants_answer = False
    observer.note_tokens(account, 1, 16, 1.2)
    observer.note_end(account, "length")
    numbers = counters.numbers()
    assert [numbers[slot] for slot in (PROMPT_TOKENS, ANSWER_TOKENS, ENDS["length"])] == [300, 0, 1]
    assert numbers[FIRST_TOKEN + SUM] == 0


def test_ends_are_exported_when_the_last_hold_is_released_and_then_at_once() -> None:
    exported = list[RequestAccount]()
    observer, ended, running = RequestObserver(export=exported.append), make_account(), make_account()
    with observer.holding_ends([ended, running]):
        observer.note_end(ended, "stop")
        assert not exported
    assert exported == [ended]
    observer.note_end(running, "abort")
    assert exported == [ended, running]


def test_tokens_of_other_requests_are_counted_while_an_ended_one_is_exported() -> None:
    other, counted = make_account(), threading.Event()

    def count() -> None:
        observer.count_tokens(other, 1)
        counted.set()

    def export(_: RequestAccount) -> None:
        counting = threading.Thread(target=count, daemon=True)
        counting.start()
        counting.join(10)

    observer = RequestObserver(counters := Counters(), export=export)
    observer.note_end(make_account(), "stop")
    assert counted.is_set()
    counted.clear()
    with observer.holding_ends([held := make_account()]):
        observer.note_end(held, "stop")
    assert counted.is_set()
    assert [counters.numbers()[slot] for slot in (ANSWER_TOKENS, ENDS["stop"])] == [2, 2]


def test_ends_on_several_threads_each_have_their_slot(tmp_path: Path) -> None:
    observer = RequestObserver(counters := Counters(), AccountRing.open(tmp_path, "frontend-0"))
    accounts = [make_account("a", request_id=str(number)) for number in range(NUM_SLOTS)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda account: observer.note_end(account, "stop"), accounts))
    assert sorted(int(each.id) for each in read_rings(tmp_path)) == list(range(NUM_SLOTS))
    assert counters.numbers()[ENDS["stop"]] == NUM_SLOTS


def test_accounts_of_all_frontends_are_read_newest_first(tmp_path: Path) -> None:
    rings = [AccountRing.open(tmp_path, f"frontend-{rank}") for rank in range(2)]
    for number in range(NUM_SLOTS + 3):
        rings[number % 2].put(make_account("a", request_id=str(number)).describe())
    assert [each.id for each in read_rings(tmp_path)] == [str(number) for number in reversed(range(NUM_SLOTS + 3))]


def test_a_successor_appends_after_the_newest_account_and_overwrites_the_oldest(tmp_path: Path) -> None:
    for first in (0, NUM_SLOTS - 2):
        ring = AccountRing.open(tmp_path, "frontend-0")
        for number in range(first, first + NUM_SLOTS - 2):
            ring.put(make_account(request_id=str(number)).describe())
    last = 2 * NUM_SLOTS - 5
    assert [int(each.id) for each in read_rings(tmp_path)] == list(range(last, last - NUM_SLOTS, -1))


def test_setting_the_clock_back_does_not_change_which_account_is_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(request_id: str) -> None:
        """Write with a new ring each time: a successor, too, looks for the latest account."""
        AccountRing.open(tmp_path, "frontend-0").put(make_account(request_id=request_id).describe())

    put("before")
    hour_ago = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: hour_ago)
    put("after")
    put("at last")
    assert [each.id for each in read_rings(tmp_path)] == ["at last", "after", "before"]


def test_an_account_of_a_film_of_forty_moments_is_kept_whole(tmp_path: Path) -> None:
    now, names = time.monotonic(), list(map(name_of, range(40)))
    account = RequestAccount("f" * 32, [ShownItem(each, 256, "video") for each in names], 20_000, began=now - 12.3)
    account.note_made(now - 12.2345, now - 11.2345, now - 11.1234, names)
    send(account)
    account.note_begun(RequestBegun("r", now - 12, now - 11, now, (MediaReport(None, now - 9.8765, now, now),) * 40))
    account.note_end("stop")
    AccountRing.open(tmp_path, "frontend-0").put(account.describe())
    assert read_rings(tmp_path) == [account.describe()]


def test_an_account_of_very_many_pictures_is_truncated(tmp_path: Path) -> None:
    account = make_account(*map(name_of, range(100)))
    account.note("identify", 1.0, 1.004)
    account.note_begun(make_begun(*[MADE] * 100))
    account.note_tokens(0, 1.1)
    account.note_tokens(0, 1.2)
    account.num_tokens = 2
    account.note_end("stop")
    AccountRing.open(tmp_path, "frontend-0").put(account.describe())
    [read] = read_rings(tmp_path)
    assert 0 < len(read.media) < 100
    assert read.num_media == 100
    assert [each.stage for each in read.stages if each.item is None] == ["identify", "wait", "prefill", "generate"]
    assert [each.item for each in read.stages if each.item is not None] == list(range(len(read.media)))
    assert read.work["encoded"] == 100


@pytest.mark.parametrize("hashes", [(), ("a", "b")])
def test_an_account_that_has_no_room_even_without_its_media_is_left_out(
    tmp_path: Path, hashes: tuple[str, ...]
) -> None:
    ring = AccountRing.open(tmp_path, "frontend-0")
    ring.put(make_account(*hashes, request_id="".join(map(name_of, range(SLOT_BYTES // 32)))).describe())
    ring.put(make_account(request_id="next").describe())
    assert [each.id for each in read_rings(tmp_path)] == ["next"]


def test_an_account_being_written_is_not_read(tmp_path: Path) -> None:
    ring = AccountRing.open(tmp_path, "frontend-0")
    ring.put(make_account(request_id="whole").describe())
    ring.put(make_account(request_id="torn").describe())
    with (tmp_path / FOLDER / "frontend-0").open("r+b") as file:
        file.seek(SLOT_BYTES + 20)
        file.write(b"\xff")
    assert [each.id for each in read_rings(tmp_path)] == ["whole"]
