"""The page at / in a browser: Debian's Chromium, driven by playwright."""

import base64
import hashlib
import itertools
import json
import shutil
import time
from pathlib import Path

import pytest

from dflash_jax import SamplingParams
from dflash_jax.server.page_files import PAGE
from tests.media.encoded import encoded, picture
from tests.server.conftest import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if CHROMIUM is None:
    pytest.skip("no chromium here: apt install chromium", allow_module_level=True)

# The stream of the page `mocked`, and checks of what is shown.
MOCK, CHECKS = (Path(__file__).with_name(name).read_text() for name in ("page_mock.js", "page_checks.js"))
PROMPT = "Write the function `clamp`: Limit a value to a range."
MARKDOWN = """Here is **merge** with `two` pointers & more:

```python
def merge(a, b):
    return sorted(a + b)  # a comment that is so long that the line is wider than the window of a telephone
```

# Title

1. One *small* step,
2. see [docs](https://docs.example/page).

| step | result |
|------|--------|
| 1 | 1 2 |

> Quoted.
"""
HOSTILE = """<img src=x onerror="window.hacked = 1"> <script>window.hacked = 1</script>

<iframe src="https://evil.example/"></iframe><style>body { display: none }</style>

[a](javascript:window.hacked=1) [b](data:text/html,<script>window.hacked=1</script>)
[c](//evil.example/c) <a href="x">d</a>

![picture](https://evil.example/picture.png) ![x](x" onerror="window.hacked=1)

[good](https://good.example/ "title\\" onmouseover=\\"window.hacked=1")

```html
<script>window.hacked = 1</script>
<img src=x onerror=window.hacked=1>
"""
# Chromium's words for what tests provoke.
EXPECTED_PROBLEMS = ("status of 400", "Content Security Policy", "TrustedHTML")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser, quiet):
    """Opens the page, with nothing but this server within its reach; ``script`` runs before the page's own."""
    problems, outside, contexts = [], [], []

    def route(route):
        if route.request.url.startswith((quiet.url, "data:")):
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    def opened(script: str = "", width: int = 1000, height: int = 820, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("console", lambda m: m.type in ("error", "warning") and problems.append(m.text))
        page.route("**/*", route)
        page.add_init_script(CHECKS + script)
        page.goto(quiet.url)
        page.wait_for_selector("#models option", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not outside
    assert not [p for p in problems if not any(expected in p for expected in EXPECTED_PROBLEMS)]


@pytest.fixture
def page(new_page):
    """The page with this server's model."""
    return new_page()


@pytest.fixture
def mocked(new_page):
    """The page with a stream of its own, `page_mock.js`."""
    return new_page(MOCK)


def wait_for(page, expression: str) -> None:
    """Waits until a JavaScript expression holds. The page's content policy stops playwright's own way of waiting."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def set_up(page, **values) -> None:
    page.click("#open-settings")
    for name, value in values.items():
        if name == "block_size":
            page.select_option("#block_size", str(value))
        else:
            page.fill(f"#{name}", str(value))
    page.keyboard.press("Escape")


def finish(page) -> None:
    """Waits until nothing is being answered."""
    wait_for(page, "document.querySelector('#stop').hidden && document.querySelector('.turn.assistant')")


def ask(page, text: str, /, **mock) -> None:
    if mock:
        page.evaluate("values => Object.assign(window.mock, values)", mock)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    finish(page)


def tinted(page) -> list[str]:
    return page.evaluate("checks.tinted()")


def test_page_shows_the_turns_of_a_conversation(page, llm):
    """Streams, folds the thought, tints what was drafted, and says how fast."""
    set_up(page, block_size=16, max_tokens=160, temperature=0)
    assert page.locator("#models option").all_inner_texts() == ["Qwen/Qwen3.6-35B-A3B", "tiny"]
    ask(page, PROMPT)
    ids = llm.encode_chat([{"role": "user", "content": PROMPT}])
    expected = llm.generate([ids], SamplingParams(max_tokens=160, temperature=0))[0].text
    thought, _, answer = expected.partition("</think>")
    turn = json.loads(page.evaluate("Object.entries(localStorage).find(([k]) => k.includes('conversation'))[1]"))[
        "turns"
    ][1]
    assert (turn["reasoning"].strip(), turn["content"]) == (thought.strip(), answer.lstrip())
    fold = page.locator("details.thought")
    assert not fold.evaluate("e => e.open")
    assert thought.split()[0] in fold.text_content()
    assert len(tinted(page)) > 3
    assert float(page.inner_text("#acceptance")) > 1
    assert float(page.inner_text("#speed")) > 0
    assert float(page.inner_text("#speedup")) > 0
    assert page.inner_text("#drafted").endswith("%")
    page.uncheck("#tint")
    assert "untinted" in page.get_attribute("#log", "class")


def test_rounds_of_an_answer(page):
    """An answer that was not recorded is answered again with its seed: the same text, now with its rounds."""
    set_up(page, block_size=16, max_tokens=60, temperature=0.8)
    ask(page, PROMPT)
    before = page.text_content(".turn.assistant .text")
    page.click(".show-rounds")
    wait_for(page, "document.querySelector('#status-text').textContent == 'The same text, round by round.'")
    assert page.text_content(".turn.assistant .text") == before
    assert page.locator(".round").count() > 2
    assert page.locator(".round .accepted").count() > 5
    assert page.locator(".round .corrected").count() >= page.locator(".round").count() - 1
    assert page.locator(".round .rejected").count() > 1
    assert "accepted" in page.inner_text(".rounds .summary")
    assert page.inner_text("#speedup") == "–"
    page.click(".show-rounds")
    assert page.locator(".rounds").count() == 0
    assert page.get_attribute(".show-rounds", "aria-expanded") == "false"
    page.check("#record")
    ask(page, "Again.")
    assert page.locator(".rounds").count() == 1
    page.reload()
    page.locator(".show-rounds").last.click()
    assert page.locator(".round").count() > 1


def test_stop_and_a_new_conversation(page, quiet, monkeypatch):
    """The device brings one part of the answer, and the next one only when the server has seen the client leave."""
    device, reads = quiet.host.engine.engine.runner, itertools.count()

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
    page.wait_for_selector(".assistant .block", state="attached")
    page.keyboard.press("Escape")
    wait_for(page, "document.querySelector('#status-text').textContent == 'Stopped.'")
    assert quiet.idle()
    page.click("#new")
    assert page.locator("article").count() == 0
    assert page.locator("#empty").is_visible()
    assert page.locator("#conversations li").count() == 1


def test_an_error_is_shown_and_the_turn_can_be_tried_again(page):
    set_up(page, max_tokens=100000)
    ask(page, "Write.")
    assert "do not fit" in page.inner_text("#status")
    assert "do not fit" in page.inner_text(".turn.assistant .error")
    set_up(page, max_tokens=4)
    page.click(".regenerate")
    finish(page)
    assert page.locator(".turn.assistant .error").count() == 0


def test_markdown_and_the_tint_in_it(mocked):
    mocked.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(mocked, "Write.", text=MARKDOWN)
    mocked.wait_for_selector(".code .hljs-keyword")
    body = mocked.locator(".turn.assistant .text")
    for tag in ("strong", "figure.code pre code", "h3", "ol li em", "table td", "blockquote p"):
        assert body.locator(tag).count() >= 1, tag
    link = body.locator("a")
    assert (link.get_attribute("rel"), link.get_attribute("target")) == ("noopener noreferrer nofollow", "_blank")
    # All drafted letters are tinted, but those of a link's address and of the code's language.
    drafted = [c for i in range(0, len(MARKDOWN), 24) for c in MARKDOWN[i : i + 24][:-5] if c.isalpha()]
    shown, remaining = [c for c in "".join(tinted(mocked)) if c.isalpha()], iter(drafted)
    assert all(c in remaining for c in shown)
    assert len(shown) >= len(drafted) - len("pythonhttpsdocsexamplepage")
    mocked.click(".code .copy")
    code = MARKDOWN.partition("```python\n")[2].partition("\n```")[0]
    assert mocked.evaluate("navigator.clipboard.readText()") == code
    mocked.click(".turn.assistant .copy-turn")
    assert mocked.evaluate("navigator.clipboard.readText()") == MARKDOWN
    wait_for(mocked, "document.querySelector('#announcer').textContent == 'Copied'")


MATHS = r"""The root \(x_1 = \frac{-b}{2a}\) and $y^2$, for $5 or $6 dollars and \$7.

\[
\sum_{i=1}^n i
= \frac{n(n+1)}{2}
\]

A table:

| a | b |
| - | - |
| $\alpha$ | c |

$$\begin{aligned} a &= b \\ c &= d \end{aligned}$$

In code it stays: `\(a\)`. No formula: \(\frac{\) and \(open.
"""


@pytest.mark.parametrize("step", [3, 5000])
def test_formulas_are_mathml(mocked, step):
    """Also where they arrive in parts, of which most are no formula yet."""
    ask(mocked, "Prove.", text=MATHS, step=step)
    body = mocked.locator(".turn.assistant .text").last
    formulas = body.locator("math")
    assert formulas.count() == 5
    assert [body.locator(f"math {tag}").count() > 0 for tag in ("mfrac", "msup", "munderover", "mtable")] == [True] * 4
    assert body.locator("td math").text_content() == "α"
    assert body.locator("math.tml-display").count() == 2
    height = "math => math.querySelector('mfrac').getBoundingClientRect().height > 10"
    assert formulas.first.evaluate(height)
    text = body.text_content()
    for kept in ("for $5 or $6 dollars and $7", r"\(a\)", r"\(\frac{\)", r"\(open."):
        assert kept in text
    assert body.locator("code").all_text_contents() == [r"\(a\)", r"\(\frac{\)"]


def test_a_formula_that_still_arrives_keeps_its_form(mocked):
    ask(mocked, "Prove.", text="So\n\n\\[\nx\n- y", step=2)
    body = mocked.locator(".turn.assistant .text").last
    assert body.locator("math, li, h3, h4").count() == 0
    assert "\\[" in body.text_content()


HOSTILE_MATHS = r"""\(\href{javascript:window.hacked=1}{x}\) \(\class{a" onclick="window.hacked=1}{y}\)
\(\text{<img src=x onerror=window.hacked=1>}\) $\style{background:url(https://evil.example)}{z}$ \(\includegraphics{https://evil.example/a.png}\)
$$\def\a{\a\a}\a$$
"""


def test_hostile_formulas_run_and_load_nothing(mocked):
    ask(mocked, "Attack.", text=HOSTILE_MATHS + "$x$ " * 2000 + "\\(" * 2000, step=5000)
    body = mocked.locator(".turn.assistant .text").last
    assert mocked.evaluate("window.hacked") is None
    assert body.locator("img, script, iframe, style, a, annotation-xml, mglyph").count() == 0
    names = mocked.evaluate("[...document.querySelectorAll('#log *')].flatMap(e => e.getAttributeNames())")
    assert not [name for name in names if name.startswith("on") or name in ("href", "src")]
    assert body.locator("math").count() > 1000


def test_a_hostile_text_runs_and_loads_nothing(mocked):
    for step in (7, 5000):
        ask(mocked, "Attack.", text=HOSTILE, step=step)
    # An unclosed fence is code, which is highlighted like any other.
    mocked.wait_for_selector(".code .hljs-tag, .code .hljs-name")
    body = mocked.locator(".turn.assistant .text")
    assert mocked.evaluate("window.hacked") is None
    assert body.locator("img, script, iframe, style, object, embed, svg, form, input").count() == 0
    hrefs = body.locator("a[href]").evaluate_all("links => links.map(a => a.getAttribute('href'))")
    assert "https://good.example/" in hrefs
    assert all(href.startswith("https://") for href in hrefs)
    names = mocked.evaluate("[...document.querySelectorAll('#log *')].flatMap(e => e.getAttributeNames())")
    assert not [name for name in names if name.startswith("on")]
    assert "<img src=x onerror" in body.first.text_content()


def test_the_content_policy_stops_what_would_pass(mocked, quiet):
    """Were DOMPurify to fail, the browser would still refuse: inline scripts, other hosts, and HTML from strings."""
    policy = quiet.http.get("/").headers["content-security-policy"]
    for rule in ("default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in policy
    assert mocked.evaluate("checks.insertHtml()") == "TypeError"
    assert mocked.evaluate("fetch('https://evil.example/').then(() => 'done', e => e.name)") == "TypeError"
    for path in ("/docs", "/app.js", "/vendor/purify.es.mjs"):
        answer = quiet.http.get(path)
        assert answer.headers["content-security-policy"] == policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert quiet.http.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_vendored_files_are_those_of_their_packages():
    packages = json.loads((PAGE / "vendor" / "packages.json").read_text())
    listed = {name: value for package in packages for name, value in package["sha256"].items()}
    files = {f.name for f in (PAGE / "vendor").iterdir()} - {"packages.json"}
    assert files == set(listed)
    for name, value in listed.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == value


def test_large_texts_leave_the_page_responsive(mocked):
    """200 kB: the page renders a part of the time only, and never long at once."""
    mocked.evaluate("checks.watchFrames()")
    prose = "Some **bold** words with `code` and more of them.\n\n" * 1200
    table = "\n| a | b |\n|---|---|\n" + "| **x** | `y` |\n" * 5000 + "\n"
    code = "```python\n" + "value = compute(value, 1)\n" * 2000 + "\n"
    line = "word " * 5000
    ask(mocked, "Write.", text=prose + table + code + "```\n\n" + line, step=600, delay=0)
    assert mocked.evaluate("checks.longestFrame") < 1500
    assert mocked.evaluate("checks.frames") > 20
    assert mocked.locator("strong").count() >= 1200
    text = mocked.locator(".turn.assistant .text").text_content()
    assert text.count("value = compute") == 2000
    mocked.reload()
    assert mocked.locator("strong").count() >= 1200
    assert text.count("word ") >= 4999
    deep = "> " * 8000 + "deep"
    ask(mocked, "Write.", text=deep, step=400)
    assert "deep" in mocked.locator(".turn.assistant .text").last.text_content()


def test_conversations_are_kept_renamed_deleted_and_exported(mocked, tmp_path):
    ask(mocked, "First question", text="First answer.")
    mocked.click("#new")
    ask(mocked, "Second question", text="Second answer.", reasoning="Thought.")
    assert mocked.locator("#conversations .open").all_inner_texts() == ["Second question", "First question"]
    mocked.reload()
    assert "Second answer." in mocked.text_content("#log")
    assert mocked.locator(".thought").count() == 1
    assert tinted(mocked)
    mocked.click("text=First question")
    assert "First answer." in mocked.text_content("#log")
    item = mocked.locator("#conversations li.current")
    item.locator(".rename").click()
    mocked.keyboard.type("Another name")
    mocked.keyboard.press("Enter")
    assert "Another name" in mocked.inner_text("#conversations")
    with mocked.expect_download() as download:
        mocked.locator("#conversations li.current .export").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert [turn["content"] for turn in exported["turns"]] == ["First question", "First answer."]
    with mocked.expect_download() as download:
        mocked.click("#export-all")
    assert len(json.loads(Path(download.value.path()).read_text())["conversations"]) == 2
    mocked.locator("#conversations li.current .delete").click()
    assert mocked.locator("#conversations li").count() == 1
    assert mocked.locator("article").count() == 0
    mocked.click("#undo")
    assert "First answer." in mocked.text_content("#log")
    mocked.reload()
    assert mocked.locator("#conversations li").count() == 2
    mocked.evaluate("localStorage.setItem('dflash.conversation.bad', '{\"turns\": 5')")
    broken = {"id": "x", "title": "x", "updated": 9e15, "turns": [{"role": "assistant", "content": 5}]}
    mocked.evaluate("value => localStorage.setItem('dflash.conversation.x', JSON.stringify(value))", broken)
    mocked.evaluate("localStorage.setItem('dflash.settings', '[1')")
    mocked.reload()
    assert mocked.locator("#conversations li").count() == 2


def store(page, *conversations: dict) -> None:
    """Stores conversations, the first as the current one, and loads the page again."""
    script = """values => { for (const { key, ...value } of values)
        localStorage.setItem(`dflash.conversation.${key ?? value.id}`, JSON.stringify(value));
        for (const area of [localStorage, sessionStorage]) area.setItem("dflash.current", `"${values[0].id}"`); }"""
    page.evaluate(script, conversations)
    page.reload()
    page.wait_for_selector("#models option", state="attached")


def conversation(name: str, **fields) -> dict:
    """A conversation as the page stores it; ``fields`` are of its answer."""
    answer = {"role": "assistant", "content": "Answer.", **fields}
    return {"id": name, "title": name, "updated": 1, "turns": [{"role": "user", "content": "Question"}, answer]}


def test_stored_fields_of_another_shape_are_ignored(mocked):
    wrong = [{"runs": value} for value in ({}, "x", 5, {"content": None}, {"content": ["x"], "reasoning": []})]
    wrong += [{"stats": value} for value in ({}, {"tokens": 5})]
    wrong += [{"rounds": [5]}, {"rounds": [[["x"], 1]]}, {"reasoning": {}}, {"request": "x"}, {"error": {}}]
    store(mocked, *(conversation(str(i), **fields) for i, fields in enumerate(wrong)))
    assert mocked.locator("#conversations li").count() == len(wrong)
    for i in range(len(wrong)):
        mocked.click(f"#conversations li[data-id='{i}'] .open")
        assert mocked.locator(".turn.assistant .text").all_text_contents() == ["Answer.\n"]
        assert mocked.locator(".turn.assistant .figures, .turn.assistant .error").all_text_contents() == [""]


def test_a_conversation_that_cannot_be_shown_can_be_deleted(new_page):
    """The list and the model are there before the conversation."""
    page = new_page(MOCK + "Array.prototype.findLast = function () { if (this.length) throw new Error('broken'); };")
    store(page, conversation("a"))
    assert "cannot be shown" in page.inner_text("#status")
    page.hover("#conversations li")
    page.click("#conversations .delete")
    assert page.locator("#conversations li").count() == 0


def test_a_conversation_under_another_key_is_not_one(mocked):
    store(mocked, conversation("a"), conversation("a") | {"key": "b", "title": "b"})
    assert mocked.locator("#conversations .open").all_inner_texts() == ["a"]


def test_a_huge_answer_is_shown_as_it_is_written(mocked):
    """300,000 paragraphs, stored and growing: only the first blocks are parsed."""
    began = time.monotonic()
    store(
        mocked, conversation("a", content="Some words.\n\n" * 300_000, runs={"content": [0, 100_000], "reasoning": []})
    )
    assert mocked.locator("#conversations li").count() == 1
    assert time.monotonic() - began < 20
    assert mocked.locator(".block").count() == 5_001
    assert mocked.text_content(".turn.assistant .text").count("Some words.") == 300_000
    mocked.click("#new")
    text = "Some *bold* words.\n\n" * 20_000
    ask(mocked, "Write.", text=text, step=6000, delay=0)
    shown = mocked.text_content(".turn.assistant .text")
    assert shown.count("Some ") == 20_000
    assert shown.endswith("Some *bold* words.\n\n")
    assert mocked.locator("em").count() == 5_000
    assert "Some *bold* words." in "".join(tinted(mocked))


def test_long_code_is_not_highlighted(mocked):
    """Showing some highlighted code takes a time that grows faster than its length."""
    mocked.evaluate("checks.watchFrames()")
    for language, code in (("swift", "a<" * 7_000), ("json", "[" * 49_000), ("json", "[" * 14_900)):
        ask(mocked, "Write.", text=f"```{language}\n{code}\n```\n", step=60_000)
        mocked.wait_for_timeout(200)
    mocked.wait_for_selector(".code .hljs-punctuation")
    assert mocked.locator(".code:has(.hljs-punctuation)").count() == 1
    assert mocked.evaluate("checks.longestFrame") < 2000


@pytest.mark.parametrize(("compiled", "expected"), [(31, "(31 of 56 programs)"), (54, "rounds without drafts")])
def test_rounds_without_drafts_while_the_server_compiles_are_explained(mocked, compiled, expected):
    answer = json.dumps({"warm_up": {"compiled": compiled, "failed": 2, "total": 56}})
    mocked.route("**/server_info", lambda route: route.fulfill(body=answer, content_type="application/json"))
    mocked.evaluate("window.mock.proposed = []")
    mocked.check("#record")
    with mocked.expect_response("**/server_info"):
        ask(mocked, "Write.", text="Some words.")
    wait_for(mocked, f"document.querySelector('.rounds .summary').textContent.includes({expected!r})")
    assert ("still compiling" in mocked.inner_text(".rounds .summary")) == (compiled == 31)
    mocked.evaluate("window.mock.proposed = [' one', ' two']")
    ask(mocked, "Again.")
    assert "accepted" in mocked.locator(".rounds .summary").last.inner_text()


@pytest.mark.parametrize("failure", ["full", "disabled"])
def test_without_storage_the_page_works_and_says_so(new_page, failure):
    script = {
        "full": "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); };",
        "disabled": "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, "
        "{ get() { throw new DOMException('', 'SecurityError'); } });",
    }[failure]
    page = new_page(MOCK + script)
    ask(page, "Question", text="Answer.")
    assert {"full": "storage is full", "disabled": "keeps nothing"}[failure] in page.inner_text("#status")
    assert "Answer." in page.text_content("#log")
    page.click("#new")
    page.click("#conversations .open")
    assert "Answer." in page.text_content("#log")


def test_any_turn_is_edited_and_answered_again(mocked):
    for i in range(3):
        ask(mocked, f"Question {i}", text=f"Answer {i}.")
    answers = mocked.locator(".turn.assistant")
    mocked.evaluate("window.mock.text = 'Other.'")
    answers.nth(1).locator(".regenerate").click()
    finish(mocked)
    assert mocked.locator(".turn").count() == 4
    sent = mocked.evaluate("window.mock.bodies.at(-1).messages.map(m => m.content)")
    assert sent == ["Question 0", "Answer 0.", "Question 1"]
    mocked.click("#undo")
    assert mocked.locator(".turn").count() == 6
    assert "Answer 2." in mocked.text_content("#log")
    mocked.locator(".turn.user").nth(1).locator(".edit").click()
    mocked.keyboard.press("Escape")
    assert mocked.locator(".turn").count() == 6
    mocked.locator(".turn.user").nth(1).locator(".edit").click()
    mocked.fill(".turn textarea", "Edited")
    mocked.keyboard.press("Enter")
    finish(mocked)
    assert mocked.evaluate("window.mock.bodies.at(-1).messages.at(-1).content") == "Edited"
    assert mocked.locator(".turn").count() == 4
    answers.nth(0).locator(".edit").click()
    mocked.fill(".turn textarea", "My **own** words")
    mocked.click("text=Save")
    assert answers.nth(0).locator("strong").text_content() == "own"
    ask(mocked, "More", text="x")
    assert mocked.evaluate("window.mock.bodies.at(-1).messages[1].content") == "My **own** words"


def test_the_text_is_followed_unless_the_reader_scrolls_up(mocked):
    def grows(page) -> None:
        count = page.locator(".block").count()
        wait_for(page, f"document.querySelectorAll('.block').length > {count + 5}")

    top = "document.querySelector('#scroller').scrollTop"
    paragraphs = "A paragraph of some words.\n\n" * 150
    ask(mocked, "Write.", text=paragraphs)
    assert mocked.evaluate("checks.distanceToEnd()") < 60
    mocked.evaluate("Object.assign(window.mock, { step: 20, delay: 10 })")
    mocked.fill("#prompt", "Again.")
    mocked.press("#prompt", "Enter")
    grows(mocked)
    mocked.evaluate("document.querySelector('#scroller').scrollTop -= 400")
    before = mocked.evaluate(top)
    grows(mocked)
    assert abs(mocked.evaluate(top) - before) < 2
    assert mocked.locator("#to-end").is_visible()
    mocked.click("#to-end")
    grows(mocked)
    assert mocked.evaluate("checks.distanceToEnd()") < 60
    mocked.keyboard.press("Escape")
    finish(mocked)


def test_settings_and_model_are_kept(mocked):
    set_up(mocked, temperature=0.3, max_tokens=77, system="Be short.", block_size=4, key="secret")
    mocked.select_option("#models", "tiny")
    mocked.check("#record")
    mocked.reload()
    mocked.wait_for_selector("#models option", state="attached")
    assert (mocked.input_value("#temperature"), mocked.input_value("#block_size")) == ("0.3", "4")
    ask(mocked, "Question", text="Answer.", speedup=1.84)
    body = mocked.evaluate("window.mock.bodies.at(-1)")
    assert (body["temperature"], body["max_tokens"], body["block_size"], body["model"]) == (0.3, 77, 4, "tiny")
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    assert body["return_proposals"] is True
    assert "secret" not in mocked.evaluate("JSON.stringify(localStorage)")
    # A recorded answer is not compared: recording takes time.
    assert mocked.inner_text("#speedup") == "–"
    mocked.uncheck("#record")
    ask(mocked, "Question")
    assert mocked.inner_text("#speedup") == "1.8"
    ask(mocked, "Question", speedup=None)
    assert mocked.inner_text("#speedup") == "–"


def test_an_example_is_asked_with_one_click(mocked):
    mocked.evaluate("window.mock.text = 'Answer.'")
    example = mocked.locator("#examples button").first
    text = example.inner_text()
    example.click()
    finish(mocked)
    assert mocked.text_content(".turn.user .text") == text
    assert not mocked.locator("#empty").is_visible()


def test_a_screen_reader_hears_the_end_and_not_every_token(mocked):
    mocked.evaluate(
        """() => { window.said = [];
        new MutationObserver(() => window.said.push(document.querySelector('#announcer').textContent))
          .observe(document.querySelector('#announcer'), { childList: true, characterData: true, subtree: true }); }"""
    )
    ask(mocked, "Question", text="Some words. " * 40)
    said = mocked.evaluate("window.said")
    assert said[0] == "Answering …"
    assert len(said) <= 3
    assert said[-1].startswith("The answer is complete. Some words.")
    assert mocked.get_attribute("#log", "aria-live") == "off"
    assert mocked.get_attribute("#log", "aria-busy") == "false"
    assert mocked.evaluate("document.querySelectorAll('[aria-live=polite], [role=status]').length") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_layout_contrast_names_and_keyboard(new_page, width, scheme):
    page = new_page(MOCK, width, 740, color_scheme=scheme)
    assert page.evaluate("checks.contrast()") == []
    page.check("#record")
    ask(
        page,
        "A long question with averyveryveryveryverylongwordthatdoesnotfitintoatelephone " * 2,
        text=MARKDOWN,
        reasoning="Thought.",
    )
    page.wait_for_selector(".code .hljs-keyword")
    page.click(".thought summary")
    ask(page, "Fails", fails="Refused.")
    assert page.evaluate("checks.contrast()") == []
    assert page.evaluate("checks.nameless()") == []
    assert page.evaluate("checks.overflowing()") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 360:
        page.click("#open-sidebar")
        assert page.locator("#new").is_visible()
        assert page.evaluate("document.activeElement.id") == "close-sidebar"
        assert page.evaluate("checks.contrast()") == []
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.id") == "open-sidebar"
        wait_for(page, "!document.querySelector('#new').checkVisibility({ visibilityProperty: true })")
    expected, reached = set(page.evaluate("checks.reachable()")), set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(len(expected) + 15):
        page.keyboard.press("Tab")
        tab, outline = page.evaluate("checks.focused()")
        if tab is not None:
            reached.add(int(tab))
            assert outline >= 2
    assert expected <= reached
    page.click("#open-settings")
    assert page.evaluate("checks.contrast()") == []
    assert page.evaluate(
        "document.querySelector('dialog').scrollWidth <= document.querySelector('dialog').clientWidth + 1"
    )
    page.click("dialog .icon")
    assert not page.evaluate("document.querySelector('dialog').open")


# Gives files to an element as a drop or a paste does.
# ``bytes``: the content, or how many zeros.
GIVE = """([selector, event, bytes, name, type]) => {
  const files = new DataTransfer();
  files.items.add(new File([new Uint8Array(bytes)], name, { type }));
  const data = event === "paste" ? { clipboardData: files } : { dataTransfer: files };
  const Event = event === "paste" ? ClipboardEvent : DragEvent;
  document.querySelector(selector).dispatchEvent(new Event(event, { bubbles: true, cancelable: true, ...data }));
}"""


@pytest.fixture
def media_page(new_page):
    """The page of a model that reads images and videos, with a stream of its own."""
    page = new_page(MOCK + "window.mock.readsMedia = true; window.mock.text = 'a picture';")
    wait_for(page, "!document.querySelector('#attach').hidden")
    return page


def as_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def test_images_are_chosen_dropped_and_pasted_and_go_with_the_message(media_page):
    page, contents = media_page, [encoded(picture(8, 9, seed=i)) for i in range(4)]
    page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": contents[0]})
    page.evaluate(GIVE, ["#log", "drop", list(contents[1]), "b.png", "image/png"])
    page.evaluate(GIVE, ["#prompt", "paste", list(contents[2]), "c.png", "image/png"])
    wait_for(page, "document.querySelectorAll('#attachments img').length === 3")
    assert page.evaluate("[checks.nameless(), checks.overflowing()]") == [[], []]
    page.click("[aria-label='Remove b.png']")
    page.set_input_files("#files", {"name": "d.mp4", "mimeType": "video/mp4", "buffer": contents[3]})
    wait_for(page, "document.querySelectorAll('#attachments video').length === 1")
    ask(page, "What are these?")
    kinds = ["image_url", "image_url", "video_url"]
    urls = [*(as_url(contents[i], "image/png") for i in (0, 2)), as_url(contents[3], "video/mp4")]
    parts = [{"type": kind, kind: {"url": url}} for kind, url in zip(kinds, urls, strict=True)]
    right = {"role": "user", "content": [*parts, {"type": "text", "text": "What are these?"}]}
    assert page.evaluate("mock.bodies[0].messages") == [right]
    assert page.evaluate("document.querySelector('#attachments').hidden")
    # A stored conversation has them too, and the next answer.
    page.reload()
    wait_for(page, "document.querySelectorAll('.turn.user img').length === 2")
    wait_for(page, "[...document.querySelectorAll('.turn.user img')].every((i) => i.naturalWidth === 9)")
    page.evaluate("window.mock.text = 'again'")
    page.click(".regenerate")
    finish(page)
    assert page.evaluate("mock.bodies[0].messages[0]") == right


def test_an_image_alone_is_a_message(media_page):
    media_page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": encoded(picture(8, 9))})
    wait_for(media_page, "document.querySelector('#attachments img')")
    ask(media_page, "")
    assert media_page.inner_text("#conversations .open") == "Conversation"


def test_large_images_are_sent_smaller(media_page):
    # 3,000 by 300 pixels of noise are 2.7 MB as a PNG.
    content = encoded(picture(300, 3000))
    media_page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": content})
    wait_for(media_page, "document.querySelector('#attachments img')?.naturalWidth > 0")
    assert media_page.evaluate("(({ naturalWidth, naturalHeight }) => [naturalWidth, naturalHeight])"
                               "(document.querySelector('#attachments img'))") == [2048, 205]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("a.txt", "text/plain", "a.txt is neither an image nor a video."),
        ("a.png", "image/png", "a.png cannot be read."),
    ],
)
def test_other_files_are_refused_by_name(media_page, name, kind, message):
    media_page.evaluate(GIVE, ["#log", "drop", 2**21, name, kind])
    wait_for(media_page, f"document.querySelector('#status-text').textContent === {json.dumps(message)}")
    assert not media_page.evaluate("document.querySelectorAll('#attachments li').length")


def test_a_model_of_text_takes_no_files(page):
    assert page.evaluate("document.querySelector('#attach').hidden")
    page.evaluate(GIVE, ["#prompt", "paste", [0], "a.png", "image/png"])
    assert not page.evaluate("document.querySelectorAll('#attachments li').length")


def test_stored_media_of_other_addresses_are_not_loaded(media_page):
    """`new_page` checks that nothing else was asked for."""
    turn = {"role": "user", "content": "x", "media": [{"kind": "image", "name": "a", "url": "https://evil.example/a"}]}
    value = json.dumps({"id": "1", "title": "t", "turns": [turn], "updated": 1})
    media_page.evaluate("value => localStorage.setItem('dflash.conversation.1', value)", value)
    media_page.reload()
    media_page.click("#conversations .open")
    wait_for(media_page, "document.querySelector('.turn.user')")
    assert not media_page.evaluate("document.querySelectorAll('.turn.user img').length")
