"""The playground in a real browser: Debian's `chromium`, driven by Playwright, against a running server."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from mini_engine.demo import videos
from tests.support.client import ENDLESS
from tests.support.running_server import ROOT, RunningServer

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")]


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
    playwright.expect(opened.locator("#media li")).to_have_count(1)  # the sample
    yield opened
    opened.close()


def drop(page: playwright.Page, data: bytes) -> None:
    """The file clip.mp4, which replaces the sample."""
    script = """([name, data]) => {
        const transfer = new DataTransfer(), bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
        transfer.items.add(new File([bytes], name, {type: "video/mp4"}));
        const drop = new DragEvent("drop", {bubbles: true, cancelable: true, dataTransfer: transfer});
        document.getElementById("composer").dispatchEvent(drop);
    }"""
    page.evaluate(script, ["clip.mp4", base64.b64encode(data).decode()])


def ask(page: playwright.Page, text: str) -> playwright.Locator:
    """The entry of the new question."""
    turns = page.locator(".turn")
    number = turns.count()
    page.get_by_label("Question", exact=True).fill(text)
    page.keyboard.press("Enter")
    return turns.nth(number)


def test_the_first_click_asks_about_the_sample_and_shows_the_frames_that_the_model_saw(page):
    button = page.get_by_role("button", name="Ask", exact=True)
    button.click()
    turn = page.locator(".turn")
    playwright.expect(turn.locator(".answer")).to_have_text("a red circle moving left")
    playwright.expect(turn.locator(".strip canvas")).to_have_count(8)
    playwright.expect(button).to_be_focused()
    times = [float(text.removesuffix(" s")) for text in turn.locator(".strip li").all_inner_texts()]
    assert times == sorted(set(times)) and times[0] == 0
    # The mean x of the red pixels of each thumbnail.
    reds = page.evaluate("""() => [...document.querySelectorAll(".strip canvas")].map((canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const reds = [...Array(data.length / 4).keys()].filter((pixel) => data[4 * pixel] > 2 * data[4 * pixel + 1]);
        return reds.reduce((sum, pixel) => sum + (pixel % canvas.width), 0) / reds.length;
    })""")
    assert reds == sorted(reds, reverse=True) and reds[0] - reds[-1] > 20  # it moves to the left, by the frame's pixels
    playwright.expect(turn.locator(".legend")).to_be_hidden()
    turn.locator("summary").click()
    for term, explained in (("admission", "Queued for a permit"), ("shm_store", "shared memory")):
        page.get_by_text(term, exact=True).focus()
        assert explained in page.evaluate("getComputedStyle(document.activeElement, '::after').content")


def test_a_follow_up_and_an_answer_that_is_replaced_hit_the_caches(page):
    def skipped(turn: playwright.Locator) -> set[str]:
        """The stages that took no time."""
        return {one.rsplit(" ", 1)[0] for one in turn.locator(".legend li.skipped").all_inner_texts()}

    clip = videos.render(7 * 10**9 + 1, colour="red", shape="circle", motion="left", width=320, height=240)
    drop(page, videos.encode(clip))
    first = ask(page, "Describe the video.")
    playwright.expect(first.locator(".answer")).to_have_text("a red circle moving left")
    playwright.expect(first.locator(".frames")).to_contain_text("clip.mp4 as the model sees it: 8 frames of 84 × 56")
    playwright.expect(first.locator(".chips")).to_contain_text("media new 1 of 1")
    first.locator("summary").click()
    assert not {"decode", "encode"} & skipped(first)
    second = ask(page, "Which way does it move?")
    playwright.expect(second.locator(".answer")).to_have_text("left")
    playwright.expect(second.locator(".chips")).to_contain_text("media patches 1 of 1")
    second.locator("summary").click()
    (ROOT / "build").mkdir(exist_ok=True)
    with page.expect_response("**/metrics"):
        pass  # the numbers of the server are read again
    picture_path = ROOT / "build" / "playground.png"  # docs/playground.png is such a picture
    picture = page.screenshot(path=picture_path, animations="disabled")  # nothing is marked as changed
    assert max(len(picture), (ROOT / "docs" / "playground.png").stat().st_size) <= 200_000
    again = first.get_by_role("button", name="Ask again")
    again.click()
    playwright.expect(first.locator(".chips")).to_contain_text("media patches 1 of 1")
    playwright.expect(first.locator(".former")).to_have_attribute("aria-label", re.compile("^Before: .* decode "))
    playwright.expect(again).to_be_focused()
    assert {"decode", "process", "encode"} <= skipped(first) and page.locator(".turn").count() == 2


def test_a_question_is_copied_as_a_program_that_asks_it(page, tmp_path, monkeypatch, capsys):
    clip = videos.encode(
        videos.render(7 * 10**9 + 2, colour="red", shape="circle", motion="left", width=320, height=240)
    )
    drop(page, clip)
    turn = ask(page, "Which way does it move?")
    playwright.expect(turn.locator(".answer")).to_have_text("left")

    def copied(button: str) -> str:
        """What a button copies, pasted into the question."""
        turn.get_by_role("button", name=button).click()
        playwright.expect(turn.locator(".note")).to_have_text("Copied.")
        question = page.get_by_label("Question", exact=True)
        question.fill("")
        question.press("Control+V")
        return question.input_value()

    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(clip)
    exec(copied("Copy as Python"), {})
    assert capsys.readouterr().out.strip() == "left"
    command = ["bash", "-c", copied("Copy as curl")]
    if shutil.which("curl"):
        response = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        assert response["choices"][0]["message"]["content"] == "left"


def test_composer_state_and_newest_answer_stay_on_screen_and_a_reload_keeps_the_texts(page):
    for question in ("Describe the video.", *["Which way does it move?"] * 5):
        playwright.expect(ask(page, question).locator(".chips")).to_be_in_viewport(ratio=1)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.locator(".turn").last.scroll_into_view_if_needed()
        for place in ("#composer", "#state"):
            playwright.expect(page.locator(place)).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth") == width
    page.reload()
    playwright.expect(page.locator("#turns").get_by_role("heading")).to_have_count(6)
    playwright.expect(page.locator(".answer").first).to_have_text("a red circle moving left")
    playwright.expect(page.locator("#media li")).to_have_count(0)  # the sample is for a new conversation
    page.get_by_role("button", name="New conversation").click()
    playwright.expect(page.locator("#media li")).to_have_count(1)


def test_stop_ends_a_long_answer(page):
    page.get_by_text("Settings").click()
    page.get_by_label("Other fields of the request").fill(json.dumps(ENDLESS))
    turn = ask(page, "tell me")
    running = page.locator("[data-engine] .running")
    playwright.expect(running).to_have_text("1")
    playwright.expect(turn.locator(".pace")).to_have_text(re.compile(r"^generating · .* s · TTFT .* tokens/s$"))
    page.get_by_role("button", name="Stop").click()
    playwright.expect(turn.locator(".note")).to_have_text("Stopped.")
    playwright.expect(running).to_have_text("0")


def test_files_that_are_pasted_refused_and_broken(page):
    page.locator("#files").set_input_files({"name": "notes.txt", "mimeType": "text/plain", "buffer": b"x"})
    playwright.expect(page.locator("#composer-error")).to_have_text("Neither a video nor an image: notes.txt")
    page.evaluate("""async () => {
        const picture = await new Promise((resolve) => document.createElement("canvas").toBlob(resolve));
        const clipboardData = new DataTransfer();
        clipboardData.items.add(new File([picture], "pasted.png", {type: "image/png"}));
        const paste = new ClipboardEvent("paste", {bubbles: true, clipboardData});
        document.getElementById("question").dispatchEvent(paste);
    }""")
    playwright.expect(page.locator("#media .name")).to_have_text(re.compile("^pasted.png, "))
    playwright.expect(ask(page, "What is it?").locator(".strip canvas")).to_have_count(1)
    drop(page, b"not a video")
    turn = ask(page, "Describe the video.")
    playwright.expect(turn.get_by_role("alert")).to_contain_text("clip.mp4: cannot be read, or is damaged")
    page.get_by_role("button", name="Remove clip.mp4").click()
    playwright.expect(page.locator("#media li")).to_have_count(0)


def test_html_in_an_answer_stays_text_and_markdown_does_not(page):
    def answer_with(text: str) -> playwright.Locator:
        """The entry of a question whose answer is this text, which the bundled model cannot be made to write: the
        browser gets it in the place of the server's response."""
        choice = {"index": 0, "delta": {"reasoning_content": text, "content": text}, "finish_reason": "stop"}
        body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        return ask(page, text)

    text = '<img src=x onerror="document.title = 1"><b>bold</b> [a](javascript:document.title=1)'
    turn = answer_with(text)
    for part in (".question", ".thoughts", ".answer"):
        playwright.expect(turn.locator(part)).to_have_text(text)
    assert turn.locator("img, b, a").count() == 0 and page.title() == "mini-engine playground"
    turn = answer_with("# One\n\n- **two** `3 * 4`\n- *five*\n\n```\n# six\n```\n7 * 8 * 9\n<i>\n```x```")
    playwright.expect(turn.locator(".answer pre")).to_have_text("# six\n")
    html = "<h4>One</h4><ul><li><strong>two</strong> <code>3 * 4</code></li><li><em>five</em></li></ul>"
    assert turn.locator(".answer").inner_html().replace("<li></li>", "") == (
        f"{html}<pre># six\n</pre><p>7 * 8 * 9\n&lt;i&gt;\n``<code>x</code>``</p>"
    )


def test_a_moving_shape_on_a_narrow_dark_screen(browser, server):
    page = open_page(browser, server, color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 800})
    page.get_by_role("button", name="Moving shape").click()
    playwright.expect(page.locator("#media .name")).to_contain_text("blue square.webm")  # in the place of the sample
    turn = ask(page, "Describe the video.")
    playwright.expect(turn.locator(".answer")).to_have_text("a blue square moving up")
    playwright.expect(turn.locator(".strip canvas")).to_have_count(8)
    page.close()


def test_the_key_is_asked_for_and_a_dead_server_is_grey(browser):
    with RunningServer("--api-key", "none") as server:
        page = open_page(browser, server)
        for key, reason in (("wrong", "This server requires an API key."), ("none", "Incorrect or missing API key")):
            playwright.expect(page.locator("#key-reason")).to_contain_text(reason)
            page.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
        playwright.expect(page.locator("#state")).to_have_text("live")
        playwright.expect(ask(page, "Describe the video.").locator(".chips")).to_be_visible()
        kept = page.evaluate("[JSON.stringify(sessionStorage), localStorage.length, document.cookie]")
        assert "none" not in kept[0] and kept[1:] == [0, ""]
        server.stop()
        playwright.expect(page.locator("#state")).to_have_text(
            re.compile(r"^The server cannot be reached \(since \d\d:\d\d:\d\d\)$")
        )
        playwright.expect(page.locator("#engines")).to_have_css("filter", "grayscale(1)")
        page.close()
