"""The pictures of docs/dashboard.md: a server is asked about drawn pictures, and its dashboard is looked at.

    python docs/make_screenshots.py

Needs what `make install-test` installs.  Numbers on them are of the machine that made them.
"""

import base64
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from keepsight.demo.draw_scene import draw_scene
from keepsight.demo.scenes import plain_look, random_scene

FOLDER = Path(__file__).parent
MAX_BYTES = 150_000
# Small enough that bars can be seen to fill.
BUDGETS = ["--mm-processor-cache-gb", "0.0008", "--encoder-cache-gb", "0.00006", "--encoder-host-cache-gb", "0.0001"]
DISK = "300KiB"
QUESTIONS = ("What is in this picture?", "What colour is it?", "What is in this picture?")
NUM_PICTURES = 18


@contextmanager
def serving(disk: str) -> Iterator[str]:
    command = [sys.executable, "-m", "keepsight", "serve", "--port", "0", "--no-log-requests", *BUDGETS]
    command += ["--dashboard-thumbnails", "--encoder-disk-cache", f"{disk}:{DISK}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"served on (http://\S+?)/v1", line) for line in process.stderr)))
            yield found[1]
        finally:
            process.terminate()
            process.communicate()


def ask(url: str, picture: str, question: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
    body = json.dumps({"temperature": 0, "messages": [{"role": "user", "content": content}]}).encode()
    post(f"{url}/v1/chat/completions", body)


def post(url: str, body: bytes) -> None:
    with urllib.request.urlopen(url, body) as answer:
        answer.read()


def draw(seed: int) -> str:
    content = io.BytesIO()
    draw_scene(random_scene(Random(seed), 1, look=plain_look(896))).save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def fill_caches(url: str) -> None:
    """Let every cache answer: nearer ones are cleared, or too small, when a question is repeated."""
    pictures = [draw(seed) for seed in range(NUM_PICTURES)]
    for picture in pictures[: NUM_PICTURES // 2]:
        for question in QUESTIONS[:2]:
            ask(url, picture, question)
    for cache in ("prefix", "encoder"):
        post(f"{url}/reset_{cache}_cache", b"")
    for picture in pictures:
        ask(url, picture, QUESTIONS[0])
    post(f"{url}/reset_prefix_cache", b"")
    for picture in reversed(pictures):
        ask(url, picture, QUESTIONS[1])
    for question in QUESTIONS:
        ask(url, draw(99), question)


def save_screenshot(page: Page, name: str) -> None:
    content = io.BytesIO(page.screenshot())
    Image.open(content).convert("RGB").save(FOLDER / name, optimize=True)
    size = (FOLDER / name).stat().st_size
    assert size < MAX_BYTES, f"{name}: {size} bytes"


def take_screenshots(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1100, "height": 1000})
        page.goto(f"{url}/dashboard")
        page.get_by_role("button", name=re.compile("^Pin picture")).nth(2).click()
        page.locator("summary").first.wait_for()
        time.sleep(2)
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
        save_screenshot(page, "dashboard.png")
        page.set_viewport_size({"width": 1100, "height": 760})
        for line in range(3):
            page.locator("summary").nth(line).click()
        page.get_by_role("heading", name="Recent requests").evaluate("element => element.scrollIntoView()")
        save_screenshot(page, "waterfall.png")
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as disk:
        Path(disk).chmod(0o700)
        with serving(disk) as url:
            fill_caches(url)
            take_screenshots(url)


if __name__ == "__main__":
    main()
