"""The playground in a real browser: Debian's `chromium`, driven by Playwright, against a running server."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator

import pytest

from mini_engine.demo import videos
from tests.support.client import ENDLESS
from tests.support.running_server import ROOT, RunningServer

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")]
PICTURE_BYTES = 200_000
DROP = """([name, data]) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], name, {type: "video/mp4"}));
    const drop = new DragEvent("drop", {bubbles: true, cancelable: true, dataTransfer: transfer});
    document.getElementById("drop").dispatchEvent(drop);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # the tests may run as root
        yield started
        started.close()


def open_page(browser: playwright.Browser, server: RunningServer, **options: object) -> playwright.Page:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, **options)
    page.goto(server.base_url + "/")
    return page


@pytest.fixture
def page(browser: playwright.Browser, server: RunningServer) -> Iterator[playwright.Page]:
    opened = open_page(browser, server)
    playwright.expect(opened.locator("#state")).to_have_text("live")
    yield opened
    opened.close()


def drop(page: playwright.Page, seed: int, data: bytes | None = None) -> None:
    """A file: a clip of a red circle that moves to the left, which no other test sends, unless `data` are given."""
    clip = videos.render(7 * 10**9 + seed, colour="red", shape="circle", motion="left", width=320, height=240)
    page.evaluate(DROP, ["clip.mp4", base64.b64encode(data or videos.encode(clip)).decode()])


def ask(page: playwright.Page, text: str) -> playwright.Locator:
    """The entry of the new question."""
    page.get_by_label("Question", exact=True).fill(text)
    page.keyboard.press("Enter")
    return page.locator(".turn").last


def stages(turn: playwright.Locator) -> dict[str, str]:
    """What is shown of each stage."""
    return dict(one.rsplit(" ", 1) for one in turn.locator(".legend li.skipped").all_inner_texts())


def test_a_second_ask_about_a_dropped_video_hits_the_caches(page, tmp_path):
    drop(page, 1)
    first = ask(page, "Describe the video.")
    playwright.expect(first.locator(".answer")).to_have_text("a red circle moving left")
    playwright.expect(first.locator(".tokens")).to_contain_text("video")
    assert not {"decode", "encode"} & stages(first).keys()
    first.get_by_role("button", name="Ask again").click()
    second = page.locator(".turn").nth(1)
    playwright.expect(second.locator(".answer")).to_have_text("a red circle moving left")
    playwright.expect(second.locator(".levels")).to_contain_text("media cache hit")
    assert {"decode", "process", "encode"} <= stages(second).keys()
    (ROOT / "build").mkdir(exist_ok=True)
    page.wait_for_timeout(2500)  # the numbers of the server are read again, and no longer marked as changed
    picture = page.screenshot(path=ROOT / "build" / "playground.png")  # docs/playground.png is such a picture
    assert max(len(picture), (ROOT / "docs" / "playground.png").stat().st_size) <= PICTURE_BYTES
    third = ask(page, "Which way does it move?")
    playwright.expect(third.locator(".answer")).to_have_text("left")


def test_stop_ends_a_long_answer(page):
    page.get_by_text("Sampling settings").click()
    page.get_by_label("Other fields of the request").fill(json.dumps(ENDLESS))
    turn = ask(page, "tell me")
    running = page.locator("[data-engine] .running")
    playwright.expect(running).to_have_text("1")
    page.get_by_role("button", name="Stop").click()
    playwright.expect(turn.locator(".note")).to_have_text("Stopped.")
    playwright.expect(running).to_have_text("0")


def test_a_broken_file_shows_the_error_of_the_api(page):
    drop(page, 2, b"not a video")
    turn = ask(page, "Describe the video.")
    playwright.expect(turn.get_by_role("alert")).to_contain_text("video 1: cannot be read, or is damaged")
    page.get_by_role("button", name="Remove clip.mp4").click()
    playwright.expect(page.locator("#media li")).to_have_count(0)


def test_html_in_an_answer_stays_text(page):
    text = '<img src=x onerror="document.title = 1"><b>bold</b>'
    event = {"choices": [{"index": 0, "delta": {"reasoning_content": text, "content": text}, "finish_reason": "stop"}]}
    # The bundled model cannot be made to write this: the browser gets it in the place of the server's response.
    stream = {"content_type": "text/event-stream", "body": f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**stream))
    turn = ask(page, text)
    for part in (".question", ".thoughts", ".answer"):
        playwright.expect(turn.locator(part)).to_have_text(text)
    assert turn.locator("img, b:not(.legend b)").count() == 0 and page.title() == "mini-engine playground"


@pytest.mark.parametrize("recorder", ["MediaRecorder", "none: the bundled clip"])
def test_a_moving_shape_on_a_narrow_dark_screen(browser, server, recorder):
    page = open_page(browser, server, color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 800})
    if recorder != "MediaRecorder":
        page.evaluate("delete window.MediaRecorder")
    page.get_by_role("button", name="Moving shape").click()
    playwright.expect(page.locator("#media .name")).to_contain_text("webm" if recorder == "MediaRecorder" else "mp4")
    turn = ask(page, "Describe the video.")
    playwright.expect(turn.locator(".answer")).to_have_text("a red circle moving left")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()


def test_the_key_is_asked_for(browser):
    with RunningServer("--api-key", "none") as server:
        page = open_page(browser, server)
        for key in ("wrong", "none"):
            playwright.expect(page.locator("#key-error")).to_contain_text("Incorrect or missing API key")
            page.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
        playwright.expect(page.locator("#state")).to_have_text("live")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.close()
