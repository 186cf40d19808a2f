"""Pixels stay pinned for as long as anyone holds them, and no longer, through whichever frontend that changes."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from keepsight.api_settings import ApiSettings
from keepsight.config import Config
from keepsight.errors import UnknownHandleError
from keepsight.frontend.api.pixel_pins import PixelPins
from keepsight.frontend.intake.media_handles import ADMINISTRATOR, MediaHandles, MediaQuota, PinHolder
from keepsight.frontend.pixels.pixel_cache import PixelCache, StoreCache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.ipc.shared_store import SharedStore
from keepsight.media import Geometry
from tests.drawn import draw
from tests.frontend.api.media_server import QUOTA, Server
from tests.frontend.api.test_media_api import MakingEngine
from tests.frontend.sample_pictures import encode
from tests.names import name_of

PIXELS = np.zeros((64, 64, 3), np.uint8)
NAME = name_of(1)


class Frontend:
    """One of the frontends of a server, of which each has the same table and the same cache."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.handles = stack.enter_context(closing(MediaHandles(folder, MediaQuota(10_000, 3))))
        self.cache: PixelCache = stack.enter_context(closing(StoreCache(SharedStore(folder, 1 << 20))))
        self.pins = PixelPins(self.handles, self.cache)

    def upload(self, tenant: str = "a") -> PinHolder:
        return PinHolder(tenant, self.handles.add(tenant, b"content", Geometry(2, 2)).id)

    @property
    def pinned(self) -> set[str]:
        return {each.media_hash for each in self.cache.newest(99) if each.is_pinned}


@pytest.fixture
def frontends(tmp_path: Path) -> Iterator[tuple[Frontend, Frontend]]:
    with ExitStack() as stack:
        one, other = (Frontend(tmp_path, stack) for _ in range(2))
        one.cache.put(NAME, PIXELS)
        yield one, other
        one.handles.check_invariants()


def test_a_handle_s_pins_end_as_it_is_deleted_at_a_frontend_that_never_knew_its_pixels_name(
    frontends: tuple[Frontend, Frontend],
) -> None:
    one, other = frontends
    handle = one.upload()
    assert one.pins.pin(handle, NAME, 3600)
    other.pins.delete(handle)
    assert not one.pinned
    with pytest.raises(UnknownHandleError):
        one.pins.pin(handle, NAME, 3600)
    assert not one.pinned


@pytest.mark.parametrize("other_holder", [PinHolder("a"), PinHolder("b"), ADMINISTRATOR, None])
def test_pixels_stay_pinned_as_another_holds_them(
    frontends: tuple[Frontend, Frontend], other_holder: PinHolder | None
) -> None:
    one, other = frontends
    handle = one.upload()
    other_holder = other_holder or other.upload("b")
    assert one.pins.pin(handle, NAME, 3600)
    assert other.pins.pin(other_holder, NAME, 3600)
    one.pins.delete(handle)
    assert one.pinned == {NAME}
    one.pins.unpin(NAME)
    assert not one.pinned


def test_pixels_are_not_pinned_longer_than_those_who_still_hold_them_asked(
    frontends: tuple[Frontend, Frontend], tmp_path: Path
) -> None:
    def seconds_left() -> float:
        return (tmp_path / "pins" / NAME).stat().st_mtime - time.monotonic()

    one, other = frontends
    handle = one.upload()
    assert one.pins.pin(handle, NAME, 3600)
    for seconds in (2000, 1000):
        assert other.pins.pin(ADMINISTRATOR, NAME, seconds)
        assert 3000 < seconds_left() <= 3600
    one.pins.delete(handle)
    assert 1500 < seconds_left() <= 2000


def test_pixels_that_cannot_be_pinned_are_held_by_nobody(frontends: tuple[Frontend, Frontend]) -> None:
    one, other = frontends
    assert not one.pins.pin(ADMINISTRATOR, name_of(2), 3600)
    other.cache.put(name_of(2), PIXELS)
    handle = one.upload()
    assert one.pins.pin(handle, name_of(2), 3600)
    one.pins.delete(handle)
    assert not one.pinned


def test_requests_without_a_handle_pin_within_their_quota(frontends: tuple[Frontend, Frontend]) -> None:
    one, other = frontends
    for number in range(9):
        one.cache.put(name_of(number), PIXELS)
    assert [other.pins.pin(PinHolder("a"), name_of(number), 60) for number in range(5)] == [True] * 3 + [False] * 2
    assert other.pins.pin(PinHolder("b"), name_of(4), 60)
    assert all(other.pins.pin(ADMINISTRATOR, name_of(number), 60) for number in range(5, 9))


def test_whoever_is_overtaken_by_a_change_follows_it(
    frontends: tuple[Frontend, Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = frontends
    handle, pin = one.upload(), one.cache.pin

    def pin_late(media_hash: str, seconds: float) -> bool:
        monkeypatch.undo()
        other.pins.delete(handle)
        return pin(media_hash, seconds)

    monkeypatch.setattr(one.cache, "pin", pin_late)
    assert not one.pins.pin(handle, NAME, 3600)
    assert not one.pinned


def test_without_a_table_pixels_are_pinned_and_unpinned_as_told(frontends: tuple[Frontend, Frontend]) -> None:
    one, _ = frontends
    pins = PixelPins(None, one.cache)
    assert pins.pin(ADMINISTRATOR, NAME, 60)
    assert one.pinned == {NAME}
    pins.unpin(NAME)
    assert not one.pinned


@pytest.fixture
def two_keys(tmp_path: Path) -> Iterator[Server]:
    preparer = RequestPreparer.from_config(Config())
    settings = ApiSettings(api_keys=("ours", "theirs"), admin_api_key="admin", dashboard_thumbnails=True)
    with closing(MediaHandles(tmp_path, QUOTA)) as handles:
        yield Server(preparer, MakingEngine(preparer), handles, settings)


WEBP = encode(draw(1).picture, "WEBP", lossless=True)


@pytest.mark.parametrize("key", ["ours", "theirs"])
def test_deleting_another_encoding_of_a_pinned_picture_leaves_its_pixels_pinned(two_keys: Server, key: str) -> None:
    png = two_keys.upload(key="ours", warm=True)["id"]
    webp = two_keys.upload(WEBP, key=key, warm=True)["id"]
    assert two_keys.send("POST", f"/v1/media/{png}/pin", "ours").json()["pinned"]["pixels"]
    pinned = two_keys.engine.pins.keys()
    assert len(pinned) == 1
    two_keys.send("DELETE", f"/v1/media/{webp}", key)
    assert two_keys.engine.pins.keys() == pinned
    two_keys.send("DELETE", f"/v1/media/{png}", "ours")
    assert not two_keys.engine.pins


def test_an_administrator_s_pin_outlasts_a_client_s_upload_of_the_picture(two_keys: Server) -> None:
    first = two_keys.upload(key="ours", warm=True)["id"]
    [media_hash] = two_keys.engine.held
    assert two_keys.send("POST", f"/debug/pictures/{media_hash}/pin", "admin").json() == {"is_pinned": True}
    two_keys.send("DELETE", f"/v1/media/{first}", "ours")
    assert two_keys.engine.pins == {media_hash: 3600}
    two_keys.send("DELETE", f"/debug/pictures/{media_hash}/pin", "admin")
    assert not two_keys.engine.pins


def test_isolated_keys_unpin_the_pixels_that_only_they_could_use(two_keys: Server) -> None:
    media_ids = {}
    for key in ("ours", "theirs"):
        media_ids[key] = two_keys.upload(key=key, warm=True, cache_salt=key)["id"]
        two_keys.send("POST", f"/v1/media/{media_ids[key]}/pin", key, json={"cache_salt": key})
    assert len(two_keys.engine.pins) == 2
    two_keys.send("DELETE", f"/v1/media/{media_ids['ours']}", "ours")
    assert len(two_keys.engine.pins) == 1


def test_a_pin_that_could_not_be_renewed_ends_when_it_did_before(
    frontends: tuple[Frontend, Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = frontends
    handle = one.upload()
    assert one.pins.pin(handle, NAME, 60)
    end = one.handles.end_of_pins(NAME)
    with monkeypatch.context() as patched:
        patched.setattr(other.cache, "pin", lambda *_: False)
        assert not other.pins.pin(handle, NAME, 3600)
    assert one.handles.end_of_pins(NAME) == end
    assert one.pinned == {NAME}
    one.pins.delete(handle)
    assert one.pinned == set()
