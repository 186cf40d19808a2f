"""The processor cache as an administrator sees it, with the app in process."""

import io
import logging
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.types import ASGIApp

from keepsight.api_settings import ApiSettings
from keepsight.frontend.api.app import create_app
from keepsight.frontend.api.held_pictures import MAX_LISTED, THUMBNAIL_SIDE
from keepsight.frontend.pixels.pixel_cache import LocalCache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.observe.catalogue import RESPONSES
from keepsight.observe.counters import Counters
from keepsight.pixels import carry_embeddings
from tests.frontend.api.app_client import MODEL, Client, FakeEngine, error_of
from tests.names import name_of

WIDE = np.full((300, 400, 3), (10, 200, 30), np.uint8)


@pytest.fixture
def cache() -> LocalCache:
    return LocalCache(4 * WIDE.nbytes)


class Admin(Client):
    def __init__(self, preparer: RequestPreparer, cache: LocalCache) -> None:
        super().__init__(preparer, FakeEngine(preparer), ApiSettings(dashboard_thumbnails=True))
        self._cache = cache
        self.counters = Counters()

    def make_app(self) -> ASGIApp:
        return create_app(self.preparer, self.engine, MODEL, self.settings, None, self._cache, counters=self.counters)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return super().send(method, f"/debug/pictures{path}", **options)

    def listed(self) -> list[tuple[str, bool]]:
        return [(each["media_hash"], each["is_pinned"]) for each in self.send("GET", "").json()["data"]]


@pytest.fixture
def admin(preparer: RequestPreparer, cache: LocalCache) -> Admin:
    return Admin(preparer, cache)


def test_held_pictures_are_listed_last_used_first_and_listing_is_no_use(admin: Admin, cache: LocalCache) -> None:
    assert admin.listed() == []
    for number in (1, 2, 3):
        cache.put(name_of(number), WIDE)
    cache.get_and_update(name_of(1))
    for _ in range(2):
        assert [each for each, _ in admin.listed()] == [name_of(1), name_of(3), name_of(2)]
        assert admin.send("GET", f"/{name_of(2)}").status_code == 200


def test_a_long_list_is_cut(preparer: RequestPreparer) -> None:
    cache = LocalCache(1 << 20)
    for number in range(MAX_LISTED + 5):
        cache.put(name_of(number), np.zeros((8, 8, 3), np.uint8))
    assert len(Admin(preparer, cache).listed()) == MAX_LISTED


def test_a_picture_is_shown_small(admin: Admin, cache: LocalCache) -> None:
    cache.put(name_of(1), WIDE)
    response = admin.send("GET", f"/{name_of(1)}")
    shown = Image.open(io.BytesIO(response.content))
    assert shown.size == (THUMBNAIL_SIDE, THUMBNAIL_SIDE * 3 // 4)
    assert np.abs(np.asarray(shown).astype(int) - (10, 200, 30)).max() < 5
    assert response.headers["cache-control"] == "no-store"
    assert error_of(admin.send("GET", f"/{name_of(2)}"))[0] == 404


def test_embeddings_are_neither_listed_nor_shown_as_pictures(admin: Admin, cache: LocalCache) -> None:
    cache.put(name_of(1), carry_embeddings(np.zeros((4, 6), np.float32)))
    cache.put(name_of(2), WIDE)
    assert [each for each, _ in admin.listed()] == [name_of(2)]
    assert error_of(admin.send("GET", f"/{name_of(1)}"))[0] == 404


def test_looking_is_not_logged_and_pinning_is(
    admin: Admin, cache: LocalCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put(name_of(1), WIDE)
    with caplog.at_level(logging.INFO, "keepsight.frontend.api.request_log"):
        for method, path in (("GET", ""), ("GET", f"/{name_of(1)}"), ("POST", f"/{name_of(1)}/pin")):
            assert admin.send(method, path).is_success
    [line] = caplog.messages
    assert line.startswith(f"POST /debug/pictures/{name_of(1)}/pin")


def test_who_guesses_the_administrator_s_key_is_logged(admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    admin.settings = ApiSettings(dashboard_thumbnails=True, admin_api_key="admin")
    paths = ["/debug/pictures", f"/debug/pictures/{name_of(1)}", "/debug/picturesque", "/debug/state"]
    before = admin.counters.numbers()[RESPONSES[4]]
    with caplog.at_level(logging.INFO, "keepsight.frontend.api.request_log"):
        for path in paths:
            assert Client.send(admin, "GET", path, headers={"Authorization": "Bearer guess"}).status_code == 401
    assert [line.split(" in ")[0] for line in caplog.messages] == [f"GET {path} 401" for path in paths]
    assert admin.counters.numbers()[RESPONSES[4]] == before + len(paths)


def test_pins_are_set_and_taken_away(admin: Admin, cache: LocalCache) -> None:
    for number in (1, 2, 3):
        cache.put(name_of(number), WIDE)
    for number in (1, 2):
        assert admin.send("POST", f"/{name_of(number)}/pin").json() == {"is_pinned": True}
    # At most half of the cache can be pinned, and a missing picture cannot be.
    for number in (3, 4):
        assert error_of(admin.send("POST", f"/{name_of(number)}/pin"))[0] == 409
    assert dict(admin.listed()) == {name_of(1): True, name_of(2): True, name_of(3): False}
    assert admin.send("DELETE", f"/{name_of(1)}/pin").json() == {"is_pinned": False}
    assert dict(admin.listed())[name_of(1)] is False


def test_pictures_are_shown_only_if_enabled_and_to_administrators(admin: Admin, cache: LocalCache) -> None:
    cache.put(name_of(1), WIDE)
    admin.settings = ApiSettings()
    for path in ("", f"/{name_of(1)}"):
        assert error_of(admin.send("GET", path))[0] == 404
    admin.settings = ApiSettings(dashboard_thumbnails=True, api_keys=("one",), admin_api_key="admin")
    for path in ("", f"/{name_of(1)}"):
        assert admin.send("GET", path, headers={"Authorization": "Bearer one"}).status_code == 401
        assert admin.send("GET", path, headers={"Authorization": "Bearer admin"}).status_code == 200
