"""Media handles: tenants, lifetimes and quotas, also with several frontends at once."""

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepsight.errors import MediaQuotaError, MediaStoreError, UnknownHandleError
from keepsight.frontend.intake.media_handles import ADMINISTRATOR, MediaHandles, MediaQuota, PinHolder
from keepsight.ipc import shared_database
from keepsight.ipc.run_directory import RunDirectory
from keepsight.media import Geometry
from tests.clock import Clock

SIZE = Geometry(4, 3)
STOPS_WHILE_IT_DELETES_AND_ADDS = """
import sys
from pathlib import Path
from keepsight.frontend.intake.media_handles import MediaHandles, MediaQuota

handles = MediaHandles(Path(sys.argv[1]), MediaQuota(1 << 24, 9))
with handles._writing():
    handles._database.execute("DELETE FROM media")
    handles._database.execute(
        "INSERT INTO media (id, tenant, sha256, num_bytes, width, height, num_samples, num_pages, "
        "media_type, purpose, created, ahead, expires) VALUES ('', 'a', '', 8388608, 1, 1, 0, 0, '', '', 0, 0, 9e9)"
    )
    handles._database.execute("INSERT INTO contents VALUES ('', zeroblob(8388608))")
    handles._database.execute("UPDATE media SET width = 2")
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def handles(tmp_path: Path, clock: Clock) -> Iterator[MediaHandles]:
    handles = MediaHandles(tmp_path, MediaQuota(100, 5), clock, clock)
    yield handles
    handles.check_invariants()
    handles.close()


def test_a_folder_that_has_gone_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    handles = MediaHandles(folder, MediaQuota(100, 5))
    folder.rename(tmp_path / "gone")
    with pytest.raises(MediaStoreError, match="cannot be kept"):
        handles.add("a", b"picture", SIZE)
    handles.close()


def test_no_folder_for_temporary_files_is_needed(handles: MediaHandles) -> None:
    in_memory = 2  # SQLite's value for MEMORY.
    assert handles._database.execute("PRAGMA temp_store").fetchone() == (in_memory,)


def test_a_handle_tells_what_was_kept_and_gives_its_bytes(handles: MediaHandles) -> None:
    kept = handles.add("a", b"content", SIZE, 60)
    assert kept == handles.get("a", kept.id)
    assert (kept.num_bytes, kept.width, kept.height, kept.created, kept.expires) == (7, 4, 3, 1000, 1060)
    assert kept.sha256 == "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    assert handles.read("a", kept.id) == b"content"


def test_another_tenant_s_handle_is_as_unknown_as_one_that_never_was(handles: MediaHandles) -> None:
    kept = handles.add("a", b"content", SIZE)
    never = "media_" + "0" * 48
    messages = []
    for media_id in (kept.id, never, "media_", "", "'; --", "\ud800", f"{kept.id}\n"):
        for call in (handles.get, handles.read, handles.delete):
            with pytest.raises(UnknownHandleError) as refused:
                call("b", media_id)
            messages.append(refused.value.message.replace(media_id, ""))
        with pytest.raises(UnknownHandleError):
            handles.pin("b", media_id, 60)
    assert messages[0] == messages[3]
    assert handles.get("a", kept.id) == kept


def test_a_handle_ends_with_its_time_and_a_pin_prolongs_it(handles: MediaHandles, clock: Clock) -> None:
    short, long = (handles.add("a", b"content", SIZE, 60) for _ in range(2))
    assert handles.pin("a", long.id, 100).expires == 1100
    assert handles.pin("a", long.id, 10).pinned_until == 1100
    clock.now = 1060
    assert [each.id for each in handles.page("a", 9).shown] == [long.id]
    with pytest.raises(UnknownHandleError):
        handles.read("a", short.id)
    clock.now = 1100
    assert not handles.page("a", 9).shown


@pytest.mark.parametrize("step", [-(10**8), 10**8])
def test_handles_and_marks_live_as_long_as_promised_however_the_wall_clock_is_set(
    tmp_path: Path, clock: Clock, step: int
) -> None:
    wall_clock = Clock(10**9)
    with closing(MediaHandles(tmp_path, MediaQuota(100, 5), clock, wall_clock)) as handles:
        kept = handles.add("a", b"content", SIZE, 60)
        assert (kept.created, kept.expires) == (10**9, 10**9 + 60)
        wall_clock.now += step
        assert handles.hold_pin(PinHolder("a"), "pixels", 60)
        assert handles.pin("a", kept.id, 90).pinned_until == 10**9 + 90
        later = handles.add("a", b"content", SIZE, 90)
        assert (later.created, later.expires) == (wall_clock.now, wall_clock.now + 90)
        clock.now += 60
        assert {each.id for each in handles.page("a", 9).shown} == {kept.id, later.id}
        assert handles.end_of_pins("pixels") is None
        clock.now += 30
        assert not handles.page("a", 9).shown


def test_a_pin_never_shortens_a_life(handles: MediaHandles) -> None:
    kept = handles.add("a", b"content", SIZE, 600)
    pinned = handles.pin("a", kept.id, 60)
    assert (pinned.pinned_until, pinned.expires) == (1060, 1600)


def test_pixels_are_pinned_until_the_last_end_of_all_who_hold_them(handles: MediaHandles, clock: Clock) -> None:
    ours, theirs = handles.add("a", b"content", SIZE), handles.add("b", b"other", SIZE)
    assert handles.end_of_pins("pixels") is None
    holders = (PinHolder("a", ours.id), PinHolder("b", theirs.id), PinHolder("a"), ADMINISTRATOR)
    for holder, seconds in zip(holders, (60, 90, 80, 70), strict=True):
        assert handles.hold_pin(holder, "pixels", seconds)
        assert handles.hold_pin(holder, "pixels", 10), "of two ends the later counts"
    assert handles.hold_pin(holders[0], "others", 60)
    assert handles.end_of_pins("pixels") == 1090
    assert handles.delete("b", theirs.id) == ["pixels"]
    assert handles.end_of_pins("pixels") == 1080
    handles.take_back_pin(PinHolder("a"), "pixels", None)
    assert handles.end_of_pins("pixels") == 1070
    clock.now += 65
    handles.take_back_pin(ADMINISTRATOR, "pixels", None)
    assert handles.end_of_pins("pixels") is None
    assert handles.hold_pin(holders[0], "pixels", 60)
    assert handles.hold_pin(ADMINISTRATOR, "pixels", 60)
    handles.end_all_pins("pixels")
    assert handles.end_of_pins("pixels") is None


def test_a_handle_s_pins_end_with_it_and_one_that_has_gone_holds_none(handles: MediaHandles, clock: Clock) -> None:
    kept = handles.add("a", b"content", SIZE, 60)
    assert handles.hold_pin(PinHolder("a", kept.id), "pixels", 600)
    assert handles.end_of_pins("pixels") == 1060
    with pytest.raises(UnknownHandleError):
        handles.hold_pin(PinHolder("b", kept.id), "pixels", 60)
    clock.now += 60
    assert handles.end_of_pins("pixels") is None
    handles.check_invariants()
    with pytest.raises(UnknownHandleError):
        handles.hold_pin(PinHolder("a", kept.id), "pixels", 60)


def test_what_would_exceed_the_quota_is_refused_and_nothing_goes_for_it(handles: MediaHandles, clock: Clock) -> None:
    kept = handles.add("a", bytes(60), SIZE, 10)
    with pytest.raises(MediaQuotaError, match="60 that are stored for you would exceed your 100"):
        handles.add("a", bytes(41), SIZE)
    assert handles.page("a", 9).shown == [kept]
    handles.add("b", bytes(100), SIZE)
    for _ in range(4):
        handles.add("a", b"1", SIZE)
    with pytest.raises(MediaQuotaError, match="5 handles"):
        handles.add("a", b"1", SIZE)
    clock.now += 10
    handles.add("a", bytes(96), SIZE)


def test_pages_follow_one_another_in_both_directions(handles: MediaHandles) -> None:
    ids = [handles.add("a", b"1", SIZE).id for _ in range(5)]
    handles.add("b", b"1", SIZE)
    for is_ascending, expected in ((True, ids), (False, ids[::-1])):
        seen: list[str] = []
        while page := handles.page("a", 2, seen[-1] if seen else None, is_ascending=is_ascending).shown:
            assert len(page) <= 2
            seen += [each.id for each in page]
        assert seen == expected


def test_a_list_goes_on_behind_what_has_gone(handles: MediaHandles, clock: Clock) -> None:
    ids = []
    for step in (0, 1, -1, 0):
        clock.now += step
        ids.append(handles.add("a", b"1", SIZE).id)
    ids.append(handles.add("a", b"1", SIZE, 10).id)
    handles.delete("a", ids[1])
    clock.now += 10
    for gone, older, younger in ((1, ids[:1], ids[2:4]), (4, [ids[3], ids[2], ids[0]], [])):
        assert [each.id for each in handles.page("a", 9, ids[gone]).shown] == older
        assert [each.id for each in handles.page("a", 9, ids[gone], is_ascending=True).shown] == younger


def test_uses_are_counted_and_one_of_a_handle_that_has_gone_is_none(handles: MediaHandles) -> None:
    kept = handles.add("a", b"1", SIZE)
    for was_spared in (False, True, True):
        handles.note_use(kept.id, was_spared=was_spared)
    counted = handles.get("a", kept.id)
    assert (counted.num_uses, counted.num_spared) == (3, 2)
    handles.delete("a", kept.id)
    handles.note_use(kept.id, was_spared=True)


def test_a_handle_that_another_frontend_deletes_as_it_is_looked_up_is_unknown(
    handles: MediaHandles, clock: Clock, tmp_path: Path
) -> None:
    other = MediaHandles(tmp_path, MediaQuota(100, 5), clock)
    doomed = [handles.add("a", b"x", SIZE).id]

    def delete_before(statement: str) -> None:
        if doomed and "FROM contents" in statement:
            other.delete("a", doomed.pop())

    handles._database.set_trace_callback(delete_before)
    with pytest.raises(UnknownHandleError):
        handles.read("a", doomed[0])
    handles._database.set_trace_callback(None)
    assert not doomed
    other.close()


def test_the_file_shrinks_when_handles_go(tmp_path: Path) -> None:
    handles = MediaHandles(tmp_path, MediaQuota(1 << 22, 5))
    kept = handles.add("a", bytes(1 << 22), SIZE)
    handles.delete("a", kept.id)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1 << 19
    handles.close()


def test_all_that_has_expired_goes_within_little_room(tmp_path: Path, clock: Clock) -> None:
    handles = MediaHandles(tmp_path, MediaQuota(1 << 24, 20), clock)
    for _ in range(10):
        handles.add("a", bytes(1 << 20), SIZE, 60)
    clock.now += 60
    sizes = []

    def look() -> None:
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))

    handles._database.set_progress_handler(look, 1)
    assert handles.hold_pin(PinHolder("a"), "hash", 10)
    assert sizes[-1] < 1 << 20
    assert max(sizes) < 12 << 20
    handles.close()


def test_an_upload_leaves_room_for_the_largest_to_go_again(
    handles: MediaHandles, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles.add("a", bytes(60), SIZE, 10)
    monkeypatch.setattr(RunDirectory, "num_free_bytes", (1 << 20) + 65)
    with pytest.raises(MediaStoreError, match="no room for 6 more bytes"):
        handles.add("b", bytes(6), SIZE)
    handles.add("b", bytes(5), SIZE)
    clock.now += 10
    handles.add("b", bytes(32), SIZE)
    with pytest.raises(MediaStoreError):
        handles.add("b", bytes(33), SIZE)


def test_frontends_that_add_at_once_stay_within_the_quota_together(tmp_path: Path) -> None:
    """Each frontend has its own connection, as separate processes have."""
    frontends = [MediaHandles(tmp_path, MediaQuota(1000, 30)) for _ in range(4)]
    refused = []

    def add_some(handles: MediaHandles) -> None:
        for _ in range(12):
            try:
                handles.add("a", b"1", SIZE)
            except MediaQuotaError as error:
                refused.append(error)

    threads = [threading.Thread(target=add_some, args=[each]) for each in frontends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(frontends[0].page("a", 99).shown) == 30
    assert len(refused) == 4 * 12 - 30
    for each in frontends:
        each.check_invariants()
        each.close()


def test_what_cannot_be_written_as_another_frontend_is_stopped_is_told_so(
    tmp_path: Path, handles: MediaHandles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_database, "PATIENCE_SECONDS", 0.01)
    other = MediaHandles(tmp_path, MediaQuota(100, 5))
    with handles._writing(), pytest.raises(MediaStoreError, match="locked"):
        other.add("a", b"1", SIZE)
    other.add("a", b"1", SIZE)
    other.close()


def test_the_ends_of_pins_are_told_while_another_frontend_writes(
    tmp_path: Path, handles: MediaHandles, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_database, "PATIENCE_SECONDS", 0.01)
    other = MediaHandles(tmp_path, MediaQuota(100, 5), clock, clock)
    assert other.hold_pin(ADMINISTRATOR, "pixels", 60)
    with handles._writing():
        assert other.end_of_pin(ADMINISTRATOR, "pixels") == other.end_of_pins("pixels") == 1060
        assert other.end_of_pin(PinHolder("a"), "pixels") is None
        clock.now += 60
        assert other.end_of_pin(ADMINISTRATOR, "pixels") is other.end_of_pins("pixels") is None
    other.close()


def test_what_a_killed_frontend_was_writing_is_undone(tmp_path: Path) -> None:
    handles = MediaHandles(tmp_path, MediaQuota(1 << 24, 9))
    kept = handles.add("a", b"content", SIZE)
    command = [sys.executable, "-c", STOPS_WHILE_IT_DELETES_AND_ADDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        size = sum(file.stat().st_size for file in tmp_path.iterdir())
        process.kill()
    assert size > 1 << 22  # A part of the upload was in the file already.
    assert handles.page("a", 9).shown == [kept]
    assert handles.read("a", kept.id) == b"content"
    handles.add("b", bytes(1 << 23), SIZE)
    handles.check_invariants()
    handles.close()


TENANTS = st.sampled_from(["a", "b"])
SECONDS = st.integers(1, 50)


class Handles(RuleBasedStateMachine):
    """Compares the handles with a model of each handle's tenant, size and expiry."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.folder = Clock(), Path(tempfile.mkdtemp())
        self.handles = MediaHandles(self.folder, MediaQuota(20, 4), self.clock)
        self.held: dict[str, tuple[str, int, float]] = {}
        self.pins: dict[tuple[str, str], float] = {}

    def alive(self, tenant: str) -> dict[str, int]:
        return {
            media_id: size
            for media_id, (owner, size, end) in self.held.items()
            if owner == tenant and end > self.clock.now
        }

    @rule(tenant=TENANTS, size=st.integers(1, 25), ttl=SECONDS)
    def add(self, tenant: str, size: int, ttl: int) -> None:
        alive = self.alive(tenant)
        if sum(alive.values()) + size > 20 or len(alive) == 4:
            with pytest.raises(MediaQuotaError):
                self.handles.add(tenant, bytes(size), SIZE, ttl)
        else:
            self.held[self.handles.add(tenant, bytes(size), SIZE, ttl).id] = (tenant, size, self.clock.now + ttl)

    @rule(data=st.data(), tenant=TENANTS, ttl=SECONDS)
    def pin_or_delete(self, data: st.DataObject, tenant: str, ttl: int) -> None:
        if not self.held:
            return
        media_id = data.draw(st.sampled_from(list(self.held)))  # In an order independent of random ids.
        deletes = data.draw(st.booleans())
        if media_id not in self.alive(tenant):
            with pytest.raises(UnknownHandleError):
                self.handles.pin(tenant, media_id, ttl)
            return
        owner, size, end = self.held.pop(media_id)
        if deletes:
            self.handles.delete(tenant, media_id)
        else:
            self.handles.pin(tenant, media_id, ttl)
            self.held[media_id] = (owner, size, max(end, self.clock.now + ttl))

    @rule(tenant=TENANTS, media_hash=st.sampled_from("uvwxyz"), seconds=SECONDS)
    def pin_pixels(self, tenant: str, media_hash: str, seconds: int) -> None:
        its = {each for (owner, each), end in self.pins.items() if owner == tenant and end > self.clock.now}
        is_kept = len(its - {media_hash}) < 4
        assert self.handles.hold_pin(PinHolder(tenant), media_hash, seconds) == is_kept
        if is_kept:
            end = self.pins.get((tenant, media_hash), 0)
            self.pins[tenant, media_hash] = max(end, self.clock.now + seconds)

    @rule(seconds=SECONDS)
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def finds_what_the_model_finds(self) -> None:
        for tenant in ("a", "b"):
            found = {each.id: each.num_bytes for each in self.handles.page(tenant, 99).shown}
            assert found == self.alive(tenant)
            assert all(self.handles.read(tenant, each) == bytes(size) for each, size in found.items())
        for media_hash in "uvwxyz":
            ends = [end for (_, each), end in self.pins.items() if each == media_hash and end > self.clock.now]
            assert self.handles.end_of_pins(media_hash) == max(ends, default=None)

    def teardown(self) -> None:
        self.handles.check_invariants()
        self.handles.close()
        shutil.rmtree(self.folder)


TestHandles = Handles.TestCase
TestHandles.settings = settings(max_examples=25, stateful_step_count=20)
