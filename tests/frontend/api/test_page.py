"""The page at `/` in a real Chromium, served by a real server with the demo model."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    FilePayload,
    Locator,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

from keepsight.frontend.api.serve_page import PAGE_FILES
from tests.drawn import Drawn, draw, to_png
from tests.frontend.sample_films import film
from tests.frontend.sample_sounds import wav

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Chromium has no sandbox as root; and it should not contact Google.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PATIENCE_MS = 20_000
# For both pages together.
MAX_PAGE_BYTES = 46_700
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def url(server_port: int) -> str:
    return f"http://127.0.0.1:{server_port}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("THE PAGE IS NOT TESTED: there is no Chromium here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """A phone-sized page: what works there works anywhere. It must log no errors and contact no other host."""
    with browser.new_context(viewport={"width": 320, "height": 560}) as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.route("**/completions", answer_with_the_likeliest)
        complaints = gather_complaints(page, url)
        page.goto(url)
        expect(page.get_by_text("keepsight-demo")).to_be_visible()
        yield page
        # The browser itself logs refused requests, which are intended here.
        assert [each for each in complaints if not each.startswith("Failed to load resource")] == []


def gather_complaints(page: Page, url: str) -> list[str]:
    complaints: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(message.text)

    def see(asked: Request) -> None:
        if not asked.url.startswith((url, "data:")):
            complaints.append(asked.url)

    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", hear)
    page.on("request", see)
    return complaints


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(7)


def attach(page: Page, *drawings: Drawn) -> None:
    give_files(page, *drawings)
    expect(waiting_pictures(page)).to_have_count(len(drawings))


def give_files(page: Page, *drawings: Drawn) -> None:
    page.get_by_label("Choose pictures").set_input_files(
        [
            FilePayload(name=f"{index}.png", mimeType="image/png", buffer=to_png(each.picture))
            for index, each in enumerate(drawings)
        ]
    )


def waiting_pictures(page: Page) -> Locator:
    return page.get_by_role("list", name="Attached to the next message").get_by_role("img")


def message(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def send(page: Page, text: str) -> None:
    message(page).fill(text)
    message(page).press("Enter")


def answer(page: Page, turn: int = 0) -> Locator:
    return page.locator("#talk .assistant").nth(turn)


def give(page: Page, event: str, name: str, kind: str, content: bytes) -> None:
    """Dispatch the event of a file that is dropped or pasted."""
    page.evaluate(
        """([event, name, type, content]) => {
            const bytes = Uint8Array.from(atob(content), (each) => each.charCodeAt(0));
            const given = new DataTransfer();
            given.items.add(new File([bytes], name, { type }));
            const options = { bubbles: true, cancelable: true };
            document.querySelector("#text").dispatchEvent(
                event === "paste" ? new ClipboardEvent(event, { ...options, clipboardData: given })
                                  : new DragEvent(event, { ...options, dataTransfer: given }));
        }""",
        [event, name, kind, base64.b64encode(content).decode()],
    )


def answer_with_the_likeliest(route: Route) -> None:
    """Sample greedily: the page uses the server's default, and one answer in 4000 to "Hello" is not "Hello!"."""
    route.continue_(post_data={**body_of(route.request), "temperature": 0})


def make_endless(route: Route) -> None:
    # With the penalty nothing is repeated, so nothing is guessed, and the context is not full before Stop is pressed.
    route.fallback(post_data={**body_of(route.request), "ignore_eos": True, "frequency_penalty": 2})


def body_of(request: Request) -> dict[str, Any]:
    body = request.post_data_json
    assert isinstance(body, dict)
    return body


def messages_of(request: Request) -> Any:
    return body_of(request)["messages"]


def test_a_picture_is_shown_and_sent_with_later_questions_too(page: Page, drawn: Drawn) -> None:
    attach(page, drawn)
    send(page, drawn.questions[0].text)
    expect(answer(page)).to_contain_text(drawn.description)
    expect(answer(page).locator("small")).to_contain_text("first token")
    expect(waiting_pictures(page)).to_have_count(0)

    colour = next(question for question in drawn.questions if question.kind == "colour")
    with page.expect_request("**/chat/completions") as asked:
        send(page, colour.text)
    expect(answer(page, 1)).to_contain_text(colour.answer)
    [shown, answered, _question] = messages_of(asked.value)
    assert shown["content"][0] == {"type": "image_url", "image_url": {"url": drawn.data_url}}
    assert answered == {"role": "assistant", "content": drawn.description}


def test_an_answer_shows_its_statistics(page: Page, drawn: Drawn) -> None:
    attach(page, drawn)
    send(page, drawn.questions[0].text)
    cost = answer(page).locator("small")
    expect(cost).to_contain_text("tokens/s")
    expect(cost).to_contain_text("prompt tokens cached")


def test_several_pictures_go_in_their_order_and_one_can_be_removed(page: Page) -> None:
    drawings = [draw(seed) for seed in (1, 2, 3)]
    attach(page, *drawings)
    page.get_by_role("button", name="Remove 1.png").click()
    with page.expect_request("**/chat/completions") as asked:
        send(page, "List the pictures.")
    *pictures, _text = messages_of(asked.value)[0]["content"]
    assert [each["image_url"]["url"] for each in pictures] == [drawings[0].data_url, drawings[2].data_url]
    expect(answer(page)).to_contain_text("1: ")


@pytest.mark.parametrize("event", ["paste", "drop"])
def test_a_picture_can_be_pasted_and_dropped(page: Page, drawn: Drawn, event: str) -> None:
    give(page, event, "x.png", "image/png", to_png(drawn.picture))
    expect(waiting_pictures(page)).to_have_attribute("src", drawn.data_url)


def test_a_file_that_is_not_a_picture_is_rejected_with_a_message(page: Page) -> None:
    give(page, "drop", "notes.txt", "text/plain", b"hello")
    expect(page.get_by_role("alert")).to_have_text("notes.txt is not a picture, film, recording or PDF.")
    expect(waiting_pictures(page)).to_have_count(0)


@pytest.mark.parametrize(
    ("kind", "format_", "content"), [("video", "webm", film("webm", "libvpx")), ("audio", "wav", wav())]
)
def test_a_film_and_a_recording_can_be_played_before_and_after_they_are_sent(
    page: Page, kind: str, format_: str, content: bytes
) -> None:
    name, waiting = f"x.{format_}", page.get_by_role("list", name="Attached to the next message").locator(kind)
    give(page, "drop", name, f"{kind}/{format_}", content)
    url = f"data:{kind}/{format_};base64,{base64.b64encode(content).decode()}"
    for shown in (waiting, page.locator(f"#talk .user {kind}")):
        expect(shown).to_have_attribute("src", url)
        expect(shown).to_have_attribute("aria-label", name)
        page.wait_for_function("(shown) => shown.readyState >= 1", arg=shown.element_handle())
        if shown is waiting:
            tell(page, {"content": "Heard."})
            with page.expect_request("**/chat/completions") as asked:
                send(page, "What is it?")
            part = messages_of(asked.value)[0]["content"][0]
            assert part == {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def test_a_pdf_is_shown_by_its_name_and_sent_with_it(page: Page) -> None:
    give(page, "drop", "report.pdf", "application/pdf", b"%PDF-")
    expect(page.get_by_role("list", name="Attached to the next message")).to_contain_text("report.pdf")
    tell(page, {"content": "A report."})
    with page.expect_request("**/chat/completions") as asked:
        send(page, "What is it?")
    expect(page.locator("#talk .user")).to_contain_text("report.pdf")
    url = f"data:application/pdf;base64,{base64.b64encode(b'%PDF-').decode()}"
    part = messages_of(asked.value)[0]["content"][0]
    assert part == {"type": "file", "file": {"file_data": url, "filename": "report.pdf"}}


def hold_back_reading(page: Page) -> None:
    """Make the page read no file until the test calls `goOn`, once for each."""
    page.evaluate("""() => {
        const read = FileReader.prototype.readAsDataURL;
        FileReader.prototype.readAsDataURL = function (file) { window.goOn = () => read.call(this, file); };
    }""")


def hold_back_all_reading(page: Page) -> None:
    """Make the page read no file until the test calls `goOn` or `fail` of one of them in `held`."""
    page.evaluate("""() => {
        const read = FileReader.prototype.readAsDataURL;
        window.held = [];
        FileReader.prototype.readAsDataURL = function (file) {
            held.push({ goOn: () => read.call(this, file), fail: () => this.onerror() });
        };
    }""")


def make_unreadable(page: Page, name: str) -> None:
    page.evaluate(
        """(name) => {
        const read = FileReader.prototype.readAsDataURL;
        FileReader.prototype.readAsDataURL = function (file) {
            file.name === name ? setTimeout(() => this.onerror()) : read.call(this, file);
        };
    }""",
        name,
    )


def test_an_unreadable_file_does_not_hide_the_others(page: Page) -> None:
    make_unreadable(page, "1.png")
    give_files(page, draw(1), draw(2), draw(3))
    expect(waiting_pictures(page)).to_have_count(2)
    expect(page.get_by_role("alert")).to_have_text("1.png cannot be read.")


def test_a_file_still_being_read_stays_while_others_are_removed(page: Page) -> None:
    attach(page, draw(1))
    hold_back_reading(page)
    give_files(page, draw(2))
    page.get_by_role("button", name="Remove 0.png").click()
    expect(waiting_pictures(page)).to_have_count(0)
    page.evaluate("goOn()")
    expect(waiting_pictures(page)).to_have_attribute("src", draw(2).data_url)


def test_a_question_waits_for_the_files_that_are_being_read(page: Page) -> None:
    drawings, waiting = [draw(1), draw(2)], page.get_by_role("list", name="Attached to the next message")
    hold_back_reading(page)
    give_files(page, *drawings)
    expect(waiting).to_contain_text("2 being read")
    send(page, "List the pictures.")
    page.evaluate("goOn()")
    expect(waiting).to_contain_text("1 being read")
    expect(waiting_pictures(page)).to_have_count(1)
    assert page.locator("#talk li").count() == 0
    with page.expect_request("**/chat/completions") as asked:
        page.evaluate("goOn()")
    *pictures, question = messages_of(asked.value)[0]["content"]
    assert [each["image_url"]["url"] for each in pictures] == [each.data_url for each in drawings]
    assert question["text"] == "List the pictures."
    expect(waiting_pictures(page)).to_have_count(0)


def test_a_question_about_a_file_that_cannot_be_read_stays_in_the_form(page: Page) -> None:
    hold_back_reading(page)
    make_unreadable(page, "1.png")
    give_files(page, draw(1), draw(2))
    send(page, "List the pictures.")
    page.evaluate("goOn()")
    expect(page.get_by_role("alert")).to_have_text("1.png cannot be read.")
    expect(page.get_by_role("list", name="Attached to the next message")).not_to_contain_text("being read")
    expect(waiting_pictures(page)).to_have_count(1)
    expect(message(page)).to_have_value("List the pictures.")


def test_escape_keeps_a_question_that_waits_for_its_files(page: Page) -> None:
    hold_back_reading(page)
    give_files(page, draw(1))
    send(page, "What is in this picture?")
    page.keyboard.press("Escape")
    page.evaluate("goOn()")
    expect(waiting_pictures(page)).to_have_count(1)
    expect(message(page)).to_have_value("What is in this picture?")


def test_a_question_that_waits_for_its_files_can_be_canceled_without_a_keyboard(page: Page) -> None:
    hold_back_reading(page)
    give_files(page, draw(1))
    message(page).fill("What is in this picture?")
    page.get_by_role("button", name="Send").dblclick()  # the second click of it cancels nothing
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.evaluate("goOn()")
    expect(waiting_pictures(page)).to_have_count(1)
    expect(message(page)).to_have_value("What is in this picture?")


def test_a_question_that_is_changed_while_it_waits_for_its_files_is_not_sent_half_typed(page: Page) -> None:
    hold_back_reading(page)
    give_files(page, draw(1))
    send(page, "What colour")
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    message(page).press_sequentially(" is")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.evaluate("goOn()")
    expect(waiting_pictures(page)).to_have_count(1)
    expect(message(page)).to_have_value("What colour is")


def test_a_file_that_is_never_read_can_be_forgotten(page: Page) -> None:
    hold_back_reading(page)
    give_files(page, draw(1))
    send(page, "Hello")
    page.get_by_role("button", name="Remove files being read").click()
    expect(page.get_by_role("list", name="Attached to the next message")).to_be_hidden()
    assert page.get_by_label("Choose pictures").input_value() == ""
    expect(message(page)).to_have_value("Hello")
    message(page).press("Enter")
    expect(answer(page)).to_contain_text("Hello!")


def test_a_new_chat_does_not_wait_for_the_files_of_the_one_before(page: Page) -> None:
    hold_back_reading(page)
    give_files(page, draw(1))
    page.get_by_role("button", name="New chat").click()
    assert page.get_by_label("Choose pictures").input_value() == ""
    send(page, "Hello")
    expect(answer(page)).to_contain_text("Hello!")


def test_a_file_of_the_chat_before_fails_unnoticed(page: Page) -> None:
    hold_back_all_reading(page)
    give_files(page, draw(1))
    page.get_by_role("button", name="New chat").click()
    give_files(page, draw(2))
    send(page, "What is in this picture?")
    page.evaluate("held[0].fail()")
    expect(page.get_by_role("list", name="Attached to the next message")).to_contain_text("1 being read")
    expect(page.get_by_role("alert")).to_be_hidden()
    with page.expect_request("**/chat/completions") as asked:
        page.evaluate("held[1].goOn()")
    picture, _question = messages_of(asked.value)[0]["content"]
    assert picture["image_url"]["url"] == draw(2).data_url


def test_the_focus_stays_on_a_button_while_files_are_read(page: Page) -> None:
    attach(page, draw(1))
    hold_back_all_reading(page)
    give_files(page, draw(2), draw(3))
    page.get_by_role("button", name="Remove 0.png").focus()
    page.evaluate("held[0].goOn()")
    expect(waiting_pictures(page)).to_have_count(2)
    expect(page.get_by_role("button", name="Remove 0.png").first).to_be_focused()


def test_a_held_enter_sends_nothing_again(page: Page) -> None:
    page.keyboard.down("Enter")
    message(page).fill("Hello")  # as if it came back from a server that cannot be reached
    page.keyboard.down("Enter")
    assert page.locator("#talk li").count() == 0
    expect(message(page)).to_have_value("Hello")


def test_a_double_click_sends_once_and_stops_nothing(page: Page) -> None:
    message(page).fill("Hello")
    page.get_by_role("button", name="Send").dblclick()
    expect(answer(page)).to_contain_text("Hello!")
    expect(answer(page)).to_contain_text("prompt tokens cached")
    expect(page.locator("#talk li")).to_have_count(2)
    expect(message(page)).to_have_value("")


def test_the_enter_that_ends_a_composition_in_safari_sends_nothing(page: Page) -> None:
    message(page).fill("\u306b\u307b\u3093")
    enter = {"key": "Enter", "keyCode": 229, "bubbles": True, "cancelable": True}
    page.evaluate("(enter) => text.dispatchEvent(new KeyboardEvent('keydown', enter))", enter)
    assert page.locator("#talk li").count() == 0
    message(page).press("Enter")
    expect(page.locator("#talk li")).to_have_count(2)


@pytest.mark.parametrize(("copied", "is_text"), [("A1\tB1", True), (" \r\n", False)])
def test_text_that_is_copied_with_a_picture_of_it_is_pasted_as_text_unless_it_is_blank(
    page: Page, copied: str, is_text: bool
) -> None:
    prevented = page.evaluate(
        """(copied) => {
        const clipboardData = new DataTransfer();
        clipboardData.setData("text/plain", copied);
        clipboardData.setData("text/html", "<table><tr><td>A1<td>B1</table>");
        clipboardData.items.add(new File(["x"], "image.png", { type: "image/png" }));
        const paste = new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData });
        text.dispatchEvent(paste);
        return paste.defaultPrevented;
    }""",
        copied,
    )
    assert prevented != is_text
    expect(waiting_pictures(page)).to_have_count(0 if is_text else 1)


def test_a_refusal_names_the_file_that_it_is_about(page: Page) -> None:
    send(page, "Hello")
    expect(answer(page)).to_contain_text("prompt tokens cached")
    give_files(page, draw(1))
    give(page, "drop", "holiday.png", "image/png", b"\x89PNG but not really")
    expect(waiting_pictures(page)).to_have_count(2)
    send(page, "What is in these pictures?")
    expect(page.get_by_role("alert")).to_contain_text("holiday.png: messages[2].content[1].image_url")


def test_an_answer_is_streamed_and_can_be_stopped(page: Page) -> None:
    page.route("**/chat/completions", make_endless)
    send(page, "Hello")
    expect(answer(page)).to_contain_text("Hello")
    expect(answer(page)).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(answer(page)).to_contain_text("not finished")
    expect(page.get_by_role("alert")).to_be_hidden()

    page.unroute("**/chat/completions")
    with page.expect_request("**/chat/completions") as asked:
        send(page, "What is in this picture?")
    shown = messages_of(asked.value)[1]["content"]
    assert shown
    assert answer(page).locator("p").text_content() == shown


def test_escape_stops_an_answer_that_has_not_begun_and_restores_the_question(page: Page) -> None:
    page.route("**/chat/completions", lambda route: None)  # never answered
    send(page, "Hello")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(message(page)).to_have_value("Hello")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_question_can_be_stopped_before_the_models_are_known(page: Page) -> None:
    page.route("**/v1/models", lambda route: None)  # never answered
    page.reload()
    send(page, "Hello")
    page.get_by_role("button", name="Stop").click()
    expect(message(page)).to_have_value("Hello")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_restored_question_precedes_what_was_typed_meanwhile(page: Page) -> None:
    page.route("**/chat/completions", lambda route: None)  # never answered
    send(page, "one\ntwo\nthree")
    message(page).fill("four")
    page.keyboard.press("Escape")
    expect(message(page)).to_have_value("one\ntwo\nthree\nfour")
    assert page.evaluate("(text) => text.scrollHeight <= text.clientHeight", message(page).element_handle())


def test_a_refusal_shows_the_server_s_message_and_restores_the_question(page: Page) -> None:
    give(page, "drop", "x.png", "image/png", b"\x89PNG but not really")
    expect(waiting_pictures(page)).to_have_count(1)
    send(page, "What is in this picture?")
    expect(page.get_by_role("alert")).to_contain_text("image_url")
    expect(message(page)).to_have_value("What is in this picture?")
    page.get_by_role("button", name="Remove x.png").click()
    send(page, "Hello")
    expect(answer(page)).to_contain_text("Hello!")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_broken_answer_is_marked_and_stays(page: Page) -> None:
    events = 'data: {"choices": [{"delta": {"content": "Once"}}]}\n\ndata: {"error": {"message": "It broke."}}\n\n'
    page.route("**/chat/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    send(page, "Hello")
    expect(page.get_by_role("alert")).to_have_text("It broke.")
    expect(answer(page)).to_contain_text("Once")


def test_a_thought_is_above_its_answer_and_can_be_opened_by_keyboard(page: Page) -> None:
    tell(
        page, {"reasoning_content": "Let me see. "}, {"reasoning_content": "Red?"}, {"content": "Red"}, {"content": "."}
    )
    send(page, "Hello")
    expect(answer(page)).to_contain_text("tokens/s")
    thought, summary = answer(page).get_by_text("Let me see. Red?", exact=True), answer(page).get_by_text("Thought")
    expect(thought).to_be_hidden()
    summary.focus()
    page.keyboard.press("Enter")
    expect(thought).to_be_visible()
    (_, above, _, height), (_, below, _, _) = (box_of(each) for each in (thought, answer(page).locator("> p")))
    assert above + height <= below
    with page.expect_request("**/chat/completions") as asked:
        send(page, "And now?")
    assert messages_of(asked.value)[1] == {"role": "assistant", "content": "Red."}


def test_a_thought_is_visible_until_the_answer_begins(page: Page) -> None:
    tell(page, {"reasoning_content": "Let me see"}, end="length")
    send(page, "Hello")
    expect(answer(page)).to_contain_text("cut at the token limit")
    expect(answer(page).get_by_text("Let me see")).to_be_visible()


def tell(page: Page, *deltas: dict[str, str], end: str = "stop") -> None:
    """Answer in place of the server, whose model does not think."""
    chunks: list[Any] = [{"choices": [{"delta": each, "finish_reason": None}]} for each in deltas]
    chunks += [{"choices": [{"delta": {}, "finish_reason": end}]}]
    chunks += [{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 9}}]
    events = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
    page.route("**/chat/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream"))


def box_of(shown: Locator) -> tuple[float, float, float, float]:
    box = shown.bounding_box()
    assert box is not None
    return box["x"], box["y"], box["width"], box["height"]


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_an_answer_that_was_cut_says_so(page: Page, max_tokens: int) -> None:
    page.unroute("**/completions")
    likeliest = {"temperature": 0, "max_tokens": max_tokens}
    page.route("**/completions", lambda route: route.continue_(post_data=body_of(route.request) | likeliest))
    send(page, "Hello")
    expect(answer(page)).to_contain_text("prompt tokens cached" + " · cut at the token limit" * (max_tokens == 1))
    assert ("cut" in (answer(page).text_content() or "")) == (max_tokens == 1)


def test_a_refusal_without_a_message_shows_its_status(page: Page) -> None:
    page.route("**/chat/completions", lambda route: route.fulfill(status=502, body="<html>Bad gateway"))
    send(page, "Hello")
    expect(page.get_by_role("alert")).to_have_text("The server answered 502 Bad Gateway.")


def test_an_unreachable_server_is_reported(page: Page) -> None:
    page.route("**/chat/completions", lambda route: route.abort())
    send(page, "Hello")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")


def test_a_server_restarted_with_another_model_is_asked_for_that_one(page: Page) -> None:
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "gone"}]}))
    page.reload()
    expect(page.get_by_text("gone")).to_be_visible()
    page.unroute("**/v1/models")
    send(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("gone")
    message(page).press("Enter")
    expect(answer(page)).to_contain_text("Hello!")
    expect(page.get_by_text("keepsight-demo", exact=True)).to_be_visible()


def test_a_required_key_is_asked_for_and_kept_for_the_session(page: Page) -> None:
    def guard(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer open sesame":
            route.fallback()
        else:
            route.fulfill(status=401, json={"error": {"message": "a key is needed"}})

    page.route("**/v1/**", guard)
    expect(page.get_by_label("API key")).to_be_hidden()
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("a key is needed")
    page.get_by_label("API key").fill("open sesame")
    page.get_by_label("API key").press("Enter")
    expect(page.get_by_text("keepsight-demo")).to_be_visible()
    page.reload()
    send(page, "Hello")
    expect(answer(page)).to_contain_text("Hello!")
    expect(page.get_by_label("API key")).to_be_hidden()


def test_a_key_that_cannot_be_sent_in_a_header_is_rejected(page: Page) -> None:
    page.route("**/v1/models", lambda route: route.fulfill(status=401, json={"error": {"message": "a key is needed"}}))
    page.reload()
    key = page.get_by_label("API key")
    key.fill("from a web page\u2026")
    key.press("Enter")
    expect(key).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('key')") is None
    page.unroute("**/v1/models")
    key.fill("schl\u00fcssel")
    key.press("Enter")
    expect(page.get_by_text("keepsight-demo")).to_be_visible()


def test_a_new_chat_begins_empty(page: Page) -> None:
    send(page, "Hello")
    expect(answer(page)).to_contain_text("prompt tokens cached")
    page.get_by_role("button", name="New chat").click()
    expect(answer(page)).to_have_count(0)
    expect(message(page)).to_be_focused()
    with page.expect_request("**/chat/completions") as asked:
        send(page, "Hello again")
    assert len(messages_of(asked.value)) == 1


def test_a_new_chat_ends_the_answer_and_forgets_what_was_to_be_sent(page: Page) -> None:
    page.route("**/chat/completions", lambda route: None)  # never answered
    send(page, "Hello")
    hold_back_reading(page)
    give_files(page, draw(1))
    message(page).fill("And this?")
    page.get_by_role("button", name="New chat").click()
    page.evaluate("goOn()")
    expect(page.get_by_role("list", name="Attached to the next message")).to_be_hidden()
    expect(page.get_by_text("Drop, paste or choose a picture")).to_be_visible()
    expect(page.locator("#talk li")).to_have_count(0)
    expect(message(page)).to_have_value("")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_new_chat_needs_no_server(page: Page) -> None:
    send(page, "Hello")
    expect(answer(page)).to_contain_text("prompt tokens cached")
    page.context.set_offline(True)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#talk li")).to_have_count(0)
    expect(message(page)).to_be_focused()


def test_everything_is_reached_by_the_keyboard(page: Page) -> None:
    attach(page, draw(7))
    reached = []
    page.get_by_role("button", name="New chat").focus()
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.ariaLabel"))
    assert reached == ["talk", "Remove 0.png", "files", "text", "send"]


def test_shift_and_enter_begin_a_new_line(page: Page) -> None:
    message(page).press_sequentially("one")
    message(page).press("Shift+Enter")
    message(page).press_sequentially("two")
    expect(message(page)).to_have_value("one\ntwo")


def test_it_fits_a_phone_with_long_words_and_wide_pictures(page: Page, drawn: Drawn) -> None:
    attach(page, drawn, drawn, drawn, drawn, drawn)
    send(page, "long" * 60)
    expect(answer(page).locator("small")).not_to_be_empty()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert page.evaluate("document.querySelector('#talk').scrollWidth") <= 320


def test_it_fits_a_phone_that_shows_everything_twice_as_large(page: Page) -> None:
    page.set_viewport_size({"width": 180, "height": 320})
    assert page.evaluate("document.documentElement.scrollWidth") <= 180
    # The name does not overlap the button beside it.
    assert page.get_by_role("heading").evaluate("(name) => name.scrollWidth <= name.clientWidth")


def test_many_pictures_and_long_refusals_leave_room_for_the_conversation(page: Page, drawn: Drawn) -> None:
    refusal = {"error": {"message": "no " * 2000}}
    page.route("**/chat/completions", lambda route: route.fulfill(status=400, json=refusal))
    attach(page, *[drawn] * 30)
    send(page, "Hello")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollHeight") <= 560
    assert page.evaluate("document.querySelector('main').clientHeight") > 50


def test_the_end_of_the_conversation_stays_in_sight_whatever_grows(page: Page, drawn: Drawn) -> None:
    for turn in range(2):
        attach(page, drawn)
        send(page, drawn.questions[0].text)
        expect(answer(page, turn).locator("small")).to_contain_text("cached")
        expect(answer(page, turn).locator("small")).to_be_in_viewport()
    attach(page, drawn)
    expect(answer(page, 1).locator("small")).to_be_in_viewport()


def test_the_page_follows_the_dark_color_scheme(page: Page) -> None:
    def brightness() -> int:
        colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    page.emulate_media(color_scheme="light")
    assert brightness() > 600
    page.emulate_media(color_scheme="dark")
    assert brightness() < 150


def test_a_model_s_answer_is_shown_as_text_not_html(page: Page) -> None:
    events = 'data: {"choices": [{"delta": {"content": "<img src=x onerror=alert(1)>"}}]}\n\ndata: [DONE]\n\n'
    page.route("**/chat/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    send(page, "Hello")
    expect(answer(page)).to_contain_text("<img src=x onerror=alert(1)>")


def test_the_pages_are_small() -> None:
    folder = Path(__file__).parents[3] / "src" / "keepsight" / "frontend" / "page"
    assert {each.name for each in folder.iterdir()} == set(PAGE_FILES.values())
    assert sum(each.stat().st_size for each in folder.iterdir()) < MAX_PAGE_BYTES
