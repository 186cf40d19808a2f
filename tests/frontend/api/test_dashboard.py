"""The page at `/dashboard` in a real Chromium: a real server's files, with mostly made-up numbers."""

import copy
import io
import os
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.drawn import ask, by_url, draw
from tests.frontend.api.test_page import PATIENCE_MS, browser, gather_complaints, url
from tests.names import name_of

__all__ = ["browser", "url"]  # fixtures
PHONE = 390
MIB = 2**20


def tier(cache: str, tier: str, held: int, budget: int, queries: int, hits: int, **others: Any) -> dict[str, Any]:
    stats = {"cache": cache, "tier": tier, "bytes": held, "budget_bytes": budget, "queries": queries, "hits": hits}
    return stats | {"entries": 3, "evictions": 0, "saved_seconds": 0.5, "reason": None} | others


def request(name: str, media: list[dict[str, Any]], *stages: tuple[str, float, float]) -> dict[str, Any]:
    return {
        "id": name,
        "began_at": 1_790_000_000.0,
        "status": "stop",
        "ms": 99.0,
        "prompt_tokens": 300,
        "cached_tokens": 288,
        "completion_tokens": 7,
        "num_media": len(media),
        "media": media,
        "stages": [{"stage": stage, "begin_ms": began, "ms": ms} for stage, began, ms in stages],
    }


def found(answered_by: str, *skipped: str, tier: str | None = None, modality: str = "image") -> dict[str, Any]:
    item = {"media_hash": name_of(1), "modality": modality, "tokens": 256}
    return item | {"answered_by": answered_by, "tier": tier, "skipped": list(skipped)}


COLD = request(
    "cold", [found("nobody")], ("decode", 1, 8), ("encode", 10, 40), ("prefill", 50, 30), ("generate", 80, 9)
)
WARM = request("warm", [found("encoder", "decode", "encode", tier="disk")], ("load", 1, 2), ("prefill", 5, 5))
STATE = {
    "running": 3,
    "waiting": 0,
    "caches": [
        tier("processor", "host", MIB, 4 * MIB, 4, 3),
        tier("encoder", "device", 2 * MIB, 4 * MIB, 10, 4),
        tier("encoder", "disk", MIB, 8 * MIB, 6, 3),
        tier("encoder", "remote", 0, 0, 2, 0, reason="it does not answer"),
        tier("prefix", "device", MIB, 16 * MIB, 1000, 750),
    ],
    "media": {"fetched": 0, "decoded": 1, "preprocessed": 1, "transferred": 1, "encoded": 1},
    "requests": [WARM, COLD],
}


class Server:
    """Answers the page's requests, and records them."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = copy.deepcopy(STATE)
        self.pins: set[str] | None = {name_of(2)}
        self.order: tuple[int, ...] = (1, 2)
        self.key: str | None = None
        self.asked: list[str] = []

    def answer(self, route: Route) -> None:
        asked, path = route.request, route.request.url.partition("/debug/")[2].partition("?")[0]
        self.asked.append(f"{asked.method} {path or asked.url.rpartition('/')[2]}")
        if self.key is not None and asked.headers.get("authorization") != f"Bearer {self.key}":
            route.fulfill(status=401, json={"error": {"message": "a key is needed"}})
        elif path == "state":
            route.fulfill(json=self.state)
        elif path.startswith("pictures"):
            self._answer_of_pictures(route, asked.method, path)
        else:
            route.fulfill(json={})

    def _answer_of_pictures(self, route: Route, method: str, path: str) -> None:
        if self.pins is None:
            route.fulfill(status=404, json={"error": {"message": "Not Found"}})
        elif path == "pictures":
            names = map(name_of, self.order)
            held = [{"media_hash": each, "num_bytes": MIB, "is_pinned": each in self.pins} for each in names]
            route.fulfill(json={"data": held})
        elif path.endswith("/pin"):
            (self.pins.add if method == "POST" else self.pins.discard)(path.split("/")[1])
            route.fulfill(json={"is_pinned": method == "POST"})
        else:
            content = io.BytesIO()
            Image.new("RGB", (40, 30), "teal").save(content, "JPEG")
            route.fulfill(body=content.getvalue(), content_type="image/jpeg")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def page(browser: Browser, url: str, server: Server) -> Iterator[Page]:
    """A phone-sized page that has not loaded the dashboard yet. It must log no errors and contact no other host."""
    with browser.new_context(viewport={"width": PHONE, "height": 800}) as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        complaints = gather_complaints(page, url)
        for paths in ("**/debug/**", "**/reset_*"):
            page.route(paths, server.answer)
        yield page
        of_page = [each for each in complaints if not each.startswith(("Failed to load resource", "blob:"))]
        assert of_page == []


@pytest.fixture
def shown(page: Page, url: str) -> Page:
    page.goto(url + "dashboard")
    expect(page.get_by_role("heading", name="Recent requests")).to_be_visible()
    return page


def look_again(page: Page) -> None:
    """Make the page refresh now, as when its tab becomes visible, rather than within a second."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def cache(page: Page, name: str) -> Locator:
    return page.get_by_role("article", name=name)


def lines(page: Page) -> Locator:
    return page.locator("#requests > li")


def stage(line: Locator, name: str) -> Locator:
    return line.locator(".opened li").filter(has_text=name)


def test_each_cache_shows_its_fill_hit_rate_and_saved_time(shown: Page) -> None:
    encoder = cache(shown, "Encoder cache")
    expect(encoder).to_contain_text("2 MiB of 4 MiB")
    # Items missing in one tier are looked up in the next: 7 of 10 were found.
    expect(encoder.locator(".hits")).to_have_text("70 %")
    expect(encoder.locator(".saved")).to_have_text("1.5 s")
    expect(encoder).to_contain_text("Set aside: it does not answer")
    expect(encoder.get_by_role("meter", name="Device, full")).to_have_attribute("aria-valuenow", "50")
    expect(encoder).not_to_contain_text("Host memory")
    expect(cache(shown, "Prefix cache").locator(".hits")).to_have_text("75 %")


def test_a_cache_that_is_switched_off_has_no_card(shown: Page, server: Server) -> None:
    server.state["caches"][-1] = tier("prefix", "device", 0, 0, 0, 0)
    expect(cache(shown, "Prefix cache")).to_have_count(0)
    expect(cache(shown, "Encoder cache")).to_be_visible()


def test_the_numbers_of_running_and_waiting_requests_are_shown(shown: Page, server: Server) -> None:
    expect(shown.get_by_text("Now:")).to_have_text("Now: 3 answers under way, 0 waiting.")
    server.state |= {"running": 1, "waiting": 1200}
    expect(shown.get_by_text("Now:")).to_have_text("Now: 1 answer under way, 1,200 waiting.")


def test_the_page_updates_in_place_while_visible(shown: Page, server: Server) -> None:
    shown.evaluate("document.querySelector('article').mark = 'the same'")
    server.state["caches"][0]["bytes"] = 3 * MIB
    expect(cache(shown, "Processor cache")).to_contain_text("3 MiB of 4 MiB")
    expect(cache(shown, "Processor cache").get_by_role("meter")).to_have_attribute("aria-valuenow", "75")
    assert shown.evaluate("document.querySelector('article').mark") == "the same"


def test_a_hidden_page_sends_no_requests(shown: Page, server: Server) -> None:
    expect(shown.get_by_role("img", name="Picture")).to_have_count(2)  # the last that it asks for
    shown.evaluate("""() => {
        Object.defineProperty(document, "hidden", { value: true, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    shown.wait_for_timeout(300)  # for requests in flight
    before = len(server.asked)
    shown.wait_for_timeout(1300)
    assert len(server.asked) == before
    with shown.expect_request("**/debug/state*"):
        shown.evaluate("""() => {
            Object.defineProperty(document, "hidden", { value: false, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""")


def test_a_request_opens_to_its_stages_and_what_was_skipped_is_drawn_as_skipped(shown: Page) -> None:
    warm, cold = lines(shown).nth(0), lines(shown).nth(1)
    expect(warm).to_contain_text("1 picture: encoder cache (disk)")
    expect(cold).to_contain_text("1 picture: made anew")
    warm.locator("summary").click()
    expect(stage(warm, "encode")).to_have_class("skipped")
    expect(stage(warm, "encode")).to_contain_text("skipped")
    expect(stage(warm, "encode").locator("i")).to_have_count(0)
    expect(stage(warm, "load")).to_contain_text("2 ms")
    expect(stage(warm, "transfer")).to_have_count(0)
    cold.locator("summary").click()
    expect(stage(cold, "encode")).to_contain_text("40 ms")
    expect(stage(cold, "encode").locator("i")).to_be_visible()


def test_a_selection_in_an_open_request_survives_a_longer_request(shown: Page, server: Server) -> None:
    lines(shown).nth(1).locator("summary").click()
    lines(shown).nth(1).locator(".opened p").evaluate("(told) => getSelection().selectAllChildren(told)")
    slow = request("slow", [], ("prefill", 0, 800))
    server.state["requests"] = [slow, *server.state["requests"]]
    look_again(shown)
    expect(lines(shown)).to_have_count(3)
    assert "cold" in shown.evaluate("getSelection().toString()")
    assert "left: 1.25%" in (lines(shown).nth(2).locator(".strip i").nth(1).get_attribute("style") or "")


def test_requests_with_the_same_id_are_all_shown_and_open_ones_stay_open(shown: Page, server: Server) -> None:
    lines(shown).nth(1).locator("summary").click()
    server.state["requests"] = [COLD, COLD, *server.state["requests"]]
    look_again(shown)
    expect(lines(shown)).to_have_count(4)
    expect(lines(shown).nth(3).locator("details")).to_have_attribute("open", "")
    server.state["requests"] = server.state["requests"][1:]
    look_again(shown)
    expect(lines(shown)).to_have_count(3)


def test_very_many_pictures_are_shown_as_a_number(shown: Page, server: Server) -> None:
    server.state["requests"] = [COLD | {"num_media": 40}]
    look_again(shown)
    expect(lines(shown)).to_have_count(1)
    expect(lines(shown)).to_contain_text("40 pictures: 1 made anew, 39 not told")


@pytest.mark.parametrize(
    ("modalities", "line", "opened"),
    [
        (("video", "video"), "2 film moments: made anew", "Film moment 2: made anew"),
        (("audio", "audio"), "2 sounds: made anew", "Sound 1: made anew"),
        (("image", "audio"), "2 items: made anew", "Picture 1: made anew"),
        (("image_embeds", "prompt_embeds"), "2 embeddings: made anew", "Embedding 2: made anew"),
    ],
)
def test_items_are_called_what_they_are(
    shown: Page, server: Server, modalities: tuple[str, ...], line: str, opened: str
) -> None:
    server.state["requests"] = [request("r", [found("nobody", modality=each) for each in modalities])]
    look_again(shown)
    expect(lines(shown)).to_have_count(1)
    expect(lines(shown)).to_contain_text(line)
    lines(shown).locator("summary").click()
    expect(lines(shown)).to_contain_text(opened)


def test_a_failed_request_is_shown_as_failed_with_its_duration(shown: Page, server: Server) -> None:
    unanswered = found("nobody") | {"answered_by": None}
    failed = request("failed", [unanswered]) | {"status": "error", "completion_tokens": 0, "ms": 9000.0}
    server.state["requests"] = [failed, COLD | {"status": "abort"}]
    look_again(shown)
    expect(lines(shown).nth(0)).to_contain_text("1 picture: not answered · failed")
    expect(lines(shown).nth(0).locator(".took")).to_have_text("9 s")
    expect(lines(shown).nth(1)).to_contain_text("1 picture: made anew · its client left")


def test_a_request_id_is_shown_as_text_not_html(shown: Page, server: Server) -> None:
    server.state["requests"] = [COLD | {"id": "<img src=x onerror=alert(1)>"}]
    look_again(shown)
    expect(lines(shown)).to_have_count(1)
    lines(shown).locator("summary").click()
    expect(lines(shown)).to_contain_text("<img src=x onerror=alert(1)>")


def test_a_picture_is_pinned_and_a_cache_cleared_by_the_keyboard_alone(shown: Page, server: Server) -> None:
    expect(shown.get_by_role("img", name="Picture")).to_have_count(2)
    reached = []
    for _ in range(6):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent"))
    first, second = (f"Pin picture {name_of(number)[:8]}" for number in (1, 2))
    clear = [f"Clear the {each} cache" for each in ("processor", "encoder", "prefix")]
    assert reached == ["Chat", *clear, first, second]
    server.order = (2, 1)  # pinning counts as a use
    shown.keyboard.press("Enter")
    expect(shown.get_by_role("status")).to_have_text("Not pinned any more.")
    expect(shown.get_by_role("button", name=second)).to_have_attribute("aria-pressed", "false")
    expect(shown.get_by_role("button", name=second)).to_be_focused()
    shown.keyboard.press("Space")
    expect(shown.get_by_role("button", name=second)).to_have_attribute("aria-pressed", "true")
    for _ in range(3):
        shown.keyboard.press("Shift+Tab")
    shown.keyboard.press("Enter")
    expect(shown.get_by_role("status")).to_have_text("The encoder cache was cleared.")
    assert "POST reset_encoder_cache" in server.asked
    assert shown.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_pin_set_elsewhere_or_expired_is_shown_even_if_no_number_changes(shown: Page, server: Server) -> None:
    second = shown.get_by_role("button", name=f"Pin picture {name_of(2)[:8]}")
    expect(second).to_have_attribute("aria-pressed", "true")
    server.pins = set()
    shown.evaluate("Date.now = ((now) => () => now() + 10_000)(Date.now)")
    expect(second).to_have_attribute("aria-pressed", "false")


def test_a_thumbnail_that_failed_to_load_is_requested_again(shown: Page, server: Server) -> None:
    shown.route(f"**/debug/pictures/{name_of(3)}", lambda route: route.fulfill(status=404, json={}), times=1)
    seen = shown.get_by_role("img", name=f"Picture {name_of(3)[:8]}")
    server.order = (1, 2, 3)
    for held in (4, 5):
        server.state["caches"][0]["entries"] = held
        look_again(shown)
        expect(cache(shown, "Processor cache")).to_contain_text(f"{held} items")
        expect(seen).to_be_visible()
    expect(seen).to_have_js_property("naturalWidth", 40)


def test_without_thumbnails_there_is_no_place_for_them(page: Page, url: str, server: Server) -> None:
    server.pins = None
    page.goto(url + "dashboard")
    expect(lines(page)).to_have_count(2)
    expect(page.get_by_role("heading", name="Pictures in the processor cache")).to_be_hidden()
    with page.expect_response("**/debug/state*"):
        look_again(page)
    assert server.asked.count("GET pictures") == 1


def test_without_the_administrator_s_key_the_page_only_asks_for_it(page: Page, url: str, server: Server) -> None:
    server.key = "open sesame"
    page.goto(url + "dashboard")
    expect(page.get_by_role("alert")).to_have_text("a key is needed")
    expect(page.get_by_role("heading", name="Recent requests")).to_be_hidden()
    expect(page.get_by_label("Admin key")).to_be_focused()
    page.keyboard.type("open sesame")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Recent requests")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    page.reload()
    expect(lines(page)).to_have_count(2)


def test_a_key_that_cannot_be_sent_in_a_header_is_rejected(page: Page, url: str, server: Server) -> None:
    server.key = "open sesame"
    page.goto(url + "dashboard")
    page.get_by_label("Admin key").fill("open sesame\u200b")
    page.get_by_label("Admin key").press("Enter")
    expect(page.get_by_label("Admin key")).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('admin-key')") is None


def test_an_unreachable_server_is_reported_until_it_is_back(shown: Page, server: Server) -> None:
    shown.route("**/debug/state*", lambda route: route.abort())
    look_again(shown)
    expect(shown.get_by_role("alert")).to_have_text("The server cannot be reached.")
    shown.unroute("**/debug/state*")
    shown.route("**/debug/state*", server.answer)
    look_again(shown)
    expect(shown.get_by_role("alert")).to_be_hidden()


def test_a_server_that_does_not_answer_is_reported_and_asked_again(shown: Page, server: Server) -> None:
    shown.evaluate("AbortSignal.timeout = ((timeout) => () => timeout.call(AbortSignal, 100))(AbortSignal.timeout)")
    shown.route("**/debug/state*", lambda route: None)
    look_again(shown)
    expect(shown.get_by_role("alert")).to_have_text("The server cannot be reached.")
    shown.unroute("**/debug/state*")
    shown.route("**/debug/state*", server.answer)
    expect(shown.get_by_role("alert")).to_be_hidden()


def test_it_fits_a_phone_that_shows_everything_twice_as_large(shown: Page) -> None:
    shown.set_viewport_size({"width": 180, "height": 320})
    lines(shown).nth(1).locator("summary").click()
    assert shown.evaluate("document.documentElement.scrollWidth") <= 180
    # Wide enough for words, not one letter per line.
    assert shown.locator(".what").first.evaluate("(what) => what.clientWidth") > 80


def test_it_fits_a_phone(shown: Page, server: Server) -> None:
    server.state["requests"][0] |= {"id": "long" * 60, "media": [found("nobody"), found("prefix"), found("processor")]}
    look_again(shown)
    for line in (0, 1):
        lines(shown).nth(line).locator("summary").click()
    expect(lines(shown).nth(0)).to_contain_text("longlong")
    assert shown.evaluate("document.documentElement.scrollWidth") <= PHONE


def test_the_page_follows_the_dark_color_scheme(shown: Page) -> None:
    colours = []
    for scheme in ("light", "dark"):
        shown.emulate_media(color_scheme=scheme)
        colours.append(shown.evaluate("getComputedStyle(document.querySelector('article')).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(33, 31, 29)"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_bar_contrasts_with_its_background(shown: Page, scheme: Literal["light", "dark"]) -> None:
    """WCAG 2.2, 1.4.11, asks for a contrast of 3:1."""
    shown.emulate_media(color_scheme=scheme)
    for name in ("prepare", "wait", "encode", "prefill"):
        bar, behind = (
            shown.evaluate("(drawn) => getComputedStyle(document.querySelector(drawn)).backgroundColor", drawn)
            for drawn in (f"#legend .{name}", "body")
        )
        dark, light = sorted((luminance(bar), luminance(behind)))
        assert (light + 0.05) / (dark + 0.05) >= 3, name


def luminance(colour: str) -> float:
    """Return the relative luminance of a color like `rgb(255, 0, 0)`."""
    parts = (int(each) / 255 for each in re.findall(r"\d+", colour))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_bars_are_visible_with_forced_colors(shown: Page) -> None:
    shown.emulate_media(forced_colors="active")
    for drawn in ("#caches .bar i", "#legend .encode", "#requests .strip i"):
        colour = shown.evaluate("(drawn) => getComputedStyle(document.querySelector(drawn)).backgroundColor", drawn)
        assert colour != shown.evaluate("getComputedStyle(document.body).backgroundColor"), drawn


def test_with_a_real_server_a_second_request_about_a_picture_skips_most_stages(browser: Browser, url: str) -> None:
    drawn = draw(4711)
    # A picture that is new to this server, even if this test has run against it before.
    drawn.picture.paste(Image.frombytes("RGB", (4, 4), os.urandom(48)))
    with browser.new_context(viewport={"width": PHONE, "height": 800}) as context:
        page = context.new_page()
        page.goto(url + "dashboard")
        held = cache(page, "Encoder cache").locator("small").first
        expect(held).to_be_visible()
        before = held.text_content()
        for found_in, kind in (("made anew", ""), ("encoder cache", "skipped")):
            messages = ask(by_url(drawn.picture), drawn.questions[0].text)
            answer = page.request.post(url + "v1/chat/completions", data={"messages": messages, "max_tokens": 2})
            page.request.post(url + "reset_prefix_cache")
            newest = page.locator(f"#requests > li[data-name^='{answer.headers['x-request-id']} ']")
            expect(newest).to_contain_text(f"1 picture: {found_in}")
            newest.locator("summary").click()
            for name in ("decode", "resize", "encode"):
                expect(stage(newest, name)).to_have_class(kind)
        expect(held).not_to_have_text(before or "")
