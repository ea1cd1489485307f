"""The page at / in a browser: Debian's Chromium, driven by playwright."""

import itertools
import json
import shutil

import pytest

from dflash_jax import SamplingParams
from tests.server.conftest import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if CHROMIUM is None:
    pytest.skip("no chromium here: apt install chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, quiet):
    """The page, with nothing but this server within its reach."""
    page, problems = browser.new_page(viewport={"width": 900, "height": 820}), []
    page.on("pageerror", lambda e: problems.append(str(e)))
    # A refused request is told on the page.
    page.on("console", lambda m: m.type == "error" and "status of 400" not in m.text and problems.append(m.text))
    page.route("**/*", lambda route: route.continue_() if route.request.url.startswith(quiet.url) else route.abort())
    page.goto(quiet.url)
    yield page
    page.close()
    assert not problems


def set_up(page, **values) -> None:
    page.click("summary")
    for name, value in values.items():
        if name == "block_size":
            page.select_option("#block_size", str(value))
        else:
            page.fill(f"#{name}", str(value))


def ask(page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#stop:disabled", state="attached")


def test_page_shows_the_turns_of_a_conversation(page, llm):
    """Streams, folds the thought, tints what was drafted, and says how fast."""
    text = "Write the function `clamp`: Limit a value to a range."
    set_up(page, block_size=16, max_tokens=160, temperature=0)
    assert page.inner_text("#model") == "Qwen/Qwen3.6-35B-A3B"
    ask(page, text)
    page.wait_for_function("document.querySelector('#count').textContent > 20")
    expected = llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=160, temperature=0))[0].text
    thought, _, answer = expected.partition("</think>")
    fold = page.locator("details.thought")
    assert not fold.evaluate("e => e.open")
    assert fold.locator(".text").text_content() == thought.strip()
    assert page.locator(".assistant .body > .text").text_content() == answer.lstrip()
    assert page.locator("span.draft").count() > 3
    assert float(page.inner_text("#acceptance")) > 1
    assert float(page.inner_text("#speed")) > 0
    page.uncheck("#tint")
    assert "tinted" not in page.get_attribute("#log", "class").split()


def test_stop_and_a_new_conversation(page, quiet, monkeypatch):
    """The device brings one part of the answer, and the next one only when the server has seen the client leave."""
    device, reads = quiet.serving.engine.engine.runner, itertools.count()

    def read(*args, original=device.read):
        if next(reads):
            wait_until(lambda: quiet.serving.in_flight == 0)
        return original(*args)

    def without_end(route):
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))

    monkeypatch.setattr(device, "read", read)
    page.route("**/v1/chat/completions", without_end)
    set_up(page, max_tokens=900)
    page.fill("#prompt", "Write.")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".assistant .body > *")
    page.keyboard.press("Escape")
    page.wait_for_function("document.querySelector('#status').textContent == 'Stopped.'")
    assert quiet.idle()
    page.click("#clear")
    assert page.locator("article").count() == 0


def test_an_error_is_shown(page):
    set_up(page, max_tokens=100000)
    ask(page, "Write.")
    page.wait_for_selector("#status.error")
    assert "do not fit" in page.inner_text("#status")


def test_without_a_mouse_or_eyes(page):
    """Every control has a name, and Tab reaches it."""
    names = page.evaluate(
        """() => [...document.querySelectorAll('input, select, textarea, button')].map(
            e => (e.labels && e.labels[0] && e.labels[0].textContent.trim()) || e.textContent.trim())"""
    )
    assert all(names)
    assert page.get_attribute("#log", "role") == "log"
    reached = set()
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"send", "clear", "SUMMARY"} <= reached
